"""The program of a server: for which marks it looks, what it leaves behind, and when all marks are mail again."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from cs_proto import marks, records
from cs_proto.arrays import Array, Location
from cs_proto.frozen import with_changes
from cs_proto.messages import ApplyPoint, Mailbox, OptimizerUpdate, Return, SparseGradient, Value
from cs_runtime.transport.mailboxes import Mailboxes
from cs_runtime.transport.rings import BODY, HEAD, MARK, NBYTES, Mark
from cs_server.compute.programs import Instruction, Op
from cs_server.engine.step_plans import NextStep
from cs_server.engine.store.account import KINDS, Account, account_nbytes
from cs_server.events import Apply, Commit, Rows, Update
from cs_server.step_program import StepProgram

PEERS = (b"w0.1.x", b"w1.1.y")


class Runner:
    """Takes the place of the memory of a server: a commit counts."""

    def __init__(self) -> None:
        self.commits = np.zeros(1, np.int64)
        self.tickets: list[int] = []
        self.can = True
        self.alarm = np.zeros(1, np.int64)
        self.alarm_address = self.alarm.__array_interface__["data"][0]
        self.heeded: list[int] = []
        #: The commits that were prepared, and those of which only the numbers were set.
        self.prepared: list[Commit] = []
        self.numbered: list[object] = []
        self.tables = 0
        self.taken: list[list[list[int]]] = []
        self.can_take = True

    def prepare(self, command: Commit) -> Runner | None:
        self.prepared.append(command)
        return self if self.can else None

    def set_numbers(self, operations: object) -> None:
        self.numbered.append(operations)

    def take(self, places: list[list[int]]) -> bool:
        self.taken.append(places)
        return self.can_take

    def set_ticket(self, ticket: int) -> None:
        self.tickets.append(ticket)

    def heed_alarm(self, command: Commit, step: tuple[str, int] | None) -> bool:
        if not self.alarm[0]:
            return False
        self.heeded.append(command.ticket)
        self.alarm[0] = 0
        return True

    def instructions(self, command: Commit, prepared: Runner) -> list[Instruction]:
        return [(Op.ADD, self.commits.__array_interface__["data"][0], 1, 0)]


class World:
    """A server and two workers with their mailboxes, in one process."""

    def __init__(self, stack: ExitStack) -> None:
        self.server = Mailboxes[bytes](select.poll(), 0.0, rings_late=True)
        self.workers = [Mailboxes[str](select.poll(), 0.0) for _ in PEERS]
        for each in (self.server, *self.workers):
            stack.callback(each.close)
        for number, (worker, peer) in enumerate(zip(self.workers, PEERS, strict=True), 1):
            memory = os.memfd_create("mailbox")
            os.ftruncate(memory, NBYTES)
            made = [memory, *(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))]
            copies = [os.dup(each) for each in made]
            assert worker.offer("server", Mailbox(number, False, ""), made) is not None
            worker.sent("server")
            answer = self.server.open(peer, Mailbox(number, False, ""), copies)
            self.server.sent(peer)
            worker.taken("server", answer)
        self.runner: Any = Runner()
        self.account = Account(np.zeros(account_nbytes(2), np.uint8), 2)
        self.done = 0
        self.program = StepProgram(self.server, self.runner, self.account, self.on_done, self.on_other)
        #: The steps of another kind that may be prepared, by base.
        self.others: dict[int, NextStep] = {}
        self.alike: dict[object, object] = {}
        self.bases = {peer: marks.Bases() for peer in PEERS}
        for kind in (0, 1):
            for peer, each in zip(PEERS, self.returns(kind), strict=True):
                assert self.bases[peer].keep(each)

    @staticmethod
    def returns(kind: int) -> tuple[Return, ...]:
        """What steps of kind 0 have brought, with base 3, and those of kind 1, with base 2."""
        return tuple([Return((3 - kind,), n, 1, (), kind, Value(b"", ()), None) for n in range(len(PEERS))])

    def on_done(self) -> None:
        self.done += 1

    def on_other(self, peer: bytes, base: int) -> None:
        assert peer == PEERS[0]
        if base in self.others:
            assert self.program.prepare(self.others[base], self.bases)

    def next_step(self, run: int, kind: int = 0, *, is_of_series: bool = True) -> NextStep:
        counts = (run, *[kind] * (KINDS - 1))
        commit = Commit(run + 100 + kind, ())
        alike = self.alike.setdefault((kind, is_of_series), object())
        return NextStep(run, kind, counts, self.returns(kind), is_of_series, PEERS, commit, alike)

    def prepare(self, run: int, *, is_of_series: bool = True) -> bool:
        return self.program.prepare(self.next_step(run, is_of_series=is_of_series), self.bases)

    def mark(self, replica: int, run: int, value: bytes = b"", base: int = 3) -> None:
        assert self.workers[replica].mark("server", run, marks.marked(base, value))

    def heard(self, replica: int) -> object:
        """What the worker takes next."""
        found = self.workers[replica].take()
        return None if found is None else found[1]

    def mail(self) -> list[tuple[bytes, object]]:
        """What the server takes."""
        self.server.is_there()
        self.server.awake(())
        return list(iter(self.server.take, None))  # type: ignore[arg-type]


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack)


@pytest.mark.parametrize("is_of_series", [True, False])
def test_an_alarm_is_heeded_before_the_end_of_the_step_is_said(world: World, is_of_series: bool) -> None:
    said: list[list[object]] = []
    heed = world.runner.heed_alarm

    def heed_alarm(command: Commit, step: tuple[str, int] | None) -> bool:
        is_set = heed(command, step)
        if is_set:
            said.append([world.heard(replica) for replica in range(2)])
        return bool(is_set)

    world.runner.heed_alarm = heed_alarm
    for run in (4, 5, 6):
        assert world.prepare(run, is_of_series=is_of_series)
        world.runner.alarm[0] = run == 5
        for replica in range(2):
            world.mark(replica, run)
        assert world.mail() == []
        assert (world.done, world.runner.commits[0]) == (run - 3, run - 3)
        assert [world.heard(replica) for replica in range(2)] == [Mark(run, b"") if is_of_series else None] * 2
    assert world.runner.heeded == [105]
    assert said == [[None, None]]


@pytest.mark.parametrize("is_of_series", [True, False])
def test_steps_are_carried_out_when_all_marks_are_there(world: World, is_of_series: bool) -> None:
    for run in range(4, 40):
        assert world.prepare(run, is_of_series=is_of_series)
        world.mark(run % 2, run, b"%d" % run)
        assert world.mail() == []
        assert (world.done, world.program.is_ready) == (run - 4, True)
        world.mark(1 - run % 2, run, b"other")
        assert world.mail() == []
        assert (world.done, world.program.is_ready) == (run - 3, False)
        assert (world.account.begun, world.runner.commits[0]) == (run - 3, run - 3)
        assert world.account.kind(run) == (0, (run, *[0] * (KINDS - 1)))
        values = [b"%d" % run, b"other"]
        assert [body[marks.BASE_NBYTES :] for body in world.account.bodies(run)] == values[:: -1 if run % 2 else 1]
        ends = [Mark(run, b"") if is_of_series else None] * 2
        assert [world.heard(replica) for replica in (0, 1)] == ends
    assert world.runner.tickets == list(range(104, 140))


def test_marks_that_are_not_all_there_are_heard_when_something_else_comes(world: World) -> None:
    assert world.prepare(4)
    world.mark(0, 4, b"x")
    assert world.workers[1].post("server", [b"message"])
    assert world.mail() == [(PEERS[1], [b"message"]), (PEERS[0], Mark(4, marks.marked(3, b"x")))]
    world.mark(1, 4)
    assert world.mail() == [(PEERS[1], Mark(4, marks.marked(3, b"")))]
    assert world.done == world.account.begun == 0


def test_steps_of_another_kind_are_carried_out_when_their_marks_are_there(world: World) -> None:
    """Whether a step of one kind or of the other was expected."""
    bases = [3, 2, 2, 3, 3, 2, 3, 2]
    for run, base in enumerate(bases, 10):
        assert world.program.prepare(world.next_step(run, kind=run % 2), world.bases)
        world.others = {3: world.next_step(run, kind=0), 2: world.next_step(run, kind=1)}
        for replica in (1, 0):
            world.mark(replica, run, base=base)
        assert world.mail() == []
        assert (world.done, world.account.begun, world.runner.commits[0]) == (run - 9,) * 3
        assert world.account.kind(run)[0] == 3 - base
        assert world.account.bodies(run) == [marks.marked(base, b"")] * 2
        assert world.runner.tickets[-1] == run + 100 + 3 - base
        assert [world.heard(replica) for replica in (0, 1)] == [Mark(run, b"")] * 2


def rows_of(replica: int, place: marks.Place) -> ApplyPoint:
    """The gradient of rows of variable 1 that lie there."""
    arena = f"arena/{replica}"
    values = Array("float32", (place.rows, 4), Location(arena, place.values))
    gradient = SparseGradient(1, values, Array("int64", (place.rows,), Location(arena, place.indices)))
    return ApplyPoint(0, "", (OptimizerUpdate(1, 1, (), (gradient,)),), 0)


def with_rows(world: World, run: int, name: str = "") -> NextStep:
    """The step of a run whose replicas bring rows; each worker has a base of that."""
    place, gradients, returns = marks.Place(3, 64, 128), [], []
    for replica, peer in enumerate(PEERS):
        returned = Return((3,), replica, 1, (rows_of(replica, place),), 1, Value(b"", ()), None, name=name)
        assert world.bases[peer].keep(returned)
        (gradient,) = marks.sparse_of(returned.notes)
        gradients.append((gradient.values, gradient.indices))
        returns.append(returned)
    table = Rows("float32", 0, (9, 4), "w", (), tuple(gradients))
    commit = Commit(run + 100, (Apply((Update("sgd", (), 1, (), (table,)),)),))
    world.runner.tables = 1
    return with_changes(world.next_step(run), returns=tuple(returns), commit=commit)


@pytest.mark.parametrize("can_take", [True, False])
def test_the_marks_say_where_rows_lie(world: World, can_take: bool) -> None:
    world.runner.can_take = can_take
    assert world.program.prepare(with_rows(world, 4), world.bases)
    bodies = [marks.marked(3, b"value", None, [marks.Place(replica, 192, 256)]) for replica in range(2)]
    for replica in range(2):
        assert world.workers[replica].mark("server", 4, bodies[replica])
    mail = sorted(world.mail())
    assert world.runner.taken == [[[0, 192, 256], [1, 192, 256]]]
    assert (world.done, world.account.begun, world.runner.commits[0]) == (can_take,) * 3
    if can_take:
        assert mail == []
        assert world.account.bodies(4) == bodies
    else:  # the engine hears them
        assert mail == [(peer, Mark(4, body)) for peer, body in zip(PEERS, bodies, strict=True)]


def test_each_step_has_rows_of_its_own(world: World) -> None:
    """Also if only the numbers of its commit are set. After something else everything is found again."""
    alike, prepared = with_rows(world, 4), 0
    for run in range(4, 12):
        if run in (4, 8):
            world.program.stop()
            alike, prepared = with_rows(world, run), prepared + 1
        commit = Commit(run + 100, () if alike.commit is None else alike.commit.operations)
        step = with_changes(alike, run=run, commit=commit)
        if run in (4, 8):
            assert world.program.prepare(step, world.bases)
        places = [marks.Place(run + replica, 64 * run, 128 * run) for replica in range(2)]
        later = with_changes(step, run=run + 1)
        world.program._on_done = lambda later=later: world.program.prepare(later, world.bases)
        for replica in range(2):
            body = marks.marked(3, b"value", None, [places[replica]])
            assert world.workers[replica].mark("server", run, body)
        assert world.mail() == []
        assert world.runner.taken[-1] == [list(place) for place in places]
        assert (len(world.runner.taken), world.runner.commits[0]) == (run - 3, run - 3)
        assert len(world.runner.prepared) == prepared
    assert len(world.runner.numbered) == 8


def test_marks_of_steps_with_names_have_the_places_of_rows_behind_the_number_of_the_step(world: World) -> None:
    """Also if a step of the same kind without a name was carried out before."""
    for run, name in ((4, ""), (5, "train"), (6, "")):
        assert world.program.prepare(with_rows(world, run, name), world.bases)
        place = marks.Place(run, 192, 256)
        for replica in range(2):
            body = marks.marked(3, b"value", 77 if name else None, [place])
            assert world.workers[replica].mark("server", run, body)
        assert world.mail() == []
        assert world.runner.taken[-1] == [list(place)] * 2


def test_rows_in_another_order_than_the_marks_have_them_are_refused(world: World) -> None:
    step = with_rows(world, 4)
    assert step.commit is not None
    copied = [
        records.altered(record, notes=(rows_of(n, marks.Place(3, 64, 128)),)) for n, record in enumerate(step.returns)
    ]
    assert not world.program.prepare(with_changes(step, returns=tuple(copied)), world.bases)
    assert not world.program.is_ready


def test_workers_that_name_bases_of_several_kinds_are_heard(world: World) -> None:
    assert world.prepare(4)
    world.others = {2: world.next_step(4, kind=1)}
    world.mark(1, 4)
    world.mark(0, 4, base=2)
    assert sorted(world.mail()) == [
        (PEERS[0], Mark(4, marks.marked(2, b""))),
        (PEERS[1], Mark(4, marks.marked(3, b""))),
    ]
    assert world.done == world.account.begun == world.runner.commits[0] == 0


@pytest.mark.parametrize("over_zeromq", [False, True])
def test_the_mark_of_a_worker_is_heard_before_its_later_messages(world: World, over_zeromq: bool) -> None:
    assert world.prepare(4)
    world.mark(0, 4)
    if over_zeromq:
        world.server.came(PEERS[0], [b"message"])
    else:
        assert world.workers[0].post("server", [b"message"])
    world.mark(1, 4)
    mine = [(PEERS[0], Mark(4, marks.marked(3, b""))), (PEERS[0], [b"message"])]
    found = list(iter(world.server.take, None))  # type: ignore[arg-type]
    assert [each for each in found if each[0] == PEERS[0]] == mine
    assert world.done == world.account.begun == 0


def test_a_step_is_not_carried_out_after_something_that_the_engine_has_heard_since(world: World) -> None:
    assert world.prepare(4)
    world.mark(0, 4)
    world.account.renew()  # as the engine does then
    world.mark(1, 4)
    assert sorted(world.mail()) == [(peer, Mark(4, marks.marked(3, b""))) for peer in PEERS]
    assert (world.done, world.account.begun, world.runner.commits[0]) == (0, 0, 0)
    assert world.prepare(4)
    for replica in (0, 1):
        world.mark(replica, 4)
    assert (world.mail(), world.done) == ([], 1)


@pytest.mark.parametrize("where", [0, 1])
def test_marks_of_another_step_are_mail(world: World, where: int) -> None:
    assert world.prepare(4)
    world.mark(where, 5)
    assert world.mail() == [(PEERS[where], Mark(5, marks.marked(3, b"")))]
    assert not world.program.is_ready


def test_marks_with_another_base_are_mail(world: World) -> None:
    assert world.prepare(4)
    world.mark(0, 4)
    world.mark(1, 4, base=2)
    assert sorted(world.mail()) == [
        (PEERS[0], Mark(4, marks.marked(3, b""))),
        (PEERS[1], Mark(4, marks.marked(2, b""))),
    ]
    assert world.done == world.account.begun == world.runner.commits[0] == 0


def test_a_worker_that_has_left_its_mailbox_gets_its_answer_as_a_message(world: World) -> None:
    assert world.prepare(4)
    world.mark(0, 4)
    world.mark(1, 4)
    world.workers[1].forget("server")
    assert len(world.mail()) == 2
    assert world.done == world.account.begun == 0


def test_a_worker_that_leaves_its_mailbox_meanwhile_is_known_afterwards(world: World) -> None:
    assert world.prepare(4)
    for replica in (0, 1):
        world.mark(replica, 4)
    assert world.mail() == []
    world.workers[1]._boxes["server"].incoming.leave()
    assert list(world.server.ring()) == [(PEERS[1], 4)]
    assert list(world.server.ring()) == []


def test_a_mailbox_that_is_damaged_ends_the_wait(world: World) -> None:
    assert world.prepare(4)
    world.mark(0, 4)
    world.workers[0]._boxes["server"].outgoing.words[HEAD] = 1 << 50
    mail = world.mail()
    assert mail == [(PEERS[0], Mark(4, marks.marked(3, b""))), (PEERS[0], ())]
    assert not world.program.is_ready
    world.mark(1, 4)
    assert world.mail() == [(PEERS[1], Mark(4, marks.marked(3, b"")))]


def test_a_number_of_bytes_that_no_worker_writes_is_cut(world: World) -> None:
    assert world.prepare(4)
    world.mark(0, 4, b"x")
    world.workers[1]._boxes["server"].outgoing.words[BODY] = 1 << 60
    world.workers[1]._boxes["server"].outgoing.words[BODY + 1] = 3
    box = world.workers[1]._boxes["server"].outgoing
    box.words[MARK] = 4
    assert world.mail() == []
    assert world.done == 1
    assert [len(body) for body in world.account.bodies(4)] == [9, 1024]


class Row(World):
    """The next step is prepared as soon as one has been carried out."""

    def on_done(self) -> None:
        super().on_done()
        run = self.program.run + 1
        assert self.program.prepare(self.next_step(run, run % 2), self.bases)

    def carry_out(self, *runs: int) -> None:
        """Steps of two kinds in turns; also one of whose marks the second comes after a look."""
        for run in runs:
            done = self.done
            self.mark(0, run, base=3 - run % 2)
            assert self.mail() == []
            self.mark(1, run, base=3 - run % 2)
            assert self.mail() == []
            assert (self.done, self.account.begun, self.runner.commits[0]) == (done + 1,) * 3


@pytest.fixture
def row() -> Iterator[Row]:
    with ExitStack() as stack:
        yield Row(stack)


def test_what_was_found_for_a_kind_holds_while_only_programs_carry_out_steps(row: Row) -> None:
    assert row.program.prepare(row.next_step(4), row.bases)
    row.carry_out(*range(4, 40))
    assert [each.ticket for each in row.runner.prepared] == [104, 106]
    assert len(row.runner.numbered) == 35
    assert row.runner.tickets == [run + 100 + run % 2 for run in range(4, 41)]
    row.alike.clear()
    row.carry_out(40, 41)  # 40 was prepared before
    assert [each.ticket for each in row.runner.prepared] == [104, 106, 142, 142]
    row.carry_out(42, 43, 44)


@pytest.mark.parametrize("what", ["event", "message", "forgotten"])
def test_what_was_found_for_a_kind_is_found_again_after_anything_else(row: Row, what: str) -> None:
    assert row.program.prepare(row.next_step(4), row.bases)
    row.carry_out(4, 5, 6, 7)
    match what:
        case "event":
            row.program.stop()
        case "message":
            assert row.workers[0].post("server", [b"message"])
            assert row.mail() == [(PEERS[0], [b"message"])]
        case "forgotten":
            row.server.forget(PEERS[0])
    assert not row.program.is_ready
    row.bases[PEERS[1]] = marks.Bases()
    for kind in (0, 1):
        assert row.program.prepare(row.next_step(8, kind), row.bases)
        assert not row.program.is_ready


def test_no_step_is_looked_for_while_none_is_prepared(world: World) -> None:
    """A step is carried out once, also if its marks are still there."""
    assert world.prepare(4)
    for replica in (0, 1):
        world.mark(replica, 4)
    looks: list[object] = []
    world.on_done = lambda: looks.append(world.server.is_there())  # type: ignore[method-assign]
    world.program._on_done = world.on_done
    assert world.mail() == []
    assert looks == [False]
    assert (world.account.begun, world.runner.commits[0], world.program.is_ready) == (1, 1, False)
    world.mark(0, 5)
    assert world.mail() == [(PEERS[0], Mark(5, marks.marked(3, b"")))]


def test_what_cannot_be_prepared(world: World) -> None:
    world.runner.can = False
    assert world.prepare(4) is False
    world.runner.can = True
    known, world.bases[PEERS[1]] = world.bases[PEERS[1]], marks.Bases()
    assert world.prepare(4) is True
    assert not world.program.is_ready
    world.bases[PEERS[1]] = known
    assert world.prepare(4) is True
    assert world.program.is_ready
    world.server.forget(PEERS[0])
    assert not world.program.is_ready
    assert world.prepare(5) is True
    assert not world.program.is_ready
