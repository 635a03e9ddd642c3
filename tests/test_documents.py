"""The documents show what exists: code, links and commands. Lines are short, and decision records have their form."""

from __future__ import annotations

import re
from itertools import count
from pathlib import Path

import pytest
from tests.harness.processes import ROOT, run

from cs_proto.version import __version__

#: README.md stays a page that a visitor reads: a new feature gets one line under Features, and a page of the guide.
README_LINES = 130
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")])
#: One sentence a line, and no sentence longer than this.
LINE_LENGTH = 400
DECISIONS = sorted(ROOT.glob("docs/decisions/*.md"))


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_the_documents_name_the_version() -> None:
    assert f"This is version {__version__}, " in (ROOT / "README.md").read_text()
    newest = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1]
    in_development = f"the version in development has the number {__version__};"
    assert in_development in newest if "(not yet released)" in newest else newest.startswith(f"{__version__} (")


def test_the_readme_names_every_page_of_the_guide() -> None:
    text = (ROOT / "README.md").read_text()
    for page in ROOT.glob("docs/guide/*.md"):
        assert f"]({page.relative_to(ROOT)})" in text, page.name


def test_code_that_the_readme_shows_is_the_file_it_names() -> None:
    shown = re.findall(r"<!-- (\S+) -->\n```python\n(.*?)```\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert [name for name, _ in shown] == ["examples/twenty_lines.py"]
    for name, text in shown:
        assert text == (ROOT / name).read_text()


@pytest.mark.parametrize("document", names(DOCUMENTS))
def test_links_lead_somewhere(document: str) -> None:
    text = (ROOT / document).read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:|#", link):
            assert ((ROOT / document).parent / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("document", names(DOCUMENTS))
def test_no_line_is_longer_than_a_long_sentence(document: str) -> None:
    prose = re.sub(r"```.*?```", "", (ROOT / document).read_text(), flags=re.DOTALL)
    lines = [line for line in prose.splitlines() if not re.match(r"\| \d+ \| ", line)]  # the fields of a message
    assert [line for line in lines if len(line) > LINE_LENGTH] == []


@pytest.mark.parametrize("document", names(DOCUMENTS))
def test_commands_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^    |`)make ([a-z-]+)", (ROOT / document).read_text(), re.MULTILINE))
    assert named <= targets


def test_make_names_every_command() -> None:
    ended = run("make").ok()
    named = {line.split()[1] for line in ended.lines}
    assert named >= {"demo", "setup", "check", "test", "test-all", "lint", "bench", "clean"}


@pytest.mark.parametrize("decision", names(DECISIONS))
def test_a_decision_has_its_four_parts(decision: str) -> None:
    text = (ROOT / decision).read_text()
    number = int(Path(decision).name[:4])
    assert re.match(rf"# {number}\. \S.*\n\nStatus: \S.*\n", text)
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Context", "Decision", "Consequence"]
    assert len(text.splitlines()) <= 60


def test_decisions_are_numbered_without_a_gap() -> None:
    assert all(int(path.name[:4]) == number for path, number in zip(DECISIONS, count(1), strict=False))
