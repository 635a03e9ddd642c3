"""The pages about slow trainings, stopped ones and profiles show what the commands print of bad trainings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.harness.processes import ROOT
from tests.harness.timing import unit
from tests.harness.transcripts import Terminal, files, sections

pytestmark = pytest.mark.timeout(unit(200))

SLOW, STOPPED = sections("slow-training.md"), sections("stopped-training.md")
PROFILED = sections("profiling.md")


@pytest.mark.parametrize("section", SLOW)
def test_a_slow_training_is_found_and_mended(section: str) -> None:
    with Terminal(ROOT) as terminal:
        for shown in SLOW[section]:
            terminal.play(shown)


@pytest.mark.parametrize("section", PROFILED)
def test_a_profile_is_what_the_page_shows(section: str) -> None:
    with Terminal(ROOT) as terminal:
        for shown in PROFILED[section]:
            terminal.play(shown)


@pytest.mark.parametrize("section", STOPPED)
def test_a_training_that_has_stopped_is_explained(section: str, tmp_path: Path) -> None:
    for name, text in files("stopped-training.md").items():
        (tmp_path / name).write_text(text)
    with Terminal(tmp_path) as terminal:
        for shown in STOPPED[section]:
            terminal.play(shown)


def test_code_that_a_page_shows_is_in_the_example() -> None:
    text = (ROOT / "docs/guide/slow-training.md").read_text()
    shown = re.findall(r"<!-- (examples/slow/\w+\.py) -->\n```py\n(.*?)```", text, re.DOTALL)
    assert {name for name, _ in shown} == {f"examples/slow/{path.name}" for path in ROOT.glob("examples/slow/*.py")}
    for name, code in shown:
        for part in code.split("...\n"):
            assert part in (ROOT / name).read_text()
