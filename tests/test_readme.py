"""README and docs: their code runs or compiles, their commands and options are those of the command line, their links
lead somewhere."""

import re
import shlex
from pathlib import Path

import pytest

from depthgate.cli import TASKS, VERBS, build_parser, parse
from depthgate.options import build

ROOT = Path(__file__).parents[1]
# The log tells of commands of the past, at the commits that it names.
PAGES = ["README.md", "CONTRIBUTING.md", *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
CURRENT = sorted(page for page in PAGES if page != "docs/log.md")


def code(page: str) -> str:
    """The code blocks of a page, fenced or indented; continued lines as one."""
    text = (ROOT / page).read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    .*$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return re.sub(r"\\\n\s*", " ", "\n".join([*fenced, *indented]))


def commands(page: str) -> list[list[str]]:
    """The words after `depthgate` of every line that runs it, alone or by torchrun, and of commands with options
    within sentences."""
    found = []
    for line in code(page).splitlines():
        if re.match(r"\s*(\$ )?([A-Z_]+=\S+ )*(torchrun .*-m )?depthgate( |$)", line):
            words = shlex.split(line, comments=True)
            end = next((i for i, word in enumerate(words) if word in ("|", "&&", ";", ">", "2>", "&")), len(words))
            found.append(words[words.index("depthgate") + 1 : end])
    return found + [shlex.split(each) for each in re.findall(r"`depthgate (\w+ -[^`]+)`", (ROOT / page).read_text())]


def python(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/layers.md", "docs/language-model.md", "docs/vision.md"])
def test_every_python_block_runs_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    assert python(page)
    for block in python(page):
        exec(compile(block, page, "exec"), scope)


@pytest.mark.parametrize("page", CURRENT)
def test_every_python_block_compiles(page):
    """Those of docs/huggingface.md, which need models, are run in tests/hf."""
    for block in python(page):
        compile(block, page, "exec")


def test_commands_are_found():
    """Else the next test would say nothing."""
    assert {words[0] for words in commands("README.md")} >= {"train", "generate", "convert"}


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=" ".join(words)) for page in CURRENT for words in commands(page)]
)
def test_every_command_is_understood(words):
    """Its verb and options exist, and their values are allowed. Files that it names need not exist. Options are
    written in one way, with underscores."""
    assert not [word for word in words if re.match(r"--[\w.]+-", word)]
    if "--help" in words:
        return  # parsing would print it, and leave
    options = parse(words)
    task = options[options.verb].get("task")
    build(TASKS[task] if options.verb == "train" else VERBS[options.verb], options[options.verb])


def test_every_option_that_is_named_exists():
    known = {"--help", "--version", *re.findall(r"--[\w.]+", build_parser().format_help())}
    parsers = (each for task in TASKS for each in build_parser(task=task)._subcommands_action.choices.items())
    for verb, parser in parsers:
        assert verb in VERBS
        known |= {name for action in parser._actions for name in action.option_strings}
    for page in CURRENT:
        assert set(re.findall(r"`depthgate (\w+)", (ROOT / page).read_text())) <= VERBS.keys(), page
        for name in re.findall(r"`(?:depthgate \w+ )?(--[a-z][\w.-]*)", (ROOT / page).read_text()):
            assert name in known, f"{page}: {name}"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in CURRENT:
        for target in re.findall(r"(?:^|`)make ([\w-]+)", (ROOT / page).read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page}: {target}"


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if not link.startswith("https://"):
            assert ((ROOT / page).parent / link.split("#")[0]).exists(), link
