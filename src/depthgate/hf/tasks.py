"""`depthgate eval --tasks`: a Hugging Face model, dense or converted, on a task of lm-eval that lies in a yaml file."""

import json
import re
from pathlib import Path
from typing import Any

from depthgate.config import EvalConfig
from depthgate.device import resolve_device
from depthgate.errors import DepthgateError
from depthgate.hf.adapter import cast, compute_dtype, tokenizer_of
from depthgate.hf.code import is_model
from depthgate.hf.folder import load
from depthgate.hf.tokenizer_files import load_tokenizer


def run(config: EvalConfig, as_json: bool) -> None:
    """Print what lm-eval found."""
    figures = evaluate(config)
    if as_json:
        print(json.dumps(figures))
        return
    print(f"{config.model} on {config.tasks}: {figures['documents']:,} documents")
    for name, value in figures["metrics"].items():
        print(f"{name:32} {value:.4f}" if isinstance(value, float) else f"{name:32} {value}")


def evaluate(config: EvalConfig) -> dict[str, Any]:
    """The metrics of one task, by name."""
    file = Path(config.tasks or "")
    name = task_name(file)
    _check_only(name, file)
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise DepthgateError(f"lm-eval is missing ({error}): pip install 'depthgate[eval]'") from None
    folder, device = Path(config.model), resolve_device(config.device)
    if not is_model(folder):
        raise DepthgateError(f"{folder} is no folder of a Hugging Face model, which --tasks needs: export it first")
    model = load(folder)
    cast(model, compute_dtype(config.dtype, device, model)).to(device)
    tokenizer = load_tokenizer(folder)
    options: dict[str, Any] = {} if config.seq is None else {"max_length": config.seq}
    options["add_bos_token"] = bool(tokenizer_of(folder).prefix)  # which lm-eval leaves out unless it is told
    judged = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=config.batch, device=device, **options)
    try:
        manager = TaskManager(include_path=str(file.parent), include_defaults=False)
        found = simple_evaluate(
            judged, tasks=[name], task_manager=manager, limit=config.limit, log_samples=False, bootstrap_iters=0
        )
    except Exception as error:  # a task may hold code and templates of its own
        raise DepthgateError(f"lm-eval cannot do {file}: {type(error).__name__}: {str(error)[:300]}") from error
    metrics = {key.removesuffix(",none"): value for key, value in found["results"][name].items() if "stderr" not in key}
    count = found["n-samples"][name]["effective"]
    return {"model": config.model, "tasks": config.tasks, "documents": count, "metrics": metrics}


def task_name(file: Path) -> str:
    """What a task calls itself. Its yaml may have tags of lm-eval's own, so only this line is read."""
    try:
        named = re.search(r"^task:\s*['\"]?([\w.-]+)['\"]?\s*$", file.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError) as error:
        raise DepthgateError(f"tasks is {str(file)!r}, which cannot be read ({error}): give a yaml file") from None
    if named is None:
        raise DepthgateError(f"{file} has no line `task: NAME`: give a task of lm-eval as a yaml file")
    return named[1]


def _check_only(name: str, file: Path) -> None:
    """lm-eval looks a task up by its name among all files of the folder: no other may have it."""
    for other in sorted((*file.parent.rglob("*.yaml"), *file.parent.rglob("*.yml"))):
        if other.resolve() != file.resolve():
            try:
                same = task_name(other) == name
            except DepthgateError:
                continue
            if same:
                raise DepthgateError(f"{file} and {other} both name the task {name}: rename one, or move it elsewhere")
