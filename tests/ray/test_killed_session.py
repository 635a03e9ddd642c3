"""A test session that is killed leaves no node of Ray, and none of Ray's directories."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from tests.harness.processes import living_after, marked, start
from tests.harness.timing import unit

HANGS = """
import os
import signal

import tests.conftest
from tests.harness.processes import MARK
from tests.ray.conftest import node

def test_that_hangs(node):
    print("mark", os.environ[MARK], flush=True)
    signal.pause()
"""


@pytest.mark.timeout(unit(200))
def test_a_session_that_is_killed_leaves_no_node(tmp_path: Path) -> None:
    """As pytest-timeout ends one: no fixture is finalized."""
    (tmp_path / "test_hangs.py").write_text(HANGS)
    options = ("-s", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml", "--rootdir", tmp_path)
    command = (sys.executable, "-m", "pytest", *options, tmp_path)
    with start(*command, environment={"PYTHONPATH": "proto:server:worker:client"}) as session:
        mark = session.wait_for(r"mark (\S+)$", unit(150))[1]
        of_session = marked(mark)
        assert any(process.name() == "raylet" for process in of_session)
        session.signal(signal.SIGKILL)
        session.wait(unit(20))
        assert living_after(unit(20), of_session) == []
    assert list(Path("/tmp").glob(f"ray-{mark}-*")) == []
