"""A study and its folder: plan the grid, run the cells that are missing, keep their rows.

The folder holds grid.json (the options), results.jsonl (a row for each finished cell), the cells' runs, and the report.
"""

import hashlib
import json
import math
import os
import signal
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from depthgate.checkpoint import store as checkpoint
from depthgate.data import sources
from depthgate.data.batches import Packed
from depthgate.data.images import Shuffled, open_images
from depthgate.data.token_file import prepare
from depthgate.data.tokenizer import TextTokenizer, tokenizer_by_name
from depthgate.device import resolve_device
from depthgate.errors import DepthgateError, check_number
from depthgate.files import handled, replace, write_json
from depthgate.isoflop.cell import RESULT, finished, launch, read_row, say, text_file
from depthgate.isoflop.config import IsoflopConfig
from depthgate.isoflop.grid import CELLS, TRIED, Cell, Grid, Row, best_rate, check_fits, further_rates, scale_of_rates
from depthgate.options import command
from depthgate.vision import AUGMENTED

GRID, RESULTS, RATES, TOKENIZER, SWEEP = "grid.json", "results.jsonl", "rates.json", "tokenizer", "sweep"
# Options that may differ when a study is extended; and those that say where and how fast, not what.
_GROWS = ("budgets", "sizes", "center", "spread", "variants", "seeds", "seeds_at_minimum", "more_sizes", "calibrate")
_FREE = ("out", "device", "launcher", "parallel", "cpus", "gpus", "minutes", "extend", "dry_run", "points", "samples")
_TEXTS = ("data", "validation")  # they may move: their content counts
_ATTEMPTS = 2


class Study:
    """A study in its folder. Building one makes every check, and writes nothing."""

    def __init__(self, config: IsoflopConfig, asked: str = "") -> None:
        """`asked`: the command line that the report names."""
        self.config, self.out = config, Path(config.out)
        self.device, self.at_once = config.device, 1
        if config.launcher == "local":
            self.device = resolve_device(config.device)
            # Small models are fastest on a processor core each.
            self.at_once = config.parallel or (1 if self.device == "cuda" else len(os.sched_getaffinity(0)))
        elif config.device == "auto":  # that of other machines is not known here
            self.device = "cuda" if config.gpus else "cpu"
        self.options = {name: value for name, value in asdict(config).items() if name not in (*_FREE, *_TEXTS)}
        self.options |= {"budgets": config.budget_list, "context": config.tokens_in_sequence, "spread": config.apart}
        self.options |= dict(zip(("tokenizer", "vocab"), config.tokens, strict=True))
        self.options["measured"] = config.most_measured
        if config.images:
            train, _ = open_images(config.data)
            self.trained_on, channels, *size = train.pixels.shape
            self._seen = {"image": "x".join(map(str, size)), "channels": channels, "classes": len(train.names)}
            self.options |= {"data_hash": Shuffled(train, 1).fingerprint(), "recipe": {"stem": True, **AUGMENTED}}
        for name in _TEXTS if not config.images else ():
            text = getattr(config, name)
            self.options[f"{name}_hash"] = None if text is None else sources.fingerprint(text)
        recorded = self._recorded()
        mine, before = asked or command("isoflop", config), recorded.get("commands", [])
        self.commands: list[str] = [*(each for each in before if each != mine), mine]
        # The key is a hash of the options that must match for two studies to be comparable.
        same = json.dumps({name: value for name, value in self.options.items() if name not in _GROWS}, sort_keys=True)
        self.key = recorded.get("study") or hashlib.sha256(same.encode()).hexdigest()[:16]
        path = self.out / RESULTS
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        if text and text[-1] not in "}\n":
            say(f"{path}: its last line is cut off and left out; its cell gives it again")
            text = text[: text.rfind("\n") + 1]
        self.rows = [read_row(line, {"study": self.key}, path) for line in text.splitlines()]
        self.failed: dict[Cell, Exception] = {}
        self._plan()
        self._check_fits([cell for cell in self.cells if self._found(cell) is None])

    def _plan(self) -> None:
        """Set the grid and its cells, from the tokenizer and the learning rates as far as they are known."""
        name, vocab = ("", self._seen) if self.config.images else self.config.tokens
        if name and (name != "bpe" or (self.out / TOKENIZER / "tokenizer.json").exists()):
            vocab = self._tokenizer().vocab
        if name not in ("bytes", ""):
            name = str((self.out / TOKENIZER if name == "bpe" else Path(name)).absolute())
        assert vocab is not None
        self.grid = Grid(self.config, name, vocab, self.device, self._rates())
        self.cells = self.grid.cells()

    def _tokenizer(self) -> TextTokenizer:
        """The tokenizer of all cells; bpe is trained where it is not in the folder yet."""
        name, vocab = self.config.tokens
        return tokenizer_by_name(name, self.config.data, vocab, self.out / TOKENIZER if name == "bpe" else None)

    def _rates(self) -> dict[str, float]:
        """The scales of the learning rates that a sweep has found, and its budget, which older files lack."""
        path = self.out / RATES
        try:
            found = json.loads(path.read_text(encoding="utf-8")) if self.config.lr_sweep and path.exists() else {}
            return {n: check_number(x, n, "(0, inf)" if n == "budget" else "(0, 1]") for n, x in found.items()}
        except (ValueError, AttributeError) as error:
            raise DepthgateError(f"{path} is damaged ({error}): delete it to have the rates found again") from None

    def _check_fits(self, cells: Sequence[Cell]) -> None:
        if cells and self.config.launcher == "local":  # the memory of other machines is not known here
            check_fits(cells, self.device, self.at_once)

    def _recorded(self) -> dict[str, Any]:
        """The content of grid.json, empty if there is none; an error where that is another study."""
        path, extend = self.out / GRID, self.config.extend
        if not path.exists():
            if self.out.exists() and not (self.out.is_dir() and all(p.name[0] == "." for p in self.out.iterdir())):
                raise DepthgateError(f"out is {self.out}, which holds other files than a study's: choose another")
            return {}
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            old = {name: found.get(name, getattr(IsoflopConfig, name, None)) for name in self.options}
            "".join((*list.copy(found.get("commands", [])), found.get("study", "")))  # a list of texts, and a text
        except (ValueError, AttributeError, TypeError):
            raise DepthgateError(f"{path} is damaged: choose another --out") from None
        differ = [n for n, value in self.options.items() if old[n] != value and not (extend and n in _GROWS)]
        if differ:
            grows = ", or add to it with --extend" * (not extend and set(differ) <= set(_GROWS))
            lines = (f"\n  {name}: {old[name]} there, {self.options[name]} here" for name in differ)
            raise DepthgateError(f"{self.out} is another study: choose another --out{grows}{''.join(lines)}")
        return found

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Hold the folder for this process alone. SIGTERM ends a study as Ctrl-C does, so that its workers end too. A
        study that fails before its first cell leaves the folder free."""
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            with handled(signal.default_int_handler, signal.SIGTERM), checkpoint.lock(self.out / ".isoflop.lock"):
                new = not self._recorded()  # checked again, now that no other process can interfere
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

    def run(self) -> None:
        """Run every cell that is missing."""
        if not self.config.images:
            shards = prepare(self.config.data, self._tokenizer(), self.config.validation)
            Packed(shards.train, self.config.tokens_in_sequence)  # an error where the text is too short
        if self.config.lr_sweep:
            self._sweep()
        self._plan()  # the tokenizer and the rates are known now
        self._run(self.cells, self._more)

    def _more(self) -> list[Cell]:
        """Cells that complete curves ask for."""
        more = self.grid.more(self.cells, self.rows, self._check_fits)
        self.cells += more
        return more

    def _sweep(self) -> None:
        """Find the learning rate of the middle size of each variant at the smallest budget, or at that of the first
        sweep, if there was one; those of other sizes follow from it by the rule. The variants go on side by side."""
        seed, found = self.config.seed, self._rates()
        if not (names := sorted(self.grid.ladders.keys() - found.keys())):
            return
        paths = [] if "budget" in found else self.out.glob(f"{SWEEP}/*/{RESULT}")  # of an older study
        before = [read_row(path.read_text(errors="replace"), {}, path)["budget"] for path in paths]
        budget = found.get("budget") or max(before, default=self.config.budget_list[0])
        shapes = {name: self.grid.shapes(budget, name) for name in names}
        middle = {name: each[len(each) // 2] for name, each in shapes.items()}
        usual = {name: self.grid.cell(budget, name, shape, seed).training.lr for name, shape in middle.items()}
        losses: dict[str, dict[float, float]] = {name: {} for name in names}
        tried = {name: [_short(usual[name] * times) for times in TRIED] for name in names}
        while any(tried.values()):
            cells = [self.grid.cell(budget, n, middle[n], seed, lr, SWEEP) for n in names for lr in tried[n]]
            for row in self._run(cells):
                losses[row["variant"]][row["lr"]] = row["loss_causal"]
            tried = {n: [_short(lr) for lr in further_rates(losses[n], tried[n])] if tried[n] else [] for n in names}
        for name in names:
            if not losses[name]:
                raise DepthgateError(f"no learning rate of {name} gave a loss: see {self.out / SWEEP}")
            found[name] = scale_of_rates(best_rate(losses[name]), middle[name].dim)
        self.failed.clear()  # a rate that fails is a bad rate, and not a failure of the study
        write_json(self.out / RATES, {**found, "budget": budget})

    def _found(self, cell: Cell) -> Row | None:
        """The row of a finished cell; where its folder was deleted, the one that results.jsonl keeps."""
        if cell.folder.exists() or text_file(cell, "error").exists() or cell.part != CELLS:
            return finished(cell)
        return next((row for row in self.rows if cell.described().items() <= row.items()), None)

    def _run(self, cells: Sequence[Cell], more: Callable[[], Sequence[Cell]] = tuple) -> list[Row]:
        """Run the cells that are not finished, those that `more` adds to them as rows come in, and those that fail once
        more; the rows of all that have one."""
        wanted, rows = dict[str, Cell](), dict[str, Row]()

        def longest(new: Sequence[Cell]) -> list[Cell]:
            """Those of new cells, and of those that follow, that are not finished: the longest first, so that no core
            waits for the last one."""
            missing = list[Cell]()
            while new:
                wanted.update((cell.name, cell) for cell in new)
                found = {cell.name: row for cell in new if (row := self._found(cell))}
                rows.update(found)
                self._keep(found.values(), new)
                missing += [cell for cell in new if cell.name not in found]
                new = more()
            return sorted(missing, key=lambda cell: -cell.training.steps * cell.training.model.layers)

        missing = longest(cells)
        for _ in range(_ATTEMPTS):
            if not missing:
                break
            if rows:
                say(f"{len(rows)} of {len(wanted)} cells are finished")
            outcomes = launch(missing, self.config, self.at_once, lambda: longest(more()))
            with closing(outcomes):  # type: ignore[type-var]
                for cell, outcome in outcomes:
                    if isinstance(outcome, Exception):
                        self.failed[cell] = outcome
                        say(f"{cell.name} failed: {_first_line(outcome)}")
                        continue
                    self.failed.pop(cell, None)
                    rows[cell.name] = outcome
                    self._keep([outcome], [cell])
                    waiting = [each.flops for name, each in wanted.items() if name not in rows]
                    left = sum(waiting) / speed(rows.values()) / max(1, min(self.at_once, len(waiting)))
                    what = "error in percent" if self.config.images else "causal loss"
                    found = f"{what} {outcome['loss_causal']:.4f} after {outcome['seconds']:.0f} s"
                    say(f"{len(rows)} of {len(wanted)}: {cell.name}: {found}; up to about {duration(left)} left")
            missing = [cell for name, cell in wanted.items() if name not in rows]
        return list(rows.values())

    def _keep(self, rows: Collection[Row], cells: Sequence[Cell]) -> None:
        """Keep the rows of finished cells, unless these belong to a sweep."""
        if rows and cells[0].part == CELLS:
            known = {row["cell"]: {**row, "study": self.key} for row in (*self.rows, *rows)}
            self.rows = sorted(known.values(), key=lambda r: (r["budget"], r["variant"], r["params"], r["seed"]))
            replace(self.out / RESULTS, "".join(json.dumps(row) + "\n" for row in self.rows))

    def check_failed(self) -> None:
        """Raise an error that lists the cells that failed, if any did."""
        if self.failed:
            lines = (f"\n  {cell.name}: {_first_line(error)}" for cell, error in self.failed.items())
            what = f"{len(self.failed)} of {len(self.cells)} cells failed; the same command tries them again"
            raise DepthgateError(f"{what} ({self.out / CELLS}/*.error.txt say more):{''.join(lines)}")


def _short(lr: float) -> float:
    return float(f"{lr:.3g}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def speed(rows: Collection[Row]) -> float:
    """FLOPs per second of finished cells; nan without any."""
    flops, seconds = (sum(row[name] for row in rows) for name in ("flops", "seconds"))
    return flops / seconds if seconds else math.nan


def duration(seconds: float) -> str:
    """Hours, minutes and seconds for a reader."""
    return "unknown" if math.isnan(seconds) else str(timedelta(seconds=round(seconds)))
