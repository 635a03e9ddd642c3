"""Where values and gradients lie: in the server's memory, without a copy, and in no pickle."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.processes import ROOT
from tests.harness.timing import unit
from tests.interop.torch.beside import centralized, difference, train_alone
from torch import nn

import central_storage as cs
import central_storage.torch as cst

pytestmark = pytest.mark.timeout(unit(300))


def test_nothing_is_copied(two: cs.CentralStorageStrategy) -> None:
    """The parameters are the server's memory; large gradients lie in its buffers after the pass, all at the apply."""
    model, _ = centralized(two, nn.Linear(300, 100))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.function(model, optimizer)
    def train(x: torch.Tensor) -> Any:
        from central_storage.torch.binding import current
        from cs_worker.execution.gradients import GradientBuffers

        def refuse(*_: Any) -> None:
            raise AssertionError("a gradient was copied")

        GradientBuffers._bring = refuse  # type: ignore[method-assign]
        values = [p.data_ptr() == np.asarray(p.variable).__array_interface__["data"][0] for p in model.parameters()]
        model(x).sum().backward()
        found = current("a test")
        assert found is not None
        place = found._all_places()[id(model.weight)][1]
        return str([*values, model.weight.grad.data_ptr() == place.data_ptr(), optimizer.step()])

    for _ in range(3):  # also where parameters are bound anew
        assert train(torch.ones(4, 300)) == "[True, True, True, None]"


def test_a_function_is_sent_without_the_values(two: cs.CentralStorageStrategy) -> None:
    from central_storage.pickling.pickler import dump_function

    model, _ = centralized(two, nn.Linear(2000, 1000))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor) -> torch.Tensor:
        return model(x).mean()

    assert len(dump_function(train._replica, two.adopt)) < 20_000
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 8


class Rows(nn.Module):
    """Two tables whose gradients are rows, one of them in bags, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Embedding(50, 4, sparse=True)
        self.bags = nn.EmbeddingBag(40, 4, mode="sum", sparse=True)
        self.out = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor, bags: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([self.one(ids), self.bags(bags)], dim=1))


def test_tables_get_rows(three: cs.CentralStorageStrategy) -> None:
    """Also with uneven shares, with none, and with rows that are named twice."""

    def loss_of(module: Any, ids: torch.Tensor, bags: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (module(ids, bags)[:, 0] - y).square().mean()

    generator = torch.Generator().manual_seed(3)
    batches = [
        (
            torch.randint(0, 50, (rows,), generator=generator),
            torch.randint(0, 40, (rows, 3), generator=generator),
            torch.randn(rows, generator=generator),
        )
        for rows in (9, 7, 4, 1)
    ]
    model, alone = centralized(three, Rows())
    assert model.one.weight.variable.sparse
    assert model.bags.weight.variable.sparse
    assert not model.out.weight.variable.sparse

    def optimizers(optim: Any, module: Any) -> list[Any]:
        tables = [module.one.weight, module.bags.weight]
        return [optim.SparseAdam(tables, lr=0.1), optim.Adagrad(module.out.parameters(), lr=0.1)]

    ours, theirs = optimizers(cst.optim, model), optimizers(torch.optim, alone)

    @cst.step(model, *ours)
    def train(ids: torch.Tensor, bags: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of(model, ids, bags, y)

    losses = [train(batch) for batch in batches * 2]
    assert losses == pytest.approx(train_alone(alone, theirs, batches * 2, loss_of), abs=1e-4)
    assert difference(model, alone) < 1e-4


def test_tables_of_16_bits(two: cs.CentralStorageStrategy) -> None:
    torch.manual_seed(0)
    model, alone = centralized(two, nn.Embedding(20, 4, sparse=True).to(torch.bfloat16))
    optimizer = cst.optim.SGD(model.parameters(), lr=1.0)

    @cst.step(model, optimizer)
    def train(ids: torch.Tensor) -> torch.Tensor:
        return model(ids).float().sum(1).mean()

    train(torch.tensor([3, 3, 5, 7]))
    change = torch.from_numpy(model.weight.variable.numpy()) - alone.weight.detach().float()
    assert change[[3, 5, 7, 0]].mean(1).tolist() == pytest.approx([-0.5, -0.25, -0.25, 0])


def test_only_who_asks_imports_torch() -> None:
    said = "import sys; print(*sorted({'torch', 'jax'} & sys.modules.keys()))"
    for program, modules in (
        ("import central_storage as cs; cs.CentralStorageStrategy; cs.optimizers.Adam", ""),
        ("from central_storage import *", ""),
        ("import central_storage as cs; cs.torch.step", "torch"),
        ("import central_storage.torch", "torch"),
    ):
        run = subprocess.run([sys.executable, "-c", f"{program}; {said}"], capture_output=True, text=True, cwd=ROOT)
        assert run.stdout.split() == modules.split(), run.stderr
