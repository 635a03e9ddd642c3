"""Which trainings of torch models the server decides in one pass, as ``strategy.statistics()`` tells."""

from __future__ import annotations

import pytest
import torch
from tests.harness.captured import nearly_all_captured
from tests.harness.timing import unit
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import central_storage as cs
import central_storage.torch as cst

pytestmark = pytest.mark.timeout(unit(300))

STEPS = 400


@pytest.mark.parametrize("rule", ["first", pytest.param("mean", marks=pytest.mark.slow)])
def test_a_training_with_the_buffers_of_a_normalization(two: cs.CentralStorageStrategy, rule: str) -> None:
    """The quick start of the guide, with a rate for each step."""
    with two.scope():
        layers = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        model = cst.centralize(layers, buffers=rule)
    optimizer = cst.optim.AdamW(model.parameters(), lr=3e-4, max_norm=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(x), y)

    batch = torch.randn(8, 20), torch.randint(0, 3, (8,))
    with nearly_all_captured(two, STEPS):
        for _ in range(STEPS):
            train(batch)
            schedule.step()


class Recommender(nn.Module):
    """Two tables, whose gradients are sparse, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, 4, mode="sum", sparse=True) for _ in range(2))
        self.top = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found = [table(rows[:, k : k + 1]) for k, table in enumerate(self.tables)]
        scores: torch.Tensor = self.top(torch.cat(found, 1))[:, 0]
        return scores


def test_a_recommender(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = cst.centralize(Recommender())
    tables = cst.optim.Adagrad(model.tables.parameters(), lr=0.01)
    dense = cst.optim.SGD(model.top.parameters(), lr=0.01)

    @cst.step(model, tables, dense)
    def train(rows: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return binary_cross_entropy_with_logits(model(rows), y)

    batch = torch.randint(0, 50, (16, 2)), torch.rand(16)
    with nearly_all_captured(two, STEPS):
        for _ in range(STEPS):
            train(batch)


def test_a_loss_over_the_whole_batch(two: cs.CentralStorageStrategy) -> None:
    """All replicas see the outputs of all, as a contrastive loss does, and their gradients come back."""
    with two.scope():
        model = cst.centralize(nn.Linear(4, 3))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.01)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        scores = out @ cst.all_gather(out).T
        return (scores**2).mean() + (cst.all_reduce(out.sum(0)) ** 2).mean()

    batch = (torch.randn(8, 4),)
    with nearly_all_captured(two, STEPS):
        for _ in range(STEPS):
            train(batch)
