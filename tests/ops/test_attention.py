"""Attention over packed runs: where runs begin, by hand. (The kernel itself is compared with a mask in tests/gpu.)"""

import torch

from depthgate.ops.attention import can_pack, run_starts


def test_runs_by_hand():
    doc = torch.tensor([[0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0], [0, 1, 2, 2, -1, -1]])
    # Three runs and one of padding a row, empty ones included: 2 3 0 1, 6 0 0 0, 1 1 2 2.
    assert run_starts(doc, 3).tolist() == [0, 2, 5, 5, 6, 12, 12, 12, 12, 13, 14, 16, 18]
    assert run_starts(doc, 3).dtype == torch.int32


def test_a_cpu_uses_masks():
    assert not can_pack(torch.zeros(1, 2, 1, 8, dtype=torch.bfloat16))
