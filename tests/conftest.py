"""Shared by all tests: one table of tolerances by dtype, and a fixed start for every test."""

import gc
import os
import signal

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is loaded: threads that spin starve shared cores
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no processes that load torch to compile a few kernels

import torch

from depthgate import device
from depthgate.errors import warn_once

# (rtol, atol) by dtype: how far two right answers may be apart when they sum in another order.
TOLERANCE = {
    torch.float64: (1e-10, 1e-12),
    torch.float32: (1e-4, 1e-5),
    torch.bfloat16: (3e-2, 3e-2),
    torch.float16: (5e-3, 5e-3),
}

settings.register_profile("default", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("default")
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2  # `make test` runs two workers side by side
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as a shell starts what it puts into the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


_interleaved = device.interleaved


def _one_product(cases, repeats, warmup, *rest, **named):
    """Every run begins with the speed of a matrix product on this machine, the best of several; here it is one."""
    return _interleaved(cases, *((1, 0) if set(cases) == {"product"} else (repeats, warmup)), *rest, **named)


device.interleaved = _one_product


def pytest_sessionstart():
    gc.disable()  # until all tests are collected: what modules make when they are loaded is no garbage


def pytest_collection_finish():
    """Everything that was loaded stays: no collection of garbage looks at its million objects again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(5000, 10, 100)
    gc.enable()


@pytest.fixture(autouse=True)
def _fixed_start():
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    torch._dynamo.reset()
    warn_once.cache_clear()


def close(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Assert equality within the tolerance of `dtype` (by default that of a)."""
    rtol, atol = TOLERANCE[dtype or a.dtype]
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol, check_dtype=False)
