"""Training and evaluation of vision transformers, in the one loop of all runs."""

import math
import os
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthgate.checkpoint.store import CONFIG
from depthgate.data.batches import Rows
from depthgate.data.images import Images, Shuffled, augmented, chance, open_images, some_of
from depthgate.device import ALONE, World, resolve_device
from depthgate.errors import DepthgateError
from depthgate.flops import training_flops
from depthgate.loading import is_hugging_face, load
from depthgate.recipes import images_config
from depthgate.routing import Groups, Plans, depth_plans, load_balance, routed_share, z_loss
from depthgate.train import optim, run_folder
from depthgate.train.loop import Loop
from depthgate.train.parallel import joined, spread
from depthgate.train.step import precision
from depthgate.vision import ImagesConfig
from depthgate.vit import SHAPE, ViT

_GLANCE = 1024  # held-out images that a run looks at
_BINS = 15  # of confidence, for the calibration error


def train(config: ImagesConfig, resume: bool) -> int:
    """Train a vision transformer, or go on; the exit code: 0 when done or asked to stop, 130 when interrupted."""
    with joined(resolve_device(config.device)) as world, ExitStack() as stack:
        config, images, held_out = fitted(config)  # before anything is written
        if world.first:
            stack.enter_context(run_folder.opened(config, resume))
            many = f"{len(images.labels):,} to train on, {len(held_out.labels):,} held out"
            print(f"{config.data}: {many}, {len(images.names)} classes; {config.steps:,} steps", file=sys.stderr)
        world.wait()
        task = Classification(config, images, world)
        graph = optim.capturable(config, world, experts="moe" in config.model.kinds)
        weights = dict(task.model.named_parameters())
        optimizers = [optim.adamw(weights, config, _decays, world.device if graph else "")]
        shuffled = Shuffled(images, config.model.context, config.seed, config.repeats)
        loop = Loop(config, task, optimizers, shuffled, world, names="\n".join(images.names))
        these = some_of(len(held_out.labels), _GLANCE)
        seen = Images(held_out.pixels[these], held_out.labels[these], images.names)
        loop.look = lambda: glance(task.model, seen, config, world.device)
        loop.look_every = max(-(-config.steps // 10), 32 * len(seen.labels) // config.batch)
        return loop.run(resume)


def fitted(config: ImagesConfig) -> tuple[ImagesConfig, Images, Images]:
    """The configuration that fits its images, those to train on, and those held out."""
    if config.pretrained is not None:
        config = replace(config, model=_begun(config).config)
    asked = None if config.model.image is None else config.model.size
    train, held_out = open_images(config.data, asked, config.corrupt)
    _, channels, *size = train.pixels.shape
    if config.pretrained is not None and channels != (reads := config.model.channels):
        raise DepthgateError(f"{config.data} has {channels} channels, {config.pretrained} reads {reads}: give others")
    config = config.with_data((size[0], size[1]), channels, len(train.names))
    if config.epochs is not None:
        steps = max(1, math.ceil(config.epochs * len(train.labels) / config.batch))
        config = replace(config, steps=steps, warmup=min(config.warmup, -(-steps // 10)), epochs=None)
    return config, train, held_out


def _begun(config: ImagesConfig) -> ViT:
    """A new model, or a pretrained one, whose shape no preset changes."""
    if config.pretrained is None:
        return ViT(config.model)
    preset, given = vars(images_config(config.preset).model), vars(config.model).items()
    asked = {name: each for name, each in given if each is not None and (name not in SHAPE or each != preset[name])}
    folder = Path(config.pretrained)
    ours = os.path.exists(folder / CONFIG) and not is_hugging_face(folder)
    return ViT.from_pretrained(load(folder) if ours else folder, **asked).float().train()


def _decays(name: str, weight: Tensor) -> bool:
    return weight.ndim >= 2 and not name.endswith("bias") and name not in ("position", "prefix")


class Classification:
    """The task of a vision transformer that learns the classes of images."""

    falling_steps = 0

    def __init__(self, config: ImagesConfig, images: Images, world: World = ALONE) -> None:
        self.config, self.goal, self.capacity = config, config.model.capacity, config.model.capacity
        torch.manual_seed(config.seed)
        model, (N, _, *size) = _begun(config), images.pixels.shape
        if not model.begin_head(images.names) and world.first:
            print(f"{config.pretrained} tells other classes apart: its head begins with zeros", file=sys.stderr)
        if config.pretrained is None:
            wide = images.pixels[some_of(N, 1 + 2**24 // math.prod(size))].float() / 255
            model.pixel_mean.copy_(wide.mean((0, 2, 3)))
            model.pixel_std.copy_(wide.std((0, 2, 3)).clamp(min=1e-3))
        self.model = spread(model.to(world.device), config.compile, world, "forward")
        compiled = config.compile and world.size == 1
        self._forward = torch.compile(self.model, dynamic=False) if compiled else self.model
        self._augmented = torch.compile(augmented, dynamic=False) if compiled else augmented
        self._surviving = torch.compile(surviving, dynamic=False) if compiled else surviving

    def set_capacity(self, capacity: float) -> None:
        """Never asked to: the capacity of images stays what it is."""

    def loss(self, rows: Rows) -> tuple[Tensor, Tensor | float, list[Tensor], Plans]:
        config, mean, std = self.config, self.model.pixel_mean, self.model.pixel_std
        with torch.no_grad(), torch.autocast(rows.tokens.device.type, enabled=False):
            x, target = self._augmented(rows.tokens, rows.targets, rows.pos, config, mean, std)
            survive = self._surviving(rows.pos, config)
        logits, plans = self._forward(x, survive=survive)
        of_routers: Tensor | float = 0.0
        for plan in plans:
            if isinstance(plan, Groups):
                of_routers = of_routers + config.z_loss * z_loss(plan) + config.balance_loss * load_balance(plan)
        shares = [routed_share(plan) for plan in depth_plans(plans)]
        loss = torch.nn.functional.cross_entropy(logits.float(), target)
        return loss, of_routers, shares, ()

    def flops_per_token(self, capacity: float) -> float:
        return training_flops(replace(self.config.model, capacity=capacity))

    def held(self) -> dict[str, Tensor]:
        return self.model.state_dict()


def surviving(number: Tensor, config: ImagesConfig) -> Tensor | None:
    """Factors of the updates of each layer (layers, B): 0 for images that skip it, else what keeps the mean."""
    if not config.drop_path:
        return None
    layers = config.model.layers
    drop = [config.drop_path * (layer / (layers - 1) if layers > 1 else 1) for layer in range(layers)]
    return torch.stack([(chance(number, config.seed, 100 + i) >= p) / (1 - p) for i, p in enumerate(drop)])


def glance(model: ViT, images: Images, config: ImagesConfig, device: str) -> dict[str, Any]:
    """Figures of some held-out images, for the page of a run."""
    with torch.compiler.set_stance("force_eager"), precision(config, device), suppress(DepthgateError):
        found = measure(model, images, config.batch, device)
        row = {"held_out_loss": found["loss"], "held_out_accuracy": found["accuracy"]}
        return row | {"causal_share": [], "agreement": []}  # layers of images take the top k, and ask no rule
    return {}


@torch.no_grad()
def measure(model: ViT, images: Images, batch: int, device: str | torch.device) -> dict[str, Any]:
    """Accuracy, loss in nats and calibration error of a model: how far confidence is from accuracy, the mean over bins
    of equal width, weighted by their images."""
    right, sure, losses, shares = [], [], [], list[list[Tensor]]()
    for pixels, label in zip(*(torch.split(each, batch) for each in images[:2]), strict=True):
        logits, plans = model(pixels.to(device))
        chances = logits.float().log_softmax(-1).cpu()
        best = chances.max(-1)
        right.append(best.indices == label)
        sure.append(best.values.exp())
        losses.append(-chances.gather(1, label[:, None])[:, 0])
        shares.append([routed_share(plan) * len(label) for plan in depth_plans(plans)])
    hit, confidence, loss = (torch.cat(each).double() for each in (right, sure, losses))
    if not torch.isfinite(loss).all():
        raise DepthgateError("the model gives losses that are not finite: its weights are damaged")
    place = (confidence * _BINS).long().clamp(max=_BINS - 1)
    gap = torch.zeros(_BINS, dtype=torch.float64).index_add(0, place, confidence - hit)
    counts = images.labels.bincount(minlength=len(images.names))
    hits = torch.zeros(len(images.names), dtype=torch.float64).index_add(0, images.labels, hit)
    return {
        "images": len(hit),
        "accuracy": float(hit.mean()),
        "loss": float(loss.mean()),
        "calibration_error": float(gap.abs().sum() / len(hit)),
        "confidence": float(confidence.mean()),
        "accuracy_by_class": {images.names[i]: float(hits[i] / counts[i]) for i in counts.nonzero()[:, 0].tolist()},
        "routed_share": [float(sum(layer)) / len(hit) for layer in zip(*shares, strict=True)],
    }
