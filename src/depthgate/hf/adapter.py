"""A transformers model as the rest of the library sees a language model: packed rows in, a loss and plans out."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthgate.data.tokenizer import HFTokenizer, read_tokenizer
from depthgate.errors import DepthgateError
from depthgate.hf.code import check_config
from depthgate.hf.convert import routed_layers
from depthgate.hf.families import FAMILIES, PREFIX, modeling
from depthgate.hf.folder import load
from depthgate.hf.tokenizer_files import load_tokenizer
from depthgate.ops.loss import linear_cross_entropy
from depthgate.routing.plan import Slots


class ModelTokenizer(HFTokenizer):
    """The tokenizer in a model's folder. Documents begin with what it puts before a text: many models have never seen
    one that begins otherwise."""

    def __init__(self, inner: Any, end: str) -> None:
        super().__init__(inner, end)
        bare, whole = (inner.encode("a", add_special_tokens=special).ids for special in (False, True))
        starts = [i for i in range(len(whole)) if whole[i : i + len(bare)] == bare]
        self.prefix: list[int] = whole[: starts[0]] if starts else []

    def encode_many(self, texts: Any) -> list[list[int]]:
        return [[*self.prefix, *ids] for ids in super().encode_many(texts)]

    def fingerprint(self) -> str:
        return f"{self.prefix} {super().fingerprint()}"


class Language:
    """A model with its tokenizer, read in windows of `context` tokens."""

    def __init__(self, model: Any, tokenizer: HFTokenizer, context: int) -> None:
        kind = model.config.model_type.removeprefix(PREFIX)
        if kind not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise DepthgateError(
                f"{type(model).__name__} is of the family {kind!r}, which is not known: it may be {known}"
            )
        if getattr(model.config, "final_logit_softcapping", None):
            raise DepthgateError("the model caps its logits (final_logit_softcapping), which is not known here")
        room = model.config.max_position_embeddings
        if context > room:
            raise DepthgateError(f"seq is {context}, but the model has room for {room} tokens: ask for less")
        if tokenizer.vocab > model.config.vocab_size:
            raise DepthgateError(
                f"the tokenizer has {tokenizer.vocab} ids, the model {model.config.vocab_size}: it is another model's"
            )
        self.model, self.tokenizer, self.context = model, tokenizer, context
        self.routed = routed_layers(model)

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def head(self) -> Tensor:
        """The weight (V, D) that makes logits of hidden states."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    def hidden(self, tokens: Tensor, pos: Tensor, causal: bool | None = None) -> Tensor:
        """(B, T), positions that begin anew with each document and are -1 at padding behind them -> (B, T, D)."""
        pos = torch.where(pos < 0, (pos < 0).cumsum(1) - 1, pos)  # padding is a document of its own
        options = {"causal_routing": causal} if self.routed else {}
        x: Tensor = self.model.base_model(
            input_ids=tokens, position_ids=pos, use_cache=False, **options
        ).last_hidden_state
        return x / getattr(self.model.config, "logits_scaling", 1.0)

    def loss(
        self, tokens: Tensor, targets: Tensor, pos: Tensor, doc: Tensor | None = None, *, causal: bool = False
    ) -> tuple[Tensor, list[Slots]]:
        """Mean cross-entropy of the targets that are not -1, and what each routed layer did."""
        del doc  # positions tell documents apart
        with self.plans() as plans:
            x = self.hidden(tokens, pos, causal)
        return linear_cross_entropy(x.flatten(0, 1), self.head, targets.flatten()), plans

    @contextmanager
    def plans(self) -> Iterator[list[Slots]]:
        """A list that fills with the plans of the routed layers."""
        found: list[Slots] = []
        hooks = [
            layer.depth_router.register_forward_hook(lambda _, __, plan: found.append(plan)) for layer in self.routed
        ]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()


def tokenizer_of(folder: Path) -> ModelTokenizer:
    """The tokenizer of a model's folder. tokenizer.json is what the model has seen, where it is; some classes of
    transformers read half of it."""
    found, path = load_tokenizer(folder), folder / "tokenizer.json"
    inner = read_tokenizer(path) if path.is_file() else getattr(found, "backend_tokenizer", None)
    if inner is None:
        raise DepthgateError(f"{folder} has a {type(found).__name__}, which cannot be saved as a tokenizer.json")
    if found.eos_token is None:
        raise DepthgateError(f"{folder} does not say which token ends a text: add eos_token to tokenizer_config.json")
    return ModelTokenizer(inner, str(found.eos_token))


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
    """By name; auto: float32 on a CPU, elsewhere what the model is stored in."""
    found: torch.dtype = getattr(torch, name) if name != "auto" else torch.float32 if device == "cpu" else model.dtype
    return found


def cast(model: Any, dtype: torch.dtype) -> Any:
    """The model in another dtype, in place; its routers stay in float32."""
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if "depth_router" not in name and "inv_freq" not in name and weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    return model
