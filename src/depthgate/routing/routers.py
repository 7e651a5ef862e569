"""Routers: look at tokens, return a plan."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import depthgate.routing.launched as launched
from depthgate.errors import DepthgateError, InvalidValueError, check_capacity, check_choice, check_count, check_number
from depthgate.flops import budget
from depthgate.ops.rows import check_per_token, check_tokens, flat_index, inverse_for_gathering, shaped, take_rows
from depthgate.ops.select import choose, compact, top_k, top_of_documents
from depthgate.ops.soft import MOST, soft_exponentials, working_dtype
from depthgate.routing.causal import Scores, Threshold, rule_from
from depthgate.routing.plan import Groups, Plan, Slots, Soft
from depthgate.routing.scores import Gate, Scorer, checked, features, gate_from

_Taken = tuple[Tensor, Tensor | None, Tensor | None]  # (B, E, C), filled if rows may differ; slot (B, E, T) if known
POOLS = ("sequence", "batch")  # what an expert takes its tokens out of
EXPERT_GATES = ("softmax", "sigmoid")
_FINITE_SCORE = 1e4  # what an infinite score counts as in a gate


class TopTokens(nn.Module):
    """Each expert takes its k best tokens: Mixture-of-Depths with one expert, expert choice with several.
    Score every token; ask the causal rule, whose loss wants its answer in any case; choose. That is k = max(1,
    floor(capacity * n)) of the n valid tokens of each document, or of the whole batch, by their scores; or, with
    `causal=True`, each token by the `rule` alone, so that counts differ from row to row.
    """

    def __init__(
        self,
        dim: int,
        capacity: float,
        *,
        experts: int = 1,
        gate: str | Gate = "one_plus_tanh",
        rule: str | nn.Module = "scores",
        across_experts: bool = False,
        scorer: nn.Module | None = None,
        scores_have_no_loss: bool = False,
        pool: str = "sequence",
        normed: bool = False,
    ) -> None:
        """across_experts: rank a token by its log-probability for each expert, not by its logit (expert choice).
        scorer: a module such as RandomScorer in place of the learnt scores.
        scores_have_no_loss: no loss reads `Slots.scores`: gradients reach the router through gates of routed tokens.
        pool: "sequence", or "batch": an expert takes its tokens out of all those of a batch, whatever their documents.
        normed: score tokens scaled to a mean square of one, for routers that read the residual stream.
        """
        super().__init__()
        self.dim = check_count(dim, "dim")
        self.capacity = check_capacity(capacity)
        self.experts = check_count(experts, "experts")
        self.gate = gate_from(gate)
        self.across_experts = across_experts
        self.pool = check_choice(pool, "pool", POOLS)
        self.normed = normed
        # One expert's bias changes no choice of the top k; `causal_bce` asks for scores of both signs.
        if scorer is not None and not isinstance(scorer, nn.Module):
            raise InvalidValueError(f"scorer is {scorer!r}: it must be a module, such as RandomScorer()")
        self.proj: Any = Scorer(dim, experts, bias=True) if scorer is None else scorer
        self.rule = rule_from(rule, dim, experts)
        alone = experts == 1 and not across_experts and pool == "sequence"
        self.sparse = scores_have_no_loss and scorer is None and alone
        if across_experts and isinstance(self.rule, Scores):
            raise InvalidValueError("rule is 'scores', but log-probabilities are never above 0: use 'threshold'")

    def extra_repr(self) -> str:
        return f"capacity={self.capacity}, gate={getattr(self.gate, '__name__', self.gate)}, pool={self.pool!r}"

    def forward(
        self,
        x: Tensor,
        pos: Tensor | None = None,
        causal: bool = False,
        *,
        doc: Tensor | None = None,
        keep: Tensor | None = None,
        max_documents: int | None = None,
        fewest_slots: int = 0,
        slots: int | None = None,
        lacking: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> Slots:
        """x (B, T, D); pos (B, T), negative at padding; doc (B, T), documents are routed apart; keep (B, T) bool,
        tokens that are taken first whatever their score.

        max_documents: the most that a row of `doc` holds, if known: slots are then counted without asking the device.
        fewest_slots: 1 gives a causal choice of no token an empty slot, so that the block is called all the same, as
            FSDP2 needs it; with gradients there is one in any case.
        slots: those of a causal choice, for a caller that looks whether they suffice: no token beyond them is taken.
        lacking: () int64, is then raised to the most that a row lacks. Nothing waits for the device.
        rotary: positions (B or 1, T, R) that the plan may hold for the tokens in its slots, with these tokens.
        """
        _check_call(x, self.dim, pos, doc)
        if keep is not None:
            check_per_token(keep, x, "keep", torch.bool)
        valid = None if pos is None else pos >= 0
        if keep is None and (gate := launched.gate_of(self, x, causal, doc, max_documents)):
            how: dict[str, Any] = {"max_documents": max_documents, "fewest": fewest_slots, "slots": slots}
            return launched.plan(self, gate, x, valid, doc, causal, lacking=lacking, rotary=rotary, **how)
        with torch.autocast(x.device.type, enabled=False):
            tokens = self._features(x, valid)
            sparse = self.sparse and torch.is_grad_enabled()
            with torch.set_grad_enabled(torch.is_grad_enabled() and not sparse):
                logits = checked(self.proj(tokens, pos, self.capacity), (*x.shape[:2], self.experts), "scorer")
                scores = self._ranked(logits)
        # Outside, so that a predictor's products are as fast as any: it has no say in which tokens training picks.
        decision = checked(self.rule(tokens, scores), scores.shape, "rule")
        if causal:
            wanted = decision.detach() >= 0 if keep is None else (decision.detach() >= 0) | keep[..., None]
            marked = self._by_pool(wanted if valid is None else wanted & valid[..., None])
            chosen, filled, slot = _marked_slots(marked, fewest_slots, slots)
        else:
            ranked = scores.detach() if keep is None else torch.where(keep[..., None], torch.inf, scores.detach())
            of_batch = None if valid is None else valid.reshape(1, -1), None, None
            given = (valid, doc, max_documents) if self.pool == "sequence" else of_batch
            chosen, filled, slot = self._choose(self._by_pool(ranked), *given)
        pooled = x.shape[1] if self.pool == "sequence" else x.shape[0] * x.shape[1]
        flat, rows = flat_index(chosen.flatten(1), pooled), None
        if sparse:  # the scores of routed tokens, computed again from them alone
            known = None if slot is None or filled is not None else slot.mT
            rows = take_rows(x, chosen[:, 0], inverse_for_gathering(known, x), flat)
            picked = self.proj(self._features(rows, None if filled is None else filled[:, 0])).mT
        else:
            picked = self._by_pool(scores).gather(2, chosen)
        picked = picked.nan_to_num(0.0, _FINITE_SCORE, -_FINITE_SCORE)
        gates = checked(self.gate(picked), picked.shape, "gate")
        gates = gates if filled is None else gates * filled
        slot = None if slot is None else slot.mT.reshape(scores.shape)
        plan = Slots(chosen, gates, logits, decision, filled, valid, causal, slot, keep, flat, rows)
        if slots is not None and lacking is not None:
            lacking.copy_(torch.maximum(lacking, plan.causal_choice.sum(1).amax() - slots))
        return plan

    def decide(self, x: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (N, D) at positions (N,), each by itself: True where the causal rule routes it (N, E), and gates."""
        tokens = self._features(x[:, None], None)
        scores = self._ranked(self.proj(tokens, pos[:, None], self.capacity))
        gates = self.gate(scores.nan_to_num(0.0, _FINITE_SCORE, -_FINITE_SCORE))
        return self.rule(tokens, scores)[:, 0] >= 0, gates[:, 0]

    def _by_pool(self, each: Tensor) -> Tensor:
        """(B, T, E) -> (P, E, tokens of a pool)."""
        return each.mT if self.pool == "sequence" else each.flatten(0, 1)[None].mT

    def _features(self, x: Tensor, valid: Tensor | None) -> Tensor:
        found = features(x, valid)
        return F.rms_norm(found, found.shape[-1:]) if self.normed else found

    def _ranked(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1) if self.across_experts else logits

    def _choose(self, ranked: Tensor, valid: Tensor | None, doc: Tensor | None, max_documents: int | None) -> _Taken:
        """ranked (B, E, T) -> the top k."""
        T = ranked.shape[2]
        k = budget(self.capacity, T)
        if valid is None and doc is None:
            if not ranked.is_cuda:
                return top_k(ranked, k), None, None
            chosen, _, slot = choose(ranked, None, None, self.capacity, k)
            return chosen, None, slot
        if doc is None:
            return choose(ranked, valid, None, self.capacity, k)
        if max_documents is None:
            marked = top_of_documents(ranked, valid, doc, self.capacity)
            return *compact(marked, _slots_for(marked)), None
        # Shares are rounded down, but each document gets one token at least.
        return choose(ranked, valid, doc, self.capacity, min(T, k + max_documents - 1))

    def update(self, plan: Slots, unless: Tensor | None = None) -> None:
        """Move the rule's threshold, if it has one, by a plan's scores, `unless` (a bool on the device) is true: as
        many tokens reach it as the plan took, which are more than the capacity says where documents are short."""
        if not isinstance(self.rule, Threshold):
            return
        ranked = self._ranked(plan.scores.detach())
        if self.pool == "sequence" or plan.causal or plan.keep is not None or not plan.tokens.numel():
            others = plan.chosen if plan.keep is None else plan.chosen & ~plan.keep[..., None]
            share = self.capacity if plan.causal or self.pool == "batch" else others.sum((0, 1))
            self.rule.update(ranked, plan.valid, share, unless, plan.keep)
            return
        # The whole batch was ranked: the k-th best scores are the lowest that were taken, and nothing is sorted again.
        taken = self._by_pool(ranked).gather(2, plan.tokens)
        taken = taken if plan.filled is None else torch.where(plan.filled, taken, torch.inf)
        self.rule.move(taken.amin((0, 2)), True if unless is None else ~unless)


def _marked_slots(marked: Tensor, fewest: int, slots: int | None) -> _Taken:
    """Tokens that are marked (P, E, tokens of a pool), in so many slots, or in as many as are needed."""
    if slots is None and marked.shape[:2] == (1, 1) and not torch.compiler.is_compiling():
        found = marked[0].nonzero()[None, None, :, 1]  # waits for the device, and leaves no slot empty
        if found.shape[2] >= max(fewest, int(torch.is_grad_enabled())):
            return found, None, None
    return *compact(marked, _slots_for(marked, fewest) if slots is None else slots), None


def _slots_for(marked: Tensor, fewest: int = 0) -> int:
    """The number of slots that the fullest row needs: one host sync. A compiled graph gets T. With gradients there is
    at least one, so that every parameter gets one (of 0)."""
    if torch.compiler.is_compiling() or not marked.numel():
        return marked.shape[-1]
    return max(int(marked.sum(-1).max()), int(torch.is_grad_enabled()), fewest)


def update_thresholds(model: nn.Module, plans: tuple[Plan, ...]) -> None:
    """`update` every TopTokens router of a model from the plans of one forward pass, in order."""
    routers = [m for m in model.modules() if isinstance(m, TopTokens)]
    slots = [p for p in plans if isinstance(p, Slots)]
    if len(routers) != len(slots):
        raise DepthgateError(
            f"{len(slots)} Slots plans for {len(routers)} TopTokens routers: pass the plans of one whole forward pass "
            "(a router that ran several times, on parts of a batch, is updated by router.update(plan))"
        )
    for router, plan in zip(routers, slots, strict=True):
        router.update(plan)


class TopExperts(nn.Module):
    """Each token takes its `top_k` best of the experts and `null_experts`, which compute nothing. Dropless.

    Gates are softmax probabilities: of the chosen real experts alone where `top_k` > 1 (Mixtral), of all where it is 1
    (Switch: else the gate would be constant). Or with gate="sigmoid" the sigmoid of each score, not normalised. A null
    choice changes the gates of the others in neither. Ties go to the lower expert. Causal as it is.
    """

    def __init__(
        self, dim: int, num_experts: int, top_k: int = 2, null_experts: int = 0, gate: str = "softmax"
    ) -> None:
        super().__init__()
        self.dim = check_count(dim, "dim")
        self.num_experts = check_count(num_experts, "num_experts")
        self.top_k = check_count(top_k, "top_k", maximum=num_experts)
        self.null_experts = check_count(null_experts, "null_experts", minimum=0)
        self.gate = check_choice(gate, "gate", EXPERT_GATES)
        self.proj = Scorer(dim, num_experts + null_experts)

    def extra_repr(self) -> str:
        sizes = f"num_experts={self.num_experts}, top_k={self.top_k}, null_experts={self.null_experts}"
        return f"{sizes}, gate={self.gate!r}"

    def forward(self, x: Tensor, pos: Tensor | None = None, causal: bool = False) -> Groups:  # noqa: ARG002
        """x (B, T, D); pos (B, T), negative at padding."""
        _check_call(x, self.dim, pos, None)
        valid = None if pos is None else pos >= 0
        scores = self.proj(features(x, valid))
        choice = top_k(scores, self.top_k)  # (B, T, K), ascending
        gates = self._gates(scores, choice)
        if valid is not None:
            choice = torch.where(valid[..., None], choice, -1)
        computed = (choice >= 0) & (choice < self.num_experts)
        # Null experts and padding sort behind every real expert.
        expert = torch.where(computed, choice, self.num_experts).flatten()
        by_expert, order = expert.sort(stable=True)
        experts = torch.arange(self.num_experts, device=x.device)
        ends = torch.searchsorted(by_expert, experts, right=True).int()
        row = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
        gates = torch.where(computed, gates, 0.0)
        return Groups(order, ends, row.view_as(choice), gates, choice, scores, valid)

    def _gates(self, scores: Tensor, choice: Tensor) -> Tensor:
        """scores (B, T, E + null), choice (B, T, K) -> gates (B, T, K); what null experts get is not read."""
        if self.top_k == 1 and self.gate == "softmax":
            all_of_them = scores.nan_to_num(-_FINITE_SCORE, _FINITE_SCORE, -_FINITE_SCORE).softmax(-1)
            return _picked(all_of_them, choice)
        picked = _picked(scores, choice).nan_to_num(0.0, _FINITE_SCORE, -_FINITE_SCORE)
        if self.gate == "sigmoid":
            return picked.sigmoid()
        return torch.where(choice < self.num_experts, picked, torch.finfo(picked.dtype).min).softmax(-1)


def _picked(scores: Tensor, choice: Tensor) -> Tensor:
    """scores (B, T, E), choice (B, T, K) -> (B, T, K), what `gather` says. The gradient of `gather` is a scatter, of
    which torch 2.13 makes wrong code, and no error, where several layers are compiled with dynamic shapes. In compiled
    code the K * E comparisons of each token are never in memory."""
    if not torch.compiler.is_compiling():
        return scores.gather(-1, choice)
    chosen = choice[..., None] == torch.arange(scores.shape[-1], device=scores.device)
    return torch.where(chosen, scores[..., None, :], 0.0).sum(-1)


class SoftSlots(nn.Module):
    """Soft MoE's router (Puigcerver et al. 2023, section 2.3): logits are the cosine of token and slot times a learnt
    scale, 40 at most; dispatch is their softmax over tokens, combine their softmax over slots. Not causal.

    Either may be "uniform": all weights alike, the control that a learnt router is compared with.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        slots_per_expert: int = 1,
        *,
        scale: float = 1.0,
        dispatch: str = "learnt",
        combine: str = "learnt",
    ) -> None:
        super().__init__()
        self.dim = check_count(dim, "dim")
        self.num_experts = check_count(num_experts, "num_experts")
        self.slots_per_expert = check_count(slots_per_expert, "slots_per_expert")
        self.first_scale = check_number(scale, "scale", f"(0, {MOST}]")
        self.dispatch = check_choice(dispatch, "dispatch", ("learnt", "uniform"))
        self.combine = check_choice(combine, "combine", ("learnt", "uniform"))
        self.phi = nn.Parameter(torch.empty(dim, num_experts * slots_per_expert))
        self.scale = nn.Parameter(torch.empty(1))  # not 0-d: FSDP2 cannot shard that
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.phi, std=self.dim**-0.5)
        nn.init.constant_(self.scale, self.first_scale)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, slots_per_expert={self.slots_per_expert}"

    def forward(self, x: Tensor, pos: Tensor | None = None, causal: bool = False) -> Soft:
        """x (B, T, D); pos (B, T), negative at padding."""
        _check_call(x, self.dim, pos, None)
        if causal:
            raise DepthgateError("Soft MoE mixes all tokens and has no causal form: use MixtureOfExperts instead")
        valid = None if pos is None else pos >= 0
        dtype = working_dtype(x)
        with torch.autocast(x.device.type, enabled=False):
            tokens = x.to(dtype) if valid is None else torch.where(valid[..., None], x, 0.0).to(dtype)
            phi, scale = (each.to(torch.promote_types(dtype, torch.float32)) for each in (self.phi, self.scale))
            scale = scale + (scale.clamp(-MOST, MOST) - scale).detach()  # beyond it, too, a gradient leads back
            slots = scale * phi * torch.rsqrt(phi.square().sum(0, keepdim=True) + 1e-12)
            weights = soft_exponentials(tokens, slots.to(dtype), scale.detach().abs(), valid)
        weights = shaped(weights, *x.shape[:2], self.num_experts, self.slots_per_expert)
        kinds = (self.dispatch, self.combine)  # weights are 0 at padding alone
        into, back = (weights if how == "learnt" else (weights > 0).to(weights.dtype) for how in kinds)
        return Soft(into, back, scale.detach().abs(), valid)


def _check_call(x: Tensor, dim: int, pos: Tensor | None, doc: Tensor | None) -> None:
    check_tokens(x, dim)
    if pos is not None:
        check_per_token(pos, x, "pos")
    if doc is not None:
        check_per_token(doc, x, "doc")
