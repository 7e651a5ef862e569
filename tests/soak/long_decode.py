"""100,000 decode steps with flat memory: `python tests/soak/long_decode.py [--steps N]`.

Rows with different prompts are decoded again and again; whenever the context is full, the cache of every row is cropped
to its prompt, and it goes on from there. Memory of the process and of the cache must not grow after the first tenth.
"""

import argparse
import resource
import time

import torch

import depthgate as dg
from depthgate.generation.plain import Reader


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
    prompts = [torch.randint(64, (n,)).tolist() for n in (3, 9, 20)]
    before = torch.tensor([len(prompt) - 1 for prompt in prompts])
    reader = Reader(model, 3)
    start, early = time.perf_counter(), (0, 0)
    logits = reader.prefill(prompts).logits
    for step in range(steps):
        tokens = logits.argmax(-1)
        if int(reader.lengths.max()) + 1 >= shape.context:
            reader.lengths = torch.minimum(reader.lengths, before)
            for layer in reader.caches:
                layer.crop(before)
            tokens = torch.tensor([prompt[-1] for prompt in prompts])
            tokens[step % 3] = step % 64  # not the same text for ever
        logits = reader.step(tokens).logits
        if step == steps // 10:
            early = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, reader.cache_bytes)
    rss, kept = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, reader.cache_bytes
    seconds = time.perf_counter() - start
    print(f"{steps} steps in {seconds:.0f} s; peak memory {early[0] / 1024:.1f} -> {rss / 1024:.1f} MiB; ", end="")
    print(f"cache {early[1]} -> {kept} bytes")
    assert kept <= early[1], "the cache grew"
    assert rss - early[0] < 4 * 1024, "the process grew"


if __name__ == "__main__":
    main()
