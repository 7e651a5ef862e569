"""What `depthgate isoflop` can be told. Imports no torch."""

from dataclasses import dataclass

from depthgate.config import check_vocab
from depthgate.errors import InvalidValueError, check_choice, check_count, check_positive
from depthgate.isoflop.variants import Variant, parsed


@dataclass(frozen=True)
class IsoflopConfig:
    """Train models of several sizes and kinds with the same FLOPs, fit the best of each kind, and compare them.

    Args:
        data: text, as for depthgate train
        out: folder of the study: every cell's run, results.jsonl, results.csv and report.html
        budgets: training FLOPs, separated by commas
        sizes: models of each variant at each budget; a minimum needs three, one is enough to try many variants
        variants: dense, mod, mode, moe or random, separated by commas; each may set options of the model and of its
            training, as in mod:capacity=0.25:pattern=dense+dense+mod:router_lr=3
        seeds: seeds of every cell
        seeds_at_minimum: seeds of the best size of each variant; as many as seeds unless given
        more_sizes: sizes that may be added to a variant's curve at its open side until its minimum has higher losses on
            both sides
        validation: text to measure on; a share of the data is held out unless given
        tokenizer: bytes, bpe (trained on the data), or a folder with a Hugging Face tokenizer
        vocab: size of a bpe tokenizer
        context: tokens of a sequence; 256 unless a budget is 1e14 or more, then 1024
        batch: sequences of a step in every cell; unless given, more of them the larger the budget
        center: times the FLOPs a token that the middle size is expected to be best at
        spread: FLOPs a token of a size over those of the next smaller one
        lr: learning rate of all cells, instead of the rule that gives each width and budget its own
        lr_sweep: first find a learning rate for each variant and width by trying five at the smallest budget
        device: cpu, cuda, or auto
        launcher: local, ray or submitit
        parallel: cells that run at the same time, with launcher local; unless given, one for each processor core,
            or one on a GPU
        cpus: processor cores of a cell, for ray and submitit
        gpus: GPUs of a cell, for ray and submitit; may be a fraction with ray
        minutes: longest time of a cell, for submitit
        measured: held-out tokens that losses are measured on, about
        extend: go on with a study that was made for other budgets, sizes (also center and spread), variants or seeds
        dry_run: print the grid, and train nothing
    """

    data: str = "stdlib"
    out: str = "runs/isoflop"
    budgets: str | float = "1e12,2e12"
    sizes: int = 5
    variants: str = "dense,mod"
    seeds: int = 1
    seeds_at_minimum: int | None = None
    more_sizes: int = 0
    validation: str | None = None
    tokenizer: str = "bytes"
    vocab: int | None = None
    context: int | None = None
    batch: int | None = None
    center: float = 1.0
    spread: float = 2.0
    lr: float | None = None
    lr_sweep: bool = False
    device: str = "auto"
    launcher: str = "local"
    parallel: int | None = None
    cpus: int = 1
    gpus: float = 0.0
    minutes: int = 240
    measured: int = 2**17
    extend: bool = False
    dry_run: bool = False

    def __post_init__(self) -> None:
        assert self.budget_list
        assert self.variant_list
        check_count(self.sizes, "sizes", maximum=99)
        for name, most in (("seeds", 99), ("cpus", 1024), ("minutes", 10**6), ("measured", 2**40)):
            check_count(getattr(self, name), name, maximum=most)
        if self.parallel is not None:
            check_count(self.parallel, "parallel", maximum=256)
        check_count(self.more_sizes, "more_sizes", minimum=0, maximum=99)
        if self.seeds_at_minimum is not None:
            check_count(self.seeds_at_minimum, "seeds_at_minimum", minimum=self.seeds, maximum=99)
        if self.context is not None:
            check_count(self.context, "context", minimum=8, maximum=2**20)
        if self.batch is not None:
            check_count(self.batch, "batch", maximum=2**16)
        for name, low, high in (("center", 1e-3, 1e3), ("spread", 1.2, 100.0)):
            if not low <= check_positive(getattr(self, name), name) <= high:
                raise InvalidValueError(f"{name} is {getattr(self, name)}: it must be from {low:g} to {high:g}")
        if self.lr is not None:
            check_positive(self.lr, "lr")
            if self.lr_sweep:
                raise InvalidValueError(f"lr is {self.lr} and lr_sweep is true: give one of them")
        if not 0 <= self.gpus <= 1024 or (self.launcher == "submitit" and self.gpus % 1):
            whole = "a whole number, " if self.launcher == "submitit" else ""
            raise InvalidValueError(f"gpus is {self.gpus}: it must be {whole}from 0 to 1024")
        check_choice(self.device, "device", ("auto", "cpu", "cuda"))
        check_choice(self.launcher, "launcher", ("local", "ray", "submitit"))
        if self.launcher != "local" and self.device == "cuda" and not self.gpus:
            raise InvalidValueError(f"device is cuda and gpus is 0: give --gpus 1 with --launcher {self.launcher}")
        check_vocab(self.tokenizer, self.vocab)

    @property
    def budget_list(self) -> list[float]:
        """`budgets` as numbers, ascending."""
        try:
            found = [float(part) for part in str(self.budgets).split(",")]
        except ValueError:
            raise InvalidValueError(f"budgets is {self.budgets!r}: give FLOPs, as 3e15,1e16") from None
        for budget in found:
            check_positive(budget, "budgets")
        if len(set(found)) < len(found):
            raise InvalidValueError(f"budgets is {self.budgets!r}: one stands twice")
        return sorted(found)

    @property
    def variant_list(self) -> list[Variant]:
        """`variants`, each with what it sets."""
        found = [parsed(part.strip()) for part in str(self.variants).split(",")]
        if len({variant.name for variant in found}) < len(found):
            raise InvalidValueError(f"variants is {self.variants!r}: one stands twice")
        return found

    @property
    def tokens_in_sequence(self) -> int:
        """`context`, or what fits the budgets."""
        return self.context or (1024 if max(self.budget_list) >= 1e14 else 256)
