"""A server is killed at every place it has, and at random instants: training ends with the bits of an undisturbed one,
losses included."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.processes import run

import central_storage as cs
from central_storage import aio
from cs_runtime.failpoints import FAILPOINTS

pytestmark = pytest.mark.timeout(300)  # each death costs the start of a server

# Its steps bring too much for a program; those of test_passed_steps do not.
PLACES = [name for name in FAILPOINTS if name.startswith("server.") and name not in ("server.pass", "server.looked")]
SIZE = 1000


class Model:
    """Everything that a step can bring."""

    def __init__(self, strategy: cs.CentralStorageStrategy) -> None:
        total = cs.VariableAggregation.SUM
        with strategy.scope():
            self.weights = cs.Variable(np.linspace(-1, 1, SIZE, dtype=np.float32), name="weights")
            self.half = cs.Variable(np.linspace(-1, 1, SIZE).astype(np.float16), name="half")
            self.table = cs.Variable(np.ones((50, 8), np.float32), name="table")
            self.count = cs.Variable(np.zeros(3), name="count", aggregation=total)
            self.rows = cs.Variable(np.zeros((6, 2)), name="rows", aggregation=total)
            self.adam = cs.optimizers.Adam(0.01)
            self.adagrad = cs.optimizers.Adagrad(0.1, clipnorm=1.0)
            self.sgd = cs.optimizers.SGD(0.01, momentum=0.9)
            self.groups = [cs.Variable(np.ones(n, np.float32), name=f"group{n}") for n in (3, SIZE, 7)]
            self.of_groups = [cs.optimizers.Adam(0.1), cs.optimizers.Adam(0.2), cs.optimizers.SGD(0.1, momentum=0.5)]
            self.group_rows = cs.Variable(np.ones((9, 4), np.float32), name="group_rows")
            self.of_rows = cs.optimizers.Adagrad(0.1)

    def add(self, strategy: cs.CentralStorageStrategy, value: Any) -> None:
        self.count.assign_add(strategy.reduce("SUM", value, axis=None))

    def together(self, k: Any) -> float:
        """Several optimizers in one update, and nothing else: a captured step."""
        context = cs.get_replica_context()
        assert context is not None
        k, replica = int(np.ravel(k)[0]), int(context.replica_id_in_sync_group)
        random = np.random.default_rng([k, replica, 2])
        gradients = [random.standard_normal(variable.shape).astype(np.float32) for variable in self.groups]
        rows = cs.IndexedSlices(random.standard_normal((5, 4)).astype(np.float32), random.integers(0, 9, 5))
        pairs = [[pair] for pair in zip(gradients, self.groups, strict=True)]
        groups = [*zip(self.of_groups, pairs, strict=True), (self.of_rows, [(rows, self.group_rows)])]
        before = float(np.asarray(self.groups[0])[0])
        cs.optimizers.apply_gradients(groups, global_clipnorm=20.0, weight=(k + replica) % 3 / 2, clip_epsilon=1e-6)
        return before

    def step(self, k: Any) -> float:
        context = cs.get_replica_context()
        assert context is not None
        k, replica = int(np.ravel(k)[0]), int(context.replica_id_in_sync_group)
        random = np.random.default_rng([k, replica])
        (gradient,) = cs.gradient_buffers([self.weights])
        gradient[:] = random.standard_normal(SIZE)
        self.adam.apply_gradients([(gradient, self.weights)])
        self.sgd.apply_gradients([(random.standard_normal(SIZE).astype(np.float16), self.half)])
        rows = cs.IndexedSlices(random.standard_normal((5, 8)).astype(np.float32), random.integers(0, 50, 5))
        self.adagrad.apply_gradients([(rows, self.table)])
        self.rows.scatter_add(cs.IndexedSlices(np.full((3, 2), k + replica + 0.5), np.array([0, k % 6, 0])))
        self.count.assign_add(np.full(3, replica + 1.0))
        total = context.all_reduce("SUM", random.standard_normal(20_000 if k % 3 else 4))
        if k % 4 == 1:
            context.merge_call(self.add, (total[:3],))
        return float(np.asarray(self.weights)[0]) + float(total[0])


def trained(strategy: cs.CentralStorageStrategy) -> dict[str, bytes]:
    """The bits of variables, slots and answers after some steps and what the controller writes between them."""
    model, said = Model(strategy), []
    local = strategy.experimental_local_results
    for k in range(STEPS // 2):
        said += local(strategy.run(model.together, args=(k,)))
    for result in strategy.run_steps(model.together, strategy.experimental_distribute_dataset(elements_of(STEPS))):
        said += local(result)
    for k in range(STEPS):
        said += local(strategy.run(model.step, args=(k,)))
        if k % 5 == 2:
            model.count.assign_add(np.ones(3))
            said.append(model.count.numpy().tolist())
    elements = strategy.experimental_distribute_dataset(elements_of(2 * STEPS)[STEPS:])
    for result in strategy.run_steps(model.step, elements):
        said += local(result)
    optimizers = (model.adam, model.adagrad, model.sgd, *model.of_groups, model.of_rows)
    said.append([int(optimizer.iterations) for optimizer in optimizers])
    with strategy.scope():
        said.append(cs.Variable(model.weights.numpy() * 2, name="last").numpy()[-1])
    trained_ones = (model.weights, model.half, model.table, model.count, model.rows, *model.groups, model.group_rows)
    values = {v.name: v.numpy() for v in trained_ones}
    kept = ((model.adam, model.weights, "m"), (model.adam, model.weights, "v"), (model.sgd, model.half, "momentum"))
    for optimizer, variable, slot in (*kept, (model.adagrad, model.table, "accumulator")):
        values[slot] = np.asarray(optimizer.get_slot(variable, slot))
    return {name: value.tobytes() for name, value in values.items()} | {"said": repr(said).encode()}


def elements_of(steps: int) -> list[np.ndarray]:
    return [np.full(2, k) for k in range(steps)]


STEPS = 15


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, bytes]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        return trained(strategy)


@pytest.fixture(scope="module")
def protected() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], max_restarts=1000) as strategy:
        yield strategy  # the first who uses it finds nothing in it, as random numbers and names ask for


def test_killed_at_every_place(undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [f"{place}=kill@{3 + 2 * number}" for number, place in enumerate(PLACES)]
    monkeypatch.setenv("CS_FAILPOINTS", ";".join(items))
    monkeypatch.setenv("CS_FAILPOINTS_DIR", str(tmp_path))
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], max_restarts=1000) as strategy:
        assert trained(strategy) == undisturbed
    assert {path.name for path in tmp_path.iterdir()} == set(items)


@pytest.mark.slow
def test_killed_at_random_instants(undisturbed: dict[str, bytes], protected: cs.CentralStorageStrategy) -> None:
    kills, over = 0, threading.Event()

    def kill() -> None:
        nonlocal kills
        random = np.random.default_rng(4)
        with cs.connect(protected.address, timeout=60) as observer:
            while kills < 4 and not over.wait(random.uniform(0.05, 0.5)):
                os.kill(observer.statistics().pid, signal.SIGKILL)
                kills += 1

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        found = trained(protected)
    finally:
        over.set()
        killer.join()
    assert found == undisturbed
    assert kills
    protected.statistics()  # the last kill may come after the training: the script is connected again from here on


@pytest.mark.asyncio
async def test_observers_ask_again(protected: cs.CentralStorageStrategy) -> None:
    with protected.scope():
        variable = cs.Variable(np.arange(5.0), name="seen")
    first = protected.statistics().pid
    with cs.connect(protected.address, timeout=60) as observer:
        async with aio.connect(protected.address, timeout=60) as other:
            os.kill(first, signal.SIGKILL)
            assert observer.get("seen").tolist() == variable.numpy().tolist()
            second = observer.statistics().pid
            assert second != first
            os.kill(second, signal.SIGKILL)
            assert (await other.get("seen")).tolist() == variable.numpy().tolist()
            assert (await other.statistics()).pid not in (first, second)


TWO_CLIENTS = """
import os, signal, subprocess, sys
import numpy as np
import central_storage as cs

def step():
    count.assign_add(np.ones(2))

def another_server():
    before = observer.statistics().pid
    os.kill(before, signal.SIGKILL)
    while observer.statistics().pid == before:
        pass

with cs.CentralStorageStrategy() as strategy:
    observer = cs.connect(timeout=60)
    if len(sys.argv) > 1:  # the second: a server after the one that welcomed it hears from replicas, too
        another_server()
    with strategy.scope():
        count = cs.Variable(np.zeros(2), name=f"count{len(sys.argv)}", aggregation=cs.VariableAggregation.SUM)
    strategy.run(step)
if len(sys.argv) == 1:
    another_server()
    subprocess.run([sys.executable, __file__, "second"], check=True)
    print(observer.get_all(["count1", "count2"]))
"""


@pytest.mark.slow
def test_what_replicas_of_a_client_that_has_left_say_again_is_not_acted_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TWO_CLIENTS)
    ended = run("cs-launch", "--devices", "cpu:0,cpu:1", str(tmp_path / "train.py")).ok()
    assert "[array([2., 2.]), array([2., 2.])]" in ended.out
