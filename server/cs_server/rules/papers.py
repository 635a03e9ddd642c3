"""The update rules that are defined by a paper.

Lion: Chen et al., 2023, "Symbolic discovery of optimization algorithms", algorithm 2. Row-wise Adagrad: FBGEMM's
``EXACT_ROWWISE_ADAGRAD`` with its weight decay of kind L2, after Gupta et al., 2014, "Training highly multiclass
classifiers".
"""

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


RULES = (
    Rule("lion", lion, lion_numbers, zeros(1), "all", is_real=True),
    Rule("rowwise_adagrad", rowwise_adagrad, rowwise_adagrad_numbers, accumulator, is_real=True, row=decayed),
)
