"""How many steps a second the service makes now.

Each second the engine notes how many steps there were. Steps may take longer than a second, so what is kept are the
moments at which the number had changed.
"""

from __future__ import annotations

from collections import deque

__all__ = ["StepRate"]

# The rate is that of the last second or more, until so many steps are in it, but of at most so many seconds.
_LEAST_SECONDS, _ENOUGH, _MOST_SECONDS = 1.0, 10, 10.0
# If no step has ended for so many times the duration of a step, and for so many seconds, none is expected any more.
_LATE, _LATE_SECONDS = 3.0, 2.5
# A moment is noted each second, and one is older than the window.
_KEPT = int(_MOST_SECONDS) + 2


class StepRate:
    """The numbers of steps at the last moments.

    Examples:
        >>> rate = StepRate(0.0, 0)
        >>> for second in range(1, 5):
        ...     rate.note(float(second), 100 * second)
        >>> rate.at(4.5, 450), rate.at(8.0, 400)
        (100.0, 0.0)
    """

    def __init__(self, now: float, steps: int) -> None:
        self._seen = deque([(now, steps)], _KEPT)

    def note(self, now: float, steps: int) -> None:
        """There are so many steps now. To be called each second."""
        if steps != self._seen[-1][1]:
            self._seen.append((now, steps))

    def at(self, now: float, steps: int) -> float:
        """Steps a second, when there are so many steps."""
        seen = [*self._seen, (now, steps)] if steps != self._seen[-1][1] else [*self._seen]
        end, last = seen.pop()
        if not seen:
            return 0.0
        begin, first = seen.pop()
        while seen and end - seen[-1][0] <= _MOST_SECONDS and (end - begin < _LEAST_SECONDS or last - first < _ENOUGH):
            begin, first = seen.pop()
        rate = (last - first) / max(end - begin, 1e-3)
        return rate if now - end <= max(_LATE_SECONDS, _LATE / rate) else 0.0
