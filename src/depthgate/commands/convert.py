"""`depthgate convert`: a Hugging Face model with routed layers, or a run of ours as a Hugging Face model."""

import json
from dataclasses import fields
from pathlib import Path

import torch

from depthgate.checkpoint.store import MANIFEST, steps
from depthgate.config import ConvertConfig
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.hf.conversion import TOLERANCE, Converted, check_new, convert_folder, distance, logits, save
from depthgate.hf.decoder_weights import export
from depthgate.loading import is_hugging_face, load

_OF_RUNS = ("model", "out", "to", "probe", "seed")  # options that mean something for a run


def run(config: ConvertConfig, as_json: bool) -> int:
    """Convert a Hugging Face model, or export a run, and print what was done."""
    source = Path(config.model)
    ours = source.is_dir() and not is_hugging_face(source) and ((source / MANIFEST).exists() or steps(source))
    if ours:
        for each in fields(config):
            if each.name not in _OF_RUNS and getattr(config, each.name) != each.default:
                raise InvalidValueError(f"{source} is a run, which keeps its own routing: leave --{each.name} out")
        _export(config, as_json)
        return 0
    if config.to is not None:
        raise InvalidValueError(f"to is {config.to!r}, but {source} is not a run of `depthgate train`: leave --to out")
    done = convert_folder(config)
    if as_json:
        found = {"routing": done.config.depthgate, "difference": done.difference, "changes": done.changes}
        print(json.dumps({"out": config.out, **found}))
    else:
        _print(done)
        print(f"wrote {config.out}")
    return 0


def _print(done: Converted) -> None:
    routing = done.config.depthgate
    print(f"{'layer':>5} {'change':>8}  tokens that enter")
    for i in range(done.config.num_hidden_layers):
        change = "" if done.changes is None else f"{done.changes[i]:.4f}"
        print(f"{i:5} {change:>8}  {routing['capacity'] if i in routing['layers'] else 1:.0%}")
    if done.changes is not None:
        print("change: mean |f(x) - x| / |x| over the tokens of the text")
    print(f"at capacity 1 the logits are the dense model's (largest difference {done.difference:.1e} of the largest)")


def _export(config: ConvertConfig, as_json: bool) -> None:
    """Write a run as a Hugging Face model whose logits are those of the run."""
    out = Path(config.out)
    check_new(out, Path(config.model))
    decoder = load(config.model)
    model = export(decoder, config.to)
    length = min(config.probe, decoder.config.context)
    chance = torch.Generator().manual_seed(config.seed)
    probe = torch.randint(decoder.config.vocab, (2, length), generator=chance)
    difference = 0.0
    for causal in (True, False):
        with torch.no_grad():
            want = decoder(probe, causal=causal).logits.double()
        how = {"causal_routing": causal} if decoder.config.routed else {}
        difference = max(difference, distance(logits(model, probe, **how), want))
    if not difference <= TOLERANCE[torch.float32]:
        raise DepthgateError(f"the logits differ from the run's by {difference:.1e} of the largest: nothing is written")
    save(model, decoder.tokenizer.save, out, probe)
    if as_json:
        print(json.dumps({"out": str(out), "model_type": model.config.model_type, "difference": difference}))
        return
    print(f"the logits are those of the run (largest difference {difference:.1e} of the largest)")
    print(f"wrote {out}, a {type(model).__name__}")
