"""Steps that a program carries out: an engine that hears of them afterwards says and knows what one that hears every
return says and knows, and so does a server in its place."""

from __future__ import annotations

import struct
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples
from tests.harness.playbook import CONTROLLER, handled, returns, uncounted, w
from tests.server.engine.test_captured_steps import BETWEEN, KINDS, Kind, Two, noted

from cs_proto import codec, marks, records
from cs_proto.arrays import Array, Location
from cs_proto.frozen import with_changes
from cs_proto.messages import ApplyPoint, Return, RunFinished, StepFinished, Value
from cs_server.engine.engine import Engine
from cs_server.engine.step_plans import NextStep
from cs_server.engine.store.account import BODY_NBYTES, KIND_NBYTES, STEPS, Account, account_nbytes
from cs_server.engine.store.control_log import ControlDamaged, ControlMemory
from cs_server.events import Apply, Command, Commit, Finished, Received, Send
from cs_server.step_program import _meet

APPLIES = [KINDS[0], KINDS[1], KINDS[2], KINDS[3], KINDS[4], KINDS[7], KINDS[8]]
"""Kinds of steps of which the replicas bring the same again and again, and nothing but gradients."""


class Passing(Two):
    """Replicas that bring the same in every step of a kind, by marks; a program carries steps out where it may."""

    def __init__(self, replicas: int, lookahead: int = 2) -> None:
        self.memory = np.zeros(account_nbytes(replicas), np.uint8)
        super().__init__(replicas, lookahead)
        self.account = Account(self.memory, replicas)
        self.compare(self.short, self.store)
        self.store = ControlMemory()
        self.store.write(dict(self.other_store.items()))
        self.short = Engine(self.config, self.store, self.account)
        self.passed = 0
        #: What the commits of steps had in common that were said to be alike.
        self.alike: dict[object, object] = {}
        self.site = ""  # of every apply, if it is set

    def successor(self) -> tuple[Engine, ControlMemory]:
        store, memory = ControlMemory(), self.memory.copy()
        store.write(dict(self.store.items()))
        return Engine(self.config, store, Account(memory, self.replicas)), store

    def brought(self, replica: int, kind: Kind, series: int) -> Received:
        """What a replica returns: always another value."""
        notes = noted(kind, replica, 2)
        notes = tuple([lying(note, self.run + replica) for note in notes])
        if self.site:
            notes = tuple([records.replace(note, site=self.site) for note in notes])
        event = returns(replica, sum(type(note).__name__ != "WriteNote" for note in notes), notes, (self.run,))
        assert isinstance(event.record, Return)
        record = records.replace(
            event.record,
            value=Value(bytes([replica, self.run % 256] * (self.run % 3)), ()),
            series=series,
            lookahead=self.lookahead if series else 0,
            incarnation=self.incarnations[replica],
            client="c",
        )
        return Received(w(replica, self.incarnations[replica]), record)

    def step(self, kind: Kind, series: int, between: str = "", where: int = -1, *, in_full: bool = False) -> None:
        """Carry out one step, with an event before the return of replica ``where``, or behind the last. ``in_full``:
        replica 0 sends its return as a message."""
        self.run += 1
        said = [self.brought(replica, kind, series) for replica in range(self.replicas)]
        if in_full:
            said[0] = Received(said[0].peer, said[0].record, codec.encode(said[0].record))
        if where == 0:
            self.between(between)
            self.settle()
        step = self.short.next_step()
        if step is not None and not self.fits(step, said):
            step = self.short.next_step(said[0].record)  # type: ignore[arg-type]
        if step is not None and self.fits(step, said) and not in_full and not 0 < where < self.replicas:
            self.carry_out(step, said)
        else:
            for replica, each in enumerate(said):
                if replica and where == replica:
                    self.between(between)
                self.heard.append(each)
                self.hear(each)
        self.settle()
        if where >= self.replicas:
            self.between(between)
            self.settle()

    def fits(self, step: NextStep, said: list[Received]) -> bool:
        """Whether each worker would leave the mark for which the program looks."""
        expected = []
        for each, known in zip(said, step.returns, strict=True):
            assert isinstance(each.record, Return)
            if marks.are_alike(each.record.notes, known.notes):
                expected.append(records.altered(each.record, run=known.run, value=known.value, notes=known.notes))
        return step.run == self.run and expected == list(step.returns)

    def carry_out(self, step: NextStep, said: list[Received]) -> None:
        """As the program does it; another server takes over after each store that it can see."""
        captured = self.short._captured
        assert captured._followed is not None
        # What else has been heard since is not known to another server.
        self.now = captured._server.tables.captured[captured._followed].since[-1]
        self.store_at(self.account.kind_address(self.run), struct.pack("<9Q", step.kind, *step.counts))
        for replica, each in enumerate(said):
            assert isinstance(each.record, Return)
            assert each.record.value is not None
            body = marks.marked(1, each.record.value.body, places=list(marks.places_of(each.record.notes)))
            held = len(body).to_bytes(8, "little") + body.ljust(BODY_NBYTES - 8, b"?")
            self.store_at(self.account.body_address(self.run, replica), held)
        self.takes_over()  # the step has not begun
        self.heard += said
        commands = [command for each in said for command in handled(lambda e: self.long.handle(e, self.now), each)]
        commits = [command for command in commands if isinstance(command, Commit)]
        assert [*map(nowhere, commits)] == ([] if step.commit is None else [nowhere(step.commit)])
        assert step.commit is None or _meet(step, step.commit)
        common = without_numbers(step)
        assert self.alike.setdefault(step.alike, common) == common
        self.account._words[1] += 1
        another, store = self.successor()  # it takes the commit as under way
        assert [each for each in another.resume() if isinstance(each, Commit)] == commits
        self.compare(another, store)
        for commit in commits:
            commands += handled(lambda e: self.long.handle(e, self.now), Finished(commit.ticket))
        answers = [command for command in commands if isinstance(command, Send)]
        if series := said[0].record.series:  # type: ignore[attr-defined]
            assert series
            assert [type(each.record) for each in answers] == [StepFinished] * self.replicas + [RunFinished]
        assert step.is_of_series == bool(series)
        told: list[Command] = [self.short.passed(self.now)]
        assert [*map(uncounted, told)] == [*map(uncounted, answers[-1:])]
        assert answers[-1].peer == CONTROLLER
        assert self.takes_over() == [commit.ticket for commit in commits]
        self.passed += 1

    def store_at(self, address: int, stored: bytes) -> None:
        first = address - self.memory.__array_interface__["data"][0]
        self.memory[first : first + len(stored)] = np.frombuffer(stored, np.uint8)

    def takes_over(self) -> list[int]:
        """Another server does, and carries out the commit that may be under way. Returns its ticket, if there is."""
        another, store = self.successor()
        tickets = [each.ticket for each in another.resume() if isinstance(each, Commit)]
        for ticket in tickets:
            another.handle(Finished(ticket), self.now)
        self.compare(another, store)
        return tickets


def without_numbers(step: NextStep) -> object:
    """The commit of a step and the Returns that it follows, without what may differ in the next one."""
    operations = []
    for each in () if step.commit is None else step.commit.operations:
        assert isinstance(each, Apply)
        updates = [
            with_changes(update, t=0, hyperparameters=(), counts=tuple([n - update.t for n in update.counts]))
            for update in each.updates
        ]
        operations.append(with_changes(each, updates=tuple(updates)))
    return operations, step.returns, step.kind, step.is_of_series, step.workers


def lying(note: Any, number: int) -> Any:
    """The note, in which the rows of sparse gradients are another number, and lie elsewhere, with each number."""
    if not isinstance(note, ApplyPoint) or not any(update.sparse for update in note.updates):
        return note

    def moved(array: Array, at: int) -> Array:
        assert isinstance(array.place, Location)
        return records.replace(array, shape=(number % 3,), place=records.replace(array.place, offset=at))

    updates = []
    for update in note.updates:
        sparse = [
            records.replace(
                each, values=moved(each.values, 128 * number), indices=moved(each.indices, 64 + 128 * number)
            )
            for each in update.sparse
        ]
        updates.append(records.replace(update, sparse=tuple(sparse)))
    return records.replace(note, updates=tuple(updates))


def nowhere(commit: Commit) -> Commit:
    """The commit without the places of sparse gradients."""
    operations = []
    for operation in commit.operations:
        assert isinstance(operation, Apply)
        updates = [
            with_changes(each, sparse=tuple([with_changes(rows, gradients=()) for rows in each.sparse]))
            for each in operation.updates
        ]
        operations.append(with_changes(operation, updates=tuple(updates)))
    return with_changes(commit, operations=tuple(operations))


@st.composite
def plans(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Kinds of steps, whether they are of a series and of the last one, how many, what comes into the last, and which
    one a replica says in full."""
    kinds = st.lists(st.sampled_from([*APPLIES, *APPLIES, *APPLIES, *KINDS]), min_size=1, max_size=9)
    event = st.tuples(st.sampled_from(BETWEEN), st.integers(0, 3))
    part = st.tuples(kinds, st.sampled_from([0, 0, 1, 1, 2]), st.integers(1, 50), event, st.integers(0, 99))
    return draw(st.lists(part, min_size=1, max_size=5))


@given(replicas=st.integers(1, 3), lookahead=st.integers(0, 3), plan=plans())
@settings(max_examples=examples(40))
def test_what_a_program_carries_out_is_what_the_engine_would(
    replicas: int, lookahead: int, plan: list[tuple[Any, ...]]
) -> None:
    two, series = Passing(replicas, lookahead), 0
    for kinds, is_of_series, alike, (what, where), full in plan:
        for number in range(alike):
            series = 0 if not is_of_series else series if series and is_of_series == 1 else two.run + 1
            is_last = number == alike - 1
            kind = kinds[number % len(kinds)]
            two.step(kind, series, what if is_last else "", where if is_last else -1, in_full=number == full)
    two.compare(two.short, two.store)


@pytest.mark.parametrize("what", BETWEEN)
@pytest.mark.parametrize(
    ("lookahead", "kind"),
    [
        pytest.param(lookahead, kind, marks=() if (number + place) % 3 == 0 else pytest.mark.slow)
        for number, lookahead in enumerate([None, 0, 2])
        for place, kind in enumerate(APPLIES)
    ],
)
def test_anything_may_come_between_steps_of_a_program(kind: Kind, lookahead: int | None, what: str) -> None:
    two = Passing(2, lookahead or 0)
    series = 0 if lookahead is None else 2
    for where in range(4):
        for _ in range(5):
            two.step(kind, series)
        two.step(kind, series, what, where)
    two.compare(two.short, two.store)
    assert two.passed


@pytest.mark.parametrize(
    ("lookahead", "order"),
    [
        pytest.param(lookahead, order, marks=() if (number + place) % 3 == 0 else pytest.mark.slow)
        for number, lookahead in enumerate([None, 0, 3])
        for place, order in enumerate(["01", "0011", "0310", "012345", "0123450543210"])
    ],
)
def test_steps_of_several_kinds_in_turns_are_passed(order: str, lookahead: int | None) -> None:
    """All but the first two of each kind, whatever came before them. Kinds are also left and taken up again."""
    two = Passing(2, lookahead or 0)
    series = 0 if lookahead is None else 2
    for kind in [*order] * 6 + [order[0]] * 2 * STEPS + [*order] * 2:
        two.step(APPLIES[int(kind)], series)
    two.compare(two.short, two.store)
    assert two.passed >= two.run - 1 - 3 * len(set(order))


def test_runs_on_their_own_are_passed_after_steps_of_a_series() -> None:
    two = Passing(2, 1)
    for _ in range(4):
        series = two.run + 1
        for _ in range(5):
            two.step(APPLIES[1], series)
        for _ in range(3):
            two.step(APPLIES[3], 0)
    two.compare(two.short, two.store)
    # Of each series the second step has the first plan. Of the others only the very first one has none.
    assert two.passed >= two.run - 1 - 2 * 4 - 2


def test_steps_go_on_after_one_that_no_program_carries_out() -> None:
    two = Passing(2)
    for _ in range(6):
        for kind in (APPLIES[0], APPLIES[0], KINDS[11], APPLIES[3]):
            two.step(kind, 0)
    assert two.passed >= two.run - 1 - 6 - 12
    two.compare(two.short, two.store)


def test_two_functions_that_apply_the_same_gradients_are_two_kinds() -> None:
    two = Passing(2)
    for number in range(12):
        two.site = f"train.py:{number % 2}"
        two.step(KINDS[8], 0)
    assert two.passed >= 8
    assert len(two.short._captured._kinds) == 2
    two.compare(two.short, two.store)


def test_an_account_with_a_kind_that_the_store_lacks_is_damaged() -> None:
    two = Passing(2)
    for _ in range(4):
        two.step(KINDS[0], 0)
    two.store_at(two.account.kind_address(two.run), struct.pack("<9Q", 5, *[9] * 8))
    with pytest.raises(ControlDamaged, match="a step of kind 5, and the control store has none"):
        two.successor()


@pytest.mark.parametrize("what", [each for each in BETWEEN if each])
def test_whatever_the_engine_hears_renews_the_account_that_a_program_follows(what: str) -> None:
    two = Passing(2)
    for _ in range(5):
        two.step(KINDS[1], 2)
    assert two.short.next_step() is not None
    before = two.account.number
    two.between(what)
    assert two.account.number > before
    assert not two.account.begun


def test_no_program_carries_out_steps_that_may_not_fit_into_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Passing(2)
    monkeypatch.setattr("cs_server.engine.captured_steps._STEPS_NBYTES", 3 * 2 * (BODY_NBYTES - 8))
    for _ in range(9):
        two.step(KINDS[1], 2)
    assert not two.passed
    assert two.short._captured._counts[0] >= 5  # they are captured
    monkeypatch.undo()
    for _ in range(9):
        two.step(KINDS[1], 2)
    assert two.passed


def test_all_but_the_first_steps_of_a_long_training_are_passed() -> None:
    two = Passing(2)
    for _ in range(3 * STEPS):
        two.step(KINDS[1], 2)
    assert two.passed >= 3 * STEPS - 3
    numbers = {two.account.number}
    for _ in range(4):
        two.between("tick")
        two.step(KINDS[1], 2)
        two.step(KINDS[1], 2)
        numbers.add(two.account.number)
    assert len(numbers) == 5, "a step of the store could be taken for another one"


@pytest.mark.parametrize("kind", [KINDS[10], KINDS[11], KINDS[12]])
def test_no_program_carries_out_steps_with_values_of_their_own(kind: Kind) -> None:
    two = Passing(2)
    for _ in range(6):
        two.step(kind, 0)
    assert not two.passed


@pytest.mark.parametrize("series", [0, 2])
def test_a_program_carries_out_steps_whose_rows_lie_elsewhere(series: int) -> None:
    two = Passing(2)
    for number in range(9):
        two.step(KINDS[4], series, in_full=number == 5)
    assert two.passed == 5  # not the first two, nor that in full and the one after it
    assert len(two.alike) == 2  # as before it, and as after it
    two.compare(two.short, two.store)


def test_a_kind_that_is_refused_goes_by_messages() -> None:
    two = Passing(2)
    for _ in range(4):
        two.step(KINDS[0], 0)
    assert two.passed
    assert two.short.next_step() is not None
    two.short.refuse_steps()
    before = two.passed
    for _ in range(4):
        two.step(KINDS[0], 0)
    assert two.passed == before
    for _ in range(4):
        two.step(KINDS[1], 0)
    assert two.passed > before
    two.compare(two.short, two.store)


def test_bodies_that_are_damaged_are_cut_to_their_place() -> None:
    memory = np.full(account_nbytes(2), 255, np.uint8)
    account = Account(memory, 2)
    assert [len(body) for body in account.bodies(5)] == [BODY_NBYTES - 8] * 2


def test_each_run_and_replica_has_a_place_of_its_own() -> None:
    memory = np.zeros(account_nbytes(3), np.uint8)
    account = Account(memory, 3)
    first = memory.__array_interface__["data"][0]
    places = sorted(account.body_address(run, replica) - first for run, replica in zip(count(), [0, 1, 2] * STEPS))
    every = sorted(account.body_address(run, replica) - first for run in range(STEPS) for replica in range(3))
    assert set(places) <= set(every)
    kinds = [account.kind_address(run) - first for run in range(STEPS)]
    nbytes = KIND_NBYTES + 3 * BODY_NBYTES
    assert kinds == list(range(kinds[0], len(memory), nbytes))
    assert every == [kind + KIND_NBYTES + n * BODY_NBYTES for kind in kinds for n in range(3)]
    assert account.body_address(STEPS, 0) == account.body_address(0, 0)
