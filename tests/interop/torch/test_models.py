"""The example models train as with torch alone, with few lines that differ, and continue from a checkpoint."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.harness.processes import ROOT, run, start
from tests.harness.timing import unit

pytestmark = pytest.mark.timeout(unit(300))

EXAMPLES = ROOT / "examples/torch_models"
#: Less than the programs take by themselves. All write a checkpoint before their end.
SMALL = {
    "convnet": ("--epochs", "2", "--dropout", "0"),
    "gpt": ("--steps", "40", "--layers", "1", "--length", "32"),
    "dlrm": ("--epochs", "2", "--rows", "5000", "--height", "500"),
}
#: Threads that wait for each other on a busy machine take long.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def module(name: str) -> ModuleType:
    """A file of the examples."""
    spec = importlib.util.spec_from_file_location(f"torch_models_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.mark.parametrize("name", SMALL)
def test_at_most_twelve_lines_differ(name: str) -> None:
    """Every line counts, also an empty one: those that only our program has, and apart from them those that only the
    other has. The other files of the folder belong to both programs."""
    alone, here = ((EXAMPLES / f"{name}{ending}.py").read_text().splitlines() for ending in ("_torch", ""))
    changes = list(difflib.ndiff(alone, here))
    assert 5 < len([line for line in changes if line.startswith("+ ")]) <= 12
    assert 5 < len([line for line in changes if line.startswith("- ")]) <= 12
    shared = {path.stem for path in EXAMPLES.glob("*.py")} - {
        f"{each}{end}" for each in SMALL for end in ("", "_torch")
    }
    for each in shared - {"compare"}:
        assert "central_storage" not in (EXAMPLES / f"{each}.py").read_text()


def test_the_sizes_of_the_models() -> None:
    models, data = module("models"), module("data")
    manual = data.Manual(128)
    gpt = models.GPT(len(manual.characters), manual.length)
    assert 3e6 < sum(p.numel() for p in gpt.parameters()) < 10e6
    assert manual.written(manual.tokens("The ")) == "The "
    defaults = dict(re.findall(r'"--(\w+)", type=int, default=([\d_]+)', (EXAMPLES / "dlrm.py").read_text()))
    tables, height, width = (int(defaults[name]) for name in ("tables", "height", "width"))
    assert 8 <= tables <= 26
    assert tables * height * width * 12 < 4 << 30  # a table and SparseAdam's two moments, of float32


@pytest.mark.parametrize("name", SMALL)
def test_the_largest_difference_from_torch_alone(name: str) -> None:
    ended = run(
        sys.executable, EXAMPLES / "compare.py", name, *SMALL[name], environment=ONE_THREAD, timeout=unit(250)
    ).ok()
    found = re.fullmatch(rf"{name} +largest difference from torch alone: (\S+), of \S+", ended.lines[-1])
    assert found is not None
    assert 0 < float(found[1]) < 1e-3
    losses = [float(said) for said in re.findall(r"loss (\S+)", ended.err)]
    half = len(losses) // 2
    assert half >= 2
    assert losses[:half] == pytest.approx(losses[half:], abs=2e-4)
    assert losses[half - 1] < losses[0]
    samples = re.findall(r"^The .{20}", ended.err, re.MULTILINE | re.DOTALL)
    assert len(samples) == (2 if name == "gpt" else 0)


def leaves(nest: Any) -> Iterator[Any]:
    if isinstance(nest, dict):
        nest = list(nest.items())
    if isinstance(nest, list | tuple):
        for each in nest:
            yield from leaves(each)
    else:
        yield nest


@pytest.mark.parametrize("name", SMALL)
def test_a_training_that_was_killed_continues_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """The first part is under the launcher, and the second is not."""
    program, whole, half = EXAMPLES / f"{name}.py", tmp_path / "whole", tmp_path / "half"
    run(program, *SMALL[name], "--checkpoint", whole, timeout=unit(100)).ok()
    launcher = ("cs-launch", "--devices", "cpu:0,cpu:1")
    with start(*launcher, program, *SMALL[name], "--checkpoint", half) as child:
        child.wait_for("^(epoch 0|step 20) ", timeout=unit(100))  # printed when the file has been written
    assert half.exists()
    continued = run(program, *SMALL[name], "--checkpoint", half, timeout=unit(100)).ok()
    assert not re.search("^(epoch 0|step 20) ", continued.out, re.MULTILINE)
    ours, expected = (list(leaves(torch.load(path))) for path in (half, whole))
    assert len(ours) == len(expected) > 10
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


def test_a_file_of_either_program_serves_the_other(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint"
    rest = ("--rows", "3000", "--height", "500", "--checkpoint", file)
    for epoch, program in enumerate(("dlrm_torch.py", "dlrm.py", "dlrm_torch.py")):
        lines = run(EXAMPLES / program, "--epochs", str(epoch + 1), *rest, timeout=unit(100)).ok().lines
        assert [line for line in lines if line.startswith("epoch")] == lines[-1:]
        assert lines[-1].startswith(f"epoch {epoch} ")
