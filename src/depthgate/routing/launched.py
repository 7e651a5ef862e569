"""Plans of one expert's router in a few launches: for passes without gradients on CUDA, where small models wait for
these."""

from typing import Any

import torch
from torch import Tensor

from depthgate.flops import budget
from depthgate.ops.rows import flat_index
from depthgate.ops.select import few_launches, limits_of, rows_fit
from depthgate.routing.causal import Scores, Threshold
from depthgate.routing.plan import Slots
from depthgate.routing.scores import Scorer, checked, gate_name


def gate_of(router: Any, x: Tensor, causal: bool, doc: Tensor | None, max_documents: int | None) -> str | None:
    """The name of the gate of a TopTokens, where `plan` gives what its forward would; None elsewhere."""
    simple = router.experts == 1 and router.pool == "sequence" and not router.across_experts
    fits = rows_fit(x.shape[1], x.shape[0] * x.shape[1])
    if not simple or not fits or not isinstance(router.proj, Scorer) or not few_launches(x):
        return None
    here = router.proj.weight.device == x.device and router.proj.weight.dtype == torch.float32  # not offloaded
    known = causal or doc is None or max_documents is not None  # the number of slots
    return gate_name(router.gate) if here and known else None


def plan(
    router: Any,
    gate: str,
    x: Tensor,
    valid: Tensor | None,
    doc: Tensor | None,
    causal: bool,
    *,
    max_documents: int | None,
    fewest: int,
    slots: int | None,
    lacking: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
) -> Slots:
    """The forward of a TopTokens with this gate. With `rotary` and without padding and documents one kernel does it,
    and takes the tokens too, where that is no slower and the number of slots is known beforehand."""
    from depthgate.ops import route_triton

    T, rule, proj = x.shape[1], router.rule, router.proj
    threshold = (rule.average, rule.weight) if isinstance(rule, Threshold) else None
    simple = isinstance(rule, Scores | Threshold) and valid is None and doc is None
    if rotary is not None and simple and (slots or not causal) and route_triton.small(x):
        how = router.normed, gate, slots or budget(router.capacity, T), rotary, causal, lacking
        scores, decision, made, rows, turned = route_triton.routed(x, proj.weight, proj.bias, threshold, *how)
        index, filled, slot, gates, _ = made
        return Slots(index, gates, scores, decision, filled, None, causal, slot.mT, taken=rows, rotary=turned)
    scores, decision = route_triton.scored(x, valid, proj.weight, proj.bias, threshold, router.normed)
    if not isinstance(rule, Scores | Threshold):
        with torch.autocast(x.device.type, enabled=False):
            tokens = router._features(x, valid)
        decision = checked(rule(tokens, scores), scores.shape, "rule")
    if not causal:
        most = budget(router.capacity, T)
        most = most if doc is None or max_documents is None else min(T, most + max_documents - 1)
        limits = limits_of(scores.mT, valid, doc, router.capacity, most)
        index, filled, slot, gates, flat = route_triton.chosen(scores.mT, valid, doc, limits, most, gate)
        return Slots(index, gates, scores, decision, filled, valid, False, slot.mT, None, flat)
    found = route_triton.marked(decision, valid, scores, gate, slots or T, lacking if slots else None)
    (index, filled, slot, gates, flat), many = found
    if slots is None:
        count = max(fewest, *many.tolist())  # waits for the device
        index, filled, gates = index[..., :count], filled[..., :count], gates[..., :count]
        filled, flat = None if len(x) == 1 and fewest == 0 else filled, flat_index(index.flatten(1), T)
    return Slots(index, gates, scores, decision, filled, valid, True, slot.mT, None, flat)
