"""Views that variables keep: shown again without a look, but for where something else is the value."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.worker.stand_in import Sent, Service
from tests.worker.test_replica import Model, kinds
from tests.worker.test_token import meet, merge, merged, nested, results
from tests.worker.test_write_notes import slices, table

from cs_proto import messages
from cs_proto.errors import ContextError, InvalidArgumentError

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
