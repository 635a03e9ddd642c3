"""Messages wait for a peer that does not read, in their order, and no more of them than its limit allows."""

from __future__ import annotations

import logging

import pytest

from cs_server import unsent
from cs_server.unsent import Unsent


class Peers:
    """Peers of which some take no message."""

    def __init__(self) -> None:
        self.deaf: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.heard: list[tuple[bytes, list[bytes]]] = []
        self.unsent = Unsent(self._send)

    def _send(self, peer: bytes, parts: object) -> bool | None:
        if peer in self.gone:
            return None
        if peer in self.deaf:
            return False
        assert isinstance(parts, list)
        self.heard.append((peer, parts))
        return True


def test_no_more_messages_wait_than_the_limit_and_the_rest_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(unsent, "_MESSAGES", 3)
    peers = Peers()
    peers.deaf = {b"deaf"}
    with caplog.at_level(logging.WARNING):
        assert [peers.unsent.add(b"deaf", [b"%d" % number]) for number in range(5)] == [True] * 3 + [False] * 2
    assert peers.unsent.add(b"other", [b"0"])  # each has a limit of its own
    assert [record.getMessage() for record in caplog.records] == [
        "b'deaf' does not read its messages: 3 messages of 3 bytes wait, and further ones are dropped"
    ]
    peers.unsent.try_again()
    assert peers.heard == [(b"other", [b"0"])]
    peers.deaf.clear()
    peers.unsent.try_again()
    assert peers.heard[1:] == [(b"deaf", [b"0"]), (b"deaf", [b"1"]), (b"deaf", [b"2"])]
    assert not peers.unsent
    assert peers.unsent.add(b"deaf", [b"5"])


def test_no_more_bytes_wait_than_the_limit_and_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unsent, "_NBYTES", 100)
    peers = Peers()
    peers.deaf = {b"deaf"}
    assert [peers.unsent.add(b"deaf", [bytes(40), bytes(20)]) for _ in range(4)] == [True, True, False, False]
    peers.gone = {b"deaf"}  # whose messages are dropped
    peers.unsent.try_again()
    assert not peers.unsent
    assert peers.heard == []


def test_a_message_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers()
    memory = bytearray(b"before")
    peers.unsent.add(b"slow", [memoryview(memory)])
    memory[:] = b"after!"
    peers.unsent.try_again()
    assert peers.heard == [(b"slow", [b"before"])]


def test_the_pause_grows_as_long_as_nobody_reads() -> None:
    peers = Peers()
    peers.deaf = {b"deaf"}
    peers.unsent.add(b"deaf", [b""])
    pauses = []
    for _ in range(12):
        pauses.append(peers.unsent.pause)
        peers.unsent.try_again()
    assert pauses[:3] == [0.001, 0.002, 0.004]
    assert pauses[-1] == 1.0
    peers.unsent.add(b"other", [b""])
    assert peers.unsent.pause == 0.001
