"""The vision transformer: FLOPs and weights as counted, images of different sizes, patterns, and what is refused."""

import json

import pytest
import torch

import depthgate as dg
from depthgate.device import count_flops
from depthgate.errors import InvalidValueError
from depthgate.flops import vit_cost
from depthgate.layers import MoD
from tests import vision
from tests.conftest import close

SMALL = {"image": "8x12", "patch": "4x2", "dim": 16, "layers": 4, "heads": 2, "experts": 6, "classes": 5, "slots": 2}
PATTERNS = ["dense", "soft_moe", "moe", "mod", "dense,mod", "soft_moe,moe,mod,dense"]


def small(pattern="soft_moe", **more):
    vit = dg.ViT(dg.ViTConfig(**{**SMALL, "pattern": pattern, **more})).eval()
    torch.nn.init.normal_(vit.head.weight)
    return vit


def bytes_of(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "more", [{}, {"pooling": "class", "registers": 2}, {"stem": True}, {"stem": True, "patch": 1}], ids=str
)
def test_weights_and_flops_are_as_counted(pattern, more):
    vit, images = small(pattern, **more), bytes_of(1, 3, 8, 12)
    cost = vit_cost(vit.config)
    assert sum(weight.numel() for weight in vit.parameters()) == cost.parameters
    assert count_flops(lambda: vit(images)) == cost.forward


def test_patterns_begin_in_the_second_half_unless_dense_is_in_them():
    assert dg.ViTConfig(layers=5).kinds == ("dense", "dense", "soft_moe", "soft_moe", "soft_moe")
    assert dg.ViTConfig(layers=4, pattern="moe,mod", start=1).kinds == ("dense", "moe", "mod", "moe")
    assert dg.ViTConfig(layers=4, pattern="dense,mod").kinds == ("dense", "mod", "dense", "mod")
    assert (dg.ViTConfig.slots, dg.ViTConfig.pooling) == (1, "mean")
    assert small(experts=1).config.experts == 1  # top_k is for moe
    with pytest.raises(InvalidValueError, match="top_k is 2"):
        small("dense,moe", experts=1)
    for name, experts in (("vit-b16-soft", 128), ("vit-tiny-soft", 16)):
        config = dg.ViT.from_preset(name, layers=2, dim=16, heads=2).config
        assert (config.experts, config.slots, config.kinds) == (experts, 1, ("dense", "soft_moe"))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("pooling", "stem"), [("mean", False), ("class", False), ("mean", True)])
def test_an_image_among_larger_ones_is_what_it_is_alone(pattern, pooling, stem):
    vit = small(pattern, pooling=pooling, registers=1, stem=stem).double()
    images = [bytes_of(3, 8, 12), bytes_of(3, 4, 6), bytes_of(3, 8, 4), bytes_of(3, 16, 4)]
    together = vit(images).logits
    for image, logits in zip(images, together, strict=True):
        close(vit(image[None]).logits[0], logits)
    padded, mask = torch.full((2, 3, 16, 12), torch.nan, dtype=torch.float64), torch.zeros(2, 16, 12, dtype=torch.bool)
    for row, image in enumerate(images[:2]):
        _, high, wide = image.shape
        padded[row, :, :high, :wide], mask[row, :high, :wide] = vit.normalised(image[None])[0], True
    close(vit(padded, mask=mask).logits, together[:2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(16, 2), (4, 12), (12, 6)], ids=str)
def test_positions_of_another_size_are_stretched_channel_by_channel(size, dtype):
    vit = small("dense").to(dtype)
    images = vit.normalised(bytes_of(1, 3, *size))
    rows, columns = vit.config.patches_of(*size)
    patches = torch.nn.functional.unfold(images.double(), vit.config.patch_size, stride=vit.config.patch_size).mT
    learnt = vit.position.double().mT.reshape(-1, 1, 1, 2, 6)  # (D, 1, 1, rows, columns)
    stretched = [torch.nn.functional.interpolate(c, (rows, columns), mode="bicubic", antialias=True) for c in learnt]
    wanted = vit.patch.double()(patches) + torch.stack(stretched).flatten(1).mT
    close(vit.to(dtype).embed(images)[0].double(), wanted, dtype)


def test_a_stem_halves_the_image_until_a_pixel_is_a_patch():
    vit, images = small("dense", stem=True).double(), bytes_of(2, 3, 8, 12)  # patches of 4 x 2 pixels, 16 wide
    seen, (first, second) = vit.normalised(images), vit.patch
    nearby = torch.nn.functional.unfold(seen, 3, padding=1, stride=2)
    seen = torch.nn.functional.gelu(first.weight.flatten(1) @ nearby + first.bias[:, None]).view(2, 8, 4, 6)
    nearby = torch.nn.functional.unfold(seen, 3, padding=1, stride=(2, 1))
    wanted = (second.weight.flatten(1) @ nearby + second.bias[:, None]).mT
    close(vit.embed(images)[0], wanted + vit.position)


def test_a_mod_layer_always_takes_class_and_registers():
    vit = small("mod", start=0, pooling="class", registers=2, capacity=0.3)
    for plan in vit(bytes_of(3, 3, 8, 12)).plans:
        assert plan.chosen[:, :3].all()
        assert plan.chosen.sum(1).unique().tolist() == [int(0.3 * 15)]
    assert sum(isinstance(layer, MoD) for layer in vit.layers) == 4


def test_updates_that_do_not_survive_are_left_out():
    vit, images = small("dense,mod"), bytes_of(2, 3, 8, 12)
    survive = torch.ones(4, 2)
    close(vit(images, survive=survive).logits, vit(images).logits)
    survive[:, 1] = 0
    without = vit.head(vit.norm(vit.embed(images)[0].mean(1)))
    close(vit(images, survive=survive).logits[1], without[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_halves_read_bytes(dtype):
    vit, images = small("soft_moe,moe,mod,dense"), bytes_of(2, 3, 8, 12)
    wanted = vit(images).logits
    found = vit.to(dtype)(images).logits
    assert found.dtype is dtype
    close(found.float(), wanted, torch.bfloat16)


def test_models_of_other_kinds_start_alike():
    torch.manual_seed(3)
    one = small("dense")
    torch.manual_seed(3)
    two = small("soft_moe")
    assert torch.equal(one.layers[0].ffn.up.weight, two.layers[0].ffn.up.weight)
    assert torch.equal(one.layers[3].attention.qkv.weight, two.layers[3].attention.qkv.weight)


REFUSED = {
    "image, 32 by a patch of 5": (lambda: dg.ViT(dg.ViTConfig(patch=5)), "not divisible by the height of a patch, 5"),
    "image x": (lambda: dg.ViTConfig(image="32x"), "image is '32x'"),
    "kind": (lambda: dg.ViTConfig(pattern="soft"), "pattern is 'soft'"),
    "few tokens": (
        lambda: small("mod", pooling="class", registers=3, capacity=0.2),
        "capacity 0.2 takes 3 of 4 prefix tokens",
    ),
    "a stem": (lambda: dg.ViTConfig(stem=True, patch="4x6", image=24), "patch is '4x6', and a stem needs sides"),
    "a narrow stem": (
        lambda: dg.ViTConfig(stem=True, patch=16, dim=12, image=32),
        "dim 12 is not divisible by what a stem for this patch needs, 8",
    ),
    "heads": (lambda: dg.ViTConfig(dim=10, heads=3), "dim 10 is not divisible by heads 3"),
    "start": (lambda: dg.ViTConfig(start=7), "start is 7"),
    "a preset": (lambda: dg.ViT.from_preset("vit-tiny-sft"), "did you mean vit-tiny-soft"),
    "channels": (lambda: small()(bytes_of(1, 1, 8, 12)), "images has shape (1, 1, 8, 12)"),
    "integers": (lambda: small()(bytes_of(1, 3, 8, 12).long()), "images has dtype torch.int64"),
    "a side": (lambda: small()(bytes_of(1, 3, 8, 13)), "the width of an image, 13 is not divisible"),
    "holes": (lambda: masked([[1, 1, 1], [1, 0, 1]]), "is not a rectangle"),
    "not at the top": (lambda: masked([[0, 0, 0], [1, 1, 1]]), "at the top left"),
    "a side of nothing": (lambda: small()(bytes_of(1, 3, 0, 12)), "images has shape (1, 3, 0, 12)"),
    "nothing": (lambda: small()(None), "images is not a tensor"),
    "a list": (lambda: small()([]), "images is not a tensor"),
    "a list of several kinds": (lambda: small()([bytes_of(3, 8, 12), torch.rand(3, 4, 12)]), "several dtypes"),
    "a side in a list": (lambda: small()([bytes_of(3, 8, 12), bytes_of(3, 4, 11)]), "the width of an image, 11"),
    "a mask beside a list": (
        lambda: small()([bytes_of(3, 8, 12)], mask=torch.ones(1, 8, 12).bool()),
        "mask is given beside a list",
    ),
    "a list of several channels": (lambda: small()([bytes_of(3, 8, 12), bytes_of(1, 4, 12)]), "numbers of channels"),
}


def masked(patches):
    mask = torch.tensor(patches).bool().repeat_interleave(4, 0).repeat_interleave(4, 1)
    return small(patch="4x4")(bytes_of(1, 3, 8, 12), mask=mask[None])


@pytest.mark.parametrize(("call", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_named(call, says):
    with pytest.raises(InvalidValueError) as error:
        call()
    assert says in str(error.value)


def of_transformers():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=12, patch_size=4, num_labels=3)).eval()


def of_beit():
    from transformers import BeitConfig, BeitForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return BeitForImageClassification(BeitConfig(**sizes, image_size=12, patch_size=4))


def of_timm(**more):
    sizes = {"img_size": (8, 12), "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    return vision.package("timm").models.VisionTransformer(**sizes, **more).eval()


THEIRS = {
    "transformers": of_transformers,
    "timm": of_timm,
    "timm, mean": lambda: of_timm(global_pool="avg"),
    "timm, registers": lambda: of_timm(reg_tokens=2, no_embed_class=True),
    "timm, layer scale": lambda: of_timm(init_values=0.1),
    "timm, no biases": lambda: of_timm(qkv_bias=False, proj_bias=False, reg_tokens=2, no_embed_class=True),
}


@pytest.mark.parametrize("make", THEIRS.values(), ids=THEIRS.keys())
def test_a_pretrained_vit_is_opened_and_upcycled(make):
    """Its logits are the same, and so are they with moe layers and with mod layers of capacity 1."""
    theirs = make()
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    theirs.double()
    images = torch.randn(2, 3, *((12, 12) if hasattr(theirs, "config") else (8, 12)), dtype=torch.float64)
    wanted = theirs(images)
    wanted = getattr(wanted, "logits", wanted)
    for changes in ({}, {"pattern": "moe", "experts": 4}, {"pattern": "mod", "capacity": 1.0, "start": 0}):
        vit = dg.ViT.from_pretrained(theirs, **changes).double()
        close(vit(images).logits, wanted)
    assert vit.config.kinds == ("mod", "mod")
    soft = dg.ViT.from_pretrained(theirs, pattern="soft_moe", experts=4).double()
    alike = torch.randn(1, 1, 16, dtype=torch.float64).expand(1, 5, 16)
    dense = dg.ViT.from_pretrained(theirs).double().layers[1].ffn
    close(soft.layers[1].ffn(alike)[0], dense(alike)[0])  # slots of equal tokens are these tokens


@pytest.mark.parametrize(
    "changes",
    [{"heads": 4}, {"layers": 3}, {"registers": 1}, {"hidden": 32}, {"patch": 2}, {"expert_hidden": 8}],
    ids=str,
)
def test_a_pretrained_vit_keeps_its_shape(changes):
    with pytest.raises(InvalidValueError, match="only image, classes and routing may be chosen"):
        dg.ViT.from_pretrained(of_transformers(), pattern="soft_moe", **changes)
    assert dg.ViT.from_pretrained(of_transformers(), image=12, patch="4x4").config.size == (12, 12)


def test_a_pretrained_vit_for_other_images_and_classes():
    """Positions are stretched as for images of other sizes, and the head is a new one."""
    theirs, images = of_transformers(), torch.randn(2, 3, 8, 16)
    opened, other = (dg.ViT.from_pretrained(theirs, **changes) for changes in ({}, {"image": "8x16", "classes": 5}))
    close(other.features(images)[0], opened.features(images)[0])
    assert other.position.shape == (8, 16)
    assert torch.equal(other(images).logits, torch.zeros(2, 5))
    assert other.names == ["0", "1", "2", "3", "4"]


def test_a_trained_vit_of_our_own_is_upcycled():
    config = dg.ViTConfig(image=12, patch=4, dim=16, heads=2, layers=2, hidden=24, classes=3, pattern="dense")
    own, images = dg.ViT(config), bytes_of(2, 3, 12, 12)
    own.names, own.pixel_mean[:] = ["a", "b", "c"], torch.tensor([0.1, 0.2, 0.3])
    torch.nn.init.normal_(own.head.weight)
    for changes in ({}, {"pattern": "moe", "experts": 4}, {"pattern": "mod", "capacity": 1.0, "start": 0}):
        vit = dg.ViT.from_pretrained(own, **changes)
        close(vit(images).logits, own(images).logits)
        assert vit.names == ["a", "b", "c"]
    with pytest.raises(InvalidValueError, match="only a dense one can be upcycled"):
        dg.ViT.from_pretrained(vit)


@pytest.mark.parametrize(
    ("known", "names", "rows"),
    [
        (["a", "b", "c"], ["c", "a", "b"], [2, 0, 1]),
        (["a", "b", "c"], ["a", "b", "d"], None),
        (["LABEL_0", "LABEL_1", "LABEL_2"], ["c", "a", "b"], [0, 1, 2]),
        (["a", "b", "c"], ["0", "1", "2"], [0, 1, 2]),
    ],
)
def test_a_head_follows_the_names_of_its_classes(known, names, rows):
    config = dg.ViTConfig(image=12, patch=4, dim=16, heads=2, layers=2, classes=3, pattern="dense")
    vit, images = dg.ViT(config), bytes_of(2, 3, 12, 12)
    for weight in vit.head.parameters():
        torch.nn.init.normal_(weight)
    vit.names, before = known, vit(images).logits
    assert vit.begin_head(names) == (rows is not None)
    assert vit.names == names
    close(vit(images).logits, torch.zeros(2, 3) if rows is None else before[:, rows])


def test_pixels_of_grey_models_of_timm():
    grey = vision.package("timm").create_model("vit_tiny_patch16_224", in_chans=1, num_classes=2)
    vit = dg.ViT.from_pretrained(grey)
    assert vit.pixel_mean.tolist() == pytest.approx([sum(grey.pretrained_cfg["mean"]) / 3])


def test_a_missing_folder_is_not_looked_for_elsewhere(monkeypatch):
    import socket

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("it asked the network"))
    with pytest.raises(dg.DepthgateError, match="none is not a folder"):
        dg.ViT.from_pretrained("none")


def test_models_that_are_not_plain_vits_are_refused(tmp_path):
    for make, says in (
        (lambda: torch.nn.Linear(2, 2), "a Linear is not a ViT"),
        (lambda: 3, "a int is not a ViT"),
        (
            lambda: of_timm(block_fn=vision.package("timm").models.vision_transformer.ParallelScalingBlock),
            "is not a ViT",
        ),
        (lambda: of_timm(act_layer=lambda: torch.nn.GELU("tanh")), r"with GELU\(approximate='tanh'\)"),
        (lambda: of_timm(mlp_layer=vision.package("timm").layers.GluMlp), r"ffn\.down\.weight"),
        (lambda: of_timm(global_pool="max"), "global_pool='max'"),
        (lambda: of_timm(global_pool="map", class_token=False), "global_pool='map'"),
        (lambda: of_timm(global_pool="avg", fc_norm=False), "a norm before its mean"),
        (lambda: of_timm(global_pool="avg", pool_include_prefix=True), "class and registers in its mean"),
        (lambda: of_timm(block_fn=vision.package("timm").models.vision_transformer.ResPostBlock), "with ResPostBlock"),
        (of_beit, "is not a ViT"),
        (lambda: str(tmp_path), "is not the folder of an image classifier"),
    ):
        with pytest.raises(dg.DepthgateError, match=says):
            dg.ViT.from_pretrained(make())
    for options, says in (
        ({"pattern": "moe", "top_k": 1}, "top_k is 1"),
        ({"pattern": "mod", "gate": "raw"}, "gate is 'raw'"),
        ({"pattern": "dense,mod", "gate": "sigmoid"}, "gate is 'sigmoid'"),
    ):
        with pytest.raises(InvalidValueError, match=says):
            dg.ViT.from_pretrained(of_timm(), **options)


def test_folders_of_pretrained_models(tmp_path):
    of_transformers().save_pretrained(tmp_path / "vit")
    assert dg.ViT.from_pretrained(tmp_path / "vit").names == ["LABEL_0", "LABEL_1", "LABEL_2"]
    about, pixels = (
        {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]},
        tmp_path / "vit/preprocessor_config.json",
    )
    pixels.write_text(json.dumps(about))
    close(dg.ViT.from_pretrained(tmp_path / "vit").pixel_mean, torch.tensor([0.1, 0.2, 0.3]))
    pixels.write_text(json.dumps(about | {"do_normalize": False}))
    images = bytes_of(1, 3, 12, 12)
    close(dg.ViT.from_pretrained(tmp_path / "vit").normalised(images), images / 255)
    for scaled in ({"rescale_factor": 1 / 127.5}, {"do_rescale": False}):
        pixels.write_text(json.dumps(about | scaled))
        theirs = images * scaled.get("rescale_factor", 1.0)
        wanted = (theirs - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([0.4, 0.5, 0.6])[:, None, None]
        close(dg.ViT.from_pretrained(tmp_path / "vit").normalised(images), wanted)
    for odd in ("{", '{"image_std": [0, 0, 0]}', '{"image_mean": [0.1, 0.2]}', '{"image_mean": ["a", 1, 2]}'):
        pixels.write_text(odd)
        with pytest.raises(dg.DepthgateError, match=r"preprocessor_config\.json is damaged"):
            dg.ViT.from_pretrained(tmp_path / "vit")
    weights = tmp_path / "vit" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(dg.DepthgateError, match="is not the folder of an image classifier"):
        dg.ViT.from_pretrained(tmp_path / "vit")
