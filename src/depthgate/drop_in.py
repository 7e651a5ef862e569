"""Layers that drop into other people's models: tensor in, tensor out, with routers that train by themselves.

    vit.blocks[1] = dg.MixtureOfDepths(vit.blocks[1], 192, capacity=0.5)
    vit.blocks[2].mlp = dg.SoftMoE(192, num_experts=16)

Two things are causal or not, each by itself: the choice of the tokens (`causal=True` decides each from itself alone, by
the rule), and the block (its own attention). A causal model needs both.
"""

import itertools
import re
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from depthgate.errors import DepthgateError, InvalidValueError, check_count
from depthgate.flops import budget
from depthgate.gathering import Arguments, Given, Kinds
from depthgate.layers import Attention, Block, MoD, MoE, SwiGLU
from depthgate.layers import SoftMoE as SoftMoEUpdate
from depthgate.layers.mod import SoftMoD
from depthgate.ops.rows import check_per_token, check_tokens, masked_positions, plain_positions
from depthgate.options import Named
from depthgate.recording import RecordedPlans
from depthgate.routing.plan import Slots
from depthgate.routing.routers import TopTokens
from depthgate.routing.scores import Gate
from depthgate.routing.training import RouterTraining, in_backward, warn_when_traced

# Tables of relative positions, of timm and transformers, which a block with fewer tokens would read at wrong places.
_OVER_ALL_PLACES = ("relative_position_bias_table", "rel_pos", "relative_position_bias", "relative_attention_bias")


class MixtureOfDepths(Named, nn.Module):
    """Mixture-of-Depths around any module that maps (B, T, D) to (B, T, D) and has its own residual.

        y = MixtureOfDepths(nn.TransformerEncoderLayer(64, 4, batch_first=True), 64, capacity=0.25)(x)

    Of each row's n valid tokens the max(1, floor(capacity * n)) with the best scores go through `block`; every other
    token stays as it is, bit for bit. A routed token moves from x (gate 0) to the block's result (gate 1). In training
    mode the router's losses join the backward pass, and its threshold moves, by themselves.

    With a mask or `causal=True` rows route different numbers of tokens. A block that takes a padding mask gets them in
    one call, the shorter rows filled up with zeros (`padding_keyword`). Any other block is called once for each number,
    with the rows that have it: right for every block, but more calls, none of them in a full graph, and FSDP2 must then
    shard this layer, not the block within, with `always_call=True` if it also runs without gradients. A
    tensor as long as the batch, shared or undeclared, makes that all rows each time: `per_row` says that it has an
    entry for each.
    """

    def __init__(
        self,
        block: nn.Module,
        dim: int,
        capacity: float = 0.125,
        *,
        gate: str | Gate = "one_plus_tanh",
        rule: str | nn.Module = "scores",
        keep: int = 0,
        per_token: Collection[str] = (),
        per_pair: Collection[str] = (),
        per_row: Collection[str] = (),
        shared: Collection[str] = (),
        padding_keyword: str | None = None,
        always_call: bool = False,
        losses: str | None = "backward",
        rule_loss: float = 0.01,
        balance_loss: float = 0.01,
        z_loss: float = 0.001,
    ) -> None:
        """gate: one_plus_tanh, sigmoid, raw or straight_through, or a function of scores.
        rule: how `causal=True` decides: scores, predictor or threshold, or a module (see depthgate.routing.causal).
        keep: the first tokens of each row that are routed before all others, such as class and register tokens.
        per_token, per_pair, per_row, shared: names of the block's other arguments that are tensors. Those per token,
            such as (B, T, ...), (1, T, ...) or (T, ...), are gathered as x is; those per pair of tokens, (T, T),
            (B, T, T), (B, 1, T, T) or (B, H, T, T), on both axes; those per row, (B, ...), such as the condition of a
            diffusion model, go with their rows; shared ones are handed on as they are. Arguments of torch's transformer
            layers (src_mask, memory, ...), of timm's (attn_mask) and of transformers' (attention_mask, position_ids,
            position_embeddings, encoder_hidden_states, ...) are known.
        padding_keyword: the block's keyword for a (B, k) mask, True at padding; known for torch's layers.
        always_call: call the block, for one empty slot, where a causal choice takes no token: processes that share its
            weights (FSDP2) would else wait for each other. With gradients that is so in any case.
        losses: "backward" puts the router's losses into the backward pass; None leaves them to the caller.
        rule_loss, z_loss: their weights, 0 for none. balance_loss changes nothing: one expert is always balanced.
        """
        super().__init__()
        self.dim = check_count(dim, "dim")
        self.router = TopTokens(dim, capacity, gate=gate, rule=rule)
        self.keep = check_count(keep, "keep", minimum=0)
        _check_block(block)
        self.block = block
        self.always_call = always_call
        self.router_training = RouterTraining(losses, rule_loss, balance_loss, z_loss)
        declared = {"per_token": per_token, "per_pair": per_pair, "per_row": per_row, "shared": shared}
        self._arguments = Arguments(block, padding_keyword, **declared)
        self._looks = 0  # causal calls that could show whether the block looks ahead
        self._called = False  # the block, ever: before that it is not known what it returns
        self._after: tuple[None, ...] | None = None  # what the block returns after its tensor, if it returns a tuple

    def __getattr__(self, name: str) -> Any:
        """Attributes of the block as well: containers read some, as nn.TransformerEncoder does `self_attn`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "block":
                raise
            return getattr(self.block, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Attributes that only the block has are set there, where they are read."""
        block = self.__dict__.get("_modules", {}).get("block")
        mine = name.startswith("_") or name in self.__dict__ or name in self._modules or hasattr(type(self), name)
        if block is not None and not mine and hasattr(block, name):
            setattr(block, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def capacity(self) -> float:
        """Share of the tokens that are routed."""
        return self.router.capacity

    def forward(
        self,
        x: Any = None,
        *args: Any,
        mask: Tensor | None = None,
        keep: Tensor | None = None,
        causal: bool = False,
        return_plans: bool = False,
        **kwargs: Any,
    ) -> Any:
        """x (B, T, D), also by the name that the block has for it; mask (B, T), True at real tokens; keep (B, T), True
        at tokens that go before all others (among the k of a row, or with `causal=True` in any case); causal, decide by
        the causal rule instead of the top k. Other arguments go to the block.

        Returns y (B, T, D), in a tuple if the block returns one, or (y, plans) with `return_plans=True`.
        """
        x = kwargs.pop(self._arguments.first, None) if x is None else x
        nested = isinstance(x, Tensor) and x.is_nested  # nn.TransformerEncoder makes such tensors in evaluation
        if nested:
            x, mask = _padded(x, mask, keep)
        check_tokens(x, self.dim)
        _check_device(x, self)
        named = self._arguments.named(args, kwargs)
        if "mask" in self._arguments.told and mask is not None and not nested:  # the block's own
            named["mask"], mask = mask, None
        if "keep" in self._arguments.told and keep is not None:
            named["keep"], keep = keep, None
        kinds = {name: self._arguments.kind(name, value, x) for name, value in named.items()}
        real = self._arguments.joined_mask(mask, named, kinds, x)
        pos = None if real is None else masked_positions(real, x)
        kept = self._kept(x, real, keep, causal)
        unknown = causal and not torch.compiler.is_compiling() and not self._called
        plan = self.router(x, pos, causal, keep=kept, fewest_slots=int(self.always_call or unknown))
        y = self._through_block(x, plan, named, kinds) if plan.tokens.shape[-1] or not x.numel() else x
        y = x.clone() if y is x else y  # which may be written to
        y = self.router_training(y, plan, self.router)
        y = torch._nested_tensor_from_mask(y, mask) if nested else y  # type: ignore[arg-type]
        result = y if self._after is None else (y, *self._after)
        return (result, RecordedPlans((plan,))) if return_plans else result

    def _kept(self, x: Tensor, mask: Tensor | None, keep: Tensor | None, causal: bool) -> Tensor | None:
        """(B, T) bool: tokens to route whatever their score; None if there are none."""
        if keep is not None:
            check_per_token(keep, x, "keep", torch.bool)
        if self.keep == 0:
            return keep
        T, k = x.shape[1], budget(self.capacity, x.shape[1])
        if self.keep > k and T and not causal:
            raise InvalidValueError(
                f"keep is {self.keep}, but capacity {self.capacity} takes {k} of {T} tokens: raise it, or keep fewer"
            )
        first = (plain_positions(x) if mask is None else mask.cumsum(1) - 1) < self.keep
        return first if keep is None else first | keep

    def _through_block(self, x: Tensor, plan: Slots, named: Given, kinds: Kinds) -> Tensor:
        """x with its routed tokens taken through the block."""
        plan = plan if x.numel() else plan._replace(filled=None)  # torch's layers take no masks of an empty batch
        if plan.filled is None or self._arguments.takes_padding(kinds):
            return self._one_call(x, plan, named, kinds)
        if torch.compiler.is_exporting():
            raise DepthgateError("rows differ, and the block takes no padding mask: export needs a padding_keyword")
        y = x
        counts = plan.filled.sum(-1)[:, 0]  # (B,)
        apart = self._arguments.rows_are_known(named, kinds, x)
        must = torch.is_grad_enabled() or self.always_call or not self._called
        # Rows without any stay out. Where all are, gradients still want one call: every parameter is to get one (of 0).
        for k in sorted({*counts.tolist()} - {0}) or [0] * must:
            batch = (counts == k).nonzero()[:, 0]
            # Where rows cannot be told apart the block gets as many as ever: copies of the first of these, thrown away.
            these = batch if apart else torch.where(counts == k, torch.arange(len(x), device=x.device), batch[0])
            part, mine = plan.rows(these, max(k, 1)), self._arguments.rows(named, kinds, these, x)
            rows = self._one_call(x[these], part._replace(filled=None) if k else part, mine, kinds)
            y = y.to(rows.dtype).index_copy(0, batch, rows if apart else rows[batch])
        return y

    def _one_call(self, x: Tensor, plan: Slots, named: Given, kinds: Kinds) -> Tensor:
        rows = plan.dispatch(x, fill=0)[:, 0]
        found = self._arguments.gathered(named, kinds, plan, x)
        watched = plan.causal and rows.shape[1] > 1
        out = self._watched_block(rows, found, plan, named) if watched else self._block(rows, found)
        return plan.merge(x, out[:, None])

    def _block(self, rows: Tensor, named: Given) -> Tensor:
        if torch.compiler.is_compiling():
            out = self._arguments.call(self.block, rows, named)
        else:
            try:
                out = self._arguments.call(self.block, rows, named)
            except RuntimeError as error:
                if any(part is self for part in self.block.modules()):
                    raise InvalidValueError("block holds this layer itself: give it another block") from None
                _explain(error, rows, self.block)
                error.add_note(f"The block got {rows.shape[1]} tokens of each row: has it tables or windows over all?")
                raise
        self._called, self._after = True, None
        if isinstance(out, tuple) and out and all(more is None for more in out[1:]):
            out, self._after = out[0], out[1:]
        if not isinstance(out, Tensor) or out.shape != rows.shape or not out.is_floating_point():
            got = f"{out.dtype} of shape {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise InvalidValueError(
                f"block returned {got} for an input of shape {tuple(rows.shape)}: it must return a floating tensor of "
                "that shape, with its own residual, or a tuple of that and of None"
            )
        return out

    def _watched_block(self, rows: Tensor, found: Given, plan: Slots, named: Given) -> Tensor:
        """The block's result in a causal call, with a warning if what is known of torch's layers, or the gradient of a
        row's first token, shows that the block looks at later ones."""
        known, grad = self._arguments.torch_layer, torch.is_grad_enabled()
        if not (known if torch.compiler.is_compiling() else self._may_look()):
            return self._block(rows, found)
        if known:
            out, ahead = self._block(rows, found), not self._arguments.is_causal(named)
        else:
            with torch.enable_grad():
                watched = rows if rows.requires_grad else rows.detach().requires_grad_()
                out = self._block(watched.clone(), found)  # which the block may write to
                ahead = _first_sees_later(out, watched, plan)
            out = out if grad else out.detach()
        if ahead:
            warn_when_traced(
                f"causal=True chooses tokens causally, but the block, a {type(self.block).__name__}, looks at later "
                "tokens: give it a causal mask (such as is_causal=True), or do not count on causality"
            )
        return out

    def _may_look(self) -> bool:
        """True in the 1st, 2nd, 4th, 8th, ... call that can show whether the block looks ahead: a branch may start at
        zero. Gradients cannot where there are none, where the block's own routers add losses to them, in a checkpoint,
        which counts what is saved for them, under torch.func, and with FSDP2, whose hooks expect one backward pass."""
        if not self._arguments.torch_layer:
            counted = in_backward() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
            losses = any(isinstance(part, RouterTraining) and part.training for part in self.block.modules())
            sharded = any(type(weight).__name__ == "DTensor" for weight in self.block.parameters())
            elsewhere = torch.is_inference_mode_enabled() or torch._C._functorch.peek_interpreter_stack() is not None
            if losses or sharded or counted or elsewhere:
                return False
        self._looks += 1
        return not self._looks & (self._looks - 1)


def _check_device(x: Any, layer: nn.Module) -> None:
    if isinstance(x, Tensor) and x.is_meta and not next(layer.parameters()).is_meta:
        raise InvalidValueError("x is on the meta device, which holds no values: move the layer there too, or x here")


def _explain(error: RuntimeError, x: Tensor, weights: nn.Module) -> None:
    """Raise an error that names both dtypes, where torch refused to mix them."""
    mine, *kinds = (str(each.dtype).removeprefix("torch.") for each in (x, *weights.parameters()))
    if re.search("dtype|scalar ?type", str(error)) and kinds and mine not in kinds:
        what = f"x is {mine}, and the weights are {' and '.join(sorted({*kinds}))}"
        raise InvalidValueError(f"{what}: cast x or the layer, or use torch.autocast") from error


def _padded(x: Any, mask: Any, keep: Any) -> tuple[Tensor, Tensor]:
    """A nested tensor, whose rows differ in length -> (B, T, D) with zeros at the end, (B, T) True at real tokens."""
    if mask is not None or keep is not None:
        raise InvalidValueError("x is nested, with rows of different lengths: give it no mask and no keep")
    lengths = torch.tensor([len(row) for row in x.unbind()], device=x.device)
    padded = torch.nested.to_padded_tensor(x, 0.0)
    return padded, torch.arange(padded.shape[1], device=x.device) < lengths[:, None]


def _first_sees_later(out: Tensor, rows: Tensor, plan: Slots) -> bool:
    """True if the block's result for the first token of any row depends on the tokens after it."""
    first = out[:, 0] if plan.filled is None else out[plan.filled[:, 0, 0], 0]
    if not out.requires_grad:
        return False
    weighted = first * torch.arange(first.shape[-1]).to(first)  # the plain sum of a normalised token is constant
    try:
        (grad,) = torch.autograd.grad(weighted.sum(), rows, retain_graph=True, allow_unused=True)
    except RuntimeError:  # a block that cannot be asked, such as a compiled one that frees its buffers
        return False
    return grad is not None and bool(grad[:, 1:].any())


def _check_block(block: Any) -> None:
    """Refuse what would be silently wrong: an Update (its result lacks the residual), and tokens before batch."""
    if not isinstance(block, nn.Module):
        raise InvalidValueError(f"block is a {type(block).__name__}: it must be an nn.Module")
    if isinstance(block, MixtureOfDepths):
        what = f"block is a MixtureOfDepths itself, of capacity {block.capacity}"
        raise InvalidValueError(f"{what}: route once, with the product of both")
    if isinstance(block, Block | MoD | SoftMoD | MoE | SoftMoEUpdate | SwiGLU | Attention):
        what = f"block is a {type(block).__name__}, which returns an update without the residual"
        raise InvalidValueError(f"{what}: use depthgate.layers.MoD")
    for part, name in itertools.product(block.modules(), _OVER_ALL_PLACES):
        if isinstance(getattr(part, name, None), Tensor | nn.Module):
            raise InvalidValueError(f"block has {name}, which counts the places between tokens: it cannot be routed")
    torch_layers = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
    if any(isinstance(part, torch_layers) and not part.self_attn.batch_first for part in block.modules()):
        raise InvalidValueError("block has batch_first=False: build it with batch_first=True, x is (B, T, dim)")


def _called(forward: Callable[..., Any], layer: nn.Module, x: Any, causal: bool, mask: Tensor | None) -> Any:
    """What an update of ours returns, with errors that name the remedy."""
    _check_device(x, layer)
    try:
        return forward(x, causal=causal, mask=mask)
    except RuntimeError as error:
        _explain(error, x, layer)
        raise


class MixtureOfExperts(Named, MoE):
    """A feed-forward of which each token uses a part; an update, without the residual: y = x + layer(x).

    In training mode the router's losses join the backward pass, and thresholds move, by themselves.
    choice="tokens": each token goes to its `top_k` best of `num_experts` and `null_experts`.
    choice="experts": each expert takes a share `capacity` of the tokens (default top_k / num_experts) of its `pool`, so
    that a token has from none to all of the experts.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int = 2,
        choice: str = "tokens",
        null_experts: int = 0,
        *,
        hidden: int | None = None,
        shared_experts: int = 0,
        capacity: float | None = None,
        rule: str | nn.Module | None = None,
        pool: str | None = None,
        gate: str = "softmax",
        losses: str | None = "backward",
        rule_loss: float = 0.01,
        balance_loss: float = 0.01,
        z_loss: float = 0.001,
    ) -> None:
        """hidden: width of an expert (default 8/3 of dim).
        shared_experts: always on, together one SwiGLU that is so many times as wide.
        rule: how `causal=True` decides where experts choose: threshold (default) or predictor.
        pool: what experts choose out of, sequence (default: each row by itself) or batch (results of a row then depend
            on the others, unless `causal=True`).
        gate: what an expert's result is multiplied by, softmax (a token's probability for it) or sigmoid of its score.
        losses: "backward" puts the router's losses into the backward pass; None leaves them to the caller.
        rule_loss, balance_loss, z_loss: their weights, 0 for none; each where the choice has such a loss.
        """
        more: dict[str, Any] = {"hidden": hidden, "shared_experts": shared_experts, "capacity": capacity}
        super().__init__(dim, num_experts, top_k, choice, null_experts, rule=rule, pool=pool, gate=gate, **more)
        self.router_training = RouterTraining(losses, rule_loss, balance_loss, z_loss)

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, *, causal: bool = False, return_plans: bool = False
    ) -> Any:
        """x (B, T, D); mask (B, T), True at real tokens; causal, experts decide token by token by their rule.
        Returns the update (B, T, D), or (update, plans) with `return_plans=True`."""
        update, plans = _called(super().forward, self, x, causal, mask)
        update = self.router_training(update, plans[0], self.router)
        return (update, RecordedPlans(plans)) if return_plans else update


class SoftMoE(Named, SoftMoEUpdate):
    """A fully differentiable feed-forward by slots; an update, without the residual: y = x + layer(x).

    Each slot holds a weighted mean of all tokens of a row: not for causal models. The router needs no loss."""

    def __init__(self, dim: int, num_experts: int, slots_per_expert: int = 1, *, hidden: int | None = None) -> None:
        """num_experts: GELU networks with biases, each with its own slots.
        slots_per_expert: how many; num_experts * slots_per_expert rows are computed, however many tokens there are.
        hidden: width of an expert (default four times dim).
        """
        super().__init__(dim, num_experts, slots_per_expert, hidden=hidden)

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, *, causal: bool = False, return_plans: bool = False
    ) -> Any:
        """x (B, T, D); mask (B, T), True at real tokens; padding gets an update of 0; causal=True is refused.
        Returns the update (B, T, D), or (update, plans) with `return_plans=True`."""
        update, plans = _called(super().forward, self, x, causal, mask)
        return (update, RecordedPlans(plans)) if return_plans else update
