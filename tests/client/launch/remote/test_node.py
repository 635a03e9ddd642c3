"""What comes for a worker on another machine when none runs, its mailboxes, and what it is told without a question to
the service."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import pytest
from tests.harness.timing import unit

from central_storage.cluster import items
from central_storage.cluster.memory import NodeMemory, Piece
from central_storage.cluster.sockets import Sockets
from central_storage.launch.remote.node import Node
from central_storage.launch.supervisor.children import Child
from central_storage.launch.supervisor.connections import Peer
from central_storage.launch.supervisor.loop import Call, Loop
from cs_proto import messages
from cs_proto.codec import WORK_LIMITS, decode, encode
from cs_proto.errors import InvalidArgumentError
from cs_proto.messages import Joined
from cs_proto.peers import SERVER, SUPERVISOR, server_endpoint
from cs_proto.records import Buffer, Record
from cs_runtime.shared_memory.mapping import Mapping
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.channel import Channel
from cs_runtime.transport.readiness import is_readable
from cs_runtime.transport.rings import HEAD, LEFT
from cs_runtime.transport.supervisor_link import SupervisorLink

T = TypeVar("T")
SLAB = "parameters/float32"


@pytest.fixture
def shared() -> Iterator[NodeMemory]:
    made = NodeMemory("this machine")
    yield made
    made.close()


def test_the_variables_of_all_workers_come_also_while_one_of_them_does_not_run(
    tmp_path: Path, shared: NodeMemory
) -> None:
    """The gateway does not bring them again for the others."""
    node = Node(Loop(), str(tmp_path), lambda kind, parts: None, shared)
    node.pass_on(items.MEMORY, items.parts_of(Piece(SLAB, 4096, 10, b"abc")))
    node.pass_on(items.MEMORY, items.parts_of(Piece("versions", 4096, 8, bytes(8))))
    node.pass_on(items.MEMORY, items.parts_of(Piece("arena/server", 4096, 0, b"for nobody")))
    (piece,) = shared.pieces([(SLAB, 9, 14)])
    assert piece.data == b"\0abc\0"
    assert shared.reservation("versions") == 4096
    with pytest.raises(InvalidArgumentError, match="there is no segment 'arena/server'"):
        shared.reservation("arena/server")
    node.close()


class Watched(Loop):
    """A loop that tells which descriptors it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.descriptors: set[int] = set()

    def on_readable(self, descriptor: int, call: Call | None) -> None:
        super().on_readable(descriptor, call)
        if call is not None:
            self.descriptors.add(descriptor)

    def has_rest(self, node: Node) -> bool:
        """Whether nothing is readable any more after a few turns of ``node``."""
        for _ in range(20):
            if not any(is_readable(descriptor, 0.05) for descriptor in self.descriptors):
                return True
            node.turn()
        return False


def test_a_node_without_a_worker_leaves_the_processor_alone(tmp_path: Path, shared: NodeMemory) -> None:
    """The descriptor of a socket stays readable until somebody asks the socket what has happened."""
    loop = Watched()
    node = Node(loop, str(tmp_path), lambda kind, parts: None, shared)
    node.open()
    assert loop.has_rest(node)
    sockets = Sockets()
    late = sockets.dealer(server_endpoint(str(tmp_path)), b"late")
    late.send([b"of a worker that has died"])
    assert any(is_readable(descriptor, unit(5)) for descriptor in loop.descriptors)
    assert loop.has_rest(node)
    sockets.close()
    node.close()


class Itself:
    """The child of a node, whichever process introduces itself."""

    def is_run_by(self, peer: Peer, who: messages.Introduce) -> bool:
        return True


class Worker:
    """What a worker has of its surroundings. Its calls that wait for an answer have the node turn meanwhile."""

    def __init__(self, path: str, turn: Callable[[], object]) -> None:
        self.turn = turn
        self.heard: list[Record] = []
        self.link = SupervisorLink(supervisor_link.connect(path), "worker", 0, 1)
        self.do(self.link.await_name)
        self.quiet = os.eventfd(0, os.EFD_CLOEXEC)
        self.channel = Channel(
            self.link,
            self.quiet,
            lambda *what: None,
            lambda peer, parts: decode(parts),
            linger=0,
            patience=0.0,
            on_wake=lambda: None,
            rings_late=True,
        )
        self.channel.listen(f"{path}/w0.1", WORK_LIMITS, 0)
        self.channel.admit()
        self.channel.connect(SERVER, server_endpoint(path))

    def do(self, call: Callable[[], object]) -> None:
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(call)
            while not done.done():
                self.turn()
            done.result()

    def hear(self) -> None:
        """Take one message, and do what it asks for as a worker does."""
        if (received := self.channel.receive(0.01)) is None:
            return
        if isinstance(received.record, messages.Offer):
            accepted: list[messages.MailboxAccepted] = []
            peer, offer = received.peer, received.record
            self.do(lambda: accepted.append(self.channel.open_mailbox(peer, offer)))
            self.channel.send(peer, encode(accepted[0]))
            self.channel.mailboxes.ring()
        elif received.peer != SUPERVISOR:
            self.heard.append(received.record)

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + unit(20)
        while not is_so():
            assert time.monotonic() < deadline
            self.turn()
            self.hear()


@dataclass
class Outpost:
    """A node with a worker, and what it has put for the gateway."""

    loop: Watched
    node: Node
    worker: Worker
    put: list[tuple[bytes, list[Buffer]]]

    def turn(self) -> None:
        self.loop.turn(0.01)
        self.node.turn()

    @property
    def said(self) -> list[Record]:
        return [decode(parts) for kind, parts in self.put if kind == items.SERVER]


@pytest.fixture
def outpost(shared: NodeMemory) -> Iterator[Outpost]:
    """Its worker has a mailbox to the server."""
    put: list[tuple[bytes, list[Buffer]]] = []
    loop = Watched()
    with tempfile.TemporaryDirectory(prefix="cs-", dir="/tmp") as path:
        node = Node(loop, path, lambda kind, parts: put.append((kind, list(parts))), shared)
        node.open()
        node.begin(Joined(0, 1, 1, "", b""), cast(Child, Itself()))

        def turn() -> None:
            loop.turn(0.01)
            node.turn()

        worker = Worker(path, turn)
        made: list[tuple[messages.Mailbox, list[int]]] = []
        worker.do(lambda: made.append(worker.link.mailbox(messages.MakeMailbox("server"))))
        offer = worker.channel.mailboxes.offer(SERVER, *made[0])
        assert offer is not None
        worker.channel.send(SERVER, encode(offer))
        for number in range(100, 150):  # some of them come with the Offer, and all count
            worker.channel.send(SERVER, question(number))
        worker.until(lambda: worker.channel.mailboxes.number(SERVER) == 1 and len(put) == 50)
        put.clear()
        yield Outpost(loop, node, worker, put)
        worker.channel.close()
        worker.link.close()
        os.close(worker.quiet)
        node.close()


def question(number: int, nbytes: int = 1) -> list[Buffer]:
    return encode(messages.Get(number, (), ("x" * nbytes,), False))


def test_a_worker_is_heard_in_the_order_in_which_it_spoke(outpost: Outpost) -> None:
    """Whether a message went by mailbox or found it full."""
    worker = outpost.worker
    before = worker.channel.mailboxes.posted
    for number in range(1, 31):
        worker.channel.send(SERVER, question(number, 60_000 if number % 3 else 10))
    worker.channel.mailboxes.ring()
    assert 2 < worker.channel.mailboxes.posted - before < 30
    worker.until(lambda: len(outpost.said) == 30)
    assert [said.request for said in outpost.said if isinstance(said, messages.Get)] == [*range(1, 31)]


def test_mail_wakes_the_outpost_and_leaves_it_at_rest(outpost: Outpost) -> None:
    mailboxes = outpost.worker.channel.mailboxes
    for number in range(1, 4):
        while outpost.node.turn():
            pass
        assert outpost.loop.has_rest(outpost.node)
        outpost.worker.channel.send(SERVER, question(number))
        mailboxes.ring()
        assert any(is_readable(descriptor, 0) for descriptor in outpost.loop.descriptors)
        outpost.loop.turn(0)
        assert outpost.node.turn()
        assert len(outpost.said) == number
    assert mailboxes.rung == 3
    assert outpost.loop.has_rest(outpost.node)


def test_what_a_worker_has_posted_without_a_ring_is_heard_at_its_end(outpost: Outpost) -> None:
    """It was killed in between."""
    worker = outpost.worker
    before = worker.channel.mailboxes.posted
    worker.channel.send(SERVER, question(1))
    assert worker.channel.mailboxes.posted == before + 1
    outpost.node.turn()
    outpost.node.end()
    assert len(outpost.said) == 1
    assert worker.channel.mailboxes.box(SERVER).outgoing.words[LEFT]  # type: ignore[union-attr]


def test_a_mark_goes_as_a_message(outpost: Outpost) -> None:
    """Only the server knows what it stands for."""
    assert not outpost.worker.channel.mailboxes.mark(SERVER, 7)


def test_a_damaged_mailbox_is_given_up(outpost: Outpost) -> None:
    worker = outpost.worker
    box = worker.channel.mailboxes.box(SERVER)
    assert box is not None
    box.outgoing.words[HEAD] = 12345
    outpost.node.turn()
    before = worker.channel.mailboxes.posted
    worker.channel.send(SERVER, question(1))
    assert worker.channel.mailboxes.posted == before
    worker.until(lambda: len(outpost.said) == 1)


def test_what_the_script_says_comes_by_mailbox(outpost: Outpost) -> None:
    worker, node = outpost.worker, outpost.node
    script = messages.Introduce(messages.PROTOCOL, "controller", 0, 1, 40, "9f", b"c9f")
    node.pass_on(items.SUPERVISOR, encode(script))

    def say(number: int) -> None:
        node.pass_on(items.CONTROLLER, [b"c9f", *encode(messages.Cancel((number,)))])

    say(1)
    worker.until(lambda: b"c9f" in worker.channel.mailboxes.peers() and len(worker.heard) == 1)
    assert node._now is not None
    mailboxes = node._now.mailboxes
    worker.until(lambda: mailboxes.number(b"c9f") > 0)  # it has the answer
    mailbox = worker.channel.mailboxes.box(b"c9f")
    assert mailbox is not None
    for number in (2, 3):
        say(number)
    assert mailbox.incoming.has_mail
    worker.until(lambda: len(worker.heard) == 3)
    assert worker.heard == [messages.Cancel((number,)) for number in (1, 2, 3)]
    assert not any(kind == items.CONTROLLER for kind, _ in outpost.put)
    node.pass_on(items.SUPERVISOR, encode(messages.Died("worker", 1, 1, 41, "SIGKILL", "", False)))
    say(4)
    worker.until(lambda: len(worker.heard) == 4)


def test_a_node_without_mailboxes_makes_none(shared: NodeMemory) -> None:
    node = Node(Loop(), "run", lambda kind, parts: None, shared, mailboxes=False)
    assert node._mailroom.make(node, "w0", "server")[0].refused == "mailboxes are switched off"
    node.close()


class Service:
    """What the node asks of the service, which grants each segment with so many bytes."""

    def __init__(self, tmp_path: Path, shared: NodeMemory) -> None:
        self.asked: list[str] = []
        self.nbytes = 4096
        self.loop = Loop()
        self.node = Node(self.loop, str(tmp_path), self._put, shared)
        self.node.open()
        self.node.begin(Joined(0, 1, 1, "ipc"), cast(Child, Itself()))

    def _put(self, kind: bytes, parts: Sequence[Buffer]) -> None:
        record = decode(parts)
        assert isinstance(record, messages.OpenSegment)
        self.asked.append(record.segment)
        self.node.pass_on(
            kind, encode(messages.Segment(record.segment, self.nbytes, record.segment.startswith("arena")))
        )

    def while_serving(self, call: Callable[[], T]) -> T:
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(call)
            while not found.done():
                self.loop.turn(0.01)
            return found.result()


def test_a_variable_that_is_read_again_costs_no_question_to_the_service(tmp_path: Path, shared: NodeMemory) -> None:
    """A worker maps the segment anew if it has preserved what it had read."""
    service = Service(tmp_path, shared)
    link = SupervisorLink(supervisor_link.connect(str(tmp_path), unit(5)), "worker", 0, 1)
    link.may_preserve = True

    def read(name: str, stop: int) -> bytes:
        segment = service.while_serving(lambda: link.segment(name, stop))
        assert isinstance(segment, Mapping)
        link.map_anew(name)
        return bytes(segment.memory[stop - 3 : stop])

    service.while_serving(lambda: link.await_name(unit(5)))
    assert read(SLAB, 4096) == bytes(3)
    service.node.pass_on(items.MEMORY, items.parts_of(Piece(SLAB, 4096, 4093, b"new")))
    assert read(SLAB, 4096) == b"new"
    assert service.asked == [SLAB]
    service.nbytes = 8192
    assert read(SLAB, 5000) == bytes(3)  # only the service knows whether it is so long now
    assert service.asked == [SLAB, SLAB]
    service.node.pass_on(items.MEMORY, items.parts_of(Piece(SLAB, 12288, 12285, b"end")))
    assert read(SLAB, 12288) == b"end"
    assert service.asked == [SLAB, SLAB]
    for _ in range(2):  # what is of this worker alone, it maps once
        read("arena/0", 4096)
    assert service.asked == [SLAB, SLAB, "arena/0", "arena/0"]
    link.close()
    service.node.close()
