"""One browser for all tests, and one tiny trained run."""

import pytest

from tests.train.tiny import train, write_data
from tests.view.chromium import Browser


@pytest.fixture(scope="session")
def browser():
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A folder with runs of some steps: mod, resumed after step 5; staged mode with experts, two of them null; and
    integrated mode."""
    folder = tmp_path_factory.mktemp("view")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        data = write_data(folder / "text.jsonl")
        routed = ("--model.pattern=dense,mod", "--model.layers=4")
        assert train(folder / "mod", data, 5, *routed) == 0
        assert train(folder / "mod", data, 12, *routed, "--resume") == 0
        experts = ("--model.experts=4", "--model.null_experts=2", "--model.capacity=0.5", "--model.rule=scores")
        assert train(folder / "mode", data, 6, "--model.pattern=moe,mode_staged", *experts) == 0
        assert train(folder / "integrated", data, 6, "--preset=tiny-mode", "--model.experts=4") == 0
        yield folder


@pytest.fixture(scope="session")
def run(runs):
    return runs / "mod"
