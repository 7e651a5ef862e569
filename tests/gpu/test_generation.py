"""Generation on CUDA: the tokens of the CPU, cached and not, sampled and searched. Skipped without a device."""

import pytest
import torch

import depthgate as dg
from tests.generation.models import built, prompts, said

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.mark.parametrize("options", [{"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2}, {"beams": 3}])
def test_tokens_are_those_of_the_cpu(options):
    model, texts = built("dense,mod", "scores"), prompts(5)
    expected = said(dg.generate(model, texts, max_new_tokens=12, **options))
    model = model.cuda()
    for cache in (True, False):
        assert said(dg.generate(model, texts, max_new_tokens=12, cache=cache, chunk=5, **options)) == expected
