"""`dg.load`: a trained model from a run's folder (its newest complete checkpoint), from one checkpoint's folder, or
from that of a Llama or Qwen3 of Hugging Face, routed or not."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthgate.checkpoint import store as checkpoint
from depthgate.checkpoint.files import damaged
from depthgate.checkpoint.manifest import MANIFEST
from depthgate.checkpoint.store import TOKENIZER, check_fit
from depthgate.config import ModelConfig
from depthgate.data.tokenizer import TextTokenizer, folder_hash, load_tokenizer
from depthgate.errors import DepthgateError
from depthgate.flops import parameters
from depthgate.hf.code import is_model
from depthgate.model import Decoder

_LATER = ("head_dim", "norm_eps")  # values of a model that runs of older versions do not name


class LoadedDecoder(Decoder):
    """A Decoder with the tokenizer it was trained with."""

    tokenizer: TextTokenizer

    @property
    def context(self) -> int:
        """Tokens that it is read in windows of."""
        return self.config.context

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device


def load(path: str | Path) -> LoadedDecoder:
    """The model in evaluation mode, on the CPU, with its `tokenizer`. Damage is a DepthgateError, and nothing in the
    folder is ever executed."""
    if is_model(Path(path)):
        return _from_hugging_face(Path(path))
    found, home = _newest(Path(path))
    config, weights = model_config(found.config, found.path), found.tensors["model"]
    _check_size(config, weights, found.path)  # before anything is allocated
    tokenizer = _tokenizer(home / TOKENIZER, config.vocab, found.state.get("tokenizer"))
    model = LoadedDecoder(config)
    check_fit(weights, model.state_dict(), found.path)
    if config.tied and not torch.equal(weights["embed.weight"], weights["head.weight"]):
        raise damaged(found.path, "has two weights where its configuration ties them")
    model.load_state_dict(weights)
    model.tokenizer = tokenizer
    return model.eval()


def _from_hugging_face(folder: Path) -> LoadedDecoder:
    from depthgate.hf.decoder import to_decoder
    from depthgate.hf.folder import load as load_model

    tokenizer = load_tokenizer(folder)
    model = to_decoder(load_model(folder), LoadedDecoder)
    if tokenizer.vocab > model.config.vocab:
        raise DepthgateError(
            f"{folder} has {tokenizer.vocab} tokens, the model {model.config.vocab}: one is of another"
        )
    model.tokenizer = tokenizer
    return model


def _newest(folder: Path) -> tuple[checkpoint.Checkpoint, Path]:
    """The checkpoint that a folder names, and the folder of its run."""
    try:
        if not folder.is_dir():
            raise DepthgateError(f"{folder} is no folder: give a run of `depthgate train`, or one of its checkpoints")
        alone = (folder / MANIFEST).exists()
    except OSError as error:
        raise DepthgateError(f"{folder} cannot be read ({error.strerror}): give the folder of a run") from None
    if alone:
        return checkpoint.read_folder(folder, ["model"]), folder.absolute().parent
    return checkpoint.load(folder, ["model"]), folder


def model_config(config: dict[str, Any], path: Path) -> ModelConfig:
    """The model's part of a run's configuration; unknown and missing keys and other types are refused."""
    section = config.get("model")
    if isinstance(section, dict):
        section = {**dict.fromkeys(_LATER), **section}
    known = {field.name: field.type for field in fields(ModelConfig)}
    if not isinstance(section, dict) or section.keys() != known.keys():
        wrong = sorted(section.keys() ^ known.keys()) if isinstance(section, dict) else ["model"]
        raise damaged(path / "config.json", f"has wrong or missing keys ({', '.join(wrong)[:200]})")
    for name, kind in known.items():
        if kind in (str, bool) and type(section[name]) is not kind:  # numbers are checked with their ranges
            raise damaged(path / "config.json", f"has a wrong value for {name}")
    try:
        return ModelConfig(**section)
    except DepthgateError as error:
        raise damaged(path / "config.json", f"names no model ({error})") from None


def _check_size(config: ModelConfig, weights: Mapping[str, Tensor], path: Path) -> None:
    """A configuration must not ask for more than the weights bring along. Tied ones count once."""
    numbers = {(t.data_ptr(), t.numel()) for t in weights.values()}
    layers = {name.split(".")[1] for name in weights if name.startswith("layers.")}
    if parameters(config) > sum(n for _, n in numbers) or len(layers) != config.layers:
        raise damaged(path / "config.json", "names another model than the weights are of")


def _tokenizer(folder: Path, vocab: int, known: Any) -> TextTokenizer:
    """The run's tokenizer, which lies beside its checkpoints; these know its hash."""
    if not folder.is_dir():
        raise DepthgateError(f"{folder} is missing: it lies beside the checkpoints of a run; copy it along with them")
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab != vocab:
        raise DepthgateError(f"{folder} has {tokenizer.vocab} tokens, the model {vocab}: one is of another run")
    if known is not None and known != folder_hash(folder):
        raise damaged(folder, "is not the tokenizer that the model was trained with")
    return tokenizer
