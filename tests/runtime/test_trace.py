"""Moments are noted where a directory is named, and cost nothing elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cs_runtime.trace import moments

PROGRAM = """
from itertools import count
from cs_runtime.trace import moments
moment = moments("worker", count(5).__next__)
moment("woken")
moment("decoded")
"""


def test_a_process_leaves_its_moments_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CS_MOMENTS", str(tmp_path))
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
    [left] = tmp_path.iterdir()
    assert left.name.startswith("worker-")
    assert left.read_text() == "woken 5\ndecoded 6\n"


def test_nothing_is_noted_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CS_MOMENTS", raising=False)

    def clock() -> int:
        raise AssertionError("nobody asked what time it is")

    moments("client", clock)("woken")
