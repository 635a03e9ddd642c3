"""The rules of optax, of Lion and of LAMB against their definitions, written out here once more in double precision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from cs_proto.arithmetic.optimizers import defaults_of, rule_of
from cs_server.rules import RULES, Array, reference

STEPS = 12
CASES: list[tuple[str, dict[str, Any]]] = [
    ("optax.sgd", {}),
    ("optax.sgd", {"momentum": 0.9}),
    ("optax.sgd", {"momentum": 0.9, "nesterov": True}),
    ("optax.adam", {}),
    ("optax.adam", {"eps_root": 1e-6}),
    ("optax.adam", {"nesterov": True, "eps_root": 1e-6}),
    ("optax.adamw", {"weight_decay": 0.1}),
    ("optax.adamw", {"weight_decay": 0.1, "nesterov": True}),
    ("optax.adagrad", {}),
    ("optax.adagrad", {"initial_accumulator_value": 0.0, "epsilon": 0.0}),
    ("optax.rmsprop", {}),
    ("optax.rmsprop", {"eps_in_sqrt": False, "initial_accumulator_value": 1.0}),
    ("optax.rmsprop", {"momentum": 0.9, "bias_correction": True}),
    ("optax.rmsprop", {"momentum": 0.9, "nesterov": True}),
    ("optax.rmsprop", {"centered": True, "epsilon": 1e-3, "bias_correction": True}),
    ("optax.rmsprop", {"centered": True, "eps_in_sqrt": False}),
    ("optax.rmsprop", {"centered": True, "momentum": 0.5, "nesterov": True, "initial_accumulator_value": 1.0}),
    ("optax.lion", {"weight_decay": 0.1}),
    ("Lion", {"beta_1": 0.8, "beta_2": 0.95, "weight_decay": 0.1}),
]


class Formula:
    """A leaf of the parameters and of the state, transformation by transformation."""

    def __init__(self, kind: str, given: Mapping[str, Any], w: Array, slot: str) -> None:
        self.way, self.given, self.w = getattr(self, f"_{kind.rpartition('.')[2].lower()}"), given, w.copy()
        self.slot = slot
        self.state: dict[str, Array] = {}

    def moment(self, name: str, decay: float, value: Array, start: float = 0.0) -> Array:
        before = self.state.get(name, np.full_like(value, start))
        self.state[name] = (1 - decay) * value + decay * before
        return self.state[name]

    def step(self, g: Array, t: int) -> None:
        self.w = self.w + self.way(g, t)

    def trace(self, update: Array) -> Array:
        mu = self.given["momentum"]
        if not mu:
            return update
        self.state["trace"] = update + mu * self.state.get("trace", 0.0)
        return update + mu * self.state["trace"] if self.given["nesterov"] else self.state["trace"]

    def _sgd(self, g: Array, t: int) -> Array:
        return -self.given["learning_rate"] * self.trace(g)

    def _adam(self, g: Array, t: int) -> Array:
        given, b1, b2 = self.given, self.given["beta_1"], self.given["beta_2"]
        m, v = self.moment("mu", b1, g), self.moment("nu", b2, g * g)
        hat = m / (1 - b1**t)
        if given["nesterov"]:
            hat = b1 * m / (1 - b1 ** (t + 1)) + (1 - b1) * g / (1 - b1**t)
        update = hat / (np.sqrt(v / (1 - b2**t) + given["eps_root"]) + given["epsilon"])
        return -given["learning_rate"] * (update + given.get("weight_decay", 0.0) * self.w)

    _adamw = _adam

    def _adagrad(self, g: Array, t: int) -> Array:
        total = self.state.get("sum_of_squares", np.full_like(g, self.given["initial_accumulator_value"])) + g * g
        self.state["sum_of_squares"] = total
        scale = [1 / math.sqrt(each + self.given["epsilon"]) if each > 0 else 0.0 for each in total]
        return -self.given["learning_rate"] * np.array(scale) * g

    def _rmsprop(self, g: Array, t: int) -> Array:
        given, rho = self.given, self.given["rho"]
        rest = 1 - rho**t if given["bias_correction"] else 1.0
        spread = self.moment("nu", rho, g * g, given["initial_accumulator_value"]) / rest
        if given["centered"]:
            spread = spread - (self.moment("mu", rho, g) / rest) ** 2
        under, beside = (given["epsilon"], 0.0) if given["eps_in_sqrt"] else (0.0, given["epsilon"])
        return self.trace(-given["learning_rate"] * g / (np.sqrt(spread + under) + beside))

    def _lion(self, g: Array, t: int) -> Array:
        given, name = self.given, self.slot
        b1, m = given["beta_1"], self.state.get(name, np.zeros_like(g))
        update = np.sign((1 - b1) * g + b1 * m) + given["weight_decay"] * self.w
        self.moment(name, given["beta_2"], g)
        return -given["learning_rate"] * update


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-7, 1e-10])
@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_a_rule_follows_its_definition(kind: str, changes: dict[str, Any], scale: float) -> None:
    given = {**defaults_of(kind), "learning_rate": 0.01, **changes}
    rule, random = RULES[rule_of(kind, given)], np.random.default_rng(3)
    w = random.standard_normal(20)
    formula = Formula(kind, given, w, *rule.slots[:1] or [""])
    slots = tuple(np.full(20, value) for value in rule.initial(given))
    for t in range(1, STEPS + 1):
        g = scale * random.standard_normal(20)
        g[0] = 0.0
        formula.given = now = {**given, "learning_rate": 0.01 * min(1, t / 5)}
        reference(rule, w, [g / 2, g / 2], slots, now, t)
        formula.step(g, t)
        np.testing.assert_allclose(w, formula.w, rtol=1e-12)
    for name, slot in zip(rule.slots, slots, strict=True):
        np.testing.assert_allclose(slot, formula.state[name], rtol=1e-11, atol=1e-14 * np.abs(slot).max())
