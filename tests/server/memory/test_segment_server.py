"""Bytes for who cannot map: a Carried segment over the server's answers is what a Mapping over the memory is."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples

from cs_proto.arrays import Array, Location, array_of, bytes_array, frame_view
from cs_proto.codec import BULK_LIMITS, LIMITS, decode, encode
from cs_proto.errors import (
    ContextError,
    InvalidArgumentError,
    LocalProtocolError,
    MemoryPlanError,
    PeerProtocolError,
    ShutdownError,
    replica_exception_class,
)
from cs_proto.messages import Done, Fetch, Fetched, Put, Refused
from cs_proto.records import Record
from cs_runtime.shared_memory import remote_segment
from cs_runtime.shared_memory.mapping import Mapping
from cs_runtime.shared_memory.remote_segment import RemoteSegment, aligned
from cs_server.memory.segment_server import carry

NBYTES = 16 * mmap.PAGESIZE
WRITERS = {"arena/0": "w0", "parameters/float32": "", "arena/controller": "controller"}


class Segments:
    """Three segments of the server's."""

    def __init__(self) -> None:
        self.mappings = {name: _mapping(name) for name in WRITERS}

    def get(self, name: str) -> Mapping:
        if name not in self.mappings:
            raise InvalidArgumentError(f"there is no segment {name}")
        return self.mappings[name]

    def view(self, array: Array) -> np.ndarray:
        return self.get(array.place.segment).view(array) if isinstance(array.place, Location) else frame_view(array)

    def writer(self, name: str) -> str:
        return WRITERS.get(name, "")


def _mapping(name: str) -> Mapping:
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, NBYTES)
    return Mapping(name, descriptor, NBYTES, writable=True)


class Server:
    """What asks, over the wire, on behalf of ``who``."""

    def __init__(self, who: str) -> None:
        self.segments = Segments()
        self.asked: list[Record] = []
        self._who = who

    def __call__(self, request: Callable[[int], Record], answer: type[Any]) -> Any:
        sent = decode([bytes(part) for part in encode(request(len(self.asked) + 1))], LIMITS)
        self.asked.append(sent)
        assert isinstance(sent, Fetch | Put)
        reply = carry(sent, lambda: self._who, self.segments)
        reply = decode([bytes(part) for part in encode(reply, BULK_LIMITS)], BULK_LIMITS)
        if isinstance(reply, Refused):
            assert reply.number == len(self.asked)
            raise replica_exception_class(reply.error.exception)(reply.error.message)
        assert isinstance(reply, answer)
        assert getattr(reply, "request", getattr(reply, "sequence", None)) == len(self.asked)
        return reply


DTYPES = st.sampled_from(["float32", "float64", "int8", "complex64", "bool", "U3", "S5"])
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@settings(max_examples=examples(60))
@given(DTYPES, SHAPES, st.integers(0, 50), st.integers(1, 64), st.randoms(use_true_random=False))
def test_carried_bytes_are_those_of_the_memory(
    dtype: str, shape: tuple[int, ...], offset: int, at_once: int, random: Any
) -> None:
    server = Server("w0")
    array = Array(dtype, shape, Location("arena/0", 64 * offset))
    value = np.array([random.randrange(2) for _ in range(int(np.prod(shape)))]).astype(dtype).reshape(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_segment, "_AT_ONCE", at_once)
        segment = RemoteSegment("arena/0", NBYTES, server)
        segment.write(array, value)
        assert np.array_equal(server.segments.view(array), value)
        seen = segment.view(array)
        assert seen.dtype == value.dtype
        assert np.array_equal(seen, value)
        assert not seen.flags.writeable
        assert seen.ctypes.data % 64 == 0 or not seen.size
        assert all(len(encode(record)[-1]) <= max(at_once, 64) for record in server.asked if isinstance(record, Put))


@settings(max_examples=examples(60))
@given(st.integers(1, 9), SHAPES, st.lists(st.integers(0, 8)), st.integers(1, 64))
def test_rows_are_those_of_the_memory(height: int, rest: tuple[int, ...], rows: list[int], at_once: int) -> None:
    server = Server("w0")
    array = Array("float32", (height, *rest), Location("parameters/float32", 128))
    table = server.segments.view(array)
    table[...] = np.arange(table.size).reshape(table.shape)
    named = np.array([row % height for row in rows], np.int64)
    shaped = named.reshape(2, -1) if len(named) % 2 == 0 else named
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_segment, "_AT_ONCE", at_once)
        seen = RemoteSegment("parameters/float32", NBYTES, server).rows(array, shaped)
    assert np.array_equal(seen, server.segments.get("parameters/float32").rows(array, shaped))


def test_a_row_that_is_named_again_is_fetched_once() -> None:
    server = Server("w0")
    array = Array("float32", (8, 2), Location("parameters/float32", 128))
    server.segments.view(array)[...] = np.arange(16).reshape(8, 2)
    seen = RemoteSegment("parameters/float32", NBYTES, server).rows(array, np.array([5, 1, 5, 5, 1]))
    assert seen.tolist() == [[10, 11], [2, 3], [10, 11], [10, 11], [2, 3]]
    assert seen.ctypes.data % 64 == 0
    [fetch] = server.asked
    assert isinstance(fetch, Fetch)
    assert fetch.rows is not None
    assert frame_view(fetch.rows).tolist() == [1, 5]


def test_a_copy_is_current_when_it_is_asked_for() -> None:
    server = Server("w1")
    array = Array("float32", (4,), Location("parameters/float32", 0))
    segment = RemoteSegment("parameters/float32", NBYTES, server)
    before = segment.view(array)
    server.segments.view(array)[...] = 1
    assert before.tolist() == [0, 0, 0, 0]
    assert segment.view(array).tolist() == [1, 1, 1, 1]


def test_what_is_discarded_is_zero() -> None:
    server = Server("w0")
    array = Array("uint8", (NBYTES,), Location("arena/0", 0))
    segment = RemoteSegment("arena/0", NBYTES, server)
    segment.take(0, NBYTES, "a value")
    segment.write(array, np.ones(NBYTES, np.uint8))
    segment.discard(mmap.PAGESIZE, NBYTES)
    assert segment.view(array).tolist() == [1] * mmap.PAGESIZE + [0] * (NBYTES - mmap.PAGESIZE)


@pytest.mark.parametrize("segment", ["parameters/float32", "arena/controller", "control"])
def test_nobody_writes_what_another_owns(segment: str) -> None:
    server = Server("w0")
    array = Array("uint8", (4,), Location(segment, 0))
    for put in (lambda n: Put(n, array, bytes_array(b"1234")), lambda n: Put(n, array, None)):
        with pytest.raises(ContextError, match=f"w0 may not write segment {segment}"):
            server(put, Done)
    assert not server.segments.get("parameters/float32").elements("uint8").any()


@pytest.mark.parametrize(
    ("array", "rows", "error", "said"),
    [
        (Array("float32", (3,), Location("nowhere", 0)), None, InvalidArgumentError, "no segment nowhere"),
        (Array("float32", (3,), Location("arena/0", NBYTES)), None, LocalProtocolError, "ends at byte"),
        (
            Array("int8", (3, 2), Location("arena/0", 0)),
            [0, 3],
            InvalidArgumentError,
            "rows 0 to 3 were asked for, but the array has 3",
        ),
        (
            Array("int8", (3, 2), Location("arena/0", 0)),
            [-1],
            InvalidArgumentError,
            "rows -1 to -1 were asked for, but the array has 3",
        ),
        (Array("int8", (1, 9000), Location("arena/0", 0)), [0] * 8000, InvalidArgumentError, "at most 67108864"),
    ],
)
def test_what_cannot_be_fetched_is_said(
    array: Array, rows: list[int] | None, error: type[Exception], said: str
) -> None:
    named = None if rows is None else array_of(np.array(rows, np.int64))
    with pytest.raises(error, match=said):
        Server("w0")(lambda n: Fetch(n, array, named), Fetched)


def test_who_may_not_ask_is_refused() -> None:
    def stranger() -> str:
        raise PeerProtocolError("who is that?")

    array = Array("uint8", (4,), Location("arena/0", 0))
    for request in (Fetch(7, array, None), Put(7, array, bytes_array(b"1234")), Put(7, array, None)):
        reply = carry(request, stranger, Segments())
        assert isinstance(reply, Refused)
        assert (reply.number, reply.error.message) == (7, "who is that?")


def test_no_room_is_an_error_of_the_plan() -> None:
    class Full(Mapping):
        def reserve(self, start: int, stop: int) -> None:
            raise MemoryPlanError(f"{stop - start} bytes planned")

    server = Server("w0")
    descriptor = os.memfd_create("full")
    os.ftruncate(descriptor, NBYTES)
    server.segments.mappings["arena/0"] = Full("arena/0", descriptor, NBYTES, writable=True)
    with pytest.raises(MemoryPlanError, match="32 bytes planned"):
        RemoteSegment("arena/0", NBYTES, server).write(Array("float32", (8,), Location("arena/0", 0)), np.ones(8))
    assert not server.segments.get("arena/0").elements("uint8").any()


def test_the_end_of_the_service_is_not_the_peers_fault() -> None:
    class Gone(Segments):
        def get(self, name: str) -> Mapping:
            raise ShutdownError("the supervisor is gone")

    with pytest.raises(ShutdownError):
        carry(Fetch(1, Array("uint8", (4,), Location("arena/0", 0)), None), lambda: "w0", Gone())


@pytest.mark.parametrize("place", [Location("arena/1", 0), array_of(np.ones(4)).place])
def test_an_array_that_lies_elsewhere_is_a_defect(place: Any) -> None:
    segment = RemoteSegment("arena/0", NBYTES, Server("w0"))
    for use in (segment.view, lambda array: segment.write(array, np.ones(4))):
        with pytest.raises(LocalProtocolError, match="does not lie in segment arena/0"):
            use(Array("float64", (4,), place))


def test_aligned_arrays_begin_like_those_in_segments() -> None:
    for shape in ((), (3,), (5, 7), (0, 2)):
        assert aligned("complex128", shape).shape == shape
        assert aligned("complex128", (*shape, 1)).ctypes.data % 64 == 0 or 0 in shape


@pytest.mark.parametrize("kind", [MemoryError, ValueError, OSError])
def test_whatever_goes_wrong_is_said_to_who_asked(kind: type[Exception]) -> None:
    class Broken(Segments):
        def view(self, array: Array) -> np.ndarray:
            raise kind("no")

    for request in (
        Fetch(3, Array("uint8", (8,), Location("arena/0", 0)), None),
        Put(3, Array("uint8", (8,), Location("arena/0", 0)), bytes_array(bytes(8))),
    ):
        answer = carry(request, lambda: "w0", Broken())
        assert isinstance(answer, Refused)
        assert (answer.number, answer.error.exception, answer.error.message) == (3, kind.__name__, "no")
