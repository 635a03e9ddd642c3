"""Processes that stand by, and orphans of processes that have died."""

from __future__ import annotations

import io
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.harness.processes import run, start

from central_storage.launch.plan import Command
from central_storage.launch.supervisor import children
from central_storage.launch.supervisor.children import Child, Standbys, end_leftovers
from central_storage.launch.supervisor.loop import Loop


def test_one_that_has_ended_is_no_other_process() -> None:
    loop, standbys, ended = Loop(), Standbys(), list[Child]()
    command = Command("worker", 0, (sys.executable, "-c", ""), os.environ, is_standby=True)
    standbys.start([command], partial(Child, loop, on_lines=lambda *_: None, on_end=ended.append))
    while not ended:
        loop.turn()
    assert standbys.take(Command("worker", 0, (sys.executable, "-m", "cs_worker"), os.environ)) is None


ADOPTS = """
import ctypes, os, subprocess, sys
from central_storage.launch.supervisor.children import reap_adopted

PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
own = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
for _ in range(100):  # a process that dies and leaves one that has ended before
    if (parent := os.fork()) == 0:
        if os.fork() == 0:
            os._exit(0)
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # its child is a zombie from here on
        os._exit(0)
    os.waitpid(parent, 0)
reap_adopted({own.pid})
children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
print(*[pid for pid in children if pid != str(own.pid)], own.poll())
own.communicate(b"\\n")
"""


def test_the_orphans_of_100_dead_processes_leave_no_zombies() -> None:
    assert run(sys.executable, "-c", ADOPTS).ok().out.split() == ["None"]


def test_a_process_that_another_loop_watches_from_now_on() -> None:
    """With a line that has begun before, and ends after."""
    one, other = Loop(), Loop()
    heard, ended = list[str](), list[Child]()
    program = "import sys; print('begun', end='', flush=True); sys.stdin.readline(); print(', ended')"
    command = Command("worker", 0, (sys.executable, "-c", program), os.environ, is_standby=True)
    child = Child(one, command, on_lines=lambda _child, _stream, lines: heard.extend(lines), on_end=ended.append)
    one.turn()
    child.move(other)
    assert child.become(Command("worker", 0, ("python", "-m", "anything"), os.environ))
    while not ended:
        other.turn()
    one.turn(0)
    assert "".join(heard) == "begun, ended"
    assert child.returncode == 0


def test_a_process_that_becomes_a_program_is_no_leftover_that_is_overlooked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel shows it without an environment for a moment."""
    environment = {"CS_RUN_DIRECTORY": str(tmp_path), "CS_ROLE": "worker", "RANK": "0"}
    with start(
        sys.executable, "-c", "import signal; print('ready', flush=True); signal.pause()", environment=environment
    ) as child:
        child.wait_for("^ready")
        shown = [b""]

        def opened(path: str, mode: str) -> Any:
            if path == f"/proc/{child.pid}/environ" and shown:
                return io.BytesIO(shown.pop())
            return open(path, mode)

        monkeypatch.setattr(children, "open", opened, raising=False)
        end_leftovers(str(tmp_path), "worker", 0)
        assert child.wait().code == -signal.SIGKILL
        assert not shown


def test_a_process_without_an_environment_is_no_leftover(tmp_path: Path) -> None:
    lasting = "import signal; print(1, flush=True); signal.pause()"
    program = f"import os, sys; os.execve(sys.executable, [sys.executable, '-Sc', {lasting!r}], {{}})"
    with start(sys.executable, "-c", program) as child:
        child.wait_for("^1")
        end_leftovers(str(tmp_path))
        child.signal(signal.SIGTERM)
        assert child.wait().code == -signal.SIGTERM
