"""What a worker on another machine may say to the server, and what it is brought before it is told something."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.harness.examples import examples
from tests.harness.processes import start
from tests.harness.record_strategies import records
from tests.harness.timing import unit

from central_storage.cluster import items
from central_storage.cluster.memory import Piece
from central_storage.cluster.stand_in import StandIn, checked
from cs_proto import messages
from cs_proto.codec import BULK_LIMITS, PACKET_NBYTES, Decoder, decode, encode
from cs_proto.descriptors import Array, Location
from cs_proto.errors import CentralStorageError, PeerProtocolError
from cs_proto.peers import server_endpoint
from cs_proto.records import RECORDS, Buffer, Record, altered
from cs_runtime.transport import supervisor_link
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


@pytest.fixture
def run_directory() -> Iterator[str]:
    """Of a service that waits for one worker."""
    with tempfile.TemporaryDirectory(prefix="cs-", dir="/tmp") as parent:
        path = f"{parent}/run"
        with start("cs-launch", "--serve", "1", "--run-dir", path) as service:
            service.wait_for("workers from elsewhere", stream="err")
            yield path


def failed(error: CentralStorageError) -> None:
    raise error


def test_only_the_script_has_changed_what_a_worker_has_brought(run_directory: str) -> None:
    """What a server that was started again says twice brings no older bytes over newer ones."""
    gateway = Gateway()
    launcher = supervisor_link.connect(run_directory)
    launcher.sendall(b"".join(encode(messages.Join(messages.PROTOCOL, os.getpid()))))
    joined = decode([launcher.recv(PACKET_NBYTES)])
    assert isinstance(joined, messages.Joined)
    stand_in = StandIn(gateway, run_directory, joined, lambda *item: gateway.put.append(item), lambda: 0, failed)
    script = SupervisorLink(supervisor_link.connect(run_directory), "controller")
    script.await_name()
    stand_in.pass_on(items.SUPERVISOR, encode(messages.Ready()))
    worker = messages.Worker(joined.rank, joined.incarnation, os.getpid(), "cpu:0")
    stand_in.pass_on(items.SERVER, encode(messages.Register(messages.PROTOCOL, worker)))
    gateway.turn_until(lambda: gateway.has_put(messages.Registered))
    server = gateway.context.socket(zmq.DEALER)
    server.setsockopt(zmq.IDENTITY, script.name)
    server.connect(server_endpoint(run_directory))
    server.send_multipart(encode(messages.Hello(messages.PROTOCOL, "controller", script.client, os.getpid())))
    peer = peer_of(messages.Introduce(messages.PROTOCOL, "controller", 0, 1, os.getpid(), script.client))
    gateway.turn_until(lambda: peer in stand_in._link.peers)

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
    stand_in.close()
    script.close()
    launcher.close()
    gateway.context.destroy(linger=0)
