"""The page about optimizers has the rules of optax, and its defaults."""

from __future__ import annotations

import inspect
import random
from typing import Any

import jax
import numpy as np
import optax
import pytest
from tests.harness.guides import HYPERPARAMETERS, rules, table, updated

import central_storage.jax as csj

_GIVEN = HYPERPARAMETERS
_ADAM = {"b1": _GIVEN["b1"], "b2": _GIVEN["b2"], "eps": _GIVEN["eps"]}
OPTAX: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD with momentum": ("sgd", {"momentum": _GIVEN["mu"]}),
    "Adam": ("adam", _ADAM),
    "AdamW": ("adamw", {**_ADAM, "weight_decay": _GIVEN["decay"]}),
    "RMSprop with momentum": ("rmsprop", {"decay": _GIVEN["rho"], "eps": _GIVEN["eps"], "momentum": _GIVEN["mu"]}),
    "Adagrad": ("adagrad", {"eps": _GIVEN["eps"], "initial_accumulator_value": 0.0}),
}
_random = random.Random(0)
GRADIENTS = [_random.uniform(-1, 1) for _ in range(8)]
RATES = [_random.uniform(0.05, 0.2) for _ in GRADIENTS]


def test_the_page_has_the_same_rules_as_this_test() -> None:
    assert rules(1).keys() == OPTAX.keys()


@pytest.mark.parametrize("rule", OPTAX)
def test_the_rule_of_optax(rule: str) -> None:
    expected = updated(rules(1)[rule], GRADIENTS, RATES, **_GIVEN)
    kind, arguments = OPTAX[rule]
    rates = jax.numpy.array(RATES)
    transformation = getattr(optax, kind)(lambda count: rates[count], **arguments)
    w = jax.numpy.ones(1)
    state = transformation.init(w)
    for gradient, value in zip(GRADIENTS, expected, strict=True):
        updates, state = transformation.update(jax.numpy.full(1, gradient), state, w)
        w = optax.apply_updates(w, updates)
        assert np.asarray(w)[0] == pytest.approx(value, rel=2e-5)  # float32


@pytest.mark.parametrize("row", table("optimizers.md", "default"), ids=lambda row: row[0].replace("`", ""))
def test_the_defaults(row: list[str]) -> None:
    what, _, of_optax, _ = row
    argument, kind = what.replace("`", "").split(" of ")
    name = {"epsilon": "eps", "rho": "decay"}.get(argument, argument)
    for package in (optax, csj.optim):
        default = inspect.signature(getattr(package, kind.lower())).parameters[name].default
        assert default == (float(of_optax) if of_optax else inspect.Parameter.empty)
