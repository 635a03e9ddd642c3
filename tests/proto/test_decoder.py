"""A decoder that knows runs and returns again reads what :func:`cs_proto.codec.decode` reads, whatever arrives."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cs_proto import codec
from cs_proto.arrays import Array, Location, array_of, bytes_array
from cs_proto.codec import Decoder, Limits, decode, encode
from cs_proto.errors import PeerProtocolError
from cs_proto.messages import ApplyPoint, OptimizerUpdate, Return, Run, SparseGradient, Value
from cs_proto.records import Frame, Record, replace

UPDATES = (OptimizerUpdate(1, 1, ()), OptimizerUpdate(2, 2, ()))
FIRST = Return((5,), 0, 1, (ApplyPoint(0, "train.py:12", UPDATES, 0),), 1, Value(b"loss", ()), None, 2, 2, "c")

RUN = Run((5,), 5, 0, 7, bytes(16), None, True, b"pickle", (), 2, 2, name="module.step")


def brought(offset: int) -> Return:
    """A return with rows at a place in an arena."""
    values, rows = Location("arena/0", offset), Location("arena/0", offset + 64)
    gradient = SparseGradient(3, Array("float32", (2, 4), values), Array("int64", (2,), rows))
    return replace(FIRST, notes=(ApplyPoint(0, "train.py:12", (OptimizerUpdate(1, 1, (), (gradient,)),), 0),))


ROWS_IN_FRAMES = ApplyPoint(
    0,
    "train.py:12",
    (OptimizerUpdate(1, 1, (), (SparseGradient(3, array_of(np.ones((1, 4))), array_of(np.array([7]))),)),),
    0,
)

RETURN = bytes(encode(FIRST)[0][:3])

FRAMED = (array_of(np.array(1.0)),)
LOCATED = (Array("float32", (2,), Location("arena/0", 64)),)
BYTES = (bytes_array(b"0123"),)


def read(decoded: object, parts: list[bytes]) -> Record | str:
    try:
        record = decoded(parts)  # type: ignore[operator]
    except PeerProtocolError as error:
        return str(error)
    assert isinstance(record, Record)
    return record


@st.composite
def messages(draw: st.DrawFn) -> list[bytes]:
    """A return or run like the first one, often with a byte changed, left out or added."""
    number = draw(st.sampled_from([2, 5, 127, 128, 300, 1 << 20, 1 << 40]))
    pickled = draw(st.binary(max_size=8) | st.just(bytes(300)) | st.builds(Frame, st.binary(max_size=8)))
    held = draw(st.sampled_from([(), ((0, 4096),)]))
    returned = replace(
        FIRST,
        run=(number,),
        replica=draw(st.integers(0, 1)),
        notes=draw(st.sampled_from([(), FIRST.notes, brought(64).notes, brought(4096).notes, (ROWS_IN_FRAMES,)])),
        value=Value(draw(st.binary(max_size=8) | st.just(bytes(300))), draw(st.sampled_from([(), FRAMED, LOCATED]))),
        series=draw(st.sampled_from([0, 2])),
    )
    step = draw(st.sampled_from([0, 1, 2, 127, 128, 300, 1 << 20, 1 << 40]))
    buffers = draw(st.sampled_from([(), LOCATED, BYTES, (*BYTES, *LOCATED, *BYTES)]))
    series = draw(st.sampled_from([0, 2]))
    run = replace(RUN, run=(number,), step=step, arguments=pickled, buffers=buffers, held=held, series=series)
    header, *frames = [bytes(part) for part in encode(draw(st.sampled_from([returned, run])))]
    at = draw(st.integers(0, len(header) - 1))
    new = draw(st.sampled_from([b"", b"\x00", b"\xc4", b"\xff", header[at : at + 1] * 2]))
    if draw(st.booleans()):
        header = header[:at] + new + header[at + 1 :]
    return [header, *frames, *draw(st.sampled_from([(), (), (b"more",)]))]


@given(st.lists(messages(), max_size=40))
def test_what_is_known_again_is_what_was_sent(said: list[list[bytes]]) -> None:
    decoder = Decoder()
    framed = replace(RUN, arguments=Frame(b""))
    for parts in [*map(encode, [FIRST, brought(64), RUN, replace(RUN, buffers=BYTES), framed]), *said]:
        assert read(decoder.decode, parts) == read(decode, parts)


def test_of_a_return_that_is_known_again_nothing_else_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder()
    decoder.decode(encode(FIRST))
    monkeypatch.setattr(codec, "decode", None)
    for run, body in ((6, b""), (200, b"a"), (70_000, bytes(255)), (1 << 31, bytes(256))):
        again = replace(FIRST, run=(run,), value=Value(body, ()))
        assert decoder.decode(encode(again)) == again


def test_of_rows_in_parts_of_an_arena_that_are_used_in_turn_nothing_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = Decoder()
    first = [decoder.decode(encode(brought(offset))) for offset in (0, 4096, 8192)]
    monkeypatch.setattr(codec, "decode", None)
    for run, before in enumerate(first * 2, 8):
        assert isinstance(before, Return)
        again = decoder.decode(encode(replace(before, run=(run,), value=Value(b"other", ()))))
        assert again == replace(before, run=(run,), value=Value(b"other", ()))
        assert isinstance(again, Return)
        assert again.notes is before.notes  # so that places are checked once


def test_rows_that_always_lie_elsewhere_displace_few_messages_that_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, run = Decoder(), encode(FIRST)
    for step in range(200):
        decoder.decode(encode(brought(64 * step)))
    decoder.decode(run)
    for step in range(200, 600):
        decoder.decode(encode(brought(64 * step)))
    monkeypatch.setattr(codec, "decode", None)
    assert decoder.decode(run) == FIRST


@pytest.mark.parametrize("kind", [bytes, Frame])
def test_of_a_run_that_is_known_again_nothing_else_is_read(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    decoder = Decoder()
    decoder.decode(encode(replace(RUN, arguments=kind(b"pickle"))))
    monkeypatch.setattr(codec, "decode", None)
    for run, pickled in ((6, b""), (200, b"a"), (70_000, bytes(255)), (1 << 31, bytes(4096))):
        again = replace(RUN, run=(run,), step=run // 3, arguments=kind(pickled))
        assert decoder.decode(encode(again)) == again


def test_of_a_run_with_buffers_only_their_bytes_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder()
    decoder.decode(encode(replace(RUN, buffers=(*BYTES, *LOCATED))))
    with monkeypatch.context() as patched:
        patched.setattr(codec, "decode", None)
        again = replace(RUN, run=(6,), step=6, arguments=b"other", buffers=(bytes_array(b"abcd"), *LOCATED))
        assert decoder.decode(encode(again)) == again
    header, frame = encode(replace(RUN, run=(7,), buffers=(*BYTES, *LOCATED)))
    for frames in ([], [bytes(frame)[:3]], [frame, frame]):
        assert read(decoder.decode, [header, *frames]) == read(decode, [header, *frames])  # type: ignore[list-item]
        assert isinstance(read(decoder.decode, [header, *frames]), str)  # type: ignore[list-item]


def test_a_frame_that_is_too_large_is_refused_also_when_its_run_is_known_again() -> None:
    decoder = Decoder(Limits(frame_nbytes=8))
    decoder.decode(encode(replace(RUN, arguments=Frame(bytes(8)))))
    with pytest.raises(PeerProtocolError, match="frame 0 has 9 bytes"):
        decoder.decode(encode(replace(RUN, arguments=Frame(bytes(9)))))


def test_a_step_before_its_series_is_refused_also_when_it_is_known_again() -> None:
    decoder = Decoder()
    decoder.decode(encode(FIRST))
    early = encode(replace(FIRST, run=(3,)))[0].replace(b"\x91\x03", b"\x91\x01", 1)
    assert read(decoder.decode, [early]) == read(decode, [early]) != FIRST
    assert "is no step of a series" in str(read(decoder.decode, [early]))


def test_the_first_step_of_a_function_is_known_again() -> None:
    decoder = Decoder()
    decoder.decode(encode(RUN))
    first = encode(replace(RUN, step=0))
    assert decoder.decode(first) == decode(first) == replace(RUN, step=0)


@pytest.mark.parametrize("instead", [b"\xd9\x04", b"\xc5\x04", b"\xc4\x03", b"\xc4\x05", b"\xa4l", b"\x90\xc0"])
def test_what_is_not_the_bytes_of_a_value_is_refused_also_when_all_else_is_known(instead: bytes) -> None:
    decoder = Decoder()
    decoder.decode(encode(FIRST))
    damaged = bytes(encode(FIRST)[0]).replace(b"\xc4\x04loss", instead + b"loss")
    assert isinstance(read(decoder.decode, [damaged]), str)
    assert read(decoder.decode, [damaged]) == read(decode, [damaged])


def test_as_many_are_known_as_replicas_take_turns_with_buffers() -> None:
    decoder = Decoder()
    for number in range(100):
        record = replace(FIRST, replica=number)
        assert decoder.decode(encode(record)) == record
    assert len(decoder._known[RETURN]) == codec._KNOWN


def test_of_what_is_known_the_bytes_that_change_are_not_kept() -> None:
    """A peer that sends much must not fill the memory of who only listens."""
    decoder = Decoder()
    kinds = [replace(FIRST, value=Value(bytes(8192), ())), replace(RUN, arguments=bytes(8192))]
    for record in [*kinds, replace(RUN, arguments=Frame(bytes(1 << 20)))]:
        assert decoder.decode(encode(record)) == record
    long = replace(FIRST, notes=tuple(ApplyPoint(k, "train.py:12" * 40, UPDATES[:1], 0) for k in range(40)))
    assert decoder.decode(encode(long)) == long
    kept = [known for entries in decoder._known.values() for known in entries]
    assert len(kept) == len(kinds) + 1
    assert sum(len(known.between) + len(known.behind or b"") for known in kept) < 1024
    records = [known.record for known in kept]
    assert [getattr(record, "value", None) or getattr(record, "arguments", None) for record in records] == [
        None,
        b"",
        b"",
    ]


def test_what_another_program_spells_otherwise_is_read_each_time() -> None:
    wire = msgpack.unpackb(encode(FIRST)[0])
    header = b"\xdc\x00\x0e" + b"".join(map(msgpack.packb, wire))
    decoder = Decoder()
    assert decoder.decode([header]) == FIRST
    wide = bytes(encode(FIRST)[0]).replace(b"\xc4\x04loss", b"\xc5\x00\x04loss")
    assert decoder.decode([wide]) == FIRST
    assert not decoder._known[RETURN]
