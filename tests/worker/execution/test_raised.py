"""Whatever the user's code raises becomes an answer."""

from __future__ import annotations

import numpy as np

from cs_runtime.shared_memory.arena import Arena
from cs_worker.execution.outgoing import raised_error


class Untellable(Exception):
    """Raises when asked what it was raised with."""

    @property
    def args(self) -> tuple[object, ...]:  # type: ignore[override]
        raise ValueError("not to be told")


class Terse(ValueError):
    """Does not say what it holds."""

    def __str__(self) -> str:
        return "too much"


def test_an_ordinary_exception(arena: Arena) -> None:
    error = raised_error(KeyError("k"), 2, 5, arena)
    assert (error.exception, error.replica, error.merge_index) == ("KeyError", 2, 5)


def test_one_that_cannot_be_told(arena: Arena) -> None:
    error = raised_error(Untellable(), 1, 0, arena)
    assert (error.exception, error.replica) == ("RuntimeError", 1)
    assert "a Untellable that cannot be described, because its str() raises a ValueError" in error.message


def test_one_with_more_arrays_than_can_travel(arena: Arena) -> None:
    large = np.zeros(129, np.float64)
    error = raised_error(Terse([large] * 30_001), 0, 0, arena)
    assert error.exception == "RuntimeError"
