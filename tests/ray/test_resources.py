"""A service in an actor obeys what Ray says about threads and GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.harness.processes import run
from tests.harness.stand_in_gpus import stand_in_gpus
from tests.harness.timing import unit

PROGRAM = Path(__file__).parent / "resources.py"

pytestmark = pytest.mark.timeout(unit(200))


def test_workers_have_the_threads_of_the_actor_or_of_its_environment(node: Mapping[str, str]) -> None:
    assert run(PROGRAM, "threads", environment=node, timeout=unit(180)).ok().lines[-2:] == ["[2, 2]", "[1, 1]"]


def test_gpu_0_is_the_first_gpu_that_ray_gives_the_actor(node: Mapping[str, str]) -> None:
    with stand_in_gpus(2):
        ended = run(PROGRAM, "gpus", environment=node, timeout=unit(180)).ok()
    name = "/job:localhost/replica:0/task:0/device:GPU:0"
    assert ended.lines[-2:] == [f"{name} 0", f"{name} 1"]
