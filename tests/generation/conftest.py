"""A model that was really trained, a little, for all tests of the command."""

import pytest

from tests.train.tiny import train, write_data


@pytest.fixture(scope="package")
def model(tmp_path_factory):
    """The folder of a run: two layers, of which the second is routed; bytes; a context of 32."""
    folder = tmp_path_factory.mktemp("generate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder / "home"))
        assert (
            train(folder / "run", write_data(folder / "text.jsonl"), 60, "--model.pattern=dense,mod", "--lr=0.02") == 0
        )
    return str(folder / "run")
