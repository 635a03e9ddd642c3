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
from cs_proto import segment_names, step_times
from cs_runtime.shared_memory.mapping import Mapping
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.supervisor_link import SupervisorLink

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


@pytest.fixture
def is_noted(training: Training) -> Iterator[Callable[[], bool]]:
    """Whether the training notes its step times now."""
    link = SupervisorLink(supervisor_link.connect(training.address), "observer")
    segment = link.segment(segment_names.times("server"))
    assert isinstance(segment, Mapping)
    words = segment.memory.cast("B").cast("Q")
    yield lambda: bool(words[step_times.WATCHED])
    words.release()
    link.close()


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


def test_ctrl_z_and_an_end_give_the_terminal_back(training: Training, opened: Callable[..., Terminal]) -> None:
    program = str(Path(sys.executable).with_name("cs-top"))
    terminal = opened(80, 24, "bash", "--norc", "-i")
    terminal.press(f"{program} --interval 0.2 {training.address}", "Enter")
    terminal.until(lambda text: "q quit" in text)
    terminal.press("C-z")
    terminal.until(lambda text: "Stopped" in text and "q quit" not in text)
    terminal.press("echo seen", "Enter", "fg", "Enter")
    shown = terminal.until(lambda text: "q quit" in text)
    assert shown.startswith("train-")
    terminal.press("C-z")
    terminal.until(lambda text: "q quit" not in text and "seen" in text)
    terminal.press("kill %1; fg", "Enter", "echo code $?", "Enter")
    terminal.until(lambda text: "code 143" in text and "q quit" not in text)


def wait(holds: Callable[[], bool]) -> None:
    """The time of the test limits the wait."""
    while not holds():
        os.sched_yield()


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50)])
def test_the_parts_of_a_step_are_shown_and_noted_while_somebody_wants_them(
    training: Training, opened: Callable[..., Terminal], is_noted: Callable[[], bool], columns: int, rows: int
) -> None:
    program = str(Path(sys.executable).with_name("cs-top"))
    terminal = opened(columns, rows, program, "--interval", "0.2", training.address)
    terminal.until(lambda text: "processor time" in text)
    assert not is_noted()
    terminal.press("b")
    names = ("commit", "messages", "script data", "script waiting", "w0 function", "w0 waiting", "w1 waiting", "q quit")
    shown = terminal.until(
        lambda text: "parts of the last" in text and all(f"{name} " in text for name in names)
    )  # it may be half drawn before
    assert "the training notes step times" in shown
    assert "processor time" not in shown
    assert len(shown.rstrip("\n").split("\n")) == rows
    assert is_noted()
    os.kill(training.pid("w1"), signal.SIGKILL)
    terminal.until(lambda text: "w1.2" in text and "parts of the last" in text)
    training.flag.touch()  # no step ends any more
    terminal.press("p")
    terminal.until(lambda text: "[paused]" in text and "nothing is noted now" in text)
    wait(lambda: not is_noted())
    terminal.press("p")
    terminal.until(lambda text: "none ended in the last" in text and "the training notes" in text)
    training.flag.unlink()
    terminal.until(lambda text: "parts of the last" in text and "w1 function" in text)
    terminal.press("b")
    terminal.until(lambda text: "processor time" in text and "parts of" not in text)
    wait(lambda: not is_noted())
    terminal.press("b")
    terminal.until(lambda text: "parts of the last" in text)
    terminal.press("q")
    terminal.until(lambda text: "code 0" in text)
    wait(lambda: not is_noted())


def test_it_begins_with_the_parts_and_ends_with_the_service(
    training: Training, opened: Callable[..., Terminal]
) -> None:
    program = str(Path(sys.executable).with_name("cs-top"))
    terminal = opened(80, 24, program, "--parts", "--interval", "0.2", training.address)
    terminal.until(lambda text: "parts of the last" in text)
    training.child.signal(signal.SIGINT)
    terminal.until(lambda text: "  over" in text.split("\n")[0])
    terminal.press("b", "b")
    terminal.press("C-c")
    terminal.until(lambda text: "code " in text)


def test_it_says_why_there_are_no_parts(tmp_path: Path, opened: Callable[..., Terminal]) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    program = str(Path(sys.executable).with_name("cs-top"))
    with start(script, str(tmp_path / "wait"), environment={"CS_TIMES": "off"}) as child:
        terminal = opened(80, 24, program, "--parts", "--interval", "0.2", Training(child, tmp_path / "wait").address)
        terminal.until(lambda text: "no parts of a step: the service in" in text and "█" in text)
        terminal.press("q")
        terminal.until(lambda text: "code 0" in text)
    services.clean()
