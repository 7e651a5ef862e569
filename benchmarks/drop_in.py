"""Mixture-of-Depths around nn.TransformerEncoderLayer: time and FLOPs of forward and backward, against the plain layer.

    python benchmarks/drop_in.py

A layer is timed only after it gave the right answer: the plain layer on the tokens that it chose, gradients included.
"""

import argparse
import copy
from statistics import median

import torch
from torch import Tensor, nn

import depthgate as dg
import measure
from depthgate.device import count_flops, interleaved


def main(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    dtype = getattr(torch, options.dtype)
    plain = nn.TransformerEncoderLayer(options.dim, options.dim // 64, dropout=0.0, batch_first=True)
    plain = plain.to(options.device, dtype)
    x = torch.randn(options.batch, options.tokens, options.dim, device=options.device, dtype=dtype, requires_grad=True)
    layers: dict[str, nn.Module] = {"dense": plain}
    for share in options.capacities.split(","):
        layers[f"{float(share):.1%}"] = dg.MixtureOfDepths(copy.deepcopy(plain), options.dim, float(share)).to(x)
    rows: list[measure.Row] = [{"layer": name} for name in layers]
    for row, layer in zip(rows[1:], list(layers.values())[1:], strict=True):
        if error := _error(layer, plain, x.detach()):
            row["error"] = error
    right = {row["layer"]: layers[row["layer"]] for row in rows if "error" not in row}
    cases = {name: lambda layer=layer: layer(x).sum().backward() for name, layer in right.items()}
    seconds = interleaved(cases, options.repeats, 3, options.device)
    flops = {name: count_flops(case) for name, case in cases.items()}
    for row in rows:
        if row["layer"] in right:
            name = row["layer"]
            ratios = [mine / dense for mine, dense in zip(seconds[name], seconds["dense"], strict=True)]
            row |= {"ms": 1e3 * median(seconds[name]), "time": median(ratios), "flops": flops[name] / flops["dense"]}
    columns = {
        "capacity": lambda row: row["layer"],
        "ms": measure.figure("ms", 1),
        "time / dense": measure.figure("time", 2),
        "FLOPs / dense": measure.figure("flops", 3),
    }
    title = f"nn.TransformerEncoderLayer({options.dim}), {options.batch} x {options.tokens}, forward and backward"
    measure.report(options, rows, title, columns, threads=torch.get_num_threads())


def _error(layer: nn.Module, plain: nn.Module, x: Tensor) -> str | None:
    """What is wrong with a routed layer's result and gradient on some rows; None if nothing is."""
    x = x[:2].clone().requires_grad_()
    y, (plan,) = layer.eval()(x, return_plans=True)
    tokens = plan.tokens[:, 0]
    rows = x.gather(1, tokens[..., None].expand(-1, -1, x.shape[-1]))
    gates = plan.gates[:, 0, :, None].to(x.dtype)
    new = (1 - gates) * rows + gates * plain.eval()(rows)
    expected = x.scatter(1, tokens[..., None].expand_as(new), new)
    seed = torch.randn_like(y)
    got, want = (torch.autograd.grad(each, x, seed, retain_graph=True)[0] for each in (y, expected))
    layer.train()
    plain.train()
    tolerance = 1e-3 if x.dtype == torch.float32 else 5e-2
    apart = max((y - expected).abs().max().item(), (got - want).abs().max().item() / want.abs().max().item())
    return None if apart < tolerance else f"{apart:.2g} from the plain layer on the chosen tokens"


if __name__ == "__main__":
    parser = measure.parser(__doc__ or "")
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--capacities", default="0.125,0.25,0.5,1")
    parser.add_argument("--repeats", type=int, default=15)
    measure.main(main, parser.parse_args())
