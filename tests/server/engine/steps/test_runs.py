"""What replicas bring: in order, once, into the run it belongs to; cancelled runs and nested ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.harness.playbook import (
    CONTROLLER,
    DEFAULTS,
    Playbook,
    Says,
    allocates,
    applies,
    asks,
    assigns,
    commits,
    computes,
    dies,
    first_apply,
    hears,
    lies,
    merge_calls,
    reads,
    reduces,
    result,
    returns,
    scalar,
    spec,
    steps,
    to,
    w,
    writes,
)

from cs_proto.arrays import Array, Location
from cs_proto.messages import (
    PROTOCOL,
    Accepted,
    Ask,
    Assign,
    Cancel,
    ClientGone,
    Committed,
    Configure,
    Create,
    Created,
    Describe,
    Described,
    Done,
    Get,
    Goodbye,
    Got,
    Hello,
    MergeCallReturn,
    Merged,
    OptimizerChange,
    PointFailed,
    Reduced,
    Refused,
    Resent,
    Return,
    RunFinished,
    StepFinished,
    Token,
    Value,
    WaitReport,
    Welcome,
)
from cs_server.engine.engine import Engine
from cs_server.events import ClientLeft, Commit, Dismiss, Finished, FreeResults, Received, Send, Tick

W = lies("parameters/float32", 0)
NOTHING = Value(b"", ())


def training(replicas: int = 2) -> Playbook:
    """Variable 1 (w) and an SGD optimizer whose set 1 is w; its first step was run 1."""
    return Playbook(replicas).begin().has(spec("w")).has_optimizer().has_set(1)


# --- what is wrong with a message -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (asks(0, reduces(2)), "sent merge point 2 of run 2, but 0 is the next one"),
        (asks(0, reduces(1), (applies(2),)), "sent merge point 2 of run 2, but 0 is the next one"),
        (asks(0, reads(3)), "reads after 3 merge points but has reached 0"),
        (
            asks(0, reads(1), (first_apply(0, 1),)),
            "sent apply_gradients of optimizer 1 .train.py:10. as a note, but it needs",
        ),
        (asks(0, reads(1), (assigns(0, scalar(1), checked=True),)), "sent assign_add .* as a note"),
        (asks(0, reads(1), (applies(0, 9),)), "optimizer 1 has no set of variables 9"),
        (
            asks(0, reads(1), (applies(0, 1, optimizer=2),)),
            "optimizer 2 has no set of variables 1",
        ),
        (asks(0, reduces(0), run=(2, 0, 0)), "run 2.0.0 is nested in a merge_call that no worker is running"),
    ],
)
def test_a_wrong_question_fails_at_its_point_and_counts_for_nothing(wrong: Received, reason: str) -> None:
    book = training()
    ask = wrong.record
    assert isinstance(ask, Ask)
    if len(ask.run) == 1:
        ask = replace(ask, run=(2,))
    failed = to(w(0), PointFailed, "cs.PeerProtocolError", reason, k=ask.point.k, ends_run=True)
    book.on(hears(w(0), ask), failed)
    book.on(asks(0, reduces(0, scalar(1)), run=(2,)))
    book.on(asks(1, reduces(0, scalar(1)), run=(2,)), computes((scalar(1),), (scalar(1),), reduce="SUM"))


def test_a_merge_point_is_not_brought_twice_differently() -> None:
    book = Playbook(2).begin()
    book.on(asks(0, reduces(0, scalar(1))))
    other = asks(0, reduces(0, scalar(2)))
    book.on(other, to(w(0), PointFailed, "cs.PeerProtocolError", "but had sent all_reduce SUM .train.py:31. before"))
    book.on(asks(0, reduces(1, scalar(2))), to(w(0), PointFailed, "cs.PeerProtocolError", "while it waits", k=1))


def test_nothing_is_brought_after_the_return() -> None:
    book = Playbook(2).begin()
    book.on(returns(0, 0))
    book.on(asks(0, reduces(0)), to(w(0), PointFailed, "cs.PeerProtocolError", "after its return from run 1"))


def test_a_wrong_return_is_an_error_of_the_run() -> None:
    # Were it only refused, the run would wait for it for ever.
    book = Playbook(2).begin()
    book.on(returns(1, 0))
    book.on(
        returns(0, 2),
        to(CONTROLLER, RunFinished, "cs.PeerProtocolError", "after 2 merge points, but sent 0 of them"),
    )


def test_a_replica_that_was_interrupted_counts_as_it_likes() -> None:
    book = Playbook(2).begin()
    book.on(asks(0, reduces(0, scalar(1))))
    book.on(returns(0, 0, raises="KeyboardInterrupt"))
    book.on(returns(1, 0), to(CONTROLLER, RunFinished, "KeyboardInterrupt"))


def test_late_repetitions_are_answered_from_the_table() -> None:
    book = training()
    for replica in (0, 1):
        book.does(asks(replica, first_apply(0, 1), run=(2,)))
    for replica in (0, 1):
        book.does(asks(replica, reads(1), run=(2,)))
    book.settle()
    for replica in (0, 1):
        book.does(asks(replica, reduces(1, scalar(1)), run=(2,)))
    book.does(book.computed(scalar(2)))
    book.on(asks(0, first_apply(0, 1), run=(2,)), Send(w(0), Accepted((2,), 0, (1,))))
    book.on(asks(0, reads(1), run=(2,)), Send(w(0), Committed((2,), 1)))
    book.on(asks(1, reduces(1, scalar(1)), run=(2,)), Send(w(1), Reduced((2,), 1, (scalar(2),))))
    book.does(returns(0, 2, run=(2,)))
    book.on(asks(0, reads(1), run=(2,)), Send(w(0), Committed((2,), 1)))
    book.repeat_all()


# --- cancelled runs -------------------------------------------------------------------------------------------------


def test_a_cancelled_run_commits_nothing_more_and_ends_when_all_have_returned() -> None:
    book = training()
    book.on(asks(0, reduces(1, scalar(1)), (applies(0),), run=(2,)))
    told = to(w(0), PointFailed, "KeyboardInterrupt", "run 2 was cancelled", k=1, ends_run=True)
    book.on(hears(CONTROLLER, Cancel((2,))), told)
    book.on(hears(CONTROLLER, Cancel((2,))))
    book.on(asks(1, reads(1), (applies(0),), run=(2,)), to(w(1), PointFailed, "KeyboardInterrupt", ends_run=True))
    book.on(returns(0, 1, raises="KeyboardInterrupt", run=(2,)))
    cancelled = to(CONTROLLER, RunFinished, "KeyboardInterrupt", "run 2 was cancelled", commits=0)
    book.on(returns(1, 1, raises="ValueError", run=(2,)), cancelled)
    book.on(hears(CONTROLLER, Cancel((2,))))  # too late
    for replica in (0, 1):
        book.does(returns(replica, 1, (applies(0),), run=(3,)))
    assert commits(steps(2, ((0, 1),))).fits(book.commands[-1])
    book.repeat_all()


def agreed(replicas: int = 2) -> Playbook:
    """In run 2 all have brought an apply, which waits to be committed, and are at work."""
    book = training(replicas)
    for replica in range(replicas):
        book.does(asks(replica, reduces(1, scalar(1)), (applies(0),), run=(2,)))
    book.does(book.computed(scalar(1)))
    return book


def test_what_was_agreed_before_a_cancellation_is_not_committed() -> None:
    book = agreed()
    book.on(hears(CONTROLLER, Cancel((2,))))
    book.on(returns(0, 2, run=(2,)))
    book.on(returns(1, 2, run=(2,)), to(CONTROLLER, RunFinished, "KeyboardInterrupt", commits=0))


def test_what_was_agreed_before_a_death_is_not_committed() -> None:
    book = agreed()
    book.on(dies(1), Says("died"))
    book.on(returns(0, 2, run=(2,)), to(CONTROLLER, RunFinished, "cs.ReplicaLostError", "0 commits of", commits=0))


def test_a_death_goes_before_the_mismatch_that_was_found_before_it() -> None:
    book = training()
    book.does(asks(0, reduces(0), run=(2,)))
    book.does(asks(1, merge_calls(0), run=(2,)))
    book.on(dies(1), Says("died"))
    book.on(
        returns(0, 1, raises="cs.MergeMismatchError", run=(2,)),
        to(CONTROLLER, RunFinished, "cs.ReplicaLostError", "replica 1"),
    )


def test_a_run_may_be_cancelled_before_anybody_has_heard_of_it() -> None:
    book = training()
    book.on(hears(CONTROLLER, Cancel((2,))))
    book.on(asks(0, reduces(0), run=(2,)), to(w(0), PointFailed, "KeyboardInterrupt", ends_run=True))
    # Replica 1 never does; the next run begins nevertheless.
    book.on(returns(1, 0, run=(3,)))
    book.on(returns(0, 0, run=(3,)), to(CONTROLLER, RunFinished, run=(3,)))
    book.on(hears(CONTROLLER, Cancel((2,))))
    book.on(asks(1, reduces(0), run=(2,)), to(w(1), PointFailed, "cs.ContextError", "run 2 is over", ends_run=True))
    book.on(returns(1, 1, raises="KeyboardInterrupt", run=(2,)), Says("returned from run 2, which is over"))


def test_a_commit_under_way_is_finished_before_the_cancelled_are_told() -> None:
    book = training()
    book.does(asks(0, reads(1), (applies(0),), run=(2,)))
    book.does(asks(1, reads(1), (applies(0),), run=(2,)))
    book.on(hears(CONTROLLER, Cancel((2,))))
    book.on(asks(1, reads(1), (applies(0),), run=(2,)))
    refused = to(CONTROLLER, Refused, "cs.ContextError", "run 2 has not ended")
    book.on(hears(CONTROLLER, Assign("c", book.sequence(), 1, "assign", scalar(1))), refused)
    book.on(book.finished(), Send(w(0), Committed((2,), 1)), Send(w(1), Committed((2,), 1)))
    book.on(returns(0, 1, run=(2,)))
    book.on(returns(1, 1, run=(2,)), to(CONTROLLER, RunFinished, "KeyboardInterrupt", commits=1))


def test_a_controller_that_leaves_cancels_its_runs_and_the_next_one_waits_for_their_end() -> None:
    book = training()
    book.on(asks(0, reduces(0, scalar(1)), run=(2,)))
    book.on(hears(CONTROLLER, Goodbye("c")), to(w(0), PointFailed, "KeyboardInterrupt", ends_run=True))
    book.on(hears(b"c2", Hello(PROTOCOL, "controller", "d", 9)))
    book.on(returns(0, 1, raises="KeyboardInterrupt", run=(2,)))
    book.repeats = False
    book.on(returns(1, 0, run=(2,)), to(b"c2", Welcome, last_run=2))
    book.on(returns(0, 0, run=(3,)))
    book.on(returns(1, 0, run=(3,)), to(b"c2", RunFinished, run=(3,)))


def test_no_run_of_the_next_controller_has_the_number_of_a_run_of_which_workers_were_told_the_end() -> None:
    """A worker may read StepFinished after the first run of the next controller."""
    book = training()
    for run in (2, 3):
        book.does(returns(0, 0, run=(run,), series=2))
        said = book.does(returns(1, 0, run=(run,), series=2))
        assert [Send(w(replica), StepFinished((run,), False)) for replica in (0, 1)] == said[:2]
    book.on(hears(CONTROLLER, Goodbye("c")))
    book.on(hears(b"c2", Hello(PROTOCOL, "controller", "d", 9)), to(b"c2", Welcome, last_run=3))
    book.on(hears(b"c2", Goodbye("d")))
    book.on(hears(b"c3", Hello(PROTOCOL, "controller", "e", 9)), to(b"c3", Welcome, last_run=3))


def test_the_runs_of_the_next_controller_are_heard_however_many_came_before() -> None:
    book = Playbook(2).begin()
    for run in range(1, 101):
        book.does(returns(0, 0, run=(run,)))
        book.does(returns(1, 0, run=(run,)))
    book.on(hears(CONTROLLER, Goodbye("c")))
    book.on(hears(b"c2", Hello(PROTOCOL, "controller", "d", 9)), to(b"c2", Welcome, last_run=100))
    book.on(returns(0, 0, run=(166,)), to(w(0), Refused, "cs.PeerProtocolError", FAR.format(166, 66, 100)))
    for run in (101, 102, 103):
        book.on(returns(0, 0, run=(run,)))
        book.on(returns(1, 0, run=(run,)), to(b"c2", RunFinished, run=(run,), error=None))


def test_a_worker_that_was_not_sent_a_run_says_so_when_the_controller_has_gone() -> None:
    """The controller may be killed between its two messages, or the worker drop the one that waits in its queue."""
    book = training()
    book.on(returns(0, 1, (applies(0),), run=(2,)))
    book.on(ClientLeft("c"), Dismiss("c"), Says("has gone"))
    book.on(hears(b"c2", Hello(PROTOCOL, "controller", "d", 9)))
    book.on(hears(w(1), ClientGone("b")))  # it left an earlier client
    book.on(hears(w(0), ClientGone("c")))
    book.on(hears(w(1), ClientGone("c")), to(b"c2", Welcome))
    book.repeats = False
    book.on(returns(0, 0))
    for replica in (0, 1):  # it is said to every server
        book.on(hears(w(replica), ClientGone("c")))
    book.on(returns(1, 0), to(b"c2", RunFinished, run=(1,)))
    refused = to(b"c2", Refused, "cs.PeerProtocolError", "only a worker may send a ClientGone")
    book.on(hears(b"c2", ClientGone("d")), refused)


def test_the_last_words_of_a_run_of_a_client_that_has_left_do_nothing() -> None:
    book = training()

    def says(event: Received, client: str) -> Received:
        assert isinstance(event.record, Ask | Return)
        return replace(event, record=replace(event.record, client=client))

    for replica in (0, 1):
        book.does(says(returns(replica, 1, (applies(0),), run=(2,)), "c"))
    book.does(book.finished())
    book.does(hears(CONTROLLER, Goodbye("c")))
    book.repeats = False
    for _ in range(2):  # no client is there, then another
        for replica in (0, 1):
            last = says(returns(replica, 1, (applies(0),), run=(2,)), "c")
            book.on(last, Says(f"replica {replica} returned from run 2, which is over"))
        asked = says(asks(0, reads(1), (applies(0),), run=(2,)), "c")
        book.on(asked, to(w(0), PointFailed, "cs.ContextError", "run 2 is over", ends_run=True))
        book.does(hears(b"c2", Hello(PROTOCOL, "controller", "d", 9)))
    for replica in (0, 1):  # its second run is one of its own
        book.does(says(returns(replica, 1, (applies(0),), run=(2,)), "d"))
    book.on(book.finished(), to(b"c2", RunFinished, run=(2,), commits=1))


def test_a_run_that_is_over_is_not_begun_again_where_it_is_sent_again() -> None:
    book = training()
    for run in (2, 3):
        for replica in (0, 1):
            book.does(returns(replica, 0, run=(run,)))
    known = {key for key, _ in book.memory.items()}
    book.on(hears(CONTROLLER, Resent((2,), 0)))
    assert {key for key, _ in book.memory.items()} == known


def test_a_run_that_nobody_has_heard_of_does_not_keep_the_next_controller_waiting() -> None:
    book = Playbook(2).begin()
    book.does(hears(CONTROLLER, Cancel((1,))))
    book.does(hears(CONTROLLER, Goodbye("c")))
    book.on(hears(b"c2", Hello(PROTOCOL, "controller", "d", 9)), to(b"c2", Welcome))


def test_the_next_run_frees_the_results_that_lie_in_the_servers_arena() -> None:
    book = training()
    large = Array("float32", (1 << 20,), Location("arena/server", 64))
    for replica in (0, 1):
        book.does(asks(replica, reduces(0, scalar(1)), run=(2,)))
    book.on(book.computed(large), Send(w(0), Reduced((2,), 0, (large,))), Send(w(1), Reduced((2,), 0, (large,))))
    assert book.results_nbytes == 64 + (4 << 20)
    for replica in (0, 1):
        book.does(returns(replica, 1, run=(2,)))
    book.on(returns(0, 0, run=(3,)), FreeResults())
    assert book.results_nbytes == 0
    book.does(returns(1, 0, run=(3,)))
    book.on(returns(0, 0, run=(4,)))  # nothing large, nothing to free


# --- steps of a series ----------------------------------------------------------------------------------------------


def over(run: int, failed: bool = False, replicas: int = 2) -> list[Send]:
    """What the replicas of a step are told when it is over."""
    return [Send(w(replica), StepFinished((run,), failed)) for replica in range(replicas)]


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_hear_that_a_step_is_over_when_it_is_committed(replicas: int) -> None:
    book = training(replicas)
    for run in (2, 3):
        for replica in range(1, replicas):
            book.on(returns(replica, 1, (applies(0),), run=(run,), series=2))
        book.on(returns(0, 1, (applies(0),), run=(run,), series=2), commits(steps(run, ((0, 1),), (0,) * replicas)))
        book.on(book.finished(), *over(run, replicas=replicas), to(CONTROLLER, RunFinished, run=(run,), commits=1))
    book.repeat_all()


def test_a_controller_that_is_back_hears_again_how_its_runs_ended() -> None:
    book = training(1)
    hello = hears(CONTROLLER, Hello(PROTOCOL, "controller", "c", 7))
    ends = {run: to(CONTROLLER, RunFinished, run=(run,)) for run in range(2, 8)}
    book.on(returns(0, 0, run=(2,)), ends[2])
    book.on(hello, to(CONTROLLER, Welcome), ends[2])
    for run in (3, 4, 5):  # with a lookahead of 1 it has had the answers of those before the last
        step = returns(0, 0, run=(run,), series=3).record
        assert isinstance(step, Return)
        step = replace(step, lookahead=1)
        book.on(hears(w(0), step), *over(run, replicas=1), ends[run])
    repeated = [command for run in (4, 5) for command in (*over(run, replicas=1), ends[run])]
    book.on(hello, to(CONTROLLER, Welcome), *repeated)
    book.does(asks(0, reduces(0, scalar(1)), run=(6,)))
    book.on(hello, to(CONTROLLER, Welcome))  # it has those of the series, since this is none of it
    book.repeat_all()


def test_a_run_of_its_own_tells_replicas_nothing() -> None:
    book = training()
    book.on(returns(0, 0, run=(2,)))
    book.on(returns(1, 0, run=(2,)), to(CONTROLLER, RunFinished))


def test_after_a_step_that_failed_none_of_its_series_begins() -> None:
    book = training()
    book.on(returns(0, 0, run=(2,), series=2, raises="KeyError"))
    book.on(returns(1, 0, run=(2,), series=2), *over(2, failed=True), to(CONTROLLER, RunFinished, "KeyError"))
    is_over = to(w(0), PointFailed, "cs.ContextError", "run 3 is over", ends_run=True)
    book.on(asks(0, reduces(0, scalar(1)), run=(3,), series=2), is_over)
    book.on(returns(1, 0, run=(4,), series=2), Says("returned from run 4, which is over"), over(4, failed=True)[1])
    book.on(returns(0, 0, run=(5,)))
    book.on(returns(1, 0, run=(5,)), to(CONTROLLER, RunFinished, run=(5,)))
    book.repeat_all()


def test_who_missed_the_end_of_a_step_hears_it_when_a_later_run_has_begun() -> None:
    """The server may have died with the message, and the others gone on: step 3 waits in this worker's queue."""
    book = training()
    for replica in (0, 1):
        book.does(returns(replica, 0, run=(2,), series=2, raises="KeyError"))
    book.on(returns(0, 0, run=(4,), series=4))
    is_over = Says("returned from run 2, which is over")
    book.on(returns(1, 0, run=(2,), series=2, raises="KeyError"), is_over, over(2, failed=True)[1])
    book.on(returns(0, 0, run=(2,), series=2, raises="KeyError"), is_over)  # late: it has gone on
    book.on(returns(1, 0, run=(4,), series=4), *over(4), to(CONTROLLER, RunFinished, run=(4,)))


def test_another_series_begins_after_one_that_failed() -> None:
    book = training()
    for replica in (0, 1):
        book.does(returns(replica, 0, run=(2,), series=2, raises="KeyError"))
    book.on(returns(0, 0, run=(5,), series=5))
    book.on(returns(1, 0, run=(5,), series=5), *over(5), to(CONTROLLER, RunFinished, run=(5,)))


def test_a_step_whose_replica_is_dead_is_over_for_the_others() -> None:
    book = training()
    book.on(returns(0, 0, run=(2,), series=2))
    lost = to(CONTROLLER, RunFinished, "cs.ReplicaLostError", run=(2,))
    book.on(dies(1), Says("died"), Send(w(0), StepFinished((2,), True)), lost)
    # And of one that begins when the death is known.
    book.on(
        returns(0, 0, run=(4,), series=4),
        to(CONTROLLER, RunFinished, "cs.ReplicaLostError", run=(4,)),
        over(4, True)[0],
    )


@pytest.mark.parametrize("later", [0, 1, 2])
def test_cancelling_steps_ends_the_first_that_is_not_over(later: int) -> None:
    book = training()
    book.on(returns(0, 1, (applies(0),), run=(2,), series=2))
    book.on(hears(CONTROLLER, Cancel((2,), later)))
    cancelled = to(CONTROLLER, RunFinished, "KeyboardInterrupt", run=(2,), commits=0)
    book.on(returns(1, 1, (applies(0),), run=(2,), series=2), *over(2, failed=True), cancelled)
    book.repeat_all()


def test_cancelling_steps_may_come_when_the_first_is_over() -> None:
    book = training()
    for replica in (0, 1):
        book.does(returns(replica, 0, run=(2,), series=2))
    book.on(asks(0, reduces(0, scalar(1)), run=(3,), series=2))
    book.on(hears(CONTROLLER, Cancel((2,), 2)), to(w(0), PointFailed, "KeyboardInterrupt", "run 3 was", run=(3,)))
    book.on(returns(0, 1, run=(3,), series=2, raises="KeyboardInterrupt"))
    cancelled = to(CONTROLLER, RunFinished, "KeyboardInterrupt", run=(3,))
    book.on(returns(1, 0, run=(3,), series=2, raises="KeyboardInterrupt"), *over(3, failed=True), cancelled)
    book.repeat_all()


def test_cancelling_steps_may_come_before_the_next_one_begins() -> None:
    book = training()
    for replica in (0, 1):
        book.does(returns(replica, 0, run=(2,), series=2))
    book.on(hears(CONTROLLER, Cancel((2,), 2)))
    book.on(returns(0, 0, run=(3,), series=2))
    cancelled = to(CONTROLLER, RunFinished, "KeyboardInterrupt", run=(3,))
    book.on(returns(1, 0, run=(3,), series=2), *over(3, failed=True), cancelled)
    book.repeat_all()


def test_cancelling_steps_forgets_no_end_of_the_steps_before() -> None:
    """The end of step 2 may be lost with the server, for a worker and for the controller."""
    book = training()
    for replica in (0, 1):
        book.does(returns(replica, 0, run=(2,), series=2))
    book.on(hears(CONTROLLER, Cancel((2,), 1)))
    ended = to(CONTROLLER, RunFinished, run=(2,))
    book.on(returns(1, 0, run=(2,), series=2), *over(2), ended)
    book.on(hears(CONTROLLER, Hello(PROTOCOL, "controller", "c", 7)), to(CONTROLLER, Welcome), *over(2), ended)
    book.on(returns(0, 0, run=(3,), series=2))
    cancelled = to(CONTROLLER, RunFinished, "KeyboardInterrupt", run=(3,))
    book.on(returns(1, 0, run=(3,), series=2), *over(3, failed=True), cancelled)
    book.repeat_all()


def test_cancelling_steps_that_are_all_over_changes_nothing() -> None:
    book = training()
    for run in (2, 3):
        for replica in (0, 1):
            book.does(returns(replica, 0, run=(run,), series=2))
    book.on(hears(CONTROLLER, Cancel((2,), 1)))
    book.on(returns(0, 0, run=(4,)))
    book.on(returns(1, 0, run=(4,)), to(CONTROLLER, RunFinished, run=(4,)))


def test_cancelling_steps_of_which_one_has_failed_changes_nothing() -> None:
    book = training()
    for replica in (0, 1):
        book.does(returns(replica, 0, run=(2,), series=2, raises="KeyError"))
    book.on(hears(CONTROLLER, Cancel((2,), 2)))
    book.on(returns(0, 0, run=(5,)))
    book.on(returns(1, 0, run=(5,)), to(CONTROLLER, RunFinished, run=(5,)))


def test_what_replicas_bring_to_the_next_step_waits_for_the_end_of_the_one_before() -> None:
    book = training()
    book.on(returns(0, 1, (applies(0),), run=(2,), series=2))
    book.on(returns(0, 1, (applies(0),), run=(3,), series=2))  # too early: no worker of ours does that
    book.on(returns(1, 1, (applies(0),), run=(2,), series=2), commits(steps(2, ((0, 1),), (0, 0))))
    book.on(book.finished(), *over(2), to(CONTROLLER, RunFinished, run=(2,), commits=1))
    book.on(returns(1, 1, (applies(0),), run=(3,), series=2), commits(steps(3, ((0, 1),), (0, 0))))
    book.on(book.finished(), *over(3), to(CONTROLLER, RunFinished, run=(3,), commits=1))


# --- nested runs ----------------------------------------------------------------------------------------------------


def merging(replicas: int = 2) -> Playbook:
    """All are at merge_call 0 of run 2, and replica 0 holds the token."""
    book = training(replicas)
    for replica in range(replicas):
        book.does(asks(replica, merge_calls(0), run=(2,)))
    assert to(w(0), Token, run=(2,), k=0).fits(book.commands[-1])
    return book


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_holder_of_the_token_runs_and_its_answer_comes_to_it(replicas: int) -> None:
    book = merging(replicas)
    nested = (2, 0, 0)
    for replica in range(replicas - 1):
        book.on(returns(replica, 1, (applies(0),), run=nested))
    last = replicas - 1
    book.on(returns(last, 1, (applies(0),), run=nested), commits(steps(2, ((0, 1),), (0,) * replicas)))
    finished = Send(w(0), RunFinished(nested, tuple(map(result, range(replicas))), None, 1))
    book.on(book.finished(), finished)
    book.on(returns(last, 1, (applies(0),), run=nested), finished)
    given_back = hears(w(0), MergeCallReturn((2,), 0, (NOTHING,) * replicas, None))
    book.on(given_back, *(Send(w(r), Merged((2,), 0, NOTHING)) for r in range(1, replicas)))
    book.on(returns(0, 1, (applies(0),), run=nested), finished)  # still known
    for replica in range(last):
        book.on(returns(replica, 1, run=(2,)))
    book.on(returns(last, 1, run=(2,)), to(CONTROLLER, RunFinished, run=(2,), commits=0))
    book.repeat_all()


def test_a_nested_run_belongs_to_the_token_that_is_out() -> None:
    book = merging()
    reason = "nested in a merge_call that no worker is running"
    for run in [(2, 1, 0), (3, 0, 0), (2, 0, 0, 0, 0)]:
        book.on(asks(0, reduces(0), run=run), to(w(0), PointFailed, "cs.PeerProtocolError", reason))
    book.on(returns(0, 0, run=(2, 0, 0)))
    early = hears(w(0), MergeCallReturn((2,), 0, (NOTHING, NOTHING), None))
    # The merge function cannot have returned before what it started: the run ends with that.
    book.on(early, to(w(1), PointFailed, "cs.PeerProtocolError", "returned before run 2.0.0 was over", ends_run=True))


def test_the_next_nested_run_forgets_the_one_before_it() -> None:
    book = merging()
    for run in [(2, 0, 0), (2, 0, 1)]:
        book.does(returns(0, 0, run=run))
        book.on(returns(1, 0, run=run), to(w(0), RunFinished, run=run))
    book.on(returns(1, 0, run=(2, 0, 0)), Says("run 2.0.0, which is over"))
    book.on(asks(1, reads(0), run=(2, 0, 0)), to(w(1), PointFailed, "cs.ContextError", "run 2.0.0 is over"))


def test_tokens_nest() -> None:
    book = merging()
    for replica in (0, 1):
        book.does(asks(replica, merge_calls(0), run=(2, 0, 0)))
    assert to(w(0), Token, run=(2, 0, 0)).fits(book.commands[-1])
    book.does(returns(1, 0, run=(2, 0, 0, 0, 0)))
    book.on(returns(0, 0, run=(2, 0, 0, 0, 0)), to(w(0), RunFinished, run=(2, 0, 0, 0, 0)))
    book.on(hears(w(0), MergeCallReturn((2, 0, 0), 0, (NOTHING, NOTHING), None)), to(w(1), Merged, run=(2, 0, 0), k=0))


def test_the_holder_of_the_token_does_what_the_controller_does() -> None:
    book = merging()
    refused = to(CONTROLLER, Refused, "cs.ContextError", "holder of the merge_call token")
    book.on(hears(CONTROLLER, Assign("c", book.sequence(), 1, "assign", scalar(1))), refused)
    request = hears(w(0), Assign("2.0", 1, 1, "assign_add", scalar(1)))
    book.on(request, commits(writes(W, "assign_add", scalar(1))))
    book.on(book.finished(), Send(w(0), Done(1, 1, 2)))
    book.on(request, Send(w(0), Done(1, 1, 2)))
    book.on(
        hears(w(0), Create("2.0", 2, spec("b"), None)),
        allocates("parameters/float32", 64, 68),
        to(w(0), Created, sequence=2),
    )
    sgd = tuple(DEFAULTS["SGD"].items())
    book.on(hears(w(0), Configure("2.0", 3, 0, "SGD", sgd, None, -1)), Send(w(0), Done(3, 2, 0)))
    book.on(hears(w(0), Get(1, (1,), (), False)), to(w(0), Got, request=1))
    # While a run nested in the merge_call is open, nobody writes from outside.
    book.on(returns(1, 0, run=(2, 0, 0)))
    late = hears(w(0), Assign("2.0", 4, 1, "assign", scalar(1)))
    book.on(late, to(w(0), Refused, "cs.ContextError", "run 2.0.0 has not ended", number=4))
    book.on(returns(0, 0, run=(2, 0, 0)), to(w(0), RunFinished))
    book.does(hears(w(0), MergeCallReturn((2,), 0, (NOTHING, NOTHING), None)))
    after = hears(w(0), Assign("2.0", 5, 1, "assign", scalar(1)))
    book.on(after, to(w(0), Refused, "cs.ContextError", "run 2 has not ended", number=5))
    book.repeat_all()


def test_the_requests_of_a_token_are_forgotten_with_its_run() -> None:
    book = merging()
    book.does(hears(w(0), Assign("2.0", 1, 1, "assign", scalar(1))))
    book.settle()
    book.does(hears(w(0), MergeCallReturn((2,), 0, (NOTHING, NOTHING), None)))
    for replica in (0, 1):
        book.does(returns(replica, 1, run=(2,)))
    assert any(key[:1] == b"q" and b"2.0" in key for key, _ in book.memory.items())
    book.does(returns(0, 0, run=(3,)))
    assert not any(key[:1] == b"q" and b"2.0" in key for key, _ in book.memory.items())
    assert not any(key[:1] in b"spu" and b"\x91\x02" in key for key, _ in book.memory.items())


def test_a_request_that_outlives_its_run_is_answered_and_forgotten() -> None:
    book = merging()
    book.does(hears(w(0), Assign("2.0", 1, 1, "assign", scalar(1))))
    book.does(hears(CONTROLLER, Cancel((2,))))
    book.on(returns(0, 0, run=(3,)))
    book.on(book.finished(), Send(w(0), Done(1, 1, 2)))
    assert not any(key[:1] == b"q" and b"2.0" in key for key, _ in book.memory.items())


def test_an_error_in_a_nested_run_is_the_holders_to_raise() -> None:
    book = merging()
    book.on(asks(0, reduces(0, scalar(1)), run=(2, 0, 0)))
    book.on(
        returns(1, 0, raises="KeyError", run=(2, 0, 0)),
        to(w(0), PointFailed, "cs.MergeMismatchError", "replica 1 raised KeyError", run=(2, 0, 0)),
    )
    book.on(
        returns(0, 1, raises="cs.MergeMismatchError", run=(2, 0, 0)),
        to(w(0), RunFinished, "KeyError", run=(2, 0, 0)),
    )
    caught = hears(w(0), MergeCallReturn((2,), 0, (NOTHING, NOTHING), None))
    book.on(caught, to(w(1), Merged, run=(2,)))


def test_replica_0_goes_on_only_after_it_has_given_the_token_back() -> None:
    book = merging()
    inside = "replica 0 of run 2 asks at all_reduce SUM .* inside its merge_call"
    book.on(asks(0, reduces(1), run=(2,)), to(w(0), PointFailed, "cs.PeerProtocolError", inside, k=1, ends_run=True))
    inside = "replica 0 returned from run 2 inside its merge_call"
    book.on(
        returns(0, 1, raises="cs.PeerProtocolError", run=(2,)),
        to(w(1), PointFailed, "cs.PeerProtocolError", inside, k=0, ends_run=True),
    )
    book.on(returns(1, 1, raises="cs.PeerProtocolError", run=(2,)), to(CONTROLLER, RunFinished, "cs.PeerProtocolError"))


def test_cancelling_a_run_cancels_those_nested_in_it() -> None:
    book = merging()
    book.does(asks(0, reduces(0, scalar(1)), run=(2, 0, 0)))
    book.on(
        hears(CONTROLLER, Cancel((2,))),
        to(w(1), PointFailed, "KeyboardInterrupt", "run 2 was", run=(2,), k=0),
        to(w(0), PointFailed, "KeyboardInterrupt", "run 2.0.0 was", run=(2, 0, 0)),
    )
    book.on(hears(w(0), MergeCallReturn((2,), 0, (NOTHING, NOTHING), None)))  # too late
    book.on(returns(0, 1, raises="KeyboardInterrupt", run=(2,)))
    book.on(returns(1, 1, raises="KeyboardInterrupt", run=(2,)), to(CONTROLLER, RunFinished, "KeyboardInterrupt"))


def test_a_death_in_a_nested_run_ends_it_and_the_run_around_it() -> None:
    book = merging()
    book.does(asks(0, reduces(0, scalar(1)), run=(2, 0, 0)))
    lost = "cs.ReplicaLostError"
    book.on(dies(1), Says("died"), to(w(0), PointFailed, lost, "replica 1 .* in run 2.0.0", run=(2, 0, 0)))
    book.on(returns(0, 1, raises=lost, run=(2, 0, 0)), to(w(0), RunFinished, lost, run=(2, 0, 0)))
    book.on(hears(w(0), MergeCallReturn((2,), 0, (), book.commands[-1].record.error)))  # type: ignore[union-attr]
    book.on(returns(0, 1, raises=lost, run=(2,)), to(CONTROLLER, RunFinished, lost, "replica 1 .* in run 2:"))


def test_the_death_of_the_holder_takes_its_token_with_it() -> None:
    book = merging()
    lost = to(w(1), PointFailed, "cs.ReplicaLostError", "replica 0", run=(2,), ends_run=True)
    book.on(dies(0), Says("died"), lost)
    refused = to(w(0), Refused, "cs.PeerProtocolError")
    book.on(hears(w(0), MergeCallReturn((2,), 0, (NOTHING, NOTHING), None)), refused)
    late = asks(1, reduces(0), run=(2, 0, 0))
    book.on(late, to(w(1), PointFailed, "cs.PeerProtocolError", "that no worker is running"))
    book.on(
        returns(1, 1, raises="cs.ReplicaLostError", run=(2,)),
        to(CONTROLLER, RunFinished, "cs.ReplicaLostError"),
    )


def test_a_value_of_the_arena_is_passed_on_unread() -> None:
    book = Playbook(1).begin()
    far = Value(b"far", (lies("arena/0", 64, (1000,)),))
    book.on(hears(w(0), Return((1,), 0, 1, (), 0, far, None)), Send(CONTROLLER, RunFinished((1,), (far,), None, 0)))


# --- how far ahead a run may be -----------------------------------------------------------------------------------

FAR = r"run {} is {} runs after the last known one \({}\); at most 65"


@pytest.mark.parametrize("number", [66, 4000, 1 << 61])
def test_a_run_far_ahead_is_refused_and_true_ones_are_heard(number: int) -> None:
    book = Playbook(2).begin()
    reason = FAR.format(number, number, 0)
    book.on(returns(0, 0, run=(number,)), to(w(0), Refused, "cs.PeerProtocolError", reason))
    book.on(asks(0, reads(0), run=(number,)), to(w(0), PointFailed, "cs.PeerProtocolError", reason, ends_run=True))
    for record in (Cancel((number,)), Resent((number,), 0), WaitReport((number,), 1.0)):
        book.on(hears(CONTROLLER, record), to(CONTROLLER, Refused, "cs.PeerProtocolError", reason))
    for run in (1, 2):
        book.on(returns(0, 0, run=(run,)))
        book.on(returns(1, 0, run=(run,)), to(CONTROLLER, RunFinished, run=(run,), error=None))
    book.on(returns(0, 0, run=(68,)), to(w(0), Refused, "cs.PeerProtocolError", FAR.format(68, 66, 2)))
    book.on(returns(0, 0, run=(67,)))


def test_a_nested_run_far_ahead_is_refused_too() -> None:
    book = merging()
    reason = r"run 2.0.70 is 71 runs after the last known one \(there is none\); at most 65"
    book.on(returns(0, 0, run=(2, 0, 70)), to(w(0), Refused, "cs.PeerProtocolError", reason))
    book.on(returns(0, 0, run=(2, 0, 0)))
    book.on(returns(1, 0, run=(2, 0, 0)), to(w(0), RunFinished, run=(2, 0, 0)))


def test_a_plain_step_far_ahead_is_none() -> None:
    book = Playbook(2).begin().has(spec("w")).has_optimizer().has_set(1)
    for run in (2, 3):
        for replica in (0, 1):
            book.does(returns(replica, 1, (applies(0),), run=(run,)))
        book.settle()
    engine = Engine(book.config, book.memory)
    for replica in (0, 1):
        engine.handle(returns(replica, 1, (applies(0),), run=(4,)), 1.0)
    engine.handle(Finished(book.commands and max(c.ticket for c in book.commands if isinstance(c, Commit)) + 1), 1.0)
    (refused,) = engine.handle(returns(0, 1, (applies(0),), run=(3000,)), 1.0)
    assert to(w(0), Refused, "cs.PeerProtocolError", FAR.format(3000, 2996, 4)).fits(refused)
    assert engine.handle(returns(0, 1, (applies(0),), run=(5,)), 1.0) == []
    (commit,) = engine.handle(returns(1, 1, (applies(0),), run=(5,)), 1.0)
    assert isinstance(commit, Commit)


def test_after_many_plain_steps_the_next_is_near() -> None:
    book = Playbook(2).begin().has(spec("w")).has_optimizer().has_set(1)
    engine = Engine(book.config, book.memory)
    for run in range(2, 400):
        for replica in (0, 1):
            for command in engine.handle(returns(replica, 1, (applies(0),), run=(run,)), 1.0):
                assert isinstance(command, Commit)
                (finished,) = engine.handle(Finished(command.ticket), 1.0)
                assert to(CONTROLLER, RunFinished, run=(run,)).fits(finished)
        if run in (100, 398):  # by then a hundred steps are known by their messages alone
            assert engine.handle(Tick(), 1.0) == []
            assert engine.handle(returns(0, 1, (applies(0),), run=(run,)), 1.0) == [
                Send(CONTROLLER, RunFinished((run,), (result(0), result(1)), None, 1))
            ]


def test_a_rate_that_comes_with_a_step_does_not_undo_what_a_merge_function_sets() -> None:
    """Every message of a replica brings the rate, and it holds from the first of them on."""
    book = Playbook(2).begin().has_optimizer(learning_rate=0.125)
    changes = (OptimizerChange(1, (("learning_rate", 0.5),)),)
    for replica in (0, 1):
        asked = Ask((1,), replica, 1, (), merge_calls(0), 1, preserved=True, changes=changes)
        book.does(hears(w(replica), asked))
    given = (("learning_rate", 0.25),)
    book.on(hears(w(0), Configure("1.0", 1, 1, "SGD", given, None, -1)), to(w(0), Done, number=1))
    book.does(hears(w(0), MergeCallReturn((1,), 0, (NOTHING,) * 2, None)))
    for replica in (0, 1):
        book.does(hears(w(replica), Return((1,), replica, 1, (), 1, result(replica), None, 1, changes=changes)))
    (answer,) = book.does(hears(CONTROLLER, Describe(0, (), (1,))))
    assert isinstance(answer, Send)
    assert isinstance(answer.record, Described)
    assert dict(answer.record.optimizers[0].hyperparameters)["learning_rate"] == 0.25
