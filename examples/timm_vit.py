"""A timm vision transformer with Soft MoE in its second half and Mixture-of-Depths in its first, on drawn shapes.

pip install timm
python examples/timm_vit.py
"""

import argparse

import timm
import torch
import torch.nn.functional as F

import depthgate as dg

SIZE, PATCH = 32, 4


def build():
    vit = timm.create_model(
        "vit_tiny_patch16_224", img_size=SIZE, patch_size=PATCH, embed_dim=96, depth=4, num_heads=3, num_classes=3
    )
    vit.blocks[1] = dg.MixtureOfDepths(vit.blocks[1], 96, capacity=0.5, keep=1)  # the class token is always computed
    for block in vit.blocks[2:]:
        block.mlp = dg.SoftMoE(96, num_experts=16)
    return vit


def images(rows=64):
    """Noise with a bright square, disc or cross somewhere: the class is its shape."""
    label, centre = torch.randint(3, (rows,)), torch.randint(8, SIZE - 8, (rows, 2, 1, 1))
    grid = torch.stack(torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij"))
    down, right = (grid - centre).abs().unbind(1)
    square, disc = (down <= 5) & (right <= 5), down**2 + right**2 <= 36
    cross = ((down <= 1) & (right <= 6)) | ((right <= 1) & (down <= 6))
    shape = torch.stack((square, disc, cross), 1)[torch.arange(rows), label]
    return 0.5 * torch.randn(rows, 3, SIZE, SIZE) + shape[:, None], label


def main(steps):
    torch.manual_seed(0)
    vit = build()
    optimizer = torch.optim.AdamW(vit.parameters(), lr=1e-3)
    for step in range(1, steps + 1):
        pixels, label = images()
        loss = F.cross_entropy(vit(pixels), label)
        optimizer.zero_grad()
        loss.backward()  # the router's losses come with it; Soft MoE needs none
        optimizer.step()
        if step % 25 == 1 or step == steps:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    pixels, label = images(512)
    with torch.no_grad(), dg.record(vit.eval()) as plans:
        accuracy = (vit(pixels).argmax(1) == label).float().mean().item()
    print(f"accuracy {accuracy:.3f} on new images")
    print(plans)
    plans.save_page("timm_vit.html", grid=(SIZE // PATCH, SIZE // PATCH), prefix=1)
    print("timm_vit.html shows the patches that were computed, and those that feed each slot")
    return accuracy, plans


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
