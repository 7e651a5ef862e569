"""The same layers in a loop of accelerate, with accumulation: one call tells the routers how the loss is scaled.

pip install accelerate
accelerate launch examples/accelerate_loop.py      # one process or many
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import depthgate as dg

DIM, LENGTH, PARTS = 32, 16, 4


def build():
    def layer():
        return nn.TransformerEncoderLayer(DIM, 4, 64, batch_first=True, dropout=0.0)

    routed = dg.MixtureOfDepths(layer(), DIM, capacity=0.25)
    return nn.Sequential(nn.Linear(4, DIM), layer(), routed, layer(), nn.Linear(DIM, 4))


def data(rows=512):
    """Each token is to be mapped to the mean of its sequence."""
    x = torch.randn(rows, LENGTH, 4)
    return TensorDataset(x, x.mean(1, keepdim=True).expand_as(x))


def main(epochs):
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=PARTS)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(), batch_size=16, shuffle=True))
    scale = accelerator.scaler.get_scale if accelerator.scaler else lambda: 1.0
    losses = []
    for epoch in range(epochs):
        total = 0.0
        for x, target in loader:
            with accelerator.accumulate(model):
                dg.set_loss_scale(model, scale() / PARTS)  # accelerator.backward divides the loss, and may scale it
                loss = F.mse_loss(model(x), target)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / len(loader)
        losses.append(total)
        accelerator.print(f"epoch {epoch + 1}: loss {total:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    main(parser.parse_args().epochs)
