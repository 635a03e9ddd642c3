"""``check_numerics`` with models of torch, where the loss is finite and a gradient is not: such a step changes nothing,
also no buffer, and the training goes on as if it had not been."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.timing import unit
from tests.interop.torch.beside import batch_of, centralized, difference, train_alone
from torch import nn
from torch.nn import functional as F  # noqa: N812

import central_storage as cs
import central_storage.torch as cst
from central_storage.errors import NumericsError

pytestmark = pytest.mark.timeout(unit(300))


@pytest.fixture
def raising(two: cs.CentralStorageStrategy, monkeypatch: pytest.MonkeyPatch) -> cs.CentralStorageStrategy:
    monkeypatch.setattr(two.controller, "check_numerics", "raise")
    return two


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 3))


def loss_of(module: Any, x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A loss with a root, whose derivative is infinite for a row of scale 0."""
    scores = module(x)
    return F.cross_entropy(scores, y) + (scores.sum(1) * scale).square().sqrt().mean()


def batch(seed: int, rows: int = 8, bad: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch, of which the row ``bad`` makes gradients NaN."""
    scale = torch.ones(rows)
    if bad is not None:
        scale[bad] = 0
    return *batch_of(seed, rows), scale


def state_of(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """All that a step changes."""
    slots = [value for each in optimizer.state_dict()["state"].values() for value in each.values()]
    return [torch.as_tensor(value).clone() for value in (*model.state_dict().values(), *slots)]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("bad", [0, -1])
def test_a_bad_batch_is_skipped(raising: cs.CentralStorageStrategy, bad: int, accumulate: int) -> None:
    model, alone = centralized(raising, net())
    optimizer = cst.optim.Adam(model.parameters(), lr=0.01)

    @cst.step(model, optimizer, accumulate=accumulate)
    def train(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x, y, scale)

    batches = [batch(seed, 12) for seed in range(6)]
    losses = []
    for number, good in enumerate(batches):
        if number in (0, 4):  # before the server knows the step, and in the midst
            before = state_of(model, optimizer)
            named = rf"gradient of '.+' has nan at \[.*\], in step .* on replica {0 if bad == 0 else 1} "
            with pytest.raises(NumericsError, match=named):
                train(batch(number, 12, bad))
            assert equal(state_of(model, optimizer), before)
        losses.append(train(good))
    theirs = train_alone(alone, torch.optim.Adam(alone.parameters(), lr=0.01), batches, loss_of)
    assert losses == pytest.approx(theirs, abs=1e-5)
    assert difference(model, alone) < 1e-5


def test_a_bound_on_the_norm_hides_nothing(raising: cs.CentralStorageStrategy) -> None:
    model, _ = centralized(raising, net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, max_norm=1.0)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x, y, scale)

    train(batch(0))
    before = state_of(model, optimizer)
    with pytest.raises(NumericsError, match="has nan"):
        train(batch(0, bad=2))
    assert equal(state_of(model, optimizer), before)
    assert train(batch(0)) > 0


def test_buffers_of_a_bad_step_stay(raising: cs.CentralStorageStrategy) -> None:
    torch.manual_seed(4)
    model, _ = centralized(raising, nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x, y, scale)

    for _ in range(3):
        train(batch(0))
        before = state_of(model, optimizer)
        with pytest.raises(NumericsError, match="has nan"):
            train(batch(1, bad=7))
        assert equal(state_of(model, optimizer), before)
    assert int(model.state_dict()["1.num_batches_tracked"]) == 3


def test_rows_of_a_table_are_looked_at(raising: cs.CentralStorageStrategy) -> None:
    torch.manual_seed(5)
    model, _ = centralized(raising, nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1)))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows = model[0](ids)
        return (rows.sum((1, 2)) * scale).mean()  # so only the table has a gradient

    ids = torch.tensor([[1, 2], [3, 7]])
    train(ids, torch.ones(2))
    before = state_of(model, optimizer)
    with pytest.raises(NumericsError, match=r"has inf at \[(3|7), 0\].* on replica 1 "):
        train(ids, torch.tensor([1.0, torch.inf]))
    assert equal(state_of(model, optimizer), before)


def test_steps_ahead_end_with_the_bad_one(raising: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(raising, net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x, y, scale)

    batches = [batch(seed) for seed in range(4)]
    with pytest.raises(NumericsError, match="has nan"):
        list(train.ahead(cst.batches(raising, [*batches, batch(4, bad=0), batch(5)])))
    train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), batches, loss_of)
    assert difference(model, alone) < 1e-6


def test_a_warning_does_not_hold_the_update_back(
    two: cs.CentralStorageStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two.controller, "check_numerics", "warn")
    model, _ = centralized(two, net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x, y, scale)

    assert np.isfinite(train(batch(0, bad=0)))
    assert model.state_dict()["0.weight"].isnan().any()
