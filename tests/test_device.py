"""Devices: FLOPs against numbers worked by hand, rounds of timed calls, and what figures carry."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from depthgate.device import count_flops, interleaved, machine
from depthgate.layers import Attention, Block, MoD, MoE, SwiGLU
from depthgate.routing import TopTokens


def _leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def test_linear_by_hand() -> None:
    layer = torch.nn.Linear(8, 12)
    x = _leaf(3, 5, 8)
    product = 2 * 3 * 5 * 8 * 12
    assert count_flops(lambda: layer(x)) == product
    assert count_flops(lambda: layer(x).sum().backward()) == 3 * product


def test_attention_by_hand_and_by_its_written_out_form() -> None:
    B, H, T, S, d = 2, 4, 6, 10, 8
    q, k, v = _leaf(B, H, T, d), _leaf(B, H, S, d), _leaf(B, H, S, d)

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    product = 2 * B * H * T * S * d  # q k^T, and weights v
    assert count_flops(forward) == 2 * product
    fused = count_flops(lambda: forward().sum().backward())
    with sdpa_kernel(SDPBackend.MATH):
        assert count_flops(forward) == 2 * product
        written_out = count_flops(lambda: forward().sum().backward())
    assert written_out == 6 * product  # each forward product has two gradients
    assert fused == 7 * product  # the fused backward computes the weights again


def test_grouped_attention_counts_query_heads() -> None:
    B, H, T, d = 2, 4, 6, 8
    q, k, v = _leaf(B, H, T, d), _leaf(B, 2, T, d), _leaf(B, 2, T, d)
    flops = count_flops(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward())
    assert flops == 7 * 2 * B * H * T * T * d


def test_a_whole_block_and_its_mod_by_hand() -> None:
    B, T, D, hidden = 2, 16, 32, 24

    def block_flops(tokens: int) -> int:
        linear = 2 * B * tokens * (D * 3 * D + D * D + D * 2 * hidden + hidden * D)
        return linear + 2 * 2 * B * tokens * tokens * D

    block = Block(D, Attention(D, 2), SwiGLU(D, hidden))
    x = torch.randn(B, T, D)
    assert count_flops(lambda: block(x)) == block_flops(T)
    router = 2 * B * T * D
    mod = MoD(block, TopTokens(D, 0.25))
    assert count_flops(lambda: mod(x)) == block_flops(T // 4) + router


def test_mixture_of_experts_by_hand() -> None:
    B, T, D, E, K, hidden = 2, 8, 16, 4, 2, 24
    layer = MoE(D, E, K, hidden=hidden)
    router, experts = 2 * B * T * D * E, 2 * B * T * K * 3 * D * hidden
    assert count_flops(lambda: layer(torch.randn(B, T, D))) == router + experts


def test_rounds_run_every_case_in_turn() -> None:
    ran: list[str] = []
    cases = {"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}
    seconds = interleaved(cases, repeats=2, warmup=1, device="cpu", between=lambda: ran.append("-"))
    assert "".join(ran) == "-a-b" * 3
    assert [len(s) for s in seconds.values()] == [2, 2]  # the warm-up is not among them
    assert min(min(s) for s in seconds.values()) >= 0


def test_machine_names_what_a_figure_must_carry() -> None:
    about = machine()
    assert about["torch"] == torch.__version__
    assert about["threads"] == torch.get_num_threads()
    assert {"device", "date", "commit", "python", "cores"} <= about.keys()
