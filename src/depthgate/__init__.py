"""depthgate: transformers that spend compute where tokens need it. Names load on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
_HOMES = {
    "depthgate.config": ("ModelConfig",),
    "depthgate.errors": ("DepthgateError",),
    "depthgate.generation.calls": ("generate", "stream"),
    "depthgate.drop_in": ("MixtureOfDepths", "MixtureOfExperts", "SoftMoE"),
    "depthgate.loading": ("load",),
    "depthgate.model": ("Decoder",),
    "depthgate.vision": ("ViTConfig",),
    "depthgate.vit": ("ViT",),
    "depthgate.encoders": ("MoDEncoder", "SoftMoEBlock", "SoftMoEEncoder"),
    "depthgate.recipes": ("presets",),
    "depthgate.recording": ("record",),
    "depthgate.routing.training": ("set_loss_scale",),
    "depthgate.routing": ("Groups", "Slots", "Soft", "SoftSlots", "TopExperts", "TopTokens"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = ("hf", "layers", "ops", "routing", "view")

if TYPE_CHECKING:
    from depthgate import hf as hf
    from depthgate import layers as layers
    from depthgate import ops as ops
    from depthgate import routing as routing
    from depthgate import view as view
    from depthgate.config import ModelConfig as ModelConfig
    from depthgate.drop_in import MixtureOfDepths as MixtureOfDepths
    from depthgate.drop_in import MixtureOfExperts as MixtureOfExperts
    from depthgate.drop_in import SoftMoE as SoftMoE
    from depthgate.encoders import MoDEncoder as MoDEncoder
    from depthgate.encoders import SoftMoEBlock as SoftMoEBlock
    from depthgate.encoders import SoftMoEEncoder as SoftMoEEncoder
    from depthgate.errors import DepthgateError as DepthgateError
    from depthgate.generation.calls import generate as generate
    from depthgate.generation.calls import stream as stream
    from depthgate.loading import load as load
    from depthgate.model import Decoder as Decoder
    from depthgate.recipes import presets as presets
    from depthgate.recording import record as record
    from depthgate.routing import Groups as Groups
    from depthgate.routing import Slots as Slots
    from depthgate.routing import Soft as Soft
    from depthgate.routing import SoftSlots as SoftSlots
    from depthgate.routing import TopExperts as TopExperts
    from depthgate.routing import TopTokens as TopTokens
    from depthgate.routing.training import set_loss_scale as set_loss_scale
    from depthgate.vision import ViTConfig as ViTConfig
    from depthgate.vit import ViT as ViT

__all__ = ["__version__", *sorted(_HOME), *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _MODULES:
        return import_module(f"depthgate.{name}")
    from depthgate.errors import near

    raise AttributeError(f"module 'depthgate' has no attribute {name!r}{near(name, __all__)}")


def __dir__() -> list[str]:
    return __all__
