"""Stacks of processes: read as faulthandler writes them, merged where they are equal, asked of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.harness.timing import unit

from central_storage.ctl.stacks import Stack, collect, merged, parsed
from central_storage.launch.packages import python_path
from cs_runtime import stacks

TEXT = """Thread 0x00007f01 [cs-lifeline] (most recent call first):
  File "/a/b.py", line 5 in watch
  File "/a/c.py", line 9 in run

Current thread 0x00007f02 (most recent call first):
  <no Python frame>
"""


def test_threads_and_frames_are_read() -> None:
    assert parsed(TEXT) == [
        Stack("cs-lifeline", (("/a/c.py", "9", "run"), ("/a/b.py", "5", "watch"))),
        Stack("0x00007f02", (("<no Python frame>", "", ""),)),
    ]
    assert parsed("nothing of this kind\n") == []


def test_names_that_are_not_ascii_are_read() -> None:
    text = 'Thread 0x1f (most recent call first):\n  File "/tr\\xe1in \\u6570\\U0001f600.py", line 3 in \\xfcber\n'
    assert parsed(text) == [Stack("0x1f", (("/tráin 数😀.py", "3", "über"),))]


def test_equal_stacks_come_once_those_of_most_processes_first() -> None:
    one, two = Stack("1", (("a", "1", "f"),)), Stack("2", (("b", "2", "g"),))
    found = merged([("server", [two]), ("w0", [one, one]), ("w1", [Stack("3", one.frames)])])
    assert found == [(["w0", "w0", "w1"], one.frames), (["server"], two.frames)]


@contextmanager
def program(text: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has printed a line."""
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ) or ""}
    command = [sys.executable, "-u", "-c", text]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        try:
            yield child
        finally:
            child.kill()


WAITS = """
from cs_runtime import stacks

def in_the_middle():
    print("ready")
    input()

stacks.keep_ready()
in_the_middle()
"""


@pytest.mark.long
def test_processes_show_their_stacks_again_and_again_and_work_on() -> None:
    with program(WAITS) as one, program(WAITS) as other, program("print('ready'); input()") as foreign:
        for _ in range(2):
            found = collect([one.pid, other.pid, foreign.pid], unit(5))
            assert found[foreign.pid] == "it keeps no stacks ready: it is just starting, or is no process of Python"
            for pid in (one.pid, other.pid):
                (stack,) = found[pid]
                assert isinstance(stack, Stack)
                assert [function for _, _, function in stack.frames] == ["<module>", "in_the_middle"]
        assert one.poll() is None


@pytest.mark.long
def test_a_stopped_and_an_ended_process_say_so() -> None:
    with program(WAITS) as child:
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert collect([child.pid], 0.1) == {child.pid: "it has printed none within 0.1 s: it is stopped"}
        child.kill()
        child.wait()
        assert collect([child.pid], 0.1) == {child.pid: "it has ended"}


def test_this_process_has_all_its_threads() -> None:
    stacks.keep_ready()
    stacks.keep_ready()
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    found = collect([os.getpid()], unit(5))[os.getpid()]
    over.set()
    thread.join()
    functions = {function for stack in found if isinstance(stack, Stack) for _, _, function in stack.frames}
    assert {"wait", "test_this_process_has_all_its_threads"} <= functions
