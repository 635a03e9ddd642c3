"""The stacks of processes, as :mod:`cs_runtime.stacks` writes them: asked for, read, merged where they are equal."""

from __future__ import annotations

import fcntl
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from cs_proto.frozen import frozen
from cs_runtime import stacks

from . import processes

__all__ = ["Stack", "collect", "merged", "parsed"]

_THREAD = re.compile(r"(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
# How faulthandler writes what is not ASCII.
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_POLL_SECONDS = 0.01
# faulthandler writes at one go. When nothing has come for so long, that is all.
_QUIET_SECONDS = 0.15


@frozen
class Stack:
    """The stack of a thread, innermost call last: ``(file, line, function)``. ``thread`` is its name, if Python tells
    it, else its number."""

    thread: str
    frames: tuple[tuple[str, str, str], ...]


def collect(pids: Sequence[int], timeout: float) -> dict[int, list[Stack] | str]:
    """The stacks of all threads of each process, or why they cannot be had."""
    found: dict[int, list[Stack] | str] = {}
    waiting: dict[int, _Asked] = {}
    with ExitStack() as undo:
        for pid in pids:
            asked = _ask(pid, undo.callback)
            if isinstance(asked, str):
                found[pid] = asked
            else:
                waiting[pid] = asked
        deadline = time.monotonic() + timeout
        while waiting and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            for pid, asked in list(waiting.items()):
                if asked.is_complete():
                    found[pid] = parsed(waiting.pop(pid).text())
        for pid in waiting:
            now = processes.status(pid)
            state = f"it is {now.state}" if now is not None else "it has ended"
            found[pid] = f"it has printed none within {timeout:g} s: {state}"
    return {pid: found[pid] for pid in pids}


def parsed(text: str) -> list[Stack]:
    """The stacks in what faulthandler has written.

    Examples:
        >>> parsed('Current thread 0x1f (most recent call first):\\n  File "a.py", line 3 in f\\n')
        [Stack(thread='0x1f', frames=(('a.py', '3', 'f'),))]
    """
    result: list[Stack] = []
    thread = ""
    frames: list[tuple[str, str, str]] = []

    def add() -> None:
        if thread:
            result.append(Stack(thread, tuple(reversed(frames))))

    for line in text.splitlines():
        if begun := _THREAD.fullmatch(line):
            add()
            thread, frames = begun[3] or begun[2], []
        elif frame := _FRAME.fullmatch(line):
            frames.append((_unescaped(frame[1]), frame[2], _unescaped(frame[3])))
        elif line.startswith("  ") and thread:
            frames.append((line.strip(), "", ""))  # "<no Python frame>", "..."
    add()
    return result


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(min(int(found[1] or found[2] or found[3], 16), sys.maxunicode)), text)


def merged(found: Sequence[tuple[str, Sequence[Stack]]]) -> list[tuple[list[str], tuple[tuple[str, str, str], ...]]]:
    """The different stacks of several processes, each with the labels of those that have it; a label comes once for
    each thread. The stacks of most processes come first."""
    groups: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    for label, threads in found:
        for stack in threads:
            groups.setdefault(stack.frames, []).append(label)
    return sorted(((labels, frames) for frames, labels in groups.items()), key=lambda group: -len(set(group[0])))


class _Asked:
    """A process that was asked, and its memory file."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size, self._since = 0, time.monotonic()

    def is_complete(self) -> bool:
        """Whether all stacks are there."""
        size, now = os.fstat(self._descriptor).st_size, time.monotonic()
        if size != self._size:
            self._size, self._since = size, now
        return size > 0 and now - self._since >= _QUIET_SECONDS

    def text(self) -> str:
        """What was written."""
        return os.pread(self._descriptor, self._size, 0).decode("utf-8", "replace")


def _ask(pid: int, undo: Callable[..., object]) -> _Asked | str:
    """Empty the memory file of a process, and send it the signal; or why that is not possible."""
    pidfd = processes.open_pid(pid)
    if pidfd is None:
        return "it has ended"
    undo(os.close, pidfd)
    descriptor = _file_of(pid)
    if descriptor is None:
        return "it keeps no stacks ready: it is just starting, or is no process of Python"
    undo(os.close, descriptor)
    try:  # one reader at a time
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "another cs-ctl reads its stacks; try again"
    os.ftruncate(descriptor, 0)
    if not processes.handles(pid, stacks.SIGNAL) or not processes.send(pidfd, stacks.SIGNAL):
        return "it has ended, or another program runs in it"
    return _Asked(descriptor)


def _file_of(pid: int) -> int | None:
    try:
        for entry in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{entry}"
            if os.path.basename(os.readlink(path)).startswith(f"memfd:{stacks.FILE} "):
                return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        pass
    return None
