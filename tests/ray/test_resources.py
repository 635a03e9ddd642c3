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


def test_threads_and_gpus(node: Mapping[str, str]) -> None:
    """Workers have the threads of the actor or of its environment, and ``gpu:0`` is the first GPU that Ray gives it."""
    with stand_in_gpus(2):
        ended = run(PROGRAM, environment=node, timeout=unit(180)).ok()
    name = "/job:localhost/replica:0/task:0/device:GPU:0"
    assert ended.lines[-4:] == ["[2, 2]", "[1, 1]", f"{name} 0", f"{name} 1"]
