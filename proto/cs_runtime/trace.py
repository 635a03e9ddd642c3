"""Step times: a process notes in a ring when it reaches a named place of a step.

The ring is a segment of this process (:mod:`cs_proto.step_times`), which observers read. Nothing is kept before a
process has its ring, while nobody reads it, and if ``CS_TIMES=off``.
"""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable

from cs_proto import step_times as layout
from cs_proto.errors import ConfigurationError

__all__ = ["Trace", "is_on", "moments", "note_span", "trace_of"]

_FIRST, _WRITTEN, _NAMES, _WATCHED = layout.FIRST, layout.WRITTEN, layout.NAMES, layout.WATCHED
_RUN = (1 << 32) - 1


def is_on() -> bool:
    """Whether ``CS_TIMES`` lets this process note step times, as it does if it is not set. Raises ConfigurationError if
    it is neither ``on`` nor ``off``."""
    said = os.environ.get("CS_TIMES") or "on"
    if said not in ("on", "off"):
        raise ConfigurationError(f"CS_TIMES must be on or off, not {said!r:.40}")
    return said == "on"


class Trace:
    """The writer of one ring. Any thread of the process may note moments. ::

    trace = Trace()
    trace.attach(segment.memory)
    trace.note("called", run=7)
    """

    #: ``note(name, run=0)``: this process has reached the place ``name``, one of `cs_proto.step_times.MOMENTS`, in the
    #: run of that number; 0 if the place does not know it.
    note: Callable[..., None]

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """``clock`` counts nanoseconds, alike in all processes of the machine."""
        self._clock = clock
        self._lock = threading.Lock()
        self.note, self._put, self._write_to = _writer(clock)
        if os.environ.get("CS_TIMES") == "off":
            self.note = _nothing
        self._words = _nowhere()[0]
        #: One word, which is not 0 while somebody reads the ring. To look at it before :attr:`note` saves the call.
        self.watched = self._words[_WATCHED : _WATCHED + 1]
        self._is_attached = False
        # The numbers of the names in the table, which are cut, and of those that were given here.
        self._table: dict[str, int] = {}
        self._names: dict[str, int] = {}
        _traces.add(self)

    def attach(self, memory: memoryview) -> None:
        """Write to this segment from now on, behind what a process before this one has written there. ``memory`` has
        `cs_proto.step_times.NBYTES` writable bytes."""
        text = memory.cast("B")
        words = text.cast("Q")
        is_first = words[layout.MAGIC] != layout.MARKER
        count = 0 if is_first else words[_NAMES]
        with self._lock:
            names = (layout.name_of(bytes(text[layout.name_place(number)])) for number in range(count))
            self._text, self._words, self._is_attached = text, words, True
            self.watched = words[_WATCHED : _WATCHED + 1]
            self._table, self._names = {name: number for number, name in enumerate(names)}, {}
            words[layout.VERSION], words[layout.PLACES] = layout.VERSION_NUMBER, layout.CAPACITY
            words[layout.EPOCH], words[layout.PID] = time.time_ns() - self._clock(), os.getpid()
            words[layout.MAGIC] = layout.MARKER
            self._write_to(words, layout.CAPACITY, 0 if is_first else words[_WRITTEN])
        _attach(self, True)
        self._put(layout.STARTED | (os.getpid() & _RUN) << 32)

    def detach(self) -> None:
        """Keep nothing from now on."""
        _attach(self, False)
        with self._lock:
            self._words, *_ = nowhere = _nowhere()
            self.watched = self._words[_WATCHED : _WATCHED + 1]
            self._write_to(*nowhere)
            self._is_attached, self._table, self._names = False, {}, {}

    def note_span(self, name: str, kind: int) -> None:
        """A span of this name begins or ends in this thread. ``kind`` is `cs_proto.step_times.BEGINS` or ``ENDS``."""
        if not self._words[_WATCHED]:
            return
        number = self._names.get(name)
        if number is None:
            number = self._number_of(name)
        self._put(kind | number | (threading.get_ident() & _RUN) << 32)

    def _number_of(self, name: str) -> int:
        """The number of a new name in the table; that of all other spans if the table is full."""
        with self._lock:
            cut, count = layout.name_of(layout.packed_name(name)), len(self._table)
            if not self._is_attached:
                return 0
            if cut not in self._table and count >= layout.MOST_NAMES - 1:
                cut = layout.OTHER_SPANS
            if cut not in self._table:
                self._text[layout.name_place(count)] = layout.packed_name(cut)
                self._table[cut] = count
                self._words[_NAMES] = count + 1
            number = self._table[cut]
            if len(self._names) < 2 * layout.MOST_NAMES:  # names that are made up anew each time take no more memory
                self._names[name] = number
            return number


def _writer(
    clock: Callable[[], int],
) -> tuple[Callable[..., None], Callable[[int], None], Callable[[memoryview, int, int], None]]:
    """`Trace.note`; what writes a word of kind and run, whether or not anybody reads; and what has both write to other
    words, with so many places of which so many were written. Variables of a closure take less time than attributes."""
    words, places, written = _nowhere()
    kinds = layout.KINDS

    def note(name: str, run: int = 0) -> None:
        nonlocal written
        if not words[_WATCHED]:
            return
        what = kinds[name]
        if run:
            what |= (run & _RUN) << 32
        now = clock()
        # No function is called from here on, so no other thread and no signal handler runs in between.
        place = written % places * 2 + _FIRST
        words[place] = now
        words[place + 1] = what
        written += 1
        words[_WRITTEN] = written

    def put(what: int) -> None:
        nonlocal written
        now = clock()
        place = written % places * 2 + _FIRST  # as in `note`
        words[place] = now
        words[place + 1] = what
        written += 1
        words[_WRITTEN] = written

    def write_to(other: memoryview, count: int, before: int) -> None:
        nonlocal words, places, written
        words, places, written = other, count, before

    return note, put, write_to


def _nowhere() -> tuple[memoryview, int, int]:
    """A place for one moment, which nobody reads."""
    return memoryview(bytearray(8 * (_FIRST + 2))).cast("Q"), 1, 0


@functools.cache
def trace_of(role: str) -> Trace:
    """The one trace of this process for its role: ``server`` or ``worker``."""
    return Trace()


def moments(role: str) -> Callable[..., None]:
    """:meth:`Trace.note` of :func:`trace_of`."""
    return trace_of(role).note


# Those that write to a ring: one for each service of this process.
_attached: tuple[Trace, ...] = ()


def _attach(trace: Trace, is_attached: bool) -> None:
    global _attached
    others = [each for each in _attached if each is not trace]
    _attached = (*others, trace) if is_attached else tuple(others)


def note_span(name: str, kind: int) -> None:
    """As :meth:`Trace.note_span`, in the rings of all services of this process."""
    for trace in _attached:
        trace.note_span(name, kind)


def _nothing(name: str, run: int = 0) -> None:
    pass


def _detach_all() -> None:
    """A ring has one writer, which is not the forked child."""
    for trace in list(_traces):
        trace._lock = threading.Lock()  # another thread of the parent may have held it  # noqa: SLF001
        trace.detach()


_traces: weakref.WeakSet[Trace] = weakref.WeakSet()
os.register_at_fork(after_in_child=_detach_all)
