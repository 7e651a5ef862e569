"""What a user might run instead: Hugging Face's LlamaForCausalLM of the same shape, as its users would run it."""

import time
from importlib.util import find_spec
from typing import Any

import torch

from depthgate.config import ModelConfig, TrainConfig
from depthgate.data.batches import Rows
from depthgate.errors import DepthgateError
from depthgate.hf.table import their_values
from depthgate.train.step import Figures, precision


def check_transformers() -> None:
    """Before anything is measured."""
    if find_spec("transformers") is None:
        raise DepthgateError("llama is asked for, but transformers is not installed: pip install 'depthgate[hf]'")


def llama(model: ModelConfig, seed: int) -> Any:
    """A LlamaForCausalLM with random weights, of the shape of a dense decoder."""
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found, unused-ignore]

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**their_values(model, torch.finfo(torch.float32).eps)))


@torch.inference_mode()
def llama_generate(net: Any, tokens: torch.Tensor, new_tokens: int) -> float:
    """Tokens a second of `generate`, greedy, after a prompt of `tokens` (B, T): the time of `new_tokens` more than one,
    so that reading the prompt is left out."""

    def seconds(count: int) -> float:
        start = time.perf_counter()
        net.generate(tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        if tokens.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(2)  # warms up
    one = seconds(1)
    return len(tokens) * new_tokens / max(1e-9, seconds(1 + new_tokens) - one)


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
