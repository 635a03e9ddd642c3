"""The numbers of an optimizer follow it wherever they are kept."""

from __future__ import annotations

import copy
import math
import operator
from typing import Any

import numpy as np
import pytest

import central_storage as cs
from cs_proto.errors import InvalidArgumentError


@pytest.fixture
def adam() -> Any:
    return cs.optimizers.Adam(0.5)


def test_a_kept_count_follows(adam: Any) -> None:
    kept, seen = adam.iterations, []
    while kept < 3:
        seen.append(int(kept))
        adam.iterations = kept + 1
    assert seen == [0, 1, 2]
    assert (kept.numpy(), kept.value(), kept.read_value()) == (3, 3, 3)
    assert (kept.numpy().dtype, kept.dtype, kept.shape, kept.trainable) == (np.int64, np.int64, (), False)
    assert kept.name == "Adam/iterations"


def test_a_kept_hyperparameter_follows(adam: Any) -> None:
    rate, beta = adam.lr, adam.beta_1
    adam.learning_rate = 0.25
    adam.beta_1 = 0.75
    assert (float(rate), float(beta), rate.numpy(), rate.dtype) == (0.25, 0.75, 0.25, np.float64)
    assert rate.assign(0.125) is rate
    assert adam.lr == adam.learning_rate == 0.125
    assert (adam.amsgrad, adam.clipnorm) == (False, None)


@pytest.mark.parametrize(
    "name",
    [
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "lt",
        "le",
        "gt",
        "ge",
        "eq",
        "ne",
        "and_",
        "or_",
        "xor",
    ],
)
def test_operators_are_those_of_the_number(name: str, adam: Any) -> None:
    adam.iterations = 7
    do = getattr(operator, name)
    for other in (3, 7, 11):
        assert do(adam.iterations, other) == do(7, other)
        assert do(other, adam.iterations) == do(other, 7)
        assert type(do(adam.iterations, other)) is type(do(7, other))
    assert do(adam.iterations, adam.iterations) == do(7, 7)


def test_it_is_a_number_to_python(adam: Any) -> None:
    adam.iterations = count = 5
    it = adam.iterations
    assert (int(it), float(it), complex(it), bool(it), -it, +it, abs(it)) == (5, 5.0, 5 + 0j, True, -5, 5, 5)
    assert (round(it), math.floor(it), math.ceil(it), math.trunc(it), math.sqrt(it + 4)) == (5, 5, 5, 5, 3)
    assert (list(range(it)), "abcdefg"[it], [0] * it) == ([0, 1, 2, 3, 4], "f", [0] * 5)
    assert (f"{it:03d}", str(it), repr(it), divmod(it, 2)) == ("005", "5", "5", (2, 1))
    assert (1 << it, it >> 1, it == count, it != count) == (32, 2, True, False)
    assert f"{adam.beta_1:.2f}" == "0.90"
    assert not cs.optimizers.Adam().iterations
    with pytest.raises(TypeError):
        operator.index(adam.lr)
    with pytest.raises(ZeroDivisionError):
        _ = 1 / cs.optimizers.SGD().iterations


def test_it_is_a_number_to_numpy(adam: Any) -> None:
    adam.iterations = 4
    it, rows = adam.iterations, np.ones(2, np.float32)
    for found in (rows * it, it * rows, rows * adam.lr, np.multiply(rows, it), np.float32(2) * adam.lr):
        assert found.dtype == np.float32
    assert np.asarray(it).dtype == np.int64
    assert np.asarray(it, np.float32).dtype == np.float32
    assert (np.sqrt(it), np.array([it, 1]).tolist(), np.arange(9)[it]) == (2, [4, 1], 4)
    assert (rows * 4 == it).all()


def test_it_is_assigned_as_a_variable_is(adam: Any) -> None:
    assert int(adam.iterations.assign(7)) == 7
    assert int(adam.iterations.assign_add(2)) == 9
    assert int(adam.iterations.assign_sub(1)) == 8
    adam.iterations = adam.iterations
    assert adam.iterations == 8
    with pytest.raises(InvalidArgumentError, match="at least 0"):
        adam.iterations.assign(-1)
    with pytest.raises(TypeError):
        adam.iterations = 1.5
    with pytest.raises(TypeError, match="cannot follow variable Variable; for its present value, assign int"):
        adam.iterations = cs.Variable(3)
    other = cs.optimizers.SGD(adam.lr)
    adam.lr = 0.25
    assert (other.learning_rate, adam.lr) == (0.5, 0.25)


def test_what_would_silently_let_go_is_refused(adam: Any) -> None:
    kept = step = adam.iterations
    step += 1
    with pytest.raises(RuntimeError, match=r"Adam/iterations a number that no longer follows .* int\(x\)"):
        _ = step < 3
    assert "assign_add" in repr(step)
    adam.iterations += 2
    adam.lr *= 0.5
    assert (kept, adam.iterations, adam.learning_rate) == (2, 2, 0.25)
    with pytest.raises(TypeError, match=r"Adam/iterations changes, so it cannot be a key; use int\(x\)"):
        _ = {adam.iterations: 1}
    assert copy.copy(kept) == kept


def test_a_schedule_takes_it(adam: Any) -> None:
    decay = cs.optimizers.schedules.InverseTimeDecay(1.0, 1, 1.0)
    adam.iterations = 3
    assert decay(adam.iterations) == 0.25
    adam.learning_rate = lambda: 1 / (1 + adam.iterations)
    assert adam.get_config()["learning_rate"] is adam.learning_rate


def test_it_follows_the_server_and_into_replicas() -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        with strategy.scope():
            w, sgd = cs.Variable(np.zeros(2, np.float32)), cs.optimizers.SGD(0.5)
        it, rate = sgd.iterations, sgd.lr
        average = cs.train.ExponentialMovingAverage(0.9, num_updates=it)

        def step(given: Any) -> Any:
            before = int(given)
            sgd.apply_gradients([(np.ones(2, np.float32), w)])
            return before, given, it, rate * 2, {"rate": rate}

        for count in range(2):
            assert strategy.run(step, (it,))[:3] == (count, count + 1, count + 1)
            assert it == count + 1
        rate.assign(0.25)
        _, _, _, doubled, kept = strategy.run(step, (it,))
        assert strategy.experimental_local_results(doubled) == (0.5, 0.5)
        assert strategy.experimental_local_results(kept["rate"]) == (0.25, 0.25)
        strategy.run(lambda: average.apply([w]))
        assert average._num_updates is it
        with pytest.raises(cs.errors.ContextError, match="iterations can be set only in the script"):
            strategy.run(lambda: it.assign(0))
        with pytest.raises(TypeError, match="cannot be pickled"):
            copy.deepcopy(it)
