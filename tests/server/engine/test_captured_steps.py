"""Captured steps: whatever comes between them, an engine that captures steps says and knows what one that never does
says and knows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples
from tests.harness.playbook import (
    ADDRESSES,
    CONTROLLER,
    DEFAULTS,
    OBSERVER,
    Playbook,
    array,
    asks,
    assigns,
    dies,
    first_apply,
    gathers,
    handled,
    hears,
    known,
    notes_write,
    reduces,
    result,
    returns,
    scalar,
    spec,
    uncounted,
    w,
    worker,
)

from cs_proto import records, segment_names
from cs_proto.arithmetic.optimizers import defaults_of
from cs_proto.arithmetic.schedules import Schedule
from cs_proto.arrays import Array, Location
from cs_proto.messages import (
    PROTOCOL,
    ApplyPoint,
    Assign,
    Cancel,
    Configure,
    Counters,
    Create,
    Describe,
    Get,
    Hello,
    Locate,
    Note,
    OptimizerChange,
    OptimizerUpdate,
    Register,
    Return,
    RunFinished,
    SparseGradient,
    Statistics,
    StepFinished,
    Value,
    WaitReport,
    WriteNote,
)
from cs_server.engine import captured_steps
from cs_server.engine.engine import Config, Engine
from cs_server.engine.store import reasons
from cs_server.engine.store.control_log import ControlDamaged, ControlFull, ControlMemory
from cs_server.events import ClientLeft, Command, Commit, Compute, Computed, Event, Finished, Received, Send, Tick

PLAIN, OPTIMIZER = b"y", b"o"
"""The first letter of the keys of steps of which only the messages are in the store."""

# The merge points of a step: optimizer and set of what each applies, and of which variables the gradients are sparse;
# or several of these, which one apply brings together.
# Or an aggregated assign, by the variable; or a write note of every replica, or of the first one; or a question.
Kind: TypeAlias = tuple[tuple[Any, ...] | str, ...]
KINDS: tuple[Kind, ...] = (
    ((1, 1),),
    ((1, 1), (2, 2)),
    ((2, 2), (2, 2)),
    (),
    ((1, 1, 2),),
    (((1, 1), (2, 3)), (2, 2)),
    (((1, 1), (2, 2)),),  # refused: they have variables in common
    ((2, 4), (2, 2), (2, 4)),
    ((2, 4),),
    ((1, 1), (2, 2, 1, 2)),
    ("write",),
    ((1, 1), "sum"),
    ("mean", (2, 2), "first", "own write", "write"),
    ("own write", (1, 1), "write", (((1, 1), (2, 3))), "own write"),
    ("none",),  # refused where there are several replicas
    ("write", "misfit"),  # refused
    ("sum", "mean", "sum"),
)
# The variables that are assigned to. Of these the fourth cannot be assigned to by several replicas.
SUM, NONE, MEAN, FIRST = 3, 4, 5, 6
ASSIGNED = {"sum": SUM, "none": NONE, "mean": MEAN, "first": FIRST, "misfit": SUM}
BETWEEN = (
    "tick",
    "statistics",
    "describe",
    "again",
    "down",
    "assign",
    "rate",
    "steps",
    "cancel",
    "death",
    "stranger",
    "hello",
    "late tick",
    "get",
    "get bytes",
    "get in vain",
    "ask of a worker",
    "locate",
    "wait",
)
# Optimizer 2 counts the updates of each variable. Set 4 is its set of variable 2 alone.
TORCH_ADAM = {name: float(value) for name, value in defaults_of("torch.Adam").items()}


def applies(k: int, replica: int, run: int, *given: Any) -> ApplyPoint:
    """Alone it has the weight 1; several updates have another one at every step, and a bound."""
    if isinstance(given[0], int):
        return ApplyPoint(k, f"train.py:{k}", (updates(replica, run, *given),), run % 2)
    together = tuple(updates(replica, run, *each) for each in given)
    return ApplyPoint(k, f"train.py:{k}", together, run % 2, (run + replica) % 3 / 2, 1.5, 1e-6)


def updates(replica: int, run: int, optimizer: int, number: int, *sparse: int) -> OptimizerUpdate:
    arena = segment_names.arena(replica)
    rows = tuple(
        SparseGradient(
            variable,
            Array("float32", (run,), Location(arena, 128 * variable)),
            Array("int64", (run,), Location(arena, 4096)),
        )
        for variable in sparse
    )
    return OptimizerUpdate(optimizer, number, (), rows)


def noted(kind: Kind, replica: int, run: int) -> tuple[Any, ...]:
    """What a replica brings in a step of that kind: notes and questions."""
    notes: list[Any] = []
    k = writes = 0
    value = array(run, replica, 1.0)
    for each in kind:
        if isinstance(each, str) and each.endswith("write"):
            if each == "write" or replica == 0:
                notes.append(notes_write(k, writes, value, variable=writes % 3 + 1, op="assign_add"))
                writes += 1
            continue
        if each in ("reduce", "gather"):
            notes.append(reduces(k, value) if each == "reduce" else gathers(k, value))
        elif isinstance(each, str):
            notes.append(assigns(k, scalar(1.0) if each == "misfit" else value, ASSIGNED[each]))
        else:
            notes.append(applies(k, replica, run, *each))
        k += 1
    return tuple(notes)


def misfitting(note: Note) -> Note:
    """The same with values, or sparse gradients whose rows, are wider than the variable's."""
    if not isinstance(note, ApplyPoint):
        return records.replace(note, value=array(1.0, 2.0))
    wider = []
    for update in note.updates:
        arrays = [records.replace(each.values, shape=(*each.values.shape, 2)) for each in update.sparse]
        pairs = zip(update.sparse, arrays, strict=True)
        sparse = tuple(records.replace(each, values=values) for each, values in pairs)
        wider.append(records.replace(update, sparse=sparse))
    return records.replace(note, updates=tuple(wider))


class Two:
    """The same conversation with an engine that takes the short way where it can, and with one that never does."""

    def __init__(self, replicas: int, lookahead: int = 2) -> None:
        self.replicas, self.lookahead = replicas, lookahead
        self.config = Config(replicas, "CPU:0", ADDRESSES, pid=1, started=0.0, step_timeout=None)
        self.store, self.other_store = ControlMemory(), ControlMemory()
        self.short, self.long = Engine(self.config, self.store), Engine(self.config, self.other_store)
        self.long._captured.hear = lambda event, now: None  # type: ignore[method-assign]  # it never captures one
        self.now = 100.0
        self.under_way: list[Finished | Computed] = []
        self.heard: list[Received] = []
        self.incarnations = [1] * replicas
        self.requests = count(20)
        self.run = 1
        begin = Playbook(replicas).begin_events()
        specs = [spec(f"v{n}", (3,), aggregation=rule) for n, rule in enumerate((1, 1, 1, 0, 2, 3), 1)]
        made = [hears(CONTROLLER, Create("c", n, each, None)) for n, each in enumerate(specs, 1)]
        for number, kind, numbers in ((7, "SGD", DEFAULTS["SGD"]), (8, "torch.Adam", TORCH_ADAM)):
            pairs = tuple(numbers.items())
            made.append(hears(CONTROLLER, Configure("c", number, 0, kind, pairs, None, -1)))
        made.append(hears(w(0), Locate(0, (1,), 1)))
        for event in [*begin, *made]:
            self.hear(event)
            self.settle()
        for k, (optimizer, *members) in enumerate([(1, 1, 2), (2, 1, 2), (2, 3), (2, 2)]):
            for replica in range(replicas):
                self.hear(asks(replica, first_apply(k, *members, optimizer=optimizer)))
            self.settle()
        for replica in range(replicas):
            self.hear(returns(replica, 4))
        self.settle()

    def hear(self, event: Event) -> list[Command]:
        self.now += 0.25
        commands = handled(lambda each: self.short.handle(each, self.now), event)
        others = handled(lambda each: self.long.handle(each, self.now), event)
        assert [*map(uncounted, commands)] == [*map(uncounted, others)]
        begun = [self.outcome(command) for command in commands if isinstance(command, Commit | Compute)]
        self.under_way += begun
        is_return = isinstance(event, Received) and isinstance(event.record, Return)
        if begun or (is_return and commands):  # what the next server would know
            self.compare(*self.successor())
        return commands

    def outcome(self, command: Commit | Compute) -> Finished | Computed:
        """What the server says when it has carried out a command."""
        if isinstance(command, Commit):
            return Finished(command.ticket)
        assert len(command.components) == self.replicas
        return Computed(command.ticket, tuple(array(command.ticket) for _ in command.components[0]), None)

    def successor(self) -> tuple[Engine, ControlMemory]:
        """A server in the place of the one with the short way, and its store."""
        copy = ControlMemory()
        copy.write(dict(self.store.items()))
        return Engine(self.config, copy), copy

    def compare(self, engine: Engine, store: ControlMemory) -> None:
        engine.write_down()
        self.long.write_down()
        assert known(store) == known(self.other_store)

    def settle(self) -> list[Command]:
        commands: list[Command] = []
        while self.under_way:
            commands += self.hear(self.under_way.pop(0))
        return commands

    def said(self, replica: int, kind: Kind, series: int, trouble: str = "", client: str = "c") -> Received:
        notes = noted(kind, replica, self.run)
        count = sum(not isinstance(note, WriteNote) for note in notes)
        raises = "builtins.ValueError" if trouble == "raises" else ""
        event = returns(replica, count + (trouble == "miscounts"), notes, (self.run,), raises, series=series)
        record = event.record
        assert isinstance(record, Return)
        if trouble == "large":
            record = records.replace(record, value=Value(bytes(5000), ()))
        if trouble == "writes":
            note = notes_write(count, len(notes) - count, array(1.0, 2.0, 3.0), op="assign_add")
            record = records.replace(record, notes=(*notes, note))
        if trouble == "swaps" and len(notes) > 1:
            record = records.replace(record, notes=notes[::-1])
        if trouble == "misfits":
            record = records.replace(record, notes=tuple(map(misfitting, notes)))
        if trouble == "renumbers":
            noted_writes = (records.replace(n, number=n.number + 1) if isinstance(n, WriteNote) else n for n in notes)
            record = records.replace(record, notes=tuple(noted_writes))
        if trouble in ("older", "newer"):
            run = self.run + 1 if trouble == "newer" else max(self.run - 1, series)
            record = records.replace(record, run=(run,))
        record = records.replace(
            record,
            lookahead=self.lookahead if series else 0,
            incarnation=self.incarnations[replica],
            client=client,
            changes=self.changes() if series else (),
        )
        return replace(event, peer=w(replica, self.incarnations[replica]), record=record)

    def changes(self) -> tuple[OptimizerChange, ...]:
        """Hyperparameters that come with a step, of one optimizer or the other, and not with every step."""
        if self.run % 3 == 0:
            return ()
        rate = ("learning_rate", self.run / 8)
        if self.run % 3 == 1:
            return (OptimizerChange(1, (rate,)),)
        return (OptimizerChange(2, (("beta_1", 0.5), rate)), OptimizerChange(1, (rate,)))

    def between(self, what: str) -> None:
        match what:
            case "tick":
                self.hear(Tick())
            case "late tick":
                self.now += 30.0
                self.hear(Tick())
            case "get":
                self.hear(hears(OBSERVER, Get(next(self.requests), (), (), False)))
            case "get bytes":
                self.hear(hears(CONTROLLER, Get(next(self.requests), (1, SUM), ("v2",), True)))
            case "get in vain":
                self.hear(hears(CONTROLLER, Get(next(self.requests), (99,), (), True)))
            case "ask of a worker":
                self.hear(hears(w(0, self.incarnations[0]), Describe(next(self.requests), (3,), (2,))))
            case "locate":
                self.hear(hears(w(0, self.incarnations[0]), Locate(next(self.requests), (1, 2), self.run % 3 - 1)))
            case "wait":
                self.hear(hears(CONTROLLER, WaitReport((self.run,), 1.0)))
            case "statistics":
                self.hear(hears(OBSERVER, Statistics(next(self.requests))))
            case "describe":
                self.hear(hears(OBSERVER, Describe(next(self.requests), (1, 2), (1, 2))))
            case "again" if self.heard:
                self.hear(self.heard[-1])
            case "down":
                self.compare(self.short, self.store)
            case "assign":
                self.hear(hears(CONTROLLER, Assign("c", next(self.requests), 1, "assign", scalar(0.0), None)))
            case "rate":
                rate = (("learning_rate", 0.5),)
                self.hear(hears(CONTROLLER, Configure("c", next(self.requests), 1, "SGD", rate, None, -1)))
            case "steps":
                count = ((1, 7 * self.run),)
                number = next(self.requests)
                self.hear(hears(CONTROLLER, Configure("c", number, 2, "torch.Adam", (), None, -1, None, count)))
            case "cancel":
                self.hear(hears(CONTROLLER, Cancel((self.run,), 1)))
            case "death":
                replica = self.run % self.replicas
                died = dies(replica, self.incarnations[replica]).died
                self.hear(replace(dies(replica), died=records.replace(died, restarts=True)))
                self.incarnations[replica] += 1
                fresh = Register(PROTOCOL, worker(replica, self.incarnations[replica]))
                self.hear(hears(w(replica, self.incarnations[replica]), fresh))
            case "stranger":
                self.hear(replace(self.said(0, KINDS[0], 0), peer=b"w0.7"))
            case "hello":
                self.hear(hears(CONTROLLER, Hello(PROTOCOL, "controller", "c", 7)))


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Kinds that come in turns, whether it is a step of the series, how many there are, what comes into the last of
    them and where, and what else a replica does in it; whether replicas return in the other order."""
    kinds = st.lists(st.sampled_from(KINDS), min_size=1, max_size=3) | st.permutations(KINDS)
    trouble = st.sampled_from(["", "", "", *TROUBLES])
    event = st.none() | st.tuples(st.sampled_from(BETWEEN), st.integers(0, 3))
    return draw(
        st.lists(
            st.tuples(kinds, st.sampled_from([0, 1, 1, 2]), st.integers(1, 20), event, trouble, st.booleans()),
            min_size=1,
            max_size=6,
        )
    )


TROUBLES = ("raises", "large", "writes", "miscounts", "swaps", "other", "older", "newer", "misfits", "renumbers")


def carried_out(two: Two, plan: list[tuple[Any, ...]]) -> None:
    """Steps as :func:`steps` tells them."""
    series = 0
    for kinds, is_of_series, alike, event, trouble, is_turned in plan:
        for number in range(alike):
            kind = kinds[number % len(kinds)]
            is_last = number == alike - 1
            two.run += 1
            series = 0 if not is_of_series else series if series and is_of_series == 1 else two.run
            what, where = event if event is not None and is_last else ("", 0)
            replicas = range(two.replicas)
            for at, replica in enumerate(replicas[::-1] if is_turned else replicas):
                if where == at < 2:
                    two.between(what)
                mine = trouble if is_last and replica == 0 else ""
                said = two.said(replica, KINDS[0] if mine == "other" else kind, series, mine)
                two.heard.append(said)
                two.hear(said)
            if where == 2:
                two.between(what)
            two.settle()
            if where == 3:
                two.between(what)
                two.settle()
    two.compare(two.short, two.store)


@given(replicas=st.integers(1, 3), lookahead=st.integers(0, 2), plan=steps())
@settings(max_examples=examples(40))
def test_the_short_way_is_the_long_way(replicas: int, lookahead: int, plan: list[tuple[Any, ...]]) -> None:
    carried_out(Two(replicas, lookahead), plan)


@pytest.mark.parametrize(
    ("series", "kind"),
    [
        (0, KINDS[0]),
        pytest.param(1, KINDS[9], marks=pytest.mark.long),
        (0, KINDS[12]),
        pytest.param(1, KINDS[13], marks=pytest.mark.slow),
        pytest.param(0, KINDS[9], marks=pytest.mark.slow),
        pytest.param(1, KINDS[0], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("what", [*BETWEEN, *TROUBLES])
def test_what_is_not_plain_comes_among_plain_steps(what: str, series: int, kind: Kind) -> None:
    for where in range(4) if what in BETWEEN else (0,):
        event = (what, where) if what in BETWEEN else None
        trouble = what if what in TROUBLES else ""
        before, after = ([kind], series, 6, event, trouble, False), ([KINDS[1]], series, 5, None, "", True)
        carried_out(Two(2), [before, after])


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("series", [0, 2])
@pytest.mark.parametrize("kind", [KINDS[1], KINDS[7], KINDS[9], KINDS[12], KINDS[13]])
def test_of_a_plain_step_the_messages_are_written_and_nothing_else(kind: Kind, replicas: int, series: int) -> None:
    two = Two(replicas)
    places = set()
    for two.run in range(2, 12):
        before = dict(two.store.items())
        for replica in range(replicas - 1):
            assert two.hear(two.said(replica, kind, series)) == []
        if two.run > 3:  # the first plain one: with it all is written that is known
            assert dict(two.store.items()) == before
        (commit,) = two.hear(two.said(replicas - 1, kind, series))
        assert isinstance(commit, Commit)
        after = dict(two.store.items())
        answers = [type(command.record) for command in two.settle() if isinstance(command, Send)]
        assert answers == [StepFinished] * (replicas * bool(series)) + [RunFinished]
        assert dict(two.store.items()) == after
        changed = {key for key in before | after if before.get(key) != after.get(key)}
        places |= {key for key in changed if key[:1] == PLAIN}
        # What the step before has changed of an optimizer is written with this one.
        has_changed = series and (two.run - 1) % 3 != 0
        written = {key for key in changed if key[:1] != OPTIMIZER}
        assert two.run <= 3 or (len(written) == 1 and written <= places)
        assert two.run <= 3 or has_changed or written == changed
    assert len(places) == (3 if series else 1)  # what those need who did not hear the end


def test_steps_that_something_comes_between_go_the_long_way() -> None:
    two = Two(2)
    for two.run in range(2, 6):
        for replica in (0, 1):
            two.hear(two.said(replica, KINDS[0], 0))
        two.settle()
        is_captured = any(key[:1] == PLAIN for key, _ in two.store.items())
        assert is_captured == (two.run == 2)  # later it is known to be in vain
        two.between("assign")
        two.settle()


def test_where_the_messages_find_no_room_nothing_is_lost() -> None:
    class Narrow(ControlMemory):
        def write(self, changes: Mapping[bytes, bytes | None]) -> None:
            if any(key[:1] == PLAIN and value is not None for key, value in changes.items()):
                raise ControlFull("the control store is full")
            super().write(changes)

    two = Two(2)
    two.compare(two.short, two.store)
    two.store = Narrow()
    two.store.write(dict(two.other_store.items()))
    two.short = Engine(two.config, two.store)
    for two.run in range(2, 6):
        for replica in (0, 1):
            two.hear(two.said(replica, KINDS[0], 2))
        assert two.settle()


def test_messages_that_no_record_could_hold_go_the_long_way() -> None:
    two = Two(2)
    for two.run in range(2, 6):
        for replica in (0, 1):
            said = two.said(replica, KINDS[0] * 400, 0)
            assert isinstance(said.record, Return)
            notes = tuple(records.replace(note, site="s" * 4000) for note in said.record.notes)
            two.hear(replace(said, record=records.replace(said.record, notes=notes)))
        assert two.settle()
        assert not [key for key, _ in two.store.items() if key[:1] == PLAIN]


@pytest.mark.parametrize(("lookahead", "is_plain"), [(16, True), (17, False)])
def test_steps_sent_far_ahead_go_the_long_way(lookahead: int, is_plain: bool) -> None:
    two = Two(1, lookahead)
    for two.run in range(2, 6):
        two.hear(two.said(0, KINDS[0], 2))
        two.settle()
    assert any(key[:1] == PLAIN for key, _ in two.store.items()) is is_plain


def test_a_tick_of_which_nothing_follows_needs_no_room() -> None:
    class Full(ControlMemory):
        def write(self, changes: Mapping[bytes, bytes | None]) -> None:
            raise ControlFull("the control store is full")

    two = Two(2)
    for two.run in range(2, 6):
        for replica in (0, 1):
            two.hear(two.said(replica, KINDS[0], 2))
        two.settle()
    two.store.__class__ = Full
    assert two.hear(Tick()) == []


def test_messages_that_do_not_read_back_are_damage() -> None:
    two = Two(1)
    for two.run in (2, 3):
        two.hear(two.said(0, KINDS[0], 0))
        two.settle()
    ((key, value),) = [entry for entry in two.store.items() if entry[0][:1] == PLAIN]
    two.store.write({key: value[:-40] + bytes(40)})
    with pytest.raises(ControlDamaged, match="does not read back"):
        Engine(two.config, two.store)


class Traced(ControlMemory):
    """A store that keeps what it held after each write."""

    def __init__(self) -> None:
        super().__init__()
        self.states: list[dict[bytes, bytes]] = []

    def write(self, changes: Mapping[bytes, bytes | None]) -> None:
        super().write(changes)
        self.states.append(dict(self.items()))


@pytest.mark.parametrize("between", ["", "get", "tick", "rate"])
@pytest.mark.parametrize("series", [0, 2])
@pytest.mark.parametrize("kinds", [KINDS[:1], (KINDS[12], KINDS[3], KINDS[0]), (KINDS[13], KINDS[11])])
def test_a_server_that_takes_over_between_any_two_writes_goes_on(
    kinds: tuple[Kind, ...], series: int, between: str
) -> None:
    """The workers send to it what they have sent to the server before it and what was not answered."""
    two = Two(2)
    two.compare(two.short, two.store)
    two.store = Traced()
    two.store.write(dict(two.other_store.items()))
    two.short = Engine(two.config, two.store)
    for two.run in range(2, 14):
        two.store.states[:-1] = []
        said = [two.said(replica, kinds[two.run % len(kinds)], series) for replica in (0, 1)]
        commands = [command for each in said for command in two.hear(each)]
        commits = [command for command in commands if isinstance(command, Commit)]
        for state in two.store.states[:-1]:  # the last one has this step
            copy = ControlMemory()
            copy.write(state)
            another = Engine(two.config, copy)
            begun = [command.ticket for command in another.resume() if isinstance(command, Commit)]
            for ticket in begun:
                another.handle(Finished(ticket), two.now)
            again = [command for each in said for command in another.handle(each, two.now)]
            assert [command for command in again if isinstance(command, Commit)] == commits
            for commit in commits:
                again += another.handle(Finished(commit.ticket), two.now)
            assert [each.record for each in again if isinstance(each, Send) and each.peer == CONTROLLER] == [
                RunFinished((two.run,), (result(0), result(1)), None, sum_of(said))
            ]
        two.settle()
        two.between(between)
    assert two.short._server.tables.captured or (between == "rate" and series)


def sum_of(said: list[Received]) -> int:
    """How many commits a step counts as: each merge point is one, and each write note."""
    returned = [event.record for event in said if isinstance(event.record, Return)]
    return returned[0].count + sum(isinstance(note, WriteNote) for each in returned for note in each.notes)


def counted(engine: Engine, *others: Engine) -> tuple[int, dict[str, int]]:
    """What ``strategy.statistics()`` shows of the first engine; the others are asked, too."""
    records = []
    for each in (engine, *others):
        (answer,) = each.handle(hears(OBSERVER, Statistics(1)), 500.0)
        assert isinstance(answer, Send)
        assert isinstance(answer.record, Counters)
        records.append(answer.record)
    assert len({(record.run, record.waiting) for record in records}) == 1
    return records[0].captured, dict(records[0].uncaptured)


def test_captured_steps_are_counted_also_by_the_next_server() -> None:
    two = Two(2)
    first = {reasons.WORDS[reasons.FIRST]: 1}
    assert counted(two.short, two.long) == (0, first)
    for two.run in range(2, 22):
        for replica in (0, 1):
            two.hear(two.said(replica, KINDS[two.run % 2], 0))
        two.settle()
    assert counted(two.short, two.long) == (20, first)
    two.between("assign")
    two.settle()
    assert counted(two.short, two.long) == (20, first)
    for two.run in range(22, 25):
        for replica in (0, 1):
            two.hear(two.said(replica, KINDS[0], 0))
        two.settle()
    copy = ControlMemory()
    copy.write(dict(two.store.items()))
    another = Engine(two.config, copy)
    for command in another.resume():
        if isinstance(command, Commit):
            another.handle(Finished(command.ticket), two.now)
    assert counted(another) == counted(two.short, two.long) == (23, first)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("raises", reasons.FAILED),
        ("large", reasons.LARGE),
        ("miscounts", reasons.FAILED),
        ("wait", reasons.SLOW),
        ("late tick", reasons.SLOW),
        ("assign", reasons.AFTER),
    ],
)
def test_other_runs_are_counted_by_their_reason(
    what: str, reason: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(captured_steps, "_STEP_NBYTES", 5000)
    caplog.set_level("DEBUG", "cs_server.engine")
    two = Two(2)
    carried_out(two, [([KINDS[0]], 0, 6, (what, 1) if what in BETWEEN else None, what, False)])
    captured, uncaptured = counted(two.short, two.long)
    assert (captured, uncaptured.get(reasons.WORDS[reason])) == (5, 1)
    assert "steps are captured from run 2 on" in caplog.text
    assert re.search(rf"5 steps were captured, until a \w+ came: {re.escape(reasons.WORDS[reason])}", caplog.text)


def test_more_kinds_than_have_room_are_captured_after_a_break() -> None:
    two = Two(2)
    kinds: list[Kind] = [("write",) * count for count in range(12)]
    for two.run in range(2, 62):
        for replica in (0, 1):
            two.hear(two.said(replica, kinds[two.run % 12], 0))
        two.settle()
    captured, _ = counted(two.short, two.long)
    assert captured > 45
    two.compare(two.short, two.store)


def test_a_ninth_kind_is_told_from_other_reasons() -> None:
    two = Two(2)
    kinds: list[Kind] = [("write",) * count for count in range(9)]
    for two.run in range(2, 11):
        for replica in (0, 1):
            two.hear(two.said(replica, kinds[two.run - 2], 0))
        two.settle()
    captured, uncaptured = counted(two.short, two.long)
    assert (captured, uncaptured[reasons.WORDS[reasons.KINDS]]) == (8, 1)


def test_what_raises_unforeseen_is_met_in_the_general_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise OverflowError

    two = Two(2)
    with monkeypatch.context() as patched:
        patched.setattr(captured_steps.CapturedSteps, "_operations", fail)
        for two.run in (2, 3):
            for replica in (0, 1):
                two.hear(two.said(replica, KINDS[0], 0))
            two.settle()
    two.compare(two.short, two.store)
    assert counted(two.short, two.long)[0] == 0


def test_reasons_of_a_client_are_not_those_of_the_next() -> None:
    """Even if it counted its runs from 1 again."""
    two = Two(2)
    for two.run in range(2, 12):
        for replica in (0, 1):
            two.hear(two.said(replica, KINDS[0], 0))
        two.settle()
    two.hear(ClientLeft("c"))
    two.hear(hears(b"c2", Hello(PROTOCOL, "controller", "d", 9)))
    before, _ = counted(two.short, two.long)
    assert before == 10
    for two.run in range(1, 12):  # none is captured: each asks
        run = (two.run,)
        for replica in (0, 1):
            asked = asks(replica, first_apply(0, 1, 2, optimizer=1), run=run)
            two.hear(replace(asked, record=records.replace(asked.record, client="d")))
        two.settle()
        for replica in (0, 1):
            returned = returns(replica, 1, run=run)
            two.hear(replace(returned, record=records.replace(returned.record, client="d")))
        two.settle()
    assert counted(two.short, two.long)[0] == before


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule("ExponentialDecay", (0.1, 1e-310, 0.5, 1.0)),
        Schedule("CosineDecayRestarts", (0.1, 1e-310, 2.0, 1.0, 0.0)),
        Schedule("CosineDecayRestarts", (0.1, 1e-310, 1.0, 0.5, 0.0)),
    ],
)
def test_a_schedule_beyond_the_range_of_a_float_ends_no_server(schedule: Schedule) -> None:
    two = Two(2)
    for two.run in (2, 3, 4):
        for replica in (0, 1):
            two.hear(two.said(replica, KINDS[0], 0))
        two.settle()
    two.hear(hears(CONTROLLER, Configure("c", 50, 1, "SGD", (), schedule, -1)))
    copy = ControlMemory()
    copy.write(dict(two.store.items()))
    Engine(two.config, copy).resume()
    for two.run in (5, 6):
        for replica in (0, 1):
            two.hear(two.said(replica, KINDS[0], 0))
        two.settle()
    two.compare(two.short, two.store)
