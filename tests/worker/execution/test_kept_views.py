"""Views that variables keep: shown again without a look, but for where something else is the value."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.worker.execution.test_merge_controller import meet, merge, merged, nested, results
from tests.worker.execution.test_replica import Model, kinds
from tests.worker.execution.test_write_notes import slices, table
from tests.worker.stand_in import Sent, Service

import central_storage as cs
from cs_proto import messages, segment_names
from cs_proto.arrays import array_of
from cs_proto.codec import encode
from cs_proto.errors import ContextError, InvalidArgumentError, MemoryPlanError
from cs_proto.records import replace
from cs_runtime.shared_memory import mapping

F32 = np.float32


def test_a_view_is_one_object_for_all_runs(alone: Service) -> None:
    v = table(alone)
    kept: list[np.ndarray] = []

    def look() -> bool:
        kept.append(np.asarray(v))
        return kept[-1] is kept[0] and np.asarray(v) is kept[0]

    for _ in range(3):
        alone.run(look, frozen=True)
        assert alone.result() is True


@pytest.mark.parametrize("what", ["apply", "assign"])
def test_after_a_merge_point_it_is_committed_first(alone: Service, what: str) -> None:
    optimizer, v = Model(alone).known()
    w = table(alone)

    def step() -> list[Any]:
        before = [np.asarray(v).tolist(), np.asarray(w).tolist()]
        if what == "apply":
            optimizer.apply_gradients([(np.ones(4, F32), v)])
        else:
            v.assign(np.ones(4, F32))
        return [*before, np.asarray(w).tolist(), np.asarray(v).tolist()]  # w is shown as it was

    run = alone.run(step)
    assert kinds(alone.asked())[0][-1] == "ReadPoint"
    alone.value(v._cs_handle()[1])[...] = 5
    alone.answer(0, messages.Committed(run, 1))
    assert alone.result() == [[1] * 4, [0] * 3, [0] * 3, [5] * 4]


@pytest.mark.parametrize("ordinary", [True, False])
def test_a_noted_write_is_seen(alone: Service, ordinary: bool) -> None:
    v, w = table(alone, ordinary=ordinary), table(alone)

    def step() -> list[Any]:
        before = np.asarray(v), np.asarray(w)
        if ordinary:
            v.assign_add(np.ones(3, F32))
        else:
            v.scatter_add(slices(1, 0, 1, 2))
        return [*before, np.asarray(w), np.asarray(v), v + 1]

    for _ in range(2):  # what the run before has noted is the server's business
        alone.run(step)
        assert [array.tolist() for array in alone.result()] == [[0] * 3, [0] * 3, [0] * 3, [1] * 3, [2] * 3]


def test_a_forgotten_variable_is_asked_for(alone: Service) -> None:
    v, w = table(alone), table(alone)

    def look() -> Any:
        return [np.asarray(variable).tolist() for variable in (w, w, v, v)][-1]

    for _ in range(2):
        alone.run(look, frozen=True)
        assert alone.result() == [0] * 3
    number = v._cs_handle()[1]
    known = alone.variables.pop(number)
    alone.tell(0, messages.Forget((number,)))
    alone.run(look, frozen=True)
    with pytest.raises(InvalidArgumentError, match="there is no number"):
        alone.result()
    other = alone.variables[alone.add_variable(np.full(3, 8, F32))]
    alone.variables[number] = messages.Variable(number, known.spec, other.place, 0)
    alone.run(look, frozen=True)
    assert alone.result() == [8] * 3


def test_other_threads_read_none(alone: Service) -> None:
    v = table(alone)

    def from_thread() -> list[str]:
        assert np.asarray(v) is np.asarray(v)  # mapped, and then kept
        found: list[str] = []

        def use() -> None:
            try:
                found.append(str(np.asarray(v)))
            except ContextError as error:
                found.append(str(error))

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        return found

    alone.run(from_thread)
    (found,) = alone.result()
    assert "in the thread of" in found


def test_a_merge_function_reads_copies(pair: Service) -> None:
    v: Any = Sent("variable", pair.add_variable(np.zeros(2, F32)))

    def look() -> bool:
        return bool(np.asarray(v).flags.writeable)

    def inside(strategy: Any) -> list[bool]:
        before = look()
        (shown,) = strategy.experimental_local_results(strategy.run(look))  # the same of both replicas
        return [before, shown, look()]

    def step() -> list[bool]:
        return [look(), *merge(inside), look()]

    run = pair.run(step)
    meet(pair, run)
    nested(pair, (*run, 0, 0))
    merged(pair, run)
    assert results(pair) == [[False, True, False, True, False]] * 2


# --- what was shown keeps its bits ------------------------------------------------------------------------------------


def counted(step: Callable[[], Any]) -> Callable[[], tuple[Any, list[int]]]:
    """A function that says with its result how many ranges were preserved in its run, time by time."""

    def run() -> tuple[Any, list[int]]:
        calls: list[int] = []
        plain = mapping.Mapping.preserve

        def preserve(self: Any, ranges: Any) -> None:
            calls.append(len(ranges))
            plain(self, ranges)

        mapping.Mapping.preserve = preserve  # type: ignore[method-assign]
        try:
            return step(), calls
        finally:
            mapping.Mapping.preserve = plain  # type: ignore[method-assign]

    return run


def test_a_plain_step_preserves_nothing(alone: Service) -> None:
    optimizer, v = Model(alone).known()

    def step() -> float:
        value = np.asarray(v)
        optimizer.apply_gradients([(value * F32(2), v)])
        return float(value[0])

    for _ in range(2):
        alone.run(counted(step))
        assert alone.result() == (1.0, [])


def test_where_nothing_is_held_nothing_is_preserved(alone: Service) -> None:
    optimizer, v = Model(alone).known()

    def step() -> float:
        optimizer.apply_gradients([(np.asarray(v) * F32(2), v)])
        return float(np.asarray(v)[0])

    run = alone.run(counted(step))
    asked = alone.asked()
    assert asked.preserved
    alone.answer(0, messages.Committed(run, 1))
    assert alone.result() == (1.0, [])


def test_all_that_is_held_is_preserved_and_nothing_else(alone: Service) -> None:
    optimizer, v = Model(alone).known()
    w, other = table(alone), table(alone, 5000)

    def step() -> list[Any]:
        views = [np.asarray(v), w[1:], memoryview(np.asarray(v))]
        assert np.asarray(other).sum() == 0  # read, and not held
        optimizer.apply_gradients([(np.ones(4, F32), v)])
        after = np.asarray(v)
        return [*map(np.array, views), after, np.asarray(w), np.asarray(other)[:1]]

    for count in range(2):
        run = alone.run(counted(step))
        assert alone.asked().preserved
        alone.value(v._cs_handle()[1])[...] = 5 + count
        alone.value(w._cs_handle()[1])[...] = 7 + count
        alone.value(other._cs_handle()[1])[...] = 9
        alone.answer(0, messages.Committed(run, 1))
        found, calls = alone.result()
        before, of_w = [1, 5][count], [0, 7][count]
        assert [array.tolist() for array in found] == [
            [before] * 4,
            [of_w] * 2,
            [before] * 4,
            [5 + count] * 4,
            [7 + count] * 3,
            [9],
        ]
        assert calls == [2]
        alone.value(other._cs_handle()[1])[...] = 0


def reduced(run: messages.RunId, k: int = 0) -> messages.Reduced:
    return messages.Reduced(run, k, (array_of(np.array([3.0])),))


def test_what_was_mapped_before_the_segment_was_extended_is_preserved_too(alone: Service) -> None:
    name = segment_names.parameters("float64")  # which no other test maps
    alone.reserved[name] = 4096
    v = Sent("variable", alone.add_variable(np.ones(4)))
    alone.run(lambda: np.asarray(v).tolist(), frozen=True)
    assert alone.result() == [1] * 4
    del alone.reserved[name]
    w = Sent("variable", alone.add_variable(np.zeros(5000)))  # ends beyond the first 4096 bytes

    def step() -> list[Any]:
        old = [np.asarray(v), np.asarray(w)]
        v.assign(np.ones(4))  # type: ignore[attr-defined]
        new = [np.asarray(v), np.asarray(w)]
        return [[float(array[0]) for array in arrays] for arrays in (old, new)]

    run = alone.run(counted(step))
    assert alone.asked().preserved
    for variable, value in ((v, 5), (w, 7)):
        alone.value(variable._cs_handle()[1])[...] = value
    alone.answer(0, messages.Committed(run, 1))
    assert alone.result() == ([[1, 0], [5, 7]], [1, 1])  # two mappings, a range in each


def test_a_replica_that_is_asked_preserves_its_views_and_asks_again(pair: Service) -> None:
    v = table(pair)

    def step() -> list[Any]:
        held = np.asarray(v)
        total = cs.get_replica_context().all_reduce("SUM", np.ones(1))
        return [held, np.asarray(v), total]

    run = pair.run(counted(step))
    asked = pair.asked(0)
    assert not asked.preserved
    for _ in range(2):  # of a server that has not heard it, too
        pair.answer(0, messages.Preserve(run, 0))
        assert pair.asked(0) == replace(asked, preserved=True)
    assert not pair.asked(1).preserved
    pair.value(v._cs_handle()[1])[...] = 4
    for replica, calls in ((0, [1]), (1, [])):
        pair.answer(replica, reduced(run))
        (held, new, total), seen = pair.result(replica)
        assert (held.tolist(), new.tolist(), total.tolist()) == ([4 * replica] * 3, [4] * 3, [3])
        assert seen == calls


def test_another_server_is_told_that_it_is_preserved(pair: Service) -> None:
    v = table(pair)

    def step() -> list[Any]:
        held = np.asarray(v)
        cs.get_replica_context().all_reduce("SUM", np.ones(1))
        return [held]

    serving = messages.Serving(pair.directory, "")
    run = pair.run(step)
    asked = pair.asked(0)
    pair.lifelines[0].sendall(b"".join(encode(serving)))  # in the place of one that died before it had asked
    assert pair.asked(0) == asked
    pair.answer(0, messages.Preserve(run, 0))
    assert pair.asked(0).preserved
    pair.value(v._cs_handle()[1])[...] = 4
    pair.lifelines[0].sendall(b"".join(encode(serving)))
    assert pair.asked(0) == replace(asked, preserved=True)
    pair.asked(1)
    for replica in (0, 1):
        pair.answer(replica, reduced(run))
        assert pair.result(replica)[0].tolist() == [4 * replica] * 3


def test_one_that_has_read_nothing_needs_not_be_asked(pair: Service) -> None:
    table(pair)

    def step() -> None:
        merge(lambda strategy: None)
        cs.get_replica_context().all_reduce("SUM", np.ones(1))

    run = pair.run(step)
    meet(pair, run)
    merged(pair, run)
    for replica in (0, 1):
        assert pair.asked(replica).preserved
        pair.answer(replica, reduced(run, 1))
        pair.result(replica)


def refused_with(module: Any, name: str, stand_in: Callable[..., int], call: Callable[[], Any]) -> str:
    """What a replica's ``call`` is refused with while ``name`` of ``module`` is ``stand_in``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, stand_in)
        try:
            call()
        except MemoryPlanError as error:  # pytest.raises would keep its frames, and the views in them
            return str(error)
    raise AssertionError("it is not refused")


def test_an_error_names_the_views_for_which_there_is_no_memory(alone: Service) -> None:
    optimizer, v = Model(alone).known()
    name = alone.variables[v._cs_handle()[1]].spec.name

    def step() -> tuple[str, list[float], list[float]]:
        from cs_runtime import machine

        held = np.asarray(v)
        optimizer.apply_gradients([(np.ones(4, F32), v)])
        refused = refused_with(machine, "available_nbytes", lambda: 4095, partial(np.asarray, v))
        before = held.tolist()
        new = np.asarray(v)  # there is room now
        return refused, before + held.tolist(), new.tolist()

    run = alone.run(step)
    alone.asked()  # the second time
    alone.value(v._cs_handle()[1])[...] = 5
    alone.answer(0, messages.Committed(run, 1))
    refused, before, new = alone.result()
    assert refused == (
        f"{name}: 4096 bytes are needed to preserve arrays that were read before an update and are still held, but "
        "4095 bytes are available; let go of the arrays before the update, or read only the rows that you need, with "
        "sparse_read"
    )
    assert (before, new) == ([1] * 8, [5] * 4)


def test_a_replica_that_cannot_preserve_its_views_goes_no_further(pair: Service) -> None:
    v = table(pair)

    def step() -> list[str]:
        from cs_runtime import machine

        held = np.asarray(v)
        reduce = partial(cs.get_replica_context().all_reduce, "SUM", np.ones(1))
        refused = [refused_with(machine, "available_nbytes", lambda: 0, reduce) for _ in range(2)]
        assert held.tolist() == [0] * 3
        return refused

    run = pair.run(step)
    assert not pair.asked(0).preserved
    pair.answer(0, messages.Preserve(run, 0))
    first, second = pair.result(0)
    assert "are needed to preserve arrays that were read" in first
    assert first in second
    pair.asked(1)
    assert not pair.has_more()


def test_what_the_kernel_does_not_preserve_is_named_and_shows_the_servers_memory(alone: Service) -> None:
    optimizer, v = Model(alone).known()
    name = alone.variables[v._cs_handle()[1]].spec.name

    def step() -> tuple[str, list[float]]:
        held = np.asarray(v)
        optimizer.apply_gradients([(np.ones(4, F32), v)])
        refused = refused_with(mapping, "_mprotect", lambda *_: -1, partial(np.asarray, v))
        return refused, held.tolist()

    alone.run(step)
    refused, held = alone.result()
    assert refused.startswith(f"{name}: 4096 bytes are needed to preserve arrays that were read before an update and")
    assert "could not be preserved" in refused
    assert held == [1] * 4
