"""`depthgate view`: a model reads a text, and a page shows where its tokens went."""

import json
import math
from pathlib import Path

import torch

from depthgate.config import EvalConfig
from depthgate.errors import DepthgateError
from depthgate.loading import LoadedDecoder, load
from depthgate.train.batches import windows
from depthgate.train.evaluate import documents_of
from depthgate.train.loop import resolve_device
from depthgate.train.routes import routed_layers, token_text
from depthgate.view.config import ViewConfig
from depthgate.view.routes import Routes, routes
from depthgate.view.routes_page import routes_page


def run(config: ViewConfig, as_json: bool) -> None:
    """Write the page; print its path, or what it says of each layer as JSON."""
    out = Path(config.out)
    if out.is_dir() or not out.parent.is_dir():
        raise DepthgateError(f"out is {out}: name a file in a folder that exists")
    model = load(config.model).to(resolve_device(config.device))
    ids = _ids(model, config)
    found = read(model, ids)
    where = config.text or ("the prompt" if config.prompt else "text that the run held out")
    context = model.config.context
    parts = "" if len(ids) <= context else f" It was read {context} tokens at a time, as the model was trained."
    about = (
        f"{config.model} reads {len(ids):,} tokens of {where}. {len(found.layers)} of {found.depth} layers are routed; "
        f"every router decides from the token alone (the causal choice), as in generation.{parts}"
    )
    page = routes_page(f"depthgate view: {config.model}", about, found)
    try:
        out.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise DepthgateError(f"cannot write {out} ({error.strerror}): name another file with --out") from None
    if as_json:
        shares = {"routed_share": found.shares(found.causal), "top_k_share": found.shares(found.top_k)}
        print(
            json.dumps(
                {"page": str(out), "tokens": len(ids), "layers": found.layers, **shares, "agreement": found.agreement}
            )
        )
    else:
        print(out)


def _ids(model: LoadedDecoder, config: ViewConfig) -> list[int]:
    """The tokens to read."""
    if config.prompt is None and config.text is None:
        documents = documents_of(EvalConfig(config.model, "heldout"), model)
        length = min(config.tokens, len(documents))
        return windows(documents, [0], length).tokens[0].tolist()
    text = config.prompt
    if text is None:
        try:
            text = Path(str(config.text)).read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise DepthgateError(f"text is {config.text}: it cannot be read ({error.strerror})") from None
    ids = model.tokenizer.encode(text)[: config.tokens]
    if not ids:
        raise DepthgateError(f"text is {config.text}: there is nothing in it to read")
    return ids


@torch.no_grad()
def read(model: LoadedDecoder, ids: list[int]) -> Routes:
    """What the routers do with tokens, `context` of them at a time, and how well each was predicted."""
    device, context = model.embed.weight.device, model.config.context
    rows = math.ceil(len(ids) / context)
    width = min(len(ids), context)
    tokens = torch.zeros(rows, width, dtype=torch.long)
    real = torch.arange(rows * width).view(rows, width) < len(ids)
    tokens[real] = torch.tensor(ids)
    pos = torch.where(real, torch.arange(width).expand(rows, width), -1).to(device)
    tokens = tokens.to(device)
    logits, causal = model(tokens, pos, causal=True)
    top_k = model(tokens, pos, causal=False).plans
    losses = torch.full(real.shape, math.nan)
    said = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none"
    )
    losses[:, 1:] = said.view(rows, width - 1).cpu()
    texts = [token_text(model, i) for i in ids]
    flat = losses[real].tolist()
    return routes(texts, routed_layers(model), model.config.layers, causal, top_k, real.to(device), flat)
