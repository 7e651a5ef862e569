"""The vision transformer: patches, a pattern of layers, the residual loop, the head; and pretrained ones as a start."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from depthgate.config import check_neutral
from depthgate.errors import InvalidValueError
from depthgate.flops import budget
from depthgate.layers import MLP, MoD, MoE, SoftMoE
from depthgate.model import Output, generator_of
from depthgate.ops.attention import attention_to_all
from depthgate.ops.rows import plain_positions
from depthgate.recipes import images_config
from depthgate.routing import Plans, TopTokens
from depthgate.vision import ViTConfig
from depthgate.vit_weights import Pretrained, not_plain, pretrained, told_by


class Attention(nn.Module):
    """Multi-head attention of all tokens to all real ones, with biases and without rotary positions."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (B, T, D); mask (B, T), True at real tokens."""
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, D // self.heads).unbind(2)
        return self.out(attention_to_all(q, k, v, mask).reshape(B, T, D))  # type: ignore[no-any-return]


class Block(nn.Module):
    """The pre-norm block as an Update: a + ffn(norm(x + a)), a = attention(norm(x)); norms have a mean."""

    def __init__(self, dim: int, heads: int, ffn: nn.Module, norm_eps: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim, norm_eps)
        self.attention = Attention(dim, heads)
        self.ffn_norm = nn.LayerNorm(dim, norm_eps)
        self.ffn = ffn

    def forward(self, x: Tensor, pos: Tensor | None = None, plain: bool = False, **_: Any) -> tuple[Tensor, Plans]:
        mask = None if plain or pos is None else pos >= 0
        attended = self.attention(self.attention_norm(x), mask)
        fed, plans = self.ffn(self.ffn_norm(x + attended), pos=pos, plain=plain)
        return attended + fed, plans


def build_layer(config: ViTConfig, kind: str) -> nn.Module:
    """One layer of a kind, as an Update."""
    dim, hidden = config.dim, config.hidden_of_experts(kind)
    ffn: nn.Module
    if kind == "soft_moe":
        how: Any = {"scale": config.slot_scale, "dispatch": config.dispatch, "combine": config.combine}
        ffn = SoftMoE(dim, config.experts, config.slots, hidden=hidden, **how)
    elif kind == "moe":
        ffn = MoE(dim, config.experts, config.top_k, hidden=hidden, activation="gelu", bias=True)
    else:
        ffn = MLP(dim, config.mlp_hidden)
    block = Block(dim, config.heads, ffn, config.norm_eps)
    return MoD(block, TopTokens(dim, config.capacity, gate=config.gate, normed=True)) if kind == "mod" else block


class Stem(nn.ModuleList):
    """Convolutions that halve an image, each twice as wide as the one before, until a pixel stands for a patch (after
    Xiao et al. 2021, arXiv 2106.14881, without norms)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(nn.Conv2d(before, after, 3, stride, 1) for before, after, stride in config.convolutions)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x (B, channels, H, W), 0 at padding; mask (B, H, W) -> (B, rows * columns, D)."""
        for number, convolution in enumerate(self):
            if number:
                x = F.gelu(x)
            if number and mask is not None:  # padding is 0 to every convolution, as what lies beyond an image is
                mask = mask[:, :: mask.shape[1] // x.shape[2], :: mask.shape[2] // x.shape[3]]
                x = torch.where(mask[:, None], x, 0.0)
            x = convolution(x)
        return x.flatten(2).mT


class ViT(nn.Module):
    """Patches, `layers` of the configured kinds, and a head on a class token or on the mean of all patches."""

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        if not isinstance(config, ViTConfig):
            raise InvalidValueError(f"config is {config!r}: it must be a ViTConfig, or use ViT.from_preset(name)")
        if "mod" in config.kinds and (k := budget(config.capacity, config.context)) < config.prefix:
            raise InvalidValueError(f"capacity {config.capacity} takes {k} of {config.prefix} prefix tokens: raise it")
        self.config = config
        self.names = [str(number) for number in range(config.classes)]  # of the classes
        seed = int(torch.randint(2**62, (), device="cpu"))  # before the layers draw anything
        (high, wide), (rows, columns) = config.patch_size, config.grid
        pixels = config.channels * high * wide
        self.patch = Stem(config) if config.stem else nn.Linear(pixels, config.dim)
        self.position = nn.Parameter(torch.empty(rows * columns, config.dim))
        self.prefix = nn.Parameter(torch.empty(config.prefix, config.dim)) if config.prefix else None
        self.layers = nn.ModuleList(build_layer(config, kind) for kind in config.kinds)
        self.norm = nn.LayerNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.classes)
        # What bytes are normalised by: those of the data.
        self.register_buffer("pixel_mean", torch.full((config.channels,), 0.5))
        self.register_buffer("pixel_std", torch.full((config.channels,), 0.5))
        self.reset_parameters(seed)

    @classmethod
    def from_preset(cls, name: str, **changes: Any) -> Self:
        """A new model of a preset's shape, such as "vit-b16-soft", with other values of ViTConfig if given."""
        return cls(replace(images_config(name).model, **changes))

    @classmethod
    def from_pretrained(cls, source: Any, **changes: Any) -> Self:
        """A ViT from a pretrained one of timm or transformers (a module, or the folder of a transformers model) or from
        a dense one of ours. With other values of ViTConfig, such as pattern="moe", it is upcycled: experts start as
        copies of the MLP, so that moe layers (and mod layers of capacity 1) compute what it did, and soft_moe layers
        do for equal tokens.
        For another `image` its positions are stretched; for another number of `classes` it has a new head, of zeros."""
        theirs = source._as_pretrained() if isinstance(source, ViT) else _complete(pretrained(source))
        weights, config = theirs.weights, replace(theirs.config, expert_hidden=theirs.config.hidden)
        asked = replace(config, **changes)
        for name in ("patch_size", *SHAPE[1:]):
            if getattr(asked, name) != getattr(config, name):
                what = f"{name} is {getattr(asked, name)!r}, that of the model {getattr(config, name)!r}"
                raise InvalidValueError(f"{what}: leave it out; only image, classes and routing may be chosen")
        if "mod" in asked.kinds:
            check_neutral(asked.gate)
        if asked.top_k == 1 and "moe" in asked.kinds:
            raise InvalidValueError("top_k is 1, whose gate is not 1: experts would be less than the MLP; use 2")
        weights["position"] = _stretched(weights["position"], config.grid, asked.grid)
        names = theirs.names
        if asked.classes != config.classes:
            names, weights = None, {name: each for name, each in weights.items() if not name.startswith("head.")}
        vit = cls(asked).to(weights["position"].dtype)
        for name, tensor in vit.state_dict().items():  # which is written to
            plain = name.replace(".block.", ".")  # of a mod layer
            if found := re.fullmatch(r"(.*\.ffn\.)experts\.(up|down)(_bias)?", plain):
                of_mlp = weights[f"{found[1]}{found[2]}.{'bias' if found[3] else 'weight'}"]
                tensor.copy_(of_mlp if found[3] else of_mlp.mT)
            elif plain in weights:
                tensor.copy_(weights[plain])
            elif ".router.proj." in name and ".ffn." not in name:
                tensor.zero_()  # a gate of one
        for buffer, value in ((vit.pixel_mean, theirs.mean), (vit.pixel_std, theirs.std)):
            if value is not None:
                buffer.copy_(torch.as_tensor(value))
        vit.names = names or vit.names
        return vit.eval()

    def _as_pretrained(self) -> Pretrained:
        """This model as one that another may begin from: a dense one, whose experts will be copies of its MLPs."""
        if set(self.config.kinds) != {"dense"}:
            raise InvalidValueError(f"the model has layers of {self.config.pattern}: only a dense one can be upcycled")
        weights = {name: each.detach() for name, each in self.state_dict().items() if not name.startswith("pixel_")}
        config = replace(self.config, hidden=self.config.mlp_hidden)
        return Pretrained(type(self).__name__, weights, config, list(self.names), self.pixel_mean, self.pixel_std)

    def begin_head(self, names: Sequence[str]) -> bool:
        """Let the head tell these classes apart. Rows of classes of the same names are put in their order; a head that
        knows others begins with zeros, which False tells. Names that are numbers say nothing: the head stays."""
        known, names = self.names, list(names)
        self.names = names
        if known == names or not (told_by(known) and told_by(names)):
            return True
        same = sorted(known) == sorted(names)
        with torch.no_grad():
            for weight in (self.head.weight, self.head.bias):
                weight.copy_(weight[[known.index(name) for name in names]] if same else torch.zeros_like(weight))
        return same

    def reset_parameters(self, seed: int | None = None) -> None:
        """Normal weights of the variance of nn.Linear's; those that write into the residual smaller; a head of zeros. A
        weight's values depend on the seed, its name and its shape alone: models that differ elsewhere start alike."""
        seed = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed
        for name, weight in self.named_parameters():
            if weight.is_meta:
                continue
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif weight.ndim >= 2:
                inputs = weight.shape[1] if weight.ndim == 3 or name.endswith("weight") else 1 / 0.0012
                divisor = weight[0].numel() if weight.ndim == 4 else 3 * inputs  # a stem keeps the variance
                writes = name.endswith(("out.weight", "down.weight", "down"))
                std = divisor**-0.5 / ((2 * len(self.layers)) ** 0.5 if writes else 1.0)
                nn.init.normal_(weight, std=std, generator=generator_of(seed, name, weight.device))
        nn.init.zeros_(self.head.weight)

    def forward(
        self, images: Tensor | Sequence[Tensor], mask: Tensor | None = None, survive: Tensor | None = None
    ) -> Output:
        """images (B, channels, height, width), bytes or normalised already; or a list of (channels, height, width), of
        different sizes. mask (B, height, width), True at real pixels: those of a rectangle at the top left.
        survive (layers, B): what each image's updates are multiplied by, for training with drop path.
        Returns logits (B, classes), and the plans of all routed layers."""
        x, plans = self.features(images, mask, survive)
        return Output(self.head(x), plans)

    def features(
        self, images: Tensor | Sequence[Tensor], mask: Tensor | None = None, survive: Tensor | None = None
    ) -> tuple[Tensor, Plans]:
        """The input of the head (B, D), and the plans."""
        x, real = self.embed(images, mask)
        plans: Plans = ()
        start = self.config.prefix
        pos = None if real is None else torch.where(real, plain_positions(x), -1)
        keep = plain_positions(x) < start if start else None
        for number, layer in enumerate(self.layers):
            call: dict[str, Any] = {"pos": pos, "plain": real is None}
            if isinstance(layer, MoD):
                call["keep"] = keep
            update, more = layer(x, **call)
            x = x + (update if survive is None else update * survive[number, :, None, None].to(update.dtype))
            plans += more
        if self.config.pooling == "class":
            return self.norm(x[:, 0]), plans
        if real is None:
            return self.norm(x[:, start:].mean(1)), plans
        there = real[:, start:, None]
        total = torch.where(there, x[:, start:], 0.0).sum(1)
        return self.norm(total / there.sum(1).clamp(min=1)), plans

    def embed(self, images: Tensor | Sequence[Tensor], mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """The tokens of images (B, T, D), and which of them are real (B, T); None: all are."""
        if not isinstance(images, Tensor):
            if mask is not None:
                raise InvalidValueError("mask is given beside a list of images, whose sizes make it: leave it out")
            images, mask = self._padded(images)
        pixels = self.normalised(images)
        (high, wide), (B, C, *size) = self.config.patch_size, pixels.shape
        rows, columns = self.config.patches_of(*size)
        real = None
        if mask is not None:
            real, pixels = self._real(mask, images), torch.where(mask[:, None], pixels, 0.0)
        if isinstance(self.patch, Stem):
            x = self.patch(pixels, mask)
        else:
            cut = pixels.view(B, C, rows, high, columns, wide).permute(0, 2, 4, 1, 3, 5)
            x = self.patch(cut.reshape(B, rows * columns, C * high * wide))
        places = _stretched(self.position, self.config.grid, (rows, columns)) if real is None else self._places(real)
        x = x + places
        if self.prefix is not None:
            x = torch.cat((self.prefix.to(x.dtype).expand(B, -1, -1), x), 1)
        return x, None if real is None else F.pad(real.flatten(1), (self.config.prefix, 0), value=True)

    def normalised(self, images: Tensor) -> Tensor:
        """Images as the model reads them: bytes are normalised, other values are taken as they are."""
        channels = self.config.channels
        if images.ndim != 4 or images.shape[1] != channels or 0 in images.shape[1:]:
            shape = f"(batch, {channels}, height, width)"
            raise InvalidValueError(f"images has shape {tuple(images.shape)}: it must be {shape}")
        if images.dtype is torch.uint8:
            images = (images / 255 - self.pixel_mean[:, None, None]) / self.pixel_std[:, None, None]
        elif not images.is_floating_point():
            raise InvalidValueError(f"images has dtype {images.dtype}: it must be uint8, or a floating dtype")
        return images.to(self.position.dtype)

    def _padded(self, images: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Images of different sizes (channels, height, width) as one tensor, and the mask of their pixels."""
        tensors = list(images) if isinstance(images, Sequence) else []
        if not tensors or not all(isinstance(each, Tensor) and each.ndim == 3 for each in tensors):
            raise InvalidValueError("images is not a tensor: it must be a list of tensors (channels, height, width)")
        if len({(each.dtype, each.shape[0]) for each in images}) > 1:
            raise InvalidValueError("images has several dtypes or numbers of channels: give bytes, or floats, of one")
        if len({each.shape for each in images}) == 1:
            return torch.stack(list(images)), None
        for each in images:
            self.config.patches_of(*each.shape[1:])
        H, W = (max(each.shape[side] for each in images) for side in (1, 2))
        room = [(0, W - each.shape[2], 0, H - each.shape[1]) for each in images]
        mask = [F.pad(torch.ones_like(e[0], dtype=torch.bool), pad) for e, pad in zip(images, room, strict=True)]
        return torch.stack([F.pad(e, pad) for e, pad in zip(images, room, strict=True)]), torch.stack(mask)

    def _real(self, mask: Tensor, images: Tensor) -> Tensor:
        """mask (B, H, W) -> (B, rows, columns), True at patches of the image."""
        B, _, H, W = images.shape
        if mask.shape != (B, H, W) or mask.dtype is not torch.bool:
            raise InvalidValueError(f"mask is {mask.dtype} {tuple(mask.shape)}: it must be bool {(B, H, W)}")
        high, wide = self.config.patch_size
        parts = mask.view(B, H // high, high, W // wide, wide)
        real = parts.any(4).any(2)
        tall, broad = (side.cummin(1).values for side in (real.any(2), real.any(1)))
        whole = tall[:, :, None] & broad[:, None]
        if not torch.equal(parts.all(4).all(2), whole) or not torch.equal(real, whole):
            raise InvalidValueError("mask is not a rectangle of whole patches at the top left: pad right and below")
        return real

    def _places(self, real: Tensor) -> Tensor:
        """Positions of images of different sizes, each with those that it has alone: (B, rows * columns, D)."""
        B, rows, columns = real.shape
        room = self.position.new_zeros(B, rows, columns, self.position.shape[1])
        sizes = list(zip(real.any(2).sum(1).tolist(), real.any(1).sum(1).tolist(), strict=True))
        for high, wide in {size for size in sizes if all(size)}:
            mine = torch.tensor([size == (high, wide) for size in sizes], device=real.device)
            part = _stretched(self.position, self.config.grid, (high, wide)).view(high, wide, -1)
            room = torch.where(mine[:, None, None, None], F.pad(part, (0, 0, 0, columns - wide, 0, rows - high)), room)
        return room.flatten(1, 2)


def _stretched(position: Tensor, grid: tuple[int, int], wanted: tuple[int, int]) -> Tensor:
    """The positions of a grid (rows * columns, D), as learnt or stretched to another grid."""
    if wanted == grid:
        return position
    # Contiguous: torch 2.13 mixes up the channels of others where one column is asked for. Not in halves: on a CPU it
    # cannot.
    learnt = position.view(1, *grid, -1).permute(0, 3, 1, 2).contiguous()
    wide = learnt.to(torch.promote_types(learnt.dtype, torch.float32))
    return F.interpolate(wide, wanted, mode="bicubic", antialias=True).flatten(2)[0].mT.to(learnt.dtype)


_SIZES = ("dim", "layers", "heads", "hidden", "expert_hidden")
SHAPE = ("patch", "channels", "stem", *_SIZES, "pooling", "registers", "norm_eps")


def _complete(theirs: Pretrained) -> Pretrained:
    """A model with zeros for the biases that it does not have; refused where its weights are not a ViT's of ours."""
    weights = theirs.weights
    with torch.device("meta"):
        known = ViT(theirs.config).state_dict()
    for name, each in known.items():
        if name.endswith(".bias") and name not in weights:
            weights[name] = weights["position"].new_zeros(each.shape)
    shapes, wanted = ({(name, each.shape) for name, each in of.items()} for of in (weights, known))
    if odd := sorted(name for name, _ in shapes ^ wanted if name not in ("pixel_mean", "pixel_std")):
        raise not_plain(theirs.kind, odd[0])
    return theirs
