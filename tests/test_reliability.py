"""docs/reliability.md and the tests that refer to it: every row is there, and every test that it names."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = (ROOT / "docs" / "reliability.md").read_text()


def test_rows_are_numbered_from_1_on():
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", TABLE, re.M)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) == 50


def test_every_row_that_a_test_refers_to_is_there():
    found = set()
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        if "reliability.md" in text:
            said = re.findall(r"\b[Rr]ows? ([\d, toand]+) of docs", " ".join(text.split()))
            said += re.findall(r"^# ([\d, ]+):", text, re.M)
            found |= {int(number) for each in said for number in re.findall(r"\d+", each)}
    assert {4, 9, 15, 17, 27, 39, 44, 45} <= found
    assert found <= set(range(1, 51))


def test_every_test_that_the_table_names_is_there():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TABLE)
    assert len(named) > 48
    for path, function in named:
        text = (ROOT / path).read_text()
        assert not function or f"def {function}(" in text, f"{path}::{function}"
