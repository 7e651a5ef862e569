"""A transformers model as the rest of the library sees a language model: packed rows in; logits, loss, plans out."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthgate.data.tokenizer import HFTokenizer, read_tokenizer
from depthgate.errors import DepthgateError
from depthgate.hf.code import check_config
from depthgate.hf.conversion import routed_layers
from depthgate.hf.families import FAMILIES, PREFIX, modeling
from depthgate.hf.folder import load
from depthgate.hf.tokenizer_files import load_tokenizer
from depthgate.model import Output
from depthgate.ops.loss import linear_cross_entropy
from depthgate.routing.plan import Plans, Slots

_CONTEXT = 1024  # tokens read at once unless the caller says otherwise: the logits of a large vocabulary have to fit


class ModelTokenizer(HFTokenizer):
    """The tokenizer in a model's folder. Texts begin with the tokens that it puts before a text, such as <s>: many
    models have never seen a text that begins differently."""

    def __init__(self, inner: Any, end: str | None) -> None:
        super().__init__(inner, end)
        try:
            bare = inner.encode("a", add_special_tokens=False)
        except Exception:  # of a vocabulary of words, none of which stands for the unknown ones
            bare = inner.encode(next(iter(inner.get_vocab(with_added_tokens=False))), add_special_tokens=False)
        bare, whole = bare.ids, inner.post_process(bare).ids
        starts = [i for i in range(len(whole)) if whole[i : i + len(bare)] == bare]
        self.prefix: list[int] = whole[: starts[0]] if starts else []

    def encode_many(self, texts: Any) -> list[list[int]]:
        return [[*self.prefix, *ids] for ids in super().encode_many(texts)]

    def fingerprint(self) -> str:
        return f"{self.prefix} {super().fingerprint()}"


class HFLanguageModel:
    """A transformers model with its tokenizer, read in windows of `context` tokens."""

    experts = (0, 0)  # none of ours

    def __init__(self, model: Any, tokenizer: HFTokenizer, context: int | None = None) -> None:
        kind = model.config.model_type.removeprefix(PREFIX)
        if kind not in FAMILIES:
            raise DepthgateError(
                f"{type(model).__name__} belongs to the family {kind!r}, which is not supported: use one of "
                f"{', '.join(FAMILIES)}"
            )
        if getattr(model.config, "final_logit_softcapping", None):
            raise DepthgateError("the model caps its logits (final_logit_softcapping), which is not supported here")
        room = model.config.max_position_embeddings
        context = min(room, _CONTEXT) if context is None else context
        if context > room:
            raise DepthgateError(f"seq is {context}, but the model has room for {room} tokens: ask for less")
        if tokenizer.vocab > model.config.vocab_size:
            raise DepthgateError(
                f"the tokenizer has {tokenizer.vocab} ids, but the model has {model.config.vocab_size}: they belong to "
                "different models"
            )
        self.model, self.tokenizer, self.context = model, tokenizer, context
        self.routed = routed_layers(model)

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of every layer, as in ModelConfig.pattern."""
        routed = (getattr(self.model.config, "depthgate", None) or {}).get("layers", [])
        return tuple("mod" if i in routed else "dense" for i in range(self.model.config.num_hidden_layers))

    @property
    def head(self) -> Tensor:
        """The weight (V, D) that turns hidden states into logits."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def __call__(
        self, tokens: Tensor, pos: Tensor | None = None, doc: Tensor | None = None, causal: bool = False
    ) -> Output:
        """Logits and plans of tokens (B, T)."""
        del doc  # positions tell documents apart
        with collected_plans(self.model) as plans:
            logits = self.model(tokens, use_cache=False, **self._options(pos, causal)).logits
        return Output(logits, tuple(plans))

    def hidden(
        self, tokens: Tensor, pos: Tensor | None, causal: bool | None = None, max_documents: int | None = None
    ) -> Tensor:
        """Hidden states (B, T, D) of tokens (B, T). Positions restart at 0 with each document, and are -1 at padding
        after the documents; max_documents is the most that a row holds, where the caller knows."""
        options = self._options(pos, causal, max_documents)
        x: Tensor = self.model.base_model(tokens, use_cache=False, **options).last_hidden_state
        return x / getattr(self.model.config, "logits_scaling", 1.0)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        pos: Tensor | None = None,
        doc: Tensor | None = None,
        causal: bool = False,
    ) -> tuple[Tensor, Plans]:
        """Mean cross-entropy of the targets that are not negative, and the plans of the routed layers."""
        del doc  # positions tell documents apart
        with collected_plans(self.model) as plans:
            x = self.hidden(tokens, pos, causal)
        return linear_cross_entropy(x.flatten(0, 1), self.head, targets.flatten()), tuple(plans)

    def _options(self, pos: Tensor | None, causal: bool | None, max_documents: int | None = None) -> dict[str, Any]:
        """Keywords of the model's forward."""
        routing: dict[str, Any] = {"causal_routing": causal, "max_documents": max_documents}
        options = routing if self.routed else {}
        if pos is not None:  # padding becomes a document of its own
            options["position_ids"] = torch.where(pos < 0, (pos < 0).cumsum(1) - 1, pos)
        return options


@contextmanager
def collected_plans(model: Any) -> Iterator[list[Slots]]:
    """A list that fills with the plans of the model's routed layers, in order, each time that the model runs."""
    found: list[Slots] = []
    hooks = [
        layer.depth_router.register_forward_hook(lambda _, __, plan: found.append(plan))
        for layer in routed_layers(model)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def open_folder(folder: Path, device: str, dtype: str = "auto", context: int | None = None) -> HFLanguageModel:
    """The model of a folder, with its tokenizer, on a device."""
    model = load(folder)
    found = HFLanguageModel(model, tokenizer_of(folder), context)
    cast(model, compute_dtype(dtype, device, model)).to(device)
    return found


def tokenizer_of(folder: Path) -> ModelTokenizer:
    """The tokenizer of a model's folder: tokenizer.json itself where it exists, since some classes of transformers
    ignore parts of it."""
    found, path = load_tokenizer(folder), folder / "tokenizer.json"
    inner = read_tokenizer(path) if path.is_file() else getattr(found, "backend_tokenizer", None)
    if inner is None:
        raise DepthgateError(f"{folder} has a {type(found).__name__}, which cannot be saved as a tokenizer.json")
    return ModelTokenizer(inner, None if found.eos_token is None else str(found.eos_token))


def dense_of(folder: Path) -> Any:
    """The model of a folder with all its layers dense: as it is, or without its routers."""
    if not (folder / "config.json").is_file():
        raise DepthgateError(f"{folder} has no config.json: give the folder of a Hugging Face model")
    kind = str(check_config(folder / "config.json")["model_type"])
    if not kind.startswith(PREFIX):
        return load(folder)
    base = getattr(modeling(kind.removeprefix(PREFIX)), FAMILIES[kind.removeprefix(PREFIX)].model)
    values, _ = base.config_class.get_config_dict(folder, local_files_only=True)
    config = base.config_class.from_dict(
        {key: value for key, value in values.items() if key not in ("depthgate", "model_type", "architectures")}
    )
    return base.from_pretrained(folder, config=config, dtype="auto", local_files_only=True).eval()


def compute_dtype(name: str, device: str, model: Any) -> torch.dtype:
    """The dtype of this name; auto: float32 on a CPU, elsewhere the dtype that the model is stored in."""
    found: torch.dtype = getattr(torch, name) if name != "auto" else torch.float32 if device == "cpu" else model.dtype
    return found


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Cast a model in place, except for its routers, which stay in float32."""
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if "depth_router" not in name and "inv_freq" not in name and weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    return model
