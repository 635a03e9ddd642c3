"""What the service prints while the script does something else.

A script's own service sends what its processes print over the life-line. During an operation the receive seam shows
it; in between this thread does, so that a replica's last words do not wait for the next run.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

__all__ = ["OutputListener"]


class OutputListener:
    """Calls ``listen`` under ``lock`` whenever ``descriptor`` is readable and no operation holds the lock.

    The thread touches nothing else, until :meth:`finish`. ``listen`` returns False when there will be nothing more to
    hear.
    """

    def __init__(self, descriptor: int, lock: AbstractContextManager[bool], listen: Callable[[], bool]) -> None:
        self._lock = lock
        self._listen = listen
        self._last: Callable[[], None] | None = None
        self._stop_reader, self._stop_writer = os.pipe2(os.O_CLOEXEC)
        # Not select(): ``descriptor`` is closed after stop(), and may be when this thread next asks.
        self._poller = select.poll()
        self._poller.register(descriptor, select.POLLIN)
        self._poller.register(self._stop_reader, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="central storage output", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped(None):
                with self._lock:  # by now the listener may have been stopped, or an operation have heard it all
                    if self._stopped(0) or not self._listen():
                        break
            if self._last is not None:
                self._last()
        finally:
            os.close(self._stop_reader)

    def _stopped(self, timeout: int | None) -> bool:
        """Wait until there is something to hear; whether it is the end."""
        return self._stop_reader in dict(self._poller.poll(timeout))

    def stop(self) -> None:
        """End the thread; the caller may hold the lock. Idempotent."""
        if self._stop_writer >= 0:
            os.close(self._stop_writer)  # end-of-file makes the other end readable
            self._stop_writer = -1

    def finish(self, last: Callable[[], None]) -> None:
        """End the thread, which calls ``last`` first. Takes no lock."""
        self._last = last
        if self._stop_writer >= 0:
            os.write(self._stop_writer, b"!")

    def join(self) -> None:
        """Wait for the thread; the caller must not hold the lock."""
        if threading.current_thread() is not self._thread:
            self._thread.join()
