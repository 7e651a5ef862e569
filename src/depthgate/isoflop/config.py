"""What `depthgate isoflop` can be told. Imports no torch."""

from dataclasses import dataclass

from depthgate.config import check_vocab
from depthgate.errors import InvalidValueError, check_count, check_positive
from depthgate.isoflop.variants import Variant, parsed
from depthgate.options import DEVICES, Options, choice, count, number, positive, switch


@dataclass(frozen=True)
class IsoflopConfig(Options):
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
    sizes: int = count(5, maximum=99)
    variants: str = "dense,mod"
    seeds: int = count(1, maximum=99)
    seeds_at_minimum: int | None = count(None, maximum=99)
    more_sizes: int = count(0, minimum=0, maximum=99)
    validation: str | None = None
    tokenizer: str = "bytes"
    vocab: int | None = None
    context: int | None = count(None, minimum=8, maximum=2**20)
    batch: int | None = count(None, maximum=2**16)
    center: float = number(1.0, 1e-3, 1e3)
    spread: float = number(2.0, 1.2, 100.0)
    lr: float | None = positive(None)
    lr_sweep: bool = False
    device: str = choice("auto", DEVICES)
    launcher: str = choice("local", ("local", "ray", "submitit"))
    parallel: int | None = count(None, maximum=256)
    cpus: int = count(1, maximum=1024)
    gpus: float = number(0.0, 0, 1024)
    minutes: int = count(240, maximum=10**6)
    measured: int = count(2**17, maximum=2**40)
    extend: bool = False
    dry_run: bool = switch()

    def check_together(self) -> None:
        assert self.budget_list
        assert self.variant_list
        if self.seeds_at_minimum is not None:
            check_count(self.seeds_at_minimum, "seeds_at_minimum", minimum=self.seeds, maximum=99)
        if self.lr is not None and self.lr_sweep:
            raise InvalidValueError(f"lr is {self.lr} and lr_sweep is true: give one of them")
        if self.launcher == "submitit" and self.gpus % 1:
            raise InvalidValueError(f"gpus is {self.gpus}: it must be a whole number with --launcher submitit")
        if self.launcher != "local" and self.device == "cuda" and not self.gpus:
            raise InvalidValueError(f"device is cuda and gpus is 0: give --gpus 1 with --launcher {self.launcher}")
        check_vocab(self.tokenizer, self.vocab)

    @property
    def budget_list(self) -> list[float]:
        """`budgets` as numbers, ascending."""
        try:
            found = [float(part) for part in str(self.budgets).split(",")]
        except ValueError:
            raise InvalidValueError(f"budgets is {self.budgets!r}: give FLOPs, such as 3e15,1e16") from None
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
