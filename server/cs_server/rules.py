"""The update rules: one table of what each optimizer does to a variable and its slots.

Owns the arithmetic of every rule that ``cs_proto.arithmetic.optimizers`` names. A rule's `step` is an elementwise pure
function. It is written once and used twice: with arrays it is the NumPy reference below, with scalars numba inlines it
into the loops of ``compute.jit``. So a step holds only operators and NumPy functions that round alike in both, no
literal numbers (a literal would widen float32) and no branches. This module knows no memory layout, no message and no
compiler. ``compute.kernels`` applies the rules, ``compute.sparse`` those of sparse gradients; the catalogue asks for a
rule by name.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cs_proto.arithmetic.optimizers import SLOTS, Hyperparameters
from cs_proto.errors import InvalidArgumentError
from cs_proto.frozen import frozen

Array: TypeAlias = NDArray[Any]

#: Dtypes of the variables that live on a GPU.
GPU_DTYPES = ("float16", "float32", "float64")


@frozen
class Rule:
    """One way of updating a variable.

    `step(w, g, *slots, *numbers)` returns the new `(w, *slots)`, where g is the gradient summed over the replicas.
    `numbers(hyperparameters, t)` gives the scalars of the t-th update (t counts from 1) in double precision, and
    `initial(hyperparameters)` the value each slot is filled with before the first.

    `moves` says which rows change, beside those it names, under a sparse gradient: none, those of the slots, or all of
    slots and variable, as if the gradient were zero there. `is_real`: the rule compares, so complex variables have no
    part in it. `is_compiled`: every operation of the step rounds alike in NumPy and in compiled code.
    """

    name: str
    step: Callable[..., tuple[Array, ...]]
    numbers: Callable[[Hyperparameters, int], tuple[float, ...]]
    initial: Callable[[Hyperparameters], tuple[float, ...]] = lambda given: ()
    moves: Literal["rows", "slots", "all"] = "rows"
    is_real: bool = False
    is_compiled: bool = True

    @property
    def slots(self) -> tuple[str, ...]:
        return SLOTS[self.name]

    @property
    def count_of_numbers(self) -> int:
        return len(signature(self.step).parameters) - len(self.slots) - len(("w", "g"))

    def takes(self, dtype: np.dtype[Any]) -> bool:
        """Whether variables of this dtype can be updated."""
        return dtype.kind in ("f" if self.is_real else "fc")


def reference(
    rule: Rule,
    parameters: Array,
    gradients: Sequence[Array],
    slots: tuple[Array, ...],
    hyperparameters: Hyperparameters,
    t: int,
    scale: Sequence[float] = (),
) -> None:
    """Apply the rule in plain NumPy, in place: what every kernel must equal bit for bit.

    All arrays have one shape (any) and one floating-point or complex dtype; everything is computed in that of
    `computed_in`. The gradients stand in replica order and are added one after the other. `scale` has the weight of
    each gradient and, at last, the factor of their sum; empty, all are 1. Raises InvalidArgumentError as `scalars`
    does, and when there is no gradient.
    """
    if not gradients:
        raise InvalidArgumentError(f"{rule.name} needs the gradient of at least one replica")
    wide = computed_in(parameters.dtype)
    numbers = scalars(rule, hyperparameters, t, wide)
    # An overflow or a nan is the training's own affair: it is kept in the values, as the kernels keep it.
    with np.errstate(all="ignore"):
        total = summed(gradients, scale[:-1], wide)
        if scale:
            scaled(total, scale[-1])
        before = [array.astype(wide, copy=False) for array in (parameters, *slots)]
        updated = rule.step(before[0], total, *before[1:], *numbers)
        for target, value in zip((parameters, *slots), updated, strict=True):
            target[...] = value


def summed(gradients: Sequence[Array], weights: Sequence[float], dtype: np.dtype[Any]) -> Array:
    """The sum of the gradients in replica order, each times its weight, as a new array of this dtype.

    A gradient whose weight is 0 in this precision is left out, also where it is NaN. No weights: all are 1.
    """
    total = None
    with np.errstate(all="ignore"):
        for gradient, weight in zip(gradients, weights or [1.0] * len(gradients), strict=True):
            if weight != 1:
                if dtype.type(weight) == 0:
                    continue
                gradient = scaled(gradient.astype(dtype), weight)
            if total is None:
                total = gradient.astype(dtype)
            else:
                total += gradient
    return np.zeros(gradients[0].shape, dtype) if total is None else total


def scaled(gradient: Array, factor: float) -> Array:
    """``gradient``, contiguous, multiplied in place."""
    if factor != 1:
        real = gradient.view(gradient.real.dtype)  # a product with a complex number would have other infinities
        with np.errstate(all="ignore"):
            real *= real.dtype.type(factor)
    return gradient


def computed_in(dtype: np.dtype[Any] | str) -> np.dtype[Any]:
    """What is computed in for variables of ``dtype``: halves, of which squares soon are 0, are widened when they are
    read and rounded when they are written."""
    return np.dtype(np.float32 if np.dtype(dtype) == np.float16 else dtype)


def scalars(rule: Rule, hyperparameters: Hyperparameters, t: int, dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """The rule's numbers for update t, rounded once, from double precision to the dtype of the variable.

    In single precision they are made of hyperparameters that are rounded themselves, as TensorFlow holds them: of a
    ``beta_2`` of 0.999 the rest to 1 is another in the fifth digit.

    Raises InvalidArgumentError for t < 1, a dtype without fractions, or a hyperparameter that the rule misses.
    """
    if t < 1:
        raise InvalidArgumentError(f"updates are counted from 1: t = {t}")
    if not rule.takes(dtype):
        kinds = "floating-point" if rule.is_real else "floating-point and complex"
        raise InvalidArgumentError(f"only {kinds} variables can be optimized by {rule.name}, not {dtype}")
    with np.errstate(over="ignore"):
        if dtype in (np.float32, np.complex64):
            hyperparameters = {name: float(np.float32(value)) for name, value in hyperparameters.items()}
        try:
            numbers = rule.numbers(hyperparameters, t)
        except KeyError as missing:
            raise InvalidArgumentError(f"{rule.name} needs the hyperparameter {missing}") from None
        return tuple(map(dtype.type, numbers))


# The steps. Products and sums stand in the order in which TensorFlow's kernels take them.

_Step: TypeAlias = tuple[Array, ...]


def _sgd(w: Array, g: Array, learning_rate: Array) -> _Step:
    return (w - learning_rate * g,)


def _sgd_momentum(w: Array, g: Array, m: Array, learning_rate: Array, momentum: Array) -> _Step:
    m = momentum * m - learning_rate * g
    return w + m, m


def _sgd_nesterov(w: Array, g: Array, m: Array, learning_rate: Array, momentum: Array) -> _Step:
    step = learning_rate * g
    m = momentum * m - step
    return w + (momentum * m - step), m


def _adagrad(w: Array, g: Array, a: Array, learning_rate: Array, epsilon: Array) -> _Step:
    a = a + g * g
    return w - learning_rate * g / (np.sqrt(a) + epsilon), a


def _rmsprop(w: Array, g: Array, s: Array, learning_rate: Array, rho: Array, c: Array, epsilon: Array) -> _Step:
    s = rho * s + c * (g * g)
    return w - learning_rate * g / (np.sqrt(s) + epsilon), s


def _rmsprop_centered(
    w: Array, g: Array, s: Array, mean: Array, learning_rate: Array, rho: Array, c: Array, epsilon: Array
) -> _Step:
    s = rho * s + c * (g * g)
    mean = rho * mean + c * g
    return w - learning_rate * g / (np.sqrt(s - mean * mean) + epsilon), s, mean


def _rmsprop_momentum(
    w: Array, g: Array, s: Array, b: Array, learning_rate: Array, rho: Array, c: Array, epsilon: Array, momentum: Array
) -> _Step:
    s = rho * s + c * (g * g)
    b = momentum * b + learning_rate * g / np.sqrt(s + epsilon)
    return w - b, s, b


def _rmsprop_centered_momentum(
    w: Array,
    g: Array,
    s: Array,
    b: Array,
    mean: Array,
    learning_rate: Array,
    rho: Array,
    c: Array,
    epsilon: Array,
    momentum: Array,
) -> _Step:
    s = rho * s + c * (g * g)
    mean = rho * mean + c * g
    b = momentum * b + learning_rate * g / np.sqrt(s - mean * mean + epsilon)
    return w - b, s, b, mean


def _adam(
    w: Array, g: Array, m: Array, v: Array, rate: Array, b1: Array, c1: Array, b2: Array, c2: Array, epsilon: Array
) -> _Step:
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    return w - rate * m / (np.sqrt(v) + epsilon), m, v


def _adam_amsgrad(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    vhat: Array,
    rate: Array,
    b1: Array,
    c1: Array,
    b2: Array,
    c2: Array,
    epsilon: Array,
) -> _Step:
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    vhat = np.maximum(vhat, v)
    return w - rate * m / (np.sqrt(vhat) + epsilon), m, v, vhat


def _adamw(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    rate: Array,
    b1: Array,
    c1: Array,
    b2: Array,
    c2: Array,
    epsilon: Array,
    decay: Array,
) -> _Step:
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    return w - decay * w - rate * m / (np.sqrt(v) + epsilon), m, v


def _adamw_amsgrad(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    vhat: Array,
    rate: Array,
    b1: Array,
    c1: Array,
    b2: Array,
    c2: Array,
    epsilon: Array,
    decay: Array,
) -> _Step:
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    vhat = np.maximum(vhat, v)
    return w - decay * w - rate * m / (np.sqrt(vhat) + epsilon), m, v, vhat


def _adamax(
    w: Array, g: Array, m: Array, v: Array, rate: Array, b1: Array, c1: Array, b2: Array, epsilon: Array
) -> _Step:
    m = b1 * m + c1 * g
    v = np.maximum(b2 * v, np.abs(g))
    return w - rate * m / (v + epsilon), m, v


def _nadam(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    rate_g: Array,
    rate_m: Array,
    rate_v: Array,
    b1: Array,
    c1: Array,
    b2: Array,
    c2: Array,
    epsilon: Array,
) -> _Step:
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    return w - (rate_g * g + rate_m * m) / (np.sqrt(rate_v * v) + epsilon), m, v


def _adadelta(
    w: Array, g: Array, a: Array, x: Array, learning_rate: Array, rho: Array, c: Array, epsilon: Array
) -> _Step:
    a = rho * a + c * (g * g)
    d = np.sqrt(x + epsilon) / np.sqrt(a + epsilon) * g
    x = rho * x + c * (d * d)
    return w - learning_rate * d, a, x


# Where |z| does not exceed l1 the new value is 0, else -sign(z) (|z| - l1) / q.


def _ftrl(
    w: Array, g: Array, a: Array, z: Array, learning_rate: Array, l1: Array, double_l2: Array, double_shrinkage: Array
) -> _Step:
    n = a + g * g
    root = np.sqrt(n)
    z = z + (g + double_shrinkage * w) - (root - np.sqrt(a)) / learning_rate * w
    q = root / learning_rate + double_l2
    return np.copysign(np.maximum(np.abs(z), l1) - l1, -z) / q, n, z


def _ftrl_power(
    w: Array,
    g: Array,
    a: Array,
    z: Array,
    learning_rate: Array,
    l1: Array,
    double_l2: Array,
    double_shrinkage: Array,
    power: Array,
) -> _Step:
    n = a + g * g
    root = n**power
    z = z + (g + double_shrinkage * w) - (root - a**power) / learning_rate * w
    q = root / learning_rate + double_l2
    return np.copysign(np.maximum(np.abs(z), l1) - l1, -z) / q, n, z


# The numbers of the t-th update.


def _sgd_numbers(given: Hyperparameters, t: int) -> tuple[float, ...]:
    return (given["learning_rate"],)


def _momentum_numbers(given: Hyperparameters, t: int) -> tuple[float, ...]:
    return given["learning_rate"], given["momentum"]


def _adagrad_numbers(given: Hyperparameters, t: int) -> tuple[float, ...]:
    return given["learning_rate"], given["epsilon"]


def _rmsprop_numbers(given: Hyperparameters, t: int) -> tuple[float, ...]:
    return given["learning_rate"], given["rho"], 1 - given["rho"], given["epsilon"]


def _rmsprop_momentum_numbers(given: Hyperparameters, t: int) -> tuple[float, ...]:
    return *_rmsprop_numbers(given, t), given["momentum"]


def _adam_numbers(given: Hyperparameters, t: int) -> tuple[float, ...]:
    b1, b2 = given["beta_1"], given["beta_2"]
    rate = given["learning_rate"] * math.sqrt(1 - b2**t) / (1 - b1**t)
    return rate, b1, 1 - b1, b2, 1 - b2, given["epsilon"]


def _adamw_numbers(given: Hyperparameters, t: int) -> tuple[float, ...]:
    return *_adam_numbers(given, t), given["learning_rate"] * given["weight_decay"]


def _adamax_numbers(given: Hyperparameters, t: int) -> tuple[float, ...]:
    b1 = given["beta_1"]
    return given["learning_rate"] / (1 - b1**t), b1, 1 - b1, given["beta_2"], given["epsilon"]


def _nadam_numbers(given: Hyperparameters, t: int) -> tuple[float, ...]:
    learning_rate, b1, b2 = given["learning_rate"], given["beta_1"], given["beta_2"]
    product, next_mu = _nadam_product(b1, t), _nadam_mu(b1, t + 1)
    rate_g = learning_rate * (1 - _nadam_mu(b1, t)) / (1 - product)
    rate_m = learning_rate * next_mu / (1 - product * next_mu)
    return rate_g, rate_m, 1 / (1 - b2**t), b1, 1 - b1, b2, 1 - b2, given["epsilon"]


def _nadam_mu(beta_1: float, t: int) -> float:
    """The momentum that Nadam's schedule has at update t."""
    return beta_1 * (1 - 0.5 * math.pow(0.96, 0.004 * t))


# Below this a product does not show in 1 - product any more, and every later one is smaller.
_NOTHING = 2.0**-60


def _nadam_product(beta_1: float, t: int) -> float:
    """The product of Nadam's momenta of updates 1 to t. The first are about a half: some sixty are all that count."""
    product = 1.0
    for update in range(1, t + 1):
        product *= _nadam_mu(beta_1, update)
        if product < _NOTHING:
            break
    return product


def _adadelta_numbers(given: Hyperparameters, t: int) -> tuple[float, ...]:
    return given["learning_rate"], given["rho"], 1 - given["rho"], given["epsilon"]


def _ftrl_numbers(given: Hyperparameters, t: int) -> tuple[float, ...]:
    learning_rate, beta = given["learning_rate"], given["beta"]
    # Without a learning rate beta has no finite meaning; at 0 it has none.
    adjusted = beta / learning_rate if learning_rate else (math.inf if beta else 0.0)
    return (
        learning_rate,
        given["l1_regularization_strength"],
        2 * given["l2_regularization_strength"] + adjusted,
        2 * given["l2_shrinkage_regularization_strength"],
    )


def _ftrl_power_numbers(given: Hyperparameters, t: int) -> tuple[float, ...]:
    return *_ftrl_numbers(given, t), -given["learning_rate_power"]


def _zeros(count: int) -> Callable[[Hyperparameters], tuple[float, ...]]:
    return lambda given: (0.0,) * count


def _accumulator(given: Hyperparameters) -> tuple[float, ...]:
    return (given["initial_accumulator_value"],)


def _accumulator_and_linear(given: Hyperparameters) -> tuple[float, ...]:
    return given["initial_accumulator_value"], 0.0


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("sgd", _sgd, _sgd_numbers),
        Rule("sgd_momentum", _sgd_momentum, _momentum_numbers, _zeros(1)),
        Rule("sgd_nesterov", _sgd_nesterov, _momentum_numbers, _zeros(1)),
        Rule("adagrad", _adagrad, _adagrad_numbers, _accumulator),
        Rule("rmsprop", _rmsprop, _rmsprop_numbers, _zeros(1), "slots"),
        Rule("rmsprop_momentum", _rmsprop_momentum, _rmsprop_momentum_numbers, _zeros(2)),
        Rule("rmsprop_centered", _rmsprop_centered, _rmsprop_numbers, _zeros(2), "slots"),
        Rule("rmsprop_centered_momentum", _rmsprop_centered_momentum, _rmsprop_momentum_numbers, _zeros(3)),
        Rule("adam", _adam, _adam_numbers, _zeros(2), "all"),
        Rule("adam_amsgrad", _adam_amsgrad, _adam_numbers, _zeros(3), "all"),
        Rule("adamw", _adamw, _adamw_numbers, _zeros(2), "all"),
        Rule("adamw_amsgrad", _adamw_amsgrad, _adamw_numbers, _zeros(3), "all"),
        Rule("adamax", _adamax, _adamax_numbers, _zeros(2), is_real=True),
        Rule("nadam", _nadam, _nadam_numbers, _zeros(2), "slots"),
        Rule("adadelta", _adadelta, _adadelta_numbers, _zeros(2)),
        Rule("ftrl", _ftrl, _ftrl_numbers, _accumulator_and_linear, is_real=True),
        Rule("ftrl_power", _ftrl_power, _ftrl_power_numbers, _accumulator_and_linear, is_real=True, is_compiled=False),
    )
}
