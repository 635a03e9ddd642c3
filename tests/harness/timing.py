"""The one unit of time of the tests: every limit is a multiple of it, so a slow machine is one setting.

Limits say when a test gives up. Nothing waits a fixed time and no test asserts a speed.
"""

from __future__ import annotations

import os

__all__ = ["unit"]


def unit(count: float = 1.0) -> float:
    """``count`` units in seconds; one is a second, times ``CS_TEST_TIME_UNIT``."""
    return count * float(os.environ.get("CS_TEST_TIME_UNIT", "1"))
