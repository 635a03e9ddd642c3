"""Specs of elements: shape and dtype without the values. ``element_spec`` of data sets and their iterators is a nest of
these records; this module computes no value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import optree

__all__ = ["PerReplicaSpec", "TensorSpec", "joined", "observed", "zeros"]


@dataclass(frozen=True)
class TensorSpec:
    """The shape and dtype of an array that does not exist yet.

    Args:
        shape: The shape, with None for an axis of any length. None altogether: any number of axes.
        dtype: The dtype.
        name: Kept for whoever reads it; nothing here does.

    Raises:
        TypeError: ``shape`` is no sequence, or ``dtype`` no dtype.

    Examples:
        >>> import numpy as np
        >>> import central_storage as cs
        >>> cs.data.TensorSpec((None, 8), np.float32)
        TensorSpec(shape=(None, 8), dtype=np.float32, name=None)
    """

    shape: tuple[int | None, ...] | None
    dtype: Any = np.float32
    name: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", None if self.shape is None else tuple(self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))

    def __repr__(self) -> str:
        dtype = f"np.{self.dtype.name}" if hasattr(np, self.dtype.name) else repr(self.dtype)
        return f"TensorSpec(shape={self.shape}, dtype={dtype}, name={self.name!r})"

    def admits(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of ``shape`` fits."""
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(
            allowed in (None, length) for allowed, length in zip(self.shape, shape, strict=True)
        )


@dataclass(frozen=True)
class PerReplicaSpec:
    """A PerReplica: the spec of every component, in replica order."""

    values: tuple[TensorSpec, ...]

    def __repr__(self) -> str:
        return f"PerReplicaSpec({', '.join(map(repr, self.values))})"


def observed(element: Any, any_length: bool) -> Any:
    """The specs of the arrays in ``element`` (None stays); with ``any_length`` their axis 0 is taken to vary."""

    def spec(leaf: Any) -> TensorSpec | None:
        if leaf is None:
            return None
        shape = tuple(leaf.shape)
        return TensorSpec((None, *shape[1:]) if any_length and shape else shape, leaf.dtype)

    return optree.tree_map(spec, element, none_is_leaf=True)


def zeros(specs: Any) -> Any:
    """An element of zeros that ``specs`` admits, if there is no real one; an axis of any length gets length 1."""

    def leaf(spec: TensorSpec | None) -> Any:
        return None if spec is None else np.zeros([1 if n is None else n for n in spec.shape or ()], spec.dtype)

    return optree.tree_map(leaf, specs, none_is_leaf=True)


def joined(one: Any, other: Any) -> Any:
    """The narrowest spec that admits the elements of both. Raises TypeError if structure or dtype differ."""

    def join(a: TensorSpec, b: object) -> TensorSpec:
        if not isinstance(b, TensorSpec):
            raise TypeError(f"the elements of a data set must have one structure, not {a} and {b}")
        if a.dtype != b.dtype and not a.dtype.kind == b.dtype.kind in ("U", "S"):
            raise TypeError(f"the elements of a data set must have one dtype, not {a.dtype} and {b.dtype}")
        if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
            return TensorSpec(None, a.dtype)
        return TensorSpec(tuple(m if m == n else None for m, n in zip(a.shape, b.shape, strict=True)), a.dtype)

    try:
        return optree.tree_map(join, one, other, none_is_leaf=True)
    except ValueError as error:
        raise TypeError(f"the elements of a data set must have one structure: {error}") from error
