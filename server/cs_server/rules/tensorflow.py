"""The update rules of TensorFlow's optimizers.

The source of the formulas is ``tf.keras.optimizers.legacy`` (``optimizer_v2``), whose kernels take products and sums in
the order in which they stand here. Hyperparameters are rounded to single precision first, as TensorFlow holds them. t
is the optimizer's count of updates.
"""

import math

import numpy as np

from cs_proto.arithmetic.optimizers import Hyperparameters
from cs_proto.frozen import with_changes

from .rule import Array, Numbers, Rule, Step, accumulator, zeros

# The steps.


def _sgd(w: Array, g: Array, learning_rate: Array) -> Step:
    return (w - learning_rate * g,)


def _sgd_momentum(w: Array, g: Array, m: Array, learning_rate: Array, momentum: Array) -> Step:
    m = momentum * m - learning_rate * g
    return w + m, m


def _sgd_nesterov(w: Array, g: Array, m: Array, learning_rate: Array, momentum: Array) -> Step:
    step = learning_rate * g
    m = momentum * m - step
    return w + (momentum * m - step), m


def _adagrad(w: Array, g: Array, a: Array, learning_rate: Array, epsilon: Array) -> Step:
    a = a + g * g
    return w - learning_rate * g / (np.sqrt(a) + epsilon), a


def _rmsprop(w: Array, g: Array, s: Array, learning_rate: Array, rho: Array, c: Array, epsilon: Array) -> Step:
    s = rho * s + c * (g * g)
    return w - learning_rate * g / (np.sqrt(s) + epsilon), s


def _rmsprop_centered(
    w: Array, g: Array, s: Array, mean: Array, learning_rate: Array, rho: Array, c: Array, epsilon: Array
) -> Step:
    s = rho * s + c * (g * g)
    mean = rho * mean + c * g
    return w - learning_rate * g / (np.sqrt(s - mean * mean) + epsilon), s, mean


def _rmsprop_momentum(
    w: Array, g: Array, s: Array, b: Array, learning_rate: Array, rho: Array, c: Array, epsilon: Array, momentum: Array
) -> Step:
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
) -> Step:
    s = rho * s + c * (g * g)
    mean = rho * mean + c * g
    b = momentum * b + learning_rate * g / np.sqrt(s - mean * mean + epsilon)
    return w - b, s, b, mean


def _adam(
    w: Array, g: Array, m: Array, v: Array, rate: Array, b1: Array, c1: Array, b2: Array, c2: Array, epsilon: Array
) -> Step:
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
) -> Step:
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
) -> Step:
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
) -> Step:
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    vhat = np.maximum(vhat, v)
    return w - decay * w - rate * m / (np.sqrt(vhat) + epsilon), m, v, vhat


def _adamax(
    w: Array, g: Array, m: Array, v: Array, rate: Array, b1: Array, c1: Array, b2: Array, epsilon: Array
) -> Step:
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
) -> Step:
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    return w - (rate_g * g + rate_m * m) / (np.sqrt(rate_v * v) + epsilon), m, v


def _adadelta(
    w: Array, g: Array, a: Array, x: Array, learning_rate: Array, rho: Array, c: Array, epsilon: Array
) -> Step:
    a = rho * a + c * (g * g)
    d = np.sqrt(x + epsilon) / np.sqrt(a + epsilon) * g
    x = rho * x + c * (d * d)
    return w - learning_rate * d, a, x


# Where |z| does not exceed l1 the new value is 0, else -sign(z) (|z| - l1) / q.


def _ftrl(
    w: Array, g: Array, a: Array, z: Array, learning_rate: Array, l1: Array, double_l2: Array, double_shrinkage: Array
) -> Step:
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
) -> Step:
    n = a + g * g
    root = n**power
    z = z + (g + double_shrinkage * w) - (root - a**power) / learning_rate * w
    q = root / learning_rate + double_l2
    return np.copysign(np.maximum(np.abs(z), l1) - l1, -z) / q, n, z


# The numbers of the t-th update.


def _sgd_numbers(given: Hyperparameters, t: int) -> Numbers:
    return (given["learning_rate"],)


def _momentum_numbers(given: Hyperparameters, t: int) -> Numbers:
    return given["learning_rate"], given["momentum"]


def _adagrad_numbers(given: Hyperparameters, t: int) -> Numbers:
    return given["learning_rate"], given["epsilon"]


def _rmsprop_numbers(given: Hyperparameters, t: int) -> Numbers:
    return given["learning_rate"], given["rho"], 1 - given["rho"], given["epsilon"]


def _rmsprop_momentum_numbers(given: Hyperparameters, t: int) -> Numbers:
    return *_rmsprop_numbers(given, t), given["momentum"]


def _adam_numbers(given: Hyperparameters, t: int) -> Numbers:
    b1, b2 = given["beta_1"], given["beta_2"]
    rate = given["learning_rate"] * math.sqrt(1 - b2**t) / (1 - b1**t)
    return rate, b1, 1 - b1, b2, 1 - b2, given["epsilon"]


def _adamw_numbers(given: Hyperparameters, t: int) -> Numbers:
    return *_adam_numbers(given, t), given["learning_rate"] * given["weight_decay"]


def _adamax_numbers(given: Hyperparameters, t: int) -> Numbers:
    b1 = given["beta_1"]
    return given["learning_rate"] / (1 - b1**t), b1, 1 - b1, given["beta_2"], given["epsilon"]


def _nadam_numbers(given: Hyperparameters, t: int) -> Numbers:
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


def _adadelta_numbers(given: Hyperparameters, t: int) -> Numbers:
    return given["learning_rate"], given["rho"], 1 - given["rho"], given["epsilon"]


def _ftrl_numbers(given: Hyperparameters, t: int) -> Numbers:
    learning_rate, beta = given["learning_rate"], given["beta"]
    # Without a learning rate beta has no finite meaning; at 0 it has none.
    adjusted = beta / learning_rate if learning_rate else (math.inf if beta else 0.0)
    return (
        learning_rate,
        given["l1_regularization_strength"],
        2 * given["l2_regularization_strength"] + adjusted,
        2 * given["l2_shrinkage_regularization_strength"],
    )


def _ftrl_power_numbers(given: Hyperparameters, t: int) -> Numbers:
    return *_ftrl_numbers(given, t), -given["learning_rate_power"]


def _accumulator_and_linear(given: Hyperparameters) -> Numbers:
    return given["initial_accumulator_value"], 0.0


RULES = tuple(
    with_changes(rule, rounds_first=True)
    for rule in (
        Rule("sgd", _sgd, _sgd_numbers),
        Rule("sgd_momentum", _sgd_momentum, _momentum_numbers, zeros(1)),
        Rule("sgd_nesterov", _sgd_nesterov, _momentum_numbers, zeros(1)),
        Rule("adagrad", _adagrad, _adagrad_numbers, accumulator),
        Rule("rmsprop", _rmsprop, _rmsprop_numbers, zeros(1), "slots"),
        Rule("rmsprop_momentum", _rmsprop_momentum, _rmsprop_momentum_numbers, zeros(2)),
        Rule("rmsprop_centered", _rmsprop_centered, _rmsprop_numbers, zeros(2), "slots"),
        Rule("rmsprop_centered_momentum", _rmsprop_centered_momentum, _rmsprop_momentum_numbers, zeros(3)),
        Rule("adam", _adam, _adam_numbers, zeros(2), "all"),
        Rule("adam_amsgrad", _adam_amsgrad, _adam_numbers, zeros(3), "all"),
        Rule("adamw", _adamw, _adamw_numbers, zeros(2), "all"),
        Rule("adamw_amsgrad", _adamw_amsgrad, _adamw_numbers, zeros(3), "all"),
        Rule("adamax", _adamax, _adamax_numbers, zeros(2), is_real=True),
        Rule("nadam", _nadam, _nadam_numbers, zeros(2), "slots"),
        Rule("adadelta", _adadelta, _adadelta_numbers, zeros(2)),
        Rule("ftrl", _ftrl, _ftrl_numbers, _accumulator_and_linear, is_real=True),
        Rule("ftrl_power", _ftrl_power, _ftrl_power_numbers, _accumulator_and_linear, is_real=True, is_compiled=False),
    )
)
