"""``cs.Tensor``: an array in every way, with ``numpy()``; what is computed with it is a plain array or number."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from central_storage.core.tensors.tensor import Tensor, as_tensor, tensors_in

VECTOR = as_tensor(np.float32([1, 2, 3]))
NUMBER = as_tensor(np.float32(2.5))


def test_numpy_gives_a_plain_copy_and_a_number_without_axes() -> None:
    copied = VECTOR.numpy()
    assert type(copied) is np.ndarray
    assert copied.flags.writeable
    assert not np.shares_memory(copied, VECTOR)
    assert type(NUMBER.numpy()) is np.float32
    assert type(as_tensor(np.array(["ab"])).numpy()) is np.ndarray


def test_asarray_copies_nothing() -> None:
    plain = np.asarray(VECTOR)
    assert type(plain) is np.ndarray
    assert np.shares_memory(plain, VECTOR)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: 1 + x,
        lambda x: x * x,
        lambda x: np.ones(3, np.float32) - x,
        lambda x: -x,
        lambda x: x > 1,
        lambda x: x @ x,
        np.exp,
        np.sum,
        np.mean,
        lambda x: x.sum(),
        lambda x: x.max(),
        lambda x: np.concatenate([x.ravel(), x.ravel()]),
        lambda x: np.where(x > 1, x, 0),
        lambda x: np.dot(x, np.ones(3, np.float32)),
        lambda x: np.linalg.norm(x),
    ],
)
def test_what_is_computed_is_plain(compute: Callable[[Any], Any]) -> None:
    result = compute(VECTOR)
    assert type(result) is np.ndarray or isinstance(result, np.generic)
    np.testing.assert_array_equal(result, compute(np.asarray(VECTOR)))


@pytest.mark.parametrize("compute", [operator.neg, lambda x: x + 1, lambda x: x * x, np.sqrt, lambda x: x.sum()])
def test_what_is_computed_without_axes_is_a_number(compute: Callable[[Any], Any]) -> None:
    assert type(compute(NUMBER)) is np.float32
    assert float(NUMBER) == 2.5
    assert f"{NUMBER:.2f}" == "2.50"


@pytest.mark.parametrize("view", [lambda x: x[1:], lambda x: x.reshape(3, 1), lambda x: x.T, lambda x: x[None]])
def test_a_view_is_a_tensor(view: Callable[[Any], Any]) -> None:
    assert type(view(VECTOR)) is Tensor
    assert np.shares_memory(view(VECTOR), VECTOR)


def test_in_place_changes_the_tensor_itself() -> None:
    vector = as_tensor(np.zeros(2))
    same = vector
    vector += 1
    assert vector is same
    assert same.tolist() == [1, 1]


@pytest.mark.parametrize("number", [np.float32(2), np.array(2, np.float32)])
@pytest.mark.parametrize(
    ("change", "result"),
    [
        (operator.iadd, 5),
        (operator.isub, -1),
        (operator.imul, 6),
        (operator.itruediv, np.float32(2) / 3),
        (operator.ifloordiv, 0),
        (operator.imod, 2),
        (operator.ipow, 8),
    ],
)
def test_in_place_gives_a_name_another_number(number: Any, change: Callable[[Any, Any], Any], result: float) -> None:
    total = as_tensor(number)
    changed = change(total, 3)
    assert (total, changed) == (2, result)
    assert type(changed) is Tensor
    assert type(changed.numpy()) is np.float32


@pytest.mark.parametrize(
    ("change", "result"),
    [
        (operator.iand, 2),
        (operator.ior, 7),
        (operator.ixor, 5),
        (operator.ilshift, 48),
        (operator.irshift, 0),
    ],
)
def test_in_place_with_bits_does_so_too(change: Callable[[Any, Any], Any], result: int) -> None:
    bits = as_tensor(np.array(6))
    assert (change(bits, 3), bits) == (result, 6)


def test_a_history_of_sums_keeps_each() -> None:
    total, history = as_tensor(np.array(0.0)), []
    for loss in (1, 2, 3):
        total += loss
        history.append(total)
    assert history == [1, 3, 6]


def test_a_number_is_rounded_and_says_why_it_is_no_sequence() -> None:
    assert (round(NUMBER), round(as_tensor(np.float64(2.345)), 1)) == (2, 2.3)
    with pytest.raises(TypeError, match=r"no len\(\); for its number use int\(x\)"):
        np.random.default_rng(as_tensor(np.int32(1)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="__round__"):
        round(VECTOR)  # type: ignore[call-overload]
    assert len(VECTOR) == 3


def test_a_call_does_not_make_one() -> None:
    for arguments in ([[1.0, 2.0]], [(2, 2)], []):
        with pytest.raises(TypeError, match=r"use cs\.constant"):
            Tensor(*arguments)


@pytest.mark.parametrize("tensor", [VECTOR, NUMBER, as_tensor(np.zeros((0, 2))), as_tensor(np.array("text"))])
@pytest.mark.parametrize("through", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy])
def test_it_is_copied_and_pickled_as_a_tensor(tensor: Tensor, through: Callable[[Any], Any]) -> None:
    got = through(tensor)
    assert type(got) is Tensor
    assert (got.dtype, got.shape, got.tolist()) == (tensor.dtype, tensor.shape, tensor.tolist())


def test_a_large_one_is_pickled_out_of_band() -> None:
    buffers: list[pickle.PickleBuffer] = []
    tensor = as_tensor(np.zeros(100_000))
    assert len(pickle.dumps(tensor, 5, buffer_callback=buffers.append)) < 1000
    assert len(buffers) == 1


def test_one_that_cannot_change_is_a_key() -> None:
    number = as_tensor(np.int32(1))
    assert {number: "one"}[1] == "one"  # type: ignore[index]
    assert {1: "one"}[number] == "one"  # type: ignore[index]
    assert ["zero", "one"][number] == "one"
    for other, word in ((VECTOR, "axes"), (as_tensor(np.array(1)), "written")):
        with pytest.raises(TypeError, match=word):
            hash(other)


@pytest.mark.parametrize("through", [lambda value: pickle.loads(pickle.dumps(value)), copy.deepcopy])
def test_a_key_that_is_copied_is_a_key_again(through: Callable[[Any], Any]) -> None:
    (again,) = through({as_tensor(np.int32(1)): "one"})
    assert (type(again), again.dtype, hash(again)) == (Tensor, np.int32, hash(1))


def test_its_text_is_tensorflows() -> None:
    assert repr(NUMBER) == "<cs.Tensor: shape=(), dtype=float32, numpy=2.5>"
    assert repr(as_tensor(np.int32([[1], [2]]))) == (
        "<cs.Tensor: shape=(2, 1), dtype=int32, numpy=\narray([[1],\n       [2]], dtype=int32)>"
    )
    assert repr(as_tensor(np.array("a"))) == "<cs.Tensor: shape=(), dtype=<U1, numpy='a'>"
    assert str(VECTOR) == "[1. 2. 3.]"


def test_only_plain_arrays_become_one() -> None:
    masked, text = np.ma.array([1, 2], mask=[0, 1]), "text"
    nest = {"array": np.zeros(2), "masked": masked, "text": text, "none": None, "tensor": VECTOR}
    got = tensors_in(nest)
    assert type(got["array"]) is Tensor
    assert got["masked"] is masked
    assert got["text"] is text
    assert got["none"] is None
    assert got["tensor"] is VECTOR


def test_it_takes_no_attribute() -> None:
    with pytest.raises(AttributeError):
        as_tensor(np.zeros(1)).name = "x"
