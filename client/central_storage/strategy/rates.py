"""Hyperparameters that ``run_steps`` gives to optimizers step by step: one item of each iterable for each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from central_storage.core.handles import handle_id
from central_storage.core.pipeline import Changes
from central_storage.optimizers.optimizer import Optimizer
from cs_proto.errors import InvalidArgumentError

__all__ = ["Rates"]


class Rates:
    """The iterables of one ``run_steps``. They are read as steps are sent."""

    def __init__(self, rates: object, take_along: Callable[[Optimizer], None]) -> None:
        """``take_along`` makes an optimizer one of the strategy.

        Raises TypeError for something else than a mapping of optimizers to iterables, InvalidArgumentError for an
        optimizer with a schedule of its own, and ContextError for one of another strategy.
        """
        if not isinstance(rates, Mapping):
            raise TypeError(f"rates must be a mapping of optimizers to iterables, not a {type(rates).__name__}")
        self._items: dict[Optimizer, Iterator[Any]] = {}
        self._read = 0
        #: What was sent with the steps that are not known to have begun.
        self._sent: deque[dict[Optimizer, dict[str, float]]] = deque()
        for optimizer, items in rates.items():
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"rates must be a mapping of optimizers; {optimizer!r:.80} is none")
            try:
                self._items[optimizer] = iter(items)
            except TypeError:
                raise TypeError(
                    f"the rates of {optimizer.name} must be an iterable with an item for each step, not {items!r:.80}"
                ) from None
            optimizer.refuse_schedule()
            take_along(optimizer)

    def send(self, send: Callable[[Changes], None]) -> None:
        """Send the next step with its items.

        Raises InvalidArgumentError if an iterable has no item left, or for an item that the optimizer cannot take; then
        nothing was sent.
        """
        changes = {optimizer: self._next(optimizer, items) for optimizer, items in self._items.items()}
        self._read += 1
        send([(handle_id(optimizer)[1], numbers) for optimizer, numbers in changes.items()])
        self._sent.append(changes)

    def begun(self) -> None:
        """One more step has begun, the first of those that were sent."""
        for optimizer, numbers in self._sent.popleft().items() if self._sent else ():
            optimizer.took(numbers)

    def _next(self, optimizer: Optimizer, items: Iterator[Any]) -> dict[str, float]:
        optimizer.refuse_schedule()
        try:
            item = next(items)
        except StopIteration:
            raise InvalidArgumentError(
                f"the rates of {optimizer.name} end after {self._read} items; run_steps needs one for each step"
            ) from None
        return optimizer.checked_changes(item if isinstance(item, Mapping) else {"learning_rate": item})
