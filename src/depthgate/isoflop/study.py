"""`depthgate isoflop`: plan the grid, run the cells that are missing, fit, report."""

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from depthgate.data import sources as text
from depthgate.data.batches import Packed
from depthgate.data.token_file import cache_folder, prepare
from depthgate.data.tokenizer import BPETokenizer, ByteTokenizer, TextTokenizer, load_tokenizer
from depthgate.device import resolve_device
from depthgate.errors import DepthgateError
from depthgate.files import write_json
from depthgate.isoflop import fit, rates
from depthgate.isoflop.cell import beside, finished, is_of
from depthgate.isoflop.config import IsoflopConfig
from depthgate.isoflop.estimate import Speed
from depthgate.isoflop.folder import Folder
from depthgate.isoflop.grid import CELLS, Cell, Grid, check_fits
from depthgate.isoflop.launch import launch, parallel
from depthgate.isoflop.more import more_cells
from depthgate.isoflop.progress import Progress, short
from depthgate.isoflop.rates import Rates
from depthgate.isoflop.report import print_grid, write

RATES, TOKENIZER, SWEEP = "rates.json", "tokenizer", "sweep"
_ATTEMPTS = 2


def run(config: IsoflopConfig, as_json: bool) -> int:
    """The whole study, or what is left of it; the exit code."""
    study = Study(config)
    if config.dry_run:
        print_grid(study.cells, Speed(study.rows, study.device), as_json, config)
        return 0
    with _terminated_as_interrupted(), study.folder.opened():
        study.run()
        if study.rows:
            write(Path(config.out), study.rows, study.curves, study.folder.commands, as_json)
    if study.failed:
        names = "\n  ".join(f"{cell.name}: {short(error)}" for cell, error in study.failed.items())
        raise DepthgateError(
            f"{len(study.failed)} of {len(study.cells)} cells failed; the same command tries them again "
            f"({study.out / CELLS}/*.error.txt say more):\n  {names}"
        )
    return 0


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Have SIGTERM end a study as Ctrl-C does, so that whatever it started is ended too."""
    before = None
    with suppress(ValueError):  # only the main thread may
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


class Study:
    """A study in its folder. Making one checks all there is to check, and writes nothing."""

    def __init__(self, config: IsoflopConfig) -> None:
        self.config, self.out = config, Path(config.out)
        self.device = _device(config)
        self.folder = Folder(config)
        tokenizer, vocab = self._tokenizer()
        self.grid = Grid(config, tokenizer, vocab, self.device, self._rates())
        self.cells = self.grid.cells()
        self._check_fits([cell for cell in self.cells if self._found(cell) is None])
        self.failed: dict[Cell, Exception] = {}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Of all finished cells, whichever command asked for them."""
        return self.folder.rows

    def _found(self, cell: Cell) -> dict[str, Any] | None:
        """The row of a finished cell; where its folder was taken away, what results.jsonl has kept of it."""
        if cell.folder.exists() or beside(cell, "error").exists() or cell.part != CELLS:
            return finished(cell)
        return next((row for row in self.rows if is_of(row, cell)), None)

    def _check_fits(self, cells: Sequence[Cell]) -> None:
        if cells and self.config.launcher == "local":  # of other machines, nothing is known here
            check_fits(cells, self.device, parallel(self.config, self.device))

    def _tokenizer(self) -> tuple[str, int]:
        """Its name for a cell's training, and its size: what was asked for, where it has yet to be trained."""
        name = self.config.tokenizer
        if name == "bytes":
            return name, ByteTokenizer().vocab
        if name != "bpe":
            return str(Path(name).absolute()), TextTokenizer.from_folder(name).vocab
        folder = self.out.absolute() / TOKENIZER
        if (folder / "tokenizer.json").exists():
            return str(folder), load_tokenizer(folder).vocab
        assert self.config.vocab is not None
        return str(folder), self.config.vocab

    def _rates(self) -> Rates:
        path = self.out / RATES
        if not (self.config.lr_sweep and path.exists()):
            return Rates({})
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return Rates({name: (float(scale), float(power)) for name, (scale, power) in found.items()})
        except (ValueError, TypeError, AttributeError):
            raise DepthgateError(f"{path} is damaged: delete it to have the rates found again") from None

    def run(self) -> None:
        """Everything that is missing."""
        self._prepare()
        if self.config.lr_sweep:
            self._sweep()
        self._run(self.cells)
        while more := more_cells(self.grid, self.cells, self.rows, self._check_fits):
            self.cells += more
            self._run(more)

    def _prepare(self) -> None:
        """Tokenize once, before several processes would."""
        config = self.config
        tokenizer: TextTokenizer
        if config.tokenizer == "bpe":
            folder = self.out.absolute() / TOKENIZER
            if not (folder / "tokenizer.json").exists():
                assert config.vocab is not None
                BPETokenizer.train(text.documents(config.data), config.vocab).save(folder)
                self.grid = Grid(config, *self._tokenizer(), self.device, self.grid.rates)
                self.cells = self.grid.cells()
            tokenizer = load_tokenizer(folder)
        else:
            tokenizer = ByteTokenizer() if config.tokenizer == "bytes" else TextTokenizer.from_folder(config.tokenizer)
        shards = prepare(config.data, tokenizer, cache_folder(), config.validation)
        Packed(shards.train, config.tokens_in_sequence)  # an error where the text is too short

    def _sweep(self) -> None:
        """Learning rates for the smallest budget's smallest and largest size of each variant, fitted for all widths."""
        budget, found = self.config.budget_list[0], dict(self.grid.rates.fitted)
        for name in self.grid.ladders.keys() - found.keys():
            shapes = [c.training.model for c in self.cells if (c.budget, c.variant, c.seed) == (budget, name, 0)]
            best = []
            for shape in (shapes[0], shapes[-1]):
                usual, losses = self.grid.rates.of(name, shape.dim, budget), dict[float, float]()
                tried = [usual * times for times in rates.TRIED]
                while tried:
                    lrs = [float(f"{lr:.3g}") for lr in tried]
                    cells = [self.grid.cell(budget, name, shape, 0, lr, SWEEP) for lr in lrs]
                    losses |= {row["lr"]: row["loss_causal"] for row in self._run(cells)}
                    tried = rates.further(losses, lrs)
                if not losses:
                    raise DepthgateError(f"no learning rate of {name} came to an end: see {self.out / SWEEP}")
                best.append((shape.dim, rates.best_rate(losses)))
            found[name] = rates.fit(best, budget)
        self.failed.clear()  # a rate that fails is a bad rate, and that is all there is to it
        write_json(self.out / RATES, found)
        self.grid.rates = self._rates()
        self.cells = self.grid.cells()

    def _run(self, cells: Sequence[Cell]) -> list[dict[str, Any]]:
        """Run those of the cells that are not finished; those that fail once more. All rows there are."""
        rows = {cell.name: row for cell in cells if (row := self._found(cell))}
        for _ in range(_ATTEMPTS):
            missing = [cell for cell in cells if cell.name not in rows]
            if not missing:
                break
            progress = Progress(missing, len(cells), Speed(list(rows.values()), self.device))
            at_once = parallel(self.config, self.device)
            with closing(launch(missing, self.config, at_once, progress.begins)) as outcomes:  # type: ignore[type-var]
                for cell, outcome in outcomes:
                    progress.ends(cell, outcome)
                    if isinstance(outcome, Exception):
                        self.failed[cell] = outcome
                        continue
                    self.failed.pop(cell, None)
                    rows[cell.name] = outcome
                    if cell.part == CELLS:
                        self.folder.save([outcome])
        if cells and cells[0].part == CELLS:
            self.folder.save(list(rows.values()))
        return list(rows.values())

    @property
    def curves(self) -> list[fit.Curve]:
        """By budget, dense first."""
        found = []
        for budget in sorted({row["budget"] for row in self.rows}):
            for name in sorted({row["variant"] for row in self.rows}, key=lambda name: (name[:5] != "dense", name)):
                if rows := [r for r in self.rows if (r["budget"], r["variant"]) == (budget, name)]:
                    found.append(fit.curve(rows))
        return found


def _device(config: IsoflopConfig) -> str:
    """What cells run on. With other launchers than local that is not this machine's to say."""
    if config.launcher == "local":
        return resolve_device(config.device)
    return ("cuda" if config.gpus else "cpu") if config.device == "auto" else config.device
