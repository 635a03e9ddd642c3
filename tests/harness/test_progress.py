"""The line that says how far the tests are."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.processes import ROOT

PROGRAM = """
import pytest

@pytest.mark.parametrize("number", range(40))
def test_number(number):
    assert number != 7

@pytest.mark.skip(reason="not here")
def test_skipped():
    pass
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "test_program.py").write_text(PROGRAM)
    options = ("-p", "tests.harness.progress", "-p", "no:cacheprovider", "--rootdir", str(tmp_path))
    return [sys.executable, "-m", "pytest", *options, str(tmp_path)]


@pytest.mark.parametrize(
    "workers", [pytest.param((), id="alone"), pytest.param(("-n", "2"), id="xdist", marks=pytest.mark.slow)]
)
def test_a_log_gets_a_line_for_every_tenth(command: list[str], workers: tuple[str, ...]) -> None:
    ended = subprocess.run([*command, *workers], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended
    shown = re.findall(r"^ *(\d+) % of 41 tests after \d+:\d\d(, 1 failed)?$", ended.stdout, re.MULTILINE)
    assert [percent for percent, _ in shown] == ["12", "21", "31", "41", "51", "60", "70", "80", "90", "100"]
    assert shown[-1][1] == ", 1 failed"
    assert re.search(r"^FAILED \S*test_program\.py::test_number\[7\] \(call\)$", ended.stdout, re.MULTILINE)
    assert "assert 7 != 7" in ended.stdout
    assert "1 failed, 39 passed, 1 skipped" in ended.stdout
    assert "..." not in ended.stdout


def test_a_terminal_shows_one_line_that_changes(command: list[str]) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, cwd=ROOT, stdout=theirs, env=os.environ | {"TERM": "xterm"}) as process:
        os.close(theirs)
        shown = b""
        while part := read(ours):
            shown += part
    os.close(ours)
    assert process.returncode == 1
    assert len(re.findall(rb"\r +\d+ % of 41 tests", shown)) >= 40
    assert len(re.findall(rb"% of 41 tests[^\n]*\r?\n", shown)) <= 3


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 100_000)
    except OSError:  # so Linux says that nobody writes any more
        return b""
