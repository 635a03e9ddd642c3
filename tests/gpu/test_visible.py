"""What is said of GPUs without CUDA is what CUDA says."""

from __future__ import annotations

import os

import pytest

import central_storage as cs
from central_storage.diagnostics.gpu_inventory import gpu_count, visible_gpus

pytestmark = pytest.mark.gpu


def _known(number: int) -> str:
    """What CuPy tells of a UUID, in hexadecimal digits: it ends before the first byte that is zero."""
    import cupy

    return bytes(cupy.cuda.runtime.getDeviceProperties(number)["uuid"][:16]).hex()


def test_gpus_are_counted_and_ordered_as_by_cuda() -> None:
    import cupy

    assert gpu_count() == cupy.cuda.runtime.getDeviceCount()
    for number, gpu in enumerate(visible_gpus()):
        # None: an instance of a divided GPU, or unlike GPUs in CUDA's order.
        assert not gpu.uuid or gpu.uuid.removeprefix("GPU-").replace("-", "").startswith(_known(number))


def test_a_worker_sees_its_gpu_alone() -> None:
    last = gpu_count() - 1
    known = _known(last)

    def look() -> tuple[int, str, str]:
        import cupy

        properties = cupy.cuda.runtime.getDeviceProperties(0)
        return cupy.cuda.runtime.getDeviceCount(), properties["uuid"][:16].hex(), os.environ["CUDA_VISIBLE_DEVICES"]

    with cs.CentralStorageStrategy([f"gpu:{last}"], parameter_device="cpu:0") as strategy:
        count, seen, visible = strategy.run(look)
    assert (count, seen) == (1, known)
    assert visible == visible_gpus()[last].entry
