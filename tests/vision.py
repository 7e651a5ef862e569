"""timm, torchvision and vit-pytorch, which live in a folder of their own beside the other packages.

PyPI's torchvision does not load its operators next to a CPU build of torch, and trl, where it finds a torchvision,
wants them. So only the tests that ask for it here see that folder (`make setup` fills it).
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(sys.prefix) / "vision"
# Importing torchvision gives them shapes, which needs their names; no test calls them.
OPERATORS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_library: torch.library.Library | None = None  # declarations last as long as this does


def package(name: str) -> ModuleType:
    """`timm` or `vit_pytorch`; skips the test where that is not installed."""
    global _library
    if _library is None:
        _library = torch.library.Library("torchvision", "FRAGMENT")
        for operator, declaration in OPERATORS.items():
            if not hasattr(torch.ops.torchvision, operator):
                _library.define(declaration)
    sys.path.append(str(FOLDER))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed: `make setup` puts it into {FOLDER}")
    finally:
        sys.path.remove(str(FOLDER))  # processes that a later test starts get a copy of the path
