"""The bar of a series of steps: how many are over, how fast, and the loss of the last one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from central_storage.core.values import DistributedValues
from central_storage.diagnostics.bars import Bar
from central_storage.diagnostics.extras import require

__all__ = ["StepBar", "checked", "known", "mean_of", "numbers_of", "step_bar", "with_bar"]

T = TypeVar("T")


class StepBar:
    """Counts steps. Their results are there when they are counted, and are looked at only when the bar changes."""

    def __init__(self, text: str, total: int | None, units: str = "steps") -> None:
        """Raises ModuleNotFoundError as :class:`Bar`."""
        self._bar = Bar(text, total, units)
        self._last: Any = None

    def passed(self, result: Any) -> None:
        """A step is over, with this result."""
        self._last = result
        if self._bar.advance():
            self._bar.show(numbers_of(result))

    def show(self, numbers: dict[str, float]) -> None:
        """Show these numbers when the bar changes next."""
        self._last = numbers
        if self._bar.advance(0):
            self._bar.show(numbers)

    def close(self) -> None:
        """Show the end. Idempotent."""
        last, self._last = self._last, None
        self._bar.close(numbers_of(last))


def step_bar(text: str | None, total: int | None) -> StepBar | None:
    """The bar that stands behind ``text``; None if there is none."""
    return None if text is None else StepBar(text, total)


def checked(progress: bool | str) -> str | None:
    """The text before the bar that ``progress`` asks for; None if it asks for none.

    Raises TypeError if ``progress`` is neither a bool nor a str, and ModuleNotFoundError without tqdm.
    """
    if not isinstance(progress, bool | str):
        raise TypeError(f"progress must be True, False or a text that stands before the bar, not {progress!r:.80}")
    if progress is False:
        return None
    require("tqdm", "progress", "a progress bar")
    return "" if progress is True else progress


def with_bar(results: Iterator[T], progress: bool | str, total: int | None) -> Iterator[T]:
    """The ``results``, with a bar if ``progress`` asks for one. Raises as :func:`checked`."""
    text = checked(progress)
    return results if text is None else _counted(results, text, total)


def _counted(results: Iterator[T], text: str, total: int | None) -> Iterator[T]:
    bar = StepBar(text, total)
    try:
        for result in results:
            bar.passed(result)
            yield result
    finally:
        bar.close()


def known(length: Callable[[], int], otherwise: int | None = None) -> int | None:
    """The length, or ``otherwise`` if it is not known."""
    try:
        return length()
    except TypeError:
        return otherwise


def numbers_of(result: Any) -> dict[str, float] | None:
    """What a bar shows of a result: as loss, the mean over the replicas of a number, or of the first part of a tuple;
    of a mapping every number, by its name. None if there is none.

    >>> from central_storage.core.values import PerReplica
    >>> numbers_of((PerReplica([1.0, 2.0]), "text")), numbers_of({"error": 0.5, "text": "text"}), numbers_of(None)
    ({'loss': 1.5}, {'error': 0.5}, None)
    """
    given = result if isinstance(result, Mapping) else {"loss": result[0] if _is_tuple(result) else result}
    found = {str(name): mean for name, value in given.items() if (mean := mean_of(value)) is not None}
    return found or None


def mean_of(value: Any) -> float | None:
    """The mean over the replicas of a value that is one number in each; None if it is anything else, or if reading it
    would wait for a GPU.

    >>> from central_storage.core.values import PerReplica
    >>> mean_of(PerReplica([1.0, 2.0])), mean_of(3), mean_of("text"), mean_of([1.0])
    (1.5, 3.0, None, None)
    """
    numbers = [_number(each) for each in (value.values if isinstance(value, DistributedValues) else (value,))]
    known = [number for number in numbers if number is not None]
    return sum(known) / len(known) if len(known) == len(numbers) > 0 else None


def _is_tuple(result: Any) -> bool:
    return isinstance(result, tuple) and bool(result)


def _number(value: Any) -> float | None:
    if isinstance(value, bool | np.bool_):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:  # an int beyond float64, which must not end the training
            return math.inf if value > 0 else -math.inf
    if not isinstance(value, np.ndarray | np.generic):
        is_here = getattr(value, "is_ready", None)  # of an array of JAX
        device = getattr(getattr(value, "device", None), "type", "")  # of a tensor of torch
        shape = getattr(value, "shape", None)
        if not (device == "cpu" or (callable(is_here) and is_here())) or shape is None or np.prod(shape) != 1:
            return None
        try:
            value = np.asarray(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, RuntimeError):  # of a dtype or a layout that NumPy lacks
            return None
    return float(value.item()) if value.size == 1 and value.dtype.kind in "iuf" else None
