"""The decoder: causal, packed, counted; parameters and FLOPs from the configuration alone."""

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import depthgate as dg
from depthgate import flops
from depthgate.ops import reference
from depthgate.ops.loss import linear_cross_entropy
from depthgate.routing import RULES, Groups, Slots, Threshold, causal_bce, update_thresholds
from tests.conftest import close

SMALL = {"vocab": 50, "dim": 32, "layers": 4, "heads": 4, "context": 24, "capacity": 0.25, "experts": 4}
CONFIGS = {
    "dense": {},
    "gqa, qk-norm, untied": {"kv_heads": 2, "qk_norm": True, "tied": False},
    "mod": {"pattern": "dense,mod"},
    "mod by scores": {"pattern": "dense,mod", "rule": "scores"},
    "moe": {"pattern": "dense,moe", "shared_experts": 1, "null_experts": 2, "expert_hidden": 16},
    "mode": {"pattern": "dense,mode", "pool": "sequence", "top_k": 1, "shared_experts": 1},
    "mode by tokens": {"pattern": "mode,dense", "choice": "tokens", "null_experts": 4},
    "mode_staged": {"pattern": "mode_staged,dense", "rule": "threshold"},
    "mod and mode": {
        **{"pattern": "mod,mode", "first": "dense", "rule": "threshold", "pool": "sequence"},
        **dict.fromkeys(("key_shift", "embed_norm", "router_norm", "qk_norm"), True),
    },
    "random": {"pattern": "dense,random", "rule": "scores"},
}
each = pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS.keys())


def build(options, seed=0):
    """A model whose thresholds, where it has some, let some tokens through."""
    torch.manual_seed(seed)
    model = dg.Decoder(dg.ModelConfig(**{**SMALL, **options})).eval()  # only then are random routers the same again
    update_thresholds(model, model(tokens()).plans)
    return model


def tokens(B=2, T=24):
    return torch.randint(50, (B, T))


@each
def test_parameters_and_flops_equal_the_built_model(options):
    model = build(options)
    config = model.config
    assert flops.parameters(config) == sum(p.numel() for p in model.parameters())
    for T in (24, 7):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            out = model(tokens(1, T))
        groups = [plan.computed.double().mean().item() for plan in out.plans if isinstance(plan, Groups)]
        share = sum(groups) / len(groups) if groups else None  # of the choices, by experts that are not null
        forward = flops.forward_flops(config, T, share) * T
        assert counter.get_total_flops() == pytest.approx(forward, rel=1e-12)
        total = out.logits.sum()
        for plan in out.plans:
            if config.rule == "predictor" and isinstance(plan, Slots) and plan.decision.requires_grad:
                total = total + causal_bce(plan)
        with FlopCounterMode(display=False) as counter:
            total.backward()
        backward = flops.training_flops(config, T, share) * T - forward
        assert counter.get_total_flops() == pytest.approx(backward, rel=1e-12)


@pytest.mark.parametrize(("experts", "sequences", "T"), [(16, 8, 24), (12, 8, 32), (64, 8, 32), (64, 32, 16)])
def test_experts_that_choose_out_of_a_batch_are_counted_as_they_run(experts, sequences, T):
    shape = {"vocab": 64, "dim": 32, "heads": 2, "layers": 2, "experts": experts, "top_k": 1, "shared_experts": 1}
    for pool in ("batch", "sequence"):
        config = dg.ModelConfig(**shape, pattern="mode", pool=pool)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
            dg.Decoder(config)(torch.zeros(sequences, T, dtype=torch.long))
        counted = sequences * flops.model_cost(config, T, sequences=sequences).forward
        assert counter.get_total_flops() == pytest.approx(counted, rel=1e-12)


@each
def test_the_future_never_leaks_in_causal_mode(options):
    model = build(options).double()
    ids = tokens()
    changed = ids.clone()
    changed[:, 13:] = (changed[:, 13:] + 7) % 50
    close(model(ids, causal=True).logits[:, :13], model(changed, causal=True).logits[:, :13])
    assert not torch.allclose(model(ids, causal=True).logits[:, 13:], model(changed, causal=True).logits[:, 13:])


@each
@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_equal_separate_ones(options, causal):
    model = build(options).double()
    lengths = [9, 4, 11]
    ids = tokens(1, 24)
    pos = torch.cat([torch.arange(n) for n in lengths])[None]
    doc = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    packed = model(ids, pos, doc, causal=causal).logits
    alone = [model(part, causal=causal).logits for part in ids.split(lengths, 1)]
    close(packed, torch.cat(alone, 1))


RECIPE = dict.fromkeys(("key_shift", "embed_norm", "router_norm", "qk_norm"), True) | {"rule": "threshold"}


@pytest.mark.parametrize("pattern", ["mode", "mod,mode", "moe", "mode_staged"])
def test_a_causal_result_depends_on_its_document_up_to_its_token_alone(pattern):
    """Whatever the rest of the batch says, out of which experts choose in training. Documents of other lengths, one of
    a token alone, and padding, with keys of the token before."""
    model = build({"pattern": pattern, "null_experts": int("mode" not in pattern), **RECIPE}).double()
    ids = tokens()
    doc = torch.tensor([[0] * 9 + [1] + [2] * 14, [0] * 5 + [1] * 13 + [-1] * 6])
    pos = torch.tensor([[*range(9), 0, *range(14)], [*range(5), *range(13)] + [-1] * 6])
    expected, plans = model(ids, pos, doc, causal=True)
    entered = [plan.chosen[pos >= 0].double().mean() for plan in plans if isinstance(plan, Slots)]
    assert all(0.01 < share < 0.9 for share in entered)
    for row, last in ((0, 0), (0, 3), (0, 9), (0, 17), (1, 4), (1, 5), (1, 12)):
        changed = torch.randint(50, ids.shape)
        kept = (doc == doc[row, last]) & (torch.arange(2)[:, None] == row) & (pos <= pos[row, last])
        changed[kept] = ids[kept]
        got = model(changed, pos, doc, causal=True).logits
        close(got[kept], expected[kept])
        assert not torch.allclose(got[~kept & (pos >= 0)], expected[~kept & (pos >= 0)])
    for causal in (True, False):
        some, all_known = (model.hidden(ids, pos, doc, causal, max_documents=most)[0] for most in (None, 3))
        close(all_known[pos >= 0], some[pos >= 0])


@pytest.mark.parametrize(("pattern", "rows"), [("mode", 3), ("mod,mode", 1), ("dense,mod", 1)])
def test_with_thresholds_of_the_same_scores_the_causal_pass_is_the_top_k_pass(pattern, rows):
    """Of a whole model: the pool of a mode layer is the batch, that of a mod layer a sequence."""
    model = build({"pattern": pattern, "vocab": 80, **RECIPE}).double()
    rules = [module for module in model.modules() if isinstance(module, Threshold)]
    for rule in rules:
        rule.decay = 0.0
    ids = torch.randperm(80)[: 24 * rows].view(rows, 24)  # the same token twice has the same score in the first layer
    logits, plans = model(ids)
    update_thresholds(model, plans)
    for rule in rules:
        rule.average -= 1e-9  # rows of experts are summed in another order
    causal, found = model(ids, causal=True)
    assert all(a.chosen.equal(b.chosen) for a, b in zip(plans, found, strict=True))
    close(causal, logits)


def test_thresholds_that_have_learnt_nothing_let_every_token_through():
    model = dg.Decoder(dg.ModelConfig(**{**SMALL, "pattern": "mod,mode", "rule": "threshold"}))
    assert all(plan.chosen.all() for plan in model(tokens(), causal=True).plans)
    assert not any(plan.chosen.all() for plan in model(tokens()).plans)


@each
def test_left_padding_equals_the_row_alone(options):
    model = build(options).double()
    ids = tokens(2, 12)
    pos = torch.arange(12).repeat(2, 1)
    pos[1] -= 5
    padded = model(ids, pos.clamp(min=-1), causal=True).logits
    close(padded[0], model(ids[:1], causal=True).logits[0])
    close(padded[1, 5:], model(ids[1:, 5:], causal=True).logits[0])


@each
def test_the_loss_is_the_cross_entropy_of_the_logits(options):
    model = build(options)
    ids = tokens()
    targets = tokens()
    targets[0, :5] = -1
    loss, plans = model.loss(ids, targets)
    logits, expected_plans = model(ids)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
    close(loss, expected)
    assert len(plans) == len(expected_plans)
    got = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)
    wanted = torch.autograd.grad(expected, [*model.parameters()], allow_unused=True)
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            close(a, b)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunked_cross_entropy_equals_its_twin(chunk):
    x = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 10, -1, 3, 3, -7, 5])
    close(linear_cross_entropy(x, w, targets, chunk), reference.linear_cross_entropy(x, w, targets))
    assert gradcheck(lambda x, w: linear_cross_entropy(x, w, targets, chunk), (x, w))
    assert linear_cross_entropy(x, w, torch.full((7,), -1), chunk).item() == 0


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_generates_causally_after_training_a_little(rule):
    """Some steps with the top-k loss and the rule's own; then a causal pass routes about as many tokens and has about
    the same loss, and the model says what that pass says, which is nearly all that it was trained on."""
    model = build({"pattern": "dense,mod", "rule": rule}).train()
    ids = tokens(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(60):
        loss, plans = model.loss(ids[:, :-1], ids[:, 1:])
        losses.append(loss.item())
        (loss if rule == "threshold" else loss + 0.1 * sum(map(causal_bce, plans))).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rule == "threshold":
            update_thresholds(model, plans)
    loss, plans = model.eval().loss(ids[:, :-1], ids[:, 1:], causal=True)
    assert losses[-1] < 0.1 * losses[0]
    assert loss.item() < 0.1 * losses[0]
    shares = [plan.chosen.float().mean().item() for plan in plans]
    assert len(shares) == 2
    assert all(0.05 < share < 0.5 for share in shares)  # of a capacity of 0.25
    said = torch.tensor([result.tokens for result in dg.generate(model, ids[:, :8], max_new_tokens=8, temperature=0)])
    read = model(torch.cat((ids[:, :8], said), 1), causal=True).logits
    assert torch.equal(said, read[:, 7:-1].argmax(-1))
    assert (said == ids[:, 8:16]).float().mean() > 0.8  # one token that is missed leads the rest of its row astray


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pattern": "dense,soft_moe"}, "Soft MoE"),
        ({"pattern": "dense,fancy"}, "'fancy'"),
        ({"hidden": 10**9}, "hidden is 1000000000"),
        ({"dim": 10**9}, "dim is 1000000000"),
        ({"heads": 3}, "dim 32 .* heads 3"),
        ({"capacity": 0.0}, "capacity is 0.0"),
        ({"top_k": 9}, "top_k is 9"),
        ({"rule": "luck"}, "'luck'"),
        ({"pattern": "mode", "experts": 1, "top_k": 1}, "experts is 1"),
        ({"pattern": "mode", "null_experts": 2}, "null_experts is 2: they are for --model.choice tokens"),
        ({"pattern": "mode", "pool": "world"}, "'world'"),
        ({"pattern": "moda"}, "'moda'"),
        ({"key_shift": True, "heads": 16}, "head size is 2: key_shift needs a multiple of 4"),
        ({"vocab": -1}, "vocab is -1"),
        ({"layers": "four"}, "'four'"),
    ],
)
def test_bad_configurations(options, says):
    with pytest.raises(dg.DepthgateError, match=says):
        dg.ModelConfig(**{**SMALL, **options})


@pytest.mark.parametrize("ids", [torch.zeros(3), torch.zeros(1, 2, 3).long(), torch.zeros(1, 3), [[1, 2]]])
def test_bad_tokens(ids):
    with pytest.raises(dg.DepthgateError, match="tokens"):
        build({})(ids)


def test_a_model_of_a_preset():
    model = dg.Decoder.from_preset("tiny-mod", vocab=32, layers=2)
    assert [*model.config.kinds] == ["dense", "mod"]
    assert model.config.vocab == 32
    for name in ("tiny-mdo", 3, None):
        with pytest.raises(dg.DepthgateError, match=f"preset is {name!r}: did you mean"):
            dg.Decoder.from_preset(name)


def test_a_document_of_one_row_is_what_it_is_at_any_positions():
    """Chance takes tokens by their positions: told of the document or not, these are those that were given."""
    model, ids = build({"pattern": "random"}), tokens()
    pos = torch.arange(5, 29).expand(2, 24)
    for causal in (False, True):
        alone = model(ids, pos, causal=causal).logits
        close(model(ids, pos, torch.zeros_like(pos), causal=causal).logits, alone)
    assert not torch.allclose(alone, model(ids, causal=True).logits)
