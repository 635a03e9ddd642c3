"""Reading ahead: the next items of an iterator, taken by a thread while the caller works with the last one.

``Dataset.prefetch`` and the iterators of distributed data sets use it. The thread refers to a :class:`_Shelf`, never to
the caller's :class:`ReadAhead`. So the thread of an abandoned iteration ends with the last reference to the iteration.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from cs_proto.errors import ContextError
from cs_runtime.waits import pace_of

__all__ = ["ReadAhead"]

_log = logging.getLogger("central_storage.ahead")

# The end of an iteration waits this many seconds for the current item, because the source may be waiting itself.
_STOP_TIMEOUT = 5.0


class ReadAhead:
    """The items of ``items``, up to ``size`` of them taken ahead; the thread starts when the first is asked for.

    An exception of ``items`` is raised in the place of its item, and ends the iteration. ``close()``, the end of the
    items, the end of the script and the loss of the last reference end the thread, which frees ``items``. However the
    threads are scheduled, an abandoned iteration has read exactly ``size`` items more than were taken, so a source with
    state (the epochs of a shuffle) continues in the same way in every run of a script.

    A forked child cannot continue (ContextError), because the thread that reads ahead exists only in the parent.
    """

    def __init__(self, items: Iterator[Any], size: int) -> None:
        self._shelf = shelf = _Shelf(items, size)
        #: End the iteration and free its items. Waits up to 5 s for the current item. Idempotent.
        self.close = weakref.finalize(self, shelf.stop)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._shelf.take()


class _End(NamedTuple):
    """Follows the last item, with the exception of the items, if any."""

    error: BaseException | None


class _Shelf:
    """The queue between the thread, which puts items in, and the caller, who takes them."""

    def __init__(self, items: Iterator[Any], size: int) -> None:
        self._items: Iterator[Any] | None = items
        # Neither takes a lock, because the garbage collector may stop a shelf while the thread uses it.
        self._ready: SimpleQueue[Any] = SimpleQueue()  # items, and then an _End
        self._room: SimpleQueue[bool] = SimpleQueue()  # True for each item that may be read, then False
        for _ in range(size):
            self._room.put(True)
        self._stopped = False  # no more items are taken
        self._hurried = False  # the thread must read no more, even if there is room
        self._starts = threading.RLock()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def take(self) -> Any:
        """Wait for the next item. Raises StopIteration at the end, and once the exception of the items."""
        if os.getpid() != self._process:  # checked before the lock, which another thread may have held at the fork
            raise ContextError(
                f"this iterator is read ahead in process {self._process}; in a forked child, iterate the data set again"
            )
        if self._thread is None:
            self._start()
        if self._stopped:
            raise StopIteration
        began, pace = time.monotonic(), pace_of("data")
        while True:
            try:
                item = self._ready.get(timeout=max(0.0, began + pace.after - time.monotonic()))
                if type(item) is _End:
                    self._ready.put(_End(None))
                else:
                    self._room.put(True)
                break
            except Empty:
                waited = time.monotonic() - began
                if pace.is_due(waited):
                    _log.warning("waiting %.0f s for the next element of a data set", waited)
            except (
                BaseException
            ):  # after Ctrl-C the current item is lost, but its room is freed, and an end stays the end
                self._room.put(True)
                if self._items is None:
                    self._ready.put(_End(None))
                raise
        if type(item) is not _End:
            return item
        raise item.error or StopIteration

    def stop(self) -> None:
        """Take no more items, and wait for the thread to end."""
        if os.getpid() != self._process:
            return
        with self._starts:
            self._stopped = True
            thread = self._thread
        self._room.put(False)
        if thread is None:
            self._free()
        elif thread is not threading.current_thread():
            thread.join(_STOP_TIMEOUT)
            if thread.is_alive():
                self._hurried = True
                _log.warning(
                    "the thread that reads a data set ahead still waits for an element after %.0f s; it ends when "
                    "the element arrives",
                    _STOP_TIMEOUT,
                )
        with suppress(Empty):
            while True:
                self._ready.get_nowait()
        self._ready.put(_End(None))  # for another thread that waits for an item

    def _start(self) -> None:
        with self._starts:
            if self._thread is not None or self._stopped:
                return
            # A daemon: a source that waits for ever must not keep the script from ending. The context carries
            # np.errstate.
            run = contextvars.copy_context().run
            self._thread = threading.Thread(target=run, args=(self._fill,), name="cs-read-ahead", daemon=True)
            self._thread.start()

    def _fill(self) -> None:
        """The code of the thread."""
        end = _End(None)
        try:
            while self._room.get() and not self._hurried:
                assert self._items is not None
                self._ready.put(next(self._items))
        except StopIteration:
            pass
        # The taker handles every exception, SystemExit included.
        except BaseException as error:  # noqa: BLE001
            end = _End(error)
        finally:
            try:
                self._free()
            finally:
                self._ready.put(end)

    def _free(self) -> None:
        items, self._items = self._items, None
        if items is not None and hasattr(items, "close"):
            items.close()
