"""Conversations with the engine: an event, then the commands that must follow, with a readable difference.

A :class:`Playbook` holds two engines. One lives through the whole conversation over a store in a dictionary. The other
is built anew from a log in a buffer before every event. Both must give the same commands and leave the same store, so
every conversation also shows that nothing is known that is not recorded. After every message the same message is given
once more to a copy of the engine, and at the end of the conversation every write and every message of a run: none may
be acted on twice.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgpack
import numpy as np

from cs_proto.arrays import Array, Location, array_of
from cs_proto.messages import (
    PROTOCOL,
    ApplyPoint,
    Ask,
    Assign,
    AssignPoint,
    Cancel,
    Configure,
    Counters,
    Create,
    CreatePoint,
    Describe,
    Described,
    Died,
    Error,
    Free,
    GatherPoint,
    Hello,
    Locate,
    MergeCallPoint,
    MergeCallReturn,
    Note,
    OptimizerUpdate,
    PointFailed,
    ReadPoint,
    ReducePoint,
    Refused,
    Register,
    Return,
    SparseGradient,
    Value,
    VariableSpec,
    Worker,
    WriteNote,
)
from cs_proto.pace import NAME_AFTER
from cs_proto.records import Record
from cs_proto.records import replace as record_with
from cs_server.engine.engine import Config, Engine
from cs_server.engine.store.address_budget import divided
from cs_server.engine.store.control_log import Control, ControlLog, ControlMemory
from cs_server.events import (
    Allocate,
    Apply,
    Command,
    Commit,
    Compute,
    Computed,
    Dense,
    Event,
    Fill,
    Finished,
    Log,
    MemoryAvailable,
    Needed,
    ProcessDied,
    Received,
    Reserve,
    Send,
    Update,
    Write,
)

MACHINE_NBYTES = 1 << 30
#: How long segments may be there.
ADDRESSES = divided(64 << 40, MACHINE_NBYTES, 2)
CONTROLLER = b"c1"
OBSERVER = b"o1"
DEFAULTS = {
    "SGD": {"learning_rate": 0.1, "momentum": 0.0, "nesterov": 0.0},
    "Adam": {"learning_rate": 0.1, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": 0.0},
}
_ONCE_ONLY = (Ask, Return, MergeCallReturn, Create, Free, Assign, Configure, Cancel)


@dataclass(frozen=True)
class To:
    """Stands for a Send of a record of that kind to ``peer`` with those fields and, if it has an error, one of that
    code whose message has the pattern in it."""

    peer: bytes
    kind: type[Record]
    fields: tuple[tuple[str, Any], ...] = ()
    code: str = ""
    pattern: str = ""

    def fits(self, command: Command) -> bool:
        if not isinstance(command, Send) or command.peer != self.peer or type(command.record) is not self.kind:
            return False
        if any(getattr(command.record, name) != value for name, value in self.fields):
            return False
        error = getattr(command.record, "error", None)
        if not self.code:
            return error is None
        return error is not None and error.exception == self.code and re.search(self.pattern, error.message) is not None


@dataclass(frozen=True)
class Says:
    """Stands for a Log with the pattern in it."""

    pattern: str
    slow: bool = False

    def fits(self, command: Command) -> bool:
        return (
            isinstance(command, Log) and command.slow == self.slow and re.search(self.pattern, command.text) is not None
        )


@dataclass(frozen=True)
class Does:
    """Stands for a Commit of these operations, or a Compute of these components, under any ticket. Which variables
    operations change is the catalogue's tests' business."""

    wanted: Commit | Compute

    def fits(self, command: Command) -> bool:
        if isinstance(command, Commit):
            operations = (o if isinstance(o, Fill) else replace(o, variables=()) for o in command.operations)
            command = replace(command, operations=tuple(operations))
        return isinstance(command, Commit | Compute) and replace(command, ticket=0) == self.wanted


Expected = Command | To | Says | Does


def to(peer: bytes, kind: type[Record], code: str = "", pattern: str = "", **fields: Any) -> To:
    """A record without an error, or with one of ``code`` (``cs.`` is put before project errors) and ``pattern``."""
    return To(peer, kind, tuple(fields.items()), code, pattern)


def commits(*operations: Apply | Write | Fill) -> Does:
    return Does(Commit(0, operations))


def computes(*components: tuple[Array, ...], reduce: Any = None, axis: int = 0) -> Does:
    return Does(Compute(0, reduce, axis, components))


class Playbook:
    """One service seen from outside."""

    def __init__(
        self,
        replicas: int = 2,
        *,
        step_timeout: float | None = None,
        name_after: float = NAME_AFTER,
        device: str = "CPU:0",
    ) -> None:
        self.config = Config(replicas, device, ADDRESSES, 1, 0.0, step_timeout, name_after)
        self.now = 100.0
        self._told: list[tuple[str, object]] = []
        self.commands: list[Command] = []
        self.memory = ControlMemory()
        self._buffer = np.zeros(1 << 20, np.uint8)
        self._engine = Engine(self.config, self.memory)
        #: Whether messages are given once more. Off where a controller leaves: the next one counts its runs from 1.
        self.repeats = True
        self._heard: list[Received] = []
        self._sequence = 0
        self._finished: set[int] = set()
        #: What cannot be had, with what the service says of it.
        self.refuses: dict[Needed, Error] = {}

    def on(self, event: Event, *expected: Expected) -> list[Command]:
        """Give ``event``; exactly ``expected`` must follow, in order."""
        commands = self.does(event)
        if not fits(expected, commands):
            raise AssertionError(self._difference(expected, commands))
        return commands

    def does(self, event: Event) -> list[Command]:
        """Give ``event`` to both engines, and once more to a copy; what the engine answers. It is given the memory that
        it asks for, as far as this is not among ``refuses``; those allocations come first."""
        commands = handled(self._both, event, self.refuses)
        self.commands += commands
        is_once_only = isinstance(event, Received) and isinstance(event.record, _ONCE_ONLY)
        if is_once_only and self.repeats and not any(map(_is_refusal, commands)):
            self._heard.append(event)
            self.repeat(event)
        return commands

    def _both(self, event: Event) -> list[Command]:
        commands = self._engine.handle(event, self.now)
        self._engine.write_down()
        log = ControlLog(self._buffer, turnover=16 << 10)
        another = Engine(self.config, log)
        rebuilt = another.handle(event, self.now)
        another.write_down()
        self._tell(event, commands)
        if [*map(uncounted, rebuilt)] != [*map(uncounted, commands)]:
            raise AssertionError("an engine built anew does otherwise\n" + self._difference(commands, rebuilt))
        if (steady := known(self.memory)) != (logged := known(log)):
            changed = {key for key in steady.keys() | logged.keys() if steady.get(key) != logged.get(key)}
            raise AssertionError(f"the stores differ in {sorted(changed)}\n" + self._difference(commands, commands))
        return commands

    def repeat(self, event: Received) -> None:
        """Give a message once more to a copy of the engine: at most what was said is said again, nothing is done."""
        copy = ControlMemory()
        copy.write(dict(self.memory.items()))
        before = {key: value for key, value in copy.items() if key != b"tally"}
        engine = Engine(self.config, copy)
        again = handled(lambda event: engine.handle(event, self.now), event, self.refuses)
        engine.write_down()
        after = {key: value for key, value in copy.items() if key != b"tally"}
        acted = [c for c in again if not isinstance(c, Log) and c not in self.commands and not _is_refusal(c)]
        if acted or before != after:
            changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
            raise AssertionError(
                f"repeated, {event} is acted on: {acted}; changed {changed}\n" + self._difference(again, again)
            )

    def repeat_all(self) -> None:
        """Every write and every message of a run once more."""
        for event in self._heard:
            self.repeat(event)

    def resume(self) -> list[Command]:
        """What an engine built anew has to do first."""
        return Engine(self.config, ControlLog(self._buffer, turnover=16 << 10)).resume()

    def begin(self, *, available_nbytes: int = 1 << 30) -> Playbook:
        """All workers register, a controller and an observer say hello."""
        for event in self.begin_events(available_nbytes):
            self.does(event)
        return self

    def begin_events(self, available_nbytes: int = 1 << 30) -> list[Event]:
        """The events of ``begin``."""
        return [
            MemoryAvailable(available_nbytes),
            *(hears(w(replica), register(replica)) for replica in range(self.config.replicas)),
            hears(CONTROLLER, Hello(PROTOCOL, "controller", "c", 7)),
            hears(OBSERVER, Hello(PROTOCOL, "observer", "o", 8)),
        ]

    def has(self, *specs: VariableSpec) -> Playbook:
        """The controller has made these variables."""
        for wanted in specs:
            self._sequence += 1
            self.does(hears(CONTROLLER, Create("c", self._sequence, wanted, None)))
        return self

    def has_optimizer(self, kind: str = "SGD", **hyperparameters: float) -> Playbook:
        """The controller has made an optimizer."""
        self._sequence += 1
        pairs = tuple({**DEFAULTS[kind], **hyperparameters}.items())
        self.does(hears(CONTROLLER, Configure("c", self._sequence, 0, kind, pairs, None, -1)))
        return self

    def has_set(self, *variables: int, optimizer: int = 1, run: tuple[int, ...] = (1,)) -> Playbook:
        """In a run of its own all replicas have applied to these variables once."""
        for replica in range(self.config.replicas):
            self.does(asks(replica, first_apply(0, *variables, optimizer=optimizer), run=run))
        self.settle()
        for replica in range(self.config.replicas):
            self.does(returns(replica, 1, run=run))
        self.settle()
        return self

    def has_second_buffers(self, *variables: int) -> Playbook:
        """A worker has asked for the second set of gradient buffers for the dtypes of these variables."""
        self.does(hears(w(0), Locate(0, variables, 1)))
        return self

    def settle(self) -> Playbook:
        """Every commit that is under way is finished."""
        while self.ticket():
            self.does(self.finished())
        return self

    def ticket(self) -> int:
        """The ticket of the commit under way, or 0."""
        begun = [command.ticket for command in self.commands if isinstance(command, Commit)]
        return begun[-1] if begun and begun[-1] not in self._finished else 0

    def finished(self) -> Finished:
        """The commit under way is finished."""
        self._finished.add(self.ticket())
        return Finished(max(self._finished))

    @property
    def results_nbytes(self) -> int:
        """What the recorded outcomes need of the server's arena."""
        return self._engine.results_nbytes

    def writer(self, peer: bytes) -> str:
        """Under which name ``peer`` may write segments."""
        return self._engine.writer(peer)

    def computed(self, *arrays: Array, error: Error | None = None) -> Computed:
        """The last computation has this outcome."""
        tickets = [command.ticket for command in self.commands if isinstance(command, Compute)]
        return Computed(tickets[-1], arrays, error)

    def version(self, number: int) -> int:
        """How many commits have changed a variable, as an observer is told."""
        (answer,) = self.does(hears(OBSERVER, Describe(self.sequence(), (number,), ())))
        assert isinstance(answer, Send)
        assert isinstance(answer.record, Described)
        return answer.record.variables[0].version

    def sequence(self) -> int:
        """The next number of the controller's requests."""
        self._sequence += 1
        return self._sequence

    def copy(self) -> Playbook:
        """One that goes on from here by itself. The engine that lives on there is built anew."""
        made = copy(self)
        made.memory = ControlMemory()
        made.memory.write(dict(self.memory.items()))
        made._buffer = self._buffer.copy()
        made._engine = Engine(self.config, made.memory)
        made.commands, made._told, made._heard = [*self.commands], [*self._told], [*self._heard]
        made._finished, made.refuses = {*self._finished}, {**self.refuses}
        return made

    @property
    def transcript(self) -> list[str]:
        """What was said so far, in lines."""
        return [f"{mark}{_short(item)}" for mark, item in self._told]

    def _tell(self, event: Event, commands: Iterable[Command]) -> None:
        self._told += [("> ", event), *(("    ", command) for command in commands)]

    def _difference(self, expected: Iterable[object], commands: Iterable[object]) -> str:
        lines = difflib.ndiff([_short(item) for item in expected], [_short(item) for item in commands])
        return "\n".join(["the conversation:", *self.transcript[-24:], "expected (-), happened (+):", *lines])


def uncounted(command: Command) -> Command:
    """The same without the number of captured steps, and without the rate: a server that takes over begins anew."""
    if isinstance(command, Send) and isinstance(command.record, Counters):
        return replace(command, record=record_with(command.record, captured=0, uncaptured=(), rate=0.0))
    return command


def known(store: Control) -> dict[bytes, bytes]:
    """What is in a store, but not how many runs were captured: a server that begins captures none at first."""
    return {key: _without_captured(value) if key == b"tally" else value for key, value in store.items()}


def _without_captured(tally: bytes) -> bytes:
    packed: bytes = msgpack.packb(msgpack.unpackb(tally)[:-2])
    return packed


def handled(
    handle: Callable[[Event], list[Command]], event: Event, refuses: Mapping[Needed, Error] = MappingProxyType({})
) -> list[Command]:
    """What follows from ``event`` when it is given what it needs as by the service: that first."""
    given: list[Command] = []
    commands = handle(event)
    while any(isinstance(command, Reserve) for command in commands):
        (reserve,) = commands
        assert isinstance(reserve, Reserve)
        asked = reserve.asked
        for each in reserve.needed:
            if each in refuses:
                asked = replace(asked, refused=(*asked.refused, (each, refuses[each])))
                break
            asked = replace(asked, granted=(*asked.granted, each))
            given.append(each)
        commands = handle(asked)
    return given + commands


def fits(expected: Iterable[Expected], commands: list[Command]) -> bool:
    """Whether the commands are the expected ones, in order."""
    wanted = list(expected)
    return len(wanted) == len(commands) and all(
        e.fits(c) if isinstance(e, To | Says | Does) else e == c for e, c in zip(wanted, commands, strict=True)
    )


def _short(item: object) -> str:
    text = repr(item)
    return text if len(text) < 600 else text[:600] + "..."


def _is_refusal(command: Command) -> bool:
    if not isinstance(command, Send):
        return False
    record = command.record
    codes = ("cs.ContextError", "cs.PeerProtocolError")
    return isinstance(record, Refused) or (isinstance(record, PointFailed) and record.error.exception in codes)


# --- short words for events ---------------------------------------------------------------------------------------


def w(replica: int, incarnation: int = 1) -> bytes:
    """The identity of a worker's socket."""
    return f"w{replica}.{incarnation}".encode()


def hears(peer: bytes, record: Record) -> Received:
    return Received(peer, record)


def worker(replica: int, incarnation: int = 1) -> Worker:
    return Worker(replica, incarnation, 100 + replica, f"CPU:{replica}")


def register(replica: int, incarnation: int = 1) -> Register:
    return Register(PROTOCOL, worker(replica, incarnation))


def dies(replica: int, incarnation: int = 1, cause: str = "SIGKILL") -> ProcessDied:
    return ProcessDied(Died("worker", replica, incarnation, 100 + replica, cause, ""))


def asks(
    replica: int,
    point: Any,
    notes: tuple[Note, ...] = (),
    run: tuple[int, ...] = (1,),
    series: int = 0,
    preserved: bool = False,
) -> Received:
    """A replica asks. Who reads its own update, or calls a merge function, has preserved what it was shown."""
    is_preserved = preserved or isinstance(point, ReadPoint | MergeCallPoint)
    return Received(w(replica), Ask(run, replica, 1, notes, point, series, preserved=is_preserved))


def returns(
    replica: int,
    count: int,
    notes: tuple[Note, ...] = (),
    run: tuple[int, ...] = (1,),
    raises: str = "",
    at: int | None = None,
    series: int = 0,
) -> Received:
    """A replica returns its own number, or raises the exception of that code."""
    error = fault(raises, replica, count if at is None else at) if raises else None
    value = None if raises else result(replica)
    return Received(w(replica), Return(run, replica, 1, notes, count, value, error, series))


def result(replica: int) -> Value:
    return Value(bytes([replica]), ())


def fault(code: str, replica: int = -1, merge_index: int = 0) -> Error:
    return Error(code, f"{code} of replica {replica}", None, f"builtins:{code}", replica, merge_index, "")


def spec(name: str, shape: tuple[int, ...] = (), dtype: str = "float32", aggregation: int = 1) -> VariableSpec:
    return VariableSpec(name, dtype, shape, True, aggregation, 0)


def array(*values: float, dtype: str = "float32") -> Array:
    return array_of(np.array(values, dtype))


def scalar(value: float, dtype: str = "float32") -> Array:
    return array_of(np.array(value, dtype))


def lies(segment: str, offset: int, shape: tuple[int, ...] = (), dtype: str = "float32") -> Array:
    return Array(dtype, shape, Location(segment, offset))


def site(line: int) -> str:
    return f"train.py:{line}"


def applies(k: int, number: int = 1, buffers: int = 0, optimizer: int = 1, line: int = 10) -> ApplyPoint:
    """An apply of a set that has a number."""
    return ApplyPoint(k, site(line), (OptimizerUpdate(optimizer, number, ()),), buffers)


def first_apply(
    k: int,
    *variables: int,
    buffers: int = 0,
    optimizer: int = 1,
    line: int = 10,
    sparse: tuple[SparseGradient, ...] = (),
) -> ApplyPoint:
    return ApplyPoint(k, site(line), (OptimizerUpdate(optimizer, 0, variables, sparse),), buffers)


def assigns(
    k: int, value: Array, variable: int = 1, op: Any = "assign_add", checked: bool = False, line: int = 20
) -> AssignPoint:
    return AssignPoint(k, site(line), variable, op, value, checked)


def notes_write(
    k: int,
    number: int,
    value: Array,
    rows: Array | None = None,
    variable: int = 1,
    op: Any = "scatter_add",
    line: int = 25,
) -> WriteNote:
    """A write that needs no agreement."""
    return WriteNote(k, number, site(line), variable, op, value, rows)


def makes(k: int, what: VariableSpec, value: Array) -> CreatePoint:
    return CreatePoint(k, site(5), what, value)


def reduces(k: int, *arrays: Array, op: Any = "SUM", line: int = 31) -> ReducePoint:
    return ReducePoint(k, site(line), op, arrays)


def gathers(k: int, *arrays: Array, axis: int = 0, line: int = 32) -> GatherPoint:
    return GatherPoint(k, site(line), axis, arrays)


def merge_calls(k: int, arguments: bytes = b"", line: int = 40) -> MergeCallPoint:
    return MergeCallPoint(k, site(line), Value(arguments, ()))


def reads(k: int, line: int = 50) -> ReadPoint:
    return ReadPoint(k, site(line))


def allocates(
    segment: str, start: int = 0, stop: int = 0, writer: str = "", reservation: int = ADDRESSES.slab
) -> Allocate:
    return Allocate(segment, reservation, writer, start, stop)


def steps(
    t: int, ranges: tuple[tuple[int, int], ...], buffers: tuple[int, ...] = (0, 0), **hyperparameters: float
) -> Apply:
    """The ``t``-th step of optimizer 1, which is SGD, on float32 variables."""
    part = Dense(
        dtype="float32",
        ranges=ranges,
        parameters="parameters/float32",
        slots=(),
        gradients=tuple(f"gradients/{replica}/{b}/float32" for replica, b in enumerate(buffers)),
    )
    return Apply((Update("sgd", tuple({**DEFAULTS["SGD"], **hyperparameters}.items()), t, (part,)),))


def writes(target: Array, op: Any, *sources: Array, reduce: Any = None, rows: Array | None = None) -> Write:
    return Write(target, op, reduce, sources, rows)
