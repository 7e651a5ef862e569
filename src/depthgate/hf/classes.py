"""Classes of routed models, made from those of transformers when they are first needed, and their registration. With
trust_remote_code=True a saved folder's own small file (auto_map) imports them."""

import warnings
from functools import cache, partial, wraps
from inspect import signature
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from depthgate.config import ModelConfig
from depthgate.errors import DepthgateError, DepthgateWarning, check_choice, installed
from depthgate.hf.decoder import RoutedDecoder
from depthgate.hf.families import FAMILIES, HEADS, OURS, PREFIX, VALUES, Routing, decoder_layers, heads, modeling
from depthgate.hf.folder import CODE, check_code, code_names
from depthgate.hf.inputs import MODES, PADDING, causal_of, places
from depthgate.hf.layer import DepthRouter, RoutedLayer, routed_layers
from depthgate.hf.parts import exchanged
from depthgate.model import Decoder
from depthgate.routing.causal import Predictor, Threshold
from depthgate.routing.routers import TopTokens

ROUTER = "depth_router"
TESTED = (5, 18)  # of transformers: the tests pass with it and with 5.22
OLDEST = (5, 17)  # all of them pass except a few of assisted decoding

_CODE_TEXT = '''"""Opens this model with from_pretrained(folder, trust_remote_code=True): pip install depthgate"""

from depthgate.hf.classes import {}
'''
_Base: Any = object  # in front of classes of transformers


class RoutedConfig(_Base):  # type: ignore[misc]
    """A family's config with two more values: `depthgate` (see Routing) and `routing_mode`."""

    depthgate: Any

    def __post_init__(self, **kwargs: Any) -> None:
        check_code(kwargs.get("auto_map"), self.model_type)
        super().__post_init__(**kwargs)
        check_choice(self.routing_mode, "routing_mode", MODES)
        if self.depthgate is not None:  # as in the config that others are compared with
            self.read()
        register_models(self.model_type.removeprefix(PREFIX))  # the Auto classes will look for them

    def read(self) -> None:
        """Refuse wrong values of `depthgate`, and fill in those that are not given."""
        self.depthgate = Routing.read(self.depthgate, self.num_hidden_layers).written()

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "auto_map": code_names(self.model_type)}

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        folder = Path(save_directory)
        if not folder.is_file():  # which transformers refuses
            names = ", ".join(name.partition(".")[2] for name in code_names(self.model_type).values())
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{CODE}.py").write_text(_CODE_TEXT.format(names), encoding="utf-8")
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: transformers would copy our source into every folder that is saved later."""


class RoutedModel(_Base):  # type: ignore[misc]
    """A family's model, some layers of which are routed."""

    _keep_in_fp32_modules_strict = (ROUTER,)
    register_for_auto_class = RoutedConfig.register_for_auto_class

    @property
    def routing_mode(self) -> str:
        """How tokens are chosen where a call does not say: "auto" (the top k while training, causally in evaluation),
        "causal" or "top_k". Calls that are given a cache choose causally in any case."""
        return str(self.config.routing_mode)

    @routing_mode.setter
    def routing_mode(self, mode: str) -> None:
        self.config.routing_mode = check_choice(mode, "routing_mode", MODES)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        install(self)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model with the routing that it has, whatever was written into its config since it was made."""
        routing: Routing | None = vars(self).get("routing")
        has = routing and {**routing.written(), "rule_loss": self.config.depthgate["rule_loss"]}
        if has and self.config.depthgate != has:
            what = "config.depthgate was changed, which does not change the model; what the model has is saved"
            warnings.warn(f"{what}. For another capacity call dg.hf.set_capacity", DepthgateWarning, stacklevel=2)
            self.config.depthgate = has
        return super().save_pretrained(*args, **kwargs)

    def init_continuous_batching(self, generation_config: Any = None, *_: Any, **__: Any) -> Any:
        """Our engine in place of transformers' batches, whose cache has a place for every token of every layer."""
        from depthgate.hf.batching_transformers import Manager

        return Manager(self, generation_config or self.generation_config)

    def initialize_weights(self) -> None:
        """Initialise the weights that a checkpoint does not hold: such routers are neutral."""
        from transformers.initialization import zeros_

        super().initialize_weights()
        for part in self.modules():
            if isinstance(part, TopTokens):
                neutral(part, zeros_)  # which leaves loaded weights alone


class DecoderConfig(RoutedConfig):
    """The config of a Decoder as it is: `depthgate` holds the values of its ModelConfig."""

    def read(self) -> None:
        """Refuse wrong values of `depthgate`; the others follow from these."""
        for name, value in vars(ModelConfig(**self.depthgate)).items():
            if name in VALUES and value is not None:
                setattr(self, VALUES[name], value)


class DecoderModel(RoutedModel):
    """A Decoder as it is. `model.eval()`, and a call with a cache, route by the causal rule, `model.train()` by the top
    k, or as `causal_routing` says. A cache is made where use_cache=True asks for it."""

    _input_embed_layer = "embed"
    _keep_in_fp32_modules_strict = ("router",)
    _tied_weights_keys = {"model.head.weight": "model.embed.weight"}  # noqa: RUF012

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super(RoutedModel, self).__init__(config, *args, **kwargs)
        self.model = Decoder(ModelConfig(**config.depthgate))
        self.post_init()

    def initialize_weights(self) -> None:
        """Do nothing: a new Decoder has made its weights."""

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        """Refuse: the vocabulary belongs to the Decoder."""
        raise DepthgateError("the vocabulary of a Decoder stays as it is: train with another --tokenizer or --vocab")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        causal_routing: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """attention_mask (B, T), 0 at padding; without one, documents begin where position_ids (B, T) do not go on by
        one."""
        from transformers import DynamicCache
        from transformers.modeling_outputs import CausalLMOutputWithPast

        from depthgate.hf.cache_transformers import decoder_stores

        cache = DynamicCache() if past_key_values is None and use_cache else past_key_values
        pos, doc = places(input_ids, attention_mask, position_ids, cache)
        stores = None if cache is None else decoder_stores(cache, len(self.model.layers), pos)
        causal = causal_of(causal_routing, cache is not None, self.config.routing_mode)
        causal = not self.training if causal is None else causal
        x, _ = self.model.hidden(input_ids, pos, doc, causal, stores)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.head(x[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)


def neutral(router: TopTokens, zeros_: Any = nn.init.zeros_) -> None:
    """Make a router score every token 0: the gate is then 1, and the causal rule routes all."""
    last = router.rule.down if isinstance(router.rule, Predictor) else router.rule
    for tensor in (*router.proj.parameters(), *last.parameters(), *last.buffers()):
        zeros_(tensor)


def install(model: Any) -> None:
    """Route the layers that the model's config names."""
    config, decoder = model.config, model.base_model
    model.routing = decoder.routing = routing = Routing.read(config.depthgate, config.num_hidden_layers)
    config.depthgate = routing.written()
    check_choice(config.routing_mode, "routing_mode", MODES)  # from_pretrained sets it after the config was made
    kind, layers = config.model_type.removeprefix(PREFIX), decoder_layers(model)
    gate, rule = routing.gate, routing.rule  # of which only `scores` has a loss that reads the scores
    for i, capacity in zip(routing.layers, routing.capacities, strict=True):
        layer = layers[i]
        if isinstance(layer, RoutedLayer):  # a decoder that was made by its own class
            continue
        router = DepthRouter(config.hidden_size, capacity, gate=gate, rule=rule, scores_have_no_loss=rule != "scores")
        neutral(router)
        if isinstance(router.rule, Threshold):
            router.rule.decay = routing.decay
        layer.depth_router = router.to(_device(layer), torch.float32).train(layer.training)
        _become(layer, layer_class(kind))
    for part, made in exchanged(decoder, kind):
        _become(part, made)
    _become(decoder, model_class(kind, "AutoModel"))
    # Names that transformers looks at when it places a model on devices.
    model._no_split_modules = {*(model._no_split_modules or ()), layer_class(kind).__name__}


def _become(module: Any, made: Any) -> None:
    """Give a module another class."""
    module.__class__ = made
    if "_old_forward" in vars(module):  # called by a hook of accelerate that is on the module already
        module._old_forward = MethodType(made.forward, module)


def uninstall(model: Any) -> None:
    """Make a routed model, its decoder and its layers those of its family again, without routers."""
    kind = model.config.model_type.removeprefix(PREFIX)
    for layer in routed_layers(model):
        del layer.depth_router
        _become(layer, getattr(modeling(kind), FAMILIES[kind].layer))
    for part, its in exchanged(model.base_model, kind, back=True):
        _become(part, its)
    for part in (model.base_model, model):
        vars(part).pop("routing", None)
        _become(part, getattr(modeling(kind), type(part).__name__.removeprefix("MoD")))
    model._no_split_modules = {*(model._no_split_modules or ())} - {layer_class(kind).__name__}


def _device(layer: Any) -> Any:
    """The device on which a layer computes: that of its weights, unless accelerate fetches them for it."""
    hooks = [getattr(part, "_hf_hook", None) for part in layer.modules()]
    given = [device for hook in hooks if (device := getattr(hook, "execution_device", None)) is not None]
    return given[0] if given else next(layer.parameters()).device


def _with_padding(prepare: Any) -> Any:
    """A model's prepare_inputs_for_generation, with what its routed layers need. For a static cache transformers makes
    a mask of all places, which no longer tells which of the new tokens are padding: that is added."""

    @wraps(prepare)  # transformers looks at its arguments
    def prepared(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = prepare(self, input_ids, *args, **kwargs)
        if getattr(inputs.get("past_key_values"), "is_compileable", False):
            new = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
            padding = kwargs.get("attention_mask")
            if padding is None:  # a tensor always, or a step would be compiled with one and without
                padding = torch.ones(new.shape[:2], dtype=torch.long, device=new.device)
            # With strides that grow with the text, every step would be compiled again.
            inputs[PADDING] = padding[:, -new.shape[1] :].clone(memory_format=torch.contiguous_format)
        return inputs

    return prepared


@cache
def layer_class(kind: str) -> type[RoutedLayer]:
    """The routed decoder layer of a family."""
    family = FAMILIES[kind]
    base = getattr(modeling(kind), family.layer)
    body = {"family": family, "names": tuple(signature(base.forward).parameters)[2:], "__module__": __name__}
    return type(f"MoD{family.layer}", (RoutedLayer, base), body)


@cache
def config_class(kind: str) -> Any:
    """The config of a family's routed models, or of Decoders as they are."""
    from huggingface_hub.dataclasses import strict
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    types = {"depthgate": dict | None, "routing_mode": str}
    value = {"__annotations__": types, "depthgate": None, "routing_mode": "auto", "__module__": __name__}
    if kind == OURS:
        return strict(type("DepthgateConfig", (DecoderConfig, PreTrainedConfig), {**value, "model_type": OURS}))
    base, body = CONFIG_MAPPING[kind], {**value, "model_type": PREFIX + kind}
    return strict(type(f"MoD{base.__name__}", (RoutedConfig, base), body))


def model_class(kind: str, head: str = "AutoModelForCausalLM") -> Any:
    """The routed models of a family under an Auto class, or Decoders as they are."""
    return _model_class(kind, head)


@cache
def _model_class(kind: str, head: str) -> Any:
    from transformers import GenerationMixin, PreTrainedModel
    from transformers.utils import output_capturing

    config = config_class(kind)
    body = {"__module__": __name__, "__annotations__": {"config": config}, "config_class": config}
    if kind == OURS:
        return type("DepthgateForCausalLM", (DecoderModel, PreTrainedModel, GenerationMixin), body)
    base = getattr(modeling(kind), heads(kind)[head])
    bases = (RoutedModel, RoutedDecoder, base) if head == "AutoModel" else (RoutedModel, base)
    model: Any = type(f"MoD{base.__name__}", bases, {**body, "names": tuple(signature(base.forward).parameters)[1:]})
    if head == "AutoModelForCausalLM":
        model.prepare_inputs_for_generation = _with_padding(base.prepare_inputs_for_generation)
    _inherit(model, base, kind)
    if base._can_record_outputs:  # as a new model does in __init__
        output_capturing._CAN_RECORD_REGISTRY[str(model)] = base._can_record_outputs
    return model


@cache
def register_models(kind: str) -> None:
    """Make the Auto classes of transformers know the routed models of a family, or Decoders as they are."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for head in ("AutoModelForCausalLM",) if kind == OURS else heads(kind):
        model = model_class(kind, head)
        getattr(transformers, head).register(model.config_class, model, exist_ok=True)
        if head != "AutoModel":  # pipelines and Trainer look a model up by its name: others' labels are not shifted
            getattr(auto, HEADS[head])[model.config_class.model_type] = model.__name__


def _inherit(model: Any, base: Any, kind: str) -> None:
    """Let routed models have the tokenizer of their family, and the names that its weights have in files."""
    from transformers import AutoTokenizer, conversion_mapping
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

    for theirs, ours in ((kind, PREFIX + kind), (base.__name__, model.__name__)):
        stored = conversion_mapping.get_checkpoint_conversion_mapping(theirs)
        if stored is not None:
            conversion_mapping.register_checkpoint_conversion_mapping(ours, stored, overwrite=True)
    if tokenizer := TOKENIZER_MAPPING.get(base.config_class, None):
        AutoTokenizer.register(model.config_class, tokenizer_class=tokenizer, exist_ok=True)


@cache
def register() -> None:
    """Make the Auto classes of transformers know routed models: `import depthgate.hf` calls it."""
    transformers = installed("transformers", "hf")
    from transformers.models.auto import configuration_auto, tokenization_auto

    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not OLDEST <= version < (6, 0):
        raise DepthgateError(f"transformers is {transformers.__version__}: install 5.18 or a later 5.x")
    if version < TESTED:
        why = "assisted decoding and cropped caches may fail with it; all else works. Install 5.18 or a later 5.x"
        warnings.warn(f"transformers is {transformers.__version__}: {why}", DepthgateWarning, stacklevel=2)
    # AutoTokenizer goes by the type of the model, for some types against the tokenizer's files: routed models have the
    # tokenizers of their family.
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    names.update({PREFIX + kind: names[kind] for kind in FAMILIES if kind in names})
    wrong: set[str] = getattr(tokenization_auto, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", set())
    wrong.update({PREFIX + kind for kind in FAMILIES if kind in wrong})
    for kind in FAMILIES.keys() & configuration_auto.CONFIG_MAPPING_NAMES.keys():  # this transformers may lack some
        transformers.AutoConfig.register(PREFIX + kind, config_class(kind), exist_ok=True)
    transformers.AutoConfig.register(OURS, config_class(OURS), exist_ok=True)


def __getattr__(name: str) -> Any:
    """A class by its name, as unpickling, saved folders and transformers ask for it."""
    if name in ("DepthgateConfig", "DepthgateForCausalLM"):
        return config_class(OURS) if name == "DepthgateConfig" else model_class(OURS)
    for kind, family in FAMILIES.items() if name.startswith("MoD") else ():
        makers: dict[str, Any] = {family.layer: layer_class, family.config: config_class}
        makers |= {model: partial(model_class, head=head) for head, model in heads(kind).items()}
        if name.removeprefix("MoD") in makers:
            return makers[name.removeprefix("MoD")](kind)
    raise AttributeError(f"module 'depthgate.hf.classes' has no attribute {name!r}")
