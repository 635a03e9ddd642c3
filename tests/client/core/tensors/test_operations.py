"""``constant``, ``identity``, ``reshape``, ``range`` and ``add``: TensorFlow's dtypes, shapes and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import central_storage as cs


@pytest.mark.parametrize(
    ("made", "dtype", "value"),
    [
        (lambda: cs.constant(1.0), "float32", 1.0),
        (lambda: cs.constant([[1], [2]]), "int32", [[1], [2]]),
        (lambda: cs.constant(2**40), "int64", 2**40),
        (lambda: cs.constant([1, 2], dtype=np.float64), "float64", [1.0, 2.0]),
        (lambda: cs.constant(5, shape=(2, 2)), "int32", [[5, 5], [5, 5]]),
        (lambda: cs.constant([1, 2, 3, 4], shape=[2, 2]), "int32", [[1, 2], [3, 4]]),
        (lambda: cs.constant("a"), "<U1", "a"),
        (lambda: cs.identity(cs.constant([[1], [2]])), "int32", [[1], [2]]),
        (lambda: cs.identity(cs.Variable([1.5])), "float32", [1.5]),
        (lambda: cs.range(6), "int32", [0, 1, 2, 3, 4, 5]),
        (lambda: cs.range(1, 2, 0.5), "float32", [1.0, 1.5]),
        (lambda: cs.range(3, 0, -1), "int32", [3, 2, 1]),
        (lambda: cs.range(np.int64(3)), "int64", [0, 1, 2]),
        (lambda: cs.range(3, dtype=np.float32), "float32", [0.0, 1.0, 2.0]),
        (lambda: cs.reshape(cs.range(6), shape=(1, 2, 3)), "int32", [[[0, 1, 2], [3, 4, 5]]]),
        (lambda: cs.reshape([1, 2], -1), "int32", [1, 2]),
        (lambda: cs.add([1.0, 2.0], 1), "float32", [2.0, 3.0]),
        (lambda: cs.add(1, np.float64([1.0])), "float64", [2.0]),
        (lambda: cs.add(1, 2), "int32", 3),
        (lambda: cs.add(cs.Variable([1.0]), cs.constant([[1.0], [2.0]])), "float32", [[2.0], [3.0]]),
    ],
)
def test_values(made: Callable[[], Any], dtype: str, value: Any) -> None:
    tensor = made()
    assert type(tensor) is cs.Tensor
    assert tensor.dtype == np.dtype(dtype)
    assert tensor.tolist() == value


@pytest.mark.parametrize(
    ("made", "kind", "word"),
    [
        (lambda: cs.constant(None), ValueError, "cannot become an array"),
        (lambda: cs.constant(1.5, dtype=np.int32), TypeError, "implicitly"),
        (lambda: cs.constant([1, 2, 3], shape=(2, 2)), ValueError, r"\[3\].*\(2, 2\)"),
        (lambda: cs.reshape([1, 2, 3], (2, -1)), ValueError, r"\[3\]"),
        (lambda: cs.range(0, 5, 0), ValueError, "delta"),
        (lambda: cs.range([1, 2]), ValueError, "one number"),
        (lambda: cs.range(1.5, dtype=np.int32), TypeError, "implicitly"),
        (lambda: cs.add(np.float32([1]), np.float64([1])), ValueError, "one dtype"),
        (lambda: cs.add(np.int32([1]), 1.5), TypeError, "implicitly"),
        (lambda: cs.add([1, 2], [1, 2, 3]), ValueError, "broadcast"),
    ],
)
def test_refusals(made: Callable[[], Any], kind: type[Exception], word: str) -> None:
    with pytest.raises(kind, match=word):
        made()


def test_a_constant_does_not_change_with_its_source() -> None:
    source = np.zeros(2)
    tensors = cs.constant(source), cs.identity(source)
    source += 1
    assert [tensor.tolist() for tensor in tensors] == [[0, 0], [0, 0]]


def test_shapes_may_have_an_unusual_size() -> None:
    assert cs.constant([1.0], shape=(3,)).tolist() == [1, 1, 1]
    assert cs.constant([], shape=(0, 2)).shape == (0, 2)
