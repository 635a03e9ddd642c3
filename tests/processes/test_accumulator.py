"""The gradient accumulator over a real service: sums of each replica, over runs, deaths and failures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.harness.services import connected

import central_storage as cs
from cs_proto.errors import ContextError, InvalidArgumentError

F32 = np.float32


@pytest.fixture(scope="module")
def service() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as made:
        yield connected(made)


class Model:
    def __init__(self, strategy: cs.CentralStorageStrategy) -> None:
        with strategy.scope():
            self.w, self.b = cs.Variable(np.zeros(2, F32)), cs.Variable(np.zeros((), F32))
            self.sgd = cs.optimizers.SGD(1.0)
            self.accumulator = cs.optimizers.GradientAccumulator()

    def add(self, scale: float) -> int:
        rank = int(cs.get_replica_context().replica_id_in_sync_group)
        self.accumulator([F32([1, 2]) * F32(scale) + F32(rank), F32(scale)])
        return self.accumulator.step

    def apply(self) -> None:
        self.sgd.apply_gradients(zip(self.accumulator.gradients, [self.w, self.b], strict=True))
        self.accumulator.reset()


def lists(values: list[Any]) -> list[Any]:
    return [np.asarray(value).tolist() for value in values]


def test_sums_of_several_runs_are_applied_once(service: cs.CentralStorageStrategy) -> None:
    model = Model(service)
    assert [service.run(model.add, (scale,)) for scale in (1.0, 10.0)] == [1, 2]
    assert model.accumulator.step == 2
    assert lists(model.accumulator.gradients) == [[24, 46], 22]
    own = service.experimental_local_results(service.run(lambda: model.accumulator.gradients[0]))
    assert lists(list(own)) == [[11, 22], [13, 24]]
    service.run(model.apply)
    assert (model.w.numpy().tolist(), float(model.b.numpy()), model.accumulator.step) == ([-24, -46], -22, 0)
    assert lists(model.accumulator.gradients) == [[0, 0], 0]
    assert service.run(model.add, (1.0,)) == 1
    model.accumulator.reset()
    assert (model.accumulator.step, lists(model.accumulator.gradients)) == (0, [[0, 0], 0])


def test_calls_and_apply_in_one_run(service: cs.CentralStorageStrategy) -> None:
    model = Model(service)

    def step() -> tuple[int, int]:
        model.add(1.0)
        steps = model.add(2.0)
        model.apply()
        return steps, model.accumulator.step

    assert service.run(step) == (2, 0)
    assert service.run(step) == (2, 0)
    assert model.w.numpy().tolist() == [-16, -28]


def test_none_and_sparse_gradients(service: cs.CentralStorageStrategy) -> None:
    model = Model(service)

    def step(first: Any) -> list[Any]:
        model.accumulator([first, None])
        return model.accumulator.gradients

    for _ in range(2):
        sums = service.run(step, (cs.IndexedSlices([[3.0]], [1], dense_shape=(2, 1)),))
    assert sums[1] is None
    assert lists([sums[0].values[1]]) == [[[0], [6]]]
    assert service.run(lambda: model.accumulator.gradients)[1] is None


def test_what_does_not_fit_changes_nothing(service: cs.CentralStorageStrategy) -> None:
    model = Model(service)
    service.run(model.add, (1.0,))
    with pytest.raises(InvalidArgumentError, match="adds up 2 gradients, not 1"):
        service.run(lambda: model.accumulator([F32([1, 2])]))
    with pytest.raises(InvalidArgumentError, match=r"gradient 0 was float32\[2\], and is now float32\[3\]"):
        service.run(lambda: model.accumulator([F32([1, 2, 3]), F32(1)]))
    with pytest.raises(ContextError, match="inside a replica function only"):
        model.accumulator([F32([1, 2]), F32(1)])
    with pytest.raises(ContextError, match="cannot be made in a replica"):
        service.run(cs.optimizers.GradientAccumulator)
    assert (model.accumulator.step, lists(model.accumulator.gradients)) == (1, [[3, 5], 2])


def test_one_belongs_to_one_strategy_and_names_are_its_own(service: cs.CentralStorageStrategy) -> None:
    first, second = Model(service), Model(service)
    assert first.accumulator.name != second.accumulator.name
    for model in (first, second, first):
        service.run(model.add, (1.0,))
    assert (first.accumulator.step, second.accumulator.step) == (2, 1)
    with (
        cs.CentralStorageStrategy(["cpu:0"], in_process=True) as other,
        pytest.raises(ContextError, match="belongs to another strategy; make one for each"),
    ):
        other.run(lambda: first.accumulator.step)


def test_a_repeated_run_adds_nothing_twice(service: cs.CentralStorageStrategy, tmp_path: Any) -> None:
    model, mark = Model(service), tmp_path / "died"

    def step(dies: bool) -> int:
        steps = model.add(1.0)  # which reads the steps; a run that had read its own writes could not be repeated
        rank = int(cs.get_replica_context().replica_id_in_sync_group)
        assert model.accumulator.gradients[0][0] == steps * (1 + rank)
        if dies and rank == 1 and not mark.exists():
            mark.touch()
            os._exit(3)
        return steps

    assert service.run(step, (False,)) == 1
    assert service.run(step, (True,)) == 2
    assert service.run(step, (False,)) == 3
    assert mark.exists()
    assert lists(model.accumulator.gradients) == [[9, 15], 6]
    service.run(model.apply)
    assert model.w.numpy().tolist() == [-9, -15]
