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


def processes(driver: Child) -> list[psutil.Process]:
    """An actor, and the supervisor, the server and two workers that are its service."""
    found = [psutil.Process(int(pid)) for pid in driver.wait_for(r"^processes (.+)$", unit(120))[1].split()]
    assert len(found) == 5
    assert len(run_directories()) == 1
    return found


def test_two_at_once_train_to_the_bits_of_plain_processes(node: Mapping[str, str]) -> None:
    plain = run(HERE / "training.py", "0.1", "0.01", timeout=unit(60)).ok().lines
    assert len(set(plain)) == 2
    driver = run(HERE / "actors.py", "train", "0.1", "0.01", environment=node, timeout=unit(180)).ok()
    assert [line for line in driver.lines if re.fullmatch("[0-9a-f]{64}", line)] == plain


def test_an_actor_that_sigkill_ends_leaves_nothing(node: Mapping[str, str]) -> None:
    with start(HERE / "actors.py", "none", environment=node) as driver:
        actor, *service = processes(driver)
        actor.kill()
        assert living_after(unit(20), [actor, *service]) == []
        assert run_directories() == []


@pytest.mark.parametrize("how", [("let-go",), ("let-go", "kept"), ("kill", "kept")], ids=" ".join)
def test_an_actor_that_ray_ends_leaves_nothing(node: Mapping[str, str], how: tuple[str, ...]) -> None:
    """With ``kept``, the supervisor ends the service. Without, Ray kills it, and the exit handler of the actor removes
    its directory."""
    with start(HERE / "actors.py", *how, environment=node) as driver:
        ended = processes(driver)
        driver.signal(signal.SIGUSR1)
        assert living_after(unit(20), ended) == []
        assert run_directories() == []


def test_an_actor_that_ray_kills_leaves_at_most_a_directory_which_the_next_start_clears(
    node: Mapping[str, str],
) -> None:
    """Ray kills the supervisor, and then the actor, which has no time for its exit handlers."""
    with start(HERE / "actors.py", "kill", environment=node) as driver:
        ended = processes(driver)
        driver.signal(signal.SIGUSR1)
        assert living_after(unit(20), ended) == []
        assert_next_start_clears(run_directories())
