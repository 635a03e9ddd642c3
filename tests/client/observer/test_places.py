"""Where an observer finds a service, and how long it gives a connection."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from central_storage.observer.places import place_of
from cs_runtime.transport.curve import make_keys


@pytest.mark.parametrize(
    ("timeout", "milliseconds"), [(1.0, 2000), (10.0, 2000), (15.0, 3000), (25.0, 5000), (1e5, 5000)]
)
def test_a_connection_has_a_fifth_of_the_time_of_a_question(tmp_path: Path, timeout: float, milliseconds: int) -> None:
    """So much as the round trip of a slow network takes; but no more than after a loss."""
    keys = str(tmp_path / "keys")
    make_keys(keys)
    place = place_of("tcp://127.0.0.1:5600", keys)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        place.protect(socket, timeout)
        assert socket.getsockopt(zmq.CONNECT_TIMEOUT) == milliseconds
