"""A study and its folder: plan the grid, run the cells that are missing, keep their rows.

The folder holds grid.json (the options), results.jsonl (a row for each finished cell), the cells' runs, and the report.
"""

import hashlib
import json
import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from depthgate.checkpoint import store as checkpoint
from depthgate.data import sources
from depthgate.data.batches import Packed
from depthgate.data.token_file import cache_folder, prepare
from depthgate.data.tokenizer import TextTokenizer, tokenizer_by_name
from depthgate.device import interleaved, resolve_device
from depthgate.errors import DepthgateError
from depthgate.files import replace, write_json
from depthgate.flops import training_flops
from depthgate.isoflop import fit
from depthgate.isoflop.cell import Row, belongs, finished, is_row, launch, parallel, say, text_file
from depthgate.isoflop.config import IsoflopConfig, command
from depthgate.isoflop.grid import CELLS, TRIED, Cell, Grid, best_rate, check_fits, fit_rates, further_rates
from depthgate.model import Decoder
from depthgate.train.run_folder import check_same

GRID, RESULTS, RATES, TOKENIZER, SWEEP = "grid.json", "results.jsonl", "rates.json", "tokenizer", "sweep"
# Options that may differ when a study is extended; and those that say where and how fast, not what.
_GROWS = ("budgets", "sizes", "center", "spread", "variants", "seeds", "seeds_at_minimum", "more_sizes")
_FREE = ("out", "device", "launcher", "parallel", "cpus", "gpus", "minutes", "extend", "dry_run", "points", "samples")
_ATTEMPTS = 2


class Study:
    """A study in its folder. Building one makes every check, and writes nothing."""

    def __init__(self, config: IsoflopConfig, asked: str = "") -> None:
        """`asked`: the command line that the report names."""
        self.config, self.out, self.device = config, Path(config.out), _device(config)
        self.options = {name: value for name, value in asdict(config).items() if name not in _FREE}
        self.options |= {"budgets": config.budget_list, "context": config.tokens_in_sequence}
        for name in ("data", "validation"):
            if data := getattr(config, name):
                self.options[f"{name}_hash"] = sources.fingerprint(data)
        recorded = self._recorded() or {}
        mine, before = asked or command("isoflop", config), recorded.get("commands", [])
        self.commands: list[str] = [*(each for each in before if each != mine), mine]
        self.key, self.rows = self._read_rows(recorded)
        self.failed: dict[Cell, Exception] = {}
        self._plan()
        self._check_fits([cell for cell in self.cells if self._found(cell) is None])

    def _plan(self) -> None:
        """Set the grid and its cells, from the tokenizer and the learning rates as far as they are known."""
        name, vocab = self.config.tokenizer, self.config.vocab
        if name != "bpe" or (self.out / TOKENIZER / "tokenizer.json").exists():
            vocab = self._tokenizer().vocab
        if name != "bytes":
            name = str(self.out.absolute() / TOKENIZER if name == "bpe" else Path(name).absolute())
        assert vocab is not None
        self.grid = Grid(self.config, name, vocab, self.device, self._read_rates())
        self.cells = self.grid.cells()

    def _tokenizer(self) -> TextTokenizer:
        """The tokenizer of all cells; bpe is trained where it is not in the folder yet."""
        config, saved = self.config, self.out / TOKENIZER if self.config.tokenizer == "bpe" else None
        return tokenizer_by_name(config.tokenizer, config.data, config.vocab, saved)

    def _check_fits(self, cells: Sequence[Cell]) -> None:
        if cells and self.config.launcher == "local":  # the memory of other machines is not known here
            check_fits(cells, self.device, parallel(self.config, self.device))

    def _recorded(self) -> dict[str, Any] | None:
        """The content of grid.json, None if there is none; an error where that is another study."""
        path = self.out / GRID
        if not path.exists():
            if self.out.exists() and not (self.out.is_dir() and all(p.name[0] == "." for p in self.out.iterdir())):
                raise DepthgateError(
                    f"out is {self.out}, which holds other files than a study's: choose another folder"
                )
            return None
        with suppress(ValueError):
            recorded = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(recorded, dict):
                self._check_same(recorded)
                return recorded
        raise DepthgateError(f"{path} is damaged: choose another --out")

    def _check_same(self, recorded: dict[str, Any]) -> None:
        new = {name: v for name, v in self.options.items() if not (self.config.extend and name in _GROWS)}
        old = {name: recorded.get(name, getattr(IsoflopConfig, name, None)) for name in new}
        try:
            check_same(new, old, self.out)
        except DepthgateError as error:
            lines = str(error).splitlines()[1:]
            grows = not self.config.extend and all(line.split(":")[0].strip() in _GROWS for line in lines)
            start = f"{self.out} is another study: choose another --out{', or add to it with --extend true' * grows}"
            raise DepthgateError("\n".join([start, *lines])) from None

    def _read_rows(self, recorded: dict[str, Any]) -> tuple[str, list[Row]]:
        """The key of the study, and the rows that it has already, from whichever command."""
        path, rows = self.out / RESULTS, []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
            with suppress(ValueError):
                rows.append(json.loads(line))
        keys = [row.pop("study", None) if is_row(row) else None for row in rows]
        # Older versions made the key in another way, and only rows have it.
        first = keys[0] if keys and recorded and "study" not in recorded else None
        key = recorded.get("study") or first or self._key()
        if any(each != key for each in keys):
            raise DepthgateError(f"{path} belongs to another study, or is damaged: choose another --out, or delete it")
        return key, rows

    def _key(self) -> str:
        """Hash of the options that must match for two studies to be comparable. Stored in grid.json."""
        same = {name: value for name, value in self.options.items() if name not in (*_GROWS, "data", "validation")}
        return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]

    def _read_rates(self) -> dict[str, tuple[float, float]]:
        path = self.out / RATES
        if not (self.config.lr_sweep and path.exists()):
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return {name: (float(scale), float(power)) for name, (scale, power) in found.items()}
        except (ValueError, TypeError, AttributeError):
            raise DepthgateError(f"{path} is damaged: delete it to have the rates found again") from None

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the folder for this process alone. SIGTERM ends a study as Ctrl-C does, so that its workers end too. A
        study that fails before its first cell leaves the folder free."""
        before: Any = signal.SIG_DFL
        with suppress(ValueError):  # only the main thread may set handlers
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            with checkpoint.lock(self.out / ".isoflop.lock"):
                new = self._recorded() is None  # checked again, now that no other process can interfere
                write_json(self.out / GRID, {**self.options, "study": self.key, "commands": self.commands})
                try:
                    yield
                except DepthgateError:
                    if new and not (self.out / CELLS).exists():
                        (self.out / GRID).unlink(missing_ok=True)
                    raise
        except KeyboardInterrupt:
            say("the same command goes on from here")
            raise
        except OSError as error:
            raise DepthgateError(f"cannot write {self.out} ({error.strerror}): choose another --out") from error
        finally:
            with suppress(ValueError):
                signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # None: not set by Python

    def run(self) -> None:
        """Run every cell that is missing."""
        shards = prepare(self.config.data, self._tokenizer(), cache_folder(), self.config.validation)
        Packed(shards.train, self.config.tokens_in_sequence)  # an error where the text is too short
        if self.config.lr_sweep:
            self._sweep()
        self._plan()  # the tokenizer and the rates are known now
        self._run(self.cells)
        while more := self.grid.more(self.cells, self.rows, self._check_fits):
            self.cells += more
            self._run(more)

    def _sweep(self) -> None:
        """Find learning rates for the smallest budget's smallest and largest size of each variant, and fit the rest."""
        budget, seed, found = self.config.budget_list[0], self.config.seed, self._read_rates()
        for name in self.grid.ladders.keys() - found.keys():
            shapes, best = self.grid.shapes(budget, name), []
            for shape in (shapes[0], shapes[-1]):
                usual, losses = self.grid.cell(budget, name, shape, seed).training.lr, dict[float, float]()
                tried = [usual * times for times in TRIED]
                while tried:
                    lrs = [float(f"{lr:.3g}") for lr in tried]
                    rows = self._run([self.grid.cell(budget, name, shape, seed, lr, SWEEP) for lr in lrs])
                    losses |= {row["lr"]: row["loss_causal"] for row in rows}
                    tried = further_rates(losses, lrs)
                if not losses:
                    raise DepthgateError(f"no learning rate of {name} gave a loss: see {self.out / SWEEP}")
                best.append((shape.dim, best_rate(losses)))
            found[name] = fit_rates(best, budget)
        self.failed.clear()  # a rate that fails is a bad rate, and not a failure of the study
        write_json(self.out / RATES, found)

    def _found(self, cell: Cell) -> Row | None:
        """The row of a finished cell; where its folder was deleted, the one that results.jsonl keeps."""
        if cell.folder.exists() or text_file(cell, "error").exists() or cell.part != CELLS:
            return finished(cell)
        return next((row for row in self.rows if belongs(row, cell)), None)

    def _run(self, cells: Sequence[Cell]) -> list[Row]:
        """Run the cells that are not finished, and those that fail once more; the rows of all that have one."""
        rows = {cell.name: row for cell in cells if (row := self._found(cell))}
        self._keep(list(rows.values()), cells)
        for _ in range(_ATTEMPTS):
            missing = [cell for cell in cells if cell.name not in rows]
            if not missing:
                break
            if rows:
                say(f"{len(rows)} of {len(cells)} cells are finished")
            at_once = parallel(self.config, self.device)
            with closing(launch(missing, self.config, at_once)) as outcomes:  # type: ignore[type-var]
                for cell, outcome in outcomes:
                    if isinstance(outcome, Exception):
                        self.failed[cell] = outcome
                        say(f"{cell.name} failed: {_first_line(outcome)}")
                        continue
                    self.failed.pop(cell, None)
                    rows[cell.name] = outcome
                    self._keep([outcome], cells)
                    speeds = known_speeds(rows.values(), self.device)
                    left = sum(seconds(each, speeds) for each in missing if each.name not in rows)
                    say(
                        f"{len(rows)} of {len(cells)}: {cell.name}: causal loss {outcome['loss_causal']:.4f} after "
                        f"{outcome['seconds']:.0f} s; about {duration(left)} left, one after another"
                    )
        return list(rows.values())

    def _keep(self, rows: Sequence[Row], cells: Sequence[Cell]) -> None:
        """Keep the rows of finished cells, unless these belong to a sweep."""
        if rows and cells[0].part == CELLS:
            known = {row["cell"]: row for row in (*self.rows, *rows)}
            self.rows = sorted(known.values(), key=lambda r: (r["budget"], r["variant"], r["params"], r["seed"]))
            replace(self.out / RESULTS, "".join(json.dumps({**row, "study": self.key}) + "\n" for row in self.rows))

    def check_failed(self) -> None:
        """Raise an error that lists the cells that failed, if any did."""
        if self.failed:
            names = "\n  ".join(f"{cell.name}: {_first_line(error)}" for cell, error in self.failed.items())
            raise DepthgateError(
                f"{len(self.failed)} of {len(self.cells)} cells failed; the same command tries them again "
                f"({self.out / CELLS}/*.error.txt say more):\n  {names}"
            )

    @property
    def curves(self) -> list[fit.Curve]:
        """A curve for each budget and variant, by budget, dense first."""
        found: dict[tuple[float, str], list[Row]] = {}
        for row in self.rows:
            found.setdefault((row["budget"], row["variant"]), []).append(row)
        return [fit.curve(found[key]) for key in sorted(found, key=lambda k: (k[0], k[1][:5] != "dense", k[1]))]


def _device(config: IsoflopConfig) -> str:
    """The device of the cells. Launchers other than local use other machines, whose devices are not known here."""
    if config.launcher == "local":
        return resolve_device(config.device)
    return ("cuda" if config.gpus else "cpu") if config.device == "auto" else config.device


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


Speeds = Sequence[tuple[float, float]]  # FLOPs per token, FLOPs per second


def known_speeds(rows: Any, device: str) -> Speeds:
    """The speeds of finished cells."""
    timed = (row for row in rows if row.get("device") == device and row.get("seconds"))
    return [(row["flops_per_token"], row["flops"] / row["seconds"]) for row in timed]


def probe_speeds(cells: Sequence[Cell], device: str) -> Speeds:
    """The speeds of the cheapest and the dearest model, in a few steps; none if their device is not here."""
    if device == "cuda" and not torch.cuda.is_available():
        return []
    found, ordered = [], sorted(cells, key=lambda cell: training_flops(cell.training.model))
    for cell in (ordered[0], ordered[-1]):
        model = cell.training.model
        net = Decoder(model).to(device)
        tokens = torch.randint(model.vocab, (1 if device == "cpu" else min(8, cell.training.batch), model.context))
        tokens = tokens.to(device)
        step = {"step": lambda net=net, tokens=tokens: net.loss(tokens, tokens)[0].backward()}
        cost = training_flops(model)
        found.append((cost, cost * tokens.numel() / min(interleaved(step, 3, 0, device)["step"])))
    return found


def seconds(cell: Cell, speeds: Speeds) -> float:
    """Estimated seconds of a cell, at the speed of the model nearest to it; nan where none is known."""
    cost = training_flops(cell.training.model)
    rate = min(speeds, key=lambda known: abs(math.log(known[0] / cost)), default=(0.0, math.nan))[1]
    return cell.flops / rate + 5 + 30 * cell.training.compile  # for what is not a training step


def duration(seconds: float) -> str:
    """Seconds for a reader: 45 s, 12 min, 3.5 h."""
    if math.isnan(seconds):
        return "unknown"
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
