"""Whatever bytes arrive: a record within the limits, or one PeerProtocolError, and never much memory."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections.abc import Callable, Sequence

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples
from tests.harness.record_strategies import any_record

from cs_proto.arrays import Array, array_of, bytes_array
from cs_proto.codec import (
    BULK_LIMITS,
    LIMITS,
    Limits,
    RunEncoder,
    answered,
    decode,
    decode_finished,
    encode,
    encode_values,
)
from cs_proto.errors import LocalProtocolError, PeerProtocolError
from cs_proto.messages import (
    PROTOCOL,
    Ask,
    Assign,
    Cancel,
    Configure,
    Error,
    Get,
    Goodbye,
    Got,
    Introduce,
    OptimizerChange,
    Output,
    ReducePoint,
    Run,
    RunFinished,
    Shutdown,
    Statistics,
    Value,
)
from cs_proto.records import RECORDS, Buffer, Frame, Record, replace

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


#: What changes in a Run now and then, and what nobody sends at every step.
CHANGES = {
    "seed": [7, 8],
    "digest": [bytes(16), b"d" * 16],
    "function": [None, None, bytes_array(b"function")],
    "frozen": [True, False],
    "buffers": [(), (), (bytes_array(b"buffer"),)],
    "series": [0, 1],
    "lookahead": [0, 2],
    "held": [(), (), ((0, 1 << 20),)],
    "name": ["step", "other"],
    "changes": [(), (), (OptimizerChange(1, (("learning_rate", 0.5),)),)],
    "check_numerics": ["off", "warn"],
}


# Where msgpack takes more bytes for a number, and for the length of bytes.
BORDERS = [0, 31, 127, 255, (1 << 16) - 1, (1 << 32) - 1, (1 << 40) - 1]
NUMBERS = st.sampled_from([number + more for number in BORDERS for more in (0, 1)])
SIZES = st.sampled_from([number + more for number in [*BORDERS[:5], 16 * 1024] for more in (0, 1)])


@st.composite
def steps(draw: st.DrawFn) -> list[Run]:
    """The Runs of one step, most of which are like those of every other."""
    run, step = (draw(NUMBERS) for _ in range(2))
    changed = draw(st.none() | st.sampled_from(list(CHANGES)))
    common = {name: values[0] for name, values in CHANGES.items()}
    common |= {} if changed is None else {changed: draw(st.sampled_from(CHANGES[changed]))}
    pickled = st.binary(max_size=3) | SIZES.map(bytes)
    arguments = pickled | pickled.map(Frame) | pickled.map(bytes_array)
    return [Run((run,), step, replica, arguments=draw(arguments), **common) for replica in range(2)]


@given(st.lists(steps(), max_size=20))
def test_runs_are_encoded_as_one_by_one(said: list[list[Run]]) -> None:
    encoder = RunEncoder()
    for runs in said:
        encoded = encoder.encode([tuple(run.__dict__.values()) for run in runs])
        assert [list(map(bytes, parts)) for parts in encoded] == [list(map(bytes, encode(run))) for run in runs]


def test_of_a_run_like_the_one_before_only_its_numbers_and_arguments_are_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = Run((1,), 0, 0, 7, bytes(16), None, True, b"first", ())
    encoder = RunEncoder()
    encoder.encode([tuple(first.__dict__.values())])
    monkeypatch.setattr("cs_proto.codec.encode_values", None)
    for number, arguments in ((2, b"second"), (300, Frame(b"third")), (1 << 40, b"")):
        run = replace(first, run=(number,), step=number, arguments=arguments)
        [parts] = encoder.encode([tuple(run.__dict__.values())])
        assert decode(parts) == run


@pytest.mark.parametrize("arguments", [bytes(5 << 20), Frame(bytes(65 << 20))])
def test_arguments_that_are_too_large_are_refused_also_in_a_run_that_is_known(arguments: bytes | Frame) -> None:
    values = Run((1,), 0, 0, 7, bytes(16), None, True, b"first", ()).__dict__
    encoder = RunEncoder()
    encoder.encode([tuple(values.values())])
    with pytest.raises(LocalProtocolError, match=r"a Run (with a header of|cannot be sent: frame 0 has)"):
        encoder.encode([tuple((values | {"arguments": arguments}).values())])


def test_a_run_that_is_refused_is_refused_again() -> None:
    values = Run((1,), 0, 0, 7, bytes(16), None, True, b"first", (), name="n" * (5 << 20)).__dict__
    encoder = RunEncoder()
    for _ in range(2):
        with pytest.raises(LocalProtocolError, match="a Run with a header of"):
            encoder.encode([tuple(values.values())])


@st.composite
def finished(draw: st.DrawFn) -> list[bytes]:
    """A RunFinished, often with a byte changed, left out or added."""
    bodies = st.just(b"\xc0") | st.binary(max_size=12) | SIZES.map(bytes)
    arrays = st.sampled_from([(), (), (bytes_array(b"result"),)])
    many = st.integers(14, 17).map(lambda count: [Value(b"\xc0", ())] * count)
    values = tuple(draw(st.lists(st.builds(Value, bodies, arrays), max_size=3) | many))
    error = draw(st.sampled_from([None, None, Error("ValueError", "no", None, "", 0, 0, "")]))
    run = draw(st.tuples(NUMBERS) | st.just((5, 0, 0)))
    commits = draw(NUMBERS)
    header, *frames = [bytes(part) for part in encode(RunFinished(run, () if error else values, error, commits))]
    at = draw(st.integers(0, len(header)))
    new = draw(
        st.sampled_from([b"", b"\x00", b"\x90", b"\xc0", b"\xc4", b"\xff", header[at : at + 1] * 2])
        | st.binary(max_size=2)
    )
    if draw(st.booleans()):
        header = header[:at] + new + header[at + 1 :]
    return [header, *frames, *draw(st.sampled_from([(), (), (b"more",)]))]


@given(finished() | any_record().map(encode))
def test_the_end_of_a_run_is_decoded_as_any_record(parts: list[bytes]) -> None:
    def read(decoded: Callable[[list[bytes]], Record]) -> Record | str:
        try:
            return decoded(parts)
        except PeerProtocolError as error:
            return str(error)

    assert read(decode_finished) == read(decode)


@pytest.mark.parametrize(
    "change", [lambda header: header + b"\x00", lambda header: header[:-1], lambda header: header[:9]]
)
def test_the_end_of_a_run_with_more_or_fewer_bytes_is_refused(change: Callable[[bytes], bytes]) -> None:
    end = RunFinished((300,), (Value(b"\xc0", ()), Value(b"\xcb12345678", ())), None, 2)
    [header] = encode(end)
    with pytest.raises(PeerProtocolError, match="not one msgpack value"):
        decode_finished([change(bytes(header))])


def test_the_end_of_most_steps_is_decoded_without_msgpack(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [RunFinished((1 << n,), (Value(b"\xc0", ()), Value(b"\xcb12345678", ())), None, 2) for n in range(31)]
    monkeypatch.setattr("cs_proto.codec.decode", None)
    assert [decode_finished(encode(end)) for end in ends] == ends


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
