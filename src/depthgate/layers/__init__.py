"""The layers, one paper a file. A layer is an Update:

    f(x, pos=None, doc=None, cache=None, causal=False, plain=False, max_documents=None) -> (update, plans)

x (B, T, D); pos (B, T), negative at padding, None for 0, 1, 2, ...; doc (B, T), tokens of different documents never
meet; cache, the keys and values of earlier tokens; causal, routers decide by the causal rule instead of the top k.
Two promises make fast paths possible: plain, that rows are whole single documents in ascending order, so that no mask
is needed; max_documents, that a row of `doc` holds at most that many documents, each one run of tokens in order.
The residual is added by the caller; `add_to` does it where tokens without an update cost nothing.
"""

from depthgate.layers.attention import Attention
from depthgate.layers.block import Block
from depthgate.layers.ffn import MLP, Experts, SwiGLU
from depthgate.layers.mod import MoD
from depthgate.layers.moe import MoE
from depthgate.layers.soft_moe import SoftMoE

__all__ = ["MLP", "Attention", "Block", "Experts", "MoD", "MoE", "SoftMoE", "SwiGLU"]
