"""Moments of a step: records when a process reaches a named place, for a table of where the time of a step goes.

If ``CS_MOMENTS`` names no directory, a place costs the call of an empty function. Otherwise the process writes the
file ``ROLE-PID`` there when it ends: a line for each moment, with its name and the time. Each role passes its own
clock; ``benchmarks/parts.py`` combines the files of several processes.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

__all__ = ["moments"]

# Only the last ones are kept: some thousands of steps.
_KEPT = 200_000


@functools.cache
def moments(role: str, clock: Callable[[], int]) -> Callable[[str], None]:
    """The function that records that this process has reached the place of that name.

    ``clock`` counts nanoseconds, alike in all processes of the machine. For one role and clock the function is the
    same everywhere in the process.
    """
    directory = os.environ.get("CS_MOMENTS")
    if not directory:
        return _not_asked
    noted: deque[tuple[str, int]] = deque(maxlen=_KEPT)

    def note(name: str) -> None:
        noted.append((name, clock()))

    def leave() -> None:
        lines = "".join(f"{name} {when}\n" for name, when in noted)
        Path(directory, f"{role}-{os.getpid()}").write_text(lines)

    atexit.register(leave)
    return note


def _not_asked(name: str) -> None:
    pass
