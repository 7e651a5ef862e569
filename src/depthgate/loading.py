"""Models from folders: `load` gives a Decoder, `open_model` a language model of ours or of transformers.

A folder may be a run's (its newest complete checkpoint is read), a checkpoint's, or a Hugging Face model's.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from depthgate.checkpoint import store as checkpoint
from depthgate.checkpoint.store import CONFIG, MANIFEST, TOKENIZER, check_fit
from depthgate.checkpoint.tensors import damaged
from depthgate.config import ModelConfig
from depthgate.data.token_file import Documents, prepare
from depthgate.data.tokenizer import TextTokenizer, folder_hash, load_tokenizer
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.flops import parameters
from depthgate.model import Decoder, Output
from depthgate.routing.plan import Plans

_LARGEST_CONFIG = 2**24  # bytes that are looked at
_LATER = ("head_dim", "norm_eps")  # values of a model that runs of older versions do not name


class LanguageModel(Protocol):
    """A model with its tokenizer: a LoadedDecoder, or a transformers model behind hf.adapter.HFLanguageModel."""

    @property
    def tokenizer(self) -> TextTokenizer: ...
    @property
    def context(self) -> int: ...  # tokens read at once
    @property
    def device(self) -> torch.device: ...
    @property
    def kinds(self) -> tuple[str, ...]: ...  # of every layer, as in ModelConfig.pattern
    @property
    def experts(self) -> tuple[int, int]: ...  # of a layer that has some: those that compute, and null ones

    def __call__(
        self, tokens: Tensor, pos: Tensor | None = None, doc: Tensor | None = None, causal: bool = False
    ) -> Output:
        """Logits and plans of tokens (B, T); pos is negative at padding, doc numbers packed documents, causal lets
        routers decide token by token instead of by the top k."""

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        pos: Tensor | None = None,
        doc: Tensor | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, Plans]:
        """Mean cross-entropy in nats of the targets (B, T) that are not negative, and the plans."""


class LoadedDecoder(Decoder):
    """A Decoder with the tokenizer it was trained with."""

    tokenizer: TextTokenizer

    @property
    def context(self) -> int:
        return self.config.context

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def kinds(self) -> tuple[str, ...]:
        return self.config.kinds

    @property
    def experts(self) -> tuple[int, int]:
        return self.config.experts, self.config.null_experts


def is_hugging_face(folder: Path) -> bool:
    """True for the folder of a transformers model: its config.json, damaged or not, names a type of model, and that of
    a run does not."""
    try:
        with (folder / CONFIG).open("rb") as file:
            return b'"model_type"' in file.read(_LARGEST_CONFIG)
    except OSError:
        return False


def open_model(folder: str | Path, device: str, dtype: str = "auto", context: int | None = None) -> LanguageModel:
    """The language model of a folder, in evaluation mode. A dtype and a context can only be chosen for Hugging Face
    models; auto is float32 on a CPU, elsewhere the dtype that the model is stored in."""
    if is_hugging_face(Path(folder)):
        from depthgate.hf.adapter import open_folder

        return open_folder(Path(folder), device, dtype, context)
    if context is not None or dtype != "auto":
        raise InvalidValueError(
            f"--seq and --dtype only apply to Hugging Face models, and {folder} is a depthgate run: remove them"
        )
    return load(folder).to(device)


def held_out(folder: str | Path, tokenizer: TextTokenizer) -> Documents:
    """The documents that a run kept from its training, or its validation text."""
    if is_hugging_face(Path(folder)):
        raise InvalidValueError(
            f"{folder} is a Hugging Face model, which has no held-out text: name a text with --data, --text or --prompt"
        )
    home = Path(folder).absolute().parent if Path(folder, MANIFEST).exists() else Path(folder)
    try:
        asked = json.loads((home / CONFIG).read_text(encoding="utf-8"))
        data, validation = str(asked["data"]), asked["validation"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DepthgateError(
            f"{home / CONFIG} does not say what the run was trained on ({error}): name a text"
        ) from None
    return prepare(data, tokenizer, validation).validation


def load(path: str | Path) -> LoadedDecoder:
    """A Decoder in evaluation mode, on the CPU, with its `tokenizer`. Damage is a DepthgateError, and nothing in the
    folder is ever executed."""
    if is_hugging_face(Path(path)):
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
    from depthgate.hf.decoder_weights import to_decoder
    from depthgate.hf.folder import load as load_model

    tokenizer = load_tokenizer(folder)
    model = to_decoder(load_model(folder), LoadedDecoder)
    if tokenizer.vocab > model.config.vocab:
        raise DepthgateError(
            f"the tokenizer in {folder} has {tokenizer.vocab} tokens, but the model's vocabulary has "
            f"{model.config.vocab}: they belong to different models"
        )
    model.tokenizer = tokenizer
    return model


def _newest(folder: Path) -> tuple[checkpoint.Checkpoint, Path]:
    """The checkpoint that a folder names, and the folder of its run."""
    try:
        if not folder.is_dir():
            raise DepthgateError(
                f"{folder} is not a folder: give a run of `depthgate train`, or one of its checkpoints"
            )
        alone = (folder / MANIFEST).exists()
    except OSError as error:
        raise DepthgateError(f"{folder} cannot be read ({error.strerror}): give the folder of a run") from None
    if alone:
        return checkpoint.read_folder(folder, ["model"]), folder.absolute().parent
    return checkpoint.load(folder, ["model"]), folder


def model_config(config: dict[str, Any], path: Path) -> ModelConfig:
    """The model's part of a run's configuration. Unknown and missing keys and wrong values are refused."""
    section = config.get("model")
    given = {**dict.fromkeys(_LATER), **section} if isinstance(section, dict) else {}
    if wrong := given.keys() ^ {field.name for field in fields(ModelConfig)}:
        raise damaged(path / CONFIG, f"has wrong or missing keys ({', '.join(sorted(wrong))[:200]})")
    try:
        return ModelConfig(**given)
    except DepthgateError as error:
        raise damaged(path / CONFIG, f"does not name a model ({error})") from None


def _check_size(config: ModelConfig, weights: Mapping[str, Tensor], path: Path) -> None:
    """Refuse a configuration that asks for more weights than there are. Tied ones count once."""
    numbers = {(t.data_ptr(), t.numel()) for t in weights.values()}
    layers = {name.split(".")[1] for name in weights if name.startswith("layers.")}
    if parameters(config) > sum(n for _, n in numbers) or len(layers) != config.layers:
        raise damaged(path / CONFIG, "names another model than the one that the weights belong to")


def _tokenizer(folder: Path, vocab: int, known: Any) -> TextTokenizer:
    """The run's tokenizer, which lies next to its checkpoints; these know its hash."""
    if not folder.is_dir():
        raise DepthgateError(
            f"{folder} is missing: it belongs next to the checkpoints of a run; copy it along with them"
        )
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab != vocab:
        raise DepthgateError(
            f"{folder} has {tokenizer.vocab} tokens, but the model's vocabulary has {vocab}: they belong to "
            "different runs"
        )
    if known is not None and known != folder_hash(folder):
        raise damaged(folder, "is not the tokenizer that the model was trained with")
    return tokenizer
