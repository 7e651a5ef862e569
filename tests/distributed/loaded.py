"""What the processes of these tests need, loaded once in the server that they are forked from."""

import importlib
from pathlib import Path

import pytest
import torch._dynamo
import torch.distributed.fsdp  # noqa: F401

import depthgate.commands.train
import depthgate.train.loop
import depthgate.view.runs  # noqa: F401
from depthgate.cli import build_parser

build_parser()
for _path in Path(__file__).parent.glob("test_*.py"):
    try:
        importlib.import_module(f"tests.distributed.{_path.stem}")
    except pytest.skip.Exception:  # of a package that is not installed
        continue
try:
    import transformers

    from depthgate.hf.families import FAMILIES

    for _family in FAMILIES.values():
        getattr(transformers, _family.model)
except ImportError:
    pass
