"""A service in an actor of Ray: the bits of a plain process, and nothing left however the actor ends."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from tests.harness.processes import Child, living_after, run, start
from tests.harness.timing import unit
from tests.ray.leavings import assert_next_start_clears, run_directories

HERE = Path(__file__).parent

pytestmark = pytest.mark.timeout(unit(200))


def processes(driver: Child, how: str) -> list[psutil.Process]:
    """An actor, and the supervisor, the server and two workers that are its service."""
    said = driver.wait_for(rf"^processes {how} (.+)$", unit(120))[1]
    found = [psutil.Process(int(pid)) for pid in said.split()]
    assert len(found) == 5
    assert len(run_directories()) == 1
    return found


def test_two_at_once_train_to_the_bits_of_plain_processes(node: Mapping[str, str]) -> None:
    plain = run(HERE / "training.py", "0.1", "0.01", timeout=unit(60)).ok().lines
    assert len(set(plain)) == 2
    driver = run(HERE / "actors.py", "train", "0.1", "0.01", environment=node, timeout=unit(180)).ok()
    assert [line for line in driver.lines if re.fullmatch("[0-9a-f]{64}", line)] == plain


def test_an_actor_that_ends_leaves_nothing(node: Mapping[str, str]) -> None:
    """With ``kept``, the supervisor ends the service. Without, Ray kills it, and the exit handler of the actor removes
    its directory, unless Ray kills the actor, too: the next start clears the directory then."""
    hows = ("none", "let-go", "let-go-kept", "kill-kept", "kill")
    with start(HERE / "actors.py", "end", *hows, environment=node) as driver:
        for how in hows:
            actor, *service = processes(driver, how)
            if how == "none":
                actor.kill()
                assert living_after(unit(20), [actor, *service]) == []
            driver.signal(signal.SIGUSR1)
            driver.wait_for(f"^told {how}$", unit(20))
            assert living_after(unit(20), [actor, *service]) == []
            if how == "kill":
                assert_next_start_clears(run_directories())
            assert run_directories() == []
            driver.signal(signal.SIGUSR1)
