"""Pieces of memory as items: they come back as they were, and nothing else is taken for one."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from central_storage.cluster.items import parts_of, piece_of
from central_storage.cluster.memory import PIECE_NBYTES, Piece
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
