"""Items arrive in order, each once, whatever connections lose, and no more than a window is under way."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from central_storage.cluster import session
from central_storage.cluster.session import ENVELOPE_NBYTES, HEARD_WITHIN, MOST_UNHEARD, Item, Session
from cs_proto.codec import Limits, decode, encode
from cs_proto.errors import LocalProtocolError, PeerProtocolError
from cs_proto.messages import ITEM_ENDS, PART_ENDS, PART_GOES_ON, Envelope
from cs_proto.records import Buffer, Frame

NAME = bytes(range(16))
MIB = 1 << 20


@contextmanager
def small_envelopes() -> Iterator[None]:
    """Envelopes of a few bytes, so that short items fill several."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("ENVELOPE_NBYTES", 40), ("_WHOLE_NBYTES", 12), ("_SMALL_NBYTES", 4), ("_MOST_PIECES", 6)):
            patch.setattr(session, name, value)
        yield


def envelope_of(message: list[Buffer]) -> Envelope:
    record = decode(message)
    assert isinstance(record, Envelope)
    return record


class Pair:
    """Two ends and the connection between them: in each direction, messages that have not arrived."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ends = (Session(NAME, self.now), Session(NAME, self.now))
        self.put: tuple[list[Item], list[Item]] = ([], [])
        self.got: tuple[list[Item], list[Item]] = ([], [])
        self.flying: tuple[deque[list[Buffer]], deque[list[Buffer]]] = (deque(), deque())
        self.last: list[list[Buffer] | None] = [None, None]

    def send(self, end: int, most: int) -> None:
        """Send up to ``most`` messages; the peer takes no more."""
        for message in self.ends[end].envelopes(self.now):
            if most == 0:
                break
            most -= 1
            self.flying[end].append(message)
        numbered = [message for message in self.flying[end] if envelope_of(message).number]
        assert len(numbered) <= MOST_UNHEARD
        assert all(sum(map(len, message)) <= session.ENVELOPE_NBYTES + 500 for message in numbered)

    def arrive(self, end: int, most: int) -> None:
        """Let up to ``most`` messages of this end arrive."""
        for _ in range(min(most, len(self.flying[end]))):
            message = self.last[end] = self.flying[end].popleft()
            self.got[1 - end].extend(self.ends[1 - end].hear(envelope_of(message), self.now))

    def again(self, end: int) -> None:
        """Let the last message that has arrived arrive once more."""
        message = self.last[end]
        if message is not None:
            assert self.ends[1 - end].hear(envelope_of(message), self.now) == []

    def cut(self) -> None:
        """Lose all that is under way, and connect again."""
        for flying in self.flying:
            flying.clear()
        heard = [end.heard for end in self.ends]
        for end in (0, 1):
            self.ends[end].resume(heard[1 - end], self.now)

    def settle(self) -> None:
        """Let all arrive."""
        for _ in range(3000):
            if not any(end.waiting for end in self.ends):
                return
            for end in (0, 1):
                self.send(end, 9)
                self.arrive(end, 9)
            self.now += HEARD_WITHIN
        raise AssertionError("they do not settle")


ENDS = st.integers(0, 1)
ITEMS = st.tuples(st.binary(min_size=1, max_size=1), st.lists(st.binary(max_size=90), max_size=4))
ACTIONS = st.one_of(
    st.tuples(st.just("put"), ENDS, ITEMS),
    st.tuples(st.just("send"), ENDS, st.integers(0, 3)),
    st.tuples(st.just("arrive"), ENDS, st.integers(1, 3)),
    st.tuples(st.just("again"), ENDS, st.none()),
    st.tuples(st.just("cut"), ENDS, st.none()),
    st.tuples(st.just("wait"), ENDS, st.floats(0, 2)),
)


@given(st.lists(ACTIONS, max_size=60))
def test_items_arrive_in_order_each_once_whatever_is_lost(actions: list[tuple[str, int, object]]) -> None:
    with small_envelopes():
        pair = Pair()
        for action, end, given_value in actions:
            if action == "put":
                assert isinstance(given_value, tuple)
                kind, parts = given_value
                pair.ends[end].put(kind, parts)
                pair.put[end].append((kind, parts))
            elif action == "wait":
                assert isinstance(given_value, float)
                pair.now += given_value
            elif action == "cut":
                pair.cut()
            elif action == "again":
                pair.again(end)
            else:
                assert isinstance(given_value, int)
                (pair.send if action == "send" else pair.arrive)(end, given_value)
        pair.settle()
    for end in (0, 1):
        assert [(kind, [bytes(part) for part in parts]) for kind, parts in pair.got[1 - end]] == pair.put[end]


def test_a_session_works_after_every_cut_of_a_long_item() -> None:
    """Each envelope of an item is lost once, before it arrives and after it has arrived."""
    with small_envelopes():
        pair = Pair()
        item = (b"M", [bytes(range(100)), b"", b"end"])
        pair.ends[0].put(*item)
        cuts = 0
        while pair.ends[0].waiting:
            pair.send(0, 1)
            pair.cut()  # before
            pair.send(0, 1)
            pair.arrive(0, 1)
            pair.cut()  # after, before the other end could say so
            cuts += 1
            assert cuts < 100
        assert cuts > 2
        assert pair.got[1] == [item]


def messages(end: Session, now: float = 0.0) -> list[list[Buffer]]:
    return list(end.envelopes(now))


def test_what_waits_travels_together_and_large_parts_in_pieces() -> None:
    pair = Pair()
    large = bytes(range(256)) * (9 * MIB // 256)
    pair.ends[0].put(b"S", [b"small"])
    pair.ends[0].put(b"Z", [b"header", large])
    pair.ends[0].put(b"M", [b"head", memoryview(large)[:MIB]])
    assert pair.ends[0].waiting == 1 + 5 + 1 + 6 + len(large) + 1 + 4 + MIB
    first, second = (envelope_of(message) for message in messages(pair.ends[0]))
    assert first.ends == bytes((PART_ENDS, ITEM_ENDS, PART_ENDS, PART_ENDS, PART_GOES_ON))
    assert second.ends == bytes((PART_GOES_ON,))
    for each in (first, second):
        pieces = [piece.data if isinstance(piece, Frame) else piece for piece in each.pieces]
        assert sum(map(len, pieces)) == ENVELOPE_NBYTES
    assert pair.ends[1].hear(first, 0.0) == [(b"S", [b"small"])]
    assert pair.ends[1].hear(second, 0.0) == []
    pair.settle()
    got = pair.got[1]
    assert [(kind, list(map(bytes, parts))) for kind, parts in got] == [
        (b"Z", [b"header", large]),
        (b"M", [b"head", large[:MIB]]),
    ]


def test_a_part_that_is_not_cut_is_not_copied_on_arrival() -> None:
    sender, receiver = Session(NAME, 0.0), Session(NAME, 0.0)
    sender.put(b"M", [bytes(MIB)])
    (message,) = messages(sender)
    ((_, [part]),) = receiver.hear(envelope_of(message), 0.0)
    assert part is message[1]


def test_memory_is_read_when_its_envelope_is_made_and_sent_again_as_it_was() -> None:
    sender, receiver = Session(NAME, 0.0), Session(NAME, 0.0)
    memory = bytearray(b"before")
    sender.put(b"M", [memory])
    memory[:] = b"middle"
    messages(sender)
    memory[:] = b"behind"
    sender.resume(0, 0.0)
    (message,) = messages(sender)
    assert receiver.hear(envelope_of(message), 0.0) == [(b"M", [b"middle"])]


def test_arrays_of_numbers_are_counted_in_bytes() -> None:
    sender, receiver = Session(NAME, 0.0), Session(NAME, 0.0)
    sender.put(b"M", [memoryview(bytes(8)).cast("d"), memoryview(array("d"))])
    assert sender.waiting == 9
    (message,) = messages(sender)
    assert receiver.hear(envelope_of(message), 0.0) == [(b"M", [bytes(8), b""])]


def test_a_message_that_could_not_be_sent_comes_again() -> None:
    end = Session(NAME, 0.0)
    end.put(b"S", [b"x"])
    for _ in range(3):
        for message in end.envelopes(0.0):
            assert envelope_of(message).number == 1
            break  # its peer is full
    assert end.due(0.0) == 0.0
    assert [envelope_of(message).number for message in messages(end)] == [1]
    assert messages(end) == []


def test_an_end_that_has_nothing_to_say_gives_signs_of_life() -> None:
    pair = Pair()
    one, other = pair.ends
    assert messages(one, 0.5) == []
    assert one.due(0.25) == 0.75
    (sign,) = messages(one, 1.0)
    assert envelope_of(sign) == Envelope(NAME, 0, 0, b"", ())
    assert one.due(1.25) == 0.75
    assert other.silence(1.0) == 1.0
    assert other.hear(envelope_of(sign), 1.0) == []
    assert other.silence(3.0) == 2.0
    assert messages(other, 0.75) == []  # a sign of life wants none


def test_what_has_arrived_is_said_with_the_next_items() -> None:
    one, other = Session(NAME, 0.0), Session(NAME, 0.0)
    one.put(b"S", [b"x"])
    (message,) = messages(one)
    other.hear(envelope_of(message), 0.0)
    assert messages(other) == []
    other.put(b"S", [b"y"])
    (answer,) = messages(other)
    assert (envelope_of(answer).number, envelope_of(answer).heard) == (1, 1)
    assert messages(other, HEARD_WITHIN) == []
    one.hear(envelope_of(answer), 0.0)
    assert one.waiting == 0


def heard_by(one: Session, other: Session, now: float) -> None:
    for message in messages(one, now):
        other.hear(envelope_of(message), now)


def test_what_has_arrived_is_said_soon_and_once_if_there_are_no_items() -> None:
    one, other = Session(NAME, 0.0), Session(NAME, 0.0)
    one.put(b"S", [b"x"])
    heard_by(one, other, 0.0)
    assert other.due(0.0) == HEARD_WITHIN
    assert messages(other, HEARD_WITHIN / 2) == []
    (answer,) = messages(other, HEARD_WITHIN)
    assert envelope_of(answer) == Envelope(NAME, 0, 1, b"", ())
    assert messages(other, 0.5) == []
    one.hear(envelope_of(answer), 0.5)
    assert one.waiting == 0


def test_what_has_arrived_is_said_at_once_if_the_other_end_may_wait_for_it() -> None:
    one, other = Session(NAME, 0.0), Session(NAME, 0.0)
    one.put(b"M", [bytes(65 << 10)])  # there may be more of that
    heard_by(one, other, 0.0)
    assert other.due(0.0) == 0.0
    heard_by(other, one, 0.0)
    assert one.waiting == 0
    for number in range(MOST_UNHEARD):
        one.put(b"S", [b"x"])
        heard_by(one, other, 0.0)
        assert (other.due(0.0) == 0.0) == (number == MOST_UNHEARD - 1)
    heard_by(other, one, 0.0)
    assert one.waiting == 0
    one.put(b"S", [b"x"])
    (message,) = messages(one)
    for _ in range(2):  # it has come twice, because it was sent again
        other.hear(envelope_of(message), 0.0)
    assert other.due(0.0) == 0.0


def holding(*pieces: bytes, ends: tuple[int, ...], number: int = 1, heard: int = 0) -> Envelope:
    return Envelope(NAME, number, heard, bytes(ends), pieces)


@pytest.mark.parametrize(
    ("envelopes", "said"),
    [
        ([holding(b"S", ends=(2,), number=2)], "envelope 2 came after envelope 0"),
        ([holding(b"S", ends=(2,), heard=1)], "has heard envelope 1, and 0 was sent last"),
        ([holding(b"", ends=(2,))], "whose kind has 0 bytes"),
        ([holding(b"SS", ends=(2,))], "whose kind has 2 bytes"),
        ([holding(b"S", *[b""] * 10, ends=(1,) * 10 + (2,))], "more than 2 parts"),
        ([holding(b"S", bytes(2000), ends=(1, 0)), holding(bytes(100), ends=(2,), number=2)], "more than 1000 bytes"),
        ([holding(b"S", b"", b"", ends=(1, 0, 0)), holding(b"", ends=(0,), number=2)], "a part in 3 pieces"),
    ],
)
def test_a_peer_that_breaks_the_rules(envelopes: list[Envelope], said: str) -> None:
    end = Session(NAME, 0.0, Limits(message_nbytes=1000, frames=2))
    *before, last = envelopes
    for each in before:
        end.hear(each, 0.0)
    with pytest.raises(PeerProtocolError, match=said):
        end.hear(last, 0.0)


def test_a_peer_cannot_take_back_what_it_has_heard() -> None:
    end = Session(NAME, 0.0)
    end.put(b"S", [b"x"])
    assert len(messages(end)) == 1
    end.hear(Envelope(NAME, 0, 1, b"", ()), 0.0)
    with pytest.raises(PeerProtocolError, match="had heard envelope 1, and now only 0"):
        end.resume(0, 0.0)
    with pytest.raises(PeerProtocolError, match="has heard envelope 2, and 1 was sent last"):
        end.resume(2, 0.0)


@pytest.mark.parametrize("kind", [b"", b"SS"])
def test_a_kind_is_one_byte(kind: bytes) -> None:
    with pytest.raises(LocalProtocolError, match="one byte"):
        Session(NAME, 0.0).put(kind, [])


def test_an_envelope_of_the_most_pieces_keeps_to_the_limits() -> None:
    sender, receiver = Session(NAME, 0.0), Session(NAME, 0.0)
    parts = [bytes([number % 256]) * 1024 for number in range(4000)]
    sender.put(b"C", parts)
    sender.put(b"C", [part + b"+" for part in parts])
    got: list[Item] = []
    for number in range(9):
        now = number * HEARD_WITHIN
        for message in messages(sender, now):
            got += receiver.hear(envelope_of(message), now)  # decode refuses what exceeds the limits
        for message in messages(receiver, now):
            sender.hear(envelope_of(message), now)
    assert sender.waiting == 0
    assert [len(parts) for _, parts in got] == [4000, 4000]
    assert got[0][1] == parts


def test_names_have_sixteen_bytes() -> None:
    with pytest.raises(LocalProtocolError, match="16 bytes, not 3"):
        encode(Envelope(b"abc", 0, 0, b"", ()))
