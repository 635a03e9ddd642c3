"""An element of a data set: its arrays, and one part of it for each replica."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import optree

from central_storage.core.tensors.tensor import Tensor, as_tensor
from central_storage.core.values import PerReplica, convert_to_tensor, per_replica
from cs_proto.arrays import INLINE_NBYTES
from cs_proto.errors import (
    InvalidArgumentError,
    UnbatchedDatasetError,
)

from .tickets import Ticket

__all__ = ["Carry", "arrays_in", "empty_like", "holds_arrays", "is_small", "plain_array", "split"]


def split(element: Any, n: int, carry: Callable[[Any], Any] | None = None) -> Any:
    """``element``, a nest of global batches, with a PerReplica of ``n`` views in place of every array; the views are
    of the array or, with ``carry``, of its result.

    Each array is split by its own axis 0. Plain under one replica. A scalar is an :class:`UnbatchedDatasetError`.
    """

    def shares(leaf: Any) -> Any:
        if leaf is None:
            return None
        if n == 1:
            return as_tensor(leaf if carry is None else carry(leaf))
        if not leaf.shape:
            raise UnbatchedDatasetError(
                f"a scalar cannot be split over {n} replicas: {element!r:.200}; batch the data set by the global batch "
                "size: .batch(size), or batch_size=size of a DataLoader"
            )
        if carry is not None:
            leaf = carry(leaf)
        leaf = leaf.view(Tensor) if type(leaf) is np.ndarray else as_tensor(leaf)
        return per_replica(map(leaf.__getitem__, _shares(leaf.shape[0], n)))

    if type(element) in _ARRAYS:  # many elements are one array or a tuple of arrays, which need no walk
        return shares(element)
    if type(element) is tuple and _ARRAYS.issuperset(map(type, element)):
        return tuple([shares(leaf) for leaf in element])
    return optree.tree_map(shares, arrays_in(element), none_is_leaf=True)


_ARRAYS = frozenset({np.ndarray, Tensor})
# A memory map of NumPy is an array in a file, and nothing else.
_PLAIN = _ARRAYS | {np.memmap}


@functools.lru_cache(64)
def _shares(rows: int, n: int) -> list[slice]:
    """The rows of each replica."""
    size = -(-rows // n)
    return [slice(replica * size, (replica + 1) * size) for replica in range(n)]


def is_small(element: Any) -> bool:
    """Whether every array in ``element`` is small enough to travel inside a message."""
    leaves = optree.tree_leaves(element)
    parts = [part for leaf in leaves for part in (leaf.values if isinstance(leaf, PerReplica) else (leaf,))]
    return all(type(part) in _ARRAYS and part.nbytes <= INLINE_NBYTES for part in parts)


def holds_arrays(element: Any) -> bool:
    leaves = optree.tree_leaves(_nest(element), none_is_leaf=True)
    return any(hasattr(leaf, "shape") and not isinstance(leaf, np.generic) for leaf in leaves)


def arrays_in(element: Any) -> Any:
    """``element`` with arrays at its leaves: those of a device and tickets unchanged, others as NumPy arrays over the
    same memory. A list or tuple of texts becomes one array, because loaders collate texts so. None stays."""
    return optree.tree_map(_array, _nest(element), is_leaf=_is_texts, none_is_leaf=True)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(type(text) in (str, bytes) for text in value)


def _nest(element: Any) -> Any:
    # Tokenizers and the like collate into mappings of their own.
    return dict(element) if isinstance(element, Mapping) and not isinstance(element, dict) else element


def _array(leaf: Any) -> Any:
    if leaf is None or isinstance(leaf, np.ndarray | Ticket) or hasattr(leaf, "__cuda_array_interface__"):
        return leaf
    if isinstance(leaf, str | bytes) and not isinstance(leaf, np.generic):
        raise InvalidArgumentError(f"an element holds the bare string {leaf!r:.80}; put texts into a NumPy array")
    try:
        return convert_to_tensor(leaf)
    except (ValueError, TypeError, RuntimeError, BufferError) as error:  # the errors of its array protocol
        raise InvalidArgumentError(
            f"an element of the data set holds a {type(leaf).__name__}, which is not an array: {error}"
            + (f"; convert it from {leaf.dtype} to float32" if getattr(leaf, "dtype", None) == "bfloat16" else "")
        ) from error


def plain_array(leaf: Any) -> Any:
    """A leaf of an element as torch and JAX take it: an array of a foreign byte order is converted. Raises
    InvalidArgumentError for a masked array."""
    # torch drops a mask in silence. A compiled function of JAX does, too, and misreads a foreign byte order.
    is_misread = isinstance(leaf, np.ndarray) and (isinstance(leaf, np.ma.MaskedArray) or not leaf.dtype.isnative)
    return convert_to_tensor(leaf) if is_misread else leaf


def empty_like(leaf: Any) -> Any:
    if leaf is None:
        return None
    return leaf[:0] if leaf.shape else np.zeros(0, leaf.dtype)


class Carry:
    """Copies the arrays that are read. Without a ``copy`` function it does nothing. With one, the copies are in memory
    that the replicas read, where their source can no longer change them."""

    copy: Callable[[np.ndarray], np.ndarray] | None = None

    def leaf(self, leaf: Any) -> Any:
        """An array of any kind, carried."""
        if self.copy is None:
            return leaf
        # A scalar, an array of a device, or an array of a class of its own, such as a masked one, which would lose it.
        if type(leaf) not in _PLAIN:
            return leaf.copy()
        copied = self.copy(leaf)
        if not leaf.flags.writeable:
            copied.flags.writeable = False
        return copied

    def element(self, element: Any) -> Any:
        """A nest of arrays, carried; None stays."""
        if self.copy is None:
            return element
        return optree.tree_map(self.leaf, element)
