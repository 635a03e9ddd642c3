"""The learning rate as a function of the step: the meaning of each kind of schedule.

The server evaluates a schedule when it commits a step, and the client when a schedule is called. Both use ``rate``, so
the two cannot differ. All numbers are computed in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from cs_proto.records import Finite, Record, record

__all__ = ["FIELDS", "Kind", "Schedule", "rate"]

Kind = Literal["ExponentialDecay", "PiecewiseConstantDecay", "CosineDecay", "PolynomialDecay"]

#: The numbers of each kind in the order of ``Schedule.numbers``; PiecewiseConstantDecay has n boundaries, then n + 1
#: values. A flag is 1 or 0.
FIELDS: dict[Kind, tuple[str, ...]] = {
    "ExponentialDecay": ("initial_learning_rate", "decay_steps", "decay_rate", "staircase"),
    "PiecewiseConstantDecay": (),
    "CosineDecay": ("initial_learning_rate", "decay_steps", "alpha", "has_warmup", "warmup_target", "warmup_steps"),
    "PolynomialDecay": ("initial_learning_rate", "decay_steps", "end_learning_rate", "power", "cycle"),
}


@record(21)
class Schedule(Record):
    """A learning rate that follows the step: a kind and its numbers (``cs_proto.arithmetic.schedules``)."""

    kind: Kind
    numbers: tuple[Finite, ...]

    def check(self) -> None:
        if what := _fault(self.kind, self.numbers):
            self.refuse(what)


def _fault(kind: Kind, numbers: Sequence[float]) -> str:
    """The fault in the numbers of a schedule; empty if there is none."""
    if kind == "PiecewiseConstantDecay":
        boundaries = numbers[: len(numbers) // 2]
        if len(numbers) % 2 == 0:
            return "PiecewiseConstantDecay needs one more value than boundaries"
        return "" if list(boundaries) == sorted(boundaries) else "the boundaries of PiecewiseConstantDecay must ascend"
    if len(numbers) != len(FIELDS[kind]):
        return f"{kind} needs the numbers {', '.join(FIELDS[kind])}"
    return "" if numbers[1] > 0 else f"decay_steps of {kind} must be more than 0, not {numbers[1]:g}"


def rate(kind: Kind, numbers: Sequence[float], step: float) -> float:
    """The learning rate of the update after ``step`` earlier updates; ``step`` is at least 0.

    The numbers are those of a Schedule. A result beyond the range of a float is infinite, and so is 0 to a negative
    power.
    """
    return _RATES[kind](step, *numbers)


def _exponential(step: float, initial: float, decay_steps: float, decay_rate: float, staircase: float) -> float:
    exponent = step / decay_steps
    return initial * _power(decay_rate, math.floor(exponent) if staircase else exponent)


def _piecewise(step: float, *numbers: float) -> float:
    count = len(numbers) // 2
    return numbers[count + sum(step > boundary for boundary in numbers[:count])]


def _cosine(
    step: float,
    initial: float,
    decay_steps: float,
    alpha: float,
    has_warmup: float,
    warmup_target: float,
    warmup_steps: float,
) -> float:
    peak = initial
    if has_warmup:
        if step < warmup_steps:
            return initial + (warmup_target - initial) * (step / warmup_steps)
        peak, step = warmup_target, step - warmup_steps
    decayed = 0.5 * (1 + math.cos(math.pi * min(step, decay_steps) / decay_steps))
    return peak * ((1 - alpha) * decayed + alpha)


def _polynomial(step: float, initial: float, decay_steps: float, end: float, power: float, cycle: float) -> float:
    if cycle:
        decay_steps *= max(1, math.ceil(step / decay_steps))
    else:
        step = min(step, decay_steps)
    return (initial - end) * _power(1 - step / decay_steps, power) + end


def _power(base: float, exponent: float) -> float:
    try:
        found = base**exponent
    except (OverflowError, ZeroDivisionError):
        return math.inf
    return found if isinstance(found, float | int) else math.nan  # a negative base has complex roots


_RATES: dict[Kind, Callable[..., float]] = {
    "ExponentialDecay": _exponential,
    "PiecewiseConstantDecay": _piecewise,
    "CosineDecay": _cosine,
    "PolynomialDecay": _polynomial,
}
