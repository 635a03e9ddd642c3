"""What a worker on another machine may say to the server, and what it is brought before it is told something."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples
from tests.harness.processes import MAILBOXES, start
from tests.harness.record_strategies import records
from tests.harness.shortages import no_descriptors
from tests.harness.timing import unit

from central_storage.cluster import items
from central_storage.cluster.memory import Piece
from central_storage.cluster.stand_in import StandIn, checked
from cs_proto import messages
from cs_proto.codec import BULK_LIMITS, PACKET_NBYTES, Decoder, decode, encode
from cs_proto.descriptors import Array, Location
from cs_proto.errors import CentralStorageError, DescriptorLimitError, LaunchError, PeerProtocolError
from cs_proto.peers import server_endpoint, worker_endpoint
from cs_proto.records import RECORDS, Buffer, Record, altered
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.channel import Channel
from cs_runtime.transport.rings import LEFT
from cs_runtime.transport.supervisor_link import SupervisorLink, peer_of

WORKERS = {
    *("Register", "Ask", "Return", "ClientGone", "Get", "Describe", "DescribeSlots", "Fetch", "Put", "Locate"),
    "Statistics",
}
HOLDERS = WORKERS | {"MergeCallReturn", "Create", "Assign", "AssignSlot", "Configure"}


def of(record: Record, rank: int, incarnation: int) -> Record:
    """The record as that worker would send it."""
    if isinstance(record, messages.Register):
        return altered(record, worker=altered(record.worker, replica=rank, incarnation=incarnation))
    if isinstance(record, messages.Ask | messages.Return):
        return altered(record, replica=rank, incarnation=incarnation)
    return record


@given(record=st.sampled_from(list(RECORDS.values())).flatmap(records))
def test_only_what_a_worker_says_is_passed_on(record: Record) -> None:
    for rank, allowed in ((0, HOLDERS), (3, WORKERS)):
        said = of(record, rank, 2)
        if type(record).__name__ in allowed:
            assert checked(said, rank, 2) is said
        else:
            with pytest.raises(PeerProtocolError, match=f"worker w{rank}.2 .* sent a {type(record).__name__} "):
                checked(said, rank, 2)


@pytest.mark.parametrize("kind", [messages.Register, messages.Ask, messages.Return])
@pytest.mark.parametrize("other", [(1, 2), (0, 1), (0, 3)])
def test_nobody_speaks_for_another_worker(kind: type[Record], other: tuple[int, int]) -> None:
    @settings(max_examples=examples(5))
    @given(record=records(kind))
    def say(record: Record) -> None:
        with pytest.raises(PeerProtocolError, match=f"as w{other[0]}.{other[1]}, which it may not send"):
            checked(of(record, *other), 0, 2)

    say()


@pytest.mark.parametrize("kind", [b"C", b"J", b"L", b"M", b"S", b"W", b"Z", b"?"])
def test_an_item_without_parts_ends_its_worker_and_nothing_else(kind: bytes) -> None:
    stand_in = StandIn.__new__(StandIn)  # without a service: nothing of it may be needed
    with pytest.raises(PeerProtocolError, match="without parts"):
        stand_in.pass_on(kind, [])


# --- with a service -------------------------------------------------------------------------------------------------


class Gateway:
    """The loop of a gateway, and what it puts for the outpost."""

    def __init__(self) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.put: list[tuple[bytes, list[Buffer]]] = []
        self._poller = zmq.Poller()
        self._watched: dict[Any, Callable[[], None]] = {}

    def watch(self, what: zmq.Socket[bytes] | int, call: Callable[[], None]) -> None:
        self._poller.register(what, zmq.POLLIN)
        self._watched[what] = call

    def unwatch(self, what: zmq.Socket[bytes] | int) -> None:
        self._poller.unregister(what)
        del self._watched[what]

    def turn_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + unit(20)
        while not is_so():
            assert time.monotonic() < deadline
            for what, _ in self._poller.poll(100):
                self._watched[what]()

    def has_put(self, kind: type[Record]) -> bool:
        return any(isinstance(decode(parts), kind) for item, parts in self.put if item == items.SERVER)


@contextmanager
def waiting_service(workers: int) -> Iterator[str]:
    """The run directory of a service that waits for so many workers."""
    with tempfile.TemporaryDirectory(prefix="cs-", dir="/tmp") as parent:
        path = f"{parent}/run"
        with start("cs-launch", "--serve", str(workers), "--run-dir", path) as service:
            service.wait_for("from elsewhere", stream="err")
            yield path


@pytest.fixture
def run_directory() -> Iterator[str]:
    with waiting_service(1) as path:
        yield path


def failed(error: CentralStorageError) -> None:
    raise error


class Introduced:
    """A stand-in, and a script that the service has introduced to it."""

    def __init__(self, run_directory: str) -> None:
        gateway = self.gateway = Gateway()
        self._launcher = supervisor_link.connect(run_directory)
        self._launcher.sendall(b"".join(encode(messages.Join(messages.PROTOCOL, os.getpid()))))
        joined = decode([self._launcher.recv(PACKET_NBYTES)])
        assert isinstance(joined, messages.Joined)
        stand_in = self.stand_in = StandIn(
            gateway, run_directory, joined, lambda *item: gateway.put.append(item), lambda: 0, failed
        )
        script = self.script = SupervisorLink(supervisor_link.connect(run_directory), "controller")
        script.await_name()
        stand_in.pass_on(items.SUPERVISOR, encode(messages.Ready()))
        worker = messages.Worker(joined.rank, joined.incarnation, os.getpid(), "cpu:0")
        stand_in.pass_on(items.SERVER, encode(messages.Register(messages.PROTOCOL, worker)))
        gateway.turn_until(lambda: gateway.has_put(messages.Registered))
        server = self._server = gateway.context.socket(zmq.DEALER)
        server.setsockopt(zmq.IDENTITY, script.name)
        server.connect(server_endpoint(run_directory))
        server.send_multipart(encode(messages.Hello(messages.PROTOCOL, "controller", script.client, os.getpid())))
        peer = self.peer = peer_of(
            messages.Introduce(messages.PROTOCOL, "controller", 0, 1, os.getpid(), script.client)
        )
        gateway.turn_until(lambda: peer in stand_in._link.peers)

    def close(self) -> None:
        self.stand_in.close()
        self.script.close()
        self._launcher.close()
        self.gateway.context.destroy(linger=0)


@pytest.fixture
def introduced(run_directory: str) -> Iterator[Introduced]:
    made = Introduced(run_directory)
    yield made
    made.close()


@pytest.mark.skipif(not MAILBOXES, reason="CS_MAILBOXES=off: the script offers none")
def test_what_the_script_says_by_mailbox_is_passed_on_in_order(introduced: Introduced, run_directory: str) -> None:
    gateway, stand_in, worker = introduced.gateway, introduced.stand_in, b"w0"
    quiet = os.eventfd(0, os.EFD_CLOEXEC)
    script = Channel(
        introduced.script,
        quiet,
        lambda *what: None,
        lambda peer, parts: decode(parts),
        linger=0,
        patience=0.0,
        on_wake=lambda: None,
        rings_late=True,
    )
    script.connect(worker, worker_endpoint(run_directory, 0, 1))
    gateway.put.clear()
    watched = len(gateway._watched)
    script.offer_mailbox(worker, "w0")
    script.send(worker, encode(messages.Cancel((40,))))  # comes with the Offer, and counts

    def is_open() -> bool:
        stand_in.turn()
        script.receive(0.01)
        return script.mailboxes.number(worker) > 0

    gateway.turn_until(is_open)
    assert len(gateway._watched) == watched + 1
    before = script.mailboxes.posted
    for number in range(1, 31):  # they do not all fit
        arguments = bytes(50_000 if number % 3 else 10)
        script.send(worker, encode(messages.Run((number,), 0, 0, 7, bytes(16), None, True, arguments, ())))
    script.mailboxes.ring()
    assert 2 < script.mailboxes.posted - before < 30

    def passed_on() -> list[Record]:
        stand_in.turn()
        return [decode(parts[1:]) for item, parts in gateway.put if item == items.CONTROLLER]

    gateway.turn_until(lambda: len(passed_on()) == 31)
    assert passed_on()[0] == messages.Cancel((40,))
    assert [each.run for each in passed_on() if isinstance(each, messages.Run)] == [(n,) for n in range(1, 31)]
    script.send(worker, encode(messages.Cancel((30,))))  # it is killed before it rings
    stand_in.turn()
    assert passed_on()[-1] == messages.Cancel((30,))
    stand_in.close()
    assert not gateway._watched
    box = script.mailboxes.box(worker)
    assert box is not None
    assert box.outgoing.words[LEFT]
    script.close()
    os.close(quiet)


def test_only_the_script_has_changed_what_a_worker_has_brought(introduced: Introduced) -> None:
    """What a server that was started again says twice brings no older bytes over newer ones."""
    gateway, stand_in, peer = introduced.gateway, introduced.stand_in, introduced.peer

    def brought(kind: bytes, record: Record, *label: bytes) -> list[tuple[int, int]]:
        """The parts of the worker's arena that are brought before ``record``."""
        gateway.put.clear()
        stand_in._pass_down(kind, Decoder(BULK_LIMITS), encode(record), label)
        pieces = [items.piece_of(parts) for item, parts in gateway.put if item == items.MEMORY]
        return [(piece.offset, len(piece.data)) for piece in pieces if piece.segment == "arena/0"]

    array = Array("uint8", (3000,), Location("arena/0", 4096))
    merged = messages.Merged((1,), 0, messages.Value(b"\xc0", (array,)))
    assert brought(items.SERVER, merged) == [(4096, 3000)]  # of an earlier incarnation
    stand_in.pass_on(items.MEMORY, items.parts_of(Piece("arena/0", 1 << 20, 5000, bytes(1000))))
    assert brought(items.SERVER, merged) == [(4096, 904), (6000, 1096)]
    run = messages.Run((1,), 0, 0, 7, bytes(16), None, True, array, ())
    assert brought(items.CONTROLLER, run, peer) == [(4096, 3000)]


def test_what_the_system_refuses_ends_the_session_with_a_remedy(introduced: Introduced) -> None:
    gateway, stand_in = introduced.gateway, introduced.stand_in
    array = Array("uint8", (3000,), Location("arena/0", 4096))  # nobody has mapped it yet
    merged = messages.Merged((1,), 0, messages.Value(b"\xc0", (array,)))
    call = stand_in._guarded(lambda: stand_in._pass_down(items.SERVER, Decoder(BULK_LIMITS), encode(merged)))
    gateway.put.clear()
    said = r"the gateway \(pid .*larger limit \(ulimit -Hn\)"
    with no_descriptors(), pytest.raises(DescriptorLimitError, match=said):
        call()
    assert gateway.put == []

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(LaunchError, match=r"cannot go on with this outpost: .* No space left"):
        stand_in._guarded(fail)()
