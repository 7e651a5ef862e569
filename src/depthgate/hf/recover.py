"""Recovery of a converted model: which weights learn, from which teacher, by which loss, and what is written.

`Recovery` is a task of the training loop (depthgate.train.loop), which `depthgate finetune` runs.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthgate.config import FinetuneConfig
from depthgate.data.batches import Packed, Rows
from depthgate.device import count_flops
from depthgate.errors import DepthgateError
from depthgate.files import new_folder
from depthgate.hf.adapter import HFLanguageModel, cast, collected_plans, dense_of
from depthgate.hf.calibrate import calibrate, scale_routers, unscale_routers
from depthgate.hf.classes import ROUTER
from depthgate.hf.conversion import set_capacity
from depthgate.hf.families import Routing, decoder_layers
from depthgate.hf.folder import copy_tokenizer, find_tokenizer, load
from depthgate.ops.loss import linear_cross_entropy, linear_distillation
from depthgate.routing import Plans, Threshold, routed_share

_DECAY = 0.9  # of moving thresholds: scores move much in a short time


class Recovery:
    """The task of a converted model that learns what routing has lost. `trained` are the weights that learn, by name,
    in float32."""

    def __init__(self, language: HFLanguageModel, config: FinetuneConfig, device: str, max_documents: int) -> None:
        self.language, self.config, self.device, self.max_documents = language, config, device, max_documents
        self.model: Any = language.model
        self.teacher = self._teacher()
        self._stored: torch.dtype = self.model.dtype
        torch.manual_seed(config.seed)
        self._adapted = _with_lora(self.model, config.rank) if config.train == "lora" else None
        if config.train == "full" or config.dtype == "float32":
            cast(self.model, torch.float32)
        self.model.to(device).train()
        scale_routers(language.routed)
        for name, weight in self.model.named_parameters():
            learns = config.train == "full" or ROUTER in name or "lora_" in name
            weight.requires_grad_(learns)
            if learns:
                weight.data = weight.data.float()
        self.trained: dict[str, nn.Parameter] = {n: w for n, w in self.model.named_parameters() if w.requires_grad}
        for layer in language.routed:
            if isinstance(layer.depth_router.rule, Threshold):
                layer.depth_router.rule.decay = _DECAY
        if config.checkpointing:
            self.model.gradient_checkpointing_enable()
            self.model.enable_input_require_grads()
        if config.compile:
            _compile_layers(self.model)
            if self.teacher is not None:
                _compile_layers(self.teacher.model)
        self._flops = self._count_flops()
        self.goal = self.capacity if config.capacity is None else config.capacity
        steps = config.steps if config.schedule_steps is None else config.schedule_steps
        self.falling_steps = falling_steps(config.capacity_share, steps)

    def _teacher(self) -> HFLanguageModel | None:
        """The dense model to learn from, if the configuration asks for one."""
        if self.config.loss != "distillation":
            return None
        dense = dense_of(Path(self.config.teacher or self.config.model))
        if dense.config.vocab_size != self.model.config.vocab_size:
            raise DepthgateError(
                f"the teacher has {dense.config.vocab_size} ids, the model {self.model.config.vocab_size}: "
                "they must have one vocabulary"
            )
        dense = cast(dense, getattr(torch, self.config.dtype)).to(self.device).requires_grad_(False)
        return HFLanguageModel(dense, self.language.tokenizer, self.language.context)

    @property
    def capacity(self) -> float:
        """Share of the tokens that routed layers take now."""
        return self.language.routed[0].depth_router.capacity

    def set_capacity(self, capacity: float) -> None:
        """Let routed layers take another share from now on."""
        set_capacity(self.model, capacity)

    def calibrate(self, packed: Packed) -> None:
        """Calibrate the routers of a new run, if the configuration asks for it."""
        if self.config.calibrate:
            rows = packed.rows(range(-(-self.config.calibrate // self.config.seq)))
            with torch.compiler.set_stance("force_eager"):  # compiled layers would be compiled for it
                calibrate(self.language, rows, self.goal)

    def loss(self, rows: Rows) -> tuple[Tensor, float, list[Tensor], Plans]:
        """Mean loss over the targets, and the routed share of each layer. The layers themselves add the loss of their
        rules, and move their thresholds."""
        with collected_plans(self.model, lambda plan: routed_share(plan).detach()) as shares:
            mean = self._loss(rows.tokens, rows.pos, rows.targets.flatten())
        return mean, 0.0, [first for first, *_ in shares], ()

    def _loss(self, tokens: Tensor, pos: Tensor, targets: Tensor) -> Tensor:
        share = Routing(**self.model.config.depthgate).rule_loss / self.config.accumulate  # every part adds it
        x = self.language.hidden(tokens, pos, max_documents=self.max_documents, rule_loss=share).flatten(0, 1)
        weight, compiled = self.language.head, self.config.compile
        if self.teacher is None:
            return linear_cross_entropy(x, weight, targets, compiled=compiled)
        with torch.no_grad(), torch.autocast(self.device, enabled=False):
            taught = self.teacher.hidden(tokens, pos).flatten(0, 1)
        softness, text = self.config.temperature, self.config.text_share
        return linear_distillation(x, weight, taught, self.teacher.head, targets, softness, text, compiled=compiled)

    def flops_per_token(self, capacity: float) -> float:
        """Training FLOPs per token at this capacity, interpolated between the counts at capacity 1 and at the model's
        own."""
        dense, goal, at = self._flops
        return goal if at == 1 else goal + (dense - goal) * (capacity - at) / (1 - at)

    @torch.no_grad()
    def _count_flops(self) -> tuple[float, float, float]:
        """Training FLOPs per token, dense and at the model's own capacity, and that capacity."""
        own, counts = self.capacity, []
        tokens = torch.zeros(1, self.config.seq, dtype=torch.long, device=self.device)
        pos = torch.arange(self.config.seq, device=self.device)[None]
        head = 2 * self.language.head.numel()
        low = torch.autocast(self.device, torch.bfloat16, enabled=self.config.dtype == "bfloat16")
        for capacity in (1.0, own):
            set_capacity(self.model, capacity)
            with torch.compiler.set_stance("force_eager"), low:
                counts.append(count_flops(lambda: self.language.hidden(tokens, pos)) / self.config.seq + head)
        passes = 3 if self.config.train == "full" else 2  # frozen weights have no gradients of their own
        taught = counts[0] if self.teacher is not None else 0
        return passes * counts[0] + taught, passes * counts[1] + taught, own

    def held(self) -> dict[str, Tensor]:
        """The weights that learn, and the scales and thresholds of the routers; what is frozen is not saved."""
        buffers = {n: b for n, b in self.model.named_buffers() if ROUTER in n}
        return {**{n: w.detach() for n, w in self.trained.items()}, **buffers}

    def publish(self, folder: Path) -> None:
        """Write the model, in the dtype it came in and with LoRA merged, and see that it loads before it is put in
        place. It cannot be trained any further."""
        if self._adapted is not None:
            self._adapted.merge_and_unload()
        unscale_routers(self.language.routed)
        cast(self.model, self._stored).eval()
        source = Path(self.config.model)
        try:
            with new_folder(folder, last="config.json") as part:
                self.model.save_pretrained(part)
                copy_tokenizer(find_tokenizer(source), source, part)
                load(part)
        except OSError as error:
            raise DepthgateError(f"cannot write the model to {folder} ({error.strerror or error})") from error


def falling_steps(share: float, steps: int) -> int:
    """Steps over which the capacity falls: one at least if any are wanted, and never the last, which is at the goal."""
    return min(max(int(share * steps), int(share > 0)), steps - 1)


def decays(name: str, weight: Tensor) -> bool:
    """True for matrices of layers; embeddings, norms, routers and LoRA do not decay."""
    return weight.ndim >= 2 and not any(part in name for part in ("embed", "wte", "wpe", "head", "lora_", "router"))


def _compile_layers(model: Any) -> None:
    """Compile layers, once for all of a kind and for each number of tokens that they take."""
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # stages of the capacity
    for layer in decoder_layers(model):
        layer.compile(dynamic=False)


def _with_lora(model: Any, rank: int) -> Any:
    """LoRA in all linear layers except those of routers, which are trained as they are."""
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
