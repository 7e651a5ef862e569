"""One-line changes of other people's models: ViTs of timm, lucidrains and Hugging Face; torch's encoder, Sequential."""

import copy
import warnings

import pytest
import torch
from torch import nn

import depthgate as dg
from tests.conftest import close
from tests.vision import package

D = 32


class TimmViT:
    def plain(self):
        timm = package("timm")
        return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3)

    def depths(self, model, capacity):
        model.blocks[0] = dg.MixtureOfDepths(model.blocks[0], 192, capacity, keep=1)

    def experts(self, model):
        model.blocks[1].mlp = dg.SoftMoE(192, num_experts=4)

    def inputs(self):
        return torch.randn(2, 3, 32, 32, dtype=torch.float64)


class LucidrainsViT:
    def plain(self):
        sizes = {"image_size": 32, "patch_size": 8, "num_classes": 3, "dim": D, "depth": 2, "heads": 2, "mlp_dim": 64}
        return package("vit_pytorch").ViT(**sizes)

    def depths(self, model, capacity):
        model.transformer = dg.MixtureOfDepths(model.transformer, D, capacity, keep=1)

    def experts(self, model):
        model.transformer.layers[0][1] = dg.SoftMoE(D, 4)

    inputs = TimmViT.inputs


class HuggingFaceViT:
    def plain(self):
        import transformers

        sizes = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        return transformers.ViTModel(transformers.ViTConfig(image_size=32, patch_size=8, **sizes))

    def depths(self, model, capacity):
        model.layers[0] = dg.MixtureOfDepths(model.layers[0], D, capacity, keep=1)

    def experts(self, model):
        model.layers[1].mlp = dg.SoftMoE(D, 4)

    inputs = TimmViT.inputs


class Encoder:
    """nn.TransformerEncoder, of which one layer is changed."""

    def plain(self):
        layer = nn.TransformerEncoderLayer(D, 2, 64, batch_first=True, dropout=0.0)
        return nn.TransformerEncoder(layer, 2)

    def depths(self, model, capacity):
        model.layers[1] = dg.MixtureOfDepths(model.layers[1], D, capacity)

    def experts(self, model):
        """torch looks into the feed-forward of its own layers, so that none can be put in its place."""

    def inputs(self):
        return torch.randn(2, 8, D, dtype=torch.float64)


class Sequential:
    def plain(self):
        return nn.Sequential(nn.Linear(D, D), nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)), nn.Linear(D, D))

    def depths(self, model, capacity):
        model[1] = dg.MixtureOfDepths(model[1], D, capacity)

    def experts(self, model):
        model.append(dg.SoftMoE(D, 4))
        model.append(dg.MixtureOfExperts(D, 4, hidden=16))

    inputs = Encoder.inputs


MODELS = {
    "timm": TimmViT,
    "lucidrains": LucidrainsViT,
    "hugging face": HuggingFaceViT,
    "encoder": Encoder,
    "sequential": Sequential,
}


def changed(name, seed=0):
    """A model with routed layers, and a batch for it."""
    torch.manual_seed(seed)
    case = MODELS[name]()
    model = case.plain()
    case.experts(model)
    case.depths(model, 0.5)
    return model.double(), case.inputs()


def answer(model, x):
    y = model(x)
    return y if isinstance(y, torch.Tensor) else y.pooler_output


def gradients(model, x):
    model.zero_grad()
    y = answer(model, x)
    y.pow(2).sum().backward()
    return y.detach(), {name: p.grad for name, p in model.named_parameters()}


def zero_routers(model):
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".router." in f".{name}":
                p.zero_()


@pytest.mark.parametrize("name", MODELS)
def test_capacity_one_with_a_router_of_zeros_is_the_model_as_it_was(name):
    case = MODELS[name]()
    model = case.plain().double()
    x = case.inputs()
    before, expected = gradients(model, x)
    case.depths(model, 1.0)
    model.double()
    zero_routers(model)
    y, grads = gradients(model, x)
    close(y, before)
    grads = {n.replace(".block.", "."): g for n, g in grads.items() if ".router." not in n}
    assert grads.keys() == expected.keys()
    for n, g in expected.items():
        close(grads[n], g)
    model.eval()
    with torch.no_grad():
        close(answer(model, x), before)


@pytest.mark.parametrize("name", MODELS)
def test_trains_and_its_state_moves_to_another_model(name):
    model, x = changed(name)
    y, grads = gradients(model, x)
    assert all(g is not None and g.isfinite().all() for g in grads.values())
    other, _ = changed(name, seed=1)
    assert not torch.allclose(answer(other, x), y)
    other.load_state_dict(model.state_dict())
    close(answer(other, x), y)
    with dg.record(model) as plans:
        answer(model, x)
    routed = plans[0]
    assert routed.chosen.sum() == 2 * (routed.scores.shape[1] // 2)
    if name not in ("encoder", "sequential"):  # a class token, which the head reads
        assert routed.chosen[:, 0].all()


@pytest.mark.parametrize("name", MODELS)
def test_compiled_and_exported_it_says_the_same(name):
    model, x = changed(name)
    y, expected = gradients(model, x)
    expected = {n: g.clone() for n, g in expected.items()}
    model.compile(backend="aot_eager", fullgraph=True)
    z, grads = gradients(model, x)
    close(z, y)
    for n, g in expected.items():
        close(grads[n], g)
    model, _ = changed(name)
    model.eval()
    y = answer(model, x)
    exported = torch.export.export(model, (x,)).module()
    close(answer(exported, x), y)


def test_an_encoder_of_routed_layers():
    """nn.TransformerEncoder copies the layer it is given: routed ones with routers of their own."""
    layer = nn.TransformerEncoderLayer(D, 2, 64, batch_first=True, dropout=0.0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        model = nn.TransformerEncoder(dg.MixtureOfDepths(layer, D, 0.5), 2).double()
    x = torch.randn(2, 8, D, dtype=torch.float64)
    padding = torch.arange(8) >= torch.tensor([[8], [5]])
    causal = nn.Transformer.generate_square_subsequent_mask(8, dtype=torch.float64)
    for call in ({}, {"src_key_padding_mask": padding}, {"mask": causal, "is_causal": True}):
        expected = x
        for routed in model.layers:
            own = {"src_key_padding_mask": padding} if "src_key_padding_mask" in call else {}
            own |= {"src_mask": causal} if "mask" in call else {}
            expected = routed(expected, **own)
        y = model(x, **call)
        close(y, expected)
        with torch.no_grad():
            close(model.eval()(x, **call), expected)
        model.train()
    assert model.layers[0].router is not model.layers[1].router
    model(x).pow(2).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_nested_tensors_of_an_encoder_in_evaluation():
    """With padding, and without gradients, torch hands its layers nested tensors: the same as without."""
    model, _ = changed("encoder")
    model.eval()
    x = torch.randn(3, 8, D, dtype=torch.float64)
    padding = torch.arange(8) >= torch.tensor([[8], [5], [1]])
    seen = []
    model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].is_nested))
    with_gradients = model(x, src_key_padding_mask=padding)
    with torch.no_grad(), warnings.catch_warnings(), dg.record(model) as plans:
        warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")
        without = model(x, src_key_padding_mask=padding)
    assert seen == [False, True]
    close(without[~padding], with_gradients[~padding])
    assert plans["layers.1"].chosen[..., 0].sum(1).tolist() == [4, 2, 1]
    assert not plans["layers.1"].chosen[padding].any()
    x[padding] = torch.nan  # whatever lies in padding
    with torch.no_grad():
        close(model(x, src_key_padding_mask=padding)[~padding], without[~padding])


def test_nested_tensors_take_no_mask_of_their_own():
    layer = dg.MixtureOfDepths(nn.TransformerEncoderLayer(D, 2, 64, batch_first=True), D, 0.5)
    x = torch.nested.nested_tensor([torch.randn(4, D), torch.randn(2, D)])
    for name in ("mask", "keep"):
        with pytest.raises(dg.DepthgateError, match=r"x is nested.*no mask and no keep"):
            layer(x, **{name: torch.ones(2, 4, dtype=torch.bool)})
    for other in (dg.MixtureOfExperts(D, 4), dg.SoftMoE(D, 4)):
        with pytest.raises(dg.DepthgateError, match="x is a nested tensor"):
            other(x)


def test_padded_patches_of_naflexvit_are_never_routed():
    """Their mask is attn_mask (B, 1, T, T): what lies in padding changes nothing."""
    sizes = {"embed_dim": D, "depth": 2, "num_heads": 2, "num_classes": 3, "init_values": None}
    model = package("timm").create_model("naflexvit_base_patch16_gap", **sizes).double().eval()
    model.blocks[0] = dg.MixtureOfDepths(model.blocks[0], D, 0.5).double()
    places = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij"), -1).reshape(1, 9, 2)
    real = torch.arange(9)[None] < 4
    patches = torch.randn(1, 9, 3 * 16 * 16, dtype=torch.float64)
    said = []
    for fill in (0.0, 5.0):
        filled = patches.masked_fill(~real[..., None], fill)
        with dg.record(model) as plans:
            said.append(model({"patches": filled, "patch_coord": places, "patch_valid": real}))
        assert torch.equal(plans[0].valid[:, -9:], real)
        assert not plans[0].chosen[:, -5:].any()
    close(*said)


def test_a_copy_and_a_pickle_of_a_changed_model_say_the_same(tmp_path):
    model, x = changed("encoder")
    close(copy.deepcopy(model)(x), model(x))
    torch.save(model, tmp_path / "model.pt")
    close(torch.load(tmp_path / "model.pt", weights_only=False)(x), model(x))


def test_containers_read_the_attributes_of_the_block():
    inner = nn.TransformerEncoderLayer(D, 2, 64, batch_first=True)
    layer = dg.MixtureOfDepths(inner, D, 0.5)
    assert layer.self_attn is inner.self_attn
    assert layer.norm_first is False
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        layer.nothing_of_the_kind  # noqa: B018


@pytest.mark.parametrize(
    "build",
    [
        lambda: dg.MixtureOfDepths(nn.Linear(16, 16), 16, 0.5),
        lambda: dg.MixtureOfExperts(16, 4),
        lambda: dg.SoftMoE(16, 2),
    ],
)
def test_results_may_be_written_to(build):
    """Gradients of y and of y changed in place are those of y changed otherwise."""
    layer, x = build().double(), torch.randn(2, 8, 16, dtype=torch.float64)
    want = torch.autograd.grad((2 * layer(x) + 1).pow(2).sum(), list(layer.parameters()), allow_unused=True)
    y = layer(x)
    y *= 2
    y += 1
    got = torch.autograd.grad(y.pow(2).sum(), list(layer.parameters()), allow_unused=True)
    for a, b in zip(got, want, strict=True):
        close(a, b)


def test_what_is_set_on_the_layer_reaches_its_block():
    layer = dg.MixtureOfDepths(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 16, 0.5)
    layer.linear1 = nn.Linear(16, 32)
    layer.norm_first = True
    assert layer.block.linear1 is layer.linear1
    assert layer.block.norm_first
    assert {name.split(".")[0] for name, _ in layer.named_parameters()} == {"router", "block"}


def test_a_predictor_trains_alone():
    """All else frozen, the block and the router's scores too."""
    layer = dg.MixtureOfDepths(nn.Linear(16, 16), 16, 0.5, rule="predictor").requires_grad_(False)
    layer.router.rule.requires_grad_(True)
    layer(torch.randn(2, 8, 16)).sum().backward()
    assert all(weight.grad.abs().sum() > 0 for weight in layer.router.rule.parameters())
