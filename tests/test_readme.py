"""README: its code runs, its commands exist, its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_every_python_block_runs_in_order():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 4
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`?make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    "page", sorted(["README.md", "CONTRIBUTING.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))])
)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if not link.startswith("https://"):
            assert ((ROOT / page).parent / link.split("#")[0]).exists(), link


def test_readme_names_real_options():
    for name in re.findall(r"`(one_plus_tanh|sigmoid|raw|straight_through)`", README):
        from depthgate.routing import GATES

        assert name in GATES
