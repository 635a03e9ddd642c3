"""The engine as a whole: the order of arrival decides nothing, restarts lose nothing, and nothing is half done."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples
from tests.harness.playbook import (
    CONTROLLER,
    DEFAULTS,
    OBSERVER,
    Playbook,
    applies,
    array,
    asks,
    assigns,
    computes,
    dies,
    fault,
    first_apply,
    gathers,
    handled,
    hears,
    makes,
    merge_calls,
    reads,
    reduces,
    returns,
    scalar,
    spec,
    steps,
    to,
    w,
)

from cs_proto.arrays import Location, array_of
from cs_proto.messages import (
    PROTOCOL,
    Ask,
    Assign,
    Cancel,
    Committed,
    Configure,
    Create,
    CreatePoint,
    Describe,
    Free,
    GatherPoint,
    Get,
    Hello,
    MergeCallPoint,
    MergeCallReturn,
    PointFailed,
    Preserve,
    ReadPoint,
    ReducePoint,
    Refused,
    Return,
    RunFinished,
    StepFinished,
    Token,
    Value,
)
from cs_proto.records import Record
from cs_server.engine.engine import Engine
from cs_server.engine.store.control_log import ControlFull, ControlLog
from cs_server.events import (
    Allocate,
    Command,
    Commit,
    Compute,
    Computed,
    Discard,
    Event,
    Fill,
    Finished,
    Listening,
    ProcessDied,
    Received,
    Send,
    Tick,
)

RUN = (2,)

# --- replicas that follow a program ---------------------------------------------------------------------------------

#: What a replica may do next, given the number of its next merge point and who it is.
MOVES: dict[str, Callable[[int, int], Any]] = {
    "apply": lambda k, r: applies(k, buffers=k % 2),
    "apply both": lambda k, r: first_apply(k, 1, 2),
    "apply nothing there": lambda k, r: first_apply(k, 9),
    "assign": lambda k, r: assigns(k, scalar(r)),
    "assign 5": lambda k, r: assigns(k, scalar(5), checked=True),
    "assign r": lambda k, r: assigns(k, scalar(r), variable=2, checked=True),
    "all_reduce": lambda k, r: reduces(k, scalar(r), line=k),
    "all_gather": lambda k, r: gathers(k, array(r), line=k),
    "read": lambda k, r: reads(k),
    "create": lambda k, r: makes(k, spec("made"), scalar(r)),
    "merge_call": lambda k, r: merge_calls(k, b"%d" % r),
}
WAITED = (ReadPoint, ReducePoint, GatherPoint, CreatePoint, MergeCallPoint)
PRESERVED = (ReadPoint, MergeCallPoint)


@dataclass
class Replica:
    """A worker that does what its program says, and returns or raises at its end."""

    number: int
    program: list[str]
    k: int = 0
    #: The point whose answer it waits for, and the question.
    awaited: Any = None
    asked: Ask | None = None
    has_returned: bool = False
    given_back: MergeCallReturn | None = None
    notes: list[Any] = field(default_factory=list)
    answers: list[Record] = field(default_factory=list)

    def next_message(self) -> Record:
        """What it sends next. It must not be waiting."""
        if self.given_back is not None:
            given_back, self.given_back = self.given_back, None
            return given_back
        while self.program:
            move = self.program.pop(0)
            if move == "raise":
                return self._return("ValueError")
            point = MOVES[move](self.k, self.number)
            self.k += not isinstance(point, ReadPoint)
            if isinstance(point, WAITED) or getattr(point, "checked", False) or getattr(point, "needs_answer", False):
                self.awaited = point
                notes, self.notes = tuple(self.notes), []
                self.asked = Ask(RUN, self.number, 1, notes, point, preserved=isinstance(point, PRESERVED))
                return self.asked
            self.notes.append(point)
        return self._return("")

    def hear(self, answer: Record) -> None:
        """Take an answer for which it waits; a token is given back next."""
        reads = isinstance(self.awaited, ReadPoint)
        if self.awaited is None or answer.k != self.awaited.k or isinstance(answer, Committed) > reads:  # type: ignore[attr-defined]
            return
        self.answers.append(answer)
        self.awaited = None
        if isinstance(answer, PointFailed) and answer.ends_run:
            self.program = ["raise"]
        if isinstance(answer, Token):
            shares = tuple(Value(a.body + b"!", ()) for a in answer.arguments)
            self.given_back = MergeCallReturn(RUN, answer.k, shares, None)

    def _return(self, code: str) -> Return:
        self.has_returned = True
        failed = self.answers and isinstance(self.answers[-1], PointFailed) and self.answers[-1].ends_run
        error = fault("cs.MergeMismatchError" if failed else code, self.number, self.k) if code else None
        value = None if code else Value(b"%d" % self.number, ())
        notes, self.notes = tuple(self.notes), []
        return Return(RUN, self.number, 1, notes, self.k, value, error)


def play(programs: list[list[str]], chance: random.Random | None) -> tuple[list[object], Record, list[list[Record]]]:
    """What was committed, how the run ended and what each replica was answered.

    With ``chance`` messages of different replicas overtake each other, arithmetic and commits take their time, and
    messages are repeated.
    """
    book = Playbook(len(programs)).begin().has(spec("w"), spec("b")).has_second_buffers(1).has_optimizer().has_set(1)
    replicas = [Replica(number, list(program)) for number, program in enumerate(programs)]
    before = len(book.commands)
    pending: deque[Event] = deque()
    sent: list[Event] = []
    seen = before

    def deliver(event: Event) -> None:
        nonlocal seen
        book.does(event)
        if isinstance(event, Received):
            sent.append(event)
        for command in book.commands[seen:]:
            hear(command)
        seen = len(book.commands)

    def hear(command: Command) -> None:
        match command:
            case Commit(ticket):
                pending.append(Finished(ticket))
            case Compute(ticket, _, _, components):
                total = sum(float(np.frombuffer(c[0].place.data, "float32")[0]) for c in components)  # type: ignore[union-attr]
                pending.append(Computed(ticket, (scalar(total),), None))
            case Send(peer, Preserve()):
                asked = replicas[int(peer[1:2])].asked
                assert asked is not None
                pending.append(hears(peer, replace(asked, preserved=True)))
            case Send(peer, record) if peer != CONTROLLER:
                replicas[int(peer[1:2])].hear(record)

    for _ in range(1000):
        ready = [replica for replica in replicas if replica.awaited is None and not replica.has_returned]
        if chance is not None and sent and chance.random() < 0.2:
            again = chance.choice(sent)
            commands = book.does(again)
            assert not any(isinstance(c, Commit | Compute | Allocate) for c in commands)
            seen = len(book.commands)
        elif pending and (not ready or chance is None or chance.random() < 0.5):
            deliver(pending.popleft())
        elif ready:
            replica = ready[0] if chance is None else chance.choice(ready)
            deliver(hears(w(replica.number), replica.next_message()))
        else:
            break
    book.repeat_all()
    operations = [o for c in book.commands[before:] if isinstance(c, Commit) for o in c.operations]
    ends = {c.record: None for c in book.commands[before:] if isinstance(c, Send) and isinstance(c.record, RunFinished)}
    assert len(ends) == 1
    return operations, next(iter(ends)), [replica.answers for replica in replicas]


@st.composite
def programs(draw: st.DrawFn) -> list[list[str]]:
    """Mostly the same program on 1-3 replicas, of which some leave it somewhere."""
    common = draw(st.lists(st.sampled_from(sorted(MOVES)), max_size=5))
    made = []
    for _ in range(draw(st.integers(1, 3))):
        own = list(common)
        for change in draw(st.lists(st.sampled_from(["raise", "return", *sorted(MOVES)]), max_size=1)):
            at = draw(st.integers(0, len(own)))
            if change == "return":
                del own[at:]
            else:
                own[at : at + 1] = [change]
        made.append(own)
    return made


@given(programs(), st.integers(0, 1 << 30))
@settings(max_examples=examples(25))
def test_the_order_of_arrival_decides_nothing(plan: list[list[str]], seed: int) -> None:
    assert play(plan, random.Random(seed)) == play(plan, None)


def test_everything_at_once() -> None:
    plan = ["apply", "all_reduce", "apply both", "read", "create", "assign", "merge_call", "all_gather", "apply"]
    operations, end, answers = play([list(plan) for _ in range(3)], random.Random(0))
    kinds = [type(operation).__name__ for operation in operations]
    assert kinds == ["Apply", "Apply", "Write", "Write", "Apply"]
    assert isinstance(end, RunFinished)
    assert (end.error, end.commits, len(end.values)) == (None, 5, 3)
    heard = [type(answer).__name__ for answer in answers[1]]
    assert heard == ["Reduced", "Accepted", "Committed", "CreatedInRun", "Merged", "Reduced"]


# --- restarts -------------------------------------------------------------------------------------------------------


def test_a_restarted_server_does_again_what_was_under_way() -> None:
    book = Playbook(2).begin().has(spec("w")).has_optimizer().has_set(1)
    assert all(isinstance(command, Allocate) for command in book.resume())
    assert len(book.resume()) == 3
    for replica in (0, 1):
        book.does(returns(replica, 1, (applies(0),), run=(2,)))
    (*opened, commit) = book.resume()
    assert commit == book.commands[-1] == Commit(book.ticket(), (replace(steps(2, ((0, 1),)), variables=(1,)),))
    assert all(isinstance(command, Allocate) for command in opened)
    book.settle()
    for replica in (0, 1):
        book.does(asks(replica, reduces(0, scalar(replica)), run=(3,)))
    assert book.resume()[-1] == book.commands[-1]
    assert computes((scalar(0),), (scalar(1),), reduce="SUM").fits(book.resume()[-1])


def test_every_kind_of_commit_can_be_done_again() -> None:
    book = Playbook(1).begin()

    def is_done_again() -> None:
        assert book.resume()[-1] == next(c for c in reversed(book.commands) if isinstance(c, Commit))
        book.settle()

    book.does(hears(CONTROLLER, Create("c", book.sequence(), spec("w"), scalar(1))))
    is_done_again()
    book.does(hears(CONTROLLER, Assign("c", book.sequence(), 1, "assign", scalar(1))))
    is_done_again()
    book.has_optimizer("Adam")
    book.does(asks(0, first_apply(0, 1)))
    assert isinstance(book.resume()[-1].operations[0], Fill)  # type: ignore[union-attr]
    is_done_again()
    book.does(asks(0, makes(1, spec("b"), scalar(2))))
    is_done_again()


def test_a_restarted_server_gives_back_what_may_not_have_been() -> None:
    book = Playbook(1).begin().has(spec("a", (9,), "int32"), spec("b", (9,), "int32"))
    given = [c for c in book.does(hears(CONTROLLER, Free("c", book.sequence(), (1,)))) if isinstance(c, Discard)]
    again = [c for c in book.resume() if isinstance(c, Discard)]
    assert [(c.segment, c.start) for c in again] == [(c.segment, c.start) for c in given] == [("parameters/int32", 0)]
    assert 36 <= again[0].stop <= 64  # and not the other variable


# --- what does not fit the store ------------------------------------------------------------------------------------


class Narrow:
    """An engine over a store of a few kilobytes."""

    def __init__(self, replicas: int = 2) -> None:
        self.config = replace(Playbook(replicas).config)
        self.buffer = np.zeros(2 * 6144, np.uint8)
        for event in Playbook(replicas).begin_events():
            self.handle(event)

    def handle(self, event: Event) -> list[Command]:
        engine = Engine(self.config, ControlLog(self.buffer))
        commands = handled(lambda event: engine.handle(event, 1.0), event)
        engine.write_down()
        return commands


BULK = array_of(np.ones(6000, np.uint8))


def test_what_is_too_large_to_write_down_is_an_error_and_the_run_goes_on() -> None:
    engine = Narrow()
    big = Value(b"", (BULK,))
    failed = engine.handle(asks(0, replace(merge_calls(0), arguments=big)))
    assert to(w(0), PointFailed, "cs.MemoryPlanError", "control store is full", k=0, ends_run=True).fits(failed[0])
    engine.handle(asks(0, reduces(0, scalar(1))))
    (compute,) = engine.handle(asks(1, reduces(0, scalar(1))))
    assert isinstance(compute, Compute)
    answers = engine.handle(Computed(compute.ticket, (BULK,), None))
    wanted = [to(w(r), PointFailed, "cs.MemoryPlanError", "full", ends_run=False) for r in (0, 1)]
    assert [expected.fits(answer) for expected, answer in zip(wanted, answers, strict=True)] == [True, True]
    assert engine.handle(hears(w(0), Return((1,), 0, 1, (), 1, big, None))) == []
    (end,) = engine.handle(returns(1, 1))
    assert to(CONTROLLER, RunFinished, "cs.MemoryPlanError", "control store is full").fits(end)


def test_a_merge_call_whose_results_are_too_large_fails_at_all() -> None:
    engine = Narrow()
    for replica in (0, 1):
        engine.handle(asks(replica, merge_calls(0)))
    (answer,) = engine.handle(hears(w(0), MergeCallReturn((1,), 0, (Value(b"", (BULK,)), Value(b"", ())), None)))
    assert to(w(1), PointFailed, "cs.MemoryPlanError", "full", ends_run=True).fits(answer)


def test_a_request_that_is_too_large_is_refused() -> None:
    engine = Narrow()
    create = Create("c", 3, spec("w", (6000,), "uint8"), BULK)
    *_, refused, given_back = engine.handle(hears(CONTROLLER, create))
    assert to(CONTROLLER, Refused, "cs.MemoryPlanError", "full", number=3).fits(refused)
    assert given_back == Discard("parameters/uint8", 0, 6000)
    (got,) = engine.handle(hears(OBSERVER, Get(1, (), (), False)))
    assert got.record.variables == ()  # type: ignore[union-attr]


def test_what_was_refused_leaves_its_name_free() -> None:
    # One engine all through: what it has derived from the tables must be forgotten as well.
    engine = Engine(Playbook(1).config, ControlLog(np.zeros(2 * 6144, np.uint8)))
    handle = partial(handled, lambda event: engine.handle(event, 1.0))
    for event in Playbook(1).begin_events():
        handle(event)
    handle(hears(CONTROLLER, Create("c", 1, spec("w", (6000,), "uint8"), BULK)))
    created = handle(hears(CONTROLLER, Create("c", 2, spec("w"), None)))[-1]
    assert created.record.variable.spec.name == "w"  # type: ignore[union-attr]


def test_where_not_even_an_error_fits_the_store_says_so() -> None:
    book = Playbook(1)
    engine = Engine(book.config, ControlLog(np.zeros(80, np.uint8)))
    with pytest.raises(ControlFull):
        engine.handle(Listening(), 1.0)


# --- what is not written at once --------------------------------------------------------------------------------------


class Mortal:
    """A service whose server is killed wherever a process can be: the next one has what was written and no more."""

    def __init__(self, replicas: int, chance: random.Random | None) -> None:
        self.config = Playbook(replicas).config
        self.buffer = np.zeros(1 << 20, np.uint8)
        self.engine = self.started()
        self.chance: random.Random | None = None
        #: By ticket.
        self.commits: dict[int, Commit] = {}
        self.sent: list[Send] = []
        sets = [asks(replica, first_apply(0, 1)) for replica in range(replicas)]
        ends = [returns(replica, 1) for replica in range(replicas)]
        made = hears(CONTROLLER, Create("c", 1, spec("w"), None))
        rates = tuple(DEFAULTS["SGD"].items())
        configured = hears(CONTROLLER, Configure("c", 2, 0, "SGD", rates, None, -1))
        for event in [*Playbook(replicas).begin_events(), made, configured, *sets, *ends]:
            self.hear(event)
        self.sent.clear()
        self.chance = chance

    def started(self) -> Engine:
        return Engine(self.config, ControlLog(self.buffer, turnover=16 << 10))

    def hear(self, event: Event) -> bool:
        """Have done what follows from ``event``; whether the server has died of it."""
        return self._settle(self._dies() or handled(lambda each: self.engine.handle(each, 1.0), event))

    def restart(self) -> bool:
        """Another server takes its place; whether that one has died, too."""
        self.engine = self.started()
        return self._settle(self.engine.resume())

    def _settle(self, commands: list[Command] | bool) -> bool:
        pending: deque[Event] = deque()
        while True:
            for command in commands if isinstance(commands, list) else ():
                if self._dies():
                    return True
                match command:
                    case Commit(ticket):
                        assert self.started().resume()[-1] == command  # nothing else may be decided meanwhile
                        # It is known of the last one alone whether it is done.
                        assert ticket >= max(self.commits, default=0)
                        assert self.commits.setdefault(ticket, command) == command
                        pending.append(Finished(ticket))
                    case Send():
                        self.sent.append(command)
            if commands is True or self._dies():
                return True
            if not pending:
                return False
            commands = self.engine.handle(pending.popleft(), 1.0)

    def _dies(self) -> bool:
        return self.chance is not None and self.chance.random() < 0.07


def trained(replicas: int, count: int, series: int, orders: list[list[int]], chance: random.Random | None) -> object:
    """What was committed and what was told of steps whose replicas return in these orders, while servers die."""
    service = Mortal(replicas, chance)
    step = [0] * replicas  # the one from which the replica returns next, or has without knowing that it is over
    said: list[Received | None] = [None] * replicas
    ends: dict[tuple[int, ...], Record] = {}
    is_dead = False
    for _ in range(4000):
        if is_dead:
            again = [hears(CONTROLLER, Hello(PROTOCOL, "controller", "c", 7)), *filter(None, said)]
            is_dead = service.restart() or any(service.hear(event) for event in again)
        elif moves := [r for at in range(count) for r in orders[at] if step[r] == at and said[r] is None]:
            replica = moves[0]
            run = (2 + step[replica],)
            notes = (applies(0, buffers=step[replica] % 2),)
            said[replica] = event = returns(replica, 1, notes, run=run, series=series)
            is_dead = service.hear(event)
        for sent in service.sent:
            match sent.record:
                case RunFinished(run) if run != (1,):  # which is said again to who says hello again
                    assert ends.setdefault(run, sent.record) == sent.record
                    over = [] if series else range(replicas)
                case StepFinished(run):
                    over = [int(sent.peer[1:2])]
                case _:
                    over = []
            for replica in over:
                if run == (2 + step[replica],) and said[replica] is not None:
                    said[replica], step[replica] = None, step[replica] + 1
        service.sent.clear()
        if len(ends) == count and not is_dead:
            break
    service.chance = None
    told = service.engine.handle(hears(OBSERVER, Describe(1, (1,), (1,))), 1.0)
    return [service.commits[ticket] for ticket in sorted(service.commits)], ends, told


@given(
    replicas=st.integers(1, 3),
    orders=st.lists(st.permutations(range(3)), min_size=1, max_size=4),
    is_ahead=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=examples(25))
def test_servers_that_die_before_they_write_lose_nothing(
    replicas: int, orders: list[list[int]], is_ahead: bool, seed: int
) -> None:
    orders = [[replica for replica in order if replica < replicas] for order in orders]
    plan = partial(trained, replicas, len(orders), 2 if is_ahead else 0, orders)
    assert plan(random.Random(seed)) == plan(None)


def test_one_write_makes_a_step() -> None:
    book = Mortal(2, None)
    written: list[int] = []
    for number in range(2, 6):
        for replica in (0, 1):
            before = book.buffer[:64].tobytes()
            book.hear(returns(replica, 1, (applies(0),), run=(number,), series=2))
            written.append(before != book.buffer[:64].tobytes())
    assert written == [False, True] * 4
    assert [type(sent.record) for sent in book.sent] == [StepFinished, StepFinished, RunFinished] * 4


def test_an_event_that_fails_takes_nothing_with_it_that_is_not_written_yet() -> None:
    book = Mortal(2, None)
    book.hear(returns(0, 1, (applies(0),), run=(2,)))
    book.hear(returns(1, 7, (applies(0),), run=(2,)))  # refused, and counted as failed
    (sent,) = book.sent
    assert to(CONTROLLER, RunFinished, "cs.PeerProtocolError", "after 7 merge points").fits(sent)
    book.sent.clear()
    for replica in (0, 1):
        book.hear(returns(replica, 1, (applies(0),), run=(3,)))
    assert len(book.sent) == 1
    book.sent.clear()
    book.restart()
    assert len(book.sent) == 1


# --- odds and ends --------------------------------------------------------------------------------------------------


def test_events_about_nothing_do_nothing() -> None:
    book = Playbook(2).begin()
    book.on(Finished(7))
    book.on(Computed(7, (), None))
    book.on(Tick())
    assert book.does(dies(1))
    assert book.does(ProcessDied(replace(dies(1).died))) == []


def test_a_refused_message_leaves_nothing_behind() -> None:
    book = Playbook(2).begin().has(spec("w")).has_optimizer()
    before = {key: value for key, value in book.memory.items() if key != b"tally"}
    wrong = asks(0, reads(5), (assigns(0, scalar(1)), assigns(1, scalar(1))))
    book.on(wrong, to(w(0), PointFailed, "cs.PeerProtocolError", "reads after 5"))
    assert {key: value for key, value in book.memory.items() if key != b"tally"} == before
    book.on(hears(OBSERVER, Describe(1, (1, 9), ())), to(OBSERVER, Refused, "cs.InvalidArgumentError", number=1))


def test_a_finished_step_leaves_only_its_own_records() -> None:
    book = Playbook(2).begin().has(spec("w")).has_optimizer().has_set(1)
    sizes = []
    for run in range(2, 12):
        for replica in (0, 1):
            book.does(asks(replica, reduces(1, scalar(1)), (applies(0),), run=(run,)))
        book.does(book.computed(scalar(2)))
        for replica in (0, 1):
            book.does(returns(replica, 2, run=(run,)))
        book.settle()
        sizes.append(len(list(book.memory.items())))
    assert len(set(sizes)) == 1


def test_places_are_told_and_never_move() -> None:
    book = Playbook(2).begin()
    for n in range(5):
        book.has(spec(f"v{n}", (n,)))
    (sent,) = book.does(hears(OBSERVER, Get(1, (), (), False)))
    offsets = [variable.place for variable in sent.record.variables]  # type: ignore[union-attr]
    assert offsets == [Location("parameters/float32", offset) for offset in (0, 0, 64, 128, 192)]


# --- steps of a series ----------------------------------------------------------------------------------------------


@given(
    replicas=st.integers(1, 3),
    count=st.integers(1, 4),
    fails=st.none() | st.tuples(st.integers(0, 3), st.integers(0, 2)),
    cancels=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=examples(25))
def test_steps_follow_each_other_whatever_overtakes_what(
    replicas: int, count: int, fails: tuple[int, int] | None, cancels: bool, seed: int
) -> None:
    """Each replica returns from a step and begins the next when it hears that the one before is over; the controller
    may cancel all that it knows of no end. No step is committed while a replica is in a later one, and they end in
    order, the last with the error where there is one."""
    chance = random.Random(seed)
    book = Playbook(replicas).begin().has(spec("w")).has_optimizer().has_set(1)
    seen = len(book.commands)
    begun = [0] * replicas  # how many steps each replica has begun; the next one when it may
    may_begin = [True] * replicas
    ended: list[Record] = []
    commits = 0
    is_cancelled = False
    pending: deque[Event] = deque()
    for _ in range(200):
        moves = [replica for replica in range(replicas) if may_begin[replica] and begun[replica] < count]
        if cancels and not is_cancelled and len(ended) < count and chance.random() < 0.1:
            is_cancelled = True
            event: Event = hears(CONTROLLER, Cancel((2 + len(ended),), count - 1 - len(ended)))
        elif pending and (not moves or chance.random() < 0.5):
            event = pending.popleft()
        elif moves:
            replica = chance.choice(moves)
            raises = "ValueError" if fails == (begun[replica], replica) else ""
            event = returns(replica, 1, (applies(0),), run=(2 + begun[replica],), raises=raises, series=2)
            begun[replica] += 1
            may_begin[replica] = False
        else:
            break
        book.does(event)
        for command in book.commands[seen:]:
            match command:
                case Commit(ticket):
                    commits += 1
                    assert begun == [commits] * replicas
                    assert not any(may_begin)
                    pending.append(Finished(ticket))
                case Send(peer, StepFinished(run, failed)):
                    replica = int(peer[1:2])
                    assert run == (1 + begun[replica],)
                    may_begin[replica] = not failed
                case Send(_, RunFinished() as record):
                    ended.append(record)
        seen = len(book.commands)
    book.repeat_all()
    assert [record.run for record in ended] == [(2 + number,) for number in range(len(ended))]  # type: ignore[attr-defined]
    errors = [record.error and record.error.exception for record in ended]  # type: ignore[attr-defined]
    assert not any(errors[:-1])
    assert begun == [len(ended)] * replicas
    if len(ended) < count or errors[-1]:
        assert errors[-1] == "KeyboardInterrupt" if is_cancelled and fails is None else errors[-1]
        assert is_cancelled or (fails is not None and fails[0] == len(ended) - 1)
    else:
        assert fails is None or fails[0] >= count or fails[1] >= replicas
