"""Arrays that a replica brings itself: an element holds a ticket in their place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np

__all__ = ["Ticket"]


class Ticket(ABC):
    """Stands for an array that always has the same values. Its pickle is loaded as that array, where it is loaded."""

    #: Those of the array.
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @abstractmethod
    def __getitem__(self, rows: slice | np.ndarray) -> Self:
        """The ticket of some of the rows: a slice, or an array of their places."""

    @abstractmethod
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The array itself, which is brought to this process."""

    @abstractmethod
    def __reduce__(self) -> tuple[Any, ...]:
        """The function that brings the array, and its arguments."""

    def copy(self) -> Self:
        """The ticket itself: nothing can change it."""
        return self
