"""What is computed, one paper a file. A layer is an Update:

    f(x, pos=None, doc=None, cache=None, causal=False, plain=False) -> (update, plans)

x (B, T, D); pos (B, T), negative at padding, None for 0, 1, 2, ...; doc (B, T), tokens of different documents never
meet; cache, where a layer keeps keys and values of earlier tokens; causal, whether routers decide by the causal
rule; plain, a promise that rows are whole single documents in ascending order, so that no mask is needed.
The residual is added by the caller.
"""

from depthgate.layers.attention import Attention
from depthgate.layers.block import Block
from depthgate.layers.ffn import Experts, SwiGLU
from depthgate.layers.mod import MixtureOfDepths, MoD
from depthgate.layers.moe import MixtureOfExperts
from depthgate.layers.soft_moe import SoftMoE

__all__ = ["Attention", "Block", "Experts", "MixtureOfDepths", "MixtureOfExperts", "MoD", "SoftMoE", "SwiGLU"]
