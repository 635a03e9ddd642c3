"""The tests of this folder use a GPU in their own process, too."""

from __future__ import annotations

import pytest
from tests.conftest import why_no_gpu


@pytest.fixture(scope="session", autouse=True)
def _open_gpu() -> None:
    """CUDA opens descriptors at its first use and keeps them. The first test would otherwise seem to leave them."""
    if why_no_gpu() is None:
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)
        (cupy.ones(1) + 1).get(stream=stream)
        stream.synchronize()
