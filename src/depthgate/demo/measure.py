"""What the demo measures of a trained model, besides its loss: the text it was not trained on, and a sample."""

import math

import torch

from depthgate.config import TrainConfig
from depthgate.data.token_file import Documents, cache_folder, prepare
from depthgate.loading import LoadedDecoder

PROMPT = "def "
SAMPLED = 300  # tokens; a token is a byte here
TEMPERATURE = 0.8
MEASURED = 2**15  # most held-out tokens that the loss is measured on


def held_out(config: TrainConfig, model: LoadedDecoder) -> Documents:
    """The documents that a run did not train on."""
    return prepare(config.data, model.tokenizer, cache_folder()).validation


@torch.no_grad()
def sample(model: LoadedDecoder, seed: int, prompt: str = PROMPT) -> str:
    """The prompt and what the model makes of it, token by token, each from a pass over the last `context` tokens. The
    end of a document is never drawn, so that all samples are of one length."""
    generator = torch.Generator().manual_seed(seed)
    ids = model.tokenizer.encode(prompt)
    for _ in range(SAMPLED):
        logits = model(torch.tensor([ids[-model.config.context :]]), causal=True).logits[0, -1] / TEMPERATURE
        logits[model.tokenizer.end] = -math.inf
        ids.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
    return model.tokenizer.decode(ids)
