"""The rules of torch.optim against the algorithms of its documentation, written out here once more in double
precision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from cs_proto.arithmetic.optimizers import defaults_of, rule_of
from cs_server.rules import RULES, Array, reference
from cs_server.rules.torch import _product

STEPS = 12
ALL = {"weight_decay": 0.1, "maximize": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", ALL),
    ("SGD", {"momentum": 0.9}),
    ("SGD", {"momentum": 0.9, "dampening": 0.3, **ALL}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "dampening": 0.3, **ALL}),
    ("Adam", {}),
    ("Adam", ALL),
    ("Adam", {"amsgrad": True, "beta_2": 0.5}),
    ("Adam", {"decoupled_weight_decay": True, **ALL}),
    ("Adam", {"beta_1": 0.0}),
    ("AdamW", {}),
    ("AdamW", {"amsgrad": True, "beta_2": 0.5, **ALL}),
    ("SparseAdam", {"maximize": True}),
    ("RMSprop", ALL),
    ("RMSprop", {"momentum": 0.9, **ALL}),
    ("RMSprop", {"centered": True, **ALL}),
    ("RMSprop", {"centered": True, "momentum": 0.9, **ALL}),
    ("Adamax", ALL),
    ("NAdam", ALL),
    ("NAdam", {"decoupled_weight_decay": True, "momentum_decay": 0.1, **ALL}),
    ("RAdam", ALL),
    ("RAdam", {"decoupled_weight_decay": True, "beta_2": 0.9, **ALL}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5, **ALL}),
    ("Adadelta", ALL),
]


class Formula:
    """A parameter and its state, as torch's documentation writes the algorithms."""

    def __init__(self, kind: str, given: Mapping[str, Any], w: Array) -> None:
        self.kind, self.given, self.w = kind, given, w.copy()
        self.state: dict[str, Array] = {}
        self.mus = 1.0

    def moment(self, name: str, decay: float, value: Array, start: float = 0.0) -> Array:
        before = self.state.get(name, np.full_like(value, start))
        self.state[name] = decay * before + (1 - decay) * value
        return self.state[name]

    def step(self, g: Array, t: int) -> None:
        given, lr = self.given, self.given["learning_rate"]
        if given.get("maximize"):
            g = -g
        decay = given.get("weight_decay", 0.0)
        if self.kind == "AdamW" or given.get("decoupled_weight_decay"):
            self.w = self.w - lr * decay * self.w
        else:
            g = g + decay * self.w
        self.w = self.w - lr * getattr(self, self.kind.lower().removesuffix("w"))(g, t)

    def sgd(self, g: Array, t: int) -> Array:
        mu = self.given["momentum"]
        if not mu:
            return g
        kept = self.state.get("momentum_buffer")
        b = self.state["momentum_buffer"] = g if kept is None else mu * kept + (1 - self.given["dampening"]) * g
        return g + mu * b if self.given["nesterov"] else b

    def _moments(self, g: Array) -> tuple[Array, Array]:
        given = self.given
        return self.moment("exp_avg", given["beta_1"], g), self.moment("exp_avg_sq", given["beta_2"], g * g)

    def adam(self, g: Array, t: int) -> Array:
        m, v = self._moments(g)
        if self.given["amsgrad"]:
            v = self.state["max_exp_avg_sq"] = np.maximum(self.state.get("max_exp_avg_sq", 0.0), v)
        hat = v / (1 - self.given["beta_2"] ** t)
        return m / (1 - self.given["beta_1"] ** t) / (np.sqrt(hat) + self.given["epsilon"])

    def sparseadam(self, g: Array, t: int) -> Array:
        m, v = self._moments(g)
        corrected = math.sqrt(1 - self.given["beta_2"] ** t) / (1 - self.given["beta_1"] ** t)
        return corrected * m / (np.sqrt(v) + self.given["epsilon"])

    def rmsprop(self, g: Array, t: int) -> Array:
        spread = self.moment("square_avg", self.given["rho"], g * g)
        if self.given["centered"]:
            spread = spread - self.moment("grad_avg", self.given["rho"], g) ** 2
        x = g / (np.sqrt(spread) + self.given["epsilon"])
        if not self.given["momentum"]:
            return x
        self.state["momentum_buffer"] = self.given["momentum"] * self.state.get("momentum_buffer", 0.0) + x
        return self.state["momentum_buffer"]

    def adamax(self, g: Array, t: int) -> Array:
        m = self.moment("exp_avg", self.given["beta_1"], g)
        u = np.maximum(self.given["beta_2"] * self.state.get("exp_inf", 0.0), np.abs(g) + self.given["epsilon"])
        self.state["exp_inf"] = u
        return m / (1 - self.given["beta_1"] ** t) / u

    def nadam(self, g: Array, t: int) -> Array:
        m, v = self._moments(g)
        mu, following = (
            self.given["beta_1"] * (1 - 0.5 * 0.96 ** (step * self.given["momentum_decay"])) for step in (t, t + 1)
        )
        self.mus *= mu
        hat = following * m / (1 - self.mus * following) + (1 - mu) * g / (1 - self.mus)
        return hat / (np.sqrt(v / (1 - self.given["beta_2"] ** t)) + self.given["epsilon"])

    def radam(self, g: Array, t: int) -> Array:
        m, v = self._moments(g)
        b2 = self.given["beta_2"]
        longest = 2 / (1 - b2) - 1
        length = longest - 2 * t * b2**t / (1 - b2**t)
        hat = m / (1 - self.given["beta_1"] ** t)
        if length <= 5:
            return hat
        r = math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))
        return hat * r * math.sqrt(1 - b2**t) / (np.sqrt(v) + self.given["epsilon"])

    def adagrad(self, g: Array, t: int) -> Array:
        start = self.given["initial_accumulator_value"]
        self.state["sum"] = self.state.get("sum", start) + g * g
        return g / (1 + (t - 1) * self.given["lr_decay"]) / (np.sqrt(self.state["sum"]) + self.given["epsilon"])

    def adadelta(self, g: Array, t: int) -> Array:
        v = self.moment("square_avg", self.given["rho"], g * g)
        delta = np.sqrt(self.state.get("acc_delta", 0.0) + self.given["epsilon"]) / np.sqrt(v + self.given["epsilon"])
        self.moment("acc_delta", self.given["rho"], (delta * g) ** 2)
        return delta * g


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-7, 1e-10])
@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_a_rule_follows_the_documentation_of_torch(kind: str, changes: dict[str, Any], scale: float) -> None:
    given = {**defaults_of(f"torch.{kind}"), **changes}
    rule, random = RULES[rule_of(f"torch.{kind}", given)], np.random.default_rng(3)
    w = random.standard_normal(20)
    formula = Formula(kind, given, w)
    slots = tuple(np.full(20, value) for value in rule.initial(given))
    for t in range(1, STEPS + 1):
        g = scale * random.standard_normal(20)
        formula.given = now = {**given, "learning_rate": given["learning_rate"] * min(1, t / 5)}
        reference(rule, w, [g / 2, g / 2], slots, now, t)
        formula.step(g, t)
        np.testing.assert_allclose(w, formula.w, rtol=1e-12)
    for name, slot in zip(rule.slots, slots, strict=True):
        np.testing.assert_allclose(slot, formula.state[name], rtol=1e-11, atol=1e-14 * np.abs(slot).max())


def test_a_momentum_of_zero_leaves_the_buffer_alone() -> None:
    for kind in ("SGD", "RMSprop"):
        given = {**defaults_of(f"torch.{kind}"), "momentum": 0.9, "dampening": 0.3}
        rule = RULES[f"torch_{kind.lower()}_momentum"]
        w, slots = np.ones(3), tuple(np.zeros(3) for _ in rule.slots)
        reference(rule, w, [np.full(3, 2.0)], slots, given, 1)
        buffer, before = slots[-1].copy(), w.copy()
        reference(rule, w, [np.full(3, 4.0)], slots, {**given, "momentum": 0.0}, 2)
        assert slots[-1].tolist() == buffer.tolist()
        x = 4.0 if kind == "SGD" else 4.0 / (np.sqrt(slots[0]) + given["epsilon"])
        np.testing.assert_allclose(w, before - given["learning_rate"] * x, rtol=1e-15)


@pytest.mark.parametrize(("beta_1", "decay"), [(0.0, 0.004), (0.9, 0.004), (0.9999, 1.0), (1 - 1e-12, 0.0)])
def test_the_product_of_nadams_momenta_depends_on_nothing_but_the_update(beta_1: float, decay: float) -> None:
    product, products = 1.0, []
    for t in range(1, 300):
        product *= beta_1 * (1 - 0.5 * 0.96 ** (t * decay))
        products.append(product)
    asked = np.random.default_rng(0).permutation(299)
    for which in [*asked, *range(299)]:
        found = _product(beta_1, decay, int(which) + 1)
        assert 1 - found == pytest.approx(1 - products[which], rel=1e-15)
        assert found <= 2.0**-60 or found == products[which]
