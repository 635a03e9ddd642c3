"""Tables that lie on another machine than their replica: it has their rows only, and trains to the same bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import central_storage as cs
import central_storage.torch as cst
from central_storage import errors

HEIGHT, WIDTH = 400, 16


def _lie(elsewhere: bool) -> None:
    """In a worker: tables are fetched by rows, as on another machine, or mapped."""
    import cs_worker.execution.catalogue as module

    module.__dict__.setdefault("_plain_is_carried", module.Catalogue.is_carried)
    plain = module.__dict__["_plain_is_carried"]

    def is_carried(self: Any, number: int) -> bool:
        return self.place(number).spec.sparse or plain(self, number)

    module.Catalogue.is_carried = is_carried if elsewhere else plain  # type: ignore[method-assign]


@pytest.fixture
def elsewhere(two: cs.CentralStorageStrategy) -> Iterator[cs.CentralStorageStrategy]:
    """Two replicas whose tables lie elsewhere, until it is said that they do not."""
    two.run(_lie, args=(True,))
    yield two
    two.run(_lie, args=(False,))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(HEIGHT, WIDTH, sparse=True, padding_idx=3)
        self.bags = torch.nn.EmbeddingBag(HEIGHT, WIDTH, sparse=True, mode="mean", padding_idx=5)
        self.last = torch.nn.Linear(2 * WIDTH, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([self.words(ids[:, 0]), self.bags(ids[:, 1:])], dim=1))


def batch_of(seed: int, rows: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    """Few different rows, so that many come twice."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 20, (rows, 4), generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def trained(strategy: cs.CentralStorageStrategy, net: torch.nn.Module) -> tuple[list[float], dict[str, torch.Tensor]]:
    with strategy.scope():
        model = cst.centralize(net)
    tables = [*model.words.parameters(), *model.bags.parameters()]
    optimizers = [cst.optim.SparseAdam(tables, lr=0.05), cst.optim.Adam(model.last.parameters(), lr=0.05)]

    @cst.step(model, *optimizers)
    def train(ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(ids), y)

    losses = [train(batch_of(seed)) for seed in range(5)]
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def test_rows_of_look_ups_train_to_the_bits_of_whole_tables(elsewhere: cs.CentralStorageStrategy) -> None:
    net = Net()
    losses, values = trained(elsewhere, copy.deepcopy(net))
    elsewhere.run(_lie, args=(False,))
    expected_losses, expected = trained(elsewhere, net)
    assert losses == expected_losses
    assert values.keys() == expected.keys()
    assert all(torch.equal(values[name], expected[name]) for name in values)


def test_what_needs_all_of_a_table_is_refused_and_names_it(elsewhere: cs.CentralStorageStrategy) -> None:
    with elsewhere.scope():
        model = cst.centralize(Net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(ids), y) + model.words.weight.sum()

    with pytest.raises(errors.InvalidArgumentError, match=r"words.weight is a table .* another machine has only"):
        train(batch_of(0))
