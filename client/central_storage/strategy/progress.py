"""``cs.progress``: a loop over anything, with a bar."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from central_storage.core.public_objects import Closed, presented
from cs_proto.errors import InvalidArgumentError

from .run_steps import Steps
from .step_bar import StepBar, known, mean_of

__all__ = ["Progress", "progress"]

T = TypeVar("T")


@presented
class Progress(Closed, Generic[T]):
    """What ``cs.progress`` returns: an iterator over the items of an iterable, which a bar counts.

    The bar ends with the items, with :meth:`close`, with the end of a ``with`` block, and with this object.
    """

    def __init__(self, items: Iterable[T], text: str, total: int | None, units: str) -> None:
        self._items = iter(items)
        self._total = total
        self._has_results = isinstance(items, Steps)
        self._shown: dict[str, float] = {}
        self._bar = StepBar(text, total, units)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            item = next(self._items)
        except BaseException:  # the end of the loop, whatever ends it, also Ctrl-C
            self._bar.close()
            raise
        self._bar.passed(item if self._has_results else self._shown)
        return item

    def __len__(self) -> int:
        if self._total is None:
            raise TypeError("the number of items is not known; say it with cs.progress(iterable, total=number)")
        return self._total

    def __bool__(self) -> bool:
        """True: a loop is something, however many items it has."""
        return True

    def show(self, **numbers: Any) -> None:
        """Show numbers beside the bar when it changes next, in place of those before.

        Args:
            **numbers: Numbers; or results of ``run`` that are a number in each replica: their mean is shown.

        Raises:
            InvalidArgumentError: A value is neither, or lies on a GPU, so that reading it would wait (a ValueError).

        Examples:
            >>> import central_storage as cs
            >>> epochs = cs.progress(range(2), "training", units="epochs")
            >>> for epoch in epochs:
            ...     epochs.show(loss=cs.PerReplica([0.5, 1.5]))
        """
        shown = {name: mean_of(value) for name, value in numbers.items()}
        for name, mean in shown.items():
            if mean is None:
                raise InvalidArgumentError(
                    f"show({name}=…) takes a number that is there, such as float(loss), not {numbers[name]!r:.80}"
                )
        self._has_results, self._shown = False, {name: mean for name, mean in shown.items() if mean is not None}
        self._bar.show(self._shown)

    def close(self) -> None:
        """End the bar. The items that are left can still be taken. Idempotent."""
        self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_bar"):
            self._bar.close()


def progress(iterable: Iterable[T], text: str = "", *, total: int | None = None, units: str = "steps") -> Progress[T]:
    """Iterate over ``iterable``, and show on stderr how far the loop is and how fast.

    A terminal and a notebook show a bar of tqdm. A pipe gets a plain line after ten seconds, then less and less often,
    and one at the end. Of the results of ``run_steps`` the loss is shown: the mean over the replicas of a result that
    is a number, or of the first part of a tuple; of a dict, every number. Other numbers are shown with ``show``.

    Args:
        iterable: What to iterate over: results of ``run_steps``, a distributed data set, a range of epochs, or anything
            else.
        text: What stands before the bar, such as "training".
        total: The number of items. None: ``len(iterable)`` where it is known.
        units: What is counted, in the plural.

    Returns:
        An iterator over the items, with ``show(loss=number)`` and ``close()``.

    Raises:
        ModuleNotFoundError: tqdm is not installed: the extra ``progress`` (an ImportError).
        TypeError: ``iterable`` cannot be iterated, or ``text`` or ``units`` is not a str.
        InvalidArgumentError: ``total`` is not a number from 0 (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     data = strategy.experimental_distribute_dataset(cs.data.Dataset.range(6).batch(2))
        ...     for losses in cs.progress(strategy.run_steps(lambda rows: rows.sum(), data), "training"):
        ...         print(strategy.reduce("SUM", losses, axis=None))
        1
        5
        9
    """
    for name, value in (("text", text), ("units", units)):
        if not isinstance(value, str):
            raise TypeError(f"{name} must be a str, not {value!r:.80}")
    if total is None:
        total = known(lambda: len(iterable))  # type: ignore[arg-type]
    elif isinstance(total, bool) or not isinstance(total, int) or total < 0:
        raise InvalidArgumentError(f"total must be a number of items from 0, or None, not {total!r:.80}")
    return Progress(iterable, text, total, units)
