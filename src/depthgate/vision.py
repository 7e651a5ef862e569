"""Options of vision transformers and of their training on images, and their presets. Imports no torch."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from depthgate.config import GATE_NAMES, RunConfig, check_pattern
from depthgate.errors import InvalidValueError, check_capacity, check_count, check_divides, check_number
from depthgate.options import Options, choice, count, number, option

KINDS, LEARNT = ("dense", "soft_moe", "moe", "mod"), ("learnt", "uniform")


def check_side(given: Any, name: str) -> tuple[int, int]:
    """Height and width in pixels: a number, or a text such as 32x48."""
    sides = str(given).split("x")
    if isinstance(given, bool) or len(sides) > 2 or not all(side.isdecimal() for side in sides):
        raise InvalidValueError(f"{name} is {given!r}: it must be pixels of a side, or HEIGHTxWIDTH, such as 32x48")
    high, wide = (check_count(int(side), name, maximum=2**14) for side in (sides[0], sides[-1]))
    return high, wide


@dataclass(frozen=True)
class ViTConfig(Options):
    """A vision transformer."""

    image: str | int | None = option(
        None, "pixels of a side, or HEIGHTxWIDTH; the data's unless given, or 32", check_side
    )
    patch: str | int = option(4, "pixels of a side of a patch, or HEIGHTxWIDTH", check_side)
    channels: int = count(3, "colours of a pixel", maximum=2**10)
    classes: int = count(10, "how many classes there are", maximum=2**20)
    dim: int = count(192, "model width", maximum=2**16)
    layers: int = count(6, "number of layers", maximum=2**12)
    heads: int = count(3, "heads of attention", maximum=2**12)
    hidden: int | None = count(None, "width of the feed-forward; four times dim unless given", maximum=2**20)
    pattern: str = option(
        "soft_moe",
        "kinds of layers, separated by commas and repeated from layer `start` on: dense, soft_moe (experts that see "
        "means of tokens), moe (experts chosen by tokens), mod (Mixture-of-Depths)",
        partial(check_pattern, kinds=KINDS),
    )
    start: int | None = count(
        None, "first layer of the pattern, after dense ones; half, or 0 if dense is in it", 0, 2**12
    )
    experts: int = count(32, "experts of a soft_moe or moe layer", maximum=2**14)
    slots: int = count(1, "slots of each expert of a soft_moe layer", maximum=2**14)
    top_k: int = count(2, "experts each token of a moe layer uses", maximum=2**14)
    expert_hidden: int | None = count(None, "width of an expert; hidden unless given, over top_k in moe", maximum=2**20)
    slot_scale: float = number(8.0, "(0, 40]", "scale of the logits of soft_moe layers at first")
    dispatch: str = choice("learnt", LEARNT, "weights of tokens in slots; uniform: all alike, as a control")
    combine: str = choice("learnt", LEARNT, "weights of slots in tokens; uniform: all alike, as a control")
    capacity: float = option(0.5, "share of the tokens that go through a mod layer", check_capacity)
    gate: str = choice("one_plus_tanh", GATE_NAMES, "what a row of a mod layer is multiplied by")
    pooling: str = choice("mean", ("mean", "class"), "what the head reads: the mean of all patches, or a class token")
    registers: int = count(0, "further tokens that belong to no patch", minimum=0, maximum=2**10)
    norm_eps: float = number(1e-6, "(0, inf)", "what norms add to the variance")
    stem: bool = option(False, "make patches by convolutions that halve the image, instead of cutting it")

    def check_together(self) -> None:
        if self.image is not None:
            self.patches_of(*self.size)
        check_divides(self.heads, self.dim, "heads", "dim")
        if self.stem:
            for side in self.patch_size:
                if side & (side - 1):
                    what = f"patch is {self.patch!r}, and a stem needs sides that are powers of two"
                    raise InvalidValueError(f"{what}: give such a patch, or stem=false")
            check_divides(2 ** (len(self.convolutions) - 1), self.dim, "what a stem for this patch needs,", "dim")
        if "moe" in self.pattern.split(","):
            check_count(self.top_k, "top_k", maximum=self.experts)
        check_count(self.start or 0, "start", minimum=0, maximum=self.layers)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an image."""
        return check_side(self.image or 32, "image")

    @property
    def patch_size(self) -> tuple[int, int]:
        return check_side(self.patch, "patch")

    @property
    def convolutions(self) -> list[tuple[int, int, tuple[int, int]]]:
        """Channels before and after each convolution of the stem, and its strides, down and across; none without it."""
        high, wide = (side.bit_length() - 1 for side in self.patch_size)
        many = max(high, wide, 1) if self.stem else 0
        widths = [self.channels, *(self.dim // 2 ** (many - n) for n in range(1, many + 1))]
        return [(widths[n], widths[n + 1], (1 + (n < high), 1 + (n < wide))) for n in range(many)]

    def patches_of(self, *size: int) -> tuple[int, int]:
        """Rows and columns of the patches of an image of this height and width."""
        each = zip(self.patch_size, size, ("height", "width"), strict=True)
        rows, columns = (check_divides(p, s, f"the {n} of a patch,", f"the {n} of an image,") for p, s, n in each)
        return rows, columns

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.patches_of(*self.size)

    @property
    def prefix(self) -> int:
        """Tokens before the patches: class and registers."""
        return self.registers + (self.pooling == "class")

    @property
    def context(self) -> int:
        """Tokens of an image."""
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def mlp_hidden(self) -> int:
        return self.hidden or 4 * self.dim

    def hidden_of_experts(self, kind: str) -> int:
        """Width of an expert in a layer of this kind."""
        used = self.top_k if kind == "moe" else 1
        return self.expert_hidden or max(8, round(self.mlp_hidden / used / 8) * 8)

    @property
    def kinds(self) -> tuple[str, ...]:
        cycle = self.pattern.split(",")
        start = self.start if self.start is not None else 0 if "dense" in cycle else self.layers // 2
        return tuple("dense" if i < start else cycle[(i - start) % len(cycle)] for i in range(self.layers))

    @property
    def routed(self) -> tuple[int, ...]:
        """The layers, counted from 0, that only some tokens go through."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind == "mod")


@dataclass(frozen=True, kw_only=True)
class ImagesConfig(RunConfig):
    """Train a vision transformer on images."""

    task: str = choice("images", ("images",), "images: what this is")
    data: str = option("", "an .npz file, or a folder with a folder of images for each class, in train and test")
    out: str = "runs/images"
    preset: str = option("vit-tiny-soft", "where all other options start from (see depthgate presets)")
    model: ViTConfig = field(default_factory=ViTConfig)
    pretrained: str | None = option(
        None, "folder of a ViT of transformers, or a run's of a dense one, to start from; its shape is the model's"
    )
    corrupt: str = choice("refuse", ("refuse", "skip"), "what is done about files that are not images")
    epochs: float | None = number(
        None, "(0, inf)", "as many images as so many passes have, instead of steps; warm-up: a tenth at most"
    )
    repeats: int = count(1, "times that an image comes in a row, each time changed in another way", maximum=2**10)
    batch: int = count(128, "images in a step")
    lr: float = number(1e-3, "(0, inf)")
    weight_decay: float = number(0.05, "[0, 1)")
    cuda_graph: bool = option(True, "on cuda, record a step once and replay it as a CUDA graph, where it can be one")
    balance_loss: float = number(0.01, "[0, 1)", "weight of the loss that spreads tokens over experts of moe layers")
    z_loss: float = number(1e-4, "[0, 1)", "weight of the loss that keeps the logits of experts small")
    smoothing: float = number(0.1, "[0, 1)", "share of a label that is spread over all classes")
    drop_path: float = number(0.0, "[0, 1)", "chance that an image skips the last layer; of earlier layers, less")
    crop: float = number(0.125, "[0, 1)", "share of a side by which images are shifted at most")
    zoom: float = number(1.0, "(0, 1]", "smallest share of an image's area that is cut out and enlarged; 1: all of it")
    flip: bool = option(True, "mirror half of the images")
    randaugment: float = number(0.0, "[0, 1]", "strength of two changes of geometry or colour to each image; 0: none")
    mixup: float = number(0.0, "[0, 1]", "share of the images that are mixed with another, and their labels too")
    cutmix: float = number(0.0, "[0, 1]", "share of the images that get a part of another, and as much of its label")
    erasing: float = number(0.0, "[0, 1]", "share of the images of which a rectangle is erased")

    def check_together(self) -> None:
        super().check_together()
        check_number(self.mixup + self.cutmix, "mixup + cutmix", "[0, 1]")

    def with_data(self, size: tuple[int, int], channels: int, classes: int) -> "ImagesConfig":
        """The configuration for these images; a model that was asked for and does not fit them is refused."""
        for name, found in (("channels", channels), ("classes", classes)):
            if getattr(self.model, name) not in (getattr(ViTConfig, name), found):
                what = f"model.{name} is {getattr(self.model, name)}, but the images have {found}"
                raise InvalidValueError(f"{what}: leave it out")
        image = "x".join(map(str, size)) if self.model.image is None else self.model.image
        return replace(self, model=replace(self.model, image=image, channels=channels, classes=classes))


# One recipe for all kinds of models.
AUGMENTED: dict[str, Any] = {"randaugment": 0.5, "mixup": 0.25, "cutmix": 0.25, "erasing": 0.25, "drop_path": 0.1}
_TINY = {"model.dim": 96, "model.layers": 4, "model.experts": 16, "batch": 64, "warmup": 50, "lowest_lr": 0.0}
_GPU = {**AUGMENTED, "dtype": "bfloat16", "compile": True, "lowest_lr": 0.0}
# The shape and the rates of the plain ViT of SPT_LSA (Lee et al. 2021), with a stem; warm-up is 10 epochs.
_CIFAR = {**_GPU, "model.layers": 9, "model.heads": 12, "model.hidden": 384, "model.stem": True}
_CIFAR |= {"batch": 256, "warmup": 1953}
_S16 = {**_GPU, "model.image": 224, "model.patch": 16, "model.dim": 384, "model.layers": 12, "model.heads": 6}
_S16 |= {"model.experts": 128, "zoom": 0.3, "crop": 0.0, "batch": 1024, "warmup": 5000}
_SIZES = {"tiny": _TINY, "cifar": _CIFAR, "s16": _S16, "b16": {**_S16, "model.dim": 768, "model.heads": 12}}
_PATTERNS = {"dense": "dense", "soft": "soft_moe", "moe": "moe", "mod": "dense,mod"}
PRETRAINED = "vit-tiny-dense"  # where runs from a pretrained model start from, unless they name a preset
IMAGE_PRESETS: dict[str, dict[str, Any]] = {
    f"vit-{size}-{kind}": {**_SIZES[size], "model.pattern": _PATTERNS[kind]} for size in _SIZES for kind in _PATTERNS
}
