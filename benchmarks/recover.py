"""A real model made cheaper: convert, measure, recover, measure again, and time all of them; with the control that it
is to be judged by, the dense model trained alike: the same text, loss, steps and seeds.

    python benchmarks/recover.py --dense DIR --data wiki-train.txt.xz --valid wiki-valid.txt.xz --out runs/recover \
        --capacities 0.75,0.5 --seeds 0,1,2 --minutes 3 --device cuda --budget 540

Prints a JSON object a line as each figure is there, and a table at the end: bits a byte of held-out text and three
tasks made from it (depthgate eval --tasks), means over the seeds and their range. `--minutes` is the training time of
the control: all models make as many steps as a short trial says fit into it. What is there already is not done again:
an interrupted call, or one that ended after `--budget` seconds, is given once more and goes on where it was. With
`--side_by_side` the seeds are trained at the same time, a process each, which a GPU wants NVIDIA's MPS for; their times
of training are then those of models that share it.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path

from depthgate.commands import bench, convert, finetune
from depthgate.commands.eval import evaluate
from depthgate.config import TEXT_TASKS, BenchConfig, ConvertConfig, EvalConfig, FinetuneConfig
from depthgate.device import machine, resolve_device
from depthgate.errors import DepthgateError

_TRIAL = 12  # steps that say how long one takes; the first ones warm up


class Rows:
    """rows.jsonl: figures by name, each written as soon as it is known; a process of one seed writes its own file."""

    def __init__(self, out: Path, seed: str = "") -> None:
        self.path = out / f"rows{seed}.jsonl"
        self.found: dict[str, dict[str, object]] = {}
        for path in sorted(out.glob("rows*.jsonl")):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):
                    row = json.loads(line)
                    self.found[row["row"]] = row

    def begin(self, options: dict[str, object], about: dict[str, object]) -> None:
        """The first row says what was asked for, and where. More capacities and batches may be asked for later."""
        grows = ("capacities", "batches", "seeds", "budget", "side_by_side", "of_seed")
        old = self.get("machine", lambda: {**about, "options": options})["options"]
        differ = [name for name in options if name not in grows and old.get(name) != options[name]]
        if differ:
            told = ", ".join(f"{name}: {old.get(name)} there, {options[name]} here" for name in differ)
            raise DepthgateError(f"{self.path} was made with other options ({told}): choose another --out")

    def get(self, name: str, make) -> dict[str, object]:
        if name not in self.found:
            start = time.perf_counter()
            row = {"row": name, **make(), "took": round(time.perf_counter() - start, 1)}
            self.found[name] = row
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
        return self.found[name]


def from_gguf(file: Path, out: Path) -> None:
    """A GGUF checkpoint as a plain folder in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    part = out.with_name(f".{out.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    values = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    plain = type(model)(type(model.config)(**values))
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(part)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(part)
    part.rename(out)


def value_of(text: str) -> object:
    """A number, true or false; anything else is text."""
    with contextlib.suppress(ValueError):
        return json.loads(text)
    return text


def quietly(work, *args) -> dict[str, object]:
    """The JSON object that a command prints last."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = work(*args)
    if code:
        sys.exit(code)
    return json.loads(text.getvalue().splitlines()[-1])


def steps_for(config: FinetuneConfig, minutes: float, out: Path) -> dict[str, object]:
    """Steps of this configuration that fit into so many minutes, by a short trial at the last capacity."""
    trial = out / "trial"
    shutil.rmtree(trial, ignore_errors=True)
    quietly(finetune.run, replace(config, out=str(trial), steps=_TRIAL, capacity_share=0.0), True)
    rows = [json.loads(line) for line in (trial / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(trial)
    each = sorted(b["seconds"] - a["seconds"] for a, b in pairwise(rows[2:]))
    seconds = each[len(each) // 2]
    return {"seconds_a_step": seconds, "steps": max(1, int(60 * minutes / seconds))}


def recovered(config: FinetuneConfig) -> dict[str, object]:
    """Fine-tune, or go on where it was interrupted; the last row of metrics. Ends the process if it was stopped."""
    resume = (Path(config.out) / "finetune.json").exists()
    last = quietly(finetune.run, config, True, resume)
    if last["step"] < config.steps:
        sys.exit(f"the time is up at step {last['step']} of {config.steps}: give the same command again")
    return {key: last[key] for key in ("step", "loss", "tokens", "flops", "seconds", "tokens_per_second")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--dense", type=Path, help="folder of a dense model")
    source.add_argument("--gguf", type=Path, help="or a GGUF file, which needs the package gguf")
    parser.add_argument("--data", required=True, help="text to train on")
    parser.add_argument("--valid", required=True, help="text to measure on")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--capacities", default="0.75,0.5")
    parser.add_argument("--layers", default="auto", help="auto: the half that changes --data least; or as for convert")
    parser.add_argument("--gate", default="straight_through")
    parser.add_argument("--rule", default="threshold")
    parser.add_argument("--seeds", default="0", help="of training; all arms are trained with each")
    parser.add_argument("--side_by_side", action="store_true", help="train seeds at the same time, a process each")
    parser.add_argument("--of_seed", default="", help=argparse.SUPPRESS)  # the seed of such a process
    parser.add_argument("--minutes", type=float, help="training time of the control; --set steps=N instead")
    parser.add_argument("--budget", type=float, help="seconds after which the call ends, to be given again")
    parser.add_argument("--items", type=int, default=200, help="of each task; 0: no tasks")
    parser.add_argument("--eval_tokens", type=int, default=300_000)
    parser.add_argument("--eval_batch", type=int, default=16)
    parser.add_argument("--batches", default="1,16", help="sizes of batches that are timed; none: ''")
    parser.add_argument("--context", type=int, default=1024, help="tokens read when timed, and in a window measured")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], help="an option of depthgate finetune, such as lr=2e-4")
    options = parser.parse_args()

    os.environ.setdefault("XDG_CACHE_HOME", str(options.out.resolve() / "cache"))
    options.out.mkdir(parents=True, exist_ok=True)
    rows, device = Rows(options.out, options.of_seed), resolve_device(options.device)
    dense = options.dense
    if dense is None:
        dense = options.out / "dense"
        if not dense.exists():
            from_gguf(options.gguf, dense)
    known = {field.name for field in fields(FinetuneConfig)}
    given = {name: value_of(text) for name, _, text in (each.partition("=") for each in options.set)}
    if unknown := given.keys() - known:
        raise DepthgateError(f"--set {sorted(unknown)}: no such option of finetune")
    try:
        capacities = [float(each) for each in options.capacities.split(",")]
        replace(FinetuneConfig(model="model", data=options.data, out="out"), **given)
    except ValueError as error:  # DepthgateError is one
        raise DepthgateError(f"--capacities or --set: {error}") from None
    rows.begin(json.loads(json.dumps(vars(options) | {"set": given}, default=str)), machine(device))

    def measured(folder: Path) -> dict[str, object]:
        asked = EvalConfig(
            str(folder),
            options.valid,
            batch=options.eval_batch,
            tokens=options.eval_tokens,
            seq=options.context,
            device=device,
        )
        found = evaluate(asked)
        shares = found["routed_share"]
        kept = ("tokens", "nats_per_token", "perplexity", "bits_per_byte", "bits_per_byte_top_k", "flops_per_token")
        found_tasks = {}
        if options.items:
            found_tasks = evaluate(replace(asked, tasks=",".join(TEXT_TASKS), limit=options.items))["metrics"]
        return (
            {key: found[key] for key in kept} | {"routed": sum(shares) / len(shares) if shares else 1.0} | found_tasks
        )

    if options.budget is not None:  # a run that trains then writes a checkpoint and stops
        end = threading.Timer(options.budget, os.kill, (os.getpid(), signal.SIGTERM))
        end.daemon = True
        end.start()
    base = FinetuneConfig(model=str(dense), data=options.data, out=str(options.out / "trial"), device=device)
    base = replace(base, capacity=1.0, **given)
    if options.minutes is not None:
        found = rows.get("trial", lambda: steps_for(base, options.minutes, options.out))
        base = replace(base, steps=found["steps"])
    folders = {"dense": dense}
    rows.get("dense", lambda: measured(dense))
    arms: dict[str, tuple[Path, float]] = {"control": (dense, 1.0)}
    for capacity in capacities:
        converted = options.out / f"converted-{capacity}"
        if not converted.exists():
            text = options.data if options.layers == "auto" else None
            how = {"layers": options.layers, "text": text, "gate": options.gate, "rule": options.rule}
            asked = ConvertConfig(str(dense), str(converted), str(capacity), **how)
            quietly(convert.run, asked, True)
        arms[f"capacity {capacity}"] = converted, capacity
        rows.get(f"capacity {capacity}, converted", lambda folder=converted: measured(folder))
    seeds = options.seeds.split(",")
    if options.side_by_side and not options.of_seed:
        asked = [(sys.executable, *sys.argv, "--of_seed", seed) for seed in seeds]
        running = [subprocess.Popen([*each, "--batches", ""], stdout=subprocess.DEVNULL) for each in asked]
        codes = [process.wait() for process in running]
        if any(codes):
            sys.exit("a process of one seed failed, or its time was up: see above; the same command goes on")
        rows = Rows(options.out)
    for seed in map(int, [options.of_seed] if options.of_seed else seeds):
        for name, (source, capacity) in arms.items():
            after = options.out / f"{name.replace(' ', '-')}-seed-{seed}"
            config = replace(base, model=str(source), out=str(after), capacity=capacity, seed=seed)
            rows.get(f"{name}, seed {seed}, training", lambda c=config: recovered(c))
            rows.get(f"{name}, seed {seed}", lambda folder=after: measured(folder))
            folders.setdefault(f"{name}, seed {seed}" if seed == 0 else "", after)
    folders.pop("", None)
    if options.batches:
        for name, folder in folders.items():
            asked = BenchConfig(str(folder), options.valid, options.batches, options.context)
            rows.get(f"{name}, speed", lambda a=asked: {"speeds": bench.measure(a, device)})
    table(rows.found)
    means(rows.found, [*arms], len(seeds))


def means(rows: dict[str, dict[str, object]], arms: list[str], seeds: int) -> None:
    """Each arm over its seeds: the mean, and lowest to highest; bits a byte over the control of the same seed."""
    print(f"\n| {seeds} seeds | bits/byte | over the control | routed | " + " | ".join(TEXT_TASKS) + " |")
    print("|---" * (4 + len(TEXT_TASKS)) + "|")
    control = {key.rpartition(", ")[2]: row for key, row in rows.items() if key.startswith("control, seed")}
    for arm in arms:
        mine = {seed: rows[f"{arm}, {seed}"] for seed in control if f"{arm}, {seed}" in rows}
        bits = [row["bits_per_byte"] for row in mine.values()]
        over = [row["bits_per_byte"] / control[seed]["bits_per_byte"] - 1 for seed, row in mine.items()]
        tasks = [[row[task] for row in mine.values() if task in row] for task in TEXT_TASKS]
        cells = [f"{statistics.mean(bits):.4f} ({min(bits):.4f} to {max(bits):.4f})"]
        cells.append(f"{statistics.mean(over):+.2%} ({min(over):+.2%} to {max(over):+.2%})")
        cells.append(f"{statistics.mean(row['routed'] for row in mine.values()):.1%}")
        cells += [f"{statistics.mean(each):.3f}" if each else "" for each in tasks]
        print(f"| {arm} | " + " | ".join(cells) + " |")


def table(rows: dict[str, dict[str, object]]) -> None:
    """The figures side by side, as markdown."""
    names = "model|perplexity|bits/byte|over dense|top-k bits/byte|routed|MFLOPs/token|batch: prefill, decode tokens/s"
    print("\n" + "|".join(["", *names.split("|"), ""]) + "\n" + "|---" * 8 + "|")
    for name, row in rows.items():
        if "perplexity" not in row or "bits_per_byte" not in row:
            continue
        timed = rows.get(f"{name}, speed", {}).get("speeds", [])
        speeds = "; ".join(
            each.get("error")
            or f"{each['batch']}: {each['prefill_tokens_per_second']:,.0f}, {each['decode_tokens_per_second']:,.0f}"
            for each in timed
        )
        over = row["bits_per_byte"] / rows["dense"]["bits_per_byte"] - 1
        print(
            f"| {name} | {row['perplexity']:.2f} | {row['bits_per_byte']:.4f} | {over:+.1%} | "
            f"{row['bits_per_byte_top_k']:.4f} | {row['routed']:.1%} | {row['flops_per_token'] / 1e6:.1f} | {speeds} |"
        )


if __name__ == "__main__":
    try:
        main()
    except DepthgateError as error:
        sys.exit(f"recover: error: {error}")
