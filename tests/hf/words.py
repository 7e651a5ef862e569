"""A folder of a tiny model with a tokenizer, and text it can read."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import depthgate as dg
from tests.hf.zoo import dense


def save_tokenizer(folder):
    """Ids 3 to 95 are the words w3 to w95; 1 begins a text and 2 ends it."""
    words = ["<unknown>", "<begin>", "<end>", *(f"w{i}" for i in range(3, 96))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 1)])
    names = {"bos_token": "<begin>", "eos_token": "<end>", "unk_token": "<unknown>", "pad_token": "<end>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def save_model(folder, kind="llama", capacity=None, **options):
    """A dense model, or one converted at a capacity."""
    model = dense(kind)
    if capacity is not None:
        dg.hf.convert(model, capacity, **options)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def texts(documents=40, length=60, seed=3):
    """Words of which each follows from the one before, in one of three ways."""
    chance = torch.Generator().manual_seed(seed)
    starts = torch.randint(90, (documents,), generator=chance).tolist()
    steps = torch.randint(1, 4, (documents,), generator=chance).tolist()
    return [
        " ".join(f"w{3 + (start + step * i) % 93}" for i in range(length))
        for start, step in zip(starts, steps, strict=True)
    ]


def write_text(path, **options):
    path.write_text("<|endoftext|>".join(texts(**options)))
    return path
