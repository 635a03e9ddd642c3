"""Write notes of a replica: what is sent, and what the replica itself reads meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.worker.stand_in import Sent, Service, points

import central_storage as cs
from cs_proto import messages
from cs_proto.arrays import Array, Location, array_of
from cs_proto.messages import WriteNote

F32 = np.float32


def table(service: Service, rows: int = 3, *, ordinary: bool = False) -> Any:
    """A variable of ``rows`` zeros, and its handle to send."""
    number = service.add_variable(np.zeros(rows, F32))
    if ordinary:
        known = service.variables[number]
        spec = messages.VariableSpec(known.spec.name, "float32", (rows,), True, 0, 0, True)
        service.variables[number] = messages.Variable(number, spec, known.place, 0)
    return Sent("variable", number)


def slices(value: float, *rows: int) -> cs.IndexedSlices:
    return cs.IndexedSlices(np.full(len(rows), value, F32), np.array(rows, np.int32))


def written(service: Service, record: messages.Ask | messages.Return) -> list[Any]:
    """(k, number, op, value, rows) of the write notes."""
    return [
        (n.k, n.number, n.op, service.copy(n.value).tolist(), n.indices and service.copy(n.indices).tolist())
        for n in record.notes
        if isinstance(n, WriteNote)
    ]


def test_a_scatter_is_noted_and_read_without_a_message(pair: Service) -> None:
    v = table(pair)
    number = v._cs_handle()[1]

    def step() -> list[Any]:
        v.scatter_add(slices(1, 0, 0))
        first = np.asarray(v)
        v.scatter_sub(slices(5, 2))
        v.scatter_update(slices(7, 1))
        assert not first.flags.writeable
        return [first, v.numpy(), v.sparse_read([[2], [0]]), v.value()]

    pair.run(step)
    for replica in range(2):
        returned = pair.returned(replica)
        assert returned.count == 0
        assert written(pair, returned) == [
            (0, 0, "scatter_add", [1, 1], [0, 0]),
            (0, 1, "scatter_sub", [5], [2]),
            (0, 2, "scatter_update", [7], [1]),
        ]
        assert all(note.site.startswith(__file__) for note in returned.notes)
        assert returned.value is not None
        results = [array.tolist() for array in pair.decode(returned.value)]
        assert results == [[2, 0, 0], [2, 7, -5], [[-5], [2]], [2, 7, -5]]
    assert pair.value(number).tolist() == [0, 0, 0]


def test_rows_that_do_not_exist_are_refused_at_the_call(alone: Service) -> None:
    v = table(alone)
    alone.run(lambda: v.scatter_add(slices(1, 3)))
    with pytest.raises(ValueError, match=r"row 3 is outside \[0, 3\)"):
        alone.result()


@pytest.mark.parametrize("op", ["assign", "assign_add", "assign_sub"])
def test_an_ordinary_variable_is_assigned_by_notes(pair: Service, op: str) -> None:
    v = table(pair, ordinary=True)

    def step() -> Any:
        getattr(v, op)([1.0, 2.0, 3.0])
        return v.numpy()

    pair.run(step)
    expected = [-1, -2, -3] if op == "assign_sub" else [1, 2, 3]
    for replica in range(2):
        returned = pair.returned(replica)
        assert written(pair, returned) == [(0, 0, op, [1, 2, 3], None)]
        assert returned.value is not None
        assert pair.decode(returned.value).tolist() == expected


def test_the_value_is_that_of_then(alone: Service) -> None:
    v, large = table(alone), table(alone, 40_000)

    def step() -> None:
        value, rows = np.ones(1, F32), np.zeros(1, np.int64)
        v.scatter_add(cs.IndexedSlices(value, rows))
        value[0], rows[0] = 9, 2
        many = np.ones(40_000, F32)
        large.scatter_add(cs.IndexedSlices(many, np.arange(40_000)))
        many[:] = 9

    alone.run(step)
    small, big = alone.returned().notes
    assert isinstance(small, WriteNote)
    assert isinstance(big, WriteNote)
    assert small.indices is not None
    assert (alone.copy(small.value).tolist(), alone.copy(small.indices).tolist()) == ([1], [0])
    assert isinstance(big.value.place, Location)
    assert alone.copy(big.value).max() == 1


def test_what_others_may_have_written_by_now_is_read_from_the_server(alone: Service) -> None:
    """After a wait a commit may have taken the note in: reading has it made, and reads the server's memory."""
    v = table(alone)
    number = v._cs_handle()[1]

    def step() -> list[Any]:
        v.scatter_add(slices(1, 0))
        before = v.numpy()
        cs.get_replica_context().merge_call(lambda strategy: None)
        after = v.numpy()
        v.scatter_add(slices(2, 0))
        return [before, after, v.numpy()]

    run = alone.run(step)
    asked = alone.asked()
    assert list(points(asked)) == ["WriteNote", "MergeCallPoint"]
    alone.value(number)[...] = [11, 0, 5]
    assert isinstance(asked.point, messages.MergeCallPoint)
    alone.answer(0, messages.Token(run, 0, (asked.point.arguments,)))
    alone.from_server_socket(messages.MergeCallReturn)
    returned = alone.returned()
    assert written(alone, returned) == [(1, 1, "scatter_add", [2], [0])]
    assert returned.value is not None
    assert [array.tolist() for array in alone.decode(returned.value)] == [[1, 0, 0], [11, 0, 5], [13, 0, 5]]


def test_reading_after_an_all_reduce_commits_first(pair: Service) -> None:
    v = table(pair)
    number = v._cs_handle()[1]

    def step() -> list[Any]:
        v.scatter_add(slices(1, 0))
        cs.get_replica_context().all_reduce("SUM", np.ones(1))
        v.scatter_add(slices(2, 1))
        return [v.numpy(), v.sparse_read([1])]

    run = pair.run(step)
    for replica in range(2):
        asked = pair.asked(replica)
        assert written(pair, asked) == [(0, 0, "scatter_add", [1], [0])]
        pair.answer(replica, messages.Reduced(run, 0, (array_of(np.ones(1)),)))
    for replica in range(2):
        asked = pair.asked(replica)
        assert list(points(asked)) == ["WriteNote", "ReadPoint"]
        assert written(pair, asked) == [(1, 1, "scatter_add", [2], [1])]
        assert asked.point.k == 1
    pair.value(number)[...] = [2, 0, 0]  # what was noted before merge point 0, and nothing after it
    for replica in range(2):
        pair.answer(replica, messages.Committed(run, 1))
        whole, row = pair.result(replica)
        assert (whole.tolist(), row.tolist()) == ([2, 2, 0], [2])


def test_an_assign_at_a_merge_point_comes_between(alone: Service) -> None:
    v = table(alone)
    number = v._cs_handle()[1]

    def step() -> Any:
        v.scatter_add(slices(1, 0))
        v.assign_add(np.ones(3, F32))
        v.scatter_add(slices(4, 2))
        return v.numpy()

    run = alone.run(step)
    asked = alone.asked()
    assert list(points(asked)) == ["WriteNote", "AssignPoint", "WriteNote", "ReadPoint"]
    alone.value(number)[...] = [2, 1, 1]
    alone.answer(0, messages.Committed(run, 1))
    assert alone.result().tolist() == [2, 1, 5]


def test_very_many_are_sent_on_in_between(alone: Service) -> None:
    v = table(alone)

    def step() -> Any:
        for _ in range(1001):
            v.scatter_add(slices(1, 0))
        return v.numpy()

    run = alone.run(step)
    asked = alone.asked()
    assert (len(asked.notes), asked.point.k) == (1000, 0)
    alone.answer(0, messages.Committed(run, 0))  # nothing was committed: they come after no merge point
    returned = alone.returned()
    assert [entry[1] for entry in written(alone, returned)] == [1000]
    assert returned.value is not None
    assert alone.decode(returned.value).tolist() == [1001, 0, 0]


def test_reading_rows_of_a_large_table_copies_no_table(alone: Service) -> None:
    """Rows with notes on them are worked out alone."""
    v = table(alone, 1_000_000)

    def step() -> Any:
        import tracemalloc

        v.sparse_read([0])
        tracemalloc.start()
        v.scatter_add(slices(1, 5, 7, 5))
        first = v.sparse_read([[7, 5], [6, 999_999]])
        v.scatter_update(slices(9, 6))
        results = [first, v.sparse_read([6, 999_999]), v.sparse_read([])]
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        whole = v.numpy()
        return [*results, peak, whole[5:8], v.sparse_read([5])]

    alone.run(step)
    first, second, nothing, peak, whole, last = alone.result()
    assert [first.tolist(), second.tolist(), nothing.tolist()] == [[[1, 2], [0, 0]], [9, 0], []]
    assert peak < 3_000_000  # the table has four million bytes
    assert [whole.tolist(), last.tolist()] == [[2, 9, 1], [2]]


def test_rows_of_an_ordinary_variable_that_was_assigned(alone: Service) -> None:
    v = table(alone, ordinary=True)

    def step() -> Any:
        v.assign_add([1.0, 2.0, 3.0])
        v.scatter_add(slices(10, 2))
        return v.sparse_read([2, 0])

    alone.run(step)
    assert alone.result().tolist() == [13, 1]


def test_a_constraint_comes_with_the_handle(alone: Service) -> None:
    v = table(alone)
    code: list[Any] = [lambda value: value * factor]
    factor = 2
    v._cs_code = lambda: code[0]
    alone.run(lambda: (v.constraint(3), v.name))
    assert alone.result()[0] == 6
    factor = 5
    alone.run(lambda: v.constraint(3))
    assert alone.result() == 15
    del v._cs_code
    alone.run(lambda: v.constraint is None)


def test_a_constraint_follows_the_update(alone: Service) -> None:
    v = table(alone)
    optimizer: Any = Sent("optimizer", alone.add_optimizer())
    v._cs_code = lambda: np.abs
    run = alone.run(lambda: optimizer.apply_gradients([(np.ones(3, F32), v)]))
    alone.answer(0, messages.Accepted(run, alone.asked().point.k, (71,)))
    asked = alone.asked()
    assert isinstance(asked.point, messages.MergeCallPoint)
    alone.value(v._cs_handle()[1])[...] = [-1, 2, -3]
    alone.answer(0, messages.Token(run, 1, (asked.point.arguments,)))
    _, assign = alone.from_server_socket(messages.Assign)
    assert (assign.op, alone.copy(assign.value).tolist(), assign.indices) == ("assign", [1, 2, 3], None)
    alone.answer(0, messages.Done(assign.sequence, assign.variable, 2))
    alone.from_server_socket(messages.MergeCallReturn)
    assert alone.result() is None


def test_a_constraint_and_a_sparse_gradient_do_not_go_together(alone: Service) -> None:
    v = table(alone)
    optimizer: Any = Sent("optimizer", alone.add_optimizer())
    v._cs_code = lambda: np.abs
    alone.run(lambda: optimizer.apply_gradients([(slices(1, 0), v)]))
    with pytest.raises(RuntimeError, match="has a constraint and a sparse gradient"):
        alone.result()


def test_the_holder_of_a_token_writes_and_reads_rows(alone: Service) -> None:
    v = table(alone)

    def merged(strategy: Any) -> Any:
        v.scatter_update(slices(4, 2))
        return v.sparse_read([2, 0])

    run = alone.run(lambda: cs.get_replica_context().merge_call(merged))
    asked = alone.asked()
    assert isinstance(asked.point, messages.MergeCallPoint)
    alone.answer(0, messages.Token(run, 0, (asked.point.arguments,)))
    _, assign = alone.from_server_socket(messages.Assign)
    assert isinstance(assign.indices, Array)
    assert (assign.op, alone.copy(assign.indices).tolist()) == ("scatter_update", [2])
    alone.value(v._cs_handle()[1])[2] = 4
    alone.answer(0, messages.Done(assign.sequence, assign.variable, 1))
    alone.from_server_socket(messages.MergeCallReturn)
    assert alone.result().tolist() == [4, 0]
