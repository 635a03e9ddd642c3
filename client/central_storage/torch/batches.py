"""Global batches, split over the replicas by rows, with what each row counts in the mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import optree
import torch

from central_storage.data.dataset import Dataset
from central_storage.data.distributed import DistributedDataset
from central_storage.data.libraries import Reading, is_hugging_face
from central_storage.data.splitting import arrays_in, plain_array, split
from central_storage.strategy.service_strategy import CentralStorageStrategy
from cs_proto.errors import InvalidArgumentError, UnbatchedDatasetError
from cs_proto.printable import counted

from .share import Share

__all__ = ["Weigh", "batches", "distributed", "parts", "share_of"]

#: What each row of a batch counts: numbers of at least 0, one for each row.
Weigh = Callable[[Any], Any]


#: The key of a batch that is prepared: a dict of one entry, since plain containers are pickled fastest. Its value is a
#: tuple: the data, of which every array has as many rows as all replicas take together; a row for each replica, int64,
#: of the number of rows, the number of replicas and flags which arrays are the bits of bfloat16, a dtype that NumPy
#: does not have; and what each row counts, float64 with the sum 1, or None if all count the same.
_KEY = "central_storage.torch.batch"

Batch: TypeAlias = dict[str, tuple[Any, Any, Any]]


def batches(strategy: CentralStorageStrategy, loader: Iterable[Any], weight: Weigh | None = None) -> DistributedDataset:
    """The batches of a loader, for functions that ``cst.step``, ``cst.function`` or ``cst.evaluate`` has decorated.

    Each batch is split by rows. The shares may differ in size; a batch with fewer rows than replicas leaves some
    without rows, and the results are the same. From the second batch on they are read ahead.

    Args:
        strategy: The strategy whose replicas take the batches.
        loader: A ``DataLoader``, or anything iterable that yields global batches: a tensor, or a tuple, list or dict of
            tensors, whose axis 0 are the rows. Arrays are taken as tensors. Tensors of bfloat16 stay so.
        weight: A function of a batch, as the loader yields it, that returns what each row counts, such as its number of
            tokens: numbers of at least 0, one for each row. None: all rows count the same. The function returns the
            mean over its share, weighted in the same way.

    Returns:
        A distributed data set. It can be iterated again and again, and a checkpoint can hold its position.

    Raises:
        TypeError: ``strategy`` is not a strategy, or ``weight`` cannot be called.
        NotADatasetError: ``loader`` cannot be iterated (a TypeError).
        InvalidArgumentError: While it is iterated: a batch has no rows, its tensors differ in rows, or weights do not
            fit (a ValueError).

    Examples:
        >>> import torch
        >>> import central_storage as cs, central_storage.torch as cst
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     loader = torch.utils.data.DataLoader(torch.arange(5.0), batch_size=2)
        ...     print(len(list(cst.batches(strategy, loader))))
        3
    """
    if not isinstance(strategy, CentralStorageStrategy):
        raise TypeError(f"strategy must be a CentralStorageStrategy, not {strategy!r:.100}")
    if weight is not None and not callable(weight):
        raise TypeError(f"weight must be a function of a batch that returns a number for each row, not {weight!r:.100}")
    replicas = strategy.num_replicas_in_sync
    if not isinstance(loader, Iterable) or isinstance(loader, torch.Tensor | np.ndarray | str | bytes | Mapping):
        return strategy.experimental_distribute_dataset(loader)  # which says what can be distributed
    if isinstance(loader, Dataset):
        return strategy.experimental_distribute_dataset(
            loader.map(lambda *parts: prepared(parts if len(parts) > 1 else parts[0], weight or _alike, replicas))
        )
    return strategy.experimental_distribute_dataset(_Weighed(loader, weight, replicas))


class _Weighed:
    """The batches of a loader, prepared."""

    def __init__(self, loader: Iterable[Any], weigh: Weigh | None, replicas: int) -> None:
        self._loader = loader
        self._weigh = weigh
        self._replicas = replicas
        self._is_used = False

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self._loader, Iterator):
            if self._is_used:
                raise InvalidArgumentError(
                    f"the {type(self._loader).__name__} given to cst.batches can be iterated only once, and has been; "
                    "pass the loader, or call cst.batches with a new iterator"
                )
            self._is_used = True
        for batch in Reading(self._loader):
            yield prepared(batch, self._weigh, self._replicas)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """The position of a loader that has one."""
        if name in ("state_dict", "load_state_dict") and not is_hugging_face(self._loader):
            return getattr(self._loader, name)
        raise AttributeError(name)


def distributed(batch: Any, replicas: int) -> tuple[Any, Any, Any]:
    """The parts of a batch that is prepared, an element of :func:`batches`, or of one that the user passes by hand."""
    is_prepared = type(batch) is dict and _KEY in batch
    found: Batch = batch if is_prepared else split(prepared(batch, None, replicas), replicas)
    return found[_KEY]


def prepared(batch: Any, weigh: Weigh | None, replicas: int) -> Batch:
    """A global batch with its weights. Where replicas would get no rows, rows of replica 0 come again behind the last
    row: :func:`share_of` knows them."""
    bits: list[Any] = []
    try:
        arrays = arrays_in(_as_bits(tuple(batch) if type(batch) is list else batch, bits))
        data = optree.tree_map(plain_array, arrays, none_is_leaf=True)
    except InvalidArgumentError as error:
        error.add_note("Convert it in the loader, as by x.float(), x.to_dense() or x.detach().")
        raise
    leaves = [leaf for leaf in optree.tree_leaves(data, none_is_leaf=True) if leaf is not None]
    are_bits = [any(leaf is each for each in bits) for leaf in leaves]
    lengths = {leaf.shape[0] if leaf.shape else None for leaf in leaves}
    if None in lengths:
        raise UnbatchedDatasetError(
            f"the batch {batch!r:.200} holds a scalar, which has no rows; pass constants as keyword arguments of the "
            "decorated function, or let the loader make batches"
        )
    if len(lengths) != 1:
        raise InvalidArgumentError(
            f"the tensors of a batch must have the same number of rows, but have {sorted(lengths)}"  # type: ignore[type-var]
            if lengths
            else f"the batch {batch!r:.100} holds no tensor"
        )
    (rows,) = lengths
    assert rows is not None
    if not rows:
        raise InvalidArgumentError("a batch has no rows, so it has no mean; leave it out")
    weights = None if weigh is None else _weights(weigh(batch), rows)
    size = -(-rows // replicas)
    if (replicas - 1) * size >= rows:
        order = np.concatenate([np.arange(rows), np.arange(rows, replicas * size) % size])
        data = optree.tree_map(lambda leaf: None if leaf is None else leaf[order], data, none_is_leaf=True)
        weights = None if weights is None else np.where(np.arange(replicas * size) < rows, weights[order], 0.0)
    return {_KEY: (data, np.tile(np.array([rows, replicas, *are_bits], np.int64), (replicas, 1)), weights)}


def _as_bits(batch: Any, found: list[Any]) -> Any:
    """The batch with an array of int16 in place of each tensor of bfloat16; these are added to ``found``."""

    def bits(leaf: Any) -> Any:
        if not (isinstance(leaf, torch.Tensor) and leaf.dtype is torch.bfloat16 and leaf.device.type == "cpu"):
            return leaf
        found.append(leaf.detach().view(torch.int16).numpy())
        return found[-1]

    return optree.tree_map(bits, batch, none_is_leaf=True)


def _from_bits(data: Any, are_bits: np.ndarray) -> Any:
    """In a replica: the data with tensors of bfloat16 again."""
    flags = iter(are_bits)
    return optree.tree_map(
        lambda leaf: torch.from_dlpack(leaf).view(torch.bfloat16) if leaf is not None and next(flags) else leaf,
        data,
        none_is_leaf=True,
    )


def _alike(batch: Any) -> np.ndarray:
    """The weights of rows that count the same: an element of a :class:`Dataset` holds no None."""
    return np.ones(_length(batch))


def _weights(given: Any, rows: int) -> np.ndarray:
    weights = np.asarray(given.detach().cpu() if isinstance(given, torch.Tensor) else given, np.float64)
    if weights.shape != (rows,):
        raise InvalidArgumentError(f"weight returned the shape {weights.shape} for a batch of {counted(rows, 'row')}")
    if not np.isfinite(weights).all() or weights.min() < 0 or not weights.any():
        raise InvalidArgumentError("weight must return finite numbers of at least 0 that are not all 0")
    normalized: np.ndarray = weights / weights.sum()
    return normalized


def share_of(batch: Batch | tuple[Any, Any, Any], replica: int, replicas: int) -> tuple[Any, Share, np.ndarray | None]:
    """In a replica: the data of its share, without rows that are not its own unless it has none, and the share; also
    what each row counts."""
    data, about, weights = batch[_KEY] if isinstance(batch, dict) else batch
    count, prepared_for, are_bits = int(about[0, 0]), int(about[0, 1]), about[0, 2:]
    if prepared_for != replicas:
        raise InvalidArgumentError(
            f"the batch is split over {prepared_for} replica(s), and the strategy of the model has {replicas}: call "
            "cst.batches with that strategy"
        )
    if are_bits.any():
        data = _from_bits(data, are_bits)
    size = -(-count // replicas)
    own = max(0, min(count - replica * size, size))
    if own and own < _length(data):
        data = optree.tree_map(lambda leaf: None if leaf is None else leaf[:own], data, none_is_leaf=True)
    weights = None if weights is None else weights[:own] if own else weights[:0]
    weight = own / count if weights is None else float(weights.sum())
    return data, Share(replica, weight, not own, min(replicas, -(-count // size))), weights


def _length(data: Any) -> int:
    return len(next(leaf for leaf in optree.tree_leaves(data)))


def parts(data: Any, share: Share, weights: np.ndarray | None, count: int) -> list[tuple[Any, float]]:
    """The share in ``count`` parts or, where it has fewer rows, as many as it has, each with the part of the share's
    weight that it counts."""
    rows = _length(data)
    if count == 1 or rows == 1:
        return [(data, 1.0)]
    size = -(-rows // count)
    made = []
    for first in range(0, rows, size):
        piece = slice(first, first + size)
        part = optree.tree_map(lambda leaf, piece=piece: None if leaf is None else leaf[piece], data, none_is_leaf=True)
        if share.is_empty or weights is None or not share.weight:
            weight = len(range(*piece.indices(rows))) / rows
        else:
            weight = float(weights[piece].sum()) / share.weight
        made.append((part, weight))
    return made
