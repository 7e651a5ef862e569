"""Kill `depthgate train` at random moments, go on with --resume, again and again; the end must be as if never killed.

    python tests/soak/kill_runs.py --rounds 200

Most rounds fork a process that has torch loaded and runs the command line; every 20th starts an interpreter of its
own. A round ends with SIGKILL at a random moment (while starting, stepping or saving); in every fifth, SIGTERM comes
first, and where that is enough, the round does not count. After each round the newest checkpoint must load whole,
without a warning and no older than the one before, and metrics.jsonl must hold every step up to it. At last the run is
finished and compared, bit for bit, with one that was never interrupted.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

import depthgate as dg
from depthgate.checkpoint import store as checkpoint
from depthgate.cli import build_parser
from depthgate.cli import main as depthgate
from depthgate.commands import train  # noqa: F401  (what a child needs is loaded before it is forked)
from depthgate.train import loop  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.train.tiny import same, words, write_data

FRESH, POLITE = 20, 5  # every so many rounds: a new interpreter; SIGTERM first


def forked(argv: list[str]) -> int:
    """The command line in a copy of this process; its id."""
    child = os.fork()
    if not child:
        code = 99
        try:
            code = depthgate(argv)
        finally:
            os._exit(code)
    return child


def started(argv: list[str]) -> int:
    """The command line in an interpreter of its own; its id."""
    return subprocess.Popen([sys.executable, "-m", "depthgate", *argv]).pid


def ended(child: int, within: float) -> int | None:
    """The exit code of a process that ends by itself in time."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def finished(argv: list[str]) -> None:
    code = ended(forked(argv), 600)
    assert code == 0, f"exit code {code}: {argv}"


def kill(child: int, rng: random.Random, longest: float, polite: bool) -> bool:
    """Kill a process after a random time; whether it had ended by itself, which it may when asked to."""
    code = ended(child, rng.uniform(0, longest))
    assert code is None, f"the run ended by itself, with code {code}"
    if polite:
        os.kill(child, signal.SIGTERM)
        code = ended(child, rng.choice([rng.uniform(0, 0.1), 10]))
        assert code in (None, 0, -signal.SIGTERM), f"exit code {code} after SIGTERM"  # the last: before it could listen
        if code is not None:
            return True
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or polite, f"the run ended by itself, with status {status}"
    return False


def check(run: Path, reached: int) -> tuple[int, bool]:
    """Look at a run after a kill: the step that it goes on from, and whether the kill left anything unfinished."""
    left = any(path.name.startswith((".tmp-", ".old-")) for path in run.iterdir())
    step = 0
    if reached or checkpoint.steps(run):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a kill damages nothing, so there is nothing to warn of
            found, model = checkpoint.load(run), dg.load(run)
        step = found.step
        assert all(torch.equal(t, found.tensors["model"][name]) for name, t in model.state_dict().items())
    assert step >= reached, f"step {reached} was complete, but {step} was loaded"
    metrics = run / "metrics.jsonl"
    *whole, _cut_short = metrics.read_text().split("\n") if metrics.exists() else [""]
    rows = [json.loads(row)["step"] for row in whole]
    assert rows == list(range(1, len(rows) + 1)), "rows are missing or stand twice"
    assert len(rows) >= step, f"there are {len(rows)} rows at step {step}"
    return step, left


def soak(folder: Path, rounds: int, seed: int, longest: float) -> str:
    rng = random.Random(seed)
    run, data = folder / "run", write_data(folder / "text.jsonl")

    def command(out: Path, steps: int, *options: str) -> list[str]:
        return words(out, data, steps, "--checkpoint_every=1", "--accumulate=2", *options)

    began, reached, kills, dirty, by_itself, idle = time.monotonic(), 0, 0, 0, 0, 0
    while kills < rounds:
        number = kills + by_itself
        fresh, polite = number % FRESH == FRESH // 2, number % POLITE == POLITE - 1
        start: Callable[[list[str]], int] = started if fresh else forked
        child = start(command(run, 10**6, "--resume"))
        alone = kill(child, rng, longest + 3 * fresh, polite)
        kills, by_itself = kills + (not alone), by_itself + alone
        before = reached
        reached, left = check(run, reached) if run.exists() else (reached, False)
        dirty, idle = dirty + left, idle + (reached == before)
    finished(command(run, reached + 7, "--resume"))
    finished(command(folder / "whole", reached + 7))
    assert same(run, folder / "whole")
    assert check(run, reached + 7) == (reached + 7, False)
    rows = [[json.loads(row)["loss"] for row in (folder / out / "metrics.jsonl").open()] for out in ("run", "whole")]
    assert rows[0] == rows[1]
    kinds = f"{kills} runs killed, and {by_itself} more that SIGTERM ended in time"
    marks = f"{dirty} left an unfinished folder, {idle} had not saved another step"
    seconds = time.monotonic() - began
    return f"{kinds}; {marks}; {reached + 7} steps, equal to an uninterrupted run bit for bit; {seconds:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=1.2, help="seconds until a kill; starting takes a third of it")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    build_parser()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"XDG_CACHE_HOME": folder, "HOME": folder, "OMP_NUM_THREADS": "1"}
        with open(Path(folder) / "log", "w") as log:
            screen = os.dup(2)
            os.dup2(log.fileno(), 2)  # the progress of every child
            try:
                result = soak(Path(folder), options.rounds, options.seed, options.longest)
            except BaseException:
                os.dup2(screen, 2)
                sys.stderr.write((Path(folder) / "log").read_text()[-3000:])
                raise
            os.dup2(screen, 2)
    print(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
