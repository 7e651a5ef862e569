"""An engine for many steps, with requests that come and go: each gets its own tokens, pages come back, memory stays.

python tests/soak/engine_steps.py --steps 100000 [--device cuda]
"""

import argparse
import random
import resource

import torch

import depthgate as dg
from depthgate.generation.config import Sampling
from depthgate.generation.engine import Engine


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=100_000)
    options.add_argument("--device", default="cpu")
    given = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = dg.ModelConfig(vocab=64, dim=32, layers=4, heads=2, context=128, pattern="dense,mod", key_shift=True)
    model = dg.Decoder(shape).to(given.device).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    draw = random.Random(0)
    engine = Engine(model, rows=8, memory=512, page=16)
    free = [len(pool) for pool in engine._free]

    def new() -> tuple[list[int], Sampling]:
        prompt = [draw.randrange(64) for _ in range(draw.randint(1, 40))]
        return prompt, Sampling(
            max_new_tokens=draw.randint(1, 80), seed=draw.randrange(1000), temperature=draw.choice((0.0, 1.0))
        )

    made, checked, memory = [], 0, []
    for step in range(given.steps):
        while engine.waiting < 4:
            prompt, sampling = new()
            made.append((prompt, sampling, engine.submit(prompt, sampling)))
        engine.turn()
        if draw.random() < 0.01 and made:
            engine.cancel(draw.choice(made)[2])
        done = [each for each in made if each[2].result.finish is not None]
        made = [each for each in made if each[2].result.finish is None]
        for prompt, sampling, request in done:
            if request.result.finish == "length" and draw.random() < 0.02:  # of all, those of one in fifty are compared
                (alone,) = dg.generate(
                    model, [prompt], engine=False, seed=sampling.seed, temperature=sampling.temperature,
                    max_new_tokens=sampling.max_new_tokens,
                )  # fmt: skip
                assert alone.tokens == request.result.tokens, (step, prompt, sampling)
                checked += 1
        if step % max(1, given.steps // 20) == 0:
            held = torch.cuda.memory_allocated() if given.device == "cuda" else 0
            memory.append((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, held // 2**20))
            print(f"step {step:,}: {memory[-1][0]:,} MiB of the process, {memory[-1][1]:,} on the device", flush=True)
    for _, _, request in made:
        engine.cancel(request)
    while engine.waiting or engine.running:
        engine.turn()
    assert [len(pool) for pool in engine._free] == free, "pages are missing"
    first, last = memory[len(memory) // 4], memory[-1]
    assert (last[0] - first[0] <= 32) & (last[1] - first[1] <= 1), f"memory grew from {first} to {last} MiB"
    print(f"{given.steps:,} steps, {engine._count:,} requests, {checked:,} compared: equal; all pages are back")


if __name__ == "__main__":
    main()
