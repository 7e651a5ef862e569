"""`depthgate view --model DIR`: a model reads a text, and a page shows where its tokens went."""

import json
from pathlib import Path
from typing import Any

import torch

from depthgate.data.batches import windows
from depthgate.device import resolve_device
from depthgate.files import check_outs, write
from depthgate.loading import LanguageModel, held_out, open_model
from depthgate.view.config import ViewConfig
from depthgate.view.experts import ExpertLayer, expert_layers, joined_experts
from depthgate.view.page import Html, count, isolated, join, note, paragraph, short
from depthgate.view.readers import encoded, losses, read_text
from depthgate.view.routes import Routes, joined, routes
from depthgate.view.routes_page import routes_page


def show(config: ViewConfig, as_json: bool) -> None:
    """Write what is asked for; print its path, or what it says of each layer as JSON."""
    outs = check_outs((config.page, config.png, config.svg))
    model = open_model(str(config.model), resolve_device(config.device))
    prompt, replaced = read_text(config.text, config.tokens) if config.text is not None else (config.prompt, 0)
    if prompt is None:
        documents = held_out(str(config.model), model.tokenizer)
        ids = windows(documents, [0], min(config.tokens, len(documents))).tokens[0].tolist()
    else:
        ids = encoded(model, prompt, config.tokens)
    found, experts = read(model, ids)
    title = f"depthgate view: {isolated(short(str(config.model)))}"
    if config.png is not None or config.svg is not None:
        from depthgate.view.figures import routes_figure, save

        save(routes_figure(found, experts), config.png, config.svg)
    if config.page is not None:
        about = join([paragraph(_about(config, model, found)), *_replaced(replaced)])
        write(Path(config.page), routes_page(title, about, found, experts))
    if as_json:
        print(json.dumps(_told(config, found, experts)))
        return
    for out in outs:
        print(out)


def _about(config: ViewConfig, model: LanguageModel, found: Routes) -> str:
    where = "the prompt" if config.prompt else "text that the run held out"
    if config.text:
        where = isolated(short(config.text))
    many = len(found.tokens)
    parts = "" if many <= model.context else f" It was read {model.context:,} tokens at a time."
    deciding = " Every router decides from the token alone (the causal choice), as in generation." * bool(found.layers)
    return (
        f"{isolated(short(str(config.model)))} reads {count(many, 'token')} of {where}. "
        f"{len(found.layers)} of {count(found.depth, 'layer')} are routed.{deciding}{parts}"
    )


def _replaced(many: int) -> list[Html]:
    if not many:
        return []
    what = "1 byte of the file is" if many == 1 else f"{many:,} bytes of the file are"
    return [note(f"{what} not UTF-8: � stands for each.")]


def _told(config: ViewConfig, found: Routes, experts: list[ExpertLayer]) -> dict[str, Any]:
    return {
        "page": config.page,
        "tokens": len(found.tokens),
        "layers": found.layers,
        "routed_share": found.shares(found.causal),
        "top_k_share": found.shares(found.top_k),
        "agreement": found.agreement,
        "rule_accuracy": found.accuracy,
        "experts": [{"layer": e.layer, "load": e.load, "null_share": e.null_share} for e in experts],
    }


@torch.no_grad()
def read(model: LanguageModel, ids: list[int]) -> tuple[Routes, list[ExpertLayer]]:
    """What the routers do with tokens, a window of them at a time, and how well each was predicted."""
    parts, chosen = [], []
    layers = [i + 1 for i, kind in enumerate(model.kinds) if kind in ("mod", "mode", "random")]
    for start in range(0, len(ids), model.context):
        part = ids[start : start + model.context]
        tokens = torch.tensor([part], device=model.device)
        logits, causal = model(tokens, causal=True)
        said = losses(logits, tokens)
        del logits
        top_k = model(tokens).plans
        parts.append(
            routes([model.tokenizer.token_text(i) for i in part], layers, len(model.kinds), causal, top_k, said)
        )
        chosen.append(expert_layers(model.kinds, causal, len(part), model.experts))
    return joined(parts), joined_experts(chosen)
