"""merge_call: replica 0's worker is the controller for its length, and starts runs in all workers."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.worker.execution.test_replica import Model
from tests.worker.stand_in import Sent, Service, points

import central_storage as cs
from central_storage.core.values import unshared
from cs_proto import messages
from cs_proto.arrays import Location
from cs_proto.errors import ContextError, InvalidArgumentError, ReplicaLostError
from cs_proto.failures import error_of

F32 = np.float32


def merge(function: Any, *args: Any) -> Any:
    """What a replica function does in most of these tests."""
    return cs.get_replica_context().merge_call(function, args)


def meet(service: Service, run: messages.RunId, k: int = 0) -> tuple[messages.Value, ...]:
    """Both replicas come to the merge_call; replica 0 gets the token. Their arguments."""
    arguments = []
    for replica in range(service.replicas):
        point = service.asked(replica).point
        assert isinstance(point, messages.MergeCallPoint)
        assert point.k == k
        arguments.append(point.arguments)
    service.answer(0, messages.Token(run, k, tuple(arguments)))
    return tuple(arguments)


def merged(service: Service, run: messages.RunId, k: int = 0) -> messages.MergeCallReturn:
    """Replica 0 gives the token back; the others get their share, as the server does it."""
    _, returned = service.from_server_socket(messages.MergeCallReturn, 0)
    assert (returned.run, returned.k) == (run, k)
    for replica in range(1, service.replicas):
        if returned.error is None:
            service.answer(replica, messages.Merged(run, k, returned.values[replica]))
        else:
            service.answer(replica, messages.PointFailed(run, k, returned.error, True))
    return returned


def nested(service: Service, path: messages.RunId) -> list[Any]:
    """All replicas return from a nested run, and its holder is told."""
    values = []
    for replica in range(service.replicas):
        returned = service.returned(replica)
        assert returned.run == path
        assert returned.value is not None, returned.error
        values.append(returned.value)
    service.answer(0, messages.RunFinished(path, tuple(values), None, 0))
    return [service.decode(value) for value in values]


def results(service: Service) -> list[Any]:
    return [unshared(service.result(replica)) for replica in range(service.replicas)]


def test_arguments_arrive_regrouped_and_shares_go_back(pair: Service) -> None:
    def inside(strategy: Any, x: Any, name: str, v: Any, *, scale: int) -> Any:
        assert cs.in_cross_replica_context()
        assert cs.get_strategy() is strategy
        assert cs.get_replica_context() is None
        values = strategy.experimental_local_results(x)
        parts = cs.PerReplica([value * scale for value in values])
        return {"part": parts, "common": name, "sum": strategy.reduce("SUM", x, axis=None), "same": v}

    v: Any = Sent("variable", pair.add_variable(F32(1)))

    def step() -> Any:
        context = cs.get_replica_context()
        x = np.full(2, context.replica_id_in_sync_group + 1.0)
        found = context.merge_call(inside, (x, "both", v), {"scale": 10})
        return found["part"], found["common"], found["sum"], found["same"] is v, cs.get_replica_context() is context

    run = pair.run(step)
    meet(pair, run)
    merged(pair, run)
    first, second = results(pair)
    assert first[0].tolist() == [10.0, 10.0]
    assert second[0].tolist() == [20.0, 20.0]
    for found in (first, second):
        assert found[1] == "both"
        assert found[2].tolist() == [3.0, 3.0]
        assert found[3:] == (True, True)


def test_large_arguments_and_shares_lie_in_arenas(pair: Service) -> None:
    def step() -> float:
        share = merge(lambda strategy, x: x, np.full(50_000, cs.get_replica_context().replica_id_in_sync_group))
        return float(share.mean())

    run = pair.run(step)
    arguments = meet(pair, run)
    places = [value.arrays[0].place for value in arguments]
    assert [place.segment for place in places if isinstance(place, Location)] == ["arena/0", "arena/1"]
    returned = merged(pair, run)
    places = [value.arrays[0].place for value in returned.values]
    assert [place.segment for place in places if isinstance(place, Location)] == ["arena/0", "arena/0"]
    assert results(pair) == [0.0, 1.0]


def test_only_replica_zeros_function_is_called(pair: Service, tmp_path: Path) -> None:
    def step() -> Any:
        replica = cs.get_replica_context().replica_id_in_sync_group
        return merge(lambda strategy: (tmp_path / str(replica)).touch())

    run = pair.run(step)
    meet(pair, run)
    merged(pair, run)
    assert results(pair) == [None, None]
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_notes_travel_with_the_merge_call_and_are_committed_by_it(pair: Service) -> None:
    optimizer, v = Model(pair).known()

    def step() -> Any:
        optimizer.apply_gradients([(np.ones(4, F32), v)])
        merge(lambda strategy: None)
        return v.numpy()  # no further question

    run = pair.run(step)
    asked = [pair.asked(replica) for replica in range(2)]
    assert [points(each) for each in asked] == [["ApplyPoint", "MergeCallPoint"]] * 2
    pair.answer(0, messages.Token(run, 1, (pair.encode(((), {})),) * 2))
    merged(pair, run, 1)
    assert [found.tolist() for found in results(pair)] == [[1.0] * 4] * 2


def test_what_the_merge_function_raises_ends_the_run_everywhere(pair: Service) -> None:
    def inside(strategy: Any) -> None:
        raise KeyError("inside")

    def step() -> str:
        context, found = cs.get_replica_context(), []
        for _ in range(2):
            try:
                context.merge_call(inside)
            except KeyError as error:
                found.append(repr(error))
        return ", ".join(found)

    run = pair.run(step)
    meet(pair, run)
    returned = merged(pair, run)
    assert returned.error is not None
    assert (returned.error.exception, returned.error.replica) == ("KeyError", 0)
    assert "in inside" in returned.error.traceback
    assert results(pair) == [
        "KeyError('inside'), ReplicaKeyError('inside')",
        "ReplicaKeyError('inside'), ReplicaKeyError('inside')",
    ]


def unequal_structures() -> None:
    merge(lambda strategy, x: None, [1] * (1 + cs.get_replica_context().replica_id_in_sync_group))


def no_data() -> None:
    merge(lambda strategy: {1})


@pytest.mark.parametrize(
    ("step", "exception"), [(unequal_structures, "cs.StructureMismatchError"), (no_data, "cs.ResultError")]
)
def test_arguments_and_results_that_do_not_fit_are_an_error_of_the_call(
    pair: Service, step: Callable[[], None], exception: str
) -> None:
    run = pair.run(step)
    meet(pair, run)
    returned = merged(pair, run)
    assert returned.error is not None
    assert returned.error.exception == exception
    for replica in range(2):
        assert pair.returned(replica).error is not None


# --- runs inside ----------------------------------------------------------------------------------------------------


def test_a_nested_run_goes_to_all_workers(pair: Service) -> None:
    factor = 3

    def inside(strategy: Any, x: Any) -> Any:
        def double(part: Any, *, plus: int) -> Any:
            return part * factor + plus + cs.get_replica_context().replica_id_in_sync_group

        first = strategy.run(double, args=(x,), kwargs={"plus": 100})
        second = strategy.run(lambda: "second")
        return first, second

    def step() -> Any:
        return merge(inside, np.full(2, cs.get_replica_context().replica_id_in_sync_group))

    run = pair.run(step)
    meet(pair, run)
    assert [found.tolist() for found in nested(pair, (*run, 0, 0))] == [[100, 100], [104, 104]]
    assert nested(pair, (*run, 0, 1)) == ["second", "second"]
    merged(pair, run)
    (first, text), (second, _) = results(pair)
    assert (first.tolist(), second.tolist(), text) == ([100, 100], [104, 104], "second")


def test_a_nested_run_has_merge_points_of_its_own(pair: Service) -> None:
    optimizer, v = Model(pair).known()

    def step() -> Any:
        return merge(lambda strategy: strategy.run(apply_and_read))

    def apply_and_read() -> Any:
        optimizer.apply_gradients([(np.ones(4, F32), v)])
        return v.numpy()

    run = pair.run(step)
    meet(pair, run)
    path = (*run, 0, 0)
    for replica in range(2):
        asked = pair.asked(replica)
        assert (asked.run, points(asked), asked.point.k) == (path, ["ApplyPoint", "ReadPoint"], 1)
        pair.answer(replica, messages.Committed(path, 1))
    nested(pair, path)
    merged(pair, run)
    for replica in range(2):
        assert pair.returned(replica).count == 1  # of the outer run


def test_a_merge_call_in_a_nested_run(pair: Service) -> None:
    def innermost() -> int:
        return 10 + cs.get_replica_context().replica_id_in_sync_group

    def inner() -> Any:
        return merge(lambda strategy: strategy.run(innermost))

    run = pair.run(lambda: merge(lambda strategy: strategy.run(inner)))
    meet(pair, run)
    path = (*run, 0, 0)
    meet(pair, path)
    deepest = (*path, 0, 0)
    assert nested(pair, deepest) == [10, 11]
    merged(pair, path)
    assert nested(pair, path) == [10, 11]
    merged(pair, run)
    assert results(pair) == [10, 11]


def test_a_function_is_sent_to_workers_once(pair: Service) -> None:
    def inside(strategy: Any) -> int:
        def small(n: int) -> int:
            return n

        return sum(cs.get_strategy().experimental_local_results(strategy.run(small, (n,)))[0] for n in range(3))

    run = pair.run(lambda: merge(inside))
    meet(pair, run)
    for j in range(3):
        assert nested(pair, (*run, 0, j)) == [j, j]
    merged(pair, run)
    assert results(pair) == [3, 3]


def test_a_frozen_function_is_one_object_in_every_worker(pair: Service) -> None:
    @cs.function
    def count() -> int:
        count.seen = getattr(count, "seen", 0) + 1  # type: ignore[attr-defined]
        return int(count.seen)  # type: ignore[attr-defined]

    run = pair.run(lambda: merge(lambda strategy: [strategy.run(count) for _ in range(2)]))
    meet(pair, run)
    assert nested(pair, (*run, 0, 0)) == [1, 1]
    assert nested(pair, (*run, 0, 1)) == [2, 2]
    merged(pair, run)
    assert results(pair) == [[1, 2], [1, 2]]


def test_large_arguments_of_nested_runs(pair: Service) -> None:
    def inside(strategy: Any) -> Any:
        batch = np.arange(40_000)
        return strategy.run(lambda x: (int(x.sum()), x.flags.writeable), (batch,))

    run = pair.run(lambda: merge(inside))
    meet(pair, run)
    expected = (int(np.arange(40_000).sum()), False)
    assert nested(pair, (*run, 0, 0)) == [expected, expected]
    merged(pair, run)
    results(pair)


def test_a_nested_run_that_fails_is_raised_in_the_merge_function(pair: Service) -> None:
    def inside(strategy: Any) -> str:
        try:
            strategy.run(lambda: 1 // 0)
        except ZeroDivisionError as error:
            return f"caught {error}"
        return ""

    run = pair.run(lambda: merge(inside))
    meet(pair, run)
    errors = [pair.returned(replica).error for replica in range(2)]
    pair.answer(0, messages.RunFinished((*run, 0, 0), (), errors[1], 0))
    merged(pair, run)
    assert [found.startswith("caught ") and "division" in found for found in results(pair)] == [True, True]


def test_random_state_goes_on_after_a_nested_run(pair: Service) -> None:
    def step(nest: bool) -> tuple[float, float, float]:
        first = random.random()
        inside = merge(lambda strategy: strategy.run(lambda: random.random()) if nest else None)
        return first, random.random(), 0.0 if inside is None else 1.0

    found = []
    for nest in (False, True):
        run = pair.run(step, nest, run=(700,))
        meet(pair, run)
        if nest:
            assert len(set(nested(pair, (*run, 0, 0)))) == 2
        merged(pair, run)
        found.append([each[:2] for each in results(pair)])
    assert found[0] == found[1]


def test_buffers_handed_out_around_a_nested_run_are_left_alone(pair: Service) -> None:
    optimizer, v = Model(pair).known()

    def inner() -> None:
        for _ in range(2):
            optimizer.apply_gradients([(np.full(4, 9, F32), v)])

    def step() -> list[float]:
        (g,) = cs.gradient_buffers([v])
        g[...] = 5
        merge(lambda strategy: strategy.run(inner))
        kept = g.tolist()
        optimizer.apply_gradients([(g, v)])
        return [float(x) for x in kept]

    run = pair.run(step)
    meet(pair, run)
    path = (*run, 0, 0)
    used = set()
    for replica in range(2):
        asked = pair.asked(replica)  # with one set left, every second apply waits
        assert points(asked) == ["ApplyPoint", "ReadPoint"]
        used |= {note.buffers for note in asked.notes if isinstance(note, messages.ApplyPoint)}
        pair.answer(replica, messages.Committed(path, 1))
    for replica in range(2):
        returned = pair.returned(replica)
        used |= {note.buffers for note in returned.notes if isinstance(note, messages.ApplyPoint)}
        assert returned.value is not None
        value = returned.value
    assert len(used) == 1
    pair.answer(0, messages.RunFinished(path, (value, value), None, 2))
    merged(pair, run)
    for replica in range(2):
        returned = pair.returned(replica)
        (note,) = returned.notes
        assert isinstance(note, messages.ApplyPoint)
        assert note.buffers not in used
        assert returned.value is not None
        assert pair.decode(returned.value) == [5.0] * 4


# --- writes of the merge function -----------------------------------------------------------------------------------


def test_the_merge_function_writes_like_the_client(pair: Service) -> None:
    number = pair.add_variable(np.zeros(2, F32))
    v: Any = Sent("variable", number)

    def inside(strategy: Any) -> Any:
        v.assign(np.array([1, 2], F32))
        before = v.numpy()
        v.assign_add(np.ones(2, F32))
        made = cs.Variable(np.zeros(3, F32), name="late")
        sgd = cs.optimizers.SGD(0.25)
        return before, made.name, sgd.learning_rate

    run = pair.run(lambda: merge(inside))
    meet(pair, run)
    _, first = pair.from_server_socket(messages.Assign, 0)
    assert (first.sequence, first.variable, first.op) == (1, number, "assign")
    pair.value(number)[...] = [1, 2]
    pair.answer(0, messages.Done(1, number, 1))
    _, second = pair.from_server_socket(messages.Assign, 0)
    assert (second.client, second.sequence, second.op) == (first.client, 2, "assign_add")
    pair.answer(0, messages.Done(2, number, 2))
    _, create = pair.from_server_socket(messages.Create, 0)
    assert (create.client, create.sequence, create.variable.name) == (first.client, 3, "late")
    made = pair.add_variable(np.zeros(3, F32))
    pair.answer(0, messages.Created(3, pair.variables[made]))
    _, configure = pair.from_server_socket(messages.Configure, 0)
    assert (configure.sequence, configure.kind, dict(configure.hyperparameters)["learning_rate"]) == (4, "SGD", 0.25)
    optimizer = pair.add_optimizer()
    pair.optimizers[optimizer] = messages.Optimizer(optimizer, "SGD", "sgd", configure.hyperparameters, None, 0)
    pair.answer(0, messages.Done(4, optimizer, 0))
    merged(pair, run)
    for before, name, rate in results(pair):
        assert (before.tolist(), name, rate) == ([1, 2], f"v{made}", 0.25)


def test_a_large_initial_value_follows_its_plan(pair: Service) -> None:
    run = pair.run(lambda: merge(lambda strategy: cs.Variable(np.ones(30_000, F32)).shape))
    meet(pair, run)
    _, create = pair.from_server_socket(messages.Create, 0)
    assert create.value is None
    number = pair.add_variable(np.zeros(30_000, F32))
    pair.answer(0, messages.Created(1, pair.variables[number]))
    _, assign = pair.from_server_socket(messages.Assign, 0)
    assert pair.copy(assign.value).sum() == 30_000
    pair.answer(0, messages.Done(2, number, 1))
    merged(pair, run)
    assert results(pair) == [(30_000,)] * 2


def test_every_token_counts_its_own_writes(pair: Service) -> None:
    number = pair.add_variable(F32(0))
    v: Any = Sent("variable", number)

    def step() -> None:
        for _ in range(2):
            merge(lambda strategy: v.assign(F32(1), read_value=False))

    run = pair.run(step)
    clients = []
    for k in range(2):
        meet(pair, run, k)
        _, assign = pair.from_server_socket(messages.Assign, 0)
        assert assign.sequence == 1
        clients.append(assign.client)
        pair.answer(0, messages.Done(1, number, k + 1))
        merged(pair, run, k)
    results(pair)
    assert len(set(clients)) == 2


def test_a_write_that_is_refused_is_raised(pair: Service) -> None:
    number = pair.add_variable(F32(0))
    v: Any = Sent("variable", number)

    def inside(strategy: Any) -> str:
        try:
            v.assign(F32(1))
        except ValueError as error:
            return str(error)
        return ""

    run = pair.run(lambda: merge(inside))
    meet(pair, run)
    pair.from_server_socket(messages.Assign, 0)
    pair.answer(0, messages.Refused(1, error_of(InvalidArgumentError("not now"))))
    merged(pair, run)
    assert results(pair) == ["not now"] * 2


def test_shutting_down_is_the_scripts(pair: Service) -> None:
    def inside(strategy: Any) -> None:
        strategy.shutdown()

    run = pair.run(lambda: merge(inside))
    meet(pair, run)
    merged(pair, run)
    for replica in range(2):
        with pytest.raises(ContextError, match="in your script"):
            pair.result(replica)


def test_a_lost_server_is_said_to_who_waits(pair: Service) -> None:
    died = messages.PointFailed((1,), 0, error_of(ReplicaLostError("replica 0 was lost")), True)
    run = pair.run(lambda: merge(lambda strategy: None))
    for replica in range(2):
        pair.asked(replica)
        pair.answer(replica, messages.PointFailed(run, 0, died.error, True))
        with pytest.raises(ReplicaLostError, match="replica 0 was lost"):
            pair.result(replica)
