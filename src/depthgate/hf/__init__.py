"""Hugging Face: routed decoder layers inside transformers models.

    import depthgate.hf                                      # AutoModelForCausalLM now opens converted models
    model = depthgate.hf.convert(AutoModelForCausalLM.from_pretrained(...), capacity=0.5, layers="every_other")

`model.train()` routes by the top k of each document, `model.eval()` and calls with a cache by the causal rule.
`model.routing_mode = "causal"` or `"top_k"`, saved with the model, is the same in both; `causal_routing=` of one call.
"""

from importlib.util import find_spec

from depthgate.hf.classes import register
from depthgate.hf.conversion import convert, layer_changes, set_capacity, to_dense
from depthgate.hf.decoder_weights import to_decoder
from depthgate.hf.export import export
from depthgate.hf.families import Routing
from depthgate.hf.layer import routed_layers
from depthgate.hf.recover import calibrate

__all__ = ["Routing", "calibrate", "convert", "export", "layer_changes", "register", "routed_layers"]
__all__ += ["set_capacity", "to_decoder", "to_dense"]

if find_spec("transformers") is not None:
    register()
