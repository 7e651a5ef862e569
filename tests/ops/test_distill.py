"""The loss of a student that learns from a teacher, against its naive twin."""

import pytest
import torch
from torch.autograd import gradcheck

from depthgate.ops import reference
from depthgate.ops.loss import linear_distillation
from tests.conftest import close

TARGETS = torch.tensor([3, -1, 0, 8, 2, -1, 5])


def sides(dim=4, teacher_dim=3):
    torch.manual_seed(0)
    student = [torch.randn(n, dim, dtype=torch.float64, requires_grad=True) for n in (7, 9)]
    return *student, *(torch.randn(n, teacher_dim, dtype=torch.float64) for n in (7, 9))


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize(("temperature", "text"), [(1.0, 0.0), (2.0, 0.3), (0.5, 1.0)])
def test_it_equals_its_twin(chunk, temperature, text):
    x, w, y, v = sides()
    found = linear_distillation(x, w, y, v, TARGETS, temperature, text, chunk)
    close(found, reference.linear_distillation(x, w, y, v, TARGETS, temperature, text))
    assert gradcheck(lambda x, w: linear_distillation(x, w, y, v, TARGETS, temperature, text, chunk), (x, w))


def test_a_student_that_equals_its_teacher_has_no_loss_and_no_gradient():
    x, w, _, _ = sides()
    loss = linear_distillation(x, w, x, w, TARGETS)
    loss.backward()
    for found in (loss, x.grad, w.grad):
        close(found, torch.zeros_like(found))


def test_without_targets_it_is_zero():
    x, w, y, v = sides()
    assert linear_distillation(x, w, y, v, torch.full((7,), -1)).item() == 0
