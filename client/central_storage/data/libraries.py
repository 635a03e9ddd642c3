"""Data sets of other libraries, unchanged: Hugging Face datasets, grain, torch's loaders.

This module imports none of them and knows a source by its methods. An iterator with ``get_state`` and ``set_state``
(grain), or a source with ``state_dict`` and ``load_state_dict`` (torchdata's loaders, streams of Hugging Face), has a
position that can be saved and restored. Hugging Face's data sets also need a format, and yield columns.
"""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np

from central_storage.core.values import convert_to_tensor
from cs_proto.errors import CheckpointError, InvalidArgumentError, NotADatasetError, UnbatchedDatasetError

__all__ = ["Reading", "has_state", "is_hugging_face", "packed_state", "unpacked_state"]

_TUPLE, _ARRAY, _TENSOR = 1, 2, 3


class Reading:
    """One iteration over a source: its elements, and after each of them the state from which the next one follows."""

    def __init__(self, source: Any, state: Any = None) -> None:
        """Raises CheckpointError where the source refuses ``state``."""
        self._is_hugging_face = is_hugging_face(source)
        if self._is_hugging_face:
            source = _formatted(source)
        try:
            if state is not None and _is_loader(source):
                if self._is_hugging_face:
                    source = copy.deepcopy(source)  # it would begin every later iteration at the state
                source.load_state_dict(state)
            self._items: Any = iter(source)
            self._elements = map(_columns, self._items) if self._is_hugging_face else self._items
            if state is not None and not _is_loader(source):
                self._items.set_state(state)
        except Exception as error:  # the library may raise anything
            if state is None:
                raise
            raise CheckpointError(
                f"the {type(source).__name__} cannot continue at the saved position: {error}; make it of the data that "
                "it had when the checkpoint was saved"
            ) from error
        self._source = source

    def __iter__(self) -> Iterator[Any]:
        return self._elements  # a loop does not ask here for each element

    def __next__(self) -> Any:
        return next(self._elements)

    def state(self) -> Any:
        """The state after the last element; None where the source does not say."""
        try:
            if _is_loader(self._source):
                return copy.deepcopy(self._source.state_dict())
            return self._items.get_state() if hasattr(self._items, "set_state") else None
        except NotImplementedError:
            return None

    def close(self) -> None:
        """Close a generator."""
        if hasattr(self._items, "close"):
            self._items.close()


def is_hugging_face(source: Any) -> bool:
    """Whether ``source`` is a data set or a stream of Hugging Face."""
    return type(source).__module__ in ("datasets.arrow_dataset", "datasets.iterable_dataset")


def has_state(source: Any) -> bool:
    """Whether an iteration of ``source`` can begin at a saved state."""
    return _is_loader(source) or type(source).__module__.partition(".")[0] == "grain"


def _is_loader(source: Any) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def _formatted(source: Any) -> Any:
    """A data set of Hugging Face whose columns are arrays."""
    form = getattr(source, "format", None)
    kind = (
        form["type"] if isinstance(form, dict) else getattr(getattr(source, "_formatting", None), "format_type", None)
    )
    if kind in (None, "python"):
        return source.with_format("numpy")
    if kind in ("arrow", "pandas", "polars"):
        raise NotADatasetError(f"the data set has the format {kind!r}, whose rows are tables; use with_format('numpy')")
    return source


def _columns(row: Any) -> Any:
    """The columns of a batch of Hugging Face as arrays of one length."""
    if not isinstance(row, dict):
        return row
    found = {name: _column(name, value) for name, value in row.items()}
    lengths = {name: array.shape[:1] for name, array in found.items()}
    if () in lengths.values() or len({*lengths.values()}) > 1:
        raise UnbatchedDatasetError(
            f"the elements are single rows, whose columns differ in length: {lengths}; batch the data set by the "
            "global batch size, dataset.batch(size)"
        )
    return found


def _column(name: str, value: Any) -> Any:
    array = np.asarray(value)
    if array.dtype != object:
        return array if array.dtype.kind not in "Mm" else convert_to_tensor(array)
    if all(isinstance(text, str) for text in array.flat):
        return array.astype(str)
    raise InvalidArgumentError(
        f"the column {name!r} holds values that are no array, such as rows of different lengths; pad them, or leave "
        "the column out with remove_columns"
    )


def packed_state(state: Any) -> bytes:
    """A state as bytes. Empty if it is None or cannot be stored as data; then elements are counted instead."""
    if state is None:
        return b""
    try:
        packed: bytes = msgpack.packb(state, default=_extended, strict_types=True)
    except (TypeError, ValueError, OverflowError):
        return b""
    return packed


def unpacked_state(data: bytes) -> Any:
    """The state that :func:`packed_state` packed. Raises ValueError for other bytes."""
    return msgpack.unpackb(data, ext_hook=_restored, strict_map_key=False) if data else None


def _extended(part: Any) -> msgpack.ExtType:
    if type(part) is tuple:
        return msgpack.ExtType(_TUPLE, msgpack.packb(list(part), default=_extended, strict_types=True))
    if isinstance(part, np.ndarray | np.generic) or type(part).__module__ == "torch":
        file = io.BytesIO()
        np.save(file, np.asarray(part), allow_pickle=False)
        return msgpack.ExtType(_TENSOR if type(part).__module__ == "torch" else _ARRAY, file.getvalue())
    raise TypeError(f"{type(part).__name__} is no data")


def _restored(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(msgpack.unpackb(data, ext_hook=_restored, strict_map_key=False))
    if code not in (_ARRAY, _TENSOR):
        raise ValueError(f"extension {code} is unknown")
    array = np.load(io.BytesIO(data), allow_pickle=False)
    if code == _TENSOR and "torch" in sys.modules:
        return sys.modules["torch"].from_numpy(array)
    return array
