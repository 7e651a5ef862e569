"""A model and its tokenizer from a folder that Hugging Face or we wrote, or from a GGUF file: whole or not at all, and
nothing in it is executed."""

import json
import shutil
from pathlib import Path
from typing import Any

from depthgate.data.tokenizer import MOST_IDS, read_tokenizer
from depthgate.errors import DepthgateError, InvalidValueError
from depthgate.hf.families import FAMILIES, PREFIX

CODE = "modeling_depthgate"  # the module in a saved folder that auto_map names
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")
_LEAST = {"num_hidden_layers": 1, "n_layer": 1, "max_position_embeddings": 2, "n_positions": 2}
_VOCABULARIES = ("tokenizer.json", "tokenizer.*.json", "tokenizer.model*", "vocab.*", "tekken.json", "*.tiktoken")
_TOKENIZER_FILES = (
    *_VOCABULARIES,
    *("tokenizer_config.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
)
_SAMPLE = (
    "In 1905, 12345.67 or 1e-9? It's  a\ttest:\r\n\n    if (x != 'y') { z += 1; }  Über Größe, 東京都, привет 👍🏽\n"
)


def load(path: Path) -> Any:
    """The model of a folder or a GGUF file, in evaluation mode, on the CPU."""
    try:
        from transformers.utils import logging
    except ImportError:
        raise DepthgateError("transformers is missing: pip install 'depthgate[hf]'") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    packed = gguf_of(path)
    if packed is not None:
        return _unpacked(packed)
    if not (path / "config.json").is_file():
        raise DepthgateError(f"{path} has no config.json: give the folder of a Hugging Face model, or a GGUF file")
    check_config(path / "config.json")
    return _loaded(path, dtype="auto")


def code_names(model_type: str) -> dict[str, str]:
    """The auto_map of a routed model."""
    family = FAMILIES[model_type.removeprefix(PREFIX)]
    return {"AutoConfig": f"{CODE}.MoD{family.config}", "AutoModelForCausalLM": f"{CODE}.MoD{family.model}"}


def check_code(named: Any, model_type: str) -> None:
    """Refuse an auto_map that is not ours: a config must not choose which code is executed."""
    if named is not None and (not model_type.startswith(PREFIX) or named != code_names(model_type)):
        raise InvalidValueError(
            f"the config names code to run (auto_map is {str(named)[:120]}), which is never done: take it out"
        )


def check_config(path: Path) -> dict[str, Any]:
    """The values of a model's config.json; refused if it is damaged or names code that is not ours."""
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DepthgateError(f"{path} cannot be loaded: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise DepthgateError(f"{path} cannot be loaded: it does not name a model_type")
    for name, least in _LEAST.items():  # transformers would make a model without layers
        size = config.get(name, least)
        if isinstance(size, int) and size < least:
            raise DepthgateError(f"{path} cannot be loaded: {name} is {size}: it must be a whole number from {least}")
    for name in ("attn_implementation", "_attn_implementation"):
        if "/" in str(config.get(name)):  # transformers would fetch a kernel of that name, and run it
            raise DepthgateError(
                f"{path} names code to run ({name} is {str(config[name])[:120]}), which is never done: take it out"
            )
    kind = config["model_type"]
    check_code(config.get("auto_map"), kind if kind.removeprefix(PREFIX) in FAMILIES else "")
    return config


def check_generation(folder: Path) -> None:
    """Refuse a generation_config.json that is damaged, which transformers ignores, or that could not be saved again."""
    path = folder / "generation_config.json"
    if path.is_file():
        from transformers import GenerationConfig

        try:
            GenerationConfig.from_pretrained(folder, local_files_only=True).validate(strict=True)
        except Exception as error:  # a damaged file may be anything
            raise DepthgateError(f"{path} cannot be loaded: {_reason(error)}. Mend it, or take it away") from None


def gguf_of(path: Path) -> Path | None:
    """The GGUF file that is meant, if one is: itself, or the only one of a folder without other weights."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise DepthgateError(f"{path} is a file: give the folder of a Hugging Face model, or a .gguf file")
        return path
    if not path.is_dir() or any(any(path.glob(pattern)) for pattern in _WEIGHTS):
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        raise DepthgateError(f"{path} has {len(found)} GGUF files: name one of them, such as {found[0]}")
    return found[0] if found else None


def _unpacked(path: Path) -> Any:
    """The model of a GGUF file. Its weights become float32, which holds them exactly and can be trained."""
    import torch

    try:
        import gguf
    except ImportError:
        raise DepthgateError(f"{path} needs the package gguf: pip install 'depthgate[hf]'") from None
    _check_whole(gguf, path)
    model = _loaded(path.parent, gguf_file=path.name, dtype=torch.float32)
    for config in (model.config, model.base_model.config):  # they are no longer packed
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        model.__dict__.pop(name, None)
    return model


def _check_whole(gguf: Any, path: Path) -> None:
    """Refuse a cut GGUF file: the reader maps it into memory, and would read beyond its end."""
    try:
        reader = gguf.GGUFReader(path)
        end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
        parts = reader.fields.get("split.count")
        count = 1 if parts is None else int(parts.parts[parts.data[0]][0])
    except Exception as error:  # a damaged file may be anything
        raise DepthgateError(f"{path} cannot be loaded: {_reason(error)}: it is not a GGUF file, or cut") from None
    if count > 1:
        raise DepthgateError(f"{path} is one of {count} parts: join them first (llama-gguf-split --merge)")
    if end > path.stat().st_size or not reader.tensors:
        raise DepthgateError(f"{path} cannot be loaded: it is cut")


def _loaded(folder: Path, **how: Any) -> Any:
    from transformers import AutoModelForCausalLM

    what = folder / how["gguf_file"] if "gguf_file" in how else folder
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, output_loading_info=True, **how
        )
    except DepthgateError:
        raise
    except Exception as error:  # a damaged file may be anything
        raise DepthgateError(f"{what} cannot be loaded: {_reason(error)}") from None
    for kind in ("missing", "mismatched", "unexpected"):
        if keys := sorted(map(str, info.get(f"{kind}_keys") or ())):
            raise DepthgateError(
                f"{what} has {kind} weights ({', '.join(keys)[:200]}): it belongs to another model, or is cut"
            )
    return model.eval()


def _reason(error: BaseException) -> str:
    """The fault that transformers found, in a line; in our words where its own mislead."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError):
        return f"transformers does not know {text}, which its config.json names or should"
    if "incomplete metadata" in text or "InvalidHeader" in text:
        return f"its weights are cut or damaged ({text[:120]}): fetch them again"
    if "weights_only" in text:
        return "its weights are a pickle that is damaged or names code, which is never run: take safetensors"
    if "ignore_mismatched_sizes" in text:
        return "its weights have other sizes than its config.json says"
    return text[:300]


def load_tokenizer(path: Path, **how: Any) -> Any:
    """The tokenizer of transformers next to a model, or within its GGUF file. One that is damaged or names code is
    refused."""
    from transformers import AutoTokenizer

    packed = gguf_of(path)
    if packed is not None:
        how["gguf_file"] = packed.name
    elif not has_tokenizer(path):
        raise DepthgateError(
            f"{path} has no tokenizer: put the files of the model's own there, "
            f"as AutoTokenizer.from_pretrained(MODEL).save_pretrained({str(path)!r}) does"
        )
    else:
        _check_tokenizer_config(path / "tokenizer_config.json")
        if (path / "tokenizer.json").is_file():
            read_tokenizer(path / "tokenizer.json")  # refuses ids that would end the process
    try:
        folder = path if packed is None else packed.parent
        found = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **how)
        largest = max(found.get_vocab().values(), default=-1)
    except (DepthgateError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a panic of `tokenizers` is not an Exception
        raise DepthgateError(
            f"{path} has no tokenizer that loads: {_reason(error)}. Mend its files, or take them away"
        ) from None
    if not 0 <= largest < MOST_IDS:
        raise DepthgateError(f"the tokenizer of {path} has {largest} as its largest id: it is damaged")
    return found


def has_tokenizer(path: Path) -> bool:
    """True if there is a vocabulary; some classes of tokenizers load without one, and know no word."""
    return gguf_of(path) is not None or any(any(path.glob(pattern)) for pattern in _VOCABULARIES)


def find_tokenizer(path: Path) -> Any:
    """The tokenizer next to a model; None if there is none. Damage is refused, as in `load_tokenizer`."""
    _check_tokenizer_config(path / "tokenizer_config.json")  # which would be copied, vocabulary or not
    return load_tokenizer(path) if has_tokenizer(path) else None


def _check_tokenizer_config(path: Path) -> None:
    try:
        named = json.loads(path.read_bytes()).get("auto_map") if path.is_file() else None
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise DepthgateError(f"{path} cannot be loaded: {error}") from None
    check_code(named, "")


def copy_tokenizer(tokenizer: Any, source: Path, out: Path) -> None:
    """Copy the tokenizer of a model, or of its GGUF file, into the folder of a routed one. Its files stay as they are
    if they load as the same tokenizer there, also where depthgate is not imported."""
    for pattern in _TOKENIZER_FILES if gguf_of(source) is None else ():
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, out / file.name)
    if tokenizer is None:
        return
    for change in (None, _name_class, type(tokenizer).save_pretrained):
        if change is not None:
            change(tokenizer, out)
        if _loads_as(tokenizer, out):
            return
    raise DepthgateError(
        f"saving the tokenizer of {source} (a {type(tokenizer).__name__}) changes how it tokenises text, so nothing "
        f"was written. Remove its files from {source} and load the tokenizer from its original folder"
    )


def _name_class(tokenizer: Any, out: Path) -> None:
    """Write down the class, as transformers does not trust the files of some types of models."""
    path = out / "tokenizer_config.json"
    values = json.loads(path.read_bytes()) if path.is_file() else {}
    values["tokenizer_class"] = type(tokenizer).__name__
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _loads_as(tokenizer: Any, out: Path) -> bool:
    """True if a folder has this tokenizer, as a tokenizer.json if it can be one. It is read as by a program that does
    not know the type of the model; with depthgate.hf imported that type has the tokenizer of its family."""
    from transformers import PreTrainedConfig

    if hasattr(tokenizer, "backend_tokenizer") and not (out / "tokenizer.json").is_file():
        return False
    try:
        return _content(load_tokenizer(out, config=PreTrainedConfig())) == _content(tokenizer)
    except DepthgateError:
        return False


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
