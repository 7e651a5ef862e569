"""nn.TransformerEncoder with Mixture-of-Depths in one line, on padded sequences: does word 1 come before word 2?

python examples/transformer_encoder.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import depthgate as dg

WORDS, LENGTH, DIM = 40, 24, 64


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pos = nn.Embedding(WORDS, DIM), nn.Parameter(0.02 * torch.randn(LENGTH, DIM))
        layer = nn.TransformerEncoderLayer(DIM, 4, 128, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 4)
        self.encoder.layers[2] = dg.MixtureOfDepths(self.encoder.layers[2], DIM, capacity=0.5)  # the one line
        self.head = nn.Linear(DIM, 2)

    def forward(self, words):
        padding = words == 0  # never routed
        x = self.encoder(self.embed(words) + self.pos, src_key_padding_mask=padding)
        return self.head(x.masked_fill(padding[..., None], -torch.inf).amax(1))


def batch(rows=64):
    """Sequences of random words, 8 to 24 long, with one 1 and one 2 among the first eight; label 1 if 1 comes first."""
    words, lengths = torch.randint(3, WORDS, (rows, LENGTH)), torch.randint(8, LENGTH + 1, (rows,))
    place = torch.rand(rows, 8).argsort(1)[:, :2]  # of the 1 and of the 2
    words.scatter_(1, place, torch.tensor([1, 2]).expand(rows, 2))
    return words.masked_fill(torch.arange(LENGTH) >= lengths[:, None], 0), (place[:, 0] < place[:, 1]).long()


def main(steps):
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        words, label = batch()
        loss = F.cross_entropy(model(words), label)
        optimizer.zero_grad()
        loss.backward()  # the router's losses come with it
        optimizer.step()
        if step % 25 == 1 or step == steps:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    words, label = batch(1000)
    with torch.no_grad(), dg.record(model.eval()) as plans:
        accuracy = (model(words).argmax(1) == label).float().mean().item()
    print(f"accuracy {accuracy:.3f} on new sequences")
    print(plans)
    return accuracy, plans


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
