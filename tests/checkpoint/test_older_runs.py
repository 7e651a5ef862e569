"""Runs that commit e9f41b0 wrote, by one process and by two: their weights load as that commit read them.

tests/fixtures/e9f41b0/expected.json has hashes of all tensors and the first logits after "the dog looks", by that
commit. The runs were made by `depthgate train` with these options, one of them under torchrun with two processes.
"""

import hashlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import depthgate as dg
from depthgate.checkpoint import store as checkpoint
from depthgate.cli import main
from depthgate.data.tokenizer import ByteTokenizer
from tests.conftest import close

OLD = Path(__file__).parents[1] / "fixtures" / "e9f41b0"
EXPECTED = json.loads((OLD / "expected.json").read_text())
OPTIONS = [
    # What the preset was then.
    *(f"--model.{name}=false" for name in ("qk_norm", "key_shift", "embed_norm", "router_norm")),
    *("--schedule=cosine", "--lowest_lr=0.1", "--warmup=20", "--lr=0.003", "--schedule_steps=1000"),
    "--model.dim=4",
    "--model.layers=2",
    "--model.heads=2",
    "--model.hidden=4",
    "--model.context=16",
    "--model.pattern=mod,dense",
    "--model.capacity=0.5",
    "--model.tied=true",
    "--model.rule=threshold",
    "--batch=2",
    "--device=cpu",
]


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()))
    return found.hexdigest()


@pytest.mark.parametrize("run", ["one", "two"])
def test_every_tensor_is_what_was_saved(run):
    found = checkpoint.load(OLD / run)
    assert found.step == 2
    for group in ("model", "optimizer", "rng"):
        assert digest(found.tensors[group]) == EXPECTED[run][group]
    checkpoint.read_folder(OLD / run / "step-2")


@pytest.mark.parametrize("run", ["one", "two"])
def test_the_model_gives_the_same_logits(run):
    model = dg.load(OLD / run)
    tokens = torch.tensor([model.tokenizer.encode("the dog looks")])
    with torch.no_grad():
        close(model(tokens, causal=True).logits[0, -1, :8], torch.tensor(EXPECTED[run]["logits"]))


@pytest.mark.parametrize("run", ["one", "two"])
def test_the_run_goes_on(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(OLD / run, tmp_path / "run")
    command = ["train", "--out", str(tmp_path / "run"), "--data", str(OLD / "text.txt"), "--steps=4", *OPTIONS]
    assert main([*command, "--resume"]) == 0
    assert checkpoint.steps(tmp_path / "run") == [2, 4]


def test_random_layers_load_with_the_salt_under_its_old_name(tmp_path):
    config = dg.ModelConfig(vocab=257, dim=4, layers=2, heads=2, pattern="random,dense", capacity=0.5)
    model, tokens = dg.Decoder(config).eval(), torch.arange(24)[None]
    old = {name.replace("router.proj.salt", "router.salt"): weight for name, weight in model.state_dict().items()}
    assert "layers.0.router.salt" in old
    checkpoint.save(tmp_path, 1, {"model": old}, {}, {"model": asdict(config)})
    ByteTokenizer().save(tmp_path / "tokenizer")
    with torch.no_grad():
        assert torch.equal(dg.load(tmp_path)(tokens, causal=True).logits, model(tokens, causal=True).logits)
