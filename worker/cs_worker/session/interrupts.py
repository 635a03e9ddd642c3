"""Signals reach the user's code only where they belong.

SIGINT is a doorbell that says "look at your mail": the client sends a Cancel that names a run, then rings.
KeyboardInterrupt is raised in the user's code of that very run and nowhere else, so it can neither tear the worker's
own code apart nor hit a later run. While the worker waits inside a run the Cancel itself is seen, without any signal.
SIGTERM ends the process.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

__all__ = ["Interrupts", "ThreadInterrupts", "ring_doorbell"]

_log = logging.getLogger("central_storage.worker")

# The Cancel is sent before the signal but travels through other threads: this long it may be late.
_MAIL_TIMEOUT = 1.0


class Interrupts:
    """Which code runs in the main thread now, the user's or the worker's own, and what signals do to it."""

    def __init__(self) -> None:
        self.terminating = False
        #: Whether the user's code runs now. While :attr:`is_calm`, it may be set without a call of :meth:`switch`.
        self.in_user_code = False
        #: Whether neither a Cancel nor a SIGINT has ever come: then the way back to the user's code needs no check.
        self.is_calm = True
        # Each Cancel comes with one SIGINT, before or after it. Each count has one writer, so that none is lost where
        # the signal interrupts the other.
        self._rings = 0
        self._explained = 0
        self._is_cancelled: Callable[[], bool] = _never
        self._fetch_mail: Callable[[float], None] = _nothing

    def attend_to(self, is_cancelled: Callable[[], bool], fetch_mail: Callable[[float], None]) -> None:
        """Set how to learn whether the run under way is cancelled. ``fetch_mail(timeout)`` waits at most ``timeout``
        seconds until :meth:`note_cancel` has noted a Cancel of any run."""
        self._is_cancelled = is_cancelled
        self._fetch_mail = fetch_mail

    def install(self) -> None:
        """Handle SIGINT and SIGTERM from now on. Main thread only."""
        # signal.signal looks each handler up in an enum, does not find it, and handles the exception: in every run.
        _signal.signal(signal.SIGINT, self._interrupt)
        _signal.signal(signal.SIGTERM, self._terminate)

    def forget(self) -> None:
        """In a forked child: signals do what they do in any Python process."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)  # the pipe is shared with the worker

    def user_code(self) -> _Part:
        """A block that runs the user's code: here, and only here, KeyboardInterrupt may appear out of nothing."""
        return _Part(self, in_user_code=True)

    def own_code(self) -> _Part:
        """A block inside the user's code that must not be torn apart; a SIGINT is looked at when it ends."""
        return _Part(self, in_user_code=False)

    def note_cancel(self) -> None:
        """A Cancel has arrived."""
        self.is_calm = False
        self._explained += 1

    def begin_run(self) -> None:
        """A run of the client begins: the SIGINT of an earlier one has come by now, or never will."""
        self._explained = min(self._explained, self._rings)

    def switch(self, in_user_code: bool) -> bool:
        """What follows is the user's code, or the worker's own; returns which it was before."""
        before, self.in_user_code = self.in_user_code, in_user_code
        if in_user_code and not self.is_calm:
            self._attend()
        return before

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.is_calm = False
        self._rings += 1
        self._attend()

    def _attend(self) -> None:
        while self.in_user_code and (self._rings > self._explained or self._is_cancelled()):
            # What follows is the worker's own code. It stays so if KeyboardInterrupt is raised: once is enough, and
            # the blocks that the exception leaves restore the rest.
            self.in_user_code = False
            if not self._is_cancelled():
                self._fetch_mail(_MAIL_TIMEOUT)
            if self._is_cancelled():
                raise KeyboardInterrupt
            if self._rings > self._explained:
                _log.warning("ignored a SIGINT, because no run was cancelled")
                self._explained = self._rings
            self.in_user_code = True

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.terminating = True
        raise SystemExit(0)


class ThreadInterrupts(Interrupts):
    """The same for a worker that is a thread of a script, where signals go to the main thread. :meth:`ring` and
    :meth:`terminate` are to it what SIGINT and SIGTERM are to a process: they may be called from any thread, and raise
    in the user's code where that runs. Code that does not come back to the interpreter is not reached."""

    def __init__(self) -> None:
        super().__init__()
        self.is_calm = False  # another thread may ring at any time
        self.identity = 0
        self._lock = threading.Lock()
        self._struck: type[BaseException] | None = None

    def install(self) -> None:
        """This thread is the worker's."""
        self.identity = threading.get_ident()

    def ring(self) -> None:
        """A Cancel is in the mail."""
        with self._lock:
            self._rings += 1
            self._strike(_Interrupted)

    def terminate(self) -> None:
        """The worker is to end."""
        with self._lock:
            self.terminating = True
            self._strike(_Terminated)

    def switch(self, in_user_code: bool) -> bool:
        """As in a process; what was to be raised in the user's code, and has not been yet, is raised here."""
        with self._lock:
            struck, self._struck = self._struck, None
            if struck is not None and _here.raised is not struck:
                _raise_in(self.identity, None)
                raise KeyboardInterrupt if struck is _Interrupted else SystemExit(0)
            _here.raised = None
            if in_user_code and self.terminating:
                raise SystemExit(0)
            before, self.in_user_code = self.in_user_code, in_user_code
        self._attend()
        return before

    @property
    def is_unheard(self) -> bool:
        """Whether something is still to be raised in the user's code."""
        return self._struck is not None

    def _strike(self, kind: type[BaseException]) -> None:
        if self.in_user_code:
            self.in_user_code = False  # once is enough, as for a signal
            self._struck = kind
            _raise_in(self.identity, kind)


class _Here(threading.local):
    """The exception that another thread has raised in this one, until :meth:`ThreadInterrupts.switch` knows of it."""

    raised: type[BaseException] | None = None


_here = _Here()


class _Interrupted(KeyboardInterrupt):
    """The interpreter makes the object in the thread in which it raises it, so ``__init__`` notes that it did."""

    def __init__(self) -> None:
        super().__init__()
        _here.raised = _Interrupted


class _Terminated(SystemExit):
    """Like :class:`_Interrupted`."""

    def __init__(self) -> None:
        super().__init__(0)
        _here.raised = _Terminated


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Have the interpreter raise ``kind`` in a thread between two steps of its code. None withdraws an exception that
    is not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), kind and ctypes.py_object(kind))


class _Part:
    """A stretch of code of one of the two kinds; leaving it restores the kind around it."""

    __slots__ = ("_before", "_in_user_code", "_interrupts")

    def __init__(self, interrupts: Interrupts, *, in_user_code: bool) -> None:
        self._interrupts = interrupts
        self._in_user_code = in_user_code
        self._before = False

    def __enter__(self) -> None:
        self._before = self._interrupts.switch(self._in_user_code)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._interrupts.switch(self._before)


def ring_doorbell() -> int:
    """A descriptor that is readable after a signal, for the rest of this process. Main thread only.

    It goes into the poll of the receive seam: a signal that comes just before the poll would else be handled only when
    the poll ends.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def _never() -> bool:
    return False


def _nothing(timeout: float) -> None:
    """Before there is any mail."""
