"""Attention over packed runs: where runs begin, by hand. (The kernel itself is compared with a mask in tests/gpu.)"""

import pytest
import torch

from depthgate.ops.attention import cached_attention, can_pack, run_starts


def test_runs_by_hand():
    doc = torch.tensor([[0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0], [0, 1, 2, 2, -1, -1]])
    # Three runs and one of padding a row, empty ones included: 2 3 0 1, 6 0 0 0, 1 1 2 2.
    assert run_starts(doc, 3).tolist() == [0, 2, 5, 5, 6, 12, 12, 12, 12, 13, 14, 16, 18]
    assert run_starts(doc, 3).dtype == torch.int32


def test_a_cpu_uses_masks():
    assert not can_pack(torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("queries", [1, 3])
def test_grouped_heads_look_at_what_the_mask_allows(heads, groups, queries):
    q = torch.randn(2, heads, queries, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, groups, 5, 8, dtype=torch.float64)
    mask = torch.rand(2, 1, queries, 5) > 0.4
    mask[..., 0] = True
    for b in range(2):
        for h in range(heads):
            g = h // (heads // groups)
            for t in range(queries):
                weight = torch.where(mask[b, 0, t], k[b, g] @ q[b, h, t] / 8**0.5, -torch.inf).softmax(0)
                torch.testing.assert_close(cached_attention(q, k, v, mask)[b, h, t], weight @ v[b, g])
