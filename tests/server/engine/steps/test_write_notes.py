"""Writes that replicas need not agree on: when the server does them, in which order, and which count for nothing."""

from __future__ import annotations

import pytest
from tests.harness.playbook import (
    CONTROLLER,
    Playbook,
    Says,
    array,
    asks,
    assigns,
    commits,
    computes,
    dies,
    hears,
    lies,
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
    writes,
)

from cs_proto.arrays import Array
from cs_proto.messages import Cancel, Committed, PointFailed, Reduced, RunFinished, Token, WriteNote
from cs_server.events import Write

W = lies("parameters/float32", 0, (3,))


def rows(*numbers: int) -> Array:
    return array(*numbers, dtype="int64")


def book(replicas: int = 2) -> Playbook:
    """Variable 1 has three rows of one number."""
    return Playbook(replicas).begin().has(spec("w", (3,)))


def note(k: int, number: int, value: float, row: int = 0) -> WriteNote:
    return notes_write(k, number, array(value), rows(row))


def done(value: float, row: int = 0) -> Write:
    return writes(W, "scatter_add", array(value), rows=rows(row))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_trailing_ones_are_done_at_the_end_in_replica_order(replicas: int) -> None:
    seen = book(replicas)
    for replica in reversed(range(1, replicas)):
        seen.on(returns(replica, 0, (note(0, 0, replica), note(0, 1, 10 + replica))))
    every = [done(value) for replica in range(replicas) for value in (replica, 10 + replica)]
    seen.on(returns(0, 0, (note(0, 0, 0), note(0, 1, 10))), commits(*every))
    results = tuple(map(result, range(replicas)))
    seen.on(seen.finished(), to(CONTROLLER, RunFinished, values=results, commits=2 * replicas))
    seen.repeat_all()


def test_those_before_a_merge_point_are_done_just_before_it() -> None:
    seen = book()
    one, two = array(1, 1, 1), array(2, 2, 2)
    seen.on(returns(1, 2, (note(0, 0, 5), assigns(0, one), assigns(1, one), note(2, 1, 6))))
    seen.on(
        returns(0, 2, (assigns(0, two), note(1, 0, 3), note(1, 1, 4), assigns(1, two), note(2, 2, 7))),
        commits(
            done(5),
            writes(W, "assign_add", two, one, reduce="SUM"),
            done(3),
            done(4),
            writes(W, "assign_add", two, one, reduce="SUM"),
            done(7),
            done(6),
        ),
    )
    seen.on(seen.finished(), to(CONTROLLER, RunFinished, commits=7))
    seen.repeat_all()


def test_reading_what_a_merge_point_wrote_commits_those_before_it_and_none_after() -> None:
    seen = book()
    seen.on(asks(0, reads(1), (note(0, 0, 1), assigns(0, array(1, 1, 1)), note(1, 1, 2))))
    seen.on(
        asks(1, reduces(1, scalar(1)), (assigns(0, array(2, 2, 2)), note(1, 0, 3)), preserved=True),
        commits(done(1), writes(W, "assign_add", array(1, 1, 1), array(2, 2, 2), reduce="SUM")),
    )
    seen.on(seen.finished(), to(w(0), Committed, k=1))
    seen.on(asks(0, reduces(1, scalar(2))), computes((scalar(2),), (scalar(1),), reduce="SUM"))
    seen.on(seen.computed(scalar(3)), to(w(0), Reduced), to(w(1), Reduced))
    seen.on(returns(0, 2))
    seen.on(returns(1, 2), commits(done(2), done(3)))
    seen.on(seen.finished(), to(CONTROLLER, RunFinished, commits=4))
    seen.repeat_all()


def test_a_reduction_does_not_commit_them_and_a_merge_call_does() -> None:
    seen = book()
    for replica in (0, 1):
        seen.does(asks(replica, reduces(0, scalar(1)), (note(0, 0, replica),)))
    seen.on(seen.computed(scalar(2)), to(w(0), Reduced), to(w(1), Reduced))
    seen.on(asks(1, merge_calls(1), (note(1, 1, 9),)))
    seen.on(asks(0, merge_calls(1)), commits(done(0), done(1), done(9)))
    seen.on(seen.finished(), to(w(0), Token))


def test_more_of_them_may_come_between_two_merge_points() -> None:
    """A replica that has very many sends them on before it reaches the next merge point."""
    seen = book()
    seen.on(asks(0, reads(0), (note(0, 0, 1),)), to(w(0), Committed, k=0))
    seen.on(asks(0, reads(0), (note(0, 1, 2),)), to(w(0), Committed, k=0))
    seen.on(returns(0, 0, (note(0, 2, 3),)))
    seen.on(returns(1, 0), commits(done(1), done(2), done(3)))


def test_a_raise_leaves_what_was_noted_before_the_replicas_parted() -> None:
    seen = book()
    seen.on(returns(0, 1, (note(0, 0, 1), assigns(0, array(1, 1, 1)), note(1, 1, 2))))
    seen.on(returns(1, 0, (note(0, 0, 5),), raises="ValueError"), commits(done(1), done(5)))
    seen.on(seen.finished(), to(CONTROLLER, RunFinished, "ValueError", commits=2))
    seen.on(returns(0, 0, run=(2,)))
    seen.on(returns(1, 0, run=(2,)), to(CONTROLLER, RunFinished))  # the one after the parting is gone


def test_a_cancelled_run_leaves_nothing() -> None:
    seen = book()
    seen.does(returns(0, 0, (note(0, 0, 1),)))
    seen.does(hears(CONTROLLER, Cancel((1,))))
    seen.on(returns(1, 0, (note(0, 0, 2),)), to(CONTROLLER, RunFinished, "KeyboardInterrupt", commits=0))


def test_a_lost_replica_leaves_nothing() -> None:
    seen = book()
    seen.does(returns(0, 0, (note(0, 0, 1),)))
    seen.on(dies(1), Says("replica 1 .* died"), to(CONTROLLER, RunFinished, "cs.ReplicaLostError", commits=0))


def test_versions_count_them() -> None:
    seen = book()
    seen.does(returns(0, 0, (note(0, 0, 1), notes_write(0, 1, array(1, 2, 3), None, op="assign"))))
    seen.on(returns(1, 0), commits(done(1), writes(W, "assign", array(1, 2, 3))))
    seen.settle()
    assert seen.version(1) == 2


@pytest.mark.parametrize(
    ("wrong", "code", "pattern"),
    [
        (
            note(0, 1, 1),
            "cs.PeerProtocolError",
            "sent write note 1 of run 1 after 0 merge points, but the server has 0 notes",
        ),
        (note(1, 0, 1), "cs.PeerProtocolError", "after 1 merge points"),
        (notes_write(0, 0, array(1), rows(0), variable=7), "cs.InvalidArgumentError", "no variable 7"),
        (notes_write(0, 0, array(1, 2), rows(0)), "cs.InvalidArgumentError", r"float32\[2\]; it must be float32\[1\]"),
        (notes_write(0, 0, array(1), array(0)), "cs.InvalidArgumentError", "must be integers"),
        (notes_write(0, 0, array(1), None), "cs.InvalidArgumentError", "has indices"),
        (
            notes_write(0, 0, array(1), rows(0), op="assign"),
            "cs.InvalidArgumentError",
            "a scatter operation has indices",
        ),
    ],
)
def test_what_does_not_fit_is_refused_to_its_sender(wrong: WriteNote, code: str, pattern: str) -> None:
    seen = book()
    seen.on(asks(0, reads(0), (wrong,)), to(w(0), PointFailed, code, pattern))
    seen.on(returns(1, 0))
    seen.on(returns(0, 0, raises="ValueError"), to(CONTROLLER, RunFinished, "ValueError", commits=0))
