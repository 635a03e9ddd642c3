"""What happens between two steps of a script, such as a save: who wants to know, and whether now is such a moment."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backends import Strategy

__all__ = ["after_step", "before_end", "ends", "is_within", "passed", "within"]

#: Called when the script has got the results of a step of this strategy, in the thread that got them.
after_step: list[Callable[[Strategy], object]] = []

#: Called before the values of this strategy go, because it is shut down.
before_end: list[Callable[[Strategy], object]] = []

# By thread, how many blocks of :data:`within` are under way.
_within: dict[int, int] = {}


def passed(strategy: Strategy) -> None:
    """A step of ``strategy`` is over."""
    for each in tuple(after_step):
        each(strategy)


def ends(strategy: Strategy) -> None:
    """``strategy`` is about to be shut down."""
    for each in tuple(before_end):
        each(strategy)


class _Within:
    """A ``with`` block, during which the state is not that between two steps, as in a restore. It may be nested."""

    def __enter__(self) -> None:
        thread = get_ident()
        _within[thread] = _within.get(thread, 0) + 1

    def __exit__(self, *error: object) -> None:
        thread = get_ident()
        left = _within[thread] - 1
        if left:
            _within[thread] = left
        else:
            del _within[thread]


within = _Within()


def is_within() -> bool:
    """Whether this thread is in such a block."""
    return get_ident() in _within
