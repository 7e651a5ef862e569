"""What a user might train instead: Hugging Face's LlamaForCausalLM of the same shape, as its users would train it."""

import torch

from depthgate.config import TrainConfig
from depthgate.ops.sizes import swiglu_hidden
from depthgate.train.batches import Rows
from depthgate.train.step import Figures, precision


class LlamaStep:
    """A training step: weights in fp32 and products in bf16 as ours, compiled as ours, fused AdamW, clipped gradients.
    Its documents are not kept apart."""

    def __init__(self, config: TrainConfig) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM  # type: ignore[import-not-found, unused-ignore]

        model = config.model
        shape = LlamaConfig(
            vocab_size=model.vocab,
            hidden_size=model.dim,
            intermediate_size=swiglu_hidden(model.dim),
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads,
            max_position_embeddings=model.context,
            tie_word_embeddings=model.tied,
            use_cache=False,
        )
        torch.manual_seed(config.seed)
        self.config = config
        self.llama = LlamaForCausalLM(shape).to(config.device)
        self.run = torch.compile(self.llama, dynamic=False) if config.compile else self.llama
        self.optimizer = torch.optim.AdamW(self.llama.parameters(), lr=1e-4, fused=True)

    def __call__(self, rows: Rows) -> Figures:
        device, parts = self.config.device, self.config.accumulate
        tokens = rows.tokens.pin_memory() if device == "cuda" else rows.tokens
        total = torch.zeros((), device=device)
        for ids in tokens.to(device, non_blocking=True).chunk(parts):
            with precision(self.config, device):
                loss = self.run(input_ids=ids, labels=ids).loss / parts
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.llama.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Figures(torch.stack([total, norm]))
