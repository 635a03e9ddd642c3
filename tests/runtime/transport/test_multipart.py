"""Of a message that is too large as much is kept as is needed to refuse it, and the next one is heard as ever."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import cast

import pytest
import zmq
from tests.harness.timing import unit

from cs_proto.codec import Limits, decode
from cs_proto.errors import PeerProtocolError
from cs_runtime.transport.multipart import receive

LIMITS = Limits(frames=4, frame_nbytes=1000, message_nbytes=2500)
_numbers = count()


@pytest.fixture(params=[zmq.DEALER, zmq.ROUTER], ids=["dealer", "router"])
def sockets(request: pytest.FixtureRequest) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """Who sends, and who receives."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as sender, context.socket(request.param) as receiver:
        endpoint = f"inproc://multipart{next(_numbers)}"
        for each in (sender, receiver):
            each.setsockopt(zmq.LINGER, 0)
            each.setsockopt(zmq.RCVTIMEO, int(unit(20) * 1000))
        receiver.bind(endpoint)
        sender.connect(endpoint)
        yield sender, receiver


@pytest.mark.parametrize(("parts", "most"), [([bytes(900)] * 50, 4), ([b""] * 50, 6)], ids=["bytes", "frames"])
def test_no_more_is_kept_than_is_needed_to_refuse(
    sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]], parts: list[bytes], most: int
) -> None:
    sender, receiver = sockets
    is_routed = receiver.type == zmq.ROUTER
    for message in (parts, [b"next", b"one"]):
        sender.send_multipart(message)
    kept = receive(receiver, LIMITS, is_routed=is_routed)[is_routed:]
    assert len(kept) <= most
    assert sum(map(len, kept)) <= LIMITS.message_nbytes + LIMITS.frame_nbytes
    with pytest.raises(PeerProtocolError):
        decode([part.bytes for part in kept], LIMITS)
    following = receive(receiver, LIMITS, is_routed=is_routed)[is_routed:]
    assert [part.bytes for part in following] == [b"next", b"one"]


class _Part:
    more = True

    def __len__(self) -> int:
        return 1


class _Cut:
    """A socket that has lost its connection, and with it all but the first part of a message."""

    def __init__(self) -> None:
        self._parts = [_Part()]

    def recv(self, flags: int = 0, *, copy: bool) -> _Part:
        if self._parts:
            return self._parts.pop()
        assert flags & zmq.NOBLOCK, "it waits for ever"
        raise zmq.Again


def test_a_part_that_was_lost_is_not_waited_for() -> None:
    with pytest.raises(zmq.Again):
        receive(cast("zmq.Socket[bytes]", _Cut()), LIMITS, zmq.NOBLOCK)
