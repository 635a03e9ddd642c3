"""Requests of controllers and observers to the server (codes 30-49), and its replies (70-79).

The controller's writes carry (client, sequence); reads carry only a number, by which the reply is matched.
"""

from __future__ import annotations

from typing import Annotated

from cs_proto.arithmetic.schedules import Schedule
from cs_proto.descriptors import Array, Location
from cs_proto.records import Count, Finite, NotNegative, Range, Record, Seconds, record

from .shared import DevicePlace, Error, Number, Optimizer, Pid, Replica, Variable, VariableSpec, WriteOp

# --- requests -------------------------------------------------------------------------------------------------------


@record(30)
class Create(Record):
    """Make a variable. The value follows by :class:`Assign` unless ``value`` carries it.

    If the plan does not fit the memory, it is refused with MemoryPlanError before anything changes.
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
    """Make an optimizer (``optimizer`` 0) or change one; ``iterations`` -1 and ``exempt`` None stay as they are. A
    learning rate without a schedule ends the schedule."""

    client: str
    sequence: Count
    optimizer: Count
    kind: str
    hyperparameters: tuple[tuple[str, Finite], ...]
    schedule: Schedule | None
    iterations: Annotated[int, Range(-1, (1 << 62) - 1)]
    exempt: tuple[str, ...] | None = None
    steps: tuple[tuple[Number, Count], ...] = ()


@record(33)
class Get(Record):
    """Read variables by number and by name; with neither, all of them. ``frames`` asks for the bytes in frames, for
    peers that map no memory; otherwise the reply says where the bytes lie."""

    request: Count
    variables: tuple[Number, ...]
    names: tuple[str, ...]
    frames: bool


@record(34)
class Describe(Record):
    """Ask for the records of variables and optimizers by number, without values."""

    request: Count
    variables: tuple[Number, ...]
    optimizers: tuple[Number, ...]


@record(35)
class Statistics(Record):
    """Ask for the server's counters."""

    request: Count


@record(37)
class Free(Record):
    """The script has dropped these variables and optimizers. The server frees them, with the slots of either, and
    reuses their places. It ignores numbers that it has freed already."""

    client: str
    sequence: Count
    variables: tuple[Number, ...]
    optimizers: tuple[Number, ...] = ()


@record(38)
class DescribeSlots(Record):
    """Ask for the places of an optimizer's slots for a variable and for ``others``. Missing slots are made."""

    request: Count
    optimizer: Number
    variable: Number
    others: tuple[Number, ...] = ()


@record(39)
class AssignSlot(Record):
    """The controller (or the holder of a merge_call token) writes a slot once, and makes it if it is missing. With
    ``first``, ``value`` goes to the rows from that number on."""

    client: str
    sequence: Count
    optimizer: Number
    variable: Number
    slot: str
    value: Array
    first: Count | None = None


@record(40)
class Fetch(Record):
    """The bytes of an array, or of the ``rows`` (int64) of it, for a peer that cannot map the segment it lies in."""

    request: Count
    array: Array
    rows: Array | None

    def check(self) -> None:
        if not isinstance(self.array.place, Location):
            self.refuse("the array of a Fetch must lie in a segment")
        if self.rows is not None and (self.rows.dtype != "int64" or len(self.rows.shape) != 1 or not self.array.shape):
            self.refuse("rows are numbers int64[n] of an array that has rows")


@record(41)
class Put(Record):
    """Write the bytes ``value`` into ``array`` (uint8[n]), for a sender that may write there but cannot map it. Without
    a value, free the whole pages of ``array``."""

    request: Count
    array: Array
    value: Array | None

    def check(self) -> None:
        if not isinstance(self.array.place, Location) or self.array.dtype != "uint8" or len(self.array.shape) != 1:
            self.refuse("the array of a Put must be uint8[n] in a segment")
        if self.value is not None and (self.value.dtype, self.value.shape) != (self.array.dtype, self.array.shape):
            self.refuse(f"{self.value.shape} bytes do not fit into {self.array.shape}")


@record(42)
class Locate(Record):
    """A worker on a GPU asks where variables lie on the GPU of the variables.

    With ``buffers`` 0 or 1 (otherwise -1) it asks where on that GPU it may compute their gradients. An ApplyPoint names
    these buffers as ``buffers`` + 2. Every worker asks with 1 before it first uses its second set of gradient buffers
    for a dtype of these variables, and the server makes the set then.
    """

    request: Count
    variables: tuple[Number, ...]
    buffers: Annotated[int, Range(-1, 1)]


@record(46)
class AssignAll(Record):
    """The controller (or the holder of a merge_call token) sets many variables and slots at once. Missing slots are
    made.

    ``slots`` has (optimizer, slot, variables). ``value`` is uint8[n]: the bytes of the variables, and then of the
    slots, in this order. Each begins at a multiple of 64 bytes; zeros lie in between and at the end.
    """

    client: str
    sequence: Count
    variables: tuple[Number, ...]
    slots: tuple[tuple[Number, str, tuple[Number, ...]], ...]
    value: Array

    def check(self) -> None:
        value = self.value
        if not isinstance(value.place, Location) or value.dtype != "uint8" or len(value.shape) != 1:
            self.refuse("the value of an AssignAll must be uint8[n] in a segment")


# --- replies --------------------------------------------------------------------------------------------------------


@record(70)
class Done(Record):
    """Reply to Assign, AssignSlot and Configure: the number of the variable, slot or optimizer, and its version or
    iterations. Reply to AssignAll: the number of values, and 0. Reply to Free: the number of freed variables, 0, and
    the new names of others, by number. Reply to Put: 0 and 0."""

    sequence: Count
    number: Count
    version: Count
    renamed: tuple[tuple[Number, str], ...] = ()


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
    """Reply to Describe; ``slotted`` gives, for each optimizer, the numbers of the variables for which it has slots,
    ``steps`` how often it updated each of them."""

    request: Count
    variables: tuple[Variable, ...]
    optimizers: tuple[Optimizer, ...]
    slotted: tuple[tuple[Number, ...], ...]
    steps: tuple[tuple[Count, ...], ...] = ()


@record(74)
class ReplicaStatistics(Record):
    """Counters of one replica since the start of the server. ``not_finite`` counts the steps in which the server warned
    of this replica's gradients. ``node`` is the address of the worker's machine; "" if that is this one."""

    replica: Replica
    pid: Pid
    device: str
    runs: Count
    points: Count
    applies: Count
    not_finite: Count = 0
    node: str = ""


@record(75)
class Counters(Record):
    """Reply to Statistics.

    They are the result of ``strategy.statistics()``. ``uptime`` is in seconds. ``replicas`` has the counts of each
    replica. ``parameter_nbytes`` and ``slot_nbytes`` are the bytes of all variables and of all slots.
    ``posted`` counts the answers that were sent by mailbox. ``doorbells`` counts how often a doorbell woke a sleeping
    process: the server, or a process that it answered. A controller adds the workers that it has woken.
    ``captured`` counts the runs that the server decided in one pass, and ``uncaptured`` the others, by reason: pairs of
    words and a number. They count over the life of the service, also when the server is replaced.
    ``run`` is the number of the controller's last finished run. ``waiting`` says what each open run waits for, and for
    how long, in words.
    ``not_finite`` counts the commits since the start of the server in which a sum of gradients was not finite, and
    ``overflowed`` those of them in which each gradient was finite; the server looks for that where it warns.
    ``rate`` is the number of runs a second over the last second or, if they take long, over the last ten.

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
    captured: Count = 0
    uncaptured: tuple[tuple[str, Count], ...] = ()
    run: Count = 0
    waiting: tuple[str, ...] = ()
    not_finite: Count = 0
    overflowed: Count = 0
    rate: NotNegative = 0.0


@record(76)
class Refused(Record):
    """Reply to a request or first message that was refused: ``number`` is its sequence or request number."""

    number: Count
    error: Error


@record(77)
class Slots(Record):
    """Reply to DescribeSlots: the names of the slots, in the rule's order, and where each lies: all slots of the first
    variable, then those of the next one."""

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
    """Reply to Locate: the arrays by the names of their segments and, if variables are kept on a GPU, the ``uuid`` of
    that GPU and the arrays' places there.

    A server that dies loses these places. ``keeps``: another server then takes its place, and needs the gradients in
    their segments, too.
    """

    request: Count
    uuid: bytes
    arrays: tuple[Array, ...]
    places: tuple[DevicePlace, ...]
    keeps: bool
