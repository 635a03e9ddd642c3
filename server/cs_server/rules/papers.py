"""The update rules that are defined by a paper.

Lion: Chen et al., 2023, "Symbolic discovery of optimization algorithms", algorithm 2. LAMB: You et al., 2020, "Large
batch optimization for deep learning: training BERT in 76 minutes", algorithm 2, without a bound of the norms. Row-wise
Adagrad: FBGEMM's ``EXACT_ROWWISE_ADAGRAD`` with its weight decay of kind L2, after Gupta et al., 2014, "Training highly
multiclass classifiers".
"""

import math
from collections.abc import Callable

import numpy as np

from cs_proto.arithmetic.optimizers import Hyperparameters

from .rule import Array, Numbers, Rule, Step, accumulator, zeros


def lion(w: Array, g: Array, m: Array, rate: Array, decay: Array, b1: Array, c1: Array, b2: Array, c2: Array) -> Step:
    return w - (rate * np.sign(b1 * m + c1 * g) + decay * w), b2 * m + c2 * g


def lion_numbers(given: Hyperparameters, t: int) -> Numbers:
    rate, b1, b2 = given["learning_rate"], given["beta_1"], given["beta_2"]
    return rate, rate * given["weight_decay"], b1, 1 - b1, b2, 1 - b2


def rowwise_adagrad(w: Array, g: Array, a: Array, learning_rate: Array, epsilon: Array, decay: Array) -> Step:
    return w - learning_rate / (np.sqrt(a) + epsilon) * (g + decay * w), a


def decayed(w: Array, g: Array, learning_rate: Array, epsilon: Array, decay: Array) -> Array:
    value: Array = g + decay * w
    return value


def rowwise_adagrad_numbers(given: Hyperparameters, t: int) -> Numbers:
    return given["learning_rate"], given["epsilon"], given["weight_decay"]


def lamb(
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
    scale: Array,
    floor: Array,
    epsilon: Array,
) -> Step:
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    return w - rate * (scale * m / (np.sqrt(v + floor) + epsilon) + decay * w), m, v


def lamb_direction(
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
    scale: Array,
    floor: Array,
    epsilon: Array,
) -> Step:
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    return (scale * m / (np.sqrt(v + floor) + epsilon) + decay * w,)


def lamb_numbers(given: Hyperparameters, t: int) -> Numbers:
    """Instead of dividing v by its correction, the others are multiplied. ``eps_root`` is a number of optax."""
    b1, b2 = given["beta_1"], given["beta_2"]
    rest = 1 - b2**t
    root = math.sqrt(rest)
    floor = given.get("eps_root", 0.0) * rest
    decays = (b1, 1 - b1, b2, 1 - b2)
    return given["learning_rate"], given["weight_decay"], *decays, root / (1 - b1**t), floor, given["epsilon"] * root


def _without_decay(numbers: Callable[[Hyperparameters, int], Numbers]) -> Callable[[Hyperparameters, int], Numbers]:
    """The numbers of a rule for variables that are exempt from weight decay."""
    return lambda given, t: numbers({**given, "weight_decay": 0.0}, t)


RULES = (
    Rule("lion", lion, lion_numbers, zeros(1), "all", is_real=True),
    Rule("lion_without_decay", lion, _without_decay(lion_numbers), zeros(1), "all", is_real=True),
    Rule("rowwise_adagrad", rowwise_adagrad, rowwise_adagrad_numbers, accumulator, is_real=True, row=decayed),
    Rule("lamb", lamb, lamb_numbers, zeros(2), "all", is_real=True, direction=lamb_direction),
    Rule("lamb_without_decay", lamb, _without_decay(lamb_numbers), zeros(2), "all", True, direction=lamb_direction),
)
