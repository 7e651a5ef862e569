"""Recovery of a converted model: which weights learn, from which teacher, by which loss, and what is written.

`Recovery` is a task of the training loop (depthgate.train.loop), which `depthgate finetune` runs.

A router of zeros ranks all tokens alike; a calibrated one begins with those that its layer adds most to, as far as a
linear function of the token tells it. In a pretrained model some channels are a thousand times larger than others, and
one step of AdamW would turn a router over: a scaled one learns as if every channel had the size 1.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthgate.checkpoint.store import METRICS
from depthgate.config import FinetuneConfig
from depthgate.data.batches import Packed, Rows
from depthgate.device import count_flops
from depthgate.errors import DepthgateError, installed
from depthgate.flops import budget
from depthgate.hf.adapter import HFLanguageModel, cast, collected_plans
from depthgate.hf.card import write_card
from depthgate.hf.classes import ROUTER
from depthgate.hf.conversion import calibration_inputs, save, set_capacity, to_dense, watched
from depthgate.hf.families import decoder_layers
from depthgate.hf.folder import copy_tokenizer, find_tokenizer, load
from depthgate.hf.layer import RoutedLayer, routed_layers
from depthgate.ops.loss import linear_cross_entropy, linear_distillation
from depthgate.routing import Plans, Predictor, Threshold, TopTokens, routed_share
from depthgate.routing.scores import straight_through

_CAPACITIES = 8  # between 1 and the goal, of compiled layers
_RIDGE = 1e-2  # as a share of the mean square of a channel
_SCORE_STD = 1.0  # of calibrated scores
_SCORE_STD_IN_GATE = 0.05  # where scores change the gate, which is to stay near 1
_LEAST_STD = 1e-3  # less is rounding: of tokens that are all the same
_ROUNDING = 1e-5  # of scores, as a share of the largest
_FIRST_TOKEN_SCORE = 3.0  # wanted for a document's first token, in standard deviations above the mean of the others
_FIRST_TOKEN_WEIGHT = 30.0  # in the fit, where that of another is 1


class Recovery:
    """The task of a converted model that learns what routing has lost. `trained` holds the weights that learn."""

    def __init__(self, language: HFLanguageModel, config: FinetuneConfig, device: str, max_documents: int) -> None:
        self.language, self.config, self.device = language, config, device
        self.model: Any = language.model
        self.teacher = self._teacher()
        self._stored: torch.dtype = self.model.dtype
        self._routing: dict[str, Any] = {"max_documents": max_documents}
        if language.routed:  # every part of a batch adds it
            self._routing["rule_loss"] = self.model.config.depthgate["rule_loss"] / config.accumulate
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
        self._goals = [config.capacity or layer.depth_router.capacity for layer in language.routed] or [1.0]
        self.goal = sum(self._goals) / len(self._goals)
        if config.checkpointing:
            self.model.gradient_checkpointing_enable()
            self.model.enable_input_require_grads()
        if config.compile:  # once for all layers of a kind, and for each number of tokens that they take
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
            torch._dynamo.config.skip_nnmodule_hook_guards = False  # with checkpointing those of the first step stayed
            for each in filter(None, (language, self.teacher)):
                for layer in decoder_layers(each.model):
                    layer.compile(dynamic=False)
        self._flops = self._count_flops()
        self.falling_steps = falling_steps(config.capacity_share, config.schedule_steps or config.steps)

    def _teacher(self) -> HFLanguageModel | None:
        """The dense model to learn from, if the configuration asks for one."""
        if self.config.loss != "distillation":
            return None
        dense = load(Path(self.config.teacher or self.config.model))
        dense = to_dense(dense) if routed_layers(dense) else dense
        its, own = dense.config.vocab_size, self.model.config.vocab_size
        if its != own:
            raise DepthgateError(f"the teacher has {its} ids, the model {own}: they must have one vocabulary")
        dense = cast(dense, getattr(torch, self.config.dtype)).to(self.device).requires_grad_(False)
        return HFLanguageModel(dense, self.language.tokenizer, self.language.context)

    def set_capacity(self, capacity: float) -> None:
        """Let routed layers take another share from now on, in the mean; each falls from 1 to its own goal."""
        left = (capacity - self.goal) / (1 - self.goal) if self.goal < 1 else 0.0
        if self.config.compile:  # a graph for each of a few capacities
            left = math.ceil(_CAPACITIES * left - 1e-9) / _CAPACITIES
        self.capacity = self.goal + (1 - self.goal) * left
        if self.language.routed:
            set_capacity(self.model, [goal + (1 - goal) * left for goal in self._goals])

    def calibrate(self, packed: Packed) -> None:
        """Calibrate the routers of a new run, if the configuration asks for it."""
        if self.config.calibrate and self.language.routed:
            rows = packed.rows(range(-(-self.config.calibrate // self.config.seq)))
            with torch.compiler.set_stance("force_eager"):  # compiled layers would be compiled for it
                calibrate_rows(self.language, rows)

    def loss(self, rows: Rows) -> tuple[Tensor, float, list[Tensor], Plans]:
        """Mean loss over the targets, and routed shares. Layers add the loss of their rules and move thresholds."""
        config, head, targets = self.config, self.language.head, rows.targets.flatten()
        with collected_plans(self.model, lambda plan: routed_share(plan).detach()) as found:
            x = self.language.hidden(rows.tokens, rows.pos, **self._routing).flatten(0, 1)
        shares = [first for first, *_ in found]
        if self.teacher is None:
            return linear_cross_entropy(x, head, targets, compiled=config.compile), 0.0, shares, ()
        with torch.no_grad(), torch.autocast(self.device, enabled=False):
            taught = self.teacher.hidden(rows.tokens, rows.pos).flatten(0, 1)
        wanted = (taught, self.teacher.head, targets, config.temperature, config.text_share)
        return linear_distillation(x, head, *wanted, compiled=config.compile), 0.0, shares, ()

    def flops_per_token(self, capacity: float) -> float:
        """Training FLOPs per token, interpolated between the counts at capacity 1 and at the model's own."""
        dense, goal, at = self._flops
        return goal if at == 1 else goal + (dense - goal) * (capacity - at) / (1 - at)

    def _count_flops(self) -> tuple[float, float, float]:
        """Training FLOPs per token, dense and at the model's own capacity, and that capacity."""
        own, counts = self.goal, []
        tokens = torch.zeros(1, self.config.seq, dtype=torch.long, device=self.device)
        pos = torch.arange(self.config.seq, device=self.device)[None]
        head = 2 * self.language.head.numel()
        low = torch.autocast(self.device, torch.bfloat16, enabled=self.config.dtype == "bfloat16")
        for capacity in (1.0, own):
            self.set_capacity(capacity)
            with torch.compiler.set_stance("force_eager"), low:
                flops = count_flops(lambda: self.language.hidden(tokens, pos, causal=False))
            counts.append(flops / self.config.seq + head)
        passes = 3 if self.config.train == "full" else 2  # frozen weights have no gradients of their own
        taught = counts[0] if self.teacher is not None else 0
        return passes * counts[0] + taught, passes * counts[1] + taught, own

    def held(self) -> dict[str, Tensor]:
        """The weights that learn, and the scales and thresholds of the routers; what is frozen is not saved."""
        buffers = {n: b for n, b in self.model.named_buffers() if ROUTER in n}
        return {**{n: w.detach() for n, w in self.trained.items()}, **buffers}

    def publish(self, folder: Path) -> None:
        """Write the model in the dtype it came in, LoRA merged: see `save`. It cannot be trained any further."""
        if self._adapted is not None:
            self._adapted.merge_and_unload()
        unscale_routers(self.language.routed)
        cast(self.model, self._stored).cpu().eval()
        source = Path(self.config.model)

        def write(part: Path) -> None:
            copy_tokenizer(find_tokenizer(source), source, part)
            if not self.language.routed:
                return
            last = json.loads((folder / METRICS).read_text(encoding="utf-8").rstrip("\n").rpartition("\n")[2])
            write_card(part, folder.name, self.model, "finetune", self.config, last)

        save(self.model, write, folder, last="config.json")


def falling_steps(share: float, steps: int) -> int:
    """Steps over which the capacity falls: one at least if any are wanted, and never the last, which is at the goal."""
    return min(max(int(share * steps), int(share > 0)), steps - 1)


def decays(name: str, weight: Tensor) -> bool:
    """True for matrices of layers; embeddings, norms, routers and LoRA do not decay."""
    return weight.ndim >= 2 and not any(part in name for part in ("embed", "wte", "wpe", "head", "lora_", "router"))


def _with_lora(model: Any, rank: int) -> Any:
    """LoRA in all linear layers except those of routers, which are trained as they are."""
    peft = installed("peft", "finetune")
    where = {"target_modules": "all-linear", "exclude_modules": rf".*{ROUTER}.*"}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM", **where))
    print(f"LoRA of rank {rank} in {len(adapted.targeted_module_names)} layers", file=sys.stderr)
    return adapted


@cache
def _scaled_class(base: Any) -> Any:
    """A class whose weight is what it learns times the scale of each channel. One class for all modules of a kind, so
    that code compiled for one of them serves all (parametrizations of torch make a class for each)."""
    return type(f"Scaled{base.__name__}", (base,), {"weight": property(lambda self: self.learnt * self.scale)})


def _readers(layers: Sequence[RoutedLayer]) -> list[Any]:
    """The parts of routers that look at tokens."""
    routers = [layer.depth_router for layer in layers]
    return [router.proj for router in routers] + [r.rule.up for r in routers if isinstance(r.rule, Predictor)]


def scale_routers(layers: Sequence[RoutedLayer]) -> None:
    """Let routers learn with a scale for each channel, which `calibrate` sets."""
    for part in _readers(layers):
        part.learnt = part._parameters.pop("weight")
        part.register_buffer("scale", torch.ones(part.learnt.shape[-1], device=part.learnt.device))
        part.__class__ = _scaled_class(part.__class__)


def unscale_routers(layers: Sequence[RoutedLayer]) -> None:
    """Turn scaled weights into plain ones of the same value."""
    for part in _readers(layers):
        part.learnt.data = part.weight.detach()
        part.__class__ = part.__class__.__bases__[0]
        part.weight = part._parameters.pop("learnt")
        del part.scale


@torch.no_grad()
def calibrate(model: Any, batch: Any) -> None:
    """Set the routers of a converted model from what its layers, all dense, do to the tokens of a batch: token ids
    (B, T) or a dict of the model's inputs. A score is the logarithm of how much its layer adds to a token, |f(x) - x|,
    as well as a linear function of the token tells it; the first of a text, where all others look, is put first.
    The rules `scores` and `threshold` then route the capacity; a predictor has to learn it."""
    layers = routed_layers(model)
    if not layers:
        raise DepthgateError("the model has no routed layers: convert it with dg.hf.convert")
    if any(weight.is_meta for layer in layers for weight in layer.depth_router.parameters()):
        what = "weights of routers are offloaded (device_map), where they cannot be changed"
        raise DepthgateError(f"{what}: calibrate the model before it is placed, save it, and load it from there")
    inputs, mask = calibration_inputs(model, batch)
    call = {**inputs, "use_cache": False, "causal_routing": False}
    with _all_dense(model, layers) as seen:
        model.base_model(**call)
    starts = inputs.get("position_ids")
    first = mask.cumsum(1) == 1 if starts is None else (mask.cumsum(1) == 1) | (starts == 0)
    _check_finite(layers, seen, mask.flatten())
    scale_routers(layers)
    _calibrate(layers, seen, mask.flatten(), (mask & first).flatten(), fit=True)
    unscale_routers(layers)
    with watched(model, ()), collected_plans(model, lambda plan: plan.scores) as found:
        model.base_model(**call)  # each layer now gets what the routed ones before it leave
    for layer, (scores,) in zip(layers, found, strict=True):
        middle = _between(scores[mask.to(scores.device)].flatten(), layer.depth_router.capacity)
        layer.depth_router.proj.bias.sub_(middle)


@torch.no_grad()
def calibrate_rows(language: Any, rows: Rows) -> None:
    """The same for the scaled routers of an HFLanguageModel, on packed rows; those that are not neutral are scaled, and
    compute what they did."""
    neutral = not any(layer.depth_router.proj.weight.any() for layer in language.routed)
    with _all_dense(language.model, language.routed) as seen:
        for tokens, pos in zip(rows.tokens, rows.pos, strict=True):
            language.hidden(tokens[None].to(language.device), pos[None].to(language.device), causal=False)
    first = (rows.pos == 0).flatten().to(language.device)
    _check_finite(language.routed, seen, torch.ones_like(first))
    _calibrate(language.routed, seen, torch.ones_like(first), first, neutral)


@contextmanager
def _all_dense(model: Any, layers: Sequence[RoutedLayer]) -> Iterator[Any]:
    """What `watched` gives, at capacity 1."""
    goals = [layer.depth_router.capacity for layer in layers]
    with ExitStack() as after:
        after.callback(set_capacity, model, goals)
        set_capacity(model, 1.0)
        yield after.enter_context(watched(model, layers))


def _check_finite(layers: Sequence[RoutedLayer], seen: Any, mask: Tensor) -> None:
    """Refuse changes from which no router can be set, before any is."""
    for layer, mine in zip(layers, seen, strict=True):
        change = torch.cat([change.flatten() for _, change in mine])
        if not change[mask.to(change.device)].isfinite().all():
            what = f"layer {layer._attention.layer_idx} gives numbers that are not finite"
            raise DepthgateError(f"{what}: its weights are damaged, or too large for {next(layer.parameters()).dtype}")


def _calibrate(layers: Sequence[RoutedLayer], seen: Any, mask: Tensor, first: Tensor, fit: bool) -> None:
    """Set scales, and routers if asked, from the inputs and changes of each layer: of the tokens of `mask` (N,), of
    which those of `first` (N,) begin a text."""
    for layer, mine in zip(layers, seen, strict=True):
        router: Any = layer.depth_router
        x, change = (torch.cat([each.flatten(0, 1) for each in part]).float() for part in zip(*mine, strict=True))
        mine.clear()
        at = mask.to(x.device)
        x, change = x[at], change[at]
        size = x.square().mean(0).sqrt().clamp(min=1e-6)
        for part in _readers([layer]):
            part.scale.copy_(1 / size)
            if part is router.proj or router.rule.down.weight.any():  # others than those of an untrained predictor
                part.learnt.mul_(size)  # keep their value
        if fit:
            spread = _SCORE_STD if router.gate is straight_through else _SCORE_STD_IN_GATE
            added = (change * x.norm(dim=-1)).clamp(min=1e-6).log()
            _fit(router, x / size, added, first[mask].to(x.device), router.capacity, spread)


def _fit(router: TopTokens, x: Tensor, added: Tensor, first: Tensor, capacity: float, spread: float) -> None:
    """Set a router by ridge regression on scaled tokens x (N, D): a share of `capacity` then scores at least 0."""
    wanted = (added - added[~first].mean()) / added[~first].std().clamp(min=_LEAST_STD)
    wanted = torch.where(first, _FIRST_TOKEN_SCORE, wanted)
    features = torch.cat([x, torch.ones_like(x[:, :1])], 1).double()
    weighted = features * torch.where(first, _FIRST_TOKEN_WEIGHT, 1.0)[:, None] / len(x)
    square = weighted.mT @ features
    square.diagonal().add_(_RIDGE)
    fit = torch.linalg.solve(square, weighted.mT @ wanted.double())[:-1].float()
    scores = x @ fit
    times = spread / scores[~first].std().clamp(min=_LEAST_STD)
    router.proj.learnt.copy_(fit * times)
    router.proj.bias.fill_(float(-_between(scores, capacity) * times))
    if isinstance(router.rule, Threshold):
        router.rule.average.zero_()
        router.rule.weight.fill_(1.0)


def _between(scores: Tensor, capacity: float) -> Tensor:
    """A number halfway between the share of scores (N,) that is taken and the others. One of them would leave equal
    tokens, as every first layer has them, to rounding: with a cache they would be decided otherwise than without."""
    least = scores.sort(descending=True).values[budget(capacity, len(scores)) - 1]
    others = scores[scores < least - _ROUNDING * scores.abs().max()]
    return (least + others.max()) / 2 if len(others) else least - _ROUNDING * scores.abs().max()
