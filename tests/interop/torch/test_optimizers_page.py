"""The page about optimizers has the rules of torch and of TensorFlow, their defaults, and how far they lie apart."""

from __future__ import annotations

import inspect
import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.guides import HYPERPARAMETERS, rules, table, updated

import central_storage as cs
import central_storage.torch as cst

_GIVEN = HYPERPARAMETERS
_BETAS = (_GIVEN["b1"], _GIVEN["b2"])
#: The arguments of torch's classes, and those of ours with TensorFlow's rules.
TORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD with momentum": ("SGD", {"momentum": _GIVEN["mu"]}),
    "Adam": ("Adam", {"betas": _BETAS, "eps": _GIVEN["eps"]}),
    "AdamW": ("AdamW", {"betas": _BETAS, "eps": _GIVEN["eps"], "weight_decay": _GIVEN["decay"]}),
    "RMSprop with momentum": ("RMSprop", {"alpha": _GIVEN["rho"], "eps": _GIVEN["eps"], "momentum": _GIVEN["mu"]}),
    "Adagrad": ("Adagrad", {"eps": _GIVEN["eps"]}),
}
_KERAS_ADAM = {"beta_1": _GIVEN["b1"], "beta_2": _GIVEN["b2"], "epsilon": _GIVEN["eps"]}
TENSORFLOW: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD with momentum": ("SGD", {"momentum": _GIVEN["mu"]}),
    "Adam": ("Adam", _KERAS_ADAM),
    "AdamW": ("AdamW", {**_KERAS_ADAM, "weight_decay": _GIVEN["decay"]}),
    "RMSprop with momentum": ("RMSprop", {"rho": _GIVEN["rho"], "epsilon": _GIVEN["eps"], "momentum": _GIVEN["mu"]}),
    "Adagrad": ("Adagrad", {"epsilon": _GIVEN["eps"], "initial_accumulator_value": 0.0}),
}
_random = random.Random(0)
GRADIENTS = [_random.uniform(-1, 1) for _ in range(8)]
RATES = [_random.uniform(0.05, 0.2) for _ in GRADIENTS]


def test_the_page_has_the_same_rules_as_this_test() -> None:
    assert rules(0).keys() == rules(2).keys() == TORCH.keys() == TENSORFLOW.keys()


@pytest.mark.parametrize("rule", TORCH)
def test_the_rule_of_torch(rule: str) -> None:
    expected = updated(rules(0)[rule], GRADIENTS, RATES, **_GIVEN)
    kind, arguments = TORCH[rule]
    w = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = getattr(torch.optim, kind)([w], **arguments)
    for gradient, rate, value in zip(GRADIENTS, RATES, expected, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        w.grad = torch.full_like(w, gradient)
        optimizer.step()
        assert w.item() == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("rule", TENSORFLOW)
def test_the_rule_of_tensorflow(rule: str) -> None:
    expected = updated(rules(2)[rule], GRADIENTS, RATES, **_GIVEN)
    kind, arguments = TENSORFLOW[rule]
    with cs.CentralStorageStrategy(in_process=True) as strategy:
        with strategy.scope():
            w = cs.Variable(np.ones(1))
            optimizer = getattr(cs.optimizers, kind)(**arguments)
        for gradient, rate, value in zip(GRADIENTS, RATES, expected, strict=True):
            optimizer.learning_rate = rate
            strategy.run(lambda g: optimizer.apply_gradients([(np.full(1, g), w)]), (gradient,))
            assert w.numpy()[0] == pytest.approx(value, rel=1e-6)  # the rate is a float32


@pytest.mark.parametrize("row", table("optimizers.md", "default"), ids=lambda row: row[0].replace("`", ""))
def test_the_defaults(row: list[str]) -> None:
    what, of_torch, _, of_tensorflow = row
    argument, kind = what.replace("`", "").split(" of ")
    of_ours = inspect.signature(getattr(cs.optimizers, kind)).parameters[argument].default
    assert of_ours == float(of_tensorflow)
    names = {"epsilon": "eps", "rho": "alpha", "learning_rate": "lr"}
    of_theirs = getattr(torch.optim, kind)([torch.nn.Parameter(torch.ones(1))])
    assert of_theirs.defaults[names.get(argument, argument)] == float(of_torch)
    assert issubclass(getattr(cst.optim, kind), type(of_theirs))


@pytest.mark.parametrize("row", table("optimizers.md", "rule | gradient 1"), ids=lambda row: row[0])
def test_how_far_the_rules_lie_apart(row: list[str]) -> None:
    rule, *shown = row
    given = {
        "SGD with momentum": {"lr": 0.1, "mu": 0.9},
        "Adam": {"lr": 1e-3, "eps": 1e-8, "b1": 0.9, "b2": 0.999},
        "RMSprop with momentum": {"lr": 0.01, "eps": 1e-8, "rho": 0.99, "mu": 0.9},
        "Adagrad": {"lr": 0.01, "eps": 1e-10},
    }[rule]
    rate = given.pop("lr")
    constant, rising = [rate] * 30, [rate * t / 30 for t in range(1, 31)]
    cases = [(1.0, constant), (1e-3, constant), (1e-7, constant), (1e-10, constant), (1.0, rising)]
    for (gradient, rates), number in zip(cases, shown, strict=True):
        theirs, ours = (updated(rules(library)[rule], [gradient] * 30, rates, 0.0, **given)[-1] for library in (0, 2))
        assert float(number) == pytest.approx(ours / theirs - 1, rel=0.1, abs=1e-9)
