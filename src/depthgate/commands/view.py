"""`depthgate view`: what a model does with a text, or how runs went, as a page or a picture."""

import json
import re
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from depthgate.config import ViewConfig
from depthgate.device import resolve_device
from depthgate.errors import DepthgateError
from depthgate.files import check_outs, write
from depthgate.loading import LanguageModel, held_out, open_model
from depthgate.view.figures import plans_figure, runs_figure, save
from depthgate.view.page import count, isolated, join, note, paragraph, short
from depthgate.view.routes import Decisions, held_out_tokens, read, text_page
from depthgate.view.runs import METRICS, REPORT, read_runs, runs_page

_GRID = "grid.json"  # every study has one


def run(config: ViewConfig, as_json: bool) -> None:
    """Write the files that are asked for; print their paths, or figures as JSON."""
    if isinstance(sys.stdout, TextIOWrapper):  # a path may hold any bytes
        sys.stdout.reconfigure(errors="surrogateescape")
    studies = [Path(each) for each in config.runs if Path(each, _GRID).is_file() and not Path(each, METRICS).exists()]
    if studies:
        outs, told = _study(studies[0], config)
    else:
        outs = check_outs(config.page, config.png, config.svg)
        told = _runs(config) if config.model is None else _model(config, config.model)
    if as_json:
        print(json.dumps({"page": config.page, **told}))
    else:
        print(*outs, sep="\n")


def _study(study: Path, config: ViewConfig) -> tuple[list[Path], dict[str, Any]]:
    """The report that the study wrote, or a copy of it."""
    if len(config.runs) > 1:
        raise DepthgateError(f"{study} is a study of `depthgate isoflop`: give it alone, or the runs in its cells/")
    if config.png or config.svg:
        raise DepthgateError(
            f"{study} is a study of `depthgate isoflop`: its report is a page, with pictures next to it (curves.png, "
            "curves.svg); leave --png and --svg out"
        )
    report = study / REPORT
    if not report.is_file():
        raise DepthgateError(f"{study} has no {REPORT} yet: `depthgate isoflop` writes it when its cells are done")
    if config.out is None:
        return [report], {"page": str(report)}
    [page] = check_outs(config.out)
    write(page, report.read_bytes())
    return [page], {"page": str(page)}


def _runs(config: ViewConfig) -> dict[str, Any]:
    runs = read_runs(config.runs)
    if config.png is not None or config.svg is not None:
        save(runs_figure(runs), config.png, config.svg)
    if config.page is not None:
        write(Path(config.page), runs_page(runs))
    return {"runs": [run.summary for run in runs]}


def _model(config: ViewConfig, folder: str) -> dict[str, Any]:
    model = open_model(folder, resolve_device(config.device))
    prompt, replaced = _text(config.text, config.tokens) if config.text is not None else (config.prompt, 0)
    if prompt is None:
        ids = held_out_tokens(held_out(folder, model.tokenizer), config.tokens)
    else:
        ids = _encoded(model, prompt, config.tokens)
    found = read(model, ids)
    if config.png is not None or config.svg is not None:
        save(plans_figure(found, None), config.png, config.svg)
    if config.page is not None:
        name = isolated(short(folder))
        about = [paragraph(name, _about(config, model, found))]
        if replaced:
            what = "1 byte of the file is" if replaced == 1 else f"{replaced:,} bytes of the file are"
            about.append(note(f"{what} not UTF-8: � stands for each."))
        write(Path(config.page), text_page(f"depthgate view: {name}", join(about), found))
    return _figures(found)


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
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise DepthgateError(f"the model's tokenizer cannot express this text ({why}): give another") from None
    if not ids:
        shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
        raise DepthgateError(f"the text is {shown}: the model's tokenizer makes no token of it, give another")
    return ids


def _about(config: ViewConfig, model: LanguageModel, found: Decisions) -> str:
    source = "the prompt" if config.prompt else "text that the run held out"
    if config.text:
        source = isolated(short(config.text))
    routes, many = found.routes, len(found.routes.tokens)
    parts = "" if many <= model.context else f" It was read {model.context:,} tokens at a time."
    deciding = " Every router decides from the token alone (the causal choice), as in generation." * bool(routes.layers)
    routed = f"{len(routes.layers)} of {count(routes.depth, 'layer')} are routed."
    return f" reads {count(many, 'token')} of {source}. {routed}{deciding}{parts}"


def _figures(found: Decisions) -> dict[str, Any]:
    layers = found.routes.layers
    names = ("routed_share", "top_k_share", "agreement", "rule_accuracy")
    return {
        "tokens": len(found.routes.tokens),
        "layers": found.routes.numbers,
        **{name: [layer.shares[name] for layer in layers] for name in names},
        "experts": [{"layer": e.layer, "load": e.load, "null_share": e.null_share} for e in found.experts],
    }
