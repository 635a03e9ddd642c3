"""How a run goes on: when replicas are answered, what is committed and when, and how it ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.harness.playbook import (
    CONTROLLER,
    Playbook,
    To,
    allocates,
    applies,
    array,
    asks,
    assigns,
    commits,
    computes,
    dies,
    fault,
    first_apply,
    gathers,
    hears,
    lies,
    makes,
    merge_calls,
    reads,
    reduces,
    register,
    result,
    returns,
    scalar,
    spec,
    steps,
    to,
    w,
    writes,
)

from cs_proto.messages import (
    Accepted,
    ApplyPoint,
    Ask,
    Assign,
    Committed,
    CreatedInRun,
    Done,
    MergeCallReturn,
    Merged,
    OptimizerUpdate,
    PointFailed,
    Preserve,
    Reduced,
    Refused,
    RunFinished,
    SparseGradient,
    Token,
    Value,
    Variable,
)
from cs_server.engine.store.tables import Tables
from cs_server.events import (
    Apply,
    Command,
    Commit,
    Discard,
    Fill,
    Fingerprint,
    Fingerprinted,
    MemoryAvailable,
    Received,
    Send,
)

W = lies("parameters/float32", 0)
NONE, SUM, MEAN, ONLY_FIRST = range(4)
MISMATCH = "cs.MergeMismatchError"
WRITTEN = "cs.VariableWrittenError"


def training(replicas: int = 2) -> Playbook:
    """Variable 1 (w) and an SGD optimizer whose set 1 is w; its first step was run 1."""
    return Playbook(replicas).begin().has(spec("w")).has_second_buffers(1).has_optimizer().has_set(1)


def finished(replicas: int = 2, commits: int = 0) -> To:
    return to(CONTROLLER, RunFinished, values=tuple(map(result, range(replicas))), commits=commits)


# --- runs without merge points, and the step that everybody writes --------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_run_ends_when_all_have_returned(replicas: int) -> None:
    book = Playbook(replicas).begin()
    for replica in reversed(range(1, replicas)):
        book.on(returns(replica, 0))
    book.on(returns(0, 0), finished(replicas))
    book.repeat_all()


def test_gradients_in_buffers_that_nobody_asked_for_end_the_run_and_nothing_else() -> None:
    book = Playbook(2).begin().has(spec("w")).has_optimizer().has_set(1)
    for run in (2, 3):  # the second may be a captured step
        book.does(returns(0, 1, (applies(0, buffers=1),), run=(run,)))
        why = "gradient of 'w' is said to lie in the second set of buffers, but no Locate asked for that of float32"
        *commands, ended = book.does(returns(1, 1, (applies(0, buffers=1),), run=(run,)))
        assert to(CONTROLLER, RunFinished, "cs.InvalidArgumentError", why, commits=0).fits(ended)
        assert not any(isinstance(command, Commit) for command in commands)
    book.does(returns(0, 1, (applies(0),), run=(4,)))
    book.on(returns(1, 1, (applies(0),), run=(4,)), commits(steps(2, ((0, 1),))))


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_notes_are_committed_at_the_return_in_one_message_a_replica(replicas: int) -> None:
    book = training(replicas)
    for replica in range(replicas - 1):
        book.on(returns(replica, 1, (applies(0, buffers=replica % 2),), run=(2,)))
    last = replicas - 1
    buffers = tuple(replica % 2 for replica in range(replicas))
    book.on(
        returns(last, 1, (applies(0, buffers=last % 2),), run=(2,)),
        commits(steps(2, ((0, 1),), buffers)),
    )
    book.on(book.finished(), finished(replicas, commits=1))
    book.repeat_all()


def test_the_answer_is_repeated_until_the_next_run_begins() -> None:
    book = Playbook(2).begin()
    book.does(returns(0, 0))
    book.on(returns(1, 0), finished())
    book.on(returns(0, 0), finished())
    book.on(returns(0, 0, run=(2,)))
    book.does(returns(1, 0))  # over: nothing but a line
    book.on(asks(1, reads(0)), to(w(1), PointFailed, "cs.ContextError", "run 1 is over", ends_run=True))


# --- all_reduce and all_gather --------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_reduction_is_computed_when_all_wait_and_commits_nothing(replicas: int) -> None:
    book = training(replicas)
    parts = tuple((scalar(replica), array(replica, 1)) for replica in range(replicas))
    for replica in range(replicas - 1):
        book.on(asks(replica, reduces(1, *parts[replica]), (applies(0),), run=(2,)))
    last = replicas - 1
    book.on(asks(last, reduces(1, *parts[last]), (applies(0),), run=(2,)), computes(*parts, reduce="SUM"))
    total = (scalar(6), array(6, 3))
    book.on(
        book.computed(*total),
        *(Send(w(replica), Reduced((2,), 1, total)) for replica in range(replicas)),
    )
    for replica in range(last):
        book.on(returns(replica, 2, run=(2,)))
    book.on(returns(last, 2, run=(2,)), commits(steps(2, ((0, 1),), (0,) * replicas)))
    book.on(book.finished(), finished(replicas, commits=1))
    book.repeat_all()


def test_a_gather_names_its_axis() -> None:
    book = Playbook(2).begin()
    book.on(asks(0, gathers(0, array(1), axis=-1)))
    book.on(asks(1, gathers(0, array(2, 3), axis=-1)), computes((array(1),), (array(2, 3),), axis=-1))
    book.on(
        book.computed(array(1, 2, 3)),
        Send(w(0), Reduced((1,), 0, (array(1, 2, 3),))),
        Send(w(1), Reduced((1,), 0, (array(1, 2, 3),))),
    )


def test_a_reduction_that_cannot_be_computed_fails_at_all_and_the_run_goes_on() -> None:
    book = Playbook(2).begin()
    book.does(asks(0, reduces(0, array(1))))
    book.does(asks(1, reduces(0, array(1, 2))))
    why = fault("cs.InvalidArgumentError")
    failed = [to(w(r), PointFailed, "cs.InvalidArgumentError", k=0, ends_run=False) for r in (0, 1)]
    book.on(book.computed(error=why), *failed)
    book.on(asks(0, reduces(1, scalar(1))))
    book.on(asks(1, reduces(1, scalar(2))), computes((scalar(1),), (scalar(2),), reduce="SUM"))
    book.does(book.computed(scalar(3)))
    book.on(returns(0, 2))
    book.on(returns(1, 2), finished())
    book.repeat_all()


def test_outcomes_answer_questions_that_are_repeated() -> None:
    book = Playbook(2).begin()
    book.does(asks(0, reduces(0, scalar(1))))
    book.on(asks(0, reduces(0, scalar(1))))
    book.does(asks(1, reduces(0, scalar(2))))
    book.on(asks(1, reduces(0, scalar(2))))  # under way
    reduced = Reduced((1,), 0, (scalar(3),))
    book.on(book.computed(scalar(3)), Send(w(0), reduced), Send(w(1), reduced))
    book.on(book.computed(scalar(4)))  # once
    book.on(asks(0, reduces(0, scalar(1))), Send(w(0), reduced))


# --- applies and assigns --------------------------------------------------------------------------------------------


def test_the_first_apply_of_a_set_is_answered_at_once_and_committed_late() -> None:
    book = Playbook(2).begin().has(spec("w", (2,)), spec("b")).has_optimizer("Adam")
    book.on(asks(0, first_apply(0, 2, 1)))
    book.on(
        asks(1, first_apply(0, 1, 2)),
        allocates("slots/1/m/float32", 0, 8),
        allocates("slots/1/v/float32", 0, 8),
        allocates("slots/1/m/float32", 64, 68),
        allocates("slots/1/v/float32", 64, 68),
        Send(w(0), Accepted((1,), 0, (1,))),
        Send(w(1), Accepted((1,), 0, (1,))),
        commits(
            Fill("slots/1/m/float32", "float32", 0, 2, 0.0),
            Fill("slots/1/v/float32", "float32", 0, 2, 0.0),
            Fill("slots/1/m/float32", "float32", 16, 17, 0.0),
            Fill("slots/1/v/float32", "float32", 16, 17, 0.0),
        ),
    )
    book.on(returns(0, 1))
    book.on(returns(1, 1))  # the slots are not filled yet
    (step,) = book.does(book.finished())
    assert step.operations[0].updates[0].dense[0].slots == ("slots/1/m/float32", "slots/1/v/float32")  # type: ignore[union-attr]
    book.on(book.finished(), finished(commits=1))
    book.repeat_all()


def rows(replica: int, count: int = 1, variable: int = 1, width: int = 2) -> SparseGradient:
    """The gradient of some rows, in the replica's arena."""
    arena = f"arena/{replica}"
    return SparseGradient(variable, lies(arena, 0, (count, width)), lies(arena, 4096, (count,), "int64"))


def test_sparse_gradients_are_applied_in_replica_order_and_their_slots_take_no_memory() -> None:
    book = Playbook(2).begin().has(spec("table", (5, 2)), spec("b")).has_optimizer("Adam")
    points = [first_apply(0, 1, 2, sparse=(rows(replica, 3),)) for replica in (0, 1)]
    book.on(asks(1, points[1]))
    *_, fills = book.does(asks(0, points[0]))
    assert isinstance(fills, Commit)
    assert [fill.is_lazy for fill in fills.operations if isinstance(fill, Fill)] == [True, True, False, False]
    book.on(book.finished())
    book.on(returns(0, 1))
    (step,) = book.does(returns(1, 1))
    assert isinstance(step, Commit)
    (apply,) = step.operations
    assert isinstance(apply, Apply)
    (step_of_one,) = apply.updates
    assert [part.ranges for part in step_of_one.dense] == [((16, 17),)]
    assert [(part.first, part.shape) for part in step_of_one.sparse] == [(0, (5, 2))]
    brought = [point.updates[0].sparse[0] for point in points]
    assert step_of_one.sparse[0].gradients == tuple((each.values, each.indices) for each in brought)
    book.on(book.finished(), finished(commits=1))
    book.repeat_all()


def test_a_sparse_gradient_meets_a_dense_one() -> None:
    book = Playbook(2).begin().has(spec("table", (5, 2)), spec("empty", (0, 2))).has_optimizer()
    brought = rows(0), rows(0, variable=2)
    book.on(asks(0, first_apply(0, 1, 2, sparse=brought)))
    book.does(asks(1, first_apply(0, 1, 2)))
    book.on(returns(0, 1))
    (step,) = book.does(returns(1, 1))
    assert isinstance(step, Commit)
    (apply,) = step.operations
    assert isinstance(apply, Apply)
    (update,) = apply.updates
    assert not update.sparse
    (part,) = update.dense
    assert part.ranges == ((0, 10),)
    assert part.gradients == ("gradients/0/0/float32", "gradients/1/0/float32")
    assert part.rows == ((brought[0].values, brought[0].indices), None)
    book.on(book.finished(), finished(commits=1))
    book.repeat_all()


def test_rows_of_different_variables_do_not_meet() -> None:
    book = Playbook(2).begin().has(spec("table", (5, 2)), spec("other", (5, 2))).has_optimizer()
    book.on(asks(0, first_apply(0, 1, sparse=(rows(0),))))
    reason = r"replica 0 .* to 'table' \(rows of 'table'\) .*replica 1 .* to 'other' \("
    told = {"ends_run": True}
    book.on(
        asks(1, first_apply(0, 2)),
        to(w(0), PointFailed, MISMATCH, reason, **told),
        to(w(1), PointFailed, MISMATCH, reason, **told),
    )


def test_a_sparse_gradient_that_does_not_fit_fails_alike_for_all() -> None:
    book = Playbook(2).begin().has(spec("table", (5, 2))).has_optimizer()
    book.on(asks(0, first_apply(0, 1, sparse=(rows(0),))))
    reason = r"sparse gradient of variable 'table' is float32\[1, 3\]; the variable is float32\[5, 2\]"
    book.on(
        asks(1, first_apply(0, 1, sparse=(rows(1, width=3),))),
        to(w(0), PointFailed, "cs.InvalidArgumentError", reason, ends_run=False),
        to(w(1), PointFailed, "cs.InvalidArgumentError", reason, ends_run=False),
    )


def test_a_replica_that_knows_the_set_agrees_with_one_that_does_not() -> None:
    book = training()
    book.on(asks(0, first_apply(0, 1), run=(2,)))
    book.on(returns(1, 1, (applies(0, buffers=1),), run=(2,)), Send(w(0), Accepted((2,), 0, (1,))))
    book.on(returns(0, 1, run=(2,)), commits(steps(2, ((0, 1),), (0, 1))))


def test_one_commit_does_all_that_is_agreed_in_order() -> None:
    book = training()
    notes = (applies(0), assigns(1, scalar(5)), applies(2, buffers=1))
    book.on(returns(0, 3, notes, run=(2,)))
    book.on(
        returns(1, 3, notes, run=(2,)),
        commits(
            steps(2, ((0, 1),)),
            writes(W, "assign_add", scalar(5), scalar(5), reduce="SUM"),
            steps(3, ((0, 1),), (1, 1)),
        ),
    )
    book.on(book.finished(), finished(commits=3))


@pytest.mark.parametrize(
    ("variables", "optimizer", "reason"),
    [((7,), 1, "no variable 7"), ((2,), 1, "'n' is int64"), ((1, 1), 1, "twice"), ((1,), 5, "no optimizer 5")],
)
def test_a_first_apply_that_is_impossible_fails_at_all_and_the_run_goes_on(
    variables: tuple[int, ...], optimizer: int, reason: str
) -> None:
    book = Playbook(2).begin().has(spec("w"), spec("n", (), "int64")).has_optimizer()
    book.on(asks(0, first_apply(0, *variables, optimizer=optimizer)))
    failed = [to(w(r), PointFailed, "cs.InvalidArgumentError", reason, k=0, ends_run=False) for r in (0, 1)]
    book.on(asks(1, first_apply(0, *variables, optimizer=optimizer)), *failed)
    book.on(returns(0, 1))
    book.on(returns(1, 1), finished(commits=0))
    book.repeat_all()


def test_slots_that_do_not_fit_the_memory_are_refused_at_the_first_apply() -> None:
    book = Playbook(2).begin().has(spec("w", (100,))).has_optimizer("Adam")
    book.on(MemoryAvailable(799))
    book.on(asks(0, first_apply(0, 1)))
    failed = [to(w(r), PointFailed, "cs.MemoryPlanError", "800 bytes planned.*799", ends_run=False) for r in (0, 1)]
    book.on(asks(1, first_apply(0, 1)), *failed)
    book.on(MemoryAvailable(1 << 20))
    book.does(asks(0, first_apply(1, 1)))
    book.does(asks(1, first_apply(1, 1)))
    assert book.commands[-2] == Send(w(1), Accepted((1,), 1, (1,)))


VALUES = {"different": (1.0, 2.0), "equal": (3.0, 3.0)}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("op", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize(
    ("aggregation", "dtype", "values", "is_checked", "wanted"),
    [
        (NONE, "float32", "different", False, "NONE"),
        (NONE, "float32", "equal", True, "NONE"),
        (SUM, "float32", "different", False, "SUM"),
        (SUM, "float32", "equal", False, "SUM"),
        (SUM, "float32", "different", True, "SUM"),
        (SUM, "float32", "equal", True, "same Python number"),
        (SUM, "int32", "different", False, "SUM"),
        (MEAN, "float32", "different", False, "MEAN"),
        (MEAN, "float32", "equal", False, "MEAN"),
        (MEAN, "float32", "equal", True, None),
        (MEAN, "int32", "different", False, "mean of int32"),
        (MEAN, "int32", "equal", True, None),
        (ONLY_FIRST, "float32", "different", False, None),
        (ONLY_FIRST, "float32", "equal", True, None),
        (ONLY_FIRST, "int32", "different", True, None),
    ],
)
def test_assigns_follow_the_table_of_aggregations(
    replicas: int, op: str, aggregation: int, dtype: str, values: str, is_checked: bool, wanted: Any
) -> None:
    book = Playbook(replicas).begin().has(spec("v", (), dtype, aggregation))
    parts = [scalar(value, dtype) for value in VALUES[values]][:replicas]
    points = [assigns(0, part, op=op, checked=is_checked) for part in parts]
    for replica, point in enumerate(points):
        book.does(asks(replica, point))
    if wanted not in (None, "SUM", "MEAN") and replicas > 1:
        failed = [to(w(r), PointFailed, "cs.InvalidArgumentError", wanted, k=0, ends_run=False) for r in (0, 1)]
        assert [e.fits(c) for e, c in zip(failed, book.commands[-2:], strict=True)] == [True, True]
        return
    assert book.commands[-replicas:] == [Send(w(r), Accepted((1,), 0)) for r in range(replicas)]
    for replica in range(replicas - 1):
        book.does(returns(replica, 1))
    target = lies(f"parameters/{dtype}", 0, (), dtype)
    if replicas == 1 or wanted is None:
        operation = writes(target, op, parts[0])
    else:
        operation = writes(target, op, *parts, reduce=wanted)
    book.on(returns(replicas - 1, 1), commits(operation))


def test_a_noted_assign_that_is_impossible_ends_the_run_after_what_came_before() -> None:
    book = training().has(spec("v", (), aggregation=NONE))
    notes = (applies(0), assigns(1, scalar(1), variable=2), applies(2, buffers=1))
    book.on(returns(0, 3, notes, run=(2,)))
    book.on(returns(1, 3, notes, run=(2,)), commits(steps(2, ((0, 1),))))
    book.on(
        book.finished(),
        to(CONTROLLER, RunFinished, "cs.InvalidArgumentError", r"'v' in a replica \(train.py:20\).*NONE", commits=1),
    )


def test_a_noted_assign_of_the_wrong_shape_ends_the_run() -> None:
    book = training()
    book.does(asks(0, reads(1), (assigns(0, array(1)),), run=(2,)))
    failed = [to(w(r), PointFailed, "cs.InvalidArgumentError", r"float32\[1\]", ends_run=True) for r in (0, 1)]
    book.on(asks(1, reads(1), (assigns(0, array(1)),), run=(2,)), *failed)


# --- several optimizers in one apply --------------------------------------------------------------------------------


def tables_of(book: Playbook) -> Tables:
    """What the engine knows."""
    return book._engine._server.tables


def together(k: int, *numbers: int, known: bool = True, **how: Any) -> ApplyPoint:
    """An apply of optimizers 1, 2, … to these variables, or if they are ``known`` to the sets of these numbers."""
    return ApplyPoint(
        k,
        "train.py:10",
        tuple(
            OptimizerUpdate(optimizer, number if known else 0, () if known else (number,))
            for optimizer, number in enumerate(numbers, 1)
        ),
        0,
        **how,
    )


def test_several_optimizers_are_one_commit_and_each_counts_once() -> None:
    book = Playbook(2).begin().has(spec("a", (3,)), spec("b", (3,))).has_optimizer().has_optimizer("Adam")
    book.does(asks(0, together(0, 1, 2, known=False, weight=0.5)))
    answers = book.does(asks(1, together(0, 1, 2, known=False, weight=0.25)))
    assert [command for command in answers if isinstance(command, Send)] == [
        Send(w(replica), Accepted((1,), 0, (1, 2))) for replica in (0, 1)
    ]
    book.settle()
    book.does(returns(0, 1))
    (step,) = book.does(returns(1, 1))
    assert isinstance(step, Commit)
    (apply,) = step.operations
    assert isinstance(apply, Apply)
    assert [(update.rule, update.t) for update in apply.updates] == [("sgd", 1), ("adam", 1)]
    assert (apply.weights, apply.variables, apply.global_clipnorm) == ((0.5, 0.25), (1, 2), None)
    book.on(book.finished(), finished(commits=1))
    assert [optimizer.iterations for optimizer in tables_of(book).optimizers.values()] == [1, 1]
    for replica in (0, 1):  # now the numbers are known
        book.does(returns(replica, 1, (together(0, 1, 2, global_clipnorm=1.5, clip_epsilon=1e-6),), run=(2,)))
    (apply,) = book.commands[-1].operations  # type: ignore[union-attr]
    assert (apply.weights, apply.global_clipnorm, apply.clip_epsilon) == ((), 1.5, 1e-6)
    book.settle()
    assert [optimizer.iterations for optimizer in tables_of(book).optimizers.values()] == [2, 2]


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"global_clipnorm": 2.0}, "global_clipnorm=1.0, clip_epsilon=0.0 .*global_clipnorm=2.0, clip_epsilon=0.0 "),
        ({"global_clipnorm": 1.0, "clip_epsilon": 0.5}, "clip_epsilon=0.0 .*clip_epsilon=0.5 "),
        ({}, "optimizers 1 and 2 with global_clipnorm=1.0.* optimizers 1 and 2 to 'a' and to 'b'"),
    ],
)
def test_replicas_that_differ_in_the_bound_do_not_meet(others: dict[str, float], told: str) -> None:
    book = Playbook(2).begin().has(spec("a", (3,)), spec("b", (3,))).has_optimizer().has_optimizer()
    book.on(asks(0, together(0, 1, 2, known=False, global_clipnorm=1.0)))
    failed = [to(w(r), PointFailed, MISMATCH, told, ends_run=True) for r in (0, 1)]
    book.on(asks(1, together(0, 1, 2, known=False, **others)), *failed)


def test_optimizers_that_share_a_variable_are_refused() -> None:
    book = Playbook(2).begin().has(spec("a", (3,))).has_optimizer().has_optimizer()
    book.on(asks(0, together(0, 1, 1, known=False)))
    reason = "optimizers 1 and 2 both update variable 'a' in one apply; give it to one of them"
    failed = [to(w(r), PointFailed, "cs.InvalidArgumentError", reason, ends_run=False) for r in (0, 1)]
    book.on(asks(1, together(0, 1, 1, known=False)), *failed)
    assert not tables_of(book).sets


def test_of_sets_that_cannot_all_be_made_none_is_half_made() -> None:
    book = Playbook(2).begin().has(spec("a", (3,)), spec("b", (3,), "int64")).has_optimizer("Adam").has_optimizer()
    book.on(asks(0, together(0, 1, 2, known=False)))
    reason = "variable 'b' is int64; only floating-point variables can be optimized"
    failed = [to(w(r), PointFailed, "cs.InvalidArgumentError", reason, ends_run=False) for r in (0, 1)]
    book.on(asks(1, together(0, 1, 2, known=False)), *failed)
    assert not tables_of(book).sets
    assert not tables_of(book).slots


def test_slots_of_earlier_sets_are_filled_where_the_memory_ends_at_a_later_one() -> None:
    book = Playbook(2).begin().has(spec("a", (2,)), spec("b", (1000,)))
    book.has_optimizer("Adam").has_optimizer("Adam", amsgrad=1.0)
    book.does(MemoryAvailable(9000))
    book.does(asks(0, together(0, 1, 2, known=False)))
    commands = book.does(asks(1, together(0, 1, 2, known=False)))
    failed = [command.record for command in commands if isinstance(command, Send)]
    assert [type(record) for record in failed] == [PointFailed, PointFailed]
    assert "MemoryPlanError" in str(failed[0])
    (fills,) = (command for command in commands if isinstance(command, Commit))
    assert {fill.segment for fill in fills.operations} == {"slots/1/m/float32", "slots/1/v/float32"}  # type: ignore[union-attr]
    assert [known.variables for known in tables_of(book).sets.values()] == [(1,)]


# --- what forces a commit -------------------------------------------------------------------------------------------


def test_who_reads_what_it_wrote_waits_for_the_commit() -> None:
    book = training()
    book.on(asks(0, reads(1), (applies(0),), run=(2,)))
    book.on(asks(1, reads(1), (applies(0),), run=(2,)), commits(steps(2, ((0, 1),))))
    book.on(book.finished(), Send(w(0), Committed((2,), 1)), Send(w(1), Committed((2,), 1)))
    book.on(returns(0, 1, run=(2,)))
    book.on(returns(1, 1, run=(2,)), finished(commits=1))
    book.repeat_all()


def test_nothing_is_committed_while_a_replica_is_at_work() -> None:
    book = training(3)
    book.on(asks(0, reads(1), (applies(0),), run=(2,)))
    book.on(returns(1, 1, (applies(0),), run=(2,)))
    for_two = first_apply(0, 1)
    book.on(asks(2, for_two, run=(2,)), Send(w(2), Accepted((2,), 0, (1,))))  # agreed, and replica 2 goes on
    book.on(returns(2, 1, run=(2,)), commits(steps(2, ((0, 1),), (0, 0, 0))))
    book.on(book.finished(), Send(w(0), Committed((2,), 1)))
    book.on(returns(0, 1, run=(2,)), finished(3, commits=1))


def test_nobody_is_let_go_on_during_a_commit() -> None:
    book = training()
    book.on(asks(0, reads(1), (applies(0),), run=(2,)))
    book.on(asks(1, reduces(1, scalar(1)), (applies(0),), run=(2,), preserved=True), commits(steps(2, ((0, 1),))))
    book.on(book.finished(), Send(w(0), Committed((2,), 1)))
    book.on(asks(0, reduces(1, scalar(2)), run=(2,)), computes((scalar(2),), (scalar(1),), reduce="SUM"))


# --- a commit in the midst of a run ---------------------------------------------------------------------------------


def reads_while_another_waits(replicas: int = 2) -> Playbook:
    """Replica 0 reads its own update; the others wait at an all_reduce and have been asked to preserve what they have
    been shown."""
    book = training(replicas)
    book.on(asks(0, reads(1), (applies(0),), run=(2,)))
    for replica in range(1, replicas - 1):
        book.on(asks(replica, reduces(1, scalar(1)), (applies(0),), run=(2,)))
    asked = [Send(w(replica), Preserve((2,), 1)) for replica in range(1, replicas)]
    book.on(asks(replicas - 1, reduces(1, scalar(1)), (applies(0),), run=(2,)), *asked)
    return book


def preserves(replica: int) -> Received:
    return asks(replica, reduces(1, scalar(1)), (applies(0),), run=(2,), preserved=True)


def test_a_replica_that_waits_is_asked_to_preserve_its_views() -> None:
    book = reads_while_another_waits()
    book.on(preserves(1), commits(steps(2, ((0, 1),))))
    book.on(book.finished(), Send(w(0), Committed((2,), 1)))
    book.on(asks(0, reduces(1, scalar(2)), run=(2,)), computes((scalar(2),), (scalar(1),), reduce="SUM"))
    book.repeat_all()


def test_a_commit_waits_for_all_of_them() -> None:
    book = reads_while_another_waits(3)
    book.on(preserves(2))
    book.on(MemoryAvailable(1 << 30))  # nothing is asked twice
    book.on(preserves(1), commits(steps(2, ((0, 1),), (0, 0, 0))))


def test_what_is_preserved_is_so_for_every_commit_of_the_same_wait() -> None:
    book = training()
    book.on(asks(0, reads(1), (applies(0),), run=(2,)))
    waits = asks(1, reduces(2, scalar(1)), (applies(0), applies(1, buffers=1)), run=(2,))
    book.on(waits, Send(w(1), Preserve((2,), 2)))
    book.on(replace(waits, record=replace(waits.record, preserved=True)), commits(steps(2, ((0, 1),))))
    book.on(book.finished(), Send(w(0), Committed((2,), 1)))
    book.on(asks(0, reads(2), (applies(1, buffers=1),), run=(2,)), commits(steps(3, ((0, 1),), (1, 1))))
    book.on(book.finished(), Send(w(0), Committed((2,), 2)))


def test_in_its_next_wait_it_is_asked_again() -> None:
    book = reads_while_another_waits()
    book.does(preserves(1))
    book.does(book.finished())
    book.does(asks(0, reduces(1, scalar(2)), run=(2,)))
    book.on(book.computed(scalar(3)), to(w(0), Reduced), to(w(1), Reduced))
    book.on(asks(0, reads(3), (applies(2),), run=(2,)))
    book.on(asks(1, reduces(3, scalar(1)), (applies(2),), run=(2,)), Send(w(1), Preserve((2,), 3)))


def test_where_nothing_is_committed_nobody_is_asked() -> None:
    book = training()
    book.on(asks(0, reduces(1, scalar(1)), (applies(0),), run=(2,)))
    together = computes((scalar(1),), (scalar(1),), reduce="SUM")
    book.on(asks(1, reduces(1, scalar(1)), (applies(0),), run=(2,)), together)
    book.on(book.computed(scalar(2)), to(w(0), Reduced), to(w(1), Reduced))
    book.on(returns(0, 2, run=(2,)))
    book.on(returns(1, 2, run=(2,)), commits(steps(2, ((0, 1),))))


def test_a_replica_that_missed_the_request_is_asked_again() -> None:
    """A worker says its question again to a server in the place of one that died."""
    book = reads_while_another_waits()
    again = asks(1, reduces(1, scalar(1)), (applies(0),), run=(2,))
    book.on(again, Send(w(1), Preserve((2,), 1)))
    book.on(preserves(1), commits(steps(2, ((0, 1),))))
    book.on(again)  # it has come late


def replays(book: Playbook) -> list[Command]:
    """The worker of replica 1 dies, and the one in its place comes to where it waited; what follows in the end."""
    event = dies(1)
    commands = book.does(replace(event, died=replace(event.died, restarts=True)))
    commands += book.does(hears(w(1, 2), register(1, 2)))
    for again in (None, hears(w(1, 2), REPLAY)):
        if again is not None:
            commands = book.does(again)
        while fingerprints := [command for command in commands if isinstance(command, Fingerprint)]:
            commands = book.does(Fingerprinted(fingerprints[0].ticket, b"the same"))
    return commands


REPLAY = Ask((2,), 1, 2, (applies(0),), reduces(1, scalar(1)))


def test_one_that_dies_before_it_has_preserved_is_asked_when_it_waits_again() -> None:
    book = reads_while_another_waits()
    assert replays(book) == [Send(w(1, 2), Preserve((2,), 1))]
    book.on(hears(w(1, 2), replace(REPLAY, preserved=True)), commits(steps(2, ((0, 1),))))
    book.on(book.finished(), Send(w(0), Committed((2,), 1)))


def test_one_that_dies_when_it_has_preserved_is_asked_when_it_waits_again() -> None:
    book = reads_while_another_waits(3)
    book.on(preserves(1))
    assert replays(book) == [Send(w(1, 2), Preserve((2,), 1))]
    book.on(preserves(2))
    book.on(hears(w(1, 2), replace(REPLAY, preserved=True)), commits(steps(2, ((0, 1),), (0, 0, 0))))


def test_a_replica_that_cannot_preserve_returns_an_error_and_the_run_ends_with_it() -> None:
    book = reads_while_another_waits()
    book.on(returns(1, 1, run=(2,), raises="cs.MemoryPlanError"), commits(steps(2, ((0, 1),))))
    book.on(book.finished(), Send(w(0), Committed((2,), 1)))
    book.on(returns(0, 1, run=(2,)), to(CONTROLLER, RunFinished, "cs.MemoryPlanError"))


def test_who_has_written_nothing_reads_at_once() -> None:
    book = training()
    book.on(asks(0, reads(0), run=(2,)), Send(w(0), Committed((2,), 0)))


def test_who_has_written_nothing_waits_while_others_write() -> None:
    book = training()
    book.does(hears(CONTROLLER, Assign("c", book.sequence(), 1, "assign", scalar(1))))
    book.on(asks(0, reads(0), run=(2,)))
    book.on(book.finished(), to(CONTROLLER, Done), Send(w(0), Committed((2,), 0)))


# --- create ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_variable_made_in_a_run_is_replica_0s(replicas: int) -> None:
    book = training(replicas)
    for replica in range(1, replicas):
        book.on(asks(replica, makes(1, spec("x", (2,), aggregation=2), array(9, 9)), (applies(0),), run=(2,)))
    place = lies("parameters/float32", 64)
    book.on(
        asks(0, makes(1, spec("w"), scalar(4)), (applies(0),), run=(2,)),
        allocates("parameters/float32", 64, 68),
        commits(writes(place, "assign", scalar(4))),  # the apply before it waits
    )
    made = Variable(2, spec("w_1"), place.place, 0)  # type: ignore[arg-type]
    everybody = [Send(w(replica), CreatedInRun((2,), 1, made)) for replica in range(replicas)]
    book.on(book.finished(), *everybody)
    for replica in range(replicas - 1):
        book.on(returns(replica, 2, run=(2,)))
    book.on(returns(replicas - 1, 2, run=(2,)), commits(steps(2, ((0, 1),), (0,) * replicas)))
    book.on(book.finished(), finished(replicas, commits=2))
    book.repeat_all()


def test_a_later_replica_that_makes_more_does_not_meet_the_others() -> None:
    book = Playbook(2).begin()
    book.on(asks(1, makes(0, spec("x"), scalar(1))))
    why = r"replica 0 returned after 0 merge points; replica 1 waits at the creation of variable 'x' \(train.py:5\)"
    book.on(returns(0, 0), to(w(1), PointFailed, MISMATCH, why, ends_run=True))
    book.on(returns(1, 1, raises=MISMATCH), to(CONTROLLER, RunFinished, MISMATCH, why))


def test_a_creation_that_does_not_fit_fails_at_all() -> None:
    book = Playbook(2).begin()
    book.on(MemoryAvailable(10))
    book.on(asks(0, makes(0, spec("x"), scalar(1))))
    failed = [to(w(r), PointFailed, "cs.MemoryPlanError", "variable 'x'", ends_run=False) for r in (0, 1)]
    book.on(asks(1, makes(0, spec("x"), scalar(1))), *failed)


# --- merge_call -----------------------------------------------------------------------------------------------------


def values(*texts: bytes) -> tuple[Value, ...]:
    return tuple(Value(text, ()) for text in texts)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_merge_call_is_run_by_replica_0_after_what_came_before_it(replicas: int) -> None:
    book = training(replicas)
    texts = [b"%d" % replica for replica in range(replicas)]
    for replica in range(replicas - 1):
        book.on(asks(replica, merge_calls(1, texts[replica]), (applies(0),), run=(2,)))
    last = replicas - 1
    book.on(
        asks(last, merge_calls(1, texts[last]), (applies(0),), run=(2,)),
        commits(steps(2, ((0, 1),), (0,) * replicas)),
    )
    token = Send(w(0), Token((2,), 1, values(*texts)))
    book.on(book.finished(), token)
    if replicas > 1:
        book.on(asks(0, merge_calls(1, b"0"), (applies(0),), run=(2,)), token)  # repeated
        book.on(asks(1, merge_calls(1, b"1"), (applies(0),), run=(2,)))  # waits
    given_back = hears(w(0), MergeCallReturn((2,), 1, values(*texts), None))
    shares = [Send(w(r), Merged((2,), 1, Value(texts[r], ()))) for r in range(1, replicas)]
    book.on(given_back, *shares)
    book.on(given_back)
    for replica in range(last):
        book.on(returns(replica, 2, run=(2,)))
    book.on(returns(last, 2, run=(2,)), finished(replicas, commits=1))
    book.repeat_all()


def test_an_error_in_the_merge_function_ends_the_run() -> None:
    book = Playbook(2).begin()
    book.does(asks(0, merge_calls(0)))
    book.on(asks(1, merge_calls(0)), to(w(0), Token))
    book.on(
        hears(w(0), MergeCallReturn((1,), 0, (), fault("KeyError"))),
        to(w(1), PointFailed, "KeyError", k=0, ends_run=True),
    )
    book.on(returns(0, 1, raises="KeyError"))
    book.on(returns(1, 1, raises="KeyError"), to(CONTROLLER, RunFinished, "KeyError", commits=0))


def test_the_token_is_replica_0s_to_give_back() -> None:
    book = Playbook(2).begin()
    book.on(
        hears(w(0), MergeCallReturn((1,), 0, values(b"", b""), None)),
        to(w(0), Refused, "cs.PeerProtocolError", "no worker holds the token of merge point 0 of run 1"),
    )
    book.does(asks(0, merge_calls(0)))
    book.does(asks(1, merge_calls(0)))
    book.on(
        hears(w(1), MergeCallReturn((1,), 0, values(b"", b""), None)),
        to(w(1), Refused, "cs.PeerProtocolError", "does not hold a token"),
    )
    # A wrong number of values fails the merge_call instead of leaving replica 1 waiting.
    book.on(
        hears(w(0), MergeCallReturn((1,), 0, values(b""), None)),
        to(w(1), PointFailed, "cs.PeerProtocolError", "a merge_call returned 1 values for 2 replicas", ends_run=True),
    )


# --- disagreement ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            asks(0, reduces(0, scalar(1))),
            asks(1, gathers(0, array(1))),
            r"replica 0 waits at all_reduce SUM of \d arrays? \(train.py:31\); "
            r"replica 1 waits at all_gather along axis 0 of \d arrays? \(train.py:32\)",
        ),
        (
            asks(0, reduces(0, scalar(1))),
            asks(1, reduces(0, scalar(1), op="MEAN")),
            "all_reduce SUM .*; replica 1 waits at all_reduce MEAN",
        ),
        (asks(0, gathers(0, axis=0)), asks(1, gathers(0, axis=1)), "axis 0 .*; .*axis 1"),
        (asks(0, merge_calls(0)), asks(1, reduces(0)), r"merge_call \(train.py:40\); .*all_reduce"),
        (
            asks(0, first_apply(0, 1)),
            asks(1, first_apply(0, 1, 2)),
            r"optimizer 1 to 'w' \(train.py:10\); replica 1 waits at apply_gradients of optimizer 1 to 'w', '\w+' \(",
        ),
        (asks(0, first_apply(0, 1)), asks(1, first_apply(0, 1, optimizer=2)), "optimizer 1 .*; .*optimizer 2"),
        (
            asks(0, assigns(0, scalar(1), checked=True)),
            asks(1, assigns(0, scalar(1), variable=2, checked=True)),
            "assign_add of variable 1, 'w' .*; .*assign_add of variable 2, '(?!w')",
        ),
        (
            asks(0, assigns(0, scalar(1), checked=True)),
            asks(1, assigns(0, scalar(1), op="assign", checked=True)),
            "assign_add of variable 1, 'w' .*; .*assign of variable 1, 'w'",
        ),
        (
            asks(0, reads(1), (assigns(0, scalar(1)),)),
            asks(1, reduces(0)),
            r"replica 0 waits at a read of what it wrote \(train.py:50\) after assign_add .* as its merge point 0; "
            "replica 1 waits at all_reduce",
        ),
    ],
)
def test_replicas_that_wait_at_different_points_are_told_where_each_is(first: Any, second: Any, said: str) -> None:
    book = Playbook(2).begin().has(spec("w"), spec("b")).has_optimizer().has_optimizer()
    book.on(first)
    why = f"replicas do not meet at merge point 0: .*{said}"
    failed = [to(w(r), PointFailed, MISMATCH, why, ends_run=True) for r in (0, 1)]
    book.on(second, *failed)
    book.on(asks(0, reduces(1, scalar(1))), to(w(0), PointFailed, MISMATCH, why, k=1, ends_run=True))
    book.on(returns(0, 2, raises=MISMATCH, at=0))
    book.on(returns(1, 1, raises=MISMATCH, at=0), to(CONTROLLER, RunFinished, MISMATCH, why, commits=0))
    book.repeat_all()


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (reduces(0, scalar(1)), reduces(0), "all_reduce SUM of 1 array .*; .*all_reduce SUM of 0 arrays"),
        (gathers(0, array(1)), gathers(0), "all_gather along axis 0 of 1 array .*; .* of 0 arrays"),
    ],
)
def test_nests_that_do_not_fit_each_other_are_an_assertion_error_too(first: Any, second: Any, said: str) -> None:
    book = Playbook(2).begin()
    book.on(asks(0, first))
    failed = [to(w(r), PointFailed, "cs.StructureMismatchError", said, ends_run=True) for r in (0, 1)]
    book.on(asks(1, second), *failed)
    book.on(returns(0, 1, raises="cs.StructureMismatchError", at=0))
    book.on(
        returns(1, 1, raises="cs.StructureMismatchError", at=0),
        to(CONTROLLER, RunFinished, "cs.StructureMismatchError", said, commits=0),
    )
    book.repeat_all()


def test_call_sites_shapes_and_values_need_not_agree() -> None:
    book = Playbook(2).begin()
    book.on(asks(0, reduces(0, scalar(1), line=1)))
    book.on(asks(1, reduces(0, array(1, 2), line=2)), computes((scalar(1),), (array(1, 2),), reduce="SUM"))


def test_one_that_returned_and_one_that_waits_do_not_meet() -> None:
    book = training()
    book.on(asks(0, reduces(1, scalar(1)), (applies(0),), run=(2,)))
    why = (
        r"merge point 1: replica 0 waits at all_reduce SUM of \d arrays? \(train.py:31\); "
        "replica 1 returned after 1 merge point"
    )
    book.on(returns(1, 1, (applies(0),), run=(2,)), to(w(0), PointFailed, MISMATCH, why, k=1, ends_run=True))
    # What all had brought before is committed when the run ends.
    book.on(returns(0, 2, raises=MISMATCH, run=(2,)), commits(steps(2, ((0, 1),))))
    book.on(book.finished(), to(CONTROLLER, RunFinished, MISMATCH, why, commits=1, values=()))
    book.repeat_all()


def test_three_replicas_are_all_named() -> None:
    book = Playbook(3).begin()
    book.on(returns(2, 0, raises="ValueError"))
    book.on(asks(0, reduces(0, scalar(1))))
    why = "replica 0 waits at all_reduce .*; replica 1 waits at all_gather .*; replica 2 raised ValueError after"
    failed = [to(w(r), PointFailed, MISMATCH, why, ends_run=True) for r in (0, 1)]
    book.on(asks(1, gathers(0, array(1))), *failed)
    book.on(returns(0, 1, raises=MISMATCH))
    book.on(returns(1, 1, raises=MISMATCH), to(CONTROLLER, RunFinished, "ValueError", "of replica 2"))


def test_unequal_numbers_of_notes_are_found_at_the_end() -> None:
    book = training()
    book.on(returns(0, 2, (applies(0), applies(1, buffers=1)), run=(2,)))
    book.on(returns(1, 1, (applies(0),), run=(2,)), commits(steps(2, ((0, 1),))))
    why = (
        r"merge point 1: replica 0 reached apply_gradients of optimizer 1 to 'w' \(train.py:10\) and returned; "
        "replica 1 returned after 1 merge point"
    )
    book.on(book.finished(), to(CONTROLLER, RunFinished, MISMATCH, why, commits=1))


def test_different_notes_are_found_at_the_end_and_nothing_after_them_counts() -> None:
    book = training()
    book.on(returns(0, 2, (applies(0, line=1), assigns(1, scalar(1))), run=(2,)))
    why = (
        r"replica 0 reached apply_gradients .*train.py:1\).*; "
        r"replica 1 reached assign_add of variable 1, 'w' \(train.py:9\)"
    )
    book.on(
        returns(1, 2, (assigns(0, scalar(1), line=9), applies(1)), run=(2,)),
        to(CONTROLLER, RunFinished, MISMATCH, why, commits=0),
    )


# --- errors of the user's code --------------------------------------------------------------------------------------


def test_a_raise_is_a_return_with_notes() -> None:
    book = training()
    book.on(returns(0, 1, (applies(0),), raises="KeyError", run=(2,)))
    book.on(returns(1, 2, (applies(0), applies(1, buffers=1)), run=(2,)), commits(steps(2, ((0, 1),))))
    book.on(book.finished(), to(CONTROLLER, RunFinished, "KeyError", "of replica 0", commits=1, values=()))
    book.repeat_all()


def test_whoever_waits_is_told_who_raised() -> None:
    book = Playbook(2).begin()
    book.on(asks(1, reduces(0, scalar(1))))
    why = "replica 0 raised KeyError after 0 merge points; replica 1 waits at all_reduce"
    book.on(returns(0, 0, raises="KeyError"), to(w(1), PointFailed, MISMATCH, why, ends_run=True))
    book.on(returns(1, 1, raises=MISMATCH), to(CONTROLLER, RunFinished, "KeyError", "of replica 0"))


@pytest.mark.parametrize(("at", "wanted"), [((1, 0), "TypeError"), ((0, 1), "KeyError"), ((1, 1), "KeyError")], ids=str)
def test_the_lowest_error_is_raised(at: tuple[int, int], wanted: str) -> None:
    book = Playbook(2).begin()
    book.on(returns(1, 0, raises="TypeError", at=at[1]))
    book.on(returns(0, 0, raises="KeyError", at=at[0]), to(CONTROLLER, RunFinished, wanted))


@pytest.mark.parametrize("error", [WRITTEN, "cs.NumericsError"])
def test_what_a_run_computed_does_not_count_if_a_replica_says_that_numbers_are_wrong(error: str) -> None:
    book = training()
    book.on(returns(0, 2, (applies(0), applies(1, buffers=1)), raises=error, run=(2,)))
    at = 0 if error == WRITTEN else 2
    book.on(
        returns(1, 1, (applies(0),), raises="KeyError", at=at, run=(2,)),
        to(CONTROLLER, RunFinished, error, "of replica 0", commits=0),
    )
    book.on(returns(0, 1, (applies(0),), run=(3,)))
    book.on(returns(1, 1, (applies(0),), run=(3,)), commits(steps(2, ((0, 1),))))
    book.on(book.finished(), finished(commits=1))
    book.repeat_all()


def test_whoever_would_read_such_an_update_is_told_that_the_replicas_do_not_meet() -> None:
    book = training()
    book.on(asks(1, reads(1), (applies(0),), run=(2,)))
    why = "replica 0 raised cs.VariableWrittenError after 1 merge point"
    book.on(returns(0, 1, (applies(0),), raises=WRITTEN, run=(2,)), to(w(1), PointFailed, MISMATCH, why, ends_run=True))
    book.on(returns(1, 1, raises=MISMATCH, run=(2,)), to(CONTROLLER, RunFinished, WRITTEN, "of replica 0", commits=0))


def test_a_mismatch_that_the_user_raised_is_still_an_error() -> None:
    book = Playbook(2).begin()
    book.on(returns(0, 0, raises=MISMATCH))
    book.on(returns(1, 0), to(CONTROLLER, RunFinished, MISMATCH, "of replica 0"))


# --- several runs ---------------------------------------------------------------------------------------------------


def test_a_run_that_is_ahead_waits_for_the_one_before_it() -> None:
    book = training()
    book.on(returns(0, 1, (applies(0),), run=(2,)))
    book.on(asks(0, reads(0), run=(3,)))  # it would read what run 2 has not written yet
    book.on(returns(1, 1, (applies(0),), run=(2,)), commits(steps(2, ((0, 1),))))
    book.on(asks(1, reduces(0, scalar(2)), run=(3,)))
    book.on(book.finished(), finished(commits=1), Send(w(0), Committed((3,), 0)))
    book.on(asks(0, reduces(0, scalar(1)), run=(3,)), computes((scalar(1),), (scalar(2),), reduce="SUM"))


# --- memory that others have taken since it was planned -------------------------------------------------------------


def test_slots_and_variables_that_find_no_memory_fail_at_their_merge_point_and_the_run_goes_on() -> None:
    book = Playbook(2).begin().has(spec("w", (2,))).has_optimizer("Adam")
    first, second = (allocates(f"slots/1/{slot}/float32", 0, 8) for slot in "mv")
    third = allocates("parameters/float32", 64, 68)
    book.refuses = {each: fault("cs.DeviceMemoryError") for each in (second, third)}
    book.on(asks(0, first_apply(0, 1)))
    refused = [to(w(r), PointFailed, "cs.DeviceMemoryError", "the slots of optimizer 1", k=0) for r in (0, 1)]
    book.on(asks(1, first_apply(0, 1)), first, *refused, Discard("slots/1/m/float32", 0, 8))
    book.on(asks(0, makes(1, spec("b"), scalar(2))))
    refused = [to(w(r), PointFailed, "cs.DeviceMemoryError", "variable 'b'", k=1) for r in (0, 1)]
    book.on(asks(1, makes(1, spec("b"), scalar(2))), *refused)
    book.refuses = {}
    book.on(asks(0, first_apply(2, 1)))
    assert book.does(asks(1, first_apply(2, 1)))[:2] == [first, second]
    book.settle()
    for replica in (0, 1):
        book.does(returns(replica, 3))
    book.on(book.finished(), finished(commits=1))
    book.repeat_all()
