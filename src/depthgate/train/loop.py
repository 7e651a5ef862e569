"""`depthgate train`: from text to a checkpoint that survives. Interrupt it at any moment and go on with --resume."""

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from depthgate.config import ModelConfig, TrainConfig
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.flops import training_flops
from depthgate.model import Decoder
from depthgate.routing import TopTokens
from depthgate.train import checkpoint, optim, run, text
from depthgate.train.batches import Packed, batches
from depthgate.train.parallel import World, joined, like, whole
from depthgate.train.shards import prepare, tokenize
from depthgate.train.step import Result, set_capacity, step
from depthgate.train.tokenizer import BPETokenizer, ByteTokenizer, HFTokenizer, TextTokenizer, load_tokenizer

CACHE = "~/.cache/depthgate"


def train(config: TrainConfig, resume: bool) -> int:
    """Train, or go on; the exit code: 0 when done or asked to stop (SIGTERM), 130 when interrupted."""
    with (
        joined(resolve_device(config.device)) as world,
        _prepared(world, config, resume) as (folder, tokenizer),
    ):
        config = _with_vocab(config, tokenizer)
        shards = prepare(config.data, tokenizer, Path(CACHE).expanduser(), config.validation, seed=config.seed)
        packed = Packed(shards.train, config.model.context, config.seed, config.max_documents)
        return _Training(config, folder, world, packed).run(resume)


@contextmanager
def _prepared(world: World, config: TrainConfig, resume: bool) -> Iterator[tuple[Path, TextTokenizer]]:
    """The run's folder and tokenizer. The first process opens and prepares; the others find it done."""
    if not world.first:
        world.wait()
        yield Path(config.out), load_tokenizer(Path(config.out) / run.TOKENIZER)
        return
    with run.opened(config, resume) as folder:
        tokenizer = _tokenizer(config, folder)
        tokenize(config.data, tokenizer, Path(CACHE).expanduser())
        world.wait()
        yield folder, tokenizer


def resolve_device(device: str) -> str:
    """cpu or cuda; an error where cuda is asked for and absent."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise InvalidValueError("device is 'cuda', but no CUDA device is available: use --device cpu")
    return ("cuda" if available else "cpu") if device == "auto" else device


def _tokenizer(config: TrainConfig, folder: Path) -> TextTokenizer:
    """The run's own tokenizer, made on its first start."""
    saved = folder / run.TOKENIZER
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
    if config.model.vocab not in (ModelConfig.vocab, tokenizer.vocab):
        raise InvalidValueError(
            f"model.vocab is {config.model.vocab}, but the tokenizer has {tokenizer.vocab} tokens: leave it out"
        )
    return replace(config, model=replace(config.model, vocab=tokenizer.vocab))


class _Training:
    """A run in progress: everything a checkpoint holds."""

    def __init__(self, config: TrainConfig, folder: Path, world: World, packed: Packed) -> None:
        self.config, self.folder, self.world, self.packed = config, folder, world, packed
        if world.size > 1 and config.optimizer == "muon":
            raise InvalidValueError("optimizer is 'muon': it needs whole matrices, in one process; use adamw")
        torch.manual_seed(config.seed)
        self.model = Decoder(config.model).to(world.device)
        for module in self.model.modules():
            if isinstance(module, TopTokens):
                module.max_documents = config.max_documents
        if config.compile:
            for layer in self.model.layers:
                layer.compile()
        world.shard(self.model)
        self.optimizers = optim.build(self.model, config)
        self.state: dict[str, Any] = {"step": 0, "sequences": 0, "tokens": 0, "flops": 0.0, "seconds": 0.0, "bad": 0}
        self.state["data"] = packed.documents.fingerprint()

    def run(self, resume: bool) -> int:
        if resume and checkpoint.steps(self.folder):
            self._restore()
        saved = self.state["step"] if resume else -1
        with _stop_signals() as stopped, self._record() as record:
            stream = batches(
                self.packed,
                self.config.batch,
                self.state["sequences"],
                self.config.workers,
                self.world.rank,
                self.world.size,
            )
            while self.state["step"] < self.config.steps and not self.world.any(bool(stopped)):
                record(self._step(next(stream).rows))
                if self.state["step"] % self.config.checkpoint_every == 0:
                    saved = self._save()
        if saved != self.state["step"]:
            self._save()
        if stopped and self.world.first:
            print(f"stopped at step {self.state['step']}; go on with --resume", file=sys.stderr)
        return 130 if signal.SIGINT in stopped else 0

    @contextmanager
    def _record(self) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Where rows of metrics go: into the run's folder and onto the screen, from the first process alone."""
        if not self.world.first:
            yield lambda row: None  # noqa: ARG005
            return
        metrics = run.Metrics(self.folder, self.state["step"])
        with closing(metrics), _progress(self.config.steps, self.state["step"]) as show:

            def record(row: dict[str, Any]) -> None:
                metrics.add(row)
                show(row)

            yield record

    def _step(self, rows: Any) -> dict[str, Any]:
        config, number = self.config, self.state["step"]
        start = time.perf_counter()
        capacity, lr = optim.capacity(config, number), optim.rate(config, number)
        set_capacity(self.model, capacity)
        optim.set_rate(self.optimizers, lr)
        result = step(self.model, self.optimizers, rows, config, self.world)
        loss, norm = result.loss.item(), result.norm.item()
        self._count_bad(number, loss, norm)
        tokens = rows.tokens.numel() * self.world.size
        seconds = time.perf_counter() - start
        cost = training_flops(replace(config.model, capacity=capacity))
        state = self.state
        state["step"] += 1
        state["sequences"] += config.batch
        state["tokens"] += tokens
        state["flops"] += cost * tokens
        state["seconds"] += seconds
        return self._row(result, loss, norm, lr, capacity, tokens / seconds)

    def _row(
        self, result: Result, loss: float, norm: float, lr: float, capacity: float, speed: float
    ) -> dict[str, Any]:
        shares = [round(share.item(), 6) for share in result.shares]
        return {
            "step": self.state["step"],
            "loss": loss if math.isfinite(loss) else None,
            "tokens": self.state["tokens"],
            "flops": self.state["flops"],
            "seconds": round(self.state["seconds"], 6),
            "lr": lr,
            "routed_share": shares,
            "capacity": capacity,
            "gradient_norm": norm if math.isfinite(norm) else None,
            "tokens_per_second": round(speed, 1),
        }

    def _count_bad(self, number: int, loss: float, norm: float) -> None:
        """Stop after too many steps without a finite loss and gradient; each of them changed nothing."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.state["bad"] = 0
            return
        self.state["bad"] += 1
        if self.state["bad"] >= self.config.most_bad_steps:
            weights = whole(dict(self.model.named_parameters()))
            bad = [name for name, weight in weights.items() if not weight.isfinite().all()]
            where = f"; the first weight that is not finite is {bad[0]}" if bad else "; all weights are finite"
            raise DepthgateError(
                f"step {number + 1}: loss {loss}, gradient norm {norm}, the {self.state['bad']}th bad step in a row"
                f"{where}. The last checkpoint is intact: lower --lr, or look at the data"
            )

    def _save(self) -> int:
        tensors = {
            "model": whole(self.model.state_dict()),
            "optimizer": whole(optim.state_tensors(self.model, self.optimizers)),
            "rng": {"cpu": torch.get_rng_state()},
        }
        if self.world.first:
            config = run.plain(self.config)
            checkpoint.save(self.folder, self.state["step"], tensors, self.state, config, self.config.keep)
        self.world.wait()
        return int(self.state["step"])

    def _restore(self) -> None:
        found = checkpoint.load(self.folder)
        if found.state.get("data") != self.state["data"]:
            raise DepthgateError(
                f"the data of {self.folder} has changed since step {found.step}: "
                "give the same text, or start another run"
            )
        held = self.model.state_dict()
        self.model.load_state_dict({n: like(t, held[n]) if n in held else t for n, t in found.tensors["model"].items()})
        optim.load_state_tensors(self.model, self.optimizers, found.tensors["optimizer"])
        torch.set_rng_state(found.tensors["rng"]["cpu"])
        self.state = dict(found.state)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Signals that ask the run to stop after the step it is in; asked twice, it stops at once."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(steps: int, done: int) -> Iterator[Any]:
    """A line on stderr that follows the steps."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}, {task.fields[speed]} tokens/s, routed {task.fields[shares]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task("", total=steps, completed=done, loss="-", speed="-", shares="-")

        def show(row: dict[str, Any]) -> None:
            loss = "not finite" if row["loss"] is None else f"{row['loss']:.3f}"
            shares = " ".join(f"{share:.2f}" for share in row["routed_share"]) or "all"
            progress.update(
                task, completed=row["step"], loss=loss, speed=f"{row['tokens_per_second']:,.0f}", shares=shares
            )

        yield show
