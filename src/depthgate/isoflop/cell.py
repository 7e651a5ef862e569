"""One cell, from a fresh or interrupted run to its row of results. Runs wherever a launcher puts it."""

import contextlib
import gc
import json
import math
import os
import signal
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor

from depthgate.checkpoint.store import METRICS
from depthgate.config import ModelConfig
from depthgate.data.token_file import cache_folder, prepare
from depthgate.device import machine, resolve_device
from depthgate.errors import DepthgateError
from depthgate.files import write_json
from depthgate.flops import forward_flops
from depthgate.isoflop.grid import Cell, described
from depthgate.loading import load
from depthgate.train import loop
from depthgate.train.evaluate import measure

RESULT = "result.json"


def finished(cell: Cell) -> dict[str, Any] | None:
    """The row of a cell that was run to its end."""
    path = cell.folder / RESULT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError:
        raise DepthgateError(f"{path} is damaged: delete it to have the cell measured again") from None
    if not isinstance(found, dict) or not is_of(found, cell):
        raise DepthgateError(f"{path} is of another study: choose another --out")
    if not whole(found):
        raise DepthgateError(f"{path} is damaged: delete it to have the cell measured again")
    return found


def is_of(row: dict[str, Any], cell: Cell) -> bool:
    """Whether it is what this very cell gave."""
    return all(row.get(name) == value for name, value in described(cell).items())


def whole(row: object) -> bool:
    """Whether it has what reports are made of."""
    names = ("budget", "params", "seed", "loss", "loss_causal", "seconds", "flops", "forward_flops_per_token")
    return (
        isinstance(row, dict)
        and all(isinstance(row.get(name), str) for name in ("cell", "variant"))
        and all(isinstance(row.get(name), float | int) and math.isfinite(row[name]) for name in names)
    )


def beside(cell: Cell, what: str) -> Path:
    """A file beside the cell's run: its log, or its error."""
    return cell.folder.parent / f"{cell.name}.{what}.txt"


def run_cell(cell: Cell, measured: int, quiet: bool) -> dict[str, Any]:
    """Train, or go on; measure; the row of results. A failure is written down beside the run. `quiet`: what training
    says goes into a file, as where several cells run at once."""
    cell.folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _into(beside(cell, "log") if quiet else None):
            row = _trained(cell, measured)
    except Exception:
        beside(cell, "error").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    finally:
        _forget()
    beside(cell, "error").unlink(missing_ok=True)
    write_json(cell.folder / RESULT, row)
    return row


def _trained(cell: Cell, measured: int) -> dict[str, Any]:
    training, folder = cell.training, cell.folder
    last_step = folder / f"step-{training.steps}"
    try:
        model = load(last_step)
    except DepthgateError:  # it is not there yet, or damaged: training goes on from what is whole
        if loop.train(training, resume=True) == 130 or not last_step.is_dir():
            raise KeyboardInterrupt from None  # somebody asked the process to stop
        model = load(last_step)
    model = model.to(resolve_device(training.device))
    shards = prepare(training.data, model.tokenizer, cache_folder(), training.validation)
    figures = measure(model, shards.validation, training.batch, measured)
    about = machine(training.device)
    last = json.loads((folder / METRICS).read_text(encoding="utf-8").splitlines()[-1])
    return {
        **described(cell),
        "loss": figures["nats_per_token_top_k"],
        "loss_causal": figures["nats_per_token"],
        "bits_per_byte": figures["bits_per_byte"],
        "train_loss": last["loss"],
        "flops": last["flops"],
        "passes": cell.tokens / len(shards.train),
        "forward_flops_per_token": _forward(model.config, figures["routed_share"]),
        "seconds": last["seconds"],
        "routed_share": figures["routed_share"],
        "agreement": figures["agreement"],
        "measured_tokens": figures["tokens"],
        "device": training.device,
        "machine": f"{about['device']}, torch {about['torch']}, commit {about['commit'] or 'unknown'}",
    }


def _forward(config: ModelConfig, shares: list[float]) -> float:
    """FLOPs a token of a causal forward pass: routed layers take what they took of the held-out text, on average."""
    taken = max(1e-6, sum(shares) / len(shares)) if shares else config.capacity
    return forward_flops(replace(config, capacity=taken))


def _forget() -> None:
    """Free what a cell took: the next one may need it all."""
    gc.collect()
    if torch.cuda.is_available():
        torch.compiler.reset()
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _into(path: Path | None) -> Any:
    """Have stderr written to a file."""
    if path is None:
        yield
        return
    with path.open("a", encoding="utf-8") as file, contextlib.redirect_stderr(file):
        yield


def in_worker(cell: Cell, measured: int, threads: int) -> dict[str, Any]:
    """`run_cell` in a process of another's."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    torch.set_num_threads(threads)
    inductor.compile_threads = threads  # cells that compile side by side would each start a process for every core
    return run_cell(cell, measured, quiet=True)


def _watch(study: int) -> None:
    """Ask this process to stop once that of the study is gone."""
    while True:
        try:
            os.kill(study, 0)
        except ProcessLookupError:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(1.0)


def alone(cell: Cell, measured: int, threads: int, study: int) -> None:
    """`run_cell` as all that a process does: its exit code and the cell's files tell the rest. It saves and stops when
    whoever started it is gone."""
    threading.Thread(target=_watch, args=(study,), daemon=True).start()
    try:
        in_worker(cell, measured, threads)
    except KeyboardInterrupt:
        os._exit(130)
    except Exception:
        os._exit(1)
