"""Returns by mark: when one may be left, and that no Return is lost or changed by it, however late the server looks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import cast

import numpy as np
import pytest
from tests.worker.playbook import CONTROLLER, PEERS, REGISTER, REGISTERED, ended, run, step

from cs_proto.arrays import Array, Location, array_of, bytes_array
from cs_proto.errors import PeerProtocolError
from cs_proto.failures import error_of
from cs_proto.marks import BASES, Bases, base_of
from cs_proto.messages import (
    ApplyPoint,
    Ask,
    AssignPoint,
    ClientGone,
    Describe,
    Note,
    OptimizerChange,
    OptimizerUpdate,
    ReadPoint,
    Return,
    Run,
    Serving,
    SparseGradient,
    StepFinished,
    Value,
)
from cs_proto.peers import SERVER, SUPERVISOR
from cs_proto.records import Record, altered
from cs_proto.records import replace as changed
from cs_runtime.transport.rings import MARK_NBYTES
from cs_worker.session.conversation import Conversation
from cs_worker.session.core import SessionCore
from cs_worker.session.interrupts import Interrupts
from cs_worker.session.marked_returns import MarkedReturns
from cs_worker.session.session import Link

SERVING = Serving("/run", "")
APPLY = ApplyPoint(0, "train.py:1", (OptimizerUpdate(1, 1, ()),), 0)
SPARSE = SparseGradient(1, array_of(np.ones((1, 2))), array_of(np.zeros(1, np.int64)))
ROWS = changed(APPLY, updates=(OptimizerUpdate(1, 1, (), (SPARSE,)),))
ASSIGN = AssignPoint(0, "train.py:1", 1, "assign", bytes_array(b"1"), False)

# --- each condition alone -----------------------------------------------------------------------------------------

BASE = changed(ended(step(5, 5), b"five"), notes=(APPLY,), count=1)
RUN = step(6, 5)
SIX = Value(b"six", ())


def taken(returns: MarkedReturns) -> None:
    """The server says that the step is over."""
    returns.is_taken = True


@dataclass
class Case:
    """A worker that has returned from step 5 in full, and now returns from another."""

    base: Return = BASE
    controller: bytes = CONTROLLER
    run: Run = RUN
    notes: list[Note] = field(default_factory=lambda: [changed(APPLY)])
    count: int = 1
    value: Value = SIX
    sent: int = 9
    between: Callable[[MarkedReturns], object] = taken

    def body(self) -> bytes | None:
        returns = MarkedReturns()
        returns.controller = CONTROLLER
        returns.said(self.base, 9)
        self.between(returns)
        returns.controller = self.controller
        mark = returns.mark_of(self.run, self.notes, self.count, self.value, self.sent)
        return None if mark is None else mark[0]


def nothing(returns: MarkedReturns) -> None:
    """The server does not say that the step is over."""


def another_mark(returns: MarkedReturns) -> None:
    taken(returns)
    mark = returns.mark_of(RUN, [APPLY], 1, SIX, 9)
    assert mark is not None
    assert mark[1]() == changed(BASE, run=RUN.run, value=SIX)


def another_server(returns: MarkedReturns) -> None:
    returns.forget()
    taken(returns)


def worse(returned: Return) -> Callable[[MarkedReturns], object]:
    def between(returns: MarkedReturns) -> None:
        taken(returns)
        returns.said(returned, 9)
        taken(returns)

    return between


CHANGES = (OptimizerChange(1, (("learning_rate", 0.5),)),)
FAILED = changed(BASE, value=None, error=error_of(ValueError("no")))
WITH_ARRAY = Value(b"six", (bytes_array(b"1"),))


def test_a_mark_names_the_base_and_has_the_value() -> None:
    assert Case().body() == (5).to_bytes(8, "little") + b"six"
    assert Case(value=Value(b"", ())).body() == (5).to_bytes(8, "little")
    assert Case(run=step(7, 5), between=lambda r: (another_mark(r), taken(r))).body() is not None


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(between=nothing), id="the server may not have taken the base"),
        pytest.param(Case(between=another_mark), id="the server may not have taken the mark before"),
        pytest.param(Case(between=another_server), id="another server"),
        pytest.param(Case(sent=10), id="something else was sent"),
        pytest.param(Case(controller=b"cbeef"), id="another controller"),
        pytest.param(Case(run=step(6, 6)), id="another series"),
        pytest.param(Case(run=run(6)), id="a run on its own"),
        pytest.param(Case(run=changed(RUN, lookahead=3)), id="another lookahead"),
        pytest.param(Case(run=changed(RUN, changes=CHANGES)), id="it brings hyperparameters"),
        pytest.param(Case(count=2), id="another number of merge points"),
        pytest.param(Case(notes=[]), id="fewer notes"),
        pytest.param(Case(notes=[APPLY, APPLY]), id="more notes"),
        pytest.param(Case(notes=[changed(APPLY, buffers=1)]), id="another note"),
        pytest.param(Case(value=WITH_ARRAY), id="a value with an array"),
        pytest.param(Case(base=FAILED), id="the base is an error"),
        pytest.param(Case(base=changed(BASE, value=WITH_ARRAY)), id="the base has an array"),
        pytest.param(Case(base=changed(BASE, changes=CHANGES)), id="the base brings hyperparameters"),
        pytest.param(Case(base=changed(BASE, notes=(ROWS,)), notes=[ROWS]), id="the base has rows"),
        pytest.param(Case(base=changed(BASE, notes=(ASSIGN,)), notes=[ASSIGN]), id="the base has a value"),
        pytest.param(Case(base=ended(run(6, 0, 0)), run=run(6, 0, 1), notes=[], count=0), id="both are nested"),
        pytest.param(Case(base=ended(run(5)), run=run(6, 0, 0), notes=[], count=0), id="it is nested"),
        pytest.param(Case(between=worse(FAILED)), id="an error was returned since"),
        pytest.param(Case(between=worse(ended(run(6, 0, 0)))), id="a nested run has returned since"),
    ],
)
def test_each_condition_alone_has_the_return_sent(case: Case) -> None:
    assert case.body() is None


def rows_at(offset: int, rows: int) -> ApplyPoint:
    """An apply of rows whose values and indices lie at ``offset`` and behind that."""
    values = Array("float32", (rows, 2), Location("arenas/1", offset))
    indices = Array("int64", (rows,), Location("arenas/1", offset + 1024))
    return changed(APPLY, updates=(OptimizerUpdate(1, 1, (), (SparseGradient(1, values, indices),)),))


def test_rows_at_places_that_take_turns_have_marks_with_their_own_places() -> None:
    bases, returns = Bases(), MarkedReturns()
    returns.controller = CONTROLLER
    applies = [rows_at(offset, rows) for offset, rows in ((0, 3), (4096, 3), (8192, 2))]
    full = changed(BASE, notes=(applies[0],))
    bases.keep(full)
    returns.said(full, 9)
    for number in range(6, 18):
        taken(returns)
        given, value = step(number, 5), Value(b"%d" % number, ())
        # Some are other objects at the same place.
        note = changed(applies[number % 3]) if number % 5 == 0 else applies[number % 3]
        mark = returns.mark_of(given, [note], 1, value, 9)
        assert mark is not None
        wanted = changed(full, run=given.run, value=value, notes=(note,))
        assert mark[1]() == bases.returned(number, mark[0]) == wanted


def test_what_was_known_of_a_base_that_is_not_kept_is_forgotten() -> None:
    returns = MarkedReturns()
    returns.controller = CONTROLLER
    returns.said(BASE, 9)
    taken(returns)
    assert returns.mark_of(RUN, [APPLY], 1, SIX, 9) is not None
    for number in range(7, 7 + BASES):
        returns.said(changed(BASE, run=(number,), count=2), 9)
        taken(returns)
    assert returns.mark_of(RUN, [APPLY], 1, SIX, 9) is None


# --- nothing is lost, and nothing changes ---------------------------------------------------------------------------


class Mail:
    """What a worker has said to a server that has not looked yet: messages in order, and one mark."""

    def __init__(self) -> None:
        self.messages: deque[Record] = deque()
        self.mark: tuple[int, bytes] | None = None
        self.bases = Bases()

    def take(self) -> Record | None:
        """The mark first, as a server reads its mailboxes."""
        if self.mark is not None:
            (number, body), self.mark = self.mark, None
            if (base := self.bases.get(base_of(body))) is None:
                raise PeerProtocolError(f"the mark of run {number} names a Return that the server does not have")
            return altered(base, run=(number,), value=Value(body[8:], ()))
        if not self.messages:
            return None
        record = self.messages.popleft()
        if isinstance(record, Return):
            self.bases.keep(record)
        return record


class ModelLink:
    """A worker's link to a server, which another one may replace, and to a script."""

    def __init__(self) -> None:
        self.sent = 0
        self.marks = 0
        self.mail = Mail()
        self.coming: deque[tuple[bytes, Record]] = deque()
        #: What the worker has said to this server, in order and in full.
        self.said: list[Record] = []

    def receive(self, timeout: float | None, quiet: bytes | None = None) -> tuple[bytes, Record] | None:
        return self.coming.popleft() if self.coming else None

    def send_server(self, record: Record) -> None:
        self.sent += 1
        self.mail.messages.append(record)
        self.said.append(record)

    def offer_mailbox(self) -> None:
        self.sent += 1

    def mark_server(self, number: int, body: bytes) -> bool:
        if len(body) > MARK_NBYTES:
            return False
        self.mail.mark = (number, body)
        self.marks += 1
        return True

    def send_supervisor(self, record: Record) -> None:
        """Nobody listens."""

    def replaced(self) -> None:
        """The server dies, with what it has not taken."""
        self.mail, self.said = Mail(), []


class World:
    """A worker, a script that keeps to the protocol, and a server whose looks ``decide`` puts off."""

    def __init__(self, decide: Callable[[int], int]) -> None:
        """``decide(n)`` is a number below ``n``."""
        self.decide = decide
        self.functions = (1, 2, 4, 12)[decide(4)]
        self.link = ModelLink()
        self.talk = Conversation(SessionCore(REGISTER, PEERS), cast("Link", self.link), Interrupts())
        self.talk.session.registered = REGISTERED
        self.heard: list[Record] = []
        self.ends: dict[int, Return] = {}
        self.number = 0
        #: What the functions bring: a worker keeps it, and brings the same object again.
        self.applies = [changed(APPLY, site=f"train.py:{n}") for n in range(self.functions)]
        #: The last run of which a server has the Return: the next server knows it, too.
        self.taken = 0
        self.is_dead = False

    def server_looks(self) -> None:
        """It takes as much as it likes."""
        while not self.is_dead and self.decide(3) and self.server_takes():
            pass

    def server_takes(self) -> bool:
        record = self.link.mail.take()
        if record is not None:
            self.heard.append(record)
            if isinstance(record, Return):
                assert record == self.ends[record.run[0]]
                self.taken = max(self.taken, record.run[0])
        return record is not None

    def server_has(self, number: int) -> None:
        """Let the server look until it has that Return."""
        while self.taken < number:
            assert self.server_takes(), f"the Return of run {number} is lost"

    def check(self) -> None:
        """All that was said to this server has come, in order."""
        while self.server_takes():
            pass
        assert [record for record in self.heard if record in self.link.said] == self.link.said

    # --- what may happen --------------------------------------------------------------------------------------------

    def server_dies(self) -> None:
        self.server_looks()
        self.is_dead = True

    def server_serves(self) -> None:
        """Another one does, and has nothing that the one before did not take."""
        self.is_dead = False
        self.heard.clear()
        self.link.replaced()
        if self.decide(2):
            self.link.offer_mailbox()
        self.link.coming.append((SUPERVISOR, SERVING))
        self.talk._receive(0)

    def carries_out(self, run: Run) -> None:
        """The worker's turn."""
        self.talk.begin_run(CONTROLLER, run)
        if self.decide(12) == 0:
            self.link.send_server(Ask(run.run, 1, 1, (), ReadPoint(0, "train.py:1")))
        if self.decide(12) == 0:
            self.link.send_server(Describe(1, (), ()))
        self.server_looks()
        if self.decide(20) == 0:
            self.server_dies()
        # With twelve functions there are more kinds of Returns than bases.
        notes: list[Note] = [self.applies[self.decide(self.functions)]] if self.decide(12) else [ASSIGN]
        if self.decide(6) == 0:  # it was forgotten
            notes = [changed(note) for note in notes]
        fails = self.decide(20) == 0
        arrays = (bytes_array(b"1"),) if self.decide(12) == 0 else ()
        value = Value(b"%d" % run.run[0] * (2000 if self.decide(12) == 0 else 1), arrays)
        full = changed(ended(run), notes=tuple(notes), count=len(notes), value=value, changes=run.changes)
        if fails:
            full = changed(full, value=None, error=error_of(ValueError("no")))
        self.ends[run.run[0]] = full
        if fails or not self.talk.mark_return(run, notes, len(notes), value):
            self.talk.say(run.run, full)
        else:
            self.link.said.append(full)
        self.talk._carry_out(self.talk.session.end_run())

    def next_of(self, series: int) -> Run:
        self.number += 1
        made = step(self.number, series or self.number) if series >= 0 else run(self.number)
        return changed(made, changes=CHANGES) if self.decide(12) == 0 else made

    def hears(self, sender: bytes, record: Record) -> None:
        self.link.coming.append((sender, record))
        self.talk._receive(0)
        self.server_looks()

    def runs(self) -> None:
        """The script runs a function and gets its result."""
        self.hears(CONTROLLER, self.next_of(-1))
        self.works()
        self.ends_with(self.number)

    def works(self) -> None:
        """The worker does what it may."""
        while (work := self.talk.session.next_work()) is not None:
            assert isinstance(work[1], Run)
            self.carries_out(work[1])

    def ends_with(self, number: int) -> None:
        """The script waits for the result of a run, however many servers that takes."""
        while self.is_dead or self.decide(12) == 0:
            self.server_dies()
            self.server_serves()
        self.server_has(number)

    def loops(self) -> None:
        """The script goes through the steps of a series, sent ahead. It may send a run on its own before they are
        over."""
        first, left = self.number + 1, 1 + self.decide(12)
        ahead = deque[Run]()
        while left or ahead:
            while left and len(ahead) <= 2:
                ahead.append(self.next_of(first))
                self.hears(CONTROLLER, ahead[-1])
                left -= 1
            if all(run.series for run in ahead) and self.decide(6) == 0:
                ahead.append(self.next_of(-1))
                self.hears(CONTROLLER, ahead[-1])
            self.works()
            run = ahead.popleft()
            self.ends_with(run.run[0])
            if run.series:
                self.hears(SERVER, StepFinished(run.run, False))
        self.works()


@pytest.mark.parametrize("seed", range(5))
def test_what_the_server_makes_of_marks_is_what_would_have_been_sent(seed: int) -> None:
    random, marks, runs = Random(seed), 0, 0
    for _ in range(40):
        world = World(random.randrange)
        for _ in range(20):
            match random.randrange(10):
                case 0:
                    world.hears(SUPERVISOR, ClientGone("another"))
                case 1 | 2 | 3 | 4:
                    world.loops()
                case _:
                    world.runs()
        world.check()
        marks, runs = marks + world.link.marks, runs + world.number
    assert 0.1 < marks / runs < 0.8
