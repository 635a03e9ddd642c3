"""The output of a service's processes.

:class:`Lines` cuts bytes into lines, :class:`Tail` keeps the last ones for the failure report, and :class:`LogFiles`
writes all of them to files. A :class:`Sink` shows them: :class:`Console` on the launcher's terminal, the one in
``background`` over the owner's connection. If the terminal is slow, the sink becomes *full*: no line is dropped, and
the processes block as on any full pipe.
"""

from __future__ import annotations

import codecs
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, Protocol

from cs_proto.errors import ConfigurationError

from .loop import Loop

__all__ = ["Console", "Lines", "LogFiles", "Sink", "Stream", "Tail", "prefixed"]

_log = logging.getLogger("central_storage.launch")

Stream = Literal["stdout", "stderr"]

# A longer line is cut, so that output without line ends is shown and does not fill the memory.
_LINE_LIMIT = 8192
_TAIL_LINES = 20
_TAIL_LINE_LIMIT = 500
# When more bytes than this wait for a slow terminal, the processes' pipes are not read.
_CONSOLE_NBYTES = 256 * 1024
# A pipe that polls as writable takes this much without blocking.
_PIPE_BUF = 4096


class Sink(Protocol):
    """Shows lines."""

    #: Called when the sink was full and has room again.
    on_room: Callable[[], None]

    def write(self, stream: Stream, text: str) -> None:
        """Show ``text``: whole lines with their ends. Never blocks."""

    @property
    def full(self) -> bool:
        """Whether more should be written only after :attr:`on_room`."""


class Lines:
    """Bytes in, lines of text out. Bytes that are not UTF-8 become U+FFFD; a carriage return ends a line too, so
    that a progress bar is seen before its process ends."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""
        self._is_cut = False  # in the middle of a line, the beginning of which was given out

    @property
    def has_partial(self) -> bool:
        """Whether a line has begun and not ended."""
        return bool(self._partial.rstrip("\r"))

    def flush(self) -> list[str]:
        """The line that has begun, as far as it has come; what follows of it comes as another line."""
        rest = self._partial.rstrip("\r")
        if not rest:
            return []
        self._is_cut = not self._partial.endswith("\r")
        self._partial = ""
        return [rest]

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` completes, without their ends."""
        return self._cut(self._decoder.decode(data))

    def finish(self) -> list[str]:
        """The rest, when no more bytes will come."""
        lines = self._cut(self._decoder.decode(b"", final=True))
        rest, self._partial = self._partial.rstrip("\r"), ""
        return [*lines, rest] if rest else lines

    def _cut(self, text: str) -> list[str]:
        text = self._partial + text
        # A carriage return at the very end may be half of "\r\n".
        held = "\r" if text.endswith("\r") else ""
        parts = text[: len(text) - len(held)].replace("\r\n", "\n").replace("\r", "\n").split("\n")
        rest = parts.pop()
        if self._is_cut and (parts or rest):
            self._is_cut = False
            if parts and not parts[0]:
                del parts[0]
        while len(rest) > _LINE_LIMIT:
            parts.append(rest[:_LINE_LIMIT])
            rest = rest[_LINE_LIMIT:]
        self._partial = rest + held
        return parts


class Tail:
    """The last lines of a process."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)

    def add(self, lines: Iterable[str]) -> None:
        """Remember ``lines``, shortened."""
        self._lines.extend(line[:_TAIL_LINE_LIMIT] for line in lines)

    def text(self) -> str:
        """At most 20 lines, the last one last."""
        return "\n".join(self._lines)

    def last_line_with_prefix(self, start: str) -> str:
        """The last of these lines that begins with ``start``; "" if none does."""
        return next((line for line in reversed(self._lines) if line.startswith(start)), "")


class LogFiles:
    """A file ``<label>.log`` for each process, with both streams in the order in which they were read."""

    def __init__(self, directory: str) -> None:
        """Make ``directory``, for its owner only. Raises ConfigurationError if that fails."""
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"log files cannot be written to {directory}: {error.strerror}") from error
        self.directory = directory
        self._files: dict[str, int] = {}

    @classmethod
    def under(cls, parent: str, run_directory: str) -> LogFiles:
        """Log files in a directory of ``parent`` that has the name of the run directory."""
        return cls(os.path.join(os.path.abspath(parent), os.path.basename(run_directory)))

    def write(self, label: str, lines: Iterable[str]) -> None:
        """Append ``lines`` to the file of ``label``. If that fails, warn once and write no more to this file."""
        descriptor = self._files.get(label)
        try:
            if descriptor is None:
                path = Path(self.directory, f"{label}.log")
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
                self._files[label] = descriptor
            if descriptor >= 0:
                os.write(descriptor, "".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            _log.warning("nothing more is written to %s/%s.log: %s", self.directory, label, error.strerror)
            if descriptor is not None:
                os.close(descriptor)
            self._files[label] = -1

    def close(self) -> None:
        """Close the files. Idempotent."""
        for descriptor in self._files.values():
            if descriptor >= 0:
                os.close(descriptor)
        self._files.clear()


class Console:
    """This process's own standard output and error as a sink that never blocks the loop."""

    def __init__(self, loop: Loop, descriptors: dict[Stream, int] | None = None) -> None:
        self.on_room: Callable[[], None] = _nothing
        self._loop = loop
        self._descriptors: dict[Stream, int] = descriptors or {"stdout": 1, "stderr": 2}
        self._waiting: dict[Stream, bytearray] = {stream: bytearray() for stream in self._descriptors}

    def write(self, stream: Stream, text: str) -> None:
        """Show ``text`` on the stream of that name as soon as it can be written."""
        waiting = self._waiting[stream]
        waiting += text.encode("utf-8", "replace")
        self._loop.on_writable(self._descriptors[stream], lambda: self._flush(stream))

    @property
    def full(self) -> bool:
        """Whether too much text waits for a slow reader."""
        return any(len(waiting) > _CONSOLE_NBYTES for waiting in self._waiting.values())

    @property
    def empty(self) -> bool:
        """Whether everything written so far is shown."""
        return not any(self._waiting.values())

    def _flush(self, stream: Stream) -> None:
        waiting = self._waiting[stream]
        was_full = self.full
        try:
            written = os.write(self._descriptors[stream], waiting[:_PIPE_BUF])
        except BlockingIOError:
            return
        except OSError:  # the reader has gone, and the run goes on without it
            written = len(waiting)
        del waiting[:written]
        if not waiting:
            self._loop.on_writable(self._descriptors[stream], None)
        if was_full and not self.full:
            self.on_room()


def prefixed(label: str, lines: Iterable[str]) -> str:
    """``lines`` as text, each behind ``[label]``."""
    return "".join(f"[{label}] {line}\n" for line in lines)


def _nothing() -> None:
    pass
