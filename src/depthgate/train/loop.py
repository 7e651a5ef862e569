"""The training loop of `depthgate train` and `depthgate finetune`: batch, step, figures, metrics, checkpoint, signals.

A run can be interrupted at any moment, and goes on with --resume as if it had not been.
"""

import math
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from depthgate.checkpoint import store as checkpoint
from depthgate.config import RunConfig, TrainConfig
from depthgate.data.batches import Numbered, Packed, Rows, batches
from depthgate.data.token_file import Documents, prepare, told
from depthgate.data.tokenizer import folder_hash, tokenizer_by_name
from depthgate.device import ALONE, World, matmul_rate, resolve_device
from depthgate.errors import DepthgateError, DepthgateWarning, InvalidValueError
from depthgate.flops import training_flops
from depthgate.layers import MoD
from depthgate.routing import Groups, Plans, Slots, causal_bce, depth_plans, load_balance, routed_share, z_loss
from depthgate.train import optim, run_folder
from depthgate.train.optim import Optimizers
from depthgate.train.parallel import build_decoder, joined, like
from depthgate.train.run_folder import Record, Row, recording, stop_signals
from depthgate.train.step import Figures, Step, Task, precision

GLANCE = 2**13  # tokens of held-out text that a run looks at, about
_REMEDY = "The last checkpoint is intact: lower --lr, or look at the data"


def train(config: TrainConfig, resume: bool) -> int:
    """Train a decoder, or go on; the exit code: 0 when done or asked to stop (SIGTERM), 130 when interrupted."""
    with joined(resolve_device(config.device)) as world, ExitStack() as stack:
        if world.first:  # makes the run's folder, tokenizer and documents; the others wait, and find them
            stack.enter_context(run_folder.opened(config, resume))
        else:
            world.wait()
        saved = Path(config.out, checkpoint.TOKENIZER)
        tokenizer = tokenizer_by_name(config.tokenizer, config.data, config.vocab, saved)
        shards = prepare(config.data, tokenizer, config.validation)
        if world.first:
            print(told(config.data, *shards), file=sys.stderr)
            world.wait()
        config = config.with_vocab(tokenizer.vocab)
        packed = Packed(shards.train, config.model.context, config.seed, config.max_documents)
        task = Pretraining(replace(config, max_documents=_documents(packed)), world)
        optimizers = optim.build(task.model, config, world)
        loop = Loop(config, task, optimizers, packed, world, tokenizer=folder_hash(saved))
        seen = {"tokenizer": tokenizer, "context": config.model.context, "kinds": config.model.kinds}
        seen |= {"loss": task.model.loss, "device": world.device}
        loop.look = partial(glance, SimpleNamespace(**seen), shards.validation, config)
        return loop.run(resume)


def glance(model: Any, documents: Documents, config: TrainConfig) -> Row:
    """Figures of some held-out text, for the page of a run. Every process must ask, and reads the same text."""
    from depthgate.train.evaluate import measure

    with torch.compiler.set_stance("force_eager"), precision(config, model.device), suppress(DepthgateError):
        of = measure(model, documents, max(1, config.batch // config.accumulate), GLANCE)
        return {"held_out_loss": of["nats_per_token"], "causal_share": of["routed_share"], "agreement": of["agreement"]}
    return {}  # it holds no text, or the loss is not finite


def _documents(packed: Packed) -> int:
    """The most documents a sequence will hold; a warning where it would have to hold more."""
    most = packed.most_documents
    kept = min(most, packed.max_documents or most)
    if kept < most:
        left_out = f"the tokens of those after the first {kept} (max_documents) are left out"
        warnings.warn(f"a sequence has up to {most} documents: {left_out}", DepthgateWarning, stacklevel=2)
    return kept


class Pretraining:
    """The task of a decoder that learns to predict text, and of its routers."""

    def __init__(self, config: TrainConfig, world: World = ALONE) -> None:
        if world.size > 1 and config.optimizer == "muon":
            raise InvalidValueError("optimizer is 'muon': it needs whole matrices, in one process; use adamw")
        self.config, self.capacity = config, config.model.capacity
        self.sequences = max(1, config.batch // config.accumulate // world.size)  # that are computed at once
        self.goal, self.falling_steps = config.model.capacity, config.capacity_steps
        torch.manual_seed(config.seed)
        self.model = build_decoder(config.model, config.compile, world)
        self.read_plans = torch.compile(read_plans, dynamic=False) if config.compile and world.size == 1 else read_plans

    def set_capacity(self, capacity: float) -> None:
        self.capacity = capacity
        for module in self.model.layers.modules():
            if isinstance(module, MoD):
                module.router.capacity = capacity

    def loss(self, rows: Rows) -> tuple[Tensor, Tensor | float, list[Tensor], Plans]:
        mean, plans = self.model.loss(*rows, max_documents=self.config.max_documents)
        of_routers, shares = self.read_plans(plans, self.config)
        return mean, of_routers, shares, plans

    def flops_per_token(self, capacity: float) -> float:
        return training_flops(replace(self.config.model, capacity=capacity), sequences=self.sequences)

    def held(self) -> dict[str, Tensor]:
        return self.model.state_dict()


def read_plans(plans: Plans, config: TrainConfig) -> tuple[Tensor | float, list[Tensor]]:
    """The sum of the weighted losses of all plans, and their routed shares; one function, compiled as one."""
    total: Tensor | float = 0.0
    for plan in plans:
        if isinstance(plan, Groups):
            total = total + config.z_loss * z_loss(plan) + config.balance_loss * load_balance(plan)
        if isinstance(plan, Slots) and plan.decision.requires_grad:  # not that of a threshold
            total = total + config.rule_loss * causal_bce(plan)
    return total, [routed_share(plan) for plan in depth_plans(plans)]


class Loop:
    """A run in progress: everything a checkpoint holds, and the steps from one to the next."""

    def __init__(
        self, config: RunConfig, task: Task, optimizers: Optimizers, packed: Numbered, world: World, **hashes: str
    ) -> None:
        """hashes: what else tells the run apart, kept in its checkpoints."""
        self.config, self.folder, self.task, self.packed, self.world = config, Path(config.out), task, packed, world
        self.step, self.optimizers = Step(task, optimizers, config, world), optimizers
        self.clock = 0.0
        self.peak = matmul_rate(world.device, getattr(torch, config.dtype)) * world.size
        self.restored: int | None = None  # the step that a resumed run went on from
        self.look: Callable[[], Row] | None = None  # figures of held-out text, for some of the rows
        # About ten times, and on a thirtieth of the tokens that are trained on at most.
        self.look_every = max(-(-config.steps // 10), 32 * GLANCE // (config.batch * packed.context))
        self.state: dict[str, Any] = {"step": 0, "sequences": 0, "tokens": 0, "flops": 0.0, "seconds": 0.0, "bad": 0}
        self.state |= {"data": packed.fingerprint(), **hashes}

    def run(self, resume: bool) -> int:
        """Make all steps that are left; the exit code: 0 when done or asked to stop (SIGTERM), 130 when interrupted."""
        if resume and checkpoint.steps(self.folder):
            self._restore()
        first, none = self.world.first, nullcontext[Record](lambda _: None)
        recorder = recording(self.config, self.folder, self.state["step"]) if first else none
        with stop_signals() as stopped, recorder as record:
            self._steps(stopped, record)
        if self.world.first:
            step = f"{'stopped at' if stopped else 'at'} step {self.state['step']}"
            done = "; more with --steps" if self.restored == self.state["step"] else ""
            done = f"; go on with --resume --out {self.folder}" if stopped else done
            print(f"{step}, saved in {self.folder}{done}", file=sys.stderr)
        return 130 if signal.SIGINT in list(stopped)[:1] else 0

    def _steps(self, stopped: Mapping[int, float], record: Record) -> None:
        config, state, world = self.config, self.state, self.world
        stream = batches(self.packed, config.batch, state["sequences"], config.workers, world.rank, world.size)
        under_way: deque[tuple[Row, Figures]] = deque()
        late = int(world.device.startswith("cuda"))  # steps under way while the figures of one are read
        saved = self.restored
        self.clock = time.perf_counter()
        while state["step"] < config.steps and not world.any(bool(stopped)):
            under_way.append(self._start(next(stream)))
            step, every = state["step"], self.look_every
            due, looks = step % config.checkpoint_every == 0, step % every == 0 or every <= step == config.steps
            while len(under_way) > (0 if due or looks else late):
                row = self._end(*under_way.popleft())
                record(row | self.look() if self.look and looks and not under_way else row)
            if due:
                saved = self._save()
            if due or looks:
                self.clock = time.perf_counter()
        for started in under_way:
            record(self._end(*started))
        if saved != state["step"]:
            self._save()

    def _start(self, rows: Rows) -> tuple[Row, Figures]:
        """Start a step, at the rate and the capacity that are its own; returns what is known of its row of metrics."""
        state, task = self.state, self.task
        lr = optim.rate(self.config, state["step"])
        capacity = optim.capacity(task.goal, state["step"], task.falling_steps)
        self.step.set_capacity(capacity)
        optim.set_rate(self.optimizers, lr)
        figures = self.step(rows)
        resumed = {"resumed": True} if state["step"] == self.restored else {}
        state["step"] += 1
        state["sequences"] += self.config.batch
        return {"step": state["step"], "lr": lr, "capacity": capacity, **resumed}, figures

    def _end(self, row: Row, figures: Figures) -> Row:
        """The whole row of metrics of a step; waits for its end, and stops after too many steps without a finite loss
        and gradient, each of which changed nothing."""
        loss, norm, shares = figures.read()
        now, state = time.perf_counter(), self.state
        seconds, self.clock = max(now - self.clock, 1e-9), now
        tokens = self.config.batch * self.packed.context
        flops = self.task.flops_per_token(row["capacity"]) * tokens
        good = math.isfinite(loss) and math.isfinite(norm)
        for name, more in (("seconds", seconds), ("tokens", tokens), ("flops", flops)):
            state[name] += more
        state["bad"] = 0 if good else state["bad"] + 1
        if state["bad"] >= self.config.most_bad_steps:
            bad = self._not_finite()
            where = f"the first weight that is not finite is {bad}" if bad else "all weights are finite"
            many = f"loss {loss}, gradient norm {norm}, bad step {state['bad']} in a row; {where}"
            raise DepthgateError(f"step {row['step']}: {many}. {_REMEDY}")
        return row | {
            "loss": loss if math.isfinite(loss) else None,
            "tokens": state["tokens"],
            "flops": state["flops"],
            "seconds": round(state["seconds"], 6),
            "routed_share": [round(share, 6) for share in shares],
            "gradient_norm": norm if math.isfinite(norm) else None,
            "tokens_per_second": round(tokens / seconds, 1),
            "utilisation": round(flops / seconds / self.peak, 4),
        }

    def _not_finite(self) -> str | None:
        """The first weight that is not finite. Every process must ask, and looks at its own rows."""
        local = ((n, w.to_local() if isinstance(w, DTensor) else w) for n, w in self.task.held().items())
        first = next((name for name, weight in local if not weight.isfinite().all()), None)
        return (first or "a weight") if self.world.any(first is not None) else None

    def _save(self) -> int:
        step = int(self.state["step"])
        if bad := self._not_finite():
            raise DepthgateError(f"step {step}: {bad} is not finite, and is not saved. {_REMEDY}")
        tensors = {
            "model": self.task.held(),
            "optimizer": optim.state_tensors(self.task.model, self.optimizers),
            "rng": {"cpu": torch.get_rng_state()},
        }
        config = run_folder.plain(self.config)
        checkpoint.save(self.folder, step, tensors, self.state, config, self.config.keep, self.world)
        return step

    def _restore(self) -> None:
        held = self.task.held()
        found = checkpoint.load(self.folder, world=self.world, held=held)
        found.state.pop("capacity", None)  # kept by older runs of finetune, and never needed
        self.world.agree(lambda: run_folder.check_found(found, self.config, self.state, self.task.model, held))
        with torch.no_grad():
            for name, tensor in found.tensors["model"].items():
                held[name].copy_(like(tensor, held[name]))
        optim.load_state_tensors(self.task.model, self.optimizers, found.tensors["optimizer"])
        torch.set_rng_state(found.tensors["rng"]["cpu"])
        self.state, self.restored = found.state, found.step
