"""The update rules of optax.

The source of the formulas is optax 0.2 (``optax/_src/alias.py``, ``transform.py``). Their numbers are computed in
double precision; optax itself computes ``b2**t`` in the precision of JAX, which in float32 costs digits of the first
updates. t is the variable's own count of updates. Steps that mean the same as torch's are torch's.

A gradient of JAX is dense, so rows that a sparse gradient does not name change as under a gradient of zeros.
"""

import math

import numpy as np

from cs_proto.arithmetic.optimizers import Hyperparameters

from .papers import lion, lion_numbers
from .rule import Array, Numbers, Rule, Step, accumulator, zeros
from .torch import (
    torch_rmsprop,
    torch_rmsprop_centered,
    torch_rmsprop_centered_momentum,
    torch_rmsprop_momentum,
    torch_sgd,
    torch_sgd_momentum,
)

_AS_IT_IS = (1.0, 0.0)  # direction and L2 penalty of the gradient

# The steps. Weight decay is part of what is added to the variable, while torch first multiplies the variable by 1 less
# the decay: in single precision that is another number where the decay is small.


def optax_adam(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    rate: Array,
    decay: Array,
    b1: Array,
    c1: Array,
    b2: Array,
    c2: Array,
    floor: Array,
    epsilon: Array,
) -> Step:
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    return w - (rate * m / (np.sqrt(v + floor) + epsilon) + decay * w), m, v


def optax_adam_nesterov(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    rate_g: Array,
    rate_m: Array,
    decay: Array,
    b1: Array,
    c1: Array,
    b2: Array,
    c2: Array,
    floor: Array,
    epsilon: Array,
) -> Step:
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    return w - ((rate_m * m + rate_g * g) / (np.sqrt(v + floor) + epsilon) + decay * w), m, v


# Where the sum is 0 there is no update: its sign is 0, and `one` keeps the divisor from 0.
def optax_adagrad(w: Array, g: Array, a: Array, rate: Array, epsilon: Array, one: Array) -> Step:
    a = a + g * g
    return w - rate * np.sign(a) * g / np.sqrt(a + epsilon + (one - np.sign(a))), a


def _sgd_numbers(given: Hyperparameters, t: int) -> Numbers:
    return *_AS_IT_IS, given["learning_rate"]


def _sgd_momentum_numbers(given: Hyperparameters, t: int) -> Numbers:
    mu = given["momentum"]
    return *_sgd_numbers(given, t), mu, 1.0, *((1.0, mu) if given["nesterov"] else (0.0, 1.0))


def _adam_tail(given: Hyperparameters, t: int) -> Numbers:
    """The numbers behind the rates. Instead of dividing nu by its correction, the others are multiplied."""
    b1, b2 = given["beta_1"], given["beta_2"]
    rest = 1 - b2**t
    decay = given["learning_rate"] * given.get("weight_decay", 0.0)
    return decay, b1, 1 - b1, b2, 1 - b2, given["eps_root"] * rest, given["epsilon"] * math.sqrt(rest)


def _adam_numbers(given: Hyperparameters, t: int) -> Numbers:
    rate = given["learning_rate"] * math.sqrt(1 - given["beta_2"] ** t)
    return rate / (1 - given["beta_1"] ** t), *_adam_tail(given, t)


def _adam_nesterov_numbers(given: Hyperparameters, t: int) -> Numbers:
    b1, rate = given["beta_1"], given["learning_rate"] * math.sqrt(1 - given["beta_2"] ** t)
    return rate * (1 - b1) / (1 - b1**t), rate * b1 / (1 - b1 ** (t + 1)), *_adam_tail(given, t)


def _adagrad_numbers(given: Hyperparameters, t: int) -> Numbers:
    return given["learning_rate"], given["epsilon"], 1.0


def _rmsprop_parts(given: Hyperparameters, t: int) -> tuple[Numbers, float, Numbers, float]:
    """The numbers of the averages, the share of the squared mean, the two epsilons and the rate. Instead of dividing
    the averages by the bias correction, the others are multiplied."""
    rho, epsilon = given["rho"], given["epsilon"]
    rest = 1 - rho**t if given["bias_correction"] else 1.0
    epsilons = (epsilon * rest, 0.0) if given["eps_in_sqrt"] else (0.0, epsilon * math.sqrt(rest))
    return (*_AS_IT_IS, rho, 1 - rho), 1 / rest, epsilons, given["learning_rate"] * math.sqrt(rest)


def _rmsprop_numbers(given: Hyperparameters, t: int) -> Numbers:
    averages, _, epsilons, rate = _rmsprop_parts(given, t)
    return *averages, *epsilons, rate


def _rmsprop_centered_numbers(given: Hyperparameters, t: int) -> Numbers:
    averages, share, epsilons, rate = _rmsprop_parts(given, t)
    return *averages, share, *epsilons, rate


def _trace(given: Hyperparameters, rate: float) -> Numbers:
    """The numbers of a momentum behind the rate: the trace adds up what is added to the variable."""
    mu = given["momentum"]
    return mu, -rate, *((rate, -mu) if given["nesterov"] else (0.0, -1.0))


def _rmsprop_momentum_numbers(given: Hyperparameters, t: int) -> Numbers:
    *numbers, rate = _rmsprop_numbers(given, t)
    return *numbers, *_trace(given, rate)


def _rmsprop_centered_momentum_numbers(given: Hyperparameters, t: int) -> Numbers:
    *numbers, rate = _rmsprop_centered_numbers(given, t)
    return *numbers, *_trace(given, rate)


def _scale(given: Hyperparameters) -> Numbers:
    return given["initial_accumulator_value"], 0.0


RULES = (
    Rule("optax_sgd", torch_sgd, _sgd_numbers),
    Rule("optax_sgd_momentum", torch_sgd_momentum, _sgd_momentum_numbers, zeros(1), "all"),
    Rule("optax_adam", optax_adam, _adam_numbers, zeros(2), "all", is_real=True),
    Rule("optax_adam_nesterov", optax_adam_nesterov, _adam_nesterov_numbers, zeros(2), "all", is_real=True),
    Rule("optax_adagrad", optax_adagrad, _adagrad_numbers, accumulator, is_real=True),
    Rule("optax_rmsprop", torch_rmsprop, _rmsprop_numbers, accumulator, "slots", is_real=True),
    Rule("optax_rmsprop_momentum", torch_rmsprop_momentum, _rmsprop_momentum_numbers, _scale, "all", is_real=True),
    Rule("optax_rmsprop_centered", torch_rmsprop_centered, _rmsprop_centered_numbers, _scale, "slots", is_real=True),
    Rule(
        "optax_rmsprop_centered_momentum",
        torch_rmsprop_centered_momentum,
        _rmsprop_centered_momentum_numbers,
        lambda given: (*_scale(given), 0.0),
        "all",
        is_real=True,
    ),
    Rule("optax_lion", lion, lion_numbers, zeros(1), "all", is_real=True),
)
