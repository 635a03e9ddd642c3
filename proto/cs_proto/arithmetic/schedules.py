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

Kind = Literal[
    "ExponentialDecay",
    "PiecewiseConstantDecay",
    "CosineDecay",
    "PolynomialDecay",
    "InverseTimeDecay",
    "CosineDecayRestarts",
]

#: The numbers of each kind in the order of ``Schedule.numbers``; PiecewiseConstantDecay has n boundaries, then n + 1
#: values. A flag is 1 or 0.
FIELDS: dict[Kind, tuple[str, ...]] = {
    "ExponentialDecay": ("initial_learning_rate", "decay_steps", "decay_rate", "staircase"),
    "PiecewiseConstantDecay": (),
    "CosineDecay": ("initial_learning_rate", "decay_steps", "alpha", "has_warmup", "warmup_target", "warmup_steps"),
    "PolynomialDecay": ("initial_learning_rate", "decay_steps", "end_learning_rate", "power", "cycle"),
    "InverseTimeDecay": ("initial_learning_rate", "decay_steps", "decay_rate", "staircase"),
    "CosineDecayRestarts": ("initial_learning_rate", "first_decay_steps", "t_mul", "m_mul", "alpha"),
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
    if numbers[1] <= 0:
        return f"{FIELDS[kind][1]} of {kind} must be more than 0, not {numbers[1]:g}"
    if kind == "CosineDecayRestarts" and numbers[2] < 1:  # the restarts would come ever sooner, and there is no rate
        return f"t_mul of {kind} must be at least 1, not {numbers[2]:g}"  # where they meet
    return ""


def rate(kind: Kind, numbers: Sequence[float], step: float) -> float:
    """The learning rate of the update after ``step`` earlier updates; ``step`` is at least 0.

    The numbers are those of a Schedule. A result beyond the range of a float is infinite, and so is 0 to a negative
    power.
    """
    return _RATES[kind](step, *numbers)


def _floor(value: float) -> float:
    """``math.floor``, which raises for infinity; infinity stays as it is."""
    return math.floor(value) if math.isfinite(value) else value


def _exponential(step: float, initial: float, decay_steps: float, decay_rate: float, staircase: float) -> float:
    exponent = step / decay_steps
    return initial * _power(decay_rate, _floor(exponent) if staircase else exponent)


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
        decay_steps *= max(1, -_floor(-step / decay_steps))
    else:
        step = min(step, decay_steps)
    return (initial - end) * _power(1 - step / decay_steps, power) + end


def _inverse_time(step: float, initial: float, decay_steps: float, decay_rate: float, staircase: float) -> float:
    elapsed = step / decay_steps
    divisor = 1 + decay_rate * (_floor(elapsed) if staircase else elapsed)
    return initial / divisor if divisor else math.inf


def _cosine_restarts(
    step: float, initial: float, first_decay_steps: float, t_mul: float, m_mul: float, alpha: float
) -> float:
    elapsed = step / first_decay_steps
    restarts: float
    if not math.isfinite(elapsed * t_mul):
        restarts, fraction = math.inf, 0.0
    elif t_mul == 1:
        restarts = math.floor(elapsed)
        fraction = elapsed - restarts
    else:
        restarts = math.floor(math.log(1 + elapsed * (t_mul - 1)) / math.log(t_mul))
        fraction = (elapsed - (t_mul**restarts - 1) / (t_mul - 1)) / t_mul**restarts
        if fraction >= 1:  # the logarithm was rounded to just below a whole number
            restarts, fraction = restarts + 1, 0.0
    decayed = 0.5 * _power(m_mul, restarts) * (1 + math.cos(math.pi * fraction))
    return initial * ((1 - alpha) * decayed + alpha)


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
    "InverseTimeDecay": _inverse_time,
    "CosineDecayRestarts": _cosine_restarts,
}
