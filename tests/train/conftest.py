"""Every test of training has a home of its own, and so a cache of token files of its own."""

import pytest

from tests.train.tiny import write_data


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


@pytest.fixture
def data(tmp_path):
    """Some documents, a few hundred tokens in all."""
    return write_data(tmp_path / "text.jsonl")
