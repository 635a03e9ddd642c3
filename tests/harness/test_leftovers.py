"""A test that leaves something fails, and the failure names it: a whole test session run on tests that do."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from .leftovers import since, take
from .processes import Ended, run

LEAVES = '''
import os, socket, subprocess, sys, tempfile, threading
kept = []

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))

def test_orphan():
    subprocess.run([sys.executable, "-c", """if True:
        import os, time
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
    """])

def test_thread():
    kept.append(threading.Thread(target=threading.Event().wait, args=(4,), name="cs-idle", daemon=True))
    kept[-1].start()

def test_socket():
    kept.append(socket.socket())

def test_memfd():
    kept.append(os.memfd_create("slab"))

def test_run_directory():
    os.mkdir(os.path.join(os.environ["XDG_RUNTIME_DIR"], "cs-1234"))

def test_nothing():
    assert not [name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("cs-")]

def test_that_fails_shows_logs():
    with open(os.path.join(os.environ["CS_LOG_DIR"], "server.log"), "w") as log:
        log.write("the last words of the server")
    assert kept == []
'''

HANGS = """
import threading

def test_waits():
    threading.Event().wait(600)
"""


def run_tests(directory: Path, text: str, *options: str) -> Ended:
    """A session of pytest with this file of tests."""
    (directory / "test_file.py").write_text(text)
    own = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml", "--rootdir", str(directory)]
    hurry = {"CS_TEST_TIME_UNIT": "0.1"}  # how long what is left is given to go
    return run(sys.executable, "-m", "pytest", *own, *options, str(directory), environment=hurry)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run_tests(tmp_path_factory.mktemp("leaves"), LEAVES)


@pytest.mark.slow
def test_a_test_that_hangs_in_a_worker_of_xdist_is_ended_and_its_stacks_are_shown(tmp_path: Path) -> None:
    limits = ("-o", "faulthandler_timeout=1", "--timeout=3")
    ended = run_tests(tmp_path, HANGS, "-n", "1", "--max-worker-restart=0", *limits)
    assert "in test_waits" in ended.out + ended.err
    assert "worker 'gw0' crashed while running 'test_file.py::test_waits'" in ended.out


@pytest.mark.parametrize(
    ("name", "thing"),
    [
        ("test_process", r"process pid \d+ .*time.sleep\(600\)"),
        ("test_orphan", r"process pid \d+ "),
        ("test_thread", "thread 'cs-idle'"),
        ("test_socket", r"open descriptor socket:\[\d+\]"),
        ("test_memfd", "open descriptor /memfd:slab"),
        ("test_run_directory", "file /.*/cs-1234"),
    ],
)
def test_what_is_left_is_named(session: Ended, name: str, thing: str) -> None:
    section = session.out.partition(f"ERROR at teardown of {name} ")[2].partition("\n___")[0]
    assert re.search(f"the test left behind:\n{thing}", section), session.out


def test_nothing_left_is_no_error_and_a_failure_stays_one_failure(session: Ended) -> None:
    assert "8 passed" not in session.out
    assert "1 failed, 7 passed, 6 errors" in session.lines[-1]


def test_a_failure_shows_the_logs(session: Ended) -> None:
    assert "log server.log" in session.out
    assert "the last words of the server" in session.out


def test_shared_memory_is_left_behind_unless_another_process_uses_it() -> None:
    path = Path("/dev/shm", f"psm_{os.getpid()}")
    holds = "import mmap, sys; f = open(sys.argv[1]); m = mmap.mmap(f.fileno(), 1, prot=1); print(); input()"
    before = take()
    path.write_bytes(b"1")
    try:
        command = [sys.executable, "-u", "-c", holds, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            other.stdout.readline()
            assert not since(before, timeout=0).files
            other.communicate("\n")
        assert since(before, timeout=0).files == [path]
    finally:
        path.unlink()


def test_a_worker_of_ray_is_left_behind_unless_its_node_was_there_before(tmp_path: Path) -> None:
    node = tmp_path / "raylet"
    node.symlink_to("/bin/sh")
    program = "sleep 600 & echo $!; read _; kill $!; wait"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    before = take()
    with subprocess.Popen([node, "-c", f"read _; {program}"], **pipes) as raylet:
        after = take()
        raylet.stdin.write("\n")
        raylet.stdin.flush()
        worker = int(raylet.stdout.readline())
        assert not since(after, timeout=0).processes
        assert {process.pid for process in since(before, timeout=0).processes} == {raylet.pid, worker}
        raylet.communicate("\n")


@pytest.mark.parametrize(("listens", "counts"), [("server", True), ("supervisor", True), ("w1.2~0001", False)])
def test_a_late_connection_to_an_earlier_service_is_left_behind_unless_it_leads_to_a_worker(
    listens: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    address = tmp_path / "cs-1234" / listens
    address.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(address))
        listener.listen()
        before = take()
        client.connect(str(address))
        with listener.accept()[0]:
            assert not since(before, timeout=0).descriptors
            with socket.socket(socket.AF_UNIX) as another:
                another.connect(str(address))
                inode = os.fstat(another.fileno()).st_ino
                assert since(before, timeout=0).descriptors == [f"socket:[{inode}]"] * counts
