"""The arithmetic of SUM, MEAN and gather over components."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_proto.arithmetic.reduction import gather, mean_dtype, reduce, reduce_axis
from cs_proto.errors import InvalidArgumentError


def f32(*values):
    return [np.asarray(value, np.float32) for value in values]


def same(result, expected, dtype):
    assert isinstance(result, np.ndarray)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, np.asarray(expected, dtype), strict=True)


def test_sum_and_mean_are_element_wise():
    same(reduce("SUM", f32([1, 2], [3, 4])), [4, 6], np.float32)
    same(reduce("MEAN", f32([1, 2], [3, 4])), [2, 3], np.float32)
    same(reduce("MEAN", f32(1, 2, 3, 5)), 2.75, np.float32)
    same(reduce("SUM", f32([], [])), [], np.float32)


def test_components_are_added_in_order():
    large, one = 2.0**24, 1.0
    assert reduce("SUM", f32(large, one, one, -large)) == 0  # each 1 is lost in turn
    assert reduce("SUM", f32(large, -large, one, one)) == 2


def test_result_is_new_and_the_components_are_left_alone():
    components = f32([1, 2], [3, 4])
    result = reduce("SUM", components)
    result[0] = 99
    same(components[0], [1, 2], np.float32)
    alone = reduce("SUM", components[:1])
    assert not np.shares_memory(alone, components[0])


@pytest.mark.parametrize(
    ("dtype", "mean"),
    [
        ("int8", "float32"),
        ("uint16", "float32"),
        ("int32", "float64"),
        ("uint64", "float64"),
        ("float16", "float16"),
        ("float64", "float64"),
        ("complex64", "complex64"),
    ],
)
def test_dtypes(dtype, mean):
    components = [np.array([1, 2], dtype), np.array([3, 5], dtype)]
    assert mean_dtype(np.dtype(dtype)) == mean
    same(reduce("SUM", components), [4, 7], dtype)
    same(reduce("MEAN", components), [2, 3.5], mean)
    same(reduce_axis("SUM", components, 0), 11, dtype)
    same(reduce_axis("MEAN", components, 0), 2.75, mean)


def test_integers_wrap_around():
    same(reduce("SUM", [np.uint8(200), np.uint8(100)]), 44, np.uint8)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_the_mean_of_integers_does_not_wrap_around(dtype):
    for bound in (np.iinfo(dtype).max, np.iinfo(dtype).min):
        same(reduce("MEAN", [np.full(2, bound, dtype)] * 3), [float(bound)] * 2, mean_dtype(np.dtype(dtype)))
        components = [np.full((2, 2), bound, dtype), np.full((2, 3), bound, dtype)]
        same(reduce_axis("MEAN", components, 1), [float(bound)] * 2, mean_dtype(np.dtype(dtype)))


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), min_size=1))
def test_the_sum_below_a_mean_of_integers_is_rounded_once(numbers):
    mean = float(sum(numbers)) / len(numbers)
    same(reduce("MEAN", [np.int64(number) for number in numbers]), mean, np.float64)
    same(reduce_axis("MEAN", np.split(np.array(numbers, np.int64), [1]), 0), mean, np.float64)


def test_float16_mean_of_more_elements_than_float16_can_count():
    same(reduce_axis("MEAN", [np.full(70_000, 0.5, np.float16)], 0), 0.5, np.float16)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize(
    "components",
    [
        f32([1], [1, 2]),
        f32(1, [1, 2]),
        f32([1, 2], []),
        [np.float32(1), np.float64(1)],
        [np.array([True]), np.array([False])],
        [np.array("a"), np.array("b")],
        [],
    ],
    ids=["shape", "rank", "empty", "dtype", "bool", "string", "none"],
)
def test_components_that_do_not_fit(op, components):
    with pytest.raises(InvalidArgumentError):
        reduce(op, components)


def test_unknown_op():
    with pytest.raises(InvalidArgumentError, match="MAX"):
        reduce("MAX", f32(1))


MATRICES = f32([[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12.5]])


@pytest.mark.parametrize(
    ("op", "axis", "expected"),
    [
        ("SUM", 0, [22, 26, 30.5]),
        ("SUM", -1, [30, 48.5]),
        ("SUM", (-2, -1), 78.5),
        ("SUM", (), [[8, 10, 12], [14, 16, 18.5]]),
        ("MEAN", (), [[4, 5, 6], [7, 8, 9.25]]),
        ("MEAN", 0, [5.5, 6.5, 7.625]),
        ("MEAN", (0, -1), np.float32(78.5) / np.float32(12)),
        ("MEAN", np.int64(1), [5, np.float32(48.5) / np.float32(6)]),
    ],
)
def test_axes(op, axis, expected):
    same(reduce_axis(op, MATRICES, axis), expected, np.float32)


def test_mean_weighs_every_element_alike_under_uneven_shares():
    same(reduce_axis("MEAN", f32([1, 2, 3, 4], [5, 6]), 0), 3.5, np.float32)
    same(reduce_axis("MEAN", f32([1, 2, 6], []), 0), 3, np.float32)
    same(reduce_axis("MEAN", f32([[1, 2], [3, 4], [5, 6]], [[7, 9]]), (0, 1)), 4.625, np.float32)


def test_nothing_at_all():
    same(reduce_axis("SUM", f32([], []), 0), 0, np.float32)
    assert np.isnan(reduce_axis("MEAN", f32([], []), 0))


@pytest.mark.parametrize(
    ("components", "axis", "error"),
    [
        (MATRICES, 2, ValueError),
        (MATRICES, -3, ValueError),
        (MATRICES, (0, 0), InvalidArgumentError),
        (MATRICES, (0, -2), InvalidArgumentError),
        (MATRICES, [0, 1], TypeError),
        (MATRICES, 0.5, TypeError),
        (MATRICES, True, TypeError),
        (f32(1, 2), 0, ValueError),
        (f32([[1, 2]] * 3, [[7, 9]]), 1, InvalidArgumentError),
        ([np.ones(2, np.float32), np.ones(2)], 0, InvalidArgumentError),
        ([np.array([True])] * 2, 0, TypeError),
        ([np.array(["a"])] * 2, 0, TypeError),
    ],
)
def test_axes_that_do_not_fit(components, axis, error):
    for op in ("SUM", "MEAN"):
        with pytest.raises(error):
            reduce_axis(op, components, axis)


@given(st.lists(st.lists(st.integers(-1000, 1000), max_size=5), min_size=1, max_size=4))
def test_shares_of_a_batch_reduce_to_what_the_whole_batch_does(shares):
    whole = np.array(list(itertools.chain(*shares)), np.int64)
    components = [np.array(share, np.int64) for share in shares]
    assert reduce_axis("SUM", components, 0) == whole.sum()
    np.testing.assert_array_equal(gather(components, 0), whole)
    if whole.size:
        assert reduce_axis("MEAN", components, 0) == pytest.approx(whole.mean())


def test_gather():
    a, b = np.array([[1, 2, 3]], np.int32), np.array([[4, 5, 6]], np.int32)
    same(gather([a, b], -1), [[1, 2, 3, 4, 5, 6]], np.int32)
    same(gather([a, b], -2), [[1, 2, 3], [4, 5, 6]], np.int32)
    same(gather([a, a[:0], b], 0), [[1, 2, 3], [4, 5, 6]], np.int32)
    same(gather([np.array([True]), np.array([], bool)], 0), [True], bool)
    assert gather([np.array(["a"]), np.array(["b", "ccc"])], 0).tolist() == ["a", "b", "ccc"]


@pytest.mark.parametrize(
    ("components", "axis", "error"),
    [
        (f32([1], [2]), 1, InvalidArgumentError),
        (f32([1], [2]), -2, InvalidArgumentError),
        (f32([1], [2]), (0, 0), InvalidArgumentError),
        (f32([1], [2]), None, ValueError),
        (f32([1], [2]), 0.0, TypeError),
        (f32(1, 2), 0, InvalidArgumentError),
        (f32([1], [[2]]), 0, InvalidArgumentError),
        (f32([[1, 2, 3]], [[4]]), 0, InvalidArgumentError),
        ([np.array([1.0]), np.array([1])], 0, InvalidArgumentError),
        ([], 0, InvalidArgumentError),
    ],
)
def test_gather_of_what_does_not_fit(components, axis, error):
    with pytest.raises(error):
        gather(components, axis)
