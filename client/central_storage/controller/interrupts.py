"""Ctrl-C at safe points only.

While the client talks to its service a KeyboardInterrupt must not land between two parts of a message. In the main
thread the handler is replaced for the length of an operation: it counts, and wakes the receive seam, which raises
where nothing is half-done.
"""

from __future__ import annotations

import os
import threading
from _signal import SIGINT, getsignal, signal  # type: ignore[import-not-found]
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Interrupts"]

# What ``_signal`` has in place of a handler: None for one that is not Python's, and the numbers of SIG_DFL and SIG_IGN.
_NO_HANDLERS = (None, 0, 1)


class Interrupts:
    """Counts Ctrl-C for the length of a ``with`` block. Outside the main thread it does nothing: signals go there."""

    def __init__(self) -> None:
        self.count = 0
        self._taken = 0
        self._previous: Any = None
        self._installed = False
        self._depth = 0
        self._closed = False
        self._deferred = False
        self._main = threading.main_thread().ident
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    @property
    def is_entered(self) -> bool:
        """Whether a ``with`` block is under way."""
        return self._depth > 0

    def fileno(self) -> int:
        """Readable when Ctrl-C was pressed."""
        return self._reader

    def raise_pending(self) -> None:
        """Raise KeyboardInterrupt for a Ctrl-C of this ``with`` block that has not been raised yet."""
        if self._installed and self.count > self._taken and not self._deferred:  # often called: as _is_pending
            self._taken = self.count
            self._drain()
            raise KeyboardInterrupt

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Nothing is raised, and :meth:`fileno` wakes nobody, for the length of the block, which does what would take
        no time if memory were shared. Not to be nested."""
        self._deferred = True
        self._drain()
        try:
            yield
        finally:
            self._deferred = False
            if self._is_pending:
                self._wake()

    @property
    def _is_pending(self) -> bool:
        # A Ctrl-C that the end of a block has raised still counts, and another thread may wait by then.
        return self._installed and self.count > self._taken

    def close(self) -> None:
        """Close the descriptors."""
        self._closed = True
        os.close(self._reader)
        os.close(self._writer)

    def __enter__(self) -> Self:
        # Until the handler is replaced, Ctrl-C may raise between any two calls: nothing may have changed by then.
        if self._depth == 0 and threading.get_ident() == self._main:
            # The functions of ``signal`` look handlers up in enums: 6 % of a run of an empty function (decision 27).
            previous = getsignal(SIGINT)
            if previous not in _NO_HANDLERS:  # a user who ignores Ctrl-C, for example, is left alone
                self._previous = previous
                self.count = self._taken = 0
                signal(SIGINT, self._note)
                self._installed = True
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._installed and self._depth == 0:
            self._installed = False
            signal(SIGINT, self._previous)  # from here on, Ctrl-C raises by itself
            if self.count > self._taken:
                self._drain()
                if not isinstance(error, KeyboardInterrupt):  # another error is its context: a caller may suppress it
                    raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if not self._deferred:
            self._wake()

    def _wake(self) -> None:
        if not self._closed:
            os.write(self._writer, b"!")

    def _drain(self) -> None:
        if not self._closed:
            with suppress(BlockingIOError):
                os.read(self._reader, 64)
