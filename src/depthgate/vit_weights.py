"""Pretrained vision transformers of timm and of transformers: their weights by our names, and their configuration."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthgate.errors import DepthgateError, InvalidValueError, installed
from depthgate.vision import ViTConfig


class Pretrained(NamedTuple):
    """A model that another one begins from."""

    kind: str  # its class
    weights: dict[str, Tensor]
    config: ViTConfig
    names: list[str] | None  # of its classes, where they are known
    mean: Any = None  # and std: of pixels, one for all channels or one for each
    std: Any = None


_GELU = ("gelu", "gelu_python", "GELU()", "GELU(approximate='none')")
# Names of weights in timm (first) and in transformers, older and newer, and ours.
_RENAMED = (
    (r"patch_embed\.proj\.|embeddings\.patch_embeddings\.projection\.", "patch."),
    (r"(?:encoder\.layer|layers|blocks)\.(\d+)\.", r"layers.\1."),
    (r"\.(?:norm1|layernorm_before)\.", ".attention_norm."),
    (r"\.(?:norm2|layernorm_after)\.", ".ffn_norm."),
    (r"\.attention\.(?:attention\.)?(?:query|q_proj)\.", ".attention.q."),
    (r"\.attention\.(?:attention\.)?(?:key|k_proj)\.", ".attention.k."),
    (r"\.attention\.(?:attention\.)?(?:value|v_proj)\.", ".attention.v."),
    (r"\.attn\.qkv\.", ".attention.qkv."),
    (r"\.(?:attn\.proj|attention\.output\.dense|attention\.o_proj)\.", ".attention.out."),
    (r"\.(?:mlp\.fc1|intermediate\.dense)\.", ".ffn.up."),
    (r"(\d)\.(?:mlp\.fc2|output\.dense)\.", r"\1.ffn.down."),
    (r"^(?:layernorm|fc_norm)\.", "norm."),
    (r"^classifier\.", "head."),
    (r"^(?:embeddings\.)?(cls_token|reg_token)$|^embeddings\.position_embeddings$|^pos_embed$", r"\1"),
)
_NEEDED = {"patch.weight", "position", "head.weight", "layers.0.attention.qkv.weight", "layers.0.ffn.up.weight"}


def pretrained(source: Any) -> Pretrained:
    """A ViT of timm or transformers, a module or the folder of a transformers model."""
    model = _opened(source) if isinstance(source, str | Path) else source
    weights, config = _theirs(model)
    labels = getattr(getattr(model, "config", None), "id2label", None)
    names = labels and [str(labels.get(number, number)) for number in range(config.classes)]
    cfg = getattr(model, "pretrained_cfg", None) or {}
    mean, std = cfg.get("mean"), cfg.get("std")
    if model is not source and (file := Path(source, "preprocessor_config.json")).is_file():
        mean, std = _of_pixels(file, config.channels)
    if mean and std and len(mean) not in (1, config.channels):  # timm's are of colours, also for grey images
        mean, std = ([sum(each) / len(each)] for each in (mean, std))
    return Pretrained(type(model).__name__, weights, config, names, mean, std)


def told_by(names: Sequence[str]) -> bool:
    """True if names of classes say what these are; numbers do not."""
    return not all(re.fullmatch(r"(LABEL_)?\d+", name) for name in names)


def _opened(folder: str | Path) -> nn.Module:
    """The model of a folder, which nothing is looked for outside of."""
    if not Path(folder).is_dir():  # which transformers would look for on the Hub
        raise DepthgateError(f"{folder} is not a folder: give that of an image classifier")
    found = installed("transformers", "hf").AutoModelForImageClassification
    try:
        return found.from_pretrained(str(folder), local_files_only=True)  # type: ignore[no-any-return]
    except Exception as error:  # transformers and safetensors raise many kinds
        raise DepthgateError(f"{folder} is not the folder of an image classifier ({str(error)[:100]})") from None


def _of_pixels(file: Path, channels: int) -> tuple[list[float], list[float]]:
    """The mean and std of a transformers model's pixels, of bytes / 255, by its preprocessor."""
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        factor = 255 * about.get("rescale_factor", 1 / 255) if about.get("do_rescale", True) else 255
        normal = about.get("do_normalize", True)
        given = [about.get("image_mean") or [0.5], about.get("image_std") or [0.5]] if normal else [[0.0], [1.0]]
        mean, std = ([float(x) / factor for x in (each if isinstance(each, list) else [each])] for each in given)
        sizes = {len(mean), len(std)} <= {1, channels}
        if not sizes or not all(map(math.isfinite, (*mean, *std))) or not min(std) > 0:
            raise ValueError
    except (ValueError, TypeError, AttributeError, ZeroDivisionError):
        what = f"{file} is damaged, or of other channels than the model's {channels}"
        raise DepthgateError(f"{what}: mend it, or remove it, if mean and std are 0.5") from None
    return mean, std


def _theirs(model: Any) -> tuple[dict[str, Tensor], ViTConfig]:
    """The weights of a ViT of timm or transformers by our names, and its configuration."""
    found: dict[str, Tensor] = {}
    for theirs, tensor in model.state_dict().items() if isinstance(model, nn.Module) else ():
        name = theirs.removeprefix("vit.")
        for old, new in _RENAMED:
            name = re.sub(old, new, name)
        found[name or "position"] = tensor.detach()
    for name in [name for name in found if ".attention.q." in name]:
        parts = [name.replace(".q.", f".{part}.") for part in "qkv"]
        if found.keys() >= {*parts}:
            found[name.replace(".q.", ".qkv.")] = torch.cat([found.pop(part) for part in parts])
    about, blocks = getattr(model, "config", None), getattr(model, "blocks", None)
    if not found.keys() >= _NEEDED or (about is None and blocks is None):
        what = f"a {type(model).__name__} is not a ViT that can be opened"
        raise InvalidValueError(f"{what}: give a VisionTransformer of timm or a ViT of transformers, with a head")
    for name in [name for name in found if re.fullmatch(r"layers\.\d+\.ls[12]\.gamma", name)]:  # timm's layer scale
        writes = name.replace("ls1.gamma", "attention.out").replace("ls2.gamma", "ffn.down")
        scale = found.pop(name)
        for part, axes in ((f"{writes}.weight", (-1, 1)), (f"{writes}.bias", (-1,))):
            if part in found:
                found[part] = found[part] * scale.view(axes)
    (dim, channels, *patch), position = found["patch.weight"].shape, found["position"][0]
    found["patch.weight"] = found["patch.weight"].flatten(1)
    size: Any = about.image_size if about is not None else model.patch_embed.img_size
    high, wide = size if isinstance(size, Sequence) else (size, size)
    patches = (high // patch[0]) * (wide // patch[1])
    first = [found.pop(name)[0] for name in ("cls_token", "reg_token") if name in found]
    prefix = torch.cat(first) if first else position[:0]
    places = position[: len(position) - patches]  # those of tokens before the patches, where they have any
    found["position"] = position[len(places) :]
    if len(prefix):
        found["prefix"] = prefix + F.pad(places, (0, 0, 0, len(prefix) - len(places)))
    pool: Any = "token" if about is not None else model.global_pool
    pooling = "mean" if pool == "avg" else "class"
    layers = 1 + max(int(name.split(".")[1]) for name in found if name.startswith("layers."))
    block: Any = blocks[0] if blocks is not None else None
    heads, eps = (about.num_attention_heads, about.layer_norm_eps) if about else (block.attn.num_heads, block.norm1.eps)
    act = about.hidden_act if about else repr(block.mlp.act)
    sides = {"image": f"{high}x{wide}", "patch": f"{patch[0]}x{patch[1]}", "channels": channels}
    shape = {"dim": dim, "layers": layers, "heads": heads, "hidden": len(found["layers.0.ffn.up.weight"])}
    registers = max(0, len(prefix) - (pooling == "class"))
    ends = {"pooling": pooling, "registers": registers, "classes": len(found["head.weight"])}
    config = ViTConfig(**sides, **shape, **ends, norm_eps=eps, pattern="dense")  # type: ignore[arg-type]
    odd = [act] * (act not in _GELU)
    early = ["a norm before its mean"] * (pool == "avg" and "fc_norm.weight" not in model.state_dict())
    early += ["class and registers in its mean"] * (pool == "avg" and getattr(model, "pool_include_prefix", False))
    # Blocks with the same weights may have another order, as ResPostBlock of timm has.
    early += [type(each).__name__ for each in blocks or () if type(each).__name__ != "Block"]
    for found_odd in [f"global_pool={pool!r}"] * (pool not in ("token", "avg")) + early + odd:
        raise not_plain(type(model).__name__, found_odd)
    return found, config


def not_plain(kind: str, what: str) -> InvalidValueError:
    """The error of a model that computes something else than a ViT of ours."""
    return InvalidValueError(f"a {kind} with {what} is more or less than a plain ViT: give one")
