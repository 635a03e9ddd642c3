"""When a manager saves by itself: every so many steps or seconds, and before SIGTERM ends the script."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any, Protocol

from central_storage.core import between_steps
from central_storage.core.backends import Strategy
from cs_proto.errors import ContextError, InvalidArgumentError, ShutdownError
from cs_runtime import saving_mark

from .background import finish_all

__all__ = ["Automatic", "Saves"]

_log = logging.getLogger("central_storage.train")

# A signal that came at a moment when nothing is saved is sent again after so many seconds.
_AGAIN = 0.02
# A script that has made steps gets so many seconds to end one: only then every element that it has used has its effect.
_PATIENCE = 1.0


class Saves(Protocol):
    """What saves: a manager."""

    def _save_in_thread(self) -> object:
        """Begin a save."""

    def _hear(self) -> object:
        """Act on the error of a thread that could not save, if there is one."""

    def _save_now(self) -> object:
        """Save, and return when the file is there."""

    def _strategies(self) -> Sequence[Strategy]:
        """Whose values are saved."""


class Automatic:
    """The policy of one manager. It holds the manager weakly: a manager that nobody holds saves no more."""

    def __init__(
        self, manager: Saves, every_steps: int | None, every_seconds: float | None, *, on_sigterm: bool
    ) -> None:
        """Raises InvalidArgumentError for an argument out of range, ContextError if ``on_sigterm`` is given outside the
        main thread."""
        if every_steps is not None and (type(every_steps) is not int or every_steps < 1):
            raise InvalidArgumentError(f"every_steps must be a number of steps from 1, or None, not {every_steps!r}")
        is_number = isinstance(every_seconds, int | float) and not isinstance(every_seconds, bool)
        if every_seconds is not None and not (is_number and 0 < every_seconds < float("inf")):
            raise InvalidArgumentError(
                f"every_seconds must be a number of seconds above 0, or None, not {every_seconds!r}"
            )
        self._manager = weakref.ref(manager, self._leave)
        self._process = os.getpid()
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        # Before the script has restored, or has made a step, its state is worth nothing: it would hide a better one.
        self._is_ready = False
        self._steps = 0
        self._has_steps = False
        self._saved_at = time.monotonic()
        self._ours: weakref.WeakKeyDictionary[Strategy, bool] = weakref.WeakKeyDictionary()
        self._asked_at: float | None = None
        self._is_saving = self._is_saved = False
        self._lock = threading.RLock()
        self._undo = ExitStack()
        between_steps.after_step.append(self._passed)
        between_steps.before_end.append(self._ending)
        if on_sigterm:
            self._take_sigterm()

    def ready(self) -> None:
        """The state is worth saving from now on: it was restored, or there was nothing to restore."""
        self._is_ready = True

    def saved(self) -> None:
        """A save has begun, whoever asked for it."""
        self._is_ready = True
        self._steps = 0
        self._saved_at = time.monotonic()

    def _leave(self, manager: object) -> None:
        """The manager is gone. Called by the garbage collector in any thread, so the handler of the signal stays; it
        ends the script as before."""
        for calls, own in ((between_steps.after_step, self._passed), (between_steps.before_end, self._ending)):
            calls[:] = [each for each in calls if each != own]

    # --- between steps --------------------------------------------------------------------------------------------

    def _passed(self, strategy: Strategy) -> None:
        manager = self._manager()
        if manager is None or not self._is_of(strategy, manager):
            return
        self._is_ready = self._has_steps = True
        self._steps += 1
        if self._asked_at is not None:
            self._save_and_end()
            return
        is_far = self._every_steps is not None and self._steps >= self._every_steps
        is_late = self._every_seconds is not None and time.monotonic() - self._saved_at >= self._every_seconds
        manager._hear()  # noqa: SLF001  (they are one thing)
        if is_far or is_late:
            manager._save_in_thread()  # noqa: SLF001

    def _ending(self, strategy: Strategy) -> None:
        """The values of the strategy are about to go."""
        manager = self._manager()
        if self._asked_at is not None and manager is not None and self._is_of(strategy, manager):
            self._save_and_end()

    def _is_of(self, strategy: Strategy, manager: Saves) -> bool:
        """Whether the checkpoint has values of the strategy. That is looked up once: its objects may be many."""
        found = self._ours.get(strategy)
        if found is None:
            found = self._ours[strategy] = strategy in manager._strategies()  # noqa: SLF001
        return found

    # --- SIGTERM --------------------------------------------------------------------------------------------------

    def _take_sigterm(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ContextError("on_sigterm needs the main thread, which gets the signals; make the manager there")
        self._before: Any = signal.signal(signal.SIGTERM, self._signalled) or signal.SIG_DFL

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between any two of its instructions."""
        manager = self._manager()
        if manager is None or not self._is_ready or os.getpid() != self._process:  # a forked child saves nothing
            self._end()
            return
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            atexit.register(self._save_and_end)
            self._undo.enter_context(saving_mark.setting())  # before the launcher loses patience
            _log.warning("SIGTERM: saving a checkpoint, which ends the script")
        is_time = not self._has_steps or time.monotonic() - self._asked_at >= _PATIENCE
        if self._is_saved:
            self._end()
        elif is_time and _is_between_steps(manager):
            self._save_and_end()
        elif not self._is_saving:  # a step saves when it is over
            threading.Thread(target=_send_again, name="central storage signal", daemon=True).start()

    def _save_and_end(self) -> None:
        if self._is_saving and threading.current_thread() is threading.main_thread():
            return  # a signal has come in the midst of this method
        with self._lock:
            if not self._is_saved:
                self._is_saving = True
                manager = self._manager()
                try:
                    if manager is not None:
                        manager._save_now()  # noqa: SLF001
                except Exception as error:  # noqa: BLE001  (the script ends, whatever prevents the save)
                    _log.error("no checkpoint could be saved at SIGTERM: %s", error)
                self._is_saved = True
        if threading.current_thread() is threading.main_thread():
            self._end()
        else:
            _to_main_thread()

    def _end(self) -> None:
        """Let the signal do what it would have done."""
        finish_all()
        signal.signal(signal.SIGTERM, self._before)
        os.kill(os.getpid(), signal.SIGTERM)
        if self._before is signal.SIG_DFL:  # the first process of a container gets no signal that it does not handle
            os._exit(128 + signal.SIGTERM)


def _is_between_steps(manager: Saves) -> bool:
    return not between_steps.is_within() and not any(map(_is_busy, manager._strategies()))  # noqa: SLF001


def _is_busy(strategy: Strategy) -> bool:
    try:
        return strategy.controller.is_busy
    except ShutdownError:
        return False


def _send_again() -> None:
    time.sleep(_AGAIN)
    _to_main_thread()


def _to_main_thread() -> None:
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGTERM)
