"""A service as a state machine against a dictionary of arrays: whatever is done in whatever order, and whoever is
killed in between, variables hold what the dictionary holds.

Values are integers in float64, so every sum is exact. One service does for all examples, or they would take minutes;
an example begins with variables of its own.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import central_storage as cs

_WIDTH = 3
_LONGEST = 5
_SUM = cs.VariableAggregation.SUM
#: What the replicas of a step do to each variable.
_KINDS = ("nothing", "dense", "sparse", "assign_add", "scatter_add")

numbers = st.integers(-50, 50)
rows = st.lists(st.integers(0, 1000), min_size=1, max_size=4)
names = st.integers(0, 1000)


def step(work: list[tuple[str, int, list[int]]], variables: list[cs.Variable], optimizer: Any) -> float:
    """What one replica does: to each variable what ``work`` says, each time scaled by its number plus one."""
    context = cs.get_replica_context()
    assert context is not None
    scale = int(context.replica_id_in_sync_group) + 1.0
    pairs: list[Any] = []
    for (kind, number, where), variable in zip(work, variables, strict=True):
        indices = np.array(where) % variable.shape[0]
        delta = cs.IndexedSlices(np.full((len(where), _WIDTH), scale * number), indices)
        if kind == "dense":
            pairs.append((np.full(variable.shape, scale * number), variable))
        elif kind == "sparse":
            pairs.append((delta, variable))
        elif kind == "assign_add":
            variable.assign_add(np.full(variable.shape, scale * number))
        elif kind == "scatter_add":
            variable.scatter_add(delta)
    if pairs:
        optimizer.apply_gradients(pairs)
    return float(context.all_reduce("SUM", np.array(scale)))


class States(RuleBasedStateMachine):
    """Variables of a service, and the arrays that they should hold."""

    strategy: cs.CentralStorageStrategy
    #: What may be killed: "server" and the workers by their numbers.
    victims: tuple[str | int, ...] = ()
    #: Since the last kill: what dies without having worked is started again ever later.
    has_worked = True
    kills = 0

    def __init__(self) -> None:
        super().__init__()
        self.variables: list[cs.Variable] = []
        self.arrays: list[np.ndarray] = []
        self.saved: tuple[cs.train.Checkpoint, str, list[np.ndarray]] | None = None
        self.directory = tempfile.TemporaryDirectory()

    def teardown(self) -> None:
        for variable, array in zip(self.variables, self.arrays, strict=True):
            np.testing.assert_array_equal(variable.numpy(), array)
        self.directory.cleanup()

    @initialize()
    def optimize(self) -> None:
        with self.strategy.scope():
            self.optimizer = cs.optimizers.SGD(learning_rate=1.0)

    @precondition(lambda self: len(self.variables) < 4)
    @rule(length=st.integers(1, _LONGEST), number=numbers)
    def create(self, length: int, number: int) -> None:
        array = np.full((length, _WIDTH), float(number))
        with self.strategy.scope():
            self.variables.append(cs.Variable(array, aggregation=_SUM))
        self.arrays.append(array.copy())

    @precondition(lambda self: self.variables)
    @rule(name=names)
    def get(self, name: int) -> None:
        which = name % len(self.variables)
        np.testing.assert_array_equal(self.variables[which].numpy(), self.arrays[which])

    @precondition(lambda self: self.variables)
    @rule(name=names, where=rows)
    def get_rows(self, name: int, where: list[int]) -> None:
        which = name % len(self.variables)
        indices = np.array(where) % len(self.arrays[which])
        np.testing.assert_array_equal(self.variables[which].sparse_read(indices), self.arrays[which][indices])

    @precondition(lambda self: self.variables)
    @rule(name=names, number=numbers, op=st.sampled_from(["assign", "assign_add", "assign_sub"]))
    def write(self, name: int, number: int, op: str) -> None:
        which = name % len(self.variables)
        value = np.full(self.arrays[which].shape, float(number))
        getattr(self.variables[which], op)(value)
        signs = {"assign": 0, "assign_add": 1, "assign_sub": -1}
        self.arrays[which] = value if op == "assign" else self.arrays[which] + signs[op] * value

    @precondition(lambda self: self.variables)
    @rule(data=st.data())
    def apply(self, data: st.DataObject) -> None:
        work = [(data.draw(st.sampled_from(_KINDS)), data.draw(numbers), data.draw(rows)) for _ in self.variables]
        met = self.strategy.run(step, args=(work, self.variables, self.optimizer))
        assert self.strategy.experimental_local_results(met) == (3.0, 3.0)
        type(self).has_worked = True
        for (kind, number, where), array in zip(work, self.arrays, strict=True):
            added = np.zeros_like(array)
            if kind in ("dense", "assign_add"):
                added += 3.0 * number
            elif kind in ("sparse", "scatter_add"):
                np.add.at(added, np.array(where) % len(array), 3.0 * number)
            array += -added if kind in ("dense", "sparse") else added

    @precondition(lambda self: self.variables)
    @rule()
    def checkpoint(self) -> None:
        checkpoint = cs.train.Checkpoint(variables=list(self.variables))
        path = checkpoint.save(str(Path(self.directory.name) / "checkpoint"))
        self.saved = (checkpoint, path, [array.copy() for array in self.arrays])

    @precondition(lambda self: self.saved is not None)
    @rule()
    def restore(self) -> None:
        assert self.saved is not None
        checkpoint, path, arrays = self.saved
        checkpoint.restore(path).assert_consumed()
        self.arrays[: len(arrays)] = [array.copy() for array in arrays]

    @precondition(lambda self: self.victims and self.has_worked)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        type(self).has_worked = False
        type(self).kills += 1
        victim = data.draw(st.sampled_from(self.victims))
        statistics = self.strategy.statistics()
        pid = statistics.pid if victim == "server" else statistics.replicas[int(victim)].pid
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def strategy() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], max_restarts=100_000) as made:
        made.run(os.getpid)  # all have worked
        yield made


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("victims", "examples"), [((), 15), ((0, 1, "server"), 6)], ids=["undisturbed", "killed"])
def test_variables_are_what_a_dictionary_of_arrays_is(
    strategy: cs.CentralStorageStrategy, victims: tuple[str | int, ...], examples: int
) -> None:
    class Machine(States):
        pass

    Machine.strategy, Machine.victims = strategy, victims
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=15,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert bool(Machine.kills) == bool(victims)
