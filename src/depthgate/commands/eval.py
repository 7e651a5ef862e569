"""`depthgate eval`: a model of ours or of transformers, dense or converted, on a text, on tasks made from it, on images
or on a task of lm-eval."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from depthgate.config import EvalConfig
from depthgate.console import print_table
from depthgate.data.batches import validation_rows
from depthgate.data.sources import documents
from depthgate.data.token_file import Documents
from depthgate.device import count_flops, resolve_device
from depthgate.errors import DepthgateError
from depthgate.flops import vit_cost
from depthgate.hf.adapter import evaluate_task
from depthgate.hf.card import add_figures, check_card
from depthgate.loading import LanguageModel, images_of, is_hugging_face, is_of_images, load, open_model, text_of
from depthgate.train import images, tasks
from depthgate.train.evaluate import measure

_COUNTED = 8  # windows whose FLOPs are counted
_ITEMS = 200  # of each task
_BY_LAYER = {
    "routed_share": "routed share",
    "agreement": "agreement (tokens routed by the causal rule and by the top k, of those by either)",
    "experts_per_token": "experts per token",
}


def evaluate(config: EvalConfig) -> dict[str, Any]:
    """The figures of one model on one text, on tasks or on images."""
    if config.data is None:
        if not is_hugging_face(Path(config.model)):
            what = f"--tasks of lm-eval needs a Hugging Face model, and {config.model} is not one"
            raise DepthgateError(f"{what}: depthgate convert writes a run as one")
        return evaluate_task(config)
    if config.tasks is None and is_of_images(config.model):
        return _on_images(config)
    model = open_model(config.model, resolve_device(config.device), config.dtype, config.seq)
    if config.tasks is not None:
        texts = _held_out(config, model) if config.data == "heldout" else documents(config.data)
        items = config.limit or _ITEMS
        metrics = tasks.measure(model, texts, config.tasks.split(","), items)
        return {"model": config.model, "data": config.data, "tasks": config.tasks, "items": items, "metrics": metrics}
    text = text_of(config.model, model.tokenizer, None if config.data == "heldout" else config.data)
    figures = measure(model, text, config.batch, config.tokens)
    return {"model": config.model, "data": config.data, **figures, "flops_per_token": flops_per_token(model, text)}


def _held_out(config: EvalConfig, model: LanguageModel) -> Iterator[str]:
    """The documents that a run kept from its training, as texts."""
    held = text_of(config.model, model.tokenizer)
    for number, (start, stop) in enumerate(pairwise(held.bounds.tolist())):
        yield model.tokenizer.decode(held.read(torch.arange(start, stop), torch.tensor([number])).tolist())


def _on_images(config: EvalConfig) -> dict[str, Any]:
    device, vit = resolve_device(config.device), load(config.model)
    found = images_of(vit, config.model, None if config.data == "heldout" else config.data)
    figures = images.measure(vit.to(device), found, config.batch, device)
    return {"model": config.model, "data": config.data, **figures, "flops_per_image": vit_cost(vit.config).forward}


@torch.no_grad()
def flops_per_token(model: LanguageModel, documents: Documents) -> float:
    """Forward FLOPs a token, head included, as counted while the model read a few windows, each as one document, and
    decided causally."""
    flops = tokens = 0
    for rows in validation_rows(documents, model.context, 1, _COUNTED * model.context):
        given = [each[:, rows.pos[0] >= 0].to(model.device) for each in (rows.tokens, rows.targets)]
        flops += count_flops(lambda given=given: model.loss(*given, causal=True))  # type: ignore[misc]
        tokens += given[0].numel()
    return flops / tokens


def run(config: EvalConfig, as_json: bool) -> None:
    """Print the figures, and write them into the model's card if that is asked for."""
    folder, on = Path(config.model), " of ".join(filter(None, (config.tasks, config.data)))
    if config.card:
        check_card(folder)
    figures = evaluate(config)
    if as_json:
        print(json.dumps(figures))
    else:
        _print(figures, f"{config.model} on {on}")
    if config.card:
        kept = {name: value for name, value in figures.items() if name not in ("model", "data", "tasks", "metrics")}
        add_figures(folder, on, config, {**kept, **figures.get("metrics", {})})


def _print(figures: dict[str, Any], title: str) -> None:
    """The figures for a reader."""
    if "metrics" in figures:
        print(f"{title}: {figures.get('items') or figures['documents']:,} items")
        for name, value in figures["metrics"].items():
            print(f"{name:32} {value:.4f}" if isinstance(value, float) else f"{name:32} {value}")
    elif "accuracy" in figures:
        print(f"{title}: {figures['images']:,} images")
        flops = f"{figures['flops_per_image']:,.0f} FLOPs an image"
        print(f"accuracy {figures['accuracy']:.2%}, loss {figures['loss']:.4f} nats, {flops}")
        print(f"calibration error {figures['calibration_error']:.4f}, mean confidence {figures['confidence']:.2%}")
        for name, share in list(figures["accuracy_by_class"].items())[:100]:
            print(f"  {name}: {share:.2%}")
    else:
        rows = [
            (name, f"{figures[f'nats_per_token{end}']:.4f}", f"{figures[f'bits_per_byte{end}']:.4f}")
            for name, end in (("causal", ""), ("top k", "_top_k"))
        ]
        print_table(("decision", "nats/token", "bits/byte"), rows, f"{title}: {figures['tokens']:,} tokens")
        print(f"perplexity {figures['perplexity']:.3f}, {figures['flops_per_token']:,.0f} FLOPs a token, causal")
        for name, words in _BY_LAYER.items():
            if figures[name]:
                print(f"{words} by layer: {' '.join(f'{value:.3f}' for value in figures[name])}")
