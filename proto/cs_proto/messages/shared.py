"""Fields that several messages share: numbers and their ranges, runs, values, errors, and the records of variables,
optimizers and workers. Codes 1-9."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from cs_proto.arithmetic.schedules import Schedule
from cs_proto.descriptors import Array, Location, is_wire_dtype, shape_fault
from cs_proto.records import Count, Finite, Range, Record, record, shown

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
#: merge point 2 of run 5. A replay finds the same path without asking any process.
RunId = tuple[Count, ...]

Role = Literal["server", "worker", "controller", "observer", "script"]
ReduceOpName = Literal["SUM", "MEAN"]
#: What a replica does about gradients that are not finite.
NumericsCheck = Literal["off", "warn", "raise"]
AssignOp = Literal["assign", "assign_add", "assign_sub"]
WriteOp = Literal["assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub", "scatter_update"]

#: What the name of a variable must be: it is printed in many places.
VARIABLE_NAME = "1-512 printable characters, without control characters, line ends and marks of direction"


#: The longest name of a node.
_MOST_NODE_CHARACTERS = 255


def is_node(name: str) -> bool:
    """Whether a machine may be called so: by the address at which others see it. Empty: the machine of the service."""
    is_short = len(name) <= _MOST_NODE_CHARACTERS
    return is_short and name.isascii() and all(char.isalnum() or char in ".:%-_" for char in name)


def is_variable_name(name: str) -> bool:
    """Whether a variable may have this name."""
    return 0 < len(name) <= 512 and name.isprintable()


class OfRun(Record):
    """Base of the records that belong to one run."""

    run: RunId

    def check(self) -> None:
        run = self.run
        if len(run) % 2 == 0 or len(run) > 65:
            self.refuse(f"{shown(run)} is not a run: (n,) or (n, k, j, ...)")


def run_of(record: Record) -> int:
    """The number of the script's run that a record belongs to; 0 if it belongs to none."""
    return record.run[0] if isinstance(record, OfRun) else 0


class OfStep(OfRun):
    """Base of the records that say which series a run is a step of: its first run's number, 0 for a run on its own."""

    series: Count

    def check(self) -> None:
        super().check()
        if self.series > self.run[0] or (self.series and len(self.run) > 1):
            self.refuse(f"{shown(self.run)} is no step of a series that began with run {self.series}")


@record(3)
class Value(Record):
    """A nest of the closed vocabulary: ``body`` encodes the nest (docs/protocol.md, section 9), ``arrays`` are its
    arrays in the order in which the body names them. The server passes it on unread."""

    body: bytes
    arrays: tuple[Array, ...]


@record(4)
class Error(Record):
    """An exception as data: a code of the closed table, its arguments, its origin, its traceback as text.

    ``origin`` is the ``module:qualname`` of its class when it was raised. ``replica`` is -1 if it belongs to none.
    ``merge_index`` is the number of merge points that the replica had passed.
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
    """The requested properties of a variable. The server makes ``name`` unique. Replicas write to an ``ordinary``
    variable, made outside every scope, by WriteNotes, whatever its aggregation. A ``sparse`` one has no gradient
    buffers."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    trainable: bool
    aggregation: Annotated[int, Range(0, 3)]
    synchronization: Annotated[int, Range(0, 3)]
    ordinary: bool = False
    sparse: bool = False

    def check(self) -> None:
        if not is_variable_name(self.name):
            self.refuse(f"{shown(self.name)} is not a variable name: {VARIABLE_NAME}")
        if not is_wire_dtype(self.dtype) or self.dtype[0] in "US":
            self.refuse(f"a variable cannot have dtype {shown(self.dtype)}")
        if fault := shape_fault(self.dtype, self.shape):
            self.refuse(fault)
        if self.sparse and not (self.trainable and self.shape and self.dtype.startswith(("float", "complex"))):
            self.refuse("a sparse variable is trainable, has an axis of rows, and a dtype that has gradients")


@record(6)
class Variable(Record):
    """An existing variable: its number, its spec with the final name, the place of its value, its version."""

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
    """An existing optimizer: its kind (``SGD``), the rule that its hyperparameters chose when it was made, the schedule
    of its learning rate (None: a constant), and patterns of the names that are ``exempt`` from weight decay."""

    number: Number
    kind: str
    rule: str
    hyperparameters: tuple[tuple[str, Finite], ...]
    schedule: Schedule | None
    iterations: Count
    exempt: tuple[str, ...] = ()


@record(8)
class Worker(Record):
    """A registered worker. It listens where :func:`cs_proto.peers.worker_endpoint` says. ``node`` is the address of
    the machine on which it runs and has that pid; "" if that is the machine of the service."""

    replica: Replica
    incarnation: Incarnation
    pid: Pid
    device: str
    node: str = ""

    def check(self) -> None:
        if not is_node(self.node):
            self.refuse(f"{shown(self.node)} is no node")


@record(9)
class DevicePlace(Record):
    """The place of an array on a GPU: the CUDA IPC ``handle`` of a block of its memory, the byte ``offset`` in it, and
    the block's ``size`` in bytes. The block begins and ends with the ``mark``, so a process that opens it can check
    that it has the whole block. An empty handle: the array is not on the GPU."""

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
        """The offsets of the mark in the block."""
        return 0, self.size - len(self.mark)

    def holds(self, nbytes: int) -> bool:
        """Whether ``nbytes`` bytes from the offset on lie between the marks."""
        return len(self.mark) <= self.offset <= self.offset + nbytes <= self.size - len(self.mark) < 1 << 62
