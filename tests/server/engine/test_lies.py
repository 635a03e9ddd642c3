"""Records that are valid and untrue, from whomever, at any moment: each is acted on or refused, and a refused one has
changed nothing."""

from __future__ import annotations

import dataclasses
import logging
import types
import typing
from collections import deque
from functools import cache
from typing import Annotated, Any, Literal, Union

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples
from tests.harness.playbook import (
    CONTROLLER,
    OBSERVER,
    Playbook,
    applies,
    array,
    asks,
    assigns,
    first_apply,
    gathers,
    handled,
    hears,
    makes,
    merge_calls,
    notes_write,
    reads,
    reduces,
    result,
    returns,
    scalar,
    spec,
    to,
    w,
)

from cs_proto.arrays import Array, Location, array_of
from cs_proto.errors import LocalProtocolError
from cs_proto.messages import (
    Assign,
    Configure,
    Create,
    Get,
    MergeCallReturn,
    Refused,
    Resent,
    Return,
    RunFinished,
    Statistics,
    Value,
)
from cs_proto.records import RECORDS, Frame, Record
from cs_server.engine.engine import Engine
from cs_server.engine.steps import replica_messages, runs
from cs_server.engine.store.control_log import ControlMemory
from cs_server.engine.store.state import State
from cs_server.events import (
    Command,
    Commit,
    Compute,
    Computed,
    Event,
    Fingerprint,
    Fingerprinted,
    Finished,
    Listening,
    Received,
    Send,
    Tick,
)

KINDS = [
    kind for _, kind in sorted(RECORDS.items()) if kind.__module__.startswith("cs_proto.messages.") and kind.code < 110
]
TOP = [kind for kind in KINDS if kind.code >= 10 and kind.code != 20 and not 50 <= kind.code <= 57]
PEERS = [w(0), w(1), w(0, 2), w(7), CONTROLLER, OBSERVER, b"c9", b"x"]

# --- a training ---------------------------------------------------------------------------------------------------


def training() -> list[Event]:
    """What two workers and a controller honestly say, with a bit of everything."""
    book = Playbook(2)
    sgd = (("learning_rate", 0.1), ("momentum", 0.0), ("nesterov", 0.0))
    events: list[Event] = [
        Listening(),
        *book.begin_events(),
        hears(CONTROLLER, Create("c", 1, spec("w"), scalar(1))),
        hears(CONTROLLER, Create("c", 2, spec("t", (4, 2)), None)),
        hears(CONTROLLER, Configure("c", 3, 0, "SGD", sgd, None, -1)),
        hears(CONTROLLER, Assign("c", 4, 1, "assign_add", scalar(2))),
    ]
    for run in (1, 2):
        events += [asks(r, first_apply(0, 1, 2), run=(run,)) for r in (0, 1)]
        events += [returns(r, 1, run=(run,)) for r in (0, 1)]
    events += [returns(r, 1, (applies(0),), run=(run,)) for run in (3, 4, 5) for r in (1, 0)]
    events.append(Tick())
    run = (6,)
    events += [asks(r, reduces(0, scalar(r)), run=run) for r in (0, 1)]
    events += [hears(OBSERVER, Get(1, (1,), (), True)), hears(OBSERVER, Statistics(2))]
    noted = (assigns(1, scalar(1)), notes_write(2, 0, array_of(np.ones((1, 2), np.float32)), rows(), variable=2))
    events += [asks(r, reads(2), noted[: 2 - r], run=run) for r in (0, 1)]
    events += [asks(r, makes(2, spec("made"), scalar(3)), run=run) for r in (0, 1)]
    events += [asks(r, gathers(3, array(r)), run=run) for r in (0, 1)]
    events += [asks(r, merge_calls(4), run=run) for r in (0, 1)]
    events += [hears(w(0), Assign("6.0", 1, 1, "assign", scalar(9)))]
    events += [returns(r, 0, run=(6, 4, 0)) for r in (1, 0)]
    events += [hears(w(0), MergeCallReturn(run, 4, (Value(b"", ()),) * 2, None))]
    events += [returns(r, 5, run=run) for r in (0, 1)]
    series = [returns(r, 1, (applies(0),), run=(run,), series=7) for run in (7, 8, 9) for r in (0, 1)]
    return [*events, *series, returns(0, 0, run=(10,), raises="ValueError"), returns(1, 0, run=(10,))]


def rows() -> Array:
    return array_of(np.array([1], np.int64))


HONEST = training()


class Played:
    """An engine that hears the training, and lies at some moments of it."""

    def __init__(self) -> None:
        self.config = Playbook(2).config
        self.store = ControlMemory()
        self.engine = Engine(self.config, self.store)
        self.said: list[list[Command]] = []
        self._due = deque[Event](HONEST)

    def goes_on(self, count: int = 1 << 30) -> None:
        """The next events of the training, and what follows from them."""
        for _ in range(count):
            if not self._due:
                return
            commands = self.hears(self._due.popleft())
            self.said.append(commands)
            for command in reversed(commands):
                if (outcome := outcome_of(command)) is not None:
                    self._due.appendleft(outcome)

    def hears(self, event: Event) -> list[Command]:
        return handled(lambda event: self.engine.handle(event, 50.0), event)

    @property
    def known(self) -> dict[str, Any]:
        """All that the engine knows, but for how often it was spoken to and when."""
        tables = self.engine._server.tables
        found = {name: dict(table) for name, table in vars(tables).items() if hasattr(table, "letter")}
        tally = {k: v for k, v in vars(tables.tally).items() if k not in ("messages", "seen")}
        plain = {
            k: v for k, v in vars(self.engine._captured).items() if k in ("_held", "_run", "_returns", "_committing")
        }
        index = self.engine._server.index
        return {**found, **tally, **plain, "names": dict(index.numbers), "set numbers": dict(index.set_numbers)}


def outcome_of(command: Command) -> Event | None:
    match command:
        case Commit(ticket):
            return Finished(ticket)
        case Compute(ticket):
            return Computed(ticket, (scalar(1),), None)
        case Fingerprint(ticket):
            return Fingerprinted(ticket, b"same")
    return None


@cache
def honest() -> list[list[Command]]:
    played = Played()
    played.goes_on()
    return played.said


def test_the_training_is_one() -> None:
    ends = [c.record for said in honest() for c in said if isinstance(c, Send) and isinstance(c.record, RunFinished)]
    assert [end.run[0] for end in ends] == [1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10]
    assert [end.error is None for end in ends] == [True] * 10 + [False]
    refusals = [c.record for said in honest() for c in said if isinstance(c, Send) and isinstance(c.record, Refused)]
    assert refusals == []


# --- lies -----------------------------------------------------------------------------------------------------------

LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "run": st.sampled_from([(n,) for n in range(1, 12)] + [(6, 4, 0), (6, 4, 1), (6, 0, 0), (70,), (1 << 60,)]),
    "client": st.sampled_from(["c", "", "o", "6.0", "z"]),
    "series": st.sampled_from([0, 0, 0, 7, 1]),
    "protocol": st.sampled_from([1, 1, 1, 2]),
    "incarnation": st.sampled_from([1, 1, 1, 2, (1 << 31) - 1]),
    "segment": st.sampled_from(["parameters/float32", "arena/0", "nowhere"]),
    "dtype": st.sampled_from(["float32", "float32", "int64", "bool"]),
    "digest": st.just(bytes(16)),
    "kind": st.sampled_from(["SGD", "Adam", "None"]),
    "exception": st.sampled_from(["ValueError", "cs.MergeMismatchError", "none"]),
}
ARRAYS = st.sampled_from(
    [
        *(scalar(1), array(1, 2), rows(), array_of(np.ones((4, 2), np.float32)), array_of(np.ones((1, 2), np.float32))),
        *(Array("float32", shape, Location("parameters/float32", 0)) for shape in [(), (4, 2), (1 << 40,)]),
        Array("int64", (1,), Location("arena/0", 1 << 50)),
    ]
)


def lies_of(hint: Any, name: str = "") -> st.SearchStrategy[Any]:
    if name in LIKELY:
        return LIKELY[name]
    if hint is Array:
        return ARRAYS
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        least, most = arguments[1].least, arguments[1].most
        likely = [each for each in (0, 1, 1, 2, 3, 4, -1, 7, least, most) if least <= each <= most]
        return st.sampled_from([arguments[0](each) for each in likely])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[1:] == (Ellipsis,):
        return st.lists(lies_of(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(lies_of, arguments))
    if origin in (Union, types.UnionType):
        return st.one_of(*map(lies_of, arguments))
    if isinstance(hint, type) and issubclass(hint, Record):
        return st.deferred(lambda: lying(hint))
    plain: dict[Any, st.SearchStrategy[Any]] = {
        str: st.sampled_from(["w", "t", "x", ""]),
        bytes: st.just(b""),
        bool: st.booleans(),
        type(None): st.none(),
        Frame: st.just(Frame(b"")),
    }
    return plain[hint]


@cache
def lying(kind: type[Record]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    named = {field.name: lies_of(hints[field.name], field.name) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]

    def built(values: dict[str, Any]) -> Record | None:
        try:
            return kind(**values)
        except LocalProtocolError:
            return None

    return st.fixed_dictionaries(named).map(built).filter(lambda made: made is not None)


def told(record: Any, peer: bytes | None) -> Received:
    """By ``peer``, or by whoever says such things."""
    if peer is None and hasattr(record, "replica"):
        peer = CONTROLLER if isinstance(record, Resent) else w(record.replica)
    return Received(peer or (w(0) if isinstance(record, MergeCallReturn) else CONTROLLER), record)


LIES = st.builds(
    told, st.sampled_from(TOP).flatmap(lying), st.one_of(st.none(), st.none(), st.none(), st.sampled_from(PEERS))
)


def is_refused(lie: Received, commands: list[Command]) -> bool:
    return len(commands) == 1 and isinstance(commands[0], Send) and isinstance(commands[0].record, Refused)


@settings(max_examples=examples(200))
@given(st.integers(0, len(HONEST) + 20), st.lists(LIES, min_size=1, max_size=4))
def test_a_lie_is_acted_on_or_refused_and_a_refused_one_has_changed_nothing(moment: int, lies: list[Received]) -> None:
    played = Played()
    played.goes_on(moment)
    is_clean = True
    for lie in lies:
        played.engine.write_down()
        before = played.known
        commands = played.hears(lie)
        if is_refused(lie, commands):
            after = played.known
            if hasattr(lie.record, "sequence"):  # what was said to a write is kept, to be said again
                is_clean = is_clean and after["requests"] == before["requests"]
                after["requests"] = before["requests"]
            assert after == before
        else:
            is_clean = False
            for command in commands:
                if (outcome := outcome_of(command)) is not None:
                    played._due.appendleft(outcome)
    played.goes_on()
    if is_clean:
        assert [without_counts(said) for said in played.said] == [without_counts(said) for said in honest()]


@pytest.mark.parametrize("replica", [2, 1023])
def test_a_replica_that_there_is_not_is_named(replica: int) -> None:
    book = Playbook(2).begin()
    refused = to(CONTROLLER, Refused, "cs.InvalidArgumentError", f"no replica {replica}; this service has 2")
    book.on(hears(CONTROLLER, Resent((1,), replica)), refused)


def without_counts(said: list[Command]) -> list[Command]:
    """Lies are counted among the messages, and nothing else of them is seen."""
    return [each for each in said if not (isinstance(each, Send) and hasattr(each.record, "messages"))]


# --- an engine that is wrong itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KeyError, IndexError, AssertionError, ZeroDivisionError, MemoryError, RecursionError])
def test_an_unforeseen_exception_is_a_refusal_that_changes_nothing(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    played = Played()
    played.goes_on(len(HONEST) - 12)
    played.engine.write_down()
    before = played.known

    def broken(server: State, *_: object) -> bool:
        for run in server.tables.runs:
            del server.tables.runs[run]
        raise kind("-5")

    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(runs, "begin_again", broken)
        for _ in range(3):
            (refused,) = played.hears(hears(CONTROLLER, Resent((9,), 0)))
            assert to(CONTROLLER, Refused, "cs.PeerProtocolError", f"Resent .*{kind.__name__}.*nothing").fits(refused)
    assert played.known == before
    (told,) = [record for record in caplog.records if record.exc_info is not None]  # once, however often it comes
    assert "in broken" in caplog.text
    played.goes_on()
    assert [without_counts(said) for said in played.said] == [without_counts(said) for said in honest()]
    assert isinstance(told.exc_info, tuple)


def test_a_question_in_a_run_that_cannot_be_acted_on_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    book = Playbook(2).begin()
    real = replica_messages._ask

    def broken(server: State, peer: bytes, record: Any, now: float) -> None:
        if record.replica == 1:
            raise KeyError(record.replica)
        real(server, peer, record, now)

    with monkeypatch.context() as patched:
        patched.setattr(replica_messages, "_ask", broken)
        book.does(asks(0, reduces(0, scalar(1))))
        (failed,) = book.does(asks(1, reduces(0, scalar(1))))
    assert isinstance(failed, Send)
    assert type(failed.record).__name__ == "PointFailed"
    echo = Return((1,), 1, 1, (), 1, None, failed.record.error)  # type: ignore[attr-defined]
    book.does(hears(w(1), echo))
    book.does(returns(0, 1, raises="cs.MergeMismatchError"))
    book.on(returns(0, 0, run=(2,)))
    book.on(returns(1, 0, run=(2,)), Send(CONTROLLER, RunFinished((2,), (result(0), result(1)), None, 0)))
