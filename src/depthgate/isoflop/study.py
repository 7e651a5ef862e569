"""`depthgate isoflop`: plan the grid, run the cells that are missing, fit, report."""

import hashlib
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from depthgate.errors import DepthgateError
from depthgate.isoflop import fit, rates
from depthgate.isoflop.cell import finished
from depthgate.isoflop.config import IsoflopConfig
from depthgate.isoflop.estimate import Speed
from depthgate.isoflop.grid import CELLS, Cell, Grid, check_fits
from depthgate.isoflop.launch import launch, parallel
from depthgate.isoflop.more import more_cells
from depthgate.isoflop.progress import Progress, short
from depthgate.isoflop.rates import Rates
from depthgate.isoflop.report import print_grid, write
from depthgate.train import checkpoint, text
from depthgate.train.batches import Packed
from depthgate.train.loop import resolve_device
from depthgate.train.run import cache, check_same, write_json
from depthgate.train.shards import prepare
from depthgate.train.tokenizer import BPETokenizer, ByteTokenizer, HFTokenizer, TextTokenizer, load_tokenizer
from depthgate.view.output import replace

GRID, RATES, RESULTS, TOKENIZER = "grid.json", "rates.json", "results.jsonl", "tokenizer"
SWEEP = "sweep"
# What a study that goes on may have more of; and what says where and how fast, not what.
_GROWS = ("budgets", "sizes", "center", "spread", "variants", "seeds", "seeds_at_minimum", "more_sizes")
_FREE = ("out", "device", "launcher", "parallel", "cpus", "gpus", "minutes", "extend", "dry_run")
_ATTEMPTS = 2


def run(config: IsoflopConfig, as_json: bool) -> int:
    """The whole study, or what is left of it; the exit code."""
    study = Study(config)
    if config.dry_run:
        print_grid(study.cells, Speed(study.rows, study.device), as_json, config)
        return 0
    with _terminated_as_interrupted(), study.opened():
        study.run()
        if study.rows:
            write(Path(config.out), study.rows, study.curves, config, as_json)
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
        self.told = {name: value for name, value in asdict(config).items() if name not in _FREE}
        self.told |= {"budgets": config.budget_list, "context": config.tokens_in_sequence}
        for name in ("data", "validation"):
            if data := getattr(config, name):
                self.told[f"{name}_hash"] = text.fingerprint(data)
        self._check_mine()
        tokenizer, vocab = self._tokenizer()
        self.grid = Grid(config, tokenizer, vocab, self.device, self._rates())
        self.cells = self.grid.cells()
        self._check_fits(self.cells)
        self.rows = self._known() + [row for cell in self.cells if (row := finished(cell))]
        self.failed: dict[Cell, Exception] = {}

    @property
    def key(self) -> str:
        """Of all that studies must share for their losses to be compared."""
        same = {name: value for name, value in self.told.items() if name not in (*_GROWS, "data", "validation")}
        return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]

    def _check_mine(self) -> None:
        """The folder must be new, or that of this study."""
        if not self.out.exists():
            return
        path = self.out / GRID
        strange = self.out.is_dir() and any(not p.name.startswith(".") for p in self.out.iterdir())
        if not self.out.is_dir() or (strange and not path.exists()):
            raise DepthgateError(f"out is {self.out}, which holds other files than a study's: choose another folder")
        if not path.exists():
            return
        try:
            recorded = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            recorded = None
        if not isinstance(recorded, dict):
            raise DepthgateError(f"{path} is damaged: choose another --out")
        grows = _GROWS if self.config.extend else ()
        new, old = ({n: value for n, value in told.items() if n not in grows} for told in (self.told, recorded))
        try:
            check_same(new, old, self.out)
        except DepthgateError as error:
            lines = str(error).splitlines()[1:]
            only = not self.config.extend and all(line.split(":")[0].strip() in _GROWS for line in lines)
            more = ", or add to it with --extend true" if only else ""
            raise DepthgateError(
                f"{self.out} is another study: choose another --out{more}\n" + "\n".join(lines)
            ) from None

    def _known(self) -> list[dict[str, Any]]:
        """Rows that the study has already, also of cells that it is not asked for now; those of another study are
        refused, as they would be written over."""
        path = self.out / RESULTS
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        found = []
        for line in lines:
            try:
                row = json.loads(line)
                key = row.pop("study", None)
            except (ValueError, AttributeError, TypeError):
                key = None
            if key != self.key:
                raise DepthgateError(f"{path} is of another study, or damaged: choose another --out, or delete it")
            found.append(row)
        return found

    def _check_fits(self, cells: Sequence[Cell]) -> None:
        if self.config.launcher == "local":  # of other machines, nothing is known here
            check_fits(cells, self.device, parallel(self.config, self.device))

    def _tokenizer(self) -> tuple[str, int]:
        """Its name for a cell's training, and its size: what was asked for, where it has yet to be trained."""
        name = self.config.tokenizer
        if name == "bytes":
            return name, ByteTokenizer().vocab
        if name != "bpe":
            return str(Path(name).absolute()), HFTokenizer.from_folder(name).vocab
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

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The folder, held by this process alone."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            with checkpoint.lock(self.out / ".isoflop.lock"):
                self._check_mine()  # once more, now that no other process can come between
                write_json(self.out / GRID, self.told)
                yield
        except OSError as error:
            raise DepthgateError(f"cannot write {self.out} ({error.strerror}): choose another --out") from error

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
            tokenizer = ByteTokenizer() if config.tokenizer == "bytes" else HFTokenizer.from_folder(config.tokenizer)
        shards = prepare(config.data, tokenizer, cache(), config.validation)
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
        rows = {cell.name: row for cell in cells if (row := finished(cell))}
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
                        self._save(rows)
        if cells and cells[0].part == CELLS:
            self._save(rows)
        return list(rows.values())

    def _save(self, rows: dict[str, dict[str, Any]]) -> None:
        """results.jsonl: a row for each finished cell, in the order of the grid."""
        known = {row["cell"]: row for row in (*self.rows, *rows.values())}
        self.rows = sorted(known.values(), key=lambda r: (r["budget"], r["variant"], r["params"], r["seed"]))
        lines = "".join(json.dumps({**row, "study": self.key}) + "\n" for row in self.rows)
        replace(self.out / RESULTS, lines)

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
