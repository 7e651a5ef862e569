"""Checkpoints that survive a kill, a full disk and damage.

    run/step-100/    model.safetensors, optimizer.safetensors, ..., state.json, config.json, manifest.json

Several processes save together: each writes its own rows, as model-00001-of-00004.safetensors. They agree after each
phase (`World.agree`), so that a failure in one is raised in all, for the same reason.
A folder named step-N is complete: it gets that name by one rename, after all its files are on the disk. The manifest
holds size and SHA-256 of each. .tmp-step-N-... is unfinished or on its way out: it is never loaded, and the next save
removes it. .old-step-N-... is complete and about to be replaced; it counts until its successor stands.
Hashes find damage, they are not a signature: write access to the folder is choice of the weights, but runs nothing.
"""

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from depthgate.checkpoint import tensors as tensor_files
from depthgate.checkpoint.tensors import FILE_NAME, damaged, file_name, from_json
from depthgate.config import EXPERT_KINDS
from depthgate.device import ALONE, World
from depthgate.errors import DepthgateError, DepthgateWarning, check_count
from depthgate.files import sync
from depthgate.flops import swiglu_hidden

CONFIG, METRICS, TOKENIZER = "config.json", "metrics.jsonl", "tokenizer"  # in the folder of a run
MANIFEST, STATE = "manifest.json", "state.json"
PLAIN = (STATE, CONFIG)  # the files of a checkpoint that hold no tensors
VERSION = 1
MAX_STEP = 10**15
MAX_JSON = 16 * 2**20  # far above any real file: it bounds the memory that a hostile one can take
_FORMAT = "depthgate checkpoint"
# Values of a model that runs of older versions do not name, and what they were.
_LATER: dict[str, Any] = {
    **dict.fromkeys(("head_dim", "norm_eps", "first", "expert_gate")),
    **dict.fromkeys(("key_shift", "embed_norm", "router_norm"), False),
    **{"choice": "experts", "pool": "batch"},  # read by no layer of that time
}
_STEP = re.compile(r"(?:step|(\.old)-step)-(0|[1-9][0-9]{0,15})(?(1)-[0-9a-f]+)")

Named = Mapping[str, Tensor]
Tensors = Mapping[str, Named]  # by group and name
Plain = dict[str, Any]
Records = dict[str, dict[str, Any]]  # size and SHA-256 of files, by name
T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: tensors on the CPU by group and name, and plain data."""

    path: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    config: dict[str, Any]


def save(
    run: Path, step: int, tensors: Tensors, state: Plain, config: Plain, keep: int = 2, world: World = ALONE
) -> Path:
    """Write `run/step-N`, then remove all but the `keep` newest complete checkpoints up to it; returns the folder.

    When this returns, the checkpoint is on the disk. When it raises, the earlier ones are as they were. A checkpoint of
    the same step is replaced; later ones, which only a run that went back can meet, are left alone.
    """
    run, step, keep = Path(run), check_count(step, "step", 0, MAX_STEP), check_count(keep, "keep", 2)

    def together(work: Callable[[], T]) -> T:
        def named() -> T:
            try:
                return work()
            except OSError as error:
                why = f"cannot save step {step} in {run} ({error.strerror or error}): earlier checkpoints are intact"
                raise DepthgateError(f"{why}; free some space, make it writable, or choose another folder") from error

        return world.agree(named)

    size = together(lambda: tensor_files.check(tensors))
    plain = together(lambda: {STATE: to_json(state, "state"), CONFIG: to_json(config, "config")})
    own = together(lambda: {group: tensor_files.own(named, world) for group, named in tensors.items()})
    with ExitStack() as stack:
        temp = world.told(together(lambda: stack.enter_context(begun(run, step, size)) if world.first else run))

        def write() -> Records:
            paths = {group: temp / file_name(group, world.rank, world.size) for group in own}
            for group, (held, places) in own.items():
                tensor_files.write(paths[group], held, places)
            return seal(paths.values())

        written = [together(write)] * world.size
        if world.size > 1:
            dist.all_gather_object(written, written[0])
        records = {name: record for part in written for name, record in part.items()}
        together(lambda: publish(temp, step, records, plain, keep) if world.first else None)
    return run / f"step-{step}"


def to_json(value: Plain, what: str) -> bytes:
    """Encode plain data; tuples become lists."""
    try:
        text = json.dumps(value, indent=1).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DepthgateError(f"{what} is not plain data ({error}): use numbers, text, lists and dicts") from None
    if len(text) > MAX_JSON:
        raise DepthgateError(f"{what} is {len(text)} bytes of JSON, more than {MAX_JSON}: save the bulk as tensors")
    return text


@contextmanager
def begun(run: Path, step: int, size: int) -> Iterator[Path]:
    """A folder for a checkpoint of `size` bytes, in a run whose lock is held; removed unless it is published."""
    if not run.is_dir():
        run.mkdir(parents=True)
        sync(run.parent)
    with lock(run / ".lock"):
        _tidy(run)
        if (free := shutil.disk_usage(run).free) < (need := size + 2**20):
            what = f"{run} has {free / 2**20:.1f} MiB free, and a checkpoint needs {need / 2**20:.1f}"
            raise DepthgateError(f"{what}: free some space or choose another; earlier checkpoints are intact")
        temp = run / f".tmp-step-{step}-{secrets.token_hex(8)}"
        try:
            os.mkdir(temp)
            yield temp
        finally:
            _discard(temp)  # nothing, once it has its name


def seal(paths: Iterable[Path]) -> Records:
    """Wait until files are on the disk; returns their entries for the manifest."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(4) as pool:
        digests = {path: pool.submit(digest, path) for path in paths}  # of the bytes in memory, while the disk is busy
        for path in digests:
            sync(path)
        return {path.name: {"size": path.stat().st_size, "sha256": found.result()} for path, found in digests.items()}


def publish(temp: Path, step: int, records: Records, plain: Mapping[str, bytes], keep: int) -> None:
    """Complete the folder of `begun`, give it its name, and remove the checkpoints that are too old."""
    run, target = temp.parent, temp.parent / f"step-{step}"
    for name, content in plain.items():
        (temp / name).write_bytes(content)
    records = {**records, **seal(temp / name for name in plain)}
    (temp / MANIFEST).write_bytes(pack_manifest(step, records))
    sync(temp / MANIFEST)
    sync(temp)
    if os.path.lexists(target):
        os.rename(target, run / f".old-{temp.name.removeprefix('.tmp-')}")
    os.rename(temp, target)
    sync(run)
    _rotate(run, step, keep)


def pack_manifest(step: int, records: Records) -> bytes:
    """The manifest of these files; it holds a hash of itself."""
    body = {"format": _FORMAT, "version": VERSION, "step": step, "files": records}
    return to_json(body | {"sha256": hashlib.sha256(to_json(body, MANIFEST)).hexdigest()}, MANIFEST)


def read_manifest(folder: Path) -> tuple[int, Records]:
    """The step and the files of a checkpoint's folder, after a look at every name and size in it."""
    path = folder / MANIFEST
    with _opened(path) as file:
        body = from_json(text := file.read(), path)
    version, step, records = (body.get(name) for name in ("version", "step", "files"))
    if body.get("format") != _FORMAT or type(version) is not int:
        raise damaged(path, "is not the manifest of a depthgate checkpoint")
    if version != VERSION:
        remedy = "upgrade depthgate" if version > VERSION else "read and save it with the depthgate that wrote it"
        raise DepthgateError(f"{path} has format version {version}, this depthgate reads {VERSION}: {remedy}")
    if type(step) is not int or not isinstance(records, dict) or not records.keys() >= set(PLAIN):
        raise damaged(path, f"does not list a step, {' and '.join(PLAIN)}")
    for name, record in records.items():
        match record:
            case {"size": int(), "sha256": str(), **more} if not more and (name in PLAIN or FILE_NAME.fullmatch(name)):
                continue
        raise damaged(path, f"lists {name[:99]!r}, which is not a file of a checkpoint")
    if text != pack_manifest(step, records):
        raise damaged(path, "is not what was saved (its own SHA-256 differs)")
    if step_of(folder.name) not in (-1, step):
        raise damaged(folder, f"holds step {step}, so it was renamed or mixed up")
    if extra := set(os.listdir(folder)) - {*records, MANIFEST}:
        raise damaged(folder / min(extra), "is not in the manifest; remove it if it is yours")
    for name, record in records.items():
        with _opened(folder / name, record):
            pass
    return step, records


@contextmanager
def _opened(path: Path, record: Plain | None = None, hashed: bool = False) -> Iterator[IO[bytes]]:
    """A plain file in a plain folder, its size checked before anything is read, and its hash where asked for."""
    try:
        if path.parent.is_symlink():
            raise damaged(path.parent, "cannot be opened (it is a symbolic link)")
        # Without O_NONBLOCK, a pipe put there would block for ever.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise damaged(path, "is not a plain file")
            if record is not None and found.st_size != record["size"]:
                raise damaged(path, f"has {found.st_size} bytes where the manifest says {record['size']}")
            if path.suffix == ".json" and found.st_size > MAX_JSON:
                raise damaged(path, f"has {found.st_size} bytes, more than the {MAX_JSON} allowed")
            if record is not None and hashed and hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
                raise damaged(path, "is not what was saved (its SHA-256 differs)")
            file.seek(0)
            yield file
    except OSError as error:
        raise damaged(path, f"cannot be opened ({error.strerror})") from None


def runs_in(folder: Path) -> str:
    """The runs that a folder holds, for a message; empty where it holds none."""
    runs = sorted({str(path.parent) for depth in ("*", "*/*") for path in folder.glob(f"{depth}/step-*")})
    return f"{', '.join(runs[:9])}{' ...' if runs[9:] else ''}"


def load(run: Path, only: Collection[str] | None = None, world: World = ALONE, held: Named | None = None) -> Checkpoint:
    """Read the newest complete checkpoint, the same in all processes; a warning names damaged ones, which are skipped.

    `only` names the groups of tensors to read, and to check; all unless given. In several processes, a tensor with the
    name of one in `held` (or that name, a colon and more) and its shape is split as it is.
    """
    failed: dict[Path, str] = {}
    # Listed again each time: a run that is still saving may have removed an old one and added a newer one.
    while left := [path for path in world.told(world.agree(lambda: _candidates(Path(run)))) if path not in failed]:
        try:
            found = world.agree(partial(read_folder, left[-1], only, world, held))
        except DepthgateError as error:
            failed[left[-1]] = str(error)
            continue
        for later, reason in failed.items():
            if step_of(later.name) >= found.step and world.first:
                warnings.warn(f"{reason}\nstep {found.step} is loaded instead", DepthgateWarning, stacklevel=2)
        return found
    reasons = "".join(f"\n{reason}" for reason in list(failed.values())[:5])
    remedy = "delete that folder to train again" if failed else "the run has not saved yet, or this is not its folder"
    if runs := runs_in(Path(run)):
        remedy = f"it holds runs, name one of them: {runs}"
    raise DepthgateError(f"no complete checkpoint in {run}: {remedy}{reasons}")


def read_folder(
    folder: Path, only: Collection[str] | None = None, world: World = ALONE, held: Named | None = None
) -> Checkpoint:
    """Read one checkpoint, from a folder of any name; what is missing, damaged or unknown is an error. Each process
    compares its share of the files with their hashes, and looks at all headers before it takes memory for tensors."""
    folder = Path(folder)
    step, records = read_manifest(folder)
    groups = tensor_files.by_group(records, folder)
    wanted = sorted(groups if only is None else only)
    if not groups.keys() >= set(wanted):
        raise DepthgateError(f"{folder} has no tensors named {wanted}: it has {sorted(groups)}")
    own = sorted(records, key=lambda name: (records[name]["size"], name))[world.rank :: world.size]

    def opened(name: str) -> Any:
        with _opened(folder / name, records[name], hashed=name in PLAIN or name in own) as file:
            if name in PLAIN:
                return from_json(file.read(), folder / name)
            return tensor_files.open_file(file.fileno(), folder / name)

    names = [*PLAIN, *(name for group in wanted for name in groups[group])]
    with ThreadPoolExecutor(4) as pool:  # hashing is most of the work
        found = dict(zip(names, pool.map(opened, names), strict=True))
    pieces = {group: tensor_files.index({folder / name: found[name] for name in groups[group]}) for group in wanted}
    tensors = {group: tensor_files.read_all(pieces[group], world, held or {}) for group in wanted}
    # Random routers had their salt under another name once.
    tensors = {g: {n.replace("router.salt", "router.proj.salt"): t for n, t in tensors[g].items()} for g in wanted}
    return Checkpoint(folder, step, tensors, *(found[name] for name in PLAIN))


def check_fit(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: Path) -> None:
    """Tensors must have the names, shapes and dtypes of those they replace, and be finite."""
    if odd := sorted(found.keys() ^ wanted.keys()):
        what = "lacks" if odd[0] in wanted else "has the unknown"
        raise damaged(path, f"does not fit its configuration: it {what} {odd[0][:99]!r}")
    for name, tensor in found.items():
        if (tensor.shape, tensor.dtype) != (wanted[name].shape, wanted[name].dtype):
            kind = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            raise damaged(path, f"does not fit its configuration: {name} is {kind}"[:300])
        own = getattr(tensor, "to_local", lambda t=tensor: t)()  # of a split tensor, this process's rows
        if own.is_floating_point() and not own.isfinite().all():
            raise damaged(path, f"has numbers in {name} that are not finite")


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, or raise at once if another process or thread does. A dead process holds nothing. The
    holder alone may remove the file. A process that opened it before then locks a removed file, and is refused."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (path.exists() and os.path.samestat(os.fstat(fd), path.stat())):
                raise BlockingIOError
        except BlockingIOError:
            raise DepthgateError(f"{path} is held by a process that writes there: choose another folder") from None
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough where a forked child has the file open too
        os.close(fd)


def steps(run: Path) -> list[int]:
    """The steps that have a folder, ascending; none if there is no such run. Damaged ones count: see `load`."""
    return sorted({step_of(path.name) for path in _candidates(Path(run))})


def step_of(name: str) -> int:
    """The step of a checkpoint's folder, by its name; -1 for other names."""
    return int(match[2]) if (match := _STEP.fullmatch(name)) else -1


def _candidates(run: Path) -> list[Path]:
    """Everything that has the name of a checkpoint, oldest first; a replaced one (.old) before its successor."""
    try:
        found = [name for name in os.listdir(run) if step_of(name) >= 0]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DepthgateError(f"{run} cannot be read ({error.strerror}): give the folder of a run") from None
    return [run / name for name in sorted(found, key=lambda name: (step_of(name), name))]


def _tidy(run: Path) -> None:
    """Remove what a killed save left. Only the holder of the lock may, so nothing here is still being written."""
    for path in [*run.glob(".tmp-step-*"), *run.glob(".old-step-*")]:
        target = run / f"step-{step_of(path.name)}"
        if path.name.startswith(".tmp-") or os.path.lexists(target):
            _discard(path)
        elif step_of(path.name) >= 0:
            os.rename(path, target)


def _rotate(run: Path, step: int, keep: int) -> None:
    """Remove checkpoints older than the `keep` newest up to `step` that are complete by manifest and sizes. Later ones
    may be the damaged ones that a resume went back from: they must not push out the good ones."""
    kept = 0
    for path in reversed(_candidates(run)):
        if path.name.startswith("."):
            _discard(path)
        elif step_of(path.name) > step:
            warnings.warn(f"{path} is later than step {step}, now saved: a load tries it first", DepthgateWarning, 4)
        elif kept >= keep:
            _discard(path)
        else:
            with suppress(DepthgateError):
                read_manifest(path)
                kept += 1


def _discard(path: Path) -> None:
    """Remove a folder, or warn: an old folder that stays is not a reason to stop training."""
    try:
        if not path.name.startswith(".tmp-"):
            # Out of sight first: a kill must not leave half a checkpoint.
            path = path.rename(path.with_name(f".tmp-{path.name.removeprefix('.old-')}-{secrets.token_hex(4)}"))
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(f"cannot remove {path} ({error.strerror}): remove it by hand", DepthgateWarning, stacklevel=5)


def as_written_now(config: dict[str, Any]) -> dict[str, Any]:
    """A run's configuration as this version writes it: what older versions did not name is what it was then."""
    model = config.get("model")
    if not isinstance(model, dict):
        return config
    if config.get("task") == "images":
        return {**config, "model": {"stem": False, **model}}
    pattern, dim, changed = model.get("pattern"), model.get("dim"), dict[str, Any]()
    if "choice" not in model and isinstance(pattern, str) and isinstance(dim, int):
        kinds = pattern.split(",")  # mode was the staged kind, and experts as wide as a dense feed-forward
        changed["pattern"] = ",".join("mode_staged" if kind == "mode" else kind for kind in kinds)
        if {*kinds} & {*EXPERT_KINDS}:
            changed["expert_hidden"] = model.get("expert_hidden") or model.get("hidden") or swiglu_hidden(dim)
    return {**config, "model": {**_LATER, **model, **changed}}
