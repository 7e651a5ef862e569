"""A model from a folder that Hugging Face or we wrote, or from a GGUF file: whole or not at all, and nothing in it is
executed."""

from pathlib import Path
from typing import Any

from depthgate.errors import DepthgateError
from depthgate.hf.code import check_config

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")


def load(path: Path) -> Any:
    """In evaluation mode, on the CPU."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        raise DepthgateError("transformers is missing: pip install 'depthgate[hf]'") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    packed = gguf_of(path)
    if packed is None:
        if not (path / "config.json").is_file():
            raise DepthgateError(f"{path} has no config.json: give the folder of a Hugging Face model, or a GGUF file")
        check_config(path / "config.json")
        return _loaded(AutoModelForCausalLM, path, dtype="auto")
    return _unpacked(AutoModelForCausalLM, packed)


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
        raise DepthgateError(f"{path} has {len(found)} GGUF files: name one of them, as {found[0]}")
    return found[0] if found else None


def _unpacked(auto: Any, path: Path) -> Any:
    """The weights of a GGUF file as numbers that can be trained: float32, which holds them exactly."""
    import torch

    try:
        import gguf
    except ImportError:
        raise DepthgateError(f"{path} needs the package gguf: pip install 'depthgate[hf]'") from None
    _check_whole(gguf, path)
    model = _loaded(auto, path.parent, gguf_file=path.name, dtype=torch.float32)
    for config in (model.config, model.base_model.config):  # they are no longer packed
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    for name in ("hf_quantizer", "quantization_method", "is_quantized"):
        model.__dict__.pop(name, None)
    return model


def _check_whole(gguf: Any, path: Path) -> None:
    """The reader maps the file into memory, and would read beyond its end."""
    try:
        reader = gguf.GGUFReader(path)
        end = max((int(t.data_offset) + int(t.n_bytes) for t in reader.tensors), default=0)
        parts = reader.fields.get("split.count")
        count = 1 if parts is None else int(parts.parts[parts.data[0]][0])
    except Exception as error:  # a damaged file may be anything
        raise DepthgateError(f"{path} cannot be loaded: {why(error)}: it is no GGUF file, or cut") from None
    if count > 1:
        raise DepthgateError(f"{path} is one of {count} parts: join them first (llama-gguf-split --merge)")
    if end > path.stat().st_size or not reader.tensors:
        raise DepthgateError(f"{path} cannot be loaded: it is cut")


def _loaded(auto: Any, folder: Path, **how: Any) -> Any:
    what = folder / how["gguf_file"] if "gguf_file" in how else folder
    try:
        model, info = auto.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, output_loading_info=True, **how
        )
    except DepthgateError:
        raise
    except Exception as error:  # a damaged file may be anything
        raise DepthgateError(f"{what} cannot be loaded: {why(error)}") from None
    for kind in ("missing", "mismatched", "unexpected"):
        if keys := sorted(map(str, info.get(f"{kind}_keys") or ())):
            raise DepthgateError(f"{what} has {kind} weights ({', '.join(keys)[:200]}): it is of another model, or cut")
    return model.eval()


def why(error: BaseException) -> str:
    """What transformers found wrong, in a line; with our words where its own mislead."""
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
