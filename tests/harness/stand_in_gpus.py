"""GPUs for tests on a machine that has none: the fake driver directory, and the stand-in for CuPy in its place."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["StandInGpus", "stand_in_gpus"]

_CUPY = Path(__file__).with_name("cupy_stand_in")
_VARIABLES = ("CS_NVIDIA_DRIVER", "CUDA_VISIBLE_DEVICES", "PYTHONPATH")


class StandInGpus:
    """The GPUs of a :func:`stand_in_gpus` block: ``cupy`` is the stand-in in this process."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def cupy(self) -> ModuleType:
        """The stand-in."""
        import cupy

        return cupy

    def counts(self, pid: int) -> dict[str, int] | None:
        """What the process has counted, also when it has ended; None where it never imported the stand-in."""
        from cupy._machine import COUNTERS

        path = self._directory / "processes" / str(pid)
        if not path.exists():
            return None
        return dict(zip(COUNTERS, map(int, np.fromfile(path, np.uint64)), strict=True))


@contextmanager
def stand_in_gpus(count: int, nbytes: int = 1 << 30) -> Iterator[StandInGpus]:
    """``count`` GPUs of ``nbytes`` bytes each, in this process and in those it starts, for the length of the block."""
    directory = Path(tempfile.mkdtemp(prefix="gpus-"))
    for number in range(count):
        gpu = directory / "gpus" / f"0000:{number + 1:02x}:00.0"
        gpu.mkdir(parents=True)
        uuid = f"GPU-{number:08x}-0000-4000-8000-{0xC5 + number:012x}"
        (gpu / "information").write_text(f"Model: \t\t Stand-in\nGPU UUID: \t {uuid}\nMemory: \t {nbytes}\n")
    saved = {name: os.environ.get(name) for name in _VARIABLES}
    modules, path = _take_away_cupy(), list(sys.path)
    os.environ["CS_NVIDIA_DRIVER"] = str(directory / "gpus")
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_CUPY), *filter(None, [saved["PYTHONPATH"]])])
    sys.path.insert(0, str(_CUPY))
    try:
        yield StandInGpus(directory)
    finally:
        _take_away_cupy()
        sys.modules.update(modules)
        sys.path[:] = path
        for name, value in saved.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(directory)


def _take_away_cupy() -> dict[str, Any]:
    """Forget CuPy, whichever is imported, so that the next import finds the one that is first on the path."""
    names = [name for name in sys.modules if name.partition(".")[0] == "cupy"]
    return {name: sys.modules.pop(name) for name in names}
