"""A folder of a tiny model with a tokenizer, and text it can read."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from tests.hf.zoo import dense


def save_tokenizer(folder):
    """Ids 0 to 95 are the words w0 to w95; w2 ends a text."""
    tokenizer = Tokenizer(WordLevel({f"w{i}": i for i in range(96)}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", unk_token="w0").save_pretrained(folder)


def save_model(folder, kind="llama", **how):
    """A dense model, or what `how` makes of it."""
    dense(kind).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def write_text(path, documents=40, length=60, seed=3):
    """Documents in which a word follows from the one before, mostly."""
    chance = torch.Generator().manual_seed(seed)
    lines = []
    for _ in range(documents):
        step = int(torch.randint(1, 4, (), generator=chance))
        start = int(torch.randint(90, (), generator=chance))
        lines.append(" ".join(f"w{3 + (start + step * i) % 93}" for i in range(length)))
    path.write_text("<|endoftext|>".join(lines))
    return path
