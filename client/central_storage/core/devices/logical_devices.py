"""Arrays on several devices of one replica.

A replica may own several devices, its logical devices 0, 1, …. A :class:`LogicalTensor` is an array whose pieces lie
on them; read as an array, it has its original value. The strategy's ``experimental_…_logical_device(s)`` make such
arrays; the caller passes the function that copies an array to a device.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from central_storage.core.public_objects import Closed
from central_storage.core.tensors.tensor import as_tensor
from central_storage.core.values import convert_to_tensor
from cs_proto.errors import InvalidArgumentError
from cs_proto.frozen import frozen

__all__ = ["LogicalTensor", "Piece", "Place", "assign", "replicate", "split"]

#: Copies an array to a device, given by its full name.
Place = Callable[[Any, str], Any]


@frozen(eq=False)
class Piece:
    """The part ``where`` (one slice per axis) of an array, as an array on ``device`` (a full name)."""

    device: str
    where: tuple[slice, ...]
    value: Any


class LogicalTensor(Closed, NDArrayOperatorsMixin):
    """An array whose ``pieces`` lie on the logical devices of a replica.

    Operators, NumPy functions and indexing act on the whole array, which is assembled on the replica's first device.
    """

    def __init__(self, shape: tuple[int, ...], dtype: Any, pieces: tuple[Piece, ...], home: str, place: Place) -> None:
        self.shape = shape
        self.dtype = dtype
        self.pieces = pieces
        self._home = home
        self._place = place

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def read(self) -> Any:
        """The whole array on the replica's first device."""
        first = self._place(self.pieces[0].value, self._home)
        if first.shape == self.shape:
            return first
        whole = self._place(np.empty(self.shape, self.dtype), self._home)
        for piece in self.pieces:
            whole[piece.where] = self._place(piece.value, self._home)
        return whole

    def numpy(self) -> Any:
        """The whole as a NumPy array of its own."""
        return as_tensor(convert_to_tensor(self.read())).numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = convert_to_tensor(self.read())
        return np.array(whole, dtype) if copy else np.asarray(whole, dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [x.read() if isinstance(x, LogicalTensor) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.read()[key]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of an array without axes")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<LogicalTensor {self.dtype}{list(self.shape)} on {', '.join(piece.device for piece in self.pieces)}>"


def assign(tensor: Any, logical_device_id: int, devices: Sequence[str], place: Place) -> LogicalTensor:
    """``tensor`` on one of ``devices``. Raises InvalidArgumentError if there is no device with that number."""
    try:
        number = -1 if isinstance(logical_device_id, bool) else operator.index(logical_device_id)
    except TypeError:
        number = -1
    if not 0 <= number < len(devices):
        raise InvalidArgumentError(
            f"logical device {logical_device_id!r:.100} does not exist; this replica has 0 to {len(devices) - 1}; "
            "compute_devices=[('cpu:0', 'cpu:1'), …] gives a replica several"
        )
    return _whole_on(tensor, devices[number : number + 1], devices[0], place)


def replicate(tensor: Any, devices: Sequence[str], place: Place) -> LogicalTensor:
    """``tensor`` on each of ``devices``."""
    return _whole_on(tensor, devices, devices[0], place)


def split(tensor: Any, partition_dimensions: Sequence[int], devices: Sequence[str], place: Place) -> LogicalTensor:
    """``tensor`` cut into ``partition_dimensions[i]`` equal parts along axis i; piece k, counted with the last axis
    running fastest, is on ``devices[k]``.

    Raises InvalidArgumentError if that is not one positive int per axis, if their product is not the number of
    devices, or if an axis cannot be cut into that many equal parts.
    """
    array = _array(tensor)
    try:
        parts = [operator.index(part) for part in partition_dimensions]
    except TypeError:
        parts = []
    if len(parts) != array.ndim or any(part < 1 for part in parts):
        raise InvalidArgumentError(
            f"partition_dimensions must be a list of one positive int for each of {array.ndim} axes, not "
            f"{partition_dimensions!r:.200}"
        )
    if math.prod(parts) != len(devices):
        raise InvalidArgumentError(
            f"partition_dimensions {parts} make {math.prod(parts)} pieces, but a replica has {len(devices)} devices"
        )
    for axis, (length, part) in enumerate(zip(array.shape, parts, strict=True)):
        if length % part:
            raise InvalidArgumentError(f"axis {axis} of length {length} cannot be cut into {part} equal parts")
    cuts = [
        [slice(k * length // part, (k + 1) * length // part) for k in range(part)]
        for length, part in zip(array.shape, parts, strict=True)
    ]
    pieces = tuple(
        Piece(device, where, place(array[where], device))
        for device, where in zip(devices, itertools.product(*cuts), strict=True)
    )
    return LogicalTensor(tuple(array.shape), array.dtype, pieces, devices[0], place)


def _whole_on(tensor: Any, devices: Sequence[str], home: str, place: Place) -> LogicalTensor:
    array = _array(tensor)
    where = tuple(slice(0, length) for length in array.shape)
    pieces = tuple(Piece(device, where, place(array, device)) for device in devices)
    return LogicalTensor(tuple(array.shape), array.dtype, pieces, home, place)


def _array(tensor: Any) -> Any:
    if isinstance(tensor, LogicalTensor):
        return tensor.read()
    return tensor if hasattr(tensor, "__cuda_array_interface__") else convert_to_tensor(tensor)
