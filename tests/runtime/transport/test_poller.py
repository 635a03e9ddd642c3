"""Waiting for descriptors and for sockets whose descriptors tell of news only."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator
from contextlib import suppress

import pytest

from cs_runtime.transport.poller import Poller
from cs_runtime.transport.readiness import is_readable


class Socket:
    """As one of ZeroMQ: its descriptor is readable from the first news on until somebody looks, or sends."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK)
        self.messages = 0
        self.asked = 0

    def fileno(self) -> int:
        return self.descriptor

    def getsockopt(self, option: int) -> int | bytes:
        assert option == 15  # ZMQ_EVENTS
        self.asked += 1
        self._take_news()
        return 3 if self.messages else 2  # it may always be sent to

    def get_message(self) -> None:
        self.messages += 1
        os.eventfd_write(self.descriptor, 1)

    def send(self) -> None:
        self._take_news()

    def _take_news(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)


@pytest.fixture
def socket() -> Iterator[Socket]:
    made = Socket()
    yield made
    os.close(made.descriptor)


@pytest.fixture
def poller(socket: Socket) -> Poller[Socket]:
    made: Poller[Socket] = Poller()
    made.register_socket(socket)
    return made


def test_a_message_is_named_until_it_is_taken(poller: Poller[Socket], socket: Socket) -> None:
    assert poller.poll(0) == set()
    socket.get_message()
    assert poller.poll(None) == {socket}
    assert poller.poll(None) == {socket}
    socket.messages = 0
    assert poller.poll(0) == set()


def test_a_message_from_before_the_socket_was_registered_is_named(socket: Socket) -> None:
    socket.get_message()
    socket.send()
    poller: Poller[Socket] = Poller()
    poller.register_socket(socket)
    assert poller.poll(None) == {socket}


def test_a_message_that_comes_while_something_is_sent_is_named(poller: Poller[Socket], socket: Socket) -> None:
    assert poller.poll(0) == set()
    socket.get_message()
    socket.send()
    poller.used(socket)
    assert poller.poll(None) == {socket}


def test_news_that_are_no_message_are_nothing(poller: Poller[Socket], socket: Socket) -> None:
    assert poller.poll(0) == set()
    os.eventfd_write(socket.descriptor, 1)
    assert poller.poll(None) == set()
    assert poller.poll(0) == set()


def test_a_socket_that_nobody_uses_is_left_alone(poller: Poller[Socket], socket: Socket) -> None:
    poller.poll(0)
    asked = socket.asked
    poller.poll(0)
    assert socket.asked == asked


def test_a_descriptor_and_a_socket(poller: Poller[Socket], socket: Socket) -> None:
    reader, writer = os.pipe()
    poller.register(reader)
    os.write(writer, b"x")
    assert poller.poll(None) == {reader}
    socket.get_message()
    assert poller.poll(None) == {reader, socket}
    poller.unregister(reader)
    assert poller.poll(None) == {socket}
    os.close(reader)
    os.close(writer)


def test_what_is_not_registered_any_more_is_not_named(poller: Poller[Socket], socket: Socket) -> None:
    socket.get_message()
    assert poller.poll(None) == {socket}
    poller.unregister_socket(socket)
    poller.used(socket)
    assert poller.poll(0) == set()


def test_descriptors_of_any_number_may_be_asked_for() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    reader, writer = os.pipe()
    high = fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, 2000)
    try:
        assert not is_readable(high, 0)
        os.write(writer, b"!")
        assert is_readable(high, None)
    finally:
        for descriptor in (reader, writer, high):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
