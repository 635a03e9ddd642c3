"""A strategy's link to no service: it notes what a script makes, and ends the script at its first step.

It implements :class:`~central_storage.core.backends.ServiceBackend`. It starts nothing and allocates no variable: small
values are kept, so that the script reads what it wrote; large ones read as zeros that take no memory.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from central_storage.core.backends import Carriage, Column, ReadRows, Values, assign_each, every, is_zero, read_each
from central_storage.core.made_in_replicas import MadeInReplicas
from central_storage.core.pipeline import Arguments, Changes, Series
from central_storage.pickling.function import Function, Pickled
from central_storage.pickling.pickler import Adopt, digest, dump_arguments, dump_function
from cs_proto import messages, scatter, segment_names
from cs_proto.arithmetic.optimizers import check_change, rule_of, slot_shape
from cs_proto.arithmetic.schedules import Schedule
from cs_proto.arrays import INLINE_NBYTES, Location
from cs_proto.errors import ShutdownError
from cs_proto.memory_plan import value_nbytes
from cs_proto.messages import AssignOp, Counters, NumericsCheck, VariableSpec, WriteOp
from cs_proto.records import replace
from cs_runtime import machine
from cs_runtime.shared_memory.arena import Arena

from .ending import Ending

__all__ = ["PlanningLink"]

# Values of more bytes are not kept.
_KEPT_NBYTES = 1 << 20
# Values of more bytes are not read to find out whether they are zeros.
_READ_NBYTES = 1 << 30
# More than any step sends, and a multiple of every page.
_ARENA_NBYTES = 1 << 50
# MAP_NORESERVE, which the module mmap lacks: the zeros may be more than the machine has.
_NORESERVE = 0x4000


class PlanningLink:
    """What a strategy holds where others hold a link to their service. A facade, as that link is: it has a method for
    everything that the strategy, its variables and its optimizers ask."""

    def __init__(
        self, compute_devices: Sequence[str], parameter_device: str, seed: int, ending: Ending, *, in_process: bool
    ) -> None:
        self.compute_devices = tuple(compute_devices)
        self.parameter_device = parameter_device
        self.replicas = len(self.compute_devices)
        #: No directory: there is nothing to connect to.
        self.address = "estimate"
        self.ended: str | None = None
        self.check_numerics: NumericsCheck = "off"
        self.seed = seed
        self._ending = ending
        self._in_process = in_process
        self._lock = threading.RLock()
        self._variables: dict[int, messages.Variable] = {}
        self._values: dict[int, np.ndarray] = {}
        self._optimizers: dict[int, messages.Optimizer] = {}
        # By optimizer and variable: the slots whose values are kept.
        self._slots: dict[tuple[int, int], dict[str, np.ndarray]] = {}
        self._counts: dict[tuple[int, int], int] = {}
        self._runs: dict[str, int] = {}
        # Of objects that are gone; the garbage collector may add to it at any time.
        self._gone: deque[tuple[str, Any]] = deque()
        self._made = self._last_optimizer = 0
        self._adopt: Adopt = _nothing_adopted
        self._is_held: Callable[[str, int], Any] = lambda kind, number: None
        self._read_ahead = 0
        # What the arena of a script would take, and what is read ahead.
        self._arena = Arena(_nowhere)
        self._inputs = self._largest = self._arguments = 0
        ending.add(self._planned)

    @property
    def is_busy(self) -> bool:
        """False: no operation takes any time."""
        return False

    # --- the first step -------------------------------------------------------------------------------------------

    def run(
        self, function: Callable[..., Any], arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> list[Any]:
        """Note the bytes of the arguments, and end the script."""
        self.send_step(Series(self, 0), function, arguments, ())
        return []

    def series(self, lookahead: int) -> Series:
        """Steps of which the first one ends the script."""
        return Series(self, lookahead)

    def send_step(self, series: Series, function: Callable[..., Any], arguments: Arguments, changes: Changes) -> None:
        """As :meth:`run`, for the first step of a series."""
        self._require_service()
        with self._lock:
            sent = self._pickled(function)
            pickles = [dump_arguments(args, kwargs, self._adopt, _in_place) for args, kwargs in arguments]
            self._arguments = sum(len(data) + sum(each.nbytes for each in buffers) for data, buffers in pickles)
            self._place_steps(sent.data, pickles, series.lookahead)
        self._ending.reached("step")

    def _place_steps(
        self, function: bytes, pickles: Sequence[tuple[bytes, Sequence[memoryview]]], lookahead: int
    ) -> None:
        """Place what the steps under way send, as a link does. Elements that are read ahead lie elsewhere, but for the
        first one."""
        parts = lookahead + 1
        element = Arena(_nowhere)
        for part in range(1 if self._read_ahead else parts):
            self._arena.reset(part, parts)
            if not part:
                self._arena.share(function)  # the workers keep it
            for pickled, buffers in pickles:
                self._arena.share(pickled)
                for buffer in buffers:
                    self._arena.share(buffer)
                    element.share(buffer)
        self._arena.reset(0, parts)
        # Beside the elements that are read ahead there are those of the steps under way and, in a loop of single runs,
        # the one that the loop has had before.
        count = self._read_ahead + max(2, parts) if self._read_ahead else 0
        self._inputs = count * element.touched_nbytes

    def settle(self, series: Series, left: int = 0, *, cancel: bool = False) -> None:
        """Return at once: no step is under way."""

    def carrier(self) -> Carriage:
        """What copies an array into ordinary memory, and notes how many elements are read ahead."""
        return Carriage(np.copy, not self._in_process, self._expect)

    def _expect(self, count: int) -> None:
        self._read_ahead = count

    def _pickled(self, function: Callable[..., Any]) -> Pickled:
        return function.pickle_for(self, self._pickle) if isinstance(function, Function) else self._pickle(function)

    def _pickle(self, function: Callable[..., Any]) -> Pickled:
        data = dump_function(function, self._adopt)
        return Pickled(data, digest(data), set())

    def _planned(self) -> Mapping[str, Any] | None:
        """What was made, as JSON values."""
        optimizers = []
        for number, made in self._optimizers.items():
            held = self._is_held("optimizer", number)
            members = {variable for optimizer, variable in self._slots if optimizer == number}
            members.update(getattr(held, "members", ()))
            optimizers.append({"rule": made.rule, "members": sorted(members) or None})
        specs = ((each.number, each.spec) for each in self._variables.values())
        return {
            "devices": list(self.compute_devices),
            "parameter_device": self.parameter_device,
            "is_closed": self.ended is not None,
            "variables": [[n, s.name, s.dtype, list(s.shape), s.trainable, s.sparse] for n, s in specs],
            "optimizers": optimizers,
            "arenas": self._arena.touched_nbytes + self._inputs,
            "largest_value": self._largest,
            "arguments": self._arguments,
            "available": machine.available_nbytes(),
        }

    # --- variables ------------------------------------------------------------------------------------------------

    def create(self, spec: VariableSpec, value: np.ndarray, site: str) -> messages.Variable:
        """Note a variable."""
        self._require_service()
        with self._lock:
            self._made += 1
            name = self._free_name(spec.name)
            place = Location(segment_names.parameters(segment_names.slab(spec.dtype, sparse=spec.sparse)), 0)
            made = messages.Variable(self._made, replace(spec, name=name), place, 0)
            self._variables[made.number] = made
            if value.nbytes > INLINE_NBYTES and not (value.nbytes <= _READ_NBYTES and is_zero(value)):
                self._pass(value)
            if value.nbytes <= _KEPT_NBYTES:
                self._values[made.number] = np.array(value)
            return made

    def _pass(self, value: np.ndarray) -> None:
        """A value goes to the server through the arena, where its pages stay until the next run."""
        mark = self._arena.mark()
        self._arena.place(value)
        self._arena.release(mark)
        self._largest = max(self._largest, self._arena.touched_nbytes)

    def _free_name(self, name: str) -> str:
        taken = {each.spec.name for each in self._variables.values()}
        names = itertools.chain([name], (f"{name}_{count}" for count in itertools.count(1)))
        return next(each for each in names if each not in taken)

    def assign(self, number: int, op: AssignOp, value: np.ndarray, site: str, *, scalar: bool) -> None:
        """Write a variable whose value is kept."""
        self.write(number, op, value, None, site)

    def write(self, number: int, op: WriteOp, value: np.ndarray, rows: np.ndarray | None, site: str) -> None:
        """Write a variable whose value is kept, or rows of it."""
        self._require_service()
        with self._lock:
            self._pass(value)
            made = self._variables[number]
            self._variables[number] = replace(made, version=made.version + 1)
            if (kept := self._values.get(number)) is not None:
                scatter.write(kept, op, value, rows)

    def read(self, number: int) -> np.ndarray:
        """A copy of a value that is kept, else zeros that take no memory until they are written."""
        self._require_service()
        kept = self._values.get(number)
        return _zeros(self._variables[number].spec) if kept is None else kept.copy()

    def sample(self, number: int, most: int) -> np.ndarray | None:
        """At most about ``most`` of the values."""
        return every(self.read(number), most)

    def read_rows(self, number: int, rows: np.ndarray) -> np.ndarray:
        """A copy of these rows."""
        return np.asarray(np.take(self.read(number), rows, axis=0))

    def variable(self, number: int) -> messages.Variable:
        """The record of a variable."""
        return self._variables[number]

    def variables(self) -> tuple[messages.Variable, ...]:
        """All records, in the order in which the variables were made."""
        self._require_service()
        return tuple(self._variables.values())

    # --- optimizers -----------------------------------------------------------------------------------------------

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
        """Note an optimizer (``number`` 0), or a change of one; its number."""
        self._require_service()
        with self._lock:
            if number:
                known = self._optimizers[number]
                given = {**dict(known.hyperparameters), **hyperparameters}
                check_change(kind, known.rule, dict(known.hyperparameters), given)
                if schedule is None and "learning_rate" not in hyperparameters:
                    schedule = known.schedule
            else:
                given = dict(hyperparameters)
                number = self._last_optimizer = self._last_optimizer + 1
                known = messages.Optimizer(number, kind, rule_of(kind, given), (), None, 0)
            self._optimizers[number] = replace(
                known,
                hyperparameters=tuple(given.items()),
                schedule=schedule,
                iterations=known.iterations if iterations < 0 else iterations,
                exempt=known.exempt if exempt is None else exempt,
            )
            for variable, count in (steps or {}).items():
                self._slots.setdefault((number, variable), {})
                self._counts[number, variable] = count
            return number

    def optimizer(self, number: int) -> messages.Optimizer:
        """The record of an optimizer."""
        return self._optimizers[number]

    def slot(self, optimizer: int, variable: int, slot: str) -> np.ndarray:
        """A copy of a slot, zeros where no value of it is kept."""
        self._require_service()
        kept = self._slots.setdefault((optimizer, variable), {}).get(slot)
        spec = self._variables[variable].spec
        shape = slot_shape(self._optimizers[optimizer].rule, spec.shape)
        return _zeros(replace(spec, shape=shape, sparse=False)) if kept is None else kept.copy()

    def assign_slot(
        self, optimizer: int, variable: int, slot: str, value: np.ndarray, first: int | None = None
    ) -> None:
        """Write a slot, whose value is kept if it is small, or rows of a slot that is not."""
        self._require_service()
        self._pass(value)
        kept = self._slots.setdefault((optimizer, variable), {})
        if first is None and value.nbytes <= _KEPT_NBYTES:
            kept[slot] = np.array(value)

    def slotted(self, optimizer: int) -> tuple[int, ...]:
        """The numbers of the variables beside which a script has made slots."""
        return tuple(sorted(variable for number, variable in self._slots if number == optimizer))

    def steps_of(self, optimizer: int) -> dict[int, int]:
        """The counts of updates that a script has set, by variable."""
        return {variable: self._counts.get((optimizer, variable), 0) for variable in self.slotted(optimizer)}

    def read_all(self, columns: Sequence[Column], *, copied: bool) -> Values:
        """The values of many variables and slots, which are asked for one after the other."""
        return read_each(self, columns, copied=copied)

    def read_in_rows(self, columns: Sequence[Column]) -> list[ReadRows]:
        """How rows of large values are read, one value for each column."""

        def reader(each: Column) -> ReadRows:
            (number,) = each.numbers
            if each.optimizer:
                return lambda first, stop: self.slot(each.optimizer, number, each.slot)[first:stop]
            return lambda first, stop: self.read_rows(number, np.arange(first, stop))

        return list(map(reader, columns))

    def assign_all(self, columns: Sequence[tuple[Column, memoryview]]) -> None:
        """Set many variables and slots, one after the other."""
        assign_each(self, columns)

    # --- the rest -------------------------------------------------------------------------------------------------

    def resolve_handles(
        self,
        resolve: Callable[[str, int], object],
        adopt: Adopt,
        is_held: Callable[[str, int], object],
        made_in_replicas: MadeInReplicas,
        before_first_run: Callable[[], None],
    ) -> None:
        """How handles are named, and which object somebody holds."""
        self._adopt, self._is_held = adopt, is_held

    @property
    def is_running(self) -> bool:
        """Whether the strategy was not shut down."""
        return self.ended is None

    def forget(self, kind: str, number: Any) -> None:
        """Forget a variable or optimizer that is gone; its memory would be free again."""
        self._gone.append((kind, number))

    def settle_names(self) -> None:
        """Forget what is gone."""
        while self._gone:
            kind, number = self._gone.popleft()
            if kind == "variable":
                self._variables.pop(number, None)
                self._values.pop(number, None)
            elif kind == "optimizer":
                self._optimizers.pop(number, None)
            if kind in ("variable", "optimizer"):
                place = kind == "variable"
                self._slots = {key: kept for key, kept in self._slots.items() if key[place] != number}

    @property
    def workers(self) -> list[messages.Worker]:
        """None was started; those of a plan for other machines, so that the script learns where they would run."""
        nodes = () if self._in_process else self._ending.elsewhere.nodes
        devices = zip(self.compute_devices, nodes, strict=False)  # further strategies may have other numbers
        return [messages.Worker(rank, 1, 0, device, node) for rank, (device, node) in enumerate(devices)]

    def listens_at(self) -> str:
        """Where it would."""
        return self._ending.elsewhere.listen

    def processes(self) -> list[tuple[str, int, str, str]]:
        """None was started."""
        return []

    def steps(self) -> dict[str, int]:
        """The counts of runs that a checkpoint has brought."""
        return dict(self._runs)

    def set_steps(self, steps: Mapping[str, int]) -> None:
        """Take over counts of runs."""
        self._runs = dict(steps)

    def exclusively(self) -> AbstractContextManager[None]:
        """Let other threads wait."""
        return self._exclusively()

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        with self._lock:
            yield

    def statistics(self) -> Counters:
        """Counters of a service that has done nothing yet."""
        nbytes = sum(value_nbytes(each.spec) for each in self._variables.values())
        return Counters(0, os.getpid(), 0.0, len(self._variables), nbytes, 0, 0, 0, 0, ())

    def close(self) -> None:
        """Take no more."""
        self.ended = self.ended or "this strategy was shut down"

    abandon = close

    def _require_service(self) -> None:
        if self.ended is not None:
            raise ShutdownError(f"{self.ended}; make a new CentralStorageStrategy")
        self.settle_names()


class _Nowhere:
    """A segment for an arena that only counts."""

    name = segment_names.controller_arena()
    nbytes = _ARENA_NBYTES

    def take(self, start: int, stop: int, what: str) -> None:
        """Take no memory."""

    def write(self, array: object, value: object) -> None:
        """Copy nothing."""

    def discard(self, start: int, stop: int) -> None:
        """Give nothing back."""


def _nowhere() -> Any:
    return _Nowhere()


def _zeros(spec: VariableSpec) -> np.ndarray:
    """Zeros of which only those that are written take memory."""
    nbytes = value_nbytes(spec)
    if not nbytes:
        return np.zeros(spec.shape, spec.dtype)
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return np.frombuffer(memory, spec.dtype).reshape(spec.shape)


def _in_place(data: memoryview) -> memoryview:
    return data


def _nothing_adopted(handle: object) -> tuple[str, int]:
    raise ShutdownError(f"{handle!r} cannot be sent before its strategy is made")
