"""`depthgate train --task images` from outside: resumed runs, evaluation, pages, and what is refused."""

import html
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

import depthgate as dg
from depthgate.cli import main
from depthgate.data.images import Images, Shuffled, open_images
from depthgate.errors import DepthgateWarning
from depthgate.train import optim
from depthgate.train.images import Classification, measure
from depthgate.train.step import Step
from depthgate.vision import AUGMENTED, ImagesConfig, ViTConfig
from tests.checkpoint.samples import forge
from tests.train.tiny import rows, same

TINY = [
    *("--task=images", "--device=cpu", "--model.dim=16", "--model.heads=2", "--model.layers=2", "--model.experts=4"),
    *("--batch=8", "--checkpoint_every=5", "--schedule_steps=80", "--warmup=2", "--lr=0.01"),
]
ALL = [
    *("--randaugment=0.5", "--mixup=0.3", "--cutmix=0.3"),
    *("--erasing=0.3", "--drop_path=0.3", "--zoom=0.5", "--repeats=3"),
]


@pytest.fixture
def data(tmp_path):
    """Noise with a bright bar: its colour is the class."""
    random = np.random.default_rng(0)
    pixels, labels = random.integers(0, 60, (60, 8, 8, 3), np.uint8), np.arange(60) % 2
    pixels[labels == 0, :4, :, 0] += 150
    pixels[labels == 1, 4:, :, 1] += 150
    names = np.array(["red", "green"])
    np.savez(
        tmp_path / "bars.npz",
        x_train=pixels[:40],
        y_train=labels[:40],
        x_test=pixels[40:],
        y_test=labels[40:],
        classes=names,
    )
    return str(tmp_path / "bars.npz")


def train(out, data, steps, *options):
    torch.set_num_threads(1)
    return main(["train", *TINY, f"--out={out}", f"--data={data}", f"--steps={steps}", *options])


OPTIONS = {
    "soft_moe": ALL,
    "moe, bfloat16": ["--model.pattern=moe", "--dtype=bfloat16", "--accumulate=2"],
    "mod, class": ["--model.pattern=dense,mod", "--model.pooling=class", "--model.registers=1", "--workers=1"],
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_five_and_five_steps_equal_ten(tmp_path, data, options):
    assert train(tmp_path / "whole", data, 10, *options) == 0
    assert train(tmp_path / "parts", data, 5, *options) == 0
    assert main(["train", "--resume", f"--out={tmp_path / 'parts'}", "--steps=10"]) == 0
    assert same(tmp_path / "whole", tmp_path / "parts")
    assert [row["loss"] for row in rows(tmp_path / "whole")] == [row["loss"] for row in rows(tmp_path / "parts")]


def test_a_run_does_not_go_on_with_classes_of_other_names(tmp_path, data, capsys):
    assert train(tmp_path / "run", data, 2) == 0
    np.savez(data, **{**np.load(data), "classes": np.array(["red", "blue"])})
    assert main(["train", "--resume", f"--out={tmp_path / 'run'}", "--steps=3"]) == 2
    assert f"{data} has changed since step 2" in capsys.readouterr().err


def test_the_report_of_a_run_with_mod_speaks_of_no_causal_rule(tmp_path, data):
    """Layers of images take the top k, in training and after it."""
    assert train(tmp_path / "run", data, 80, "--model.pattern=dense,mod") == 0
    text = (tmp_path / "run" / "report.html").read_text()
    assert f"{rows(tmp_path / 'run')[-1]['held_out_accuracy']:.2%}" in text
    assert "Causal share" not in text
    assert "by the causal rule" not in text


def test_a_run_learns_is_measured_loaded_and_shown(tmp_path, data, capsys):
    run = tmp_path / "run"
    assert train(run, data, 80, "--smoothing=0", "--flip=false", "--crop=0") == 0
    last = rows(run)[-1]
    assert last["held_out_accuracy"] > 0.9
    assert last["tokens"] == 80 * 8 * 4
    assert (run / "report.html").is_file()
    capsys.readouterr()
    assert main(["eval", f"--model={run}", "--data=heldout", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"] == pytest.approx(last["held_out_accuracy"])
    assert found["loss"] == pytest.approx(last["held_out_loss"], rel=1e-5)
    assert list(found["accuracy_by_class"]) == ["red", "green"]
    assert main(["eval", f"--model={run}", f"--data={data}"]) == 0
    assert "calibration error" in capsys.readouterr().out
    vit = dg.load(run)
    assert vit.names == ["red", "green"]
    _, images = open_images(data)
    assert (vit(images.pixels).logits.argmax(1) == images.labels).float().mean() == pytest.approx(found["accuracy"])
    assert "Held-out accuracy" in (run / "report.html").read_text()
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.fromarray(images.pixels[0].permute(1, 2, 0).numpy()).save(folder / "one.png")
    capsys.readouterr()
    for text in ("--prompt=a", "--text=a.txt"):
        assert main(["view", f"--model={run}", f"--out={tmp_path / 'none.html'}", text]) == 2
        assert "reads no text" in capsys.readouterr().err
    for given, many in ([], 12), ([f"--images={folder}"], 1):
        assert main(["view", f"--model={run}", f"--out={tmp_path / 'page.html'}", *given, "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)["images"]
        assert len(shown) == many
        assert shown[0]["class"] == vit.names[int(vit(images.pixels[:1]).logits.argmax())]
        page = (tmp_path / "page.html").read_text()
        assert (page.count('id="image-'), page.count('class="small"')) == (many, many)  # one layer has slots
        weights = json.loads(re.search(r'id="slots-1-0">(.*?)<', page)[1])["weights"]
        assert weights[2][:2] == pytest.approx(vit(images.pixels[:1]).plans[0].into[0, :2, 2, 0].tolist(), rel=1e-2)
    assert main(["view", f"--model={run}", f"--images={tmp_path / 'none'}"]) == 2
    assert main(["generate", f"--model={run}", "--prompt=a"]) == 2
    assert "a run of images" in capsys.readouterr().err


def test_pages_show_images_of_all_classes_by_their_numbers(tmp_path, capsys):
    """Also where classes come in turn, or one after another."""
    pixels = np.random.default_rng(0).integers(0, 256, (72, 8, 8, 3), np.uint8)
    for name, labels in (("turn", np.arange(72) % 3), ("sorted", np.arange(72) // 24)):
        np.savez(tmp_path / "a.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
        assert train(tmp_path / name, tmp_path / "a.npz", 1) == 0
        capsys.readouterr()
        assert main(["view", f"--model={tmp_path / name}", f"--out={tmp_path / 'a.html'}", "--json"]) == 0
        shown = [image["image"] for image in json.loads(capsys.readouterr().out)["images"]]
        told = [[int(part) for part in re.findall(r"\d+", image)] for image in shown]
        assert [labels[number] for number, _ in told] == [label for _, label in told]
        assert ({label for _, label in told}, len(told)) == ({0, 1, 2}, 12)


def test_pages_of_folders_leave_out_what_is_no_image(tmp_path, data, capsys):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"no image")
    assert train(tmp_path / "run", data, 1) == 0
    view = ["view", f"--model={tmp_path / 'run'}", f"--out={tmp_path / 'a.html'}", f"--images={tmp_path / 'pictures'}"]
    with pytest.warns(DepthgateWarning, match=r"a\.png is not an image"):
        assert main(view) == 2
    assert "none of 1 files in it is an image" in capsys.readouterr().err
    wanted = ["b.png", "cat/b.png", *(f"dog{'x' * 90}{c}{'x' * 90}/b.png" for c in "yz")]  # alike, once cut to be shown
    for name in wanted:
        (tmp_path / "pictures" / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "pictures" / name)
    assert main([*view, "--json"]) == 0
    assert [image["image"] for image in json.loads(capsys.readouterr().out)["images"]] == wanted
    assert (tmp_path / "a.html").read_text().count("taken for") == 4  # pictures that look alike, each once


def test_a_pretrained_model_is_trained_on(tmp_path, data, capsys):
    """Upcycled, from its own function, shape and pixels; the run is one like others."""
    from transformers import ViTConfig as Shape
    from transformers import ViTForImageClassification

    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    ViTForImageClassification(Shape(**shape, image_size=12, patch_size=4, num_labels=3)).save_pretrained(
        tmp_path / "vit"
    )
    options = [
        "--task=images",
        f"--data={data}",
        f"--pretrained={tmp_path / 'vit'}",
        "--model.pattern=moe",
        "--lr=1e-9",
    ]
    for more, size in (([], "12x12"), (["--model.image=8"], "8")):
        run = tmp_path / f"of{size}"
        assert main(["train", *options, *more, f"--out={run}", "--steps=1"]) == 0
        vit = dg.load(run)
        assert (vit.config.kinds, vit.config.dim, vit.config.heads) == (("dense", "moe"), 16, 4)
        assert (str(vit.config.image), vit.names) == (size, ["red", "green"])
        images = torch.rand(2, 3, *vit.config.size)
        wanted = dg.ViT.from_pretrained(str(tmp_path / "vit"), image=size).features(images)[0]
        assert torch.allclose(vit.features(images)[0], wanted, atol=1e-5)
        assert vit.pixel_mean.tolist() == [0.5] * 3
    assert main(["train", "--resume", f"--out={run}", "--steps=2"]) == 0
    assert main(["train", *options, "--model.layers=3", f"--out={tmp_path / 'other'}"]) == 2
    assert "layers is 3, that of the model 2" in capsys.readouterr().err
    np.savez(grey := tmp_path / "grey.npz", x=np.load(data)["x_train"][..., 0], y=np.load(data)["y_train"])
    assert main(["train", *options, f"--data={grey}", f"--out={tmp_path / 'other'}"]) == 2
    assert f"{grey} has 1 channels, " in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_pretrained_model_stays_dense_and_keeps_what_it_knows_of_classes(tmp_path, data, capsys):
    """Unless a pattern is asked for. Its classes, in another order, are found again by their names."""
    from transformers import ViTConfig as Shape
    from transformers import ViTForImageClassification

    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    for names, told in ((["green", "red"], False), (["cat", "dog"], True)):
        model = ViTForImageClassification(Shape(**shape, image_size=12, patch_size=4, id2label=dict(enumerate(names))))
        torch.nn.init.constant_(model.classifier.bias[:1], 9.0)
        model.save_pretrained(tmp_path / names[0])
        options = ["--task=images", f"--data={data}", f"--pretrained={tmp_path / names[0]}", "--lr=1e-9", "--steps=1"]
        assert main(["train", *options, f"--out={tmp_path / f'of {names[0]}'}"]) == 0
        assert ("tells other classes apart" in capsys.readouterr().err) == told
        vit = dg.load(tmp_path / f"of {names[0]}")
        assert (set(vit.config.kinds), vit.names) == ({"dense"}, ["red", "green"])
        assert [round(bias) for bias in vit.head.bias.tolist()] == ([0, 0] if told else [0, 9])
    options = ["--task=images", f"--data={data}", f"--pretrained={tmp_path / 'of green'}", "--steps=1", "--lr=1e-9"]
    assert main(["train", *options, "--model.pattern=soft_moe", f"--out={tmp_path / 'own'}"]) == 0
    assert dg.load(tmp_path / "own").config.kinds == ("dense", "soft_moe")


def test_evaluation_needs_no_image_of_every_class(tmp_path, capsys):
    """By the numbers of classes, and by their names."""
    random = np.random.default_rng(1)
    pixels, labels = random.integers(0, 256, (40, 8, 8, 3), np.uint8), np.arange(40) % 4
    names, these = np.array(["ant", "bee", "cow", "dog"]), np.isin(labels, (1, 2))
    for name, classes in (("named", {"classes": names}), ("numbered", {})):
        np.savez(tmp_path / f"{name}.npz", x=pixels, y=labels, **classes)
        assert train(tmp_path / name, tmp_path / f"{name}.npz", 8) == 0
    for i in np.flatnonzero(these):
        home = tmp_path / "folder" / names[labels[i]]
        home.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[i]).save(home / f"{i}.png")
    np.savez(tmp_path / "tests.npz", x_test=pixels[these], y_test=labels[these])
    np.savez(tmp_path / "four.npz", x=pixels[:1], y=[4])
    for name, given in (("named", "folder"), ("named", "tests.npz"), ("numbered", "tests.npz")):
        vit = dg.load(tmp_path / name)
        right = vit(torch.from_numpy(pixels[these]).permute(0, 3, 1, 2)).logits.argmax(1).numpy() == labels[these]
        wanted = {vit.names[label]: right[labels[these] == label].mean() for label in (1, 2)}
        capsys.readouterr()
        assert main(["eval", f"--model={tmp_path / name}", f"--data={tmp_path / given}", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["accuracy_by_class"] == pytest.approx(wanted)
    for name, given, says in (("numbered", "folder", "has the class bee"), ("named", "four.npz", "has 5 classes")):
        assert main(["eval", f"--model={tmp_path / name}", f"--data={tmp_path / given}"]) == 2
        assert says in capsys.readouterr().err


def test_classes_whose_names_are_other_numbers_are_refused(tmp_path, capsys):
    """The first of the data's classes has no name of the model's, and would be one with the second."""
    random = np.random.default_rng(1)
    pixels, labels = random.integers(0, 256, (40, 8, 8, 3), np.uint8), np.arange(40) % 3
    np.savez(tmp_path / "named.npz", x=pixels, y=labels, classes=["1", "2", "3"])
    np.savez(tmp_path / "numbered.npz", x=pixels, y=labels)
    assert train(tmp_path / "run", tmp_path / "named.npz", 1) == 0
    assert main(["eval", f"--model={tmp_path / 'run'}", f"--data={tmp_path / 'named.npz'}"]) == 0
    assert main(["eval", f"--model={tmp_path / 'run'}", f"--data={tmp_path / 'numbered.npz'}"]) == 2
    assert "has the classes 0, 1, 2 where the model has 1, 2, 3" in capsys.readouterr().err


def test_bytes_are_normalised_by_images_of_all_classes():
    pixels = torch.zeros(20_000, 1, 2, 2, dtype=torch.uint8)
    pixels[15_000:] = 255
    config = ImagesConfig(data="", model=ViTConfig(image=2, patch=2, channels=1, classes=2, dim=8, heads=1, layers=1))
    model = Classification(config, Images(pixels, (pixels[:, 0, 0, 0] > 0).long(), ["dark", "light"])).model
    assert float(model.pixel_mean) == pytest.approx(0.25)
    assert float(model.pixel_std) == pytest.approx((0.25 * 0.75) ** 0.5, rel=1e-3)


class Waits(TorchDispatchMode):
    """Names of operations that make the host wait for the device."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "equal"):
            self.seen.append(operation)
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("pattern", ["dense", "soft_moe", "dense,mod"])
def test_a_step_never_waits_for_the_device(pattern):
    shape = ViTConfig(image=8, dim=16, layers=2, heads=2, experts=4, classes=4, pattern=pattern)
    config = ImagesConfig(data="", model=shape, batch=8, zoom=0.5, **AUGMENTED)
    images = Images(torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8), torch.arange(8) % 4, list("abcd"))
    task = Classification(config, images)
    step = Step(task, [optim.adamw(dict(task.model.named_parameters()), config, lambda *_: True)], config)
    given = Shuffled(images, 4).rows(range(8))
    step.body(given)  # the first one sets the optimizer up
    with Waits() as waits:
        step.body(given)
    assert waits.seen == []
    with Waits() as waits:
        given.targets.sum().item()
    assert len(waits.seen) == 1


@pytest.mark.parametrize("channels", [2, 4])
def test_images_of_other_channels_are_shown(tmp_path, channels):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 8, 8, channels), np.uint8)
    np.savez(tmp_path / "a.npz", x=pixels, y=np.arange(30) % 2)
    assert train(tmp_path / "run", tmp_path / "a.npz", 1, *ALL) == 0
    assert main(["view", f"--model={tmp_path / 'run'}", f"--out={tmp_path / 'page.html'}"]) == 0


def test_accuracy_and_calibration_by_hand():
    """Two classes at logits 0 and ln 3: confidence 3/4, of four images three are right, in one bin; a gap of 0."""

    class Fixed:
        def __call__(self, pixels):
            logits = torch.tensor([[0.0, 0.0], [0.0, np.log(3)]])[pixels[:, 0, 0, 0].long()]
            return logits, ()

    def figures(labels, pixels):
        shown = torch.tensor(pixels, dtype=torch.uint8).view(-1, 1, 1, 1)
        return measure(Fixed(), Images(shown, torch.tensor(labels), ["a", "b"]), 3, "cpu")

    found = figures([1, 1, 1, 0], [1, 1, 1, 1])
    assert (found["accuracy"], found["confidence"]) == (0.75, pytest.approx(0.75))
    assert found["calibration_error"] == pytest.approx(0.0, abs=1e-6)
    assert found["loss"] == pytest.approx(-(3 * np.log(0.75) + np.log(0.25)) / 4)
    assert found["accuracy_by_class"] == {"a": 0.0, "b": 1.0}
    assert figures([0, 0, 0, 0], [1, 1, 1, 1])["calibration_error"] == pytest.approx(0.75)
    assert figures([1, 1, 0, 0], [1, 1, 0, 0])["calibration_error"] == pytest.approx((2 * 0.25 + 2 * 0.5) / 4)


def test_evaluation_reads_whole_folders_and_skips_what_training_did(tmp_path, data, capsys):
    for name, colour in (("green", (0, 200, 0)), ("red", (200, 0, 0))):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(12):
            Image.new("RGB", (8, 8), colour).save(tmp_path / "images" / name / f"{i}.png")
    bad = tmp_path / "images" / "red" / "z.png"
    bad.write_bytes(b"no image")
    assert train(tmp_path / "run", tmp_path / "images", 2, "--corrupt=skip", "--repeats=2", "--model.image=8") == 0
    capsys.readouterr()
    for given, many in (("heldout", range(1, 12)), (str(tmp_path / "images"), [24])):
        assert main(["eval", f"--model={tmp_path / 'run'}", f"--data={given}", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["images"] in many
    assert main(["eval", f"--model={tmp_path / 'run'}", f"--data={data}"]) == 0  # red and green, in the other order
    (tmp_path / "images" / "red").rename(tmp_path / "images" / "blue")
    assert main(["eval", f"--model={tmp_path / 'run'}", f"--data={tmp_path / 'images'}"]) == 2
    assert "has the class blue where the model has green" in capsys.readouterr().err


REFUSED = {
    "--model.patch=3": "the height of an image, 8 is not divisible by the height of a patch, 3",
    "--model.classes=7": "model.classes is 7, but the images have 2",
    "--model.dims=3": "--model.dims is not an option",
    "--mixup=0.7 --cutmix=0.7": "mixup + cutmix is 1.4",
    "--preset=tiny-mod": "preset is 'tiny-mod'",
    "--vocab=300": "--vocab is not an option",
    "--data=none.npz": "which is not there",
    "--model.image=100000": "image is 100000",
}


@pytest.mark.parametrize(("options", "says"), REFUSED.items())
def test_bad_options_leave_nothing_behind(tmp_path, data, options, says, capsys):
    assert train(tmp_path / "a", data, 2, *options.split()) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "a" / "config.json").exists()


def test_the_task_may_stand_in_a_file_and_a_run_keeps_it(tmp_path, data, capsys):
    (tmp_path / "options.yaml").write_text(
        "task: images\npreset: vit-tiny-moe\nmodel: {dim: 16, heads: 2, experts: 4}\n"
    )
    options = [
        "--config",
        str(tmp_path / "options.yaml"),
        f"--data={data}",
        f"--out={tmp_path / 'run'}",
        "--device=cpu",
    ]
    assert main(["train", *options, "--epochs=0.5", "--steps=1000", "--batch=8"]) == 2
    assert "steps is 1000, and epochs is 0.5: give one of them" in capsys.readouterr().err
    assert main(["train", *options, "--epochs=0.5", "--batch=8"]) == 0
    assert "2 classes; 3 steps" in capsys.readouterr().err
    asked = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (asked["task"], asked["model"]["pattern"], asked["steps"]) == ("images", "moe", 3)
    assert main(["train", *options, "--steps=3"]) == 2
    assert "--resume" in capsys.readouterr().err
    assert main(["train", "--resume", f"--out={tmp_path / 'run'}", "--epochs=0.8"]) == 0  # steps of the run give way
    assert len(rows(tmp_path / "run")) == 4
    other = dict(np.load(data))
    np.savez(data, **{**other, "x_train": other["x_train"][::-1]})
    assert main(["train", "--resume", f"--out={tmp_path / 'run'}", "--epochs=1"]) == 2
    assert "has changed" in capsys.readouterr().err


def test_runs_and_studies_from_before_there_were_stems(tmp_path, data, capsys):
    """A run has none, and goes on; a study whose models had none is another study."""
    run = tmp_path / "run"
    assert train(run, data, 2) == 0
    for path in (run / "config.json", run / "step-2" / "config.json"):
        config = json.loads(path.read_text())
        assert config["model"].pop("stem") is False
        path.write_text(json.dumps(config))
    forge(run / "step-2")
    assert dg.load(run).config.stem is False
    assert main(["train", "--resume", f"--out={run}", "--steps=3"]) == 0
    assert rows(run)[-1]["step"] == 3
    study = ["isoflop", "--task=images", f"--data={data}", f"--out={tmp_path / 'study'}", "--budgets=6e7", "--sizes=1"]
    study += ["--batch=8", "--device=cpu", "--parallel=1", "--variants=dense", "--calibrate=false"]
    assert main(study) == 0
    grid = tmp_path / "study" / "grid.json"
    found = json.loads(grid.read_text())
    del found["recipe"]
    grid.write_text(json.dumps(found))
    capsys.readouterr()
    assert main(study) == 2
    assert "is another study: choose another --out\n  recipe: None there" in capsys.readouterr().err


def test_studies_of_images(tmp_path, data, capsys):
    """Cells of equal FLOPs, whose errors are those of their models; controls are variants."""
    study = tmp_path / "study"
    options = f"--task images --data {data} --out {study} --budgets 6e7 --sizes 1 --batch 8 --device cpu --parallel 1"
    assert main(["isoflop", *options.split(), "--variants", "dense,uniform_dispatch:experts=4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["variant"] for row in found["rows"]} == {"dense", "uniform_dispatch:experts=4"}
    for row in found["rows"]:
        assert abs(row["flops"] / 6e7 - 1) < 0.03
        cell = study / "cells" / row["cell"]
        config = dg.load(cell).config
        assert (config.dispatch == "uniform") == ("uniform" in row["variant"])
        _, images = open_images(data)
        wrong = dg.load(cell)(images.pixels).logits.argmax(1) != images.labels
        assert row["loss_causal"] == pytest.approx(100 * float(wrong.float().mean()))
    assert "error" in (study / "report.html").read_text()
    for more, says in (
        ("--variants dense,soft_mo", "soft_moe?"),
        ("--variants dense:patch=3:stem=false", "8 is not divisible by the height of a patch, 3"),
        ("--variants dense:patch=3", "a stem needs sides that are powers of two"),
        ("--samples 5", "samples is 5: it is for text"),
        ("--points 3", "points is 3: it is for text"),
        ("--tokenizer bpe --vocab 300", "tokenizer is 'bpe': it is for text"),
        ("--budgets 1e6", "lower --batch"),
    ):
        assert main(["isoflop", *options.split(), f"--out={tmp_path / 'other'}", *more.split()]) == 2
        assert says in capsys.readouterr().err


def test_reports_on_images_speak_of_errors_and_images(tmp_path, data, capsys):
    """Where a text's speak of losses, causal ones and tokens; training and what is drawn beside it are both in nats."""
    options = f"--task images --data {data} --out {tmp_path / 'study'} --budgets 1e8 --sizes 2 --batch 4 --device cpu"
    variants = "dense,moe:experts=4:balance_loss=0.02"
    assert main(["isoflop", *options.split(), "--parallel=1", f"--variants={variants}"]) == 0
    told, page = capsys.readouterr().out, (tmp_path / "study" / "report.html").read_text()
    for text in (told, page):
        assert "balance_loss=0.02" in text
        assert "balance_error" not in text
        assert "best error" in text
        assert not re.search(
            "best loss|lowest loss|[Ll]oss against|causal loss|held-out text|nats per token|[(]top k[)]|sequences", text
        )
    assert "Error against parameters and FLOPs" in page
    assert "nats per image" in page
    found = [json.loads(html.unescape(chart)) for chart in re.findall(r'data-chart="([^"]*)"', page)]
    drawn = next(chart for chart in found if chart["y"] == "nats per image")["series"]
    lines = (tmp_path / "study" / "results.jsonl").read_text().splitlines()
    losses = [
        (row["variant"], pytest.approx(row["flops"]), pytest.approx(row["loss"], rel=1e-3))
        for row in map(json.loads, lines)
    ]
    for variant in variants.split(","):
        flops, loss = next(of for of in drawn if of["name"] == f"{variant}, held out")["points"][0]
        assert (variant, flops, loss) in losses
