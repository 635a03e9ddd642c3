"""Tables whose bytes lie on another machine: a replica fetches the rows that it reads; all else is mapped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.worker.stand_in import Sent, Service

import central_storage as cs
from cs_proto import messages
from cs_proto.arrays import Location, array_of, frame_view
from cs_proto.errors import InvalidArgumentError

F32 = np.float32
HEIGHT, WIDTH = 1000, 4


class Model:
    """A table elsewhere and a vector in mapped memory, and their handles."""

    def __init__(self, service: Service) -> None:
        self.service = service
        service.elsewhere.add("parameters/sparse/float32")
        self.table = service.add_variable(np.arange(HEIGHT * WIDTH, dtype=F32).reshape(HEIGHT, WIDTH), sparse=True)
        self.vector = service.add_variable(np.ones(3, F32))
        self.handles: tuple[Any, Any] = Sent("variable", self.table), Sent("variable", self.vector)

    def fetch(self) -> messages.Fetch:
        """The next record of the worker, which fetches bytes; it is answered as the server does."""
        _, fetch = self.service.from_server_socket(messages.Fetch)
        assert isinstance(fetch.array.place, Location)
        view = self.service.mapping(fetch.array.place.segment).view(fetch.array)
        found = view if fetch.rows is None else view[frame_view(fetch.rows)]
        self.service.answer(0, messages.Fetched(fetch.request, array_of(found)))
        return fetch


@pytest.fixture
def model(alone: Service) -> Model:
    return Model(alone)


def test_only_the_rows_that_are_read_are_fetched(model: Model) -> None:
    table, vector = model.handles

    def step() -> Any:
        return table.sparse_read([[3, 1], [3, 999]]), cs.nn.embedding_lookup(table, [7]), vector.numpy()

    model.service.run(step)
    first, second = model.fetch(), model.fetch()
    assert first.array == second.array == model.service.variables[model.table].array
    assert first.rows is not None
    assert frame_view(first.rows).tolist() == [1, 3, 999]
    assert second.rows is not None
    assert frame_view(second.rows).tolist() == [7]
    rows, row, ones = model.service.result()
    assert rows.tolist() == model.service.value(model.table)[[[3, 1], [3, 999]]].tolist()
    assert row.tolist() == [[28, 29, 30, 31]]
    assert ones.tolist() == [1, 1, 1]
    assert not model.service.has_more()


def test_other_variables_are_still_mapped(model: Model) -> None:
    table, vector = model.handles

    def step() -> Any:
        table.sparse_read([0])
        view = np.asarray(vector)
        return view.flags.owndata, view.base is not None

    model.service.run(step)
    model.fetch()
    assert model.service.result() == (False, True)
    assert "bytes in frames" not in model.service.log(0)


def test_a_table_that_is_read_whole_is_fetched_anew_in_every_run(model: Model) -> None:
    table, vector = model.handles

    def step() -> Any:
        read = [np.asarray(each) for _ in range(2) for each in (vector, table)]
        return read[0][0], read[1][5, 0], read[3] is read[1]

    for value in (1.5, 2.5):
        model.service.value(model.table)[5, 0] = value
        model.service.value(model.vector)[0] = -value
        model.service.run(step)
        fetch = model.fetch()
        assert (fetch.array.shape, fetch.rows) == ((4 * HEIGHT * WIDTH,), None)
        assert model.service.result() == (-value, value, True)


def test_no_epoch_stands_for_what_was_copied(model: Model) -> None:
    """What is bound to all views of an epoch would keep the copy of an earlier step."""
    table, vector = model.handles

    def step() -> Any:
        from central_storage.core.context import reading

        seen = []
        for each in (vector, vector, table, vector, table, vector):
            np.asarray(each)
            seen.append(reading.epoch is not None)
        return seen

    model.service.run(step)
    model.fetch()
    assert model.service.result() == [False, True, False, False, False, False]


def test_a_dense_gradient_of_a_table_is_refused_without_a_look_at_it(model: Model) -> None:
    table, _ = model.handles
    optimizer: Any = Sent("optimizer", model.service.add_optimizer())

    def step() -> None:
        optimizer.apply_gradients([(np.zeros((HEIGHT, WIDTH), F32), table)])

    model.service.run(step)
    with pytest.raises(InvalidArgumentError, match="sparse"):
        model.service.result()
    assert not model.service.has_more()
