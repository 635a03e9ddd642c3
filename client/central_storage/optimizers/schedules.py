"""Learning rates as functions of the step. The server evaluates them when it commits a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from central_storage.core.public_objects import Closed
from central_storage.core.tensors.tensor import as_tensor
from cs_proto.arithmetic.schedules import FIELDS, Kind, rate
from cs_proto.arithmetic.schedules import Schedule as ScheduleRecord
from cs_proto.errors import InvalidArgumentError, LocalProtocolError

__all__ = [
    "CosineDecay",
    "CosineDecayRestarts",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LearningRateSchedule",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
]


class LearningRateSchedule(Closed):
    """A learning rate as a function of the step.

    Derive from it for a schedule of your own. The script calls it before every run with the optimizer's ``iterations``.
    Any other callable does as well.

    Examples:
        >>> import central_storage as cs
        >>> class Halving(cs.optimizers.schedules.LearningRateSchedule):
        ...     def __call__(self, step):
        ...         return 0.5**step
        >>> Halving()(3)
        0.125
    """

    def __call__(self, step: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define __call__(step), which returns the learning rate")


class Schedule(LearningRateSchedule):
    """Base of our schedules: hand one to an optimizer as its ``learning_rate``, or call it with a step.

    Raises InvalidArgumentError (a ValueError) for numbers that make no schedule.
    """

    kind: ClassVar[Kind]

    def __init__(self, name: str | None, **config: Any) -> None:
        self.name = name
        self._config = config
        try:
            self._record = ScheduleRecord(self.kind, tuple(float(number) for number in self._numbers()))
        except (LocalProtocolError, TypeError, ValueError, OverflowError) as error:
            detail = str(error).removeprefix("Schedule: ")
            raise InvalidArgumentError(f"{self.kind}: {detail}") from error

    def __call__(self, step: Any) -> Any:
        """The learning rate of the update before which ``step`` have been made, a float64 without axes."""
        return as_tensor(np.float64(rate(self.kind, self._record.numbers, float(step))))

    def record(self) -> ScheduleRecord:
        """The schedule as a record for the server."""
        return self._record

    def get_config(self) -> dict[str, Any]:
        """The arguments that make an equal schedule.

        Examples:
            >>> import central_storage as cs
            >>> cs.optimizers.schedules.PiecewiseConstantDecay([10], [0.1, 0.01]).get_config()
            {'boundaries': [10], 'values': [0.1, 0.01], 'name': None}
        """
        return {**self._config, "name": self.name}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """A schedule with these arguments.

        Args:
            config: A mapping as :meth:`get_config` returns it.

        Raises:
            InvalidArgumentError: The numbers make no schedule (a ValueError).

        Examples:
            >>> import central_storage as cs
            >>> config = {"boundaries": [10], "values": [0.1, 0.01]}
            >>> cs.optimizers.schedules.PiecewiseConstantDecay.from_config(config)(11).item()
            0.01
        """
        return cls(**config)

    def _numbers(self) -> Sequence[Any]:
        return [self._config[field] for field in FIELDS[self.kind]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self._record == other._record

    def __hash__(self) -> int:
        return hash(self._record)

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(f'{key}={value!r}' for key, value in self._config.items())})"


class ExponentialDecay(Schedule):
    """``initial · decay_rate ** (step / decay_steps)``; with ``staircase`` the exponent is rounded down.

    Args:
        initial_learning_rate: The rate of step 0.
        decay_steps: The steps after which the rate is ``decay_rate`` times the initial one.
        decay_rate: The factor.
        staircase: Whether the rate changes only at multiples of ``decay_steps``.
        name: Kept.

    Raises:
        InvalidArgumentError: The numbers make no schedule (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> float(cs.optimizers.schedules.ExponentialDecay(1.0, decay_steps=10, decay_rate=0.5)(20))
        0.25
    """

    kind = "ExponentialDecay"

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        decay_rate: float,
        staircase: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            name,
            initial_learning_rate=initial_learning_rate,
            decay_steps=decay_steps,
            decay_rate=decay_rate,
            staircase=staircase,
        )


class PiecewiseConstantDecay(Schedule):
    """``values[0]`` up to and with step ``boundaries[0]``, then ``values[1]``, and so on.

    Args:
        boundaries: The last steps of all values but the last, in order.
        values: The rates, one more than boundaries.
        name: Kept.

    Raises:
        InvalidArgumentError: The numbers make no schedule (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> rate = cs.optimizers.schedules.PiecewiseConstantDecay([10], [0.1, 0.01])
        >>> float(rate(10)), float(rate(11))
        (0.1, 0.01)
    """

    kind = "PiecewiseConstantDecay"

    def __init__(self, boundaries: Sequence[float], values: Sequence[float], name: str | None = None) -> None:
        super().__init__(name, boundaries=list(boundaries), values=list(values))

    def _numbers(self) -> Sequence[Any]:
        boundaries, values = self._config["boundaries"], self._config["values"]
        if len(values) != len(boundaries) + 1:
            raise ValueError(f"{len(boundaries)} boundaries need {len(boundaries) + 1} values, not {len(values)}")
        return [*boundaries, *values]


class CosineDecay(Schedule):
    """Half a cosine from the initial rate to ``alpha`` times it over ``decay_steps``, and that from then on.

    With ``warmup_target`` the rate first rises in a line from the initial rate to the target over ``warmup_steps``, and
    the cosine begins there.

    Args:
        initial_learning_rate: The rate of step 0.
        decay_steps: The length of the cosine.
        alpha: The last rate, as a part of the rate at which the cosine begins.
        name: Kept.
        warmup_target: The rate at the end of the warm-up; None: no warm-up.
        warmup_steps: The length of the warm-up.

    Raises:
        InvalidArgumentError: The numbers make no schedule (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> rate = cs.optimizers.schedules.CosineDecay(1.0, decay_steps=100, alpha=0.1)
        >>> float(rate(0)), round(float(rate(100)), 6)
        (1.0, 0.1)
    """

    kind = "CosineDecay"

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        alpha: float = 0.0,
        name: str | None = None,
        warmup_target: float | None = None,
        warmup_steps: float = 0,
    ) -> None:
        super().__init__(
            name,
            initial_learning_rate=initial_learning_rate,
            decay_steps=decay_steps,
            alpha=alpha,
            warmup_target=warmup_target,
            warmup_steps=warmup_steps,
        )

    def _numbers(self) -> Sequence[Any]:
        given, target = self._config, self._config["warmup_target"]
        warmup = [target is not None, 0.0 if target is None else target, given["warmup_steps"]]
        return [given["initial_learning_rate"], given["decay_steps"], given["alpha"], *warmup]


class PolynomialDecay(Schedule):
    """``(initial - end) · (1 - step / decay_steps) ** power + end``, and ``end`` from ``decay_steps`` on.

    With ``cycle`` the schedule begins again instead, over the next multiple of ``decay_steps`` that is not exceeded.

    Args:
        initial_learning_rate: The rate of step 0.
        decay_steps: The length of the decay.
        end_learning_rate: The last rate.
        power: The power; 1 is a line.
        cycle: Whether the decay begins again.
        name: Kept.

    Raises:
        InvalidArgumentError: The numbers make no schedule (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> float(cs.optimizers.schedules.PolynomialDecay(1.0, decay_steps=10, end_learning_rate=0.0)(5))
        0.5
    """

    kind = "PolynomialDecay"

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        end_learning_rate: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            name,
            initial_learning_rate=initial_learning_rate,
            decay_steps=decay_steps,
            end_learning_rate=end_learning_rate,
            power=power,
            cycle=cycle,
        )


class InverseTimeDecay(Schedule):
    """``initial / (1 + decay_rate · step / decay_steps)``; with ``staircase`` the quotient is rounded down.

    Args:
        initial_learning_rate: The rate of step 0.
        decay_steps: The steps that count as one.
        decay_rate: The factor of the steps.
        staircase: Whether the rate changes only at multiples of ``decay_steps``.
        name: Kept.

    Raises:
        InvalidArgumentError: The numbers make no schedule (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> float(cs.optimizers.schedules.InverseTimeDecay(1.0, decay_steps=10, decay_rate=0.5)(20))
        0.5
    """

    kind = "InverseTimeDecay"

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        decay_rate: float,
        staircase: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            name,
            initial_learning_rate=initial_learning_rate,
            decay_steps=decay_steps,
            decay_rate=decay_rate,
            staircase=staircase,
        )


class CosineDecayRestarts(Schedule):
    """Half a cosine from the initial rate down to ``alpha`` times it, again and again (Loshchilov and Hutter, 2017).

    The first takes ``first_decay_steps``. Each of the others takes ``t_mul`` times as many as the one before it, and
    begins at ``m_mul`` times its height.

    Args:
        initial_learning_rate: The rate of step 0.
        first_decay_steps: The length of the first cosine.
        t_mul: How much longer each cosine is than the one before it, at least 1.
        m_mul: How much higher each cosine begins than the one before it.
        alpha: The last rate of a cosine, as a part of the initial rate.
        name: Kept.

    Raises:
        InvalidArgumentError: The numbers make no schedule (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> rate = cs.optimizers.schedules.CosineDecayRestarts(1.0, first_decay_steps=10, m_mul=0.5)
        >>> [float(rate(step)) for step in (0, 5, 10, 20)]
        [1.0, 0.5, 0.5, 0.25]
    """

    kind = "CosineDecayRestarts"

    def __init__(
        self,
        initial_learning_rate: float,
        first_decay_steps: float,
        t_mul: float = 2.0,
        m_mul: float = 1.0,
        alpha: float = 0.0,
        name: str | None = None,
    ) -> None:
        super().__init__(
            name,
            initial_learning_rate=initial_learning_rate,
            first_decay_steps=first_decay_steps,
            t_mul=t_mul,
            m_mul=m_mul,
            alpha=alpha,
        )


_KINDS: dict[str, type[Schedule]] = {
    cls.kind: cls
    for cls in (
        ExponentialDecay,
        PiecewiseConstantDecay,
        CosineDecay,
        PolynomialDecay,
        InverseTimeDecay,
        CosineDecayRestarts,
    )
}


def schedule_of(record: ScheduleRecord) -> Schedule:
    """The schedule that the server follows."""
    numbers = record.numbers
    if record.kind == "PiecewiseConstantDecay":
        middle = len(numbers) // 2
        return PiecewiseConstantDecay(numbers[:middle], numbers[middle:])
    config: dict[str, Any] = dict(zip(FIELDS[record.kind], numbers, strict=True))
    if record.kind == "CosineDecay" and not config.pop("has_warmup"):
        config["warmup_target"] = None
    return _KINDS[record.kind].from_config(
        {field: bool(value) if field in ("staircase", "cycle") else value for field, value in config.items()}
    )


def schedule_from_config(config: Mapping[str, Any]) -> Schedule:
    """The schedule that an optimizer's ``get_config`` names. Raises InvalidArgumentError for a name unknown here."""
    cls = _KINDS.get(str(config.get("class_name")))
    if cls is None:
        raise InvalidArgumentError(f"unknown schedule {config.get('class_name')!r}: there are {', '.join(_KINDS)}")
    return cls.from_config(config["config"])
