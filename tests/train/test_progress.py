"""What a run shows: trackers get what metrics.jsonl gets, and report.html follows the run."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from depthgate.errors import DepthgateWarning
from depthgate.train import run_folder
from tests.train.tiny import rows, train


def test_tensorboard_holds_the_metrics(tmp_path, data):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert train(tmp_path / "run", data, 3, "--tracker=tensorboard") == 0
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    found = rows(tmp_path / "run")
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3]
    for key in ("loss", "lr", "tokens", "gradient_norm"):
        assert [e.value for e in events.Scalars(key)] == pytest.approx([row[key] for row in found])
    assert [e.value for e in events.Scalars("routed_share/0")] == pytest.approx([r["routed_share"][0] for r in found])


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_other_trackers_are_opened_get_the_metrics_and_are_closed(tmp_path, data, name, monkeypatch):
    """With a module of that name that notes what it is called with."""
    calls = []
    noted = {
        "init": lambda **given: calls.append((given["project"], given["name"], given["config"]["steps"])),
        "log": lambda numbers, step: calls.append((step, numbers["loss"], numbers["routed_share/0"])),
        "finish": lambda: calls.append("finished"),
    }
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(**noted))
    assert train(tmp_path / "run", data, 2, f"--tracker={name}") == 0
    found = [(row["step"], row["loss"], row["routed_share"][0]) for row in rows(tmp_path / "run")]
    assert calls == [("depthgate", "run", 2), *found, "finished"]


def test_a_tracker_that_is_missing_is_named(tmp_path, data, capsys):
    missing = [name for name in ("trackio", "wandb") if importlib.util.find_spec(name) is None]
    if not missing:
        pytest.skip("trackio and wandb are both installed here: nothing is missing")
    assert train(tmp_path / "run", data, 3, f"--tracker={missing[0]}") == 2
    assert f"pip install {missing[0]}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert train(tmp_path / "run", data, 3, "--tracker=paper") == 2
    assert "tensorboard" in capsys.readouterr().err


def test_the_report_follows_the_run(tmp_path, data, monkeypatch):
    """With every row here; in life, now and then."""
    seen, report, real = [], tmp_path / "run" / "report.html", run_folder.Metrics.add

    def add(self, row):
        seen.append(report.read_text())
        real(self, row)

    monkeypatch.setattr(run_folder.Metrics, "add", add)
    monkeypatch.setattr(run_folder, "_REPORT_SECONDS", 0)
    monkeypatch.setattr(run_folder, "_REPORT_SHARE", 1e9)
    assert train(tmp_path / "run", data, 3) == 0
    assert "no step is recorded yet" in seen[0]
    assert all("this page reloads itself" in page for page in seen)
    assert ["3 of 3" in page for page in (*seen, report.read_text())] == [False, False, False, True]
    assert ["2 of 3" in page for page in seen] == [False, False, True]
    assert "The run has ended." in report.read_text()


def test_a_report_that_cannot_be_written_does_not_stop_a_run(tmp_path, data, monkeypatch):
    """One warning, and the run is what it would have been."""

    def full(folder, live):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("depthgate.view.runs.write_report", full)
    with pytest.warns(DepthgateWarning, match="No space left on device") as said:
        assert train(tmp_path / "run", data, 3) == 0
    assert len([each for each in said if "report.html" in str(each.message)]) == 1
    assert len(rows(tmp_path / "run")) == 3
    assert not (tmp_path / "run" / "report.html").exists()
