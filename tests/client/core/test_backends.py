"""What stands in for a link that sets many values in one request."""

from __future__ import annotations

from typing import Any

import numpy as np

from central_storage.core.backends import Column, assign_each


class Noted:
    """A backend that notes what is set."""

    def __init__(self) -> None:
        self.set: list[tuple[Any, ...]] = []

    def write(self, number: int, op: str, value: np.ndarray, rows: None, site: str) -> None:
        self.set.append((number, op, rows, value.dtype.name, value.shape, value.tolist()))

    def assign_slot(self, optimizer: int, number: int, slot: str, value: np.ndarray) -> None:
        self.set.append((optimizer, number, slot, value.dtype.name, value.shape, value.tolist()))


def test_each_value_of_a_column_is_set_by_itself() -> None:
    noted: Any = Noted()
    values = np.arange(5, dtype=np.float32)
    data = memoryview(values.tobytes())
    assign_each(noted, [(Column(0, "", "float32", [7, 3, 5, 9], [(2,), (), (0, 3), (1, 2)]), data)])
    assign_each(noted, [(Column(4, "m", "int64", [2, 1], [(2,), (0,)]), memoryview(np.array([6, -1]).tobytes()))])
    assert noted.set == [
        (7, "assign", None, "float32", (2,), [0, 1]),
        (3, "assign", None, "float32", (), 2),
        (5, "assign", None, "float32", (0, 3), []),
        (9, "assign", None, "float32", (1, 2), [[3, 4]]),
        (4, 2, "m", "int64", (2,), [6, -1]),
        (4, 1, "m", "int64", (0,), []),
    ]


def test_a_part_of_a_column() -> None:
    column = Column(4, "m", "float64", [7, 3, 5], [(2,), (), (0, 3)])
    assert column.nbytes() == [16, 8, 0]
    part = column.part([2, 0])
    assert (part.numbers, part.shapes, part.nbytes()) == ([5, 7], [(0, 3), (2,)], [0, 16])
    assert (part.optimizer, part.slot, part.dtype, column.numbers) == (4, "m", "float64", [7, 3, 5])
