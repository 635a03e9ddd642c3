"""The rows of a data set of Ray, in a replica of a ``CentralStorageTrainer``.

A replica has the numbers of its rows, and asks the row server of its node for them (``row_server.py``). Workers import
this module, so it imports no Ray. Each socket is in the abstract namespace, where nothing is left when a process is
killed; both ends refuse the processes of other users.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cs_proto.errors import ContextError, InvalidArgumentError, NoAnswerError

__all__ = ["VARIABLE", "address", "is_ours", "rows", "send"]

#: The environment variable that names the training and the node, in the workers of a trainer.
VARIABLE = "CS_ROWS"
# Seconds in which Ray has started the row server of a node again, and those between two looks.
_PATIENCE, _PAUSE = 30.0, 0.05


def rows(numbers: Any, name: str = "train") -> dict[str, np.ndarray]:
    """The rows with these numbers, in the function that a :class:`CentralStorageTrainer` gives to its replicas. ::

        @cs.function
        def step(numbers):
            batch = rows(numbers)
            error = batch["x"] @ w.numpy() - batch["y"]

    They come from Ray's object store on the node of the replica. The same numbers always give the same rows.

    Args:
        numbers: Numbers of rows in any order, as the data set has them that :func:`row_numbers` gives.
        name: The name of the data set, for which the script has called :func:`row_numbers`.

    Returns:
        An array for each column, in processor memory and read-only.

    Raises:
        TypeError: ``numbers`` is no array of ints with one axis.
        InvalidArgumentError: The data set has no such row, a column is no array, or Ray cannot bring a block to this
            node (a ValueError).
        ContextError: Called anywhere else (a RuntimeError).
        NoAnswerError: Nothing on this node has the rows: the script has not called :func:`row_numbers` (a
            TimeoutError).
    """
    where = os.environ.get(VARIABLE)
    if not where:
        raise ContextError("rows works only in what the function of a CentralStorageTrainer gives to its replicas")
    wanted = np.asarray(numbers.get() if hasattr(numbers, "__cuda_array_interface__") else numbers)
    if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
        raise TypeError(f"rows takes an array of ints with one axis, not {numbers!r:.200}")
    ends = math.inf
    while True:
        try:
            return _ask(address(where, name), wanted.astype(np.int64))
        except (OSError, EOFError) as error:  # Ray starts a row server again that has ended
            ends = min(ends, time.monotonic() + _PATIENCE)
            if time.monotonic() >= ends:
                raise NoAnswerError(
                    f"no row server of the data set {name!r:.100} answers on this node ({error}); call "
                    f"row_numbers({name!r:.100}) in the script, or look at Ray's log of the actor RowServer"
                ) from error
        time.sleep(_PAUSE)


def address(where: str, name: str) -> str:
    """Where the row server of the data set ``name`` listens, in the training and on the node that ``where`` names."""
    return f"\0cs-rows-{hashlib.blake2b(f'{where}/{name}'.encode(), digest_size=16).hexdigest()}"


def is_ours(link: socket.socket) -> bool:
    """Whether the process at the other end is one of this user."""
    _, user, _ = struct.unpack("iII", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())


def send(write: Callable[[Any], object], found: dict[str, np.ndarray]) -> None:
    """Write these columns to the socket of :func:`rows`."""
    head = [[name, column.dtype.str, column.shape] for name, column in found.items()]
    write(json.dumps(head).encode() + b"\n")
    for column in found.values():
        write(np.ascontiguousarray(column).reshape(-1).view(np.uint8))


def _ask(where: str, numbers: np.ndarray) -> dict[str, np.ndarray]:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(where)
        if not is_ours(link):
            raise ConnectionRefusedError("a process of another user listens there")
        with link.makefile("rwb") as file:
            file.write(b"%d\n" % len(numbers) + numbers.tobytes())
            file.flush()
            line = file.readline()
            head = json.loads(_whole(line, len(line) + (not line.endswith(b"\n"))))
            if isinstance(head, str):
                raise InvalidArgumentError(head)
            return {name: _column(file.read, np.dtype(dtype), shape) for name, dtype, shape in head}


def _column(read: Callable[[int], bytes], dtype: np.dtype[Any], shape: list[int]) -> np.ndarray:
    nbytes = dtype.itemsize * int(np.prod(shape))
    return np.frombuffer(_whole(read(nbytes), nbytes), dtype).reshape(shape)


def _whole(data: bytes, least: int) -> bytes:
    if len(data) < least:
        raise EOFError("it ended before it had answered")
    return data
