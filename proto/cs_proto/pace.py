"""How often a wait is named: once, and then at growing intervals."""

from __future__ import annotations

__all__ = ["NAME_AFTER", "is_due", "seconds_of"]

#: Seconds after which a wait is named, unless ``CS_NAME_WAITS`` says otherwise.
NAME_AFTER = 10.0
# Eleven days.
_NEVER = 1e6


def is_due(first: float, before: float, waited: float) -> bool:
    """Whether a wait of ``waited`` seconds is to be named, which was looked at after ``before`` seconds: it is named
    after ``first`` seconds, and whenever it has lasted twice as long as when it was named.

    >>> [is_due(10.0, waited - 1.0, waited) for waited in (9.5, 10.5, 11.5, 20.5, 30.5, 40.5)]
    [False, True, False, True, False, True]
    """
    if waited < first:
        return False
    due = first
    while 2 * due <= waited:
        due *= 2
    return before < due


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
