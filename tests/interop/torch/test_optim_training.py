"""Training with the optimizers, against torch alone: the same gradients, batches and schedules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.services import connected
from tests.harness.timing import unit
from tests.interop.torch.by_hand import central, stepper, values
from tests.interop.torch.cases import CASES, Case, Net, gradients, groups_of, linear, train_torch
from torch.optim import lr_scheduler

import central_storage as cs
import central_storage.torch as cst

STEPS = 50
pytestmark = pytest.mark.timeout(unit(120))


@pytest.fixture(scope="module")
def alone() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as strategy:
        yield connected(strategy)


def assert_close(found: dict[str, torch.Tensor], expected: torch.nn.Module, steps: int = STEPS) -> None:
    """A few units in the last place for each step."""
    for name, p in expected.named_parameters():
        there = p.detach().numpy()
        bound = 4 * steps * np.spacing(np.maximum(np.abs(there), np.float32(0.1)))
        np.testing.assert_array_less(np.abs(found[name].numpy() - there), bound, err_msg=name)


def scheduled(optimizer: Any) -> Any:
    """A warm-up and a cosine; betas and momentum are cycled where the optimizer may have it."""
    may_cycle = not isinstance(optimizer, torch.optim.NAdam) and (
        "betas" in optimizer.defaults or optimizer.defaults.get("momentum")
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    return lr_scheduler.OneCycleLR(optimizer, rates, total_steps=STEPS + 1, cycle_momentum=bool(may_cycle))


@pytest.mark.parametrize("max_norm", [None, 2.0], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_class_trains_as_torchs(alone: cs.CentralStorageStrategy, case: Case, max_norm: float | None) -> None:
    """Groups with different numbers, a schedule, parameters that are frozen, unused or miss steps, one norm of all."""
    theirs = Net()
    reference = getattr(torch.optim, case.name)(groups_of(theirs), **case.kwargs)
    train_torch(theirs, reference, scheduled(reference), range(STEPS), max_norm)
    net = central(alone, Net())
    optimizer = getattr(cst.optim, case.name)(groups_of(net), **case.kwargs, max_norm=max_norm)
    schedule = scheduled(optimizer)
    step = stepper(net, [optimizer], linear)
    for number in range(STEPS):
        step(*gradients(number))
        schedule.step()
    assert_close(values(net), theirs)
    before = Net()
    assert torch.equal(values(net)["unused"], before.unused)
    assert torch.equal(values(net)["frozen"], before.frozen)


def test_values_are_clipped_before_the_norm(alone: cs.CentralStorageStrategy) -> None:
    net, theirs = central(alone, Net()), Net()
    optimizer = cst.optim.SGD(groups_of(net), lr=0.5, max_value=0.25, max_norm=0.5)
    step = stepper(net, [optimizer], linear)
    reference = torch.optim.SGD(groups_of(theirs), lr=0.5)
    for number in range(5):
        step(*gradients(number))
        reference.zero_grad()
        linear(theirs, *gradients(number)).backward()
        torch.nn.utils.clip_grad_value_(theirs.parameters(), 0.25)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step()
    assert_close(values(net), theirs, 5)


def lion_by_hand(w: Any, g: Any, m: Any, lr: float, betas: tuple[float, float], decay: float) -> tuple[Any, Any]:
    w = w * (1 - lr * decay) - lr * np.sign(betas[0] * m + (1 - betas[0]) * g)
    return w, betas[1] * m + (1 - betas[1]) * g


def test_lion_follows_its_paper(alone: cs.CentralStorageStrategy) -> None:
    net = central(alone, Net())
    optimizer = cst.optim.Lion([net.first], lr=0.01, weight_decay=0.1)
    step = stepper(net, [optimizer], linear)
    w = values(net)["first"].numpy().astype(np.float64)
    m = np.zeros_like(w)
    for number in range(20):
        step(*gradients(number))
        w, m = lion_by_hand(w, gradients(number)[0], m, 0.01, (0.9, 0.99), 0.1)
    np.testing.assert_allclose(values(net)["first"].numpy(), w, rtol=1e-5, atol=1e-6)


def test_lamb_follows_its_paper(alone: cs.CentralStorageStrategy) -> None:
    net = central(alone, Net())
    optimizer = cst.optim.LAMB([net.first, net.second], lr=0.01, weight_decay=0.1)
    step = stepper(net, [optimizer], linear)
    expected = {}
    for index, name in enumerate(["first", "second"]):
        w = values(net)[name].numpy().astype(np.float64)
        m, v = np.zeros_like(w), np.zeros_like(w)
        for t in range(1, 21):
            g = gradients(t - 1)[index].astype(np.float64)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            u = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + 0.1 * w
            w = w - 0.01 * np.linalg.norm(w) / np.linalg.norm(u) * u
        expected[name] = w
    for number in range(20):
        step(*gradients(number))
    for name, w in expected.items():
        np.testing.assert_allclose(values(net)[name].numpy(), w, rtol=1e-5, atol=1e-6)


# --- tables -----------------------------------------------------------------------------------------------------


def rows_loss(module: torch.nn.Module, rows: Any, factors: Any) -> torch.Tensor:
    return (module(torch.tensor(rows)) * torch.tensor(factors)).sum()


def rows_of(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows, some of them twice, and the gradient of each."""
    random = np.random.default_rng(step)
    return random.integers(0, 6, 4), random.normal(size=(4, 3)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "kwargs"), [("SparseAdam", {"lr": 0.01}), ("Adagrad", {"lr": 0.1}), ("SGD", {"lr": 0.1})]
)
def test_a_table_trains_as_torchs(alone: cs.CentralStorageStrategy, name: str, kwargs: dict[str, Any]) -> None:
    torch.manual_seed(1)
    theirs = torch.nn.Embedding(8, 3, sparse=True)
    table = torch.nn.Embedding(8, 3, sparse=True)
    table.load_state_dict(theirs.state_dict())
    central(alone, table)
    step = stepper(table, [getattr(cst.optim, name)(table.parameters(), **kwargs)], rows_loss)
    reference = getattr(torch.optim, name)(theirs.parameters(), **kwargs)
    for number in range(STEPS):
        step(*rows_of(number))
        reference.zero_grad()
        rows_loss(theirs, *rows_of(number)).backward()
        reference.step()
    assert_close(values(table), theirs)


def test_rowwise_adagrad_has_one_number_for_each_row(alone: cs.CentralStorageStrategy) -> None:
    table = central(alone, torch.nn.Embedding(8, 3, sparse=True))
    optimizer = cst.optim.RowwiseAdagrad(table.parameters(), lr=0.1)
    step = stepper(table, [optimizer], rows_loss)
    w, total = values(table)["weight"].numpy().astype(np.float64), np.zeros(8)
    for number in range(20):
        step(*rows_of(number))
        gradient = np.zeros((8, 3))
        np.add.at(gradient, rows_of(number)[0], rows_of(number)[1])
        total += (gradient**2).mean(axis=1)
        w -= 0.1 * gradient / (np.sqrt(total) + 1e-10)[:, None]
    np.testing.assert_allclose(values(table)["weight"].numpy(), w, rtol=1e-5, atol=1e-6)
    (entry,) = optimizer.state_dict()["state"].values()
    assert entry["sum"].shape == (8,)
    np.testing.assert_allclose(entry["sum"].numpy(), total, rtol=1e-5)
