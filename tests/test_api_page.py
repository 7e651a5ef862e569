"""docs/api.md: every public name, as its docstring says."""

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
