"""The examples train as JAX alone, with few lines that differ, and continue from a checkpoint of either program."""

from __future__ import annotations

import difflib
import pickle
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.harness.processes import ROOT, run
from tests.harness.timing import unit

pytestmark = pytest.mark.timeout(unit(400))

EXAMPLES = ROOT / "examples/jax_models"
#: Fewer epochs or pieces than the programs take by themselves.
SMALL = {"mlp": ("--epochs", "2"), "transformer": ("--epochs", "1", "--pieces", "128")}


@pytest.mark.parametrize("name", SMALL)
def test_at_most_twelve_lines_differ(name: str) -> None:
    """The other files of the folder belong to both programs."""
    alone, here = ((EXAMPLES / f"{name}{ending}.py").read_text().splitlines() for ending in ("_jax", ""))
    changes = list(difflib.ndiff(alone, here))
    assert 5 < len([line for line in changes if line.startswith("+ ")]) <= 12
    assert len([line for line in changes if line.startswith("- ")]) <= 12


@pytest.mark.parametrize("name", SMALL)
def test_the_largest_difference_from_jax_alone(name: str) -> None:
    lines = (
        run(sys.executable, "-W", "error", EXAMPLES / "compare.py", name, *SMALL[name], timeout=unit(300)).ok().lines
    )
    found = re.fullmatch(rf"{name} +largest difference from JAX alone: (\S+)", lines[-1])
    assert found is not None
    assert 0 < float(found[1]) < 5e-3
    losses = [float(said[1]) for line in lines if (said := re.search(r"loss (\S+)", line))]
    half = len(losses) // 2
    assert losses[half:] == pytest.approx(losses[:half], rel=0.01)


def test_a_training_continues_under_the_launcher_from_a_file_of_either_program(tmp_path: Path) -> None:
    def trained(program: str, file: Path, epochs: int, *launcher: str) -> list[np.ndarray]:
        command = launcher or (sys.executable,)
        run(*command, EXAMPLES / program, "--epochs", str(epochs), "--checkpoint", file, timeout=unit(200)).ok()
        epoch, model, _ = pickle.loads(file.read_bytes())
        assert epoch == epochs
        return [np.asarray(leaf) for leaf in jax.tree.leaves(model)]

    launcher = ("cs-launch", "--devices", "cpu:0,cpu:1")
    whole = trained("mlp.py", tmp_path / "whole", 2, *launcher)
    trained("mlp.py", tmp_path / "half", 1)
    for one, other in zip(trained("mlp.py", tmp_path / "half", 2, *launcher), whole, strict=True):
        np.testing.assert_array_equal(one, other)  # the same bits
    trained("mlp_jax.py", tmp_path / "there", 1)
    for one, other in zip(trained("mlp.py", tmp_path / "there", 2), whole, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-3)
