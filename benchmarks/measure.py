"""Shared by the scripts in this folder: options, the report, and the Llama of transformers that others would run."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import torch

from depthgate.config import ModelConfig, TrainConfig
from depthgate.console import print_table
from depthgate.data.batches import Rows
from depthgate.device import machine, resolve_device
from depthgate.errors import DepthgateError
from depthgate.train.step import Figures, precision

Row = dict[str, Any]


def whole_numbers(text: str) -> list[int]:
    """Options such as 256,512."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise ValueError(text)
    return found


def parser(about: str) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    found = argparse.ArgumentParser(description=about.split("\n")[0])
    found.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    found.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    found.add_argument("--seed", type=int, default=0)
    found.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return found


def main(run: Callable[[argparse.Namespace], int | None], options: argparse.Namespace) -> None:
    """Run a script; an error of depthgate is one line, and exit code 2."""
    try:
        resolve_device(options.device)
        run(options)
    except DepthgateError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def say(text: str) -> None:
    """Progress, on stderr so that stdout holds results alone."""
    print(text, file=sys.stderr, flush=True)


def report(
    options: argparse.Namespace, rows: list[Row], title: str, columns: dict[str, Callable[[Row], str]], **about: Any
) -> None:
    """One JSON object, or a table whose columns are functions of a row. Raises if a row holds an error."""
    about = {**machine(options.device), **about}
    if options.json:
        print(json.dumps({"machine": about, "config": vars(options), "rows": rows}))
    else:
        cells = [_cells(row, list(columns.values())) for row in rows]
        print_table(list(columns), cells, title)
        print(", ".join(f"{key} {value}" for key, value in about.items()))
    if wrong := [f"{row.get('model') or row['layer']}: {row['error']}" for row in rows if "error" in row]:
        raise DepthgateError(f"wrong answer, not timed: {'; '.join(wrong)}")


def _cells(row: Row, columns: Sequence[Callable[[Row], str]]) -> list[str]:
    return [columns[0](row), "wrong answer"] if "error" in row else [column(row) for column in columns]


def figure(name: str, digits: int = 0, scale: float = 1.0) -> Callable[[Row], str]:
    """A column: this figure of a row times `scale`, or - where it has none."""
    return lambda row: "-" if row.get(name) is None else f"{row[name] * scale:,.{digits}f}"


def graph(call: Callable[[], Any], calls: int = 1) -> Callable[[], None]:
    """So many calls, one after another, as one CUDA graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        for _ in range(calls):
            call()
    return made.replay


def check_transformers() -> None:
    """Refuse to start where transformers is missing."""
    if find_spec("transformers") is None:
        raise DepthgateError("transformers is asked for, but is not installed: pip install 'depthgate[hf]'")


def llama(model: ModelConfig, seed: int) -> Any:
    """A LlamaForCausalLM with random weights, of the shape of a dense decoder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from depthgate.hf.decoder_weights import their_values

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**their_values(model, torch.finfo(torch.float32).eps)))


def number(value: float | None) -> str:
    """A number of a table, or nothing."""
    return "" if value is None else f"{value:,.3g}" if value < 100 else f"{value:,.0f}"


@torch.inference_mode()
def llama_generate(net: Any, tokens: torch.Tensor, new_tokens: int, **options: Any) -> float:
    """Tokens a second of `generate`, greedy, after a prompt of `tokens` (B, T) and a first token. A run of the same
    length warms it up, so that a static cache has the size that was compiled for."""
    times: list[float] = []

    def told(*_: Any) -> torch.Tensor:
        if tokens.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

    options |= {"max_new_tokens": 1 + new_tokens, "min_new_tokens": 1 + new_tokens, "stopping_criteria": [told]}
    for _ in range(2):
        times.clear()
        net.generate(tokens, do_sample=False, pad_token_id=0, **options)
    return len(tokens) * new_tokens / max(1e-9, times[-1] - times[0])


class LlamaStep:
    """A training step: weights in fp32 and products in bf16 as ours, compiled as ours, fused AdamW, clipped gradients.
    Its documents are not kept apart."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.llama = llama(config.model, config.seed).to(config.device)
        self.run = torch.compile(self.llama, dynamic=False) if config.compile else self.llama
        self.optimizer = torch.optim.AdamW(self.llama.parameters(), lr=1e-4, fused=True)

    def __call__(self, rows: Rows) -> Figures:
        device, parts = self.config.device, self.config.accumulate
        tokens = rows.tokens.pin_memory() if device == "cuda" else rows.tokens
        total = torch.zeros((), device=device)
        for ids in tokens.to(device, non_blocking=True).chunk(parts):
            with precision(self.config, device):
                loss = self.run(input_ids=ids, labels=ids, use_cache=False).loss / parts
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.llama.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Figures(torch.stack([total, norm]))
