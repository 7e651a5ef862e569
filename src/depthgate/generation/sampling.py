"""The next token from logits, and the random numbers that choose it. Nothing but `check_logits` waits for the device.

A choice is a function of one row's logits and one number: probabilities become integers, whose sums are exact, so no
order of summing, no other row and no device moves a token's place between 0 and 1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthgate.errors import InvalidValueError, check_count
from depthgate.generation.config import Sampling


def pick(logits: Tensor, sampling: Sampling, seen: Tensor | None = None, uniform: Tensor | None = None) -> Tensor:
    """A token id for each row of logits, (B, V) -> (B,).

    seen: (B, V) bool, the tokens of prompt and output so far; needed where there is a repetition penalty.
    uniform: (B,) numbers in [0, 1), float64 for full precision; needed unless greedy. Tokens lie in order of their
    ids on [0, 1), each as long as its probability after all filters, and the one at that number is taken.

    Greedy takes the first of the largest. Logits that `check_logits` refuses give some id in range.
    """
    if sampling.greedy:
        return _penalised(logits, sampling, seen).argmax(-1)
    if uniform is None or uniform.shape != logits.shape[:1]:
        found = None if uniform is None else tuple(uniform.shape)
        raise InvalidValueError(
            f"uniform is {found} for logits {tuple(logits.shape)}: give one number in [0, 1) for each row"
        )
    ends = weights(logits, sampling, seen).cumsum(-1)  # (B, V): where each token's interval ends
    total = ends[:, -1]
    # The largest numbers may round to the very end, where no token lies.
    target = torch.minimum((uniform.double() * total).long(), total - 1).clamp(min=0)
    return torch.searchsorted(ends, target[:, None], right=True)[:, 0].clamp(max=logits.shape[1] - 1)


def weights(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Probabilities after all filters as integers whose sum in a row is at most 2**62; not for greedy sampling.

    The best token has 2**45 where V is 2**17: what falls below 2**-45 of it counts as 0.
    """
    x = _penalised(logits, sampling, seen)
    if sampling.top_k is not None:
        # Temperature keeps the order, so this may come first: dividing could round two logits to a tie.
        kth = x.topk(min(sampling.top_k, x.shape[1]), -1).values[:, -1:]
        x = x.masked_fill(x < kth, -torch.inf)
    x = (x - x.amax(-1, keepdim=True)) / _tame(sampling.temperature)  # at most 0: nothing overflows
    share = x.exp()  # of the best token's probability
    weight = (share * 2.0 ** (62 - (x.shape[1] - 1).bit_length())).long()
    if sampling.top_p is not None and sampling.top_p < 1:
        order = x.sort(dim=-1, descending=True, stable=True).indices  # stable: the lower of two equal ids comes first
        sums = weight.gather(1, order).cumsum(-1)
        reached = sums.double() >= sampling.top_p * sums[:, -1:].double()
        after = reached.roll(1, -1)  # a token is dropped where those before it reach top_p
        after[:, 0] = False
        weight = weight.masked_fill(torch.empty_like(after).scatter_(1, order, after), 0)
    if sampling.min_p is not None:
        weight = weight.masked_fill(share < sampling.min_p, 0)
    return weight


def check_logits(logits: Tensor) -> None:
    """Refuse rows with NaN or +inf, and rows without any finite logit. Waits for the device."""
    bad = ~logits.amax(-1).isfinite()  # NaN is larger than all
    if bad.any():
        rows = bad.nonzero()[:, 0].tolist()
        raise InvalidValueError(
            f"the logits of row {rows[0]} ({len(rows)} of {len(bad)} rows) have NaN or +inf, or no finite number: "
            "check the model's weights, or compute in bfloat16 or float32"
        )


def _penalised(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """Logits in fp32; those of seen tokens made smaller (CTRL, Keskar et al. 2019, section 4.1)."""
    if logits.dim() != 2 or not logits.shape[1]:
        raise InvalidValueError(f"logits are {tuple(logits.shape)}: they must be (rows, vocabulary)")
    x = logits.float()
    if sampling.repetition_penalty == 1:
        return x
    if seen is None or seen.shape != x.shape:
        found = None if seen is None else tuple(seen.shape)
        raise InvalidValueError(
            f"seen is {found} for logits {tuple(x.shape)}: repetition_penalty {sampling.repetition_penalty} needs the "
            "tokens that occurred, of the same shape"
        )
    penalty = _tame(sampling.repetition_penalty)
    smaller = torch.where(x < 0, x * penalty, x / penalty).clamp(max=torch.finfo(x.dtype).max)
    return torch.where(seen, smaller, x)


def _tame(value: float) -> float:
    """Kept where it and its inverse are ordinary fp32 numbers: 0 / 0 and inf * 0 would be NaN."""
    return min(max(value, 2.0**-100), 2.0**100)


class Draws:
    """Each request's own stream of numbers in [0, 1): splitmix64 (Steele, Lea and Flood 2014), entered at any step.

    Number n is the upper 53 bits of mix(start + (n + 1) * GAMMA) as a fraction, where start = mix(seed + GAMMA): a
    function of seed and n alone. Nothing advances, so there is no state to save, and rows of a batch may leave, come
    and change places. Equal seeds give equal streams.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device | str | None = None) -> None:
        checked = [check_count(seed, "seed", 0, 2**63 - 1) for seed in seeds]
        self._start = _mix(torch.tensor(checked, dtype=torch.int64, device=device) + _GAMMA)

    def at(self, rows: Sequence[int] | Tensor, step: int | Tensor) -> Tensor:
        """The numbers of these requests, counted as the seeds were, at a step from 0: (B,) float64. Both may be
        tensors, on the device of the streams; `step` is then one for all or one for each row."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        count = torch.as_tensor(step, dtype=torch.int64) + 1
        return _right(_mix(self._start[index] + count * _GAMMA), 11).double() * 2.0**-53


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


class Sampler:
    """The next tokens of a batch of requests: each has its own random numbers and knows the tokens it has seen.
    `drawn` is how many numbers were taken from their streams before."""

    def __init__(
        self, sampling: Sampling, prompts: Sequence[Sequence[int]], vocab: int, device: torch.device, drawn: int = 0
    ) -> None:
        self.sampling, self.drawn = sampling, drawn
        self.draws = Draws(sampling.seeds(len(prompts)), device)
        self.requests = torch.arange(len(prompts), device=device)
        self.seen: Tensor | None = None  # (B, V) bool
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(len(prompts), vocab, dtype=torch.bool, device=device)
            for seen, ids in zip(self.seen, prompts, strict=True):
                seen[torch.tensor(ids, device=device)] = True

    def __call__(self, logits: Tensor) -> Tensor:
        """(B, V) -> (B,)"""
        check_logits(logits)
        uniform = None if self.sampling.greedy else self.draws.at(self.requests, self.drawn)
        tokens = pick(logits, self.sampling, self.seen, uniform)
        if self.seen is not None:
            self.seen.scatter_(1, tokens[:, None], True)
        self.drawn += 1
        return tokens

    def select(self, rows: Tensor) -> None:
        """Go on with these rows."""
        self.requests = self.requests[rows]
        self.seen = None if self.seen is None else self.seen[rows]
