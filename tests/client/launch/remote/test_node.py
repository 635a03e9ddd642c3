"""What a worker on another machine is told without a question to the service, and what comes when none runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, cast

import pytest
from tests.harness.timing import unit

from central_storage.cluster import items
from central_storage.cluster.memory import NodeMemory, Piece
from central_storage.cluster.sockets import Sockets
from central_storage.launch.remote.node import Node
from central_storage.launch.supervisor.children import Child
from central_storage.launch.supervisor.loop import Call, Loop
from cs_proto.codec import decode, encode
from cs_proto.errors import InvalidArgumentError
from cs_proto.messages import Introduce, Joined, OpenSegment, Segment
from cs_proto.peers import server_endpoint
from cs_proto.records import Buffer
from cs_runtime.shared_memory.mapping import Mapping
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.readiness import is_readable
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


class Here:
    """A worker that is this process."""

    def is_run_by(self, peer: object, who: Introduce) -> bool:
        return True


class Service:
    """What the node asks of the service, which grants each segment with so many bytes."""

    def __init__(self, tmp_path: Path, shared: NodeMemory) -> None:
        self.asked: list[str] = []
        self.nbytes = 4096
        self.loop = Loop()
        self.node = Node(self.loop, str(tmp_path), self._put, shared)
        self.node.open()
        self.node.begin(Joined(0, 1, 1, "ipc"), cast(Child, Here()))

    def _put(self, kind: bytes, parts: Sequence[Buffer]) -> None:
        record = decode(parts)
        assert isinstance(record, OpenSegment)
        self.asked.append(record.segment)
        self.node.pass_on(kind, encode(Segment(record.segment, self.nbytes, record.segment.startswith("arena"))))

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
