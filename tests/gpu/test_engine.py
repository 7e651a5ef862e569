"""The engine on CUDA: its kernels are their twins, its tokens those of the plain path. Skipped without a device."""

from itertools import product

import pytest
import torch

import depthgate as dg
from depthgate.generation.config import Sampling
from depthgate.generation.engine import Engine
from depthgate.ops import decode
from tests.generation.models import built, prompts, said

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
PATTERNS = ("dense,mod", "mod,moe", "dense,mode_staged", "mod,mode")
CASES = [("dense", "scores"), ("dense,random", "scores"), *product(PATTERNS, ("scores", "predictor", "threshold"))]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def rows(total, taken):
    places = torch.zeros(total, dtype=torch.int64, device="cuda")
    places[: len(taken)] = torch.tensor(taken, dtype=torch.int64)
    many, turns = (torch.tensor(each, dtype=torch.int32, device="cuda") for each in (len(taken), [0] * 256))
    return decode.Rows(places, many, turns=turns)


def on_cpu(each):
    if isinstance(each, torch.Tensor):
        return each.double().cpu() if each.is_floating_point() else each.cpu()
    if isinstance(each, tuple):
        return type(each)(*map(on_cpu, each)) if hasattr(each, "_fields") else tuple(map(on_cpu, each))
    return each


def near(ours, theirs):
    assert torch.isfinite(ours).all()
    error = (ours.double().cpu() - theirs).norm() / theirs.norm().clamp(min=1e-9)
    assert error < TOLERANCE[ours.dtype], error


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("total", [1, 3, 16, 40])
def test_kernels_are_their_twins(total, dtype):
    torch.manual_seed(total)
    new = lambda *shape: torch.randn(*shape, device="cuda", dtype=dtype)  # noqa: E731
    for taken in ([], [total - 1], list(range(total))):
        some, n = rows(total, taken), len(taken)
        x, weight, norm, add = new(total, 96), new(80, 96), new(96), new(total, 96)
        for options in ({}, {"norm": norm}, {"norm": norm, "add": add}, {"norm": norm, "glu": True}, {"gather": False}):
            y = decode.linear(x, some, weight, **options)
            cut = {**options, **({"add": add[:n]} if "add" in options else {})}
            source = x[:n] if options.get("gather") is False else x
            theirs = decode.linear(
                on_cpu(source), on_cpu(some), on_cpu(weight), **{k: on_cpu(v) for k, v in cut.items()}
            )
            near(y[:n], theirs)
        out, hidden, more, gates = new(total, 80), new(total, 96), new(total, 80), torch.rand(total, device="cuda")
        theirs = on_cpu(out)
        decode.add_linear(theirs, on_cpu(some), on_cpu(weight), on_cpu(hidden)[:n], on_cpu(more)[:n], on_cpu(gates)[:n])
        decode.add_linear(out, some, weight, hidden, more, gates)
        near(out, theirs)
        for shift, norms, splits in product((True, False), (True, False), (1, 4)):
            H, G, d, size = 8, 2, 32, 64
            kv, table = (
                new(total * 5 + 1, 3, 2, G, size, d),
                torch.randperm(total * 5, device="cuda").int().view(total, 5) + 1,
            )
            lengths = torch.tensor([(0, 1, 63, 64, 65, 300)[i % 6] for i in range(total)], device="cuda").int()
            heads = decode.Heads(H, G, d, new(d) if norms else None, new(d) if norms else None, None)
            pages = decode.Pages(kv[:, 1], table, lengths, new(total, G, d) if shift else None)
            cos, sin = torch.randn(2, total, d // 2, device="cuda")
            qkv, theirs = new(total, (H + 2 * G) * d), on_cpu(pages)
            y = decode.attend(qkv, some, cos, sin, heads, pages, splits)
            if n:
                near(
                    y[:n], decode.attend(on_cpu(qkv)[:n], on_cpu(some), on_cpu(cos), on_cpu(sin), on_cpu(heads), theirs)
                )
            near(pages.kv, theirs.kv)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("wanted", [True, False])
def test_a_routed_layer_of_one_row_is_its_twin(wanted, dtype):
    torch.manual_seed(0)
    new = lambda *shape: torch.randn(*shape, device="cuda", dtype=dtype)  # noqa: E731
    for length, gate in product((0, 5, 300), ("one_plus_tanh", "raw")):
        router = *(torch.randn(n, device="cuda") for n in (768, 1)), torch.tensor([-1e9 if wanted else 1e9]).cuda()
        norms = [(new(768).abs(), 1e-5) for _ in range(2)]
        weights = [new(*shape) / shape[1] ** 0.5 for shape in ((1024, 768), (768, 512), (4000, 768), (768, 2000))]
        layer = decode.Layer((*router, True, gate), norms[0], *weights[:2], norms[1], *weights[2:])
        heads = decode.Heads(8, 4, 64, new(64).abs(), new(64).abs(), None)
        table, lengths = (torch.tensor(each, device="cuda").int() for each in ([[4, 1, 5, 2, 3, 6]], [length]))
        pages = decode.Pages(new(7, 2, 4, 64, 64), table, lengths, new(1, 4, 64))
        x, (cos, sin), theirs = new(1, 768), torch.randn(2, 1, 32, device="cuda"), on_cpu(pages)
        y, entered, turns = on_cpu(x), torch.zeros(1).int(), torch.zeros(1, device="cuda").int()
        asked = [each.cuda() for each in (entered, torch.tensor(1).int())]
        known = on_cpu(layer)._replace(router=(*(each.cpu() for each in router), True, gate))
        decode.routed_layer(y, 1, entered, turns.cpu(), known, *map(on_cpu, (cos, sin, heads)), theirs, 4)
        for _ in range(2):  # the programs that wait for each other leave their counter ready
            mine = pages._replace(kv=pages.kv.clone(), last_key=pages.last_key.clone())
            decode.routed_layer(x_ := x.clone(), asked[1], asked[0], turns, layer, cos, sin, heads, mine, 4)
            near(x_, y)
            near(mine.kv, theirs.kv)
            near(mine.last_key, theirs.last_key)
            assert bool(asked[0]) is wanted


@pytest.mark.parametrize("pattern", ["dense", "dense,mod", "mod,mode"])
def test_bf16_tokens_do_not_depend_on_the_company_within_a_tile(pattern):
    """Sums of a row have one order in all batches of 2 to 16 rows, and prompts are read one by one."""
    model, texts = built(pattern, "threshold").bfloat16().cuda(), prompts(12, 4)

    def written(together):
        engine = Engine(model, rows=16, page=16, chunk=64)
        made = []
        for text in together:
            made.append(engine.submit(text, Sampling(max_new_tokens=30, temperature=0)))
            engine.turn()
        while engine.waiting or engine.running:
            engine.turn()
        return [each.result.tokens for each in made]

    every = written(texts)
    for n in range(0, 12, 3):
        assert written(texts[n : n + 3]) == every[n : n + 3]


@pytest.mark.parametrize(("pattern", "rule"), CASES)
def test_tokens_are_those_of_the_plain_path(pattern, rule):
    model, texts = built(pattern, rule).float().cuda(), prompts(7, 6)
    for temperature in (0.0, 0.8):
        options = {"max_new_tokens": 12, "temperature": temperature, "seed": list(range(7))}
        ours = dg.generate(model, texts, **options, engine=True)
        assert said(ours) == said(dg.generate(model, texts, **options, engine=False))


@pytest.mark.parametrize("pattern", ["dense", "dense,mod", "mod,mode"])
def test_requests_that_join_and_leave_change_no_token(pattern):
    model = built(pattern, "threshold").float().cuda()
    engine = Engine(model, rows=4, memory=128, page=16, chunk=16)
    texts = prompts(12, 3)
    made, cancelled = [], []
    for n, text in enumerate(texts):
        options = {"max_new_tokens": 3 + 3 * (n % 7), "temperature": (0.0, 0.9)[n % 2], "seed": n}
        options |= {"top_k": 5} if n % 3 == 0 else {"repetition_penalty": 1.3, "top_p": 0.8}
        made.append((engine.submit(text, Sampling(**options)), options))
        for _ in range(n % 4):
            engine.turn()
        if n % 5 == 4:
            engine.cancel(made[-2][0])
            cancelled.append(made[-2][0])
    while engine.waiting or engine.running:
        engine.turn()
    for (request, options), text in zip(made, texts, strict=True):
        (alone,) = dg.generate(model, [text], **options, engine=False)
        if request.result.finish == "cancelled":
            assert request in cancelled
            assert request.result.tokens == alone.tokens[: len(request.result.tokens)]
        else:
            assert said([request.result]) == said([alone])
    assert engine.batch.live == 0


@pytest.mark.parametrize("pattern", ["dense", "dense,mod", "mod", "dense,random", "mod,mode"])
def test_prompts_that_are_replayed_are_the_same(pattern):
    model, texts = built(pattern, "threshold").float().cuda(), [*prompts(12, 3), list(range(40)), [3] * 50, [5] * 50]
    engine = Engine(model, rows=3, page=16)
    for text in texts * 2:
        alone = dg.generate(model, text, max_new_tokens=4, seed=3, engine=False)
        request = engine.submit(text, Sampling(max_new_tokens=4, seed=3))
        while engine.waiting or engine.running:
            engine.turn()
        assert said([request.result]) == said(alone)
    assert any(engine.prompts._kept.values()) == (pattern != "mod,mode")
