"""What the engine is told and what it answers: the whole seam between deciding and doing.

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
    """A record came from the peer with this routing identity; in these ``parts``, where they are at hand."""

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
    """The supervisor says that a worker is gone."""

    died: Died


@frozen
class ClientLeft:
    """The supervisor says that a controller is gone."""

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
    """``event`` again, which needs something: what of it there is by now, and what was refused, why."""

    event: Any
    granted: tuple[Needed, ...] = ()
    refused: tuple[tuple[Needed, Error], ...] = ()


@frozen
class Finished:
    """A :class:`Commit` has been carried out whole."""

    ticket: int


@frozen
class Fingerprinted:
    """What :class:`Fingerprint` asked for: equal for equal bytes."""

    ticket: int
    digest: bytes


@frozen
class Tick:
    """Time passes. Once a second, so that waits can be named."""


@frozen
class Listening:
    """From now on peers are heard; what they said to a server before this one may not have been."""


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
    """Have the GPU ready to update variables of ``dtype`` by ``rule``: the commits that do it load nothing any more."""

    rule: str
    dtype: str


Needed = Allocate | LoadKernel
"""What must be there before an event that needs it is acted on: a commit cannot fail for lack of it."""


@frozen
class Reserve:
    """Carry out ``needed``, of an event of which nothing has happened yet. Answered by ``asked``, with what came of it
    added: at the first that is refused no more are tried."""

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
    """

    dtype: str
    ranges: tuple[tuple[int, int], ...]
    parameters: str
    slots: tuple[str, ...]
    gradients: tuple[str, ...]
    rule: str = ""

    def __hash__(self) -> int:
        """Without the ranges: there may be a thousand, and what is planned for a part is looked up in every step."""
        return hash((self.parameters, self.slots, self.gradients))


@frozen
class Rows:
    """The part of an update that a sparse gradient makes: of the variable of ``shape`` (height, elements of a row) from
    element ``first`` on; (values, indices) in replica order. ``rule``: another rule than that of the update."""

    dtype: str
    first: int
    shape: tuple[int, int]
    parameters: str
    slots: tuple[str, ...]
    gradients: tuple[tuple[Array, Array], ...]
    rule: str = ""


@frozen
class Apply:
    """One optimizer step of ``variables``. ``t`` counts this optimizer's steps from 1; the learning rate is that of
    this step."""

    rule: str
    hyperparameters: tuple[tuple[str, float], ...]
    t: int
    dense: tuple[Dense, ...]
    sparse: tuple[Rows, ...] = ()
    variables: tuple[int, ...] = ()


@frozen
class Write:
    """One write to one variable. ``reduce`` combines several sources in replica order first (SUM, MEAN); with one
    source it is None. A scatter writes its one source to the rows ``indices``. ``variables`` is the one variable that
    changes, or nothing where the target is a slot."""

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
    """A digest of what lies behind these arrays now. Answered by :class:`Fingerprinted`."""

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
    """Say a line. ``slow`` where it names a wait."""

    text: str
    slow: bool = False


@frozen
class Discard:
    """Give the whole pages of bytes ``start`` to ``stop`` of a segment back: nobody needs them any more."""

    segment: str
    start: int
    stop: int


@frozen
class Load:
    """Bring bytes ``start`` to ``stop`` of a segment to the GPU where variables lie: a server before this one made them
    there, and the segment has what it left."""

    segment: str
    start: int
    stop: int


@frozen
class Renamed:
    """Variables have other names now: who has looked one up by its name asks again."""


@frozen
class FreeResults:
    """What :class:`Compute` commands before this one brought is not needed any more."""


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
