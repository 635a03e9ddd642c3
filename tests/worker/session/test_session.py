"""A worker's sockets, without a worker behind them."""

from __future__ import annotations

import os
import select
import socket
import tempfile
from collections.abc import Iterator
from threading import Thread
from typing import NoReturn

import pytest
import zmq
from tests.harness.introduced import introduction
from tests.harness.timing import unit

from cs_proto.codec import WORK_LIMITS, decode, encode
from cs_proto.errors import InvalidArgumentError
from cs_proto.failures import error_of
from cs_proto.messages import (
    Died,
    Forget,
    Mailbox,
    MailboxAccepted,
    Offer,
    OpenMailbox,
    Refused,
    SegmentRefused,
    Worker,
)
from cs_proto.peers import SUPERVISOR, worker_endpoint
from cs_proto.records import Record
from cs_runtime.transport.mailboxes import Mailboxes
from cs_runtime.transport.rings import NBYTES
from cs_runtime.transport.supervisor_link import SupervisorLink
from cs_worker.baton import ProcessBaton
from cs_worker.config import Config
from cs_worker.session.core import COLLEAGUE
from cs_worker.session.session import Link


def _gone() -> NoReturn:
    raise AssertionError("the supervisor is there")


def introduced(ours: socket.socket, supervisor: socket.socket) -> SupervisorLink:
    """The connection of a worker that has its name and knows two controllers."""
    lifeline = SupervisorLink(ours, "worker")
    for name in (b"w0.1", b"c1", b"c2"):
        supervisor.sendall(b"".join(encode(introduction(name))))
    lifeline.await_name()
    return lifeline


@pytest.fixture
def link() -> Iterator[tuple[Link, zmq.Socket[bytes]]]:
    """A link that nobody else speaks to, and the socket of a peer of its ROUTER."""
    ours, supervisor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    doorbell, writer = os.pipe2(os.O_CLOEXEC)
    with tempfile.TemporaryDirectory(prefix="w-") as directory, supervisor, zmq.Context() as context:
        lifeline, config = introduced(ours, supervisor), Config(directory, 0, 1, "cpu:0")
        made = Link(config, lifeline, _gone, doorbell, ProcessBaton())
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.IDENTITY, b"c1")
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(config.endpoint)
        try:
            yield made, peer
        finally:
            peer.close()
            made.close()
            lifeline.close()
            os.close(doorbell)
            os.close(writer)


GOOD = [bytes(part) for part in encode(Forget((1,)))]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([b"\xc1"], "not one msgpack value"),
        ([b"\x90", *[b""] * 5000], "4097 frames; at most 4096"),
        ([b"\x90", *[bytes(1 << 20)] * 200], "a message of 134217729 bytes; at most 134217728"),
    ],
)
def test_what_is_no_message_is_refused_and_the_next_is_heard(
    link: tuple[Link, zmq.Socket[bytes]], parts: list[bytes], said: str
) -> None:
    ours, peer = link
    peer.send_multipart(parts)
    peer.send_multipart(GOOD)
    assert ours.receive(unit(20)) == (b"c1", Forget((1,)))
    assert peer.poll(int(unit(20) * 1000))
    refused = decode(peer.recv_multipart())
    assert isinstance(refused, Refused)
    assert said in refused.error.message


def test_one_part_that_is_too_large_ends_the_connection_before_it_is_taken(
    link: tuple[Link, zmq.Socket[bytes]],
) -> None:
    ours, peer = link
    peer.send_multipart(GOOD)
    assert ours.receive(unit(20)) == (b"c1", Forget((1,)))  # so the peer was let in
    ended = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    peer.send_multipart([bytes(WORK_LIMITS.part_nbytes + 1)])
    try:
        assert ended.poll(int(unit(20) * 1000))
    finally:
        peer.disable_monitor()
        ended.close()
    assert ours.receive(0) is None
    peer.send_multipart(GOOD)  # it connects again
    assert ours.receive(unit(20)) == (b"c1", Forget((1,)))


def test_an_offer_of_another_worker_is_heard_as_any_message(link: tuple[Link, zmq.Socket[bytes]]) -> None:
    """The session refuses it; a mailbox of a worker is none of its own."""
    ours, _ = link
    offer = Offer(1)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as colleague:
        colleague.setsockopt(zmq.LINGER, 0)
        colleague.bind(worker_endpoint(ours._config.run_directory, 1, 1))
        ours.send_worker(Worker(1, 1, 1, "cpu:0"), Forget((1,)))
        assert colleague.poll(int(unit(20) * 1000))
        name, *_ = colleague.recv_multipart()
        colleague.send_multipart([name, *encode(offer)])
        assert ours.receive(unit(20)) == (COLLEAGUE, offer)


def test_what_the_supervisor_says_while_a_segment_is_awaited_is_heard() -> None:
    ours, supervisor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    died = Died("worker", 1, 1, 43, "SIGKILL", "", True)
    doorbell, writer = os.pipe2(os.O_CLOEXEC)
    with tempfile.TemporaryDirectory(prefix="w-") as directory, supervisor:
        lifeline = introduced(ours, supervisor)
        link = Link(Config(directory, 0, 1, "cpu:0"), lifeline, _gone, doorbell, ProcessBaton())
        try:
            supervisor.sendall(b"".join(encode(died)))
            supervisor.sendall(b"".join(encode(SegmentRefused("inputs", error_of(InvalidArgumentError("none"))))))
            with pytest.raises(InvalidArgumentError, match="none"):
                lifeline.segment("inputs")
            assert link.receive(0) == (SUPERVISOR, died)
            assert link.receive(0) is None
        finally:
            link.close()
            lifeline.close()
            os.close(doorbell)
            os.close(writer)


class Controller:
    """A controller's socket, and the mailbox that it offers first of all."""

    def __init__(self, identity: bytes, number: int, endpoint: str, supervisor: socket.socket) -> None:
        """Connect and offer the mailbox, which the ``supervisor`` hands out when the worker asks for it."""
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.connect(endpoint)
        self.mailboxes: Mailboxes[str] = Mailboxes(select.poll(), 0.0)
        mailbox, memory = Mailbox(number, True, ""), os.memfd_create("mailbox")
        os.ftruncate(memory, NBYTES)
        descriptors = [memory, *(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))]
        copies = [os.dup(each) for each in descriptors]

        def hand_out() -> None:
            while not isinstance(decode([supervisor.recv(1 << 10)]), OpenMailbox):
                pass
            socket.send_fds(supervisor, [b"".join(encode(mailbox))], copies)
            for each in copies:
                os.close(each)

        Thread(target=hand_out, daemon=True).start()
        offer = self.mailboxes.offer("worker", mailbox, descriptors)
        assert offer is not None
        self.say(offer)

    def say(self, record: Record) -> None:
        """Over ZeroMQ."""
        self.socket.send_multipart(encode(record))
        self.mailboxes.sent("worker")

    def may_post(self) -> None:
        """The worker has accepted the mailbox."""
        accepted = decode(self.socket.recv_multipart())
        assert isinstance(accepted, MailboxAccepted)
        self.mailboxes.taken("worker", accepted)

    def post(self, record: Record) -> bool:
        return self.mailboxes.post("worker", encode(record))

    def close(self) -> None:
        self.mailboxes.close()
        self.context.destroy(linger=0)


def test_what_a_controller_has_left_in_its_mailbox_comes_before_all_work_of_the_next() -> None:
    """So a worker that hears late that a controller has gone carries out none of its runs behind one of the next."""
    ours, supervisor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    doorbell, writer = os.pipe2(os.O_CLOEXEC)
    with tempfile.TemporaryDirectory(prefix="w-") as directory, supervisor:
        lifeline, config = introduced(ours, supervisor), Config(directory, 0, 1, "cpu:0")
        link = Link(config, lifeline, _gone, doorbell, ProcessBaton())
        first = Controller(b"c1", 1, config.endpoint, supervisor)
        first.say(Forget((1,)))
        assert link.receive(unit(20)) == (b"c1", Forget((1,)))
        first.may_post()
        assert first.post(Forget((2,)))
        second = Controller(b"c2", 2, config.endpoint, supervisor)
        second.say(Forget((3,)))
        try:
            assert link.receive(unit(20)) == (b"c1", Forget((2,)))
            assert first.post(Forget((4,)))  # before the worker sees the next
            assert link.receive(unit(20)) == (b"c1", Forget((4,)))
            assert link.receive(unit(20)) == (b"c2", Forget((3,)))
            assert not first.post(Forget((5,)))
            second.may_post()
            assert second.post(Forget((6,)))
            assert link.receive(unit(20)) == (b"c2", Forget((6,)))
        finally:
            first.close()
            second.close()
            link.close()
            lifeline.close()
            os.close(doorbell)
            os.close(writer)
