"""The kernels of a router equal their twins, and plans made by them those of operations of torch: on CUDA, or on a CPU
by triton's interpreter (TRITON_INTERPRET=1)."""

import os

import pytest
import torch

import depthgate as dg
from depthgate.hf import decoder, layer, parts
from depthgate.ops import reference, select
from depthgate.routing import GATES, RULES, TopTokens, launched
from tests.conftest import close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device on this machine, and TRITON_INTERPRET is not 1", allow_module_level=True)
route = pytest.importorskip("depthgate.ops.route_triton", reason="triton is not installed")
layers = pytest.importorskip("depthgate.ops.layer_triton", reason="triton is not installed")

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(*shape, generator=GENERATOR)


def there(*given):
    """Tensors, and tuples of them, on the device of the kernels."""
    moved = (
        tuple(there(*g)) if isinstance(g, tuple) else g.to(DEVICE) if isinstance(g, torch.Tensor) else g for g in given
    )
    return list(moved)


def same(ours, theirs):
    for one, two in zip(ours, theirs, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            close(one.cpu().float().nan_to_num(1e6, 1e7, -1e7), two.float().nan_to_num(1e6, 1e7, -1e7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("threshold", [None, (0.3, 0.5), (0.0, 0.0)])
def test_scores(dtype, normed, threshold):
    x, valid = random(2, 5, 1100).to(dtype), torch.tensor([[True] * 5, [False, False, True, True, True]])
    x[1, 0] = torch.nan
    moved = None if threshold is None else (torch.tensor(threshold[:1]), torch.tensor(threshold[1]))
    given = x, valid, random(1, 1100) / 30, random(1), moved, normed
    same(route.scored(*there(*given)), reference.scored(*given))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shape", [(37, 40, 9), (70, 64, 20), (5, 8, 5), (300, 576, 150)])
def test_one_kernel_does_what_three_do(causal, normed, rows, shape):
    T, D, slots = shape
    x, weight, bias, cos, sin = there(
        random(rows, T, D), random(1, D) / 5, random(1), random(1, T, 12), random(1, T, 12)
    )
    threshold, lacking = there((torch.tensor([0.2]), torch.tensor([0.5])), torch.tensor(1))
    rotary = (cos, sin) if T % 2 else (cos.expand(rows, -1, -1), sin.expand(rows, -1, -1))
    given = threshold, normed, "one_plus_tanh", slots, rotary, causal, lacking
    scores, decision, made, taken, picked = route.routed(x, weight, bias, *given)
    same((scores.cpu(), decision.cpu()), [e.cpu() for e in route.scored(x, None, weight, bias, threshold, normed)])
    if causal:
        wanted, many = route.marked(decision, None, scores, "one_plus_tanh", slots)
        assert int(lacking) == max(1, int(many.max()) - slots)
    else:
        wanted = route.chosen(scores.mT, None, None, None, slots, "one_plus_tanh")
    same((each if each is None else each.cpu() for each in made[:4]), [e if e is None else e.cpu() for e in wanted[:4]])
    rows_of, positions = route.taken(x, wanted[0], rotary)
    assert torch.equal(taken, rows_of)
    assert all(torch.equal(one, two) for one, two in zip(picked, positions, strict=True))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("slots", [13, 4])
def test_marks(gate, slots):
    decision, scores = random(3, 13, 1), random(3, 13, 1) * 3
    decision[0, 2], scores[0, 3], scores[1, 1:3, 0] = torch.nan, torch.nan, torch.tensor([torch.inf, -torch.inf])
    decision[1], decision[2] = 1, -1
    for valid in (None, torch.arange(13).expand(3, 13) > 2):
        given = decision, valid, scores, gate
        lacking = torch.tensor(2, device=DEVICE)
        ours, many = route.marked(*there(*given), slots, lacking)
        assert int(lacking) == max(2, int(many.max()) - slots)
        theirs, wanted = reference.marked(*given, slots)
        same((*ours, many), (*theirs, wanted))


@pytest.mark.parametrize("gate", GATES)
def test_choices_with_their_gates(gate):
    scores, doc = random(2, 1, 12), torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3, [0] * 12])
    for valid, docs in ((None, None), (doc >= 0, None), (doc >= 0, doc)):
        limits = select.limits_of(scores, valid, docs, 0.5, 6)
        found = route.chosen(*there(scores, valid, docs, limits), 6, gate)
        index, filled, slot, gates, flat = (None if each is None else each.cpu() for each in found)
        want, full = select.choose_by_sorting(scores, valid, docs, 0.5, 6)
        assert (filled is None) == (limits is None)
        assert bool(full.all()) if filled is None else torch.equal(filled, full)
        assert torch.equal(torch.where(full, index, -1), torch.where(full, want, -1))
        picked = torch.tensor([[reference._gate(float(s), gate) for s in row] for row in scores[:, 0]])
        close(gates[:, 0], torch.where(full[:, 0], picked.gather(1, want[:, 0]), 0.0))
        assert torch.equal(flat.view(2, 6), index[:, 0] + torch.tensor([[0], [12]]))
        for b, place in torch.nonzero(full[:, 0]).tolist():
            assert slot[b, 0, index[b, 0, place]] == place
        assert int((slot >= 0).sum()) == int(full.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [None, 1, 2])
def test_taking_tokens_with_their_rotary_positions(dtype, rows):
    """rows: those of the rotary positions, in a width that is no power of two."""
    x, index = random(2, 7, 70).to(dtype), torch.tensor([[[4, 0, 6]], [[1, 2, 3]]])
    rotary = None if rows is None else (random(rows, 7, 12).to(dtype), random(rows, 7, 12))
    (ours, turned), (want, known) = route.taken(*there(x, index, rotary)), reference.taken(x, index, rotary)
    assert torch.equal(ours.cpu(), want)
    assert (turned is None) == (known is None)
    for one, two in zip(turned or (), known or (), strict=True):
        assert torch.equal(one.cpu(), two)
        assert one.dtype == two.dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging(dtype):
    x, rows = random(2, 7, 70).to(dtype), random(2, 3, 70).to(dtype)
    slot = torch.tensor([[[-1, 0, -1, 1, 2, -1, -1]], [[0, -1, -1, -1, -1, -1, 1]]])
    gates = torch.tensor([[[1.0, 0.0, 0.3]], [[1.7, 0.6, 0.0]]])
    got = route.merged(*there(x, rows, slot, gates)).cpu()
    close(got, reference.merged(x, rows, slot, gates), dtype)
    assert torch.equal(got[0, 1], rows[0, 0])
    assert torch.equal(got[0, [0, 2, 3]], x[0, [0, 2, 3]])


# Triton's interpreter cuts bfloat16 off where a GPU rounds.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 70, 576])
def test_norms(dtype, width):
    x, weight = random(2, 5, width).to(dtype) * 30, random(width).to(dtype)
    close(layers.scaled(*there(x, weight), 1e-5).cpu(), reference.scaled(x, weight, 1e-5), dtype)
    assert layers.scaled(*there(x[:0], weight), 1e-5).shape == (0, 5, width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "fewer", "width"), [(9, 3, 64), (4, 4, 6), (1, 1, 2)])
@pytest.mark.parametrize("shared", [False, True])
def test_rotary_positions(dtype, heads, fewer, width, shared):
    q, k = (random(2, 5, each, width).to(dtype).transpose(1, 2) for each in (heads, fewer))
    angle = random(1 if shared else 2, 5, width) * 7
    given = q, k, angle.cos().to(dtype), angle.sin().to(dtype)
    for ours, theirs in zip(layers.turned(*there(*given)), reference.turned(*given), strict=True):
        close(ours.cpu(), theirs, dtype)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("rows", [1, 3])
def test_plans_are_those_of_operations_of_torch(rule, gate, rows, monkeypatch):
    torch.manual_seed(rows)
    router = TopTokens(48, 0.4, gate=gate, rule=rule, normed=gate == "raw").to(DEVICE).eval()
    if rule == "threshold":
        router.rule.average.fill_(0.01)
        router.rule.weight.fill_(0.5)
    x = torch.randn(rows, 17, 48).to(DEVICE)
    padded = torch.arange(17).expand(rows, 17) - 2 * torch.arange(rows)[:, None]
    doc = torch.where(padded >= 0, (padded >= 6).long(), -1)
    padded, doc = padded.clamp(min=-1).to(DEVICE), doc.to(DEVICE)
    cases = [(None, {}), (padded, {}), (padded, {"doc": doc, "max_documents": 2})]
    for pos, more in cases:
        for causal in (False, True):
            plans = []
            for kernels in (False, True):
                monkeypatch.setattr(launched, "few_launches", lambda _, kernels=kernels: kernels)
                with torch.no_grad():
                    plans.append(router(x, pos, causal, **more))
            one, two = plans
            assert torch.equal(one.chosen, two.chosen)
            figures = [(plan.scores, plan.decision, plan.combine(plan.dispatch(x))) for plan in plans]
            same(*((each.cpu() for each in of_plan) for of_plan in figures))
            full = torch.ones_like(two.tokens, dtype=torch.bool) if two.filled is None else two.filled
            assert not two.gates[~full].any()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3", "mistral", "qwen3"])
def test_a_converted_model_gives_the_same_by_kernels(kind, monkeypatch):
    zoo = pytest.importorskip("tests.hf.zoo", reason="transformers is not installed")
    model = zoo.routed(kind, rule="threshold").to(DEVICE)
    ids = zoo.tokens(2, 23).to(DEVICE)
    mask = (torch.arange(23).expand(2, 23) >= torch.tensor([[0], [4]])).long().to(DEVICE)
    calls = [{"causal_routing": False}, {"causal_routing": True}, {"attention_mask": mask}, {"use_cache": True}]
    for call in calls:
        found = []
        for kernels in (False, True):
            for module in (launched, layer, parts, decoder):
                monkeypatch.setattr(module, "few_launches", lambda _, kernels=kernels: kernels)
            with torch.no_grad():
                found.append(model(ids, **{"use_cache": False, **call}).logits[mask.bool()])
        close(*found)


def test_a_causal_pass_that_lacks_slots_is_computed_again(monkeypatch):
    """On CUDA no layer asks how many tokens entered: what it gives is the same, whether or not they all had slots."""
    zoo = pytest.importorskip("tests.hf.zoo", reason="transformers is not installed")
    model, ids = zoo.routed("llama", rule="threshold", capacity=0.05).to(DEVICE), zoo.tokens(2, 60).to(DEVICE)
    bounds = []
    for low in (-9.0, 9.0, -9.0):  # all tokens enter, then none, then all again
        for each in dg.hf.routed_layers(model):
            each.depth_router.rule.average.fill_(low)
            each.depth_router.rule.weight.fill_(1.0)
        found = []
        for kernels in (False, True):
            for module in (launched, layer, parts, decoder):
                monkeypatch.setattr(module, "few_launches", lambda _, kernels=kernels: kernels)
            with torch.no_grad():
                found.append(model(ids, use_cache=False).logits)
        close(*found)
        bounds.append([each.depth_router.bound for each in dg.hf.routed_layers(model)])
    assert bounds == [[layer.BOUND_STEPS] * 2] * 3
