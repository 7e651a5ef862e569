"""The training loop of `depthgate train` and `depthgate finetune`: batch, step, figures, metrics, checkpoint, signals.

A run can be interrupted at any moment, and goes on with --resume as if it had not been.
"""

import math
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from depthgate.checkpoint import store as checkpoint
from depthgate.config import RunConfig, TrainConfig
from depthgate.data.batches import Packed, Rows, batches
from depthgate.data.token_file import Documents, prepare
from depthgate.data.tokenizer import TextTokenizer, folder_hash, load_tokenizer, tokenizer_by_name
from depthgate.device import World, matmul_rate, resolve_device
from depthgate.errors import DepthgateError, DepthgateWarning, InvalidValueError
from depthgate.flops import training_flops
from depthgate.routing import Groups, Plans, Slots, TopTokens, causal_bce, load_balance, routed_share, z_loss
from depthgate.train import optim, run_folder
from depthgate.train.parallel import CompiledDecoder, build_decoder, joined, like, shard
from depthgate.train.run_folder import Row, recording, stop_signals
from depthgate.train.step import Figures, Step, Task


def train(config: TrainConfig, resume: bool) -> int:
    """Train a decoder, or go on; the exit code: 0 when done or asked to stop (SIGTERM), 130 when interrupted."""
    with (
        joined(resolve_device(config.device)) as world,
        _prepared(world, config, resume) as (folder, tokenizer, documents),
    ):
        config = config.with_vocab(tokenizer.vocab)
        packed = Packed(documents, config.model.context, config.seed, config.max_documents)
        task = Pretraining(replace(config, max_documents=_documents(packed)), world)
        optimizers = optim.build(task.model, config, world)
        graph, tokenizer_hash = optim.capturable(config, world), folder_hash(folder / checkpoint.TOKENIZER)
        return Loop(config, folder, task, optimizers, packed, world, graph, tokenizer=tokenizer_hash).run(resume)


@contextmanager
def _prepared(world: World, config: TrainConfig, resume: bool) -> Iterator[tuple[Path, TextTokenizer, Documents]]:
    """The run's folder, tokenizer and documents. The first process makes them; the others wait, and find them."""
    if not world.first:
        world.wait()
        tokenizer = load_tokenizer(Path(config.out) / checkpoint.TOKENIZER)
        yield Path(config.out), tokenizer, prepare(config.data, tokenizer, config.validation).train
        return
    with run_folder.opened(config, resume) as folder:
        tokenizer = tokenizer_by_name(config.tokenizer, config.data, config.vocab, saved=folder / checkpoint.TOKENIZER)
        documents = prepare(config.data, tokenizer, config.validation).train
        world.wait()
        yield folder, tokenizer, documents


def _documents(packed: Packed) -> int:
    """The most documents a sequence will hold; a warning where it would have to hold more."""
    most = packed.most_documents
    if packed.max_documents is None or most <= packed.max_documents:
        return most
    left_out = f"the tokens of those after the first {packed.max_documents} (max_documents) are left out"
    warnings.warn(f"a sequence has up to {most} documents: {left_out}", DepthgateWarning, stacklevel=2)
    return packed.max_documents


class Pretraining:
    """The task of a decoder that learns to predict text, and of its routers."""

    def __init__(self, config: TrainConfig, world: World = World()) -> None:  # noqa: B008
        if world.size > 1 and config.optimizer == "muon":
            raise InvalidValueError("optimizer is 'muon': it needs whole matrices, in one process; use adamw")
        self.config, self.capacity = config, config.model.capacity
        self.goal, self.falling_steps = config.model.capacity, config.capacity_steps
        torch.manual_seed(config.seed)
        self.model = build_decoder(config.model, config.compile, world)
        shard(self.model, world)
        compiled = isinstance(self.model, CompiledDecoder)
        self.read_plans = torch.compile(read_plans, dynamic=False) if compiled else read_plans

    def set_capacity(self, capacity: float) -> None:
        """Let every Mixture-of-Depths router take another share of the tokens from now on."""
        self.capacity = capacity
        for module in self.model.layers.modules():
            if isinstance(module, TopTokens):
                module.capacity = capacity

    def loss(self, rows: Rows) -> tuple[Tensor, Tensor | float, list[Tensor], Plans]:
        """Cross-entropy, the loss of the routers, the routed share of every Mixture-of-Depths layer, and the plans."""
        mean, plans = self.model.loss(*rows[:4], max_documents=self.config.max_documents)
        of_routers, shares = self.read_plans(plans, self.config)
        return mean, of_routers, shares, plans

    def flops_per_token(self, capacity: float) -> float:
        """Training FLOPs per token at this capacity."""
        return training_flops(replace(self.config.model, capacity=capacity))

    def held(self) -> dict[str, Tensor]:
        """All weights, and the thresholds of the rules."""
        return self.model.state_dict()


def read_plans(plans: Plans, config: TrainConfig) -> tuple[Tensor | float, list[Tensor]]:
    """The loss of the plans and their routed shares: one function, so that it is compiled as one."""
    return plan_loss(plans, config), [routed_share(plan) for plan in plans if isinstance(plan, Slots)]


def plan_loss(plans: Plans, config: TrainConfig) -> Tensor | float:
    """The sum of the weighted losses of all plans."""
    total: Tensor | float = 0.0
    for plan in plans:
        if isinstance(plan, Groups):
            total = total + config.z_loss * z_loss(plan) + config.balance_loss * load_balance(plan)
        if isinstance(plan, Slots) and config.model.rule != "threshold":
            total = total + config.rule_loss * causal_bce(plan)
    return total


class _Started(NamedTuple):
    """A step whose figures have not been read yet."""

    figures: Figures
    step: int
    tokens: int  # of this step
    flops: float
    all_tokens: int  # of this step and those before it
    all_flops: float
    lr: float
    capacity: float


class Loop:
    """A run in progress: everything a checkpoint holds, and the steps from one to the next."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        task: Task,
        optimizers: Sequence[torch.optim.Optimizer],
        packed: Packed,
        world: World,
        graph: bool = False,
        **hashes: str,
    ) -> None:
        """graph: replay steps as a CUDA graph. hashes: what else tells the run apart, kept in its checkpoints."""
        self.config, self.folder, self.task, self.packed, self.world = config, folder, task, packed, world
        self.optimizers = optimizers
        self.step = Step(task, optimizers, config, world, graph)
        self.late = int(world.device.startswith("cuda"))  # steps under way while the figures of one are read
        self.clock = time.perf_counter()
        self.peak = matmul_rate(world.device, getattr(torch, config.dtype)) * world.size
        self.restored: int | None = None  # the step that a resumed run went on from
        self.state: dict[str, Any] = {"step": 0, "sequences": 0, "tokens": 0, "flops": 0.0, "seconds": 0.0, "bad": 0}
        self.state |= {"data": packed.documents.fingerprint(), **hashes}

    def run(self, resume: bool) -> int:
        """Make all steps that are left; the exit code: 0 when done or asked to stop (SIGTERM), 130 when interrupted."""
        if resume and checkpoint.steps(self.folder):
            self._restore()
        recorder = recording(self.config, self.folder, self.state["step"], self.world.first)
        with stop_signals() as stopped, recorder as record:
            self._steps(stopped, record)
        if self.world.first:
            step = f"{'stopped at' if stopped else 'at'} step {self.state['step']}"
            print(f"{step}, saved in {self.folder}{'; go on with --resume' if stopped else ''}", file=sys.stderr)
        return 130 if signal.SIGINT in stopped else 0

    def _steps(self, stopped: list[int], record: Callable[[Row], None]) -> None:
        config, state, world = self.config, self.state, self.world
        stream = batches(self.packed, config.batch, state["sequences"], config.workers, world.rank, world.size)
        waiting: deque[_Started] = deque()
        saved = self.restored
        self.clock = time.perf_counter()
        while state["step"] < config.steps and not world.any(bool(stopped)):
            waiting.append(self._start(next(stream)))
            due = state["step"] % config.checkpoint_every == 0
            while len(waiting) > (0 if due else self.late):
                record(self._row(waiting.popleft()))
            if due:
                saved = self._save()
                self.clock = time.perf_counter()
        for started in waiting:
            record(self._row(started))
        if saved != state["step"]:
            self._save()

    def _start(self, rows: Rows) -> _Started:
        """Start a step, at the rate and the capacity that are its own."""
        state, task = self.state, self.task
        capacity = optim.capacity(task.goal, state["step"], task.falling_steps)
        lr = optim.rate(self.config, state["step"])
        self.step.set_capacity(capacity)
        optim.set_rate(self.optimizers, lr)
        figures = self.step(rows)
        tokens = rows.tokens.numel() * self.world.size
        flops = task.flops_per_token(capacity) * tokens
        state["step"] += 1
        state["sequences"] += self.config.batch
        state["tokens"] += tokens
        state["flops"] += flops
        return _Started(figures, state["step"], tokens, flops, state["tokens"], state["flops"], lr, capacity)

    def _row(self, started: _Started) -> Row:
        """The row of metrics of a step; waits for its end."""
        loss, norm, shares = started.figures.read()
        now = time.perf_counter()
        seconds, self.clock = max(now - self.clock, 1e-9), now
        self.state["seconds"] += seconds
        self._count_bad(started.step, loss, norm)
        return {
            "step": started.step,
            "loss": loss if math.isfinite(loss) else None,
            "tokens": started.all_tokens,
            "flops": started.all_flops,
            "seconds": round(self.state["seconds"], 6),
            "lr": started.lr,
            "routed_share": [round(share, 6) for share in shares],
            "capacity": started.capacity,
            "gradient_norm": norm if math.isfinite(norm) else None,
            "tokens_per_second": round(started.tokens / seconds, 1),
            "utilisation": round(started.flops / seconds / self.peak, 4),
            **({"resumed": True} if started.step - 1 == self.restored else {}),
        }

    def _count_bad(self, step: int, loss: float, norm: float) -> None:
        """Stop after too many steps without a finite loss and gradient; each of them changed nothing."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.state["bad"] = 0
            return
        self.state["bad"] += 1
        if self.state["bad"] >= self.config.most_bad_steps:
            bad = self._not_finite()
            where = f"; the first weight that is not finite is {bad}" if bad else "; all weights are finite"
            raise DepthgateError(
                f"step {step}: loss {loss}, gradient norm {norm}, the {self.state['bad']}th bad step in a row"
                f"{where}. The last checkpoint is intact: lower --lr, or look at the data"
            )

    def _not_finite(self) -> str | None:
        """The first weight that is not finite. Every process must ask, and looks at its own rows."""
        local = ((n, w.to_local() if isinstance(w, DTensor) else w) for n, w in self.task.held().items())
        first = next((name for name, weight in local if not weight.isfinite().all()), None)
        return (first or "a weight") if self.world.any(first is not None) else None

    def _save(self) -> int:
        step = int(self.state["step"])
        if bad := self._not_finite():
            raise DepthgateError(
                f"step {step}: {bad} is not finite, and is not saved. The last checkpoint is intact: lower --lr, or "
                "look at the data"
            )
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
        if found.state["data"] != self.state["data"]:
            raise DepthgateError(
                f"the data of {self.folder} has changed since step {found.step}: "
                "give the same text, or start another run"
            )
        with torch.no_grad():
            for name, tensor in found.tensors["model"].items():
                held[name].copy_(like(tensor, held[name]))
        optim.load_state_tensors(self.task.model, self.optimizers, found.tensors["optimizer"])
        torch.set_rng_state(found.tensors["rng"]["cpu"])
        self.state = dict(found.state)
        self.restored = found.step
