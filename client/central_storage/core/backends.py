"""The interfaces between the public objects (strategy, variables, optimizers) and the code that does the work.

Public objects check, regroup and reduce; they never send a message. A :class:`ReplicaBackend` has the operations of a
replica: a worker installs one for each run. A :class:`ControllerBackend` has those of the cross-replica context: it is
the client's link to its service or, in a worker, the holder of a merge_call token. Variables and optimizers are named
by their numbers in the server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import numpy as np

from cs_proto.arithmetic.schedules import Schedule
from cs_proto.errors import ShutdownError
from cs_proto.messages import (
    AssignOp,
    Counters,
    NumericsCheck,
    Optimizer,
    ReduceOpName,
    Variable,
    VariableSpec,
    Worker,
    WriteOp,
)

from .handles import Handle
from .made_in_replicas import MadeInReplicas
from .pipeline import Series
from .variable_sets import Numbers, VariableSets

__all__ = [
    "Carriage",
    "Column",
    "Combining",
    "ControllerBackend",
    "Group",
    "ReadRows",
    "ReplicaBackend",
    "ServiceBackend",
    "Strategy",
    "Value",
    "Values",
    "assign_each",
    "every",
    "is_zero",
    "read_each",
    "service_of",
]


def _nothing_to_prepare(count: int) -> None:
    pass


class Carriage(NamedTuple):
    """The treatment of arrays that are read ahead for the replicas, and whether a thread may apply it. ``expect`` is
    told, before that, how many elements are to be read ahead."""

    copy: Callable[[np.ndarray], np.ndarray] = np.copy
    in_thread: bool = True
    expect: Callable[[int], None] = _nothing_to_prepare


class Group(NamedTuple):
    """The gradients for one optimizer: (gradient, variable number) pairs and (values, int64 indices, variable number)
    triples that fit their variables."""

    optimizer: int
    dense: Sequence[tuple[np.ndarray, int]]
    sparse: Sequence[tuple[np.ndarray, np.ndarray, int]]


@dataclass(slots=True)
class Column:
    """Variables, or the slots called ``slot`` that ``optimizer`` has beside them (0: the variables themselves), all of
    one dtype, with the shape of each. They are read and written together."""

    optimizer: int
    slot: str
    dtype: str
    numbers: list[int] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    def part(self, places: Sequence[int]) -> Column:
        """The variables or slots at these places."""
        numbers, shapes = self.numbers, self.shapes
        return replace(self, numbers=[numbers[at] for at in places], shapes=[shapes[at] for at in places])

    def nbytes(self) -> list[int]:
        """The bytes of each variable or slot."""
        itemsize = np.dtype(self.dtype).itemsize
        sizes = {shape: itemsize * math.prod(shape) for shape in set(self.shapes)}
        return [sizes[shape] for shape in self.shapes]


Value: TypeAlias = "memoryview | Callable[[], Any]"
"""The bytes of a value in the machine's order, or what returns them or the value as an array."""


Values: TypeAlias = "list[list[Value]]"
"""For each column its values."""


ReadRows: TypeAlias = "Callable[[int, int], Any]"
"""How rows of an array are read, from one number to below another: as an array, or as bytes in the machine's order."""


class Combining(NamedTuple):
    """How the gradients of the replicas are combined: by the weight of this replica, and with a bound on the norm of
    all sums together."""

    weight: float = 1.0
    global_clipnorm: float | None = None
    clip_epsilon: float = 0.0


class Strategy(Protocol):
    """The strategy, as contexts, variables and optimizers see it."""

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas."""

    @property
    def controller(self) -> ControllerBackend:
        """The interface to the service. Raises if there is none."""

    @property
    def extended_parameter_device(self) -> str:
        """The parameter device as a full name."""

    @property
    def devices_by_replica(self) -> list[list[str]]:
        """The logical devices of each replica, as full names."""

    @property
    def variables(self) -> tuple[Any, ...]:
        """Every variable there is."""

    @property
    def variable_sets(self) -> VariableSets:
        """Sets of variables that are known by identity."""

    def remember(self, handle: Handle) -> None:
        """Let ``handle`` be the one object for its number in this process."""

    def claim(self, owner: object, name: str) -> None:
        """Have :meth:`settle_owners` give a name to a moving average or an accumulator."""

    def settle_owners(self) -> None:
        """Give names to those that have claimed one."""

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call ``fn`` once per replica."""

    def reduce(self, reduce_op: Any, value: Any, axis: int | tuple[int, ...] | None) -> Any:
        """Combine the components of a distributed value."""

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of a distributed value."""


class _Catalogue(Protocol):
    """The operations on variables and optimizers that both have."""

    def variable(self, number: int) -> Variable:
        """The variable's record as last told by the server."""

    def optimizer(self, number: int) -> Optimizer:
        """The optimizer's present record, with current iterations."""

    def slot(self, optimizer: int, variable: int, slot: str) -> np.ndarray:
        """A copy of an optimizer's slot for a variable, which is made if it is missing. In a replica, noted updates are
        committed first."""

    def variables(self) -> tuple[Variable, ...]:
        """The records of all variables, in the order in which they were made."""

    def create(self, spec: VariableSpec, value: np.ndarray, site: str) -> Variable:
        """Make a variable; in a replica a waited merge point, and replica 0's value counts."""

    def assign(self, number: int, op: AssignOp, value: np.ndarray, site: str, *, scalar: bool) -> None:
        """Write a variable. In a replica an aggregated merge point; ``scalar`` says that the value was a Python
        number, which only the comparison of replicas can refuse."""

    def write(self, number: int, op: WriteOp, value: np.ndarray, rows: np.ndarray | None, site: str) -> None:
        """Write a variable without aggregation; a scatter writes to ``rows``, int64. The value has been checked. In a
        replica this is a note that needs no agreement."""

    def read_rows(self, number: int, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows of the variable's current value; ``rows`` is int64 of any shape, and checked."""


class ReplicaBackend(_Catalogue, Protocol):
    """One replica of one run. Every method that waits raises the error that the server answers. ``devices`` are its
    logical devices, as full names."""

    replica: int
    replicas: int
    devices: tuple[str, ...]

    def view(self, number: int) -> np.ndarray:
        """The variable's value on this replica's device, read-only. It keeps its bits until the run is over. On a CPU
        no copy is made unless an earlier value is held through an update. First commits what this replica noted for the
        variable.

        Raises MemoryPlanError if values that are held through an update need more memory than there is.
        """

    def is_carried(self, number: int) -> bool:
        """Whether the variable is not in the memory of this process, so that :meth:`view` fetches all of it."""

    def restore(self, numbers: Iterable[int]) -> None:
        """Show the server's values of these variables again, where this process has written to them in place. On a CPU
        the arrays that :meth:`view` has returned show them; but not one that was returned before an update and is still
        held after it, which keeps its bits. On a GPU the next :meth:`view` returns a new array. Small variables share
        pages of memory, so what was written to a neighbour may be given back, too."""

    def refuse_written(self, sites: Mapping[int, str]) -> NoReturn:
        """Raise VariableWrittenError about a write in this run to these variables. ``sites`` has, by number, the line
        that wrote, such as ``model.py:12``, or the empty string. Restores the variables. The run fails even if the
        function handles the error."""

    def protect(self, numbers: Iterable[int]) -> None:
        """Make the memory in which a replica on a CPU reads these variables unwritable until this worker ends: a write
        ends the worker by SIGSEGV, at the instruction that writes, and the error of the run names the variable. Pages
        are protected whole, so this covers small variables that share pages with these. Calls for variables that are
        protected already cost nothing.

        Raises MemoryPlanError if the kernel has no memory for its records of that.
        """

    def hold(self, value: Any) -> None:
        """Hold a result of :meth:`view` until this replica's run is over. Readers of ``__cuda_array_interface__`` hold
        the variable, and not the memory."""

    def apply(self, groups: Sequence[Group], combining: Combining, site: str) -> None:
        """Note one step of each group's optimizer, all in one update."""

    def apply_buffers(
        self,
        counts: tuple[tuple[int, int], ...],
        gradients: Sequence[np.ndarray],
        numbers: Numbers,
        combining: Combining,
        site: str,
    ) -> bool:
        """Do as ``apply`` if ``gradients`` are exactly the last ``gradient_buffers`` of the variables ``numbers``, in
        memory that the server sees. Otherwise do nothing and return False. ``counts`` divides the variables in order:
        (optimizer, count of its variables) for each group."""

    def gradient_buffers(self, numbers: Numbers) -> list[np.ndarray]:
        """Writable arrays of the variables' shapes that lie where the server reads gradients."""

    def all_reduce(self, op: ReduceOpName, leaves: Sequence[np.ndarray], site: str) -> list[np.ndarray]:
        """Combine leaf by leaf over the replicas."""

    def all_gather(self, axis: int, leaves: Sequence[np.ndarray], site: str) -> list[np.ndarray]:
        """Concatenate leaf by leaf over the replicas along ``axis``."""

    def merge_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], site: str
    ) -> Any:
        """Call replica 0's ``function(strategy, *args, **kwargs)`` once in the cross-replica context. Return this
        replica's share of its result."""

    def array_module(self) -> ModuleType:
        """NumPy, or CuPy on a GPU."""

    def place(self, array: Any, device: str) -> Any:
        """``array`` in the memory of ``device``: ``array`` itself if it is there already, and strings in host memory.
        Raises DeviceError for a device that this process cannot use."""


class ControllerBackend(_Catalogue, Protocol):
    """The one party that starts runs and writes variables outside them."""

    replicas: int
    compute_devices: tuple[str, ...]
    parameter_device: str
    address: str

    @property
    def ended(self) -> str | None:
        """Why the service has ended; None while it has not."""

    @property
    def is_busy(self) -> bool:
        """Whether an operation is under way, in any thread."""

    def run(
        self,
        function: Callable[..., Any],
        arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    ) -> list[Any]:
        """Run ``function`` once per replica, with that replica's (args, kwargs); the results in replica order."""

    def series(self, lookahead: int) -> Series:
        """Runs that may be sent while up to ``lookahead`` before them are not over. Raises ContextError in a
        merge_call."""

    def read(self, number: int) -> np.ndarray:
        """A copy of the variable's current value."""

    def sample(self, number: int, most: int) -> np.ndarray | None:
        """At most about ``most`` of the variable's values, evenly from the whole; None if a run is under way, which is
        not waited for."""

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers in replica order, as far as this process has heard. Nobody is asked."""

    def listens_at(self) -> str:
        """Where the service listens for other machines (``tcp://ADDRESS:PORT``); "" if nowhere, or if this process does
        not know."""

    def processes(self) -> Sequence[tuple[str, int, str, str]]:
        """The processes of the service, as far as this one has heard: name, pid, device, and the address of the machine
        ("" for this one). Nobody is asked."""

    def forget(self, kind: str, number: Any) -> None:
        """Note that a variable or optimizer of this process is no longer referenced, so that the server may free it.
        Called by the garbage collector in any thread."""

    @property
    def is_running(self) -> bool:
        """Whether the service runs, as far as is known."""

    def settle_names(self) -> None:
        """Free objects that are no longer referenced, so that this process and the server know the same names."""

    def configure(
        self,
        number: int,
        kind: str,
        hyperparameters: Mapping[str, float],
        schedule: Schedule | None,
        iterations: int,
        exempt: tuple[str, ...] | None = None,
        steps: Mapping[int, int] | None = None,
    ) -> int:
        """Make an optimizer (``number`` 0), or change some of its hyperparameters, its schedule, its iterations (-1:
        not them), the patterns of the names that are exempt from weight decay (None: not them) or how often it has
        updated some variables; its number. A learning rate without a schedule ends the schedule there was."""

    def slotted(self, optimizer: int) -> tuple[int, ...]:
        """The numbers of the variables for which an optimizer has slots."""

    def steps_of(self, optimizer: int) -> dict[int, int]:
        """How often an optimizer has updated each variable for which it has slots, by number."""

    def assign_slot(
        self, optimizer: int, variable: int, slot: str, value: np.ndarray, first: int | None = None
    ) -> None:
        """Write a slot, whose shape and dtype ``value`` has, or its rows from the number ``first`` on."""

    def read_all(self, columns: Sequence[Column], *, copied: bool) -> Values:
        """The values of columns, as of one moment: nobody runs or writes meanwhile (:meth:`exclusively`). ``copied``:
        they are copies that may be kept; otherwise each is valid until the next operation."""

    def read_in_rows(self, columns: Sequence[Column]) -> list[ReadRows]:
        """As :meth:`read_all`, of columns of one large value each, which are not copied: how rows of it are read, each
        valid until the next operation. Memory is needed for these rows, not for the value."""

    def assign_all(self, columns: Sequence[tuple[Column, memoryview]]) -> None:
        """Set columns to values of their dtype and shapes, in a few requests. The bytes of a column are those of its
        values, one after the other, in the machine's order. Missing slots are made."""

    @property
    def seed(self) -> int:
        """The strategy's seed. Random numbers follow from it, the function, the step and the replica."""

    def steps(self) -> dict[str, int]:
        """By the name of a function (:func:`random_streams.function_name`), the number of its runs that have begun,
        counted from the last :meth:`set_steps`; it is the ``step`` of the next one. Steps that were sent ahead and
        never began do not count."""

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Let random numbers continue as if these runs had begun, and no others."""

    def carrier(self) -> Carriage:
        """What copies an array to where the replicas read it, ahead of the run that it is an argument of, and whether a
        thread may do it. May be called in any thread."""

    def exclusively(self) -> AbstractContextManager[None]:
        """Keep other threads from running and writing for the length of a block."""

    def statistics(self) -> Counters:
        """The server's counters."""

    def close(self) -> None:
        """Let go of the service. Idempotent."""


class ServiceBackend(ControllerBackend, Protocol):
    """A script's own link to its service. ``check_numerics`` holds for the runs that follow."""

    check_numerics: NumericsCheck

    def resolve_handles(
        self,
        resolve: Callable[[str, int], object],
        adopt: Callable[[Any], tuple[str, int]],
        is_held: Callable[[str, int], object],
        made_in_replicas: MadeInReplicas,
        before_first_run: Callable[[], None],
    ) -> None:
        """How handles become objects, how handles and composites are named, which object somebody holds, which
        variables of replicas somebody needs, and what to call when the first run has brought everything that it reads.
        The strategy over this link says it once."""

    def abandon(self) -> None:
        """Note that the strategy is no longer referenced. Called by the garbage collector in any thread, at any
        time."""


def read_each(backend: ControllerBackend, columns: Sequence[Column], *, copied: bool) -> Values:
    """:meth:`ControllerBackend.read_all` by one question for each value."""
    found = [
        [partial(backend.slot, each.optimizer, number, each.slot) for number in each.numbers]
        if each.optimizer
        else [partial(backend.read, number) for number in each.numbers]
        for each in columns
    ]
    return [[partial(np.asarray, read()) if copied else read for read in each] for each in found]


def assign_each(backend: ControllerBackend, columns: Sequence[tuple[Column, memoryview]]) -> None:
    """:meth:`ControllerBackend.assign_all` by one request for each value."""
    for column, values in columns:
        at = 0
        for number, shape, nbytes in zip(column.numbers, column.shapes, column.nbytes(), strict=True):
            value = np.ndarray(shape, column.dtype, values, at)
            at += nbytes
            if column.optimizer:
                backend.assign_slot(column.optimizer, number, column.slot, value)
            else:
                backend.write(number, "assign", value, None, "")


def every(array: np.ndarray, most: int) -> np.ndarray:
    """A copy of every n-th value, at most about ``most`` of them.

    >>> every(np.arange(10).reshape(2, 5), 4)
    array([0, 3, 6, 9])
    """
    values = array.reshape(-1)
    return np.array(values[:: max(1, -(-values.size // most))])


def is_zero(value: np.ndarray) -> bool:
    """Whether every byte is; False, too, where that is not said at a glance."""
    return value.flags.c_contiguous and not value.reshape(-1).view(np.uint8).any()


def service_of(strategy: Strategy, what: str) -> ControllerBackend:
    """The interface to the service that has ``what``. If that service has ended, raises ShutdownError, which names
    ``what``: a newer strategy has another service."""
    backend = strategy.controller
    if backend.ended is not None:
        raise ShutdownError(
            f"{what} belongs to another service, which has ended ({backend.ended}); make a new "
            f"CentralStorageStrategy if there is none yet, make {what} again under its scope, and restore the value "
            "from a checkpoint"
        )
    return backend
