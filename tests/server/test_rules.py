"""The update rules against their formulas, written out here once more in plain Python."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.harness.updates import HYPERPARAMETERS

from cs_proto.arithmetic.optimizers import OPTIMIZERS, SLOTS, check_change, rule_of
from cs_proto.errors import InvalidArgumentError
from cs_server.rules import RULES, reference, scalars, tensorflow

SGD = {"learning_rate": 0.05, "momentum": 0.0, "nesterov": False}
ADAM = {"learning_rate": 0.05, "beta_1": 0.9, "beta_2": 0.99, "epsilon": 1e-7, "amsgrad": False}
ALL = HYPERPARAMETERS | {"nesterov": True, "amsgrad": True, "centered": True}
SGDS = {"sgd", "sgd_momentum", "sgd_nesterov"}
GRADIENTS = (2.0, -3.0, 0.5, 0.0, 1e-3, -0.25)


@pytest.mark.parametrize(
    ("optimizer", "hyperparameters", "rule", "slots"),
    [
        ("SGD", SGD, "sgd", ()),
        ("SGD", SGD | {"nesterov": True}, "sgd", ()),
        ("SGD", SGD | {"momentum": 0.9}, "sgd_momentum", ("momentum",)),
        ("SGD", SGD | {"momentum": 1}, "sgd_momentum", ("momentum",)),
        ("SGD", SGD | {"momentum": 0.9, "nesterov": True}, "sgd_nesterov", ("momentum",)),
        ("SGD", SGD | {"momentum": 0.9, "nesterov": 1.0}, "sgd_nesterov", ("momentum",)),
        ("Adam", ADAM, "adam", ("m", "v")),
        ("Adam", ADAM | {"amsgrad": True}, "adam_amsgrad", ("m", "v", "vhat")),
        ("Adam", ADAM | {"amsgrad": 0.0, "beta_1": 0, "epsilon": 0, "learning_rate": -1}, "adam", ("m", "v")),
    ],
)
def test_resolve_picks_the_variant(
    optimizer: str, hyperparameters: dict[str, float], rule: str, slots: tuple[str, ...]
) -> None:
    assert rule_of(optimizer, hyperparameters) == rule
    assert SLOTS[rule] == slots


@pytest.mark.parametrize(
    ("optimizer", "hyperparameters", "message"),
    [
        ("Adamm", ADAM, "unknown optimizer 'Adamm'; the optimizers are SGD, Adagrad, RMSprop, Adam"),
        ("SGD", SGD | {"rho": 0.9}, "SGD has no hyperparameter 'rho'; it has learning_rate, momentum, nesterov, clip"),
        (
            "SGD",
            {"learning_rate": 1.0, "nesterov": False},
            r"SGD needs the hyperparameter 'momentum', a number in \[0, 1",
        ),
        ("SGD", SGD | {"momentum": -0.1}, r"SGD: momentum must be a number in \[0, 1\], not -0.1"),
        ("SGD", SGD | {"momentum": 1.1}, "momentum must be"),
        ("SGD", SGD | {"momentum": math.nan}, "momentum must be"),
        ("SGD", SGD | {"momentum": True}, "momentum must be"),
        ("SGD", SGD | {"nesterov": 0.5}, "nesterov must be True or False, not 0.5"),
        ("SGD", SGD | {"nesterov": "yes"}, "nesterov must be"),
        ("SGD", SGD | {"learning_rate": math.inf}, "learning_rate must be a finite number, not inf"),
        ("SGD", SGD | {"learning_rate": 10**400}, "learning_rate must be a finite number"),
        ("SGD", SGD | {"learning_rate": "0.1"}, "learning_rate must be"),
        ("Adam", ADAM | {"beta_1": 1.0}, r"beta_1 must be a number in \[0, 1\), not 1.0"),
        ("Adam", ADAM | {"beta_2": -0.5}, "beta_2 must be"),
        ("Adam", ADAM | {"epsilon": -1e-9}, "epsilon must be a finite number of at least 0, not -1e-09"),
    ],
)
def test_resolve_names_what_is_wrong(optimizer: str, hyperparameters: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        rule_of(optimizer, hyperparameters)


@pytest.mark.parametrize(
    ("kind", "rule", "changes", "message"),
    [
        ("SGD", "sgd", {"momentum": 0.5}, "made with momentum 0 and keeps no momentum"),
        ("SGD", "sgd", {"nesterov": True}, "nesterov was fixed"),
        ("SGD", "sgd", {"lazy": True}, "lazy was fixed"),
        ("SGD", "sgd", {"learning_rate": math.nan}, "learning_rate must be"),
        ("SGD", "sgd_momentum", {"momentum": 0.0}, None),
        ("SGD", "sgd", {"learning_rate": 2, "clipvalue": 1.0, "lazy": False}, None),
    ],
)
def test_what_may_change_later(kind: str, rule: str, changes: dict[str, float], message: str | None) -> None:
    if message is None:
        check_change(kind, rule, SGD, SGD | changes)
    else:
        with pytest.raises(InvalidArgumentError, match=message):
            check_change(kind, rule, SGD, SGD | changes)


def test_the_table_is_consistent() -> None:
    assert RULES.keys() == SLOTS.keys()
    for kind, optimizer in OPTIMIZERS.items():
        assert rule_of(kind, {name: ALL[name] for name in optimizer.hyperparameters}) in RULES
    for name, rule in RULES.items():
        hyperparameters = ALL
        assert rule.name == name
        assert len(rule.initial(hyperparameters)) == len(rule.slots)
        assert len(rule.numbers(hyperparameters, 1)) == rule.count_of_numbers
        values = rule.step(*np.full((2 + len(rule.slots) + rule.count_of_numbers, 3), 0.5))
        assert len(values) == 1 + len(rule.slots)


def _sgd(lr: float) -> Iterator[float]:
    w = 1.0
    for g in GRADIENTS:
        w -= lr * g
        yield w


def _momentum(lr: float, mu: float, nesterov: bool) -> Iterator[float]:
    w, m = 1.0, 0.0
    for g in GRADIENTS:
        m = mu * m - lr * g
        w += mu * m - lr * g if nesterov else m
        yield w


def _adam(lr: float, b1: float, b2: float, epsilon: float, amsgrad: bool) -> Iterator[float]:
    w, m, v, largest = 1.0, 0.0, 0.0, 0.0
    for t, g in enumerate(GRADIENTS, 1):
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * g**2
        largest = max(largest, v)
        w -= lr * math.sqrt(1 - b2**t) / (1 - b1**t) * m / (math.sqrt(largest if amsgrad else v) + epsilon)
        yield w


@pytest.mark.parametrize(
    ("optimizer", "hyperparameters", "formula"),
    [
        ("SGD", SGD, lambda: _sgd(0.05)),
        ("SGD", SGD | {"momentum": 0.9}, lambda: _momentum(0.05, 0.9, False)),
        ("SGD", SGD | {"momentum": 0.9, "nesterov": True}, lambda: _momentum(0.05, 0.9, True)),
        ("Adam", ADAM, lambda: _adam(0.05, 0.9, 0.99, 1e-7, False)),
        # With beta_2 small, v falls again and vhat holds the maximum.
        ("Adam", ADAM | {"beta_2": 0.3, "amsgrad": True}, lambda: _adam(0.05, 0.9, 0.3, 1e-7, True)),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-14), ("float32", 3e-6), ("complex128", 1e-14)])
def test_reference_follows_the_formula(
    optimizer: str,
    hyperparameters: dict[str, float],
    formula: Callable[[], Iterator[float]],
    dtype: str,
    tolerance: float,
) -> None:
    rule = RULES[rule_of(optimizer, hyperparameters)]
    w = np.ones((2, 3), dtype)
    slots = tuple(np.full((2, 3), value, dtype) for value in rule.initial(hyperparameters))
    for t, (g, expected) in enumerate(zip(GRADIENTS, formula(), strict=True), 1):
        half = np.full((2, 3), g / 2, dtype)
        reference(rule, w, [half, half], slots, hyperparameters, t)
        np.testing.assert_allclose(w, expected, rtol=tolerance)
        np.testing.assert_array_equal(half, np.full((2, 3), g / 2, dtype))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("name", RULES)
def test_nothing_leaves_the_dtype_of_the_variable(dtype: str, name: str) -> None:
    rule, hyperparameters = RULES[name], ALL
    if not rule.takes(np.dtype(dtype)):
        with pytest.raises(InvalidArgumentError, match="only floating-point variables can be optimized by"):
            scalars(rule, hyperparameters, 3, np.dtype(dtype))
        return
    numbers = scalars(rule, hyperparameters, 3, np.dtype(dtype))
    assert [number.dtype for number in numbers] == [dtype] * rule.count_of_numbers
    if rule.rounds_first and dtype in ("float32", "complex64"):
        hyperparameters = {given: float(np.float32(value)) for given, value in hyperparameters.items()}
    assert numbers == tuple(np.array(rule.numbers(hyperparameters, 3)).astype(dtype))
    values = rule.step(*np.full((2 + len(rule.slots), 3), 0.5, dtype), *numbers)
    assert [value.dtype for value in values] == [dtype] * len(values)


def test_the_rest_of_a_rounded_decay_is_tensorflows() -> None:
    _, _, _, _, rest, _ = scalars(RULES["adam"], ADAM | {"beta_2": 0.999}, 1, np.dtype(np.float32))
    assert rest == np.float32(1) - np.float32(0.999) != np.float32(0.001)


def test_numbers_of_the_other_kinds_are_made_in_double_precision() -> None:
    *_, rest, _ = scalars(RULES["torch_adam"], ALL | {"beta_2": 0.999}, 1, np.dtype(np.float32))
    assert rest == np.float32(0.001) != np.float32(1) - np.float32(0.999)


@pytest.mark.parametrize("name", ["adam", "torch_adam"])
def test_a_number_beyond_the_dtype_is_infinite_and_warns_nobody(name: str) -> None:
    for large in (1e4, 1e5, 1e300):
        numbers = scalars(RULES[name], ALL | {"learning_rate": large}, 3, np.dtype(np.float32))
        assert np.isinf(max(numbers)) == (large == 1e300)


def test_rules_with_one_step_share_its_compiled_code_and_steps_have_names_of_their_own() -> None:
    by_kernel: dict[str, set[object]] = {}
    for rule in RULES.values():
        by_kernel.setdefault(rule.kernel, set()).add((rule.step, len(rule.slots), rule.is_compiled))
    assert all(len(steps) == 1 for steps in by_kernel.values())
    assert RULES["torch_adamw"].kernel == RULES["torch_sparse_adam"].kernel == "torch_adam"


def test_replicas_are_summed_in_their_order() -> None:
    hyperparameters = SGD | {"learning_rate": 1.0}
    for gradients, expected in [((1e8, 1.0, -1e8), 0.0), ((1e8, -1e8, 1.0), -1.0)]:
        w = np.zeros((), "float32")
        reference(RULES["sgd"], w, [np.array(g, "float32") for g in gradients], (), hyperparameters, 1)
        assert w == expected


def test_overflow_and_nan_stay_in_the_values_and_warn_nobody() -> None:
    w = np.zeros(3, "float32")
    slots = (np.zeros(3, "float32"), np.zeros(3, "float32"))
    gradient = np.array([np.inf, np.nan, 3e38], "float32")
    reference(RULES["adam"], w, [gradient, gradient], slots, ADAM | {"learning_rate": 1e300}, 1)
    assert np.isnan(w).all()
    np.testing.assert_array_equal(slots[1], np.array([np.inf, np.nan, np.inf], "float32"))


def test_reference_refuses() -> None:
    w = np.zeros(2, "float32")
    with pytest.raises(InvalidArgumentError, match="at least one replica"):
        reference(RULES["sgd"], w, [], (), SGD, 1)
    with pytest.raises(InvalidArgumentError, match="counted from 1: t = 0"):
        reference(RULES["sgd"], w, [w], (), SGD, 0)
    with pytest.raises(InvalidArgumentError, match="not int32"):
        reference(RULES["sgd"], w.astype("int32"), [w], (), SGD, 1)
    with pytest.raises(InvalidArgumentError, match="sgd_momentum needs the hyperparameter 'momentum'"):
        reference(RULES["sgd_momentum"], w, [w], (w,), {"learning_rate": 1.0}, 1)


@pytest.mark.parametrize("beta_1", [0.0, 0.9, 1 - 1e-12])
def test_the_numbers_of_nadam_follow_from_the_step_alone(beta_1: float) -> None:
    given, product = ALL | {"beta_1": beta_1}, 1.0
    for t in range(1, 200):
        mu, following = (beta_1 * (1 - 0.5 * 0.96 ** (0.004 * step)) for step in (t, t + 1))
        product *= mu
        rate_g, rate_m, *_ = RULES["nadam"].numbers(given, t)
        assert rate_g == pytest.approx(0.03 * (1 - mu) / (1 - product), rel=1e-15)
        assert rate_m == pytest.approx(0.03 * following / (1 - product * following), rel=1e-15)
    assert RULES["nadam"].numbers(given, 1 << 60) == RULES["nadam"].numbers(given, 1 << 61)


class _Formula:
    """A rule on one number, in plain Python."""

    def __init__(self) -> None:
        self.w, self.state = 1.0, {"a": 0.0, "b": 0.0, "c": 0.0, "acc": 0.1}


def _by_hand(kind: str, given: dict[str, float], t: int, g: float, f: _Formula) -> None:
    """The table of what TensorFlow's v2 optimizers do, line by line."""
    lr, s = given["learning_rate"], f.state
    rho, mu, epsilon = given["rho"], given["momentum"], given["epsilon"]
    b1, b2 = given["beta_1"], given["beta_2"]
    if kind == "adagrad":
        s["acc"] += g * g
        f.w -= lr * g / (math.sqrt(s["acc"]) + epsilon)
    elif kind == "rowwise_adagrad":  # each element of a vector is a row
        decayed = g + given["weight_decay"] * f.w
        s["acc"] += decayed**2
        f.w -= lr / (math.sqrt(s["acc"]) + epsilon) * decayed
    elif kind.startswith("rmsprop"):
        s["a"] = rho * s["a"] + (1 - rho) * g * g
        s["c"] = rho * s["c"] + (1 - rho) * g
        spread = s["a"] - s["c"] ** 2 if "centered" in kind else s["a"]
        if "momentum" in kind:
            s["b"] = mu * s["b"] + lr * g / math.sqrt(spread + epsilon)
            f.w -= s["b"]
        else:
            f.w -= lr * g / (math.sqrt(spread) + epsilon)
    elif kind.startswith("adamw"):
        f.w -= lr * given["weight_decay"] * f.w
        s["a"], s["b"] = b1 * s["a"] + (1 - b1) * g, b2 * s["b"] + (1 - b2) * g * g
        s["c"] = max(s["c"], s["b"])
        seen = s["c"] if "amsgrad" in kind else s["b"]
        f.w -= lr * math.sqrt(1 - b2**t) / (1 - b1**t) * s["a"] / (math.sqrt(seen) + epsilon)
    elif kind == "adamax":
        s["a"], s["b"] = b1 * s["a"] + (1 - b1) * g, max(b2 * s["b"], abs(g))
        f.w -= lr / (1 - b1**t) * s["a"] / (s["b"] + epsilon)
    elif kind == "nadam":
        mus = [b1 * (1 - 0.5 * 0.96 ** (0.004 * step)) for step in range(1, t + 2)]
        past = math.prod(mus[:-1])
        s["a"], s["b"] = b1 * s["a"] + (1 - b1) * g, b2 * s["b"] + (1 - b2) * g * g
        hats = g / (1 - past), s["a"] / (1 - past * mus[-1]), s["b"] / (1 - b2**t)
        f.w -= lr * ((1 - mus[-2]) * hats[0] + mus[-1] * hats[1]) / (math.sqrt(hats[2]) + epsilon)
    elif kind == "adadelta":
        s["a"] = rho * s["a"] + (1 - rho) * g * g
        d = math.sqrt(s["b"] + epsilon) / math.sqrt(s["a"] + epsilon) * g
        s["b"] = rho * s["b"] + (1 - rho) * d * d
        f.w -= lr * d
    else:
        p = given["learning_rate_power"] if kind == "ftrl_power" else -0.5
        l1, l2 = given["l1_regularization_strength"], given["l2_regularization_strength"]
        n = s["acc"] + g * g
        shrunk = g + 2 * given["l2_shrinkage_regularization_strength"] * f.w
        s["a"] += shrunk - (n**-p - s["acc"] ** -p) / lr * f.w
        q = n**-p / lr + 2 * (l2 + given["beta"] / (2 * lr))
        f.w = (math.copysign(l1, s["a"]) - s["a"]) / q if abs(s["a"]) > l1 else 0.0
        s["acc"] = n


@pytest.mark.parametrize("name", sorted({rule.name for rule in tensorflow.RULES} - {"adam", "adam_amsgrad"} - SGDS))
def test_the_other_rules_follow_their_formulas(name: str) -> None:
    rule, by_hand = RULES[name], _Formula()
    w = np.ones(3)
    slots = tuple(np.full(3, value) for value in rule.initial(ALL))
    for t, g in enumerate((2.0, -3.0, 0.5, 0.25, 1e-3, -0.25), 1):
        reference(rule, w, [np.full(3, g)], slots, ALL, t)
        _by_hand(name, ALL, t, g, by_hand)
        np.testing.assert_allclose(w, by_hand.w, rtol=1e-12, atol=1e-12)
