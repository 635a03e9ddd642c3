"""Optimizers under ``cst.step`` and ``cst.function`` on two replicas, against torch alone on whole batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.harness.timing import unit
from tests.interop.torch.beside import batch_of, centralized, difference
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import lr_scheduler

import central_storage as cs
import central_storage.torch as cst
from cs_proto.errors import ContextError

pytestmark = pytest.mark.timeout(unit(300))
STEPS = 12


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def groups_of(module: Any) -> list[dict[str, Any]]:
    """Weights with decay, and the rest without."""
    return [
        {"params": [p for p in module.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.ndim <= 1], "lr": 0.02},
    ]


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, [0.05, 0.02], total_steps=2 * STEPS)


def trainer(model: Any, *optimizers: Any) -> Any:
    @cst.step(model, *optimizers)
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    return train


def train_alone(module: Any, optimizer: Any, scheduler: Any, batches: Any, max_norm: float | None = None) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
        scheduler.step()


def batches_of(count: int) -> list[Any]:
    return [batch_of(seed, (10, 7, 2)[seed % 3]) for seed in range(count)]


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": lambda optim, groups, **more: optim.SGD(groups, lr=0.05, momentum=0.9, **more),
    "AdamW": lambda optim, groups, **more: optim.AdamW(groups, lr=0.05, **more),
    "RMSprop": lambda optim, groups, **more: optim.RMSprop(groups, lr=0.05, momentum=0.5, eps=1e-3, **more),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_a_schedule_and_one_norm_as_torch_alone(two: cs.CentralStorageStrategy, name: str) -> None:
    model, alone = centralized(two, net())
    optimizer = OPTIMIZERS[name](cst.optim, groups_of(model), max_norm=0.5)
    schedule = one_cycle(optimizer)
    train = trainer(model, optimizer)
    for batch in batches_of(STEPS):
        train(batch)
        schedule.step()
    reference = OPTIMIZERS[name](torch.optim, groups_of(alone))
    train_alone(alone, reference, one_cycle(reference), batches_of(STEPS), 0.5)
    assert difference(model, alone) < 1e-5
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in reference.param_groups]


def test_two_epochs_here_and_two_in_torch_are_four_in_torch(two: cs.CentralStorageStrategy) -> None:
    """And back: the model's and the optimizer's state dicts go both ways."""
    batches = batches_of(STEPS)
    first, second = batches[: STEPS // 2], batches[STEPS // 2 :]
    model, alone = centralized(two, net())
    reference = torch.optim.AdamW(groups_of(alone), lr=0.05)
    train_alone(alone, reference, one_cycle(reference), batches)

    optimizer = cst.optim.AdamW(groups_of(model), lr=0.05)
    schedule, train = one_cycle(optimizer), trainer(model, optimizer)
    for batch in first:
        train(batch)
        schedule.step()
    theirs = net()
    theirs.load_state_dict(model.state_dict())
    resumed = torch.optim.AdamW(groups_of(theirs), lr=0.05)
    going_on = one_cycle(resumed)
    going_on.load_state_dict(schedule.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    train_alone(theirs, resumed, going_on, second)
    assert difference(theirs, alone) < 1e-5

    theirs = net()
    resumed = torch.optim.AdamW(groups_of(theirs), lr=0.05)
    going_on = one_cycle(resumed)
    train_alone(theirs, resumed, going_on, first)
    model.load_state_dict(theirs.state_dict())
    schedule.load_state_dict(going_on.state_dict())
    optimizer.load_state_dict(resumed.state_dict())
    for batch in second:
        train(batch)
        schedule.step()
    assert difference(model, alone) < 1e-5


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_ahead_has_the_bits_of_single_calls(two: cs.CentralStorageStrategy, name: str) -> None:
    """Also over a loop that is left by ``break``, a plain loop after it, and a loop to the end."""
    data = batches_of(STEPS)
    once, again = centralized(two, net())[0], centralized(two, net())[0]
    plain, ahead = (OPTIMIZERS[name](cst.optim, groups_of(model), max_norm=0.5) for model in (once, again))
    plainly, schedule = one_cycle(plain), one_cycle(ahead)
    train = trainer(once, plain)
    expected, rates = [], []
    for batch in data:
        expected.append(train(batch))
        plainly.step()
        rates.append(schedule_numbers(plain))

    train = trainer(again, ahead)
    batches = iter(cst.batches(two, data))
    losses = []
    for loss in train.ahead(batches, scheduler=schedule):
        losses.append(loss)
        assert schedule_numbers(ahead) == rates[len(losses) - 1]
        if len(losses) == 4:
            break
    made = schedule.last_epoch
    assert 4 <= made <= 6
    assert schedule_numbers(ahead) == rates[made - 1]
    losses += [None] * (made - 4)
    losses.append(train(next(batches)))
    schedule.step()
    for loss in train.ahead(batches, scheduler=schedule):
        losses.append(loss)
    assert [loss for loss in losses if loss is not None] == [
        value for value, loss in zip(expected, losses, strict=True) if loss is not None
    ]
    assert difference(once, again) == 0
    assert schedule_numbers(ahead) == rates[-1]
    assert schedule.state_dict() == plainly.state_dict()


def schedule_numbers(optimizer: Any) -> list[Any]:
    keys = ("lr", "betas", "momentum")
    return [tuple(group[key] for key in keys if key in group) for group in optimizer.param_groups]


def test_a_change_within_a_loop_of_ahead_is_an_error(two: cs.CentralStorageStrategy) -> None:
    model, _ = centralized(two, net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)
    train = trainer(model, optimizer)
    losses = train.ahead(cst.batches(two, batches_of(5)))
    next(losses)
    optimizer.param_groups[0]["lr"] = 0.01
    with pytest.raises(ContextError, match="was sent ahead with other numbers"):
        next(losses)
    train(batch_of(0, 4))  # it works, with the new rate
    assert float(optimizer.central[0].learning_rate) == 0.01


def test_what_is_changed_between_steps_holds_for_the_next(two: cs.CentralStorageStrategy) -> None:
    """A rate, a bound, and a group that is added when the function has been sent."""
    model, alone = centralized(two, net())
    optimizer = cst.optim.SGD(model[0].parameters(), lr=0.1)
    reference = torch.optim.SGD(alone[0].parameters(), lr=0.1)
    train = trainer(model, optimizer)
    bound = None
    for number, (x, y) in enumerate(batches_of(6)):
        if number == 2:
            for each in (optimizer, reference):
                each.param_groups[0]["lr"] = 0.5
        if number == 3:
            for each, module in ((optimizer, model), (reference, alone)):
                each.add_param_group({"params": list(module[2].parameters()), "lr": 0.2})
        if number == 4:
            bound = optimizer.max_norm = 0.1
        train((x, y))
        reference.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        if bound is not None:
            nn.utils.clip_grad_norm_(alone.parameters(), bound)
        reference.step()
    assert difference(model, alone) < 1e-6


def test_the_body_of_a_loop_with_a_closure(two: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(two, net())
    optimizer, reference = cst.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(alone.parameters(), lr=0.1)

    def body(module: Any, optimizer: Any, x: Any, y: Any) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(module(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    @cst.function(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        return body(model, optimizer, x, y)

    for x, y in batches_of(3):
        assert train((x, y)) == pytest.approx(body(alone, reference, x, y).item(), abs=1e-6)
    assert difference(model, alone) < 1e-6


def test_a_replica_reads_the_numbers_of_its_step(two: cs.CentralStorageStrategy) -> None:
    model, _ = centralized(two, net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.5)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)

    @cst.function(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> Any:
        before = optimizer.param_groups[0]["lr"]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        return before, optimizer.param_groups[0]["lr"]

    for expected in (0.5, 0.25, 0.125):
        assert train(batch_of(0, 6)) == (expected, expected)
        schedule.step()


@pytest.mark.parametrize("what", ["a number", "a scheduler"])
def test_a_change_of_numbers_in_a_replica_is_found(two: cs.CentralStorageStrategy, what: str) -> None:
    """It would have no effect: a loop's body may hold a line that sets the rate, or steps a scheduler."""
    model, _ = centralized(two, net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.5)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    @cst.function(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor, spoil: bool) -> None:
        if what == "a number" and spoil:
            optimizer.param_groups[0]["lr"] = 0.25
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if what == "a scheduler" and spoil:
            optimizer._opt_called = True
            schedule._step_count = 2
            schedule.step()

    if what == "a scheduler":
        train(batch_of(0, 6), spoil=True)  # its change would hold for the next step
    before = model.state_dict()
    with pytest.raises(ContextError, match=r"SGD group 0: lr became 0\.25 in a replica, where that has no effect"):
        train(batch_of(1, 6), spoil=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    train(batch_of(1, 6), spoil=False)


def test_a_grad_scaler_in_a_replica_is_an_error_that_changes_nothing(two: cs.CentralStorageStrategy) -> None:
    model, alone = centralized(two, net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.5)

    @cst.function(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)

    with pytest.raises(ContextError, match="does not work with an enabled GradScaler"):
        train(batch_of(0, 6))
    assert difference(model, alone) == 0


def test_changes_travel_with_the_call(two: cs.CentralStorageStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many groups have changed, no message of their own; a call that fails sends them again."""
    model, alone = centralized(two, net())
    optimizer = cst.optim.SGD(groups_of(model), lr=0.5)
    reference = torch.optim.SGD(groups_of(alone), lr=0.5)

    @cst.step(model, optimizer)
    def train(x: torch.Tensor, y: torch.Tensor, fail: bool) -> torch.Tensor:
        if fail:
            raise KeyError("no")
        return F.cross_entropy(model(x), y)

    monkeypatch.setattr(type(optimizer.central[0]), "assign", None)
    for number, (x, y) in enumerate(batches_of(4)):
        for each in (optimizer, reference):
            for group in each.param_groups:
                group["lr"] *= 0.5
        if number == 2:
            with pytest.raises(KeyError):
                train((x, y), fail=True)
        train((x, y), fail=False)
        reference.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        reference.step()
        assert [float(each.learning_rate) for each in optimizer.central] == [
            group["lr"] for group in reference.param_groups
        ]
    assert difference(model, alone) < 1e-6


def test_hooks_are_called_once_a_step_in_the_script(two: cs.CentralStorageStrategy) -> None:
    model, _ = centralized(two, net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.5)
    calls = itertools.count()
    optimizer.register_step_post_hook(lambda *given: next(calls))
    train = trainer(model, optimizer)
    for batch in batches_of(3):
        train(batch)
    for _ in train.ahead(cst.batches(two, batches_of(4))):
        pass
    assert next(calls) == 7
