"""What a user might train instead: Hugging Face's LlamaForCausalLM of the same shape, as its users would train it."""

import time
from typing import Any

import torch

from depthgate.config import ModelConfig, TrainConfig
from depthgate.ops.sizes import swiglu_hidden
from depthgate.train.batches import Rows
from depthgate.train.step import Figures, precision


def llama(model: ModelConfig, seed: int) -> Any:
    """A LlamaForCausalLM with random weights, of the shape of a dense decoder."""
    from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found, unused-ignore]

    shape = LlamaConfig(
        vocab_size=model.vocab,
        hidden_size=model.dim,
        intermediate_size=model.hidden or swiglu_hidden(model.dim),
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads or model.heads,
        max_position_embeddings=model.context,
        tie_word_embeddings=model.tied,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(shape)


@torch.inference_mode()
def llama_generate(
    model: ModelConfig, batch: int, context: int, new_tokens: int, device: str, dtype: str, seed: int
) -> float:
    """Tokens a second of `generate`, greedy, after a prompt of `context` random tokens: the time of `new_tokens` more
    than one, so that reading the prompt is left out."""
    net = llama(model, seed).to(device, getattr(torch, dtype)).eval()
    ids = torch.randint(model.vocab, (batch, context), device=device)

    def seconds(count: int) -> float:
        start = time.perf_counter()
        net.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(2)  # warms up
    one = seconds(1)
    return batch * new_tokens / max(1e-9, seconds(1 + new_tokens) - one)


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
