"""100,000 decode steps with flat memory: `python tests/soak/long_decode.py [--steps N]`.

Rows with different prompts are decoded again and again; whenever the context is full, the cache of every row is cropped
to its prompt, and it goes on from there. Memory of the process and of the cache must not grow after the first tenth.
"""

import argparse
import resource
import time

import torch

import depthgate as dg
from depthgate.generation.engine import Forward


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = dg.ModelConfig(vocab=64, dim=32, layers=4, heads=2, context=128, pattern="dense,mod", rule="scores")
    model = dg.Decoder(shape).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    texts = [torch.randint(64, (n,)).tolist() for n in (3, 9, 20)]
    sizes = [len(text) for text in texts]
    forward = Forward(model, 3, True, 512)
    assert forward.cache is not None
    start, early = time.perf_counter(), (0, 0)
    with torch.inference_mode():
        logits, _ = forward(texts, sizes)
        for step in range(steps):
            for text, token in zip(texts, logits.argmax(-1).tolist(), strict=True):
                text.append(token)
            if max(map(len, texts)) >= shape.context:
                texts = [text[:size] for text, size in zip(texts, sizes, strict=True)]
                forward.cache.crop(torch.tensor([size - 1 for size in sizes]))
                texts[step % 3][-1] = step % 64  # not the same text for ever
            logits, _ = forward(texts, [1, 1, 1])
            if step == steps // 10:
                early = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, forward.cache.nbytes)
    rss, kept = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, forward.cache.nbytes
    seconds = time.perf_counter() - start
    print(f"{steps} steps in {seconds:.0f} s; peak memory {early[0] / 1024:.1f} -> {rss / 1024:.1f} MiB; ", end="")
    print(f"cache {early[1]} -> {kept} bytes")
    assert kept <= early[1], "the cache grew"
    assert rss - early[0] < 4 * 1024, "the process grew"


if __name__ == "__main__":
    main()
