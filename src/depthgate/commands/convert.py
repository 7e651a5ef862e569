"""`depthgate convert`: a Hugging Face model with routed layers, or a run of ours as a Hugging Face model."""

import json
from pathlib import Path
from typing import Any

import torch

from depthgate.checkpoint.store import MANIFEST, steps
from depthgate.config import ConvertConfig
from depthgate.errors import InvalidValueError
from depthgate.hf.conversion import check_new, check_same, convert_folder, probe_for, save
from depthgate.hf.export import export
from depthgate.hf.families import Routing
from depthgate.loading import is_hugging_face, load_decoder

_ROUTING = ("capacity", "layers", "gate", "rule", "text")  # options that mean nothing for a run


def run(config: ConvertConfig, as_json: bool) -> None:
    """Convert a Hugging Face model, or export a run, and print what was done."""
    source = Path(config.model)
    ours = source.is_dir() and not is_hugging_face(source) and ((source / MANIFEST).exists() or steps(source))
    found, lines = _export(config) if ours else _convert(config)
    print(json.dumps({"out": config.out, **found}) if as_json else "\n".join([*lines, f"wrote {config.out}"]))


def _convert(config: ConvertConfig) -> tuple[dict[str, Any], list[str]]:
    """Figures for --json, and lines for a reader."""
    if config.to is not None:
        raise InvalidValueError(f"to is {config.to!r}, but {config.model} is not a run: leave --to out")
    routed, changes, difference = convert_folder(config)
    routing = routed.depthgate
    shares = dict(zip(routing["layers"], Routing.read(routing, routed.num_hidden_layers).capacities, strict=True))
    lines = [f"{'layer':>5} {'change':>8}  tokens that enter"]
    for i in range(routed.num_hidden_layers):
        lines.append(f"{i:5} {'' if changes is None else f'{changes[i]:.4f}':>8}  {shares.get(i, 1):.0%}")
    if changes is not None:
        lines.append("change: mean |f(x) - x| / |x| over the tokens of the text")
    lines.append("these shares hold in training; in evaluation all tokens enter until routers have learnt (finetune)")
    if getattr(routed, "final_logit_softcapping", None):
        lines.append("the model caps its logits (final_logit_softcapping): depthgate finetune and eval refuse it")
    lines.append(f"at capacity 1 the logits are the dense model's (largest difference {difference:.1e} of the largest)")
    return {"routing": routing, "difference": difference, "changes": changes}, lines


def _export(config: ConvertConfig) -> tuple[dict[str, Any], list[str]]:
    """The same for a run, which becomes a Hugging Face model with the same logits."""
    if given := [name for name in _ROUTING if getattr(config, name) is not None]:
        what = f"{config.model} is a run, which keeps its own routing"
        raise InvalidValueError(f"{what}: leave --{given[0]} out, which is for Hugging Face models")
    check_new(Path(config.out), Path(config.model))
    decoder = load_decoder(config.model)
    model = export(decoder, config.to)
    if hasattr(model, "routing_mode"):
        model.routing_mode = config.routing_mode
    probe, _ = probe_for(config, model.config)
    with torch.no_grad():
        difference = check_same(model, probe, [decoder(probe, causal=causal).logits for causal in (True, False)])
    save(model, decoder.tokenizer.save, Path(config.out))
    said = f"a {type(model).__name__} with the logits of the run (largest difference {difference:.1e} of the largest)"
    return {"model_type": model.config.model_type, "difference": difference}, [said]
