"""Addresses that a process may map: the largest machines leave enough of them, and so does a small limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.harness.processes import run

import central_storage as cs
from cs_runtime import machine

TIB = 1 << 40

LIMITED = """
import os, resource, signal, sys
import numpy as np
import central_storage as cs

resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
in_process = sys.argv[1] == "threads"
strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=in_process)
with strategy.scope():
    small = cs.Variable(np.zeros(8, np.float32), name="small")
    sgd, adam = cs.optimizers.SGD(0.5), cs.optimizers.Adam(0.5)

def step():
    for _ in range(2):  # both sets of gradient buffers
        sgd.apply_gradients([(np.ones(8, np.float32), small)])

def step_of_both():
    of_large, of_small = cs.gradient_buffers([large, small])
    of_large[:], of_small[:] = 1, 1
    sgd.apply_gradients([(of_large, large), (of_small, small)])
    adam.apply_gradients([(np.zeros(8, np.float32), small)])

def size(part):
    return np.float64(part.size)

parts = strategy.experimental_distribute_values_from_function(lambda context: np.zeros(50 << 20, np.uint8))
try:  # the arena has room for one of them at the most
    strategy.run(size, args=(parts,))
except cs.errors.MemoryPlanError:
    print(strategy.reduce("SUM", strategy.run(size, args=(np.zeros(3),)), axis=None))

strategy.run(step)
with strategy.scope():
    large = cs.Variable(np.zeros(3 << 20, np.float32), name="large")  # 12 MiB: the slab is extended
strategy.run(step_of_both)
strategy.run(step)
print(small.numpy().tolist(), np.unique(large.numpy()).tolist())
try:
    with strategy.scope():
        cs.Variable(np.broadcast_to(np.float32(0), (3 << 28,)), name="huge", trainable=False)
except cs.errors.MemoryPlanError as error:
    print(error)
if not in_process:
    os.kill(strategy.statistics().pid, signal.SIGKILL)
strategy.run(step_of_both)
with strategy.scope():
    last = cs.Variable(np.ones(9, np.float32), name="last")
print(small.numpy().tolist(), np.unique(large.numpy()).tolist(), last.numpy().sum())
"""


@pytest.mark.parametrize("kind", ["processes", "threads"])
def test_under_a_limit_of_addresses(kind: str, tmp_path: Path) -> None:
    """A limit leaves room for small models, slabs are extended within it, and what does not fit is refused."""
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)
    # A library that starts a thread for each processor would need addresses for each.
    ended = run(script, kind, environment={"OPENBLAS_NUM_THREADS": "1"}).ok()
    sizes, before, refused, after = ended.lines
    assert sizes == "6.0"
    assert before == f"{[-5.0] * 8} [-1.0]"
    assert "variable 'huge': the server cannot map segment parameters/float32 of" in refused
    assert f"available under a limit of {3 << 30} bytes (3.0 GiB)" in refused
    assert "ulimit -v" in refused
    assert after == f"{[-6.0] * 8} [-2.0] 9.0"


@pytest.mark.parametrize("machine_nbytes", [3 * TIB // 2, 8 * TIB])
def test_8_replicas_train_on_the_largest_machines(machine_nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, which maps every segment three times."""
    monkeypatch.setattr(machine, "total_nbytes", lambda: machine_nbytes)
    with cs.CentralStorageStrategy([f"cpu:{r}" for r in range(8)], in_process=True) as strategy:
        with strategy.scope():
            single, double = (cs.Variable(np.zeros(8, dtype), name=dtype) for dtype in ("float32", "float64"))
            adam = cs.optimizers.Adam(0.5)

        def step() -> float:
            adam.apply_gradients([(np.ones(8, np.float32), single), (np.ones(8), double)])
            return float(np.ones(1 << 20).sum())  # by way of the arena

        assert strategy.reduce("SUM", strategy.run(step), axis=None) == 8 << 20
        np.testing.assert_allclose(single.numpy(), -0.5, rtol=1e-5)
        np.testing.assert_allclose(double.numpy(), -0.5, rtol=1e-5)
