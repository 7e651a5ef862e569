"""Four encoders with a linear head on handwritten digits, trained alike."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from depthgate.config import DemoConfig
from depthgate.encoders import MoDEncoder, SoftMoEEncoder
from depthgate.errors import DepthgateError

ROWS = 8  # a digit is 8 rows of 8 pixels
_CLASSES = 10
_HEADS = 4
EXPERTS = 4
_TEST_SHARE = 0.2
BATCH = 64
LEARNING_RATE = 3e-3
WARMUP_SHARE = 0.05
WEIGHT_DECAY = 0.05
_DENSE = "dense twin"
PICTURED = "MoD 0.25"


@dataclass
class Digits:
    """Images (N, 8, 8) in [0, 1], each a sequence of 8 rows, and their labels (N,)."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


class Classifier(nn.Module):
    """An encoder and a linear head."""

    def __init__(self, encoder: MoDEncoder | SoftMoEEncoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.output_size, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))  # type: ignore[no-any-return]


@dataclass
class Run:
    """A model and what training it gave, one entry an epoch."""

    name: str
    model: Classifier
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: float = 0.0


def load_split(seed: int) -> Digits:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DepthgateError(
            'the demo reads its digits from scikit-learn, which is missing: pip install "depthgate[demo]"'
        ) from error
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, ROWS, ROWS) / 16
    y = torch.tensor(labels, dtype=torch.long)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order.tensor_split([round(_TEST_SHARE * len(x))])
    return Digits(x[train], y[train], x[test], y[test])


def build_models(config: DemoConfig) -> dict[str, Classifier]:
    """Every model of the demo; those of one architecture start from the same weights."""

    def mod(capacity: float) -> MoDEncoder:
        return MoDEncoder(ROWS, config.hidden_size, _HEADS, capacity, config.num_layers, config.dropout, ROWS)

    def soft() -> SoftMoEEncoder:
        return SoftMoEEncoder(ROWS, config.hidden_size, EXPERTS, config.num_layers, config.dropout, ROWS)

    builders: dict[str, Callable[[], MoDEncoder | SoftMoEEncoder]] = {
        _DENSE: lambda: mod(1.0),
        "MoD 0.5": lambda: mod(0.5),
        PICTURED: lambda: mod(0.25),
        "Soft MoE": soft,
    }
    models = {}
    for name, build in builders.items():
        torch.manual_seed(config.seed)
        models[name] = Classifier(build())
    return models


def train_all(runs: list[Run], digits: Digits, config: DemoConfig) -> None:
    steps = config.epochs * math.ceil(len(digits.train_x) / BATCH)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    )
    # On stderr, so that stdout holds results alone.
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task("", total=len(runs) * steps, loss=math.nan)
        for run in runs:
            progress.update(task, description=run.name)
            for loss in _training(run, digits, config, steps):
                progress.update(task, advance=1, loss=loss)


def _training(run: Run, digits: Digits, config: DemoConfig, steps: int) -> Iterator[float]:
    """Train one model, yielding each step's loss. Batches depend on the seed alone, so every model gets the same."""
    torch.manual_seed(config.seed)  # dropout
    batches = torch.Generator().manual_seed(config.seed)
    model = run.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    warmup = max(1, round(WARMUP_SHARE * steps))

    def rate(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for _ in range(config.epochs):
        model.train()
        total = 0.0
        order = torch.randperm(len(digits.train_x), generator=batches)
        for batch in torch.split(order, BATCH):
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(digits.train_x[batch]), digits.train_y[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            value = loss.item()
            run.seconds += time.perf_counter() - start
            total += value * len(batch)
            yield value
        model.eval()
        with torch.no_grad():
            right = model(digits.test_x).argmax(-1) == digits.test_y
        run.losses.append(total / len(digits.train_x))
        run.accuracies.append(right.float().mean().item())
