"""Hugging Face models, dense and converted: tokens/s of reading, time over FLOPs, training passes, decoding.

    python benchmarks/hf_speed.py --shapes 135m,1b --device cuda --dtype bfloat16

Shapes are those of SmolLM2-135M and Llama-3.2-1B; weights are random. Every other layer is routed, by thresholds that
are calibrated on random tokens, so that the causal rule takes about the capacity. A JSON line for each figure comes as
soon as it is known, a table at the end. "over FLOPs" is the time as a share of the dense model's, divided by the FLOPs
as a share of the dense model's: 1 if every FLOP that is left out is paid for.

"dense, fused" is a control: the dense model with the norms and rotary positions of a converted one, a kernel each where
nothing is compiled and no gradient is asked for.

Passes: causal (evaluation, as a prompt is read), top_k (evaluation of what training computes), train (forward and
backward). Ways: eager, compiled (torch.compile of the model), layers (each compiled, as `finetune --compile` does),
graphs (torch.compile with mode="reduce-overhead"). A model is timed only if, with two layers in float32, it gives the
logits of the dense one at capacity 1, and compiled what it gives in eager mode. Decoding: transformers' generate, and
the engine on the same weights.
"""

import argparse
import copy
import gc
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import depthgate as dg
import depthgate.hf
import engine
import measure
from depthgate.device import count_flops, interleaved, machine
from depthgate.hf.parts import exchanged

SHAPES = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
    "135m": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    | {"num_attention_heads": 9, "num_key_value_heads": 3},
    "1b": {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"num_attention_heads": 32, "num_key_value_heads": 8},
}
MODES = {"compiled": None, "graphs": "reduce-overhead"}
Asked, Row, Cases = argparse.Namespace, dict[str, Any], dict[str, Callable[[], Any]]
Part = tuple[str, str, int, str]  # shape, pass, batch, way
Job = Any  # a part, or `check` with its arguments


def dense_model(asked: Asked, shape: str, dtype: str, **changes: Any) -> Any:
    torch.manual_seed(asked.seed)
    known = {"max_position_embeddings": 8192, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
    with torch.device(asked.device):
        return LlamaForCausalLM(LlamaConfig(**{**SHAPES[shape], **known, **changes})).to(getattr(torch, dtype)).eval()


def converted(asked: Asked, dense: Any, capacity: float) -> Any:
    """The model with every other layer routed, which takes about `capacity` of random tokens by its thresholds."""
    model = dg.hf.convert(copy.deepcopy(dense), capacity, rule="threshold", gate="straight_through")
    dg.hf.calibrate(model, ids_for(asked, model, 4, seed=7))
    return model


def fused(dense: Any) -> Any:
    """A control: the dense model with the norms and the attention that all layers of a converted one have."""
    model = copy.deepcopy(dense)
    for part, made in exchanged(model.base_model, model.config.model_type):
        part.__class__ = made
    return model


def models_of(asked: Asked, shape: str) -> dict[str, Any]:
    """The dense model, the control, and one model of each capacity."""
    dense = dense_model(asked, shape, asked.dtype)
    models = {"dense": dense, "dense, fused": fused(dense)}
    return models | {f"{each}": converted(asked, dense, each) for each in asked.capacities}


def ids_for(asked: Asked, model: Any, batch: int, seed: int = 1) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (batch, asked.context), generator=chance).to(asked.device)


def check(asked: Asked, shape: str, capacity: float) -> None:
    """Raise if a model of two layers in float32 is not the dense one at capacity 1, or not itself when compiled."""
    torch.backends.cuda.matmul.allow_tf32 = False
    dense = dense_model(asked, shape, "float32", num_hidden_layers=2)
    model, ids = converted(asked, dense, capacity), ids_for(asked, dense, 2)
    whole = dg.hf.convert(copy.deepcopy(dense), 1.0)
    with torch.no_grad():
        same(dense(ids).logits, whole(ids, causal_routing=False).logits, "at capacity 1 and dense")
        for causal in (True, False):
            want = model(ids, use_cache=False, causal_routing=causal).logits
            call = torch.compile(model, dynamic=False)
            same(want, call(ids, use_cache=False, causal_routing=causal).logits, "compiled and not")
    torch.compiler.reset()


def same(want: torch.Tensor, got: torch.Tensor, what: str) -> None:
    """Raise unless nearly all logits are equal: a score within rounding of a threshold may fall either way."""
    apart = ((want - got).abs().amax(-1) > 1e-3 * want.abs().max()).float().mean().item()
    if apart > 0.01:
        raise dg.DepthgateError(f"{what}: {apart:.1%} of the tokens have other logits, so nothing is timed")


def way_of(model: Any, way: str) -> Callable[..., Any]:
    """The model as it is called in one of the ways; layers are compiled in place."""
    if way == "layers":
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    return torch.compile(model, dynamic=False, mode=MODES[way]) if way in MODES else model


def call_of(call: Any, model: Any, ids: torch.Tensor, kind: str) -> Callable[[], Any]:
    """One pass: the logits of the last token, or a step of training without its update."""
    more = {} if kind != "top_k" or not dg.hf.routed_layers(model) else {"causal_routing": False}

    def read() -> Any:
        with torch.no_grad():
            return call(ids, use_cache=False, logits_to_keep=1, **more).logits

    def learn() -> None:
        call(ids, use_cache=False, logits_to_keep=1).logits.float().logsumexp(-1).mean().backward()
        model.zero_grad(set_to_none=True)

    return learn if kind == "train" else read


def prepared(asked: Asked, part: Part, models: dict[str, Any]) -> tuple[dict[str, int], dict[str, float], Cases]:
    """The calls of a pass, by model, each made three times; their FLOPs; and the seconds that these calls took."""
    _, kind, batch, way = part
    cases: Cases = {}
    flops, begun = dict[str, int](), dict[str, float]()
    for name, model in models.items():
        ids = ids_for(asked, model.train(kind == "train"), batch)
        plain = call_of(model, model, ids, kind)
        plain()  # finds bounds of slots: a pass that lacks some is made twice
        flops[name] = count_flops(plain)
        mine, start = copy.deepcopy(model) if way == "layers" else model, time.perf_counter()
        cases[name] = call_of(way_of(mine, way), mine, ids, kind)
        for _ in range(3):  # compiles, finds bounds of slots, compiles again
            cases[name]()
        begun[name] = time.perf_counter() - start
    return flops, begun, cases


def timed(asked: Asked, part: Part, flops: dict[str, int], begun: dict[str, float], cases: Cases) -> list[Row]:
    """A row for each model, called by turns."""
    shape, kind, batch, way = part
    taken = {name: statistics.median(of) for name, of in interleaved(cases, asked.repeats, 2, asked.device).items()}
    found = []
    for name, seconds in taken.items():
        ratio, share = seconds / taken["dense"], flops[name] / flops["dense"]
        row = {"shape": shape, "model": name, "what": kind, "way": way, "batch": batch}
        row |= {"tokens_per_second": batch * asked.context / seconds, "milliseconds": 1e3 * seconds}
        found.append(row | {"flops": share, "time": ratio, "over_flops": ratio / share, "first_calls": begun[name]})
    return found


def in_process(asked: Asked, job: Job, told: Any) -> None:
    """What a process does: check the answers of a model, or prepare a pass, wait for its turn, and time it."""
    try:
        if callable(job[0]):
            job[0](asked, *job[1:])
            told.send([])
            return
        ready = prepared(asked, job, models_of(asked, job[0]))
        told.send(None)
        told.recv()
        told.send(timed(asked, job, *ready))
    except BaseException as error:
        told.send(f"{type(error).__name__}: {error}")


def side_by_side(asked: Asked, jobs: list[Job]) -> Iterator[Row]:
    """Check and compile all at once, a process each; then time one after another, when no other process computes."""
    context, started = multiprocessing.get_context("spawn"), []
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    for job in jobs:
        mine, theirs = context.Pipe()
        process = context.Process(target=in_process, args=(asked, job, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append((job, process, mine))

    def answer(job: Job, mine: Any) -> Any:
        got = mine.recv()
        if isinstance(got, str):
            raise dg.DepthgateError(f"{job}: {got}")
        return got

    waiting = [each for each in started if answer(each[0], each[2]) is None]
    for job, process, mine in waiting:
        mine.send(None)
        yield from answer(job, mine)
        process.join()  # its memory is free


def decoding(asked: Asked, shape: str, models: dict[str, Any], show: Callable[..., None]) -> None:
    """Tokens a second of generate, and of the engine's steps with the same weights."""
    for batch in asked.batches:
        speeds: dict[str, dict[str, float]] = {"generate": {}, "engine": {}}
        for name, model in models.items():
            model.eval()
            with torch.inference_mode():
                ids = ids_for(asked, model, batch)
                speeds["generate"][name] = measure.llama_generate(model, ids, asked.new_tokens)
            decoder = dg.hf.to_decoder(model).requires_grad_(False)
            how = Asked(device=asked.device, warmup=5, steps=60, contexts=[asked.context])
            if decoder.config.routed:
                engine._calibrated(decoder)
            speeds["engine"][name] = engine._timed(decoder, batch, asked.context, how)["tokens_per_second"]
            del decoder
        for way, found in speeds.items():
            for name, speed in found.items():
                ratio = found["dense"] / speed
                show(shape=shape, model=name, what="decode", way=way, batch=batch, tokens_per_second=speed, time=ratio)


def run(asked: Asked) -> None:
    rows: list[Row] = []

    def show(**row: Any) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    print(json.dumps({"machine": machine(asked.device), "options": vars(asked)}), flush=True)
    checks = [(check, shape, capacity) for shape in asked.shapes for capacity in asked.capacities]
    parts = [(s, k, b, w) for s in asked.shapes for k in asked.passes for b in asked.batches for w in asked.ways]
    if asked.side_by_side:
        for row in side_by_side(asked, [*checks, *(part for part in parts if part[3] != "eager")]):
            show(**row)
    else:
        for each, *given in checks:
            each(asked, *given)
    for shape in asked.shapes:
        models = models_of(asked, shape)
        for part in parts:
            if part[0] == shape and (part[3] == "eager" or not asked.side_by_side):
                torch.compiler.reset()
                for row in timed(asked, part, *prepared(asked, part, models)):
                    show(**row)
        if asked.new_tokens:
            decoding(asked, shape, models, show)
        del models
        gc.collect()
    columns = ("what", "way", "batch", "tokens_per_second", "flops", "time", "over_flops", "first_calls")
    shown = {key: (lambda row, key=key: _cell(row.get(key))) for key in columns}
    named = {"model": lambda row: f"{row['shape']} {row['model']}"}
    measure.report(Asked(**{**vars(asked), "json": False}), rows, "Hugging Face models", {**named, **shown})


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else measure.number(value)


def options() -> argparse.ArgumentParser:
    found = measure.parser(__doc__)
    words = {"type": lambda text: text.split(",")}
    found.add_argument("--shapes", **words, default=["tiny"], help="of tiny, 135m, 1b")
    found.add_argument("--capacities", type=lambda text: [float(e) for e in text.split(",")], default=[0.5, 0.25])
    found.add_argument("--passes", **words, default=["causal"], help="of causal, top_k, train")
    found.add_argument("--ways", **words, default=["eager", "compiled"], help="of eager, compiled, layers, graphs")
    found.add_argument("--batches", type=measure.whole_numbers, default=[1, 16])
    found.add_argument("--context", type=int, default=1024, help="tokens of a sequence")
    found.add_argument("--repeats", type=int, default=15)
    found.add_argument("--side_by_side", action="store_true", help="check and compile in a process each, all at once")
    found.add_argument("--new_tokens", type=int, default=64, help="tokens that generate writes; 0: no decoding")
    return found


if __name__ == "__main__":
    measure.main(run, options().parse_args())
