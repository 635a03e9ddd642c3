"""What a replica says to the server: notes and waited points in order, buffers without copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.worker.stand_in import Sent, Service, points

import central_storage as cs
from central_storage.core.backends import Combining, Group
from cs_proto import messages
from cs_proto.arrays import Location, array_of
from cs_proto.errors import ContextError, InvalidArgumentError, MergeMismatchError
from cs_proto.failures import error_of

F32 = np.float32


class Model:
    """A variable and an optimizer in the service, and their handles to send."""

    def __init__(self, service: Service, *shapes: tuple[int, ...]) -> None:
        self.service = service
        self.numbers = [service.add_variable(np.ones(shape, F32)) for shape in shapes or ((4,),)]
        self.optimizer_number = service.add_optimizer()
        self.variables: list[Any] = [Sent("variable", number) for number in self.numbers]
        self.optimizer: Any = Sent("optimizer", self.optimizer_number)

    def known(self) -> tuple[Any, ...]:
        """Bring the first apply of the set behind, so that later ones are notes; (optimizer, *variables)."""
        variables, optimizer = self.variables, self.optimizer
        run = self.service.run(lambda: optimizer.apply_gradients([(np.zeros(v.shape, F32), v) for v in variables]))
        for replica in range(self.service.replicas):
            asked = self.service.asked(replica)
            self.service.answer(replica, messages.Accepted(run, asked.point.k, (70 + self.optimizer_number,)))
            self.service.returned(replica)
        return (optimizer, *variables)


def kinds(*records: messages.Ask | messages.Return) -> list[list[str]]:
    return [list(points(record)) for record in records]


# --- what goes over the wire ----------------------------------------------------------------------------------------


def test_read_compute_apply_return_is_one_message(alone: Service) -> None:
    optimizer, v = Model(alone).known()

    def step() -> float:
        optimizer.apply_gradients([(np.asarray(v) * F32(2), v)])
        return 1.5

    run = alone.run(step)
    returned = alone.returned()
    (note,) = returned.notes
    assert isinstance(note, messages.ApplyPoint)
    assert (note.k, note.updates[0].variables, returned.count) == (0, (), 1)
    assert note.site.startswith(__file__)
    assert returned.run == run
    assert np.array_equal(alone.gradient(0, note.buffers, v._cs_handle()[1]), np.full(4, 2, F32))


def test_the_first_apply_of_a_set_is_asked(alone: Service) -> None:
    model = Model(alone, (2,), (3,))
    (v, w), optimizer = model.variables, model.optimizer

    def step(order: int) -> None:
        pairs = [(np.ones(2, F32), v), (np.ones(3, F32), w)]
        optimizer.apply_gradients(pairs[::order])

    run = alone.run(step, -1)
    asked = alone.asked()
    assert isinstance(asked.point, messages.ApplyPoint)
    (update,) = asked.point.updates
    assert (update.variable_set, update.variables) == (0, tuple(sorted(model.numbers)))
    alone.answer(0, messages.Accepted(run, 0, (41,)))
    assert kinds(alone.returned()) == [[]]
    alone.run(step, 1)  # in another order it is the same set
    (note,) = alone.returned().notes
    assert isinstance(note, messages.ApplyPoint)
    (update,) = note.updates
    assert (update.variable_set, update.variables) == (41, ())


def test_one_line_brings_each_set_for_itself(alone: Service) -> None:
    """Also when the sets have the same optimizer and as many variables, and come again in later runs."""
    model = Model(alone, (2,), (2,))
    variables, optimizer = model.variables, model.optimizer

    def step(which: int) -> None:
        given = [variables[which]]
        optimizer.apply_gradients(zip(cs.gradient_buffers(given), given, strict=True))

    for which in (0, 1):
        run = alone.run(step, which)
        alone.asked()
        alone.answer(0, messages.Accepted(run, 0, (41 + which,)))
        alone.returned()
    for which in (0, 1, 1, 0):
        alone.run(step, which)
        (note,) = alone.returned().notes
        assert isinstance(note, messages.ApplyPoint)
        assert [update.variable_set for update in note.updates] == [41 + which]


def test_a_set_that_was_freed_is_asked_again(alone: Service) -> None:
    """Applies of gradient buffers are made once, and not again in later runs."""
    model = Model(alone, (2,))
    (v,), optimizer = model.variables, model.optimizer

    def step() -> None:
        optimizer.apply_gradients(zip(cs.gradient_buffers([v]), [v], strict=True))

    run = alone.run(step)
    assert alone.asked().point.site.startswith(__file__)
    alone.answer(0, messages.Accepted(run, 0, (41,)))
    alone.returned()
    for _ in range(4):  # in both sets of gradient buffers
        run = alone.run(step)
        (note,) = alone.returned().notes
        assert isinstance(note, messages.ApplyPoint)
        assert (note.k, note.updates[0].variable_set) == (0, 41)
    alone.tell(0, messages.Forget((), (optimizer._cs_handle()[1],)))
    run = alone.run(step)
    asked = alone.asked()
    assert isinstance(asked.point, messages.ApplyPoint)
    assert asked.point.updates[0].variable_set == 0
    alone.answer(0, messages.Accepted(run, 0, (42,)))
    alone.returned()
    alone.run(step)
    (note,) = alone.returned().notes
    assert isinstance(note, messages.ApplyPoint)
    assert note.updates[0].variable_set == 42


def test_notes_travel_with_the_next_question(pair: Service) -> None:
    optimizer, v = Model(pair).known()

    def step() -> float:
        optimizer.apply_gradients([(np.ones(4, F32), v)])
        return float(cs.get_replica_context().all_reduce("SUM", np.float64(2.0)))

    run = pair.run(step)
    for replica in range(2):
        asked = pair.asked(replica)
        assert kinds(asked) == [["ApplyPoint", "ReducePoint"]]
        assert [note.k for note in (*asked.notes, asked.point)] == [0, 1]
        pair.answer(replica, messages.Reduced(run, 1, (array_of(np.float64(4.0).reshape(())),)))
        returned = pair.returned(replica)
        assert (kinds(returned), returned.count) == ([[]], 2)
        assert returned.value is not None
        assert pair.decode(returned.value) == 4.0


def test_reading_what_was_written_commits_first(alone: Service) -> None:
    optimizer, v = Model(alone).known()

    def step() -> tuple[Any, int]:
        before = v.numpy()
        optimizer.apply_gradients([(np.ones(4, F32), v)])
        return before, v.numpy()

    run = alone.run(step)
    asked = alone.asked()
    assert kinds(asked) == [["ApplyPoint", "ReadPoint"]]
    assert asked.point.k == 1
    assert asked.point.site.startswith(__file__)
    alone.value(v._cs_handle()[1])[...] = 5
    alone.answer(0, messages.Committed(run, 1))
    returned = alone.returned()
    assert (kinds(returned), returned.count) == ([[]], 1)
    assert returned.value is not None
    before, after = alone.decode(returned.value)
    assert before.tolist() == [1] * 4
    assert after.tolist() == [5] * 4


def test_reading_something_else_commits_nothing(alone: Service) -> None:
    optimizer, v = Model(alone).known()
    _, w = Model(alone).known()

    def step() -> Any:
        optimizer.apply_gradients([(np.ones(4, F32), v)])
        return w.numpy()

    alone.run(step)
    assert kinds(alone.returned()) == [["ApplyPoint"]]


def test_iterations_count_the_own_step(alone: Service) -> None:
    model = Model(alone)
    optimizer, v = model.known()

    def step() -> list[int]:
        before = int(optimizer.iterations)
        optimizer.apply_gradients([(np.ones(4, F32), v)])
        return [before, optimizer.iterations]

    run = alone.run(step)
    assert kinds(alone.asked()) == [["ApplyPoint", "ReadPoint"]]
    record = alone.optimizers[model.optimizer_number]
    alone.optimizers[model.optimizer_number] = replace(record, iterations=9)
    alone.answer(0, messages.Committed(run, 1))
    assert alone.result() == [0, 9]


def test_a_version_is_that_of_the_server(alone: Service) -> None:
    _, v = Model(alone).known()
    number = v._cs_handle()[1]
    alone.run(lambda: v.version)
    assert alone.result() == 0
    known = alone.variables[number]
    alone.variables[number] = messages.Variable(number, known.spec, known.place, 6)
    alone.run(lambda: v.version)
    assert alone.result() == 6


def test_assigns_of_arrays_are_noted_with_their_value_of_then(pair: Service) -> None:
    v: Any = Sent("variable", pair.add_variable(np.zeros(3, F32)))

    def step() -> None:
        value = np.ones(3, F32)
        v.assign_add(value)
        value[...] = 9
        v.assign(value, read_value=False)

    pair.run(step)
    for replica in range(2):
        returned = pair.returned(replica)
        first, second = returned.notes
        assert isinstance(first, messages.AssignPoint)
        assert isinstance(second, messages.AssignPoint)
        assert (first.k, first.op, first.checked) == (0, "assign_add", False)
        assert (second.k, second.op, second.checked) == (1, "assign", False)
        assert pair.copy(first.value).tolist() == [1, 1, 1]
        assert pair.copy(second.value).tolist() == [9, 9, 9]


def test_assigns_of_python_numbers_are_compared(pair: Service) -> None:
    v: Any = Sent("variable", pair.add_variable(F32(0)))

    def step() -> float:
        try:
            v.assign_add(5.0)
        except ValueError as error:
            return str(error)  # type: ignore[return-value]
        return 0.0

    run = pair.run(step)
    for replica in range(2):
        asked = pair.asked(replica)
        assert isinstance(asked.point, messages.AssignPoint)
        assert asked.point.checked
        failed = error_of(InvalidArgumentError("the same number on all replicas"))
        pair.answer(replica, messages.PointFailed(run, 0, failed, False))
        assert pair.result(replica) == "the same number on all replicas"


def test_with_one_replica_there_is_nothing_to_compare(alone: Service) -> None:
    v: Any = Sent("variable", alone.add_variable(F32(0)))
    alone.run(lambda: v.assign_add(5.0, read_value=False))
    (note,) = alone.returned().notes
    assert isinstance(note, messages.AssignPoint)
    assert not note.checked


def test_a_variable_made_in_a_replica(alone: Service) -> None:
    def step() -> tuple[str, list[float]]:
        v = cs.Variable(np.array([1.0, 2.0], F32), name="made", aggregation=cs.VariableAggregation.SUM)
        return v.name, v.numpy().tolist()

    run = alone.run(step)
    point = alone.asked().point
    assert isinstance(point, messages.CreatePoint)
    assert (point.variable.name, point.variable.shape, alone.copy(point.value).tolist()) == ("made", (2,), [1.0, 2.0])
    number = alone.add_variable(np.array([3.0, 4.0], F32))
    alone.answer(0, messages.CreatedInRun(run, 0, alone.variables[number]))
    asked = alone.asked()
    assert kinds(asked) == [["ReadPoint"]]  # it is committed late like everything else
    alone.answer(0, messages.Committed(run, asked.point.k))
    assert alone.result() == (f"v{number}", [3.0, 4.0])


def test_all_gather(pair: Service) -> None:
    def step() -> list[Any]:
        context = cs.get_replica_context()
        gathered = context.all_gather({"a": np.arange(2), "b": np.zeros((1, 70_000))}, axis=0)
        gathered["a"][0] = 7  # an answer is the replica's own
        return [gathered["a"], gathered["b"].shape]

    run = pair.run(step)
    for replica in range(2):
        point = pair.asked(replica).point
        assert isinstance(point, messages.GatherPoint)
        small, large = point.arrays
        assert point.axis == 0
        assert pair.copy(small).tolist() == [0, 1]
        assert isinstance(large.place, Location)
        assert large.place.segment == f"arena/{replica}"
        pair.answer(replica, messages.Reduced(run, 0, (array_of(np.arange(4)), array_of(np.zeros((2, 70_000))))))
        first, second = pair.result(replica)
        assert first.tolist() == [7, 1, 2, 3]
        assert second == (2, 70_000)


def test_operands_of_answered_questions_take_no_room(pair: Service) -> None:
    def step() -> None:
        context = cs.get_replica_context()
        for _ in range(3):
            context.all_reduce("SUM", np.zeros(100_000, F32))

    run = pair.run(step)
    for replica in range(2):
        places = []
        for k in range(3):
            point = pair.asked(replica).point
            assert isinstance(point, messages.ReducePoint)
            places.append(point.arrays[0].place)
            pair.answer(replica, messages.Reduced(run, k, (array_of(np.zeros(100_000, F32)),)))
        pair.result(replica)
        assert len(set(places)) == 1


def test_very_many_notes_are_committed_in_between(alone: Service) -> None:
    v: Any = Sent("variable", alone.add_variable(F32(0)))

    def step() -> None:
        for _ in range(1001):
            v.assign_add(F32(1), read_value=False)

    run = alone.run(step)
    asked = alone.asked()
    assert len(asked.notes) == 1000
    assert isinstance(asked.point, messages.ReadPoint)
    alone.answer(0, messages.Committed(run, 1000))
    returned = alone.returned()
    assert (len(returned.notes), returned.count) == (1, 1001)


def test_a_raise_carries_the_notes(alone: Service) -> None:
    optimizer, v = Model(alone).known()

    def step() -> None:
        optimizer.apply_gradients([(np.ones(4, F32), v)])
        raise KeyError("later")

    alone.run(step)
    returned = alone.returned()
    assert (kinds(returned), returned.count) == ([["ApplyPoint"]], 1)
    assert returned.error is not None
    assert (returned.error.exception, returned.error.merge_index) == ("KeyError", 1)


# --- errors ---------------------------------------------------------------------------------------------------------


def test_a_run_that_has_failed_fails_again_without_asking(pair: Service) -> None:
    optimizer, v = Model(pair).known()

    def step() -> list[str]:
        context, found = cs.get_replica_context(), []
        for attempt in (
            lambda: context.all_reduce("SUM", np.ones(1)),
            lambda: context.all_reduce("SUM", np.ones(1)),
            lambda: optimizer.apply_gradients([(np.ones(4, F32), v)]),
            lambda: v.assign(np.ones(4, F32)),
            lambda: context.merge_call(lambda strategy: None),
        ):
            try:
                attempt()
            except RuntimeError as error:
                found.append(f"{type(error).__name__}: {error}")
        return [*found, str(v.numpy())]

    run = pair.run(step)
    for replica in range(2):
        pair.asked(replica)
        mismatch = error_of(MergeMismatchError("they do not meet"))
        pair.answer(replica, messages.PointFailed(run, 0, mismatch, True))
        assert pair.result(replica) == ["MergeMismatchError: they do not meet"] * 5 + ["[1. 1. 1. 1.]"]


def test_a_point_that_fails_alone_leaves_the_rest(alone: Service) -> None:
    model = Model(alone)
    (v,), optimizer = model.variables, model.optimizer

    def step() -> str:
        try:
            optimizer.apply_gradients([(np.ones(4, F32), v)])
        except MemoryError as error:
            optimizer.apply_gradients([(np.ones(4, F32), v)])
            return str(error)
        return ""

    from cs_proto.errors import MemoryPlanError

    run = alone.run(step)
    alone.asked()
    alone.answer(0, messages.PointFailed(run, 0, error_of(MemoryPlanError("slots do not fit")), False))
    again = alone.asked()
    assert isinstance(again.point, messages.ApplyPoint)
    assert (again.point.k, again.point.updates[0].variable_set) == (1, 0)
    assert again.point.buffers == 0  # they are free again
    alone.answer(0, messages.Accepted(run, 1, (3,)))
    assert alone.result() == "slots do not fit"


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        (np.ones(3, F32), r"shape \(3,\).*shape \(4,\)"),
        (np.ones(4), r"float64.*float32"),
        (np.ones((4, 1), F32), r"\(4, 1\)"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused_before_anything_is_noted(
    alone: Service, gradient: np.ndarray, message: str
) -> None:
    model = Model(alone)
    optimizer, v = model.known()
    number = model.optimizer_number
    alone.run(lambda: optimizer.apply_gradients([(gradient, v)]))
    with pytest.raises(InvalidArgumentError, match=message):
        alone.result()
    step = lambda: [Group(number, [(gradient, v.number)], [])]  # noqa: E731
    alone.run(lambda: cs.get_replica_context().backend.apply(step(), Combining(), "x:1"))
    returned = alone.returned()
    assert (returned.notes, returned.count) == ((), 0)
    assert returned.error is not None
    assert f"the gradient of v{v._cs_handle()[1]} has" in returned.error.message


def test_the_remedy_for_a_dtype_is_named(alone: Service) -> None:
    model = Model(alone)
    _, v = model.known()
    number = model.optimizer_number
    wide = np.ones(4)
    step = lambda: [Group(number, [(wide, v.number)], [])]  # noqa: E731
    alone.run(lambda: cs.get_replica_context().backend.apply(step(), Combining(), "x:1"))
    with pytest.raises(InvalidArgumentError, match=r"convert it with astype\('float32'\)"):
        alone.result()


def test_sparse_gradients_lie_in_the_arena_in_the_order_of_variables(alone: Service) -> None:
    """They stay there until the run is over; the buffers are left to the dense ones."""
    model = Model(alone)
    optimizer, v = model.known()
    other = Sent("variable", alone.add_variable(np.zeros((3, 2), F32)))
    indices = np.array([2, 0, 2])

    def step() -> None:
        rows = cs.IndexedSlices(np.full((3, 2), 7, F32), indices, (3, 2))
        single = cs.IndexedSlices(np.ones(1, F32), np.array([1], np.int32), None)
        optimizer.apply_gradients([(rows, other), (single, v)])
        rows.values[:] = 0

    run = alone.run(step)
    point = alone.asked().point
    assert isinstance(point, messages.ApplyPoint)
    (update,) = point.updates
    assert (point.buffers, [gradient.variable for gradient in update.sparse]) == (0, sorted(update.variables))
    alone.answer(0, messages.Accepted(run, 0, (1,)))
    alone.result()
    one, three = update.sparse
    assert {array.place.segment for g in update.sparse for array in (g.values, g.indices)} == {"arena/0"}  # type: ignore[union-attr]
    assert (alone.copy(one.values).tolist(), alone.copy(one.indices).tolist()) == ([1.0], [1])
    assert (alone.copy(three.values).tolist(), alone.copy(three.indices).tolist()) == ([[7, 7]] * 3, [2, 0, 2])
    assert three.indices.dtype == "int64"


def test_sparse_gradients_of_equal_sizes_lie_where_those_of_an_earlier_run_lay(alone: Service) -> None:
    optimizer, v = Model(alone).known()
    places = []
    for values in ([1.0, 2.0], [3.0, 4.0], [5.0, 6.0, 7.0], [8.0, 9.0]):
        rows = np.arange(len(values))[::-1] % 2
        alone.run(lambda: optimizer.apply_gradients([(cs.IndexedSlices(F32(values), rows), v)]))  # noqa: B023
        returned = alone.returned()
        (point,) = returned.notes
        assert isinstance(point, messages.ApplyPoint)
        assert (point.k, returned.count, len(point.updates)) == (0, 1, 1)
        (gradient,) = point.updates[0].sparse
        assert (alone.copy(gradient.values).tolist(), alone.copy(gradient.indices).tolist()) == (values, rows.tolist())
        places.append(gradient)
    first, same, longer, again = places
    assert first == same == again != longer


@pytest.mark.parametrize("how", ["buffers", "apply"])
def test_integers_have_no_gradients(alone: Service, how: str) -> None:
    optimizer: Any = Sent("optimizer", alone.add_optimizer())
    v: Any = Sent("variable", alone.add_variable(np.ones(2, np.int32)))

    def step() -> None:
        if how == "buffers":
            cs.gradient_buffers([v])
        else:
            optimizer.apply_gradients([(np.ones(2, np.int32), v)])

    alone.run(step)
    with pytest.raises(InvalidArgumentError, match="is int32; only floating-point variables have gradients"):
        alone.result()


# --- memory ---------------------------------------------------------------------------------------------------------


def test_a_view_is_the_servers_memory(alone: Service) -> None:
    _, v = Model(alone).known()
    number = v._cs_handle()[1]

    def look() -> tuple[bool, bool, list[float]]:
        first, second = np.asarray(v), np.asarray(v)
        return first is second, first.flags.writeable, first.tolist()

    alone.run(look)
    assert alone.result() == (True, False, [1.0] * 4)
    alone.value(number)[1] = 8
    alone.run(look)
    assert alone.result() == (True, False, [1.0, 8.0, 1.0, 1.0])


def test_parameters_cannot_be_written_by_any_means(alone: Service) -> None:
    _, v = Model(alone).known()

    def write() -> str:
        try:
            np.asarray(v).flags.writeable = True
        except ValueError as error:
            return str(error)
        return "written"

    alone.run(write)
    assert "cannot set WRITEABLE flag" in alone.result()


def test_a_gradient_computed_in_its_buffer_is_not_copied(alone: Service) -> None:
    optimizer, v, w = Model(alone, (4,), (2, 3)).known()

    def step() -> tuple[bool, bool]:
        g, h = cs.gradient_buffers([v, w])
        np.multiply(v, F32(3), out=g)
        h[...] = 4
        copies = []
        kept, np.copyto = np.copyto, lambda *arguments: copies.append(arguments)  # type: ignore[assignment]
        try:
            optimizer.apply_gradients([(g, v), (h, w)])
        finally:
            np.copyto = kept
        return not copies, g.flags.writeable or h.flags.writeable

    alone.run(step)
    returned = alone.returned()
    (note,) = returned.notes
    assert isinstance(note, messages.ApplyPoint)
    assert returned.value is not None
    assert alone.decode(returned.value) == (True, False)
    assert alone.gradient(0, note.buffers, v._cs_handle()[1]).tolist() == [3.0] * 4
    assert alone.gradient(0, note.buffers, w._cs_handle()[1]).tolist() == [[4.0] * 3] * 2


@pytest.mark.parametrize("how", ["elsewhere", "transposed", "swapped", "shifted"])
def test_any_other_gradient_is_copied_right(alone: Service, how: str) -> None:
    optimizer, v, w = Model(alone, (3, 3), (3, 3)).known()

    def step() -> None:
        g, h = cs.gradient_buffers([v, w])
        g[...], h[...] = np.arange(9, dtype=F32).reshape(3, 3), 5
        if how == "elsewhere":
            optimizer.apply_gradients([(g.copy(), v), (h + 0, w)])
        elif how == "transposed":
            optimizer.apply_gradients([(g.T, v), (h, w)])
        elif how == "swapped":
            optimizer.apply_gradients([(h, v), (g, w)])
        else:
            optimizer.apply_gradients([(g[::-1], v), (h, w)])

    alone.run(step)
    (note,) = alone.returned().notes
    assert isinstance(note, messages.ApplyPoint)
    found = [alone.gradient(0, note.buffers, x._cs_handle()[1]) for x in (v, w)]
    plain, fives = np.arange(9, dtype=F32).reshape(3, 3), np.full((3, 3), 5, F32)
    expected = {"transposed": [plain.T, fives], "swapped": [fives, plain], "shifted": [plain[::-1], fives]}
    assert np.array_equal(found, expected.get(how, [plain, fives]))


@pytest.mark.parametrize("how", ["apart", "again", "some", "crossed", "list changed"])
def test_buffers_are_told_apart_however_often_their_variables_were_met(alone: Service, how: str) -> None:
    optimizer, v, w = Model(alone, (2,), (2,)).known()

    @cs.function
    def step(value: int) -> list[bool]:
        g, h = given = cs.gradient_buffers([v, w])
        pairs = [(g, v), (h, w)]
        if how == "apart":
            [g], [h] = cs.gradient_buffers([v]), cs.gradient_buffers([w])
            pairs = [(g, v), (h, w)]
        elif how == "again":
            cs.gradient_buffers([v, w])
        elif how == "some":
            pairs = [(g, v)]
        elif how == "crossed":
            pairs = [(h, v), (g, w)]
        else:
            given[0] = np.zeros(2, F32)
        g[...], h[...] = value, 10 * value
        optimizer.apply_gradients(pairs)
        return [g.flags.writeable, h.flags.writeable]

    for value in (1, 2):
        alone.run(step, value)
        if how == "some" and value == 1:
            alone.answer(0, messages.Accepted(alone.asked().run, 0, (2,)))
        returned = alone.returned()
        assert returned.value is not None
        assert alone.decode(returned.value) == [False, False]
    found = [alone.gradient(0, 0, x._cs_handle()[1])[0] for x in (v, w)]
    assert found == ([20, 2] if how == "crossed" else [2, 20])


def test_two_sets_of_buffers_then_a_commit(alone: Service) -> None:
    optimizer, v = Model(alone).known()

    def step() -> list[Any]:
        seen = []
        for value in (1, 2, 3):
            (g,) = cs.gradient_buffers([v])
            g[...] = value
            seen.append(g)
            optimizer.apply_gradients([(g, v)])
        return [[g.flags.writeable for g in seen], [g.tolist()[0] for g in seen]]

    run = alone.run(step)
    asked = alone.asked()
    assert kinds(asked) == [["ApplyPoint", "ApplyPoint", "ReadPoint"]]
    buffers = [note.buffers for note in asked.notes if isinstance(note, messages.ApplyPoint)]
    assert sorted(buffers) == [0, 1]
    number = v._cs_handle()[1]
    assert [alone.gradient(0, b, number)[0] for b in buffers] == [1, 2]
    alone.answer(0, messages.Committed(run, 2))
    returned = alone.returned()
    (note,) = returned.notes
    assert isinstance(note, messages.ApplyPoint)
    assert note.buffers == buffers[0]
    assert returned.value is not None
    assert alone.decode(returned.value) == [[False] * 3, [3.0, 2.0, 3.0]]


def test_the_second_set_of_buffers_is_asked_for_once(one_worker: Service) -> None:
    optimizer, v = Model(one_worker).known()
    before = len(one_worker.second_gradients)

    def step() -> None:
        optimizer.apply_gradients([(np.ones(4, F32), v)])

    def step_twice() -> None:
        step()
        step()

    for function in (step, step_twice, step_twice):
        one_worker.run(function)
        assert one_worker.returned().error is None
    # A test before this one may have asked.
    assert (before, len(one_worker.second_gradients)) in ((0, 1), (1, 1))
    one_worker.settle()


def test_a_third_apply_of_arrays_elsewhere_waits_too(alone: Service) -> None:
    optimizer, v = Model(alone).known()

    def step() -> None:
        for value in (1, 2, 3):
            optimizer.apply_gradients([(np.full(4, value, F32), v)])

    run = alone.run(step)
    assert kinds(alone.asked()) == [["ApplyPoint", "ApplyPoint", "ReadPoint"]]
    alone.answer(0, messages.Committed(run, 2))
    assert alone.returned().count == 3


def test_buffers_of_a_run_are_free_for_the_next(alone: Service) -> None:
    optimizer, v = Model(alone).known()

    def step() -> None:
        for _ in range(2):
            optimizer.apply_gradients([(np.ones(4, F32), v)])

    for _ in range(3):
        alone.run(step)
        assert kinds(alone.returned()) == [["ApplyPoint", "ApplyPoint"]]


def test_an_answer_commits_nothing(pair: Service) -> None:
    optimizer, v = Model(pair).known()

    def step() -> None:
        context = cs.get_replica_context()
        optimizer.apply_gradients([(np.ones(4, F32), v)])
        context.all_reduce("SUM", np.ones(1))
        v.numpy()

    run = pair.run(step)
    for replica in range(2):
        assert kinds(pair.asked(replica)) == [["ApplyPoint", "ReducePoint"]]
        pair.answer(replica, messages.Reduced(run, 1, (array_of(np.ones(1)),)))
    for replica in range(2):
        assert kinds(pair.asked(replica)) == [["ReadPoint"]]
        pair.answer(replica, messages.Committed(run, 2))
        pair.returned(replica)


def test_an_array_that_cannot_travel_is_named(pair: Service) -> None:
    pair.run(lambda: cs.get_replica_context().all_reduce("SUM", np.ones(2, np.longdouble)))
    for replica in range(2):
        with pytest.raises(InvalidArgumentError, match=r"dtype float128 cannot be sent|longdouble"):
            pair.result(replica)


def test_the_cross_replica_context_is_out_of_reach(alone: Service) -> None:
    strategy: Any = Sent("strategy", 0)

    def attempt() -> list[str]:
        found = []
        for what in (
            lambda: strategy.run(lambda: None),
            strategy.shutdown,
            lambda: strategy.controller.read(1),
            lambda: strategy.scope().__enter__(),
        ):
            try:
                what()
            except RuntimeError as error:
                found.append(type(error).__name__)
        return found

    alone.run(attempt)
    assert alone.result() == ["ContextError"] * 4
    assert issubclass(ContextError, RuntimeError)


def test_statistics_are_the_servers(alone: Service) -> None:
    strategy: Any = Sent("strategy", 0)
    alone.run(lambda: strategy.statistics().commits)
    _, asked = alone.from_server_socket(messages.Statistics)
    alone.answer(0, messages.Counters(asked.request, 1, 2.0, 3, 4, 5, 66, 7, 8, ()))
    assert alone.result() == 66
