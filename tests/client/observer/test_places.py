"""How an observer reaches a service of this machine."""

from __future__ import annotations

import socket
import tempfile

import zmq
from tests.harness.timing import unit
from zmq.utils.monitor import recv_monitor_message

from central_storage.observer.places import place_of


def test_a_server_without_room_is_tried_again_at_once_however_often() -> None:
    """Longer pauses would miss the moments in which it has room beside connections without end."""
    with (
        tempfile.TemporaryDirectory() as directory,
        socket.socket(socket.AF_UNIX) as full,
        socket.socket(socket.AF_UNIX) as first,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as wire,
    ):
        full.bind(f"{directory}/server")
        full.listen(0)
        first.connect(f"{directory}/server")
        wire.setsockopt(zmq.LINGER, 0)
        place = place_of(directory, None)
        with wire.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED) as events:
            place.connect(wire)
            for _ in range(20):
                assert events.poll(1000 * unit(10))
                assert recv_monitor_message(events)["value"] < 20  # milliseconds
            wire.disable_monitor()
