"""A transformers model as a language model of the library (packed rows in; logits, loss, plans out) and of lm-eval."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthgate.config import EvalConfig
from depthgate.data.tokenizer import TextTokenizer, read_tokenizer
from depthgate.device import resolve_device
from depthgate.errors import DepthgateError
from depthgate.hf.families import FAMILIES, PREFIX
from depthgate.hf.folder import find_tokenizer, load
from depthgate.hf.layer import routed_layers
from depthgate.model import Output
from depthgate.ops.loss import linear_cross_entropy
from depthgate.routing.plan import Plans, Slots

_CONTEXT = 1024  # tokens read at once unless the caller says otherwise: the logits of a large vocabulary have to fit


class ModelTokenizer(TextTokenizer):
    """The tokenizer in a model's folder. Texts begin as the model has seen all texts begin, with <s> for example."""

    def __init__(self, inner: Any, end: str | None) -> None:
        super().__init__(inner, end)
        try:
            found = inner.encode("a")
        except Exception:  # of a vocabulary of words, none of which stands for the unknown ones
            found = inner.encode(next(iter(inner.get_vocab(with_added_tokens=False))))
        self.prefix: list[int] = found.ids[: [*found.special_tokens_mask, 0].index(0)]

    def encode_many(self, texts: Any) -> list[list[int]]:
        return [[*self.prefix, *ids] for ids in super().encode_many(texts)]

    def fingerprint(self) -> str:
        return f"{self.prefix} {super().fingerprint()}"


class HFLanguageModel:
    """A transformers model with its tokenizer, read in windows of `context` tokens."""

    experts = (0, 0)  # none of ours

    def __init__(self, model: Any, tokenizer: TextTokenizer, context: int | None = None) -> None:
        config, kind = model.config, model.config.model_type.removeprefix(PREFIX)
        if kind not in FAMILIES:
            raise DepthgateError(f"the family {kind!r} is not supported: use a model of {', '.join(FAMILIES)}")
        if getattr(config, "final_logit_softcapping", None):
            raise DepthgateError("the model caps its logits (final_logit_softcapping), which is not supported here")
        room = config.max_position_embeddings
        context = context or min(room, _CONTEXT)
        if context > room:
            raise DepthgateError(f"seq is {context}, but the model has room for {room} tokens: ask for less")
        tokenizer.check_vocab(config.vocab_size)
        self.model, self.tokenizer, self.context = model, tokenizer, context
        self.routed = routed_layers(model)
        routed = config.depthgate["layers"] if self.routed else ()
        self.kinds = tuple("mod" if i in routed else "dense" for i in range(config.num_hidden_layers))

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def head(self) -> Tensor:
        """The weight (V, D) that turns hidden states into logits."""
        return self.model.get_output_embeddings().weight  # type: ignore[no-any-return]

    def __call__(self, tokens: Tensor, pos: Any = None, doc: Any = None, causal: bool = False) -> Output:  # noqa: ARG002
        """Logits and plans of tokens (B, T). Positions tell documents apart, `doc` does not have to."""
        with collected_plans(self.model) as plans:
            logits = self.model.get_output_embeddings()(self.hidden(tokens, pos, causal))
        return Output(logits, tuple(plan for (plan,) in plans))

    def loss(
        self, tokens: Tensor, targets: Tensor, pos: Tensor | None = None, doc: Any = None, causal: bool = False
    ) -> tuple[Tensor, Plans]:
        """Mean cross-entropy of the targets that are not negative, and the plans of the routed layers."""
        del doc
        with collected_plans(self.model) as plans:
            x = self.hidden(tokens, pos, causal)
        loss = linear_cross_entropy(x.flatten(0, 1), self.head, targets.flatten())
        return loss, tuple(plan for (plan,) in plans)

    def hidden(self, tokens: Tensor, pos: Tensor | None, causal: bool | None = None, **routing: Any) -> Tensor:
        """The input of the head (B, T, D). Positions restart at 0 with each document, and are -1 at padding after the
        documents; `routing` may hold max_documents, the most that a row holds, and rule_loss."""
        options: dict[str, Any] = {"causal_routing": causal, **routing} if self.routed else {}
        if pos is not None:  # padding becomes a document of its own
            options["position_ids"] = torch.where(pos < 0, (pos < 0).cumsum(1) - 1, pos)
        x: Tensor = self.model.base_model(tokens, use_cache=False, **options).last_hidden_state
        return x / getattr(self.model.config, "logits_scaling", 1.0)


def collected_plans(model: Any, measure: Callable[[Slots], Any] = lambda plan: plan) -> Any:
    """A context in which the plans of a model's routed layers are collected, or a measure of them."""
    return collected([layer.depth_router for layer in routed_layers(model)], lambda _, __, plan: measure(plan))


@contextmanager
def collected(modules: Sequence[nn.Module], measure: Callable[[Any, Any, Any], Any]) -> Iterator[list[list[Any]]]:
    """measure(arguments, keywords, output) of every call of some modules: a list for each module, as one list for all
    would be compiled again for each of its lengths."""

    def keep(mine: list[Any], _: Any, args: Any, kwargs: Any, output: Any) -> None:
        mine.append(measure(args, kwargs, output))

    found: list[list[Any]] = [[] for _ in modules]
    with ExitStack() as hooks:
        for module, mine in zip(modules, found, strict=True):
            hooks.enter_context(module.register_forward_hook(partial(keep, mine), with_kwargs=True))
        yield found


def load_on(device: str, folder: Path, dtype: str) -> Any:
    """A model on a device. The dtype `auto` is float32 on a CPU, elsewhere the one that the model is stored in."""
    model = load(folder)
    stored = torch.float32 if device == "cpu" else model.dtype
    return cast(model, stored if dtype == "auto" else getattr(torch, dtype)).to(device)


def tokenizer_of(folder: Path) -> ModelTokenizer:
    """The tokenizer of a model's folder: its tokenizer.json if it has one, parts of which transformers may ignore."""
    found, path = find_tokenizer(folder), folder / "tokenizer.json"
    if found is None:
        how = f"AutoTokenizer.from_pretrained(MODEL).save_pretrained({str(folder)!r})"
        raise DepthgateError(f"{folder} has no tokenizer: put the files of the model's own there, as {how} does")
    inner = read_tokenizer(path) if path.is_file() else getattr(found, "backend_tokenizer", None)
    if inner is None:
        raise DepthgateError(f"{folder} has a {type(found).__name__}, which cannot be saved as a tokenizer.json")
    return ModelTokenizer(inner, None if found.eos_token is None else str(found.eos_token))


def cast(model: Any, dtype: torch.dtype) -> Any:
    """Cast a model in place, except for its routers, which stay in float32."""
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if "router" not in name and "inv_freq" not in name and weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    return model


def evaluate_task(config: EvalConfig) -> dict[str, Any]:
    """Metrics of a Hugging Face model, dense or converted, on one task of lm-eval in a yaml file."""
    file = Path(config.tasks or "")
    name = _task_name(file)
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise DepthgateError(f"lm-eval is missing ({error}): pip install 'depthgate[eval]'") from None
    folder, device = Path(config.model), resolve_device(config.device)
    model = load_on(device, folder, config.dtype)
    if hasattr(model, "routing_mode"):
        model.routing_mode = "causal"  # whatever was saved: no answer is judged by tokens that come after it
    options: dict[str, Any] = {} if config.seq is None else {"max_length": config.seq}
    options["add_bos_token"] = bool(tokenizer_of(folder).prefix)  # which lm-eval leaves out unless it is told
    judged = HFLM(pretrained=model, tokenizer=find_tokenizer(folder), batch_size=config.batch, device=device, **options)
    try:
        manager = TaskManager(include_path=str(file.parent), include_defaults=False)
        found = simple_evaluate(
            judged, tasks=[name], task_manager=manager, limit=config.limit, log_samples=False, bootstrap_iters=0
        )
    except Exception as error:  # a task may hold code and templates of its own
        raise DepthgateError(f"lm-eval cannot do {file}: {type(error).__name__}: {str(error)[:300]}") from error
    results = found["results"][name].items()  # figures as "acc,none", and what lm-eval knows of the task
    metrics = {key.removesuffix(",none"): value for key, value in results if "," in key and "stderr" not in key}
    count = found["n-samples"][name]["effective"]
    return {"model": config.model, "tasks": config.tasks, "documents": count, "metrics": metrics}


def _task_name(file: Path) -> str:
    """The name that a task gives itself. Its yaml may have tags of lm-eval's own, so only this line is read. A name
    that another file of the folder has is refused: lm-eval looks a task up by its name among all of them."""
    line = re.compile(r"^task:\s*['\"]?([\w.-]+)['\"]?\s*$", re.MULTILINE)
    others = (path for path in sorted(file.parent.rglob("*.y*ml")) if path.is_file() and not path.samefile(file))
    try:
        named = line.search(file.read_text(encoding="utf-8"))
        names = {other: line.findall(other.read_text(encoding="utf-8", errors="replace")) for other in others}
    except (OSError, UnicodeDecodeError) as error:
        raise DepthgateError(f"tasks is {str(file)!r}, which cannot be read ({error}): give a yaml file") from None
    if named is None:
        raise DepthgateError(f"{file} has no line `task: NAME`: give a task of lm-eval as a yaml file")
    if twins := [other for other, found in names.items() if named[1] in found]:
        raise DepthgateError(f"{file} and {twins[0]} both name the task {named[1]}: rename one, or move it elsewhere")
    return named[1]
