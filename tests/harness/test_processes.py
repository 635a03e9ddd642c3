"""The harness finds what a child leaves, whatever the child did to hide it, and explains a child that hangs."""

from __future__ import annotations

import re
import signal

import psutil
import pytest

from .processes import living_after, run, start
from .timing import unit

HIDES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for stream in (0, 1, 2):
            os.close(stream)
        time.sleep(600)
    os._exit(0)
os.wait()
print("hidden", flush=True)
"""

FORKS = """
import os, time
if (pid := os.fork()) == 0:
    os._exit(0)
print("forked", pid, flush=True)
time.sleep(600)
"""

HANGS = """
import faulthandler, signal, time
def stuck():
    print("here", flush=True)
    time.sleep(600)
faulthandler.register(signal.SIGUSR1)
stuck()
"""


def test_output_and_exit_code() -> None:
    ended = run("-c", "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)")
    assert (ended.code, ended.lines, ended.err) == (3, ["one"], "two\n")
    with pytest.raises(AssertionError, match="exit code 3"):
        ended.ok()


def test_much_output_on_both_streams_is_kept_whole() -> None:
    ended = run("-c", "import sys; sys.stdout.write('a' * 300_000); sys.stderr.write('b' * 300_000)").ok()
    assert (len(ended.out), len(ended.err)) == (300_000, 300_000)


def test_a_child_that_is_closed_prints_what_it_has_said(capsys: pytest.CaptureFixture[str]) -> None:
    with start("-c", "import time\nprint('at the door', flush=True)\ntime.sleep(600)") as child:
        child.wait_for("door")
    assert re.search(r"(?s)still running:.*exit code -9\n--- stdout\nat the door\n", capsys.readouterr().out)


def test_a_child_is_stopped_at_the_line_it_printed() -> None:
    with start("-c", "import time\nprint('at the door 7', flush=True)\ntime.sleep(600)") as child:
        assert child.wait_for(r"door (\d)").group(1) == "7"
        child.signal(signal.SIGTERM)
        assert child.wait().code == -signal.SIGTERM
        assert child.left() == []


def test_a_line_that_never_comes_is_an_error_with_the_output() -> None:
    with start("-c", "print('something else')") as child, pytest.raises(AssertionError, match="something else"):
        child.wait_for("the line")


def test_a_grandchild_that_hid_itself_is_found_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with start("-c", HIDES) as child:
        child.wait_for("hidden")
        child.wait()
        [left] = child.processes()
        assert any(str(left.pid) in line for line in child.left(timeout=0))
    assert not psutil.pid_exists(left.pid) or left.status() == psutil.STATUS_ZOMBIE
    monkeypatch.setenv("CS_TEST_TIME_UNIT", "0.1")  # how long the grandchild is given to go
    with pytest.raises(AssertionError, match="left running"):
        run("-c", HIDES)


def test_a_process_that_nobody_has_taken_note_of_has_ended() -> None:
    forks = (
        "import os, time\nif (pid := os.fork()) == 0: os._exit(0)\nprint('forked', pid, flush=True)\ntime.sleep(600)"
    )
    with start("-c", forks) as child:
        grandchild = psutil.Process(int(child.wait_for(r"forked (\d+)").group(1)))
        assert living_after(unit(5), [grandchild]) == []
        assert grandchild.status() == psutil.STATUS_ZOMBIE
        [parent] = child.processes()
        assert living_after(0, [grandchild, parent]) == [parent]


def test_a_child_that_hangs_is_shown_with_its_stacks() -> None:
    with start("-c", HANGS) as child:
        child.wait_for("here")
        with pytest.raises(AssertionError, match="in stuck"):
            child.wait(timeout=0)
