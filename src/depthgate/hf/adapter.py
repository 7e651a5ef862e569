"""A transformers model as the rest of the library sees a language model: packed rows in; logits, loss, plans out. And
as lm-eval sees one."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthgate.config import EvalConfig
from depthgate.data.tokenizer import TextTokenizer, read_tokenizer
from depthgate.device import resolve_device
from depthgate.errors import DepthgateError
from depthgate.hf.families import FAMILIES, PREFIX, modeling
from depthgate.hf.folder import check_config, load, load_tokenizer
from depthgate.hf.layer import routed_layers
from depthgate.model import Output
from depthgate.ops.loss import linear_cross_entropy
from depthgate.routing.plan import Plans, Slots

_CONTEXT = 1024  # tokens read at once unless the caller says otherwise: the logits of a large vocabulary have to fit


class ModelTokenizer(TextTokenizer):
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

    def __init__(self, model: Any, tokenizer: TextTokenizer, context: int | None = None) -> None:
        kind = model.config.model_type.removeprefix(PREFIX)
        if kind not in FAMILIES:
            raise DepthgateError(f"the family {kind!r} is not supported: use a model of {', '.join(FAMILIES)}")
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
        return Output(logits, tuple(plan for (plan,) in plans))

    def hidden(self, tokens: Tensor, pos: Tensor | None, causal: bool | None = None, **routing: Any) -> Tensor:
        """Hidden states (B, T, D) of tokens (B, T). Positions restart at 0 with each document, and are -1 at padding
        after the documents; `routing` may hold max_documents, the most that a row holds, and rule_loss."""
        options = self._options(pos, causal, **routing)
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
        loss = linear_cross_entropy(x.flatten(0, 1), self.head, targets.flatten())
        return loss, tuple(plan for (plan,) in plans)

    def _options(self, pos: Tensor | None, causal: bool | None, **routing: Any) -> dict[str, Any]:
        """Keywords of the model's forward."""
        options: dict[str, Any] = {"causal_routing": causal, **routing} if self.routed else {}
        if pos is not None:  # padding becomes a document of its own
            options["position_ids"] = torch.where(pos < 0, (pos < 0).cumsum(1) - 1, pos)
        return options


@contextmanager
def collected_plans(model: Any, measure: Callable[[Slots], Any] = lambda plan: plan) -> Iterator[list[list[Any]]]:
    """The plans of a model's routed layers, or a measure of them: a list for each layer, which grows with every call.

    One list for all layers would be compiled again for each of its lengths.
    """

    def append_to(mine: list[Any]) -> Callable[..., None]:
        return lambda _, __, plan: mine.append(measure(plan))

    layers = routed_layers(model)
    found: list[list[Any]] = [[] for _ in layers]
    hooks = [
        layer.depth_router.register_forward_hook(append_to(mine)) for layer, mine in zip(layers, found, strict=True)
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
    return base.from_pretrained(folder, dtype="auto", local_files_only=True).eval()


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


def evaluate_task(config: EvalConfig) -> dict[str, Any]:
    """Metrics of a Hugging Face model, dense or converted, on one task of lm-eval in a yaml file."""
    file = Path(config.tasks or "")
    name = _task_name(file)
    _check_unique(name, file)
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise DepthgateError(f"lm-eval is missing ({error}): pip install 'depthgate[eval]'") from None
    folder, device = Path(config.model), resolve_device(config.device)
    model = load(folder)
    cast(model, compute_dtype(config.dtype, device, model)).to(device)
    options: dict[str, Any] = {} if config.seq is None else {"max_length": config.seq}
    options["add_bos_token"] = bool(tokenizer_of(folder).prefix)  # which lm-eval leaves out unless it is told
    judged = HFLM(pretrained=model, tokenizer=load_tokenizer(folder), batch_size=config.batch, device=device, **options)
    try:
        manager = TaskManager(include_path=str(file.parent), include_defaults=False)
        found = simple_evaluate(
            judged, tasks=[name], task_manager=manager, limit=config.limit, log_samples=False, bootstrap_iters=0
        )
    except Exception as error:  # a task may hold code and templates of its own
        raise DepthgateError(f"lm-eval cannot do {file}: {type(error).__name__}: {str(error)[:300]}") from error
    metrics = {key.removesuffix(",none"): value for key, value in found["results"][name].items() if "stderr" not in key}
    count = found["n-samples"][name]["effective"]
    return {"model": config.model, "tasks": config.tasks, "documents": count, "metrics": metrics}


def _task_name(file: Path) -> str:
    """The name that a task gives itself. Its yaml may have tags of lm-eval's own, so only this line is read."""
    try:
        named = re.search(r"^task:\s*['\"]?([\w.-]+)['\"]?\s*$", file.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError) as error:
        raise DepthgateError(f"tasks is {str(file)!r}, which cannot be read ({error}): give a yaml file") from None
    if named is None:
        raise DepthgateError(f"{file} has no line `task: NAME`: give a task of lm-eval as a yaml file")
    return named[1]


def _check_unique(name: str, file: Path) -> None:
    """Refuse a name that another file of the folder has: lm-eval looks a task up by its name among all of them."""
    for other in sorted((*file.parent.rglob("*.yaml"), *file.parent.rglob("*.yml"))):
        try:
            same = other.resolve() != file.resolve() and _task_name(other) == name
        except DepthgateError:
            continue
        if same:
            raise DepthgateError(f"{file} and {other} both name the task {name}: rename one, or move it elsewhere")
