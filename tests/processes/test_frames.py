"""Processes that map no shared memory: every byte travels in frames, and the bits are the same."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.processes import MAILBOXES, run, start

import central_storage as cs

SCRIPT = """
import hashlib
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy()
rng = np.random.default_rng(1)
with strategy.scope():
    w = cs.Variable(rng.normal(size=(300, 200)).astype(np.float32))
    b = cs.Variable(np.zeros(200, np.float32))
    table = cs.Variable(rng.normal(size=(3000, 16)).astype(np.float32))
    large = cs.Variable(np.zeros(5 << 19), aggregation=cs.VariableAggregation.MEAN)  # 20 MiB: more than a message takes
    mean = cs.metrics.Mean()
    adam = cs.optimizers.Adam(1e-3)

def step(x, rows):
    h = x @ np.asarray(w) + np.asarray(b)
    words = table.sparse_read(rows)
    gw, gb = cs.gradient_buffers([w, b])
    np.matmul(x.T, h, out=gw)
    gb[...] = h.sum(0)
    of_rows = cs.IndexedSlices(words * np.float32(0.1), rows)
    adam.apply_gradients([(gw, w), (gb, b), (of_rows, table)])
    moved = np.array(np.asarray(b))  # commits, so it is not what it was above
    large.assign_add(np.full(5 << 19, 0.25))
    mean.update_state(moved)
    total = cs.get_replica_context().all_reduce("SUM", x)
    return total, moved

def merged():
    def merge(strategy, mine):
        large.assign(large.numpy() + 1)
        table.scatter_add(cs.IndexedSlices(np.ones((2, 16), np.float32), np.array([5, 2999])))
        nested = strategy.run(lambda v: np.asarray(w)[:1] * v[0], args=(mine,))
        return strategy.reduce("SUM", mine, axis=None), strategy.reduce("SUM", nested, axis=None)
    return cs.get_replica_context().merge_call(merge, args=(np.full(20000, 2.0, np.float32),))

x = rng.normal(size=(128, 300)).astype(np.float32)
data = cs.data.Dataset.from_tensor_slices((x, rng.integers(0, 3000, 128))).batch(32)
digest = hashlib.sha256()

def take(result):
    for part in strategy.experimental_local_results(result):
        for array in part:
            digest.update(np.ascontiguousarray(array).tobytes())

for batch in strategy.experimental_distribute_dataset(data):
    take(strategy.run(step, args=batch))
for result in strategy.run_steps(lambda batch: step(*batch), strategy.experimental_distribute_dataset(data)):
    take(result)
take(strategy.run(merged))
with strategy.scope():
    late = cs.Variable(np.arange(40000.0))
    for v in (w, b, table, large, late, adam.get_slot(w, "m")):
        digest.update((v if isinstance(v, np.ndarray) else v.numpy()).tobytes())
assert (large.numpy() == 3.0).all(), large.numpy()[:3]
assert table.sparse_read([[5], [2999]]).shape == (2, 1, 16)
print(strategy.num_replicas_in_sync, mean.result(), digest.hexdigest())
"""
# The address ranges of segments are as long as the machine's memory.
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("frames") / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def shared(script: Path) -> str:
    """What it prints where memory is shared."""
    ended = run("cs-launch", "--devices", "cpu:0,cpu:1", script).ok()
    assert f"transport ipc + {MAILBOXES}shared memory (memfd)" in ended.err
    assert "in frames" not in ended.err
    return ended.out


def test_nothing_is_shared_and_the_bits_are_the_same(script: Path, shared: str) -> None:
    ended = run("cs-launch", "--memory", "frames", "--devices", "cpu:0,cpu:1", script).ok()
    assert ended.out == shared
    assert re.search(r"^run .* transport ipc \+ bytes in frames,", ended.err)
    for who in ("[w0]", "[w1]", "[central-storage]"):
        said = [line for line in ended.err.splitlines() if line.startswith(who) and "planned memory" not in line]
        assert len(said) == 1, str(ended)
        assert said[0].endswith("ipc + bytes in frames: the service shares no memory with this process")


@pytest.fixture
def run_directory() -> Iterator[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="frames-") as parent:
        yield os.path.join(parent, "run")


@pytest.mark.slow
def test_whoever_cannot_map_says_so_beside_others_who_can(script: Path, shared: str, run_directory: str) -> None:
    environment = {"CS_ADDRESS": run_directory, "OMP_NUM_THREADS": "1"}
    launch = str(Path(sys.executable).with_name("cs-launch"))
    with ExitStack() as stack:
        server = stack.enter_context(start("cs-launch", "--serve", "2", "--memory", "files", environment=environment))
        maps = stack.enter_context(start("cs-launch", "--join", environment=environment))
        maps.wait_for("worker w0 of 2", stream="err")
        cannot = stack.enter_context(start("-c", LIMITED, launch, "--join", environment=environment))
        cannot.wait_for(
            r"\[w1\] .*transport ipc \+ bytes in frames: the service's memory cannot be mapped here \(Cannot allocate",
            stream="err",
        )
        ended = run("-c", LIMITED, sys.executable, script, environment=environment).ok()
        assert ended.out == shared
        transport, plan = ended.err.splitlines()
        assert transport == (
            "[central-storage] 2 replicas (cpu:0, cpu:1), parameters on cpu:0, transport ipc + bytes in frames: "
            "the service's memory cannot be mapped here (Cannot allocate memory)"
        )
        assert plan.startswith("[central-storage] planned memory: ")
        server.signal(signal.SIGTERM)
        assert [child.wait().code for child in (server, maps, cannot)] == [0, 0, 0]
    assert "in frames" not in maps.err


def test_where_no_address_range_is_left_for_what_is_read_after_an_update_it_is_carried(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def step() -> list[float]:
        from cs_runtime.shared_memory import mapping

        def refuse(*args: Any, **kwargs: Any) -> None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        mapping.Mapping = refuse  # type: ignore[assignment, misc]
        values = []
        for _ in range(3):
            values.append(np.asarray(w))
            (gradient,) = cs.gradient_buffers([w])
            gradient[...] = -1
            optimizer.apply_gradients([(gradient, w)])
        return [float(value[0]) for value in (*values, np.asarray(w))]

    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as own:
        with own.scope():
            w, optimizer = cs.Variable(np.ones(3)), cs.optimizers.SGD(1.0)
        for first in (1, 7):
            assert own.experimental_local_results(own.run(step)) == ([first, first + 2, first + 4, first + 6],) * 2
    printed = [line for line in capfd.readouterr().err.splitlines() if "bytes in frames" in line]
    assert len(printed) == 2
    assert all("cannot be mapped here (Cannot allocate memory)" in line for line in printed)
