"""Another user of the machine: every door to a service is closed to it, and no client goes through a door of its.

The tests become user ``nobody`` in a child, which only root may do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.harness.timing import unit

import central_storage as cs
from central_storage.ctl.asking import Supervisor
from central_storage.launch.run_directory import RunDirectory
from central_storage.launch.supervisor import connections
from central_storage.observer import places
from cs_proto.errors import ConfigurationError, LaunchError
from cs_runtime.transport import supervisor_link

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

NOBODY = 65534

# Says what it could do, in JSON: by attempt, "denied" or what came of it. It imports what it needs before it changes
# its user, who may not be able to read the packages.
ATTEMPTS = """
import ctypes, json, os, signal, socket, sys
from central_storage.observer.blocking import connect
from cs_proto.errors import LaunchError
directory, user, *pids = sys.argv[1:]
os.setgroups([]); os.setgid(int(user)); os.setuid(int(user))
libc = ctypes.CDLL(None, use_errno=True)
found = {}

def attempt(name, act):
    try:
        found[name] = repr(act())
    except PermissionError:
        found[name] = "denied"

def reached(name):
    kind = socket.SOCK_SEQPACKET if name == "supervisor" else socket.SOCK_STREAM
    with socket.socket(socket.AF_UNIX, kind) as link:
        link.connect(f"{directory}/{name}")

def read(path, nbytes=1):
    with open(path, "rb") as file:
        return file.read(nbytes)

def traced(pid):
    if libc.ptrace(16, pid, None, None) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    libc.ptrace(17, pid, None, None)

def observed():
    try:
        connect(directory, timeout=1).close()
    except LaunchError as error:
        if "belongs to user" in str(error):
            raise PermissionError from None
        raise

sockets = ("supervisor", "server", "w0.1", "w1.1")
attempt("list", lambda: os.listdir(directory))
for name in sockets:
    attempt(f"stat {name}", lambda: os.stat(f"{directory}/{name}"))
    attempt(f"connect {name}", lambda: reached(name))
for name in ("lock", "service.json"):
    attempt(f"read {name}", lambda: read(f"{directory}/{name}"))
attempt("create", lambda: open(f"{directory}/made", "x").close())
attempt("cs.connect", observed)
for pid in map(int, pids):
    attempt(f"fds {pid}", lambda: os.listdir(f"/proc/{pid}/fd"))
    for name in ("mem", "maps", "environ"):
        attempt(f"{name} {pid}", lambda: read(f"/proc/{pid}/{name}"))
    attempt(f"ptrace {pid}", lambda: traced(pid))
    attempt(f"kill {pid}", lambda: os.kill(pid, signal.SIGTERM))
print(json.dumps(found))
"""

# Puts a directory of its own in the place of a run directory, and takes it away again.
REPLACEMENT = """
import os, sys
directory, user = sys.argv[1:]
os.setgroups([]); os.setgid(int(user)); os.setuid(int(user))
os.rename(directory, directory + ".old")
os.mkdir(directory)
print("replaced")
os.rmdir(directory)
"""

# Says hello to whoever listens, where the doors of the run directory are open, and prints what comes.
INTRUSION = """
import os, socket, sys
from cs_proto.codec import encode
from cs_proto.messages import PROTOCOL, Introduce
directory, user = sys.argv[1:]
os.setgroups([]); os.setgid(int(user)); os.setuid(int(user))
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.settimeout(20)
link.connect(f"{directory}/supervisor")
try:
    link.send(b"".join(encode(Introduce(PROTOCOL, "observer", 0, 1, os.getpid(), "intruder"))))
    print("hung up" if not link.recv(1 << 17) else "answered")
except (BrokenPipeError, ConnectionResetError):
    print("hung up")
"""


def child(program: str, *arguments: object) -> str:
    """What a process prints that becomes another user."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=unit(60),
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert not done.returncode, done.stderr
    return done.stdout


def five_processes(strategy: cs.CentralStorageStrategy) -> list[int]:
    """The pids of script, supervisor, server and two workers."""
    counters = strategy.statistics()
    with Supervisor(strategy.address, unit(20)) as supervisor:
        return [os.getpid(), supervisor.pid, counters.pid, *(replica.pid for replica in counters.replicas)]


def check_denied(strategy: cs.CentralStorageStrategy, pids: list[int]) -> None:
    """Make the 43 attempts; all must be denied, and the processes must live."""
    found = json.loads(child(ATTEMPTS, strategy.address, NOBODY, *pids))
    assert len(found) == 13 + 6 * 5
    assert {name: outcome for name, outcome in found.items() if outcome != "denied"} == {}
    assert strategy.run(lambda: 1) == 1


@pytest.fixture
def open_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run directories are made where everybody may enter, as in /tmp: only they themselves are closed."""
    with tempfile.TemporaryDirectory(prefix="o-", dir="/tmp") as place:
        os.chmod(place, 0o755)
        monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        yield


@pytest.mark.long
@pytest.mark.usefixtures("open_place")
def test_another_user_gets_nothing() -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], max_restarts=0) as strategy:
        pids = five_processes(strategy)
        check_denied(strategy, pids)
        os.chmod(strategy.address, 0o755)  # the sabotage
        with pytest.raises(AssertionError, match="'list'"):
            check_denied(strategy, pids)


def intrude(strategy: cs.CentralStorageStrategy) -> str:
    """What another user hears of the supervisor where the run directory and its socket are open to all."""
    os.chmod(strategy.address, 0o711)
    os.chmod(Path(strategy.address, "supervisor"), 0o777)
    return child(INTRUSION, strategy.address, NOBODY).strip()


@pytest.mark.long
@pytest.mark.usefixtures("open_place")
def test_the_supervisor_hangs_up_on_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as strategy:
        assert intrude(strategy) == "hung up"
        true = connections._credentials
        monkeypatch.setattr(connections, "_credentials", lambda link: (true(link)[0], os.geteuid()))  # any user
        assert intrude(strategy) == "answered"


# --- clients --------------------------------------------------------------------------------------------------------


@contextmanager
def listening(directory: Path) -> Iterator[list[bytes]]:
    """Something listens like a supervisor. The list gets the packets that are sent to it."""
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / "supervisor"))
        listener.listen()

        def hear() -> None:
            while True:
                try:
                    link, _ = listener.accept()
                except OSError:  # the end of the test
                    return
                with link:
                    heard.append(link.recv(1 << 17))

        thread = threading.Thread(target=hear)
        thread.start()
        try:
            yield heard
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def check_foreign(directory: Path, monkeypatch: pytest.MonkeyPatch, expected: str) -> None:
    """No client says a word to what listens in a directory that is not its user's alone."""
    with listening(directory) as heard:
        (directory / "server").touch()
        monkeypatch.setenv("CS_ADDRESS", str(directory))
        with pytest.raises(LaunchError, match=expected):
            cs.connect(timeout=unit(5))
        with pytest.raises(LaunchError, match=expected):
            cs.CentralStorageStrategy(start_timeout=unit(1))
        with pytest.raises(LaunchError, match=expected):
            Supervisor(str(directory), unit(5))
    assert heard == []


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="f-") as made:
        yield Path(made)


def test_a_run_directory_of_another_user_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(directory, NOBODY, NOBODY)
    check_foreign(directory, monkeypatch, f"belongs to user {NOBODY}, and this process runs as user 0")


def test_a_run_directory_that_is_open_to_others_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.chmod(0o711)
    check_foreign(directory, monkeypatch, "is open to other users; chmod 700")


def test_a_run_directory_behind_a_link_of_another_user_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = directory / "foreign"
    foreign.mkdir(0o700)
    os.chown(foreign, NOBODY, NOBODY)
    (directory / "link").symlink_to(foreign)
    check_foreign(directory / "link", monkeypatch, f"belongs to user {NOBODY}")


@pytest.mark.parametrize(
    ("owner", "mode", "expected"),
    [(0, 0o777, "others may write to {}, above it"), (NOBODY, 0o755, f"{{}}, above it, belongs to user {NOBODY}")],
)
@pytest.mark.usefixtures("open_place")
def test_a_run_directory_that_others_could_replace_is_refused(
    monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, expected: str
) -> None:
    above = Path(os.environ["XDG_RUNTIME_DIR"])
    (run := above / "run").mkdir(mode=0o700)
    os.chown(above, owner, owner)
    above.chmod(mode)
    expected = expected.format(above)
    with pytest.raises(ConfigurationError, match=expected):
        RunDirectory(str(run))
    assert child(REPLACEMENT, run, NOBODY) == "replaced\n"  # as nobody does, indeed
    os.rename(f"{run}.old", run)
    check_foreign(run, monkeypatch, expected)


def test_the_checks_notice_that_any_directory_is_believed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(directory, NOBODY, NOBODY)
    (directory / "server").touch()
    for module in (supervisor_link, places):
        monkeypatch.setattr(module, "checked", os.path.realpath)
    with listening(directory) as heard, pytest.raises(LaunchError, match="it has ended"):
        cs.connect(str(directory), timeout=unit(5))
    assert len(heard) == 1


# Listens like a supervisor as another user, in a directory that is not its own.
LISTENER = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1] + "/supervisor")
os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
listener.listen()
print("listens", flush=True)
link, _ = listener.accept()
print(len(link.recv(1 << 17)), flush=True)
"""


def test_a_supervisor_of_another_user_is_refused(directory: Path) -> None:
    arguments = [sys.executable, "-c", LISTENER, str(directory), str(NOBODY)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        with pytest.raises(LaunchError, match=f"a process of user {NOBODY} listens"):
            supervisor_link.connect(str(directory))
        assert process.stdout.readline() == "0\n"
