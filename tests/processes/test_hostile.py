"""Junk connections and hostile messages while a training steps: the training ends with the same bits and in the same
processes, memory and descriptors are back at the baseline, and the log stays short (P30, P31)."""

from __future__ import annotations

import os
import random
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgpack
import numpy as np
import pytest
import zmq
from tests.harness.processes import start
from tests.harness.timing import unit
from tests.processes.test_open_files import TRAINS, Training, service_pids
from tests.processes.test_rogue import observer

import central_storage as cs
from cs_proto.arrays import Array, Location, array_of
from cs_proto.codec import decode, encode
from cs_proto.messages import (
    PROTOCOL,
    Assign,
    Create,
    Describe,
    Fetch,
    Get,
    Goodbye,
    Hello,
    Offer,
    Put,
    Register,
    Resent,
    Return,
    Statistics,
    Value,
    VariableSpec,
    Welcome,
    Worker,
)

MIB = 1 << 20
CONNECTIONS = 10_000
#: More lines a second than this would be a flood: complaints are at most four a second for each of four processes.
MOST_LINES = 16

_VALUE = array_of(np.arange(100.0))
_BYTES = array_of(np.zeros(800, np.uint8))
_PLACED = Array("uint8", (800,), Location("parameters/float32", 0))
#: What peers send, before it is damaged.
CORPUS = [
    [bytes(part) for part in encode(record)]
    for record in (
        Hello(PROTOCOL, "observer", "9", 1),
        Register(PROTOCOL, Worker(0, 2, 1, "cpu:0")),
        Get(1, (1,), ("w",), True),
        Describe(1, (1,), ()),
        Statistics(1),
        Assign("9", 1, 1, "assign", _VALUE),
        Create("9", 1, VariableSpec("stolen", "float64", (100,), True, 0, 0), _VALUE),
        Put(1, _PLACED, _BYTES),
        Fetch(1, _PLACED, None),
        Return((5,), 0, 1, (), 0, Value(b"1", (_VALUE,)), None),
        Resent((5,), 0),
        Offer(3),
        Goodbye("9"),
    )
]


def damaged(chance: random.Random) -> list[bytes]:
    """A message that no true peer sends, or sends only by chance."""
    parts = list(chance.choice(CORPUS))
    kind = chance.randrange(7)
    header = bytearray(parts[0])
    if kind == 0:
        for _ in range(chance.randint(1, 8)):
            header[chance.randrange(len(header))] = chance.randrange(256)
    elif kind == 1:
        del header[chance.randrange(len(header)) :]
    elif kind == 2:
        header[chance.randrange(len(header)) : 0] = chance.randbytes(chance.randint(1, 40))
    elif kind == 3:
        parts += [chance.randbytes(chance.randint(0, 3000))] * chance.randint(1, 20)
    elif kind == 4:
        return [*parts[:1], *([chance.randbytes(17)] * (len(parts) - 2))]
    elif kind == 5:
        fields = msgpack.unpackb(header, strict_map_key=False)
        fields[chance.randrange(len(fields))] = chance.choice([None, -1, 1 << 63, "\x9b", [[[]]], {"frame": 7}, 0.5])
        return [msgpack.packb(fields), *parts[1:]]
    else:
        return [chance.randbytes(chance.randint(0, 200)) for _ in range(chance.randint(1, 4))]
    return [bytes(header), *parts[1:]]


def private_nbytes(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


@dataclass
class Baseline:
    """What the processes of a training had before it was disturbed."""

    training: Training
    memory: dict[str, int]
    descriptors: dict[str, int]

    def left(self) -> list[str]:
        """What a process has more than it had, but for what the allocator keeps."""
        found = []
        for role, pid in self.training.pids.items():
            descriptors = self.training.descriptors(role) - self.descriptors[role]
            memory = private_nbytes(pid) - self.memory[role]
            if descriptors >= 10 or memory >= 64 * MIB:
                found.append(f"{role}: {descriptors} descriptors, {memory} bytes")
        return found

    def check(self) -> None:
        """Wait until nothing is left."""
        deadline = time.monotonic() + unit(30)
        while left := self.left():
            assert time.monotonic() < deadline, left


@pytest.fixture
def baseline() -> Iterator[Baseline]:
    """A training that computes right to its end, in the processes that it began with, however it is disturbed."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    began = time.monotonic()
    with start("-c", TRAINS, str(before[1])) as child:
        address = child.wait_for(r"trains in (\S+)", timeout=unit(60))[1]
        made = Training(child, address, service_pids(child))
        memory = {role: private_nbytes(pid) for role, pid in made.pids.items()}
        yield Baseline(made, memory, {role: made.descriptors(role) for role in memory})
        assert service_pids(child) == made.pids
        Path(address, "enough").touch()
        ended = child.wait(unit(60))
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert ended.ok().out.endswith("same bits: True\n"), ended
    assert "ended by" not in ended.err, ended
    assert len(ended.err.splitlines()) < 10 * MOST_LINES + MOST_LINES * (time.monotonic() - began)


def reads(address: str) -> None:
    """An honest peer is served."""
    with cs.connect(address) as observer:
        assert observer.get("w").shape == (1000,)


@pytest.mark.timeout(unit(200))
@pytest.mark.parametrize(
    ("name", "kind"),
    [("server", socket.SOCK_STREAM), ("w0.1", socket.SOCK_STREAM), ("supervisor", socket.SOCK_SEQPACKET)],
)
def test_junk_connections_cost_nothing_that_stays(baseline: Baseline, name: str, kind: int) -> None:
    path = f"{baseline.training.address}/{name}"
    links: list[socket.socket] = []
    chance = random.Random(1)
    try:
        for number in range(CONNECTIONS):
            link = socket.socket(socket.AF_UNIX, kind)
            links.append(link)
            link.connect(path)
            if number % 3 == 0:
                link.send(chance.randbytes(30))
            if len(links) == CONNECTIONS // 5:
                reads(baseline.training.address)
                for link in links:
                    link.close()
                links.clear()
    finally:
        for link in links:
            link.close()
    baseline.check()
    reads(baseline.training.address)


def hostile(baseline: Baseline, count: int) -> int:
    """Send damaged messages of ``count`` frames in all to the server and to a worker, half of them from observers that
    the supervisor has introduced; the others come from strangers. One of three peers reads no answer. Return the number
    of answers."""
    chance, address, frames, answers = random.Random(2), baseline.training.address, 0, 0
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        links = []
        for number in range(12):
            link = stack.enter_context(context.socket(zmq.DEALER))
            link.setsockopt(zmq.LINGER, 0)
            # A sender whose queue was full goes on when half of it is taken, and guests are heard slowly.
            link.setsockopt(zmq.SNDTIMEO, int(unit(150) * 1000))
            is_known = number % 4 in (1, 2)
            name = stack.enter_context(observer(address)).name if is_known else b"x%d" % number
            link.setsockopt(zmq.IDENTITY, name)
            link.connect(f"ipc://{address}/{'w0.1' if number % 4 == 0 else 'server'}")
            links.append(link)
        while frames < count:
            link, message = chance.choice(links), damaged(chance)
            link.send_multipart(message)
            frames += len(message)
            if links.index(link) % 3:
                while link.poll(0):
                    link.recv_multipart()
                    answers += 1
        reads(address)
    return answers


@pytest.mark.parametrize(
    "count", [60_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(unit(1800))])]
)
def test_hostile_messages_are_refused_and_forgotten(baseline: Baseline, count: int) -> None:
    assert hostile(baseline, count) > count // 100  # they are heard
    baseline.check()
    reads(baseline.training.address)


@pytest.mark.timeout(unit(200))
def test_a_peer_that_never_takes_its_answers_costs_a_bounded_amount(baseline: Baseline) -> None:
    server = baseline.training.pids["server"]
    address = baseline.training.address
    with observer(address) as known, zmq.Context() as context, context.socket(zmq.DEALER) as link:
        link.setsockopt(zmq.IDENTITY, known.name)
        link.setsockopt(zmq.LINGER, 0)
        link.setsockopt(zmq.RCVHWM, 1)
        link.setsockopt(zmq.SNDTIMEO, int(unit(30) * 1000))
        link.setsockopt(zmq.RCVTIMEO, int(unit(30) * 1000))
        link.connect(f"ipc://{address}/server")
        link.send_multipart(encode(Hello(PROTOCOL, "observer", known.client, os.getpid())))
        assert isinstance(decode(link.recv_multipart()), Welcome)
        for number in range(1, 10_001):
            link.send_multipart(encode(Get(number, (), ("w",), True)))
            link.send_multipart(encode(Statistics(number)))
        reads(address)  # the server has heard whoever came before
        assert private_nbytes(server) - baseline.memory["server"] < 64 * MIB
    baseline.check()
