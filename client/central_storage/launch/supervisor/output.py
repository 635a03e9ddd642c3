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
import re
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

from cs_proto.errors import ConfigurationError
from cs_proto.printable import printable

from .loop import Loop

__all__ = ["KEPT_NBYTES", "Console", "Lines", "LogFiles", "Screen", "Sink", "Stream", "Tail"]

_log = logging.getLogger("central_storage.launch")

Stream = Literal["stdout", "stderr"]

# A longer line is cut, so that output without line ends is shown and does not fill the memory.
_LINE_LIMIT = 8192
_TAIL_LINES = 20
_TAIL_LINE_LIMIT = 500
#: The most bytes that are kept of one process where the files may lie in memory.
KEPT_NBYTES = 16 << 20
# When more bytes than this wait for a slow terminal, the processes' pipes are not read.
_CONSOLE_NBYTES = 256 * 1024
# A pipe that polls as writable takes this much without blocking.
_PIPE_BUF = 4096


class Sink(Protocol):
    """Shows lines."""

    #: Called when the sink was full and has room again.
    on_room: Callable[[], None]

    def write(self, stream: Stream, text: str) -> None:
        """Show ``text``: lines with their ends. Never blocks."""

    @property
    def full(self) -> bool:
        """Whether more should be written only after :attr:`on_room`."""


class Lines:
    """Bytes in, lines of text out. Bytes that are not UTF-8 become U+FFFD. A line that ends with a carriage return, as
    that of a progress bar, keeps it: the next line is drawn in its place."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""
        self._drawn = ""  # what flush has given out of it

    @property
    def has_partial(self) -> bool:
        """Whether there is something for :meth:`flush`."""
        return self._partial.rstrip("\r") not in ("", self._drawn)

    def flush(self) -> list[str]:
        """The line that has begun, as far as it has come, to be drawn. It comes again when there is more of it."""
        if not self.has_partial:
            return []
        self._drawn = self._partial.rstrip("\r")
        return [f"{self._drawn}\r"]

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` completes, without line ends but with carriage returns."""
        return self._cut(self._decoder.decode(data))

    def finish(self) -> list[str]:
        """The rest, when no more bytes will come."""
        lines = self._cut(self._decoder.decode(b"", final=True))
        rest, self._partial = self._partial.rstrip("\r"), ""
        return [*lines, rest] if rest else lines

    def _cut(self, text: str) -> list[str]:
        text = self._partial + text
        # A carriage return at the very end may be half of "\r\n", which a terminal may have made "\r\r\n".
        body = text.rstrip("\r")
        held = "\r" if body != text else ""
        *ended, rest = re.split(r"(?<=[\r\n])", re.sub(r"\r+\n", "\n", body))
        # A progress bar may begin with a carriage return, behind which there is nothing to draw.
        parts = [part.removesuffix("\n") for part in ended if part != "\r"]
        if ended:
            if parts[:1] == [f"{self._drawn}\r"]:
                del parts[0]
            self._drawn = ""
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
        """Remember ``lines``, shortened and printable, without what others are drawn over."""
        self._lines.extend(printable(line[:_TAIL_LINE_LIMIT]) for line in lines if not line.endswith("\r"))

    def text(self) -> str:
        """At most 20 lines, the last one last."""
        return "\n".join(self._lines)

    def last_line_with_prefix(self, start: str) -> str:
        """The last of these lines that begins with ``start``; "" if none does."""
        return next((line for line in reversed(self._lines) if line.startswith(start)), "")


class LogFiles:
    """A file ``<label>.log`` for each process, with both streams in the order in which they were read.

    With a limit, a file that has reached half of it becomes ``<label>.log.1``, in place of the one before."""

    def __init__(self, directory: str, limit: int | None = None) -> None:
        """Make ``directory``, for its owner only. The files of a process take at most ``limit`` bytes. Raises
        ConfigurationError if the directory cannot be made."""
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"log files cannot be written to {directory}: {error.strerror}") from error
        self.directory = directory
        self._limit = limit
        self._files: dict[str, int] = {}

    @classmethod
    def under(cls, parent: str, run_directory: str) -> LogFiles:
        """Log files in a directory of ``parent`` that has the name of the run directory; with ``-logs`` behind it if
        that is the run directory itself, which goes with the run."""
        directory = os.path.join(os.path.abspath(parent), os.path.basename(run_directory))
        if os.path.realpath(directory) == os.path.realpath(run_directory):
            directory += "-logs"
        return cls(directory)

    def write(self, label: str, lines: Iterable[str]) -> None:
        """Append ``lines`` to the file of ``label``, without what others are drawn over. If that fails, warn once and
        write no more to this file."""
        descriptor = self._files.get(label)
        try:
            if descriptor is None:
                descriptor = self._files[label] = self._open(label)
            if descriptor >= 0:
                text = "".join(f"{line}\n" for line in lines if not line.endswith("\r")).encode()
                if self._limit is not None and os.fstat(descriptor).st_size + len(text) > self._limit // 2:
                    os.close(self._files.pop(label))
                    descriptor = None
                    os.rename(self._path(label), self._path(label) + ".1")
                    descriptor = self._files[label] = self._open(label)
                os.write(descriptor, text)
        except OSError as error:
            _log.warning("nothing more is written to %s/%s.log: %s", self.directory, label, error.strerror)
            if descriptor is not None:
                os.close(descriptor)
            self._files[label] = -1

    def _path(self, label: str) -> str:
        return os.path.join(self.directory, f"{label}.log")

    def _open(self, label: str) -> int:
        # Without O_NONBLOCK, a pipe of this name would wait for its reader.
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(self._path(label), how, 0o600)

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


class Screen:
    """Shows the lines of several processes in a sink, each behind ``[label]``. A line that ends with a carriage return
    is drawn over by the next one, but stays if a whole line of another process follows."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        # What will be drawn over: its stream, label and width.
        self._drawn: tuple[Stream, str, int] | None = None

    @property
    def full(self) -> bool:
        """As :attr:`Sink.full`."""
        return self._sink.full

    def write(self, stream: Stream, label: str, lines: Iterable[str]) -> None:
        """Show ``lines``, as soon as the sink does."""
        text = ""
        for line in lines:
            is_drawn = line.endswith("\r")
            shown = f"[{label}] " + line.removesuffix("\r")
            if self._drawn is not None:
                before, whose, width = self._drawn
                if is_drawn and whose != label:
                    shown = shown.ljust(width)
                elif not is_drawn and (before, whose) != (stream, label):
                    self._sink.write(before, "\n")
            self._drawn = (stream, label, len(shown.rstrip())) if is_drawn else None
            text += shown + ("\r" if is_drawn else "\n")
        if text:
            self._sink.write(stream, text)


def _nothing() -> None:
    pass
