"""Every message between processes, one frozen record each, in the order in which a service meets them.

Codes 10-29 open and close a session, 30-49 are the controller's and observers' requests, 50-69 what replicas bring
to merge points, 70-89 what the server answers, 90-109 client to worker, 110-139 the supervisor's socket.
``docs/protocol.md`` tells who sends what to whom, and when.
"""

from __future__ import annotations

import os
import re
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

from .descriptors import Array, Location, is_wire_dtype, shape_fault
from .records import Count, Finite, Frame, Range, Record, Seconds, record, shown
from .schedules import Schedule

#: Goes up when a record changes in a way that a peer of an older release cannot read. There has been no release yet.
PROTOCOL = 1

#: The most replicas of a service, and the most steps of a series that are sent before the ones before them are over.
MOST_REPLICAS, MOST_AHEAD = 1024, 64

#: The number of a variable, an optimizer, a set of variables or a write.
Number: TypeAlias = Annotated[int, Range(1, (1 << 62) - 1)]
Replica: TypeAlias = Annotated[int, Range(0, MOST_REPLICAS - 1)]
Replicas: TypeAlias = Annotated[int, Range(1, MOST_REPLICAS)]
#: How often a process was started, from 1.
Incarnation: TypeAlias = Annotated[int, Range(1, (1 << 31) - 1)]
Pid: TypeAlias = Annotated[int, Range(0, (1 << 31) - 1)]
Lookahead: TypeAlias = Annotated[int, Range(0, MOST_AHEAD)]

#: A run is a path: ``(5,)`` is the client's fifth run, ``(5, 2, 0)`` the first run nested in the merge_call that was
#: merge point 2 of run 5. The same after a replay, without asking anybody.
RunId = tuple[Count, ...]

Role = Literal["server", "worker", "controller", "observer", "script"]
ReduceOpName = Literal["SUM", "MEAN"]
AssignOp = Literal["assign", "assign_add", "assign_sub"]
WriteOp = Literal["assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update"]

_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")
_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,512}")


class _OfRun(Record):
    """Base of the records that belong to one run."""

    run: RunId

    def check(self) -> None:
        run = self.run
        if len(run) % 2 == 0 or len(run) > 65:
            self.refuse(f"{shown(run)} is not a run: (n,) or (n, k, j, ...)")


class _OfStep(_OfRun):
    """Base of the records that say which series a run is a step of: its first run's number, 0 for a run on its own."""

    series: Count

    def check(self) -> None:
        super().check()
        if self.series > self.run[0] or (self.series and len(self.run) > 1):
            self.refuse(f"{shown(self.run)} is no step of a series that began with run {self.series}")


# --- data that several messages carry -----------------------------------------------------------------------------


@record(3)
class Value(Record):
    """A nest of the closed vocabulary: ``body`` says the nest (docs/protocol.md, section 9), ``arrays`` its
    arrays in the order in which the body names them. The server passes it on unread."""

    body: bytes
    arrays: tuple[Array, ...]


@record(4)
class Error(Record):
    """An exception as data: a code of the closed table, its arguments, where it came from, its traceback as text.

    ``origin`` is ``module:qualname`` of the class as it was raised, ``replica`` -1 where it belongs to none,
    ``merge_index`` the number of merge points passed.
    """

    exception: str
    message: str
    arguments: Value | None
    origin: str
    replica: Annotated[int, Range(-1, MOST_REPLICAS - 1)]
    merge_index: Count
    traceback: str


@record(5)
class VariableSpec(Record):
    """What a variable is asked to be. ``name`` may be taken; the server makes it unique. An ``ordinary`` one was made
    outside every scope: what replicas write to it are WriteNotes, whatever its aggregation says."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    trainable: bool
    aggregation: Annotated[int, Range(0, 3)]
    synchronization: Annotated[int, Range(0, 3)]
    ordinary: bool = False

    def check(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            self.refuse(f"{shown(self.name)} is not a variable name: 1-512 characters, no control characters")
        if not is_wire_dtype(self.dtype) or self.dtype[0] in "US":
            self.refuse(f"a variable cannot have dtype {shown(self.dtype)}")
        if fault := shape_fault(self.dtype, self.shape):
            self.refuse(fault)


@record(6)
class Variable(Record):
    """A variable as it stands: its number, its spec under its final name, where its value lies, its version."""

    number: Number
    spec: VariableSpec
    place: Location
    version: Count

    @property
    def array(self) -> Array:
        """The descriptor of the value."""
        return Array(self.spec.dtype, self.spec.shape, self.place)


@record(7)
class Optimizer(Record):
    """An optimizer as it stands: its number, its kind (``SGD``), the rule that its hyperparameters chose when it was
    made, its hyperparameters by name, what the learning rate follows (None: it is the number), its iterations."""

    number: Number
    kind: str
    rule: str
    hyperparameters: tuple[tuple[str, Finite], ...]
    schedule: Schedule | None
    iterations: Count


@record(8)
class Worker(Record):
    """A registered worker: the client sends runs of ``replica`` to ``endpoint``."""

    replica: Replica
    incarnation: Incarnation
    pid: Pid
    device: str
    endpoint: str


@record(9)
class DevicePlace(Record):
    """Where an array lies on a GPU: the CUDA IPC ``handle`` of a block of its memory, the byte ``offset`` in it, the
    block's ``size`` in bytes, and the ``mark`` with which the block begins and ends, by which whoever opens it knows
    that all of it is what is meant. No handle: not there."""

    handle: bytes
    offset: Count
    size: Count
    mark: bytes

    def check(self) -> None:
        if (len(self.handle), len(self.mark)) not in ((0, 0), (64, 16)):
            self.refuse(f"a handle of {len(self.handle)} bytes and a mark of {len(self.mark)}")
        if not (self.holds(0) if self.handle else self.offset == self.size == 0):
            self.refuse(f"offset {self.offset} in a block of {self.size} bytes")

    @property
    def marked(self) -> tuple[int, int]:
        """The offsets in the block at which the mark stands."""
        return 0, self.size - len(self.mark)

    def holds(self, nbytes: int) -> bool:
        """Whether so many bytes from the offset on lie between the marks."""
        return len(self.mark) <= self.offset <= self.offset + nbytes <= self.size - len(self.mark) < 1 << 62


# --- sessions -----------------------------------------------------------------------------------------------------


@record(10)
class Register(Record):
    """Worker to server, first message: who I am and where I listen."""

    protocol: Count
    worker: Worker


@record(11)
class Registered(Record):
    """Server to every worker, once all have registered: you may take runs. ``workers`` in replica order."""

    replicas: Replicas
    parameter_device: str
    workers: tuple[Worker, ...]


@record(12)
class Hello(Record):
    """Client to server, first message. One controller at a time; observers may only read."""

    protocol: Count
    role: Literal["controller", "observer"]
    client: str
    pid: Pid


@record(13)
class Welcome(Record):
    """Server to client, once all workers have registered."""

    replicas: Replicas
    parameter_device: str
    server_pid: Pid
    workers: tuple[Worker, ...]


@record(14)
class Goodbye(Record):
    """Client to server: forget me. Not answered."""

    client: str


@record(15)
class Offer(Record):
    """Who connects to who listens, before the mailbox is used: what you get from me and is not in ``mailbox`` counts
    from here on, and I post what fits there once you have opened it."""

    mailbox: Count


@record(16)
class MailboxAccepted(Record):
    """Answer to :class:`Offer`, over ZeroMQ: I have opened the mailbox and post what fits there from here on; or why
    not (``refused``), and everything goes over ZeroMQ as before."""

    mailbox: Count
    refused: str


# --- data of the requests and merge points below ---------------------------------------------------------------------


@record(20)
class SparseGradient(Record):
    """The gradient of some rows of a variable: ``values[i]`` belongs to row ``indices[i]``; rows named twice add up."""

    variable: Number
    values: Array
    indices: Array

    def check(self) -> None:
        if self.indices.dtype != "int64" or self.values.shape[:1] != self.indices.shape or not self.values.shape:
            self.refuse("values need one int64 index a row")


# --- requests: the controller's writes carry (client, sequence), reads only a number to match the reply ------------


@record(30)
class Create(Record):
    """Make a variable. The value follows by :class:`Assign` unless ``value`` carries it.

    Refused with MemoryPlanError, before anything is touched, where the plan does not fit the memory.
    """

    client: str
    sequence: Count
    variable: VariableSpec
    value: Array | None


@record(31)
class Assign(Record):
    """The controller (or the holder of a merge_call token) writes a variable, once, whatever its aggregation. With a
    scatter ``value`` goes to the rows ``indices``."""

    client: str
    sequence: Count
    variable: Number
    op: WriteOp
    value: Array
    indices: Array | None = None


@record(32)
class Configure(Record):
    """Make an optimizer (``optimizer`` 0) or change some of its hyperparameters, its ``schedule`` or its
    ``iterations`` (-1: as they are). A learning rate without a schedule ends the schedule there was."""

    client: str
    sequence: Count
    optimizer: Count
    kind: str
    hyperparameters: tuple[tuple[str, Finite], ...]
    schedule: Schedule | None
    iterations: Annotated[int, Range(-1, (1 << 62) - 1)]


@record(33)
class Get(Record):
    """Read variables by number and by name; none of either means all. ``frames`` asks for the bytes in frames, for
    peers that map no memory; without it the reply says where the bytes lie."""

    request: Count
    variables: tuple[Number, ...]
    names: tuple[str, ...]
    frames: bool


@record(34)
class Describe(Record):
    """Ask what stands behind handles: variables and optimizers by number, without values."""

    request: Count
    variables: tuple[Number, ...]
    optimizers: tuple[Number, ...]


@record(35)
class Statistics(Record):
    """Ask for the server's counters."""

    request: Count


@record(36)
class Cancel(_OfRun):
    """Controller to server and to workers: give this run up; what is not committed is not committed.

    ``later`` counts the steps of a series that were sent after it. It is the first of them all that is not over which
    is given up, and those after that one never begin.
    """

    run: RunId
    later: Lookahead = 0

    def check(self) -> None:
        super().check()
        if self.later and len(self.run) > 1:
            self.refuse(f"{self.later} steps after {shown(self.run)}")


@record(37)
class Free(Record):
    """The controller holds these variables no more. Those that no optimizer has taken up are forgotten and their
    places given to others; numbers that stand for nothing any more are left out."""

    client: str
    sequence: Count
    variables: tuple[Number, ...]


@record(38)
class DescribeSlots(Record):
    """Ask where an optimizer's slots beside a variable lie; they are made where they are missing."""

    request: Count
    optimizer: Number
    variable: Number


@record(39)
class AssignSlot(Record):
    """The controller (or the holder of a merge_call token) writes a slot, once; it is made where it is missing."""

    client: str
    sequence: Count
    optimizer: Number
    variable: Number
    slot: str
    value: Array


@record(40)
class Fetch(Record):
    """The bytes of an array, or of the ``rows`` (int64) of it, for a peer that cannot map the segment it lies in."""

    request: Count
    array: Array
    rows: Array | None

    def check(self) -> None:
        if not isinstance(self.array.place, Location):
            self.refuse("what is fetched lies in a segment")
        if self.rows is not None and (self.rows.dtype != "int64" or len(self.rows.shape) != 1 or not self.array.shape):
            self.refuse("rows are numbers int64[n] of an array that has rows")


@record(41)
class Put(Record):
    """The bytes ``value`` belong into ``array`` (uint8[n]), where their sender may write and cannot map. Without a
    value the whole pages of ``array`` are given back."""

    request: Count
    array: Array
    value: Array | None

    def check(self) -> None:
        if not isinstance(self.array.place, Location) or self.array.dtype != "uint8" or len(self.array.shape) != 1:
            self.refuse("bytes uint8[n] are put into a segment")
        if self.value is not None and (self.value.dtype, self.value.shape) != (self.array.dtype, self.array.shape):
            self.refuse(f"{self.value.shape} bytes do not fit into {self.array.shape}")


@record(42)
class Locate(Record):
    """A worker on a GPU asks where variables lie on the GPU of the variables or, with ``buffers`` (0 or 1, else -1),
    where its gradients of them may be computed there: in the buffers that an apply calls ``buffers`` + 2. Every worker
    asks with 1 before it uses the second set of its gradient buffers of these variables' dtypes, which is made then.
    """

    request: Count
    variables: tuple[Number, ...]
    buffers: Annotated[int, Range(-1, 1)]


@record(43)
class Resent(_OfStep):
    """Controller to server: the worker of ``replica`` died, and the one in its place has been sent ``run`` again. Not
    answered. By it the server knows of a run that kills its worker before anything of it is heard."""

    run: RunId
    replica: Replica
    series: Count = 0


@record(44)
class WaitReport(_OfStep):
    """Controller to server: I have waited ``seconds`` for the end of ``run``. Not answered. By it the server knows of a
    run of whose replicas none has been heard, and that each of them is waited for."""

    run: RunId
    seconds: Seconds
    series: Count = 0


@record(45)
class WaitingFor(Record):
    """Server to controller, which has said WaitReport, every ten seconds: whom ``run`` waits for, in words."""

    run: RunId
    whom: str


# --- what a replica brings: merge points, alone or as notes that travel with the next question or the return --------


class _Point(Record):
    """Base of merge points. ``k`` counts a replica's merge points in a run from 0; ``site`` is file:line."""

    k: Count
    site: str

    def check(self) -> None:
        if len(self.site) > 4096:
            self.refuse(f"a call site of {len(self.site)} characters; it is file:line, at most 4096")


@record(50)
class ApplyPoint(_Point):
    """Gradients of a set of variables lie in gradient buffers ``buffers`` (0 or 1; 2 or 3: those on the GPU of the
    variables, as far as they have a place there), at the variables' offsets, but for those of ``sparse`` (ascending by
    variable), which lie elsewhere.

    The first of an (optimizer, set of variables) is *checked*: ``variable_set`` is 0, ``variables`` names the set,
    and it is waited for; the answer is the set's number, which is all that later ones carry.
    """

    k: Count
    site: str
    optimizer: Number
    variable_set: Count
    variables: tuple[Number, ...]
    buffers: Annotated[int, Range(0, 3)]
    sparse: tuple[SparseGradient, ...] = ()

    def check(self) -> None:
        super().check()
        if self.sparse:
            numbers = [gradient.variable for gradient in self.sparse]
            if any(later <= earlier for earlier, later in pairwise(numbers)):
                self.refuse("sparse gradients ascend by variable")
        if (self.variable_set == 0) == (not self.variables):
            self.refuse("either variables or the number of their set")


@record(51)
class AssignPoint(_Point):
    """An aggregated assign. ``checked`` (waited for) where only the comparison of replicas can find the error:
    values that came from Python scalars."""

    k: Count
    site: str
    variable: Number
    op: AssignOp
    value: Array
    checked: bool


@record(52)
class CreatePoint(_Point):
    """A variable made inside a run; replica 0's value counts."""

    k: Count
    site: str
    variable: VariableSpec
    value: Array


@record(53)
class ReducePoint(_Point):
    """all_reduce of the leaves of a nest."""

    k: Count
    site: str
    op: ReduceOpName
    arrays: tuple[Array, ...]


@record(54)
class GatherPoint(_Point):
    """all_gather of the leaves of a nest along ``axis``."""

    k: Count
    site: str
    axis: Annotated[int, Range(-(1 << 62), (1 << 62) - 1)]
    arrays: tuple[Array, ...]


@record(55)
class MergeCallPoint(_Point):
    """merge_call: this replica's (args, kwargs) as data. Replica 0's function is called in replica 0's worker."""

    k: Count
    site: str
    arguments: Value


Point = ApplyPoint | AssignPoint | CreatePoint | ReducePoint | GatherPoint | MergeCallPoint


@record(56)
class ReadPoint(_Point):
    """Not a merge point: this replica wants to read what it wrote at points before ``k``, so they must be committed."""

    k: Count
    site: str


@record(57)
class WriteNote(_Point):
    """Not a merge point, and only noted: a write that replicas need not agree on, brought after ``k`` merge points as
    this replica's ``number``-th in the run, from 0. With a scatter ``value`` goes to the rows ``indices``."""

    k: Count
    number: Count
    site: str
    variable: Number
    op: WriteOp
    value: Array
    indices: Array | None


Note = ApplyPoint | AssignPoint | WriteNote


@record(60)
class Ask(_OfStep):
    """Replica to server: my notes since the last message, and a point whose answer I wait for. ``client`` is the one
    whose run it is: another counts its runs from 1 again. ``preserved``: a commit changes no array that the function
    has read (:class:`Preserve`)."""

    run: RunId
    replica: Replica
    incarnation: Incarnation
    notes: tuple[Note, ...]
    point: ApplyPoint | AssignPoint | CreatePoint | ReducePoint | GatherPoint | MergeCallPoint | ReadPoint
    series: Count = 0
    client: str = ""
    preserved: bool = False


@record(61)
class Return(_OfStep):
    """Replica to server: the function returned or raised, after ``count`` merge points. One of a step of a ``series``
    is answered with :class:`StepFinished`; the controller has the answers of the steps before the last ``lookahead``.
    ``client`` as in :class:`Ask`.
    """

    run: RunId
    replica: Replica
    incarnation: Incarnation
    notes: tuple[Note, ...]
    count: Count
    value: Value | None
    error: Error | None
    series: Count = 0
    lookahead: Lookahead = 0
    client: str = ""

    def check(self) -> None:
        super().check()
        if (self.value is None) == (self.error is None):
            self.refuse("a replica returns a value or an error")


@record(62)
class MergeCallReturn(_OfRun):
    """Holder of the token to server: the merge function of point ``k`` returned one value per replica, or raised."""

    run: RunId
    k: Count
    values: tuple[Value, ...]
    error: Error | None


# --- what the server answers --------------------------------------------------------------------------------------


@record(70)
class Done(Record):
    """Reply to Assign, AssignSlot, Configure: the number of the thing written, and its version or iterations; to Free:
    how many variables are gone, and 0; to Put: 0 and 0."""

    sequence: Count
    number: Count
    version: Count


@record(71)
class Created(Record):
    """Reply to Create."""

    sequence: Count
    variable: Variable


@record(72)
class Got(Record):
    """Reply to Get: variables in the order asked (numbers, then names), and an array for each."""

    request: Count
    commits: Count
    variables: tuple[Variable, ...]
    arrays: tuple[Array, ...]


@record(73)
class Described(Record):
    """Reply to Describe; ``slotted`` numbers, for each optimizer, the variables beside which it keeps slots."""

    request: Count
    variables: tuple[Variable, ...]
    optimizers: tuple[Optimizer, ...]
    slotted: tuple[tuple[Number, ...], ...]


@record(74)
class ReplicaStatistics(Record):
    """Counters of one replica since the start of the server."""

    replica: Replica
    pid: Pid
    device: str
    runs: Count
    points: Count
    applies: Count


@record(75)
class Counters(Record):
    """Reply to Statistics, and the result of ``strategy.statistics()``: what the server has done, and what each replica
    brought.

    ``uptime`` is seconds. ``parameter_nbytes`` and ``slot_nbytes`` are the bytes of all variables and of the slots
    beside them. ``posted`` counts the answers that went by mailbox. ``doorbells`` counts how often a doorbell woke a
    sleeping process: the server, or one that it had an answer for. A controller adds the workers that it has woken.

    Examples:
        >>> counters = Counters(1, 4711, 2.5, 3, 1024, 0, 7, 7, 30, ())
        >>> counters.commits, counters.uptime
        (7, 2.5)
    """

    request: Count
    pid: Pid
    uptime: Seconds
    variables: Count
    parameter_nbytes: Count
    slot_nbytes: Count
    commits: Count
    runs: Count
    messages: Count
    replicas: tuple[ReplicaStatistics, ...]
    posted: Count = 0
    doorbells: Count = 0


@record(76)
class Refused(Record):
    """Reply to a request or first message that was not done: ``number`` is its sequence or request number."""

    number: Count
    error: Error


@record(77)
class Slots(Record):
    """Reply to DescribeSlots: the slots by name, in the rule's order, and where each lies."""

    request: Count
    names: tuple[str, ...]
    arrays: tuple[Array, ...]


@record(78)
class Fetched(Record):
    """Reply to Fetch: the array in a frame, or its rows one after the other."""

    request: Count
    array: Array


@record(79)
class Located(Record):
    """Reply to Locate: the arrays by the names of segments and, where variables are kept on a GPU, the ``uuid`` of that
    and the arrays' places there. A server that dies takes these along; ``keeps``: another takes its place then, which
    needs the gradients in their segments, too."""

    request: Count
    uuid: bytes
    arrays: tuple[Array, ...]
    places: tuple[DevicePlace, ...]
    keeps: bool


@record(80)
class Reduced(_OfRun):
    """Answer to a ReducePoint or GatherPoint: the results, leaf by leaf."""

    run: RunId
    k: Count
    arrays: tuple[Array, ...]


@record(81)
class Token(_OfRun):
    """Answer to replica 0 at a MergeCallPoint: you are the controller now; here are all replicas' arguments."""

    run: RunId
    k: Count
    arguments: tuple[Value, ...]


@record(82)
class Merged(_OfRun):
    """Answer to the other replicas at a MergeCallPoint: your share of what the merge function returned."""

    run: RunId
    k: Count
    value: Value


@record(83)
class Accepted(_OfRun):
    """Answer to a checked ApplyPoint (``variable_set``: its number) or AssignPoint (0): compared and recorded."""

    run: RunId
    k: Count
    variable_set: Count


@record(84)
class CreatedInRun(_OfRun):
    """Answer to a CreatePoint."""

    run: RunId
    k: Count
    variable: Variable


@record(85)
class Committed(_OfRun):
    """Answer to a ReadPoint: all points before ``k`` are committed."""

    run: RunId
    k: Count


@record(86)
class PointFailed(_OfRun):
    """Answer to any point: it fails with this error. ``ends_run`` where no further point of the run can succeed."""

    run: RunId
    k: Count
    error: Error
    ends_run: bool


@record(87)
class RunFinished(_OfRun):
    """Server to the controller of a run, once: every replica's result in replica order, or the run's error."""

    run: RunId
    values: tuple[Value, ...]
    error: Error | None
    commits: Count


@record(88)
class StepFinished(_OfRun):
    """Server to the replicas of a step of a series, once they have returned and what they brought is committed: the
    next step may begin, or, where this one ``failed``, none of the series does any more."""

    run: RunId
    failed: bool


@record(89)
class WorkerRestarted(_OfRun):
    """Server to the controller: this worker is in the place of one that died, and needs ``run`` and those after it that
    have been sent. To the holder of a token, when that worker waits at the merge_call again: ``run`` is nested in it.
    """

    run: RunId
    worker: Worker


# --- client to worker (and, during a merge_call, token holder to worker) --------------------------------------------


@record(90)
class Prepare(Record):
    """Where the script lives: its ``sys.path`` and directory. Sent before the first run and when they change."""

    path: tuple[str, ...]
    directory: str


@record(91)
class Run(_OfStep):
    """Run a function as one replica.

    The random numbers of the run follow from ``draw``, the strategy's seed and the replica. The controller counts its
    runs by ``draw`` from 1, and continues from the count of a checkpoint that it restores. So ``draw`` may become
    smaller, while the number of the run only grows. A nested run has the draw of the run around it.

    ``digest`` names the pickled function; ``function`` says where it lies, for a worker that does not hold it.
    ``frozen`` keeps the unpickled object for good (``cs.function``). ``arguments`` is a pickle of (args, kwargs), or
    says where one lies that is too large for a frame, whose large buffers lie where ``buffers`` says.

    A step of a ``series`` may be sent while up to ``lookahead`` others before it are not over: it begins when the one
    before it is. Of the worker's arena the script still holds results in the ranges of bytes ``held``, which are whole
    pages in ascending order.
    """

    run: RunId
    draw: Number
    replica: Replica
    seed: Annotated[int, Range(0, (1 << 63) - 1)]
    digest: bytes
    function: Array | None
    frozen: bool
    arguments: bytes | Frame | Array
    buffers: tuple[Array, ...]
    series: Count = 0
    lookahead: Lookahead = 0
    held: tuple[tuple[Count, Count], ...] = ()

    @property
    def draw_path(self) -> RunId:
        """The path that random numbers follow from: ``run`` with ``draw`` in place of its first number."""
        return (self.draw, *self.run[1:])

    @property
    def part(self) -> tuple[int, int]:
        """The part of the arenas that this run uses, and into how many they are divided."""
        parts = self.lookahead + 1
        return (self.run[0] - self.series) % parts, parts

    def check(self) -> None:
        super().check()
        if len(self.digest) != 16:
            self.refuse("a digest has 16 bytes")
        if self.held:
            edges = [edge for part in self.held for edge in part]
            if any(edge % _PAGE_NBYTES for edge in edges) or any(later < earlier for earlier, later in pairwise(edges)):
                self.refuse(f"{shown(self.held)} are not whole pages in ascending order")
        for pickled in (self.function, self.arguments):
            if isinstance(pickled, Array) and (pickled.dtype != "uint8" or len(pickled.shape) != 1):
                self.refuse(f"a pickle is uint8[n], not {pickled.dtype}{list(pickled.shape)}")


@record(95)
class Forget(Record):
    """The server has been told to free these variables. A worker forgets where they lie: what it has kept of one is no
    handle of whatever lies there next."""

    variables: tuple[Number, ...]


# --- the supervisor's socket (SOCK_SEQPACKET; no frames, so each record is one packet) -------------------------------


@record(110)
class Introduce(Record):
    """First packet of every process that connects to the supervisor. ``client``: what a controller calls itself in its
    Hello."""

    role: Role
    rank: Replica
    incarnation: Incarnation
    pid: Pid
    client: str = ""


@record(111)
class MakeSegment(Record):
    """Server to supervisor: make a segment of ``reservation`` bytes, or hand out the existing one of that name.

    ``writer`` names who else may map it for writing: ``""`` nobody, ``w0`` worker 0, ``controller``.
    """

    segment: str
    reservation: Number
    writer: str

    def check(self) -> None:
        Location(self.segment, 0)


@record(112)
class OpenSegment(Record):
    """Any process to supervisor: hand me the segment of that name."""

    segment: str


@record(113)
class Segment(Record):
    """Supervisor's answer to either, with the descriptor as ancillary data."""

    segment: str
    reservation: Number
    writable: bool


@record(114)
class SegmentRefused(Record):
    """Supervisor's answer where there is no such segment or it cannot be made."""

    segment: str
    error: Error


@record(115)
class Ready(Record):
    """Server or worker to supervisor: I can work."""

    endpoint: str


@record(116)
class Serving(Record):
    """Supervisor to a client, once server and workers are ready: where the server listens. To all, when a server that
    was started again is ready: what it has not answered may not have reached it."""

    endpoint: str
    run_directory: str
    transport: str


@record(117)
class Died(Record):
    """Supervisor to all: a process ended that should not have. ``cause`` reads ``exit code 3`` or ``SIGKILL``;
    ``log`` holds the last lines it wrote. ``restarts``: another takes its place, as the next incarnation."""

    role: Role
    rank: Replica
    incarnation: Incarnation
    pid: Pid
    cause: str
    log: str
    restarts: bool = False


@record(118)
class Output(Record):
    """Supervisor to the script that started it: lines its children printed."""

    stream: Literal["stdout", "stderr"]
    text: str


@record(119)
class StartFailed(Record):
    """Supervisor to a client: the service will not come up."""

    error: Error


@record(120)
class Shutdown(Record):
    """Client that started the service to supervisor: stop everything and end."""

    reason: str


@record(121)
class Join(Record):
    """First packet of a launcher that would run one of the service's workers elsewhere, in a container of its own.
    ``incarnation`` from 1: it runs, or ran last, this one of worker ``rank`` for the supervisor before this one."""

    pid: Pid
    rank: Replica = 0
    incarnation: Annotated[int, Range(0, (1 << 31) - 1)] = 0


@record(122)
class Joined(Record):
    """Supervisor's answer to :class:`Join`: the worker to run, or to go on running. ``transport`` says how the service
    talks."""

    rank: Replica
    incarnation: Incarnation
    replicas: Replicas
    transport: str

    def check(self) -> None:
        if self.rank >= self.replicas:
            self.refuse(f"worker {self.rank}.{self.incarnation} of {self.replicas}")


@record(123)
class Interrupt(Record):
    """Controller to supervisor, and from there to who runs it: the run that this replica carries out is cancelled;
    have its process look (SIGINT)."""

    replica: Replica


@record(124)
class MadeProgress(Record):
    """Server or worker to supervisor, once: this incarnation has done a piece of work to the end, so its death is no
    proof that starting it again is in vain."""

    incarnation: Incarnation


@record(125)
class Kill(Record):
    """Server to supervisor, and from there to who runs it: end this worker's incarnation, with the stacks of its
    threads in its output; ``reason`` says why, and becomes part of the cause of its death."""

    replica: Replica
    incarnation: Incarnation
    reason: str


@record(126)
class ClientGone(Record):
    """Supervisor to server: this controller's connection has ended, with or without Goodbye. The same back to the
    supervisor: its runs are given up. Supervisor to workers, which get a SIGINT as well: carry out none of them."""

    client: str


@record(127)
class MakeMailbox(Record):
    """Worker or controller to supervisor: a mailbox to the server (``server``) or to a worker (``w0``)."""

    peer: str


@record(128)
class OpenMailbox(Record):
    """Server or worker to supervisor: hand me the mailbox that I was offered."""

    mailbox: Count


@record(129)
class Mailbox(Record):
    """Supervisor's answer to either, with its memory and both doorbells (the maker's first) as ancillary data; or why
    not (``refused``). ``spins``: there are processors enough to look for mail a while before going to sleep."""

    mailbox: Count
    spins: bool
    refused: str


@record(130)
class ShowStacks(Record):
    """Server to supervisor, and from there to who runs it: have this worker's incarnation print the stacks of its
    threads (SIGUSR1). Others have waited for it for long, and it may hang."""

    replica: Replica
    incarnation: Incarnation


@record(131)
class ExtendSegment(Record):
    """Server to supervisor: make the segment of that name ``reservation`` bytes long, if it is shorter, and hand it
    out. Existing mappings of it stay valid and keep their length."""

    segment: str
    reservation: Number

    def check(self) -> None:
        Location(self.segment, 0)


# --- what the server asks -------------------------------------------------------------------------------------------


@record(140)
class Preserve(_OfRun):
    """Server to a replica that waits at point ``k``: another replica reads its own update, so a commit comes in the
    middle of the run. Preserve the views that the function holds, and send the same Ask again, ``preserved``."""

    run: RunId
    k: Count
