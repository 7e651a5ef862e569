"""The kernels of a decode step equal their twins, on a CPU by triton's interpreter."""

import os
from itertools import product

import pytest
import torch

import depthgate as dg
from depthgate.generation.config import Sampling
from depthgate.generation.engine import Engine
from depthgate.ops import decode
from tests.generation.models import built, prompts, said

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs triton and TRITON_INTERPRET=1; tests/gpu runs the kernels on CUDA", allow_module_level=True)
kernels = pytest.importorskip("depthgate.ops.decode_triton")

TAKEN = [(1, [0]), (1, []), (5, [1, 3]), (5, []), (20, [2, 19]), (20, list(range(20)))]


def rows_of(total, taken):
    places = torch.zeros(total, dtype=torch.int64)
    places[: len(taken)] = torch.tensor(taken, dtype=torch.int64)
    return decode.Rows(places, torch.tensor(len(taken), dtype=torch.int32), turns=torch.zeros(256, dtype=torch.int32))


def near(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("total", "taken"), TAKEN)
def test_products(total, taken):
    torch.manual_seed(0)
    rows, n = rows_of(total, taken), len(taken)
    x, weight, norm, add = torch.randn(total, 48), torch.randn(40, 48), torch.rand(48), torch.randn(total, 48)
    near(kernels.linear(x, rows, weight, norm=norm)[:n], decode.linear(x, rows, weight, norm=norm))
    near(
        kernels.linear(x, rows, weight, norm=norm, add=add, glu=True)[:n],
        decode.linear(x, rows, weight, norm=norm, add=add[:n], glu=True),
    )
    near(kernels.linear(x, rows, weight, gather=False)[:n], (x @ weight.T)[:n])
    out, gates, more = torch.randn(total, 40), torch.rand(total), torch.randn(total, 40)
    theirs = out.clone()
    decode.add_linear(theirs, rows, weight, x[:n], more[:n], gates[:n])
    kernels.add_linear(out, rows, weight, x, more, gates)
    near(out, theirs)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_routed_layer_of_one_row(wanted):
    torch.manual_seed(0)
    new = torch.randn
    for length, gate in product((0, 5, 40), ("one_plus_tanh", "raw")):
        router = (new(48), new(1), torch.tensor([-1e9 if wanted else 1e9]), True, gate)
        norms = [(torch.rand(48), 1e-5) for _ in range(2)]
        layer = decode.Layer(router, norms[0], new(128, 48), new(48, 64), norms[1], new(72, 48), new(48, 36))
        heads = decode.Heads(4, 2, 16, torch.rand(16), torch.rand(16), None)
        kv, table = new(6, 2, 2, 16, 16), torch.tensor([[4, 1, 5, 2]]).int()
        x, (cos, sin) = new(1, 48), new(2, 1, 8)
        found = []
        for module, live in ((decode, 1), (kernels, torch.tensor(1).int())):
            pages = decode.Pages(kv.clone(), table, torch.tensor([length]).int(), torch.ones(1, 2, 16))
            y, entered, turns = x.clone(), torch.zeros(1).int(), torch.zeros(3).int()
            module.routed_layer(y, live, entered, turns, layer, cos, sin, heads, pages, 4)
            found.append((y, pages.kv, pages.last_key, entered))
        for ours, theirs in zip(*reversed(found), strict=True):
            near(ours, theirs)
        assert bool(found[0][3]) is wanted


@pytest.mark.parametrize(("total", "taken"), TAKEN)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 24), (4, 4, 16)])
def test_attention(total, taken, heads, kv_heads, dim):
    torch.manual_seed(0)
    rows, n, size = rows_of(total, taken), len(taken), 16
    table = (torch.randperm(total * 5) + 1).view(total, 5).int()
    lengths = torch.tensor([(0, 1, 15, 16, 17, 78)[i % 6] for i in range(total)]).int()
    for norms, shift, splits in product((True, False), (True, False), (1, 4)):
        norm = torch.rand(dim) if norms else None
        how = decode.Heads(heads, kv_heads, dim, norm, norm, None)
        kv, last = torch.randn(total * 5 + 1, 3, 2, kv_heads, size, dim), torch.randn(total, kv_heads, dim)
        pages = [decode.Pages(kv.clone()[:, 1], table, lengths, last.clone() if shift else None) for _ in range(2)]
        cos, sin = torch.randn(2, total, dim // 2)
        qkv = torch.randn(total, (heads + 2 * kv_heads) * dim)
        ours = kernels.attend(qkv, rows, cos, sin, how, pages[0], splits)
        if n:
            near(ours[:n], decode.attend(qkv[:n], rows, cos, sin, how, pages[1]))
        near(pages[0].kv, pages[1].kv)
        if shift:
            near(pages[0].last_key, pages[1].last_key)


@pytest.mark.parametrize("total", [1, 5, 64])
def test_decisions_and_both_ends_of_a_step(total):
    torch.manual_seed(0)
    for live, normed, gate in product((1, 3), (True, False), ("one_plus_tanh", "sigmoid", "raw", "straight_through")):
        x, weight, bias, threshold = torch.randn(total, 48), torch.randn(48), torch.randn(1), torch.tensor([0.1])
        many = torch.tensor(min(live, total), dtype=torch.int32)
        entered = torch.zeros(2, total, dtype=torch.int32)
        rows, gates = decode.decide(x, many, entered[0], weight, bias, threshold, normed, gate)
        (places, count), ours = kernels.decide(x, many, entered[1], weight, bias, threshold, normed, gate)
        n = int(count)
        assert (n, places[:n].tolist(), sorted(places.tolist())) == (len(gates), rows.taken.tolist(), [*range(total)])
        near(ours[:n], gates)
        assert torch.equal(*entered)
        table, token, pos = torch.randn(30, 48), torch.randint(30, (total,)), torch.randint(20, (total,))
        cos, sin = torch.randn(2, 20, 6)
        for mine, theirs in zip(
            kernels.begin(table, token, normed, pos, cos, sin),
            decode.begin(table, token, normed, pos, cos, sin),
            strict=True,
        ):
            near(mine, theirs)
        logits, turns = torch.randn(total, 30).round(), torch.zeros(total).int()
        logits[0, 7] = (float("nan"), float("inf"), 0.0)[live - 1 if live < 3 else 2]
        old = [token, pos, pos + 1, torch.arange(4 * total).view(4, total).int(), torch.zeros(total, 30).bool()]
        new, record = torch.randint(30, (total,)), torch.randint(2, (5, total)).int()
        for alive in (total, 0):
            ring, living = (torch.zeros(3, 5 * total).int(), torch.tensor(4)), torch.tensor(alive, dtype=torch.int32)
            for greedy in (True, False):
                ours, theirs = ([each.clone() for each in (record, *ring, *old)] for _ in range(2))
                if greedy:
                    mine = kernels.finish_likeliest(logits, turns, living, *ours)
                else:
                    kernels.finish(new, living, *ours)
                if alive and greedy:
                    tokens = decode.finish_likeliest(logits, turns, alive, *theirs)
                    finite = theirs[0][1] > 0
                    assert torch.equal(mine[finite], tokens[finite])
                    assert torch.equal(finite, logits.amax(-1).isfinite())
                    for each in (ours, theirs):  # where logits are not finite some token is taken
                        each[1].view(3, 5, total)[1, 0, ~finite] = each[3][~finite] = 0
                        each[-1][~finite] = False
                elif alive:
                    decode.finish(new, alive, *theirs)
                    assert theirs[1][1].view(5, total)[0].tolist() == new.tolist()
                assert all(map(torch.equal, ours[1:2], theirs[1:2]))
                assert all(map(torch.equal, ours[3:], theirs[3:]))
                assert int(ours[2]) == 5
                assert not turns.any()


CASES = [("dense", "scores"), ("dense,mod", "threshold"), ("dense,mod", "predictor"), ("dense,random", "scores")]
CASES += [(pattern, "threshold") for pattern in ("mod,moe", "dense,mode_staged", "mod,mode")]


@pytest.mark.parametrize(("pattern", "rule"), CASES)
def test_a_whole_step_with_more_rows_than_live_ones(pattern, rule, monkeypatch):
    """As on CUDA: the device alone knows which rows are live, and which enter."""
    model, texts = built(pattern, rule).float(), prompts(3, 3)
    how = [{"top_k": 7}, {"temperature": 0.0}, {"min_p": 0.01, "top_k": 30}]
    wanted = [dg.generate(model, [text], seed=n, max_new_tokens=4, **how[n])[0] for n, text in enumerate(texts)]
    monkeypatch.setattr(decode, "by_kernels", lambda _: True)
    engine = Engine(model, rows=4, page=16, chunk=64)
    monkeypatch.setattr(engine.batch, "_rows", lambda: 1 << (engine.batch.live - 1).bit_length())
    requests = [engine.submit(text, Sampling(seed=n, max_new_tokens=4, **how[n])) for n, text in enumerate(texts)]
    while engine.waiting or engine.running:
        engine.turn()
    assert said([request.result for request in requests]) == said(wanted)
