"""Who may import whom, what importing costs, and that files stay small."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import depthgate

ROOT = Path(depthgate.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# layer of the library -> what else of it may be imported there
ALLOWED = {
    "_version": set(),
    "errors": set(),
    "config": {"errors"},
    "console": {"errors"},
    "ops": {"errors", "ops"},
    "routing": {"errors", "ops", "routing"},
    "layers": {"errors", "ops", "routing", "layers"},
    "flops": {"config", "ops"},
    "cache": {"errors"},
    "generation": {"errors", "config", "routing", "model", "cache", "loading", "train", "generation"},
    "model": {"errors", "config", "ops", "routing", "layers"},
    "presets": {"errors", "config"},
    "train": {"errors", "config", "presets", "flops", "ops", "routing", "layers", "model", "loading", "train"},
    "loading": {"errors", "config", "flops", "model", "train", "hf"},
    "encoders": {"errors", "ops", "routing", "layers"},
    "view": {"errors", "routing", "view"},
    "bench": {
        *("errors", "config", "presets", "flops", "ops", "routing", "layers", "encoders", "model", "train"),
        *("loading", "generation", "hf", "bench"),
    },
    "showing": {"errors", "config", "routing", "loading", "train", "hf", "view", "showing"},
    "hf": {"errors", "config", "ops", "routing", "model", "train", "bench", "hf"},
    "converting": {"errors", "hf", "loading", "train"},
    "evaluating": {"errors", "config", "loading", "train", "bench", "hf"},
    "isoflop": {"errors", "config", "flops", "ops", "loading", "model", "train", "bench", "view", "isoflop"},
    "demo": {"errors", "config", "presets", "flops", "routing", "loading", "train", "bench", "view", "demo"},
    "cli": {
        *("_version", "errors", "config", "console", "flops", "presets", "demo", "bench", "train", "generation"),
        *("hf", "isoflop", "view", "evaluating", "showing"),
    },
    "__main__": {"cli"},
    "__init__": {
        "_version",
        "config",
        "errors",
        "ops",
        "routing",
        "layers",
        "encoders",
        "model",
        "loading",
        "generation",
        "hf",
    },
}
# plans.plot() is the one door from plans to pictures, opened when it is called
DOORS = {"routing/plan.py": {"view"}}
HEAVY = {"transformers", "matplotlib", "ray", "triton", "soft_moe_pytorch"}


def home(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path):
    ours = {name.split(".")[1] for name in imports(ast.parse(path.read_text())) if name.startswith("depthgate.")}
    homes = {home(p) for p in FILES}
    assert ours & homes <= ALLOWED[home(path)] | DOORS.get(str(path.relative_to(ROOT)), set())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_layers_and_models_know_nothing_of_distribution_or_heavy_packages(path):
    tree = ast.parse(path.read_text())
    if home(path) in ("ops", "routing", "layers", "encoders", "model"):
        assert not any(name.startswith("torch.distributed") for name in imports(tree))
    top_level = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            top_level |= {name.split(".")[0] for name in imports(node)}
            assert not any(name.endswith(("_triton", ".cache_transformers")) for name in imports(node))
    # A file of kernels needs Triton to be read at all; whoever launches them imports it where it does. So does the one
    # file with a class that must be a class of transformers.
    assert not top_level & (HEAVY - {path.stem.rpartition("_")[2]})
    if home(path) in ("config", "flops", "errors", "cli", "__init__", "__main__", "_version"):
        assert "torch" not in top_level


def test_the_package_and_its_help_import_no_torch():
    code = (
        "import sys, depthgate, depthgate.cli; depthgate.cli.build_parser(); depthgate.hf; "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_loads():
    for name in depthgate.__all__:
        assert getattr(depthgate, name) is not None
    assert set(dir(depthgate)) == set(depthgate.__all__)


def test_files_stay_small():
    assert {str(p): n for p in FILES if (n := len(p.read_text().splitlines())) > 300} == {}
