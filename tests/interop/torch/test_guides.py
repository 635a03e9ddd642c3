"""The pages for users of torch: what they show are programs, and these train as torch alone does."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.harness.guides import columns, python_blocks, table
from tests.harness.processes import run
from tests.harness.timing import unit

import central_storage as cs
import central_storage.torch as cst

pytestmark = pytest.mark.timeout(unit(200))

END = "\nstrategy.shutdown()"
#: What the last block of "From one GPU" does, with torch alone.
BODY = """
for x, y in loader:
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""


@pytest.fixture
def execute() -> Any:
    """Executes programs, and ends the services that they have left."""
    namespaces: list[dict[str, Any]] = []

    def execute(*parts: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
        found = {} if names is None else names
        namespaces.append(found)
        for part in parts:
            exec(part, found)
        return found

    yield execute
    for each in namespaces:
        if isinstance(strategy := each.get("strategy"), cs.CentralStorageStrategy):
            strategy.shutdown()


def assert_equal(ours: dict[str, Any], alone: dict[str, Any]) -> None:
    assert ours.keys() == alone.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], alone[name], rtol=1e-4, atol=1e-5)


def test_from_one_gpu(execute: Callable[..., dict[str, Any]]) -> None:
    setup, *rest = python_blocks("from-one-gpu.md")
    left, right = columns("from-one-gpu.md", "torch alone")
    alone = execute(setup, left)
    right, end, nothing = right.rpartition(END)
    assert (end, nothing) == (END, "")
    ours = execute(setup, right)
    assert_equal(ours["state"], alone["state"])
    assert ours["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    for number, each in alone["momentum"]["state"].items():
        assert_equal(ours["momentum"]["state"][number], each)
    ahead, body = rest  # ten more steps, and then ten without the scheduler and with clipping
    execute(ahead, body, names=ours)
    execute(left[left.index("for x, y") : left.index("state =")], BODY, names=alone)
    assert_equal(ours["model"].state_dict(), alone["model"].state_dict())


def test_from_ddp(execute: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    [setup] = python_blocks("from-ddp.md")
    left, right = columns("from-ddp.md", "DDP")
    program, file = tmp_path / "train.py", tmp_path / "state"
    save = f"\nif __import__('os').environ['RANK'] == '0':\n    torch.save((state, loss), {str(file)!r})\n"
    program.write_text("\n".join([setup, left, save]))
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run(*launcher, program, environment={"OMP_NUM_THREADS": "1"}, timeout=unit(60)).ok()
    state, _ = torch.load(file)
    ours = execute(setup, right)
    assert_equal(ours["state"], state)


def test_the_page_about_torch(tmp_path: Path) -> None:
    [program] = python_blocks("torch.md")
    (tmp_path / "train.py").write_text(program)
    run(tmp_path / "train.py", directory=tmp_path, timeout=unit(60)).ok()
    assert torch.load(tmp_path / "model.pt")["0.weight"].shape == (64, 20)


@pytest.mark.parametrize("row", table("large-tables.md", "for a table")[1:], ids=lambda row: row[0])
def test_the_memory_of_a_table(row: list[str]) -> None:
    """The state of the optimizer has as many bytes as the page says."""
    name, shown = row
    rows, columns = 7, 3
    with cs.CentralStorageStrategy(in_process=True) as strategy:
        with strategy.scope():
            model = cst.centralize(torch.nn.Embedding(rows, columns, sparse=True))
        optimizer = getattr(cst.optim, name.removesuffix(" without momentum"))(model.parameters(), lr=0.1)

        @cst.step(model, optimizer)
        def train(ids: torch.Tensor) -> torch.Tensor:
            return model(ids).square().mean()

        train(torch.tensor([1, 2, 1]))
        state = optimizer.state_dict()["state"].get(0, {})
    nbytes = sum(4 * value.numel() for key, value in state.items() if key != "step" and value is not None)
    number, *factors = shown.removesuffix(" more").split()
    assert nbytes == int(number) * math.prod({"rows": rows, "columns": columns}[each] for each in factors)
