from __future__ import annotations

import os

from central_storage.strategy.processes import _row


def test_the_pid_of_another_machine_is_not_looked_up_here() -> None:
    row = _row("worker 1", os.getpid(), "cpu:1", "10.0.0.7")
    assert row == ("worker 1", os.getpid(), "cpu:1", "on 10.0.0.7", "", "")
    assert _row("worker 1", os.getpid(), "cpu:1", "")[3] != "on "
