"""The look for bad numbers in an array: every dtype, the first index in C order, and what is too large to add up."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cs_proto.arithmetic.finite import Bad, are_fine_on_device, copied_fine, first_bad, is_fine, limit_of

REAL = ("float16", "float32", "float64")
PIECE_NBYTES = 1 << 18
ALL = (*REAL, "complex64", "complex128")


def bad_in(values: np.ndarray, replicas: int = 2) -> Bad | None:
    """What a replica finds: at the first glance, which then must not have missed it, or at the second."""
    limit = limit_of(values.dtype, replicas)
    with np.errstate(all="ignore"):
        found, fine = first_bad(values, limit), is_fine(values, limit)
    assert found is None or not fine
    assert are_fine_on_device(np, [(values, limit)]) == (found is None)
    return found


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 70_000, 140_007])
def test_one_bad_number_is_found_wherever_it_lies(dtype: str, bad: float, place: int) -> None:
    values = np.ones((2, 70_004), dtype)
    values.reshape(-1)[place] = bad
    found = bad_in(values)
    assert found is not None
    assert found.place == divmod(place, 70_004)
    assert np.array_equal(np.dtype(dtype).type(found.value), values.reshape(-1)[place], equal_nan=True)


@pytest.mark.parametrize("dtype", ALL)
def test_good_numbers_are_seen_at_the_first_glance(dtype: str) -> None:
    for values in (np.ones(100_000, dtype), np.zeros((0, 3), dtype), np.full((), -2, dtype)):
        assert is_fine(values, limit_of(values.dtype, 2))
        assert bad_in(values) is None


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_number_is_seen_while_it_is_copied_wherever_it_lies(dtype: str, bad: float) -> None:
    count = 2 * PIECE_NBYTES // np.dtype(dtype).itemsize + 5
    for place in (0, 1, (count - 5) // 2 - 1, (count - 5) // 2, count - 6, count - 5, count - 1):
        values, target = np.ones(count, dtype), np.zeros(count, dtype)
        values[place] = bad
        assert not copied_fine(target, values, limit_of(values.dtype, 2))
        assert np.array_equal(target, values, equal_nan=True)


@pytest.mark.parametrize("dtype", ALL)
def test_good_numbers_are_seen_while_they_are_copied(dtype: str) -> None:
    limit = limit_of(np.dtype(dtype), 2)
    for values in (np.full((3, 50_000), -2, dtype), np.zeros((0, 3), dtype), np.full((), 2, dtype)):
        target = np.ones_like(values)
        assert copied_fine(target, values, limit)
        assert np.array_equal(target, values)


@pytest.mark.parametrize("bad", [1.0, math.nan])
def test_arrays_that_lie_otherwise_and_large_ones_are_seen_when_they_are_copied(bad: float) -> None:
    for values in (np.ones((600, 700), np.float32).T, np.ones((900, 700), np.float32)[::2, ::2], np.ones(9 << 20)):
        values[-1] = bad
        target = np.zeros(values.shape, values.dtype)
        assert copied_fine(target, values, limit_of(values.dtype, 2)) == (bad == 1)
        assert np.array_equal(target, values, equal_nan=True)


def test_what_is_left_out_is_only_copied() -> None:
    target, values = np.zeros(9, np.float32), np.full(9, math.nan, np.float32)
    assert copied_fine(target, values, math.inf)
    assert np.isnan(target).all()


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("value", [complex(1, math.nan), complex(math.inf, 0), complex(0, -math.inf)])
def test_both_parts_of_a_complex_number_count(dtype: str, value: complex) -> None:
    values = np.ones(5, dtype)
    values[3] = value
    found = bad_in(values)
    assert found is not None
    assert found.place == (3,)


def test_the_first_in_c_order_is_named_however_the_array_lies() -> None:
    values = np.zeros((3, 4), np.float32)
    values[2, 0], values[1, 3] = math.nan, math.inf
    for array in (values, np.asfortranarray(values), np.zeros((6, 8), np.float32)[::2, ::2]):
        array[...] = values
        assert bad_in(array) == Bad((1, 3), math.inf)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_what_may_overflow_in_the_sum_is_bad(dtype: str) -> None:
    largest = float(np.finfo(dtype).max)
    values = np.ones(9, dtype)
    values[4] = largest / 2
    assert bad_in(values, replicas=2) is None  # twice that is the largest number
    found = bad_in(values, replicas=3)
    assert found is not None
    assert found.place == (4,)
    assert bad_in(np.full(9, largest, dtype), replicas=1) is None


@pytest.mark.parametrize("replicas", [1, 2, 3, 65504])
def test_each_half_is_seen_at_the_first_glance_as_what_it_is(replicas: int) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    limit = limit_of(halves.dtype, replicas)
    are_fine = np.abs(halves.astype(np.float64)) <= limit
    assert is_fine(halves[are_fine], limit)
    bad = halves[~are_fine]
    smallest = bad[np.abs(bad) == np.nanmin(np.abs(bad))]
    assert len(smallest) == 2  # one of either sign
    for half in (*smallest, *bad[::97], *bad[-2:]):
        assert not is_fine(np.array([0, half], np.float16), limit)
        assert first_bad(np.array([0, half], np.float16), limit) is not None


def test_halves_are_weighed_in_single_precision() -> None:
    assert limit_of(np.dtype(np.float16), 2, weight=1e-10) == 65504  # in half precision that would be 0


def test_the_limit_counts_replicas_weights_and_rows_that_are_named_twice() -> None:
    largest, dtype = float(np.finfo(np.float32).max), np.dtype(np.float32)
    assert limit_of(dtype, 4) == largest / 4
    assert limit_of(dtype, 4, weight=0.25) == largest
    assert limit_of(dtype, 4, weight=0.001) == largest  # the number itself must be finite
    assert limit_of(dtype, 2, rows=5) == largest / 10
    assert limit_of(dtype, 2, rows=0) == largest / 2


@pytest.mark.parametrize("weight", [0.0, 1e-300])  # the second is 0 in float32
def test_nothing_is_bad_in_a_gradient_that_is_left_out(weight: float) -> None:
    values = np.full(3, math.nan, np.float32)
    limit = limit_of(values.dtype, 2, weight)
    assert limit == math.inf
    assert is_fine(values, limit)


def test_arrays_of_a_device_are_looked_at_together() -> None:
    fine, bad = np.ones(3, np.float32), np.array([1, math.nan], np.complex64)
    assert are_fine_on_device(np, [])
    assert are_fine_on_device(np, [(fine, 1e30), (fine[:0], 1e30)])
    for order in (1, -1):
        pairs: list[Any] = [(fine, 1e30), (bad, 1e30)][::order]
        assert not are_fine_on_device(np, pairs)
