"""What writes mean, against a loop over rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_proto.messages import WriteOp
from cs_proto.scatter import write

SCATTERS = st.sampled_from(["scatter_add", "scatter_sub", "scatter_update"])


@given(op=SCATTERS, rows=st.integers(1, 5), indices=st.lists(st.integers(-2, 6), max_size=12), width=st.integers(0, 3))
def test_a_scatter_is_a_loop_over_rows(op: WriteOp, rows: int, indices: list[int], width: int) -> None:
    random = np.random.default_rng(len(indices))
    target = random.normal(size=(rows, width)).astype(np.float32)
    values = random.normal(size=(len(indices), width)).astype(np.float32)
    expected = target.copy()
    for index, value in zip(indices, values, strict=True):
        if 0 <= index < rows:  # others are left out
            if op == "scatter_update":
                expected[index] = value
            else:
                expected[index] += value if op == "scatter_add" else -value
    write(target, op, values, np.array(indices, np.int64))
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize(("op", "expected"), [("assign", [5, 5]), ("assign_add", [6, 7]), ("assign_sub", [252, 253])])
def test_a_whole_variable_is_written_in_place_and_integers_wrap_around(op: WriteOp, expected: list[int]) -> None:
    target = np.array([1, 2], np.uint8)
    write(target, op, np.array([5, 5], np.uint8))
    assert target.tolist() == expected


def test_rows_of_bools_can_be_set() -> None:
    target = np.zeros(3, bool)
    write(target, "scatter_update", np.array([True, True]), np.array([0, 2]))
    assert target.tolist() == [True, False, True]


def test_overflow_is_the_trainings_own_affair() -> None:
    target = np.full(1, 3e38, np.float32)
    write(target, "scatter_add", np.full(1, 3e38, np.float32), np.array([0]))
    assert np.isinf(target[0])
