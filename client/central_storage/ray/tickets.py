"""The batches of a data set of a ``CentralStorageTrainer`` by reference: the script has the numbers of their rows, and
the replicas bring the rows.

Workers import this module, so it imports no Ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np

from central_storage.core.tensors.tensor import as_tensor
from central_storage.data.tickets import Ticket
from cs_proto.printable import counted

from .row_client import rows

__all__ = ["Column", "Tickets"]


class Tickets:
    """The global batches of a data set: each is a dict with a ticket for each column. They can be iterated again and
    again, and are the same ones each time."""

    def __init__(
        self,
        name: str,
        count: int,
        first: Mapping[str, np.ndarray],
        batch_size: int,
        drop_remainder: bool,
        block_timeout: float,
    ) -> None:
        """``count`` is the number of rows. ``first`` is the first one, and has the shapes and dtypes of all."""
        self._name, self._first, self._size, self._timeout = name, first, batch_size, block_timeout
        self._count = count - count % batch_size if drop_remainder else count
        self._firsts = range(0, self._count, batch_size)

    def __len__(self) -> int:
        """The number of batches."""
        return len(self._firsts)

    def __iter__(self) -> Iterator[dict[str, Column]]:
        """From the first row on."""
        for first in self._firsts:
            wanted = _Rows(self._name, range(first, min(first + self._size, self._count)), self._timeout)
            yield {name: Column(wanted, name, one.dtype, one.shape[1:]) for name, one in self._first.items()}


class Column(Ticket):
    """The ticket of a column of some rows. ``np.asarray`` brings the column to the script."""

    def __init__(self, wanted: _Rows, name: str, dtype: np.dtype[Any], of_row: tuple[int, ...]) -> None:
        """``of_row`` is the shape of the column in one row."""
        self.shape, self.dtype = (len(wanted.numbers), *of_row), dtype
        self._wanted, self._name = wanted, name

    def __getitem__(self, rows: slice | np.ndarray) -> Self:
        return type(self)(self._wanted.part(rows), self._name, self.dtype, self.shape[1:])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self._wanted.column(self._name)
        return np.array(found, dtype) if copy else np.asarray(found, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        return _brought, (self._wanted, self._name)

    def __repr__(self) -> str:
        return f"<{self._wanted}, column {self._name!r}: shape={self.shape}, dtype={self.dtype}>"


class _Rows:
    """Some rows of a data set. The columns of a batch share one, so that a replica asks once for all of them."""

    def __init__(self, name: str, numbers: range | np.ndarray, block_timeout: float) -> None:
        self.numbers = numbers
        self._name, self._timeout = name, block_timeout
        self._parts: dict[object, _Rows] = {}
        self._found: dict[str, np.ndarray] | None = None

    def part(self, share: slice | np.ndarray) -> _Rows:
        key = (share.start, share.stop, share.step) if isinstance(share, slice) else share.tobytes()
        if key not in self._parts:
            numbers = self.numbers[share] if isinstance(share, slice) else self._array()[share]
            self._parts[key] = _Rows(self._name, numbers, self._timeout)
        return self._parts[key]

    def column(self, name: str) -> np.ndarray:
        if self._found is None:
            self._found = rows(self._array(), self._name, block_timeout=self._timeout)
        return self._found[name]

    def _array(self) -> np.ndarray:
        numbers = self.numbers
        return np.arange(numbers.start, numbers.stop, numbers.step) if isinstance(numbers, range) else numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return _Rows, (self._name, self.numbers, self._timeout)

    def __str__(self) -> str:
        return f"{counted(len(self.numbers), 'row')} of {self._name!r}"


def _brought(wanted: _Rows, name: str) -> Any:
    """What a replica gets for a column."""
    return as_tensor(wanted.column(name))
