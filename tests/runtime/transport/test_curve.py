"""Keys in files, the addresses that may be named, and who is admitted."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth
from tests.harness.timing import unit
from zmq.utils.monitor import recv_monitor_message

from cs_proto.errors import ConfigurationError
from cs_runtime.transport.curve import (
    ObserverKeys,
    ServiceKeys,
    WorkerKeys,
    ZapHandler,
    check_endpoint,
    key_pair,
    make_keys,
    make_service_keys,
    protect_client,
    protect_server,
    read_public,
    write_public,
)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    directory = str(tmp_path / "keys")
    make_keys(directory)
    return directory


def observer_of(directory: str, tmp_path: Path, name: str = "observer") -> ObserverKeys:
    """The keys as they are copied to another machine."""
    there = tmp_path / f"there-{name}"
    there.mkdir(mode=0o700)
    for each in ("service.key", f"{name}.key_secret"):
        copied = there / each
        copied.write_bytes(Path(directory, each).read_bytes())
        copied.chmod(0o600)
    return ObserverKeys.read(str(there))


def test_only_the_owner_reads_what_is_secret(tmp_path: Path) -> None:
    before = os.umask(0o000)
    try:
        made = make_keys(str(tmp_path / "keys"))
    finally:
        os.umask(before)
    assert [Path(path).name for path in made] == [
        *("service.key", "service.key_secret", "observer.key", "observer.key_secret")
    ]
    modes = {Path(path).name: stat.S_IMODE(os.stat(path).st_mode) for path in made}
    assert modes == dict(zip(map(os.path.basename, made), (0o644, 0o600, 0o644, 0o600), strict=True))
    assert stat.S_IMODE(os.stat(tmp_path / "keys").st_mode) == 0o700


def test_another_observer_leaves_the_keys_of_the_service(keys: str, tmp_path: Path) -> None:
    service = ServiceKeys.read(keys)
    made = make_keys(keys, "ann")
    assert [Path(path).name for path in made] == ["observer-ann.key", "observer-ann.key_secret"]
    assert ServiceKeys.read(keys) == service
    ann, first = observer_of(keys, tmp_path, "observer-ann"), observer_of(keys, tmp_path)
    assert service.public == ann.service == first.service
    assert service.role_of(ann.public) == "observer-ann"
    assert service.role_of(first.public) == "observer"
    assert service.role_of(service.public) == ""
    Path(keys, "observer-ann.key").unlink()
    assert service.role_of(ann.public) == ""
    assert service.role_of(first.public) == "observer"


def test_keys_are_not_replaced(keys: str) -> None:
    before = {path: path.read_bytes() for path in Path(keys).iterdir()}
    with pytest.raises(ConfigurationError, match=r"observer.key is there already: .* name another observer"):
        make_keys(keys)
    for name in ("../ann", "a b", "", "x" * 65):
        if name:
            with pytest.raises(ConfigurationError, match="is no name for an observer"):
                make_keys(keys, name)
    assert {path: path.read_bytes() for path in Path(keys).iterdir()} == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.parent.chmod(0o770), "must belong to you, and others may not write there"),
        (lambda path: path.parent.parent.chmod(0o777), "other users could replace .*: others may write to"),
        (lambda path: path.chmod(0o640), "must be a file of yours that is closed to other users"),
        (lambda path: path.unlink(), "cannot be read: No such file or directory; cs-launch keys"),
        (lambda path: path.write_text("nonsense"), "holds no key"),
        (lambda path: path.write_text('curve\n    public-key = "short"\n    secret-key = "x"\n'), "holds no key"),
        (lambda path: path.write_bytes(path.with_suffix(".key").read_bytes()), "holds no secret key"),
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "must be a file of yours"),
        (lambda path: (path.unlink(), path.symlink_to("observer.key_secret")), "must be a file of yours"),
    ],
)
def test_keys_of_a_service_that_are_refused(keys: str, change: Callable[[Path], Any], said: str) -> None:
    change(Path(keys, "service.key_secret"))
    with pytest.raises(ConfigurationError, match=said):
        ServiceKeys.read(keys)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: make_keys(str(path), "ann"), "the secret keys of several observers"),
        (lambda path: (path / "observer.key_secret").unlink(), "no observer's secret key"),
        (lambda path: (path / "observer.key_secret").chmod(0o604), "closed to other users"),
        (lambda path: (path / "service.key").unlink(), "service.key cannot be read"),
        (lambda path: path.rename(path.with_name("other")), "cs-launch keys DIR makes one"),
    ],
)
def test_keys_of_an_observer_that_are_refused(keys: str, change: Callable[[Path], Any], said: str) -> None:
    change(Path(keys))
    with pytest.raises(ConfigurationError, match=said):
        ObserverKeys.read(keys)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.chmod(0o664),
        lambda path: path.chmod(0o646),
        lambda path: (path.unlink(), path.symlink_to("service.key")),
        lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
        pytest.param(
            lambda path: os.chown(path, 65534, -1), marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
        ),
    ],
    ids=["group", "everybody", "link", "pipe", "owner"],
)
def test_a_public_key_that_others_may_write_admits_nobody(
    keys: str, tmp_path: Path, change: Callable[[Path], Any]
) -> None:
    service, observer = ServiceKeys.read(keys), observer_of(keys, tmp_path)
    assert service.role_of(observer.public) == "observer"
    change(Path(keys, "observer.key"))
    assert service.role_of(observer.public) == ""
    with pytest.raises(ConfigurationError, match=r"observer\.key must be a file of yours that others may not write"):
        ServiceKeys.read(keys)
    change(tmp_path / "there-observer" / "service.key")
    with pytest.raises(ConfigurationError, match=r"service\.key must be a file of yours that others may not write"):
        ObserverKeys.read(str(tmp_path / "there-observer"))


def test_a_secret_key_in_the_place_of_a_public_one_is_refused(keys: str, tmp_path: Path) -> None:
    """Others may read the file of a public key."""
    service, observer = ServiceKeys.read(keys), observer_of(keys, tmp_path)
    for name in ("observer", "service"):
        public = Path(keys, f"{name}.key")
        before = public.read_text()
        public.write_text(Path(keys, f"{name}.key_secret").read_text())
        with pytest.raises(ConfigurationError, match=rf"{name}\.key holds a secret key, and others may read"):
            ServiceKeys.read(keys)
        assert (service.role_of(observer.public) == "observer") is (name != "observer")
        public.write_text(before)
    assert ServiceKeys.read(keys).role_of(observer.public) == "observer"


@pytest.mark.parametrize("name", ["observer-\udcff", "observer-\x1b[2J", "observer-a\nb", "worker-" + "a" * 65])
def test_a_key_whose_name_no_peer_has_admits_nobody(keys: str, tmp_path: Path, name: str) -> None:
    service, observer = ServiceKeys.read(keys), observer_of(keys, tmp_path)
    os.rename(os.path.join(keys, "observer.key"), os.path.join(keys, f"{name}.key"))
    assert service.role_of(observer.public) == ""  # ZeroMQ and the log get the role
    with pytest.raises(ConfigurationError, match=r"has a name that no peer has: .*; rename or remove") as raised:
        ServiceKeys.read(keys)
    assert str(raised.value).isascii()
    assert str(raised.value).isprintable()


def test_a_damaged_key_of_a_peer_is_named_at_the_start(keys: str) -> None:
    Path(keys, "observer.key").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"observer\.key holds no key"):
        ServiceKeys.read(keys)


@pytest.fixture
def another(tmp_path: Path) -> Path:
    """A directory with other keys of the same names."""
    make_keys(str(tmp_path / "another"))
    return tmp_path / "another"


MISMATCH = r"service\.key does not belong to .*service\.key_secret, .* copy both files anew .* run cs-launch keys"


def test_a_service_key_that_is_not_that_of_its_secret_is_refused(keys: str, tmp_path: Path, another: Path) -> None:
    """By the service, and by a peer that has both files."""
    Path(keys, "service.key").write_bytes((another / "service.key").read_bytes())
    with pytest.raises(ConfigurationError, match=MISMATCH):
        ServiceKeys.read(keys)
    with pytest.raises(ConfigurationError, match=MISMATCH):
        ObserverKeys.read(keys)
    make_keys(keys, worker="n1")
    with pytest.raises(ConfigurationError, match=MISMATCH):
        WorkerKeys.read(keys)
    assert observer_of(keys, tmp_path).service == ServiceKeys.read(str(another)).public  # nobody can tell there


def test_a_service_needs_no_file_of_its_public_key(keys: str) -> None:
    before = ServiceKeys.read(keys)
    Path(keys, "service.key").unlink()
    assert ServiceKeys.read(keys) == before


@pytest.mark.parametrize("name", ["service", "observer"])
def test_a_pair_of_two_keys_is_refused(keys: str, another: Path, name: str) -> None:
    path = Path(keys, f"{name}.key_secret")
    public, other = (zmq.auth.load_certificate(each)[0] for each in (path, another / path.name))
    path.write_bytes(path.read_bytes().replace(public, other))
    with pytest.raises(
        ConfigurationError, match=rf"the public key in .*{name}\.key_secret does not belong to the secret"
    ):
        (ServiceKeys if name == "service" else ObserverKeys).read(keys)


def test_a_directory_that_others_may_write_admits_nobody(keys: str, tmp_path: Path) -> None:
    service, observer = ServiceKeys.read(keys), observer_of(keys, tmp_path)
    Path(keys).chmod(0o777)
    assert service.role_of(observer.public) == ""
    Path(keys).chmod(0o700)
    assert service.role_of(observer.public) == "observer"


def worker_of(directory: str, tmp_path: Path, name: str) -> WorkerKeys:
    """The keys as they are copied to another machine."""
    there = tmp_path / f"there-{name}"
    there.mkdir(mode=0o700)
    for each in ("service.key", f"worker-{name}.key_secret"):
        copied = there / each
        copied.write_bytes(Path(directory, each).read_bytes())
        copied.chmod(0o600)
    return WorkerKeys.read(str(there))


def test_keys_of_workers(keys: str, tmp_path: Path) -> None:
    service = ServiceKeys.read(keys)
    made = make_keys(keys, worker="n1")
    assert [Path(path).name for path in made] == ["worker-n1.key", "worker-n1.key_secret"]
    assert [stat.S_IMODE(os.stat(path).st_mode) for path in made] == [0o644, 0o600]
    assert ServiceKeys.read(keys) == service
    worker = worker_of(keys, tmp_path, "n1")
    assert (worker.role, worker.service) == ("worker-n1", service.public)
    assert service.role_of(worker.public) == "worker-n1"
    assert observer_of(keys, tmp_path).role == "observer"
    Path(keys, "worker-n1.key").unlink()
    assert service.role_of(worker.public) == ""


def test_keys_of_a_service_and_its_first_worker(tmp_path: Path) -> None:
    made = make_keys(str(tmp_path / "keys"), worker="n1")
    names = ("service.key", "service.key_secret", "worker-n1.key", "worker-n1.key_secret")
    assert [Path(path).name for path in made] == list(names)


def test_how_many_workers_a_machine_may_run_is_said_with_its_key(keys: str, tmp_path: Path) -> None:
    service = ServiceKeys.read(keys)
    make_keys(keys, worker="n1")
    make_keys(keys, worker="n2", places=8)
    assert [service.places_of(f"worker-{name}") for name in ("n1", "n2", "nobody")] == [1, 8, 1]
    assert stat.S_IMODE((Path(keys) / "worker-n2.key").stat().st_mode) == 0o644
    assert service.role_of(worker_of(keys, tmp_path, "n2").public) == "worker-n2"
    write_public(keys, "worker-3", key_pair()[0], 4)
    assert service.places_of("worker-3") == 4
    with (Path(keys) / "worker-n1.key").open("a") as file:
        file.write("    places = many\n    places = 0\nplaces = 7\n")
    assert service.places_of("worker-n1") == 1
    for places in (0, -1, 1025):
        with pytest.raises(ConfigurationError, match=f"a machine runs 1 to 1024 workers, not {places}"):
            make_keys(keys, worker="n4", places=places)


def test_a_key_in_the_files_of_both_is_an_observers(keys: str, tmp_path: Path) -> None:
    make_keys(keys, worker="n1")
    worker = worker_of(keys, tmp_path, "n1")
    Path(keys, "observer-eve.key").write_bytes(Path(keys, "worker-n1.key").read_bytes())
    assert ServiceKeys.read(keys).role_of(worker.public) == "observer-eve"


@pytest.mark.parametrize("name", ["worker", "workers-n1", "service-n1", "worker-n1.key.old", "Worker-n1"])
def test_files_that_are_no_workers(keys: str, tmp_path: Path, name: str) -> None:
    make_keys(keys, worker="n1")
    worker = worker_of(keys, tmp_path, "n1")
    Path(keys, "worker-n1.key").rename(Path(keys, f"{name}.key" if "." not in name else name))
    assert ServiceKeys.read(keys).role_of(worker.public) == ""


def test_keys_of_workers_are_not_replaced(keys: str) -> None:
    make_keys(keys, worker="n1")
    with pytest.raises(ConfigurationError, match=r"worker-n1.key is there already: .* name another worker \(--worker"):
        make_keys(keys, worker="n1")
    for name in ("", "../n1", "a b", "x" * 65):
        with pytest.raises(ConfigurationError, match="is no name for a worker"):
            make_keys(keys, worker=name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: make_keys(str(path), worker="n2"), "the secret keys of several workers"),
        (
            lambda path: (path / "worker-n1.key_secret").unlink(),
            r"no worker's secret key: a directory for cs-launch --join has service.key and one worker-\*.key_secret",
        ),
        (lambda path: (path / "worker-n1.key_secret").chmod(0o604), "closed to other users"),
        (lambda path: (path / "service.key").unlink(), "service.key cannot be read"),
    ],
)
def test_keys_of_a_worker_that_are_refused(keys: str, change: Callable[[Path], Any], said: str) -> None:
    make_keys(keys, worker="n1")
    change(Path(keys))
    with pytest.raises(ConfigurationError, match=said):
        WorkerKeys.read(keys)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5600", "tcp://[::1]:0", "tcp://host.example:65535"])
def test_addresses(endpoint: str) -> None:
    host, port = check_endpoint(endpoint, "--listen")
    assert endpoint in (f"tcp://{host}:{port}", f"tcp://[{host}]:{port}")


@pytest.mark.parametrize(
    "endpoint",
    [
        *("tcp://*:5600", "tcp://0.0.0.0:5600", "tcp://[::]:5600", "tcp://127.0.0.1", "tcp://127.0.0.1:65536"),
        *("tcp://0:5600", "tcp://0x0:5600", "tcp://0.0:5600", "tcp://[0::0]:5600", "tcp://[::ffff:0.0.0.0]:5600"),
        *("tcp://255.255.255.255:5600", "tcp://224.0.0.1:5600", "tcp://[ff02::1]:5600", "tcp://0xe0000001:5600"),
        *("127.0.0.1:5600", "ipc:///tmp/x", "tcp://127.0.0.1:5600/x", "tcp://:5600", "tcp://a b:1", "tcp://h:-1", ""),
    ],
)
def test_addresses_that_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="--listen"):
        check_endpoint(endpoint, "--listen")


@contextmanager
def sockets(keys: str, tmp_path: Path) -> Iterator[tuple[ZapHandler, zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """What looks at keys, a server with the keys of a service, and a client with those of an observer."""
    with zmq.Context() as context:
        zap = ZapHandler(context, ServiceKeys.read(keys))
        with zap.socket, context.socket(zmq.ROUTER) as server, context.socket(zmq.DEALER) as client:
            for socket in (server, client):
                socket.setsockopt(zmq.LINGER, 0)
            protect_server(server, ServiceKeys.read(keys))
            protect_client(client, observer_of(keys, tmp_path))
            yield zap, server, client


def test_a_worker_whose_key_was_made_elsewhere(tmp_path: Path) -> None:
    """Only its public key is here; a later one takes its place."""
    service = make_service_keys(str(tmp_path))
    assert stat.S_IMODE((tmp_path / "service.key_secret").stat().st_mode) == 0o600
    assert read_public(str(tmp_path / "service.key")) == service.public
    (first, secret), (second, _) = key_pair(), key_pair()
    before = os.umask(0)
    try:
        write_public(str(tmp_path), "worker-3", first)
    finally:
        os.umask(before)
    assert service.role_of(first) == "worker-3"
    assert (service.role_of(secret), service.role_of(second)) == ("", "")
    write_public(str(tmp_path), "worker-3", second)
    assert (service.role_of(first), service.role_of(second)) == ("", "worker-3")
    assert set(os.listdir(tmp_path)) == {"service.key", "service.key_secret", "worker-3.key"}
    assert make_service_keys(str(tmp_path)).public != service.public


@pytest.mark.parametrize("key", [b"", b"a" * 39, b"a" * 41, b'"' * 40, b"\n" * 40, b"\xff" * 40])
def test_what_is_no_public_key_is_not_written(tmp_path: Path, key: bytes) -> None:
    with pytest.raises(ConfigurationError, match="is no public key"):
        write_public(str(tmp_path), "worker-3", key)
    assert os.listdir(tmp_path) == []


def test_a_known_key_is_admitted_and_its_messages_say_whose_it_is(keys: str, tmp_path: Path) -> None:
    with sockets(keys, tmp_path) as (zap, server, client):
        client.connect(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
        client.send(b"question")
        assert zap.socket.poll(1000 * unit(20))
        zap.answer()
        assert server.poll(1000 * unit(20))
        _, message = server.recv_multipart(copy=False)
        assert (message.bytes, message.get("User-Id")) == (b"question", "observer")


def test_a_socket_of_another_domain_admits_nobody(keys: str, tmp_path: Path) -> None:
    with sockets(keys, tmp_path) as (zap, server, client):
        server.setsockopt(zmq.ZAP_DOMAIN, b"other")
        ends = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        with client.get_monitor_socket(ends) as monitor:
            client.connect(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
            assert zap.socket.poll(1000 * unit(20))
            zap.answer()
            assert recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            client.disable_monitor()
