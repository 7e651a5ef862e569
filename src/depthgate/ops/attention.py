"""Attention over packed documents without a mask: flash attention over runs of tokens, each looking at itself alone.

Twin: `reference.packed_attention`.
"""

import torch
from torch import Tensor


def can_pack(v: Tensor) -> bool:
    """Whether the kernel takes values (B, T, G, d) like these: half precision on CUDA, heads of at most 256."""
    return v.is_cuda and v.dtype in (torch.bfloat16, torch.float16) and v.shape[-1] <= 256 and v.shape[-1] % 8 == 0


def packed_attention(q: Tensor, k: Tensor, v: Tensor, doc: Tensor, most: int) -> Tensor:
    """Causal attention of q (B, T, H, d) to k and v (B, T, G, d) -> (B, T, H, d), within each run of equal `doc`
    (B, T): 0 0 0 1 1 2 ..., at most `most` of them, then padding, -1."""
    B, T = doc.shape
    starts = run_starts(doc, most)
    flat = [t.to(v.dtype).reshape(B * T, *t.shape[2:]) for t in (q, k, v)]
    y = torch.ops.aten._flash_attention_forward(*flat, starts, starts, T, T, 0.0, True, False)[0]
    return y.view(q.shape)  # type: ignore[no-any-return]


def run_starts(doc: Tensor, most: int) -> Tensor:
    """doc (B, T), each row 0 ... 0 1 ... 1 2 ... and -1 at its end -> (B * (most + 1) + 1,) int32: where each run
    begins in the flattened batch, as if every row had `most` of them and one of padding; then the end."""
    sizes = (doc[:, :, None] == torch.arange(most, device=doc.device)).sum(1)  # (B, most)
    padding = doc.shape[1] - sizes.sum(1, keepdim=True)
    ends = torch.cat((sizes, padding), 1).flatten().cumsum(0)
    return torch.cat((ends.new_zeros(1), ends)).int()
