"""Hugging Face: routed decoder layers inside transformers models. Names load on first use, and transformers with them.

    model = dg.hf.convert(AutoModelForCausalLM.from_pretrained(...), capacity=0.5, layers="every_other")

`model.train()` routes by the top k of each document; `model.eval()`, and whoever hands in a cache, by the causal rule,
token by token: what is generated with a cache is then what is computed without one. `model(..., causal_routing=...)`
says it for one call.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "depthgate.hf.calibrate": ("layer_changes",),
    "depthgate.hf.config": ("Routing",),
    "depthgate.hf.conversion": ("convert", "routed_layers", "set_capacity"),
    "depthgate.hf.decoder": ("export", "to_decoder"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

if TYPE_CHECKING:
    from depthgate.hf.calibrate import layer_changes as layer_changes
    from depthgate.hf.config import Routing as Routing
    from depthgate.hf.conversion import convert as convert
    from depthgate.hf.conversion import routed_layers as routed_layers
    from depthgate.hf.conversion import set_capacity as set_capacity
    from depthgate.hf.decoder import export as export
    from depthgate.hf.decoder import to_decoder as to_decoder

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name.startswith("MoD"):  # a class of one family, as transformers asks for it
        return getattr(import_module("depthgate.hf.classes"), name)
    raise AttributeError(f"module 'depthgate.hf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
