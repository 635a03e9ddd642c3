"""Everything the engine remembers: one table for each subject, written through to the control store.

Owns the records of the tables (codes 200-229, which no peer ever sees), and their way into the store and back. The
dictionaries here are decoded copies. An engine that is built again over the same store knows what this one knew at the
last ``flush``. The tables know no rules; the other modules of the engine act on them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import msgpack

from cs_proto import codec
from cs_proto.errors import PeerProtocolError
from cs_proto.messages import (
    Accepted,
    Assign,
    AssignAll,
    AssignSlot,
    Configure,
    Create,
    Created,
    CreatedInRun,
    DescribeSlots,
    Died,
    Done,
    Error,
    Free,
    Get,
    Hello,
    MergeCallReturn,
    Optimizer,
    Point,
    PointFailed,
    ReadPoint,
    Reduced,
    Refused,
    Return,
    RunId,
    Variable,
    Worker,
    WriteNote,
)
from cs_proto.records import Buffer, Record, record

from . import reasons
from .control_log import Control, ControlDamaged

# --- what is recorded -------------------------------------------------------------------------------------------------


class _Row(Record):
    """Base of the records below. They are made by this process alone, so they are not checked field by field."""

    is_checked = False


@record(200)
class WorkerSession(_Row):
    """A registered worker and the identity of its socket. ``is_announced``: the senders of runs know it."""

    peer: bytes
    worker: Worker
    is_announced: bool = True


@record(201)
class ClientSession(_Row):
    """A client that has sent a Hello. A controller waits for its welcome ``since``; the wait was last ``named``
    then."""

    hello: Hello
    is_welcome: bool
    since: float
    named: float


@record(202)
class Request(_Row):
    """The last write of a controller: ``request`` until it is done, ``reply`` from then on.

    ``run`` is the top-level run under whose token it was made, 0 for the client's own.
    """

    peer: bytes
    run: int
    sequence: int
    request: Create | Assign | AssignAll | AssignSlot | Configure | Free | None
    reply: Created | Done | Refused | None


@record(203)
class HeldGet(_Row):
    """A Get whose bytes must be copied, or a DescribeSlots whose slots are being made, once no commit is under way."""

    peer: bytes
    get: Get | DescribeSlots


@record(204)
class Slab(_Row):
    """All variables of one dtype, or the sparse ones of it: the length of its segments, the end of the last place that
    was given away, the bytes of its variables, the part of them that no optimizer has touched although one may, and the
    number of sets of gradient buffers that each replica has."""

    reservation: int
    tail: int
    nbytes: int
    idle_nbytes: int
    gradient_sets: int = 1


@record(214)
class Hole(_Row):
    """Bytes of a slab between variables, where one was."""

    nbytes: int


@record(205)
class VariableSet(_Row):
    """The variables (ascending numbers) that an optimizer updates together."""

    optimizer: int
    variables: tuple[int, ...]


@record(213)
class Steps(_Row):
    """How often a variable set was updated."""

    count: int


@record(221)
class WrittenTogether(_Row):
    """Variables (ascending numbers) that were written ``count`` times together. Their own rows do not count that."""

    variables: tuple[int, ...]
    count: int


@record(206)
class SlotNames(_Row):
    """The slots that an optimizer has for one variable; empty if its rule needs none. ``steps``: how often it updated
    the variable, beside the steps that the sets of variables count; negative if these count too many."""

    names: tuple[str, ...]
    steps: int = 0


@record(219)
class Seat(_Row):
    """The number in the names of an optimizer's slot segments. A new optimizer takes that of one that is gone."""

    number: int


@record(220)
class Asked(_Row):
    """The name that was asked for a variable that has got another one."""

    name: str


@record(207)
class Failure(_Row):
    """The reason why a run cannot continue. Replicas are sent ``error``; ``replica`` is -1 if no replica caused it."""

    cause: Literal["mismatch", "operation", "lost", "cancelled"]
    replica: int
    error: Error


@record(208)
class RunState(_Row):
    """How far a run is. Of its merge points the first ``agreed`` were brought by all replicas and fit each other, the
    first ``committed`` are done with; ``commits`` counts those that changed a variable. ``token``: the merge point
    whose merge function is being run, or -1. Its wait was last ``named`` then; the controller has waited for its end
    since ``awaited`` (0: not for long). ``has_changed``: the hyperparameters that it brings have been taken over.
    ``client``: the controller whose run it is."""

    agreed: int
    committed: int
    commits: int
    token: int
    failure: Failure | None
    is_finished: bool
    named: float
    awaited: float = 0.0
    has_changed: bool = False
    client: str = ""


@record(209)
class ReplicaProgress(_Row):
    """Where one replica of a run stands: it has brought ``count`` merge points and ``writes`` write notes and,
    ``since`` then, it waits at merge point ``waiting`` (-1: it does not), or to ``read`` what it wrote, or has
    ``returned``, or its worker is lost. After one of ``deaths`` of its worker the run is replayed: of what is recorded
    the worker in its place has brought ``again`` merge points and ``writes_again`` write notes. While it waits,
    the views that its function holds are ``live``, so that a commit would change them, or the replica has been
    ``asked`` to preserve them, or they are ``preserved``."""

    count: int
    since: float
    waiting: int
    read: ReadPoint | None
    returned: Return | None
    is_lost: bool
    writes: int = 0
    again: int = 0
    writes_again: int = 0
    deaths: int = 0
    views: Literal["live", "asked", "preserved"] = "live"

    @property
    def is_replaying(self) -> bool:
        """Whether it has yet to repeat merge points from before its worker's death."""
        return self.again < self.count or self.writes_again < self.writes

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for an answer."""
        return self.waiting >= 0 or self.read is not None

    @property
    def is_preserving(self) -> bool:
        """Whether it waits, and others wait until it has preserved its views."""
        return self.is_waiting and self.views == "asked"

    @property
    def is_stopped(self) -> bool:
        """Whether its function can no longer read a variable."""
        return self.is_waiting or self.returned is not None or self.is_lost


@record(210)
class SlotFill(_Row):
    """The start of one slot of one variable: elements ``first`` to ``last`` of a segment. ``is_lazy``: all zero, and no
    memory taken for it."""

    segment: str
    dtype: str
    first: int
    last: int
    value: float
    is_lazy: bool


@record(211)
class Job(_Row):
    """A commit, under way or waiting for its turn.

    ``run``: merge points of ``run`` before ``k``, and the write notes before them; ``rest``: the same, and the write
    notes after them, because merge point ``k - 1`` was its last; ``create``: the value of variable ``number``, made at
    its point ``k``; ``request``: a controller's write, ``token`` and ``client`` name it; ``slots``: nothing but
    ``fills``.
    """

    kind: Literal["run", "rest", "create", "request", "slots"]
    run: RunId
    k: int
    number: int
    token: bool
    client: str
    fills: tuple[SlotFill, ...]

    @property
    def end_of_writes(self) -> int:
        """The merge point before which the write notes are in this commit."""
        return self.k + (self.kind == "rest")


@record(212)
class Computation(_Row):
    """Arithmetic under way for merge point ``k`` of ``run``."""

    run: RunId
    k: int


@record(215)
class Digest(_Row):
    """A digest of the bytes that a replica sent at a merge point or with a write note."""

    digest: bytes


@record(216)
class Check(_Row):
    """A digest that was asked for: of merge point ``k``, or of write note ``number`` where ``k`` is -1."""

    run: RunId
    replica: int
    k: int
    number: int


@record(217)
class Departure(_Row):
    """A controller that has gone. Its last messages may still arrive."""

    client: str


@record(218)
class CapturedStep(_Row):
    """A step that the other tables do not have yet: its messages, with the answers to questions, and when they came. It
    is the ``count``-th of its kind. The steps of the account with the number ``account`` follow it; 0: none do."""

    count: int
    since: tuple[float, ...]
    heard: tuple[bytes, ...]
    account: int = 0


Outcome = Accepted | CreatedInRun | Reduced | PointFailed | MergeCallReturn


@dataclass
class ServerCounters:
    """Counters. They are one small entry, which every flush writes. Lists are by replica."""

    messages: int = 0
    commits: int = 0
    runs: int = 0
    #: The last numbers given away, and the last run of the controllers that have left.
    last_run: int = 0
    variables: int = 0
    optimizers: int = 0
    sets: int = 0
    tickets: int = 0
    #: The ticket of the commit under way, or 0.
    committing: int = 0
    #: Bytes that may still be touched, as last told; -1 before.
    available_nbytes: int = -1
    #: Those of the GPU that holds the variables; -1 if none does.
    device_nbytes: int = -1
    seen: list[float] = field(default_factory=list)
    replica_runs: list[int] = field(default_factory=list)
    points: list[int] = field(default_factory=list)
    applies: list[int] = field(default_factory=list)
    #: By kind of wait, the seconds after which the next one is named; 0 before the first.
    name_after: list[float] = field(default_factory=lambda: [0.0] * 4)
    #: Runs that were decided as captured steps, and the others, by reason.
    captured: int = 0
    uncaptured: list[int] = field(default_factory=lambda: [0] * len(reasons.WORDS))


# --- the tables -------------------------------------------------------------------------------------------------------

K = TypeVar("K")
V = TypeVar("V", bound=Record)
_TALLY = b"tally"


class Table(dict[K, V]):
    """A dictionary of records that remembers what the current event has changed, and what has changed since the last
    ``flush``. It is changed only by setting and deleting items, also while it is being iterated over."""

    def __init__(self, letter: bytes, changed: list[Table[Any, Any]]) -> None:
        """In the store its keys begin with ``letter``; when it changes it is added to ``changed``, once."""
        self.letter = letter
        self._changed = changed
        # The changed entries: as they were before the current event, and as the store has them if that is older.
        self._before: dict[K, V | None] = {}
        self._stored: dict[K, V | None] = {}

    def __setitem__(self, key: K, value: V) -> None:
        if key not in self._before:
            self._note(key, self.get(key))
        dict.__setitem__(self, key, value)

    def __delitem__(self, key: K) -> None:
        if key not in self._before:
            self._note(key, self[key])
        dict.__delitem__(self, key)

    def _note(self, key: K, before: V | None) -> None:
        if not self._before and not self._stored:
            self._changed.append(self)
        self._before[key] = before

    def __iter__(self) -> Iterator[K]:
        """The keys as they are now."""
        return iter(tuple(dict.keys(self)))

    def items(self) -> list[tuple[K, V]]:  # type: ignore[override]
        """Keys and records as they are now."""
        return list(dict.items(self))

    def values(self) -> list[V]:  # type: ignore[override]
        """The records as they are now."""
        return list(dict.values(self))

    def discard(self, key: K) -> None:
        """Remove ``key`` if it exists."""
        if key in self:
            del self[key]

    def load(self, key: K, value: V | None) -> None:
        """Take over an entry of the store, or that it has none."""
        if value is None:
            self.pop(key, None)
        else:
            super().__setitem__(key, value)

    @property
    def is_changed(self) -> bool:
        """Whether the current event may have changed it."""
        return bool(self._before)

    @property
    def changed(self) -> list[K]:
        """The keys that the current event may have changed."""
        return list(self._before)

    def changes(self) -> list[tuple[K, V | None]]:
        """The entries that differ from the store."""
        stored = self._before | self._stored if self._stored else self._before
        return [(key, value) for key, before in stored.items() if (value := self.get(key)) is not before]

    def accept(self) -> None:
        """The store has the changes."""
        self._before.clear()
        self._stored.clear()

    def keep(self) -> None:
        """The current event is over; the store does not have its changes."""
        self._stored = self._before | self._stored
        self._before.clear()

    def rollback(self) -> bool:
        """Forget the changes of the current event. Return whether the store lacks earlier changes."""
        for key, value in self._before.items():
            self.load(key, value)
        self._before.clear()
        return bool(self._stored)


class Tables:
    """All tables over one store. Their changes reach the store at ``flush``, all at once; only captured steps are
    written by themselves. The changes of an event end with ``flush``, ``keep`` or ``rollback``."""

    def __init__(self, control: Control, replicas: int) -> None:
        # In the store a key begins with its table's letter. A letter is never reused for another table.
        changed = self._changed = list[Table[Any, Any]]()
        self.workers: Table[int, WorkerSession] = Table(b"w", changed)
        #: By replica, where the latest known incarnation is dead.
        self.deaths: Table[int, Died] = Table(b"d", changed)
        self.clients: Table[bytes, ClientSession] = Table(b"c", changed)
        #: By ticket, the last few.
        self.departures: Table[int, Departure] = Table(b"x", changed)
        #: By (made under a token, client).
        self.requests: Table[tuple[bool, str], Request] = Table(b"q", changed)
        self.held: Table[int, HeldGet] = Table(b"h", changed)
        self.variables: Table[int, Variable] = Table(b"v", changed)
        self.slabs: Table[str, Slab] = Table(b"a", changed)
        #: By (dtype, offset). No two are adjacent.
        self.holes: Table[tuple[str, int], Hole] = Table(b"f", changed)
        self.optimizers: Table[int, Optimizer] = Table(b"o", changed)
        #: By optimizer.
        self.seats: Table[int, Seat] = Table(b"b", changed)
        #: By variable.
        self.asked: Table[int, Asked] = Table(b"i", changed)
        self.sets: Table[int, VariableSet] = Table(b"e", changed)
        #: By variable set. It is a table of its own because it changes with every step.
        self.steps: Table[int, Steps] = Table(b"n", changed)
        #: By (optimizer, variable). Optimizer 0, without slots, stands for those that are gone.
        self.slots: Table[tuple[int, int], SlotNames] = Table(b"l", changed)
        self.runs: Table[RunId, RunState] = Table(b"r", changed)
        #: By (run, replica).
        self.stands: Table[tuple[RunId, int], ReplicaProgress] = Table(b"s", changed)
        #: By (run, replica, k).
        self.points: Table[tuple[RunId, int, int], Point] = Table(b"p", changed)
        #: By (run, replica, number), until they are committed.
        self.writes: Table[tuple[RunId, int, int], WriteNote] = Table(b"t", changed)
        #: By (run, k).
        self.outcomes: Table[tuple[RunId, int], Outcome] = Table(b"u", changed)
        #: By ticket.
        self.jobs: Table[int, Job] = Table(b"j", changed)
        self.computations: Table[int, Computation] = Table(b"m", changed)
        self.together: Table[int, WrittenTogether] = Table(b"z", changed)
        #: By (run, replica, k, number), as in a Check.
        self.digests: Table[tuple[RunId, int, int, int], Digest] = Table(b"g", changed)
        #: By ticket.
        self.checks: Table[int, Check] = Table(b"k", changed)
        #: By (number of its kind, place). A later step overwrites it when it is no longer needed.
        self.captured: Table[tuple[int, int], CapturedStep] = Table(b"y", changed)
        self.tally = _new_tally(replicas)
        self._tables = {table.letter: table for table in vars(self).values() if isinstance(table, Table)}
        self._replicas = replicas
        self._control = control
        #: Whether kept changes are missing in the store.
        self.is_ahead = False
        self._stored_tally = self._kept_tally = b""
        for key, value in control.items():
            if key == _TALLY:
                self._stored_tally = self._kept_tally = value
            else:
                self._load(key, value)
        self._restore_tally()
        if len(self.tally.seen) != replicas:
            raise ControlDamaged(f"the control store is that of {len(self.tally.seen)} replicas, not of {replicas}")

    def flush(self) -> None:
        """Write all changes, also kept ones. Raises ControlFull; then nothing is written, and the changes remain."""
        changes: dict[bytes, bytes | None] = {}
        for table in self._changed:
            changes |= {table.letter + _pack_key(key): _pack(value) for key, value in table.changes()}
        packed_tally = codec.pack(list(vars(self.tally).values()))
        if packed_tally != self._stored_tally:
            changes[_TALLY] = packed_tally
        if changes:
            self._control.write(changes)
        self._stored_tally = self._kept_tally = packed_tally
        self.is_ahead = False
        for table in self._changed:
            table.accept()
        self._changed.clear()

    def write_captured(self, steps: Mapping[tuple[int, int], CapturedStep | None]) -> None:
        """Write steps by place, or forget them, without the changes. Raises ControlFull; then nothing is written."""
        self._control.write({self.captured.letter + _pack_key(place): _pack(step) for place, step in steps.items()})
        for place, step in steps.items():
            self.captured.load(place, step)

    def keep(self) -> None:
        """Keep the changes for the next ``flush``."""
        self.is_ahead = True
        self._kept_tally = codec.pack(list(vars(self.tally).values()))
        for table in self._changed:
            table.keep()

    def rollback(self) -> None:
        """Return to the state that was flushed or kept last."""
        self._changed[:] = [table for table in self._changed if table.rollback()]
        self._restore_tally()

    def next_ticket(self) -> int:
        """A number for a commit or a computation."""
        self.tally.tickets += 1
        return self.tally.tickets

    def _restore_tally(self) -> None:
        kept = self._kept_tally
        self.tally = ServerCounters(*msgpack.unpackb(kept)) if kept else _new_tally(self._replicas)

    def _load(self, key: bytes, value: bytes) -> None:
        table = self._tables.get(key[:1])
        try:
            if table is None:
                raise ControlDamaged(f"the control store has an entry of no table: {key!r:.80}")
            table.load(msgpack.unpackb(key[1:], use_list=False), parted(value))
        except (PeerProtocolError, ValueError, struct.error) as error:
            raise ControlDamaged(f"entry {key!r:.80} of the control store does not read back: {error}") from error


def _new_tally(replicas: int) -> ServerCounters:
    return ServerCounters(
        seen=[0.0] * replicas, replica_runs=[0] * replicas, points=[0] * replicas, applies=[0] * replicas
    )


_COUNT = struct.Struct("<Q")
_NO_FRAMES = _COUNT.pack(0)
_pack_key = msgpack.Packer().pack
# This process wrote the store itself; the limits only keep damage from becoming a crash.
_LIMITS = codec.Limits(1 << 31, 1 << 24, 1 << 48, 1 << 24, 1 << 28, 1 << 48)


def _pack(value: Record | None) -> bytes | None:
    return None if value is None else joined(codec.encode(value, _LIMITS))


def joined(parts: Sequence[Buffer]) -> bytes:
    """A message whole: header and frames, each behind its length."""
    if len(parts) == 1:
        return _NO_FRAMES + bytes(parts[0])
    views = [memoryview(part).cast("B") for part in parts[1:]]
    lengths = struct.pack(f"<{len(parts)}Q", len(views), *map(len, views))
    return b"".join([lengths, *views, parts[0]])


def parted(packed: bytes) -> Record:
    """The record in such a message. Raises PeerProtocolError, ValueError or struct.error if it is damaged."""
    view = memoryview(packed)
    (count,) = _COUNT.unpack_from(view)
    if count > len(packed) // 8:
        raise ValueError(f"{count} frames in {len(packed)} bytes")
    lengths = struct.unpack_from(f"<{count}Q", view, _COUNT.size)
    frames, start = [], _COUNT.size * (1 + count)
    for length in lengths:
        frames.append(view[start : start + length])
        start += length
    return codec.decode([view[start:], *frames], _LIMITS)
