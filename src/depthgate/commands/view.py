"""`depthgate view`: what a model does with a text, or how runs went, as a page or a picture."""

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from depthgate.config import ViewConfig
from depthgate.device import resolve_device
from depthgate.errors import DepthgateError
from depthgate.files import check_outs, write
from depthgate.loading import LanguageModel, open_model, text_of
from depthgate.view.figures import figure_bytes, plans_figure, runs_figure
from depthgate.view.page import Html, count, fill, isolated, join, note, short
from depthgate.view.routes import SHARES, Image, held_out_tokens, read
from depthgate.view.routes_page import text_page
from depthgate.view.runs import METRICS, REPORT, read_runs, runs_page

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
    if config.out is None and config.page is not None and not _replaceable(Path(config.page)):
        raise DepthgateError(f"{config.page} is there, and is not a page of depthgate: name another file with --out")
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


def _replaceable(page: Path) -> bool:
    """True where there is no file yet, or one of our pages: nobody has named it, so nothing else may be lost."""
    return not page.exists() or b'content="depthgate"' in page.read_bytes()[:500]


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
    about = [fill("about_text", name=name, source=source, window=model.context, routed=routed, do=do, **size)]
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
