"""docs/api.md: every public name, as its docstring says."""

import inspect
import re
import runpy
from pathlib import Path

import depthgate as dg

ROOT = Path(__file__).parents[1]


def test_the_page_of_public_names_is_that_of_the_docstrings():
    made = runpy.run_path(str(ROOT / "docs" / "make_api.py"))["page"]()
    assert (ROOT / "docs" / "api.md").read_text() == made, "run python docs/make_api.py"
    for name in dg.__all__:
        assert name == "__version__" or f"# dg.{name}\n" in made


def test_every_public_name_says_what_it_is():
    for name in dg.__all__:
        if name != "__version__":
            assert (getattr(dg, name).__doc__ or "").strip(), f"{name} has no docstring"


def test_every_argument_of_a_layer_is_described():
    for layer in (dg.MixtureOfDepths, dg.MixtureOfExperts, dg.SoftMoE):
        text = f"{layer.__doc__} {layer.__init__.__doc__}"
        names = set(inspect.signature(layer).parameters) - {"dim"}
        assert not [name for name in names if not re.search(rf"\b{name}\b", text)], layer.__name__
