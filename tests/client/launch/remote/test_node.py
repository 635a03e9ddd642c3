"""What comes for a worker on another machine when none runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.timing import unit

from central_storage.cluster import items
from central_storage.cluster.memory import NodeMemory, Piece
from central_storage.cluster.sockets import Sockets
from central_storage.launch.remote.node import Node
from central_storage.launch.supervisor.loop import Call, Loop
from cs_proto.errors import InvalidArgumentError
from cs_proto.peers import server_endpoint
from cs_runtime.transport.readiness import is_readable

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
