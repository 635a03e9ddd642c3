"""Pages of the guide that show a terminal: their commands run, and what they print is compared with what is shown.

A block begins with a command after ``$``; a line ``...`` stands for any lines. Numbers with their units, times, pids,
paths and the names of services may differ from what is shown, and so may the width of columns. A training that
``cs-launch`` starts goes on until the next one starts, or until the page asks for its exit code by ``echo $?``. All
other commands get its run directory in ``CS_ADDRESS``. They are repeated until they print what is shown, since a
training has just begun, or other programs take the processors from it; the time of the test limits that.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from cs_proto.frozen import frozen

from .processes import ROOT, Child, start
from .timing import unit

__all__ = ["Shown", "Terminal", "comparable", "files", "is_shown", "sections"]

#: What may differ, and what stands for it in a comparison. The order counts.
_DIFFERS = (
    (r"\d\d:\d\d:\d\d", "TIME"),
    (r"(?<![\w.])/(?:[\w.+-]+/)*", ""),  # a file keeps its name
    (r"\bcs-[0-9a-f]{8}\b|\b[0-9a-f]{8}\b", "RUN"),
    (r"(?<=\w-)[0-9a-f]{4}\b", "RUN"),
    (r"(?<!replica )(?<![\w:])-?\d[\d.,]*(e[+-]\d+)?(?: ?(?:[µmn]?s|[kMGT]?B|%|[smhd]\d\d[smhd])(?!\w))?(?!\w)", "N"),
    (r"(?<=\.py:)\d+", "N"),
    (r"mailboxes \+ ", ""),  # they are off in make test-zeromq
)


@frozen
class Shown:
    """A command of a page, and the lines below it."""

    command: str
    lines: tuple[str, ...]


def sections(page: str) -> dict[str, list[Shown]]:
    """The commands of a page of the guide, by the headings of its sections."""
    found: dict[str, list[Shown]] = {}
    for section in re.split(r"^## ", _text(page), flags=re.MULTILINE)[1:]:
        blocks = re.findall(r"^```console\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
        commands = [part.splitlines() for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
        if commands:
            found[section.partition("\n")[0]] = [Shown(command, tuple(lines)) for command, *lines in commands]
    return found


def files(page: str) -> dict[str, str]:
    """The code blocks of a page that follow a comment with the name of a file."""
    return dict(re.findall(r"^<!-- (\S+) -->\n```py\n(.*?)^```$", _text(page), re.DOTALL | re.MULTILINE))


def comparable(line: str) -> str:
    """A line with a sign in place of each number, unit, time, path and name that may differ.

    >>> comparable("  replica 1: function     14.2 ms    70 %"), comparable("data-0656  running  20  /tmp/cs-0656b422")
    ('replica 1: function N N', 'data-RUN running N RUN')
    """
    for pattern, sign in _DIFFERS:
        line = re.sub(pattern, sign, line)
    return " ".join(line.split())


def is_shown(lines: Iterable[str], printed: str, *, begins: bool = False) -> bool:
    """Whether a command has printed these lines, or has begun with them."""
    pattern = "".join(r"(?:.*\n)*?" if line == "..." else re.escape(comparable(line)) + r"\n" for line in lines)
    text = "".join(f"{comparable(line)}\n" for line in printed.splitlines())
    return bool((re.match if begins else re.fullmatch)(pattern, text))


class Terminal:
    """Runs the commands of a page. Use it in a ``with`` block, at whose end its training gets Ctrl-C."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._training: Child | None = None
        self._launched: Shown | None = None
        self._address = ""
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.end()
        self._stack.close()

    def play(self, shown: Shown) -> None:
        """Run a command. Raises AssertionError if it prints something else than is shown."""
        if shown.command == "echo $?":
            assert self._training is not None
            ended = self._training.wait()
            self._compare(begins=False)
            assert shown.lines == (str(ended.code),), str(ended)
        elif shown.command.startswith("cs-launch "):
            self.end()
            self._launched, self._training = shown, self._stack.enter_context(self._start(shown.command))
            self._address = self._training.wait_for(r"^run .* directory (\S+)$")[1]
        else:
            self._compare(begins=True)
            self._ask(shown)

    def _compare(self, *, begins: bool) -> None:
        """What the training has printed with what is shown, once."""
        shown, self._launched = self._launched, None
        if shown is not None:
            assert self._training is not None
            if begins:
                self._training.wait_for(_words(shown.lines[-1]), unit(100))
            out = self._training.out
            assert is_shown(shown.lines, out, begins=begins), f"not as shown:\n{_both(shown, out)}"

    def _ask(self, shown: Shown) -> None:
        while True:
            with self._start(shown.command) as child:
                printed = child.wait(unit(100)).out
            if is_shown(shown.lines, printed):
                return
            print(_both(shown, printed), flush=True)  # shown with the failure, if the time of the test ends

    def end(self) -> None:
        """Press Ctrl-C, unless the training has ended, and wait until nothing of it is left."""
        if self._training is not None:
            self._compare(begins=True)
            if any(process.pid == self._training.pid for process in self._training.processes()):
                self._training.press_ctrl_c()
            self._training.wait()
            assert self._training.left() == []
        self._training = None
        self._stack.close()

    def _start(self, command: str) -> AbstractContextManager[Child]:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"PATH": path, "CS_ADDRESS": self._address or None, "CS_LOG_DIR": None, "CS_MESSAGES_DIR": None}
        return start("/bin/bash", "-c", f"exec {command} 2>&1", environment=environment, directory=self._directory)


def _words(line: str) -> str:
    """A pattern that finds a line with the words of this one."""
    return ".*".join(re.escape(word) for word in re.split(r"\bN\b|\bRUN\b|\bTIME\b| ", comparable(line)) if word)


def _both(shown: Shown, printed: str) -> str:
    lines = "\n".join(shown.lines)
    return f"$ {shown.command}\n--- shown\n{lines}\n--- printed\n{printed}"


def _text(page: str) -> str:
    return (ROOT / "docs/guide" / page).read_text()
