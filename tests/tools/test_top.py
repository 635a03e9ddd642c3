"""cs-top in a real terminal: tmux sends keys and shows the screen."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.harness.processes import start
from tests.processes.test_ctl import TRAIN, Training

from central_storage.ctl import services

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Terminal:
    """A terminal of so many columns and rows, with a program in it."""

    def __init__(self, socket: Path, columns: int, rows: int, *command: str) -> None:
        self._tmux = ("tmux", "-S", str(socket), "-f", "/dev/null")
        size = ("-x", str(columns), "-y", str(rows))
        # The program's exit code is the last line, and the terminal stays to show it.
        shell = f"{' '.join(command)}; echo code $?; read -r _"
        subprocess.run([*self._tmux, "new-session", "-d", *size, shell], check=True)

    def press(self, *keys: str) -> None:
        subprocess.run([*self._tmux, "send-keys", *keys], check=True)

    def screen(self) -> str:
        return subprocess.run([*self._tmux, "capture-pane", "-p"], check=True, capture_output=True, text=True).stdout

    def until(self, holds: Callable[[str], bool]) -> str:
        """The first screen of which that holds; the time of the test limits the wait."""
        while not holds(shown := self.screen()):
            pass
        return shown

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False, capture_output=True)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with start(script, str(tmp_path / "wait"), environment={"CS_LOG_DIR": None}) as child:
        yield Training(child, tmp_path / "wait")
    services.clean()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def make(columns: int, rows: int, *command: str) -> Terminal:
        made.append(Terminal(tmp_path / "tmux", columns, rows, *command))
        return made[-1]

    yield make
    for terminal in made:
        terminal.close()


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])
def test_it_is_redrawn_while_a_worker_dies_and_hears_keys(
    training: Training, opened: Callable[..., Terminal], columns: int, rows: int
) -> None:
    program = str(Path(sys.executable).with_name("cs-top"))
    terminal = opened(columns, rows, program, "--interval", "0.2", training.address)
    shown = terminal.until(lambda text: "w1.1" in text and "processor time" in text and "█" in text)
    lines = shown.rstrip("\n").split("\n")
    assert lines[0].startswith("train-")
    assert lines[-1].startswith("q quit")
    assert len(lines) == rows
    assert max(map(len, lines)) <= columns
    os.kill(training.pid("w1"), signal.SIGKILL)
    terminal.until(lambda text: "w1.2" in text and "works in its place" in text)
    terminal.press("0")
    terminal.until(lambda text: "[w0] hello from a replica" in text)
    terminal.press("l")
    terminal.until(lambda text: "[supervisor] worker w1" in text)
    terminal.press("Escape")
    terminal.until(lambda text: "log (Esc" not in text)
    terminal.press("m")
    terminal.until(lambda text: "s sort: memory" in text)
    terminal.press("s")
    terminal.until(lambda text: "s sort: restarts" in text)
    terminal.press("p")
    terminal.until(lambda text: "[paused]" in text)
    terminal.press("p")
    terminal.until(lambda text: "[paused]" not in text)
    training.child.signal(signal.SIGINT)
    terminal.until(lambda text: "  over" in text.split("\n")[0])
    terminal.press("q")
    terminal.until(lambda text: "code 0" in text)
