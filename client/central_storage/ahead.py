"""Reading ahead: the next items of an iterator, taken by a thread while the caller works with the last one.

``Dataset.prefetch`` and the iterators of distributed data sets use it. The thread holds a :class:`_Shelf`, never the
:class:`ReadAhead` in the caller's hands, so that an iteration left half-way ends the thread as soon as nobody holds
it any more.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from cs_proto.errors import ContextError

__all__ = ["Carriage", "ReadAhead"]

_log = logging.getLogger("central_storage.ahead")

# A wait this long is named, and again after as long.
_NAME_WAIT_EVERY = 10.0
# Whoever ends an iteration waits this long for what is being read; a source may wait for something itself.
_STOP_TIMEOUT = 5.0


class Carriage(NamedTuple):
    """What becomes of the arrays that are read ahead of the replicas, and whether a thread may do it."""

    copy: Callable[[np.ndarray], np.ndarray] = np.copy
    in_thread: bool = True


class ReadAhead:
    """The items of ``items``, up to ``size`` of them taken ahead; the thread starts when the first is asked for.

    An exception of ``items`` is raised where its item would have been, and is the end. ``close()``, the end of the
    items, the end of the script and the loss of the last reference end the thread, which frees ``items``. However the
    threads are scheduled, an iteration left half-way has read ``size`` items more than were taken, so that a source
    which keeps state (the epochs of a shuffle) goes on the same in every run of a script.

    A forked child cannot read on (ContextError): what is read ahead belongs to the thread, which it does not have.
    """

    def __init__(self, items: Iterator[Any], size: int) -> None:
        self._shelf = shelf = _Shelf(items, size)
        #: End the iteration and free what it holds. Waits for what is being read, up to 5 s. Idempotent.
        self.close = weakref.finalize(self, shelf.stop)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._shelf.take()


class _Shelf:
    """What the thread puts items on and the caller takes them from."""

    def __init__(self, items: Iterator[Any], size: int) -> None:
        self._items: Iterator[Any] | None = items
        self._size = size
        self._ready: deque[Any] = deque()
        self._error: BaseException | None = None
        self._ended = False  # the thread puts nothing more
        self._stopped = False  # nobody takes anything more
        # Reentrant, which a Condition is: the collector may stop a shelf in the middle of what the thread does with it.
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def take(self) -> Any:
        """The next item; waits for it. Raises StopIteration at the end, and once what the items raised."""
        if os.getpid() != self._process:  # asked before the lock, which a thread may have held at the fork
            raise ContextError(
                f"this iterator is read ahead in process {self._process}; a forked child iterates the data set anew"
            )
        with self._changed:
            if self._stopped:
                raise StopIteration
            if self._thread is None:
                self._start()
            waited = 0.0
            while not self._ready and not self._ended:
                if not self._changed.wait(_NAME_WAIT_EVERY):
                    waited += _NAME_WAIT_EVERY
                    _log.warning("waiting %.0f s for the next element of a data set", waited)
            if self._ready:
                item = self._ready.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        raise error or StopIteration

    def stop(self) -> None:
        """Take nothing more, and see the thread end."""
        if os.getpid() != self._process:
            return
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            thread = self._thread
        if thread is None:
            self._free()
        elif thread is not threading.current_thread():
            thread.join(_STOP_TIMEOUT)
            if thread.is_alive():
                self._size = 0  # nothing more than what it is at
                _log.warning(
                    "a data set that is no longer read has not given its element after %.0f s; its thread ends when it "
                    "does",
                    _STOP_TIMEOUT,
                )
        self._ready.clear()

    def _start(self) -> None:
        # A daemon: a source that waits for ever must not keep the script from ending. The context carries np.errstate.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._fill,), name="cs-read-ahead", daemon=True)
        self._thread.start()

    def _fill(self) -> None:
        """The thread."""
        try:
            while self._has_room():
                assert self._items is not None
                self._put(next(self._items))
        except StopIteration:
            pass
        # Whatever it is, SystemExit too, is the taker's to handle.
        except BaseException as error:  # noqa: BLE001
            self._error = error
        finally:
            try:
                self._free()
            finally:
                with self._changed:
                    self._ended = True
                    self._changed.notify_all()

    def _has_room(self) -> bool:
        with self._changed:
            while len(self._ready) >= self._size and not self._stopped:
                self._changed.wait()
            return len(self._ready) < self._size

    def _put(self, item: Any) -> None:
        with self._changed:
            self._ready.append(item)
            self._changed.notify_all()

    def _free(self) -> None:
        items, self._items = self._items, None
        if items is not None and hasattr(items, "close"):
            items.close()
