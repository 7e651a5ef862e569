"""A causal language model in plain PyTorch, dense and with Mixture-of-Depths, trained with equal FLOPs.

python examples/causal_lm.py 3e12      # training FLOPs of each: about two minutes on two CPU cores
"""

import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import depthgate as dg
from depthgate.device import count_flops

CONTEXT, BATCH = 256, 8


class Block(nn.Module):  # causal attention and a feed-forward, with their residuals
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.ffn(self.norm2(x))


class LM(nn.Module):  # bytes in, logits of the next byte out; with a capacity, every other block is routed
    def __init__(self, capacity=None, dim=128, heads=4, layers=6):
        super().__init__()
        self.embed, self.pos = nn.Embedding(256, dim), nn.Parameter(0.02 * torch.randn(CONTEXT, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        for i in range(1, layers, 2) if capacity else ():
            self.blocks[i] = dg.MixtureOfDepths(self.blocks[i], dim, capacity)
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, 256)

    def forward(self, tokens):
        x = self.embed(tokens) + self.pos[: tokens.shape[1]]
        for block in self.blocks:  # the top k in training; in evaluation each token decides for itself
            x = block(x, causal=not self.training) if isinstance(block, dg.MixtureOfDepths) else block(x)
        return self.head(self.norm(x))

    def loss(self, text, starts):
        rows = torch.stack([text[i : i + CONTEXT + 1] for i in starts]).long()
        return F.cross_entropy(self(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train(name, model, text, held, flops):
    steps = round(flops / count_flops(lambda: model.loss(text, [0] * BATCH).backward()))
    optimizer, start = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1), time.perf_counter()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 20, 1 - i / (steps + 1)))
    for step in range(steps):
        (loss := model.loss(text, torch.randint(len(text) - CONTEXT, (BATCH,)))).backward()  # with those of the routers
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % (steps // 8 + 1) == 0:
            print(f"{name:8} step {step} of {steps}: loss {loss.item():.3f}", flush=True)
    print(f"{name:8} {steps:5} steps {time.perf_counter() - start:5.0f} s", end="   ", flush=True)
    nats = model.eval().requires_grad_(False).loss(held, range(0, len(held) - CONTEXT, CONTEXT)).item()
    print(f"{nats:.3f} nats a byte on held-out text", flush=True)


def main(flops):
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    for name, capacity in (("dense", None), ("MoD 25%", 0.25)):
        torch.manual_seed(0)
        train(name, LM(capacity), text[:-65536], text[-65536:], flops)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 3e12)
