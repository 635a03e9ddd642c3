"""Variables on a real GPU: what `tests/server/gpu/test_store.py` shows over the stand-in, with the driver's own words.

A GPU contracts nothing and rounds like the processor, so single and double precision have the reference's bits; powers
and norms are within rounding. For a rule that needs norms, the reference adds up gradients of halves in half precision.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.harness.processes import ROOT
from tests.processes.test_gpu_variables import check_checkpoints, train
from tests.server.gpu.test_store import Both, apply, table, variables

import central_storage as cs
from cs_proto.arithmetic.optimizers import ROWWISE
from cs_proto.arrays import Array, Location, array_of
from cs_proto.errors import DeviceMemoryError
from cs_proto.memory_plan import GPU_DTYPES
from cs_proto.messages import DevicePlace
from cs_server.events import Dense, Fill, Write
from cs_server.gpu import blocks, updates
from cs_server.rules import RULES

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[True, False], ids=["journal", "no journal"])
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    made = Both(journal=request.param)
    yield made
    made.close()


@pytest.mark.parametrize("rule", sorted(RULES.keys() - ROWWISE))
def test_every_rule_against_the_reference(both: Both, rule: str) -> None:
    dense = variables(both, rule, ["float32", "float64"])
    for t in range(1, 4):
        both.commit(apply(rule, dense, t=t))
    both.assert_same(0.0 if RULES[rule].is_compiled else 1e-4)


@pytest.mark.parametrize("rule", sorted(RULES.keys() - ROWWISE))
def test_halves(both: Both, rule: str) -> None:
    both.commit(apply(rule, variables(both, rule, ["float16"])))
    both.assert_same(0.0 if RULES[rule].is_compiled and RULES[rule].direction is None else 4e-3)


@pytest.mark.parametrize("rule", ["sgd_momentum", "nadam", "adam"])
def test_sparse_gradients(both: Both, rule: str) -> None:
    sparse = table(both, rule, 200, 40, [[5, 7, 5], [199]], first=16)
    for lazy in (0.0, 1.0):
        both.commit(apply(rule, sparse=[sparse], lazy=lazy))
    both.assert_same()


@pytest.mark.parametrize("bound", [{"clipvalue": 0.5}, {"clipnorm": 0.5}, {"global_clipnorm": 2.0}])
def test_bounded_gradients(both: Both, bound: dict[str, float]) -> None:
    dense = variables(both, "sgd_momentum", ["float32", "float64"])
    both.commit(apply("sgd_momentum", dense, [table(both, "sgd_momentum", 20, 9, [[2, 5], [6]], first=1000)], **bound))
    both.assert_same(1e-6)


def test_gradients_that_cannot_be_page_locked(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(both.gpu._gpu, "page_lock", lambda start, stop: False)
    both.commit(apply("adam", variables(both, "adam", ["float32"])))
    both.assert_same()


def test_writes_and_fills(both: Both) -> None:
    both.make("parameters/float32", 16, np.ones((50, 20), "float32"))
    target = Array("float32", (50, 20), Location("parameters/float32", 64))
    add = Write(target, "assign_add", None, (array_of(np.full((50, 20), 2, "float32")),))
    rows = array_of(np.array([3, 49, 3]))
    scatter = Write(target, "scatter_add", None, (array_of(np.ones((3, 20), "float32")),), rows)
    both.commit(add, scatter, add)
    both.commit(scatter)
    both.commit(Fill("parameters/float32", "float32", 20, 40, 0.5))
    both.assert_same()


def test_long_ranges_take_several_launches(both: Both) -> None:
    size = blocks.PIECE * (updates._LAUNCH + 3) // 64 + 5
    random = np.random.default_rng(1)
    for replica in range(2):
        both.brings(f"gradients/{replica}/0/float32", 0, random.standard_normal(size).astype("float32"))
    both.make("parameters/float32", 0, random.standard_normal(size).astype("float32"))
    both.make("slots/1/momentum/float32", 0, np.zeros(size, "float32"))
    names = ("gradients/0/0/float32", "gradients/1/0/float32")
    part = Dense("float32", ((0, size),), "parameters/float32", ("slots/1/momentum/float32",), names)
    both.commit(apply("sgd_momentum", [part]))
    both.assert_same()


def test_a_server_that_begins_anew_goes_on_from_the_mirror() -> None:
    both = Both()
    dense = variables(both, "adam", ["float32"])
    for t in range(1, 4):
        both.commit(apply("adam", dense, t=t))
        both.again()
    both.assert_same()
    both.close()


def test_what_does_not_fit_is_a_typed_error(both: Both) -> None:
    with pytest.raises(DeviceMemoryError, match=r"bytes planned on gpu:0, \d+ bytes of it available"):
        both.gpu._gpu.allocate(both.gpu.available_nbytes() + (1 << 30))
    both.make("parameters/float32", 0, np.ones(9, "float32"))
    both.assert_same()


def test_a_commit_takes_nothing_of_a_gpu_that_is_full(both: Both) -> None:
    dense, sparse = variables(both, "adam", GPU_DTYPES), [table(both, "adam", 40, 20, [[1, 2], [1]], first=1000)]
    both.load(apply("adam", dense, sparse))
    taken, size = [], both.gpu.available_nbytes()
    while size > 4096:
        try:
            taken.append(both.gpu._gpu.allocate(size))
        except DeviceMemoryError:
            size //= 2
    both.commit(apply("adam", dense, sparse))
    both.commit(apply("adam", dense, sparse, t=2, clipnorm=0.5))
    both.assert_same(2e-3)
    for block in taken:
        block.free()


@pytest.mark.parametrize("bound", [{}, {"global_clipnorm": 1.0}])
def test_training_gives_what_it_gives_on_a_cpu(bound: dict[str, float]) -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0") as on_cpu:
        expected = train(on_cpu, **bound)
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], "gpu:0") as on_gpu:
        found = train(on_gpu, **bound)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5 if bound else 0)


def test_checkpoints_have_the_same_bits(tmp_path: Path) -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], "gpu:0") as on_gpu:
        check_checkpoints(on_gpu, tmp_path)


_SERVER = """
import sys
import numpy as np
from cs_server.gpu.cuda import Gpu
from cs_server.gpu.memory import DeviceMemory

gpu = Gpu("gpu:0")
memory = DeviceMemory(gpu)
memory.make("parameters/float32", 0, 4096)
memory.make("parameters/float32", 4096, 8192)
(_, _, address), = memory.spans("parameters/float32", 4096, 8192)
gpu.bring(address, np.arange(1024, dtype=np.float32))
gpu.wait()
place = memory.export("parameters/float32", 4096)
print(place.handle.hex(), place.offset, place.size, place.mark.hex(), gpu.uuid.hex(), flush=True)
sys.stdin.read()
"""


def test_another_process_opens_a_variable_where_it_lies() -> None:
    import cupy

    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as server:
        assert server.stdout is not None
        handle, offset, size, mark, uuid = server.stdout.readline().split()
        place = DevicePlace(bytes.fromhex(handle), int(offset), int(size), bytes.fromhex(mark))
        assert place.offset >= 4096
        assert bytes(cupy.cuda.runtime.getDeviceProperties(0)["uuid"][:16]).hex() == uuid
        base = cupy.cuda.runtime.ipcOpenMemHandle(place.handle)
        block = cupy.cuda.UnownedMemory(base, place.size, None, 0)
        for at in place.marked:
            found = cupy.ndarray(16, np.uint8, cupy.cuda.MemoryPointer(block, at)).get()
            assert found.tobytes() == place.mark
        found = cupy.ndarray((1024,), np.float32, cupy.cuda.MemoryPointer(block, place.offset)).get()
        cupy.cuda.runtime.ipcCloseMemHandle(base)
        server.communicate("")
    assert found.tolist() == list(range(1024))
    assert server.returncode == 0
