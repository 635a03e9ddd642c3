"""What an actor may leave behind: a run directory that the next start removes."""

from __future__ import annotations

import os
from pathlib import Path

from tests.harness.processes import run

__all__ = ["assert_next_start_clears", "run_directories"]

#: The files of a run whose supervisor was killed.
_CONTENT = {"lock", "server", "service.json", "supervisor", "w0.1", "w1.1"}


def run_directories() -> list[Path]:
    """The run directories of this test session."""
    return list(Path(os.environ["XDG_RUNTIME_DIR"]).glob("cs-*"))


def assert_next_start_clears(left: list[Path]) -> None:
    """Run directories without a process hold no more than some files, and the next command removes them."""
    for directory in left:
        assert set(os.listdir(directory)) <= _CONTENT
    run("cs-ctl", "ls").ok()
    assert run_directories() == []
