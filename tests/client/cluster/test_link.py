"""A link over real sockets with CURVE: it goes on after cuts, and nobody else reaches it."""

from __future__ import annotations

import errno
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.harness.proxies import proxied
from tests.harness.timing import unit

from central_storage.cluster import link as link_module
from central_storage.cluster.link import Item, Link, Links, Outcome, WorkerLink
from central_storage.gateway.relay import Relay
from cs_proto.codec import decode, encode
from cs_proto.errors import (
    CentralStorageError,
    ConfigurationError,
    Fenced,
    LaunchError,
    NoAnswerError,
    PeerProtocolError,
    ShutdownError,
)
from cs_proto.failures import error_of
from cs_proto.messages import PROTOCOL, CloseLink, Envelope, Goodbye, LinkOpened, OpenLink, Refused, Statistics
from cs_proto.records import Buffer, Record, replace
from cs_runtime.transport.curve import (
    ObserverKeys,
    PeerKeys,
    ServiceKeys,
    WorkerKeys,
    make_keys,
    protect_client,
)

MIB = 1 << 20
NAME = bytes(range(16))


def keys_of(head: str, tmp_path: Path, name: str) -> str:
    """The directory of one peer on another machine."""
    there = tmp_path / f"there-{name}"
    if not there.exists():
        there.mkdir(mode=0o700)
        for each in ("service.key", f"{name}.key_secret"):
            (there / each).write_bytes(Path(head, each).read_bytes())
            (there / each).chmod(0o600)
    return str(there)


class World:
    """A gateway without a service, and outposts, all in this thread."""

    def __init__(self, tmp_path: Path, return_timeout: float) -> None:
        self.keys = str(tmp_path / "keys")
        make_keys(self.keys, "ann")
        for name in ("n1", "n2"):
            make_keys(self.keys, worker=name)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.outposts: list[Link] = []
        self._tmp_path = tmp_path
        self._return_timeout = return_timeout
        self.relay = self._gateway()

    def _gateway(self) -> Relay:
        return Relay("/nowhere", ServiceKeys.read(self.keys), self.listener.dup(), self._return_timeout)

    def start_gateway_again(self) -> None:
        self.relay.close()
        self.relay = self._gateway()

    def worker_keys(self, name: str = "n1") -> WorkerKeys:
        return WorkerKeys.read(keys_of(self.keys, self._tmp_path, f"worker-{name}"))

    def observer_keys(self) -> ObserverKeys:
        return ObserverKeys.read(keys_of(self.keys, self._tmp_path, "observer-ann"))

    def outpost(self, name: str = "n1", address: str = "", keys: WorkerKeys | None = None, timeout: float = 0) -> Link:
        made = Link.connect(address or self.address, keys or self.worker_keys(name), timeout or unit(20))
        self.outposts.append(made)
        return made

    def ends(self) -> list[WorkerLink]:
        return list(self.relay.links)

    def until(self, condition: Callable[[], object], outposts: Sequence[Link] | None = None) -> None:
        """Let all take turns until something holds."""
        deadline = time.monotonic() + unit(30)
        while not condition():
            assert time.monotonic() < deadline
            self.relay.turn(0.002)
            for each in self.outposts if outposts is None else outposts:
                each.turn()

    def take_turns(self, times: int) -> None:
        """Let all take so many turns."""
        left = iter(range(times))
        self.until(lambda: next(left, None) is None)

    def meet(self, name: str = "n1", address: str = "") -> tuple[Link, WorkerLink]:
        """An outpost that is connected, and the gateway's end."""
        outpost = self.outpost(name, address)
        self.until(lambda: outpost.is_connected)
        (end,) = [each for each in self.ends() if each.role == f"worker-{name}"]
        return outpost, end

    @contextmanager
    def peer(self, keys: PeerKeys, identity: bytes = b"") -> Iterator[zmq.Socket[bytes]]:
        """A socket that says what it likes, with these keys."""
        with zmq.Context() as context, context.socket(zmq.DEALER) as made:
            made.setsockopt(zmq.LINGER, 0)
            if identity:
                made.setsockopt(zmq.IDENTITY, identity)
            protect_client(made, keys)
            made.connect(self.address)
            yield made

    def answer(self, peer: zmq.Socket[bytes], record: Record | None) -> Record:
        """Send a message, and wait for the next answer that is no sign of life."""
        peer.send_multipart([b"nonsense"] if record is None else encode(record))
        while True:
            self.until(lambda: peer.poll(0))
            found = decode(peer.recv_multipart())
            if not isinstance(found, Envelope):
                return found

    def is_alive(self, outpost: Link, end: WorkerLink) -> bool:
        """Whether items still pass in both directions, each once."""
        outpost.put(b"Z", [b"up"])
        end.put(b"Z", [b"down"])
        up: list[Item] = []
        down: list[Item] = []

        def is_there() -> bool:
            up.extend(end.received())
            down.extend(outpost.received())
            return bool(up and down) or outpost.is_over or end.is_over

        self.until(is_there)
        return (up, down) == ([(b"Z", [b"up"])], [(b"Z", [b"down"])])

    def close(self) -> None:
        for each in self.outposts:
            each.close()
        self.relay.close()
        self.listener.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path, unit(60))
    yield made
    made.close()


@pytest.fixture
def hasty(tmp_path: Path) -> Iterator[World]:
    """A gateway and outposts that do not wait long for each other."""
    made = World(tmp_path, unit(1.5))
    yield made
    made.close()


def test_items_pass_in_both_directions(world: World) -> None:
    outpost = world.outpost()
    outpost.put(b"J", [])  # before there is a connection
    outpost.put(b"Z", [b"header", bytes(9 * MIB), memoryview(b"view")])
    assert (outpost.is_open, outpost.is_connected) == (False, False)
    world.until(lambda: outpost.is_connected)
    (end,) = world.ends()
    assert (end.role, end.is_connected, end.is_over, end.reason) == ("worker-n1", True, False, None)
    end.put(b"S", [b"packet"])
    world.until(lambda: not outpost.waiting and not end.waiting)
    assert end.received() == [(b"J", []), (b"Z", [b"header", bytes(9 * MIB), b"view"])]
    assert outpost.received() == [(b"S", [b"packet"])]
    assert (end.received(), outpost.received()) == ([], [])


def test_each_key_has_a_link_of_its_own(world: World) -> None:
    one, first = world.meet("n1")
    two, second = world.meet("n2")
    assert {end.role for end in world.ends()} == {"worker-n1", "worker-n2"}
    first.put(b"S", [b"1"])
    second.put(b"S", [b"2"])
    world.until(lambda: not first.waiting and not second.waiting)
    assert (one.received(), two.received()) == ([(b"S", [b"1"])], [(b"S", [b"2"])])


def test_cuts_lose_and_double_nothing(world: World) -> None:
    with proxied(world.address) as (address, cut, _):
        outpost, end = world.meet(address=address)
        up: list[Item] = []
        down: list[Item] = []
        sizes = [0, 1, 3000, MIB, 5 * MIB]

        def all_has_arrived() -> bool:
            up.extend(end.received())
            down.extend(outpost.received())
            return not outpost.waiting and not end.waiting

        wanted = [(b"M", [b"%d" % number, bytes(sizes[number % 5])]) for number in range(40)]
        for number, (kind, parts) in enumerate(wanted):
            outpost.put(kind, parts)
            end.put(kind, parts)
            if number % 6 == 0:
                world.take_turns(3)
                cut()
        world.until(all_has_arrived)
        assert up == wanted
        assert down == wanted
        assert world.ends() == [end]
        assert not outpost.is_over


def test_a_connection_without_a_sign_of_life_is_made_anew(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_SILENCE", 1.0)
    with proxied(world.address) as (address, cut, hold):
        outpost, end = world.meet(address=address)
        hold(True)
        end.put(b"S", [b"held"])
        world.until(lambda: not outpost.is_connected)
        cut()
        hold(False)
        world.until(lambda: not end.waiting)
        assert outpost.received() == [(b"S", [b"held"])]
        assert world.is_alive(outpost, end)


def test_a_connection_that_ends_in_the_midst_of_a_message_counts_as_cut(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    outpost, end = world.meet()
    receive, ends = link_module.receive, [zmq.Again()]

    def receive_or_end(*words: Any, **options: Any) -> list[zmq.Frame]:
        if ends:
            raise ends.pop()
        return receive(*words, **options)

    monkeypatch.setattr(link_module, "receive", receive_or_end)
    before = end.identity
    assert world.is_alive(outpost, end)
    assert end.identity != before


# ZeroMQ looks at what has become of a connection in every hundredth call that receives.
MIDST = """
import sys
import zmq
from cs_proto.codec import LIMITS
from cs_runtime.transport.curve import ServiceKeys, WorkerKeys, ZapHandler, protect_server
from cs_runtime.transport.multipart import receive
from cs_runtime.transport.readiness import is_readable
from central_storage.cluster.link import _Connection

own, gateway = zmq.Context(), zmq.Context()
keys = ServiceKeys.read(sys.argv[1])
zap, router = ZapHandler(gateway, keys), gateway.socket(zmq.ROUTER)
router.setsockopt(zmq.LINGER, 0)
protect_server(router, keys)
port = router.bind_to_random_port("tcp://127.0.0.1")
connection = _Connection(own, f"tcp://127.0.0.1:{port}", WorkerKeys.read(sys.argv[2]), 0.0)
connection.socket.send(b"hello")
assert zap.socket.poll(20_000)
zap.answer()
name, _ = router.recv_multipart()
for message in ([b"single"],) * 98 + ([b"first", b"second", b"third"],):
    router.send_multipart([name, *message])
for _ in range(98):
    assert connection.socket.poll(20_000)
    assert len(receive(connection.socket, LIMITS, zmq.NOBLOCK)) == 1
assert connection.socket.poll(20_000)
parts = [connection.socket.recv(zmq.NOBLOCK)]
gateway.destroy(linger=0)
while connection.news() != "cut":
    assert connection.events.poll(20_000)
is_readable(connection.socket.getsockopt(zmq.FD), 0.3)  # what ends it, if anything does, has come
parts += [connection.socket.recv(zmq.NOBLOCK) for _ in range(2)]
print(*parts)
"""


def test_a_cut_in_the_midst_of_a_message_does_not_end_the_process(world: World, tmp_path: Path) -> None:
    there = keys_of(world.keys, tmp_path, "worker-n1")
    command = [sys.executable, "-c", MIDST, world.keys, there]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=unit(60), check=False)
    assert (ended.returncode, ended.stdout) == (0, "b'first' b'second' b'third'\n"), ended.stderr


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that TCP may take to connect, in each attempt of an outpost."""
    made: list[float] = []

    limit = link_module._limit

    def noted(limits: tuple[float, float, float], late: int) -> float:
        found = limit(limits, late)
        if limits is link_module._CONNECTS:
            made.append(found)
        return found

    monkeypatch.setattr(link_module, "_limit", noted)
    return made


def turn_until(outpost: Link, condition: Callable[[], object]) -> None:
    """Let the outpost alone take turns, when it is time."""
    poll = select.poll()
    poll.register(outpost.fileno(), select.POLLIN)
    deadline = time.monotonic() + unit(30)
    while not condition():
        assert time.monotonic() < deadline
        poll.poll(1000 * min(outpost.timeout() or 0.0, unit(30)))
        outpost.turn()


def test_a_connection_that_fails_at_once_is_made_again_soon(
    world: World, attempts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor of ZeroMQ tells of no event before somebody has asked for one."""
    monkeypatch.setattr(link_module, "_CONNECTS", (unit(600), 0.0, unit(600)))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
    turn_until(world.outpost(address=address, timeout=unit(600)), lambda: len(attempts) == 4)


def test_attempts_in_which_tcp_does_not_connect_in_time_become_longer(
    world: World, attempts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_CONNECTS", (0.02, 0.02, 0.06))
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, ExitStack() as stack:
        for _ in range(2):  # so many wait in the queue, and what more comes is dropped
            ahead = stack.enter_context(socket.socket())
            ahead.setblocking(False)
            ahead.connect_ex(listener.getsockname())
        outpost = world.outpost(address=f"tcp://127.0.0.1:{listener.getsockname()[1]}", timeout=unit(600))
        turn_until(outpost, lambda: len(attempts) == 5)
        assert attempts == pytest.approx([0.02, 0.04, 0.06, 0.06, 0.06])


def test_attempts_in_which_nobody_answers_in_time_become_longer(
    world: World, attempts: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "_CONNECTS", (unit(20), 0.0, unit(20)))
    monkeypatch.setattr(link_module, "_ANSWERS", (0.02, unit(300), unit(200)))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        outpost = world.outpost(address=f"tcp://127.0.0.1:{silent.getsockname()[1]}", timeout=unit(600))
        turn_until(outpost, lambda: len(attempts) == 2)
        turn_until(outpost, lambda: unit(100) < (outpost.timeout() or 0.0) < unit(200))


def test_the_descriptor_tells_when_there_is_something_to_do(world: World) -> None:
    outpost, end = world.meet()
    before = outpost.fileno()
    poll = select.poll()
    poll.register(outpost.fileno(), select.POLLIN)
    world.until(lambda: not poll.poll(0))
    assert 0.0 < (outpost.timeout() or 0.0) <= 1.0  # the next sign of life
    end.put(b"S", [b"packet"])
    deadline = time.monotonic() + unit(20)
    while not poll.poll(0) and time.monotonic() < deadline:
        world.relay.turn(0.002)
    outpost.turn()
    assert outpost.received() == [(b"S", [b"packet"])]
    outpost.put(b"S", [b"answer"])
    assert outpost.timeout() == 0.0
    world.relay.context.destroy(linger=0)  # which the other end sees
    assert poll.poll(unit(20) * 1000)
    world.relay.close()
    world.start_gateway_again()
    world.until(lambda: outpost.is_over)
    assert (outpost.fileno(), outpost.timeout()) == (before, None)


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [("tcp://127.0.0.1", "--join must be tcp"), ("tcp://127.0.0.1:0", "names no port"), ("/run/cs", "--join must be")],
)
def test_endpoints_that_are_refused(world: World, endpoint: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Link.connect(endpoint, world.worker_keys(), 1.0)


def test_a_key_that_is_not_admitted(world: World) -> None:
    Path(world.keys, "worker-n2.key").unlink()
    stranger = world.outpost("n2")
    world.until(lambda: stranger.is_over)
    assert isinstance(stranger.reason, ConfigurationError)
    assert "worker-n2.key" in str(stranger.reason)
    assert world.ends() == []
    stranger.put(b"Z", [b"x"])  # to nobody
    assert (stranger.waiting, stranger.timeout(), stranger.received()) == (0, None, [])


def test_a_key_that_is_removed_ends_the_link_at_the_next_connection(world: World) -> None:
    with proxied(world.address) as (address, cut, _):
        outpost, end = world.meet(address=address)
        Path(world.keys, "worker-n1.key").unlink()
        assert world.is_alive(outpost, end)
        cut()
        world.until(lambda: outpost.is_over)
        assert isinstance(outpost.reason, ConfigurationError)


def test_another_service_than_that_of_the_key(world: World) -> None:
    own = world.worker_keys()
    other = zmq.curve_keypair()[0]
    outpost = world.outpost(keys=WorkerKeys(own.path, own.public, own.secret, other), timeout=1.0)
    world.until(lambda: outpost.is_over)
    assert isinstance(outpost.reason, LaunchError)
    assert "another service than the one of service.key" in str(outpost.reason)


def test_nothing_listens_there(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"tcp://127.0.0.1:{closed.getsockname()[1]}"
    outpost = world.outpost(address=address, timeout=1.0)
    world.until(lambda: outpost.is_over)
    assert isinstance(outpost.reason, LaunchError)
    assert f"no gateway answered at {address} within 1 s" in str(outpost.reason)


def test_a_gateway_that_comes_later_is_found(world: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    outpost = world.outpost(address=address)
    world.take_turns(20)
    world.relay.close()
    world.listener.close()
    world.listener = socket.create_server(listener_of(address))
    world.relay = Relay("/nowhere", ServiceKeys.read(world.keys), world.listener.dup())
    world.until(lambda: outpost.is_connected)


def listener_of(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)


def test_a_link_that_gets_no_socket_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    outpost = world.outpost()
    monkeypatch.setattr(link_module, "_Connection", refuse)
    outpost.turn()
    assert isinstance(outpost.reason, LaunchError)
    assert str(outpost.reason) == f"the link to {world.address} cannot go on: Too many open files"


def test_a_second_outpost_with_the_same_key_is_refused(world: World) -> None:
    outpost, end = world.meet()
    second = world.outpost()
    world.until(lambda: second.is_over)
    assert isinstance(second.reason, LaunchError)
    assert "another outpost is connected with the key of worker-n1" in str(second.reason)
    assert world.ends() == [end]
    assert world.is_alive(outpost, end)


def test_a_second_outpost_takes_the_place_of_one_that_has_gone(world: World) -> None:
    with proxied(world.address) as (address, cut, _):
        outpost, end = world.meet(address=address)
        cut()
        second = world.outpost()
        world.until(lambda: second.is_connected or second.is_over, [second])
        if second.is_over:  # the gateway had not seen the cut
            assert isinstance(second.reason, LaunchError)
            second = world.outpost()
            world.until(lambda: second.is_connected, [second])
        assert isinstance(end.reason, Fenced)
        (new,) = world.ends()
        world.until(lambda: outpost.is_over)
        assert isinstance(outpost.reason, Fenced)
        assert world.is_alive(second, new)


def test_a_gateway_that_was_started_again_knows_no_session(world: World) -> None:
    outpost, _ = world.meet()
    world.start_gateway_again()
    world.until(lambda: outpost.is_over)
    assert isinstance(outpost.reason, Fenced)
    assert "knows no such session of worker-n1" in str(outpost.reason)
    assert world.ends() == []
    assert world.is_alive(*world.meet())


def test_a_gateway_gives_up_a_worker_of_which_it_hears_nothing(hasty: World) -> None:
    outpost, end = hasty.meet()
    assert hasty.is_alive(outpost, end)
    hasty.until(lambda: end.is_over, [])
    assert isinstance(end.reason, NoAnswerError)
    assert str(end.reason) == f"nothing was heard from worker-n1 for {unit(1.5):g} s"
    assert hasty.ends() == []
    hasty.until(lambda: outpost.is_over)
    assert isinstance(outpost.reason, NoAnswerError | Fenced)  # its own, if it has not been told first
    assert hasty.is_alive(*hasty.meet())


def test_an_outpost_gives_up_a_gateway_of_which_it_hears_nothing(hasty: World) -> None:
    outpost, _ = hasty.meet()
    deadline = time.monotonic() + unit(20)
    poll = select.poll()
    poll.register(outpost.fileno(), select.POLLIN)
    while not outpost.is_over and time.monotonic() < deadline:
        poll.poll(1000 * (outpost.timeout() or 0.0))
        outpost.turn()
    assert isinstance(outpost.reason, NoAnswerError)
    assert "nothing was heard from the gateway" in str(outpost.reason)


def test_signs_of_life_keep_a_link_that_has_nothing_to_say(hasty: World) -> None:
    outpost, end = hasty.meet()
    until = time.monotonic() + unit(3)  # twice as long as they wait
    hasty.until(lambda: time.monotonic() > until)
    assert hasty.is_alive(outpost, end)


def test_an_end_that_closes_says_so(world: World) -> None:
    outpost, end = world.meet()
    outpost.close()
    outpost.close()
    world.until(lambda: end.is_over, [])
    assert isinstance(outpost.reason, ShutdownError)
    assert isinstance(end.reason, ShutdownError)
    assert str(end.reason) == "the outpost of worker-n1 has ended"
    assert world.ends() == []

    other, end = world.meet()
    end.close(LaunchError("no place is free"))
    assert world.ends() == []
    world.until(lambda: other.is_over)
    assert isinstance(other.reason, LaunchError)
    assert str(other.reason) == "no place is free"

    last, end = world.meet()
    world.relay.links.close(ShutdownError("the service has ended"))
    world.until(lambda: last.is_over)
    assert (str(last.reason), str(end.reason)) == ("the service has ended",) * 2


def test_an_end_beside_a_cut_is_said_over_the_next_connection(world: World) -> None:
    """The gateway does not wait for its return_timeout then."""
    with proxied(world.address) as (address, cut, hold):
        outpost, end = world.meet(address=address)
        hold(True)
        cut()
        world.until(lambda: not outpost.is_connected)
        ending = threading.Thread(target=outpost.close, args=(unit(30),))
        ending.start()
        hold(False)
        world.until(lambda: end.is_over, [])
        ending.join()
    assert str(end.reason) == "the outpost of worker-n1 has ended"


@pytest.mark.parametrize("patience", [0.0, 0.5])
def test_an_end_beside_a_cut_waits_no_longer_than_it_may(world: World, patience: float) -> None:
    with proxied(world.address) as (address, cut, hold):
        outpost, end = world.meet(address=address)
        hold(True)
        cut()
        world.until(lambda: not outpost.is_connected)
        begun = time.monotonic()
        outpost.close(patience)
        assert patience <= time.monotonic() - begun < unit(10)
        assert not end.is_over
        hold(False)


def refusal(found: Record) -> str:
    assert isinstance(found, Refused)
    return f"{found.error.exception}: {found.error.message}"


def test_what_an_outpost_may_not_say(world: World) -> None:
    """It ends its own session, if it has one, and no other."""
    outpost, end = world.meet("n2")
    wrong: list[tuple[Record | None, str]] = [
        (None, "cs.PeerProtocolError: a header that is not one msgpack value"),
        (Goodbye("ab"), "cs.PeerProtocolError: an outpost does not send a Goodbye"),
        (LinkOpened(NAME, 0, 1.0), "cs.PeerProtocolError: an outpost does not send a LinkOpened"),
        (Envelope(NAME, 0, 0, b"", ()), "cs.Fenced: this session is over"),
        (CloseLink(NAME, error_of(KeyError())), "cs.Fenced: this session is over"),
        (OpenLink(PROTOCOL, NAME, False, 0), "cs.Fenced: the gateway knows no such session of worker-n1"),
        (OpenLink(PROTOCOL + 1, NAME, True, 0), f"cs.PeerProtocolError: .* protocol {PROTOCOL + 1}, this gateway"),
    ]
    with world.peer(world.worker_keys("n1")) as peer:
        for record, said in wrong:
            assert re.search(said, refusal(world.answer(peer, record)))
        for number, said in ((2, "envelope 2 came after envelope 0"), (1, "kind has 0 bytes")):
            assert isinstance(world.answer(peer, OpenLink(PROTOCOL, NAME, True, 0)), LinkOpened)
            assert len(world.ends()) == 2
            assert re.search(said, refusal(world.answer(peer, Envelope(NAME, number, 0, b"\2", (b"",)))))
            assert world.ends() == [end]
    assert world.is_alive(outpost, end)


@pytest.mark.parametrize("who", ["worker-n2", "worker-n1", "observer-ann"])
def test_another_connection_cannot_speak_for_a_session(world: World, who: str) -> None:
    """Even if it knows the name of the session, with another key, or with the same key over a second connection."""
    outpost, end = world.meet("n1")
    name = end.session.name
    keys = {"worker-n1": world.worker_keys(), "worker-n2": world.worker_keys("n2")}.get(who) or world.observer_keys()
    with world.peer(keys) as peer:
        for record in (Envelope(name, 1, 0, b"\2", (b"Z",)), CloseLink(name, error_of(KeyError()))):
            assert refusal(world.answer(peer, record))
        if who == "worker-n2":  # of its own key a session may have any name
            assert isinstance(world.answer(peer, OpenLink(PROTOCOL, name, True, 0)), LinkOpened)
        elif who == "observer-ann":
            assert "an observer may only ask" in refusal(world.answer(peer, OpenLink(PROTOCOL, name, True, 0)))
    assert end in world.ends()
    assert world.is_alive(outpost, end)


@pytest.mark.parametrize("who", ["worker-n2", "observer-ann"])
def test_nobody_takes_the_identity_of_a_worker(world: World, who: str) -> None:
    outpost, end = world.meet("n1")
    keys = world.worker_keys("n2") if who == "worker-n2" else world.observer_keys()
    with world.peer(keys, end.identity) as peer:
        for _ in range(20):
            peer.send_multipart(encode(Envelope(end.session.name, 1, 0, b"\2", (b"Z",))))
        for _ in range(20):
            assert world.is_alive(outpost, end)
        assert not peer.poll(0)


def test_an_observer_that_floods_starves_no_worker(world: World) -> None:
    outpost, end = world.meet("n1")
    question = [*encode(Statistics(1)), b"a part too many"]
    with world.peer(world.observer_keys()) as peer:
        for _ in range(20):
            with suppress(zmq.Again):
                while True:
                    peer.send_multipart(question, zmq.NOBLOCK)
            assert world.is_alive(outpost, end)
        assert isinstance(decode(peer.recv_multipart()), Refused)


def test_what_else_the_gateway_waits_for(world: World) -> None:
    """The sockets of those who use the links."""
    near, far = socket.socketpair()
    with near, far, world.relay.context.socket(zmq.PAIR) as one, world.relay.context.socket(zmq.PAIR) as other:
        one.bind("inproc://watched")
        other.connect("inproc://watched")
        seen: list[bytes] = []
        world.relay.watch(near.fileno(), lambda: seen.append(near.recv(9)))
        world.relay.watch(one, lambda: seen.append(one.recv()))
        far.send(b"packet")
        other.send(b"message")
        world.until(lambda: len(seen) == 2)
        assert sorted(seen) == [b"message", b"packet"]
        world.relay.unwatch(near.fileno())
        world.relay.unwatch(one)
        far.send(b"packet")
        world.relay.turn(0.0)
        assert len(seen) == 2


class Scripted:
    """The gateway's ends over a way out that fails as a test wishes."""

    def __init__(self) -> None:
        self.outcome: Outcome = "sent"
        self.sent: list[tuple[bytes, Record]] = []
        self.links = Links(self._send, 60.0)

    def _send(self, identity: bytes, parts: Sequence[Buffer]) -> Outcome:
        if self.outcome == "sent":
            self.sent.append((identity, decode(parts)))
        return self.outcome

    def hear(self, record: Record, now: float, identity: bytes = b"i") -> None:
        self.links.hear("worker-n1", identity, encode(record), now)

    def taken(self) -> list[tuple[bytes, Record]]:
        sent, self.sent = self.sent, []
        return sent


def numbers(sent: list[tuple[bytes, Record]]) -> list[int]:
    return [record.number for _, record in sent if isinstance(record, Envelope)]


def test_a_peer_that_is_full_is_tried_again_soon() -> None:
    gateway = Scripted()
    gateway.hear(OpenLink(PROTOCOL, NAME, True, 0), 0.0)
    assert gateway.taken() == [(b"i", LinkOpened(NAME, 0, 60.0))]
    (end,) = gateway.links
    end.put(b"S", [b"packet"])
    assert gateway.links.timeout(0.0) == 0.0
    gateway.outcome = "full"
    gateway.links.turn(0.0)
    assert 0.0 < (gateway.links.timeout(0.0) or 0.0) < 0.1
    gateway.outcome = "sent"
    gateway.links.turn(0.0)
    assert numbers(gateway.taken()) == [1]
    assert gateway.links.timeout(0.25) == 0.75


def test_to_a_peer_that_has_gone_nothing_is_sent_until_it_is_back() -> None:
    gateway = Scripted()
    gateway.hear(OpenLink(PROTOCOL, NAME, True, 0), 0.0)
    (end,) = gateway.links
    for _ in range(3):
        end.put(b"M", [bytes(3 * MIB)])
    gateway.links.turn(0.0)
    assert numbers(gateway.taken()) == [1, 2]  # the third waits until one is heard
    gateway.outcome = "gone"
    gateway.links.turn(2.0)
    assert not end.is_connected
    gateway.outcome = "sent"
    gateway.links.turn(2.0)
    assert gateway.taken() == []
    assert gateway.links.timeout(10.0) == 50.0
    gateway.hear(OpenLink(PROTOCOL, NAME, False, 1), 10.0, b"j")
    gateway.links.turn(10.0)
    assert numbers(gateway.taken()) == [2, 3]
    gateway.hear(Envelope(NAME, 0, 3, b"", ()), 10.0, b"i")  # over the connection that was cut
    assert end.waiting
    gateway.hear(Envelope(NAME, 0, 3, b"", ()), 10.0, b"j")
    assert not end.waiting
    assert not gateway.links.turn(69.0)
    assert list(gateway.links) == [end]
    assert gateway.links.turn(70.0)  # so that nobody waits before it is noticed
    assert list(gateway.links) == []
    assert isinstance(end.reason, NoAnswerError)
    assert gateway.links.timeout(70.0) is None


def test_the_first_answer_may_be_lost() -> None:
    """An outpost that has heard nothing begins its session again, and it is the same one."""
    gateway = Scripted()
    gateway.hear(OpenLink(PROTOCOL, NAME, True, 0), 0.0)
    (end,) = gateway.links
    end.put(b"J", [b"x"])
    gateway.links.turn(0.0)
    gateway.taken()
    gateway.hear(OpenLink(PROTOCOL, NAME, True, 0), 1.0, b"j")
    gateway.links.turn(1.0)
    assert list(gateway.links) == [end]
    assert [type(record) for _, record in gateway.sent] == [LinkOpened, Envelope]
    assert numbers(gateway.taken()) == [1]


def test_an_opening_that_comes_late_takes_no_place() -> None:
    """The outpost has given up that connection, but the network still brings what was sent over it."""
    gateway = Scripted()
    gateway.hear(OpenLink(PROTOCOL, NAME, True, 0, 1), 0.0)
    gateway.hear(OpenLink(PROTOCOL, NAME, False, 0, 3), 9.0, b"k")
    gateway.taken()
    gateway.hear(OpenLink(PROTOCOL, NAME, False, 0, 2), 9.5, b"j")
    assert [(name, type(record)) for name, record in gateway.taken()] == [(b"j", Refused)]
    (end,) = gateway.links
    end.put(b"S", [b"packet"])
    gateway.hear(Envelope(NAME, 0, 0, b"", ()), 9.5, b"k")
    gateway.links.turn(9.5)
    assert [(name, type(record)) for name, record in gateway.taken()] == [(b"k", Envelope)]


@pytest.mark.parametrize(
    ("outcome", "silence", "is_refused"), [("sent", 1.0, True), ("sent", 21.0, False), ("gone", 1.0, False)]
)
def test_whether_an_outpost_still_has_its_place(outcome: Outcome, silence: float, is_refused: bool) -> None:
    gateway = Scripted()
    gateway.hear(OpenLink(PROTOCOL, NAME, True, 0), 0.0)
    (end,) = gateway.links
    gateway.outcome = outcome
    gateway.hear(OpenLink(PROTOCOL, bytes(16), True, 0), silence, b"other")
    assert (list(gateway.links) == [end]) == is_refused
    assert end.is_over != is_refused
    if outcome == "sent":
        answers = [record for identity, record in gateway.taken() if identity == b"other"]
        assert [type(answer) for answer in answers] == [Refused if is_refused else LinkOpened]


def test_an_error_that_is_none_of_ours_is_one_of_the_protocol() -> None:
    gateway = Scripted()
    gateway.hear(OpenLink(PROTOCOL, NAME, True, 0), 0.0)
    (end,) = gateway.links
    gateway.hear(CloseLink(NAME, error_of(Fenced("ended"))), 0.0)
    assert isinstance(end.reason, CentralStorageError)
    assert (type(end.reason), str(end.reason)) == (Fenced, "ended")
    gateway.links.turn(0.0)
    assert [type(record) for _, record in gateway.taken()] == [LinkOpened]  # no answer to a goodbye
    gateway.hear(OpenLink(PROTOCOL, NAME, True, 0), 0.0)
    (end,) = gateway.links
    unknown = CloseLink(NAME, error_of(Fenced("x")))
    unknown = CloseLink(NAME, type(unknown.error)(**{**vars(unknown.error), "exception": "no such code"}))
    gateway.hear(unknown, 0.0)
    assert isinstance(end.reason, PeerProtocolError)


def test_an_error_that_no_text_makes_ends_its_session_and_nothing_else() -> None:
    gateway = Scripted()
    gateway.hear(OpenLink(PROTOCOL, NAME, True, 0), 0.0)
    (end,) = gateway.links
    error = replace(error_of(Fenced("x")), exception="UnicodeDecodeError")
    gateway.hear(CloseLink(NAME, error), 0.0)
    assert isinstance(end.reason, PeerProtocolError)
    assert "UnicodeDecodeError" in str(end.reason)


@pytest.mark.parametrize("call", ["socket", "get_monitor_socket"])
def test_a_process_without_descriptors_ends_its_link_and_says_why(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    outpost = world.outpost()
    monkeypatch.setattr(zmq.Context if call == "socket" else zmq.Socket, call, refuse)
    outpost.turn()
    with pytest.raises(LaunchError, match=r"cannot go on: Too many open files"):
        raise outpost.reason or AssertionError
    outpost.close()  # which a socket of the failed attempt does not hinder


def test_a_connection_that_cannot_be_watched_ends_its_link(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        """Watches one descriptor, and no more."""

        def __init__(self) -> None:
            self._epoll = select.epoll()
            self._watched: list[object] = []

        def register(self, what: zmq.Socket[bytes], events: int) -> None:
            if self._watched:
                raise OSError(errno.ENOSPC, "No space left on device")
            self._watched.append(what)
            self._epoll.register(what, events)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._epoll, name)

    outpost = world.outpost()
    outpost._epoll.close()
    monkeypatch.setattr(outpost, "_epoll", Full())
    outpost.turn()
    with pytest.raises(LaunchError, match=r"cannot go on: .* No space left on device"):
        raise outpost.reason or AssertionError
    outpost.close()


def test_a_name_that_nobody_knows_is_no_port_where_nothing_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(address: tuple[str, int], timeout: float) -> socket.socket:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    make_keys(str(tmp_path), worker="a")
    link = Link("tcp://nowhere.invalid:5600", WorkerKeys.read(str(tmp_path)), 1.0)
    monkeypatch.setattr(socket, "create_connection", unknown)
    try:
        said = "that is the name of no machine that is known here (Name or service not known)"
        assert link.why_not_open() == said
    finally:
        link.close()


def test_an_address_that_zeromq_refuses_ends_the_link(tmp_path: Path) -> None:
    make_keys(str(tmp_path), worker="a")
    link = Link("tcp://-:5600", WorkerKeys.read(str(tmp_path)), 1.0)
    link.turn()
    assert "cannot go on: Invalid argument" in str(link.reason)
    link.close()  # it waits for what is open
