"""The engine's events and commands: the whole interface between deciding and doing.

The service turns sockets, clocks and finished arithmetic into events and carries out commands, in order. Nothing
here opens, waits or computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cs_proto.arrays import Array
from cs_proto.frozen import frozen
from cs_proto.messages import Died, Error, Get, ReduceOpName, WriteOp
from cs_proto.records import Buffer, Record

# --- events ---------------------------------------------------------------------------------------------------------


@frozen
class Received:
    """A record came from the peer with this routing identity, in these ``parts`` if they are known."""

    peer: bytes
    record: Record
    parts: Sequence[Buffer] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Received) and (self.peer, self.record) == (other.peer, other.record)

    def __hash__(self) -> int:
        return hash((self.peer, self.record))

    def __repr__(self) -> str:
        return f"Received(peer={self.peer!r}, record={self.record!r})"


@frozen
class ProcessDied:
    """The supervisor reports that a worker is gone."""

    died: Died


@frozen
class ClientLeft:
    """The supervisor reports that a controller is gone."""

    client: str


@frozen
class MemoryAvailable:
    """Bytes that may still be touched, of the machine's memory and of the GPU where variables lie (-1: they lie on
    none); told before every record that could plan memory."""

    nbytes: int
    device_nbytes: int = -1


@frozen
class Computed:
    """The arithmetic of a :class:`Compute` command is done; its arrays lie in frames or in the server's arena."""

    ticket: int
    arrays: tuple[Array, ...]
    error: Error | None


@frozen
class Reserved:
    """``event`` again, with the needs that have been met since, and those that were refused with the reason."""

    event: Any
    granted: tuple[Needed, ...] = ()
    refused: tuple[tuple[Needed, Error], ...] = ()


@frozen
class Finished:
    """A :class:`Commit` has been carried out whole."""

    ticket: int


@frozen
class Fingerprinted:
    """The answer to :class:`Fingerprint`: equal for equal bytes."""

    ticket: int
    digest: bytes


@frozen
class Tick:
    """Time passes. Once a second, so that waits can be named."""


@frozen
class Listening:
    """From now on peers are heard. An earlier server may have missed some of their messages."""


Event = (
    Received
    | ProcessDied
    | ClientLeft
    | MemoryAvailable
    | Computed
    | Reserved
    | Fingerprinted
    | Finished
    | Tick
    | Listening
)

# --- commands -------------------------------------------------------------------------------------------------------


@frozen
class Send:
    """Send a record. If it answers the question ``inline``, its arrays are copied from their segments into frames when
    the peer takes them."""

    peer: bytes
    record: Record
    inline: Get | None = None


@frozen
class Allocate:
    """Have the supervisor make a segment if it does not exist, and extend it to ``reservation`` bytes if it is shorter
    than ``stop``. Make bytes ``start`` to ``stop`` present or, if ``is_lazy``, only reserve memory for them."""

    segment: str
    reservation: int
    writer: str
    start: int = 0
    stop: int = 0
    is_lazy: bool = False


@frozen
class LoadKernel:
    """Prepare the GPU to update variables of ``dtype`` by ``rule``, so that no commit has to load code."""

    rule: str
    dtype: str


Needed = Allocate | LoadKernel
"""What must be there before an event that needs it is acted on: a commit cannot fail for lack of it."""


@frozen
class Reserve:
    """Carry out ``needed`` before an event has any effect. The answer is ``asked``, with the outcomes added. The first
    refusal ends it."""

    needed: tuple[Needed, ...]
    asked: Reserved


@frozen
class Compute:
    """all_reduce or all_gather: ``components[replica][leaf]``, combined leaf by leaf in replica order.

    ``reduce`` names the op of an all_reduce; otherwise ``axis`` is that of an all_gather. Answered by
    :class:`Computed`.
    """

    ticket: int
    reduce: ReduceOpName | None
    axis: int
    components: tuple[tuple[Array, ...], ...]


@frozen
class Dense:
    """The part of an update that lies in one slab.

    ``ranges`` are (first, last + 1) elements, ascending. ``slots`` and ``gradients`` name segments with the same
    offsets as ``parameters``; gradients in replica order. ``rule``: another rule than that of the update.

    ``rows``: of each replica the sparse gradient (values, indices) that stands in the place of that segment, or None.
    If there are any, the part is one range, of one variable.
    """

    dtype: str
    ranges: tuple[tuple[int, int], ...]
    parameters: str
    slots: tuple[str, ...]
    gradients: tuple[str, ...]
    rule: str = ""
    rows: tuple[tuple[Array, Array] | None, ...] = ()

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """The ranges in the arrays of this part: those of a part with rows begin where its variable does."""
        return ((0, self.ranges[0][1] - self.ranges[0][0]),) if self.rows else self.ranges

    def __hash__(self) -> int:
        """Without the ranges: there may be a thousand, and what is planned for a part is looked up in every step."""
        return hash((self.parameters, self.slots, self.gradients))


@frozen
class Rows:
    """The part of an update that goes by rows: of the variable of ``shape`` (height, elements of a row) from element
    ``first`` on; the gradients (values, indices) in replica order, without indices where they have all rows. ``slots``
    name segments with the same offset. ``rule``: another rule than that of the update."""

    dtype: str
    first: int
    shape: tuple[int, int]
    parameters: str
    slots: tuple[str, ...]
    gradients: tuple[tuple[Array, Array | None], ...]
    rule: str = ""


@frozen
class Update:
    """One step of one optimizer. ``t`` is the number of this update, from 1: of the optimizer or, for kinds that count
    by variable, of these variables. ``counts``, if any, has the number of each part of ``dense``, then of ``sparse``,
    where they differ. The learning rate is that of this step. The summed gradients are multiplied by ``factor`` after
    they are clipped."""

    rule: str
    hyperparameters: tuple[tuple[str, float], ...]
    t: int
    dense: tuple[Dense, ...]
    sparse: tuple[Rows, ...] = ()
    factor: float = 1.0
    counts: tuple[int, ...] = ()

    def parts(self) -> tuple[list[tuple[Dense, int]], list[tuple[Rows, int]]]:
        """The dense and the sparse parts, each with the number of its update."""
        counts = self.counts or (self.t,) * (len(self.dense) + len(self.sparse))
        at = len(self.dense)
        return list(zip(self.dense, counts[:at], strict=True)), list(zip(self.sparse, counts[at:], strict=True))


@frozen
class Apply:
    """Steps of different optimizers, whose ``variables`` are different, too.

    ``weights``, in replica order, multiply the gradients of each replica before they are added up; a weight of 0 leaves
    a replica out. No weights: all are 1. ``global_clipnorm`` bounds the norm of the summed gradients of all
    ``updates`` together, after the bounds of each optimizer: the factor is
    ``min(1, global_clipnorm / (norm + clip_epsilon))``. ``watched`` is the call site of an apply whose gradients are
    watched (`ApplyPoint.is_watched`), and empty for others.
    """

    updates: tuple[Update, ...]
    variables: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    global_clipnorm: float | None = None
    clip_epsilon: float = 0.0
    watched: str = ""


@frozen
class Write:
    """One write. ``reduce`` combines several sources in replica order first (SUM, MEAN); with one
    source it is None. A scatter writes its one source to the rows ``indices``. ``variables`` is the one variable that
    changes, or nothing where the target is a slot. The target of an ``assign`` may also be several variables that lie
    side by side, or their slots."""

    target: Array
    op: WriteOp
    reduce: ReduceOpName | None
    sources: tuple[Array, ...]
    indices: Array | None = None
    variables: tuple[int, ...] = ()


@frozen
class Fill:
    """Set elements ``first`` to ``last`` (exclusive) of a segment to a value: the start of a slot. ``is_lazy``: it is
    zero, and the memory is given back."""

    segment: str
    dtype: str
    first: int
    last: int
    value: float
    is_lazy: bool = False


@frozen
class Commit:
    """Change variables: every operation in order, then :class:`Finished`. Checked before; it cannot fail halfway."""

    ticket: int
    operations: tuple[Apply | Write | Fill, ...]


@frozen
class Fingerprint:
    """Compute a digest of the present bytes of these arrays. Answered by :class:`Fingerprinted`."""

    ticket: int
    arrays: tuple[Array, ...]


@frozen
class EndWorker:
    """Have the supervisor kill this worker, which starts it again."""

    replica: int
    incarnation: int
    reason: str


@frozen
class TraceWorker:
    """Have this worker print where its threads are."""

    replica: int
    incarnation: int


@frozen
class Dismiss:
    """The runs of a client that has gone are given up: have its workers told."""

    client: str


@frozen
class Log:
    """Log a line. ``slow`` if it names a wait."""

    text: str
    slow: bool = False


@frozen
class Discard:
    """Return the whole pages of bytes ``start`` to ``stop`` of a segment to the machine, since they are not needed."""

    segment: str
    start: int
    stop: int


@frozen
class Load:
    """Copy bytes ``start`` to ``stop`` of a segment to the GPU of the variables. An earlier server made them there, and
    the segment has their last state."""

    segment: str
    start: int
    stop: int


@frozen
class Renamed:
    """Variables have new names now, so earlier look-ups by name have to be repeated."""


@frozen
class FreeResults:
    """The results of earlier :class:`Compute` commands are no longer needed."""


Command = (
    Send
    | Allocate
    | LoadKernel
    | Reserve
    | Load
    | Compute
    | Fingerprint
    | Discard
    | Renamed
    | FreeResults
    | Commit
    | EndWorker
    | TraceWorker
    | Dismiss
    | Log
)
