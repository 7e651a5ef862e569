"""`depthgate finetune`: recover the quality of a converted model, by default by learning from the dense one.

The run's folder is the model's: config.json and weights as transformers keeps them, finetune.json, metrics.jsonl, and
checkpoints (step-N) from which --resume goes on. They hold what is trained, not what is frozen.
"""

import sys
from dataclasses import replace
from pathlib import Path

from depthgate.checkpoint.store import METRICS, steps
from depthgate.config import FinetuneConfig
from depthgate.data.batches import Packed
from depthgate.data.token_file import Documents, tokenize, told
from depthgate.device import World, resolve_device
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.hf.adapter import HFLanguageModel, tokenizer_of
from depthgate.hf.folder import check_generation, load
from depthgate.hf.layer import routed_layers
from depthgate.hf.recover import Recovery, decays
from depthgate.train import optim
from depthgate.train.loop import Loop
from depthgate.train.run_folder import opened


def run(config: FinetuneConfig, as_json: bool, resume: bool = False) -> int:
    """Fine-tune, or go on; the exit code: 0 when done or asked to stop (SIGTERM), 130 when interrupted."""
    config, source, out = config.settled, Path(config.model), Path(config.out)
    if source.resolve() in (out.resolve(), *out.resolve().parents):
        raise InvalidValueError(f"out is {out}, in the folder of --model, which stays as it is: choose another")
    device = resolve_device(config.device)
    if config.dtype == "auto":
        config = replace(config, dtype="bfloat16" if device == "cuda" else "float32")
    check_generation(source)
    model = load(source)
    tokenizer = tokenizer_of(source)
    if not routed_layers(model) and (config.capacity != 1 or config.train == "router"):
        what = f"{source} has no routed layers of transformers: convert it first, with depthgate convert"
        raise DepthgateError(f"{what}; --capacity 1 trains it as it is (--train full or lora), for comparison")
    with opened(config, resume, "finetune.json") as folder:
        language = HFLanguageModel(model, tokenizer, config.seq)
        documents = Documents(tokenize(config.data, language.tokenizer))
        print(told(config.data, documents), file=sys.stderr)
        packed = Packed(documents, config.seq, config.seed)
        task = Recovery(language, config, device, packed.most_documents)
        optimizers = [optim.adamw(task.trained, config, decays)]
        loop = Loop(config, task, optimizers, packed, World(device=device))
        if not (resume and steps(folder)):
            task.calibrate(packed)
        code = loop.run(resume)
        task.publish(folder)
    if as_json:  # the last row of metrics
        print((folder / METRICS).read_text(encoding="utf-8").rstrip("\n").rpartition("\n")[2])
    return code
