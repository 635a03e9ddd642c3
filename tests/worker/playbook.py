"""Scenarios of a worker's session: an event, the outputs that follow, and what a new server would be told then.

A :class:`Line` of a scenario is one event. :class:`Play` gives the events of a scenario to a core, one after the other,
and :func:`cuts` plays each scenario up to each of its lines, where a test lets something else happen.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.harness.introduced import introduction

from cs_proto import messages
from cs_proto.arrays import bytes_array
from cs_proto.failures import error_of
from cs_proto.messages import MergeCallPoint, ReadPoint, Return, Run, RunId, Value
from cs_proto.peers import SERVER
from cs_proto.records import Record
from cs_worker.session.core import Drop, Execute, Output, SendServer, SendSupervisor, SessionCore, Work

CONTROLLER = b"cafe"
CLIENT = "afe"
HOLDER, NEXT_HOLDER, OTHER_WORKER = b"w0.1", b"w0.2", b"w2.1"
OTHER_CONTROLLERS = b"cbee", b"cbeef"
#: The processes that the supervisor has introduced to the worker.
PEERS = {name: introduction(name) for name in (CONTROLLER, *OTHER_CONTROLLERS, HOLDER, NEXT_HOLDER, OTHER_WORKER)}

WORKER = messages.Worker(1, 1, 7, "cpu:0")
REGISTER = messages.Register(messages.PROTOCOL, WORKER)
REGISTERED = messages.Registered(2, "cpu:0", (WORKER, WORKER))


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hears:
    """A record comes."""

    sender: bytes
    record: Record


@dataclass(frozen=True)
class Takes:
    """The worker is idle and takes its next work, which must be this; a run begins."""

    work: Work


@dataclass(frozen=True)
class Idles:
    """The worker has done its work, and nothing may begin."""


@dataclass(frozen=True)
class Says:
    """The server is sent a record that it does not answer, and which ends ``path``."""

    path: RunId
    record: Record


@dataclass(frozen=True)
class Ends:
    """A run ends with this record: the server gets a mark where one may stand for it."""

    run: Run
    record: Return


@dataclass(frozen=True)
class Waits:
    """A wait begins."""

    question: Record | None
    merge_point: RunId | None = None


@dataclass(frozen=True)
class Claims:
    """The innermost wait ends with this answer."""

    answer: Record


@dataclass(frozen=True)
class Returns:
    """The nested run that was carried out has returned."""


@dataclass(frozen=True)
class IsOver:
    """The worker knows by an answer that a nested run is over."""

    run: RunId


Event = Hears | Takes | Idles | Says | Ends | Waits | Claims | Returns | IsOver


@dataclass(frozen=True)
class Line:
    """An event of a scenario, its outputs, and what a server is told that begins to serve after it."""

    event: Event
    outputs: tuple[Output, ...]
    told: tuple[Record, ...]


def line(event: Event, *outputs: Output, told: Sequence[Record] = ()) -> Line:
    return Line(event, outputs, tuple(told))


# --- playing ----------------------------------------------------------------------------------------------------------


class Play:
    """A core, registered unless ``is_registered`` says otherwise, and what has happened to it."""

    def __init__(self, *, is_registered: bool = True) -> None:
        self.core = SessionCore(REGISTER, PEERS)
        self.transcript: list[str] = []
        #: The runs of which a mark said how they ended, and how many records the server was sent.
        self.marked: list[int] = []
        self.sent = 0
        #: The controllers' work that the core has queued, as it must be.
        self.queued: list[tuple[bytes, Work]] = []
        # The merge points of the waits, and None for a nested run; innermost last.
        self._open: list[RunId | None] = []
        if is_registered:
            ready = SendSupervisor(messages.Ready())
            self.on(Hears(SERVER, REGISTERED), ready)

    def on(self, event: Event, *expected: Output) -> None:
        """Let ``event`` happen; exactly the ``expected`` outputs must follow, in order."""
        outputs = self._happen(event)
        self.sent += sum(isinstance(output, SendServer) for output in outputs)
        self.transcript += [f"> {event}", *(f"    {output}" for output in outputs)]
        self.expect(outputs, expected)

    def play(self, lines: Sequence[Line]) -> None:
        """All events of a scenario, or the rest of one."""
        for each in lines:
            self.on(each.event, *each.outputs)

    def expect(self, outputs: Sequence[Output], expected: Sequence[Output]) -> None:
        """Outputs of the core are as expected."""
        if [*outputs] != [*expected]:
            lines = difflib.ndiff([*map(str, expected)], [*map(str, outputs)])
            raise AssertionError("\n".join([*self.transcript, "expected (-), happened (+):", *lines]))

    def expect_told(self, records: Sequence[Record]) -> None:
        """A server that begins to serve now is told these records again."""
        self.expect(self.core.server_serves(), [SendServer(record) for record in records])

    def unwind(self) -> list[Output]:
        """All waits and nested runs end without an answer, and so does the run: what follows from its end."""
        while self._open:
            if self._open.pop() is None:
                self.core.end_nested_run()
            else:
                self.core.end_wait()
        return self.core.end_run()

    def _happen(self, event: Event) -> list[Output]:
        core = self.core
        match event:
            case Hears(sender, record):
                outputs = core.hear(sender, record)
                self._follow(sender, record, outputs)
                return outputs
            case Takes(work):
                outputs = core.end_run()
                taken = core.next_work()
                assert taken is not None, "\n".join([*self.transcript, f"{work} may not begin"])
                assert taken == self.queued.pop(0)
                assert taken[1] == work
                if isinstance(work, Run):
                    core.begin_run(taken[0], work)
                return outputs
            case Idles():
                outputs = core.end_run()
                assert core.next_work() is None, "\n".join([*self.transcript, "something may begin"])
                return outputs
            case Says(path, record):
                self.sent += 1
                core.note_said(path, record, self.sent)
            case Ends(run, record):
                assert record.value is not None
                mark = core.returns.mark_of(run, record.notes, record.count, record.value, self.sent)
                if mark is not None:
                    core.note_marked(run.run, mark[1])
                    self.marked.append(run.run[0])
                else:
                    self.sent += 1
                    core.note_said(run.run, record, self.sent)
            case Waits(question, merge_point):
                self.sent += question is not None
                core.begin_wait(question, merge_point)
                self._open.append(merge_point or ())
            case Claims(answer):
                found = core.claim(lambda record: record if record == answer else None)
                assert found == answer, "\n".join([*self.transcript, f"{answer} is not there"])
                core.end_wait()
                if point := self._open.pop():
                    core.leave_merge_call(point)
            case Returns():
                assert self._open.pop() is None
                core.end_nested_run()
            case IsOver(run):
                core.note_over(run)
        return []

    def _follow(self, sender: bytes, record: Record, outputs: Sequence[Output]) -> None:
        """Keep account of the queue and of nested runs, by what the outputs say."""
        for output in outputs:
            if isinstance(output, Execute):
                self._open.append(None)
            if isinstance(output, Drop):
                self.queued = [entry for entry in self.queued if entry != (output.sender, output.record)]
        if sender[:1] == b"c" and isinstance(record, Work) and not outputs:
            self.queued.append((sender, record))


def cuts(scenario: Sequence[Line]) -> Iterator[tuple[Play, Sequence[Line], Sequence[Line]]]:
    """The scenario played up to each of its lines, from none to all; with the lines that were played, and the rest."""
    for at in range(len(scenario) + 1):
        play = Play()
        play.play(scenario[:at])
        yield play, scenario[:at], scenario[at:]


# --- records ----------------------------------------------------------------------------------------------------------


def run(*path: int) -> Run:
    """A run, or a nested one."""
    return Run(path, path[0], 1, 7, bytes(16), None, False, bytes_array(b""), ())


def step(number: int, series: int) -> Run:
    """A step of a series."""
    return Run((number,), number, 1, 7, bytes(16), None, False, bytes_array(b""), (), series, 2)


def returned(*path: int) -> Return:
    """What this replica returns."""
    return Return(path, 1, 1, (), 0, Value(b"", ()), None)


def ended(of: Run, value: bytes = b"") -> Return:
    """What this replica returns, with the value's bytes."""
    return Return(of.run, 1, 1, (), 0, Value(value, ()), None, of.series, of.lookahead, CLIENT)


def asks_commit(k: int, *path: int) -> messages.Ask:
    """The question whether all before point ``k`` is committed."""
    return messages.Ask(path, 1, 1, (), ReadPoint(k, "train.py:1"))


def asks_merge(k: int, *path: int) -> messages.Ask:
    """The question of a merge_call."""
    return messages.Ask(path, 1, 1, (), MergeCallPoint(k, "train.py:2", Value(b"", ())))


def merge_returned(k: int, *path: int) -> messages.MergeCallReturn:
    """What the holder of a token says last."""
    return messages.MergeCallReturn(path, k, (), error_of(ValueError("no")))
