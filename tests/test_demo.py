"""The demo from the command line to its report, and the page it is written with."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from depthgate.cli import main
from depthgate.view import page as pages

ENCODERS = ("dense twin", "MoD 0.5", "MoD 0.25", "Soft MoE")
SMALL = ["--epochs", "1", "--hidden_size", "16", "--num_layers", "2"]


def demo(out: Path, *options: str) -> int:
    return main(["demo", "--out", str(out), *SMALL, *options])


def test_last_line_is_the_report_which_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Long enough for rich to wrap it, and with characters that HTML would read as markup.
    out = tmp_path / ("a long <folder> & name " * 6).strip()
    assert demo(out) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == str(out / "report.html")
    text = Path(last).read_text()
    for name in ENCODERS:
        assert f'<th scope="row">{name}</th>' in text
    assert "http://" not in text
    assert "https://" not in text
    assert "<script" not in text
    assert "<folder>" not in text
    assert "&lt;folder&gt;" in text


def test_one_seed_gives_one_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = []
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        assert demo(tmp_path / name, "--seed", seed, "--json") == 0
        results.append(json.loads(capsys.readouterr().out))  # one object and nothing else
    times = [[row.pop("train_seconds") for row in result["rows"]] for result in results]
    assert all(seconds > 0 for run in times for seconds in run)
    a, b, c = (result["rows"] for result in results)
    assert a == b
    assert [row["accuracy"] for row in a] != [row["accuracy"] for row in c]
    assert results[0]["report"] == str(tmp_path / "a" / "report.html")

    # 8 rows, the last among them: 8, 4 and 2 are routed in every layer.
    assert [row["encoder"] for row in a] == list(ENCODERS)
    assert [row["routed_share"] for row in a] == [1.0, 0.5, 0.25, 1.0]
    # By hand, at width 16: input 8x16 and routers over 8 rows, head 16x10; of a block, for each of its k rows, qkv and
    # out 16x(48+16), SwiGLU of hidden 48: 16x96+48x16, and attention 2 x 16 over k rows.
    shared = 2 * (8 * 8 * 16 + 16 * 10)
    for row, k in zip(a, (8, 4, 2), strict=False):
        block = 8 * 16 + k * (16 * 64 + 16 * 96 + 48 * 16) + k * k * 2 * 16
        assert row["flops"] == shared + 2 * 2 * block
        assert row["flops_ratio"] == row["flops"] / a[0]["flops"]


def test_refused_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    blocked = tmp_path / "file" / "out"
    for out, options, said in (
        (blocked, [], f"cannot write {blocked}"),
        (tmp_path / "out", ["--epochs", "0"], "epochs is 0"),
        (tmp_path / "out", ["--hidden_size", "18"], "hidden_size"),
    ):
        assert demo(out, *options) == 2
        captured = capsys.readouterr()
        assert said in captured.err
        assert "loss" not in captured.err  # the progress bar of training has it
        assert captured.out == ""


def test_text_is_escaped_and_markup_is_not() -> None:
    evil = '<b title="x">&'
    safe = "&lt;b title=&quot;x&quot;&gt;&amp;"
    for made in (
        pages.paragraph(evil),
        pages.code(evil),
        pages.table([evil], [[evil, evil]], evil),
        pages.page(evil, {evil: evil}),
        pages.line_chart(evil, evil, {evil: [(0, 1), (1, 2)]}, evil, evil),
        pages.svg(evil, evil, 1, 1, []),
    ):
        assert evil not in made
        assert safe in made
    assert pages.paragraph(pages.code("a")) == "<p><code>a</code></p>"


def test_line_chart_by_hand() -> None:
    points = [(0, 0), (5, 25), (10, 100)]
    chart = pages.line_chart("t", "d", {"a": points}, "x", "y")
    # The plot: x from 62 to 62 + 404, y from 14 down to 14 + 254.
    assert 'points="62.0,268.0 264.0,204.5 466.0,14.0"' in chart
    assert pages.linear_ticks([0, 5, 10]) == [0, 2, 4, 6, 8, 10]
    assert pages.linear_ticks([0, 25, 100]) == [0, 20, 40, 60, 80, 100]
    labels = re.findall(r'text-anchor="middle">([\d.]+)<', chart)
    assert labels == ["0", "2", "4", "6", "8", "10"]


def test_log_chart_by_hand() -> None:
    chart = pages.line_chart("t", "d", {"a": [(0, 100), (10, 1)]}, "x", "y", log_y=True)
    assert 'points="62.0,14.0 466.0,268.0"' in chart
    assert pages.log_ticks([0.03, 2.0]) == [0.01, 0.1, 1.0, 10.0]


def test_chart_leaves_gaps_and_shows_lone_points() -> None:
    nan = float("nan")
    points = [(0.0, 0.0), (1.0, 1.0), (2.0, nan), (3.0, 1.0), (4.0, nan), (5.0, 0.0), (6.0, 1.0)]
    chart = pages.line_chart("t", "d", {"a": points}, "x", "y")
    assert chart.count("<polyline") == 2
    assert chart.count("<circle") == 1
    assert "nan" not in chart
    pages.line_chart("t", "d", {"a": []}, "x", "y")  # nothing to draw is not an error
    assert pages.linear_ticks([3.0, 3.0])[0] < 3.0 < pages.linear_ticks([3.0, 3.0])[-1]


def test_routed_image_by_hand() -> None:
    picture = pages.routed_image("t", [[0.0, 1.0], [0.5, 0.0]], [[True, False, True], [False, False, False]])
    assert "row 1: layers 1, 3; row 2: layers none" in picture
    # Two pixels of 14 and a gap of 12: layer 3 is at 40 + 2 * 14 + 2.
    assert '<rect x="70" y="2" width="10" height="10" fill="var(--c0)"' in picture
    assert picture.count('fill="var(--c0)"') == 2
    assert '<rect x="14" y="0" width="14" height="14" fill="var(--text)" fill-opacity="1.00"/>' in picture


def test_ticks_enclose_the_values() -> None:
    for low, high in ((0.0, 0.3), (-7.0, 13.0), (0.97, 0.994), (1e-9, 3e-9), (12.0, 4.5e7)):
        ticks = pages.linear_ticks([low, high])
        assert ticks[0] <= low + 1e-9 * (high - low)
        assert ticks[-1] >= high - 1e-9 * (high - low)
        assert 3 <= len(ticks) <= 9
        steps = [b - a for a, b in pairwise(ticks)]
        assert max(steps) == pytest.approx(min(steps))
