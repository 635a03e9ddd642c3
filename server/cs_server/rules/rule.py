"""What an update rule is, the numbers of its t-th update, and its reference in plain NumPy.

A rule's `step` is an elementwise pure function. It is written once and used twice: with arrays it is the NumPy
reference below, with scalars numba inlines it into the loops of ``compute.jit``. So a step holds only operators and
NumPy functions that round alike in both, no literal numbers (a literal would widen float32) and no branches. A term
that an optimizer may do without is multiplied by a number that is 0 or 1 then, which changes no finite value.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import signature
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cs_proto.arithmetic.optimizers import SLOTS, Hyperparameters
from cs_proto.errors import InvalidArgumentError
from cs_proto.frozen import frozen

Array: TypeAlias = NDArray[Any]

Step: TypeAlias = tuple[Array, ...]

Numbers: TypeAlias = tuple[float, ...]

#: The partial sums of the mean of a row.
MEAN_LANES = 16


@frozen
class Rule:
    """One way of updating a variable.

    `step(w, g, *slots, *numbers)` returns the new `(w, *slots)`, where g is the gradient summed over the replicas.
    `numbers(hyperparameters, t)` gives the scalars of the t-th update (t counts from 1) in double precision, and
    `initial(hyperparameters)` the value each slot is filled with before the first.

    `moves` says which rows change, beside those it names, under a sparse gradient: none, those of the slots, or all of
    slots and variable, as if the gradient were zero there. `decays`: weight decay acts on all rows. `is_real`: complex
    variables have no part in the rule, because it compares, or because its source takes squares of their real and
    imaginary parts. `is_compiled`: every operation of the step rounds alike in NumPy and in compiled code.
    `rounds_first`: see `scalars`.

    A rule with `row` keeps one number for each row in its only slot, of shape [rows]. The number grows by the mean of
    the squares of `row(w, g, *numbers)` over the row, and `step` gets it as the slot, which it returns as it is.
    `direction(w, g, *slots, *numbers)`: the step moves a variable by its rate times this, and the rate is multiplied by
    the trust ratio, that of the norms of the whole variable and the whole direction (`trust_ratio`). A step alone
    computes with a ratio of 1.
    """

    name: str
    step: Callable[..., tuple[Array, ...]]
    numbers: Callable[[Hyperparameters, int], Numbers]
    initial: Callable[[Hyperparameters], Numbers] = lambda given: ()
    moves: Literal["rows", "slots", "all"] = "rows"
    is_real: bool = False
    is_compiled: bool = True
    rounds_first: bool = False
    decays: bool = False
    row: Callable[..., Array] | None = None
    direction: Callable[..., Step] | None = None

    @property
    def kernel(self) -> str:
        """The name of the compiled step, which rules may share."""
        return self.step.__name__.strip("_")

    def moving(self, given: Hyperparameters) -> Literal["rows", "slots", "all"]:
        """As `moves`, under these hyperparameters; ``lazy`` lets no other row change."""
        if given.get("lazy"):
            return "rows"
        return "all" if self.decays and given["weight_decay"] else self.moves

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
) -> bool:
    """Apply the rule in plain NumPy, in place: what every kernel must equal bit for bit.

    All arrays have one shape (any) and one floating-point or complex dtype; everything is computed in that of
    `computed_in`. A slot with one number for each row has only the first axis, and the arrays are contiguous. The
    gradients stand in replica order and are added one after the other. `scale` has the weight of each gradient and, at
    last, the factor of their sum; empty, all are 1. Returns whether all elements of the sum are finite; very large ones
    may not count as finite. Raises InvalidArgumentError as `scalars` does, and when there is no gradient.
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
        is_finite = bool(np.isfinite(total.sum()))
        if rule.row is not None:
            table = parameters.reshape(math.prod(parameters.shape[:1]), math.prod(parameters.shape[1:]))
            for part in (grow, move):
                part(rule, table, total.reshape(table.shape), slots[0].reshape(len(table)), hyperparameters, t)
            return is_finite
        before = [array.astype(wide, copy=False) for array in (parameters, *slots)]
        updated = rule.step(before[0], total, *before[1:], *numbers)
        for target, value in zip((parameters, *slots), updated, strict=True):
            target[...] = value
    return is_finite


def grow(rule: Rule, parameters: Array, gradient: Array, slot: Array, hyperparameters: Hyperparameters, t: int) -> None:
    """The first part of the update by a rule with one number for each row: add to the numbers, in place. Parameters and
    the summed gradient have the shape [rows, width], the slot [rows]."""
    assert rule.row is not None
    wide = computed_in(parameters.dtype)
    with np.errstate(all="ignore"):
        values = rule.row(parameters.astype(wide), gradient.astype(wide), *scalars(rule, hyperparameters, t, wide))
        slot[...] = slot.astype(wide) + mean_squares(values)


def move(rule: Rule, parameters: Array, gradient: Array, slot: Array, hyperparameters: Hyperparameters, t: int) -> None:
    """The second part of that update: change the parameters, or some columns of them, in place."""
    wide = computed_in(parameters.dtype)
    arrays = parameters.astype(wide), gradient.astype(wide), slot.astype(wide)[:, np.newaxis]
    with np.errstate(all="ignore"):
        parameters[...], _ = rule.step(*arrays, *scalars(rule, hyperparameters, t, wide))


def mean_squares(values: Array) -> Array:
    """The mean of the squares of each row, of [rows, width]. They are added up as compiled code does it: the i-th to
    partial sum i modulo ``MEAN_LANES``, whose halves are added until one is left."""
    squares, width = values * values, values.shape[1]
    partial: Array = np.zeros((len(values), MEAN_LANES), values.dtype)
    for first in range(0, width, MEAN_LANES):
        part = squares[:, first : first + MEAN_LANES]
        partial[:, : part.shape[1]] += part
    while (half := partial.shape[1] // 2) > 0:
        partial = partial[:, :half] + partial[:, half:]
    means: Array = partial[:, 0] / values.dtype.type(width)
    return means


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


def squares(
    rule: Rule, parameters: Array, gradient: Array, slots: Sequence[Array], hyperparameters: Hyperparameters, t: int
) -> tuple[float, float]:
    """The squared norms of a piece of a variable and of its direction, added up in double precision. The arrays are as
    for `reference`; nothing is changed."""
    assert rule.direction is not None
    wide = computed_in(parameters.dtype)
    numbers = scalars(rule, hyperparameters, t, wide)
    arrays = [array.astype(wide, copy=False) for array in (parameters, gradient, *slots)]
    with np.errstate(all="ignore"):
        (direction,) = rule.direction(*arrays, *numbers)
        return float(np.square(arrays[0], dtype=float).sum()), float(np.square(direction, dtype=float).sum())


def trust_ratio(square: float, square_of_direction: float) -> float:
    """By what the rate is multiplied, from squared norms; 1 where one of them is 0."""
    return math.sqrt(square) / math.sqrt(square_of_direction) if square and square_of_direction else 1.0


def computed_in(dtype: np.dtype[Any] | str) -> np.dtype[Any]:
    """What is computed in for variables of ``dtype``: halves, of which squares soon are 0, are widened when they are
    read and rounded when they are written."""
    return np.dtype(np.float32 if np.dtype(dtype) == np.float16 else dtype)


def scalars(rule: Rule, hyperparameters: Hyperparameters, t: int, dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """The rule's numbers for update t, rounded once, from double precision to the dtype of the variable.

    Where a rule rounds first, they are made in single precision of hyperparameters that are rounded themselves, as
    TensorFlow holds them: of a ``beta_2`` of 0.999 the rest to 1 is another in the fifth digit. torch and optax compute
    them in double precision.

    Raises InvalidArgumentError for t < 1, a dtype without fractions, or a hyperparameter that the rule misses.
    """
    if t < 1:
        raise InvalidArgumentError(f"updates are counted from 1: t = {t}")
    if not rule.takes(dtype):
        kinds = "floating-point" if rule.is_real else "floating-point and complex"
        raise InvalidArgumentError(f"only {kinds} variables can be optimized by {rule.name}, not {dtype}")
    if rule.rounds_first and dtype.char in "fF":
        hyperparameters = _rounded(tuple(hyperparameters.items()))
    try:
        numbers = rule.numbers(hyperparameters, t)
    except KeyError as missing:
        raise InvalidArgumentError(f"{rule.name} needs the hyperparameter {missing}") from None
    if max(map(abs, numbers), default=0.0) < _FITS:
        return (*np.array(numbers, dtype),)
    with np.errstate(over="ignore"):  # takes longer than all else here
        return (*np.array(numbers, dtype),)


# A number that no dtype is too small for.
_FITS = 2.0**15


@lru_cache(maxsize=256)
def _rounded(hyperparameters: tuple[tuple[str, float], ...]) -> Hyperparameters:
    """The same in single precision. Those of an optimizer are asked for at every step."""
    with np.errstate(over="ignore"):
        return {name: float(np.float32(value)) for name, value in hyperparameters}


def zeros(count: int) -> Callable[[Hyperparameters], Numbers]:
    """The `initial` of a rule with this many slots that begin with 0."""
    return lambda given: (0.0,) * count


def accumulator(given: Hyperparameters) -> Numbers:
    """The `initial` of a rule whose one slot begins with a hyperparameter."""
    return (given["initial_accumulator_value"],)
