"""A stranger on the sockets of a training: what it sends is refused or costs it its connection, and the training goes
on with the same processes to the right result."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from tests.harness.timing import unit

import central_storage as cs
from cs_proto.codec import LIMITS, WORK_LIMITS, decode, encode
from cs_proto.messages import PROTOCOL, Get, Hello, Refused, Register, Return, Value, Welcome, Worker
from cs_proto.records import Record
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.supervisor_link import SupervisorLink

MIB = 1 << 20


@contextmanager
def observer(address: str) -> Iterator[SupervisorLink]:
    """A process that the supervisor has introduced as an observer."""
    link = SupervisorLink(supervisor_link.connect(address), "observer")
    try:
        link.await_name()
        yield link
    finally:
        link.close()


@contextmanager
def stranger(endpoint: str, identity: bytes) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 1)
        socket.setsockopt(zmq.RCVTIMEO, int(unit(20) * 1000))
        socket.connect(endpoint)
        yield socket


def refusal(socket: zmq.Socket[bytes], parts: Sequence[Any]) -> str:
    socket.send_multipart(parts)
    answer = decode(socket.recv_multipart())
    assert isinstance(answer, Refused), answer
    return answer.error.message


def parts(record: Record) -> list[bytes]:
    return [bytes(part) for part in encode(record)]


def private_nbytes(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) << 10


def lie_to_the_server(address: str, server: str) -> None:
    with observer(address) as link, stranger(server, link.name) as socket:
        assert "Resent.replica must be int from 0 to 1023, not -5" in refusal(socket, [msgpack.packb([43, [1], -5, 0])])
        forged = [10, PROTOCOL, [8, 0, 1 << 62, 1, "cpu:0"]]
        assert "Worker.incarnation must be int" in refusal(socket, [msgpack.packb(forged)])
        for incarnation in (1, 2, (1 << 31) - 1):
            register = Register(PROTOCOL, Worker(0, incarnation, os.getpid(), "cpu:0"))
            expected = f"says it is worker w0.{incarnation}, and the supervisor has introduced it as the observer"
            assert expected in refusal(socket, parts(register))
        assert "introduced it as observer" in refusal(socket, parts(Hello(PROTOCOL, "controller", link.client, 1)))
        assert "introduced it as observer" in refusal(socket, parts(Hello(PROTOCOL, "observer", "another", 1)))
        too_much = [b"\x90", *[bytes(48 * MIB)] * 4]
        assert "a message of 150994945 bytes; at most 134217728" in refusal(socket, too_much)
        assert "4097 frames; at most 4096" in refusal(socket, [b"\x90", *[b""] * 50_000])
        socket.send_multipart([bytes(LIMITS.part_nbytes + 1)])


def forge_a_return(address: str, server: str) -> None:
    """Of a worker, of a run far ahead."""
    with observer(address) as link, stranger(server, link.name) as socket:
        forged = Return((5000,), 0, 1, (), 0, Value(b"", ()), None)
        assert f"worker w0.1 at b'o{link.client}' has not registered" in refusal(socket, parts(forged))


def lie_to_a_worker(address: str, worker: str) -> None:
    """It hears no observer."""
    with observer(address) as link, stranger(worker, link.name) as socket:
        socket.send_multipart([b"\xc1"])
        socket.send_multipart([b"\x90", *[bytes(48 * MIB)] * 4])
        socket.send_multipart([bytes(WORK_LIMITS.part_nbytes + 1)])


@contextmanager
def reads_nothing(strategy: cs.CentralStorageStrategy, server: str, name: str, nbytes: int) -> Iterator[None]:
    """Somebody asks again and again for a large variable, and takes no answer, while the block is carried out."""
    with observer(strategy.address) as link, stranger(server, link.name) as socket:
        socket.send_multipart(parts(Hello(PROTOCOL, "observer", link.client, os.getpid())))
        welcome = decode(socket.recv_multipart())
        assert isinstance(welcome, Welcome)
        before = private_nbytes(welcome.server_pid)
        for number in range(1, 41):
            socket.send_multipart(parts(Get(number, (), (name,), True)))
        yield
        for _ in range(64):  # peers are heard in turn
            strategy.statistics()
        assert private_nbytes(welcome.server_pid) - before < 3 * nbytes


@pytest.mark.slow
@pytest.mark.parametrize("mailboxes", ["on", "off"])
def test_a_training_goes_on_among_lies(mailboxes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CS_MAILBOXES", mailboxes)
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], max_restarts=0) as strategy:
        server, worker = f"ipc://{strategy.address}/server", f"ipc://{strategy.address}/w0.1"
        with strategy.scope():
            total = cs.Variable(np.zeros(4, np.float32), name="total", aggregation=cs.VariableAggregation.SUM)
            cs.Variable(np.zeros(4 * MIB, np.float32), name="large")
            sgd = cs.optimizers.SGD(1.0)

        def step() -> float:
            sgd.apply_gradients([(np.full(4, -1, np.float32), total)])
            return 1.0

        def train() -> None:
            for _ in range(5):
                strategy.run(step)

        pids = [strategy.statistics().pid, *(each.pid for each in strategy.statistics().replicas)]
        train()
        lie_to_the_server(strategy.address, server)
        train()
        forge_a_return(strategy.address, server)
        train()
        lie_to_a_worker(strategy.address, worker)
        train()
        with reads_nothing(strategy, server, "large", 16 * MIB):
            train()
        train()
        assert np.asarray(total).tolist() == [60.0] * 4
        assert pids == [strategy.statistics().pid, *(each.pid for each in strategy.statistics().replicas)]
