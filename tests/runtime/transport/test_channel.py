"""The one place where a process waits, between a socket that plays the supervisor and peers of ZeroMQ."""

from __future__ import annotations

import os
import select
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.harness.clock import Clock
from tests.harness.introduced import introduction
from tests.harness.timing import unit

from cs_proto.codec import BULK_LIMITS, LIMITS, decode, encode
from cs_proto.errors import PeerProtocolError, ShutdownError
from cs_proto.messages import Died, Forget, Mailbox, Offer, Shutdown
from cs_proto.records import Buffer, Record, replace
from cs_runtime.transport import channel
from cs_runtime.transport.channel import SERVER, SUPERVISOR, Channel, Received
from cs_runtime.transport.mailboxes import Mailboxes
from cs_runtime.transport.readiness import is_readable
from cs_runtime.transport.rings import NBYTES, Mark
from cs_runtime.transport.supervisor_link import SupervisorLink

DIED = Died("worker", 1, 1, 43, "SIGKILL", "", True)


def record(number: int) -> Forget:
    return Forget((number + 1,))


def parts(number: int) -> list[bytes]:
    return [bytes(part) for part in encode(record(number))]


class World:
    """A channel that listens, with its supervisor and its peers in the same process."""

    def __init__(self, directory: Path, stack: ExitStack, **options: Any) -> None:
        self.directory = directory
        self.stack = stack
        self.malformed: list[bytes] = []
        self.woken = 0
        self.context = stack.enter_context(zmq.Context())
        ours, self.supervisor = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        stack.callback(self.supervisor.close)
        self.link = SupervisorLink(ours, "server")
        stack.callback(self.link.close)
        self.tell(replace(introduction(b"c0"), name=b"here"))
        self.link.await_name()
        wake, self.ringer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        stack.callback(os.close, wake)
        stack.callback(os.close, self.ringer)

        def on_wake() -> None:
            self.woken += len(os.read(wake, 64))

        self.channel = Channel(
            self.link, wake, lambda _: None, self._read, linger=0, patience=0.0, on_wake=on_wake, **options
        )
        stack.callback(self.channel.close)
        self.channel.listen(f"{directory}/here", LIMITS, 10, strict=True)
        self.channel.admit()

    def _read(self, peer: bytes, received: Sequence[Buffer]) -> Record | None:
        try:
            return decode(received, BULK_LIMITS)
        except PeerProtocolError:
            self.malformed.append(peer)
            return None

    def peer(self, identity: bytes) -> zmq.Socket[bytes]:
        self.tell(introduction(identity))
        made = self.context.socket(zmq.DEALER)
        self.stack.callback(made.close, linger=0)
        made.setsockopt(zmq.IDENTITY, identity)
        made.connect(f"ipc://{self.directory}/here")
        return made

    def tell(self, said: Record) -> None:
        self.supervisor.sendall(b"".join(encode(said)))

    def hear(self) -> Received:
        received = self.channel.receive(unit(20))
        assert received is not None
        return received

    def let_in(self, identity: bytes) -> zmq.Socket[bytes]:
        """A peer from which something has come."""
        made = self.peer(identity)
        made.send_multipart(parts(0))
        assert self.hear()[:2] == (identity, record(0))
        return made

    def until_there(self) -> None:
        """Wait until a message is there; the channel has not looked since."""
        router = self.channel._router
        assert router is not None
        assert router.poll(int(unit(20) * 1000))
        self.channel._poller.used(router)
        self.channel._next_look = 0.0


Make = Callable[..., World]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ch-"))

        def made(**options: Any) -> World:
            return World(Path(directory), stack, **options)

        yield made


def test_a_record_comes_with_its_sender_and_its_parts(make: Make) -> None:
    world = make()
    peer = world.peer(b"c1")
    peer.send_multipart(parts(7))
    received = world.hear()
    assert (received.peer, received.record) == (b"c1", record(7))
    assert [bytes(part) for part in received.parts] == parts(7)


def test_nobody_is_heard_before_the_supervisor_has_introduced_it(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    world = make()
    friend, stranger = world.let_in(b"c1"), world.context.socket(zmq.DEALER)
    world.stack.callback(stranger.close, linger=0)
    stranger.setsockopt(zmq.IDENTITY, b"c2")
    stranger.connect(f"ipc://{world.directory}/here")
    for number in range(8):  # all of them are dropped below
        stranger.send_multipart(parts(number))
    deadline = time.monotonic() + unit(20)
    while "not introduced: 8" not in caplog.text:
        assert time.monotonic() < deadline
        friend.send_multipart(parts(100))
        assert world.hear()[:2] == (b"c1", record(100))
    lines = [each.getMessage() for each in caplog.records if "not introduced" in each.getMessage()]
    assert [line.rpartition(" ")[2] for line in lines] == ["1", "2", "4", "8"]
    world.tell(introduction(b"c2"))
    stranger.send_multipart(parts(50))
    assert world.hear()[:2] == (b"c2", record(50))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(channel, "time", made)
    return made


class Sends:
    """Messages that a ROUTER receives without end, as far as it listens, before those that really came. It takes a
    tenth of the time of guests to fetch each of them."""

    def __init__(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.came: list[list[bytes]] = []
        self._clock = clock
        self._real = channel.receive
        monkeypatch.setattr(channel, "receive", self._receive)

    def _receive(self, *arguments: Any, **options: Any) -> list[zmq.Frame]:
        if not self.came:
            return self._real(*arguments, **options)
        self._clock.now += channel._GUESTS / 10
        return [zmq.Frame(part) for part in self.came.pop()]


@pytest.mark.parametrize("message", [[b"a stranger", *parts(9)], [b"o2", b"nonsense"], [b"w0.1", b"nonsense"]])
def test_what_is_dropped_takes_a_bounded_part_of_the_time(
    make: Make, monkeypatch: pytest.MonkeyPatch, clock: Clock, message: list[bytes]
) -> None:
    world = make()
    friend = world.let_in(b"c1")
    world.peer(b"o2"), world.peer(b"w0.1")
    sends = Sends(clock, monkeypatch)
    sends.came = [message] * 15
    friend.send_multipart(parts(1))
    world.until_there()
    assert world.channel.receive(0.0) is None  # the ROUTER rests
    assert (left := len(sends.came)) in (4, 5)
    world.tell(DIED)
    assert world.hear()[:2] == (SUPERVISOR, DIED)  # and nothing else does
    clock.now += 0.9 * channel._REST
    assert world.channel.receive(0.0) is None
    assert len(sends.came) == left
    clock.now += 0.2 * channel._REST
    assert world.hear()[:2] == (b"c1", record(1))
    assert not sends.came


def test_what_is_done_for_observers_takes_a_bounded_part_of_the_time(
    make: Make, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    world = make()
    friend, _ = world.let_in(b"c1"), world.let_in(b"o2")
    sends = Sends(clock, monkeypatch)
    sends.came = [[b"o2", *parts(9)] for _ in range(6)]
    friend.send_multipart(parts(1))
    world.until_there()
    for _ in range(3):
        assert world.hear()[:2] == (b"o2", record(9))
        clock.now += 0.3 * channel._GUESTS  # its owner answers
    assert world.channel.receive(0.0) is None
    assert len(sends.came) == 3
    clock.now += 1.1 * channel._REST
    assert world.hear()[:2] == (b"o2", record(9))


def test_connections_without_end_are_admitted_with_pauses(make: Make, clock: Clock) -> None:
    world = make()
    world.let_in(b"o1")
    assert world.channel._admission is not None
    waiting = world.channel._admission.descriptor
    world.peer(b"o2").send_multipart(parts(1))
    assert is_readable(waiting, unit(20))
    for seconds in (0.0, 0.9 * channel._ADMISSION_PAUSE):
        clock.now += seconds
        assert world.channel.receive(0.0) is None
        assert is_readable(waiting, 0)
    clock.now += 0.2 * channel._ADMISSION_PAUSE
    assert world.hear()[:2] == (b"o2", record(1))


@pytest.mark.timeout(unit(30))
def test_a_worker_that_the_supervisor_has_just_introduced_is_admitted_without_a_pause(make: Make, clock: Clock) -> None:
    world = make()
    world.let_in(b"o1"), world.let_in(b"w0.1"), world.let_in(b"w1.1")  # the clock stands still


def test_the_messages_of_a_training_are_not_counted(make: Make, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    world = make()
    friend = world.let_in(b"c1")
    world.let_in(b"w0.1"), world.let_in(b"o2")
    sends = Sends(clock, monkeypatch)
    sends.came = [[b"c1", *parts(3)], [b"w0.1", *parts(4)]] * 20 + [[b"o2", *parts(9)]]
    friend.send_multipart(parts(1))
    world.until_there()
    assert world.hear()[:2] == (b"o2", record(9))
    while sends.came:  # none of them waits
        received = world.channel.receive(0.0)
        assert received is not None
        assert received.peer in (b"c1", b"w0.1")
        clock.now += channel._GUESTS
    received = world.channel.receive(0.0)
    assert received is not None
    assert received[:2] == (b"c1", record(1))


def test_a_peer_is_called_what_the_supervisor_says_and_not_what_it_says(make: Make) -> None:
    world = make()
    world.tell(replace(introduction(b"w1.2"), name=b"a secret"))
    peer = world.context.socket(zmq.DEALER)
    world.stack.callback(peer.close, linger=0)
    peer.setsockopt(zmq.IDENTITY, b"a secret")
    peer.connect(f"ipc://{world.directory}/here")
    peer.send_multipart(parts(1))
    assert world.hear()[:2] == (b"w1.2", record(1))
    world.channel.send(b"w1.2", parts(2))
    assert peer.recv_multipart() == parts(2)
    assert world.channel.begin_to_send(b"w1.2")
    world.channel.finish_sending(parts(3))
    assert peer.recv_multipart() == parts(3)
    world.channel.send(b"w9.9", parts(4))  # nobody is called so any more
    assert world.channel.begin_to_send(b"w9.9") is None


def test_nothing_comes_in_time(make: Make) -> None:
    assert make().channel.receive(0) is None


@pytest.mark.parametrize("messages_first", [True, False])
def test_what_came_at_the_same_time_comes_in_one_order(make: Make, messages_first: bool) -> None:
    world = make(messages_first=messages_first)
    peer = world.let_in(b"c1")
    world.tell(DIED)
    peer.send_multipart(parts(1))
    world.until_there()
    first, second = (b"c1", record(1)), (SUPERVISOR, DIED)
    expected = [first, second] if messages_first else [second, first]
    assert [world.hear()[:2], world.hear()[:2]] == expected


@pytest.mark.parametrize("messages_first", [True, False])
def test_a_stranger_does_not_change_the_order(
    make: Make, monkeypatch: pytest.MonkeyPatch, messages_first: bool
) -> None:
    world = make(messages_first=messages_first)
    world.let_in(b"c1")
    came = [[b"a stranger", *parts(9)], [b"c1", *parts(1)]]

    def receive(*_: object, **__: object) -> list[zmq.Frame]:
        if not came:
            raise zmq.Again
        return [zmq.Frame(part) for part in came.pop(0)]

    monkeypatch.setattr(channel, "receive", receive)
    world.tell(DIED)  # it is read when the channel looks for who the stranger may be
    world.channel._ready.append(world.channel._router)  # type: ignore[arg-type]
    heard = [world.channel._at_hand(), world.channel._at_hand()]
    first, second = (b"c1", record(1)), (SUPERVISOR, DIED)
    assert [each and each[:2] for each in heard] == ([first, second] if messages_first else [second, first])


def test_messages_without_a_pause_do_not_silence_the_supervisor(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_BATCH", 3)
    world = make(messages_first=True, look_every=0.0)  # it looks before every message
    peer = world.let_in(b"c1")
    world.tell(DIED)
    for number in range(10):
        peer.send_multipart(parts(number))
    world.until_there()
    senders = [world.hear().peer for _ in range(11)]
    assert senders.index(SUPERVISOR) <= 3
    assert senders.count(b"c1") == 10


def test_the_messages_of_each_peer_keep_their_order(make: Make) -> None:
    world = make()
    first, other = world.let_in(b"c1"), make_dealer_server(world)
    for number in range(3):
        other.send_multipart([b"here", *parts(number)])
        first.send_multipart(parts(number))
    came = [world.hear()[:2] for _ in range(6)]
    for name in (b"c1", SERVER):
        assert [said for sender, said in came if sender == name] == [record(0), record(1), record(2)]


def make_dealer_server(world: World) -> zmq.Socket[bytes]:
    """A ROUTER to which the channel connects."""
    router = world.context.socket(zmq.ROUTER)
    world.stack.callback(router.close, linger=0)
    router.bind(f"ipc://{world.directory}/server")
    world.channel.connect(SERVER, f"ipc://{world.directory}/server")
    world.channel.send(SERVER, parts(9))
    assert router.recv_multipart() == [b"here", *parts(9)]
    return router


def test_a_connection_that_is_given_up_gives_nothing_any_more(make: Make) -> None:
    world = make()
    server = make_dealer_server(world)
    assert world.channel.is_connected(SERVER)
    server.send_multipart([b"here", *parts(1)])
    assert world.hear()[:2] == (SERVER, record(1))
    world.channel.disconnect(SERVER)
    world.channel.disconnect(SERVER)  # nothing happens
    assert not world.channel.is_connected(SERVER)
    assert world.channel.receive(0) is None


def test_a_signal_ends_the_wait(make: Make) -> None:
    world = make()
    os.write(world.ringer, b"!")
    assert world.channel.receive(None) is None
    assert world.woken == 1


def test_what_is_no_record_is_dropped_and_the_next_is_heard(make: Make) -> None:
    world = make()
    peer = world.peer(b"c1")
    for bad in ([b"\xc1"], [b""]):
        peer.send_multipart(bad)
    peer.send_multipart(parts(3))
    assert world.hear().record == record(3)
    assert world.malformed == [b"c1", b"c1"]


def test_a_message_without_parts_is_no_record(make: Make) -> None:
    world = make()
    world.tell(introduction(b"c2"))
    peer = world.context.socket(zmq.ROUTER)  # a DEALER sends at least one part behind its identity
    world.stack.callback(peer.close, linger=0)
    peer.setsockopt(zmq.IDENTITY, b"c2")
    peer.setsockopt(zmq.ROUTER_MANDATORY, 1)
    peer.setsockopt(zmq.CONNECT_ROUTING_ID, b"there")
    peer.connect(f"ipc://{world.directory}/here")
    while True:
        try:
            peer.send_multipart([b"there", b""])
        except zmq.ZMQError:  # the handshake is not over
            world.channel.receive(unit(0.001))
        else:
            break
    peer.send_multipart([b"there", *parts(4)])
    assert world.hear()[:2] == (b"c2", record(4))
    assert world.malformed == [b"c2"]


def test_a_supervisor_that_is_gone_is_an_error(make: Make) -> None:
    world = make()
    world.supervisor.close()
    with pytest.raises(ShutdownError):
        world.channel.receive(unit(20))


def test_answers_go_to_a_peer_that_is_there_and_to_no_other(make: Make) -> None:
    world = make()
    peer = world.let_in(b"c1")
    assert world.channel.begin_to_send(b"c1") is True
    world.channel.finish_sending(parts(5))
    assert decode(peer.recv_multipart()) == record(5)
    assert world.channel.begin_to_send(b"c2") is None


def test_an_offer_that_the_supervisor_refuses_is_answered_with_the_reason(make: Make) -> None:
    world = make()
    peer = world.let_in(b"c1")
    peer.send_multipart([bytes(part) for part in encode(Offer(3))])
    offer = world.hear().record
    assert isinstance(offer, Offer)
    world.link.carried_because = "no memory is shared here"
    accepted = world.channel.open_mailbox(b"c1", offer)
    assert accepted is not None
    assert accepted.refused == "no memory is shared here"
    assert world.channel.mailboxes.number(b"c1") == 0


@pytest.mark.parametrize("is_read", [True, False])
def test_a_mark_is_the_record_that_it_stands_for(make: Make, is_read: bool) -> None:
    def read(peer: bytes, number: int, body: bytes) -> Record | None:
        return Shutdown(f"{peer.decode()} {number} {body.decode()}") if body else None

    world = make(read_mark=read if is_read else None)
    memory = os.memfd_create("mailbox")
    os.ftruncate(memory, NBYTES)
    made = [memory, *(os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))]
    other = Mailboxes[str](select.poll(), 0.0)
    world.stack.callback(other.close)
    assert other.offer("here", Mailbox(3, True, ""), [os.dup(each) for each in made]) is not None
    other.sent("here")
    peer = world.let_in(b"c1")
    other.taken("here", world.channel.mailboxes.open(b"c1", Mailbox(3, True, ""), made))
    assert other.mark("here", 7, b"seven")
    if is_read:
        received = world.hear()
        assert (received.peer, received.record, list(received.parts)) == (b"c1", Shutdown("c1 7 seven"), [])
        assert world.channel.mailboxes.mark(b"c1", 8) is False  # it has not said that it opened the mailbox
        world.channel.mailboxes.sent(b"c1")
        assert world.channel.mailboxes.mark(b"c1", 8) is True
        assert other.take() == ("here", Mark(8, b""))
        assert other.mark("here", 9)  # of which nothing is made
    peer.send_multipart(parts(2))
    other.sent("here")
    assert world.hear()[:2] == (b"c1", record(2))


def test_what_waits_for_a_segment_comes_first(make: Make) -> None:
    world = make(messages_first=True)
    peer = world.let_in(b"c1")
    world.link.waiting.append(Shutdown("it came while a segment was awaited"))
    peer.send_multipart(parts(1))
    world.until_there()
    assert [world.hear().peer, world.hear().peer] == [SUPERVISOR, b"c1"]


def test_every_wait_is_inside_the_context_manager(make: Make) -> None:
    world = make()
    inside: list[str] = []

    @contextmanager
    def asleep() -> Iterator[None]:
        inside.append("in")
        yield
        inside.append("out")

    world.channel._while_asleep = asleep
    assert world.channel.receive(0) is None
    assert inside == ["in", "out"]


def test_closing_twice_is_closing_once(make: Make) -> None:
    world = make()
    assert not world.channel.is_closed
    world.channel.close()
    world.channel.close()
    assert world.channel.is_closed
