"""A converted model that learns: which of its weights, from whom, and how a batch becomes gradients."""

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthgate.config import FinetuneConfig
from depthgate.data.batches import Rows
from depthgate.device import count_flops, matmul_rate
from depthgate.errors import DepthgateError
from depthgate.hf.adapter import HFLanguageModel, cast, dense_of
from depthgate.hf.calibrate import scaled, unscaled
from depthgate.hf.classes import ROUTER
from depthgate.hf.conversion import set_capacity
from depthgate.hf.families import FAMILIES, PREFIX
from depthgate.ops.loss import linear_cross_entropy, linear_distillation
from depthgate.routing import Slots, Threshold, routed_share

_DECAY = 0.9  # of moving thresholds


def build(language: HFLanguageModel, config: FinetuneConfig, device: str) -> "Student":
    """The student on its device, with the teacher that the configuration asks for."""
    teacher = None
    if config.loss == "distillation":
        dense = dense_of(Path(config.teacher or config.model))
        if dense.config.vocab_size != language.model.config.vocab_size:
            raise DepthgateError(
                f"the teacher has {dense.config.vocab_size} ids, the model {language.model.config.vocab_size}: "
                "they must have one vocabulary"
            )
        dense = cast(dense, getattr(torch, config.dtype)).to(device).requires_grad_(False)
        teacher = HFLanguageModel(dense, language.tokenizer, language.context)
    return Student(language, teacher, config, device)


class Student:
    """The model in training mode. `trained` are its weights that learn, by name, in float32."""

    def __init__(
        self, language: HFLanguageModel, teacher: HFLanguageModel | None, config: FinetuneConfig, device: str
    ) -> None:
        self.language, self.teacher, self.config, self.device = language, teacher, config, device
        model = language.model
        self.stored: torch.dtype = model.dtype
        self._adapted: Any = None
        torch.manual_seed(config.seed)
        if config.train == "lora":
            self._adapted = _with_lora(model, config.rank)
        if config.train == "full" or config.dtype == "float32":
            cast(model, torch.float32)
        model.to(device).train()
        scaled(language)
        for name, weight in model.named_parameters():
            learns = config.train == "full" or ROUTER in name or "lora_" in name
            weight.requires_grad_(learns)
            if learns:
                weight.data = weight.data.float()
        self.trained: dict[str, nn.Parameter] = {n: w for n, w in model.named_parameters() if w.requires_grad}
        for layer in language.routed:
            layer.rule_loss /= config.accumulate  # every part adds it
            router: Any = layer.depth_router
            router.share = torch.zeros((), device=device)
            router.register_forward_hook(_note_share)
            if isinstance(layer.depth_router.rule, Threshold):  # scores move much in a short time
                layer.depth_router.rule.decay = _DECAY
        if config.checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        if config.compile:
            for each in (language, teacher):
                if each is not None:
                    _compile_layers(each.model)
        self.max_documents: int | None = None
        self._flops = self._count_flops()
        self.peak = matmul_rate(device, getattr(torch, config.dtype))

    @property
    def capacity(self) -> float:
        """The share of tokens that routed layers take now."""
        return self.language.routed[0].depth_router.capacity

    def expect_documents(self, most: int) -> None:
        """Promise that sequences hold no more documents than this, so that routers need not count them."""
        self.max_documents = most

    def held(self) -> dict[str, Tensor]:
        """What a checkpoint holds: weights that learn, and the thresholds of the rules."""
        buffers = {n: b for n, b in self.language.model.named_buffers() if ROUTER in n}
        return {**{n: w.detach() for n, w in self.trained.items()}, **buffers}

    def backward(self, rows: Rows) -> tuple[Tensor, list[Tensor]]:
        """Gradients of a batch, a part at a time; parts weigh as many targets as they have. Gives the loss, and the
        share of its tokens that each routed layer took."""
        rows = Rows(*(t.to(self.device, non_blocking=True) for t in rows))
        targets = (rows.targets >= 0).sum().clamp(min=1)
        total = torch.zeros((), device=self.device)
        shares: list[list[Tensor]] = []
        for part in (Rows(*p) for p in zip(*(t.chunk(self.config.accumulate) for t in rows), strict=True)):
            with self._precision():
                loss = self._loss(part)
            weight = (part.targets >= 0).sum() / targets
            (loss * weight).backward()  # type: ignore[no-untyped-call]
            total += loss.detach() * weight
            routers: list[Any] = [layer.depth_router for layer in self.language.routed]
            shares.append([router.share for router in routers])
        return total, [torch.stack(layer).mean() for layer in zip(*shares, strict=True)]

    def _precision(self) -> AbstractContextManager[object]:
        low = self.config.dtype == "bfloat16"
        return torch.autocast(self.device, torch.bfloat16) if low else nullcontext()

    def _loss(self, rows: Rows) -> Tensor:
        x = self.language.hidden(rows.tokens, rows.pos, max_documents=self.max_documents).flatten(0, 1)
        targets, weight = rows.targets.flatten(), self.language.head
        compiled = self.config.compile
        if self.teacher is None:
            return linear_cross_entropy(x, weight, targets, compiled=compiled)
        with torch.no_grad(), torch.autocast(self.device, enabled=False):
            taught = self.teacher.hidden(rows.tokens, rows.pos).flatten(0, 1)
        softness, text = self.config.temperature, self.config.text_share
        return linear_distillation(x, weight, taught, self.teacher.head, targets, softness, text, compiled=compiled)

    def flops(self, capacity: float) -> float:
        """Of a step, for each token: those of the passes, between what was counted at capacity 1 and at the goal."""
        dense, goal, at = self._flops
        return goal if at == 1 else goal + (dense - goal) * (capacity - at) / (1 - at)

    @torch.no_grad()
    def _count_flops(self) -> tuple[float, float, float]:
        """FLOPs a token of one pass, dense and at the model's own capacity, times the passes of a step."""
        goal, counts = self.capacity, []
        tokens = torch.zeros(1, self.config.seq, dtype=torch.long, device=self.device)
        pos = torch.arange(self.config.seq, device=self.device)[None]
        head = 2 * self.language.head.numel()
        for capacity in (1.0, goal):
            set_capacity(self.language.model, capacity)
            with torch.compiler.set_stance("force_eager"), self._precision():
                counts.append(count_flops(lambda: self.language.hidden(tokens, pos)) / self.config.seq + head)
        passes = 3 if self.config.train == "full" else 2  # frozen weights have no gradients of their own
        taught = counts[0] if self.teacher is not None else 0
        return passes * counts[0] + taught, passes * counts[1] + taught, goal

    def finished(self) -> Any:
        """The model as it is to be saved: in the dtype it came in, LoRA merged. It can be trained no more."""
        if self._adapted is not None:
            self._adapted.merge_and_unload()
        unscaled(self.language)
        return cast(self.language.model, self.stored).eval()


def _note_share(router: Any, _: Any, plan: Slots) -> None:
    """Kept on the router, as a list that grew from layer to layer would be compiled for anew."""
    router.share = routed_share(plan).detach()


def _compile_layers(model: Any) -> None:
    """Compile layers, once for all of a kind and for each number of tokens that they take."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # stages of the capacity
    family = FAMILIES[model.config.model_type.removeprefix(PREFIX)]
    for layer in getattr(model.base_model, family.layers):
        layer.compile(dynamic=False)


def _with_lora(model: Any, rank: int) -> Any:
    """LoRA in all linear layers but those of routers, which are trained as they are."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise DepthgateError("peft is missing: pip install 'depthgate[finetune]'") from None
    wanted = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        exclude_modules=rf".*{ROUTER}.*",
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, wanted)
    print(f"LoRA of rank {rank} in {len(adapted.targeted_module_names)} layers", file=sys.stderr)
    return adapted
