"""Images with labels: from .npz files and folders, as batches that are a pure function of their numbers, and changed by
chance in ways that are one too, on the device that trains."""

import gzip
import hashlib
import io
import os
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from depthgate.data.batches import Rows
from depthgate.data.token_file import mix
from depthgate.errors import DepthgateError, installed, warn_once
from depthgate.vision import ImagesConfig

_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_UPRIGHT = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # EXIF's orientation -> Pillow's transposition
_HELD_OUT = 10  # where there is no test split, one image of this many is held out
_SPLITS = ("test", "val", "valid", "validation")
# Names of arrays in .npz files: of the images of a split, and of their labels.
_NAMES = ("x_{}", "{}_x", "{}_images", "{}_data", "{}"), ("y_{}", "{}_y", "{}_labels", "{}_label", "{}_targets")
_File = tuple[str, Callable[[], Any]]  # a name for messages, and what opens it
_Pair = tuple[Tensor, Tensor]  # pixels and labels
_Size = tuple[int, int] | None


class Images(NamedTuple):
    """Images of one size, and their classes."""

    pixels: Tensor  # (N, channels, height, width) uint8
    labels: Tensor  # (N,) int64
    names: list[str]  # of the classes


def open_images(data: str, size: _Size = None, corrupt: str = "refuse", whole: bool = False) -> tuple[Images, Images]:
    """The images of an .npz file or a folder, to train on and held out, of height and width `size` if given. Nothing in
    a file is ever executed. corrupt: "refuse", or "skip" and warn. Where nothing is marked as held out, one image of
    ten is; with `whole`, all are, and there may be none to train on, or of a class."""
    path, skip = Path(data), corrupt == "skip"
    if not data or not path.exists():
        raise DepthgateError(f"data is {data!r}, which is not there: name an .npz file of images, or a folder")
    folder = path.is_dir() and not next(path.glob("*idx3-ubyte*"), None)
    pairs, names = (_folder if folder else _npz)(path, size, skip, whole)
    for (pixels, labels), what in zip(pairs, ("to train on", "held out"), strict=True):
        if not len(labels):
            raise DepthgateError(f"{data} holds no images{'' if whole else f' {what}'}: give some")
        low, high = map(int, labels.aminmax())
        if low < 0 or high >= len(names):
            known = f"there are {len(names)} classes, from 0 on"
            raise DepthgateError(f"{data} has the label {low if low < 0 else high}, and {known}: mend its labels")
        if pixels.shape[1:] != pairs[0][0].shape[1:]:
            raise DepthgateError(f"{data} has images of other shapes to train on than held out: make them alike")
    if [*dict.fromkeys("\n".join(names).split("\n"))] != names:
        raise DepthgateError(f"{data} has names of classes that are alike, or of two lines: give each its own")
    if not whole and len(names) < 2:
        raise DepthgateError(f"{data} has one class: there is nothing to learn from fewer than two")
    if not whole and (missing := sorted({*range(len(names))} - {*pairs[0][1].tolist()})):
        what = f"{data} has {len(names)} classes, and no image of class {names[missing[0]]} to train on"
        raise DepthgateError(f"{what}: leave it out, or give some")
    train, held_out = (Images(x if size in (None, x.shape[2:]) else _resized(x, size), y, names) for x, y in pairs)
    return train, held_out


def _resized(pixels: Tensor, size: Any) -> Tensor:
    parts = [F.interpolate(part.float(), size, mode="bilinear", antialias=True) for part in torch.split(pixels, 1024)]
    return torch.cat([part.round().clamp(0, 255).to(torch.uint8) for part in parts])


def _npz(path: Path, size: _Size, skip: bool, whole: bool) -> tuple[Sequence[_Pair], list[str]]:
    arrays, of_mnist = dict[str, Any](), path.is_dir()
    for file in path.glob("*idx[13]-ubyte*") if of_mnist else [path]:
        try:
            if not of_mnist:
                zipfile.ZipFile(file).close()  # since np.load takes other files, too
            arrays |= _mnist(file) if of_mnist else {k: np.atleast_1d(v) for k, v in np.load(file).items()}
        except Exception as error:  # gzip, zipfile and NumPy raise many kinds
            why = "it holds Python objects" if "allow_pickle" in str(error) else str(error)[:100]
            what = f"{file} cannot be read as a file of arrays ({why})"
            raise DepthgateError(f"{what}: give a whole one of plain arrays") from None
    train, *others = (_split(path, arrays, name, size, skip) for name in ("train", *_SPLITS))
    held_out = next(filter(None, others), None)
    if train is None and not (whole and held_out):
        x, y = (next((arrays[n] for n in names if n in arrays), None) for names in (("x", "images"), ("y", "labels")))
        if x is None or y is None:
            have = ", ".join(arrays) or "nothing"
            raise DepthgateError(f"{path} has {have}: it must have x and y, or x_train, y_train, x_test and y_test")
        train = _pair(path, x, y)
    pairs = _pairs(train or held_out, held_out, whole)  # type: ignore[arg-type]
    many = 1 + max((int(labels.max()) for _, labels in pairs if len(labels)), default=-1)
    if many > 2**20:
        raise DepthgateError(f"{path} has the label {many - 1}, and classes are numbered from 0 on: mend its labels")
    names = arrays.get("classes", np.arange(many))
    return pairs, [each.decode(errors="replace") if isinstance(each, bytes) else str(each) for each in names]


def _mnist(path: Path) -> dict[str, Any]:
    """The array of a file of MNIST, packed or not, by its name."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        data = bytearray(file.read())
    shape = np.frombuffer(data, ">i4", data[3], 4)
    name = path.name.partition("idx")[0][:-1].replace("t10k", "test").replace("-", "_")
    return {name: np.frombuffer(data, np.uint8, offset=4 + shape.nbytes).reshape(shape)}


def _split(path: Path, arrays: dict[str, Any], split: str, size: _Size, skip: bool) -> _Pair | None:
    """The images and labels of a split; None if there are none."""
    if f"{split}_jpeg" in arrays:
        stored, offset, label = (arrays.get(f"{split}_{name}") for name in ("jpeg", "offset", "label"))
        return _packed(path, stored, offset, label, size, skip)
    x, y = (next((arrays[n] for each in names if (n := each.format(split)) in arrays), None) for names in _NAMES)
    if (x is None) != (y is None) or f"{split}_offset" in arrays:
        raise DepthgateError(
            f"{path} has {split} images without labels, or labels without images: give both, or neither"
        )
    return None if x is None or y is None else _pair(path, x, y)


def _pair(path: Path, x: Any, y: Any) -> _Pair:
    if y.size != len(y) or len(x) != len(y) or not np.issubdtype(y.dtype, np.integer):
        raise DepthgateError(f"{path} has labels {y.dtype} {y.shape} for {len(x)} images: give a whole number for each")
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        raise DepthgateError(f"{path} has images {x.dtype} {x.shape}: they must be uint8 (N, height, width, channels)")
    x = x[..., None] if x.ndim == 3 else x
    first = x.shape[3] not in (1, 3) and (x.shape[1] in (1, 3) or x.shape[1] <= 4 < x.shape[3])  # channels come first
    x = x if first else x.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y.reshape(-1).astype(np.int64))


def _packed(path: Path, stored: Any, offset: Any, label: Any, size: _Size, skip: bool) -> _Pair:
    """Images as the bytes of files, one after another, each from its offset to the next."""
    whole = [a.reshape(-1) for a in (offset, label) if a is not None and np.issubdtype(a.dtype, np.integer)]
    ends, labels = (whole[0].tolist(), whole[1]) if len(whole) == 2 else ([], offset)
    if len(ends) < 2 or len(ends) != len(labels) + 1 or ends != sorted(ends) or ends[0] < 0 or ends[-1] > stored.nbytes:
        raise DepthgateError(f"{path} has packed images, but not an offset and a label that fit: it is damaged")
    places = enumerate(pairwise(ends))
    files = [(f"{path}, image {i},", partial(io.BytesIO, memoryview(stored)[a:b])) for i, (a, b) in places]
    return _decoded(files, torch.from_numpy(labels.astype(np.int64)), size, skip)


def _decoded(files: Sequence[_File], labels: Tensor, size: _Size, skip: bool) -> _Pair:
    """The pixels of image files, all fitted to one size, which is that of the first one unless given."""
    pillow = installed("PIL.Image", "images")

    def read(file: _File) -> Any:
        try:
            with file[1]() as stored, pillow.open(stored) as image:
                found = _colours(image)
                return np.asarray(_fitted(found, size or found.size[::-1])).transpose(2, 0, 1)
        except Exception as error:  # Pillow raises many kinds
            why = str(error).partition(" <")[0][:80] or type(error).__name__
            return f"{file[0]} is not an image that can be read ({why})"

    size = size or next((each.shape[1:] for each in map(read, files) if not isinstance(each, str)), (1, 1))
    if (room := 3 * len(files) * size[0] * size[1]) > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        raise DepthgateError(f"{len(files):,} images of {size} take {room / 2**30:.0f} GiB: lower --model.image")
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        found = list(pool.map(read, files))
    for problem in (each for each in found if isinstance(each, str)):
        if not skip:
            raise DepthgateError(f"{problem}: remove it; a run trained with --corrupt skip leaves such files out")
        warn_once(f"{problem}: it is left out")
    kept = [i for i, each in enumerate(found) if not isinstance(each, str)]
    pixels = np.stack([found[i] for i in kept]) if kept else np.zeros((0, 3, *size), np.uint8)
    return torch.from_numpy(pixels), labels[kept]


def _colours(image: Any) -> Any:
    """An image of Pillow as it is to be seen, in RGB, a byte each. Pillow itself would cut 16 bits off at 255."""
    deep = image.mode[:2] == "I;" or (image.mode == "I" and image.format in ("PNG", "PPM"))  # whose values are of 16
    image.load()  # which finds the notes of some formats
    with suppress(Exception):  # without a note on how the camera was held, or with a damaged one
        image = image.transpose(_UPRIGHT[image.getexif()[274]])
    if image.mode in ("I", "F") and not deep:
        raise ValueError(f"it has 32 bits a pixel, mode {image.mode}")
    return (image.convert("I").point(lambda i: i / 256).convert("L") if deep else image).convert("RGB")


def _fitted(image: Any, size: tuple[int, int]) -> Any:
    """The middle of an image, as large as its shape allows, resized to height and width."""
    (wide, high), (H, W) = image.size, size
    if (high, wide) == size:
        return image
    scale = min(wide / W, high / H)
    left, top = max(0.0, wide - W * scale) / 2, max(0.0, high - H * scale) / 2  # by rounding, a little below 0
    return image.resize((W, H), box=(left, top, wide - left, high - top), resample=2, reducing_gap=3.0)


def image_files(folder: Path) -> list[Path]:
    """The image files of a folder and of those in it, by name, without hidden ones."""
    named = (path for path in folder.rglob("*") if path.suffix.lower() in _ENDINGS)
    found = (path for path in named if path.is_file() or not path.exists())  # a link to nothing is to be told of
    return sorted(path for path in found if not any(part[0] == "." for part in path.relative_to(folder).parts))


def read_folder(folder: str, size: tuple[int, int], channels: int, most: int) -> tuple[list[str], Tensor]:
    """Names in a folder and pixels (N, channels, height, width) of `most` of its images at most, some of each part of
    it; files that are not images are left out, with a warning."""
    if not (found := image_files(Path(folder))):
        raise DepthgateError(f"images is {folder}, which holds no images: give a folder of some")
    files = [found[i] for i in some_of(len(found), most).tolist()]
    opened = [(str(path), partial(path.open, "rb")) for path in files]
    pixels, kept = _decoded(opened, torch.arange(len(files)), size, True)
    if not len(kept):
        raise DepthgateError(f"images is {folder}, and none of {len(files)} files in it is an image: remove them")
    grey = pixels.float().mean(1, keepdim=True).round().to(torch.uint8)
    return [str(files[i].relative_to(folder)) for i in kept], grey if channels == 1 else pixels


def _folder(folder: Path, size: _Size, skip: bool, whole: bool) -> tuple[Sequence[_Pair], list[str]]:
    named = {name.lower(): path for name, path in _folders(folder).items()}
    splits = [named[name] for name in _SPLITS if name in named]
    if splits and "train" not in named and not whole:
        raise DepthgateError(f"{folder} has a folder {splits[0].name}, but no folder train: add it, or rename that one")
    train, held_out = named.get("train", folder), next(filter(None, map(_folders, splits)), {})
    classes = held_out if whole and held_out and len(splits) == len(named) else _folders(train)  # splits are none
    held_out = held_out if "train" in named else {}
    if not classes:
        what = "images, but no folder for each class" if image_files(folder) else "no images"
        raise DepthgateError(f"data is {folder}, which holds {what}: it must hold a folder of images for each class")
    if empty := [path for path in classes.values() if not image_files(path)]:
        raise DepthgateError(f"{empty[0]} holds no images: leave the class out, or give some")
    if unknown := held_out.keys() - classes.keys():
        raise DepthgateError(f"{held_out[min(unknown)]} is a class that {train} has not: name classes alike")

    def read(where: dict[str, Path]) -> _Pair:
        files = [(path, [*classes].index(name)) for name, home in where.items() for path in image_files(home)]
        opened = [(str(path), partial(path.open, "rb")) for path, _ in files]
        return _decoded(opened, torch.tensor([label for _, label in files], dtype=torch.int64), size or (32, 32), skip)

    images = read(classes)
    return _pairs(images, read(held_out) if held_out else None, whole), [*classes]


def _folders(folder: Path) -> dict[str, Path]:
    """The folders in a folder by name, without hidden ones; none if it is not there."""
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return {path.name: path for path in found if path.is_dir() and path.name[0] != "."}


def _pairs(train: _Pair, held_out: _Pair | None, whole: bool) -> Sequence[_Pair]:
    """Images to train on and held out: where none are, one of ten, or all of them if `whole`."""
    if held_out or whole:
        return train, held_out or train
    out = torch.tensor([mix(0, i) % _HELD_OUT == 0 for i in range(len(train[1]))], dtype=torch.bool)
    out[-1:] |= not out.any()
    for label in {*train[1].tolist()} - {*train[1][~out].tolist()}:  # few images, all of them drawn: the first stays
        out[(train[1] == label).nonzero()[0]] = False
    return [(train[0][these], train[1][these]) for these in (~out, out)]


class Shuffled:
    """Training images, numbered through all epochs: epoch e is the numbers from e * N, in an order of its own. Rows are
    bytes, labels, the numbers by which each image is changed, and nothing."""

    def __init__(self, images: Images, context: int, seed: int = 0, repeats: int = 1) -> None:
        """context: tokens of an image; repeats: how often an image comes in a row (Hoffer et al. 2020)."""
        self.images, self.context, self.seed, self.repeats = images, context, seed, repeats

    def fingerprint(self) -> str:
        """A hash of all pixels and labels."""
        found = hashlib.sha256(str(tuple(self.images.pixels.shape)).encode())
        for each in self.images[:2]:
            found.update(each.contiguous().numpy().data)
        return found.hexdigest()

    def rows(self, numbers: Sequence[int]) -> Rows:
        """The images of these numbers."""
        N, number = len(self.images.labels), torch.tensor(list(numbers))
        place = number // self.repeats
        epoch, index = place // N, torch.empty_like(number)
        for each in {*epoch.tolist()}:
            index[epoch == each] = _order(N, mix(self.seed, each))[place[epoch == each] % N]
        return Rows(self.images.pixels[index], self.images.labels[index], number, torch.zeros_like(number))


@lru_cache(4)
def _order(N: int, key: int) -> Tensor:
    """The order of an epoch."""
    return torch.randperm(N, generator=torch.Generator().manual_seed(key % 2**63))


def chance(number: Tensor, *stream: int) -> Tensor:
    """A random number in [0, 1) for each of these numbers (B,): the same on all devices, and others in each stream."""
    found = number & 0x7FFFFFFF
    for key in stream:
        found = found ^ (mix(key) & 0x7FFFFFFF)
        for shift in (16, 15):  # the finalizer of MurmurHash3, modulo 2^31
            found = ((found ^ (found >> shift)) * 0x45D9F3B) & 0x7FFFFFFF
        found = found ^ (found >> 16)
    return found / 2**31


def some_of(N: int, most: int) -> Tensor:
    """The numbers of `most` of N images at most, one by chance out of each of as many stretches: classes may follow one
    another, or come in turn."""
    bounds = torch.arange(min(N, most) + 1) * N // min(N, most)
    return bounds[:-1] + (chance(torch.arange(len(bounds) - 1), 0) * bounds.diff()).long()


def augmented(pixels: Tensor, label: Tensor, number: Tensor, config: ImagesConfig, mean: Tensor, std: Tensor) -> Any:
    """Bytes (B, C, H, W) and labels (B,) -> normalised images, changed by chance, and targets (B, classes)."""
    draw = partial(chance, number, config.seed)
    x, geometry = pixels / 255, torch.eye(3, device=pixels.device).expand(len(pixels), 3, 3)
    if config.randaugment:
        x, geometry = _randaugment(x, geometry, draw, config.randaugment)
    x = (x - mean[:, None, None]) / std[:, None, None]
    x = _moved(x, geometry, draw, config)
    target = (label[:, None] == torch.arange(config.model.classes, device=x.device)).to(x.dtype)
    x, target = _mixed(x, target, draw, config)
    if config.erasing:
        area = torch.where(draw(50) < config.erasing, 0.02 + 0.31 * draw(51), 0.0)
        x = x.masked_fill(_boxes(x, area, draw(52), draw(53), 0.3 * 11 ** draw(54)), 0.0)
    return x, target * (1 - config.smoothing) + config.smoothing / config.model.classes


def _randaugment(x: Tensor, geometry: Tensor, draw: Callable[..., Tensor], strength: float) -> tuple[Tensor, Tensor]:
    """Two changes for each image, out of ten: rotate, shear and shift in two directions; brightness, contrast, colour,
    solarise and posterise (Cubuk et al. 2020, RandAugment, with fewer changes)."""
    size, pick, sign = [], [], []
    for turn in (0, 1):
        pick.append((10 * draw(10 + turn)).long())
        sign.append(torch.where(draw(20 + turn) < 0.5, -1.0, 1.0))
        size.append(strength * (0.5 + 0.5 * draw(30 + turn)))

    def amounts(change: int, most: float) -> list[Tensor]:
        return [torch.where(p == change, most * m * s, 0.0) for p, m, s in zip(pick, size, sign, strict=True)]

    def amount(change: int, most: float) -> Tensor:
        return sum(amounts(change, most), none)

    def factor(change: int) -> Tensor:
        one, other = amounts(change, 0.9)
        return ((1 + one) * (1 + other))[:, None, None, None]

    none, one = torch.zeros_like(draw(0)), torch.ones_like(draw(0))
    angle = amount(0, 0.7)
    shape = x.shape[2] / x.shape[3]  # places in images go from -1 to 1 on both sides
    turned = _matrix(angle.cos(), -shape * angle.sin(), none, angle.sin() / shape, angle.cos(), none)
    sheared = _matrix(one, amount(1, 0.4), amount(3, 0.5), amount(2, 0.4), one, amount(4, 0.5))
    x = (x * factor(5)).clamp(max=1)
    x = torch.lerp(x.mean((1, 2, 3), keepdim=True), x, factor(6)).clamp(0, 1)
    x = torch.lerp(x.mean(1, keepdim=True), x, factor(7)).clamp(0, 1)
    above = 1 - torch.stack(amounts(8, 1.0)).abs().amax(0)[:, None, None, None]
    x = torch.where(x > above, 1 - x, x)
    levels = torch.where((pick[0] == 9) | (pick[1] == 9), 2 ** (8 - 6 * strength), 256.0)[:, None, None, None]
    return (x * levels).floor().clamp(max=levels - 1) / (levels - 1), geometry @ turned @ sheared


def _matrix(*values: Tensor) -> Tensor:
    """Six values (B,), the first two rows of matrices (B, 3, 3)."""
    none, one = torch.zeros_like(values[0]), torch.ones_like(values[0])
    return torch.stack((*values, none, none, one), -1).view(-1, 3, 3)


def _moved(x: Tensor, geometry: Tensor, draw: Callable[..., Tensor], config: ImagesConfig) -> Tensor:
    """Images that are zoomed, shifted by whole pixels, mirrored and moved by `geometry`, in one step; 0 outside."""
    (B, _, H, W), none = x.shape, torch.zeros_like(draw(0))
    zoom = (config.zoom + (1 - config.zoom) * draw(1)).sqrt()
    # Of a part smaller than the image, one that lies inside it.
    room = [(1 - zoom) * (2 * draw(stream) - 1) for stream in (2, 3)]
    shift = [
        ((2 * draw(stream) - 1) * (int(config.crop * side) + 0.5)).round() * 2 / side + part
        for stream, side, part in ((4, W, room[0]), (5, H, room[1]))
    ]
    mirror = torch.where(draw(6) < 0.5, -1.0, 1.0) if config.flip else torch.ones_like(none)
    matrix = _matrix(mirror * zoom, none, shift[0], none, zoom, shift[1]) @ geometry
    grid = F.affine_grid(matrix[:, :2], [B, 1, H, W], align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def _mixed(x: Tensor, target: Tensor, draw: Callable[..., Tensor], config: ImagesConfig) -> tuple[Tensor, Tensor]:
    """Mixup (Zhang et al. 2018) or CutMix (Yun et al. 2019) with the image half a batch before, for some images."""
    if not config.mixup and not config.cutmix:
        return x, target
    which, share = draw(40)[:, None, None, None], draw(41)
    cut = _boxes(x, share, draw(42), draw(43), torch.ones_like(share)).to(x.dtype)
    weight = torch.where(which < config.mixup, share[:, None, None, None] / 2, 0.0).expand_as(cut)
    weight = torch.where((which >= config.mixup) & (which < config.mixup + config.cutmix), cut, weight)
    mean, half = weight.mean((1, 2, 3))[:, None], len(x) // 2
    return x + weight * (x.roll(half, 0) - x), target + mean * (target.roll(half, 0) - target)


def _boxes(x: Tensor, area: Tensor, down: Tensor, across: Tensor, shape: Tensor) -> Tensor:
    """(B, 1, H, W) bool: a rectangle of an area, a share of the image's, around a point; `shape` is height / width."""
    H, W = x.shape[2:]
    rows, columns = torch.arange(H, device=x.device) + 0.5, torch.arange(W, device=x.device) + 0.5
    high, wide = ((area * shape).sqrt() * H / 2)[:, None], ((area / shape).sqrt() * W / 2)[:, None]
    upright = (rows - down[:, None] * H).abs() < high
    return (upright[:, :, None] & ((columns - across[:, None] * W).abs() < wide)[:, None])[:, None]
