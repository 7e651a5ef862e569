"""Vision transformers on CUDA: products in bfloat16, steps as graphs, and runs that go on."""

import numpy as np
import pytest
import torch

from depthgate.cli import main
from depthgate.layers import SoftMoE
from depthgate.ops import reference, soft
from tests.conftest import close
from tests.train.tiny import rows, same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.mark.parametrize("compiled", [False, True])
def test_soft_products_in_bfloat16_are_near_their_twins(compiled):
    x, valid = torch.randn(4, 49, 64), torch.rand(4, 49) > 0.2
    slots, bound = 8 * torch.nn.functional.normalize(torch.randn(64, 24), dim=0), torch.tensor([8.0])

    def through(module, *given):
        weights = module.soft_exponentials(*given)
        return module.weighted_means(weights, module.weighted_means(weights.mT, given[0]))

    def both(*given):
        return through(soft, *given)

    given = [x.cuda().bfloat16().requires_grad_(), slots.cuda().bfloat16().requires_grad_(), bound.cuda(), valid.cuda()]
    found = (torch.compile(both) if compiled else both)(*given)
    wanted = through(reference, x.requires_grad_(), slots.requires_grad_(), bound, valid)
    close(found.float().cpu(), wanted, torch.bfloat16)
    found.sum().backward()
    wanted.sum().backward()
    for mine, twin in ((given[0], x), (given[1], slots)):
        gap = (mine.grad.float().cpu() - twin.grad).norm() / twin.grad.norm()
        assert gap < 0.05


@pytest.mark.parametrize("compiled", [False, True])
def test_soft_moe_under_autocast_is_near_float32(compiled):
    layer, x = SoftMoE(64, 8, 2, scale=8.0).cuda(), torch.randn(4, 49, 64, device="cuda", requires_grad=True)
    of, found = (x, *layer.parameters()), []
    for cast in (True, False):
        with torch.autocast("cuda", torch.bfloat16, enabled=cast):
            update, (plan,) = (torch.compile(layer) if compiled and cast else layer)(x)
        assert plan.dispatching.dtype is (torch.bfloat16 if cast else torch.float32)
        grad_x, *grads = torch.autograd.grad(update.float().square().sum(), of)
        assert {grad.dtype for grad in grads} == {torch.float32}
        found.append((update, grad_x, torch.cat([grad.flatten() for grad in grads])))  # one number may nearly cancel
    for mine, exact in zip(*found, strict=True):
        assert (mine.float() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("options", [["--model.pattern=soft_moe"], ["--model.pattern=moe"], ["--compile=true"]])
def test_four_and_four_steps_equal_eight(tmp_path, options):
    random = np.random.default_rng(0)
    pixels, labels = random.integers(0, 256, (64, 16, 16, 3), np.uint8), np.arange(64) % 4
    np.savez(tmp_path / "a.npz", x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    more = ["--randaugment=0.5", "--mixup=0.3", "--cutmix=0.3", "--erasing=0.3", "--drop_path=0.2", "--dtype=bfloat16"]
    shape = ["--model.dim=64", "--model.layers=2", "--model.heads=2", "--model.experts=8", "--batch=16"]
    run = [
        "train",
        "--task=images",
        f"--data={tmp_path / 'a.npz'}",
        "--device=cuda",
        "--schedule_steps=8",
        *more,
        *shape,
    ]
    assert main([*run, f"--out={tmp_path / 'whole'}", "--steps=8", *options]) == 0
    assert main([*run, f"--out={tmp_path / 'parts'}", "--steps=4", *options]) == 0
    assert main(["train", "--resume", f"--out={tmp_path / 'parts'}", "--steps=8"]) == 0
    assert same(tmp_path / "whole", tmp_path / "parts")
    assert [row["step"] for row in rows(tmp_path / "whole")] == [*range(1, 9)]
