"""When a process that has died is started again: a count for the whole service, and a pause for each process.

Pure: the supervisor asks, and starts. What ends before the service first serves is never started again.
"""

from __future__ import annotations

from collections import Counter

__all__ = ["WORKED_SECONDS", "Restarts"]

#: A process that was ready this long has worked, whatever it did.
WORKED_SECONDS = 10.0

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0


class Restarts:
    """At most ``limit`` restarts in all."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        #: How many there have been.
        self.count = 0
        self._in_vain: Counter[str] = Counter()

    def next(self, label: str, *, has_worked: bool) -> float | None:
        """Seconds until the process called ``label`` is started again, which counts; None where it is not.

        At once where what died had worked, or is the first that did not; else after 1, 2, 4 ... 30 s.
        """
        if self.count >= self.limit:
            return None
        self.count += 1
        if has_worked:
            del self._in_vain[label]
        in_vain = self._in_vain[label]
        self._in_vain[label] += 1
        return min(_FIRST_PAUSE * 2.0 ** (in_vain - 1), _LONGEST_PAUSE) if in_vain else 0.0
