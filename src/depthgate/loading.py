"""Models from folders: `load` gives a Decoder, `open_model` a language model of ours or of transformers.

A folder may be a run's (its newest complete checkpoint is read), a checkpoint's, or a Hugging Face model's.
"""

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from depthgate.checkpoint import store as checkpoint
from depthgate.checkpoint.store import CONFIG, MANIFEST, TOKENIZER, as_written_now, check_fit
from depthgate.checkpoint.tensors import damaged
from depthgate.config import ModelConfig
from depthgate.data.tokenizer import TextTokenizer, folder_hash, load_tokenizer
from depthgate.errors import DepthgateError, InvalidValueError, near
from depthgate.flops import parameters
from depthgate.model import Decoder

if TYPE_CHECKING:
    from depthgate.data.token_file import Documents
    from depthgate.hf.adapter import HFLanguageModel

_LARGEST_CONFIG = 2**24  # bytes that are looked at


class LoadedDecoder(Decoder):
    """A Decoder with the tokenizer it was trained with."""

    tokenizer: TextTokenizer

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.context = config.context  # tokens read at once
        self.kinds = config.kinds  # of every layer
        self.experts = config.experts, config.null_experts  # of a layer that has some: those that compute, and others

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device


LanguageModel: TypeAlias = "LoadedDecoder | HFLanguageModel"  # a model with its tokenizer, called and read in one way


def is_hugging_face(folder: Path) -> bool:
    """True for the folder of a transformers model, whose config.json (a run's does not) names a model_type."""
    try:
        with (folder / CONFIG).open("rb") as file:
            return b'"model_type"' in file.read(_LARGEST_CONFIG)
    except OSError:
        return False


def open_model(folder: str | Path, device: str, dtype: str = "auto", context: int | None = None) -> LanguageModel:
    """The language model of a folder, in evaluation mode. A dtype and a context can only be chosen for Hugging Face
    models; auto is float32 on a CPU, elsewhere the dtype that the model is stored in."""
    if is_hugging_face(Path(folder)):
        from depthgate.hf.adapter import HFLanguageModel, load_on, tokenizer_of
        from depthgate.hf.families import OURS
        from depthgate.hf.folder import check_config

        if check_config(Path(folder))["model_type"] != OURS:
            return HFLanguageModel(load_on(device, Path(folder), dtype), tokenizer_of(Path(folder)), context)
    if context is not None or dtype != "auto":
        raise InvalidValueError(f"--seq and --dtype are for Hugging Face models, and {folder} is a run: remove them")
    return load(folder).to(device)


def text_of(folder: str | Path, tokenizer: TextTokenizer, data: str | None = None) -> "Documents":
    """The documents of `data`; unless given, those that a run kept from its training, or its validation text."""
    from depthgate.data.token_file import Documents, prepare, tokenize

    if data is not None:
        return Documents(tokenize(data, tokenizer))
    if is_hugging_face(Path(folder)):
        what = f"{folder} is a Hugging Face model, which has no held-out text"
        raise InvalidValueError(f"{what}: name a text (--data; for view --text or --prompt)")
    home = Path(folder).absolute().parent if Path(folder, MANIFEST).exists() else Path(folder)
    try:
        asked = json.loads((home / CONFIG).read_text(encoding="utf-8"))
        data, validation = str(asked["data"]), asked["validation"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DepthgateError(f"{home / CONFIG} does not name the run's data ({error}): name a text") from None
    return prepare(data, tokenizer, validation).validation


def load(path: str | Path) -> LoadedDecoder:
    """A Decoder in evaluation mode, on the CPU, with its `tokenizer`. Nothing in the folder is ever executed."""
    folder = Path(path)
    if is_hugging_face(folder):
        from depthgate.hf.decoder_weights import to_decoder
        from depthgate.hf.folder import load as load_model

        tokenizer = load_tokenizer(folder)
        model = to_decoder(load_model(folder), LoadedDecoder)
        tokenizer.check_vocab(model.config.vocab)
        model.tokenizer = tokenizer
        return model
    if not os.path.isdir(folder):
        remedy = near(str(folder), map(str, folder.parent.glob("*/"))) or ": give a run, or one of its checkpoints"
        raise DepthgateError(f"{folder} is not a folder{remedy}")
    read = checkpoint.read_folder if os.path.exists(folder / MANIFEST) else checkpoint.load
    found = read(folder, ["model"])
    config = model_config(found.config, found.path)
    weights = found.tensors["model"]
    # Before anything is allocated. Tied weights count once.
    if parameters(config) > sum(n for _, n in {(t.data_ptr(), t.numel()) for t in weights.values()}):
        raise damaged(found.path / CONFIG, "names another model than the one that the weights belong to")
    tokenizer = _tokenizer(found.path.absolute().parent / TOKENIZER, config.vocab, found.state.get("tokenizer"))
    model = LoadedDecoder(config)
    check_fit(weights, model.state_dict(), found.path)
    if config.tied and not torch.equal(weights["embed.weight"], weights["head.weight"]):
        raise damaged(found.path, "has two weights where its configuration ties them")
    model.load_state_dict(weights)
    model.tokenizer = tokenizer
    return model.eval()


def model_config(config: dict[str, Any], path: Path) -> ModelConfig:
    """The model's part of a run's configuration. Unknown and missing keys and wrong values are refused."""
    section = as_written_now(config).get("model")
    given = section if isinstance(section, dict) else {}
    if wrong := given.keys() ^ {field.name for field in fields(ModelConfig)}:
        raise damaged(path / CONFIG, f"has wrong or missing keys ({', '.join(sorted(wrong))[:200]})")
    try:
        return ModelConfig(**given)
    except DepthgateError as error:
        raise damaged(path / CONFIG, f"does not name a model ({error})") from None


def _tokenizer(folder: Path, vocab: int, known: Any) -> TextTokenizer:
    """The run's tokenizer, which lies next to its checkpoints; these know its hash."""
    if not folder.is_dir():
        raise DepthgateError(f"{folder} is missing: copy it along with the checkpoints of its run")
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab != vocab:
        what = f"{folder} has {tokenizer.vocab} tokens, but the model's vocabulary has {vocab}"
        raise DepthgateError(f"{what}: they belong to different runs")
    if known is not None and known != folder_hash(folder):
        raise damaged(folder, "is not the tokenizer that the model was trained with")
    return tokenizer
