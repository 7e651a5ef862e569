"""`depthgate view`: what a model does with a text, or how runs went, as a page or a picture."""

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch

from depthgate.config import ViewConfig
from depthgate.data.images import read_folder, some_of
from depthgate.device import resolve_device
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.files import check_outs, write
from depthgate.loading import LanguageModel, images_of, is_of_images, load, open_model, text_of
from depthgate.view.figures import figure_bytes, plans_figure, runs_figure
from depthgate.view.page import Html, check_replaces, count, fill, isolated, join, note, paragraph, short
from depthgate.view.routes import SHARES, Decisions, Image, held_out_tokens, image_of, plan_decisions, read
from depthgate.view.routes_page import images_page, text_page
from depthgate.view.runs import METRICS, REPORT, read_runs, runs_page

_IMAGES = 12  # shown at most
_GRID = "grid.json"  # every study has one


def run(config: ViewConfig, as_json: bool) -> None:
    """Write the files that are asked for; print their paths, or figures as JSON."""
    if isinstance(sys.stdout, TextIOWrapper):  # a path may hold any bytes
        sys.stdout.reconfigure(errors="surrogateescape")
    studies = [Path(each) for each in config.runs if Path(each, _GRID).is_file() and not Path(each, METRICS).exists()]
    if studies:
        page = _study(studies[0], config)
        print(json.dumps({"page": page}) if as_json else page)
        return
    outs = check_outs(config.page, config.png, config.svg)
    if config.page is not None:
        check_replaces(Path(config.page), named=config.out is not None)
    if config.model is not None:
        make_page, draw, told = _model(config, config.model)
    else:
        runs = read_runs(config.runs)
        make_page, draw = partial(runs_page, runs, title=config.title), partial(runs_figure, runs, config.title)
        told = {"runs": [run.summary for run in runs]}
    for kind, out in (("png", config.png), ("svg", config.svg)):
        if out is not None:
            write(Path(out), figure_bytes(draw(), kind))
    if config.page is not None:
        write(Path(config.page), make_page())
    print(json.dumps({"page": config.page, **told}) if as_json else "\n".join(map(str, outs)))


def _study(study: Path, config: ViewConfig) -> str:
    """The report that the study wrote, or a copy of it."""
    what, report = f"{study} is a study of `depthgate isoflop`:", study / REPORT
    if len(config.runs) > 1:
        raise DepthgateError(f"{what} give it alone, or the runs in its cells/")
    if config.png or config.svg:
        raise DepthgateError(f"{what} its pictures are curves.png and curves.svg in it; leave --png and --svg out")
    if not report.is_file():
        remedy = "`depthgate isoflop` writes it when its cells are done; until then view the runs in its cells/"
        raise DepthgateError(f"{study} has no {REPORT} yet: {remedy}")
    if config.out is not None:
        write(Path(config.out), report.read_bytes())
    return config.out or str(report)


def _model(config: ViewConfig, folder: str) -> tuple[Callable[[], Html], Callable[[], Any], dict[str, Any]]:
    """Makers of the page and of the picture, and figures."""
    if is_of_images(folder):
        if config.text is not None or config.prompt is not None:
            raise InvalidValueError(f"{folder} is a run of images, which reads no text: leave text and prompt out")
        return _vision(config, folder)
    if config.images is not None:
        raise InvalidValueError(f"images is {config.images}, but {folder} is not a run of images: leave it out")
    model = open_model(folder, resolve_device(config.device))
    prompt, replaced = (config.prompt, 0) if config.text is None else _text(config.text, config.tokens)
    if prompt is None:
        ids = held_out_tokens(text_of(folder, model.tokenizer), config.tokens)
    else:
        ids = _encoded(model, prompt, config.tokens)
    found, name = read(model, ids), isolated(short(folder))
    source = isolated(short(config.text)) if config.text else "the prompt" if config.prompt else "held-out text"
    size = {"tokens": count(len(found.tokens), "token"), "layers": count(found.depth, "layer")}
    routed, do = (len(found.experts), "have experts") if found.experts else (len(found.layers), "are routed")
    decides = " A router decides from the token alone (the causal choice), as in generation." if routed else ""
    texts = {"name": name, "source": source, "window": model.context, "do": do, "decides": decides}
    about = [fill("about_text", routed=routed, **texts, **size)]
    if replaced:
        what = "1 byte of the file is" if replaced == 1 else f"{replaced:,} bytes of the file are"
        about.append(note(f"{what} not UTF-8: � stands for each."))
    told = {
        "tokens": len(found.tokens),
        "layers": found.names,
        **{share: [layer.shares[share] for layer in found.layers] for share in SHARES},
        "experts": [{"layer": e.name, "load": e.load, "null_share": e.bars.get("null", 0.0)} for e in found.experts],
    }
    make_page = partial(text_page, config.title or f"depthgate view: {name}", join(about), found)
    return make_page, partial(plans_figure, found, Image(), config.title), told


@torch.no_grad()
def _vision(config: ViewConfig, folder: str) -> tuple[Callable[[], Html], Callable[[], Any], dict[str, Any]]:
    """The same for a run of images: what its slots hold, and which class it sees."""
    vit = load(folder).to(resolve_device(config.device))
    of = vit.config
    if config.images is not None:
        names, pixels = read_folder(config.images, of.size, of.channels, _IMAGES)
    else:
        held_out = images_of(vit, folder)
        these = some_of(len(held_out.labels), _IMAGES)
        pixels, labels = held_out.pixels[these], held_out.labels[these].tolist()
        shown_as = zip(these.tolist(), labels, strict=True)
        names = [f"held-out image {n} ({held_out.names[label]})" for n, label in shown_as]
    logits, plans = vit(pixels.to(vit.position.device))
    best = logits.float().softmax(-1).max(-1)
    classes = [vit.names[number] for number in best.indices.tolist()]
    routed = [str(i) for i, kind in enumerate(of.kinds) if kind != "dense"]
    shown = []
    for n, name in enumerate(names):
        found = plan_decisions(plans, None, of.grid, n, of.prefix, False, routed) if plans else Decisions(of.layers, [])
        heading = f"{isolated(short(name))}, taken for {isolated(short(classes[n]))}, {float(best.values[n]):.0%} sure"
        shown.append((heading, found, image_of(of.grid, of.prefix, pixels[n, : 3 if of.channels > 2 else 1])))
    name = isolated(short(folder))
    about = paragraph(f"{name}: {of.layers} layers, {len(routed)} of them routed, over {count(len(names), 'image')}.")
    told = {"images": [{"image": a, "class": b} for a, b in zip(names, classes, strict=True)], "layers": routed}
    make_page = partial(images_page, config.title or f"depthgate view: {name}", about, shown)
    return make_page, partial(plans_figure, *shown[0][1:], config.title), told


def _text(path: str, most: int) -> tuple[str, int]:
    """The beginning of a file, and how many of its bytes are not text: U+FFFD stands for each."""
    try:
        with Path(path).open(encoding="utf-8", errors="surrogateescape") as file:
            text = file.read(64 * most)  # more than so many tokens can stand for, as a rule
    except OSError as error:
        raise DepthgateError(f"text is {path}: it cannot be read ({error.strerror})") from None
    if not text:
        raise DepthgateError(f"text is {path}: there is nothing in it to read")
    return re.subn("[\udc80-\udcff]", "\ufffd", text)


def _encoded(model: LanguageModel, text: str, most: int) -> list[int]:
    try:
        ids = model.tokenizer.encode(text)[:most]
    except DepthgateError:
        raise
    except Exception as error:  # tokenizers raise plain ones
        raise DepthgateError(f"the tokenizer cannot express this text ({short(str(error))}): give another") from None
    if not ids:
        raise DepthgateError(f"the text is {short(text)!r}: the model's tokenizer makes no token of it, give another")
    return ids
