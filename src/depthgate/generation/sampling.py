"""The next token from logits, and the random numbers that choose it. Only `check_logits` waits for the device.

A choice is a function of one row's logits and one number: probabilities become integers, whose sums are exact, so no
order of summing, no other row and no device moves a token's place between 0 and 1.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from depthgate.errors import InvalidValueError
from depthgate.generation.config import Sampling

NOT_FINITE = (
    "the logits of {} have NaN or +inf, or no finite number: "
    "check the model's weights, or compute in bfloat16 or float32"
)


class Filters(NamedTuple):
    """Sampling options of every row, each (B, 1). A filter that is None is that of no row."""

    temperature: Tensor | None = None  # 0: greedy; None: every row is greedy
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    repetition_penalty: Tensor | None = None

    @classmethod
    def of(cls, options: Tensor, used: Sequence[bool]) -> Self:
        """Those of rows (B, 5) as `as_numbers` gives them, of which some are used."""
        return cls(*(column[:, None] if use else None for column, use in zip(options.unbind(1), used, strict=True)))

    @classmethod
    def all_alike(cls, sampling: Sampling, device: torch.device | str) -> Self:
        """One row, which stands for all."""
        # In float64, as Python numbers are.
        return cls.of(
            torch.tensor([as_numbers(sampling)], dtype=torch.float64, device=device), used_filters([sampling])
        )


_NOTHING = (0.0, float("inf"), 1.0, 0.0, 1.0)  # filters that change nothing, in the order of Filters


def as_numbers(sampling: Sampling) -> list[float]:
    """The filters of one request, in the order of Filters."""
    found = [getattr(sampling, name) for name in Filters._fields]
    return [nothing if value is None else float(value) for value, nothing in zip(found, _NOTHING, strict=True)]


def used_filters(rows: Iterable[Sampling]) -> tuple[bool, ...]:
    """True for each filter that one of the requests has."""
    columns = zip(*map(as_numbers, rows), strict=True)
    return tuple(any(value != nothing for value in column) for column, nothing in zip(columns, _NOTHING, strict=True))


def pick(
    logits: Tensor, filters: Filters | Sampling, seen: Tensor | None = None, numbers: Tensor | None = None
) -> Tensor:
    """A token id for each row of logits, (B, V) -> (B,).

    seen: (B, V) bool, the tokens of prompt and output so far; needed where there is a repetition penalty.
    numbers: (B,) in [0, 1), float64 for full precision; needed unless greedy. Tokens lie in order of their ids on
    [0, 1), each as long as its probability after all filters, and the one at that number is taken.

    Greedy takes the first of the largest. Logits that `check_logits` refuses give some id in range.
    """
    if isinstance(filters, Sampling):
        filters = Filters.all_alike(filters, logits.device)
    x = _penalised(logits, filters, seen)
    likeliest = x.argmax(-1)
    if filters.temperature is None:
        return likeliest
    ends = _weights(x, filters).cumsum(-1)  # (B, V): where each token's interval ends
    assert numbers is not None
    total = ends[:, -1]
    # The largest numbers may round to the very end, where no token lies.
    target = torch.minimum((numbers.double() * total).long(), total - 1).clamp(min=0)
    drawn = torch.searchsorted(ends, target[:, None], right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return torch.where(filters.temperature[:, 0] == 0, likeliest, drawn)


def _weights(x: Tensor, filters: Filters) -> Tensor:
    """Probabilities after all filters as integers whose sum in a row is at most 2**62; not for greedy sampling.

    The best token has 2**45 where V is 2**17: what falls below 2**-45 of it counts as 0.
    """
    V = x.shape[1]
    if filters.top_k is not None:
        # Temperature keeps the order, so this may come first: dividing could round two logits to a tie.
        last = filters.top_k.clamp(max=V).long() - 1
        x = x.masked_fill(x < x.sort(dim=-1, descending=True).values.gather(1, last.expand(len(x), 1)), -torch.inf)
    assert filters.temperature is not None
    x = (x - x.amax(-1, keepdim=True)) / _tame(filters.temperature).float()  # at most 0: nothing overflows
    share = x.exp()  # of the best token's probability
    weight = (share * 2.0 ** (62 - (V - 1).bit_length())).long()
    if filters.top_p is not None:
        order = x.sort(dim=-1, descending=True, stable=True).indices  # stable: the lower of two equal ids comes first
        sums = weight.gather(1, order).cumsum(-1)
        reached = sums.double() >= filters.top_p * sums[:, -1:].double()
        after = reached.roll(1, -1)  # a token is dropped where those before it reach top_p
        after[:, 0] = False
        after = after & (filters.top_p < 1)
        weight = weight.masked_fill(torch.empty_like(after).scatter_(1, order, after), 0)
    if filters.min_p is not None:
        weight = weight.masked_fill(share < filters.min_p.float(), 0)
    return weight


class Likely(NamedTuple):
    """Log-probabilities, as the model says, before all filters."""

    token: Tensor  # (N,) of the token that was picked
    best: Tensor  # (N, n) of the likeliest, best first
    ids: Tensor  # (N, n) which these are

    def read(self) -> list[tuple[float, list[tuple[int, float]]]]:
        """Those of each row, for the host. Waits for the device."""
        best = [list(zip(*row, strict=True)) for row in zip(self.ids.tolist(), self.best.tolist(), strict=True)]
        return list(zip(self.token.tolist(), best, strict=True))


def likely(logits: Tensor, tokens: Tensor, top: int | None) -> Likely | None:
    """Log-probabilities of the tokens (N,), and of the `top` likeliest; None where top is None."""
    if top is None:
        return None
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(top, logits.shape[1]), -1)
    return Likely(logprobs.gather(1, tokens[:, None])[:, 0], best.values, best.indices)


def check_logits(logits: Tensor) -> None:
    """Refuse rows with NaN or +inf, and rows without any finite logit. Waits for the device."""
    bad = ~logits.amax(-1).isfinite()  # NaN is larger than all
    if bad.any():
        rows = bad.nonzero()[:, 0].tolist()
        raise InvalidValueError(NOT_FINITE.format(f"row {rows[0]} ({len(rows)} of {len(bad)} rows)"))


def _penalised(logits: Tensor, filters: Filters, seen: Tensor | None) -> Tensor:
    """Logits in fp32; those of seen tokens made smaller (CTRL, Keskar et al. 2019, section 4.1)."""
    x = logits.float()
    if seen is None or filters.repetition_penalty is None:
        return x
    penalty = _tame(filters.repetition_penalty).float()
    smaller = torch.where(x < 0, x * penalty, x / penalty).clamp(max=torch.finfo(x.dtype).max)
    return torch.where(seen & (penalty != 1), smaller, x)


def _tame(values: Tensor) -> Tensor:
    """Kept where they and their inverses are ordinary fp32 numbers: 0 / 0 and inf * 0 would be NaN."""
    return values.clamp(2.0**-100, 2.0**100)


def uniform(seeds: Tensor, step: int | Tensor) -> Tensor:
    """The number of each request (B,) at a step from 0, in [0, 1), float64: each seed has its own stream of splitmix64
    (Steele, Lea and Flood 2014), entered at any step.

    It is the upper 53 bits of mix(start + (step + 1) * GAMMA) as a fraction, where start = mix(seed + GAMMA): nothing
    advances, so there is no state to save, and rows of a batch may leave, come and change places.
    """
    return _right(_mix(_mix(seeds + _GAMMA) + (torch.as_tensor(step) + 1) * _GAMMA), 11).double() * 2.0**-53


# As signed numbers: int64 products and sums wrap around, which is arithmetic modulo 2**64 as splitmix64 wants it.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX2 = 0x94D049BB133111EB - 2**64


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _right(z, 30)) * _MIX1
    z = (z ^ _right(z, 27)) * _MIX2
    return z ^ _right(z, 31)


def _right(z: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros; >> of a negative number fills with ones."""
    return (z >> by) & ((1 << (64 - by)) - 1)
