"""Models from folders: `load` gives a Decoder, `open_model` a language model of ours or of transformers.

A folder may be a run's (its newest complete checkpoint is read), a checkpoint's, or a Hugging Face model's.
"""

import json
import os
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from depthgate.checkpoint import store as checkpoint
from depthgate.checkpoint.store import CONFIG, MANIFEST, STATE, TOKENIZER, as_written_now, check_fit
from depthgate.checkpoint.tensors import damaged
from depthgate.config import ModelConfig
from depthgate.data.tokenizer import TextTokenizer, folder_hash, load_tokenizer
from depthgate.errors import DepthgateError, InvalidValueError, near
from depthgate.files import check_no_part, not_a_folder
from depthgate.flops import parameters
from depthgate.model import Decoder
from depthgate.vision import ViTConfig

if TYPE_CHECKING:
    from depthgate.data.images import Images
    from depthgate.data.token_file import Documents
    from depthgate.hf.adapter import HFLanguageModel
    from depthgate.vit import ViT

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
    """True for the folder of a transformers model: its config.json (a run's does not) names a model_type, or it has
    weights that are not of a checkpoint of ours, so that its config.json is damaged or lost."""
    with suppress(OSError), (folder / CONFIG).open("rb") as file:
        if b'"model_type"' in file.read(_LARGEST_CONFIG):
            return True
    ours = any(os.path.exists(folder / name) for name in (MANIFEST, STATE))  # False, and no error, in a closed folder
    return not ours and any(folder.glob("model*.safetensors"))


def open_model(folder: str | Path, device: str, dtype: str = "auto", context: int | None = None) -> LanguageModel:
    """The language model of a folder, in evaluation mode. A dtype and a context can only be chosen for Hugging Face
    models; auto is float32 on a CPU, elsewhere the dtype that the model is stored in."""
    if is_hugging_face(Path(folder)):
        from depthgate.hf.adapter import HFLanguageModel, load_on, tokenizer_of
        from depthgate.hf.families import OURS
        from depthgate.hf.folder import check_config

        if check_config(Path(folder))["model_type"] != OURS:
            return HFLanguageModel(load_on(device, Path(folder), dtype), tokenizer_of(Path(folder)), context)
    model = load_decoder(folder).to(device)
    if context is not None or dtype != "auto":
        raise InvalidValueError(f"--seq and --dtype are not for models of depthgate's own, as in {folder}: remove them")
    return model


def text_of(folder: str | Path, tokenizer: TextTokenizer, data: str | None = None) -> "Documents":
    """The documents of `data`; unless given, those that a run kept from its training, or its validation text."""
    from depthgate.data.token_file import Documents, prepare, tokenize

    if data is not None:
        return Documents(tokenize(data, tokenizer))
    if is_hugging_face(Path(folder)):
        what = f"{folder} is a Hugging Face model, which has no held-out text"
        raise InvalidValueError(f"{what}: name a text (--data; for view --text or --prompt)")
    data, validation = _options_of(folder, "data", "validation")
    return prepare(str(data), tokenizer, validation).validation


def _options_of(folder: str | Path, *names: str) -> list[Any]:
    """What a run was asked to do, given its folder or that of one of its checkpoints."""
    try:
        home = Path(folder).absolute().parent if Path(folder, MANIFEST).exists() else Path(folder)
        asked = json.loads((home / CONFIG).read_text(encoding="utf-8"))
        return [asked[name] for name in names]
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"the {CONFIG} of {folder} does not name its {names[0]} ({error})"
        raise DepthgateError(f"{what}: name a text, or images") from None


def is_of_images(folder: str | Path) -> bool:
    """True for the run of a vision transformer."""
    try:
        return _options_of(folder, "task") == ["images"]
    except DepthgateError:
        return False


def images_of(model: "ViT", folder: str | Path, data: str | None = None) -> "Images":
    """The held-out images of `data`; unless given, those of a run."""
    from depthgate.data.images import open_images

    of_run, corrupt = _options_of(folder, "data", "corrupt")
    given, config = str(data or of_run), model.config
    found = open_images(given, config.size, str(corrupt), whole=data is not None)[1]
    if len(found.names) > config.classes or found.pixels.shape[1] != config.channels:
        what = f"{given} has {len(found.names)} classes and {found.pixels.shape[1]} channels"
        raise DepthgateError(f"{what}, the model {config.classes} and {config.channels}: give other images")
    place = {name: number for number, name in enumerate(model.names)}
    for number, (there, here) in enumerate(zip(found.names, model.names, strict=False)):
        of_number = (there,) if len(found.names) < config.classes else (there, here)
        if there not in place and str(number) not in of_number:  # the name of a class that has none
            raise DepthgateError(f"{given} has the class {there} where the model has {here}: name them alike")
    numbers = [place.get(name, number) for number, name in enumerate(found.names)]
    if len({*numbers}) < len(numbers):  # such as 0, 1, 2 by number, where the model's names are 1, 2, 3
        theirs, ours = (", ".join(names[:5]) for names in (found.names, model.names))
        raise DepthgateError(f"{given} has the classes {theirs} where the model has {ours}: name them alike")
    return found._replace(labels=torch.tensor(numbers)[found.labels], names=model.names)


def load(path: str | Path) -> Any:
    """A Decoder in evaluation mode, on the CPU, with its `tokenizer`; a ViT with the `names` of its classes, if the run
    is of images. Nothing in the folder is ever executed."""
    folder = Path(path)
    if is_hugging_face(folder):
        from depthgate.hf.decoder_weights import to_decoder
        from depthgate.hf.folder import load as load_model

        tokenizer = load_tokenizer(folder)
        model: Any = to_decoder(load_model(folder), LoadedDecoder)
        tokenizer.check_vocab(model.config.vocab)
        model.tokenizer = tokenizer
        return model
    if not os.path.isdir(folder):
        meant = near(str(folder), map(str, folder.parent.glob("*/")))
        raise not_a_folder(str(path), meant.removeprefix(": ") or "give a run, or one of its checkpoints")
    check_no_part(folder)
    read = checkpoint.read_folder if os.path.exists(folder / MANIFEST) else checkpoint.load
    found = read(folder, ["model"])
    of_images = found.config.get("task") == "images"
    config = model_config(found.config, found.path, ViTConfig if of_images else ModelConfig)
    weights = found.tensors["model"]
    # Before anything is allocated. Tied weights count once.
    if parameters(config) > sum(n for _, n in {(t.data_ptr(), t.numel()) for t in weights.values()}):
        raise damaged(found.path / CONFIG, "names another model than the one that the weights belong to")
    if of_images:
        from depthgate.vit import ViT

        model = ViT(config)
        model.names = str(found.state.get("names", "")).split("\n")
    else:
        tokenizer = _tokenizer(found.path.absolute().parent / TOKENIZER, config.vocab, found.state.get("tokenizer"))
        model = LoadedDecoder(config)
        model.tokenizer = tokenizer
    check_fit(weights, model.state_dict(), found.path)
    if not of_images and config.tied and not torch.equal(weights["embed.weight"], weights["head.weight"]):
        raise damaged(found.path, "has two weights where its configuration ties them")
    model.load_state_dict(weights)
    return model.eval()


def load_decoder(path: str | Path) -> LoadedDecoder:
    """`load` for what reads text."""
    if is_of_images(path):
        raise InvalidValueError(f"{path} is a run of images, which reads no text: give one of a language model")
    return load(path)  # type: ignore[no-any-return]


def model_config(config: dict[str, Any], path: Path, kind: type[Any] = ModelConfig) -> Any:
    """The model's part of a run's configuration. Unknown and missing keys and wrong values are refused."""
    section = as_written_now(config).get("model")
    given = section if isinstance(section, dict) else {}
    if wrong := given.keys() ^ {field.name for field in fields(kind)}:
        raise damaged(path / CONFIG, f"has wrong or missing keys ({', '.join(sorted(wrong))[:200]})")
    try:
        return kind(**given)
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
