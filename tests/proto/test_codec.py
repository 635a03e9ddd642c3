"""Whatever bytes arrive: a record within the limits, or one PeerProtocolError, and never much memory."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Sequence

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples
from tests.harness.record_strategies import any_record

from cs_proto.arrays import Array, array_of, bytes_array
from cs_proto.codec import BULK_LIMITS, LIMITS, Limits, answered, decode, encode, encode_values
from cs_proto.errors import LocalProtocolError, PeerProtocolError
from cs_proto.messages import (
    PROTOCOL,
    Ask,
    Assign,
    Cancel,
    Configure,
    Get,
    Goodbye,
    Got,
    Introduce,
    Output,
    ReducePoint,
    Run,
    Shutdown,
    Statistics,
    Value,
)
from cs_proto.records import RECORDS, Buffer, Frame, Record

ARRAY = array_of(np.arange(6, dtype=np.float32).reshape(2, 3))
ASK = Ask((5,), 0, 1, (), ReducePoint(0, "train.py:12", "SUM", (ARRAY, ARRAY)))
FUZZ = settings(max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow])


def wire(value: object, *frames: bytes) -> list[Buffer]:
    """A message whose header is any msgpack value."""
    return [msgpack.packb(value), *frames]


def record_or_refusal(parts: Sequence[Buffer], limits: Limits = LIMITS) -> Record | None:
    """What a receiver gets; any exception but PeerProtocolError fails the test."""
    try:
        return decode(parts, limits)
    except PeerProtocolError:
        return None


@FUZZ
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_bytes(parts: list[bytes]) -> None:
    record_or_refusal(parts)


_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.sampled_from(sorted(RECORDS)),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    st.binary(max_size=5),
    st.just({"frame": 0}),
)
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=8), st.dictionaries(st.text("frame", max_size=5), inner, max_size=2)
    ),
    max_leaves=20,
)


@FUZZ
@given(_TREES, st.lists(st.binary(max_size=8), max_size=2))
def test_random_msgpack(value: object, frames: list[bytes]) -> None:
    record_or_refusal(wire(value, *frames))


@FUZZ
@given(st.sampled_from(sorted(RECORDS)), st.lists(_LEAVES, max_size=9), st.lists(st.binary(max_size=8), max_size=2))
def test_random_fields_behind_a_true_code(code: int, values: list[object], frames: list[bytes]) -> None:
    kind = RECORDS[code]
    values = (values * 9)[: len(dataclasses.fields(kind))] if values else values
    record_or_refusal(wire([code, *values], *frames))


@st.composite
def damaged_messages(draw: st.DrawFn) -> list[bytes]:
    """The parts of a valid message with up to three things done to them."""
    parts = [bytes(part) for part in encode(draw(any_record()))]
    for _ in range(draw(st.integers(1, 3))):
        index = draw(st.integers(0, len(parts)))
        part = bytearray(parts[index]) if index < len(parts) else bytearray()
        damage = draw(st.sampled_from(["flip", "truncate", "grow", "insert", "drop", "repeat", "turn"]))
        if damage == "flip" and part:
            part[draw(st.integers(0, len(part) - 1))] ^= draw(st.integers(1, 255))
        elif damage == "truncate":
            del part[draw(st.integers(0, len(part))) :]
        elif damage == "grow":
            at = draw(st.integers(0, len(part)))
            part[at:at] = draw(st.binary(min_size=1, max_size=9))
        if damage == "insert":
            parts.insert(index, draw(st.binary(max_size=9)))
        elif damage == "repeat":
            parts.append(bytes(part))
        elif damage == "turn":
            parts.reverse()
        else:
            parts[index : index + 1] = [] if damage == "drop" else [bytes(part)]
    return parts


@FUZZ
@given(damaged_messages())
def test_damaged_messages(parts: list[bytes]) -> None:
    got = record_or_refusal(parts)
    if got is not None:  # the damage made another valid message: one in every respect
        again = [bytes(part) for part in encode(got)]
        assert again[1:] == parts[1:]
        assert [bytes(part) for part in encode(decode(again))] == again


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([], "the message is empty"),
        ([b""], "not one msgpack value"),
        ([b"\xc1"], "not one msgpack value"),
        (wire(Statistics.code), "a record is a list that begins with its code"),
        (wire([]), "a record is a list that begins with its code"),
        (wire({"code": 35}), "a record is a list that begins with its code"),
        (wire([True, 1]), "a record is a list that begins with its code"),
        (wire(["Statistics", 1]), "a record is a list that begins with its code"),
        (wire([35.0, 1]), "a record is a list that begins with its code"),
        (wire([0, 1]), "no record with code 0"),
        (wire([255, 1]), "no record with code 255"),
        (wire([1 << 63, 1]), "no record with code"),
        (wire([35]), "Statistics has 1 fields, not 0"),
        (wire([35, 1, 2]), "Statistics has 1 fields, not 2"),
        (wire([35, "1"]), "Statistics.request must be int"),
        (wire([35, None]), "Statistics.request must be int from 0 to .*, not None"),
        (wire([36, 5, 0]), "Cancel.run must be a tuple of int"),
        (wire([36, [1.0], 0]), "Cancel.run must be a tuple of int"),
        (
            wire([32, "c", 1, 0, "SGD", [["m"]], None, -1, None, []]),
            "Configure.hyperparameters must be a tuple of a tuple",
        ),
        (wire([60, [5], 0, 1, [], [35, 1], 0, "", False, [], "", 0]), "a Statistics does not belong here"),
        (
            wire([60, [5], 0, 1, [[53, 0, "", "SUM", []]], [56, 0, ""], 0, "", False, [], "", 0]),
            "a ReducePoint does not belong here",
        ),
        (
            wire([60, [5], 0, 1, [None], [56, 0, ""], 0, "", False, [], "", 0]),
            "Ask.notes must be a tuple of ApplyPoint or AssignPoint",
        ),
        (wire([60, [5], 0, 1, [], None, 0, "", False, [], "", 0]), "Ask.point must be"),
        (wire([3, b"", [[35, 1]]]), "a Statistics does not belong here"),
        ([*wire([35, 1]), b"more"], "1 frames, but its header names 0"),
        ([msgpack.packb([35, 1]) + b"\x00"], "not one msgpack value"),
        ([msgpack.packb([35, 1])[:-1]], "not one msgpack value"),
        ([b"\x92\x23\xa1\xff"], "not one msgpack value"),  # text that is not UTF-8
        ([b"\x92\x23" + msgpack.packb(msgpack.ExtType(1, b"x"))], "not one msgpack value"),
        ([b"\x92\x23" + msgpack.packb(msgpack.Timestamp(1))], "not one msgpack value"),
        ([b"\x92\x23\xc7\x00\x01"], "Statistics.request must be int"),  # an extension type of no bytes
        (wire([35, {1: 2}]), "not one msgpack value"),
        (wire([35, {"a": 1, "b": 2}]), "not one msgpack value"),
        (wire([35, {"frame": 0}], b"x"), "Statistics.request must be int"),
    ],
)
def test_what_is_no_message(parts: list[Buffer], said: str) -> None:
    with pytest.raises(PeerProtocolError, match=said):
        decode(parts)


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        ([], "frame 0 of a message with 0 frames"),
        ([b"\0" * 24], "frame 1 of a message with 1 frames"),
        ([b"\0" * 24, b"\0" * 23], "has 24 bytes, but its frame has 23"),
        ([b"\0" * 24, b"\0" * 24, b""], "3 frames, but its header names 2"),
    ],
)
def test_the_header_names_every_frame_there_is(frames: list[bytes], said: str) -> None:
    with pytest.raises(PeerProtocolError, match=said):
        decode([encode(ASK)[0], *frames])


@pytest.mark.parametrize(
    "second", [{"frame": 0}, {"frame": 2}, {"frame": True}, {"frame": 1.0}, {"frame": -1}, {"f": 1}, {}]
)
def test_frames_are_named_in_order_and_once(second: object) -> None:
    first = [Array.code, "uint8", [2], {"frame": 0}]
    message = [Value.code, b"", [first, [Array.code, "uint8", [2], second]]]
    with pytest.raises(PeerProtocolError, match="frame number 1 must come next"):
        decode(wire(message, b"ab", b"cd", b"ef"))


@pytest.mark.parametrize(
    ("sent", "limits", "said"),
    [
        (Goodbye("c" * 100), Limits(header_nbytes=100), "a header of 104 bytes; at most 100"),
        (ASK, Limits(frames=1), "2 frames; at most 1"),
        (ASK, Limits(frame_nbytes=23), "frame 0 has 24 bytes; at most 23"),
        (ASK, Limits(message_nbytes=47), r"a message of \d+ bytes; at most 47"),
        (Get(1, tuple(range(1, 101)), (), False), Limits(items=99), "exceeds max_array_len"),
        (Goodbye("c" * 100), Limits(text_nbytes=99), "exceeds max_str_len"),
    ],
)
def test_every_limit(sent: Record, limits: Limits, said: str) -> None:
    parts = encode(sent)
    assert decode(parts, LIMITS) == sent
    with pytest.raises(PeerProtocolError, match=said):
        decode(parts, limits)


def test_a_server_may_say_more_at_once_than_it_accepts() -> None:
    sent = Goodbye("c" * (LIMITS.header_nbytes - 100)), Value(b"v" * LIMITS.header_nbytes, ())
    assert decode(encode(sent[1], BULK_LIMITS), BULK_LIMITS) == sent[1]
    with pytest.raises(PeerProtocolError, match="at most 4194304"):
        decode(encode(sent[1], BULK_LIMITS))
    with pytest.raises(PeerProtocolError, match="exceeds max_str_len"):
        decode(encode(sent[0], BULK_LIMITS), BULK_LIMITS)


def test_the_lists_of_a_large_header_are_counted() -> None:
    value = Value(b"", tuple(Array("uint8", (0,), Frame(b"")) for _ in range(4000)))
    parts = encode(value)
    assert decode(parts) == value
    with pytest.raises(PeerProtocolError, match="more than 5000 lists in a header"):
        decode(parts, Limits(items=5000))


@pytest.mark.parametrize("depth", [5, 100, 500, 1000, 1023, 1024, 5000, 1_000_000])
def test_no_depth_of_nesting_does_harm(depth: int) -> None:
    for opening in (b"\x91", b"\x81\xa1a", b"\xdd\x00\x00\x00\x02\x00"):
        for closing in (b"", b"\x00"):
            with pytest.raises(PeerProtocolError):
                decode([opening * depth + closing])
            with pytest.raises(PeerProtocolError):
                decode([b"\x92\x23" + opening * depth + closing])


_EMPTY_LISTS = b"\xdd\x00\x02\x00\x00" + b"\x90" * (1 << 17)
_EMPTY_MAPS = b"\xdd\x00\x02\x00\x00" + b"\x80" * (1 << 17)


@pytest.mark.parametrize(
    "header",
    [
        b"\xdd\x00\x00\x00\x1e" + _EMPTY_LISTS * 30,
        b"\xdd\x00\x00\x00\x1e" + _EMPTY_MAPS * 30,
        b"\xdc\xf0\x00" + b"\x90" * 0xF000,  # too short to be counted
        b"\xdd\x00\x00\x10\x00" * 1000,  # each list promises to be long
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
    ],
    ids=["lists", "maps", "small", "promised", "list", "map", "text", "bytes", "extension"],
)
def test_a_hostile_header_costs_little_memory(header: bytes) -> None:
    assert len(header) <= LIMITS.header_nbytes
    tracemalloc.start()
    try:
        with pytest.raises(PeerProtocolError):
            decode([header])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 << 20


def test_parts_may_be_any_bytes_and_frames_are_not_copied() -> None:
    header, *frames = encode(ASK)
    held = [bytearray(frame) for frame in frames]
    got = decode([memoryview(bytes(header)), *held])
    assert got == ASK
    assert isinstance(got, Ask)
    assert isinstance(got.point, ReducePoint)
    place = got.point.arrays[0].place
    assert isinstance(place, Frame)
    assert place.data is held[0]


def test_encode_passes_frames_on_uncopied() -> None:
    data = np.arange(5, dtype=np.int64)
    _, frame = encode(Assign("c", 1, 2, "assign", array_of(data)))
    data[3] = 77
    assert np.frombuffer(frame, np.int64)[3] == 77


@pytest.mark.parametrize("number", [0.0, -0.0, 1e-310, 1.7e308, -5e-324, 0.1])
def test_floats_arrive_bit_by_bit(number: float) -> None:
    got = decode(encode(Configure("c", 1, 0, "SGD", (("learning_rate", number),), None, -1)))
    assert isinstance(got, Configure)
    assert np.float64(got.hyperparameters[0][1]).tobytes() == np.float64(number).tobytes()


def test_a_peer_may_write_a_whole_float_as_an_integer() -> None:
    got = decode(wire([32, "c", 1, 0, "SGD", [["momentum", 0], ["learning_rate", (1 << 64) - 1]], None, -1, None, []]))
    assert got == Configure("c", 1, 0, "SGD", (("momentum", 0.0), ("learning_rate", 2.0**64)), None, -1)


@given(any_record())
def test_values_are_encoded_as_the_record_of_them_is(record: Record) -> None:
    values = tuple(record.__dict__.values())
    assert list(map(bytes, encode_values(type(record), values))) == list(map(bytes, encode(record)))


def test_values_are_put_in_order_by_name_and_none_may_be_missing() -> None:
    record = Assign("c", 1, 2, "assign", bytes_array(b"x"))
    values = record.__dict__
    assert Assign.values_of(**dict(reversed(values.items()))) == tuple(values.values())
    with pytest.raises(TypeError, match="indices"):
        Assign.values_of(client="c", sequence=1, variable=2, op="assign", value=record.value)
    with pytest.raises(TypeError, match="rows"):
        Assign.values_of(**values, rows=None)


def test_this_process_is_told_what_it_may_not_say() -> None:
    with pytest.raises(LocalProtocolError, match="Shutdown cannot be sent: it has text that is not Unicode"):
        encode(Shutdown("\udcff"))
    with pytest.raises(LocalProtocolError, match="a Goodbye with a header of 4194311 bytes; at most 4194304"):
        encode(Goodbye("c" * (4 << 20)))
    with pytest.raises(LocalProtocolError, match="is not a record"):
        encode(object())  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match="a Goodbye with a header of 4194311 bytes; at most 4194304"):
        encode_values(Goodbye, ["c" * (4 << 20)])


def test_the_wire_form_is_what_the_protocol_says() -> None:
    header, *frames = encode(Run((5, 2, 0), 3, 1, 7, b"d" * 16, bytes_array(b"fn"), True, bytes_array(b"args"), ()))
    function, arguments = [2, "uint8", [2], {"frame": 0}], [2, "uint8", [4], {"frame": 1}]
    numbers = [5, 2, 0], 3, 1, 7
    assert msgpack.unpackb(header) == [91, *numbers, b"d" * 16, function, True, arguments, [], 0, 0, [], "", [], "off"]
    assert [bytes(frame) for frame in frames] == [b"fn", b"args"]
    (header,) = encode(Run((5,), 5, 1, 7, b"d" * 16, None, False, b"args", ()))
    assert msgpack.unpackb(header) == [91, [5], 5, 1, 7, b"d" * 16, None, False, b"args", [], 0, 0, [], "", [], "off"]
    header, frame = encode(Run((5,), 5, 1, 7, b"d" * 16, None, False, Frame(b"args"), ()))
    assert (msgpack.unpackb(header)[8], bytes(frame)) == ({"frame": 0}, b"args")
    assert decode([header, frame]).__dict__["arguments"] == Frame(b"args")
    assert msgpack.unpackb(encode(Introduce(PROTOCOL, "worker", 1, 2, 3))[0]) == [110, 1, "worker", 1, 2, 3, "", b""]
    assert msgpack.unpackb(encode(Cancel((1,)))[0]) == [36, [1], 0]
    assert msgpack.unpackb(encode(Output("stdout", "é"))[0]) == [118, "stdout", "é"]


@FUZZ
@given(any_record())
def test_the_number_of_an_answered_get_is_read_from_the_beginning_of_its_answer(record: Record) -> None:
    header = memoryview(bytes(encode(record, BULK_LIMITS)[0]))
    assert answered(header) == (record.request if isinstance(record, Got) else None)


@pytest.mark.parametrize("number", [0, 127, 128, 65535, 65536, 2**32, 2**62 - 1])
def test_the_number_of_an_answered_get_may_be_large(number: int) -> None:
    assert answered(memoryview(bytes(encode(Got(number, 2**62 - 1, (), ()))[0]))) == number
