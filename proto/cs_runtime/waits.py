"""When this process names its long waits, as ``CS_NAME_WAITS`` says."""

from __future__ import annotations

import functools
import os

from cs_proto.errors import ConfigurationError
from cs_proto.pace import Pace, seconds_of

__all__ = ["name_waits_after", "pace_of"]


def name_waits_after() -> float:
    """Seconds after which a wait is named. Raises ConfigurationError if ``CS_NAME_WAITS`` is neither a number nor
    ``off``."""
    try:
        return seconds_of(os.environ.get("CS_NAME_WAITS"))
    except ValueError as error:
        raise ConfigurationError(str(error)) from None


@functools.cache
def pace_of(kind: str) -> Pace:
    """The pace of all waits of one ``kind`` in this process. Raises ConfigurationError as :func:`name_waits_after`."""
    return Pace(name_waits_after())
