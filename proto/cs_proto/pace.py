"""How often long waits are named: once, and then at growing intervals."""

from __future__ import annotations

__all__ = ["NAME_AFTER", "Pace", "seconds_of"]

#: Seconds after which a wait is named, unless ``CS_NAME_WAITS`` says otherwise.
NAME_AFTER = 10.0
# Eleven days.
_NEVER = 1e6


class Pace:
    """When the waits of one kind are named: after ``first`` seconds, and from then on whenever a wait has lasted twice
    as long as when one was named last. So a step that takes 30 s is named in the first run, and in no later one.

    >>> pace = Pace(10.0)
    >>> [pace.is_due(waited) for waited in (9.5, 10.5, 11.5, 20.5)]  # in one run
    [False, True, False, True]
    >>> [pace.is_due(waited) for waited in (10.5, 20.5, 30.5, 40.5)]  # in the next one
    [False, False, False, True]
    """

    def __init__(self, first: float = NAME_AFTER) -> None:
        #: Seconds after which the next wait is named.
        self.after = first

    def is_due(self, waited: float) -> bool:
        """Whether a wait is to be named now that it has lasted ``waited`` seconds."""
        is_due = waited >= self.after
        while waited >= self.after:
            self.after *= 2
        return is_due


def seconds_of(text: str | None) -> float:
    """What ``CS_NAME_WAITS`` says: a number of seconds, or ``off``; None or nothing stands for :data:`NAME_AFTER`.

    Raises ValueError for anything else.
    """
    if not text:
        return NAME_AFTER
    if text == "off":
        return _NEVER
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _NEVER:
        raise ValueError(f"CS_NAME_WAITS must be off or a number of seconds, more than 0, not {text!r:.40}")
    return seconds
