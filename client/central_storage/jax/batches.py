"""Global batches, with what every row counts in their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from central_storage.core import context
from central_storage.core.backends import Carriage
from central_storage.core.handles import weakly
from central_storage.data.places import refuse_in_replica
from central_storage.data.weighted import WeightedDataset

if TYPE_CHECKING:
    from central_storage.data.distributed import DistributedDataset
    from central_storage.strategy.base import StrategyBase

__all__ = ["batches"]


def batches(
    strategy: StrategyBase, data: Iterable[Any], weight: Callable[[Any], Any] | None = None
) -> DistributedDataset:
    """The global batches of ``data``, split over the replicas by rows, as the function of :func:`step` takes them.

    Every element carries what each of its rows counts, so a mean over the rows of the global batch is trained whatever
    the shares: uneven ones, and empty ones.

    Args:
        strategy: The strategy of the replicas.
        data: A ``cs.data.Dataset``, a DataLoader, a list, or anything else that can be iterated again and again and
            yields nests of arrays with the same number of rows. Of a tuple or list, the loss gets every part as an
            argument, if it takes so many; anything else, such as a dict or a named tuple, is one argument.
        weight: What each row of a batch counts, such as the number of its tokens: a function from the batch to numbers
            of at least 0, one for each row. The loss of a share must be a mean with the same weights. None: every row
            counts the same.

    Returns:
        A distributed data set of pairs: the batch, and the weights.

    Raises:
        NotADatasetError: ``data`` cannot be iterated (a TypeError).
        TypeError: ``weight`` cannot be called.
        InvalidArgumentError: At a batch without rows, of arrays with different numbers of rows, or whose weights are no
            such numbers or all 0 (a ValueError).
        DatasetContextError: Called inside a replica (a RuntimeError).

    Examples:
        >>> import numpy as np
        >>> import central_storage as cs, central_storage.jax as csj
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     for (x, y), weights in csj.batches(strategy, [(np.arange(3), np.zeros(3))]):
        ...         print([len(share) for share in strategy.experimental_local_results(x)])
        [2, 1]
    """
    refuse_in_replica("made")
    context.require_cross_replica(strategy, "csj.batches")
    if weight is not None and not callable(weight):
        raise TypeError(f"weight must be a function of a batch that returns a number for each row, not {weight!r:.100}")
    return WeightedDataset(data, strategy.num_replicas_in_sync, weight, weakly(strategy.carrier, Carriage))
