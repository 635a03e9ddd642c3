"""Arrays on several devices of one replica, over two pretended memories."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import central_storage as cs
from central_storage.core.devices import logical_devices

DEVICES = ["home", "far", "farther", "farthest"]


class There(np.ndarray):
    """An array in the memory of the device ``on``."""

    on: str


def place(array: Any, device: str) -> Any:
    there = np.array(array).view(There)
    there.on = device
    return there


@given(
    parts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    sizes=st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_pieces_are_on_their_devices_and_the_whole_is_unchanged(parts: list[int], sizes: list[int]) -> None:
    shape = tuple(part * size for part, size in zip(parts, sizes, strict=False))
    devices = [f"device {k}" for k in range(math.prod(parts))]
    tensor = np.arange(math.prod(shape)).reshape(shape)
    split = logical_devices.split(tensor, parts, devices, place)
    assert (split.shape, split.dtype, split.ndim, split.size) == (shape, tensor.dtype, len(shape), tensor.size)
    assert [piece.device for piece in split.pieces] == devices
    assert [piece.value.on for piece in split.pieces] == devices
    for piece in split.pieces:
        np.testing.assert_array_equal(tensor[piece.where], piece.value)
    assert len({piece.value.shape for piece in split.pieces}) == 1
    assert sum(piece.value.size for piece in split.pieces) == tensor.size
    whole = split.read()
    assert whole.on == devices[0]
    np.testing.assert_array_equal(whole, tensor)


def test_the_order_of_pieces_is_row_major() -> None:
    split = logical_devices.split([[1, 2], [3, 4]], [2, 2], DEVICES, place)
    assert [piece.value.tolist() for piece in split.pieces] == [[[1]], [[2]], [[3]], [[4]]]


@pytest.mark.parametrize(
    ("partition", "words"),
    [
        ([4], "each of 2 axes"),
        ([1, 2, 2], "each of 2 axes"),
        ([[2], [2]], "each of 2 axes"),
        ([2, 2.0], "each of 2 axes"),
        ([4, 0], "each of 2 axes"),
        ([-2, -2], "each of 2 axes"),
        (4, "each of 2 axes"),
        ([2, 1], "make 2 pieces, but a replica has 4 devices"),
        ([1, 4], "axis 1 of length 6 cannot be cut into 4"),
    ],
)
def test_a_partition_that_does_not_fit(partition: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        logical_devices.split(np.zeros((4, 6)), partition, DEVICES, place)


def test_one_device() -> None:
    assigned = logical_devices.assign(np.arange(3), 2, DEVICES, place)
    (piece,) = assigned.pieces
    assert (piece.device, piece.value.on) == ("farther", "farther")
    assert assigned.read().on == "home"
    again = logical_devices.assign(assigned, np.int64(0), DEVICES, place)
    assert again.pieces[0].device == "home"


@pytest.mark.parametrize("number", [-1, 4, 1.0, "0", None, True])
def test_a_device_that_the_replica_does_not_own(number: Any) -> None:
    with pytest.raises(ValueError, match="0 to 3"):
        logical_devices.assign(np.arange(3), number, DEVICES, place)


def test_every_device() -> None:
    replicated = logical_devices.replicate(np.arange(3), DEVICES, place)
    assert [(piece.device, piece.value.tolist()) for piece in replicated.pieces] == [(d, [0, 1, 2]) for d in DEVICES]


def test_it_acts_as_the_array() -> None:
    split = logical_devices.split(np.arange(8).reshape(2, 4), [2, 2], DEVICES, place)
    np.testing.assert_array_equal(split + 1, np.arange(1, 9).reshape(2, 4))
    np.testing.assert_array_equal(np.ones(2, int) @ split, [4, 6, 8, 10])
    np.testing.assert_array_equal(split[1], [4, 5, 6, 7])
    np.testing.assert_array_equal(np.asarray(split, np.float32), np.arange(8, dtype=np.float32).reshape(2, 4))
    assert len(split) == 2
    assert cs.convert_to_tensor(split).shape == (2, 4)
    assert "far" in repr(split)
    with pytest.raises(TypeError, match="without axes"):
        len(logical_devices.replicate(1.0, DEVICES, place))
