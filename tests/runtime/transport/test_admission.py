"""Peers are admitted a few at a time, and only while there are descriptors for them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.harness.timing import unit

from cs_runtime import open_files
from cs_runtime.transport.admission import SUFFIX_NBYTES, Admission
from cs_runtime.transport.poller import Poller
from cs_runtime.transport.readiness import is_readable

LIMIT = 256


def admit(admission: Admission, ready: set[int | zmq.Socket[bytes]]) -> None:
    """What the owner does after a poll that found these ``ready``; it pauses only where there is no room."""
    if admission.descriptor in ready:
        admission.admit()
        if not admission.is_full:
            admission.resume()


class Entry:
    """A ROUTER with admission, in a process that may open 256 more files than it has open now."""

    def __init__(self, path: str, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.stack = stack
        in_use, base = open_files._in_use, open_files._in_use()
        monkeypatch.setattr(open_files, "limit", lambda: LIMIT)
        monkeypatch.setattr(open_files, "_in_use", lambda: in_use() - base)
        self.context = zmq.Context()
        stack.callback(self.context.destroy, linger=0)
        self.router = self.context.socket(zmq.ROUTER)
        self.poller: Poller[zmq.Socket[bytes]] = Poller()
        self.admission = Admission(self.poller, self.router, path)
        stack.callback(self.admission.close)
        self.poller.register_socket(self.router)
        self.admission.resume()

    def turn(self) -> list[list[bytes]]:
        """Poll once, as a role does: the message that has come, if any."""
        ready = self.poller.poll(0.01)
        admit(self.admission, ready)
        return [self.router.recv_multipart()] if self.router in ready else []

    def hear(self, count: int) -> list[list[bytes]]:
        """The next ``count`` messages."""
        heard: list[list[bytes]] = []
        self.until(lambda: heard.extend(self.turn()) or len(heard) >= count)
        return heard

    def has_admitted(self) -> bool:
        """Poll once: whether nobody waits, or nobody is admitted any more."""
        self.turn()
        waits = is_readable(self.admission._listener.fileno(), 0)
        return self.admission.is_full or (not waits and self.admission._has_accepted())

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait until ``condition`` holds."""
        deadline = time.monotonic() + unit(5)
        while not condition():
            assert time.monotonic() < deadline, "the condition did not hold in time"

    def dealer(self, name: bytes) -> zmq.Socket[bytes]:
        made = self.context.socket(zmq.DEALER)
        self.stack.callback(made.close, linger=0)
        made.setsockopt(zmq.IDENTITY, name)
        made.setsockopt(zmq.RECONNECT_IVL, 10)
        made.connect(f"ipc://{self.path}")
        return made

    def silent(self, count: int) -> list[socket.socket]:
        """At most ``count`` connections that send nothing: as many as fit into the queue."""
        links: list[socket.socket] = []
        while len(links) < count:
            link = self.stack.enter_context(socket.socket(socket.AF_UNIX))
            link.setblocking(False)
            try:
                link.connect(self.path)
            except BlockingIOError:
                link.close()
                break
            links.append(link)
        return links

    def sockets(self) -> int:
        """How many sockets have this path, connections included."""
        return sum(self.path in line for line in Path("/proc/net/unix").read_text().splitlines())


@pytest.fixture
def entry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Entry]:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        yield Entry(f"{directory}/router", stack, monkeypatch)


def test_every_peer_is_heard_and_answered(entry: Entry) -> None:
    peers = {f"p{number}".encode(): entry.dealer(f"p{number}".encode()) for number in range(30)}
    for name, peer in peers.items():
        peer.send(b"from " + name)
    assert sorted(entry.hear(30)) == sorted([name, b"from " + name] for name in peers)
    for name, peer in peers.items():
        entry.router.send_multipart([name, b"to " + name])
        assert peer.recv() == b"to " + name


def test_no_peer_is_admitted_without_a_free_descriptor(entry: Entry, caplog: pytest.LogCaptureFixture) -> None:
    inside = entry.dealer(b"inside")
    inside.send(b"early")
    assert entry.hear(1) == [[b"inside", b"early"]]
    links: list[socket.socket] = []
    while not entry.admission.is_full:
        links += entry.silent(1)  # its own descriptor is one of this process's, so no other comes before it is admitted
        entry.until(entry.has_admitted)
    entry.silent(100)  # fills the queue
    for _ in range(10):
        entry.turn()
        entry.admission.sweep()
        entry.admission.resume()
    assert 32 <= open_files.free() < 100
    inside.send(b"still")
    assert entry.hear(1) == [[b"inside", b"still"]]
    words = r"router: no connection is accepted: only \d+ of 256 descriptors are free, and 43 are needed"
    assert len(re.findall(words, caplog.text)) == 1

    outside = entry.dealer(b"outside")
    outside.send(b"late")
    for link in links:
        link.close()
    heard: list[list[bytes]] = []

    def is_heard() -> bool:
        entry.admission.sweep()
        entry.admission.resume()
        heard.extend(entry.turn())
        return bool(heard)

    entry.until(is_heard)
    assert heard == [[b"outside", b"late"]]
    assert not entry.admission.is_full


def test_a_listening_socket_is_closed_when_its_peers_have_gone(entry: Entry) -> None:
    before, sockets = open_files.free(), entry.sockets()
    for number in range(40):
        peer = entry.dealer(b"p%d" % number)
        peer.send(b"hello")
        entry.hear(1)
        peer.close(linger=0)
        entry.admission.sweep()

    def are_closed() -> bool:
        entry.turn()
        entry.admission.sweep()
        return entry.sockets() == sockets and open_files.free() == before

    stays = entry.dealer(b"stays")
    stays.send(b"hello")
    entry.hear(1)
    stays.send(b"again")
    entry.hear(1)
    stays.close(linger=0)
    entry.until(are_closed)


def test_a_peer_that_stays_is_not_cut_off_when_others_of_its_batch_go(entry: Entry) -> None:
    stays, goes = entry.dealer(b"stays"), entry.dealer(b"goes")
    stays.send(b"1")
    goes.send(b"1")
    entry.hear(2)
    goes.close(linger=0)
    for number in range(30):
        entry.turn()
        entry.admission.sweep()
        stays.send(b"%d" % number)
        assert entry.hear(1) == [[b"stays", b"%d" % number]]
        entry.router.send_multipart([b"stays", b"yes"])
        assert stays.recv() == b"yes"


def test_messages_of_a_peer_that_has_left_are_heard(entry: Entry) -> None:
    sockets = entry.sockets()
    peer = entry.dealer(b"p")
    for _ in range(5):
        peer.send(bytes(100_000))
    admit(entry.admission, entry.poller.poll(unit(10)))
    entry.until(lambda: entry.sockets() > sockets + 1)
    peer.close(linger=10_000)

    def is_closed() -> bool:
        entry.admission.sweep()
        return entry.sockets() == sockets

    entry.until(is_closed)
    assert len(entry.hear(5)) == 5


def test_files_of_a_killed_process_are_replaced(entry: Entry, tmp_path: Path) -> None:
    for name in (entry.path, *(f"{entry.path}~{number:04x}" for number in range(5))):
        Path(name).unlink(missing_ok=True)
        Path(name).touch()
    other = Admission(entry.poller, entry.router, entry.path)
    other.resume()
    peer = entry.dealer(b"p")
    peer.send(b"hello")
    heard: list[list[bytes]] = []

    def is_heard() -> bool:
        ready = entry.poller.poll(0.01)
        admit(other, ready)
        heard.extend([entry.router.recv_multipart()] if entry.router in ready else [])
        return bool(heard)

    entry.until(is_heard)
    other.close()


def test_a_path_that_cannot_be_bound_is_an_error(entry: Entry) -> None:
    with pytest.raises(FileNotFoundError):
        Admission(entry.poller, entry.router, "/nowhere/at/all")
    with pytest.raises(OSError, match="too long"):
        Admission(entry.poller, entry.router, "/tmp/" + "x" * (103 - SUFFIX_NBYTES))


@pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace takes root")
def test_a_peer_in_another_network_namespace_stays_connected(entry: Entry) -> None:
    """As between containers, which share the directory of the socket and nothing else."""
    code = """
import ctypes, os, sys, zmq
if ctypes.CDLL(None, use_errno=True).unshare(0x40000000):  # CLONE_NEWNET
    sys.exit(f"unshare: {os.strerror(ctypes.get_errno())}")
context = zmq.Context()
peer = context.socket(zmq.DEALER)
peer.setsockopt(zmq.IDENTITY, b"far")
peer.setsockopt(zmq.RECONNECT_IVL, -1)
peer.connect("ipc://" + sys.argv[1])
peer.send(b"here")
print(peer.recv().decode(), flush=True)
context.destroy(linger=0)
"""
    far = subprocess.Popen([sys.executable, "-c", code, entry.path], stdout=subprocess.PIPE, text=True)
    try:
        assert entry.hear(1) == [[b"far", b"here"]]
        for number in range(3):  # after each of them sockets are swept
            near = entry.dealer(f"n{number}".encode())
            near.send(b"x")
            entry.hear(1)
            before = open_files.free()
            near.close(linger=0)
            entry.until(lambda before=before: entry.turn() or entry.admission.sweep() or open_files.free() > before)
            entry.admission.sweep()
        entry.router.send_multipart([b"far", b"still there"])
        out, _ = far.communicate(timeout=unit(10))
        assert out == "still there\n"
    finally:
        far.kill()
        far.wait()
