"""Random models that route some tokens and not others, and prompts for them."""

import torch

import depthgate as dg
from depthgate.routing import Threshold

VOCAB = 40


def built(pattern="dense,mod", rule="scores", seed=0, vocab=VOCAB, context=64):
    """A model whose routers say yes and no, in float64 so that no rounding decides for them."""
    torch.manual_seed(seed)
    recipe = dict.fromkeys(
        ("key_shift", "embed_norm", "router_norm", "qk_norm"), "mo" in pattern and pattern != "dense,mod"
    )
    config = dg.ModelConfig(
        **{"vocab": vocab, "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "context": context},
        **{"experts": 4, "null_experts": int("moe" in pattern)},
        **{"pattern": pattern, "rule": rule, "capacity": 0.3 if "random" in pattern else 0.125, **recipe},
    )
    model = dg.Decoder(config).double().eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.3)
    for module in model.modules():
        if isinstance(module, Threshold):
            module.average.fill_(0.2)
            module.weight.fill_(1.0)
    return model


def prompts(rows, seed=0):
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 20, (rows,), generator=draw).tolist()
    return [torch.randint(VOCAB, (n,), generator=draw).tolist() for n in sizes]


def said(results):
    return [(r.tokens, r.finish, r.depths, r.routed) for r in results]
