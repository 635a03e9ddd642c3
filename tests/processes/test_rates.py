"""Hyperparameters given ahead of time: the bits of assigning before each run, in the order of the steps, and once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.replicas import replica

import central_storage as cs
from central_storage.optimizers import schedules
from cs_proto.errors import ContextError, InvalidArgumentError
from cs_runtime.failpoints import FAILPOINTS

PLACES = [name for name in FAILPOINTS if name.startswith("server.") and name not in ("server.pass", "server.looked")]

F32 = np.float32
STEPS = 8
RATES = [0.1 / (k + 1) for k in range(STEPS)]
BETAS: list[Any] = [{"learning_rate": r, "beta_1": 0.9 - k / 100} if k % 2 else r for k, r in enumerate(RATES)]


class Model:
    """Two optimizers, of which one changes more than its rate."""

    def __init__(self, strategy: cs.CentralStorageStrategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.v, self.w = cs.Variable(np.ones(50, F32)), cs.Variable(np.ones(9, F32))
            self.sgd, self.adam = cs.optimizers.SGD(7.0), cs.optimizers.Adam(7.0)

    def step(self, k: Any) -> float:
        random = np.random.default_rng([int(np.ravel(k)[0]), replica()])
        before = float(self.sgd.learning_rate)
        pairs = [(random.standard_normal(50).astype(F32), self.v)]
        others = [(random.standard_normal(9).astype(F32), self.w)]
        cs.optimizers.apply_gradients([(self.sgd, pairs), (self.adam, others)])
        return before

    def data(self, steps: int = STEPS) -> Any:
        return self.strategy.experimental_distribute_dataset([np.full(2, k) for k in range(steps)])

    @property
    def rates(self) -> dict[Any, Any]:
        return {self.sgd: RATES, self.adam: iter(BETAS)}

    @property
    def state(self) -> list[Any]:
        numbers = [dict(o.get_config()) for o in (self.sgd, self.adam)]
        counts = [int(o.iterations) for o in (self.sgd, self.adam)]
        return [self.v.numpy().tobytes(), self.w.numpy().tobytes(), numbers, counts]

    def assigned(self, steps: int = STEPS) -> list[Any]:
        """What assigning before each run leaves."""
        for k in range(steps):
            self.sgd.learning_rate = RATES[k]
            given = BETAS[k] if isinstance(BETAS[k], dict) else {"learning_rate": BETAS[k]}
            for name, value in given.items():
                setattr(self.adam, name, value)
            self.strategy.run(self.step, (np.full(2, k),))
        return self.state


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        return Model(strategy).assigned()


@pytest.mark.parametrize("lookahead", [0, 1, 2, 7])
def test_they_have_the_bits_of_assigning_before_each_run(
    lookahead: int, two: cs.CentralStorageStrategy, expected: list[Any]
) -> None:
    model = Model(two)
    seen = [
        two.experimental_local_results(result)
        for result in two.run_steps(model.step, model.data(), lookahead=lookahead, rates=model.rates)
    ]
    assert seen == [(rate, rate) for rate in RATES]  # a replica reads the numbers of its step
    assert model.state == expected


def test_in_threads_and_beside_other_operations(two: cs.CentralStorageStrategy, expected: list[Any]) -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        model = Model(strategy)
        for _ in strategy.run_steps(model.step, model.data(), rates=model.rates):
            pass
        assert model.state == expected
    model = Model(two)
    for k, _ in enumerate(two.run_steps(model.step, model.data(), rates=model.rates)):
        assert float(model.sgd.learning_rate) == RATES[min(k + 2, STEPS - 1)]  # of the last step that has begun
        if k == 3:
            two.run(lambda: None)
    assert model.state == expected


def test_an_assignment_in_the_loop_holds_for_what_no_item_names(two: cs.CentralStorageStrategy) -> None:
    model = Model(two)
    rates = [{"learning_rate": 0.1}] * STEPS
    for k, _ in enumerate(two.run_steps(model.step, model.data(), rates={model.adam: rates})):
        if k == 2:
            model.adam.beta_2 = 0.5
    assert (float(model.adam.beta_2), float(model.adam.learning_rate)) == (0.5, 0.1)


def test_after_break_the_numbers_are_those_of_the_last_step_that_began(two: cs.CentralStorageStrategy) -> None:
    model, other = Model(two), Model(two)
    read: list[float] = []

    def rates() -> Iterator[float]:
        for rate in RATES:
            read.append(rate)
            yield rate

    with two.run_steps(model.step, model.data(), rates={model.sgd: rates(), model.adam: BETAS}) as loop:
        next(loop)
        next(loop)
    assert (loop.steps, read) == (4, RATES[:4])  # two for the loop, and two ahead
    assert float(model.sgd.learning_rate) == RATES[3]
    assert model.state == other.assigned(4)
    model.adam.epsilon = 0.5  # what the handle knows of itself has followed
    assert repr(model.sgd) == repr(other.sgd)


def test_items_of_steps_that_never_begin_have_no_effect(two: cs.CentralStorageStrategy) -> None:
    model = Model(two)

    def step(k: Any) -> float:
        if k[0] == 2:
            raise ValueError("step 2")
        return model.step(k)

    loop = two.run_steps(step, model.data(), lookahead=3, rates=model.rates)
    with pytest.raises(ValueError, match="step 2"):
        for _ in loop:
            pass
    assert (float(model.sgd.learning_rate), int(model.sgd.iterations)) == (RATES[2], 2)
    assert float(model.adam.beta_1) == BETAS[1]["beta_1"]


def test_too_few_items_are_an_error_before_the_step(two: cs.CentralStorageStrategy) -> None:
    model, other = Model(two), Model(two)
    data = iter(model.data())
    loop = two.run_steps(model.step, data, rates={model.sgd: RATES[:3], model.adam: BETAS})
    for _ in range(3):
        next(loop)
    with pytest.raises(InvalidArgumentError, match="the rates of SGD end after 3 items; run_steps needs one for each"):
        next(loop)
    assert model.state == other.assigned(3)
    assert np.ravel(next(data).values[0]).tolist() == [3]  # its element was given back


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("fast", "SGD: learning_rate must be a finite number"),
        (np.nan, "SGD: learning_rate must be a finite number"),
        ({"momentum": 0.5}, "the optimizer was made with momentum 0"),
        ({"beta_1": 0.5}, "SGD has no hyperparameter 'beta_1'"),
        ({"nesterov": True}, "nesterov was fixed"),
    ],
)
def test_an_item_that_does_not_fit_is_an_error_before_the_step(
    item: Any, message: str, two: cs.CentralStorageStrategy
) -> None:
    model = Model(two)
    with pytest.raises(InvalidArgumentError, match=message):
        for _ in two.run_steps(model.step, model.data(), rates={model.sgd: [0.5, item]}):
            pass
    assert (float(model.sgd.learning_rate), int(model.sgd.iterations)) == (0.5, 1)


def test_what_cannot_be_given_rates_is_refused_at_once(two: cs.CentralStorageStrategy) -> None:
    model = Model(two)
    with two.scope():
        scheduled = cs.optimizers.SGD(schedules.ExponentialDecay(0.1, 10, 0.5))
        called = cs.optimizers.Adam(lambda step: 0.1)
    with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
        foreign = cs.optimizers.SGD(0.1)
    cases: list[tuple[Any, type[Exception], str]] = [
        ({scheduled: RATES}, InvalidArgumentError, "SGD has a schedule of its own"),
        ({called: RATES}, InvalidArgumentError, "Adam has a schedule of its own"),
        ({foreign: RATES}, ContextError, "another strategy"),
        ({model.sgd: 0.5}, TypeError, "the rates of SGD must be an iterable with an item for each step, not 0.5"),
        ({"sgd": RATES}, TypeError, "'sgd' is none"),
        (RATES, TypeError, "rates must be a mapping of optimizers to iterables, not a list"),
    ]
    for rates, kind, message in cases:
        with pytest.raises(kind, match=message):
            two.run_steps(model.step, model.data(), rates=rates)


def test_a_schedule_that_is_assigned_in_the_loop_ends_it(two: cs.CentralStorageStrategy) -> None:
    model = Model(two)
    loop = two.run_steps(model.step, model.data(), rates={model.sgd: RATES})
    next(loop)
    model.sgd.learning_rate = schedules.ExponentialDecay(0.1, 10, 0.5)
    assert len([next(loop), next(loop)]) == 2  # they had been sent
    with pytest.raises(InvalidArgumentError, match="SGD has a schedule of its own"):
        next(loop)


def test_an_optimizer_without_a_strategy_is_taken_along(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        w = cs.Variable(np.zeros(1, F32))
    sgd = cs.optimizers.SGD(7.0)
    data = two.experimental_distribute_dataset([np.zeros(2)] * 3)
    for _ in two.run_steps(lambda _: sgd.apply_gradients([(np.ones(1, F32), w)]), data, rates={sgd: [1, 2, 3.0]}):
        pass
    assert w.numpy().tolist() == [-12.0]


def test_the_default_strategy_has_them_too() -> None:
    sgd, seen = cs.optimizers.SGD(7.0), []
    data = cs.get_strategy().experimental_distribute_dataset(cs.data.Dataset.range(3))
    for _ in cs.get_strategy().run_steps(lambda _: seen.append(float(sgd.learning_rate)), data, rates={sgd: RATES}):
        pass
    assert seen == RATES[:3]


def test_without_lookahead_a_run_may_follow(two: cs.CentralStorageStrategy, expected: list[Any]) -> None:
    """Half of the steps by a loop, the others by ``run``."""
    model = Model(two)
    half = STEPS // 2
    for _ in two.run_steps(model.step, model.data(), half, lookahead=0, rates=model.rates):
        pass
    for k in range(half, STEPS):
        model.sgd.learning_rate = RATES[k]
        given = BETAS[k] if isinstance(BETAS[k], dict) else {"learning_rate": BETAS[k]}
        for name, value in given.items():
            setattr(model.adam, name, value)
        two.run(model.step, (np.full(2, k),))
    assert model.state == expected


class Mortal(Model):
    """Its workers or its server die at some steps, once each."""

    def __init__(self, strategy: cs.CentralStorageStrategy, path: Path, kill: Callable[[Path, int], None]) -> None:
        super().__init__(strategy)
        self.path, self.kill = str(path), kill

    def mortal_step(self, k: Any) -> float:
        number = int(np.ravel(k)[0])
        result = self.step(k)
        self.kill(Path(self.path), number)
        return result


def kill_worker(path: Path, number: int) -> None:
    once = path / f"{number}.{replica()}"
    if number in (1, 4, 5) and replica() == number % 2 and not once.exists():
        once.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_repeated_step_has_its_numbers_and_brings_them_once(
    mortal: cs.CentralStorageStrategy, tmp_path: Path, expected: list[Any]
) -> None:
    model = Mortal(mortal, tmp_path, kill_worker)
    for _ in mortal.run_steps(model.mortal_step, model.data(), rates=model.rates):
        pass
    assert len(list(tmp_path.iterdir())) == 3
    assert model.state == expected


@pytest.mark.parametrize("lookahead", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_server_that_is_killed_at_every_place(
    lookahead: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[Any]
) -> None:
    items = [f"{place}=kill@{3 + n}" for n, place in enumerate(PLACES)]
    monkeypatch.setenv("CS_FAILPOINTS", ";".join(items))
    monkeypatch.setenv("CS_FAILPOINTS_DIR", str(tmp_path))
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], max_restarts=1000) as strategy:
        model = Model(strategy)
        for _ in strategy.run_steps(model.step, model.data(), lookahead=lookahead, rates=model.rates):
            pass
        assert model.state == expected
    assert {path.name for path in tmp_path.iterdir()} >= set(items[1:3])
