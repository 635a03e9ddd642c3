"""Decides when a dead process is restarted: a limit for the whole service, and a pause for each process.

It only counts and decides; the supervisor starts. A process that dies before the service first serves is not restarted.
"""

from __future__ import annotations

from collections import Counter

from cs_proto.printable import counted

__all__ = ["WORKED_SECONDS", "Restarts"]

#: A process that was ready for this many seconds counts as one that has worked.
WORKED_SECONDS = 10.0

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
_NO_WAY = (
    "; it is not started again, because nothing can connect to the service any more; start the service again, and keep "
    "what removes old files away from its run directory"
)


class Restarts:
    """At most ``limit`` restarts in all."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        #: The number of restarts so far.
        self.count = 0
        self._in_vain: Counter[str] = Counter()

    def next(self, label: str, *, has_worked: bool) -> float | None:
        """Count a restart of the process called ``label``. Returns the seconds until it, or None if the limit is
        reached.

        The pause is 0 if the process had worked, and for the first one that had not; then 1, 2, 4 ... 30 s.
        """
        if self.count >= self.limit:
            return None
        self.count += 1
        if has_worked:
            del self._in_vain[label]
        in_vain = self._in_vain[label]
        self._in_vain[label] += 1
        return min(_FIRST_PAUSE * 2.0 ** (in_vain - 1), _LONGEST_PAUSE) if in_vain else 0.0

    def outlook(self, pause: float | None, *, can_connect: bool) -> str:
        """What comes after a death for which :meth:`next` has given ``pause``, as the end of a sentence about it.
        ``can_connect``: whether a successor could reach the supervisor."""
        if not can_connect:
            return _NO_WAY
        if pause is not None:
            return f"; restart {self.count} of {self.limit}" + f" in {pause:g} s" * (pause > 0)
        if self.count >= self.limit > 0:
            return f"; it is not started again after {counted(self.limit, 'restart')}"
        return ""
