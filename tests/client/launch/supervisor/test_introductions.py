"""Names: who gets one, who is told of whom, and what is said to a process of another version."""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack

import msgpack
import pytest
from tests.client.launch.standins import Client, World, packet
from tests.harness.timing import unit

from central_storage.controller.operations import wait_until_serving
from central_storage.launch.supervisor import connections, reception
from cs_proto.errors import PeerProtocolError
from cs_proto.messages import (
    PROTOCOL,
    Appoint,
    ClientGone,
    Interrupt,
    Introduce,
    Join,
    MakeSegment,
    OpenSegment,
    Segment,
    Serving,
    StartFailed,
)
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.readiness import is_readable
from cs_runtime.transport.supervisor_link import SupervisorLink

# A stand-in prints the introductions that it gets: role, rank, incarnation and client.
PRINTS = r"""
import re
introduced = re.compile(
    rb"..[\x00-\x7f][\xa0-\xbf]([a-z]+)(.)(.)(?:[\x00-\x7f]|\xcc.|\xcd..|\xce....)[\xa0-\xbf]([a-z]*)", re.DOTALL
)
told = 0
while True:
    for known in link.introduced[told:]:
        role, rank, incarnation, client = introduced.match(known).groups()
        print("told of", role.decode(), rank[0], incarnation[0], client.decode(), flush=True)
    told = len(link.introduced)
    packet = socket.socket.recvmsg(link, 1 << 17)[0]
    if packet[:2] == b"\x98\x6e":
        link.introduced.append(packet)
    elif packet[:2] == b"\x92\x7e":
        print("gone", packet[3:].decode(), flush=True)
"""


# A server that makes the client "first" the controller when it hears of the second one.
APPOINTS = f"""
while not any(b"second" in each for each in link.introduced):
    link.introduced.append(socket.socket.recvmsg(link, 1 << 17)[0])
link.send({packet(Appoint("first"))!r})
assert link.recv(1 << 17) == {packet(Appoint("first"))!r}
print("the workers know first", flush=True)
"""


def introduced(client: Client) -> Introduce:
    """What the supervisor calls a client, once it serves."""
    assert isinstance(client.receive(), Serving)
    return client.introduced[0]


def refused(client: Client) -> str:
    """Why the supervisor hangs up."""
    answer = client.receive()
    assert isinstance(answer, StartFailed)
    assert client.receive() is None
    return answer.error.message


def test_everybody_gets_a_name_of_its_own(world: World) -> None:
    world.start()
    clients = [world.client(), world.client("observer"), world.client("observer")]
    answers = [introduced(client) for client in clients]
    assert {len(each.name) for each in answers} == {16}
    assert len({each.name for each in answers}) == 3
    assert [each.role for each in answers] == ["controller", "observer", "observer"]
    assert all(len(client.introduced) == 1 for client in clients)  # clients are told of nobody else
    assert answers[0].name.hex() not in repr(answers[0])
    assert repr(answers[0].name) not in repr(answers[0])


def test_the_server_hears_of_all_clients_and_the_workers_of_the_controller_only(world: World) -> None:
    world.start(workers=2, server_READY=APPOINTS + PRINTS, w0_READY=PRINTS)
    introduced(world.client("observer", "eye"))
    introduced(world.client("observer"))  # it does not want to speak to the server
    first = world.client("controller", "first")
    introduced(first)
    introduced(world.client("controller", "second"))
    world.until(lambda: "[server] the workers know first" in world.sink.text)
    world.until(lambda: "[server] told of controller 0 1 second" in world.sink.text)
    for line in ("observer 0 1 eye", "controller 0 1 first", "worker 0 1", "worker 1 1"):
        assert f"[server] told of {line}" in world.sink.text
    world.until(lambda: "[w0] told of controller 0 1 first" in world.sink.text)
    assert "[w0] told of worker 1 1" in world.sink.text
    assert "[w0] told of controller 0 1 second" not in world.sink.text
    first.link.close()
    world.until(lambda: "[server] gone first" in world.sink.text)
    assert "[w0] told of controller 0 1 second" not in world.sink.text  # the server has not welcomed it
    assert world.sink.text.count("[server] told of observer") == 1
    assert "[w0] told of observer" not in world.sink.text


def test_only_the_controller_may_write(world: World) -> None:
    """Functions and arguments lie in its arena."""
    make = packet(MakeSegment("arena/controller", 1 << 20, "controller"))
    world.start(
        server=f"link.send({make!r})\nfor each in socket.recv_fds(link, 1 << 17, 1)[1]: os.close(each)\n" + APPOINTS
    )
    first, second = world.client("controller", "first"), world.client("controller", "second")
    rights = []
    for client in (first, second):
        assert isinstance(client.receive(), Serving)
        client.send(OpenSegment("arena/controller"))
        segment = client.receive()
        assert isinstance(segment, Segment)
        rights.append(segment.writable)
    assert rights == [True, False]


def test_the_server_hears_when_an_observer_has_gone(world: World) -> None:
    world.start(server_READY=PRINTS)
    client = world.client("observer", "eye")
    introduced(client)
    client.link.close()
    world.until(lambda: "[server] gone eye" in world.sink.text)


def test_a_client_or_a_name_is_taken_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.start()
    first = world.client("controller", "mine")
    name = introduced(first).name
    taken = world.client("observer", "mine")
    assert refused(taken) == "another process is client 'mine'"
    taken = world.client("")
    taken.send(Introduce(PROTOCOL, "observer", 0, 1, os.getpid(), "other", name))
    assert refused(taken) == "another process has the name that this one says it has"
    first.link.close()
    world.until(lambda: not world.service.has_controller)
    back = world.client("")  # as after the end of a supervisor
    back.send(Introduce(PROTOCOL, "controller", 0, 1, os.getpid(), "mine", name))
    assert introduced(back).name == name


def test_only_the_controller_interrupts(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.start(server_READY=APPOINTS, w0="signal.signal(signal.SIGINT, lambda *_: print('interrupted', flush=True))")
    first, second = world.client("controller", "first"), world.client("controller", "second")
    introduced(first)
    introduced(second)
    world.until(lambda: "the workers know first" in world.sink.text)
    second.send(Interrupt(0))
    world.until(lambda: "dropped a Interrupt" in caplog.text)
    assert "interrupted" not in world.sink.text
    first.send(Interrupt(0))
    world.until(lambda: "[w0] interrupted" in world.sink.text)


# --- other versions -------------------------------------------------------------------------------------------------

NUMBERED = packet(Introduce(PROTOCOL + 1, "controller", 0, 1, 1))


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (NUMBERED, f"speaks protocol {PROTOCOL + 1}, this service protocol {PROTOCOL}; install the same version"),
        (msgpack.packb([110, 7, "another", "shape"]), f"speaks protocol 7, this service protocol {PROTOCOL}"),
        (msgpack.packb([110, "controller", 0, 1, 5, ""]), "a protocol from before these had numbers, this service"),
        (packet(Join(PROTOCOL + 1, 4)), f"speaks protocol {PROTOCOL + 1}, this service protocol {PROTOCOL}"),
        (msgpack.packb([110, PROTOCOL, "nobody", 0, 1, 5, "", b""]), "Introduce.role must be one of"),
    ],
)
def test_another_version_is_told_so_at_once(world: World, sent: bytes, expected: str) -> None:
    world.start(w0="import time; time.sleep(60)")  # the service is not up, and nobody waits for that
    begun = time.monotonic()
    client = world.client("")
    client.link.send(sent)
    answer = client.receive()
    assert isinstance(answer, StartFailed)
    assert answer.error.exception == "cs.PeerProtocolError"
    assert expected in answer.error.message
    assert client.receive() is None
    assert time.monotonic() - begun < unit(1)


def test_a_script_of_another_version_ends_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.start()
    introduced(world.client())
    monkeypatch.setattr(supervisor_link, "PROTOCOL", PROTOCOL + 1)
    link = SupervisorLink(supervisor_link.connect(world.directory.path), "controller")
    try:
        world.until(lambda: supervisor_link.is_readable(link.fileno(), 0))
        begun = time.monotonic()
        with pytest.raises(PeerProtocolError, match=rf"protocol {PROTOCOL + 1}, this service protocol {PROTOCOL}"):
            wait_until_serving(link, 60)
        assert time.monotonic() - begun < unit(1)
    finally:
        link.close()


def test_a_client_that_has_gone_is_known_by_name_for_a_while(world: World) -> None:
    """What it sent last may come late. But names do not add up."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        link = SupervisorLink(ours, "server")
        try:
            theirs.send(packet(Introduce(PROTOCOL, "server", 0, 1, 1, "", b"server")))
            link.await_name()
            for number in range(30):
                name = b"n%d" % number
                theirs.send(packet(Introduce(PROTOCOL, "observer", 0, 1, 1, str(number), name)))
                theirs.send(packet(ClientGone(str(number))))
                assert link.receive_nowait() == ClientGone(str(number))
                assert link.peer_named(name) == b"o%d" % number
            assert link.receive_nowait() is None  # the owner has heard of all of them
            assert len(link.peers) == 8
            assert link.peer_named(b"n0") is None
        finally:
            link.close()


def test_the_first_stranger_makes_room_for_another(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "_STRANGERS", 3)
    monkeypatch.setattr(reception, "_INTRODUCTION", 3600.0)
    world.start()
    known = world.client()
    assert isinstance(known.receive(), Serving)
    with ExitStack() as ends:
        strangers = [ends.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(4)]
        before = len(world.service._reception.peers)
        for number, stranger in enumerate(strangers[:3], 1):
            stranger.connect(os.path.join(world.directory.path, "supervisor"))
            stranger.setblocking(False)
            world.until(lambda number=number: len(world.service._reception.peers) == before + number)
        assert not is_readable(strangers[0].fileno(), 0)
        strangers[3].connect(os.path.join(world.directory.path, "supervisor"))
        strangers[3].setblocking(False)
        world.until(lambda: is_readable(strangers[0].fileno(), 0))
        assert strangers[0].recv(1) == b""
        for stranger in strangers[1:]:
            with pytest.raises(BlockingIOError):
                stranger.recv(1)
    assert not world.service._reception.peers[0].closed


def test_connections_without_end_are_accepted_with_pauses(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "_REST", 3600.0)
    world.start()
    entry = world.service._reception
    with ExitStack() as ends:
        begun = entry._accepted
        for number in range(1, reception._AT_ONCE - begun % reception._AT_ONCE + 1):
            _stranger(world, ends)
            world.until(lambda number=number: entry._accepted == begun + number)
        accepted = entry._accepted
        _stranger(world, ends)
        for _ in range(3):
            world.loop.turn(0)
        assert entry._accepted == accepted
        again = entry._again
        assert again is not None
        assert again.call is not None
        again.call()  # the pause is over
        world.until(lambda: entry._accepted == accepted + 1)


def _stranger(world: World, ends: ExitStack) -> None:
    link = ends.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    link.connect(os.path.join(world.directory.path, "supervisor"))


def test_a_peer_that_never_reads_is_cut_off(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_QUEUE_RECORDS", 50)
    world.start()
    reads, deaf = world.client("observer"), world.client("observer")
    assert isinstance(reads.receive(), Serving)
    peers = [each for each in world.service._reception.peers if each.label == "observer"]
    world.until(lambda: all(isinstance(each.introduction, Introduce) for each in peers))
    for _ in range(1 << 16):  # more than the buffer of any socket holds
        peers[1].send(Interrupt(1))
        if peers[1].closed:
            break
    assert [each.closed for each in peers] == [False, True]
    assert deaf.link.recv(1)
