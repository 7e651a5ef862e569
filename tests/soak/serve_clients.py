"""64 clients for a minute: `python tests/soak/serve_clients.py [--seconds N] [--clients N] [--model DIR]`.

A server in a process of its own, and real `openai` clients with random prompts, lengths and seeds, streamed or whole; a
third of them leave midway. Whatever comes must be what dg.generate says, nothing may be lost, all rows must be free in
the end, and the server's memory must not grow after the first third. Unless given, a small model is trained first.
"""

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import openai
import psutil

import depthgate as dg
from depthgate.cli import main as depthgate


def small(folder: Path) -> str:
    shape = [
        "--model.dim=32",
        "--model.layers=4",
        "--model.heads=2",
        "--model.context=512",
        "--model.pattern=dense,mod",
    ]
    words = ["train", "--out", str(folder / "small"), "--steps=20", "--batch=4", "--device=cpu", *shape]
    assert depthgate(words) == 0
    return str(folder / "small")


async def client(url: str, name: str, todo: list[tuple[dict, str]], end: float, draw: random.Random) -> Counter:
    """Ask again and again until the end; count what came."""
    found: Counter = Counter()
    server = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    while time.monotonic() < end:
        asked, expected = draw.choice(todo)
        kind = draw.choice(("whole", "stream", "leave"))
        if kind == "whole":
            text = (await server.completions.create(model=name, **asked)).choices[0].text
        else:
            text, left = "", draw.randint(1, 40) if kind == "leave" else 10**9
            async with await server.completions.create(model=name, stream=True, **asked) as stream:
                async for part in stream:
                    text, left = text + part.choices[0].text, left - 1
                    if not left:
                        break
        right = expected.startswith(text) if kind == "leave" else text == expected
        assert right, f"{kind} {asked}: {text!r} is not {expected!r}"
        found[kind] += 1
    await server.close()
    return found


async def watch(process: psutil.Process, start: float, seconds: float) -> list[int]:
    """Memory of the server after a third of the time, and at the end."""
    await asyncio.sleep(seconds / 3)
    third = process.memory_info().rss
    await asyncio.sleep(max(0.0, start + seconds - time.monotonic()))
    return [third, process.memory_info().rss]


async def soak(url: str, name: str, todo: list, clients: int, seconds: float, pid: int) -> None:
    start = time.monotonic()
    each = [client(url, name, todo, start + seconds, random.Random(i)) for i in range(clients)]
    counts, memory = await asyncio.gather(asyncio.gather(*each), watch(psutil.Process(pid), start, seconds))
    told = sum(counts, Counter())
    print(f"{clients} clients, {seconds:.0f} s: {dict(told)}; memory {memory[0] >> 20} -> {memory[1] >> 20} MiB")
    assert memory[1] < memory[0] + (32 << 20), "the server grew"
    server = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    while True:
        page = await server.get(f"{url}/metrics", cast_to=str)
        now = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        if now["depthgate_requests_running"] == now["depthgate_requests_waiting"] == "0":
            break
    print({name: value for name, value in now.items() if "bucket" not in name})
    await server.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or small(Path(folder))
        draw, loaded = random.Random(0), dg.load(model)
        todo = []
        for seed in range(100):
            text = "".join(draw.choices("def class return(self):\n", k=draw.randint(1, 200)))
            asked = {"prompt": text, "max_tokens": draw.randint(1, 100), "seed": seed}
            (result,) = dg.generate(loaded, text, max_new_tokens=asked["max_tokens"], seed=seed)
            todo.append((asked, result.text))
        command = [sys.executable, "-m", "depthgate", "serve", "--model", model, "--port=0", "--rows=16", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                told = json.loads(process.stdout.readline())
                asyncio.run(soak(told["url"], told["model"], todo, options.clients, options.seconds, process.pid))
                process.send_signal(signal.SIGTERM)
                assert process.wait() == 0
            finally:
                process.kill()


if __name__ == "__main__":
    main()
