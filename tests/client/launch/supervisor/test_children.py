"""Processes that stand by."""

from __future__ import annotations

import os
import sys
from functools import partial

from central_storage.launch.plan import Command
from central_storage.launch.supervisor.children import Child, Standbys
from central_storage.launch.supervisor.loop import Loop


def test_one_that_has_ended_is_no_other_process() -> None:
    loop, standbys, ended = Loop(), Standbys(), list[Child]()
    command = Command("worker", 0, (sys.executable, "-c", ""), os.environ, is_standby=True)
    standbys.start([command], partial(Child, loop, on_lines=lambda *_: None, on_end=ended.append))
    while not ended:
        loop.turn()
    assert standbys.take(Command("worker", 0, (sys.executable, "-m", "cs_worker"), os.environ)) is None
