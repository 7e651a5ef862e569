"""`depthgate train`: from text to a checkpoint that survives. Interrupt it at any moment and go on with --resume."""

import math
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from depthgate.checkpoint import store as checkpoint
from depthgate.config import ModelConfig, TrainConfig
from depthgate.data import sources as text
from depthgate.data.batches import Packed, batches
from depthgate.data.token_file import cache_folder, prepare, tokenize
from depthgate.data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    HFTokenizer,
    TextTokenizer,
    folder_hash,
    load_tokenizer,
)
from depthgate.device import World, matmul_rate, resolve_device
from depthgate.errors import DepthgateError, DepthgateWarning, InvalidValueError
from depthgate.flops import training_flops
from depthgate.presets import preset
from depthgate.train import optim
from depthgate.train import run_folder as run
from depthgate.train.parallel import build_decoder, joined, like, shard
from depthgate.train.progress import progress_line, tracker
from depthgate.train.signals import stop_signals
from depthgate.train.step import Figures, Step


def train(config: TrainConfig, resume: bool) -> int:
    """Train, or go on; the exit code: 0 when done or asked to stop (SIGTERM), 130 when interrupted."""
    with (
        joined(resolve_device(config.device)) as world,
        _prepared(world, config, resume) as (folder, tokenizer),
    ):
        config = _with_vocab(config, tokenizer)
        shards = prepare(config.data, tokenizer, cache_folder(), config.validation)
        packed = Packed(shards.train, config.model.context, config.seed, config.max_documents)
        return _Training(config, folder, world, packed).run(resume)


@contextmanager
def _prepared(world: World, config: TrainConfig, resume: bool) -> Iterator[tuple[Path, TextTokenizer]]:
    """The run's folder and tokenizer. The first process opens and prepares; the others find it done."""
    if not world.first:
        world.wait()
        yield Path(config.out), load_tokenizer(Path(config.out) / checkpoint.TOKENIZER)
        return
    with run.opened(config, resume) as folder:
        tokenizer = _tokenizer(config, folder)
        tokenize(config.data, tokenizer, cache_folder())
        world.wait()
        yield folder, tokenizer


def _tokenizer(config: TrainConfig, folder: Path) -> TextTokenizer:
    """The run's own tokenizer, made on its first start."""
    saved = folder / checkpoint.TOKENIZER
    if (saved / "tokenizer.json").exists():  # written last: a kill may leave the folder without it
        return load_tokenizer(saved)
    tokenizer: TextTokenizer
    if config.tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    elif config.tokenizer == "bpe":
        assert config.vocab is not None
        tokenizer = BPETokenizer.train(text.documents(config.data), config.vocab)
    else:
        tokenizer = HFTokenizer.from_folder(config.tokenizer)
    tokenizer.save(saved)
    return tokenizer


def _with_vocab(config: TrainConfig, tokenizer: TextTokenizer) -> TrainConfig:
    """The model's vocabulary is the tokenizer's, unless the configuration says another, which is an error."""
    if config.model.vocab not in (ModelConfig.vocab, preset(config.preset).get("model.vocab"), tokenizer.vocab):
        raise InvalidValueError(
            f"model.vocab is {config.model.vocab}, but the tokenizer has {tokenizer.vocab} tokens: leave it out"
        )
    return replace(config, model=replace(config.model, vocab=tokenizer.vocab))


def _documents(packed: Packed) -> int:
    """The most documents a sequence will hold; a warning where it would have to hold more."""
    most = packed.most_documents
    if packed.max_documents is None or most <= packed.max_documents:
        return most
    left_out = f"the tokens of those after the first {packed.max_documents} (max_documents) are left out"
    warnings.warn(f"a sequence has up to {most} documents: {left_out}", DepthgateWarning, stacklevel=2)
    return packed.max_documents


class _Training:
    """A run in progress: everything a checkpoint holds."""

    def __init__(self, config: TrainConfig, folder: Path, world: World, packed: Packed) -> None:
        self.config, self.folder, self.world, self.packed = config, folder, world, packed
        if world.size > 1 and config.optimizer == "muon":
            raise InvalidValueError("optimizer is 'muon': it needs whole matrices, in one process; use adamw")
        torch.manual_seed(config.seed)
        self.model = build_decoder(config.model, config.compile, world)
        shard(self.model, world)
        self.optimizers = optim.build(self.model, config, world)
        self.step = Step(self.model, self.optimizers, replace(config, max_documents=_documents(packed)), world)
        self.restored: int | None = None  # the step that a resume went on from
        self.lag = int(world.device.startswith("cuda"))  # steps under way while the figures of one are read
        self.clock = time.perf_counter()
        dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.peak = matmul_rate(world.device, dtype) * world.size
        self.state: dict[str, Any] = {"step": 0, "sequences": 0, "tokens": 0, "flops": 0.0, "seconds": 0.0, "bad": 0}
        self.state |= {"data": packed.documents.fingerprint(), "tokenizer": folder_hash(folder / checkpoint.TOKENIZER)}

    def run(self, resume: bool) -> int:
        if resume and checkpoint.steps(self.folder):
            self._restore()
        saved = self.state["step"] if resume else -1
        with stop_signals() as stopped, self._record() as record:
            stream = batches(
                self.packed,
                self.config.batch,
                self.state["sequences"],
                self.config.workers,
                self.world.rank,
                self.world.size,
            )
            self.clock = time.perf_counter()
            under_way: deque[Callable[[], dict[str, Any]]] = deque()

            def finish(left: int) -> None:
                while len(under_way) > left:
                    record(under_way.popleft()())

            while self.state["step"] < self.config.steps and not self.world.any(bool(stopped)):
                under_way.append(self._step(next(stream).rows))
                finish(self.lag)
                if self.state["step"] % self.config.checkpoint_every == 0:
                    finish(0)
                    saved = self._save()
                    self.clock = time.perf_counter()
            finish(0)
            if saved != self.state["step"]:
                self._save()
        if self.world.first:
            step = self.state["step"]
            left = "; go on with --resume" if stopped else ""
            print(f"{'stopped at' if stopped else 'at'} step {step}, saved in {self.folder}{left}", file=sys.stderr)
        return 130 if signal.SIGINT in stopped else 0

    @contextmanager
    def _record(self) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Where rows of metrics go: into the run's folder and onto the screen, from the first process alone."""
        if not self.world.first:
            yield lambda row: None  # noqa: ARG005
            return
        metrics = run.Metrics(self.folder, self.state["step"])
        with (
            closing(metrics),
            tracker(self.config.tracker, self.folder, run.plain(self.config)) as track,
            progress_line(self.config.steps, self.state["step"]) as show,
        ):

            def record(row: dict[str, Any]) -> None:
                metrics.add(row)
                track(row)
                show(row)

            yield record

    def _step(self, rows: Any) -> Callable[[], dict[str, Any]]:
        """Start a step; what is returned waits for its end and gives its row of metrics."""
        config, number, state = self.config, self.state["step"], self.state
        capacity, lr = optim.capacity(config, number), optim.rate(config, number)
        self.step.set_capacity(capacity)
        optim.set_rate(self.optimizers, lr)
        figures = self.step(rows)
        tokens = rows.tokens.numel() * self.world.size
        cost = training_flops(replace(config.model, capacity=capacity)) * tokens
        state["step"] += 1
        state["sequences"] += config.batch
        state["tokens"] += tokens
        state["flops"] += cost
        row = {
            "step": state["step"],
            "tokens": state["tokens"],
            "flops": state["flops"],
            "lr": lr,
            "capacity": capacity,
        }
        return partial(self._finish, figures, row, tokens, cost)

    def _finish(self, figures: Figures, row: dict[str, Any], tokens: int, cost: float) -> dict[str, Any]:
        loss, norm, shares = figures.read()
        now = time.perf_counter()
        seconds, self.clock = max(now - self.clock, 1e-9), now
        self.state["seconds"] += seconds
        self._count_bad(row["step"], loss, norm)
        return {
            "step": row["step"],
            "loss": loss if math.isfinite(loss) else None,
            "tokens": row["tokens"],
            "flops": row["flops"],
            "seconds": round(self.state["seconds"], 6),
            "lr": row["lr"],
            "routed_share": [round(share, 6) for share in shares],
            "capacity": row["capacity"],
            "gradient_norm": norm if math.isfinite(norm) else None,
            "tokens_per_second": round(tokens / seconds, 1),
            "utilisation": round(cost / seconds / self.peak, 4),
            **({"resumed": True} if row["step"] - 1 == self.restored else {}),
        }

    def _count_bad(self, number: int, loss: float, norm: float) -> None:
        """Stop after too many steps without a finite loss and gradient; each of them changed nothing."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.state["bad"] = 0
            return
        self.state["bad"] += 1
        if self.state["bad"] >= self.config.most_bad_steps:
            bad = self._not_finite()
            where = f"; the first weight that is not finite is {bad}" if bad else "; all weights are finite"
            raise DepthgateError(
                f"step {number}: loss {loss}, gradient norm {norm}, the {self.state['bad']}th bad step in a row"
                f"{where}. The last checkpoint is intact: lower --lr, or look at the data"
            )

    def _not_finite(self) -> str | None:
        """The first weight that is not finite; every process must ask, and looks at its own rows."""
        weights = self.model.named_parameters()
        bad = [name for name, w in weights if not (w.to_local() if isinstance(w, DTensor) else w).isfinite().all()]
        return (bad or ["a weight"])[0] if self.world.any(bool(bad)) else None

    def _save(self) -> int:
        tensors = {
            "model": self.model.state_dict(),
            "optimizer": optim.state_tensors(self.model, self.optimizers),
            "rng": {"cpu": torch.get_rng_state()},
        }
        if bad := self._not_finite():
            said = f"step {self.state['step']}: {bad} is not finite, and is not saved"
            raise DepthgateError(f"{said}. The last checkpoint is intact: lower --lr, or look at the data")
        what = (self.folder, self.state["step"], tensors, self.state, run.plain(self.config), self.config.keep)
        if self.world.size == 1:
            checkpoint.save(*what)
        else:
            from depthgate.checkpoint import distributed as sharded

            sharded.save(*what, self.world)
        return int(self.state["step"])

    def _restore(self) -> None:
        held = self.model.state_dict()
        if self.world.size == 1:
            found = checkpoint.load(self.folder)
        else:
            from depthgate.checkpoint import distributed as sharded

            found = sharded.load(self.folder, self.world, held)
        self.world.agree(lambda: run.check_found(found, self.config, self.state, self.model))
        if found.state["data"] != self.state["data"]:
            raise DepthgateError(
                f"the data of {self.folder} has changed since step {found.step}: "
                "give the same text, or start another run"
            )
        self.model.load_state_dict({n: like(t, held[n]) if n in held else t for n, t in found.tensors["model"].items()})
        optim.load_state_tensors(self.model, self.optimizers, found.tensors["optimizer"])
        torch.set_rng_state(found.tensors["rng"]["cpu"])
        self.state = dict(found.state)
        self.restored = found.step
