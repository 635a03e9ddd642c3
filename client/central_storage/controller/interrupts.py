"""Handlers of signals at safe points only: of Ctrl-C, and of whatever else the script handles.

Python calls a handler between any two instructions. A handler may raise, or save a checkpoint, and neither must happen
between two parts of a message. So the script's handlers are replaced in the main thread for the length of an operation.
What replaces them notes the signal and wakes the receive seam. The script's handler is called while the end of a run is
awaited, or when the operation is over. Ctrl-C alone also ends the wait for an answer of the server.
"""

from __future__ import annotations

import os
import threading
from _signal import getsignal, raise_signal, signal  # type: ignore[import-not-found]
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from signal import SIGINT, SIGKILL, SIGSTOP, default_int_handler
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Interrupted", "Interrupts"]

# What ``_signal`` has in place of a handler: None for one that is not Python's, and the numbers of SIG_DFL and SIG_IGN.
_NO_HANDLERS = (None, 0, 1)
# The signals that come from outside, without real-time ones. Those of a fault come from an instruction, which a
# delayed handler would repeat.
_FAULTS = (4, 5, 6, 7, 8, 11, 31)  # SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV, SIGSYS
_SIGNALS = tuple(number for number in range(1, 32) if number not in (*_FAULTS, SIGKILL, SIGSTOP))
# So many signals may come, and raise, while handlers are put back. The next operation puts back what is left.
_TRIES = 5


class Interrupted(BaseException):
    """Carries an ``error`` that a handler has raised to the end of the operation, which raises that in its place. It
    is no Exception, since operations turn those into outcomes of runs."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class Interrupts:
    """Notes signals for the length of a ``with`` block. Outside the main thread it does nothing: signals go there."""

    def __init__(self) -> None:
        #: The signals that have come and whose handlers have not been called yet.
        self.pending: deque[int] = deque()
        self._found: list[Any] = []  # what was in place of each of the signals when the handlers were replaced
        self._handlers: dict[int, Any] = {}  # those of Python
        self._noting = self._note  # one object, to be known again
        self._installed = False
        self._depth = 0
        self._outside = 0  # the depth at which an operation is the outermost: above 0 in a handler
        self._closed = False
        self._deferred = False
        self._main = threading.main_thread().ident
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    @property
    def is_entered(self) -> bool:
        """Whether a ``with`` block is under way."""
        return self._depth > 0

    def fileno(self) -> int:
        """Readable when a signal has come. :meth:`woken` makes it unreadable."""
        return self._reader

    def hear(self) -> None:
        """Raise KeyboardInterrupt for a Ctrl-C that has not been raised yet."""
        if self.pending and not self._deferred and self._takes_ctrl_c():  # often called
            self._drain()
            raise KeyboardInterrupt

    def woken(self) -> None:
        """As :meth:`hear`, for who has found :meth:`fileno` readable and looks at :attr:`pending` next."""
        self._drain()
        self.hear()

    def call_handlers(self) -> None:
        """Call the handlers of the signals that have come. The caller is at a point where they may begin operations.
        Raises what they raise."""
        self._drain()
        outside, self._outside = self._outside, self._depth
        try:
            self._restore()
            self._call()
        finally:
            self._outside = outside
            self._replace()

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
            if self.pending:
                self._wake()

    def close(self) -> None:
        """Close the descriptors."""
        self._closed = True
        os.close(self._reader)
        os.close(self._writer)

    def __enter__(self) -> Self:
        # Until the handlers are replaced, one may raise between any two calls: nothing may have changed by then.
        if self._depth == self._outside and threading.get_ident() == self._main:
            self._replace()
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth != self._outside:
            return
        if self._installed:
            try:
                self._restore()  # from here on, a handler is called when its signal comes
            finally:
                if self.pending:
                    self._drain()
                    if isinstance(error, KeyboardInterrupt):
                        self._takes_ctrl_c()  # another one while the first was raised is the same
                    self._call()  # another error is the context of what it raises: a caller may suppress that error
        if isinstance(error, Interrupted):
            raise error.error from error.error.__cause__

    def _replace(self) -> None:
        """Note signals in place of calling handlers."""
        # The functions of ``signal`` look handlers up in enums: 6 % of a run of an empty function (decision 27).
        found = [*map(getsignal, _SIGNALS)]
        if found != self._found:
            if self._noting in found:  # two signals at once have kept them from being put back
                self._restore()
                found = [*map(getsignal, _SIGNALS)]
            # A user who ignores Ctrl-C, for example, is left alone.
            self._handlers = {
                number: each for number, each in zip(_SIGNALS, found, strict=True) if each not in _NO_HANDLERS
            }
            self._found = found
        try:
            for number in self._handlers:
                self._handlers[number] = signal(number, self._noting)
            self._installed = True
        except BaseException:  # whatever a handler that was not replaced yet has raised
            try:
                self._restore()
            finally:
                self._call()
            raise

    def _restore(self) -> None:
        """Put the handlers back, but for those that were changed meanwhile."""
        self._installed, raised = False, None
        for _ in range(_TRIES):
            try:
                for number, handler in self._handlers.items():
                    if getsignal(number) is self._noting:
                        signal(number, handler)
                break
            except BaseException as error:  # noqa: BLE001  (whatever a handler that is back raises: the others follow)
                raised = error
        if raised is not None:
            raise raised

    def _call(self) -> None:
        """Let the signals do what they would have done."""
        while self.pending:
            number = self.pending.popleft()
            try:
                raise_signal(number)
            except BaseException:  # whatever a handler raises, which does not keep the others from being called
                self._call()
                raise

    def _takes_ctrl_c(self) -> bool:
        """Whether Ctrl-C is pending and raises KeyboardInterrupt. It is no longer pending then."""
        if SIGINT not in self.pending or self._handlers.get(SIGINT) is not default_int_handler:
            return False
        self.pending.remove(SIGINT)
        return True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in self.pending:  # the kernel does the same with a signal that waits
            self.pending.append(number)
        if not self._deferred:
            self._wake()

    def _wake(self) -> None:
        if not self._closed:
            with suppress(BlockingIOError):  # it is readable
                os.write(self._writer, b"!")

    def _drain(self) -> None:
        if not self._closed:
            with suppress(BlockingIOError):
                os.read(self._reader, 64)
