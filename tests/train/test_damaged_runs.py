"""--resume on a run whose files were damaged: the checkpoint before is used, by name, and the end is the same bit for
bit; what cannot be mended is refused, and nothing is overwritten (rows 4 to 9 of docs/reliability.md)."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from depthgate.checkpoint import store as checkpoint
from depthgate.checkpoint import tensors as tensor_files
from depthgate.device import World
from depthgate.errors import DepthgateError
from depthgate.train import run_folder as run
from tests.checkpoint.samples import ALL_FILES, flip, forge
from tests.train.tiny import rows, same, train, write_data

FILES = [*ALL_FILES, "rng.safetensors"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The runs `ten` (with the steps 5 and 10) and `twelve`, of the same data."""
    home = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        data = write_data(home / "text.jsonl")
        assert train(home / "ten", data, 10) == 0
        assert train(home / "twelve", data, 12) == 0
    return home


@pytest.fixture
def home(made, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(made))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    shutil.copytree(made / "ten", tmp_path / "run")
    return made


def resume(home, run: Path, steps: int = 12, *options: str) -> int:
    return train(run, home / "text.jsonl", steps, "--resume", *options)


def tree(folder: Path) -> dict[str, bytes]:
    """Every file, but for locks; of the configuration, what a copy of a run does not change."""
    found = {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and "lock" not in p.name}
    kept = (folder / "config.json").read_bytes().splitlines()
    return found | {str(folder / "config.json"): b"".join(line for line in kept if b'"out"' not in line)}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def swap(path: Path) -> None:
    """The file of the step before, or of the newest where both are the same."""
    other = path.parent.parent / "step-5" / path.name
    path.write_bytes(other.read_bytes())


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent.parent / "step-5" / path.name)


DAMAGE = {
    "flipped bit": lambda path: flip(path, path.stat().st_size // 2, 8),
    "cut": cut,
    "longer": grow,
    "empty": lambda path: path.write_bytes(b""),
    "missing": lambda path: path.unlink(),
    "of another step": swap,
    "a link": link,
}


# Every kind of damage and every file; all pairs of them are tried on checkpoints alone in test_checkpoint.
PAIRS = [(kind, FILES[(i + n) % len(FILES)]) for i, kind in enumerate(DAMAGE) for n in (0, 3)]
PAIRS = [pair for pair in PAIRS if pair[0] != "of another step" or pair[1] not in ("config.json", "rng.safetensors")]


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(home, tmp_path, name, kind):
    path = tmp_path / "run" / "step-10" / name
    before = path.read_bytes()
    DAMAGE[kind](path)
    assert kind in ("missing", "a link") or path.read_bytes() != before
    with pytest.warns(UserWarning, match=r"(?s)step-10.*step 5 is loaded instead"):
        assert resume(home, tmp_path / "run") == 0
    assert same(tmp_path / "run", home / "twelve")
    assert [r["loss"] for r in rows(tmp_path / "run")] == [r["loss"] for r in rows(home / "twelve")]


FOLDERS = {
    "an extra file": lambda run: (run / "step-10" / "extra.pt").touch(),
    "the name of another step": lambda run: (run / "step-10").rename(run / "step-11"),
    "a file in its place": lambda run: (shutil.rmtree(run / "step-10"), (run / "step-10").touch()),
    "an empty folder": lambda run: (shutil.rmtree(run / "step-10"), (run / "step-10").mkdir()),
    "a link to another": lambda run: (shutil.rmtree(run / "step-10"), (run / "step-10").symlink_to(run / "step-5")),
    "a later one": lambda run: (run / "step-99").mkdir(),
}


@pytest.mark.parametrize("kind", FOLDERS)
def test_a_damaged_folder_is_named(home, tmp_path, kind):
    FOLDERS[kind](tmp_path / "run")
    with pytest.warns(UserWarning, match=r"(?s)step-(10|11|99).*is loaded instead"):
        assert resume(home, tmp_path / "run") == 0
    if kind != "a later one":  # it is left alone, as it is not ours
        shutil.rmtree(tmp_path / "run" / "step-11", ignore_errors=True)
        assert same(tmp_path / "run", home / "twelve")


def test_where_all_are_damaged_nothing_is_overwritten(home, tmp_path, capsys):
    for step in ("step-5", "step-10"):
        flip(tmp_path / "run" / step / "model.safetensors", -1)
    before = tree(tmp_path / "run")
    assert resume(home, tmp_path / "run", 10) == 2
    errors = capsys.readouterr().err
    assert "no complete checkpoint" in errors
    assert "delete that folder to train again" in errors
    assert "step-5/model.safetensors" in errors
    assert "step-10/model.safetensors" in errors
    assert tree(tmp_path / "run") == before


@pytest.mark.parametrize(
    "damage", [lambda p: p.unlink(), cut, lambda p: p.write_bytes(b"\xff"), lambda p: p.write_text("[" * 10**5)]
)
def test_what_the_run_was_asked_to_do_is_also_in_its_checkpoints(home, tmp_path, damage, capsys):
    damage(tmp_path / "run" / "config.json")
    with pytest.warns(UserWarning, match=r"(?s)config.json.*the configuration in the newest checkpoint is used"):
        assert resume(home, tmp_path / "run", 12, "--lr=0.5") == 2
    assert "lr: 0.016 there, 0.5 here" in capsys.readouterr().err
    with pytest.warns(UserWarning, match=r"config.json"):
        assert resume(home, tmp_path / "run") == 0
    assert same(tmp_path / "run", home / "twelve")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["steps"] == 12


def test_a_lost_configuration_of_a_run_with_its_own_tokenizer(home, tmp_path):
    options = ["--tokenizer=bpe", "--vocab=270"]
    assert train(tmp_path / "bpe", home / "text.jsonl", 5, *options) == 0
    (tmp_path / "bpe" / "config.json").unlink()
    with pytest.warns(UserWarning, match=r"config.json"):
        assert train(tmp_path / "bpe", home / "text.jsonl", 7, *options, "--resume") == 0
    assert checkpoint.steps(tmp_path / "bpe") == [5, 7]


def test_a_run_that_saved_nothing_and_lost_its_configuration_is_refused(home, tmp_path, capsys):
    for step in ("step-5", "step-10"):
        shutil.rmtree(tmp_path / "run" / step)
    (tmp_path / "run" / "config.json").write_text("{")
    before = tree(tmp_path / "run")
    assert resume(home, tmp_path / "run") == 2
    assert "cannot read" in capsys.readouterr().err
    assert tree(tmp_path / "run") == before


OTHERS = {
    "--model.dim=32": "model.dim: 16 there, 32 here",
    "--model.layers=4": "model.layers: 2 there, 4 here",
    "--model.capacity=0.5": "model.capacity: 0.125 there, 0.5 here",
    "--model.rule=predictor": "model.rule: threshold there, predictor here",
    "--model.gate=raw": "model.gate: one_plus_tanh there, raw here",
    "--model.pattern=moe": "model.pattern: dense,mod there, moe here",
    "--model.vocab=300": "model.vocab: 257 there, 300 here",
    "--tokenizer=bpe --vocab=300": "vocab: None there, 300 here",
    "--accumulate=2": "accumulate: 1 there, 2 here",
    "--optimizer=muon": "optimizer: adamw there, muon here",
    "--validation=other.txt": "validation: None there, other.txt here",
    "--preset=tiny-dense": "preset: tiny-mod there, tiny-dense here",
}


@pytest.mark.parametrize(("options", "says"), OTHERS.items())
def test_another_configuration_is_refused_with_its_differences(home, tmp_path, options, says, capsys):
    before = tree(tmp_path / "run")
    assert resume(home, tmp_path / "run", 12, *options.split()) == 2
    errors = capsys.readouterr().err
    assert says in errors
    assert len(errors.splitlines()) <= 15
    assert tree(tmp_path / "run") == before


def test_unknown_and_missing_keys_of_a_recorded_configuration_are_listed(home, tmp_path, capsys):
    path = tmp_path / "run" / "config.json"
    recorded = json.loads(path.read_text())
    del recorded["clip"]
    path.write_text(json.dumps(recorded | {"future": "x" * 500, "model": recorded["model"] | {"more": 1}}))
    assert resume(home, tmp_path / "run") == 2
    errors = capsys.readouterr().err
    assert "clip: absent there, 1.0 here" in errors
    assert "model.more: 1 there, absent here" in errors
    assert "future: xxx" in errors
    assert len(errors) < 1000


def test_other_data_is_refused(home, tmp_path, monkeypatch, capsys):
    other = tmp_path / "text.jsonl"
    other.write_text((home / "text.jsonl").read_text().replace("fox", "cat"))
    before = tree(tmp_path / "run")
    assert train(tmp_path / "run", other, 12, "--resume") == 2
    says = f"data is {other}, which does not hold what {tmp_path / 'run'} was trained on ({home / 'text.jsonl'})"
    assert f"{says}: leave --data out" in capsys.readouterr().err
    assert tree(tmp_path / "run") == before
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace(str(home / "text.jsonl"), str(other)))
    for step in ("step-5", "step-10"):
        inner = tmp_path / "run" / step / "config.json"
        inner.write_text(inner.read_text().replace(str(home / "text.jsonl"), str(other)))
        forge(inner.parent)
    assert train(tmp_path / "run", other, 12, "--resume") == 2
    assert f"{other} has changed since step 10" in capsys.readouterr().err
    assert checkpoint.steps(tmp_path / "run") == [5, 10]


NEW = {"step": 0, "tokens": 0, "flops": 0.0, "data": ""}
STATES = {
    "missing": {"step": 10, "tokens": 1, "flops": 0.5},
    "unknown": {"step": 10, "tokens": 1, "flops": 0.5, "data": "", "more": 1},
    "another step": {"step": 9, "tokens": 1, "flops": 0.5, "data": ""},
    "text": {"step": "10", "tokens": 1, "flops": 0.5, "data": ""},
    "boolean": {"step": 10, "tokens": True, "flops": 0.5, "data": ""},
    "fraction": {"step": 10, "tokens": 1.5, "flops": 0.5, "data": ""},
    "negative": {"step": 10, "tokens": -1, "flops": 0.5, "data": ""},
    "NaN": {"step": 10, "tokens": 1, "flops": float("nan"), "data": ""},
    "infinite": {"step": 10, "tokens": 1, "flops": float("inf"), "data": ""},
    "null": {"step": 10, "tokens": 1, "flops": 0.5, "data": None},
    "nothing": {},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_a_forged_state_is_refused(state):
    with pytest.raises(DepthgateError, match=r"state.json is not the state of a run"):
        run.check_state(checkpoint.Checkpoint(Path("run/step-10"), 10, {}, state, {}), NEW)


def test_a_good_state_is_taken():
    state = {"step": 10, "tokens": 1, "flops": 0.5, "data": "x"}
    run.check_state(checkpoint.Checkpoint(Path("run/step-10"), 10, {}, state, {}), NEW)


def change(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def remove(path: Path, *names: str) -> None:
    body = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in body.items() if name not in names}))


def tensors(path: Path, change) -> None:
    """Write a safetensors file again, with other tensors."""
    with open(path, "rb") as file:
        wholes = tensor_files.index({path: tensor_files.open_file(file.fileno(), path)})
        found = tensor_files.read_all(wholes, World(), {})
    change(found)
    tensor_files.write(path, found)


FORGED = {
    "a state without a step": lambda f: remove(f / "state.json", "step"),
    "a step in words": lambda f: change(f / "state.json", step="ten"),
    "a step before the first": lambda f: change(f / "state.json", step=-1),
    "tokens that are no number": lambda f: change(f / "state.json", tokens=float("nan")),
    "sequences in part": lambda f: change(f / "state.json", sequences=1.5),
    "the configuration of another run": lambda f: change(f / "config.json", seed=7),
    "no configuration": lambda f: (f / "config.json").write_text("{}"),
    "no optimizer": lambda f: ((f / "optimizer.safetensors").unlink(), unlisted(f, "optimizer.safetensors")),
    "no random numbers": lambda f: ((f / "rng.safetensors").unlink(), unlisted(f, "rng.safetensors")),
    "random numbers of another kind": lambda f: tensors(f / "rng.safetensors", lambda t: t.update(cpu=torch.ones(3))),
    "too few random numbers": lambda f: tensors(f / "rng.safetensors", lambda t: t.update(cpu=t["cpu"][:9])),
    "no random numbers inside": lambda f: tensors(f / "rng.safetensors", lambda t: t.clear()),
    "a weight less": lambda f: tensors(f / "model.safetensors", lambda t: t.pop("norm.weight")),
    "a weight more": lambda f: tensors(f / "model.safetensors", lambda t: t.update(x=torch.ones(1))),
    "a weight of another shape": lambda f: tensors(f / "model.safetensors", reshaped("norm.weight")),
    "a weight of another dtype": lambda f: tensors(f / "model.safetensors", doubled("norm.weight")),
    "a weight that is no number": lambda f: tensors(
        f / "model.safetensors", lambda t: t["norm.weight"].fill_(torch.nan)
    ),
    "a moment of another shape": lambda f: tensors(f / "optimizer.safetensors", reshaped("norm.weight:exp_avg")),
    "a moment of another dtype": lambda f: tensors(f / "optimizer.safetensors", doubled("norm.weight:exp_avg")),
    "a moment less": lambda f: tensors(f / "optimizer.safetensors", lambda t: t.pop("norm.weight:exp_avg_sq")),
    "a moment of nothing": lambda f: tensors(f / "optimizer.safetensors", lambda t: t.update({"x:y": torch.ones(1)})),
    "a moment that is no number": lambda f: tensors(
        f / "optimizer.safetensors", lambda t: t["norm.weight:exp_avg"].fill_(torch.nan)
    ),
}


def unlisted(folder: Path, name: str) -> None:
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    forge(folder, files={other: claim for other, claim in listed.items() if other != name})


def reshaped(name: str):
    return lambda found: found.update({name: found[name].reshape(4, 4)})


def doubled(name: str):
    return lambda found: found.update({name: found[name].double()})


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_checkpoint_is_no_way_to_go_on(home, tmp_path, kind, capsys):
    """Hashes that fit do not help: whatever a run could not have saved is refused, and nothing is overwritten."""
    folder = tmp_path / "run" / "step-10"
    FORGED[kind](folder)
    forge(folder)
    before = tree(tmp_path / "run")
    assert resume(home, tmp_path / "run", 10) == 2
    errors = capsys.readouterr().err
    assert "step-10" in errors
    assert "Traceback" not in errors
    assert tree(tmp_path / "run") == before
