"""Images from .npz files and folders, changes by chance, and data that is refused."""

import gc
import gzip
import io
import shutil
import struct
import warnings

import numpy as np
import pytest
import torch
from PIL import Image

from depthgate.data.images import Shuffled, _fitted, _randaugment, augmented, chance, open_images, read_folder, some_of
from depthgate.errors import DepthgateError, DepthgateWarning
from depthgate.vision import ImagesConfig, ViTConfig

RANDOM = np.random.default_rng(0)
PIXELS, LABELS = RANDOM.integers(0, 256, (24, 6, 4, 3), np.uint8), np.arange(24) % 3


def saved(path, **arrays):
    np.savez(path / "images.npz", **arrays)
    return str(path / "images.npz")


def files(images):
    """PNG files, one after another, and where each begins."""
    parts = []
    for image in images:
        Image.fromarray(image).save(file := io.BytesIO(), "png")
        parts.append(file.getvalue())
    return np.frombuffer(b"".join(parts), np.uint8), np.cumsum([0, *map(len, parts)])


def packed(images, labels, split):
    stored, offsets = files(images)
    return {f"{split}_jpeg": stored, f"{split}_offset": offsets, f"{split}_label": labels.astype(np.uint8)}


LAYOUTS = {
    "keras": lambda: {"x_train": PIXELS[:18], "y_train": LABELS[:18], "x_test": PIXELS[18:], "y_test": LABELS[18:]},
    "medmnist": lambda: {
        **{"train_images": PIXELS[:18], "train_labels": LABELS[:18, None]},
        **{"test_images": PIXELS[18:], "test_labels": LABELS[18:, None], "classes": np.array(["a", "b", "c"])},
    },
    "channels first": lambda: {
        **{"train": PIXELS[:18].transpose(0, 3, 1, 2), "train_y": LABELS[:18]},
        **{"test": PIXELS[18:].transpose(0, 3, 1, 2), "test_y": LABELS[18:]},
    },
    "packed as text and columns": lambda: {
        **{name: each[:, None] if "label" in name else each for name, each in LAYOUTS["packed"]().items()},
        **{"classes": np.array([b"a", b"b", b"c"])},
    },
    "packed": lambda: packed(PIXELS[:18], LABELS[:18], "train") | packed(PIXELS[18:], LABELS[18:], "test"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_layouts_of_npz_files(tmp_path, layout):
    train, held_out = open_images(saved(tmp_path, **layout()))
    assert torch.equal(train.pixels, torch.from_numpy(PIXELS[:18]).permute(0, 3, 1, 2))
    assert torch.equal(held_out.pixels, torch.from_numpy(PIXELS[18:]).permute(0, 3, 1, 2))
    assert train.labels.tolist() + held_out.labels.tolist() == LABELS.tolist()
    assert train.names == (["a", "b", "c"] if "classes" in layout() else ["0", "1", "2"])


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_channels_come_first_or_last(tmp_path, channels):
    last = RANDOM.integers(0, 256, (24, 8, 6, channels), np.uint8)
    for x in (last, last.transpose(0, 3, 1, 2)):
        pixels = open_images(saved(tmp_path, x=x, y=LABELS), whole=True)[1].pixels
        assert torch.equal(pixels, torch.from_numpy(last).permute(0, 3, 1, 2))


def test_grey_images_without_a_split_are_split_and_resized(tmp_path):
    train, held_out = open_images(saved(tmp_path, x=PIXELS[..., 0], y=LABELS), size=(3, 2))
    assert train.pixels.shape[1:] == (1, 3, 2)
    assert len(train.labels) + len(held_out.labels) == 24
    assert 0 < len(held_out.labels) < 12
    assert (open_images(saved(tmp_path, x=PIXELS[..., 0], y=LABELS))[0].labels == train.labels).all()


def folder(path, splits=("train", "test"), many=2):
    for split in splits:
        for name, image in zip(("cat", "dog") * many, PIXELS, strict=False):
            home = path / split / name
            home.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(home / f"{len(list(home.iterdir()))}.png")
    return path


def test_folders_of_classes(tmp_path):
    train, held_out = open_images(str(folder(tmp_path)), size=(6, 4))
    assert train.names == ["cat", "dog"]
    assert train.labels.tolist() == held_out.labels.tolist() == [0, 0, 1, 1]
    assert torch.equal(train.pixels, torch.from_numpy(PIXELS[[0, 2, 1, 3]]).permute(0, 3, 1, 2))
    assert open_images(str(tmp_path), size=(4, 4))[0].pixels.shape == (4, 3, 4, 4)
    train, held_out = open_images(str(folder(tmp_path / "whole", ["."], 12)), size=(6, 4))
    assert len(train.labels) + len(held_out.labels) == 24  # some are held out


def test_files_of_folders_are_closed(tmp_path):
    folder(tmp_path)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        open_images(str(tmp_path), size=(6, 4))
        gc.collect()
    assert [str(each.message) for each in seen] == []


def test_folders_whose_test_images_have_no_classes_and_whole_folders(tmp_path):
    folder(tmp_path, ["train", "val"])
    (tmp_path / "test").mkdir()
    Image.fromarray(PIXELS[0]).save(tmp_path / "test" / "0.png")
    assert len(open_images(str(tmp_path), size=(6, 4))[1].labels) == 4  # of val
    assert open_images(str(tmp_path / "val"), size=(6, 4), whole=True)[1].labels.tolist() == [0, 0, 1, 1]
    assert open_images(str(tmp_path / "val"), size=(6, 4), whole=True)[1].names == ["cat", "dog"]
    shutil.rmtree(tmp_path / "train")
    assert open_images(str(tmp_path), size=(6, 4), whole=True)[1].names == ["cat", "dog"]  # of val, and not val itself
    assert len(open_images(saved(tmp_path, x=PIXELS, y=LABELS), whole=True)[1].labels) == 24


def test_images_of_all_kinds_of_pixels_and_sizes(tmp_path):
    """Sixteen bits are scaled, not cut off; any size fits any other, by the middle of the image."""
    (tmp_path / "a").mkdir()
    deep = np.array([[0, 255, 256, 65535], [1, 511, 32768, 40000]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "a" / "deep.png")
    Image.fromarray(deep).save(tmp_path / "a" / "deep.tif")
    Image.fromarray(deep.astype(">u2")).save(tmp_path / "a" / "other_end.tif")
    (tmp_path / "a" / "deep.pgm").write_bytes(b"P5\n4 2\n65535\n" + deep.astype(">u2").tobytes())
    pixels = open_images(str(tmp_path), size=(2, 4), whole=True)[1].pixels
    assert torch.equal(pixels, torch.from_numpy((deep >> 8).astype(np.uint8)).expand(4, 3, 2, 4))
    for i, mode in enumerate(("L", "RGBA", "P", "1", "CMYK")):
        Image.fromarray(PIXELS[i]).resize((11 + 2 * i, 47 - 6 * i)).convert(mode).save(tmp_path / "a" / f"{i}.tif")
    for size in ((28, 28), (7, 31), (47, 11)):
        assert open_images(str(tmp_path), size=size, whole=True)[1].pixels.shape == (9, 3, *size)
    Image.fromarray(deep.astype(np.float32)).save(tmp_path / "a" / "z.tif")
    with pytest.raises(DepthgateError, match=r"z\.tif .*32 bits a pixel"):
        open_images(str(tmp_path))
    for high in range(1, 60):  # none lies outside its image by rounding
        for wide in range(1, 60):
            assert _fitted(Image.new("RGB", (wide, high)), (28, 20)).size == (20, 28)
    stored, offsets = files([PIXELS[0], np.tile(PIXELS[1], (2, 2, 1)), PIXELS[2]])
    arrays = {"train_jpeg": stored, "train_offset": offsets, "train_label": np.array([0, 1, 0])}
    assert open_images(saved(tmp_path, **arrays), whole=True)[0].pixels.shape == (3, 3, 6, 4)


def test_files_of_mnist(tmp_path):
    for split, name in ((slice(0, 18), "train"), (slice(18, 24), "t10k")):
        for what, array in (("images-idx3", PIXELS[split, ..., 0]), ("labels-idx1", LABELS[split].astype(np.uint8))):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            packed = name == "t10k"
            path = tmp_path / f"{name}-{what}-ubyte{'.gz' * packed}"
            path.write_bytes((gzip.compress if packed else bytes)(head + array.tobytes()))
    train, held_out = open_images(str(tmp_path))
    assert torch.equal(train.pixels[:, 0], torch.from_numpy(PIXELS[:18, ..., 0]))
    assert held_out.labels.tolist() == LABELS[18:].tolist()
    assert held_out.names == ["0", "1", "2"]
    path.write_bytes(path.read_bytes()[:9])
    with pytest.raises(DepthgateError, match=r"/t10k-labels-idx1-ubyte\.gz cannot be read .*: give a whole one"):
        open_images(str(tmp_path))
    for path in tmp_path.glob("train-labels*"):
        path.rename(tmp_path / "labels")
    for path in tmp_path.glob("t10k*"):
        path.unlink()
    with pytest.raises(DepthgateError, match="has train images without labels, or labels without images"):
        open_images(str(tmp_path))


@pytest.mark.parametrize("lacks", ["x_test", "y_test"])
def test_a_part_of_what_is_held_out_is_refused(tmp_path, lacks):
    arrays = {"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS, "y_test": LABELS}
    del arrays[lacks]
    with pytest.raises(DepthgateError, match="has test images without labels, or labels without images"):
        open_images(saved(tmp_path, **arrays))


def test_pages_show_some_images_of_each_part_of_a_folder(tmp_path):
    for name in (f"{part}/{n:02}.png" for part in "abc" for n in range(9)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    names = read_folder(str(tmp_path), (4, 4), 3, 6)[0]
    assert [name[0] for name in names] == ["a", "a", "b", "b", "c", "c"]


def test_corrupt_images_are_named_and_skipped_if_asked(tmp_path):
    folder(tmp_path)
    bad = tmp_path / "train" / "cat" / "bad.png"
    bad.write_bytes((tmp_path / "train/cat/0.png").read_bytes()[:40])
    with pytest.raises(DepthgateError, match=r"cat/bad\.png is not an image .*--corrupt skip"):
        open_images(str(tmp_path), size=(6, 4))
    with pytest.warns(DepthgateWarning, match=r"bad\.png .*left out"):
        assert open_images(str(tmp_path), size=(6, 4), corrupt="skip")[0].labels.tolist() == [0, 0, 1, 1]
    bad.unlink()
    bad.symlink_to(tmp_path / "moved.png")
    with pytest.raises(DepthgateError, match=r"cat/bad\.png is not an image .*No such file"):
        open_images(str(tmp_path), size=(6, 4))
    arrays = packed(PIXELS[:18], LABELS[:18], "train") | packed(PIXELS[18:], LABELS[18:], "test")
    arrays["train_jpeg"] = arrays["train_jpeg"].copy()
    arrays["train_jpeg"][:20] = 0
    with pytest.raises(DepthgateError, match="image 0, is not an image"):
        open_images(saved(tmp_path, **arrays))
    with pytest.warns(DepthgateWarning, match="left out"):
        assert len(open_images(saved(tmp_path, **arrays), corrupt="skip")[0].labels) == 17


X = {"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS, "y_test": LABELS}
REFUSED = {
    "a label below 0": (X | {"y_train": LABELS - 1}, "the label -1"),
    "a label too high": (X | {"classes": np.array(["a", "b"])}, "the label 2, and there are 2 classes"),
    "one class": ({"x": PIXELS, "y": LABELS * 0}, "has one class"),
    "a class without images": (X | {"y_train": LABELS // 2 * 2}, "has 3 classes, and no image of class 1 to train on"),
    "labels of another number": (X | {"y_train": LABELS[:5]}, r"for 24 images: give a whole number"),
    "labels that are not whole": (X | {"y_train": LABELS / 2}, "labels float64"),
    "images that are not bytes": (X | {"x_train": PIXELS / 255}, "images float64"),
    "other shapes": (X | {"x_test": PIXELS[:, :3]}, "other shapes to train on"),
    "a label far too high": (
        X | {"y_train": np.where(LABELS, LABELS, 2**40)},
        "has the label 1099511627776, and classes",
    ),
    "a label that is one number": (X | {"y_train": np.int64(3)}, "for 24 images: give a whole number"),
    "names of classes that are alike": (X | {"classes": np.array(["a", "b", "a"])}, "names of classes that are alike"),
    "a name of two lines": (X | {"classes": np.array(["a", "b", "c\nd"])}, "or of two lines"),
    "one image": ({"x": PIXELS[:1], "y": LABELS[:1]}, "holds no images held out"),
    "no images": ({"x_train": PIXELS[:0], "y_train": LABELS[:0]}, "holds no images|cannot|no image"),
    "other names": ({"a": PIXELS}, "it must have x and y"),
    "objects": ({"x": np.array([{}], object), "y": LABELS}, "it holds Python objects"),
    "packed labels that are not whole": (
        packed(PIXELS, LABELS, "train") | {"train_label": LABELS + 0.5},
        "it is damaged",
    ),
    "packed labels that are text": (packed(PIXELS, LABELS, "train") | {"train_label": LABELS.astype(str)}, "damaged"),
    "offsets that are not whole": (
        packed(PIXELS, LABELS, "train") | {"train_offset": np.linspace(0, 9, 25)},
        "it is damaged",
    ),
    "offsets": (packed(PIXELS, LABELS, "train") | {"train_offset": np.arange(3)}, "it is damaged"),
}


@pytest.mark.parametrize(("arrays", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_files_that_are_refused(tmp_path, arrays, says):
    with pytest.raises(DepthgateError, match=says):
        open_images(saved(tmp_path, **arrays))


def test_folders_that_are_refused(tmp_path):
    for make, says in (
        (lambda: None, "holds no images"),
        (lambda: (tmp_path / "cat").mkdir(), "cat holds no images"),
        (lambda: Image.fromarray(PIXELS[0]).save(tmp_path / "cat" / "0.png"), None),
        (lambda: (tmp_path / "dog").mkdir(), "dog holds no images"),
    ):
        make()
        if says:
            with pytest.raises(DepthgateError, match=says):
                open_images(str(tmp_path), size=(4, 4))
    for data, says in ((str(tmp_path / "none"), "not there"), ("", "data is ''")):
        with pytest.raises(DepthgateError, match=says):
            open_images(data)
    np.save(tmp_path / "array.npy", LABELS)
    (tmp_path / "damaged.npz").write_bytes(b"PK\3\4 and so on")
    (tmp_path / "text.npz").write_text("no arrays")
    for name, why in (("damaged.npz", ""), ("array.npy", "File is not a zip"), ("text.npz", "File is not a zip")):
        with pytest.raises(DepthgateError, match=rf"cannot be read as a file of arrays \({why}"):
            open_images(str(tmp_path / name))


def test_folders_of_splits_have_any_case_and_are_no_classes(tmp_path):
    for split in ("Train", "Valid"):
        for name in "ab":
            (tmp_path / split / name).mkdir(parents=True)
            Image.fromarray(PIXELS[0]).save(tmp_path / split / name / "0.png")
    train, held_out = open_images(str(tmp_path), size=(6, 4))
    assert (train.names, len(train.labels), len(held_out.labels)) == (["a", "b"], 2, 2)
    (tmp_path / "Train").rename(tmp_path / "training")
    with pytest.raises(DepthgateError, match="has a folder Valid, but no folder train"):
        open_images(str(tmp_path), size=(6, 4))


def test_photographs_are_upright(tmp_path):
    """As a camera that was held upright writes them: lying on their side, with a note."""
    upright = np.zeros((40, 20, 3), np.uint8)
    upright[:20] = 255
    lying, note = Image.fromarray(np.rot90(upright).copy()), Image.Exif()
    note[0x0112] = 6
    for split in ("train", "test"):
        for name in "ab":
            (tmp_path / split / name).mkdir(parents=True)
            lying.save(tmp_path / split / name / "0.jpg", exif=note)
    Image.fromarray(upright).save(tmp_path / "train" / "b" / "1.png", exif=b"Exif\0\0damaged")
    # The maker's name is a fraction, which says nothing against the note of how the camera was held.
    fields = struct.pack("<HHHIIHHIII", 2, 0x010F, 5, 1, 38, 0x0112, 3, 1, 6, 0) + struct.pack("<II", 3, 2)
    lying.save(tmp_path / "train" / "b" / "2.jpg", exif=b"Exif\0\0II*\0\x08\0\0\0" + fields)
    seen = open_images(str(tmp_path), size=(40, 20))[0].pixels.float()
    assert seen[:, :, :18].mean() > 250
    assert seen[:, :, 22:].mean() < 5
    assert read_folder(str(tmp_path), (40, 20), 3, 1)[1][:, :, :18].float().mean() > 250


def test_a_class_of_few_images_keeps_one_to_train_on(tmp_path):
    """Wherever the images that are drawn to be held out lie."""
    for first in range(12):
        labels = np.zeros(12, np.int64)
        labels[first] = 1
        train, held_out = open_images(saved(tmp_path, x=PIXELS[:12], y=labels))
        assert {*train.labels.tolist()} == {0, 1}
        assert len(held_out.labels) > 0
        assert len(train.labels) + len(held_out.labels) == 12


def test_hidden_files_are_no_images(tmp_path):
    """As those that macOS leaves beside every file of an archive."""
    folder(tmp_path)
    (tmp_path / "train" / "cat" / "._0.png").write_bytes(b"of macOS")
    (tmp_path / "train" / "cat" / ".cache").mkdir()
    (tmp_path / "train" / "cat" / ".cache" / "0.png").write_bytes(b"")
    assert open_images(str(tmp_path), size=(6, 4))[0].labels.tolist() == [0, 0, 1, 1]


def test_every_image_comes_once_an_epoch(tmp_path):
    shuffled = Shuffled(open_images(saved(tmp_path, **X))[0], 24, seed=3)
    rows = [shuffled.rows(range(start, start + 24)) for start in (0, 24)]
    for each in rows:
        assert sorted(each.targets.tolist()) == sorted(LABELS.tolist())
        assert {row.numpy().tobytes() for row in each.tokens} == {
            np.ascontiguousarray(x).tobytes() for x in PIXELS.transpose(0, 3, 1, 2)
        }
    assert not torch.equal(rows[0].targets, rows[1].targets)
    repeated = Shuffled(shuffled.images, 24, seed=3, repeats=3).rows(range(24))
    assert torch.equal(repeated.tokens, rows[0].tokens[:8].repeat_interleave(3, 0))
    assert repeated.pos.tolist() == [*range(24)]  # what they are changed by


def test_some_of_many_are_one_of_each_stretch():
    assert some_of(5, 7).tolist() == [0, 1, 2, 3, 4]
    found = some_of(10_000, 1000)
    assert torch.equal(found // 10, torch.arange(1000))
    assert found.remainder(10).bincount(minlength=10).min() > 60  # which would be one alone with a step of 10


def test_chance_is_uniform_and_its_streams_are_apart():
    number = torch.arange(20_000)
    one, two = chance(number, 0, 1), chance(number, 0, 2)
    for each in (one, two):
        assert abs(float(each.mean()) - 0.5) < 0.01
        assert abs(float(each.var()) - 1 / 12) < 0.002
        assert abs(float(torch.corrcoef(torch.stack((each[1:], each[:-1])))[0, 1])) < 0.03
    assert abs(float(torch.corrcoef(torch.stack((one, two)))[0, 1])) < 0.03


def colours(x, change, by):
    """One change of colour, by a factor."""
    if change == 5:
        return (x * by).clamp(max=1)
    centre = x.mean() if change == 6 else x.mean(0, keepdim=True)
    return (centre + by * (x - centre)).clamp(0, 1)


@pytest.mark.parametrize("picked", [(5, 5), (6, 6), (7, 7), (5, 6), (6, 5), (5, 7), (7, 6), (7, 0)])
def test_changes_of_colour_follow_one_another(picked):
    """Brightness, contrast, colour: each changes what the one before has made, twice if it is drawn twice."""
    signs, sizes = [(-1, -1), (-1, 1), (1, -1), (1, 1)], (1.0, 0.7)
    x = torch.rand(4, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def draw(stream):
        turn, what = stream % 10, stream // 10
        values = {
            1: [(picked[turn] + 0.5) / 10] * 4,
            2: [0.25 if of[turn] < 0 else 0.75 for of in signs],
            3: [2 * sizes[turn] - 1] * 4,
        }
        return torch.tensor(values.get(what, [0.0] * 4), dtype=torch.float64)

    found, _ = _randaugment(x, torch.eye(3, dtype=torch.float64).expand(4, 3, 3), draw, 1.0)
    for image, sign, got in zip(x, signs, found, strict=True):
        factors = dict.fromkeys((5, 6, 7), 1.0)
        for change, s, size in zip(picked, sign, sizes, strict=True):
            factors[change] = factors.get(change, 1.0) * (1 + 0.9 * s * size)
        for change in (5, 6, 7):
            image = colours(image, change, factors[change])
        assert (got - image).abs().max() < 1.01 / 255  # values of bytes
    assert found.amax((1, 2, 3)).min() > 0  # none is black


def changed(seed=0, count=64, **options):
    config = ImagesConfig(model=ViTConfig(image="6x4", patch=2, classes=3), seed=seed, **{"smoothing": 0.0, **options})
    images = torch.from_numpy(np.tile(PIXELS, (3, 1, 1, 1))[:count]).permute(0, 3, 1, 2)
    labels = torch.from_numpy(np.tile(LABELS, 3)[:count])
    mean, std = torch.full((3,), 0.5), torch.full((3,), 0.25)
    return augmented(images, labels, torch.arange(count), config, mean, std), (images / 255 - 0.5) / 0.25, labels


def test_images_are_shifted_by_whole_pixels_and_mirrored():
    (x, target), plain, labels = changed(crop=0.25)
    padded = torch.nn.functional.pad(plain, (1, 1, 1, 1))
    seen = set()
    for image, before in zip(x, padded, strict=True):
        views = {
            (i, j, m): before[:, i : i + 6, j : j + 4].flip(2) if m else before[:, i : i + 6, j : j + 4]
            for i in range(3)
            for j in range(3)
            for m in (0, 1)
        }
        found = [key for key, view in views.items() if torch.allclose(view, image, atol=1e-4)]
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) > 12
    assert torch.equal(target.argmax(1), labels)
    (x, _), plain, _ = changed(crop=0.0, flip=False)
    torch.testing.assert_close(x, plain, atol=1e-4, rtol=0)


def test_what_is_round_stays_round_in_images_that_are_not_square():
    """Of two changes that turn by chance, in an image twice as wide as it is high."""
    rows, columns = torch.meshgrid(torch.arange(40) - 19.5, torch.arange(80) - 39.5, indexing="ij")
    disc = (255.0 * (rows**2 + columns**2 < 15**2)).to(torch.uint8)
    number = torch.arange(4000)
    turned = number[torch.stack([10 * chance(number, 0, stream) < 1 for stream in (10, 11)]).all(0)]
    config = ImagesConfig(model=ViTConfig(image="40x80", channels=1), crop=0.0, randaugment=1.0)
    images, labels = disc.expand(len(turned), 1, 40, 80), torch.zeros(len(turned), dtype=torch.int64)
    x, _ = augmented(images, labels, turned, config, torch.zeros(1), torch.ones(1))
    assert len(turned) > 20
    assert ((x[:, 0] > 0.5) == (disc > 0)).float().mean((1, 2)).min() > 0.98


def test_targets_follow_what_was_mixed():
    none = {"crop": 0.0, "flip": False}
    for name in ("mixup", "cutmix"):
        (x, target), plain, labels = changed(**none, **{name: 1.0})
        one, other = (torch.nn.functional.one_hot(each, 3) for each in (labels, labels.roll(32)))
        before = plain.roll(32, 0)
        moved = (x - plain).abs().sum((1, 2, 3)) / (before - plain).abs().sum((1, 2, 3))
        if name == "cutmix":  # whole pixels
            moved = (x - before).abs().amax(1).lt(1e-3).float().mean((1, 2))
        torch.testing.assert_close(target, one + moved[:, None] * (other - one), atol=1e-3, rtol=0)
        assert (target.sum(1) - 1).abs().max() < 1e-5
    (x, _), plain, _ = changed(**none, erasing=1.0)
    assert ((x == 0) | (x - plain).abs().lt(1e-4)).all()
    assert 0.1 < float((x == 0).float().mean()) < 0.5
    (_, target), _, labels = changed(smoothing=0.3)
    assert target[0].tolist() == pytest.approx([0.1 + 0.7 * (k == int(labels[0])) for k in range(3)])


def test_changes_of_colour_and_geometry_depend_on_the_number_alone():
    (x, _), plain, _ = changed(randaugment=0.7)
    assert x.isfinite().all()
    assert x.min() >= -2.001
    assert x.max() <= 2.001
    (again, _), _, _ = changed(randaugment=0.7, count=16)
    torch.testing.assert_close(again, x[:16])
    (other, _), _, _ = changed(randaugment=0.7, seed=1)
    assert not torch.allclose(other, x)
    assert (x - plain).abs().amax((1, 2, 3)).gt(0.1).float().mean() > 0.9
