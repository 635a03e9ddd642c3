"""Captured steps in which replicas ask for an all_reduce or all_gather: whatever comes between them, an engine that
captures steps says and knows what one that never does says and knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples
from tests.harness.playbook import CONTROLLER, array, lies, reads, reduces, result, returns, w
from tests.server.engine.test_captured_steps import BETWEEN, KINDS, OPTIMIZER, PLAIN, Kind, Traced, Two, counted, noted

from cs_proto import codec, records, segment_names
from cs_proto.errors import InvalidArgumentError
from cs_proto.failures import error_of
from cs_proto.messages import (
    Ask,
    Committed,
    GatherPoint,
    OptimizerChange,
    Reduced,
    ReducePoint,
    Return,
    RunFinished,
    StepFinished,
    WriteNote,
)
from cs_server.engine.engine import Engine
from cs_server.engine.store import reasons
from cs_server.engine.store.control_log import ControlDamaged, ControlMemory
from cs_server.engine.store.tables import joined
from cs_server.events import Commit, Compute, Computed, Received, Send

QUESTIONS: tuple[Kind, ...] = (
    ("reduce",),
    ("reduce", (1, 1)),
    ((1, 1), "gather"),
    ("write", "reduce", (2, 2), "reduce", "sum", "own write"),
    ((1, 1), "reduce", (1, 1, 2), "gather", "write"),
)
TROUBLES = ("other op", "returns", "raises", "large", "again", "reads", "misfits", "other kind", "fails", "result")


class Asking(Two):
    """Replicas that ask in a step."""

    def messages(self, replica: int, kind: Kind, series: int) -> list[Received]:
        """What a replica says in a step: its questions and its Return."""
        found: list[Received] = []
        notes: list[Any] = []
        brought = noted(kind, replica, self.run)
        changes = self.changes() if series and self.run % 2 else ()
        incarnation = self.incarnations[replica]
        peer = w(replica, incarnation)
        for each in brought:
            if isinstance(each, ReducePoint | GatherPoint):
                asked = Ask((self.run,), replica, incarnation, tuple(notes), each, series, "c", changes=changes)
                found.append(Received(peer, asked))
                notes = []
            else:
                notes.append(each)
        end = self.said(replica, (), series).record
        count = sum(not isinstance(each, WriteNote) for each in brought)
        end = records.replace(end, notes=tuple(notes), count=count, changes=changes)
        return [*found, Received(peer, end)]

    def troubled(self, said: list[Received], replica: int, trouble: str) -> list[Received]:
        """What a replica says instead."""
        first, end = said[0], said[-1]
        assert isinstance(first.record, Ask)
        point = first.record.point
        match trouble:
            case "other op":
                other = reduces(point.k, array(1.0), op="MEAN")
                return [replace(first, record=records.replace(first.record, point=other)), *said[1:]]
            case "returns":
                notes = first.record.notes
                return [replace(end, record=records.replace(end.record, notes=notes, count=point.k))]
            case "raises":
                raised = returns(replica, point.k, first.record.notes, (self.run,), "builtins.ValueError").record
                assert isinstance(raised, Return)
                assert isinstance(end.record, Return)
                ended = {name: getattr(end.record, name) for name in ("series", "lookahead", "client", "incarnation")}
                return [replace(end, record=records.replace(raised, **ended))]
            case "large":
                arrays = (lies(segment_names.arena(replica), 8192, (1,)),)
                return [
                    replace(first, record=records.replace(first.record, point=reduces(point.k, *arrays))),
                    *said[1:],
                ]
            case "again":
                return [first, *said]
            case "reads":
                asked = replace(first, record=records.replace(first.record, point=reads(point.k), preserved=True))
                return [asked, replace(first, record=records.replace(first.record, notes=())), *said[1:]]
            case "misfits":
                notes = tuple(
                    records.replace(note, value=array(1.0, 2.0)) if hasattr(note, "value") else note
                    for note in first.record.notes
                )
                return [replace(first, record=records.replace(first.record, notes=notes)), *said[1:]]
            case "other kind":
                return [self.said(replica, KINDS[0], first.record.series)]
        return said

    def step(self, kind: Kind, series: int, events: dict[int, str], trouble: str = "", turned: bool = False) -> None:
        """Carry out one step. ``events`` come before the messages of these numbers."""
        self.run += 1
        said = [self.messages(replica, kind, series) for replica in range(self.replicas)]
        if trouble and len(said[0]) > 1:
            said[0] = self.troubled(said[0], 0, trouble)
        number = 0
        order = [*range(self.replicas)][:: -1 if turned else 1]
        while any(said):
            for replica in order:
                if not said[replica]:
                    continue
                if number in events:
                    self.between(events[number])
                number += 1
                self.heard.append(said[replica].pop(0))
                self.hear(self.heard[-1])
            if self.under_way and isinstance(self.under_way[0], Computed) and trouble in ("fails", "result"):
                computed = self.under_way.pop(0)
                assert isinstance(computed, Computed)
                error = error_of(InvalidArgumentError("shapes differ")) if trouble == "fails" else None
                arrays = () if error else (lies(segment_names.server_arena(), 0, (1,)),)
                self.under_way.insert(0, replace(computed, arrays=arrays, error=error))
                trouble = ""
            self.settle()
        if number in events:
            self.between(events[number])
            self.settle()


@st.composite
def plans(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Kinds of steps that come in turns, whether they are of a series and of the last one, how many, what comes into
    the last and before which message, what else a replica does in it; whether replicas speak in the other order."""
    kinds = st.lists(st.sampled_from([*QUESTIONS, *QUESTIONS, *KINDS]), min_size=1, max_size=2)
    event = st.dictionaries(st.integers(0, 9), st.sampled_from(BETWEEN), max_size=2)
    trouble = st.sampled_from(["", "", *TROUBLES])
    part = st.tuples(kinds, st.sampled_from([0, 0, 1, 1, 2]), st.integers(1, 8), event, trouble, st.booleans())
    return draw(st.lists(part, min_size=1, max_size=5))


def carried_out(two: Asking, plan: list[tuple[Any, ...]]) -> None:
    series = 0
    for kinds, is_of_series, alike, events, trouble, turned in plan:
        for number in range(alike):
            series = 0 if not is_of_series else series if series and is_of_series == 1 else two.run + 1
            is_last = number == alike - 1
            two.step(kinds[number % len(kinds)], series, events if is_last else {}, trouble if is_last else "", turned)
    two.compare(two.short, two.store)


@given(replicas=st.integers(1, 3), lookahead=st.integers(0, 2), plan=plans())
@settings(max_examples=examples(40))
def test_the_short_way_is_the_long_way(replicas: int, lookahead: int, plan: list[tuple[Any, ...]]) -> None:
    carried_out(Asking(replicas, lookahead), plan)


@pytest.mark.parametrize(
    ("series", "kind"),
    [
        pytest.param(0, QUESTIONS[1], marks=pytest.mark.long),
        *(pytest.param(2, kind, marks=pytest.mark.slow) for kind in QUESTIONS),
        *(pytest.param(0, kind, marks=pytest.mark.slow) for kind in QUESTIONS if kind != QUESTIONS[1]),
    ],
)
@pytest.mark.parametrize("what", [*BETWEEN, *TROUBLES])
def test_what_is_not_plain_comes_among_steps_with_questions(what: str, kind: Kind, series: int) -> None:
    messages = 2 * (1 + sum(each in ("reduce", "gather") for each in kind))
    for where in range(messages + 1) if what in BETWEEN else (0,):
        two = Asking(2)
        for _ in range(3):
            two.step(kind, series, {})
        two.step(kind, series, {where: what} if what in BETWEEN else {}, what if what in TROUBLES else "")
        for _ in range(3):
            two.step(kind, series, {}, turned=True)
        two.compare(two.short, two.store)


@pytest.mark.parametrize("series", [0, 2])
@pytest.mark.parametrize("kind", QUESTIONS)
def test_of_a_step_with_questions_the_messages_are_written_and_nothing_else(kind: Kind, series: int) -> None:
    two = Asking(2)
    for _ in range(3):
        two.step(kind, series, {})
    for two.run in (6, 7, 8):
        said = [two.messages(replica, kind, series) for replica in (0, 1)]
        for number, (mine, others) in enumerate(zip(*said, strict=True), 1):
            before = dict(two.store.items())
            assert two.hear(mine) == []
            assert dict(two.store.items()) == before
            commands = two.hear(others)
            after = dict(two.store.items())
            written = {key[:1] for key in before | after if before.get(key) != after.get(key)}
            # What the step before has changed of an optimizer is written with this one.
            assert written == ({PLAIN, OPTIMIZER} if series and number == 1 and two.run == 8 else {PLAIN})
            if number < len(said[0]):
                assert [type(command) for command in commands] == [Compute]
            answers = [type(each.record) for each in [*commands, *two.settle()] if isinstance(each, Send)]
            ends = [StepFinished] * (2 * bool(series)) + [RunFinished]
            assert answers == ([Reduced] * 2 if number < len(said[0]) else ends)
            assert dict(two.store.items()) == after
    captured, _ = counted(two.short, two.long)
    assert captured == 6


@pytest.mark.parametrize("series", [0, 2])
@pytest.mark.parametrize("kind", QUESTIONS)
def test_a_server_that_takes_over_between_any_two_writes_goes_on(kind: Kind, series: int) -> None:
    """The workers say to it what they have said to the server before it and what was not answered."""
    two = Asking(2)
    two.compare(two.short, two.store)
    two.store = Traced()
    two.store.write(dict(two.other_store.items()))
    two.short = Engine(two.config, two.store)
    for _ in range(4):
        two.step(kind, series, {})
    for _ in range(3):
        two.run += 1
        said = [two.messages(replica, kind, series) for replica in (0, 1)]
        commands: list[Any] = []
        of_others = []
        for number in range(len(said[0])):
            of_others += [takes_over(two, said, number, answered) for answered in ((), (0,), (0, 1))]
            commands += [command for replica in (0, 1) for command in two.hear(said[replica][number])]
            if number < len(said[0]) - 1:
                of_others.append(takes_over(two, said, number + 1, ()))
            commands += two.settle()
        mine = [command for command in commands if isinstance(command, Commit)]
        assert of_others == [mine] * len(of_others)


def takes_over(two: Asking, said: list[list[Received]], number: int, has_gone_on: tuple[int, ...]) -> list[Commit]:
    """Another server goes on when the replicas have said their messages before this one. All have the answer to the
    last, or those of ``has_gone_on``, which have said this one, too; it was not heard. What the step commits."""
    store = ControlMemory()
    store.write(dict(two.store.items()))
    another = Engine(two.config, store)
    resumed = carried_out_by(two, another, another.resume())
    before = another._server.tables.tally.tickets - sum(isinstance(command, Compute) for command in resumed)
    commands = resumed
    for at in range(max(0, number - 1), len(said[0])):
        for replica in (1, 0):
            if at >= number - 1 + (replica in has_gone_on):  # what was not answered is said again
                commands += carried_out_by(two, another, another.handle(said[replica][at], two.now))
    ends = [each.record for each in commands if isinstance(each, Send) and each.peer == CONTROLLER]
    assert [(each.run, each.values, each.error) for each in ends if isinstance(each, RunFinished)][-1:] == [
        ((two.run,), (result(0), result(1)), None)
    ]
    return [command for command in commands if isinstance(command, Commit) and command.ticket > before]


def carried_out_by(two: Asking, engine: Engine, commands: list[Any]) -> list[Any]:
    """The commands, and those that follow when they are carried out."""
    done, left = [], list(commands)
    while left:
        command = left.pop(0)
        done.append(command)
        if isinstance(command, Commit | Compute):
            left += engine.handle(two.outcome(command), two.now)
    return done


def test_steps_with_questions_are_counted_by_why_they_are_not_captured() -> None:
    two = Asking(2)
    for trouble in ("", "", "", "large", "", "", "result", "", ""):
        two.step(QUESTIONS[1], 0, {}, trouble)
    captured, uncaptured = counted(two.short, two.long)
    first = uncaptured.pop(reasons.WORDS[reasons.FIRST])
    others = {reasons.WORDS[reasons.COMBINED]: 2, reasons.WORDS[reasons.UNQUIET]: 1}  # its outcome lies in the arena
    assert (captured, first, uncaptured) == (6, 1, others)


def test_changes_that_an_optimizer_refuses_are_refused_with_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Asking(2)
    two.run = 2
    for change in (OptimizerChange(99, (("learning_rate", 0.5),)), OptimizerChange(1, (("learning_rate", -1.0),))):
        for _ in range(3):
            two.step(QUESTIONS[1], 2, {})
        with monkeypatch.context() as context:
            context.setattr(two, "changes", lambda change=change: (change,))
            two.run += two.run % 2  # steps with odd numbers bring changes
            two.step(QUESTIONS[1], 2, {})
            two.compare(two.short, two.store)


def test_a_round_of_questions_is_written_twice_before_the_step_is_decided() -> None:
    """So what is written grows with the number of rounds, not with its square."""
    written: Counter[bytes] = Counter()

    class Counting(ControlMemory):
        def write(self, changes: Mapping[bytes, bytes | None]) -> None:
            written.update(changes.keys())
            super().write(changes)

    two = Asking(2)
    two.run += 1
    *rounds, _ = zip(*[two.messages(replica, ("reduce",) * 5, 0) for replica in (0, 1)], strict=True)
    two.store.__class__ = Counting
    for asked in rounds:
        for each in asked:
            two.hear(each)
        two.settle()
    assert sorted(count for key, count in written.items() if key[:1] == PLAIN) == [1, 2, 2, 2, 2]


def test_a_message_that_belongs_to_no_step_is_damage() -> None:
    two = Asking(2)
    two.step(QUESTIONS[0], 0, {})
    tables = two.short._server.tables
    ((place, step),) = tables.captured.items()
    other = joined(codec.encode(Committed((2,), 0)))
    tables.write_captured({place: records.replace(step, heard=(other, *step.heard[1:]))})
    with pytest.raises(ControlDamaged, match="a Committed among the messages of a step"):
        two.successor()
