"""Plain steps: whatever comes between them, an engine that takes the short way says and knows what one that never does
says and knows."""

from __future__ import annotations

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
    dies,
    first_apply,
    handled,
    hears,
    notes_write,
    returns,
    scalar,
    spec,
    w,
    worker,
)

from cs_proto import records, segment_names
from cs_proto.arrays import Array, Location
from cs_proto.messages import (
    PROTOCOL,
    ApplyPoint,
    Assign,
    Cancel,
    Configure,
    Create,
    Describe,
    Hello,
    Locate,
    OptimizerUpdate,
    Register,
    Return,
    RunFinished,
    SparseGradient,
    Statistics,
    StepFinished,
    Value,
)
from cs_server.engine.engine import Config, Engine
from cs_server.engine.store.control_log import ControlDamaged, ControlFull, ControlMemory
from cs_server.events import Command, Commit, Event, Finished, MemoryAvailable, Received, Send, Tick

PLAIN = b"y"
"""The first letter of the keys of steps of which only the messages are in the store."""

# The merge points of a step: optimizer and set of what each applies, and of which variables the gradients are sparse;
# or several of these, which one apply brings together.
Kind: TypeAlias = tuple[tuple[Any, ...], ...]
KINDS: tuple[Kind, ...] = (
    ((1, 1),),
    ((1, 1), (2, 2)),
    ((2, 2), (2, 2)),
    (),
    ((1, 1, 2),),
    (((1, 1), (2, 3)), (2, 2)),
    (((1, 1), (2, 2)),),  # refused: they have variables in common
    ((1, 1), (2, 2, 1, 2)),
)
BETWEEN = ("tick", "statistics", "describe", "again", "down", "assign", "rate", "cancel", "death", "stranger", "hello")


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


def misfitting(note: ApplyPoint) -> ApplyPoint:
    """The same with sparse gradients whose rows are wider than the variable's."""
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
        self.now = 100.0
        self.under_way: list[int] = []
        self.heard: list[Received] = []
        self.incarnations = [1] * replicas
        self.requests = count(10)
        self.run = 1
        begin = Playbook(replicas).begin_events()
        made = [hears(CONTROLLER, Create("c", n, spec(f"v{n}", (3,)), None)) for n in (1, 2, 3)]
        for number, kind in ((4, "SGD"), (5, "Adam")):
            pairs = tuple(DEFAULTS[kind].items())
            made.append(hears(CONTROLLER, Configure("c", number, 0, kind, pairs, None, -1)))
        made.append(hears(w(0), Locate(0, (1,), 1)))
        for event in [*begin, *made]:
            self.hear(event)
            self.settle()
        for k, (optimizer, *variables) in enumerate(((1, 1, 2), (2, 1, 2), (2, 3))):
            for replica in range(replicas):
                self.hear(asks(replica, first_apply(k, *variables, optimizer=optimizer)))
            self.settle()
        for replica in range(replicas):
            self.hear(returns(replica, 3))
        self.settle()

    def hear(self, event: Event) -> list[Command]:
        self.now += 0.25
        self.long.handle(MemoryAvailable(1 << 30), self.now)  # after which no step is plain
        commands = handled(lambda each: self.short.handle(each, self.now), event)
        assert commands == handled(lambda each: self.long.handle(each, self.now), event)
        begun = [command.ticket for command in commands if isinstance(command, Commit)]
        self.under_way += begun
        if begun:  # what the next server would know
            copy = ControlMemory()
            copy.write(dict(self.store.items()))
            self.compare(Engine(self.config, copy), copy)
        return commands

    def compare(self, engine: Engine, store: ControlMemory) -> None:
        engine.write_down()
        self.long.write_down()
        assert dict(store.items()) == dict(self.other_store.items())

    def settle(self) -> list[Command]:
        commands: list[Command] = []
        while self.under_way:
            commands += self.hear(Finished(self.under_way.pop(0)))
        return commands

    def said(self, replica: int, kind: Kind, series: int, trouble: str = "", client: str = "c") -> Received:
        notes = tuple(applies(k, replica, self.run, *each) for k, each in enumerate(kind))
        raises = "builtins.ValueError" if trouble == "raises" else ""
        event = returns(replica, len(kind) + (trouble == "miscounts"), notes, (self.run,), raises, series=series)
        record = event.record
        assert isinstance(record, Return)
        if trouble == "large":
            record = records.replace(record, value=Value(bytes(5000), ()))
        if trouble == "writes":
            note = notes_write(len(kind), 0, array(1.0, 2.0, 3.0), op="assign_add")
            record = records.replace(record, notes=(*notes, note))
        if trouble == "swaps" and len(notes) > 1:
            record = records.replace(record, notes=notes[::-1])
        if trouble == "misfits":
            record = records.replace(record, notes=tuple(map(misfitting, notes)))
        if trouble in ("older", "newer"):
            run = self.run + 1 if trouble == "newer" else max(self.run - 1, series)
            record = records.replace(record, run=(run,))
        record = records.replace(
            record,
            lookahead=self.lookahead if series else 0,
            incarnation=self.incarnations[replica],
            client=client,
        )
        return replace(event, peer=w(replica, self.incarnations[replica]), record=record)

    def between(self, what: str) -> None:
        match what:
            case "tick":
                self.hear(Tick())
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
    """Kind, whether it is a step of the series, how many alike, what comes into the last of them and where, and what
    else a replica does in it; whether replicas return in the other order."""
    kind = st.sampled_from(KINDS)
    trouble = st.sampled_from(["", "", "", *TROUBLES])
    event = st.none() | st.tuples(st.sampled_from(BETWEEN), st.integers(0, 3))
    return draw(
        st.lists(
            st.tuples(kind, st.sampled_from([0, 1, 1, 2]), st.integers(1, 6), event, trouble, st.booleans()),
            min_size=1,
            max_size=6,
        )
    )


TROUBLES = ("raises", "large", "writes", "miscounts", "swaps", "other", "older", "newer", "misfits")


def carried_out(two: Two, plan: list[tuple[Any, ...]]) -> None:
    """Steps as :func:`steps` tells them."""
    series = 0
    for kind, is_of_series, alike, event, trouble, is_turned in plan:
        for number in range(alike):
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
        pytest.param(1, KINDS[-1], marks=pytest.mark.long),
        pytest.param(0, KINDS[-1], marks=pytest.mark.slow),
        pytest.param(1, KINDS[0], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("what", [*BETWEEN, *TROUBLES])
def test_what_is_not_plain_comes_among_plain_steps(what: str, series: int, kind: Kind) -> None:
    for where in range(4) if what in BETWEEN else (0,):
        event = (what, where) if what in BETWEEN else None
        trouble = what if what in TROUBLES else ""
        before, after = (kind, series, 6, event, trouble, False), (KINDS[1], series, 5, None, "", True)
        carried_out(Two(2), [before, after])


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("series", [0, 2])
@pytest.mark.parametrize("kind", [KINDS[1], KINDS[-3], KINDS[-1]])
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
        assert two.run <= 3 or (len(changed) == 1 and changed <= places)
    assert len(places) == (3 if series else 1)  # what those need who did not hear the end


def test_steps_that_something_comes_between_go_the_long_way() -> None:
    two = Two(2)
    for two.run in range(2, 6):
        for replica in (0, 1):
            two.hear(two.said(replica, KINDS[0], 0))
        two.settle()
        assert not [key for key, _ in two.store.items() if key[:1] == PLAIN]
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
