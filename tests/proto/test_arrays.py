"""A descriptor cannot lie: dtype, shape and bytes fit together, or there is no descriptor."""

from __future__ import annotations

import math
import random

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tests.harness.examples import examples
from tests.harness.record_strategies import DTYPES as ANY_DTYPE
from tests.harness.record_strategies import same_bits

from cs_proto.arrays import (
    DTYPES,
    INLINE_NBYTES,
    Array,
    Location,
    array_of,
    dtype_name,
    frame_view,
    is_wire_dtype,
    item_nbytes,
    shape_fault,
    view_of,
)
from cs_proto.codec import decode, encode
from cs_proto.errors import LocalProtocolError, PeerProtocolError
from cs_proto.messages import Value
from cs_proto.records import Frame

NAMES = st.one_of(
    st.sampled_from([*DTYPES, "U1", "S7", "U0", "S0", "U9999999", "U10000000", "object", "O", "float128", "V8", "f4"]),
    st.text(max_size=6),
)
LENGTHS = st.one_of(st.integers(0, 4), st.integers(-2, 1 << 64), st.sampled_from([1 << 31, 1 << 61, 1 << 62, 1 << 63]))


@settings(max_examples=examples(200))
@given(ANY_DTYPE.flatmap(lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, min_side=0, max_side=4))))
def test_every_array_arrives_bit_by_bit(value: np.ndarray) -> None:
    sent = Value(b"", (array_of(value),))
    got = decode([bytes(part) for part in encode(sent)])
    assert isinstance(got, Value)
    view = frame_view(got.arrays[0])
    native = value.astype(value.dtype.newbyteorder("="))
    assert same_bits(view, native)
    assert not view.flags.writeable


@settings(max_examples=examples(200))
@given(NAMES, st.lists(LENGTHS, max_size=4), st.integers(0, 64))
def test_a_header_cannot_lie_about_its_frame(dtype: str, shape: list[int], nbytes: int) -> None:
    try:
        header = msgpack.packb([Value.code, b"", [[Array.code, dtype, shape, {"frame": 0}]]])
        got = decode([header, b"\1" * nbytes])
    except (PeerProtocolError, OverflowError):
        return
    assert isinstance(got, Value)
    view = frame_view(got.arrays[0])
    assert view.nbytes == nbytes == got.arrays[0].nbytes
    assert view.shape == tuple(shape)
    assert view.dtype == np.dtype(dtype)


def fits(name: object, shape: list[int], nbytes: int) -> bool:
    """Whether so many bytes are an array of this dtype and shape, by NumPy's word and whole numbers alone."""
    if name not in [*DTYPES, "U3", "S2"] or min(shape, default=0) < 0:
        return False
    if np.dtype(name).itemsize * math.prod(length or 1 for length in shape) >= 1 << 62:  # too large, even if empty
        return False
    return nbytes == np.dtype(name).itemsize * math.prod(shape)


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_of_random_headers_only_those_are_accepted_that_say_what_is_there(count: int) -> None:
    chance, accepted = random.Random(count), 0
    names = [*DTYPES, "U3", "S2", "object", "O", "float128", "V8", "f4", "", "<i4", "U-1", None, 7]
    for _ in range(count):
        name = chance.choice(names)
        shape = [chance.choice([0, 1, 2, 3, 5, -1, 1 << 31, 1 << 32, 1 << 63]) for _ in range(chance.randrange(4))]
        if chance.random() < 0.5:
            shape = [length if 0 <= length < 9 else 4 for length in shape]
        size = np.dtype(name).itemsize * math.prod(shape) if name in names[: len(DTYPES) + 2] else 0
        nbytes = size if 0 <= size < 4096 and chance.random() < 0.8 else chance.randrange(64)
        try:
            got = decode([msgpack.packb([Value.code, b"", [[Array.code, name, shape, {"frame": 0}]]]), bytes(nbytes)])
        except (PeerProtocolError, OverflowError):
            assert not fits(name, shape, nbytes), (name, shape, nbytes)
        else:
            assert fits(name, shape, nbytes), (name, shape, nbytes)
            assert isinstance(got, Value)
            assert frame_view(got.arrays[0]).shape == tuple(shape)
            accepted += 1
    assert count // 20 < accepted < count // 2


@pytest.mark.parametrize("name", [*DTYPES, "U1", "U12", "S1", "S4096"])
def test_names_of_dtypes(name: str) -> None:
    assert is_wire_dtype(name)
    assert dtype_name(np.dtype(name)) == name
    assert item_nbytes(name) == np.dtype(name).itemsize


@pytest.mark.parametrize(
    "name",
    ["", "U", "U0", "S01", "U-1", "U10000000", "object", "V4", "float", "f4", "Float32", "float32 "],
)
def test_dtypes_that_may_not_travel(name: str) -> None:
    assert not is_wire_dtype(name)
    with pytest.raises(LocalProtocolError, match="cannot be sent; these can: bool, int8"):
        Array(name, (), Frame(b""))


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.zeros(2, [("a", "f4")]),
        np.zeros(2, np.longdouble),
        np.zeros(2, "V3"),
    ],
)
def test_arrays_that_may_not_travel(value: np.ndarray) -> None:
    with pytest.raises(LocalProtocolError, match="cannot be sent"):
        array_of(value)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((-1,), "is not a shape"),
        ((1,) * 33, "is not a shape"),
        ((1 << 62,), "is too large"),
        ((1 << 31, 1 << 31), "is too large"),
        ((0, 1 << 62), "is too large"),
        ((1 << 60,), "is too large"),
    ],
)
def test_shapes_that_are_none(shape: tuple[int, ...], said: str) -> None:
    assert said in shape_fault("float32", shape)
    with pytest.raises(LocalProtocolError, match=f"{said}|shape must be a tuple of int from 0"):
        Array("float32", shape, Location("arena/0", 0))


@settings(max_examples=examples(200))
@given(st.sampled_from([*DTYPES, "U3", "S5"]), st.lists(LENGTHS, max_size=3).map(tuple))
def test_every_shape_without_fault_is_one_of_numpys(dtype: str, shape: tuple[int, ...]) -> None:
    if not shape_fault(dtype, shape) and 0 in shape:
        assert view_of(Array(dtype, shape, Location("a", 0)), b"").shape == shape


@pytest.mark.parametrize("segment", ["", "/x", "A", "a b", "a/../b", "..", "a" * 101, "a\n", "ä"])
def test_names_that_no_segment_has(segment: str) -> None:
    with pytest.raises(LocalProtocolError, match="is not a segment name"):
        Location(segment, 0)


@pytest.mark.parametrize("offset", [-1, 1 << 62])
def test_offsets_out_of_range(offset: int) -> None:
    with pytest.raises(LocalProtocolError, match="offset must be int from 0 to"):
        Location("a", offset)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(12.0).reshape(3, 4).T,
        np.arange(12)[::-2],
        np.arange(4, dtype=">i4"),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.broadcast_to(np.float32(2), (2, 3)),
        np.float64(3.5).reshape(()),
        np.zeros((0, 3), np.int8),
        np.array(["a", "bcd"]),
        np.array([[True, False]]),
    ],
    ids=str,
)
def test_layouts(value: np.ndarray) -> None:
    array = array_of(value)
    view = frame_view(array)
    assert array.shape == view.shape == value.shape
    assert array.nbytes == value.nbytes
    np.testing.assert_array_equal(view, value)


def test_a_contiguous_array_is_not_copied() -> None:
    value = np.arange(6, dtype=np.int64).reshape(2, 3)
    view = frame_view(array_of(value))
    value[1, 2] = 99
    assert view[1, 2] == 99


def test_a_view_needs_enough_bytes_and_takes_no_more() -> None:
    array = Array("int16", (2, 2), Location("a", 0))
    assert view_of(array, np.arange(9, dtype=np.int16).data.cast("B")).tolist() == [[0, 1], [2, 3]]
    with pytest.raises(LocalProtocolError, match="does not fit into 7 bytes"):
        view_of(array, b"1234567")


def test_only_a_frame_can_be_viewed_without_a_segment() -> None:
    with pytest.raises(LocalProtocolError, match="did not travel in a frame"):
        frame_view(Array("int16", (2,), Location("a", 0)))


def test_what_travels_in_a_frame_is_smaller_than_any_limit() -> None:
    assert math.log2(INLINE_NBYTES) == 16
