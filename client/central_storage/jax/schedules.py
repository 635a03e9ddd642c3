"""optax's schedules: learning rates as functions of the count of updates, which is 0 at the first one.

They are computed in double precision in the script, so nothing here imports JAX. The formulas are those of optax 0.2
(``optax/schedules``); any other function of the count does as well, also one of optax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from cs_proto.errors import InvalidArgumentError

__all__ = [
    "Schedule",
    "constant_schedule",
    "cosine_decay_schedule",
    "exponential_decay",
    "join_schedules",
    "linear_schedule",
    "piecewise_constant_schedule",
    "polynomial_schedule",
    "warmup_cosine_decay_schedule",
]

Schedule: TypeAlias = Callable[[int], float]


def constant_schedule(value: float) -> Schedule:
    """The same rate at every count.

    Args:
        value: The rate.

    Examples:
        >>> import central_storage.jax as csj
        >>> csj.optim.constant_schedule(0.5)(10)
        0.5
    """
    return lambda count: value


def polynomial_schedule(
    init_value: float, end_value: float, power: float, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """From ``init_value`` to ``end_value``: ``(init - end) · (1 - t / transition_steps)^power + end``.

    Args:
        init_value: The rate until ``transition_begin``.
        end_value: The rate after the transition.
        power: The exponent.
        transition_steps: The number of counts of the transition. Without any, the rate stays ``init_value``.
        transition_begin: The count at which the transition begins.

    Examples:
        >>> import central_storage.jax as csj
        >>> csj.optim.polynomial_schedule(1.0, 0.0, 2, 10)(5)
        0.25
    """
    if transition_steps <= 0:
        return constant_schedule(init_value)
    begin = max(transition_begin, 0)

    def schedule(count: int) -> float:
        left = 1 - min(max(count - begin, 0), transition_steps) / transition_steps
        return float((init_value - end_value) * left**power + end_value)

    return schedule


def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """From ``init_value`` to ``end_value`` on a line.

    Args:
        init_value: As for :func:`polynomial_schedule`.
        end_value: As for :func:`polynomial_schedule`.
        transition_steps: As for :func:`polynomial_schedule`.
        transition_begin: As for :func:`polynomial_schedule`.

    Examples:
        >>> import central_storage.jax as csj
        >>> csj.optim.linear_schedule(0.0, 1.0, 4)(1)
        0.25
    """
    return polynomial_schedule(init_value, end_value, 1, transition_steps, transition_begin)


def piecewise_constant_schedule(
    init_value: float, boundaries_and_scales: Mapping[int, float] | None = None
) -> Schedule:
    """``init_value``, multiplied by each scale from its boundary on.

    Args:
        init_value: The first rate.
        boundaries_and_scales: The factor of each count at which the rate changes.

    Raises:
        InvalidArgumentError: A scale is negative (a ValueError).

    Examples:
        >>> import central_storage.jax as csj
        >>> schedule = csj.optim.piecewise_constant_schedule(1.0, {2: 0.5, 4: 0.5})
        >>> [schedule(count) for count in range(6)]
        [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    """
    scales = dict(boundaries_and_scales or {})
    if any(scale < 0 for scale in scales.values()):
        raise InvalidArgumentError(f"piecewise_constant_schedule takes scales of at least 0, not {scales}")
    return lambda count: init_value * math.prod(scale for boundary, scale in scales.items() if count >= boundary)


def exponential_decay(
    init_value: float,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> Schedule:
    """``init_value · decay_rate^(t / transition_steps)``.

    Args:
        init_value: The rate until ``transition_begin``.
        transition_steps: The counts after which the rate is ``decay_rate`` times as large. Without any, or with a decay
            rate of 0, the rate stays ``init_value``.
        decay_rate: The factor.
        transition_begin: The count at which the decay begins.
        staircase: Whether the exponent is rounded down.
        end_value: A bound that the rate does not pass; None: no bound.

    Examples:
        >>> import central_storage.jax as csj
        >>> csj.optim.exponential_decay(1.0, 10, 0.5)(20)
        0.25
    """
    if transition_steps <= 0 or decay_rate == 0:
        return constant_schedule(init_value)
    begin = max(transition_begin, 0)

    def schedule(count: int) -> float:
        since = count - begin
        exponent = since // transition_steps if staircase else since / transition_steps
        rate = init_value if since <= 0 else init_value * decay_rate**exponent
        if end_value is None:
            return float(rate)
        return float(max(rate, end_value) if decay_rate < 1 else min(rate, end_value))

    return schedule


def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0) -> Schedule:
    """``init_value · ((1 - alpha) · (½ (1 + cos(π t / decay_steps)))^exponent + alpha)`` (Loshchilov and Hutter, 2017).

    Args:
        init_value: The rate at count 0.
        decay_steps: The counts of the decay.
        alpha: The share of ``init_value`` that remains.
        exponent: Bends the curve.

    Raises:
        InvalidArgumentError: ``decay_steps`` is not above 0 (a ValueError).

    Examples:
        >>> import central_storage.jax as csj
        >>> round(csj.optim.cosine_decay_schedule(1.0, 10)(5), 6)
        0.5
    """
    if decay_steps <= 0:
        raise InvalidArgumentError(f"cosine_decay_schedule needs decay_steps above 0, not {decay_steps}")

    def schedule(count: int) -> float:
        cosine = 0.5 * (1 + math.cos(math.pi * min(count, decay_steps) / decay_steps))
        return float(init_value * ((1 - alpha) * cosine**exponent + alpha))

    return schedule


def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    """A line from ``init_value`` to ``peak_value``, then a cosine to ``end_value``.

    Args:
        init_value: The rate at count 0.
        peak_value: The rate at the end of the warm-up.
        warmup_steps: The counts of the warm-up.
        decay_steps: The counts of the whole schedule.
        end_value: The last rate.
        exponent: Bends the cosine.

    Raises:
        InvalidArgumentError: ``decay_steps`` is not above ``warmup_steps`` (a ValueError).

    Examples:
        >>> import central_storage.jax as csj
        >>> schedule = csj.optim.warmup_cosine_decay_schedule(0.0, 1.0, 2, 4)
        >>> [round(schedule(count), 6) for count in range(5)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    alpha = 0.0 if peak_value == 0 else end_value / peak_value
    cosine = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)
    return join_schedules([linear_schedule(init_value, peak_value, warmup_steps), cosine], [warmup_steps])


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Schedules one after the other; each counts from its own boundary.

    Args:
        schedules: The schedules.
        boundaries: The counts at which the second and later ones begin.

    Raises:
        InvalidArgumentError: There is not one boundary less than there are schedules (a ValueError).

    Examples:
        >>> import central_storage.jax as csj
        >>> warm = csj.optim.linear_schedule(0.0, 1.0, 2)
        >>> csj.optim.join_schedules([warm, csj.optim.constant_schedule(1.0)], [2])(1)
        0.5
    """
    if not schedules or len(boundaries) != len(schedules) - 1:
        raise InvalidArgumentError(
            f"join_schedules takes one boundary less than schedules, not {len(boundaries)} for {len(schedules)}"
        )

    def schedule(count: int) -> float:
        chosen, begin = schedules[0], 0
        for boundary, following in zip(boundaries, schedules[1:], strict=True):
            if count >= boundary:
                chosen, begin = following, boundary
        return chosen(count - begin)

    return schedule
