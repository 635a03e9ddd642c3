"""``cs-launch --ray auto --plan``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.harness.processes import run
from tests.harness.timing import unit
from tests.ray.conftest import CPUS_OF_NODE, Running

SCRIPT = """
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy()
print("resolver", strategy.cluster_resolver.cluster_spec().as_dict(), flush=True)
with strategy.scope():
    w = cs.Variable(np.zeros(1_000_000, np.float32))
    optimizer = cs.optimizers.Adam()
print("result", strategy.run(lambda: 5), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_a_plan_asks_ray_for_the_places_and_gives_them_back(cluster: Running, script: Path) -> None:
    options = ("--ray", "auto", "--workers", str(3 * CPUS_OF_NODE), "--plan", "--bandwidth", "1Gbit")  # all there is
    ended = run("cs-launch", *options, script, environment=cluster.environment, timeout=unit(120)).ok()
    assert ended.lines[0] == "plan: 6 workers on 3 nodes, variables on cpu:0 of 127.0.0.1"
    assert re.fullmatch(r"Ray [\d.]+ with 3 nodes: 6 workers on 127.0.0.1", ended.lines[1])
    assert sum(line.startswith("127.0.0.1  ") and "2 workers" in line for line in ended.lines) == 3
    assert "1 Gbit/s *" in ended.out
    assert "result 5" not in ended.err + ended.out
    assert "'worker': ['127.0.0.1', '127.0.0.1', '127.0.0.1', '127.0.0.1', '127.0.0.1', '127.0.0.1']" in ended.err

    # The workers of a node share a copy.
    options = ("--ray", "auto", "--workers", "4", "--workers-per-node", "2", "--plan")
    ended = run("cs-launch", *options, script, environment=cluster.environment, timeout=unit(120)).ok()
    assert ended.lines[0] == "plan: 4 workers on 2 nodes, variables on cpu:0 of 127.0.0.1"
    assert "8.0 MB out, 16 MB in; the workers of a node share its copy" in ended.out
