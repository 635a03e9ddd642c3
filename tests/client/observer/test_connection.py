"""How long an observer gives an attempt to connect to another machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import zmq
from tests.harness.clock import Clock
from tests.harness.timing import unit

from central_storage.observer import connection
from central_storage.observer.connection import Connection

ESTABLISHED = b"\x01"


class Service:
    """A port that takes connections and says nothing."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=0)
        self._listening.settimeout(unit(20))
        self._fill: list[socket.socket] = []
        self.endpoint = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"

    def stop_answering(self) -> None:
        """From now on, the kernel drops packets that would begin a connection."""
        state = ESTABLISHED
        while state == ESTABLISHED:
            each = socket.socket()
            self._fill.append(each)
            each.setblocking(False)
            each.connect_ex(self._listening.getsockname())
            state = each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)

    def accept(self) -> socket.socket:
        """The next connection, of which the other side knows."""
        made, _ = self._listening.accept()
        assert made.recv(1)  # the socket there has sent its greeting
        return made

    def close(self) -> None:
        for each in (*self._fill, self._listening):
            each.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(connection, "time", made)
    return made


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.close()


@pytest.fixture
def wire() -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        yield made


def given_up(connecting: Connection, clock: Clock, count: int) -> list[float]:
    """The seconds that each of the next attempts had."""
    had = []
    for _ in range(count):
        begun = clock.now
        while not connecting.connects_again():
            clock.now += 0.01
            assert clock.now < begun + 100
        had.append(round(clock.now - begun, 2))
    return had


def lose(connecting: Connection, made: socket.socket) -> None:
    """End a connection, and wait until the other side knows."""
    made.close()
    assert connecting.events.poll(int(unit(20) * 1000))


def test_an_attempt_has_as_long_as_all_before_it(service: Service, clock: Clock, wire: zmq.Socket[bytes]) -> None:
    service.stop_answering()
    connecting = Connection(wire, service.endpoint)
    assert given_up(connecting, clock, 4) == pytest.approx([0.7, 0.7, 1.4, 2.8], abs=0.03)
    connecting.close()
    connecting.close()


@pytest.mark.parametrize(("took", "attempt"), [(0.1, 0.7), (0.6, 1.2)])
def test_an_attempt_after_a_loss_has_twice_what_the_last_connection_took(
    service: Service, clock: Clock, wire: zmq.Socket[bytes], took: float, attempt: float
) -> None:
    connecting = Connection(wire, service.endpoint)
    made = service.accept()
    clock.now += took
    assert not connecting.connects_again()  # nothing can be lost before the first connection
    clock.now += 1000
    assert not connecting.connects_again()
    service.stop_answering()
    lose(connecting, made)
    assert given_up(connecting, clock, 3) == pytest.approx([attempt] * 3, abs=0.03)
    clock.now += 80  # a network that has become slower
    assert given_up(connecting, clock, 2)[1] > 10
    connecting.close()


def test_what_was_sent_is_lost_with_its_connection(service: Service, clock: Clock, wire: zmq.Socket[bytes]) -> None:
    wire.setsockopt(zmq.RECONNECT_IVL, 1)
    connecting = Connection(wire, service.endpoint)
    made = service.accept()
    clock.now += 0.1
    assert not connecting.connects_again()
    lose(connecting, made)
    service.accept().close()
    assert connecting.connects_again()
    connecting.close()


def test_an_observer_that_asked_nothing_for_long_gives_no_longer_attempts(
    service: Service, clock: Clock, wire: zmq.Socket[bytes]
) -> None:
    connecting = Connection(wire, service.endpoint)
    made = service.accept()
    clock.now += 1000  # all questions are answered at once, so nobody looks
    assert not connecting.connects_again()
    service.stop_answering()
    lose(connecting, made)
    assert given_up(connecting, clock, 2) == pytest.approx([0.7] * 2, abs=0.03)
    connecting.close()


def test_what_was_sent_is_lost_with_each_connection(service: Service, clock: Clock, wire: zmq.Socket[bytes]) -> None:
    wire.setsockopt(zmq.RECONNECT_IVL, 1)
    connecting = Connection(wire, service.endpoint)
    made = service.accept()
    assert not connecting.connects_again()
    for _ in range(3):  # lost and made again between two looks
        lose(connecting, made)
        made = service.accept()
        assert connecting.connects_again()
    made.close()
    connecting.close()


def test_connections_that_nobody_looks_at_do_not_stop_zeromq(service: Service, wire: zmq.Socket[bytes]) -> None:
    wire.setsockopt(zmq.RECONNECT_IVL, 1)
    connecting = Connection(wire, service.endpoint)
    for _ in range(1200):  # a monitor socket has room for 2000 events by itself
        service.accept().close()
    connecting.close()
