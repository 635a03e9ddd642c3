"""What happens between two steps of a script, such as a save: who wants to know, and whether now is such a moment."""

from __future__ import annotations

from collections.abc import Callable
from threading import local
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .backends import Strategy

__all__ = ["after_step", "before_end", "ends", "is_within", "passed", "within"]

#: Called when the script has got the results of a step of this strategy, in the thread that got them.
after_step: list[Callable[[Strategy], object]] = []

#: Called before the values of this strategy go, because it is shut down.
before_end: list[Callable[[Strategy], object]] = []


def passed(strategy: Strategy) -> None:
    """A step of ``strategy`` is over."""
    for each in tuple(after_step):
        each(strategy)


def ends(strategy: Strategy) -> None:
    """``strategy`` is about to be shut down."""
    for each in tuple(before_end):
        each(strategy)


class _Within(local):
    """A ``with`` block, during which the state is not that between two steps, as in a restore. It may be nested."""

    #: How many of these blocks are under way in this thread.
    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


within = _Within()


def is_within() -> bool:
    """Whether this thread is in such a block."""
    return within.depth > 0
