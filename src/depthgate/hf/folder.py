"""A model and its tokenizer from a Hugging Face folder or a GGUF file: whole or not at all, and nothing is executed."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from depthgate.data.tokenizer import MOST_IDS, read_tokenizer
from depthgate.errors import DepthgateError, InvalidValueError, installed
from depthgate.files import check_no_part, is_hub_name, not_a_folder
from depthgate.hf.families import FAMILIES, OURS, PREFIX, heads

CODE = "modeling_depthgate"  # the module in a saved folder that auto_map names
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")
_LEAST = {"num_hidden_layers": 1, "n_layer": 1, "max_position_embeddings": 2, "n_positions": 2}
_VOCABULARIES = ("tokenizer.json", "tokenizer.*.json", "tokenizer.model*", "vocab.*", "tekken.json", "*.tiktoken")
_MORE_FILES = ("tokenizer_config.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*")
_OF_HUB = (*_VOCABULARIES, *_MORE_FILES, "*.json", "*.model", "*.txt", "*.jinja", "LICENSE*")
_SAMPLE = "In 1905, 1234.56? It's  a\ttest:\r\n\n    if (x != 'y') { z += 1; }  Über Größe, 東京都, привет 👍🏽\n"
_CAUSES = {  # of errors whose own words mislead, by a part of these
    "must be a mapping": "it does not hold names with values",
    "deserializing header": "its weights are cut or damaged: fetch them again",
    "weights_only": "its weights are a pickle that is damaged or names code, which is never run: take safetensors",
    "ignore_mismatched_sizes": "its weights have other sizes than its config.json says",
}


def load(path: Path) -> Any:
    """The model of a folder or a GGUF file, in evaluation mode, on the CPU; a GGUF file's in float32, to be trained."""
    installed("transformers", "hf")
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    packed, folder, how, remedy = gguf_of(path), path, {"dtype": "auto"}, ""
    if packed is None:
        check_config(path)
    else:
        folder, how = packed.parent, {"dtype": "float32", "gguf_file": packed.name}
        remedy = ". Is it cut, or one of several (llama-gguf-split --merge joins them)? Is the package gguf installed?"
    safely = {"local_files_only": True, "trust_remote_code": False}
    with _named(f"{packed or path} cannot be loaded", remedy):
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **safely, **how)
    for kind in ("missing", "mismatched", "unexpected"):
        if keys := sorted(map(str, info.get(f"{kind}_keys") or ())):
            what = f"{packed or path} has {kind} weights ({', '.join(keys)[:200]})"
            routing = getattr(model.config, "depthgate", None) or {}
            if all(".depth_router.rule." in key for key in keys):
                raise DepthgateError(
                    f"{what}: its config.json says that the rule is {routing.get('rule')!r}: it was another"
                )
            raise DepthgateError(f"{what}: it belongs to another model, or is cut{remedy}")
    if packed is not None:  # traces of the packing, which would be saved
        model.config.__dict__.pop("quantization_config", None)
        for name in ("hf_quantizer", "quantization_method", "is_quantized"):
            model.__dict__.pop(name, None)
    return model.eval()


@contextmanager
def _named(opening: str, remedy: str = "") -> Iterator[None]:
    """Turn any error of a damaged file into a line that begins with `opening`, in our words if its own mislead."""
    try:
        yield
    except (DepthgateError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of `tokenizers` is not an Exception
        text = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, KeyError):
            text = f"transformers does not know {text}, which its config.json names or should"
        text = next((words for part, words in _CAUSES.items() if part in text), text)
        raise DepthgateError(f"{opening}: {text[:300]}{remedy}") from None


def code_names(model_type: str) -> dict[str, str]:
    """The auto_map of a model of ours."""
    if model_type == OURS:
        return {"AutoConfig": f"{CODE}.DepthgateConfig", "AutoModelForCausalLM": f"{CODE}.DepthgateForCausalLM"}
    kind = model_type.removeprefix(PREFIX)
    return {name: f"{CODE}.MoD{made}" for name, made in {"AutoConfig": FAMILIES[kind].config, **heads(kind)}.items()}


def check_code(named: Any, model_type: str, name: str = "auto_map") -> None:
    """Refuse an auto_map that is not ours: a config must not choose which code is executed."""
    if not named:
        return
    ours = {OURS, *(PREFIX + kind for kind in FAMILIES)}
    if isinstance(named, Mapping):
        if model_type in ours and named.items() <= code_names(model_type).items():
            return
        if others := [each for each in ours if named.items() <= code_names(each).items()]:
            what = f"the config is of a {others[0]}, and was read as a {model_type}"
            raise InvalidValueError(f"{what}: load it with AutoModelForCausalLM, or the class of its own family")
    what = f"the config names code to run ({name} is {str(named)[:120]})"
    raise InvalidValueError(f"{what}, which is never done: take it out")


def check_config(folder: Path) -> dict[str, Any]:
    """The values of a model's config.json; refused if it is damaged or names code that is not ours."""
    path = folder / "config.json"
    config = _read_json(path) if path.is_file() else {}
    if not isinstance(config.get("model_type"), str):
        check_no_part(folder)
        unnamed = f"{path} cannot be loaded: it does not name a model_type"
        wanted = "give the folder of a Hugging Face model, or a GGUF file"
        if not folder.exists():
            raise not_a_folder(str(folder), wanted)
        raise DepthgateError(unnamed if path.is_file() else f"{folder} has no config.json: {wanted}")
    for name, least in _LEAST.items():  # transformers would make a model without layers
        size = config.get(name, least)
        if isinstance(size, int) and size < least:
            raise DepthgateError(f"{path} cannot be loaded: {name} is {size}: it must be a whole number from {least}")
    for name in ("attn_implementation", "_attn_implementation"):
        if "/" in str(config.get(name)):  # transformers would fetch a kernel of that name, and run it
            check_code(config[name], "", name)
    check_code(config.get("auto_map"), config["model_type"])
    usual = {"output_attentions": False, "return_dict": True, "auto_map": config.get("auto_map") or {}}
    if odd := [name for name, value in usual.items() if config.get(name, value) not in (value, {})]:
        raise DepthgateError(f"{path} cannot be used: {odd[0]} is {json.dumps(config[odd[0]])} in it: take that out")
    dtype = config.get("dtype", config.get("torch_dtype"))
    if dtype is not None and not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise DepthgateError(f"{path} cannot be loaded: dtype is {str(dtype)[:80]!r}: it must be one such as bfloat16")
    for index in folder.glob("*.index.json"):
        found = _read_json(index)
        names = found.get("weight_map") if "metadata" in found else None
        if not isinstance(names, dict) or any(Path(str(name)).name != name for name in names.values()):
            raise DepthgateError(f"{index} does not say which file in {folder} holds which weight: fetch it again")
    return config


def fetched(name: str) -> Path:
    """The folder that is meant: itself, or that of a model on the hub (owner/name), which is fetched unless it is in
    the cache."""
    path = Path(name)
    if not is_hub_name(name):
        return path
    installed("transformers", "hf")
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(name, allow_patterns=[*_WEIGHTS[:2], *_OF_HUB]))
        if not _has(found, _WEIGHTS[:1]):  # a model with weights of torch alone
            found = Path(snapshot_download(name, allow_patterns=[*_WEIGHTS, *_OF_HUB]))
        return found
    except Exception as error:  # of the network, of the hub, of a name that it does not know
        why = f"{name} is not a folder, and cannot be fetched ({' '.join(str(error).partition('. ')[0].split())[:200]})"
        how = f"where there is a network: hf download {name} --local-dir {path.name}; then give --model {path.name}"
        raise DepthgateError(f"{why}. {how}") from None


def _read_json(path: Path) -> dict[str, Any]:
    with _named(f"{path} cannot be loaded"):
        return dict(**json.loads(path.read_bytes()))


def check_generation(folder: Path) -> None:
    """Refuse a generation_config.json that is damaged, which transformers ignores, or that could not be saved again."""
    path = folder / "generation_config.json"
    if path.is_file():
        from transformers import GenerationConfig

        with _named(f"{path} cannot be loaded", ". Mend it, or take it away"):
            GenerationConfig.from_pretrained(folder, local_files_only=True).validate(strict=True)


def gguf_of(path: Path) -> Path | None:
    """The GGUF file that is meant, if one is: itself, or the only one of a folder without other weights."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise DepthgateError(f"{path} is a file: give the folder of a Hugging Face model, or a .gguf file")
        return path
    if not path.is_dir() or _has(path, _WEIGHTS):
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise DepthgateError(f"{path} has {len(found)} GGUF files: name one of them, such as {found[0]}")
    return found[0] if found else None


def _has(folder: Path, patterns: Iterable[str]) -> bool:
    return any(any(folder.glob(pattern)) for pattern in patterns)


def find_tokenizer(path: Path, **how: Any) -> Any:
    """The tokenizer of transformers with a model, if it has one. One that is damaged or names code is refused."""
    from transformers import AutoTokenizer

    folder, packed = path, gguf_of(path)
    if packed is not None:
        folder, how["gguf_file"] = packed.parent, packed.name
    else:
        if (path / "tokenizer_config.json").is_file():  # it would be copied, vocabulary or not
            check_code(_read_json(path / "tokenizer_config.json").get("auto_map"), "")
        if not _has(path, _VOCABULARIES):  # some classes of tokenizers load without one, and know no word
            return None
        if (path / "tokenizer.json").is_file():
            read_tokenizer(path / "tokenizer.json")  # refuses ids that would end the process
    with _named(f"{path} has no tokenizer that loads", ". Mend its files, or take them away"):
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **how)
        largest = max(found.get_vocab().values(), default=-1)
    if not 0 <= largest < MOST_IDS:
        raise DepthgateError(f"the tokenizer of {path} has {largest} as its largest id: it is damaged")
    return found


def copy_tokenizer(tokenizer: Any, source: Path, out: Path) -> None:
    """Copy the tokenizer of a model, or of its GGUF file, into the folder of a routed one. Its files stay as they are
    if they load as the same tokenizer there, also where depthgate is not imported."""
    for pattern in (*_VOCABULARIES, *_MORE_FILES) if gguf_of(source) is None else ():
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
    for file in source.glob("LICENSE*") if source.is_dir() else ():
        shutil.copyfile(file, out / file.name)
    if tokenizer is None or _loads_as(tokenizer, out):
        return
    tokenizer.save_pretrained(out)  # which writes down the class: for some types of models the files are not trusted
    if not _loads_as(tokenizer, out):
        what = f"saving the tokenizer of {source} (a {type(tokenizer).__name__}) changes how it tokenises text"
        remedy = f"Remove its files from {source} and load the tokenizer from its original folder"
        raise DepthgateError(f"{what}, so nothing was written. {remedy}")


def _loads_as(tokenizer: Any, out: Path) -> bool:
    """True if a folder has this tokenizer, as a tokenizer.json if it can be one. It is read as by a program that does
    not know the type of the model; with depthgate.hf imported that type has the tokenizer of its family."""
    from transformers import PreTrainedConfig

    if hasattr(tokenizer, "backend_tokenizer") and not (out / "tokenizer.json").is_file():
        return False
    try:
        found = find_tokenizer(out, config=PreTrainedConfig())
    except DepthgateError:
        return False
    return found is not None and _content(found) == _content(tokenizer)


def _content(tokenizer: Any) -> tuple[Any, ...]:
    """Equal for two tokenizers that do the same: all ids, and those of a text that holds a few thousand tokens."""
    vocab = tokenizer.get_vocab()
    some = sorted(vocab.values())[:: len(vocab) // 4096 + 1]
    text = _SAMPLE + " ".join(tokenizer.batch_decode([[i] for i in some]))
    try:
        ids = tokenizer(text)["input_ids"]
    except Exception as error:  # of tokenizers that know some words only
        ids = str(error)
    return type(tokenizer), vocab, ids, tokenizer.special_tokens_map, tokenizer.chat_template
