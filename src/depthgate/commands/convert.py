"""`depthgate convert`: a Hugging Face model with routed layers, or a run of ours as a Hugging Face model."""

import json
from dataclasses import fields
from pathlib import Path

import torch

from depthgate.checkpoint.store import MANIFEST, steps
from depthgate.config import ConvertConfig
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.hf import command
from depthgate.hf.code import is_model
from depthgate.hf.decoder import export
from depthgate.loading import load

_TOLERANCE = 1e-4  # of the largest logit, in float32: two right answers that were rounded in another order
_OF_RUNS = ("model", "out", "to", "probe", "seed")  # options that mean something for a run


def run(config: ConvertConfig, as_json: bool) -> int:
    """Whichever the model asks for."""
    source = Path(config.model)
    ours = source.is_dir() and not is_model(source) and ((source / MANIFEST).exists() or steps(source))
    if not ours:
        if config.to is not None:
            raise InvalidValueError(f"to is {config.to!r}, but {source} is no run of `depthgate train`: leave --to out")
        return command.run(config, as_json)
    for each in fields(config):
        if each.name not in _OF_RUNS and getattr(config, each.name) != each.default:
            raise InvalidValueError(f"{source} is a run, which keeps its own routing: leave --{each.name} out")
    return _export(config, source, Path(config.out), as_json)


def _export(config: ConvertConfig, source: Path, out: Path, as_json: bool) -> int:
    command.check_new(out, source)
    decoder = load(source)
    model = export(decoder, config.to)
    length = min(config.probe, decoder.config.context)
    chance = torch.Generator().manual_seed(config.seed)
    probe = torch.randint(decoder.config.vocab, (2, length), generator=chance)
    difference = 0.0
    for causal in (True, False):
        with torch.no_grad():
            want = decoder(probe, causal=causal).logits.double()
        how = {"causal_routing": causal} if decoder.config.routed else {}
        difference = max(difference, command.distance(command.logits(model, probe, **how), want))
    if not difference <= _TOLERANCE:
        raise DepthgateError(f"the logits differ from the run's by {difference:.1e} of the largest: nothing is written")
    command.save(model, decoder.tokenizer.save, out, probe)
    found = {"out": str(out), "model_type": model.config.model_type, "difference": difference}
    if as_json:
        print(json.dumps(found))
        return 0
    print(f"logits are those of the run (largest difference {difference:.1e} of the largest)")
    print(f"wrote {out}, a {type(model).__name__}")
    return 0
