"""Which layers of a pretrained model can be skipped: what it adds to the loss if a share of the tokens skips one layer,
or several at once, before any training.

    python benchmarks/which_layers.py --model DIR --data train.txt --valid valid.txt

All layers are routed and their routers calibrated on --data; a layer that is not looked at has capacity 1, where it is
the dense one. Tokens are taken by the top k. Prints nats a token over the dense model on --valid, and how much a layer
changes its tokens, by which --layers auto goes.
"""

import argparse
from itertools import islice
from typing import Any

import torch

import depthgate as dg
import depthgate.hf
import measure
from depthgate.data.sources import documents
from depthgate.hf.conversion import least_changing

Asked = argparse.Namespace


def windows(tokenizer: Any, data: str, rows: int, length: int) -> torch.Tensor:
    """The first tokens of a text (rows, length)."""
    text = "".join(islice(documents(data), rows * length))[: 16 * rows * length]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][: rows * length]
    if len(ids) < rows * length:
        raise dg.DepthgateError(f"{data} has {len(ids)} tokens: give a longer text, or fewer sequences")
    return torch.tensor(ids).view(rows, length)


@torch.no_grad()
def loss_of(model: Any, ids: torch.Tensor) -> float:
    """Nats a token, by the top k."""
    asked = {"causal_routing": False} if dg.hf.routed_layers(model) else {}
    return sum(float(model(row[None], labels=row[None], use_cache=False, **asked).loss) for row in ids) / len(ids)


def run(asked: Asked) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(asked.model)
    model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=getattr(torch, asked.dtype)).to(asked.device).eval()
    seen = windows(tokenizer, asked.data, asked.calibrate, asked.seq).to(asked.device)
    held_out = windows(tokenizer, asked.valid, asked.windows, asked.seq).to(asked.device)
    dense, changes = loss_of(model, held_out), dg.hf.layer_changes(model, seen)
    depth = len(changes)
    dg.hf.convert(model, 0.5, range(depth), gate="straight_through", rule="threshold")
    dg.hf.calibrate(model, seen)
    sets = {"every_other": list(range(1, depth, 2)), "auto": least_changing(changes)}
    rows: list[dict[str, Any]] = []
    for name, chosen in {**sets, **{str(i): [i] for i in range(depth)}}.items():
        row: dict[str, Any] = {"layers": name, "change": changes[chosen[0]] if len(chosen) == 1 else None}
        for capacity in asked.capacities:
            dg.hf.set_capacity(model, [capacity if i in chosen else 1.0 for i in range(depth)])
            row[str(capacity)] = loss_of(model, held_out) - dense
        rows.append(row)
        measure.say(str(row))
    columns = {key: (lambda row, key=key: measure.number(row[key])) for key in ("change", *map(str, asked.capacities))}
    about = {"dense": round(dense, 4), "auto": sets["auto"]}
    measure.report(asked, rows, "Nats a token over dense", {"layers": lambda row: row["layers"], **columns}, **about)


def options() -> argparse.ArgumentParser:
    found = measure.parser(__doc__)
    found.add_argument("--model", required=True, help="folder of a dense model")
    found.add_argument("--data", required=True, help="text that routers are calibrated on, as for depthgate train")
    found.add_argument("--valid", required=True, help="text that is measured on")
    found.add_argument("--capacities", type=lambda text: [float(e) for e in text.split(",")], default=[0.5, 0.75])
    found.add_argument("--seq", type=int, default=512)
    found.add_argument("--calibrate", type=int, default=16, help="sequences")
    found.add_argument("--windows", type=int, default=4, help="sequences that are measured on")
    return found


if __name__ == "__main__":
    measure.main(run, options().parse_args())
