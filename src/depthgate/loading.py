"""`dg.load`: a trained model from a run's folder (its newest complete checkpoint) or from one checkpoint's folder."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from depthgate.config import ModelConfig
from depthgate.errors import DepthgateError
from depthgate.flops import parameters
from depthgate.model import Decoder
from depthgate.train import checkpoint
from depthgate.train.run import TOKENIZER
from depthgate.train.tokenizer import TextTokenizer, load_tokenizer


class LoadedDecoder(Decoder):
    """A Decoder with the tokenizer it was trained with."""

    tokenizer: TextTokenizer


def load(path: str | Path) -> LoadedDecoder:
    """The model in evaluation mode, on the CPU, with its `tokenizer`. Damage is a DepthgateError, and nothing in the
    folder is ever executed."""
    folder = Path(path)
    if not folder.is_dir():
        raise DepthgateError(f"{folder} is no folder: give a run of `depthgate train`, or one of its checkpoints")
    if (folder / checkpoint.MANIFEST).exists():
        found, home = checkpoint.read_folder(folder, ["model"]), folder.parent
    else:
        found, home = checkpoint.load(folder, ["model"]), folder
    config = model_config(found.config, found.path)
    weights = found.tensors["model"]
    if parameters(config) > 2 * sum(t.numel() for t in weights.values()):  # before anything is allocated
        raise DepthgateError(f"{found.path}: the configuration names a larger model than the weights are of")
    model = LoadedDecoder(config)
    model.tokenizer = load_tokenizer(home / TOKENIZER)
    if model.tokenizer.vocab != config.vocab:
        raise DepthgateError(
            f"{home / TOKENIZER} has {model.tokenizer.vocab} tokens, the model {config.vocab}: one is of another run"
        )
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise DepthgateError(f"{found.path}: the weights do not fit the configuration: {error}") from error
    return model.eval()


def model_config(config: dict[str, Any], path: Path) -> ModelConfig:
    """The model's part of a run's configuration; unknown and missing keys are refused."""
    section = config.get("model")
    names = {field.name for field in fields(ModelConfig)}
    if not isinstance(section, dict) or set(section) != names:
        wrong = sorted(set(section) ^ names) if isinstance(section, dict) else ["model"]
        raise DepthgateError(f"{path}: the configuration has wrong or missing keys: {', '.join(wrong[:5])}")
    return ModelConfig(**section)
