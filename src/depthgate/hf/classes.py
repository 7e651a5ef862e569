"""The classes of routed models, one set for each family, made from transformers' own when somebody asks for one."""

import warnings
from functools import cache, partial, wraps
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from depthgate.errors import DepthgateError, DepthgateWarning
from depthgate.hf.code import check_code, code_names, write_code
from depthgate.hf.config import Routing
from depthgate.hf.families import FAMILIES, PREFIX, modeling
from depthgate.hf.inputs import PADDING, argument_names, hand_down
from depthgate.hf.layer import DepthRouter, RoutedLayer
from depthgate.routing.causal import Predictor, Threshold
from depthgate.routing.routers import TopTokens

ROUTER = "depth_router"
TESTED = (5, 18)  # of transformers: the tests pass with it and with 5.22
OLDEST = (5, 17)  # all of them but a few of assisted decoding

_Config: Any = object  # in front of classes of transformers
_Model: Any = object


class RoutedConfig(_Config):  # type: ignore[misc]
    """A family's config with one more value, `depthgate`: see Routing."""

    def __post_init__(self, **kwargs: Any) -> None:
        check_code(kwargs.get("auto_map"), self.model_type)
        super().__post_init__(**kwargs)
        if self.depthgate is not None:  # as in the config that others are compared with
            Routing.read(self.depthgate, self.num_hidden_layers)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "auto_map": code_names(self.model_type)}

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        if not Path(save_directory).is_file():  # which transformers refuses
            write_code(self.model_type, Path(save_directory))
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: transformers would copy our source into whatever is saved later."""


class RoutedModel(_Model):  # type: ignore[misc]
    """A family's causal language model, some layers of which are routed."""

    _keep_in_fp32_modules_strict = (ROUTER,)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        install(self)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing, as for the config."""

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Its cache has a place for every token of every layer, and skipping leaves places empty."""
        raise DepthgateError("routed models cannot do continuous batching: use generate, on padded batches")

    generate_batch = continuous_batching_context_manager = init_continuous_batching

    def initialize_weights(self) -> None:
        """What a checkpoint does not hold: routers that are not in it are neutral."""
        from transformers.initialization import zeros_

        super().initialize_weights()
        for part in self.modules():
            if isinstance(part, TopTokens):
                neutral(part, zeros_)  # which leaves alone what was loaded


def neutral(router: TopTokens, zeros_: Any = nn.init.zeros_) -> None:
    """Make a router say 0 of every token: the gate is then 1, and the causal rule routes all."""
    said: list[Any] = [router.proj.weight, router.proj.bias]
    if isinstance(router.rule, Predictor):
        said += router.rule.down.parameters()
    if isinstance(router.rule, Threshold):
        said += router.rule.buffers()
    for tensor in said:
        zeros_(tensor)


def install(model: Any) -> None:
    """Route the layers that the model's config names."""
    routing = Routing.read(model.config.depthgate, model.config.num_hidden_layers)
    kind = model.config.model_type.removeprefix(PREFIX)
    decoder = model.base_model
    layers = getattr(decoder, FAMILIES[kind].layers)
    for i in routing.layers:
        layer = layers[i]
        router = DepthRouter(
            model.config.hidden_size,
            routing.capacity,
            gate=routing.gate,
            rule=routing.rule,
            scores_have_no_loss=routing.rule != "scores",
        )
        neutral(router)
        layer.depth_router = router.to(_device(layer), torch.float32).train(layer.training)
        layer.rule_loss = routing.rule_loss
        layer.__class__ = layer_class(kind)
        if "_old_forward" in vars(layer):  # what a hook of accelerate calls, which is on the layer already
            layer._old_forward = MethodType(type(layer).forward, layer)
    names = argument_names(type(decoder).forward)
    decoder.register_forward_pre_hook(partial(hand_down, names), with_kwargs=True)
    for part in (model, decoder):  # names that transformers looks at when it places a model on devices
        part._no_split_modules = {*(part._no_split_modules or ()), layer_class(kind).__name__}
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), ROUTER}


def _device(layer: Any) -> Any:
    """Where a layer computes: where its weights are, unless accelerate fetches them for it."""
    hooks = [getattr(part, "_hf_hook", None) for part in layer.modules()]
    given = [device for hook in hooks if (device := getattr(hook, "execution_device", None)) is not None]
    return given[0] if given else next(layer.parameters()).device


def with_padding(prepare: Any) -> Any:
    """A model's prepare_inputs_for_generation, with what its routed layers need. For a static cache transformers makes
    a mask of all places, which no longer tells which of the new tokens are padding: that goes beside it."""

    @wraps(prepare)  # transformers looks at its arguments
    def prepared(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = prepare(self, input_ids, *args, **kwargs)
        padding = kwargs.get("attention_mask")
        made: Any = inputs.get("attention_mask")
        if made is not padding and (isinstance(made, dict) or made.ndim == 4):
            ids = inputs.get("input_ids")
            given = inputs["inputs_embeds"] if ids is None else ids
            if padding is None:  # a tensor always, or a step would be compiled with one and without
                padding = torch.ones(given.shape[:2], dtype=torch.long, device=given.device)
            # Strides that grow with the text would be compiled for anew.
            inputs[PADDING] = padding[:, -given.shape[1] :].clone(memory_format=torch.contiguous_format)
        return inputs

    return prepared


@cache
def layer_class(kind: str) -> type[RoutedLayer]:
    """The routed decoder layer of a family."""
    family = FAMILIES[kind]
    base = getattr(modeling(kind), family.layer)
    body = {"family": family, "names": argument_names(base.forward)[1:], "__module__": __name__}
    return type(f"MoD{family.layer}", (RoutedLayer, base), body)


@cache
def model_classes(kind: str) -> tuple[type, type]:
    """The config and the model of a family, known to transformers' Auto classes."""
    import transformers
    from huggingface_hub.dataclasses import strict
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.models.auto import modeling_auto

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not OLDEST <= version < (6, 0):
        raise DepthgateError(f"transformers is {transformers.__version__}: install 5.18 or a later 5.x")
    if version < TESTED:
        why = "assisted decoding and cropped caches may fail with it; all else works. Install 5.18 or a later 5.x"
        warnings.warn(f"transformers is {transformers.__version__}: {why}", DepthgateWarning, stacklevel=2)
    family = FAMILIES[kind]
    base = getattr(modeling(kind), family.model)
    body = {
        "__module__": __name__,
        "__annotations__": {"depthgate": dict | None},
        "depthgate": None,
        "model_type": PREFIX + kind,
    }
    config = strict(type(f"MoD{family.config}", (RoutedConfig, base.config_class), body))
    body = {"__module__": __name__, "__annotations__": {"config": config}, "config_class": config}
    body["prepare_inputs_for_generation"] = with_padding(base.prepare_inputs_for_generation)
    model = type(f"MoD{family.model}", (RoutedModel, base), body)
    for theirs, ours in ((kind, PREFIX + kind), (base.__name__, model.__name__)):
        stored = get_checkpoint_conversion_mapping(theirs)
        if stored is not None:  # weights lie in files under other names
            register_checkpoint_conversion_mapping(ours, stored, overwrite=True)
    transformers.AutoModelForCausalLM.register(config, model, exist_ok=True)
    # By name, too: Trainer looks a causal language model up there, and would smooth the labels of others unshifted.
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[PREFIX + kind] = model.__name__
    _share_tokenizer(kind, base.config_class, config)
    # `transformers serve` looks for it in the module transformers, of which there may be two, as it exchanges itself
    # while it is imported: both are of a class of its own.
    setattr(type(transformers), model.__name__, model)
    return config, model


def _share_tokenizer(kind: str, family: type, config: type) -> None:
    """AutoTokenizer goes by the type of the model, and for some types against what the tokenizer's files say: a routed
    model has the tokenizer of its family."""
    from transformers.models.auto import tokenization_auto as auto

    if kind in auto.TOKENIZER_MAPPING_NAMES:
        auto.TOKENIZER_MAPPING_NAMES[PREFIX + kind] = auto.TOKENIZER_MAPPING_NAMES[kind]
    wrong: set[str] = getattr(auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", set())
    if kind in wrong:
        wrong.add(PREFIX + kind)
    tokenizer = auto.TOKENIZER_MAPPING.get(family, None)
    if tokenizer is not None:  # by class, too: it looks there where no file names one
        auto.AutoTokenizer.register(config, tokenizer_class=tokenizer, exist_ok=True)


def __getattr__(name: str) -> Any:
    """A class by its name, as unpickling and transformers ask for it."""
    for kind, family in FAMILIES.items():
        if name == f"MoD{family.layer}":
            return layer_class(kind)
        if name in (f"MoD{family.config}", f"MoD{family.model}"):
            return model_classes(kind)[name == f"MoD{family.model}"]
    raise AttributeError(f"module 'depthgate.hf.classes' has no attribute {name!r}")
