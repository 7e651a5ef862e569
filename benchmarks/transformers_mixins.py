"""transformers' own model and generation tests, run on a routed model and on the dense one of its family.

    pip download --no-deps --no-binary :all: transformers==5.22.2 && tar xf transformers-5.22.2.tar.gz
    pip install parameterized
    python benchmarks/transformers_mixins.py transformers-5.22.2 [--family mistral] [--routed_shapes] [--json] \
        [--only test_training]

The tree must be of the transformers that is installed. A source distribution holds the model tests alone; a checkout of
the repository also holds tests/generation/test_utils.py, and its tests are then run, too. Routers are random here, not
neutral, so that half of the layers really skip tokens. With --routed_shapes the generation tests take attentions and
caches of the shapes that a routed layer has; without, they stop there, and what they compare after it is not reached.
"""

import argparse
import copy
import importlib
import io
import itertools
import json
import sys
import types
import unittest
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import initialization

from depthgate.hf import classes
from depthgate.hf.families import FAMILIES, Routing

# Tests that a routed model cannot pass, and why.
_ATTENTIONS = "a routed layer attends among the tokens that entered: (C, C), not (T, T); if none did, there is nothing"
_CACHE = "a routed layer's cache has places for the tokens that entered, and spare ones, not one for each token"
REASONS = {
    "test_sliding_window_mask": _ATTENTIONS,
    "test_custom_4d_attention_mask": "refused: a mask of all pairs of tokens does not tell which ones are padding",
    "test_inherits_generation_mixin": "it looks at the class's own bases; ours come to it through the dense class",
    "test_past_key_values_format": _CACHE,
    "test_generate_with_static_cache": _CACHE,
    "test_generate_from_inputs_embeds_with_static_cache": _CACHE,
    "test_greedy_generate_dict_outputs": _ATTENTIONS,
    "test_greedy_generate_dict_outputs_use_cache": _ATTENTIONS,
    "test_sample_generate_dict_output": _ATTENTIONS,
    "test_beam_search_generate_dict_output": _ATTENTIONS,
    "test_beam_search_generate_dict_outputs_use_cache": _ATTENTIONS,
    "test_beam_sample_generate_dict_output": _ATTENTIONS,
    "test_assisted_decoding_matches_greedy_search_0_random": _ATTENTIONS,
    "test_assisted_decoding_matches_greedy_search_1_same": _ATTENTIONS,
    "test_assisted_decoding_sample": _ATTENTIONS,
    "test_prompt_lookup_decoding_matches_greedy_search": _ATTENTIONS,
    "test_generate_compilation_all_outputs": _ATTENTIONS,
}


def random_router(router: Any, *_: Any) -> None:
    """In the place of `neutral`: scores above and below 0, as where the causal rule decides; what was loaded stays."""
    chance = torch.Generator().manual_seed(5)
    for name, parameter in router.named_parameters():
        scale = 0.0 if name.endswith("bias") else 0.5
        initialization.copy_(parameter, torch.randn(parameter.shape, generator=chance) * scale)


def mixins(tree: Path) -> tuple[type, ...]:
    """The mixins of a source tree; modules that a source distribution leaves out are empty ones."""
    sys.path.insert(0, str(tree))
    for name, mixin in (
        ("tests.exporters.test_export", "ExportTesterMixin"),
        ("tests.generation.test_utils", "GenerationTesterMixin"),
    ):
        try:
            importlib.import_module(name)
        except ImportError:
            print(f"{tree} has no {name}: left out", file=sys.stderr)
            empty = types.ModuleType(name)
            setattr(empty, mixin, type(mixin, (), {}))
            package = name.rpartition(".")[0]
            sys.modules.setdefault(package, types.ModuleType(package))
            sys.modules[name] = empty
    common = importlib.import_module("tests.test_modeling_common")
    return common.ModelTesterMixin, sys.modules["tests.generation.test_utils"].GenerationTesterMixin


class RoutedShapes:
    """The generation mixin's checks of shapes on the dense layer, the first; and on the routed one what it has."""

    def _check_attentions_for_generate(self, batch_size: int, attentions: Any, *args: Any, **kwargs: Any) -> None:
        for dense, *routed in attentions:  # nothing where no token entered
            for each in routed:
                assert all(a <= b for a, b in zip(each.shape, dense.shape, strict=True)), (each.shape, dense.shape)
        of_dense = tuple(each[:1] for each in attentions)
        super()._check_attentions_for_generate(batch_size, of_dense, *args, **kwargs)  # type: ignore[misc]

    def _check_past_key_values_for_generate(
        self, batch_size: int, past_key_values: Any, seq_length: int, config: Any
    ) -> None:
        dense, routed = past_key_values.layers
        assert routed.get_seq_length() == seq_length, (routed.get_seq_length(), seq_length)
        held = ((routed.keys, dense.keys), (routed.values, dense.values)) if routed.is_initialized else ()
        for mine, theirs in held:
            assert (*mine.shape[:2], mine.shape[3]) == (*theirs.shape[:2], theirs.shape[3]), (mine.shape, theirs.shape)
        of_dense = copy.copy(past_key_values)
        of_dense.layers = [dense, dense]
        super()._check_past_key_values_for_generate(batch_size, of_dense, seq_length, config)  # type: ignore[misc]


class Tester:
    """Values that the mixins ask for: a small config, and inputs with padding."""

    is_training = True
    batch_size, seq_length, hidden_size = 5, 7, 32
    num_hidden_layers, num_attention_heads, num_key_value_heads = 2, 2, 2

    def __init__(self, parent: Any, family: str, routed: bool) -> None:
        self.parent, self.family, self.routed = parent, family, routed

    def get_config(self) -> Any:
        shape = {
            "vocab_size": 99,
            "hidden_size": self.hidden_size,
            "intermediate_size": 37,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if not self.routed:
            return getattr(transformers, FAMILIES[self.family].config)(**shape)
        routing = Routing((1,), 0.5, rule="scores").written()
        return classes.config_class(self.family)(**shape, depthgate=routing)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        ids = torch.randint(3, 99, (self.batch_size, self.seq_length))
        mask = torch.ones_like(ids).tril(0) if self.seq_length == self.batch_size else torch.ones_like(ids)
        mask[0, -1] = 0
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


def case(tree: Path, family: str, routed: bool, routed_shapes: bool = False) -> type[unittest.TestCase]:
    model = classes.model_class(family) if routed else getattr(transformers, FAMILIES[family].model)

    def set_up(self: Any) -> None:
        torch.manual_seed(0)
        self.model_tester = Tester(self, family, routed)

    body = {"all_model_classes": (model,), "all_generative_model_classes": (model,), "setUp": set_up}
    shapes = (RoutedShapes,) if routed_shapes else ()
    return type("Routed" if routed else "Dense", (*shapes, *mixins(tree), unittest.TestCase), body)


def outcome(test: unittest.TestCase) -> tuple[str, str]:
    """passed, skipped or failed; and why."""
    result = unittest.TestResult()
    stream, sys.stdout = sys.stdout, io.StringIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            test.run(result)
    finally:
        sys.stdout = stream
    if result.skipped:
        return "skipped", result.skipped[0][1]
    wrong = result.failures + result.errors
    return ("failed", wrong[0][1].strip().splitlines()[-1]) if wrong else ("passed", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="llama")
    parser.add_argument("--routed_shapes", action="store_true", help="take the shapes that a routed layer has")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="tests with this in their name")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    classes.neutral = random_router  # type: ignore[assignment]
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    dense = case(options.tree, options.family, routed=False)
    routed = case(options.tree, options.family, True, options.routed_shapes)
    generation = sys.modules["tests.generation.test_utils"].GenerationTesterMixin
    for name in unittest.TestLoader().getTestCaseNames(routed):
        if options.only in name:
            mixin = "generation" if hasattr(generation, name) else "model"
            row = {"test": name, "mixin": mixin, "dense": outcome(dense(name)), "routed": outcome(routed(name))}
            rows.append(row)
            if not options.json and row["routed"][0] != row["dense"][0]:
                print(name, "dense", *row["dense"], "| routed", *row["routed"], REASONS.get(name, ""), flush=True)
    if options.json:
        print(json.dumps(rows))
        return 0
    for mixin, kind in itertools.product(("model", "generation"), ("dense", "routed")):
        found = [row[kind][0] for row in rows if row["mixin"] == mixin]
        print(mixin, kind, {what: found.count(what) for what in ("passed", "skipped", "failed")})
    failed = [row["test"] for row in rows if row["routed"][0] == "failed"]
    print("failed without a reason", sorted(set(failed) - set(REASONS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
