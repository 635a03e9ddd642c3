"""A replica's GPU, on a stand-in: what is copied and when, and that nothing is used before it is there."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tests.harness.stand_in_gpus import StandInGpus, stand_in_gpus

from central_storage.core.random_streams import Streams
from cs_proto.arrays import Array, Location
from cs_proto.errors import DeviceMemoryError
from cs_proto.messages import DevicePlace
from cs_worker.devices.device import Device, open_device

F32 = np.float32


class Shared:
    """Variables in memory that lies in whole pages, as the server has them."""

    def __init__(self, *values: Any) -> None:
        self.values: dict[int, np.ndarray] = {}
        self.versions: dict[int, int] = {}
        self.places: dict[int, DevicePlace] = {}
        for number, value in enumerate(values, 1):
            array = np.asarray(value, F32)
            memory = mmap.mmap(-1, max(array.nbytes, 1))
            self.values[number] = np.frombuffer(memory, F32, array.size).reshape(array.shape)
            self.write(number, array)

    def write(self, number: int, value: Any) -> None:
        """What a commit does."""
        self.values[number][...] = value
        self.versions[number] = self.versions.get(number, 0) + 1

    def version(self, number: int) -> int:
        return self.versions[number]

    def view(self, number: int) -> np.ndarray:
        return self.values[number]

    def name(self, number: int) -> str:
        return f"v{number}"

    def on_device(self, number: int) -> DevicePlace | None:
        return self.places.get(number)


@pytest.fixture
def gpus() -> Iterator[StandInGpus]:
    with stand_in_gpus(2, nbytes=1 << 20) as gpus:
        yield gpus


@pytest.fixture
def device(gpus: StandInGpus) -> Iterator[Device]:
    device = open_device("gpu:0")
    yield device
    device.close()


def copied(gpus: StandInGpus) -> tuple[int, int]:
    counts = gpus.cupy.counts()
    return counts["host_to_device"], counts["host_to_device_nbytes"]


@pytest.fixture(params=["locked", "not locked"])
def shared(device: Device, request: pytest.FixtureRequest) -> Shared:
    """Two variables, page-locked or not: all must be the same but for the speed."""
    shared = Shared([1, 2, 3], np.ones((1000, 10)))
    if request.param == "locked":
        device.lock(list(shared.values.values()))
    return shared


# --- reading --------------------------------------------------------------------------------------------------------


def test_a_variable_is_copied_when_it_has_changed_and_not_again(
    gpus: StandInGpus, device: Device, shared: Shared
) -> None:
    device.begin_run(shared)
    first = device.view(1, shared)
    assert device.view(1, shared) is first
    assert first.tolist() == [1, 2, 3]
    assert copied(gpus) == (1, 12)
    device.settle()

    device.begin_run(shared)
    assert device.view(1, shared) is first
    shared.write(1, [4, 5, 6])
    shared.write(2, 7)
    second = device.view(1, shared)
    assert second.tolist() == [4, 5, 6]
    assert first.tolist() == [1, 2, 3]  # whoever still holds it
    assert copied(gpus) == (2, 24)


def test_a_variable_that_the_function_has_written_is_copied_anew(
    gpus: StandInGpus, device: Device, shared: Shared
) -> None:
    device.begin_run(shared)
    first, other = device.view(1, shared), device.view(2, shared)
    device.settle()
    first[...] = 9
    device.restore([1, 5])
    assert device.view(1, shared).tolist() == [1, 2, 3]
    assert device.view(2, shared) is other
    device.begin_run(shared)
    assert device.view(1, shared).tolist() == [1, 2, 3]


def test_what_the_run_before_read_and_has_changed_is_copied_at_once(
    gpus: StandInGpus, device: Device, shared: Shared
) -> None:
    device.begin_run(shared)
    device.view(1, shared)
    device.view(2, shared)
    device.settle()
    shared.write(1, [4, 5, 6])
    device.begin_run(shared)
    assert copied(gpus) == (3, 12 + 40_000 + 12)
    assert device.view(1, shared).tolist() == [4, 5, 6]
    device.settle()
    shared.write(2, 3)  # not read by the run before
    device.begin_run(shared)
    assert copied(gpus)[0] == 3


def test_a_copy_is_waited_for_on_whatever_stream_it_is_used(gpus: StandInGpus, device: Device) -> None:
    shared = Shared([1, 2, 3])
    device.lock([shared.view(1)])
    cp = gpus.cupy
    device.begin_run(shared)
    with cp.cuda.Stream(non_blocking=True):
        assert device.view(1, shared).tolist() == [1, 2, 3]
    with cp.cuda.Device(1):  # the copy is on the replica's own device all the same
        assert device.view(1, shared).device.id == 0


def test_rows_are_gathered_and_the_table_is_not_copied(gpus: StandInGpus, device: Device, shared: Shared) -> None:
    shared.write(2, np.arange(10_000).reshape(1000, 10))
    device.begin_run(shared)
    found = device.rows(2, np.array([[3, 999], [3, 0]]), shared)
    assert found.shape == (2, 2, 10)
    assert found.get()[:, :, 0].tolist() == [[30, 9990], [30, 0]]
    counts = gpus.cupy.counts()
    assert counts["host_to_device_nbytes"] + counts["host_reads_nbytes"] <= 4 * (8 + 40)
    assert (counts["host_reads_nbytes"] == 160) == (counts["page_locked_nbytes"] > 0)
    device.view(2, shared)
    before = copied(gpus)[1]
    assert device.rows(2, np.array([5]), shared).tolist() == shared.view(2)[[5]].tolist()
    assert copied(gpus)[1] == before + 8  # out of the copy that is there
    device.settle()


def test_dtypes_shapes_and_strings(gpus: StandInGpus, device: Device) -> None:
    for array in (np.float64(2), np.zeros((0, 3), np.float16), np.arange(4) > 1, np.ones(2, np.complex64)):
        there = device.bring(np.asarray(array))
        assert (there.dtype, there.shape) == (array.dtype, array.shape)
        assert np.array_equal(there.get(), array)
    texts = np.array(["a"])
    assert device.bring(texts) is texts
    empty = Shared(np.zeros((0, 3)))
    assert device.view(1, empty).shape == (0, 3)
    device.settle()


# --- gradients ------------------------------------------------------------------------------------------------------


def places(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    found = [np.frombuffer(mmap.mmap(-1, 1 << 16), F32)[: int(np.prod(shape))].reshape(shape) for shape in shapes]
    for place in found:
        place[...] = -1
    return found


def test_gradients_are_there_when_the_device_has_settled(gpus: StandInGpus, device: Device) -> None:
    cp = gpus.cupy
    targets = places((3,), (2, 2), (2, 3))
    device.lock(targets)
    ours, *_ = device.buffers(targets[:1])
    cp.multiply(cp.ones(3, F32), F32(5), out=ours)
    theirs, transposed = cp.full((2, 2), F32(6)), cp.asarray(np.arange(6, dtype=F32).reshape(3, 2)).T
    device.fetch([(ours, targets[0])], may_change=False)
    device.fetch([(theirs, targets[1]), (transposed, targets[2])], may_change=True)
    assert targets[0].tolist() == [-1, -1, -1]  # nothing has waited yet
    theirs *= 100  # the user's own array may be used again at once
    del ours, theirs, transposed
    device.settle()
    assert targets[0].tolist() == [5, 5, 5]
    assert targets[1].tolist() == [[6, 6], [6, 6]]
    assert targets[2].tolist() == [[0, 2, 4], [1, 3, 5]]


def test_without_settling_the_server_would_read_old_gradients(gpus: StandInGpus, device: Device) -> None:
    """What the test above relies on: forgetting to wait is seen."""
    (target,) = places((3,))
    device.lock([target])
    device.fetch([(gpus.cupy.ones(3, F32), target)], may_change=False)
    assert target.tolist() == [-1, -1, -1]
    device.settle()


def test_without_settling_the_next_commit_would_be_read_too_early(gpus: StandInGpus, device: Device) -> None:
    shared = Shared([1, 2, 3])
    device.lock([shared.view(1)])
    for settle, expected in ((device.settle, 1), (lambda: None, 9)):
        shared.write(1, [1, 2, 3])
        device.begin_run(shared)
        view = device.view(1, shared)
        settle()
        shared.view(1)[...] = 9  # the server
        assert view.tolist()[0] == expected


def test_a_gradient_from_another_device_of_the_replica(gpus: StandInGpus) -> None:
    device = open_device("gpu:0+gpu:1")
    (target,) = places((3,))
    with gpus.cupy.cuda.Device(1):
        gradient = gpus.cupy.full(3, F32(4))
    device.fetch([(gradient, target)], may_change=True)
    device.settle()
    assert target.tolist() == [4, 4, 4]
    device.close()


# --- the server's memory on the same device ---------------------------------------------------------------------------

EXPORT = """
import sys
import numpy as np
import cupy as cp
start = cp.cuda.runtime.malloc(4096)
memory = cp.cuda.UnownedMemory(start, 4096, None, 0)
first = int(sys.argv[1])
for at in (first, first + 1024 - 16):
    cp.ndarray((16,), np.uint8, cp.cuda.MemoryPointer(memory, at))[...] = 1
array = cp.ndarray((3,), np.float32, cp.cuda.MemoryPointer(memory, first + 64))
for line in sys.stdin:
    array[...] = float(line)
    cp.cuda.Device().synchronize()
    print(cp.cuda.runtime.ipcGetMemHandle(start).hex(), flush=True)
"""


MARK = bytes([1]) * 16


@contextmanager
def exporting(first: int = 0) -> Iterator[Callable[[float], bytes]]:
    """A server with three numbers at byte 64 of a block of 1024: what sets them and says the block's handle. CUDA has
    cut the block from a larger one of 4096 bytes, of which it begins at ``first``."""
    command = [sys.executable, "-c", EXPORT, str(first)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, bufsize=1) as server:

        def commit(value: float) -> bytes:
            print(value, file=server.stdin)
            assert server.stdout is not None
            return bytes.fromhex(server.stdout.readline())

        yield commit
        assert server.stdin is not None
        server.stdin.close()


def test_variables_and_gradients_on_the_same_device_stay_there(
    gpus: StandInGpus, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    shared = Shared([5, 5, 5], [7, 7, 7])
    with exporting() as commit, caplog.at_level("INFO", "central_storage.worker"):
        shared.places[1] = DevicePlace(commit(5), 64, 1024, MARK)
        device.begin_run(shared)
        view = device.view(1, shared)
        assert view.tolist() == device.rows(1, np.arange(3), shared).tolist() == [5, 5, 5]
        assert device.view(1, shared) is view
        device.settle()
        commit(6)
        shared.versions[1] += 1
        assert view.tolist() == [5, 5, 5]
        assert device.view(1, shared).tolist() == device.rows(1, np.arange(3), shared).tolist() == [6, 6, 6]
        assert device.view(2, shared).tolist() == [7, 7, 7]
        assert (copied(gpus)[0], gpus.cupy.counts()["opened"]) == (3, 1)  # row numbers, twice, and what lies elsewhere

        like = Array("float32", (3,), Location("gradients/0/2/float32", 0))
        assert device.shared([shared.places[1], None], [like, like]) is None
        (buffer,) = device.shared([shared.places[1]], [like]) or ()
        gpus.cupy.multiply(buffer, F32(2), out=buffer)
        device.put([(buffer, buffer)])
        assert device.rows(1, np.arange(3), shared).tolist() == [12, 12, 12]
        later = DevicePlace(shared.places[1].handle, 68, 1024, MARK)
        (other,) = device.shared([later], [like]) or ()
        other[...] = gpus.cupy.asarray(np.array([1, 2, 3], F32))
        device.put([(other, buffer), (np.array([4, 5, 6], F32), other)])  # the first is computed where the second goes
        assert buffer.tolist()[0] == 1
        assert other.tolist() == [4, 5, 6]
        commit(6)

        device.close_imports()  # the server is another now
        assert buffer.tolist() == [6, 6, 6]  # whoever still holds it
        shared.places.clear()
        shared.write(1, [1, 2, 3])
        assert device.view(1, shared).tolist() == [1, 2, 3]
        device.settle()
        device.begin_run(shared)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            buffer.tolist()
        assert view.tolist() == [5, 5, 5]
    assert [record.message for record in caplog.records] == [
        "transport CUDA IPC: variables on gpu:0 are copied there, rows read where they lie"
    ]


def test_variables_that_cannot_be_opened_are_copied(
    gpus: StandInGpus, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    shared = Shared([1, 2, 3])
    shared.places[1] = DevicePlace(bytes(64), 64, 1024, MARK)
    device.begin_run(shared)
    with caplog.at_level("INFO", "central_storage.worker"):
        assert device.view(1, shared).tolist() == device.view(1, shared).tolist() == [1, 2, 3]
    assert [record.message for record in caplog.records] == [
        "transport staging: the server's memory on gpu:0 cannot be opened (cudaErrorInvalidValue: invalid argument)"
    ]
    assert copied(gpus)[0] == 1
    device.settle()


@pytest.mark.parametrize(
    ("first", "offset", "size", "mark"),
    [
        (0, 64, 1024, bytes(16)),  # another block
        (1024, 64, 1024, MARK),  # the beginning of the allocation from which the block was cut
        (0, 64, 1023, MARK),  # a block that ends elsewhere
        (0, 64, 1 << 20, MARK),  # or beyond what was opened
        (0, 1000, 1024, MARK),  # what would reach into the mark
        (0, 68, 1024, MARK),  # the block, but not the variable
        (0, 60, 1024, MARK),
    ],
)
def test_memory_that_shows_other_bytes_than_the_server_wrote_is_not_used(
    gpus: StandInGpus,
    device: Device,
    caplog: pytest.LogCaptureFixture,
    first: int,
    offset: int,
    size: int,
    mark: bytes,
) -> None:
    shared = Shared([5, 5, 5])
    with exporting(first) as commit, caplog.at_level("INFO", "central_storage.worker"):
        shared.places[1] = DevicePlace(commit(5), offset, size, mark)
        device.begin_run(shared)
        shown = device.view(1, shared)
        commit(6)
        assert shown.tolist() == device.view(1, shared).tolist() == [5, 5, 5]
        if offset in (64, 1000):  # of a gradient there is no mirror
            like = Array("float32", (3,), Location("gradients/0/2/float32", 0))
            assert device.shared([shared.places[1]], [like]) is None
    assert [record.message for record in caplog.records] == [
        "transport staging: the server's memory on gpu:0 shows other bytes by CUDA IPC"
    ]
    device.settle()


def test_a_refused_page_lock_is_said_once(
    gpus: StandInGpus, device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise runtime.CUDARuntimeError(801)

    runtime = gpus.cupy.cuda.runtime
    monkeypatch.setattr(runtime, "hostRegister", refuse)
    shared = Shared([1, 2, 3], [4])
    with caplog.at_level("INFO", "central_storage.worker"):
        device.lock([shared.view(1)])
        device.lock([shared.view(2)])
    assert [record.message for record in caplog.records] == [
        "transport pageable memory: shared memory cannot be page-locked (cudaErrorNotSupported: operation not "
        "supported); copies to and from gpu:0 are slower"
    ]


# --- memory ---------------------------------------------------------------------------------------------------------


def test_too_little_memory_names_device_numbers_and_plan(gpus: StandInGpus, device: Device) -> None:
    shared = Shared(np.ones(1000), np.zeros(1 << 18), np.zeros((1 << 19, 2)))
    device.begin_run(shared)
    device.view(1, shared)
    with pytest.raises(DeviceMemoryError) as refused:
        device.view(2, shared)
    assert str(refused.value) == (
        "gpu:0: 1048576 bytes are needed for variable v2, but 1044576 of 1048576 bytes are free (CuPy's pool may hold "
        "more); copies of 1 variable take 4000 bytes. Take rows of a large table (cs.nn.embedding_lookup) instead of "
        "the whole, or smaller batches"
    )
    with pytest.raises(DeviceMemoryError, match="gradients of 2 variables"):
        device.buffers([shared.view(1), shared.view(2)])
    with pytest.raises(DeviceMemoryError, match=r"gpu:0: .* an array float32\[262144\]"):
        device.bring(np.zeros(1 << 18, F32))
    across = device.bring(np.zeros((2, 75_000), F32)).T
    with pytest.raises(DeviceMemoryError, match="600000 bytes are needed for contiguous copies of 1 array"):
        device.fetch([(across, np.empty(across.shape, F32))], may_change=True)
    del across
    assert device.rows(3, np.array([3]), shared).tolist() == [[0, 0]]


def test_copies_that_are_not_read_any_more_make_room(gpus: StandInGpus, device: Device) -> None:
    shared = Shared(np.ones(150_000), np.ones(150_000), np.ones(10))
    device.begin_run(shared)
    device.view(1, shared)
    device.view(3, shared)
    device.settle()
    device.begin_run(shared)
    device.view(3, shared)
    assert device.view(2, shared)[0] == 1
    assert copied(gpus)[0] == 3
    with pytest.raises(DeviceMemoryError):
        device.view(1, shared)  # this run reads both
    device.settle()


def test_what_is_freed_is_neither_kept_nor_locked(gpus: StandInGpus, device: Device) -> None:
    shared = Shared([1, 2, 3])
    device.lock([shared.view(1)])
    device.begin_run(shared)
    device.view(1, shared)
    assert gpus.cupy.counts()["page_locked_nbytes"] == mmap.PAGESIZE
    device.forget([1], [shared.view(1)])
    counts = gpus.cupy.counts()
    assert counts["page_locked_nbytes"] == 0
    shared.write(1, [7, 8, 9])
    shared.versions[1] = 1
    device.begin_run(shared)
    assert device.view(1, shared).tolist() == [7, 8, 9]
    device.settle()


# --- state ----------------------------------------------------------------------------------------------------------


def test_a_run_begins_on_the_replicas_device_and_stream(gpus: StandInGpus, device: Device) -> None:
    cuda = gpus.cupy.cuda
    cuda.Device(1).use()
    cuda.Device(0).use()
    cuda.Stream(non_blocking=True).use()
    cuda.Device(1).use()
    device.begin_run(Shared())
    assert (cuda.Device().id, cuda.get_current_stream().ptr) == (0, 0)


def test_the_generator_of_a_stream_is_on_the_home_device(gpus: StandInGpus) -> None:
    device = open_device("gpu:1+gpu:0")
    drawn = []
    for step in (0, 1, 0):
        numbers = Streams(7, "m.step", step, 0, make=device.generator).generator(None).random(3)
        assert type(numbers) is gpus.cupy.ndarray
        drawn.append(numbers.tolist())
    assert drawn[0] == drawn[2] != drawn[1]
    device.close()


def test_random_numbers_are_seeded_on_every_device_and_put_aside(gpus: StandInGpus) -> None:
    cp = gpus.cupy

    def draw() -> list[float]:
        drawn = []
        for number in (0, 1):
            with cp.cuda.Device(number):
                drawn.append(float(cp.random.normal()))
        return drawn

    device = open_device("gpu:0+gpu:1")
    device.seed(2**32 - 1)
    first, second = draw(), draw()
    assert first[0] != first[1]
    device.seed(2**32 - 1)
    assert draw() == first
    restore = device.keep_random_state()
    device.seed(5)
    draw()
    restore()
    assert draw() == second
    device.close()
