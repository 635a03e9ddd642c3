"""Ray Data: the global batches of a strategy from a data set of Ray, in the order of its rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray.data

from cs_proto.errors import ConfigurationError, InvalidArgumentError

__all__ = ["Batches", "begin", "check_size", "dataset", "in_order"]


class Batches:
    """The global batches of a data set: each is a dict with an array for each column. It can be iterated again and
    again, and gives the same rows each time if the data set does."""

    def __init__(self, source: ray.data.DataIterator, batch_size: int, drop_remainder: bool) -> None:
        """``source`` is Ray's iterator over a data set that keeps the order of its rows."""
        self._source, self._size, self._drops = source, batch_size, drop_remainder

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """From the first row on. Blocks are fetched when their rows are wanted. Raises ConfigurationError if the data
        set has been told meanwhile not to keep the order."""
        begin(self._source)
        return iter(self._source.iter_batches(batch_size=self._size, batch_format="numpy", drop_last=self._drops))


def dataset(source: ray.data.Dataset, batch_size: int, *, drop_remainder: bool = False) -> Batches:
    """The rows of a data set of Ray in their order, as global batches for a strategy of this process. ::

        batches = strategy.experimental_distribute_dataset(dataset(ray.data.read_parquet(path), batch_size=1024))

    Ray reads the blocks of the data set on its nodes. This process fetches one after the other, and cuts batches from
    them. The position in the batches is one number, and a checkpoint that has the distributed data set keeps it.

    Args:
        source: The data set, whose rows keep their order from now on (``preserve_order``). It must give the same rows
            whenever it is read: give a seed to what is random in it.
        batch_size: The number of rows of a global batch, which is divided among the replicas.
        drop_remainder: Leave out the last batch if it is smaller.

    Returns:
        An iterable, for :meth:`experimental_distribute_dataset` of a strategy.

    Raises:
        TypeError: ``source`` is no data set of Ray, or ``batch_size`` no int.
        InvalidArgumentError: ``batch_size`` is less than 1 (a ValueError).
        ModuleNotFoundError: Ray Data is not installed (an ImportError).
    """
    if not isinstance(source, ray.data.Dataset):
        raise TypeError(f"dataset takes a ray.data.Dataset, not {source!r:.200}")
    check_size(batch_size, 1)
    source.context.execution_options = in_order(source.context)
    return Batches(source.iterator(), batch_size, drop_remainder)


def begin(source: ray.data.DataIterator) -> None:
    """Let the next execution of ``source`` give the rows of the first one. Raises ConfigurationError if it does not
    keep the order of its rows."""
    context = source.get_context()
    if not context.execution_options.preserve_order:
        raise ConfigurationError("the data set of Ray does not keep the order of its rows: set preserve_order=True")
    # Some seeds change with each execution in this process, and a training that is started again counts from 0.
    context._execution_idx = 0  # noqa: SLF001


def in_order(context: ray.data.DataContext) -> Any:
    """The execution options of ``context``, with which the rows keep their order."""
    options = copy.deepcopy(context.execution_options)
    options.preserve_order = True
    return options


def check_size(batch_size: object, replicas: int) -> None:
    """Raise TypeError or InvalidArgumentError for what is no size of a batch for so many replicas."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int):
        raise TypeError(f"batch_size must be an int, not {batch_size!r:.100}")
    if batch_size < replicas:
        least = "at least 1" if replicas == 1 else f"at least {replicas}, a row for each replica"
        raise InvalidArgumentError(f"batch_size is the size of the global batch and must be {least}, not {batch_size}")
