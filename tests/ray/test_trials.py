"""A service in a trial of Ray Tune: two at once, killed and stopped."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from tests.harness.processes import living_after, run, start
from tests.harness.timing import unit
from tests.ray.leavings import assert_next_start_clears, run_directories

HERE = Path(__file__).parent

pytestmark = pytest.mark.timeout(unit(240))


@pytest.fixture
def storage(tmp_path: Path) -> str:
    """A directory for Tune's results, with the FIFO at which two trials meet."""
    os.mkfifo(tmp_path / "meet")
    return str(tmp_path)


def test_two_at_once_of_which_one_is_killed_train_to_the_bits_of_plain_processes(
    node: Mapping[str, str], storage: str
) -> None:
    plain = run(HERE / "training.py", "0.1", "0.01", timeout=unit(60)).ok().lines
    driver = run(HERE / "trials.py", storage, environment=node, timeout=unit(200)).ok()
    undisturbed, killed, last = driver.lines[-3:]
    assert undisturbed == f"12 2 {plain[0]}"  # all steps, two threads
    assert re.fullmatch(rf"(\d|10|11) 2 {plain[1]}", killed)  # the first process made some of the steps
    assert last == "told"
    assert_next_start_clears(run_directories())


def test_trials_that_tune_stops_leave_nothing(node: Mapping[str, str], storage: str) -> None:
    with start(HERE / "trials.py", storage, "3", environment=node) as driver:
        driver.wait_for("^told", unit(200))
        pids = [int(pid) for line in re.findall(r"^processes (.+)$", driver.out, re.MULTILINE) for pid in line.split()]
        assert len(pids) == 10
        ended = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
        assert living_after(unit(20), ended) == []
        assert run_directories() == []
