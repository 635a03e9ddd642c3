"""Schedulers of torch in the script, and their numbers ahead of time, against torch's own optimizers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.harness.services import connected
from tests.interop.torch.by_hand import central
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

import central_storage as cs
import central_storage.torch as cst
from central_storage.torch.optim.schedules import rates_ahead
from cs_proto.errors import ContextError, InvalidArgumentError


@pytest.fixture(scope="module")
def strategy() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as strategy:
        yield connected(strategy)


class Trainer:
    """Holds what no scheduler may copy."""

    def __init__(self) -> None:
        self.model = None

    def rate(self, step: int) -> float:
        return 1 / (1 + step)

    def __deepcopy__(self, memo: object) -> Any:
        raise AssertionError("copied")


class Custom(LRScheduler):
    """A user's scheduler, which also changes the weight decay and keeps a list of its own."""

    def __init__(self, optimizer: Any) -> None:
        self.seen: list[float] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        self.seen.append(self.last_epoch)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.01 * len(self.seen)
        return [base / len(self.seen) for base in self.base_lrs]


class Plain:
    """No scheduler of torch: anything with a step."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.groups, self.steps = optimizer, optimizer.param_groups, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.groups:
            group["lr"] *= 0.9


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "LambdaLR of a method": lambda o: lr_scheduler.LambdaLR(o, Trainer().rate),
    "LambdaLR by group": lambda o: lr_scheduler.LambdaLR(o, [lambda step: 0.9**step, lambda step: 1 / (step + 1)]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "CyclicLR triangular2": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, mode="triangular2"),
    "CyclicLR exp_range": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, mode="exp_range", gamma=0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.CosineAnnealingLR(o, 7)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, 0.5, 4),
    "a user's": Custom,
    "an object with a step": Plain,
    "a list": lambda o: [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)],
}
OPTIMIZERS: dict[str, Callable[[Any, Any], Any]] = {
    "SGD": lambda optim, groups: optim.SGD(groups, lr=0.1, momentum=0.9),
    "AdamW": lambda optim, groups: optim.AdamW(groups, lr=0.1),
}


def groups_of(module: torch.nn.Module) -> list[dict[str, Any]]:
    return [{"params": [module.weight]}, {"params": [module.bias], "lr": 0.05, "weight_decay": 0.1}]


def numbers(optimizer: Any) -> list[dict[str, Any]]:
    """What is in the groups beside the parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def state_of(scheduler: Any) -> Any:
    """What a scheduler remembers, but for functions and optimizers."""
    if isinstance(scheduler, list):
        return [state_of(each) for each in scheduler]
    kept = {}
    for key, value in vars(scheduler).items():
        if isinstance(value, list | tuple) and value and isinstance(value[0], LRScheduler):
            kept[key] = state_of(list(value))
        elif isinstance(value, int | float | str | list | dict) and "lambda" not in key and key != "groups":
            kept[key] = copy.copy(value)
    return kept


def step(scheduler: Any) -> None:
    for each in scheduler if isinstance(scheduler, list) else [scheduler]:
        each.step()


def plainly(kind: str, name: str, steps: int) -> tuple[list[Any], Any, Any]:
    """The groups' numbers of each step of a plain loop of torch alone; the optimizer and the scheduler after it."""
    optimizer = OPTIMIZERS[kind](torch.optim, groups_of(torch.nn.Linear(3, 2)))
    scheduler = SCHEDULERS[name](optimizer)
    seen = []
    for _ in range(steps):
        seen.append(numbers(optimizer))
        optimizer.step()
        step(scheduler)
    return seen, optimizer, scheduler


def of_server(optimizer: cst.optim.CentralOptimizer) -> list[dict[str, float]]:
    """The numbers that the server has for each group."""
    return [dict(each._current()) for each in optimizer.central]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_works_unchanged_in_the_script(strategy: cs.CentralStorageStrategy, kind: str, name: str) -> None:
    seen, torchs, schedule = plainly(kind, name, 9)
    optimizer = OPTIMIZERS[kind](cst.optim, groups_of(central(strategy, torch.nn.Linear(3, 2))))
    scheduler = SCHEDULERS[name](optimizer)
    for expected in seen:  # a warning about the order of the steps would be an error
        optimizer.push()
        assert numbers(optimizer) == expected
        assert [each["learning_rate"] for each in of_server(optimizer)] == [each["lr"] for each in expected]
        optimizer.step()
        step(scheduler)
    assert numbers(optimizer) == numbers(torchs)
    assert state_of(scheduler) == state_of(schedule)


def ahead(optimizer: Any, scheduler: Any, steps: int, taken: int, lookahead: int = 2) -> tuple[list[Any], Any]:
    """Send steps as ``run_steps`` does, and leave the loop after ``taken`` results. What was sent for each step, and
    the rates."""
    rates = rates_ahead([optimizer], scheduler)
    sent: list[Any] = []

    def send_ahead() -> None:
        while len(sent) < min(steps, done + lookahead + 1):
            sent.append([dict(next(rates[each])) for each in optimizer.central])

    for done in range(taken):  # noqa: B007  (send_ahead reads it)
        send_ahead()
        rates.taken()
    return sent, rates


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_numbers_ahead_are_those_of_a_plain_loop(strategy: cs.CentralStorageStrategy, kind: str, name: str) -> None:
    optimizer = OPTIMIZERS[kind](cst.optim, groups_of(central(strategy, torch.nn.Linear(3, 2))))
    scheduler = SCHEDULERS[name](optimizer)
    # The loop is left after five results, when seven steps have been made; another one makes the last three.
    sent, rates = ahead(optimizer, scheduler, 10, 5)
    _, torchs, schedule = plainly(kind, name, 5)
    assert numbers(optimizer) == numbers(torchs)  # in the loop, the numbers of a plain one
    assert state_of(scheduler) == state_of(schedule)
    rates.settle(7)
    _, torchs, schedule = plainly(kind, name, 7)
    assert numbers(optimizer) == numbers(torchs)
    assert state_of(scheduler) == state_of(schedule)
    more, rates = ahead(optimizer, scheduler, 3, 3)
    rates.settle(3)
    seen, torchs, schedule = plainly(kind, name, 10)
    assert numbers(optimizer) == numbers(torchs)
    assert state_of(scheduler) == state_of(schedule)
    for row, expected in zip(sent + more, seen, strict=True):
        for found, group in zip(row, expected, strict=True):
            assert found["learning_rate"] == group["lr"]
            assert found["weight_decay"] == group["weight_decay"]
            if kind == "SGD":
                assert found["momentum"] == group["momentum"]
            else:
                assert (found["beta_1"], found["beta_2"]) == group["betas"]
    optimizer.push()
    assert [each["learning_rate"] for each in of_server(optimizer)] == [each["lr"] for each in numbers(torchs)]


def test_two_optimizers_and_their_schedulers_go_ahead_together(strategy: cs.CentralStorageStrategy) -> None:
    module = central(strategy, torch.nn.Linear(3, 2))
    first, second = cst.optim.SGD([module.weight], lr=1.0), cst.optim.AdamW([module.bias], lr=1.0)
    schedulers = [lr_scheduler.ExponentialLR(first, 0.5), lr_scheduler.StepLR(second, 2, 0.1)]
    rates = rates_ahead([first, second], schedulers)
    assert list(rates) == [*first.central, *second.central]
    found = [(next(rates[first.central[0]]), next(rates[second.central[0]])) for _ in range(3)]
    assert [each["learning_rate"] for each, _ in found] == [1.0, 0.5, 0.25]
    assert [each["learning_rate"] for _, each in found] == [1.0, 1.0, 0.1]
    rates.settle(3)
    assert (first.param_groups[0]["lr"], second.param_groups[0]["lr"]) == (0.125, pytest.approx(0.1))


def test_without_a_scheduler_there_are_no_rates_and_changes_are_found(strategy: cs.CentralStorageStrategy) -> None:
    optimizer = cst.optim.SGD(central(strategy, torch.nn.Linear(3, 2)).parameters(), lr=1.0)
    rates = rates_ahead([optimizer])
    assert rates == {}
    rates.taken()
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(ContextError, match="step 2 of the loop was sent ahead with other numbers"):
        rates.taken()


@pytest.mark.parametrize("change", ["a number", "a step"])
def test_a_change_in_the_loop_is_found(strategy: cs.CentralStorageStrategy, change: str) -> None:
    optimizer = cst.optim.SGD(central(strategy, torch.nn.Linear(3, 2)).parameters(), lr=1.0)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    _, rates = ahead(optimizer, scheduler, 10, 2)
    if change == "a number":
        optimizer.param_groups[0]["lr"] = 3.0
    else:
        scheduler.step()
    with pytest.raises(ContextError, match="in a plain loop"):
        rates.taken()


def test_a_scheduler_that_depends_on_more_than_its_steps_is_found(strategy: cs.CentralStorageStrategy) -> None:
    optimizer = cst.optim.SGD(central(strategy, torch.nn.Linear(3, 2)).parameters(), lr=1.0)
    calls = []

    def counting(step: int) -> float:
        calls.append(step)
        return 1 / len(calls)

    scheduler = lr_scheduler.LambdaLR(optimizer, counting)
    with pytest.raises(ContextError, match="depends on the number of its steps alone"):
        ahead(optimizer, scheduler, 10, 5)


class Losses:
    def step(self, loss: float) -> None:
        raise AssertionError("stepped")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lr_scheduler.ReduceLROnPlateau, "ReduceLROnPlateau looks at losses"),
        (lambda o: [lr_scheduler.StepLR(o, 3), lr_scheduler.ReduceLROnPlateau(o)], "looks at losses"),
        (lambda o: Losses(), "Losses looks at losses"),
        (lambda o: 3, "a scheduler has a method step; int has none"),
        (lambda o: lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), 3), "is no optimizer of this step"),
    ],
)
def test_what_cannot_be_known_ahead_is_refused(
    strategy: cs.CentralStorageStrategy, make: Callable[[Any], Any], message: str
) -> None:
    optimizer = cst.optim.SGD(central(strategy, torch.nn.Linear(3, 2)).parameters(), lr=1.0)
    with pytest.raises(InvalidArgumentError, match=message):
        rates_ahead([optimizer], make(optimizer))


def test_reduce_on_plateau_works_in_a_plain_loop(strategy: cs.CentralStorageStrategy) -> None:
    optimizer = cst.optim.SGD(central(strategy, torch.nn.Linear(3, 2)).parameters(), lr=1.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    for loss, rate in [(1.0, 1.0), (1.0, 1.0), (1.0, 0.5), (0.5, 0.5)]:
        optimizer.push()
        optimizer.step()
        scheduler.step(loss)
        assert optimizer.param_groups[0]["lr"] == rate
    optimizer.push()
    assert of_server(optimizer)[0]["learning_rate"] == 0.5


def test_the_order_of_steps_that_torch_warns_about_is_noticed(strategy: cs.CentralStorageStrategy) -> None:
    """The warning still works: it is the script's count that silences it."""
    optimizer = cst.optim.SGD(central(strategy, torch.nn.Linear(3, 2)).parameters(), lr=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        scheduler.step()
    assert "before `optimizer.step()`" in str(found[0].message)
