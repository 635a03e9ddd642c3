"""Stand-ins for server and workers, and a client that speaks to a supervisor in the test's own thread.

A stand-in does what its test says in a line of Python; the supervisor cannot tell it from the real thing.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable

from tests.harness.timing import unit

from central_storage.core.recovery_options import Recovery
from central_storage.launch.plan import Command
from central_storage.launch.run_directory import RunDirectory
from central_storage.launch.supervisor.lifecycle import Service
from central_storage.launch.supervisor.loop import Loop
from cs_proto.codec import decode, encode
from cs_proto.messages import PROTOCOL, Introduce, MadeProgress, Ready
from cs_proto.records import Record
from cs_runtime.transport.readiness import is_readable

#: When a test gives up, seconds; no step takes anywhere near this long.
LIMIT = unit(20)

# Packets come ready-made, so that a stand-in starts in a few milliseconds. STANDIN_<label> is run before it says that
# it is ready, STANDIN_<label>_READY after; there ``incarnation`` says which start it is. The packets that it receives
# are no introductions, which begin with these two bytes: they are kept.
STANDIN = """
import json, mmap, os, signal, socket, subprocess, sys
role, rank = os.environ["CS_ROLE"], os.environ.get("RANK", "0")
label = role if role == "server" else "w" + rank
incarnation = int(sys.argv[sys.argv.index("--incarnation") + 1])
introduce, ready, worked = map(bytes.fromhex, json.loads(os.environ["STANDIN_PACKETS"])[label][incarnation - 1])
class Link(socket.socket):
    introduced = []
    def recvmsg(self, nbytes, *others):
        while (got := super().recvmsg(1 << 17, *others))[0][:2] == b"\\x98\\x6e":
            self.introduced.append(got[0])
        return got
    def recv(self, nbytes):
        return self.recvmsg(nbytes)[0]
link = Link(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect(os.path.join(os.environ["CS_RUN_DIRECTORY"], "supervisor"))
link.send(introduce)
exec(os.environ.get("STANDIN_" + label, ""))
link.send(ready)
exec(os.environ.get("STANDIN_" + label + "_READY", ""))
while link.recv(1 << 17):
    pass
"""


def packet(record: Record) -> bytes:
    return b"".join(encode(record))


def standin_environment(**code: str) -> dict[str, str]:
    """The environment of stand-ins; ``code`` by label or label_READY."""
    packets = {
        label: [
            [packet(r).hex() for r in (Introduce(PROTOCOL, role, rank, n, 1), Ready(), MadeProgress(n))]
            for n in range(1, 9)
        ]
        for label, role, rank in (("server", "server", 0), ("w0", "worker", 0), ("w1", "worker", 1))
    }
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("CS_")},
        "STANDIN_PACKETS": json.dumps(packets),
        **{f"STANDIN_{label}": lines for label, lines in code.items()},
    }


def standin_command(role: str, rank: int, run_directory: str, environment: dict[str, str]) -> Command:
    own = {"CS_ROLE": role, "CS_RUN_DIRECTORY": run_directory, "PYTHONUNBUFFERED": "1"}
    if role == "worker":
        own["RANK"] = str(rank)
    return Command(role, rank, (sys.executable, "-S", "-c", STANDIN, "--incarnation", "1"), {**environment, **own})


def wait_gone(pid: int, limit: float = LIMIT) -> None:
    """Wait until the process has ended; it need not be a child of ours."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert is_readable(pidfd, limit), f"process {pid} still runs"
    finally:
        os.close(pidfd)


class ListSink:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.text = ""
        self.full = False
        self.on_room: Callable[[], None] = lambda: None

    def write(self, stream: str, text: str) -> None:
        self.text += text


class Client:
    """A client in the test's thread: while it waits, the supervisor's loop turns."""

    def __init__(self, world: World, role: str = "controller", name: str = "") -> None:
        self.world = world
        self.descriptors: list[int] = []
        #: The name for its worker, of a launcher that a test plays.
        self.name = b""
        #: Its own introduction, and those of others that it was told of.
        self.introduced: list[Introduce] = []
        self.link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.connect(os.path.join(world.directory.path, "supervisor"))
        self.link.setblocking(False)
        if role:
            self.send(Introduce(PROTOCOL, role, 0, 1, os.getpid(), name))

    def send(self, record: Record) -> None:
        self.link.send(packet(record))

    def receive(self) -> Record | None:
        """The next record that is no introduction; None at end-of-file."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.link, 1 << 17, 1)
            except BlockingIOError:
                self.world.turn()
                continue
            self.descriptors += descriptors
            record = decode([data]) if data else None
            if not isinstance(record, Introduce):
                return record
            self.introduced.append(record)


class World:
    """A service of stand-ins, driven by the test."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.loop = Loop()
        self.sink = ListSink()
        self.clients: list[Client] = []
        self.service: Service | None = None
        self._deadline = time.monotonic() + LIMIT

    def start(
        self, workers: int = 1, start_timeout: float = LIMIT, recovery: Recovery | None = None, **code: str
    ) -> Service:
        environment = standin_environment(**code)
        roles = [("server", 0), *(("worker", rank) for rank in range(workers))]
        commands = [standin_command(role, rank, self.directory.path, environment) for role, rank in roles]
        return self.start_commands(commands, start_timeout, recovery)

    def start_commands(
        self, commands: list[Command], start_timeout: float = LIMIT, recovery: Recovery | None = None
    ) -> Service:
        self.service = Service(
            self.loop, self.directory.path, commands, self.sink, start_timeout=start_timeout, recovery=recovery
        )
        self.service.start()
        return self.service

    def client(self, role: str = "controller", name: str = "") -> Client:
        client = Client(self, role, name)
        self.clients.append(client)
        return client

    def turn(self) -> None:
        assert time.monotonic() < self._deadline, (
            f"nothing happened; the last the processes wrote:\n{self.sink.text[-2000:]}"
        )
        self.loop.turn(1.0)

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.turn()

    def pids(self) -> dict[str, int]:
        return {child.command.label: child.pid for child in self.service._children}

    def close(self) -> None:
        if self.service is not None:
            self.service.stop(0.0)
            while not self.service.stopped:
                self.loop.turn(1.0)
            self.service.close()
        for client in self.clients:
            client.link.close()
            for descriptor in client.descriptors:
                os.close(descriptor)
