"""The programs of the guide's page about Ray."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.harness.guides import python_blocks
from tests.harness.processes import Ended, run
from tests.harness.timing import unit
from tests.ray.conftest import QUICK
from tests.ray.leavings import run_directories

pytestmark = pytest.mark.timeout(unit(240))


def output(block: int, node: Mapping[str, str], directory: Path) -> Ended:
    """Run a program of the page. Tune's results go into the home directory."""
    program = directory / "program.py"
    program.write_text(python_blocks("ray.md")[block])
    ended = run(
        program, environment={**node, **QUICK, "HOME": str(directory)}, directory=directory, timeout=unit(200)
    ).ok()
    assert run_directories() == []
    return ended


def test_two_actors(node: Mapping[str, str], tmp_path: Path) -> None:
    slow, quick = literal_eval(output(0, node, tmp_path).lines[-1])
    assert 0 <= quick < slow < 1


def test_two_trials(node: Mapping[str, str], tmp_path: Path) -> None:
    assert output(1, node, tmp_path).lines[-1] == "best rate 0.01"
    assert len(list(tmp_path.glob("ray_results/*/*/checkpoint_*"))) == 10


def test_ray_train(node: Mapping[str, str], tmp_path: Path) -> None:
    said = re.search(r"^loss (\S+)$", output(2, node, tmp_path).out, re.MULTILINE)  # Ray may print after it
    assert said
    assert 0 <= float(said[1]) < 64
    assert len(list(tmp_path.glob("runs/*/checkpoint_*/central_storage.safetensors"))) == 5
