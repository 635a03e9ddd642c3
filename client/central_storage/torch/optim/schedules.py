"""Numbers of optimizers for steps that are sent ahead, from any scheduler that looks at the number of steps alone.

A twin of the scheduler is stepped when a step is sent. The scheduler itself is stepped when the loop gets the step's
result, so the loop and what follows it see what they would see in a plain loop.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from central_storage.optimizers import Optimizer
from cs_proto.arithmetic.optimizers import is_flag
from cs_proto.errors import ContextError, InvalidArgumentError

from .base import CentralOptimizer, Numbers

__all__ = ["Rates", "rates_ahead"]


def rates_ahead(optimizers: Sequence[CentralOptimizer], scheduler: Any = None) -> Rates:
    """The numbers of the optimizers' groups for each coming step, as ``run_steps(..., rates=...)`` takes them.

    Args:
        optimizers: The optimizers of the steps.
        scheduler: A scheduler of them, or a list of schedulers in the order in which a loop steps them; None: the
            numbers stay.

    Returns:
        By the server's optimizer, an iterator over mappings. Call its :meth:`Rates.taken` with each result of the loop
        and its :meth:`Rates.settle` at the end.

    Raises:
        InvalidArgumentError: A scheduler looks at losses, has no ``step``, or schedules another optimizer (a
            ValueError).
    """
    return Rates(list(optimizers), scheduler)


class Rates(dict[Optimizer, Iterator[Numbers]]):
    """What :func:`rates_ahead` returns."""

    def __init__(self, optimizers: list[CentralOptimizer], scheduler: Any) -> None:
        super().__init__()
        self._optimizers = optimizers
        given = scheduler if isinstance(scheduler, list | tuple) else [scheduler]
        self._schedulers = [each for each in given if each is not None]
        twins = _Twins(optimizers)
        self._twins = [twins.of_scheduler(each) for each in self._schedulers]
        self._twin_optimizers = [twins.of(optimizer) for optimizer in optimizers]
        for optimizer in optimizers:
            optimizer.push()
        #: The numbers of the steps whose results were not taken; those of one step are for all of them without a
        #: scheduler.
        self._expected: deque[list[Numbers]] = deque()
        self._first = _numbers(optimizers)
        self._taken = 0
        if self._schedulers:
            centrals = [central for optimizer in optimizers for central in optimizer.central]
            for index, (central, rows) in enumerate(
                zip(centrals, itertools.tee(self._rows(), len(centrals)), strict=True)
            ):
                self[central] = map(operator.itemgetter(index), rows)

    def _rows(self) -> Iterator[list[Numbers]]:
        """The numbers of all groups for each step."""
        for optimizer in self._optimizers:
            optimizer.forget_pushed()  # from now on the server's numbers follow the steps
        while True:
            row = _numbers(self._twin_optimizers)
            self._expected.append(row)
            yield row
            for twin in self._twins:
                twin.step()

    def taken(self) -> None:
        """Step optimizers and schedulers, since the loop gets the result of the next step.

        Raises:
            ContextError: The loop has changed a group or stepped a scheduler (a RuntimeError).
        """
        if _numbers(self._optimizers) != (self._expected.popleft() if self._expected else self._first):
            raise ContextError(
                f"step {self._taken + 1} of the loop was sent ahead with other numbers than its optimizer has now; "
                "change groups and step schedulers in a plain loop, or pass a scheduler that depends on the number of "
                "its steps alone, as in ahead(scheduler=...)"
            )
        self._step()

    def settle(self, made: int) -> None:
        """At the end of the loop: step for results that were not taken.

        Args:
            made: The number of steps that have succeeded.
        """
        while self._taken < made:
            self._step()
        for optimizer in self._optimizers if self else ():
            optimizer.forget_pushed()

    def _step(self) -> None:
        self._taken += 1
        for stepped in (*self._optimizers, *self._schedulers):
            stepped.step()


def _numbers(optimizers: Iterable[CentralOptimizer]) -> list[Numbers]:
    """The numbers of every group, without the flags, which chose the rules."""
    return [
        {name: value for name, value in numbers.items() if not is_flag(optimizer.kind, name)}
        for optimizer in optimizers
        for numbers in optimizer.numbers()
    ]


class _Twins:
    """Copies of schedulers that change copies of the optimizers' groups.

    Schedulers, containers, arrays and the optimizers' groups are copied. Everything else that a scheduler refers to,
    such as a function or an object whose method it calls, is shared.
    """

    def __init__(self, optimizers: Iterable[CentralOptimizer]) -> None:
        #: By the id of an original: the original, which keeps its id, and the copy.
        self._made: dict[int, tuple[Any, Any]] = {}
        for optimizer in optimizers:
            twin = object.__new__(type(optimizer))
            self._made[id(optimizer)] = optimizer, twin
            groups = [self._note(group, dict(group)) for group in optimizer.param_groups]
            twin.__dict__.update(vars(optimizer), param_groups=self._note(optimizer.param_groups, groups))
            twin.__dict__["_opt_called"] = True  # torch's schedulers warn if an optimizer was not stepped before them

    def _note(self, original: Any, twin: Any) -> Any:
        self._made[id(original)] = original, twin
        return twin

    def of_scheduler(self, scheduler: Any) -> Any:
        """The twin of a scheduler. Raises InvalidArgumentError for one whose steps cannot be known ahead."""
        known = self._made.get(id(scheduler))
        if known is not None:
            return known[1]
        name = type(scheduler).__name__
        step = getattr(scheduler, "step", None)
        if not callable(step):
            raise InvalidArgumentError(f"a scheduler has a method step; {name} has none")
        if isinstance(scheduler, ReduceLROnPlateau) or not _takes_nothing(step):
            raise InvalidArgumentError(
                f"{name} looks at losses, which are not known when steps are sent ahead; step it in a plain loop: "
                "loss = train(batch); scheduler.step(loss)"
            )
        optimizer = vars(scheduler).get("optimizer")
        if isinstance(optimizer, torch.optim.Optimizer) and id(optimizer) not in self._made:
            raise InvalidArgumentError(
                f"{name} schedules a {type(optimizer).__name__} that is no optimizer of this step; pass the schedulers "
                "of the step's optimizers"
            )
        twin = self._note(scheduler, object.__new__(type(scheduler)))
        twin.__dict__.update({key: self.of(value) for key, value in vars(scheduler).items()})
        return twin

    def of(self, value: Any) -> Any:
        """The twin of what a scheduler refers to."""
        known = self._made.get(id(value))
        if known is not None:
            return known[1]
        if isinstance(value, LRScheduler):
            return self.of_scheduler(value)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, tuple):
            return value if hasattr(value, "_fields") else tuple(map(self.of, value))
        if isinstance(value, list | deque):
            twin = self._note(value, copy.copy(value))
            for index, each in enumerate(value):
                twin[index] = self.of(each)
            return twin
        if isinstance(value, dict):
            twin = self._note(value, copy.copy(value))
            for key, each in value.items():
                twin[key] = self.of(each)
            return twin
        return copy.deepcopy(value) if isinstance(value, set | np.ndarray | torch.Tensor) else value


def _takes_nothing(step: Callable[..., Any]) -> bool:
    """Whether ``step`` can be called without an argument."""
    try:
        inspect.signature(step).bind()
    except TypeError:
        return False
    return True
