"""`depthgate train` from outside: a run that is cut and goes on equals one that was not, bit for bit."""

import json
import signal
import time
from pathlib import Path

import pytest
import torch

import depthgate as dg
from depthgate.checkpoint import store as checkpoint
from depthgate.cli import main
from depthgate.config import TrainConfig
from depthgate.errors import DepthgateError, DepthgateWarning
from depthgate.loading import text_of
from depthgate.routing import agreement
from depthgate.train import loop, optim
from depthgate.train.evaluate import measure
from tests.train.tiny import rows, same, start, train

OPTIONS = {
    "mod": [],
    "accumulation": ["--accumulate=2"],
    "workers": ["--workers=2"],
    "muon, wsd": ["--optimizer=muon", "--schedule=wsd", "--schedule_steps=12"],
    "threshold": ["--model.rule=threshold"],
    "scores, capacity schedule": ["--model.rule=scores", "--capacity_steps=8"],
    "mode_staged": ["--model.pattern=dense,mode_staged", "--model.experts=4", "--model.null_experts=1"],
    "mode, linear": ["--model.pattern=dense,mode", "--model.experts=4", "--schedule=linear", "--lowest_lr=0"],
    "mode by tokens": [
        *("--model.pattern=mod,mode", "--model.experts=4", "--model.choice=tokens", "--model.null_experts=1"),
        *("--model.key_shift=true", "--model.embed_norm=true", "--model.router_norm=true"),
    ],
    "bfloat16": ["--dtype=bfloat16"],
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_five_and_five_steps_equal_ten(tmp_path, data, options):
    assert train(tmp_path / "whole", data, 10, *options) == 0
    assert train(tmp_path / "parts", data, 5, *options) == 0
    assert train(tmp_path / "parts", data, 10, "--resume", *options) == 0
    assert same(tmp_path / "whole", tmp_path / "parts")
    losses = [[row["loss"] for row in rows(tmp_path / run)] for run in ("whole", "parts")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 10


def test_some_rows_have_figures_of_the_held_out_text(tmp_path, data, monkeypatch):
    """About ten of them, those of a measurement of the model as it was; the run is what it would be without."""
    options = ("--model.pattern=dense,mod", "--model.capacity=0.5", "--checkpoint_every=4")
    assert train(tmp_path / "without", data, 12, *options) == 0
    assert not any("held_out_loss" in row for row in rows(tmp_path / "without"))  # too short a run to look
    monkeypatch.setattr(loop, "GLANCE", 16)
    assert train(tmp_path / "with", data, 8, *options) == 0
    assert train(tmp_path / "with", data, 12, *options, "--resume") == 0
    assert same(tmp_path / "without", tmp_path / "with")
    found = {row["step"]: row for row in rows(tmp_path / "with") if "held_out_loss" in row}
    assert list(found) == [4, 8, 12]  # a look at 16 tokens for 512 that are trained on
    model = dg.load(tmp_path / "with")
    wanted = measure(model, text_of(tmp_path / "with", model.tokenizer), 4, 16)
    assert found[12]["held_out_loss"] == pytest.approx(wanted["nats_per_token"], rel=1e-6)
    assert (found[12]["causal_share"], found[12]["agreement"]) == (wanted["routed_share"], wanted["agreement"])


def test_the_run_passes_an_epoch_and_workers_change_nothing(tmp_path, data):
    assert train(tmp_path / "none", data, 20) == 0
    assert train(tmp_path / "two", data, 13, "--workers=2") == 0
    assert train(tmp_path / "two", data, 20, "--workers=1", "--resume") == 0
    assert same(tmp_path / "none", tmp_path / "two")
    assert checkpoint.load(tmp_path / "none").state["sequences"] == 80
    assert rows(tmp_path / "none")[0]["loss"] > rows(tmp_path / "none")[-1]["loss"]


def test_a_run_goes_on_with_its_own_options(tmp_path, data, capsys):
    """--resume and its folder are enough; what is given again must agree; a complete run says so."""
    assert train(tmp_path / "whole", data, 10, "--lr=0.002", "--model.key_shift=false") == 0
    assert train(tmp_path / "a", data, 5, "--lr=0.002", "--model.key_shift=false") == 0
    size = sum(len(json.loads(line)["text"]) for line in Path(data).read_text().splitlines())
    told = f"data {data}: {size:,} bytes of text, 12 documents, {size + 12:,} tokens, "  # each with one that ends it
    assert told in capsys.readouterr().err
    again = ["train", "--resume", "--out", str(tmp_path / "a")]
    assert main(again) == 0
    assert "at step 5, saved in" in (errors := capsys.readouterr().err)
    assert "more with --steps" in errors
    assert main([*again, "--steps=7", "--lr=0.002"]) == 0
    (tmp_path / "a" / "config.json").write_text("{")
    with pytest.warns(UserWarning, match="the configuration in the newest checkpoint is used"):
        assert main([*again, "--steps=10"]) == 0
    assert same(tmp_path / "a", tmp_path / "whole")
    assert main([*again, "--lr=0.5"]) == 2
    assert "lr: 0.002 there, 0.5 here" in capsys.readouterr().err


def test_resume_begins_at_the_beginning_where_nothing_was_saved(tmp_path, data):
    assert train(tmp_path / "a", data, 3, "--resume") == 0
    assert [row["step"] for row in rows(tmp_path / "a")] == [1, 2, 3]
    assert checkpoint.steps(tmp_path / "a") == [3]


def test_rows_after_the_checkpoint_are_done_again_once(tmp_path, data):
    train(tmp_path / "a", data, 5)
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "loss": 0.0}) + "\n" + '{"step": 7, "lo')  # as a kill leaves it
    train(tmp_path / "a", data, 8, "--resume")
    assert [row["step"] for row in rows(tmp_path / "a")] == list(range(1, 9))


def test_ctrl_c_saves_and_ends(tmp_path, data):
    """Of a real process; SIGTERM in test_interrupts."""
    out = tmp_path / "run"
    process = start(out, data, 10**6)
    while not checkpoint.steps(out) if out.exists() else True:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "go on with --resume" in errors
    assert "Traceback" not in errors
    assert checkpoint.load(out).step == rows(out)[-1]["step"]


def test_load_gives_the_newest_checkpoint_and_its_tokenizer(tmp_path, data):
    train(tmp_path / "a", data, 7)
    model = dg.load(tmp_path / "a")
    weights = checkpoint.load(tmp_path / "a").tensors["model"]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert model.tokenizer.decode(model.tokenizer.encode("héllo")) == "héllo"
    ids = torch.tensor([model.tokenizer.encode("the fox")])
    logits, plans = model(ids, causal=True)
    assert logits.shape == (1, 7, 257)
    assert len(plans) == 1
    step = dg.load(tmp_path / "a" / "step-5")
    assert not torch.equal(step.embed.weight, model.embed.weight)


def test_eval_prints_the_causal_and_the_top_k_figure(tmp_path, data, capsys):
    train(tmp_path / "a", data, 7)
    text = tmp_path / "short.txt"
    text.write_text("the lazy dög")
    capsys.readouterr()
    assert main(["eval", "--model", str(tmp_path / "a"), "--data", str(text), "--json", "--device=cpu"]) == 0
    figures = json.loads(capsys.readouterr().out)
    model = dg.load(tmp_path / "a")
    ids = torch.tensor([[*model.tokenizer.encode("the lazy dög"), model.tokenizer.end]])
    assert figures["tokens"] == ids.shape[1] - 1
    for causal, name in ((True, "nats_per_token"), (False, "nats_per_token_top_k")):
        logits, plans = model(ids, causal=causal)
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()
        assert figures[name] == pytest.approx(loss, rel=1e-4)
        if causal:
            assert figures["routed_share"] == pytest.approx([plans[0].chosen.float().mean().item()])
        else:
            assert figures["agreement"] == pytest.approx([agreement(plans[0]).item()])
    size = len("the lazy dög".encode()) - 1
    bits = figures["nats_per_token"] * figures["tokens"] / 0.6931471805599453
    assert figures["bits_per_byte"] == pytest.approx(bits / size)


BAD = {
    "steps 0": (["--steps=0"], "steps is 0"),
    "preset": (["--preset=tiny-moode"], "tiny-mode"),
    "unknown option": (["--model.dims=8"], "dims"),
    "vocabulary": (["--model.vocab=300"], "model.vocab is 300"),
    "absurd size": (["--model.hidden=1000000000"], "hidden is 1000000000"),
    "soft moe": (["--model.pattern=dense,soft_moe"], "Soft MoE"),
    "context": (["--model.context=100000"], "context"),
    "no data": (["--data=nowhere.txt"], "nowhere.txt"),
}


@pytest.mark.parametrize(("options", "says"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_refused_and_nothing_is_trained(tmp_path, data, options, says, capsys):
    try:
        code = train(tmp_path / "a", data, 3, *options)
    except SystemExit as stop:
        code = stop.code
    errors = capsys.readouterr().err
    assert code == 2
    assert says in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "a" / "metrics.jsonl").exists()


def test_another_run_is_not_overwritten(tmp_path, data, capsys):
    train(tmp_path / "a", data, 3)
    before = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    assert train(tmp_path / "a", data, 5) == 2
    assert "another run" in capsys.readouterr().err
    assert train(tmp_path / "a", data, 5, "--resume", "--lr=0.5", "--seed=9") == 2
    errors = capsys.readouterr().err
    assert "lr: 0.016 there, 0.5 here" in errors
    assert "seed: 0 there, 9 here" in errors
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == before


def test_schedules_by_hand():
    config = TrainConfig(steps=110, warmup=10, lr=1.0, lowest_lr=0.1)
    assert optim.rate(config, 0) == pytest.approx(0.1)
    assert optim.rate(config, 9) == pytest.approx(1.0)
    assert optim.rate(config, 60) == pytest.approx(0.1 + 0.9 * 0.5)
    assert optim.rate(config, 110) == pytest.approx(0.1)
    stable = TrainConfig(steps=100, warmup=0, lr=1.0, lowest_lr=0.0, schedule="wsd")
    assert [optim.rate(stable, s) for s in (0, 80, 90, 100)] == pytest.approx([1.0, 1.0, 0.5, 0.0])
    short = TrainConfig(steps=10, warmup=100, lr=1.0, lowest_lr=0.0, schedule="linear")  # half of it warms up
    assert [optim.rate(short, s) for s in (0, 4, 5, 9)] == pytest.approx([0.2, 1.0, 1.0, 0.2])
    with pytest.raises(
        DepthgateError, match=r"schedule_steps is 20: the rate is 0 from there on, and steps up to 60 change"
    ):
        TrainConfig(steps=60, schedule_steps=20, lowest_lr=0.0)
    assert optim.rate(TrainConfig(steps=60, schedule_steps=20, lr=1.0, lowest_lr=0.1), 59) == pytest.approx(0.1)
    assert optim.capacity(0.125, 0, 16) == 1.0
    assert optim.capacity(0.125, 8, 16) == pytest.approx((1 + 0.125) / 2)
    assert optim.capacity(0.125, 16, 16) == 0.125


def test_no_document_is_left_out_unless_asked(tmp_path):
    """Many short documents in a sequence: all of them are trained on, and a limit is announced."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": f"n{i}"}) + "\n" for i in range(300)))
    assert train(tmp_path / "all", str(lines), 3) == 0
    with pytest.warns(DepthgateWarning, match="left out"):
        train(tmp_path / "few", str(lines), 3, "--max_documents=2")
    assert rows(tmp_path / "all")[0]["loss"] != rows(tmp_path / "few")[0]["loss"]


@pytest.mark.parametrize("pattern", ["dense,mod", "dense,mode_staged", "mod,moe", "mod,mode"])
def test_eval_says_the_same_for_any_batch(tmp_path, data, capsys, pattern):
    """Shares and agreement are of all tokens, and have one number for each Mixture-of-Depths layer."""
    null = f"--model.null_experts={int(pattern != 'mod,mode')}"
    assert train(tmp_path / "a", data, 6, f"--model.pattern={pattern}", "--model.experts=4", null) == 0
    capsys.readouterr()
    found = []
    for batch in ("1", "3", "64"):
        assert main(["eval", "--model", str(tmp_path / "a"), "--data", data, "--batch", batch, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    for key in ("agreement", "routed_share", "experts_per_token", "nats_per_token", "bits_per_byte"):
        for other in found[1:]:
            assert other[key] == pytest.approx(found[0][key], rel=1e-5)
    assert len(found[0]["routed_share"]) == len(found[0]["agreement"]) == 1
    assert len(found[0]["experts_per_token"]) == (pattern != "dense,mod")


def test_eval_on_what_was_held_out(tmp_path, data, capsys):
    assert train(tmp_path / "a", data, 3) == 0
    capsys.readouterr()
    assert main(["eval", "--model", str(tmp_path / "a"), "--data", "heldout", "--json"]) == 0
    part = json.loads(capsys.readouterr().out)
    assert main(["eval", "--model", str(tmp_path / "a"), "--data", data, "--json"]) == 0
    assert 0 < part["tokens"] < json.loads(capsys.readouterr().out)["tokens"]


def test_a_vocabulary_asks_for_bpe_and_presets_give_way(tmp_path, data, capsys):
    assert train(tmp_path / "bpe", data, 2, "--vocab=270") == 0
    assert dg.load(tmp_path / "bpe").tokenizer.vocab <= 270
    small = ["--preset=mod-124m", "--compile=false", "--dtype=float32", "--tokenizer=bytes"]
    assert train(tmp_path / "bytes", data, 1, *small) == 0
    assert dg.load(tmp_path / "bytes").config.vocab == 257
    assert train(tmp_path / "few", data, 1, *small[:-1]) == 0  # a text too small for 32,768 tokens


def test_json_prints_the_last_row(tmp_path, data, capsys):
    assert train(tmp_path / "a", data, 2, "--json") == 0
    assert json.loads(capsys.readouterr().out) == rows(tmp_path / "a")[-1]


def test_another_number_of_steps_that_moves_the_schedule_is_announced(tmp_path, data):
    assert train(tmp_path / "a", data, 3, "--schedule_steps=null") == 0
    with pytest.warns(DepthgateWarning, match="scheduled for 3 steps and is now for 4"):
        train(tmp_path / "a", data, 4, "--resume", "--schedule_steps=null")
