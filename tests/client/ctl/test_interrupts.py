"""Ctrl-C ends a command wherever it comes, and undoes what has to be undone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from central_storage.ctl import interrupts
from central_storage.launch.packages import python_path

#: Presses Ctrl-C in a callback in which Python drops every exception, and goes on.
LOST = """
import os, signal, sys
from central_storage.ctl import cli
from central_storage.ctl.commands import ls

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        sum(range(1000))

def run(options):
    Dropped()
    print("it goes on", flush=True)
    return 0

ls.run = run
sys.exit(cli.main(["ls"]))
"""


def test_ctrl_c_is_heard_where_python_drops_exceptions() -> None:
    environment = {**os.environ, "PYTHONPATH": python_path(os.environ) or ""}
    ended = subprocess.run([sys.executable, "-c", LOST], env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (interrupts.CTRL_C, "", "")


def test_a_block_that_has_something_to_undo_gets_an_exception() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts.ending(), interrupts.raising(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_what_ignores_ctrl_c_still_does() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.ending(), interrupts.raising():
            os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
