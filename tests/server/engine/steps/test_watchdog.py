"""Waits that last are named: who waits, where, for whom, and again after as long."""

from __future__ import annotations

import pytest
from tests.harness.playbook import (
    CONTROLLER,
    Playbook,
    Says,
    applies,
    asks,
    dies,
    hears,
    merge_calls,
    reads,
    reduces,
    register,
    returns,
    scalar,
    spec,
    w,
)

from cs_proto.messages import PROTOCOL, Cancel, Goodbye, Hello, WaitingFor, WaitReport
from cs_server.events import Command, EndWorker, Listening, Log, Send, Tick, TraceWorker

HELLO = Hello(PROTOCOL, "controller", "c", 7)


def ticks(book: Playbook, seconds: int, *expected: Command | Says) -> None:
    """Time passes in steps of one second; nothing is said before the last, and then ``expected``."""
    for _ in range(seconds - 1):
        book.now += 1
        book.on(Tick())
    book.now += 1
    book.on(Tick(), *expected)


def test_a_replica_is_ended_that_lets_others_wait_and_was_not_heard_by_a_server_that_listened() -> None:
    book = Playbook(2, step_timeout=5.0).begin()
    book.does(asks(0, reduces(0)))
    book.now += 60  # the server was dead, and another was started
    book.on(Listening())
    book.now += 5
    book.does(Tick())
    assert not [command for command in book.commands if isinstance(command, EndWorker)]
    book.now += 1
    reason = "it did not come to its next merge point within 5 s in run 1"
    book.on(Tick(), Says(reason, slow=True), EndWorker(1, 1, reason))


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_that_nobody_but_the_controller_waits_for_are_named_and_ended(replicas: int) -> None:
    book = Playbook(replicas, step_timeout=12.0).begin()
    book.now += 60
    book.on(hears(CONTROLLER, WaitReport((1,), 1.0)))
    book.on(hears(CONTROLLER, WaitReport((1,), 1.0)))  # said again to another server
    book.now += 10
    where = "no replica has come to a merge point"
    whom = " and ".join(f"replica {r} (pid {100 + r}, w{r}.1), last seen 70 s ago" for r in range(replicas))
    told = Send(CONTROLLER, WaitingFor((1,), f"{whom}; {where}"))
    book.on(Tick(), told)  # and the controller names it
    book.now += 1.5
    reason = "it did not come to its next merge point within 12 s in run 1"
    ends = [(Says(reason, slow=True), EndWorker(replica, 1, reason)) for replica in range(replicas)]
    book.on(Tick(), *(command for both in ends for command in both))
    for replica in range(replicas):
        book.does(returns(replica, 0))
    book.on(hears(CONTROLLER, WaitReport((1,), 1.0)))  # it came late
    book.does(returns(0, 0, run=(2,)))
    book.on(hears(CONTROLLER, WaitReport((1,), 1.0)))
    assert not [command for command in book.does(Tick()) if isinstance(command, Log)]


def test_a_controller_that_names_waits_early_is_told_early_for_whom() -> None:
    book = Playbook(1, name_after=2.0).begin()
    book.on(hears(CONTROLLER, WaitReport((1,), 1.0)))
    book.now += 2
    whom = "replica 0 (pid 100, w0.1), last seen 2 s ago; no replica has come to a merge point"
    book.on(Tick(), Send(CONTROLLER, WaitingFor((1,), whom)))


def test_an_awaited_step_does_not_make_the_one_before_it_forgotten() -> None:
    book = Playbook(1).begin()
    finished = book.does(returns(0, 0, run=(1,), series=1))
    book.does(hears(CONTROLLER, WaitReport((2,), 1.0, 1)))
    assert [c for c in book.does(hears(CONTROLLER, HELLO)) if isinstance(c, Send)][1:] == finished


def test_the_holder_of_a_token_is_ended_where_its_merge_function_hangs() -> None:
    book = Playbook(2, step_timeout=5.0).begin()
    book.does(asks(0, merge_calls(0)))
    book.does(asks(1, merge_calls(0)))
    book.now += 6
    reason = "it did not come to its next merge point within 5 s in run 1"
    book.on(Tick(), Says(reason, slow=True), EndWorker(0, 1, reason))


def test_a_replica_that_lets_another_wait_is_named_at_growing_intervals() -> None:
    book = Playbook(2).begin()
    ticks(book, 30)
    book.does(asks(1, reads(0)))  # seen here
    book.now += 2
    book.does(asks(0, reduces(0, scalar(1))))
    text = (
        "run 1: waiting {} s for replica 1 (pid 101, w1.1), last seen {} s ago; "
        "replica 0 waits at all_reduce SUM (train.py:31)"
    )
    ticks(book, 10, Log(text.format(10, 12), slow=True))
    ticks(book, 10, Log(text.format(20, 22), slow=True), TraceWorker(1, 1))
    ticks(book, 20, Log(text.format(40, 42), slow=True), TraceWorker(1, 1))
    book.does(asks(1, reduces(0, scalar(1))))
    book.does(book.computed(scalar(2)))
    ticks(book, 25)  # everybody is at work


def test_everybody_who_waits_or_has_returned_is_named() -> None:
    book = Playbook(3).begin()
    book.does(returns(0, 0))
    book.now += 9
    book.does(asks(2, merge_calls(0)))
    where = "replica 0 returned after 0 merge points; replica 2 waits at merge_call .train.py:40."
    ticks(book, 1, Says(rf"waiting 10 s for replica 1 \(.*\), last seen 10 s ago; {where}", slow=True))


def test_who_holds_the_token_is_named_with_its_merge_function() -> None:
    book = Playbook(2).begin()
    book.does(asks(0, merge_calls(0)))
    book.does(asks(1, merge_calls(0)))
    ticks(
        book,
        10,
        Says(
            r"for replica 0 .*, last seen 10 s ago and the merge function of merge_call \(train.py:40\); replica 1",
            slow=True,
        ),
    )


def test_a_commit_that_lasts_is_named() -> None:
    book = Playbook(1).begin().has(spec("w")).has_optimizer().has_set(1)
    book.does(returns(0, 1, (applies(0),), run=(2,)))
    ticks(book, 10, Says("run 2: waiting 10 s for commit 2; replica 0 returned", slow=True))
    book.settle()
    ticks(book, 20)


def test_a_computation_that_lasts_is_named() -> None:
    book = Playbook(1).begin()
    book.does(asks(0, reduces(0, scalar(1))))
    ticks(book, 10, Says("run 1: waiting 10 s for the service; replica 0 waits at all_reduce", slow=True))


def test_the_dead_are_not_waited_for() -> None:
    book = Playbook(3).begin()
    book.does(dies(1))
    book.does(asks(0, reduces(0)))
    ticks(book, 20)  # the run is over, whatever replica 2 does
    book = Playbook(3).begin()
    book.does(asks(0, reduces(0)))
    book.does(dies(1))
    book.does(returns(0, 1, raises="cs.ReplicaLostError"))
    ticks(book, 10, Says("for replica 2 .*; replica 0 returned after 1 merge point; replica 1 is lost", slow=True))


def test_a_controller_that_waits_for_workers_is_told_about() -> None:
    book = Playbook(3)
    book.does(hears(w(1), register(1)))
    book.does(hears(CONTROLLER, Hello(PROTOCOL, "controller", "c", 7)))
    ticks(book, 10, Log("client c (pid 7): waiting 10 s for replica 0 and replica 2 to register", slow=True))
    ticks(book, 10, Says("waiting 20 s for replica 0 and replica 2", slow=True))
    book.does(hears(w(0), register(0)))
    book.does(hears(w(2), register(2)))
    ticks(book, 20)


def test_a_controller_that_waits_for_the_end_of_old_runs_is_told_about() -> None:
    book = Playbook(1).begin()
    book.repeats = False
    book.does(asks(0, reduces(0)))
    book.does(book.computed())
    book.does(hears(CONTROLLER, Cancel((1,))))
    book.does(hears(CONTROLLER, Goodbye("c")))
    book.does(hears(b"c2", Hello(PROTOCOL, "controller", "d", 9)))
    ticks(book, 10, Says(r"client d \(pid 9\): waiting 10 s for the runs of the client before it to end", slow=True))


@pytest.mark.parametrize("late", [1.0, 3.0, 9.9])
def test_stacks_are_shown_at_growing_intervals_however_late_a_server_looks(late: float) -> None:
    book = Playbook(2).begin()
    book.does(asks(0, reduces(0, scalar(1))))
    shown = []
    for _ in range(int(150 / late)):
        book.now += late
        shown += [command for command in book.does(Tick()) if isinstance(command, TraceWorker)]
    assert shown == [TraceWorker(1, 1)] * 3  # after 20 s, 40 s, 80 s


def test_a_wait_that_is_as_long_in_every_run_is_named_in_the_first_one_only() -> None:
    book = Playbook(2).begin()
    said = []
    for run in range(1, 4):
        book.does(returns(0, 0, run=(run,)))
        for _ in range(30):
            book.now += 1
            said += [command for command in book.does(Tick()) if isinstance(command, TraceWorker | Log)]
        book.does(returns(1, 0, run=(run,)))
    assert [type(command) for command in said] == [Log, Log, TraceWorker]


def test_a_replica_that_the_controller_alone_waits_for_shows_its_stacks_after_a_minute() -> None:
    book = Playbook(1).begin()
    book.on(hears(CONTROLLER, WaitReport((1,), 1.0)))
    shown = []
    for _ in range(100):
        book.now += 1
        shown += [(book.now, command) for command in book.does(Tick()) if isinstance(command, TraceWorker)]
    [(when, command)] = shown
    assert command == TraceWorker(0, 1)
    assert 60 <= when - (book.now - 100) <= 70
