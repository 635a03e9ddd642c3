"""What the script's side decides: conversations as tables of events and the commands that must follow.

The generated ones cut a conversation at every place, and then something else happens: Ctrl-C, the death of a worker,
another server.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from tests.harness.controller_playbook import (
    HELLO,
    NAME,
    SERVING,
    Asks,
    CtrlC,
    Event,
    Expected,
    Hears,
    Names,
    Passes,
    Playbook,
    Prepares,
    Reads,
    Sends,
    Settles,
    a_run,
    asked,
    cancels,
    counters,
    died,
    fault,
    finished,
    interrupts,
    restarted,
    runs,
    welcome,
    worker,
)

from central_storage.controller.commands import Command, Deliver, End, Fail, Interrupt, Post, Raise, Refuse
from central_storage.controller.core import ControllerCore
from central_storage.controller.waits import Settling
from cs_proto import messages
from cs_proto.arrays import bytes_array
from cs_proto.descriptors import Location
from cs_proto.errors import LocalProtocolError, ReplicaLostError
from cs_proto.messages import (
    Assign,
    Create,
    Created,
    Done,
    Forget,
    Free,
    Get,
    Prepare,
    Refused,
    Resent,
    VariableSpec,
    WaitReport,
)
from cs_proto.records import Record, replace

W0, W1 = b"w0", b"w1"
INTERRUPTED = fault("KeyboardInterrupt")
ERROR = ValueError("no")

Table = list[tuple[Event, list[Expected]]]

#: A run on its own, of which the script is told that it lasts.
RUN: Table = [
    (Prepares("/a", "/b"), [Post(W0, Prepare(("/a",), "/b")), Post(W1, Prepare(("/a",), "/b"))]),
    (Sends(), runs(1, brings=True)),
    (Settles(), []),
    (Passes(1.0), [asked(WaitReport((1,), 1.0))]),
    (Hears(messages.WaitingFor((1,), "replica 0")), []),
    (Passes(11.0), [Names("run 1: replica 0")]),
    (Hears(finished(1)), [Deliver(finished(1))]),
    (Reads(), []),
]
#: Five steps of which two are sent ahead. The third is of another function.
STEPS: Table = [
    (Sends(), runs(1, brings=True, series=1, lookahead=2)),
    (Settles(2), []),
    (Sends(), runs(2, series=1, lookahead=2)),
    (Settles(2), []),
    (Sends(b"g"), runs(3, function=b"g", brings=True, series=1, lookahead=2)),
    (Settles(2), []),
    (Hears(finished(2)), []),
    (Passes(1.5), [asked(WaitReport((1,), 1.5, 1))]),
    (Hears(finished(1)), [Deliver(finished(1))]),
    (Reads(), []),
    (Sends(), runs(4, series=1, lookahead=2)),
    (Settles(2), [Deliver(finished(2))]),
    (Reads(), []),
    (Sends(b"g"), runs(5, function=b"g", series=1, lookahead=2)),
    (Settles(), []),
    (Hears(finished(3)), [Deliver(finished(3))]),
    (Reads(), []),
    (Passes(1.0), [asked(WaitReport((4,), 1.0, 1))]),
    (Hears(finished(4)), [Deliver(finished(4))]),
    (Reads(), []),
    (Hears(finished(5)), [Deliver(finished(5))]),
    (Reads(), []),
]
TABLES = {"a run": (0, RUN), "steps": (2, STEPS)}
SHUT_DOWN = End("a second Ctrl-C shut it down")


def assign(sequence: int) -> Assign:
    return Assign("c", sequence, 1, "assign", bytes_array(b"x"))


def create(sequence: int) -> Create:
    return Create("c", sequence, VariableSpec("v", "float32", (), True, 0, 0), None)


def created(sequence: int) -> Created:
    spec = VariableSpec("v", "float32", (), True, 0, 0)
    return Created(sequence, messages.Variable(1, spec, Location("parameters/float32", 0), 0))


def play(table: Table, lookahead: int = 0) -> Playbook:
    book = Playbook(lookahead=lookahead).welcomed()
    for event, expected in table:
        book.on(event, *expected)
    return book


def played(name: str, cut: int) -> tuple[Playbook, Table]:
    """The conversation up to the cut, and what is behind it."""
    lookahead, table = TABLES[name]
    return play(table[:cut], lookahead), table[cut:]


def unanswered(book: Playbook) -> tuple[int, int]:
    """The first run that is unanswered, or the next one; and how many are behind it."""
    numbers = [said[0].run[0] for said, _ in book.unanswered]
    return (numbers[0], len(numbers) - 1) if numbers else (book.core.next_run(book.series, NAME, b"", False).run[0], -1)


def waits_at(name: str, cut: int) -> bool:
    """Whether the script waits for a run there: Ctrl-C is heard, and workers are, nowhere else."""
    left, sent, reads = 0, 0, False
    for event, expected in TABLES[name][1][:cut]:
        sent += isinstance(event, Sends) - isinstance(event, Reads)
        reads = any(isinstance(command, Deliver) for command in expected)
        if isinstance(event, Sends | Settles):
            left = event.left if isinstance(event, Settles) else sent
    return sent > left and not reads


#: Every place of every table: after so many events; and those where the script waits.
CUTS = [(name, cut) for name, (_, table) in TABLES.items() for cut in range(1, len(table) + 1)]
WAITS = [(name, cut) for name, cut in CUTS if waits_at(name, cut)]


# --- hello ----------------------------------------------------------------------------------------------------------


def test_hello_is_answered_by_a_welcome() -> None:
    core = ControllerCore("c", 7)
    question, said = core.hello(0.0)
    assert said == [asked(HELLO)]
    assert core.hear(welcome(2, pid=9), 0.0) == []
    assert question.is_over
    assert (core.server_pid, core.workers) == (9, (worker(0), worker(1)))


def test_a_worker_that_is_named_before_the_welcome_is_in_it() -> None:
    book = Playbook()
    question, _ = book.core.hello(book.now)
    book.on(Hears(died("worker", 1)))
    book.on(Hears(restarted(1, 1)))
    book.on(Hears(replace(welcome(2), workers=(worker(0), worker(1, 2)))))
    assert question.is_over
    book.core.leave(question)
    book.on(Hears(restarted(1, 1)))  # it is known
    assert book.core.workers == (worker(0), worker(1, 2))
    book.on(Sends(), *runs(1, brings=True)).on(Settles())
    book.on(CtrlC(), *cancels(1, 0, 1)).on(Hears(counters(1)), *interrupts(1, 0))


def test_a_refused_hello_is_raised() -> None:
    core = ControllerCore("c", 7)
    _, _ = core.hello(0.0)
    why = fault("cs.ContextError")
    assert core.hear(Refused(0, why), 0.0) == [Refuse(why)]


def test_a_welcome_that_does_not_come_is_named() -> None:
    core = ControllerCore("c", 7)
    core.hello(0.0)
    assert core.pause(4.0) == 6.0
    assert core.tick(9.0) == []
    [named] = core.tick(10.0)
    assert Names("the server's welcome", is_run=False).fits(named)
    assert core.pause(12.0) == 8.0


# --- a run ----------------------------------------------------------------------------------------------------------


def test_a_run() -> None:
    book = play(RUN)
    assert list(book.series.outcomes) == [[None, None]]
    assert not book.waits
    assert book.core.steps == {NAME: 1}


def test_a_function_is_brought_once_and_the_place_of_the_script_said_once() -> None:
    book = play(RUN).begin()
    book.on(Prepares("/a", "/b"))
    book.on(Sends(), *runs(2)).on(Settles()).on(Hears(finished(2)), Deliver(finished(2))).on(Reads())
    book.on(Prepares("/a", "/c"), Post(W0, Prepare(("/a",), "/c")), Post(W1, Prepare(("/a",), "/c")))
    book.begin().on(Sends(b"g"), *runs(3, function=b"g", brings=True))


def test_a_frozen_function_is_held_for_good() -> None:
    book = Playbook().welcomed()
    functions = [
        (b"frozen", True),
        *((b"f%d" % number, False) for number in range(20)),
        (b"frozen", True),
        (b"f0", False),
    ]
    for number, (function, frozen) in enumerate(functions, 1):
        fields = {"function": function, "frozen": frozen, "brings": number != 22}
        book.begin().on(Sends(function, frozen), *runs(number, **fields))
        book.on(Settles()).on(Hears(finished(number)), Deliver(finished(number))).on(Reads())


def test_a_run_that_fails_leaves_the_next_its_draw() -> None:
    book = Playbook().welcomed().on(Sends(), *runs(1, brings=True)).on(Settles())
    book.on(Hears(finished(1, fault())), Deliver(finished(1, fault()))).on(Reads(ERROR))
    assert list(book.series.outcomes) == [ERROR]
    book.begin().on(Sends(), *runs(2))


def test_results_that_cannot_be_read_are_no_failure_of_the_run() -> None:
    book = Playbook().welcomed().on(Sends(), *runs(1, brings=True)).on(Settles())
    book.does(Hears(finished(1)))
    assert book.core.delivered(ERROR, book.now) == []
    assert (book.series.succeeded, book.series.has_failed, list(book.series.outcomes)) == (1, False, [ERROR])


def test_steps_continue_from_a_checkpoint() -> None:
    book = play(RUN).begin()
    book.core.steps[NAME] = 40
    book.on(Sends(), *runs(2, step=40))
    assert book.core.steps == {NAME: 41}


def test_where_a_message_is_too_large_no_replica_begins() -> None:
    core = Playbook().welcomed().core
    series = Playbook().series
    beginning = core.next_run(series, NAME, b"f" * 16, False)
    said = [tuple(a_run(1, replica).__dict__.values()) for replica in (0, 1)]
    too_large = (*said[1][:7], b"x" * (5 << 20), *said[1][8:])
    with pytest.raises(LocalProtocolError, match="a Run with a header of"):
        core.begin_run(series, beginning, [said[0], too_large], b"f", [])
    assert core.next_run(series, NAME, b"f" * 16, False)[:7] == beginning[:7]
    assert not series.unanswered
    assert not core.steps


def test_the_end_of_a_run_that_nobody_waits_for_is_not_kept() -> None:
    book = play(RUN)
    book.on(Hears(finished(1))).on(Hears(finished(7)))
    book.begin().on(Sends(), *runs(2)).on(Settles()).on(Hears(finished(7)))
    book.on(Hears(finished(2)), Deliver(finished(2)))


# --- steps ----------------------------------------------------------------------------------------------------------


def test_steps_ahead() -> None:
    book = play(STEPS, 2)
    assert list(book.series.outcomes) == [[None, None]] * 5
    assert book.series.number == 1
    assert book.core.steps == {NAME: 5}


def test_steps_use_the_parts_of_the_arena_in_turn() -> None:
    book = Playbook(lookahead=2).welcomed()
    parts = []
    for _ in range(4):
        beginning = book.core.next_run(book.series, NAME, b"f" * 16, False)
        parts.append((beginning.part, beginning.parts))
        book.does(Sends())
    assert parts == [(0, 3), (1, 3), (2, 3), (0, 3)]


def test_steps_behind_a_failure_never_begin() -> None:
    """The next run gets their step, and brings a function again that only they had brought."""
    book = play(STEPS[:6], 2)
    book.on(Hears(finished(1)), Deliver(finished(1))).on(Reads())
    book.on(Sends(b"h"), *runs(4, function=b"h", brings=True, series=1, lookahead=2)).on(Settles(2))
    failed = finished(2, fault())
    book.on(Hears(failed), Deliver(failed)).on(Reads(ERROR))
    assert list(book.series.outcomes) == [[None, None], ERROR]
    assert (book.series.begun, book.series.succeeded, book.series.has_failed) == (2, 1, True)
    book.begin().on(Sends(b"g"), *runs(5, step=2, function=b"g", brings=True)).on(Settles())
    book.on(Hears(finished(5)), Deliver(finished(5))).on(Reads())
    book.begin().on(Sends(), *runs(6, step=3))  # the step that was over had brought it


def test_steps_that_never_begin_bring_a_new_worker_nothing() -> None:
    """It is sent the third step alone. That is dropped, so it holds no function, while the other worker holds one."""
    book = play(STEPS[:2], 2)
    for number in (2, 3):
        book.on(Sends(), *runs(number, series=1, lookahead=2)).on(Settles(2))
    book.on(Hears(restarted(3, 1)), *book.taken_up(3, 1))
    book.on(Settles()).on(Hears(finished(1)), Deliver(finished(1))).on(Reads())
    failed = finished(2, fault())
    book.on(Hears(failed), Deliver(failed)).on(Reads(ERROR))
    book.begin().on(Sends(), Post(W0, a_run(4, 0, step=2)), Post(W1, a_run(4, 1, step=2, brings=True)))


def test_an_operation_waits_for_steps_of_another_series_only() -> None:
    book = play(STEPS[:6], 2)
    steps = book.series
    assert book.core.unsettled(steps) is None
    assert book.core.unsettled(None) is steps
    assert book.core.unsettled(book.begin().series) is steps
    assert play(STEPS, 2).core.unsettled(None) is None


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "cut"), WAITS)
def test_ctrl_c_at_every_message(name: str, cut: int) -> None:
    """The server hears of it first, and the workers when it has. All runs are waited for, and then it is raised."""
    book, _ = played(name, cut)
    first, later = unanswered(book)
    book.on(CtrlC(), *cancels(first, later, 1))
    book.on(Hears(counters(1)), *interrupts(first, later))
    failed = finished(first, INTERRUPTED)
    book.on(Hears(failed), Deliver(failed)).on(Reads(KeyboardInterrupt()), Fail(KeyboardInterrupt))
    assert not book.waits
    assert book.core.asked == []
    book.begin().on(Sends(b"g"), *runs(first + later + 1, step=first, function=b"g", brings=first < 3))


@pytest.mark.parametrize(("name", "cut"), WAITS)
@pytest.mark.parametrize("heard", [0, 1, 2, 3])
def test_ctrl_c_that_comes_too_late_is_raised_when_all_runs_are_over(name: str, cut: int, heard: int) -> None:
    """``heard`` runs end before the server has heard; then the workers are told of those that are left."""
    book, _ = played(name, cut)
    first, later = unanswered(book)
    book.on(CtrlC(), *cancels(first, later, 1))
    known = {2} if name == "steps" and 7 <= cut < 9 else set()
    for number in range(first, first + later + 1):
        if number - first == heard:
            book.on(Hears(counters(1)), *interrupts(number, first + later - number))
        if number not in known:
            book.on(Hears(finished(number)), Deliver(finished(number)))
        follows = [Fail(KeyboardInterrupt)] if number == first + later else []
        book.on(Reads(), *([Deliver(finished(2))] if number + 1 in known else follows))
    assert not book.waits
    book.on(Hears(counters(1)))  # late, and nobody asks any more


@pytest.mark.parametrize(("name", "cut"), WAITS)
@pytest.mark.parametrize("workers_know", [False, True])
def test_a_second_ctrl_c_ends_the_service(name: str, cut: int, workers_know: bool) -> None:
    book, _ = played(name, cut)
    book.does(CtrlC())
    if workers_know:
        book.does(Hears(counters(1)))
    book.on(CtrlC(), End("a second Ctrl-C shut it down"), Fail(KeyboardInterrupt))


def test_a_loop_that_ends_cancels_its_steps_and_raises_nothing() -> None:
    book = play(STEPS[:5], 2).on(Settles(cancel=True), *cancels(1, 2, 1))
    book.on(Hears(counters(1)), *interrupts(1, 2))
    failed = finished(1, INTERRUPTED)
    book.on(Hears(failed), Deliver(failed)).on(Reads(KeyboardInterrupt()))
    assert not book.waits
    play(STEPS, 2).on(Settles(cancel=True))  # there is nothing to cancel
    play(STEPS[:5], 2).on(Settles(cancel=True), *cancels(1, 2, 1)).on(CtrlC(), SHUT_DOWN, Fail(KeyboardInterrupt))


def test_a_loop_that_ends_names_no_ctrl_c() -> None:
    book = play(STEPS[:5], 2).on(Settles(cancel=True), *cancels(1, 2, 1))
    book.on(Passes(1.0), asked(WaitReport((1,), 1.0, 1)))
    book.on(Passes(11.0), Names("run 1 to end; press Ctrl-C to end the service$"))


def test_what_a_handler_raises_cancels_a_run_and_names_no_ctrl_c() -> None:
    book = play(RUN[:4]).on(CtrlC(TimeoutError()), *cancels(1, 0, 1)).on(CtrlC(TimeoutError()))
    book.on(Passes(1.0), asked(WaitReport((1,), 1.0)))
    book.on(Passes(11.0), Names("run 1 to end; press Ctrl-C to end the service$"))
    book.on(CtrlC(), End("Ctrl-C shut it down"), Fail(KeyboardInterrupt))


def test_what_a_handler_raises_when_its_operation_has_waited_for_the_run() -> None:
    book = play(RUN[:4])
    outer = book.waits[0]
    book.on(Settles())
    book.on(Hears(finished(1)), Deliver(finished(1))).on(Reads())
    assert book.waits == [outer]
    error = TimeoutError()
    book.on(CtrlC(error), Raise(error))


def test_what_a_handler_raises_comes_out_though_the_wait_fails() -> None:
    error = TimeoutError()
    book = play(RUN[:4]).on(CtrlC(error), *cancels(1, 0, 1))
    (wait,) = book.waits
    assert isinstance(wait, Settling)
    assert book.core.fail(wait, RuntimeError("the server is lost")) == [Raise(error)]


def test_a_wait_after_ctrl_c_is_reported_anew() -> None:
    book = play(RUN[:4]).on(CtrlC(), *cancels(1, 0, 1))
    book.on(Passes(0.5)).on(Passes(0.5), asked(WaitReport((1,), 1.0)))


# --- deaths of workers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "cut"), CUTS)
@pytest.mark.parametrize("replica", [0, 1])
def test_a_worker_dies_at_every_message(name: str, cut: int, replica: int) -> None:
    """The one in its place is sent all that is unanswered, with the functions; and then all goes on."""
    book, rest = played(name, cut)
    first, _ = unanswered(book)
    book.on(Hears(died("worker", replica)))
    book.on(Hears(restarted(first, replica)), *book.taken_up(first, replica))
    book.on(Hears(restarted(first, replica)))  # it is known
    assert book.core.workers[replica] == worker(replica, 2)
    if any(isinstance(event, Sends) for event, _ in rest) and not book.unanswered:
        return  # this worker would be brought a function that the table does not bring
    for event, expected in rest:
        book.on(event, *expected)


@pytest.mark.parametrize(("name", "cut"), WAITS)
@pytest.mark.parametrize("replica", [0, 1])
def test_a_new_worker_is_sent_the_runs_from_the_one_on_that_the_server_names(name: str, cut: int, replica: int) -> None:
    for ahead in range(unanswered(played(name, cut)[0])[1] + 2):
        book, _ = played(name, cut)
        first, _ = unanswered(book)
        number = first + ahead
        book.on(Hears(restarted(number, replica)), *book.taken_up(number, replica))
        functions = {function for said, function in book.unanswered if said[0].run >= (number,)}
        is_new = b"f" not in functions  # to the new worker; to the other it is not
        [begun] = {command.message for command in book.does(Sends()) if _is_post(command, replica)}
        assert isinstance(begun, messages.Run)
        assert (begun.function is not None) == is_new


@pytest.mark.parametrize(("name", "cut"), WAITS)
@pytest.mark.parametrize("replica", [0, 1])
def test_a_worker_dies_in_the_midst_of_a_cancel(name: str, cut: int, replica: int) -> None:
    """The living are interrupted, and the new one is sent what it missed, and the Cancel if the others have it."""
    book, _ = played(name, cut)
    first, later = unanswered(book)
    book.on(CtrlC(), *cancels(first, later, 1)).on(Hears(died("worker", replica)))
    early = book.core.workers
    book.on(Hears(counters(1)), *interrupts(first, later, [1 - replica]))
    cancel = messages.Cancel((first,), later)
    again = [*book.taken_up(first, replica), Post(b"w%d" % replica, cancel), Interrupt(replica)]
    book.on(Hears(restarted(first, replica)), *again)
    assert early != book.core.workers
    before, _ = played(name, cut)
    before.does(CtrlC())
    before.on(Hears(restarted(first, replica)), *before.taken_up(first, replica))
    before.on(Hears(counters(1)), *interrupts(first, later))


@pytest.mark.parametrize(("name", "cut"), WAITS)
@pytest.mark.parametrize("replica", [0, 1])
def test_a_worker_that_is_lost_for_good_fails_what_is_waited_for(name: str, cut: int, replica: int) -> None:
    book, _ = played(name, cut)
    steps = [said[0].step for said, _ in book.unanswered]
    book.on(Hears(died("worker", replica, restarts=False)))
    book.does(Passes(2.4))
    assert book.waits
    assert book.core.pause(book.now) <= 0.1 + 1e-9
    book.on(Passes(0.2)).gives_up()
    assert not book.waits
    assert isinstance(book.series.outcomes[-1], ReplicaLostError)
    assert book.series.has_failed
    assert book.core.steps == {NAME: steps[0] + 1}
    with pytest.raises(
        ReplicaLostError, match=f"replica {replica} .worker w{replica}, pid 10{replica}. ended by SIGKILL"
    ):
        book.core.refuse_lost()
    book.on(Hears(SERVING), *book.told_again())


def test_what_a_run_waits_for_is_told_by_the_server_or_by_what_is_known() -> None:
    book = Playbook().welcomed().on(Sends(), *runs(1, brings=True)).on(Settles())
    assert book.core.pause(book.now) == 1.0
    book.does(Passes(1.0))
    assert book.core.pause(book.now) == 11.0
    book.on(Passes(11.0), Names(r"run 1: the server \(pid 1\) does not say for whom; it may be stopped"))
    book.on(Hears(died("worker", 1)))
    book.on(Passes(20.0), Names(r"run 1; worker w1 \(pid 101\) ended by SIGKILL and is being started again"))
    book.on(Hears(messages.WaitingFor((1,), "replica 1"))).on(Passes(20.0), Names("run 1: replica 1$"))
    book.on(Hears(restarted(1, 1)), *book.taken_up(1, 1)).on(Passes(80.0), Names("it may be stopped$"))


# --- another server -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "cut"), CUTS)
def test_a_new_server_at_every_message(name: str, cut: int) -> None:
    """It is told once more what is unanswered, in order; and then all goes on."""
    book, rest = played(name, cut)
    book.on(Hears(died("server"))).on(Hears(SERVING), *book.told_again())
    book.on(Hears(welcome(2, pid=200)))
    assert book.core.server_pid == 200
    assert book.core.workers == (worker(0), worker(1))
    for event, expected in rest:
        book.on(event, *expected)
    book.on(Hears(SERVING), *book.told_again())
    assert len(book.told_again()) == 2


@pytest.mark.parametrize(("name", "cut"), WAITS)
def test_a_new_server_after_the_death_of_a_worker_and_ctrl_c(name: str, cut: int) -> None:
    book, _ = played(name, cut)
    first, later = unanswered(book)
    book.does(Hears(restarted(first, 1)))
    book.does(CtrlC())
    again = book.told_again()
    told = {type(command.message) for command in again if isinstance(command, Post)}
    assert {messages.Hello, Resent, messages.Cancel, messages.Statistics} <= told
    book.on(Hears(SERVING), *again).on(Hears(counters(1)), *interrupts(first, later)).on(Hears(SERVING), *again)


def test_a_server_that_is_not_started_again_ends_the_link() -> None:
    why = (
        "the server (pid 100) ended by SIGKILL and is not started again (server_recovery is off, max_restarts are used "
        "up, or its run directory was removed); its variables are gone with it. Make a new CentralStorageStrategy"
    )
    gone = [End("the server (pid 100) ended by SIGKILL"), Fail(ReplicaLostError, why)]
    Playbook().welcomed().on(Hears(died("server", restarts=False)), *gone)
    book = play(STEPS[:6], 2)
    book.on(Settles()).on(Hears(died("server", restarts=False)), *gone)
    assert book.series.has_failed
    assert book.core.last_death == died("server", restarts=False)


# --- questions ------------------------------------------------------------------------------------------------------


def test_a_question_is_answered_by_what_has_its_number() -> None:
    book = Playbook().welcomed().on(Asks(Get(3, (1,), (), False)), asked(Get(3, (1,), (), False)))
    got = messages.Got(3, 0, (), ())
    book.on(Hears(messages.Got(2, 0, (), ()))).on(Hears(Done(3, 1, 0))).on(Hears(Refused(2, fault())))
    book.on(Hears(SERVING), *book.told_again()).on(Hears(got))
    assert book.answers == [got]
    book.on(Hears(SERVING), *book.told_again())
    assert book.core.asked == []


def test_a_refused_write() -> None:
    book = Playbook().welcomed()
    sequence = book.core.next_sequence()
    book.on(Asks(assign(sequence)), asked(assign(sequence))).on(Hears(Refused(sequence, fault())))
    assert book.answers == [Refused(sequence, fault())]
    assert book.core.asked == []
    book.on(Asks(assign(2)), asked(assign(2))).on(Hears(Done(2, 1, 1)))


def test_a_refusal_without_a_number_is_raised() -> None:
    why = fault("cs.ContextError")
    book = Playbook().welcomed().on(Asks(assign(1)), asked(assign(1)))
    book.on(Hears(Refused(0, why)), Refuse(why))


def test_workers_forget_what_the_server_has_freed() -> None:
    free, forget = Free("c", 1, (4, 5)), Forget((4, 5))
    book = Playbook().welcomed().on(Asks(free), asked(free))
    book.on(Hears(Done(1, 2, 0)), Post(W0, forget), Post(W1, forget))
    book.on(Asks(Free("c", 2, (6,))), asked(Free("c", 2, (6,)))).on(Hears(Refused(2, fault())))


@pytest.mark.parametrize(
    ("request_", "answer", "follows"),
    [
        (lambda: assign(1), Done(1, 1, 1), []),
        (lambda: assign(1), Refused(1, fault()), []),
        (lambda: Free("c", 1, (4,)), Done(1, 1, 0), [Post(W0, Forget((4,))), Post(W1, Forget((4,)))]),
        (lambda: create(1), created(1), []),
    ],
)
def test_ctrl_c_in_a_write_and_then_another_operation(
    request_: Callable[[], Record], answer: Record, follows: list[Expected]
) -> None:
    """The answer to the write is waited for first, whatever comes between, and another server is asked again."""
    book = Playbook().welcomed()
    book.on(Asks(request_()), asked(request_())).on(CtrlC(), Fail(KeyboardInterrupt))
    assert book.answers == [None]
    book.on(Hears(SERVING), *book.told_again())
    assert asked(request_()) in book.told_again()
    assert book.finishes_write()
    book.on(CtrlC(), Fail(KeyboardInterrupt))
    assert book.finishes_write()
    book.on(Hears(SERVING), *book.told_again()).on(Hears(answer), *follows)
    assert book.answers[-1] == answer
    assert not book.finishes_write()
    assert book.core.asked == []
    book.on(Asks(assign(2)), asked(assign(2))).on(Hears(Done(2, 1, 2)))


def test_ctrl_c_in_a_read_leaves_nothing_behind() -> None:
    book = Playbook().welcomed().on(Asks(Get(1, (1,), (), False)), asked(Get(1, (1,), (), False)))
    book.on(CtrlC(), Fail(KeyboardInterrupt))
    assert not book.finishes_write()
    assert book.core.asked == []


def test_a_write_that_was_left_off_may_be_forgotten() -> None:
    book = Playbook().welcomed().on(Asks(assign(1)), asked(assign(1))).on(CtrlC(), Fail(KeyboardInterrupt))
    book.core.forget_write()
    assert not book.finishes_write()


def test_an_answer_that_does_not_come_is_named() -> None:
    book = Playbook().welcomed().on(Asks(assign(1)), asked(assign(1)))
    book.on(Hears(died("server")))
    assert book.core.pause(book.now) == 10.0
    why = r"the answer of the server \(pid 1\) to Assign; the server \(pid 100\) ended by SIGKILL and is being"
    book.on(Passes(10.0), Names(why, is_run=False)).on(Passes(9.0)).on(Passes(1.0), Names(why, is_run=False))


# --- questions while results are read -------------------------------------------------------------------------------


def test_a_question_while_results_are_read_hears_for_the_run_as_well() -> None:
    book = play(STEPS[:9], 2)  # step 1 is being read; the end of step 2 is known
    assert book.core.unsettled(None) is None
    question = Get(1, (1,), (), False)
    book.on(Asks(question), asked(question)).on(Hears(finished(3)))
    book.on(Hears(restarted(1, 1)), *book.taken_up(1, 1))
    book.on(Hears(messages.Got(1, 0, (), ()))).on(Reads())
    book.on(Settles(), Deliver(finished(2))).on(Reads(), Deliver(finished(3))).on(Reads())
    assert not book.waits


def test_a_cancel_is_heard_by_the_server_while_something_else_is_asked() -> None:
    """Another question is open when the answer comes by which the server says so."""
    book = play(RUN[:3]).on(CtrlC(), *cancels(1, 0, 1))
    question = Get(2, (1,), (), False)
    book.on(Asks(question), asked(question)).on(Hears(counters(1)), *interrupts(1, 0)).on(Hears(finished(1)))
    book.on(Hears(messages.Got(2, 0, (), ()))).on(Passes(0.0), Deliver(finished(1)))
    book.on(Reads(), Fail(KeyboardInterrupt))


def test_results_whose_reading_ctrl_c_has_left_are_read_later() -> None:
    book = play(RUN[:7])
    question = Get(1, (1,), (), False)
    book.on(Asks(question), asked(question)).on(CtrlC(), Fail(KeyboardInterrupt))
    book.core.leave(book.waits.pop())  # the script is out of the run
    assert book.core.unsettled(None) is book.series
    book.on(Settles(), Deliver(finished(1))).on(Reads())
    assert list(book.series.outcomes) == [[None, None]]


def test_an_error_that_the_owner_meets_fails_the_runs() -> None:
    """Such as no room for the function that a new worker needs."""
    book = play(STEPS[:6], 2).on(Settles())
    assert book.core.fail(book.waits[-1], ERROR) == []  # type: ignore[arg-type]
    assert list(book.series.outcomes) == [ERROR]
    assert book.core.steps == {NAME: 1}
    cancelled = play(STEPS[:6], 2).on(Settles()).on(CtrlC(), *cancels(1, 2, 1))
    assert cancelled.core.fail(cancelled.waits[-1], ERROR) == [Fail(KeyboardInterrupt)]  # type: ignore[arg-type]


# --- threads of this process ----------------------------------------------------------------------------------------


def test_workers_in_this_process_are_neither_prepared_nor_reported() -> None:
    """A replica may be at a debugger's prompt, and has the script's own path."""
    book = Playbook(in_process=True).welcomed().on(Prepares("/a", "/b"))
    book.on(Sends(), *runs(1, brings=True)).on(Settles())
    assert book.core.pause(book.now) == 10.0
    book.on(Passes(2.0)).on(Passes(8.0), Names("run 1$"))
    book.on(CtrlC(), *cancels(1, 0, 1)).on(Hears(counters(1)), *interrupts(1, 0))


def test_without_deaths_a_wait_has_no_other_end() -> None:
    book = play(STEPS[:6], 2).on(Settles())
    book.does(Passes(5.0))
    assert book.core.pause(book.now) < math.inf
    assert book.waits


def _is_post(command: Command, replica: int) -> bool:
    return isinstance(command, Post) and command.peer == b"w%d" % replica
