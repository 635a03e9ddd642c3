"""The example models train as with torch alone, with few lines that differ, and continue from a checkpoint."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.harness.processes import ROOT, Ended, run, start
from tests.harness.timing import unit

pytestmark = pytest.mark.timeout(unit(300))

EXAMPLES = ROOT / "examples/torch_models"
#: Less than the programs take by themselves. All write a checkpoint before their end.
SMALL = {
    "convnet": ("--epochs", "2", "--dropout", "0"),
    "gpt": ("--steps", "40", "--layers", "1", "--length", "32"),
    "dlrm": ("--epochs", "2", "--rows", "5000", "--height", "500"),
}
#: As many on every machine, because the number of threads changes the bits.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
LAUNCHER = ("cs-launch", "--devices", "cpu:0,cpu:1")


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


def trained(program: str, file: Path, *options: str, launcher: tuple[str, ...] = ()) -> Ended:
    """A program of the examples, which has ended and has written a file."""
    arguments = (*launcher, EXAMPLES / program, *options, "--checkpoint", file)
    return run(*arguments, environment=ONE_THREAD, timeout=unit(100)).ok()


@pytest.fixture(scope="module", params=SMALL)
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Ended]:
    """The name of a model, the file that our program has written, and what it has printed."""
    file = tmp_path_factory.mktemp("ours") / "checkpoint"
    return request.param, file, trained(f"{request.param}.py", file, *SMALL[request.param])


def test_it_trains_as_with_torch_alone(ours: tuple[str, Path, Ended], tmp_path: Path) -> None:
    name, file, printed = ours
    alone = trained(f"{name}_torch.py", tmp_path / "checkpoint", *SMALL[name])
    difference, path = module("compare").difference(torch.load(tmp_path / "checkpoint"), torch.load(file))
    assert 0 < difference < 1e-3, path
    losses, expected = (
        [float(said) for said in re.findall(r"^(?:step|epoch).* loss (\S+)", each.out, re.MULTILINE)]
        for each in (printed, alone)
    )
    assert losses == pytest.approx(expected, abs=2e-4)
    assert losses[-1] < losses[0]
    for each in (printed, alone):
        assert len(re.findall(r"^The .{200}", each.out, re.MULTILINE | re.DOTALL)) == (name == "gpt")  # the sample


def leaves(nest: Any) -> Iterator[Any]:
    if isinstance(nest, dict):
        nest = list(nest.items())
    if isinstance(nest, list | tuple):
        for each in nest:
            yield from leaves(each)
    else:
        yield nest


def test_a_training_that_was_killed_continues_with_the_same_bits(ours: tuple[str, Path, Ended], tmp_path: Path) -> None:
    """The first part is under the launcher, and the second is not."""
    name, whole, _ = ours
    half = tmp_path / "half"
    with start(*LAUNCHER, EXAMPLES / f"{name}.py", *SMALL[name], "--checkpoint", half, environment=ONE_THREAD) as child:
        child.wait_for("^(epoch 0|step 20) ", timeout=unit(100))  # printed when the file has been written
    assert half.exists()
    continued = trained(f"{name}.py", half, *SMALL[name])
    assert not re.search("^(epoch 0|step 20) ", continued.out, re.MULTILINE)
    found, expected = (list(leaves(torch.load(path))) for path in (half, whole))
    assert len(found) == len(expected) > 10
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


def test_a_file_of_either_program_serves_the_other_under_the_launcher(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint"
    programs: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("dlrm_torch.py", ()),
        ("dlrm.py", LAUNCHER),
        ("dlrm_torch.py", ()),
    )
    for epoch, (program, launcher) in enumerate(programs):
        options = ("--epochs", str(epoch + 1), "--rows", "3000", "--height", "500")
        printed = trained(program, file, *options, launcher=launcher).lines
        assert [line.partition("  ")[0] for line in printed if line.startswith("epoch")] == [f"epoch {epoch}"]


def test_the_command_that_compares() -> None:
    options = ("--epochs", "1", "--rows", "2000", "--height", "500")
    ended = run(EXAMPLES / "compare.py", "dlrm", *options, environment=ONE_THREAD, timeout=unit(100)).ok()
    assert re.fullmatch(r"dlrm +largest difference from torch alone: \d\.\de-\d\d, of /\S+", ended.lines[-1])
