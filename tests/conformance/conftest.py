"""Which programs are run in which mode."""

from __future__ import annotations

import os
import zlib

import pytest

from .cases import Case
from .test_goldens import NAME_CPUS

#: Of the modes on stand-ins for GPUs one program in so many is run, unless CS_ALL_PROGRAMS is set: NumPy's arithmetic
#: behind a Python class is slow, and what such a mode has of its own is in every program. Those of two replicas alone,
#: or each mode would start five services for them.
_ONE_IN = 16


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is not run, so that it is counted as such."""
    left_out = [item for item in items if _is_left_out(item)]
    if left_out:
        items[:] = [item for item in items if not _is_left_out(item)]
        config.hook.pytest_deselected(items=left_out)


def _is_left_out(item: pytest.Item) -> bool:
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    case = parameters.get("case")
    if not isinstance(case, Case) or "gpus" not in str(parameters.get("pool")):
        return False
    number = zlib.crc32(f"{case.id}, {parameters['pool']}".encode())
    is_drawn = (number % _ONE_IN == 0 and case.strategies == (2,)) or "CS_ALL_PROGRAMS" in os.environ
    return case.id in NAME_CPUS or not is_drawn
