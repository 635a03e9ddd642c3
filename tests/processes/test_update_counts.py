"""Kinds that count the updates of each variable: its own numbers in every update, also ahead, after a checkpoint, after
the death of the server, and when other variables are gone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import central_storage as cs
from central_storage.optimizers import of_kind
from cs_proto.arithmetic.optimizers import defaults_of
from cs_proto.errors import ContextError, InvalidArgumentError
from cs_server.rules import RULES, reference

GIVEN = {**defaults_of("torch.Adam"), "learning_rate": 0.1, "weight_decay": 0.01}
# Which of the four variables each step updates.
USED = [(0, 1, 2, 3), (0, 1), (0, 1), (0, 1), (1, 2, 3), (0,), (0, 1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3)]
SHAPES = ((5,), (2, 3), (), (6, 2))


def gradient(step: int, which: int) -> np.ndarray:
    return np.asarray(np.random.default_rng([step, which]).standard_normal(SHAPES[which]), np.float32)


class Model:
    """Four variables, the last one with sparse gradients, and an optimizer that counts by variable."""

    def __init__(self, strategy: cs.CentralStorageStrategy, **given: float) -> None:
        with strategy.scope():
            self.variables = [cs.Variable(np.ones(shape, np.float32)) for shape in SHAPES]
            self.adam = of_kind("torch.Adam", **(GIVEN | given))

    def step(self, number: int) -> None:
        replica = int(cs.get_replica_context().replica_id_in_sync_group)
        pairs: list[Any] = []
        for which in USED[number]:
            value = gradient(number, which) * (replica + 1)
            pairs.append(
                (cs.IndexedSlices(value[1:3], np.array([1, 2])) if which == 3 else value, self.variables[which])
            )
        self.adam.apply_gradients(pairs)

    def values(self) -> list[bytes]:
        slots = [self.adam.get_slot(each, name).numpy() for each in self.variables for name in self.adam.slot_names]
        return [array.tobytes() for array in [*(each.numpy() for each in self.variables), *slots]]


def expected(steps: Sequence[int]) -> list[np.ndarray]:
    """The variables in plain NumPy."""
    rule, counts = RULES["torch_adam"], [0] * len(SHAPES)
    arrays = [[np.ones(shape, np.float32), *(np.zeros(shape, np.float32) for _ in range(2))] for shape in SHAPES]
    for number in steps:
        for which in USED[number]:
            counts[which] += 1
            value = gradient(number, which)
            if which == 3:
                value = value * np.float32([0, 1, 1, 0, 0, 0])[:, None]
            w, *slots = arrays[which]
            reference(rule, w, [value, value * 2], tuple(slots), GIVEN, counts[which])
    return [w for w, *_ in arrays]


@pytest.mark.parametrize("bound", [{}, {"clipvalue": 100.0}])
def test_every_variable_has_the_numbers_of_its_own_update(
    bound: dict[str, float], two: cs.CentralStorageStrategy
) -> None:
    model = Model(two, **bound)
    for number in range(6):
        two.run(model.step, args=(number,))
    assert model.adam.steps_of(model.variables) == [5, 5, 2, 2]
    assert model.adam.iterations == 6
    elements = two.experimental_distribute_dataset([np.full(2, number) for number in (6, 7, 8)])
    for _ in two.run_steps(lambda number: model.step(int(number[0])), elements):
        pass
    assert model.adam.steps_of(model.variables) == [8, 8, 5, 5]
    for variable, wanted in zip(model.variables, expected(range(9)), strict=True):
        assert variable.numpy().tobytes() == wanted.tobytes()


def test_a_checkpoint_has_the_counts(two: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    model = Model(two)
    for number in range(6):
        two.run(model.step, args=(number,))
    path = cs.train.Checkpoint(model=model.variables, adam=model.adam).save(tmp_path / "ckpt")
    again = Model(two)
    cs.train.Checkpoint(model=again.variables, adam=again.adam).restore(path).assert_consumed()
    assert again.adam.steps_of(again.variables) == [5, 5, 2, 2]
    outside = of_kind("torch.Adam", **GIVEN)
    cs.train.Checkpoint(model=again.variables, adam=outside).restore(path).assert_consumed()
    outside.adopt(two)
    assert outside.steps_of(again.variables) == [5, 5, 2, 2]
    for number in range(6, 9):
        two.run(model.step, args=(number,))
        two.run(again.step, args=(number,))
    assert again.values() == model.values()


def test_counts_are_set_and_outlive_other_variables(two: cs.CentralStorageStrategy) -> None:
    model = Model(two)
    first, second, *_ = model.variables
    model.adam.set_steps({first: 41, second: 3})
    two.run(model.step, args=(5,))
    assert model.adam.steps_of(model.variables) == [42, 3, 0, 0]
    two.run(model.step, args=(0,))
    del second, model.variables[1:]
    assert model.adam.steps_of([first]) == [43]
    sgd = cs.optimizers.SGD(0.1)
    sgd.iterations = 7
    assert sgd.steps_of([first]) == [7]
    with pytest.raises(InvalidArgumentError, match="SGD counts its updates for all variables together"):
        sgd.set_steps({first: 1})
    with pytest.raises(InvalidArgumentError, match="updates is at least 0, not -1"):
        model.adam.set_steps({first: -1})
    with pytest.raises(InvalidArgumentError, match="set_weights cannot set how often each variable was updated"):
        model.adam.set_weights(model.adam.get_weights())
    adam = model.adam
    with pytest.raises(ContextError, match="steps can be set only in the script"):
        two.run(lambda: adam.set_steps({first: 1}))


def test_a_server_that_takes_over_knows_the_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CS_FAILPOINTS", "server.kept=kill@3;server.phase=kill@9")
    monkeypatch.setenv("CS_FAILPOINTS_DIR", str(tmp_path))
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], max_restarts=1000) as strategy:
        model = Model(strategy, clipvalue=100.0)
        for number in range(9):
            strategy.run(model.step, args=(number,))
        assert model.adam.steps_of(model.variables) == [8, 8, 5, 5]
        for variable, wanted in zip(model.variables, expected(range(9)), strict=True):
            assert variable.numpy().tobytes() == wanted.tobytes()
    assert len(list(tmp_path.iterdir())) == 2
