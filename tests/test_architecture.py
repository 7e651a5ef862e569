"""The order of imports, what importing costs, and the size of the house."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import depthgate

ROOT = Path(depthgate.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Each may import those before it, functions included; a package may import within itself.
ORDER = (
    *("errors", "options", "files", "config", "vision", "recipes", "flops", "device", "console"),
    *("ops", "routing", "layers", "encoders", "model", "vit_weights", "vit", "cache"),
    *("data", "checkpoint", "generation", "hf", "loading", "view", "gathering", "recording", "drop_in"),
    *("train", "isoflop", "serve"),
    *("commands", "cli", "__main__"),
)
HEAVY = {"transformers", "matplotlib", "ray", "triton", "soft_moe_pytorch", "starlette", "uvicorn", "jinja2"}


def home(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        assert not getattr(node, "level", 0), "an import that is relative cannot be held to the order"
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {alias.name for alias in node.names}
            found |= {node.module} | {f"{node.module}.{name}" for name in names}
            if node.module == "depthgate":  # names that it loads from a module when they are asked for
                found |= {depthgate._HOME[name] for name in names & depthgate._HOME.keys()}
    return found


def module(path: Path) -> str:
    return ".".join(("depthgate", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module(path): path for path in FILES}


@pytest.mark.parametrize("path", [p for p in FILES if home(p) != "__init__"], ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_to_an_earlier_package(path):
    mine = ORDER.index(home(path))
    for name in imports(ast.parse(path.read_text())):
        other = name.removeprefix("depthgate.").split(".")[0]
        if name.startswith("depthgate.") and other in ORDER:
            assert ORDER.index(other) < mine or other == home(path), f"{module(path)} imports {name}"


def test_modules_do_not_import_each_other_in_a_ring():
    graph = {name: imports(ast.parse(path.read_text())) & MODULES.keys() - {name} for name, path in MODULES.items()}
    graph["depthgate"] = set()  # loads names when they are asked for
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_layers_and_models_know_nothing_of_distribution_or_heavy_packages(path):
    tree = ast.parse(path.read_text())
    if home(path) in ("ops", "routing", "layers", "drop_in", "encoders", "model", "vit"):
        assert not any(name.startswith("torch.distributed") for name in imports(tree))
    top_level = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            top_level |= {name.split(".")[0] for name in imports(node)}
            others = {"_triton", "_transformers", "_starlette"} - {"_" + path.stem.rpartition("_")[2]}
            assert not any(name.endswith(tuple(others)) for name in imports(node))
    # A file of kernels needs Triton to be read at all; the function that launches them imports it. So does the one
    # file with a class that must be a class of transformers, and that of the server's application.
    assert not top_level & (HEAVY - {path.stem.rpartition("_")[2]})
    if home(path) in ("options", "config", "vision", "flops", "errors", "cli", "__init__", "__main__"):
        assert "torch" not in top_level


def test_the_package_and_its_help_import_no_torch():
    code = (
        "import sys, depthgate, depthgate.cli; depthgate.cli.build_parser(); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_loads():
    for name in depthgate.__all__:
        assert getattr(depthgate, name) is not None
    assert set(dir(depthgate)) == set(depthgate.__all__)


def test_the_house_stays_small():
    lines = {str(path): len(path.read_text().splitlines()) for path in FILES}
    assert {path: n for path, n in lines.items() if n > 400} == {}
    assert sum(lines.values()) <= 22_050
    assert len(lines) <= 127


def loads(name: str) -> set[str]:
    """Modules of depthgate, and the packages that they are in, that are loaded with this one."""
    found = set()
    for node in ast.parse(MODULES[name].read_text()).body:
        later = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if not later and not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            found |= imports(node)
    found |= {".".join(each.split(".")[:2]) for each in found}
    return found & MODULES.keys() - {"depthgate"}


@pytest.mark.parametrize(
    ("name", "most"), [("model", 30), ("commands.generate", 48), ("train.loop", 43), ("commands.view", 55)]
)
def test_a_reader_follows_imports_to_few_files(name, most):
    seen, left = set(), {f"depthgate.{name}"}
    while left:
        seen.add(following := left.pop())
        left |= loads(following) - seen
    assert len(seen) <= most, sorted(seen)
