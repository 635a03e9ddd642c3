"""Pieces of memory as items: they come back as they were, and nothing else is taken for one. An item has a worker."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from central_storage.cluster.items import MEMORY, PLACE, SERVER, Places, parts_of, piece_of
from central_storage.cluster.memory import PIECE_NBYTES, Piece
from central_storage.cluster.session import Item
from cs_proto.codec import pack
from cs_proto.errors import PeerProtocolError


@given(offset=st.integers(0, 1 << 50), data=st.binary(max_size=100), spare=st.integers(0, 1 << 50))
def test_a_piece_comes_back(offset: int, data: bytes, spare: int) -> None:
    piece = Piece("parameters/float32", offset + len(data) + spare, offset, data)
    assert piece_of([memoryview(bytes(part)) for part in parts_of(piece)]) == piece


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"", b""],
        [pack(("arena/0", 100, 0))],
        [pack(("arena/0", 100, 0)), b"1", b"2"],
        [pack(("arena/0", 100, 98)), b"123"],
        [pack(("arena/0", 100, -1)), b"123"],
        [pack(("arena/0", "100", 0)), b"123"],
        [pack(("arena/0", 100.0, 0)), b"123"],
        [pack(("arena/0", 1 << 62, 0)), b"123"],
        [pack(("../arena", 100, 0)), b"123"],
        [pack((b"arena/0", 100, 0)), b"123"],
        [pack(("arena/0", 100, 0, 0)), b"123"],
        [pack(("arena/0", 1 << 30, 0)), bytes(PIECE_NBYTES + 1)],
        [pack(5), b"123"],
        [b"\xc1", b"123"],
    ],
)
def test_what_is_no_piece_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(PeerProtocolError, match="piece"):
        piece_of(parts)


@given(parts=st.lists(st.binary(max_size=40), max_size=3))
def test_no_bytes_raise_anything_else(parts: list[bytes]) -> None:
    with suppress(PeerProtocolError):
        piece_of(parts)


class End:
    """One end of a session in which ``count`` workers speak."""

    def __init__(self, count: int) -> None:
        self.put: list[Item] = []
        self.places = Places(count, lambda kind, parts: self.put.append((kind, list(parts))))


@given(said=st.lists(st.tuples(st.integers(0, 299), st.sampled_from([SERVER, MEMORY]))))
def test_each_item_is_of_the_worker_that_has_put_it(said: list[tuple[int, bytes]]) -> None:
    sender, receiver = End(300), End(300)
    for place, kind in said:
        sender.places.put(place, kind, [b"part"])
    found = [(receiver.places.of(kind, parts), kind) for kind, parts in sender.put]
    assert [(place, kind) for place, kind in found if kind != PLACE] == said
    assert all(place is None for place, kind in found if kind == PLACE)


def test_one_worker_needs_no_places() -> None:
    end = End(1)
    end.places.put(0, SERVER, [b"part"])
    end.places.put(0, MEMORY, [])
    assert end.put == [(SERVER, [b"part"]), (MEMORY, [])]


@pytest.mark.parametrize("parts", [[], [b""], [b"\0"], [b"\0\0\0"], [b"\0\2"], [b"\xff\xff"], [b"\0\0", b""]])
def test_what_names_no_place_is_refused(parts: list[bytes]) -> None:
    end = End(2)
    with pytest.raises(PeerProtocolError, match="no place of an outpost that has 2"):
        end.places.of(PLACE, parts)
    assert end.places.of(SERVER, [b"part"]) == 0
