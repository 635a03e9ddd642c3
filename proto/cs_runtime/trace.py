"""Moments of a step: when a process comes to a named place, for a table of where the time of a step goes.

Where the environment names no directory (``CS_MOMENTS``) a place costs the call of an empty function. Else the process
leaves ``ROLE-PID`` there when it ends: a line for each moment, its name and the clock. Each role brings its clock,
since nothing here has one; ``benchmarks/parts.py`` puts together what several processes left.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

__all__ = ["moments"]

# The last so many are kept: some thousands of steps.
_KEPT = 200_000


@functools.cache
def moments(role: str, clock: Callable[[], int]) -> Callable[[str], None]:
    """What notes that this process has come to the place of that name. ``clock`` counts nanoseconds, the same in all
    processes of the machine. For one role and clock it is the same everywhere in the process."""
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
