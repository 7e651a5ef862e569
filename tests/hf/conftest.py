"""Tiny models are fastest on one thread."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(_fixed_start):
    torch.set_num_threads(1)
