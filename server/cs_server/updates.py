"""The update rules: one table of what each optimizer does to a variable and its slots.

Owns the arithmetic and the hyperparameters of every optimizer. A rule's `step` is an elementwise pure function that is
written once and used twice: handed arrays it is the NumPy reference below, handed scalars it is what numba inlines
into the loops of `fused`. So a step holds only operators and NumPy functions that round alike in both, no literal
numbers (a literal would widen float32) and no branches. This module knows no memory layout, no message and no
compiler. `kernels` applies the rules; the catalogue asks `resolve` which rule an optimizer means.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cs_proto.errors import InvalidArgumentError

Hyperparameters: TypeAlias = Mapping[str, float]
"""Name to finite number; a flag such as ``amsgrad`` is True or False, or 1.0 or 0.0 as messages carry it."""

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True)
class Rule:
    """One way of updating a variable.

    `step(w, g, *slots, *numbers)` returns the new `(w, *slots)`, where g is the gradient summed over the replicas.
    `numbers(hyperparameters, t)` gives the scalars of the t-th update (t counts from 1) in double precision, and
    `initial(hyperparameters)` the value each slot is filled with before the first.
    """

    name: str
    slots: tuple[str, ...]
    step: Callable[..., tuple[Array, ...]]
    numbers: Callable[[Hyperparameters, int], tuple[float, ...]]
    initial: Callable[[Hyperparameters], tuple[float, ...]]

    @property
    def count_of_numbers(self) -> int:
        return len(signature(self.step).parameters) - len(self.slots) - len(("w", "g"))


def resolve(optimizer: str, hyperparameters: Hyperparameters) -> Rule:
    """The rule that an optimizer of this name follows with these hyperparameters, all of which must be given.

    Raises InvalidArgumentError, which says what would be right, for an unknown optimizer, and for a hyperparameter
    that is missing, unknown, of the wrong kind or out of its range.
    """
    family = OPTIMIZERS.get(optimizer)
    if family is None:
        raise InvalidArgumentError(f"unknown optimizer {optimizer!r}: there are {', '.join(OPTIMIZERS)}")
    for given in hyperparameters:
        if given not in family.hyperparameters:
            known = ", ".join(family.hyperparameters)
            raise InvalidArgumentError(f"{optimizer} has no hyperparameter {given!r}: it has {known}")
    for name, domain in family.hyperparameters.items():
        if name not in hyperparameters:
            raise InvalidArgumentError(f"{optimizer} needs the hyperparameter {name!r}, {domain}")
        if not domain.holds(hyperparameters[name]):
            raise InvalidArgumentError(f"{optimizer}: {name} must be {domain}, not {hyperparameters[name]!r}")
    return RULES[family.variant(hyperparameters)]


def reference(
    rule: Rule,
    parameters: Array,
    gradients: Sequence[Array],
    slots: tuple[Array, ...],
    hyperparameters: Hyperparameters,
    t: int,
) -> None:
    """Apply the rule in plain NumPy, in place: what every kernel must equal bit for bit.

    All arrays have one shape (any) and one floating-point or complex dtype, in which everything is computed. The
    gradients stand in replica order and are added one after the other. Raises InvalidArgumentError as `scalars` does,
    and when there is no gradient.
    """
    if not gradients:
        raise InvalidArgumentError(f"{rule.name} needs the gradient of at least one replica")
    numbers = scalars(rule, hyperparameters, t, parameters.dtype)
    # An overflow or a nan is the training's own affair: it is kept in the values, as the kernels keep it.
    with np.errstate(all="ignore"):
        total = gradients[0].copy()
        for gradient in gradients[1:]:
            total += gradient
        updated = rule.step(parameters, total, *slots, *numbers)
    for target, value in zip((parameters, *slots), updated, strict=True):
        target[...] = value


def scalars(rule: Rule, hyperparameters: Hyperparameters, t: int, dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """The rule's numbers for update t, rounded once, from double precision to the dtype of the variable.

    Raises InvalidArgumentError for t < 1, a dtype without fractions, or a hyperparameter that the rule misses.
    """
    if t < 1:
        raise InvalidArgumentError(f"updates are counted from 1: t = {t}")
    if dtype.kind not in "fc":
        raise InvalidArgumentError(f"only floating-point and complex variables can be optimized, not {dtype}")
    try:
        numbers = rule.numbers(hyperparameters, t)
    except KeyError as missing:
        raise InvalidArgumentError(f"{rule.name} needs the hyperparameter {missing}") from None
    with np.errstate(over="ignore"):
        return tuple(map(dtype.type, numbers))


# The steps. Products and sums stand in the order in which TensorFlow's kernels take them.


def _sgd(w: Array, g: Array, learning_rate: Array) -> tuple[Array, ...]:
    return (w - learning_rate * g,)


def _sgd_momentum(w: Array, g: Array, m: Array, learning_rate: Array, momentum: Array) -> tuple[Array, ...]:
    m = momentum * m - learning_rate * g
    return w + m, m


def _sgd_nesterov(w: Array, g: Array, m: Array, learning_rate: Array, momentum: Array) -> tuple[Array, ...]:
    step = learning_rate * g
    m = momentum * m - step
    return w + (momentum * m - step), m


def _adam(
    w: Array, g: Array, m: Array, v: Array, rate: Array, b1: Array, c1: Array, b2: Array, c2: Array, epsilon: Array
) -> tuple[Array, ...]:
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
) -> tuple[Array, ...]:
    m = b1 * m + c1 * g
    v = b2 * v + c2 * (g * g)
    vhat = np.maximum(vhat, v)
    return w - rate * m / (np.sqrt(vhat) + epsilon), m, v, vhat


# The numbers of the t-th update.


def _sgd_numbers(given: Hyperparameters, t: int) -> tuple[float, ...]:
    return (given["learning_rate"],)


def _momentum_numbers(given: Hyperparameters, t: int) -> tuple[float, ...]:
    return given["learning_rate"], given["momentum"]


def _adam_numbers(given: Hyperparameters, t: int) -> tuple[float, ...]:
    b1, b2 = given["beta_1"], given["beta_2"]
    rate = given["learning_rate"] * math.sqrt(1 - b2**t) / (1 - b1**t)
    return rate, b1, 1 - b1, b2, 1 - b2, given["epsilon"]


def _zeros(count: int) -> Callable[[Hyperparameters], tuple[float, ...]]:
    return lambda given: (0.0,) * count


RULES: Mapping[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("sgd", (), _sgd, _sgd_numbers, _zeros(0)),
        Rule("sgd_momentum", ("momentum",), _sgd_momentum, _momentum_numbers, _zeros(1)),
        Rule("sgd_nesterov", ("momentum",), _sgd_nesterov, _momentum_numbers, _zeros(1)),
        Rule("adam", ("m", "v"), _adam, _adam_numbers, _zeros(2)),
        Rule("adam_amsgrad", ("m", "v", "vhat"), _adam_amsgrad, _adam_numbers, _zeros(3)),
    )
}


@dataclass(frozen=True)
class _Number:
    """The finite numbers from low to high; `open_end` leaves high itself out."""

    low: float = -math.inf
    high: float = math.inf
    open_end: bool = False

    def holds(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        try:
            number = float(value)
        except OverflowError:
            return False
        return math.isfinite(number) and self.low <= number <= self.high and not (self.open_end and number == self.high)

    def __str__(self) -> str:
        if math.isinf(self.high):
            return "a finite number" if math.isinf(self.low) else f"a finite number of at least {self.low:g}"
        return f"a number in [{self.low:g}, {self.high:g}{')' if self.open_end else ']'}"


@dataclass(frozen=True)
class _Flag:
    """True or False; also 1 or 0."""

    def holds(self, value: object) -> bool:
        return isinstance(value, int | float) and value in (0, 1)

    def __str__(self) -> str:
        return "True or False"


@dataclass(frozen=True)
class _Optimizer:
    """What an optimizer takes, and the name of the rule it follows then."""

    hyperparameters: Mapping[str, _Number | _Flag]
    variant: Callable[[Hyperparameters], str]


def _sgd_variant(given: Hyperparameters) -> str:
    if given["momentum"] == 0:
        return "sgd"
    return "sgd_nesterov" if given["nesterov"] else "sgd_momentum"


def _adam_variant(given: Hyperparameters) -> str:
    return "adam_amsgrad" if given["amsgrad"] else "adam"


_RATE = _Number()
_DECAY = _Number(0, 1, open_end=True)
_NOT_NEGATIVE = _Number(0)

OPTIMIZERS: Mapping[str, _Optimizer] = {
    "SGD": _Optimizer({"learning_rate": _RATE, "momentum": _Number(0, 1), "nesterov": _Flag()}, _sgd_variant),
    "Adam": _Optimizer(
        {"learning_rate": _RATE, "beta_1": _DECAY, "beta_2": _DECAY, "epsilon": _NOT_NEGATIVE, "amsgrad": _Flag()},
        _adam_variant,
    ),
}
