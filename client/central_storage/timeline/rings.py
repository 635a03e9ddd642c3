"""Where the time of steps goes: from the rings of all processes of a service to slices, and from these to steps.

:class:`Rings` copies what the processes note, whatever becomes of them meanwhile. A *slice* is the time between two
moments of one process, and has the name of a part of a step. A *step* is one run that all replicas have returned from.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from cs_proto import segment_names
from cs_proto import step_times as layout
from cs_proto.errors import CentralStorageError, ConfigurationError, InvalidArgumentError, ShutdownError
from cs_proto.frozen import frozen
from cs_proto.messages import WatchTimes
from cs_runtime.shared_memory import mapping
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.rings import IS_ORDERED
from cs_runtime.transport.supervisor_link import SupervisorLink

__all__ = [
    "CONTROLLER",
    "GAP",
    "MERGE_POINT",
    "PARTS",
    "SCRIPT",
    "SERVER",
    "WAITING",
    "Moment",
    "RecordedMoments",
    "Ring",
    "Rings",
    "Slice",
    "Span",
    "Step",
    "Window",
    "role_of",
    "slices",
    "spans",
    "steps",
]

SERVER, CONTROLLER = "server", "controller"

#: By role and moment: the part of the step that ends there.
PARTS = {
    ("worker", "decoded"): "decode (worker)",
    ("worker", "called"): "arguments, seeds",
    ("worker", "bound"): "function: parameters, buffers",
    ("worker", "forward"): "function: forward",
    ("worker", "backward"): "function: backward",
    ("worker", "looked-up"): "function: look-up",
    ("worker", "sliced"): "function: IndexedSlices",
    ("worker", "applied"): "function: apply_gradients",
    ("worker", "returned"): "function",
    ("worker", "sent"): "result, encode, send (worker)",
    ("server", "decoded"): "decode (server)",
    ("server", "decided"): "merge: decide, write down",
    ("server", "committed"): "commit",
    ("server", "prepared"): "next step prepared",
    ("server", "sent"): "encode, send (server)",
}
SCRIPT = {
    ("client", "begun"): "between runs (script)",
    ("client", "pickled"): "pickle check",
    ("client", "sent"): "encode, send (client)",
    ("client", "decoded"): "decode (client)",
    ("client", "over"): "result (client)",
}
WAITING = "waiting"
MERGE_POINT = "function: up to a merge point"
_PARTS = {**PARTS, **SCRIPT}
_STARTED = "started"
#: In the place of moments that are missing.
GAP = "gap"
_GAP_KIND = 0
# What is before them belongs to another process, or is not known.
_BREAKS = (_STARTED, GAP)


class Moment(NamedTuple):
    """When (nanoseconds of CLOCK_MONOTONIC) a process reached a place, and in which run (its lowest 32 bits; 0: not
    known there). ``edge``: 1 where the span ``name`` begins in the thread ``run``, -1 where it ends, 0 at a place."""

    when: int
    name: str
    run: int
    edge: int = 0


class Slice(NamedTuple):
    """What a process did from ``begin`` to ``end`` (nanoseconds): a part of the step ``run``, which ends at the place
    ``moment``."""

    part: str
    begin: int
    end: int
    run: int
    moment: str


class Span(NamedTuple):
    """A span of the user's in one thread, from ``begin`` to ``end`` (nanoseconds)."""

    name: str
    begin: int
    end: int
    thread: int


class Ring:
    """Copies the moments of one process as they are written. Single writer, any number of readers."""

    def __init__(self, memory: memoryview, *, from_now: bool = False) -> None:
        """``memory`` is the whole segment. ``from_now``: leave out what was written before.

        Raises ConfigurationError if its layout is that of another version.
        """
        self._bytes = memory.cast("B")
        self._words = np.frombuffer(memory, np.uint64)
        self._moments = self._words[layout.FIRST :].reshape(-1, 2)
        self._names: list[str] = []
        self._check()
        self._next = self._written if from_now else 0

    @property
    def pid(self) -> int:
        """The number of the process that wrote last; 0 if there was none."""
        return int(self._words[layout.PID])

    @property
    def epoch(self) -> int:
        """The time since 1970 less that of CLOCK_MONOTONIC, in nanoseconds."""
        return int(self._words[layout.EPOCH])

    def copied(self) -> tuple[np.ndarray, int]:
        """The moments since the last call, in order, for :meth:`decoded`; and how many were overwritten before they
        could be read. Where some are missing, what follows begins with `GAP`. uint64 [moments, 2]."""
        self._check()
        first = max(self._next, self._written - layout.CAPACITY)
        upto = self._written
        copied = self._moments[np.arange(first, upto) % layout.CAPACITY]
        # The writer may be overwriting one more moment than it has counted.
        kept = min(max(first, self._written - layout.CAPACITY + 1), upto)
        lost, self._next = kept - self._next, upto
        copied = copied[kept - first :]
        if lost and len(copied):
            copied = np.concatenate([np.array([[copied[0, 0], _GAP_KIND]], np.uint64), copied])
        return copied, lost

    def decoded(self, copied: np.ndarray) -> list[Moment]:
        """What :meth:`copied` has returned."""
        self._learn_names()
        return [self._moment(when, what) for when, what in copied.tolist()]

    @property
    def _written(self) -> int:
        return int(self._words[layout.WRITTEN])

    def _check(self) -> None:
        if self._words[layout.MAGIC] != layout.MARKER:
            return  # nothing has been written yet
        found = int(self._words[layout.VERSION]), int(self._words[layout.PLACES])
        if found != (layout.VERSION_NUMBER, layout.CAPACITY):
            raise ConfigurationError(
                f"the step times of process {self.pid} have layout {found[0]} with {found[1]} places, and this version "
                f"reads layout {layout.VERSION_NUMBER} with {layout.CAPACITY}; use the version of the service"
            )

    def _learn_names(self) -> None:
        for number in range(len(self._names), int(self._words[layout.NAMES])):
            self._names.append(layout.name_of(bytes(self._bytes[layout.name_place(number)])))

    def _moment(self, when: int, what: int) -> Moment:
        kind, run = what & 0xFFFF, what >> layout.RUN_SHIFT
        if kind <= len(layout.MOMENTS):
            return Moment(when, GAP if kind == _GAP_KIND else layout.MOMENTS[kind - 1], run)
        is_end = kind >= layout.ENDS
        number = kind - (layout.ENDS if is_end else layout.BEGINS)
        return Moment(when, self._names[number], run, -1 if is_end else 1)


class Rings:
    """The rings of a service by process: ``server``, ``controller``, ``w0``, ``w1``, ... Close it, or use it in a
    ``with`` block."""

    def __init__(self, address: str) -> None:
        """Map the rings of the service in the run directory ``address``, and have its processes note step times until
        :meth:`close`.

        Raises LaunchError if there is no service, ShutdownError if it ends meanwhile, and ConfigurationError if it
        keeps no step times, or if they cannot be read from this process.
        """
        if not IS_ORDERED:
            raise ConfigurationError("step times can be read on x86-64 processors only, and this is another one")
        self._link = SupervisorLink(supervisor_link.connect(address), "observer")
        try:
            self._link.send(WatchTimes())
            self.rings = dict(self._opened(address))
        except BaseException:  # also Ctrl-C: while the connection is open, the training notes moments
            self._link.close()
            raise
        if not self.rings:
            self._link.close()
            raise ConfigurationError(
                f"the service in {address} keeps no step times: it was started with CS_TIMES=off, or in_process"
            )

    def _opened(self, address: str) -> Iterator[tuple[str, Ring]]:
        workers = (f"w{replica}" for replica in range(1 << 16))
        for process in (CONTROLLER, SERVER, *workers):
            try:
                segment = self._link.segment(segment_names.times(process))
            except InvalidArgumentError:  # there is none, and so no other worker
                return
            if not isinstance(segment, mapping.Mapping):
                raise ConfigurationError(
                    f"the step times of the service in {address} cannot be read here: {self._link.carried_because}"
                )
            yield process, Ring(segment.memory, from_now=True)

    def mapped(self, name: str) -> mapping.Mapping | None:
        """Another segment of the service; None if it cannot be mapped."""
        try:
            segment = self._link.segment(name)
        except CentralStorageError:
            return None
        return segment if isinstance(segment, mapping.Mapping) else None

    def is_over(self) -> bool:
        """Whether the service has ended."""
        try:
            while self._link.receive_nowait() is not None:
                pass  # deaths and restarts change nothing here
        except ShutdownError:
            return True
        return False

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class RecordedMoments:
    """What the processes of a service have noted since it began. It is decoded at the end only, since whoever looks
    at a training takes processor time from it.

    Moments of processes that have ended, or of a service that has, are kept, too.
    """

    def __init__(self, rings: Rings, limit: int | None = None) -> None:
        """Keep at least the last ``limit`` moments of each process, and all without a limit."""
        self._rings = rings
        self._limit = limit
        self._kept: dict[str, deque[np.ndarray]] = {process: deque() for process in rings.rings}
        self._counts = dict.fromkeys(rings.rings, 0)  # of the moments in ``_kept``
        #: By process: how many moments are not kept, or were overwritten before they could be read.
        self.missing = dict.fromkeys(rings.rings, 0)

    def look(self) -> None:
        """Copy what was noted since the last look."""
        for process, ring in self._rings.rings.items():
            copied, lost = ring.copied()
            kept = self._kept[process]
            if len(copied):
                kept.append(copied)
                self._counts[process] += len(copied)
            while self._limit is not None and kept and self._counts[process] - len(kept[0]) >= self._limit:
                self._counts[process] -= len(kept[0])
                lost += len(kept.popleft())
            self.missing[process] += lost

    def count(self, process: str, moment: str) -> int:
        """How often a process has reached a place, as far as that is kept."""
        kind = layout.MOMENTS.index(moment) + 1
        return sum(int(np.count_nonzero((copied[:, 1] & 0xFFFF) == kind)) for copied in self._kept[process])

    def moments(self) -> dict[str, list[Moment]]:
        """All that is kept, by process."""
        nothing = np.zeros((0, 2), np.uint64)
        return {
            process: ring.decoded(np.concatenate([nothing, *self._kept[process]]))
            for process, ring in self._rings.rings.items()
        }


class Window:
    """The last places that the processes of a service have reached, few enough to be looked at again and again. Spans
    are left out."""

    def __init__(self, rings: Rings, *, places: int = 4096, seconds: float = 60.0) -> None:
        """Keep at most ``places`` moments of each process, none older than ``seconds``."""
        self._rings = rings
        self._places = places
        self._nanoseconds = int(seconds * 1e9)
        self._kept = {process: np.empty((0, 2), np.uint64) for process in rings.rings}

    def read(self) -> dict[str, list[Moment]]:
        """What is in the window now, by process, for :func:`steps`."""
        oldest = max(0, time.monotonic_ns() - self._nanoseconds)
        for process, ring in self._rings.rings.items():
            kept = np.concatenate([self._kept[process], ring.copied()[0]])
            is_place = (kept[:, 1] & 0xFFFF) <= len(layout.MOMENTS)
            self._kept[process] = kept[is_place & (kept[:, 0] >= oldest)][-self._places :]
        return {process: ring.decoded(self._kept[process]) for process, ring in self._rings.rings.items()}


def role_of(process: str) -> str:
    """The role in the tables of parts: ``client``, ``server`` or ``worker``."""
    return {SERVER: "server", CONTROLLER: "client"}.get(process, "worker")


def slices(process: str, moments: Iterable[Moment]) -> list[Slice]:
    """The slices between the places that a process has reached, in order. A place that does not know its run belongs to
    the run of the next place that does."""
    role = role_of(process)
    places = sorted((moment for moment in moments if not moment.edge), key=lambda moment: moment.when)
    runs = _runs(places)
    found: list[Slice] = []
    is_called = False
    for (before, after), run in zip(pairwise(places), runs[1:], strict=True):
        # What a worker sends between the call and the return of a function ends a part of the function.
        is_called = before.name == "called" or (is_called and before.name != "returned")
        if after.name in _BREAKS:
            is_called = False
            continue
        part = _PARTS.get((role, after.name), WAITING)
        if is_called and after.name == "sent":
            part = MERGE_POINT
        found.append(Slice(part, before.when, after.when, run, after.name))
    return found


def _runs(places: Sequence[Moment]) -> list[int]:
    """The run of each place, or of the next place that knows it; 0 if there is none before the next break."""
    run, runs = 0, []
    for place in reversed(places):
        run = 0 if place.name in _BREAKS else place.run or run
        runs.append(run)
    return runs[::-1]


def spans(moments: Iterable[Moment]) -> list[Span]:
    """The spans of a process, by their beginnings; those of one thread lie apart or within each other. A span that has
    not ended lasts until the last moment of its process. The rest of one whose beginning is not there is left out."""
    found: list[Span] = []
    open_spans: dict[int, list[Moment]] = {}
    last = 0
    for moment in sorted(moments, key=lambda moment: moment.when):
        if moment.name in _BREAKS and not moment.edge:
            found += _ended(open_spans, last)
        last = moment.when
        inner = open_spans.setdefault(moment.run, []) if moment.edge else []
        if moment.edge > 0:
            inner.append(moment)
        elif moment.edge and any(each.name == moment.name for each in inner):
            while inner:  # a generator may have been left in the midst of inner spans
                begun = inner.pop()
                found.append(Span(begun.name, begun.when, moment.when, moment.run))
                if begun.name == moment.name:
                    break
    found += _ended(open_spans, last)
    return sorted(found, key=lambda span: (span.begin, -span.end))


def _ended(open_spans: dict[int, list[Moment]], last: int) -> list[Span]:
    ended = [Span(each.name, each.when, last, each.run) for inner in open_spans.values() for each in inner]
    open_spans.clear()
    return ended


@frozen
class Step:
    """One run, from the end of the run before it to its own, in nanoseconds. A run has ended when the server has
    answered, or when a replica has begun the next one: the server may note its answer later than that.

    ``functions`` and ``waits`` have an item for each replica: the time in its function, and from its return to that of
    the last replica. ``data`` is what the script took before it sent the run, as far as the replicas waited for it;
    ``script_waits`` is how long the script waited. ``messages`` is the rest of the step: messages and wake-ups.
    """

    run: int
    whole: int
    functions: tuple[int, ...]
    waits: tuple[int, ...]
    commit: int
    data: int
    script_waits: int
    messages: int


def steps(recorded: Mapping[str, Sequence[Moment]]) -> list[Step]:
    """The steps of the last script that lie whole in the moments of all processes, in order."""
    begun = max(
        (each.when for each in recorded.get(CONTROLLER, ()) if each.name == _STARTED and not each.edge), default=0
    )
    by_run = {
        process: _by_run(slices(process, (each for each in moments if each.when >= begun)))
        for process, moments in recorded.items()
    }
    workers = [process for process in recorded if role_of(process) == "worker"]
    server, script = by_run.get(SERVER, {}), by_run.get(CONTROLLER, {})
    ends: dict[int, int] = {}
    found = []
    for run in sorted(server):
        replicas = [by_run[worker].get(run, []) for worker in workers]
        returns = [[each.begin for each in mine if each.moment == "sent"] for mine in replicas]
        if not replicas or not all(returns) or not all(_has_called(mine) for mine in replicas):
            continue
        last_return = max(mine[-1] for mine in returns)
        # What the server has answered earlier in this run it may have noted later.
        decided = max((each.end for each in server[run] if each.part == "commit"), default=last_return)
        answers = [each.end for each in server[run] if each.moment == "sent" and each.end >= max(last_return, decided)]
        if not answers:
            continue
        next_calls = [
            each.end for worker in workers for each in by_run[worker].get(run + 1, []) if each.moment == "called"
        ]
        ends[run] = min(answers[0], max(last_return, min(next_calls, default=answers[0])))
        if run - 1 in ends:
            found.append(_step(run, ends[run - 1], ends[run], replicas, server[run], script.get(run, [])))
    return found


def _has_called(mine: list[Slice]) -> bool:
    return any(each.moment == "called" for each in mine)


def _step(
    run: int, begin: int, end: int, replicas: list[list[Slice]], server: list[Slice], script: list[Slice]
) -> Step:
    functions = tuple(
        sum(each.end - each.begin for each in mine if each.part.startswith("function")) for mine in replicas
    )
    returns = [max(each.end for each in mine if each.moment == "sent") for mine in replicas]
    # The server notes late, too, that it has committed.
    commit = sum(max(0, min(each.end, end) - each.begin) for each in server if each.part == "commit")
    sent = max((each.end for each in script if each.moment == "sent"), default=begin)
    between = sum(each.end - each.begin for each in script if each.moment == "begun")
    data = min(between, max(0, sent - begin))
    waited = sum(each.end - each.begin for each in script if each.part == WAITING)
    rest = end - begin - max(functions) - commit - data
    waits = tuple(max(returns) - each for each in returns)
    return Step(run, end - begin, functions, waits, commit, data, waited, max(0, rest))


def _by_run(found: Iterable[Slice]) -> dict[int, list[Slice]]:
    by_run: dict[int, list[Slice]] = {}
    for each in found:
        by_run.setdefault(each.run, []).append(each)
    return by_run
