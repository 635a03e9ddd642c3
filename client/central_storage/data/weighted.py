"""Global batches with what every row counts in their mean, split over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import optree

from cs_proto.errors import InvalidArgumentError
from cs_proto.printable import counted

from .distributed import (
    DistributedDataset,
    DistributedFromFunction,
    DistributedIterator,
    FindCarriage,
    Round,
    elsewhere,
)
from .element_spec import PerReplicaSpec, TensorSpec
from .splitting import Carry, arrays_in, split

__all__ = ["Weighted", "WeightedDataset", "is_weighted", "share_of", "weighted", "weights_of"]


class Weighted(NamedTuple):
    """A global batch, and for each row its weight and the sum of all weights, float64 [rows, 2]."""

    batch: Any
    weights: Any


class WeightedDataset(DistributedDataset):
    """Global batches with their weights, as :func:`weighted` makes them, each split over the replicas by rows."""

    def __init__(self, dataset: Any, n: int, weight: Callable[[Any], Any] | None, carrier: FindCarriage) -> None:
        super().__init__(dataset, n, None, carrier)
        self._weight = weight

    def _rounds(self, carry: Carry, states: Any = None) -> Iterator[Round]:
        (reading,) = readings = self._readings(states)
        try:
            for batch in reading:
                yield split(weighted(batch, self._weight), self._n, carry.leaf), True, self._states(readings)
        finally:
            reading.close()

    @property
    def element_spec(self) -> Any:
        """As for the data set alone, beside that of the weights."""
        batch = super().element_spec
        spec = optree.tree_leaves(batch)[0]
        first = spec if self._n == 1 else spec.values[0]
        weights = TensorSpec((first.shape[0], 2), np.dtype(np.float64))
        return Weighted(batch, weights if self._n == 1 else PerReplicaSpec((weights,) * self._n))

    def __reduce__(self) -> tuple[Any, ...]:
        return elsewhere, (DistributedDataset,)


def is_weighted(data: DistributedDataset | DistributedFromFunction | DistributedIterator) -> bool:
    """Whether the elements of a distributed data set, or of an iterator of one, are :class:`Weighted`."""
    return isinstance(data.data if isinstance(data, DistributedIterator) else data, WeightedDataset)


def weighted(batch: Any, weight: Callable[[Any], Any] | None = None) -> Weighted:
    """The batch as arrays, with its weights.

    ``weight`` gives the weights of the rows of a batch; None: each row counts 1. Raises InvalidArgumentError for a
    batch without rows or of arrays with different numbers of rows, and for weights that are negative, not finite or
    all 0.
    """
    arrays = arrays_in(batch)
    rows = _rows(arrays)
    if not rows:
        raise InvalidArgumentError(f"a global batch needs at least one row: {batch!r:.200}")
    counts = np.ones(rows) if weight is None else np.asarray(weight(batch), np.float64)
    if counts.shape != (rows,) or not np.isfinite(counts).all() or (counts < 0).any() or not counts.any():
        raise InvalidArgumentError(
            f"the weights of a batch of {counted(rows, 'row')} must be {counted(rows, 'number')} of at least 0, and "
            f"not all 0, but are {counts!r:.200}"
        )
    return Weighted(arrays, _with_sum(counts, counts.sum()))


def weights_of(shares: Sequence[Any]) -> list[np.ndarray]:
    """The weights of the shares of a batch that is split already, whose rows all count the same. Raises
    InvalidArgumentError as :func:`weighted` does."""
    rows = [_rows(share) for share in shares]
    if not any(rows):
        raise InvalidArgumentError("a global batch needs at least one row, and every share of this one is empty")
    return [_with_sum(np.ones(count), sum(rows)) for count in rows]


def _rows(batch: Any) -> int:
    lengths = {leaf.shape[:1] for leaf in optree.tree_leaves(batch)}
    if len(lengths) != 1 or () in lengths:
        raise InvalidArgumentError(
            f"a global batch needs arrays that have the same number of rows, not {sorted(lengths)}: {batch!r:.200}; "
            "give every array a row for each example"
        )
    ((rows,),) = lengths
    return int(rows)


def _with_sum(counts: np.ndarray, total: float) -> np.ndarray:
    return np.stack([counts, np.full(len(counts), total, np.float64)], axis=1)


def share_of(weights: np.ndarray) -> float:
    """What a share counts in the mean of its global batch, by its weights: from 0 to 1, and 0 without rows."""
    return float(weights[:, 0].sum() / weights[0, 1]) if len(weights) else 0.0
