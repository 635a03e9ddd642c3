"""Pieces of segments go from one machine to the other, within bounds: nobody writes what is not its own."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from central_storage.cluster import items
from central_storage.cluster.memory import PIECE_NBYTES, HeadMemory, NodeMemory, Piece, writable_from
from central_storage.cluster.session import Session
from cs_proto.codec import decode
from cs_proto.errors import InvalidArgumentError, MemoryPlanError, PeerProtocolError
from cs_proto.messages import Envelope
from cs_runtime import machine
from cs_runtime.shared_memory.mapping import Mapping

NBYTES = 3 * PIECE_NBYTES
ARENA, GRADIENTS, PARAMETERS = "arena/1", "gradients/1/0/float32", "parameters/float32"


class Service:
    """The segments of a service as worker 1 gets them."""

    def __init__(self) -> None:
        self.lengths = {ARENA: NBYTES, GRADIENTS: NBYTES, PARAMETERS: NBYTES, "arena/0": NBYTES}
        self.mappings: dict[str, Mapping] = {}
        self.opened: list[tuple[str, int]] = []

    def open(self, name: str, stop: int) -> Mapping:
        self.opened.append((name, stop))
        mapping = self.mappings.get(name)
        if mapping is None or mapping.nbytes < min(stop, self.lengths[name]):
            descriptor = os.memfd_create("segment")
            os.ftruncate(descriptor, self.lengths[name])
            is_writable = name in (ARENA, GRADIENTS)
            mapping = self.mappings[name] = Mapping(name, descriptor, self.lengths[name], writable=is_writable)
        return mapping


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.mappings.clear()


@pytest.fixture
def head(service: Service) -> HeadMemory:
    return HeadMemory(1, service.open)


@pytest.fixture
def node() -> Iterator[NodeMemory]:
    made = NodeMemory("worker 1")
    yield made
    made.close()


def in_worker(node: NodeMemory, name: str) -> mmap.mmap:
    """What the worker maps."""
    descriptor = node.descriptor(name, writable=True)
    try:
        return mmap.mmap(descriptor, node.reservation(name))
    finally:
        os.close(descriptor)


# --- to the service -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [ARENA, GRADIENTS])
def test_what_the_worker_writes_comes_to_the_service(
    name: str, node: NodeMemory, head: HeadMemory, service: Service
) -> None:
    node.hold(name, NBYTES)
    written = np.random.default_rng(0).integers(0, 256, NBYTES, np.uint8)
    with in_worker(node, name) as seen:
        seen[:] = written.tobytes()
    pieces = list(node.pieces([(name, 5, 9), (name, 64, 64 + 2 * PIECE_NBYTES + 1)]))
    assert [(each.offset, len(each.data)) for each in pieces] == [
        (5, 4),
        (64, PIECE_NBYTES),
        (64 + PIECE_NBYTES, PIECE_NBYTES),
        (64 + 2 * PIECE_NBYTES, 1),
    ]
    assert {(each.segment, each.reservation) for each in pieces} == {(name, NBYTES)}
    for piece in pieces:
        head.write(piece)
    found = np.zeros(NBYTES, np.uint8)
    found[5:9], found[64 : 65 + 2 * PIECE_NBYTES] = written[5:9], written[64 : 65 + 2 * PIECE_NBYTES]
    assert np.array_equal(service.mappings[name].elements("uint8"), found)


def test_a_piece_is_copied_once_when_its_envelope_is_made(node: NodeMemory) -> None:
    node.hold(ARENA, NBYTES)
    sender, receiver = (Session(bytes(16), 0.0) for _ in range(2))
    with in_worker(node, ARENA) as seen:
        (piece,) = node.pieces([(ARENA, 0, 2)])
        sender.put(items.MEMORY, items.parts_of(piece))
        seen[0:2] = b"aa"
        assert len(list(sender.envelopes(0.0))) == 1
        seen[0:2] = b"bb"
        sender.resume(0, 0.0)  # it was lost
        (message,) = sender.envelopes(0.0)
    record = decode(message)
    assert isinstance(record, Envelope)
    ((_, parts),) = receiver.hear(record, 0.0)
    assert items.piece_of(parts) == Piece(ARENA, NBYTES, 0, b"aa")


def test_a_piece_outlives_the_memory_of_its_worker(node: NodeMemory) -> None:
    node.hold(ARENA, NBYTES)
    with in_worker(node, ARENA) as seen:
        seen[0:2] = b"aa"
        (piece,) = node.pieces([(ARENA, 0, 2)])
    node.close()
    assert piece.data == b"aa"


@pytest.mark.parametrize(
    "name",
    [
        *("arena/0", "arena/11", "arena/controller", "gradients/0/0/float32", "gradients/1/2/float32", "control"),
        *(PARAMETERS, "versions", "gradients/1/0/float32/x", "arena/1\n", "xarena/1", "gradients/1/0/"),
        *("slots/1/m/float32", "inputs", ""),
    ],
)
def test_nobody_else_is_written(name: str, head: HeadMemory, service: Service) -> None:
    assert writable_from(1).fullmatch(name) is None
    with pytest.raises(PeerProtocolError, match="the other end of the link of worker 1 may not write"):
        head.write(Piece(name, NBYTES, 0, b"a"))
    assert service.opened == []


@pytest.mark.parametrize("offset", [-1, NBYTES - 3, NBYTES, 1 << 61])
def test_nothing_is_written_outside_a_segment(offset: int, head: HeadMemory, service: Service) -> None:
    head.write(Piece(ARENA, NBYTES, NBYTES - 4, b"last"))
    error = f"bytes {offset} to {offset + 4} of segment arena/1, which has {NBYTES}"
    with pytest.raises(PeerProtocolError, match=error):
        head.write(Piece(ARENA, 1 << 62, offset, b"more"))
    assert service.mappings[ARENA].memory[-4:] == b"last"
    assert not any(service.mappings[ARENA].memory[:-4])


def test_a_segment_that_the_service_does_not_let_the_worker_write(head: HeadMemory, service: Service) -> None:
    service.lengths["gradients/1/1/float32"] = NBYTES
    with pytest.raises(PeerProtocolError, match="segment gradients/1/1/float32 of worker 1 cannot be written here"):
        head.write(Piece("gradients/1/1/float32", NBYTES, 0, b"a"))


def test_a_segment_that_became_longer_is_mapped_as_far_as_it_is_needed(head: HeadMemory, service: Service) -> None:
    head.write(Piece(GRADIENTS, NBYTES, 0, b"a"))
    service.lengths[GRADIENTS] = 2 * NBYTES
    head.write(Piece(GRADIENTS, 2 * NBYTES, NBYTES, b"b"))
    assert service.opened == [(GRADIENTS, 1), (GRADIENTS, NBYTES + 1)]


def test_memory_that_the_machine_does_not_have_is_not_taken(
    head: HeadMemory, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    head.write(Piece(ARENA, NBYTES, 0, b"a" * PIECE_NBYTES))
    monkeypatch.setattr(machine, "available_nbytes", lambda: 1 << 20)
    head.write(Piece(ARENA, NBYTES, 0, b"b" * PIECE_NBYTES))  # it has this memory
    with pytest.raises(MemoryPlanError, match=r"what the link of worker 1 brings to arena/1 needs 1048576 bytes"):
        head.write(Piece(ARENA, NBYTES, PIECE_NBYTES, b"c" * PIECE_NBYTES))
    with pytest.raises(MemoryPlanError, match=f"needs {mmap.PAGESIZE} bytes"):  # however small it is
        head.write(Piece(ARENA, NBYTES, PIECE_NBYTES, b"d"))
    assert service.mappings[ARENA].memory[PIECE_NBYTES - 1 : PIECE_NBYTES + 1] == b"b\0"


# --- to the worker --------------------------------------------------------------------------------------------------


def test_what_the_service_has_comes_to_the_worker(node: NodeMemory, head: HeadMemory, service: Service) -> None:
    written = np.random.default_rng(0).integers(0, 256, NBYTES, np.uint8)
    descriptor = os.memfd_create("segment")
    os.ftruncate(descriptor, NBYTES)
    Mapping(PARAMETERS, os.dup(descriptor), NBYTES, writable=True).elements("uint8")[:] = written
    service.mappings[PARAMETERS] = Mapping(PARAMETERS, descriptor, NBYTES, writable=False)
    for piece in head.pieces([(PARAMETERS, 100, NBYTES)]):
        node.write(piece)
    with in_worker(node, PARAMETERS) as seen:
        assert seen[:] == bytes(100) + written[100:].tobytes()


@pytest.mark.parametrize(
    "name",
    ["inputs", "arena/controller", "arena/server", "arena/0", ARENA, "versions", "slots/2/m/float32", PARAMETERS],
)
def test_a_segment_is_made_when_the_first_piece_of_it_comes(name: str, node: NodeMemory) -> None:
    node.write(Piece(name, 1 << 30, (1 << 30) - 2, b"ab"))
    assert node.reservation(name) == 1 << 30
    assert next(node.pieces([(name, (1 << 30) - 3, 1 << 30)])).data == b"\0ab"


@pytest.mark.parametrize("name", [GRADIENTS, "control", "times/w1", "parameters/sparse/float32"])
def test_the_worker_alone_writes_its_gradients_and_tables_stay_elsewhere(name: str, node: NodeMemory) -> None:
    with pytest.raises(PeerProtocolError, match="may not write"):
        node.write(Piece(name, NBYTES, 0, b"a"))
    with pytest.raises(InvalidArgumentError, match="there is no segment"):
        node.reservation(name)


def test_a_segment_becomes_longer_and_mappings_of_it_stay(node: NodeMemory) -> None:
    node.hold(PARAMETERS, NBYTES)
    with in_worker(node, PARAMETERS) as before:
        node.write(Piece(PARAMETERS, NBYTES, 0, b"a"))
        node.write(Piece(PARAMETERS, 2 * NBYTES, 2 * NBYTES - 1, b"z"))
        node.hold(PARAMETERS, NBYTES)  # an answer that was given before
        node.write(Piece(PARAMETERS, NBYTES, 1, b"b"))
        with in_worker(node, PARAMETERS) as after:
            assert (len(before), before[:2]) == (NBYTES, b"ab")
            assert (len(after), after[:2], after[-1:]) == (2 * NBYTES, b"ab", b"z")


def test_a_worker_cannot_write_what_it_may_only_read(node: NodeMemory) -> None:
    node.hold(PARAMETERS, NBYTES)
    descriptor = node.descriptor(PARAMETERS, writable=False)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, NBYTES)
    with pytest.raises(OSError, match="Invalid argument"):
        os.ftruncate(descriptor, 10)
    os.close(descriptor)


def test_no_segment_becomes_shorter(node: NodeMemory) -> None:
    node.hold(ARENA, NBYTES)
    descriptor = node.descriptor(ARENA, writable=True)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 10)
    os.close(descriptor)


def test_a_range_outside_a_segment_or_of_none_is_refused(node: NodeMemory) -> None:
    node.hold(ARENA, NBYTES)
    with pytest.raises(PeerProtocolError, match=f"bytes 0 to {NBYTES + 1} of segment arena/1, which has {NBYTES}"):
        list(node.pieces([(ARENA, 0, NBYTES + 1)]))
    with pytest.raises(PeerProtocolError, match="worker 1 names segment gradients/1/0/float32, which it has not"):
        list(node.pieces([(GRADIENTS, 0, 4)]))
    with pytest.raises(InvalidArgumentError, match="there is no segment 'inputs'; there are arena/1"):
        node.descriptor("inputs", writable=False)


def test_a_segment_that_the_kernel_refuses(node: NodeMemory) -> None:
    with pytest.raises(MemoryPlanError, match=r"segment arena/1 of \d+ bytes"):
        node.hold(ARENA, 1 << 62)
    node.hold(ARENA, NBYTES)
    assert node.reservation(ARENA) == NBYTES


def test_what_is_closed_leaves_nothing_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    node = NodeMemory("worker 1")
    node.hold(ARENA, NBYTES)
    node.write(Piece(PARAMETERS, NBYTES, 0, b"a"))
    node.hold(PARAMETERS, 2 * NBYTES)
    node.close()
    node.close()
    assert set(os.listdir("/proc/self/fd")) == before
