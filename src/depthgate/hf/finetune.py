"""`depthgate finetune`: recover the quality of a converted model, as a rule by learning from the dense one.

The run's folder is the model's: config.json and weights as transformers keeps them, finetune.json, metrics.jsonl, and
checkpoints (step-N) from which --resume goes on. They hold what is trained, not what is frozen.
"""

import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthgate.checkpoint import store as checkpoint
from depthgate.config import FinetuneConfig
from depthgate.data.batches import Packed, batches
from depthgate.data.token_file import cache_folder, everything, tokenize
from depthgate.device import resolve_device
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.hf.adapter import HFLanguageModel, tokenizer_of
from depthgate.hf.calibrate import calibrate
from depthgate.hf.conversion import routed_layers, set_capacity
from depthgate.hf.folder import load
from depthgate.hf.recover import Student, build
from depthgate.hf.tokenizer_files import check_generation, check_text, copy_text
from depthgate.train import optim
from depthgate.train import run_folder as runs
from depthgate.train.progress import progress_line, tracker
from depthgate.train.signals import stop_signals

ASKED = "finetune.json"


def run(config: FinetuneConfig, as_json: bool, resume: bool = False) -> int:
    """Fine-tune, or go on; the exit code: 0 when done or asked to stop (SIGTERM), 130 when interrupted."""
    config = config.settled
    source = Path(config.model)
    if source.resolve() in (Path(config.out).resolve(), *Path(config.out).resolve().parents):
        raise InvalidValueError(f"out is {config.out}, in the folder of --model, which stays as it is: choose another")
    device = resolve_device(config.device)
    if config.dtype == "auto":
        config = replace(config, dtype="bfloat16" if device == "cuda" else "float32")
    check_generation(source)
    model = load(source)
    check_text(source)
    if not routed_layers(model):
        raise DepthgateError(f"{source} has no routed layers: convert it first, with depthgate convert")
    with runs.opened(config, resume, ASKED) as folder:
        tokenizer = tokenizer_of(source)
        language = HFLanguageModel(model, tokenizer, config.seq)
        packed = Packed(everything(tokenize(config.data, tokenizer, cache_folder())), config.seq, config.seed)
        code = _Finetuning(config, folder, build(language, config, device), packed).run(resume)
    if as_json:  # the last row of metrics
        print((folder / checkpoint.METRICS).read_text(encoding="utf-8").rstrip("\n").rpartition("\n")[2])
    return code


class _Finetuning:
    """A run in progress: everything a checkpoint holds."""

    def __init__(self, config: FinetuneConfig, folder: Path, student: Student, packed: Packed) -> None:
        self.config, self.folder, self.student, self.packed = config, folder, student, packed
        student.expect_documents(packed.most_documents)
        self.goal = student.capacity if config.capacity is None else config.capacity
        self.optimizer = optim.adamw(student.trained.items(), config, _decays, float(config.lr or 0))
        self.clock = time.perf_counter()
        self.state: dict[str, Any] = {"step": 0, "sequences": 0, "tokens": 0, "flops": 0.0, "seconds": 0.0, "bad": 0}
        self.state |= {"capacity": 1.0, "data": packed.documents.fingerprint()}

    def run(self, resume: bool) -> int:
        if resume and checkpoint.steps(self.folder):
            self._restore()
        elif self.config.calibrate:
            rows = self.packed.rows(range(-(-self.config.calibrate // self.config.seq)))
            with torch.compiler.set_stance("force_eager"):  # compiled layers would be compiled for it
                calibrate(self.student.language, rows, self.goal)
        saved = self.state["step"] if resume else -1
        with stop_signals() as stopped, self._record() as record:
            stream = batches(self.packed, self.config.batch, self.state["sequences"], self.config.workers)
            self.clock = time.perf_counter()
            while self.state["step"] < self.config.steps and not stopped:
                record(self._step(next(stream).rows))
                if self.state["step"] % self.config.checkpoint_every == 0:
                    saved = self._save()
                    self.clock = time.perf_counter()
            stream.close()  # type: ignore[attr-defined]
            if saved != self.state["step"]:
                self._save()
        _publish(self.student.finished(), Path(self.config.model), self.folder)
        left = "; go on with --resume" if stopped else ""
        step = f"{'stopped at' if stopped else 'at'} step {self.state['step']}"
        print(f"{step}, saved in {self.folder}{left}", file=sys.stderr)
        return 130 if signal.SIGINT in stopped else 0

    @contextmanager
    def _record(self) -> Iterator[Callable[[dict[str, Any]], None]]:
        metrics = runs.Metrics(self.folder, self.state["step"])
        with (
            closing(metrics),
            tracker(self.config.tracker, self.folder, runs.plain(self.config)) as track,
            progress_line(self.config.steps, self.state["step"]) as show,
        ):

            def record(row: dict[str, Any]) -> None:
                for take in (metrics.add, track, show):
                    take(row)

            yield record

    def _step(self, rows: Any) -> dict[str, Any]:
        config, state, student = self.config, self.state, self.student
        steps = config.steps if config.schedule_steps is None else config.schedule_steps
        capacity = optim.annealed(self.goal, state["step"], falling_steps(config.capacity_share, steps))
        lr = optim.rate(config, state["step"])
        if capacity != student.capacity:
            set_capacity(student.language.model, capacity)
        optim.set_rate([self.optimizer], lr)
        self.optimizer.zero_grad(set_to_none=True)
        loss, shares = student.backward(rows)
        grads = [weight.grad for weight in student.trained.values() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        optim.apply(self.optimizer, torch.isfinite(loss) & torch.isfinite(norm), norm, config.clip)
        figures = torch.stack([loss, norm, *shares]).tolist()  # waits for the step to end
        now = time.perf_counter()
        seconds, self.clock = max(now - self.clock, 1e-9), now
        tokens = rows.tokens.numel()
        cost = student.flops(capacity) * tokens
        state |= {"step": state["step"] + 1, "sequences": state["sequences"] + config.batch, "capacity": capacity}
        state |= {"tokens": state["tokens"] + tokens, "flops": state["flops"] + cost}
        state["seconds"] += seconds
        finite = all(math.isfinite(value) for value in figures[:2])
        self._count_bad(finite, figures[0], figures[1])
        return {
            "step": state["step"],
            "loss": figures[0] if math.isfinite(figures[0]) else None,
            "tokens": state["tokens"],
            "flops": state["flops"],
            "seconds": round(state["seconds"], 6),
            "lr": lr,
            "routed_share": [round(share, 6) for share in figures[2:]],
            "capacity": capacity,
            "gradient_norm": figures[1] if math.isfinite(figures[1]) else None,
            "tokens_per_second": round(tokens / seconds, 1),
            "utilisation": round(cost / seconds / student.peak, 4),
        }

    def _count_bad(self, finite: bool, loss: float, norm: float) -> None:
        """Stop after too many steps without a finite loss and gradient; each of them changed no weight."""
        self.state["bad"] = 0 if finite else self.state["bad"] + 1
        if self.state["bad"] >= self.config.most_bad_steps:
            raise DepthgateError(
                f"step {self.state['step']}: loss {loss}, gradient norm {norm}, the {self.state['bad']}th bad step in "
                "a row. The last checkpoint is intact: lower --lr, or look at the data"
            )

    def _save(self) -> int:
        held = self.student.held()
        if bad := [name for name, tensor in held.items() if not tensor.isfinite().all()]:
            raise DepthgateError(
                f"step {self.state['step']}: {bad[0]} is not finite, and is not saved. The last checkpoint is intact: "
                "lower --lr, or look at the data"
            )
        tensors = {
            "model": held,
            "optimizer": optim.state_tensors(self.student.language.model, [self.optimizer]),
            "rng": {"cpu": torch.get_rng_state()},
        }
        step = self.state["step"]
        checkpoint.save(self.folder, step, tensors, self.state, runs.plain(self.config), self.config.keep)
        return int(step)

    def _restore(self) -> None:
        found, model, held = checkpoint.load(self.folder), self.student.language.model, self.student.held()
        runs.check_found(found, self.config, self.state, model, held)
        if found.state["data"] != self.state["data"]:
            raise DepthgateError(
                f"the data of {self.folder} has changed since step {found.step}: give the same text, or start anew"
            )
        with torch.no_grad():
            for name, tensor in found.tensors["model"].items():
                held[name].copy_(tensor)
        optim.load_state_tensors(model, [self.optimizer], found.tensors["optimizer"])
        torch.set_rng_state(found.tensors["rng"]["cpu"])
        self.state = dict(found.state)


def falling_steps(share: float, steps: int) -> int:
    """Over which the capacity falls: one at least, if any are wanted, and never the last, which is at the goal."""
    return min(max(int(share * steps), int(share > 0)), steps - 1)


def _decays(name: str, weight: Tensor) -> bool:
    """Matrices of layers; not embeddings, norms, routers' rules or LoRA."""
    return weight.ndim >= 2 and not any(part in name for part in ("embed", "wte", "wpe", "head", "lora_", "router"))


def _publish(model: Any, source: Path, folder: Path) -> None:
    """Write the model aside, see that it loads, then put its files in place, config.json last."""
    part = folder / f".model.{os.getpid()}.part"
    try:
        part.mkdir()
        model.save_pretrained(part)
        copy_text(source, part)
        load(part)
        names = sorted(os.listdir(part), key=lambda name: name == "config.json")
        for name in names:
            os.replace(part / name, folder / name)
    except OSError as error:
        raise DepthgateError(f"cannot write the model to {folder} ({error.strerror or error})") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
