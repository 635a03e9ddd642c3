"""The rows of a data set of Ray, in a ``CentralStorageTrainer``.

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
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cs_proto.errors import CentralStorageError, ContextError, InvalidArgumentError, NoAnswerError

__all__ = ["BLOCK_TIMEOUT", "ERRORS", "VARIABLE", "addresses", "check_timeout", "is_ours", "node_of", "rows", "send"]

#: Seconds that Ray may take to bring the blocks of a step to a node. It may have to compute a lost block again.
BLOCK_TIMEOUT = 300.0
#: What a row server says in place of rows, and the error that is raised for it.
ERRORS: dict[str, type[CentralStorageError]] = {"late": NoAnswerError, "refused": InvalidArgumentError}
#: The environment variable that names the training and the node, in the script and the workers of a trainer.
VARIABLE = "CS_ROWS"
# More than a socket can wait for.
_LONGEST = 1e9
# Seconds in which Ray has started the row server of a node again, and those between two looks.
_PATIENCE, _PAUSE = 30.0, 0.05
# Seconds in which a row server says that a block is late.
_GRACE = 10.0
# To how many addresses a row server may listen. One that was killed may keep its own for a moment.
_ADDRESSES = 8


def rows(numbers: Any, name: str = "train", *, block_timeout: float = BLOCK_TIMEOUT) -> dict[str, np.ndarray]:
    """The rows with these numbers, in the function of a :class:`CentralStorageTrainer` or a replica of it. ::

        @cs.function
        def step(numbers):
            batch = rows(numbers)
            error = batch["x"] @ w.numpy() - batch["y"]

    They come from Ray's object store on the node of the caller. The same numbers always give the same rows.

    Args:
        numbers: Numbers of rows in any order, as the data set has them that :func:`row_numbers` gives.
        name: The name of the data set, for which the script has called :func:`row_numbers` or :func:`dataset_shard`.
        block_timeout: Seconds that Ray may take to bring the blocks of these rows to the node.

    Returns:
        An array for each column, in processor memory and read-only.

    Raises:
        TypeError: ``numbers`` is no array of ints with one axis, or ``block_timeout`` no number.
        InvalidArgumentError: The data set has no such row, a column is no array, Ray has lost a block, or a block finds
            no room on this node; or ``block_timeout`` is not more than 0 (a ValueError).
        ContextError: Called anywhere else (a RuntimeError).
        NoAnswerError: A block has not come in time, or nothing on this node has the rows: the script has not called
            :func:`row_numbers` or :func:`dataset_shard` (a TimeoutError).
    """
    where = os.environ.get(VARIABLE)
    if not where:
        raise ContextError("rows works only in the function of a CentralStorageTrainer and in replicas of its strategy")
    wanted = np.asarray(numbers.get() if hasattr(numbers, "__cuda_array_interface__") else numbers)
    if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
        raise TypeError(f"rows takes an array of ints with one axis, not {numbers!r:.200}")
    check_timeout(block_timeout)
    ends, gives_up = time.monotonic() + block_timeout, math.inf
    while True:
        try:
            return _found(where, name, wanted.astype(np.int64), max(0.0, ends - time.monotonic()))
        except CentralStorageError:
            raise
        except (OSError, EOFError) as error:  # Ray starts a row server again that has ended
            gives_up = min(gives_up, time.monotonic() + _PATIENCE)
            if time.monotonic() >= gives_up:
                raise NoAnswerError(
                    f"no row server of the data set {name!r:.100} answers on the node {node_of(where)} ({error}); call "
                    f"row_numbers({name!r:.100}) in the script, or look at Ray's log of the actor RowServer"
                ) from error
        time.sleep(_PAUSE)


def check_timeout(block_timeout: object) -> None:
    """Raise TypeError or InvalidArgumentError for what is no number of seconds."""
    if isinstance(block_timeout, bool) or not isinstance(block_timeout, int | float):
        raise TypeError(f"block_timeout must be a number of seconds, not {block_timeout!r:.100}")
    if not 0 < block_timeout < _LONGEST:
        raise InvalidArgumentError(
            f"block_timeout must be more than 0 and less than {_LONGEST:g} seconds, not {block_timeout}"
        )


def addresses(where: str, name: str) -> Iterator[str]:
    """Where the row server of the data set ``name`` may listen, in the training and on the node that ``where`` names:
    at the first of these that was free."""
    for number in range(_ADDRESSES):
        said = f"{where}/{name}/{number}".encode()
        yield f"\0cs-rows-{hashlib.blake2b(said, digest_size=16).hexdigest()}"


def node_of(where: str) -> str:
    """Ray's name of the node in the variable :data:`VARIABLE`."""
    return where.rpartition("/")[2]


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


def _found(where: str, name: str, numbers: np.ndarray, seconds: float) -> dict[str, np.ndarray]:
    """Ask at each address. Raises the error of the first one if nobody answers."""
    failures: list[Exception] = []
    for address in addresses(where, name):
        try:
            return _ask(address, numbers, seconds)
        except CentralStorageError:
            raise
        except TimeoutError as error:
            raise NoAnswerError(
                f"the row server of the data set {name!r:.100} on the node {node_of(where)} has said nothing for "
                f"{seconds + _GRACE:.3g} s; kill its process, the actor RowServer, and Ray starts another one"
            ) from error
        except (OSError, EOFError) as error:
            failures.append(error)
    raise failures[0]


def _ask(address: str, numbers: np.ndarray, seconds: float) -> dict[str, np.ndarray]:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(seconds + _GRACE)
        link.connect(address)
        if not is_ours(link):
            raise ConnectionRefusedError("a process of another user listens there")
        with link.makefile("rwb") as file:
            file.write(json.dumps([len(numbers), seconds]).encode() + b"\n" + numbers.tobytes())
            file.flush()
            line = file.readline()
            head = json.loads(_whole(line, len(line) + (not line.endswith(b"\n"))))
            if isinstance(head, dict):
                [(kind, why)] = head.items()
                raise ERRORS[kind](why)
            return {name: _column(file.read, np.dtype(dtype), shape) for name, dtype, shape in head}


def _column(read: Callable[[int], bytes], dtype: np.dtype[Any], shape: list[int]) -> np.ndarray:
    nbytes = dtype.itemsize * int(np.prod(shape))
    return np.frombuffer(_whole(read(nbytes), nbytes), dtype).reshape(shape)


def _whole(data: bytes, least: int) -> bytes:
    if len(data) < least:
        raise EOFError("it ended before it had answered")
    return data
