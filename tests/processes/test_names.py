"""A process of the same user that calls itself what it likes: nothing that it sends counts, and a training ends with
the bits that it would have ended with. Each check is tried on a service that is broken on purpose, too."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from tests.harness.introduced import introduction
from tests.harness.timing import unit

import central_storage as cs
from central_storage.core.handles import handle_id
from central_storage.pickling import pickler
from cs_proto import messages as m
from cs_proto.arrays import array_of, bytes_array
from cs_proto.codec import decode, encode
from cs_proto.errors import ContextError
from cs_proto.peers import server_endpoint, worker_endpoint
from cs_proto.records import Record
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.supervisor_link import SupervisorLink

DEVICES = ["cpu:0", "cpu:1"]
# A training steps after so many attempts.
BATCH = 20


class Rogue:
    """Sends forged messages to the server and to a worker of a service."""

    def __init__(self, stack: ExitStack, strategy: cs.CentralStorageStrategy, mark: Path) -> None:
        """``mark`` is touched if a worker runs the rogue's code."""
        self.address = strategy.address
        self.mark = mark
        self._stack = stack
        self._context = stack.enter_context(zmq.Context())
        #: What the client of the script is called: no secret.
        self.client = strategy.controller._session.lifeline.client
        self.variable = 1
        self.links: list[SupervisorLink] = []

    def socket(self, endpoint: str, name: bytes) -> zmq.Socket[bytes]:
        made = self._context.socket(zmq.DEALER)
        self._stack.callback(made.close, linger=0)
        made.setsockopt(zmq.IDENTITY, name)
        made.connect(endpoint)
        return made

    def to_server(self, name: bytes) -> zmq.Socket[bytes]:
        return self.socket(server_endpoint(self.address), name)

    def to_worker(self, name: bytes) -> zmq.Socket[bytes]:
        return self.socket(worker_endpoint(self.address, 0, 1), name)

    def introduced(self, role: m.Role) -> bytes:
        """The name of a process that the supervisor has introduced."""
        link = SupervisorLink(supervisor_link.connect(self.address), role)
        self._stack.callback(link.close)
        self.links.append(link)
        return link.await_name()

    def run(self, run: m.RunId) -> m.Run:
        """A run whose function touches the mark."""
        mark = self.mark
        data = pickler.dump_function(lambda: mark.touch(), handle_id)
        arguments, buffers = pickler.dump_arguments((), {}, handle_id, array_of)
        said = bytes_array(arguments)
        return m.Run(run, run[0], 0, 7, pickler.digest(data), bytes_array(data), False, said, buffers)

    def assign(self, number: int) -> m.Assign:
        value = array_of(np.full(4, 9e9, np.float32))
        return m.Assign(self.client, 10**6 + number, self.variable, "assign", value)


def forged_runs(rogue: Rogue) -> Callable[[int], None]:
    """Code to a worker, as a controller or as the holder of a token."""
    names = [b"cdead", b"c" + rogue.client.encode(), b"w0.1", b"t0.1"]
    sockets = [rogue.to_worker(name) for name in names]

    def attempt(number: int) -> None:
        send(sockets[number % len(sockets)], rogue.run((number + 1,) if number % 2 else (number + 1, 0, 0)))

    return attempt


def forged_workers(rogue: Rogue) -> Callable[[int], None]:
    """Registrations and returns to the server, as a worker."""
    sockets = [rogue.to_server(name) for name in (b"w0.1", b"w0.2", b"w1.1")]

    def attempt(number: int) -> None:
        socket = sockets[number % len(sockets)]
        send(socket, m.Register(m.PROTOCOL, m.Worker(0, number % 3 + 1, os.getpid(), "cpu:0")))
        send(socket, m.Return((number + 1,), 0, 1, (), 0, m.Value(b"\xc0", ()), None))

    return attempt


def a_false_controller(rogue: Rogue) -> Callable[[int], None]:
    """The place of the controller, and a write in its name."""
    socket = rogue.to_server(b"c" + rogue.client.encode())

    def attempt(number: int) -> None:
        send(socket, m.Hello(m.PROTOCOL, "controller", rogue.client, os.getpid()))
        send(socket, rogue.assign(number))
        send(socket, m.Goodbye(rogue.client))

    return attempt


def functions_to_others(rogue: Rogue) -> Callable[[int], None]:
    """Code to the server."""
    sockets = [rogue.to_server(b"cdead"), rogue.to_server(rogue.introduced("observer"))]
    return lambda number: send(sockets[number % 2], rogue.run((number + 1,)))


def an_observer_that_is_one(rogue: Rogue) -> Callable[[int], None]:
    """What only others may send, from a process that the supervisor has introduced as an observer."""
    name = rogue.introduced("observer")
    server, worker = rogue.to_server(name), rogue.to_worker(name)
    send(server, m.Hello(m.PROTOCOL, "observer", rogue.links[-1].client, os.getpid()))

    def attempt(number: int) -> None:
        send(worker, rogue.run((number + 1,)))
        send(server, rogue.assign(number))
        send(server, m.Hello(m.PROTOCOL, "controller", rogue.client, os.getpid()))
        send(server, m.Return((number + 1,), 0, 1, (), 0, m.Value(b"\xc0", ()), None))

    return attempt


KINDS = (
    forged_runs,
    forged_workers,
    a_false_controller,
    functions_to_others,
    an_observer_that_is_one,
)


def send(socket: zmq.Socket[bytes], record: Record) -> None:
    socket.send_multipart([bytes(part) for part in encode(record)])


def trained(strategy: cs.CentralStorageStrategy, steps: int, between: Callable[[int], object]) -> bytes:
    """The bits of a variable after so many steps of Adam."""
    with strategy.scope():
        weights = cs.Variable(np.linspace(-1, 1, 4, dtype=np.float32), name="weights")
        adam = cs.optimizers.Adam(0.1)

    def step() -> None:
        adam.apply_gradients([(np.asarray(weights) ** 2 - 0.3, weights)])

    for number in range(steps):
        strategy.run(step)
        between(number)
    return np.asarray(weights).tobytes()


@contextmanager
def service(**options: Any) -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(DEVICES, max_restarts=0, seed=5, **options) as strategy:
        yield strategy


def check_rogue(kinds: Any, attempts: int, mark: Path, **options: Any) -> None:
    """Make so many ``attempts`` of each kind while a training steps."""
    steps = len(kinds) * -(-attempts // BATCH)
    with service(**options) as strategy:
        expected = trained(strategy, steps, lambda number: None)
    with service(**options) as strategy, ExitStack() as stack:
        rogue = Rogue(stack, strategy, mark)
        made: dict[int, Callable[[int], None]] = {}

        def attack(step: int) -> None:
            kind, batch = step % len(kinds), step // len(kinds)
            if kind not in made:
                made[kind] = kinds[kind](rogue)
            for number in range(batch * BATCH, min(attempts, (batch + 1) * BATCH)):
                made[kind](number)

        assert trained(strategy, steps, attack) == expected
        strategy.run(lambda: None)  # what was sent before has come
        assert not mark.exists()


@pytest.mark.long
def test_a_rogue_of_the_same_user_gets_nothing(tmp_path: Path) -> None:
    check_rogue(KINDS, 60, tmp_path / "mark", in_process=True)


@pytest.mark.slow
@pytest.mark.parametrize("mailboxes", ["on", "off"])
def test_a_rogue_gets_nothing_of_processes(mailboxes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CS_MAILBOXES", mailboxes)
    check_rogue(KINDS, 1000, tmp_path / "mark", in_process=False)


@pytest.mark.long
def test_the_checks_notice_that_names_are_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = SupervisorLink.peer_named

    def believes(self: SupervisorLink, name: bytes) -> bytes | None:
        """Everybody is what he calls himself."""
        if true(self, name) is None and re.match(rb"c|w\d+\.\d+$", name):
            self._is_introduction(introduction(name))
        return true(self, name)

    monkeypatch.setattr(SupervisorLink, "peer_named", believes)
    with service(in_process=True) as strategy, ExitStack() as stack:
        attempt = forged_runs(Rogue(stack, strategy, tmp_path / "mark"))
        for number in range(4):
            attempt(number)
        while not (tmp_path / "mark").exists():
            time.sleep(0.01)


def test_the_service_of_a_script_has_no_other_controller(tmp_path: Path) -> None:
    with service(in_process=True) as strategy, ExitStack() as stack:
        rogue = Rogue(stack, strategy, tmp_path / "mark")
        with pytest.raises(ContextError, match=f"process {os.getpid()} controls this service") as raised:
            rogue.introduced("controller")
        assert rogue.client not in str(raised.value)


def test_nobody_ends_the_runs_of_another_by_its_client() -> None:
    """A client is in reports and log lines. Who takes it is sent away, and the true one goes on."""
    with service(in_process=True) as strategy:
        link = supervisor_link.connect(strategy.address)
        with link:
            client = strategy.controller._session.lifeline.client
            link.sendall(b"".join(encode(m.Introduce(m.PROTOCOL, "observer", 0, 1, os.getpid(), client))))
            link.settimeout(unit(20))
            refused = decode([link.recv(1 << 17)])
            assert isinstance(refused, m.StartFailed)
            assert "another process is client" in refused.error.message
            assert link.recv(1) == b""
        assert strategy.run(lambda: 5) == 5
