"""Which programs are run in which mode."""

from __future__ import annotations

import os
import zlib

import pytest

from .cases import Case
from .test_goldens import NAME_CPUS

#: Of each mode one program in so many is run, unless CS_ALL_PROGRAMS is set. With processes, which is what users have,
#: all are; threads differ in what carries the messages; on stand-ins for GPUs NumPy's arithmetic behind a Python class
#: is slow, and what such a mode has of its own is in every program.
_ONE_IN = {"processes": 1, "threads": 4}
_ONE_IN_ON_GPUS = 16


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not run, so that it is counted as such."""
    left_out = [item for item in items if _is_left_out(item)]
    if left_out:
        items[:] = [item for item in items if not _is_left_out(item)]
        config.hook.pytest_deselected(items=left_out)


def _is_left_out(item: pytest.Item) -> bool:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    case, mode = parameters.get("case"), str(parameters.get("pool"))
    if not isinstance(case, Case):
        return False
    if "gpus" in mode and case.id in NAME_CPUS:
        return True
    if "CS_ALL_PROGRAMS" in os.environ:
        return False
    if "gpus" in mode and (case.strategies != (2,) or "CSS(" in case.program):
        return True  # or each mode would start five services for them
    return zlib.crc32(f"{case.id}, {mode}".encode()) % _ONE_IN.get(mode, _ONE_IN_ON_GPUS) != 0
