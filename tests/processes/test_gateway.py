"""Observers on other machines: admitted by their keys alone, with questions alone, whoever dies or floods."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.processes import Child, run, start
from tests.harness.proxies import proxied
from tests.harness.record_strategies import records
from tests.harness.services import connected
from tests.harness.timing import unit
from tests.processes.test_ctl import Training, ctl
from zmq.utils.monitor import recv_monitor_message

import central_storage as cs
from central_storage.cluster.link import Outcome
from central_storage.ctl import services
from central_storage.gateway.relay import Relay
from central_storage.launch import cli
from central_storage.observer import blocking
from cs_proto import messages
from cs_proto.codec import BULK_LIMITS, decode, encode
from cs_proto.records import RECORDS, Record
from cs_runtime.transport.curve import ObserverKeys, ServiceKeys, make_keys, protect_client

MIB = 1 << 20
LARGE = 1 << 20  # elements: more than the connections hold
FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
REFUSED = FAILED | zmq.EVENT_DISCONNECTED

TRAIN = """
import sys
from pathlib import Path

import numpy as np

import central_storage as cs

strategy = cs.CentralStorageStrategy()
with strategy.scope():
    w = cs.Variable(np.zeros(250_000, np.float32), name="watched")
    sgd = cs.optimizers.SGD(1.0)

@cs.function
def step():
    [gradient] = cs.gradient_buffers([w])
    gradient[...] = -0.5
    sgd.apply_gradients([(gradient, w)])

print("address", strategy.address, flush=True)
flag, steps = Path(sys.argv[1]), 0
while not flag.exists():
    strategy.run(step)
    steps += 1
print("steps", steps, "value", float(w.numpy().min()), float(w.numpy().max()), flush=True)
"""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = str(tmp_path_factory.mktemp("gateway") / "keys")
    make_keys(directory)
    return directory


class Service:
    """A relay, in a thread, and the service behind it."""

    def __init__(self, strategy: cs.CentralStorageStrategy, keys: str) -> None:
        self.strategy = strategy
        self.heard: list[Record] = []
        #: A door that each Get opens, and the numbers of the questions whose values are sent.
        self.asked = threading.Semaphore(0)
        self.sent: list[int] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        self._relay = _Noting(self, ServiceKeys.read(keys), listener)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._turn)
        self._thread.start()

    def _turn(self) -> None:
        while not self._is_over.is_set():
            self._relay.turn(0.05)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._relay.close()


class _Noting(Relay):
    def __init__(self, service: Service, keys: ServiceKeys, listener: socket.socket) -> None:
        super().__init__(service.strategy.address, keys, listener)
        self._service = service

    def _forward(self, identity: bytes, record: Record) -> None:
        self._service.heard.append(record)
        super()._forward(identity, record)
        if isinstance(record, messages.Get):
            self._service.asked.release()

    def _deliver(self, identity: bytes, parts: Sequence[Any]) -> Outcome:
        record = decode([bytes(getattr(part, "buffer", part)) for part in parts], BULK_LIMITS)
        if isinstance(record, messages.Got) and record.arrays:
            self._service.sent.append(record.request)
        return super()._deliver(identity, parts)


@pytest.fixture
def service(own_two: cs.CentralStorageStrategy, keys: str) -> Iterator[Service]:
    made = Service(own_two, keys)
    yield made
    made.close()


@pytest.fixture(scope="module")
def own_two() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            w = cs.Variable(np.arange(4.0), name="w")
            large = cs.Variable(np.zeros(LARGE), name="large")
        yield connected(strategy)
        assert w.numpy().tolist() == [0.0, 1.0, 2.0, 3.0]
        assert not large.numpy().any()


@contextmanager
def peer(address: str, protect: Callable[[zmq.Socket[bytes]], object]) -> Iterator[tuple[zmq.Socket[bytes], Any]]:
    """A socket that connects to ``address``, and what reports its handshake."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.RECONNECT_IVL, -1)
        made.setsockopt(zmq.RCVTIMEO, int(unit(20) * 1000))
        protect(made)
        with made.get_monitor_socket(REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED) as monitor:
            monitor.setsockopt(zmq.RCVTIMEO, int(unit(20) * 1000))
            made.connect(address)
            yield made, monitor
            made.disable_monitor()


def test_an_observer_over_tcp_reads_what_one_of_the_machine_reads(service: Service, keys: str) -> None:
    strategy = service.strategy
    with cs.connect(strategy.address) as near, cs.connect(service.address, keys=keys) as far:
        assert (far.address, far.replicas, far.transport) == (service.address, 2, "tcp + CURVE, bytes in frames")
        assert repr(far) == f"<Observer of {service.address}>"
        assert [each.spec.name for each in far.variables()] == [each.spec.name for each in near.variables()]
        assert far.get("w").tolist() == near.get("w").tolist() == [0.0, 1.0, 2.0, 3.0]
        assert [each.tolist() for each in far.get_all(["w", "w"])] == [[0.0, 1.0, 2.0, 3.0]] * 2
        assert far.statistics().variables == near.statistics().variables
        with pytest.raises(cs.errors.InvalidArgumentError, match="nothing like it"):
            far.get("nothing like it")
        assert far.get("w").tolist() == [0.0, 1.0, 2.0, 3.0]

    async def look() -> list[float]:
        async with cs.aio.connect(service.address, keys=keys) as observer:
            return (await observer.get("w")).tolist()

    assert asyncio.run(look()) == [0.0, 1.0, 2.0, 3.0]


def test_addresses_and_keys_that_do_not_fit(keys: str, own_two: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    for address, given_keys, said in (
        ("tcp://127.0.0.1:5600", None, "needs keys=DIR"),
        ("tcp://127.0.0.1:0", keys, "names no port"),
        ("tcp://127.0.0.1", keys, "must be tcp://ADDRESS:PORT"),
        ("udp://127.0.0.1:5600", keys, "must be tcp://ADDRESS:PORT"),
        ("tcp://127.0.0.1:5600", tmp_path / "none", "cs-launch keys DIR makes one"),
        (own_two.address, keys, "is a run directory"),
    ):
        with pytest.raises(cs.errors.ConfigurationError, match=said):
            cs.connect(address, keys=given_keys)


def test_nothing_listens_there(keys: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(cs.errors.NoAnswerError, match=r"within 0.3 s: nothing listens there, .*observer.key_secret"):
        cs.connect(address, timeout=0.3, keys=keys)


def nothing(made: zmq.Socket[bytes]) -> None:
    pass


def plain(made: zmq.Socket[bytes]) -> None:
    made.setsockopt(zmq.PLAIN_USERNAME, b"observer")
    made.setsockopt(zmq.PLAIN_PASSWORD, b"observer")


def unknown_key(keys: str) -> Callable[[zmq.Socket[bytes]], None]:
    public, secret = zmq.curve_keypair()
    known = ObserverKeys.read(keys)
    return lambda made: protect_client(made, ObserverKeys("", public, secret, known.service))


def wrong_server_key(keys: str) -> Callable[[zmq.Socket[bytes]], None]:
    known = ObserverKeys.read(keys)
    return lambda made: protect_client(made, ObserverKeys("", known.public, known.secret, zmq.curve_keypair()[0]))


def attempt(service: Service, protect: Callable[[zmq.Socket[bytes]], object]) -> bool:
    """Whether a peer that protects its socket so gets through the handshake. It sends a question either way."""
    with peer(service.address, protect) as (made, monitor):
        with suppress(zmq.Again):
            made.send_multipart(encode(messages.Statistics(1)), zmq.NOBLOCK)
        return bool(recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED)


def raw(service: Service) -> bool:
    """Whether bytes that are not ZeroMQ's get an answer besides the greeting."""
    host, _, port = service.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=unit(20)) as made:
        made.sendall(os.urandom(200))
        said = b""
        with suppress(ConnectionResetError):
            while piece := made.recv(4096):
                said += piece
    return len(said) > 64


def attempts(service: Service, keys: str, times: int) -> list[bool]:
    """Five kinds of peers without a key that is known, each so many times: whether each got through."""
    got = []
    for _ in range(times):
        got += [attempt(service, kind) for kind in (nothing, plain, unknown_key(keys), wrong_server_key(keys))]
        got.append(raw(service))
    return got


@pytest.mark.parametrize("times", [20, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_nobody_without_a_known_key_gets_anything(service: Service, keys: str, times: int) -> None:
    assert attempts(service, keys, times) == [False] * (5 * times)
    with cs.connect(service.address, keys=keys) as observer:
        assert observer.get("w").tolist() == [0.0, 1.0, 2.0, 3.0]
    assert len(service.heard) <= 4  # of this observer


def test_a_broken_look_at_keys_is_noticed(
    own_two: cs.CentralStorageStrategy, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above finds a relay that admits whoever encrypts."""
    monkeypatch.setattr(ServiceKeys, "role_of", lambda self, key: "observer")
    broken = Service(own_two, keys)
    try:
        assert attempts(broken, keys, 1) == [False, False, True, False, False]
    finally:
        broken.close()


def test_a_key_that_is_removed_admits_nobody_from_then_on(own_two: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    make_keys(str(tmp_path / "keys"))
    there = tmp_path / "there"
    there.mkdir(mode=0o700)
    for name in ("service.key", "observer.key_secret"):
        (tmp_path / "keys" / name).rename(there / name)
    with ExitStack() as stack:
        service = Service(own_two, str(tmp_path / "keys"))
        stack.callback(service.close)
        with cs.connect(service.address, keys=there) as observer:
            assert observer.replicas == 2
        (tmp_path / "keys" / "observer.key").unlink()
        assert not attempt(service, lambda made: protect_client(made, ObserverKeys.read(str(there))))


QUESTIONS = (messages.Hello, messages.Get, messages.Statistics, messages.Goodbye)


def test_a_known_peer_can_only_ask(service: Service, keys: str) -> None:
    """Every record of the protocol that is no question of an observer is refused, and the server hears none."""
    before = service.strategy.statistics()
    others = sorted((kind for kind in RECORDS.values() if kind not in QUESTIONS), key=lambda kind: kind.__name__)
    with peer(service.address, lambda made: protect_client(made, ObserverKeys.read(keys))) as (made, _):

        @given(record=st.sampled_from(others).flatmap(records))
        def say(record: Record) -> None:
            made.send_multipart(encode(record))
            assert isinstance(decode(made.recv_multipart()), messages.Refused)

        say()
        made.send_multipart([b"nonsense"])
        assert isinstance(decode(made.recv_multipart()), messages.Refused)
    assert service.heard == []
    after = service.strategy.statistics()
    assert (after.variables, after.commits, after.runs) == (before.variables, before.commits, before.runs)


def test_another_role_and_another_protocol_are_refused(service: Service, keys: str) -> None:
    with peer(service.address, lambda made: protect_client(made, ObserverKeys.read(keys))) as (made, _):
        for hello, said in (
            (messages.Hello(messages.PROTOCOL, "controller", "ab12", 1), "no question"),
            (messages.Hello(messages.PROTOCOL + 1, "observer", "ab12", 1), str(messages.PROTOCOL + 1)),
        ):
            made.send_multipart(encode(hello))
            while not isinstance(answer := decode(made.recv_multipart()), messages.Refused):
                pass  # the relay has said hello itself
            assert said in answer.error.message


def test_a_connection_that_is_cut_or_held_up(service: Service, keys: str) -> None:
    with proxied(service.address) as (address, cut, hold), cs.connect(address, unit(30), keys=keys) as observer:
        for _ in range(5):
            assert observer.get("w").tolist() == [0.0, 1.0, 2.0, 3.0]
            cut()
        hold(True)
        released = threading.Timer(0.3, hold, [False])
        released.start()
        assert observer.get("w").tolist() == [0.0, 1.0, 2.0, 3.0]
        released.join()


@pytest.mark.parametrize(("name", "times"), [("w", 4), ("large", 14)])
def test_an_answer_that_is_on_its_way_is_not_sent_again(
    service: Service, keys: str, monkeypatch: pytest.MonkeyPatch, name: str, times: int
) -> None:
    """However often the observer asks: for a large value often enough that the server would answer again."""
    with proxied(service.address) as (address, _, hold), cs.connect(address, unit(60), keys=keys) as observer:
        monkeypatch.setattr(blocking, "_ASK_AGAIN", (0.01, 0.01))
        hold(True, ["down"])
        found: list[np.ndarray] = []
        asking = threading.Thread(target=lambda: found.append(observer.get(name)))
        asking.start()
        for _ in range(times):
            assert service.asked.acquire(timeout=unit(30))
        hold(False)
        asking.join()
        (question,) = {each.request for each in service.heard if isinstance(each, messages.Get)}
        assert observer.get("w").tolist() == [0.0, 1.0, 2.0, 3.0]
        assert found[0].shape == observer.get(name).shape
        assert service.sent == [question, question + 1, question + 2]


def test_an_answer_is_sent_again_over_another_connection_only(service: Service, keys: str) -> None:
    question = messages.Get(1, (), ("w",), True)
    protect = ObserverKeys.read(keys)
    for _ in range(2):
        with peer(service.address, lambda made: protect_client(made, protect)) as (made, _):
            made.send_multipart(encode(question))
            while not isinstance(decode(made.recv_multipart()), messages.Got):
                pass  # the relay has said hello itself
            for asked in (question, question, messages.Statistics(2)):
                made.send_multipart(encode(asked))
            assert isinstance(decode(made.recv_multipart()), messages.Counters)
    assert service.sent == [1, 1]


@pytest.fixture(scope="module")
def launched(keys: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Training, str]]:
    """A training that listens, and its address."""
    directory = tmp_path_factory.mktemp("listening")
    script, flag = directory / "train.py", directory / "flag"
    script.write_text(TRAIN)
    options = ("--devices", "cpu:0,cpu:1", "--listen", "tcp://127.0.0.1:0", "--keys", keys, "--max-restarts", "1000")
    with start("cs-launch", *options, script, flag) as child:
        found = child.wait_for(r"^observers on (tcp://\S+), keys in (.*)$", stream="err")
        assert found[2] == keys
        yield Training(child, flag), found[1]
        flag.touch()
        ended = child.wait()
        _, steps, _, least, most = ended.ok().lines[-1].split()
        assert float(least) == float(most) == float(steps)  # nobody has changed anything
    services.clean()


def gateways(child: Child) -> list[psutil.Process]:
    return [each for each in child.processes() if "central_storage.gateway" in each.cmdline()]


def listening(child: Child) -> set[str]:
    return {
        f"tcp://{each.laddr.ip}:{each.laddr.port}"
        for process in child.processes()
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }


def test_a_training_that_listens_is_seen_from_elsewhere(launched: tuple[Training, str], keys: str) -> None:
    training, address = launched
    with cs.connect(address, unit(30), keys=keys) as observer:
        values = [observer.get("watched") for _ in range(20)]
        assert all(each.min() == each.max() for each in values)
        assert [each[0] for each in values] == sorted(each[0] for each in values)
    assert training.status()["listen"] == address
    assert f"observers: {address}" in ctl("status", training.address).ok().out
    assert listening(training.child) == {address}


def test_a_message_that_is_refused_is_shown(launched: tuple[Training, str], keys: str) -> None:
    training, address = launched
    with peer(address, lambda made: protect_client(made, ObserverKeys.read(keys))) as (made, _):
        made.send_multipart([b"nonsense"])
        training.child.wait_for(r"\[gateway\] .* refused a message of observer: ", stream="err")


def test_the_server_and_the_gateway_may_die(launched: tuple[Training, str], keys: str) -> None:
    training, address = launched
    with cs.connect(address, unit(60), keys=keys) as observer:
        before = observer.get("watched")[0]
        os.kill(observer.statistics().pid, signal.SIGKILL)
        while (value := observer.get("watched"))[0] <= before:
            pass
        assert value.min() == value.max()
        (gateway,) = gateways(training.child)
        gateway.kill()
        assert observer.get("watched")[0] >= value[0]
        training.child.wait_for(
            rf"the gateway \(pid {gateway.pid}\) ended by SIGKILL.*; observers of other machines get no answers until",
            stream="err",
        )
        assert [each.pid for each in gateways(training.child)] != [gateway.pid]


def test_a_peer_that_takes_no_answers_costs_little_memory(launched: tuple[Training, str], keys: str) -> None:
    training, address = launched
    with cs.connect(address, unit(60), keys=keys) as honest:
        honest.get("watched")
        (gateway,) = gateways(training.child)
        before = gateway.memory_full_info().uss
        with peer(address, lambda made: protect_client(made, ObserverKeys.read(keys))) as (made, _):
            made.setsockopt(zmq.RCVHWM, 1)
            for number in range(1, 1001):
                made.send_multipart(encode(messages.Get(number, (), ("watched",), True)))
            for _ in range(20):
                honest.get("watched")
            assert gateway.memory_full_info().uss - before <= 64 * MIB
            assert made.poll(0)  # it could have taken some


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
def test_junk_connections_starve_nobody(launched: tuple[Training, str], keys: str, count: int) -> None:
    training, address = launched
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    with cs.connect(address, unit(60), keys=keys) as honest:
        honest.get("watched")
        (gateway,) = gateways(training.child)
        before = gateway.num_fds()
        with ExitStack() as junk:
            for _ in range(count):
                junk.enter_context(socket.create_connection((host, int(port)))).sendall(b"GET / HTTP/1.1\r\n\r\n")
            honest.get("watched")
            with cs.connect(address, unit(60), keys=keys) as late:
                late.get("watched")
        while gateway.num_fds() > before:  # the time limit of the test bounds it
            honest.get("watched")
        assert gateway.is_running()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--listen", "tcp://127.0.0.1:0"], "--listen needs --keys DIR: nothing listens on a network without keys"),
        (["--listen", "tcp://192.0.2.1:5600"], "--listen needs --keys DIR"),
        (["--keys", "KEYS"], "--keys needs --listen"),
        (["--listen", "tcp://127.0.0.1:0", "--keys", "/nowhere"], "/nowhere, the directory of keys, cannot be read"),
        (["--listen", "tcp://127.0.0.1:0", "--keys", "EMPTY"], "service.key_secret cannot be read"),
        (["--listen", "tcp://127.0.0.1:0", "--keys", "OPEN"], "others may not write there"),
        (["--listen", "tcp://0.0.0.0:5600", "--keys", "KEYS"], "would mean every network of this machine"),
        (["--listen", "tcp://*:5600", "--keys", "KEYS"], "would mean every network of this machine"),
        (["--listen", "tcp://[::]:5600", "--keys", "KEYS"], "would mean every network of this machine"),
        (["--listen", "127.0.0.1:5600", "--keys", "KEYS"], "must be tcp://ADDRESS:PORT"),
        (["--listen", "tcp://192.0.2.1:5600", "--keys", "KEYS"], "is no address of this machine"),
        (["--join", "--listen", "tcp://127.0.0.1:0", "--keys", "KEYS"], "--listen is for the launcher of a service"),
        (["--health", "--listen", "tcp://127.0.0.1:0", "--keys", "KEYS"], "--listen is for the launcher of a service"),
    ],
)
def test_a_start_that_is_refused(
    options: list[str], said: str, keys: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "EMPTY").mkdir(mode=0o700)
    (tmp_path / "OPEN").mkdir()
    (tmp_path / "OPEN").chmod(0o777)
    places = {"KEYS": keys, "EMPTY": str(tmp_path / "EMPTY"), "OPEN": str(tmp_path / "OPEN")}
    words = [places.get(each, each) for each in options]
    script = [] if {"--join", "--health"} & set(words) else [__file__]
    assert cli.main([*words, *script]) == 2
    assert said in capsys.readouterr().err


def test_a_name_of_every_network_is_refused(
    keys: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = socket.getaddrinfo

    def answered(host: str, *args: Any, flags: int = 0, **options: Any) -> Any:
        is_looked_up = host == "all" and not flags & socket.AI_NUMERICHOST
        return asked("0.0.0.0" if is_looked_up else host, *args, flags=flags, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answered)
    assert cli.main(["--listen", "tcp://all:0", "--keys", keys, __file__]) == 2
    assert "--listen tcp://all:0: all means every network of this machine" in capsys.readouterr().err


def test_a_port_in_use_ends_the_start(keys: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        assert cli.main(["--listen", address, "--keys", keys, __file__]) == 3
    assert f"--listen {address}: nobody can listen on 127.0.0.1" in capsys.readouterr().err


def test_the_command_that_makes_keys(tmp_path: Path) -> None:
    made = run("cs-launch", "keys", tmp_path / "keys").ok().lines
    names = ("service.key", "service.key_secret", "observer.key", "observer.key_secret")
    assert made == [f"{tmp_path}/keys/{name}" for name in names]
    assert run("cs-launch", "keys", tmp_path / "keys", "--observer", "ann").ok().lines[0].endswith("observer-ann.key")
    assert run("cs-launch", "keys", tmp_path / "keys", "--worker", "n1").ok().lines[0].endswith("worker-n1.key")
    refused = run("cs-launch", "keys", tmp_path / "keys")
    assert (refused.code, "is there already" in refused.err) == (2, True)
    refused = run("cs-launch", "keys", tmp_path / "keys", "--worker", "n2", "--observer", "eve")
    assert (refused.code, "not allowed with argument" in refused.err) == (2, True)
