"""What comes for a worker on another machine when none runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from central_storage.cluster import items
from central_storage.cluster.memory import NodeMemory, Piece
from central_storage.launch.remote.node import Node
from central_storage.launch.supervisor.loop import Loop
from cs_proto.errors import InvalidArgumentError

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
