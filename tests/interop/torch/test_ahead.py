"""``step.ahead``: the same bits as single steps, with schedulers and modes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.harness.timing import unit
from tests.interop.torch.beside import batch_of, centralized, difference
from torch import nn
from torch.nn import functional as F  # noqa: N812

import central_storage as cs
import central_storage.torch as cst

pytestmark = pytest.mark.timeout(unit(300))

BATCHES = [batch_of(seed, rows) for seed, rows in enumerate([6, 7, 1, 6, 6, 3])]


def training(strategy: cs.CentralStorageStrategy, name: str) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(5)
    model, _ = centralized(
        strategy, nn.Sequential(nn.Linear(8, 20), nn.BatchNorm1d(20), nn.Dropout(0.3), nn.Linear(20, 3))
    )
    model[1].eval()  # a share of one row has no variance
    optimizer = cst.optim.AdamW(model.parameters(), lr=0.01, max_norm=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    train.__qualname__ = name  # the random numbers of a function follow from its name
    return model, optimizer, schedule, cst.step(model, optimizer)(train)


def test_the_same_bits_as_single_steps(two: cs.CentralStorageStrategy) -> None:
    model, optimizer, schedule, train = training(two, "ahead")
    steps = two.controller.steps()
    losses = []
    for batch in cst.batches(two, BATCHES):
        losses.append(train(batch))
        schedule.step()
    two.controller.set_steps(steps)
    again, other, its_schedule, ahead = training(two, "ahead")
    assert list(ahead.ahead(cst.batches(two, BATCHES), scheduler=its_schedule)) == losses
    assert difference(again, model) == 0
    assert its_schedule.last_epoch == schedule.last_epoch == 6
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert train(BATCHES[0]) == pytest.approx(float(ahead(BATCHES[0])), abs=0.5)


def test_a_loop_that_is_left_early(two: cs.CentralStorageStrategy) -> None:
    _, _, schedule, train = training(two, "left")
    for number, _ in enumerate(train.ahead(cst.batches(two, BATCHES), scheduler=schedule, lookahead=2)):
        if number == 1:
            break
    made = two.controller.steps()["tests.interop.torch.test_ahead.left"]
    assert 2 <= made <= 4
    assert schedule.last_epoch == made


def test_without_a_scheduler_and_with_keywords(two: cs.CentralStorageStrategy) -> None:
    model, _ = centralized(two, nn.Linear(8, 3))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.0)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return F.cross_entropy(model(x), y) * scale

    plain = [train(batch) for batch in BATCHES]
    ahead = train.ahead(cst.batches(two, BATCHES), lookahead=0)
    assert next(ahead) == pytest.approx(plain[0])
    model.requires_grad_(False)  # holds from the next step that is sent
    with pytest.raises(cs.errors.InvalidArgumentError, match="depends on no parameter that needs a gradient"):
        next(ahead)
    model.requires_grad_(True)
    assert list(train.ahead(cst.batches(two, BATCHES), steps=3, scale=2.0)) == pytest.approx([2 * x for x in plain[:3]])


def test_a_bar_shows_the_mean_loss_of_the_batch(
    two: cs.CentralStorageStrategy, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, _, train = training(two, "shown")
    batches = cst.batches(two, BATCHES)
    *_, loss = train.ahead(batches, progress="training")
    assert re.fullmatch(rf"training: 6 of 6 steps in .*, loss {loss:.4g}\n", capsys.readouterr().err)
    left = train.ahead(batches, steps=4, progress=True)
    next(left)
    left.close()
    assert capsys.readouterr().err.startswith("1 of 4 steps in ")
