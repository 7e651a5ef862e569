"""What a study's folder holds: grid.json, which says what the study is, and results.jsonl with a row for each cell."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from depthgate.checkpoint import store as checkpoint
from depthgate.data import sources as text
from depthgate.errors import DepthgateError
from depthgate.files import replace, write_json
from depthgate.isoflop.cell import whole
from depthgate.isoflop.config import IsoflopConfig
from depthgate.isoflop.grid import CELLS
from depthgate.isoflop.words import command
from depthgate.train.run_folder import check_same

GRID, RESULTS = "grid.json", "results.jsonl"
# What a study that goes on may have more of; and what says where and how fast, not what.
_GROWS = ("budgets", "sizes", "center", "spread", "variants", "seeds", "seeds_at_minimum", "more_sizes")
_FREE = ("out", "device", "launcher", "parallel", "cpus", "gpus", "minutes", "extend", "dry_run")
_OWN = ("study", "commands")  # of grid.json, beside the options


class Folder:
    """The folder of a study. Making one checks that it is new, or that study's, and writes nothing."""

    def __init__(self, config: IsoflopConfig) -> None:
        self.config, self.path = config, Path(config.out)
        self.told = {name: value for name, value in asdict(config).items() if name not in _FREE}
        self.told |= {"budgets": config.budget_list, "context": config.tokens_in_sequence}
        for name in ("data", "validation"):
            if data := getattr(config, name):
                self.told[f"{name}_hash"] = text.fingerprint(data)
        recorded = self._recorded()
        rows, keys = self._rows()
        older = recorded is not None and "study" not in recorded  # keys of its rows were made otherwise
        kept = (keys[0] if keys else None) if older else (recorded or {}).get("study")
        self.key: str = kept or self._key()
        if any(key != self.key for key in keys):
            raise DepthgateError(
                f"{self.path / RESULTS} is of another study, or damaged: choose another --out, or delete it"
            )
        self.rows = rows
        mine = command(config)
        before = [] if recorded is None else recorded.get("commands", [])
        self.commands: list[str] = [*(each for each in before if each != mine), mine]

    def _key(self) -> str:
        """Of all that studies must share for their losses to be compared; it stays with the folder."""
        same = {name: value for name, value in self.told.items() if name not in (*_GROWS, "data", "validation")}
        return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).hexdigest()[:16]

    def _recorded(self) -> dict[str, Any] | None:
        """What grid.json says, None where there is none; an error where that is another study."""
        if not self.path.exists():
            return None
        path = self.path / GRID
        strange = self.path.is_dir() and any(not p.name.startswith(".") for p in self.path.iterdir())
        if not self.path.is_dir() or (strange and not path.exists()):
            raise DepthgateError(f"out is {self.path}, which holds other files than a study's: choose another folder")
        if not path.exists():
            return None
        try:
            recorded = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            recorded = None
        if not isinstance(recorded, dict):
            raise DepthgateError(f"{path} is damaged: choose another --out")
        left = (*_GROWS, *_OWN) if self.config.extend else _OWN
        new, old = ({n: value for n, value in told.items() if n not in left} for told in (self.told, recorded))
        try:
            check_same(new, old, self.path)
        except DepthgateError as error:
            lines = str(error).splitlines()[1:]
            only = not self.config.extend and all(line.split(":")[0].strip() in _GROWS for line in lines)
            more = ", or add to it with --extend true" if only else ""
            raise DepthgateError(
                f"{self.path} is another study: choose another --out{more}\n" + "\n".join(lines)
            ) from None
        return recorded

    def _rows(self) -> tuple[list[dict[str, Any]], list[str | None]]:
        """Rows that the study has already, whichever command asked for them, and the study that each names."""
        path = self.path / RESULTS
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        rows, keys = [], []
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            keys.append(row.pop("study", None) if whole(row) else None)
            rows.append(row)
        return rows, keys

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The folder, held by this process alone. One that ends before its first cell does not keep it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with checkpoint.lock(self.path / ".isoflop.lock"):
                new = self._recorded() is None  # checked once more, now that no other process can come between
                write_json(self.path / GRID, {**self.told, "study": self.key, "commands": self.commands})
                try:
                    yield
                except DepthgateError:
                    if new and not (self.path / CELLS).exists():
                        (self.path / GRID).unlink(missing_ok=True)
                    raise
        except OSError as error:
            raise DepthgateError(f"cannot write {self.path} ({error.strerror}): choose another --out") from error

    def save(self, rows: Sequence[dict[str, Any]]) -> None:
        """A row for each finished cell, in the order of the grid."""
        known = {row["cell"]: row for row in (*self.rows, *rows)}
        self.rows = sorted(known.values(), key=lambda r: (r["budget"], r["variant"], r["params"], r["seed"]))
        lines = "".join(json.dumps({**row, "study": self.key}) + "\n" for row in self.rows)
        replace(self.path / RESULTS, lines)
