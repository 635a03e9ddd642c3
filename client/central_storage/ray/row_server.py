"""The actor that gives the replicas of its node the rows of a data set of Ray.

It has references to all blocks of the data set, and Ray brings a block to the node when its first row is wanted. Ray
starts an actor that has ended again, with the arguments of its constructor, which therefore begins to listen.
"""

from __future__ import annotations

import errno
import json
import socketserver
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from ray.data.block import BlockAccessor
from ray.exceptions import GetTimeoutError, RayError

from cs_proto.errors import CentralStorageError, InvalidArgumentError, LaunchError, NoAnswerError

from .row_client import ERRORS, addresses, is_ours, node_of, send

__all__ = ["RowServer", "Table"]


class Table:
    """The rows of blocks, by number."""

    def __init__(self, blocks: Sequence[Any], counts: Sequence[int], name: str, node: str) -> None:
        """``blocks`` are references, and ``counts`` are the numbers of their rows. Errors name the data set and the
        node."""
        self._blocks, self._ends = blocks, np.cumsum(counts, dtype=np.int64)
        self._name, self._node = name, node

    def take(self, numbers: np.ndarray, seconds: float) -> dict[str, np.ndarray]:
        """The columns of these rows. Raises InvalidArgumentError for a row that is not there, and for a column that is
        no array, and NoAnswerError if their blocks do not come within so many seconds."""
        ends = time.monotonic() + seconds
        outside = numbers[(numbers < 0) | (numbers >= self._ends[-1])]
        if outside.size:
            raise InvalidArgumentError(f"the data set has the rows 0 to {self._ends[-1] - 1}, and no row {outside[0]}")
        block_of = np.searchsorted(self._ends, numbers, side="right")
        order = np.argsort(block_of, kind="stable")
        wanted = [(int(block), numbers[order[block_of[order] == block]]) for block in np.unique(block_of)]
        if not wanted:  # no rows, but columns
            wanted = [(int(np.searchsorted(self._ends, 0, side="right")), numbers)]
        parts = [self._of_block(block, rows, self._brought(block, ends, seconds)) for block, rows in wanted]
        found = {}
        for name in parts[0]:
            column = _array(name, [part[name] for part in parts])
            found[name] = np.empty_like(column)
            found[name][order] = column
        return found

    def _brought(self, block: int, ends: float, seconds: float) -> Any:
        try:
            return ray.get(self._blocks[block], timeout=max(0.0, ends - time.monotonic()))
        except GetTimeoutError as error:
            raise NoAnswerError(
                f"Ray has not brought block {block} of the data set {self._name!r:.100} (rows {self._begin(block)} to "
                f"{self._ends[block] - 1}) to the node {self._node} within {seconds:.3g} s; see what "
                "raylet.out in Ray's logs of that node says, or pass a larger block_timeout"
            ) from error

    def _begin(self, block: int) -> int:
        return int(self._ends[block - 1]) if block else 0

    def _of_block(self, block: int, numbers: np.ndarray, content: Any) -> dict[str, np.ndarray]:
        blocks = BlockAccessor.for_block(content)
        taken = blocks.take((numbers - self._begin(block)).tolist()) if numbers.size else blocks.slice(0, 0)
        found: dict[str, np.ndarray] = BlockAccessor.for_block(taken).to_batch_format("numpy")
        return found


def _array(name: str, parts: list[np.ndarray]) -> np.ndarray:
    with suppress(ValueError):  # for parts of different shapes
        column = np.concatenate(parts)
        if not column.dtype.hasobject:
            return column
        if all(isinstance(text, str) for text in column.flat):
            return column.astype(str)
    raise InvalidArgumentError(
        f"the column {name!r:.100} holds values that are no array, such as rows of different lengths; change them with "
        "map_batches, or leave the column out with drop_columns"
    )


class RowServer:
    """Answers until it is ended, which Ray does by ending its process."""

    def __init__(self, where: str, name: str, blocks: list[Any], counts: list[int]) -> None:
        """Serves the rows of the data set ``name``, in the training and on the node that ``where`` names."""
        self._server = _listening(where, name)
        self._server.table = Table(blocks, counts, name, node_of(where))
        threading.Thread(target=self._server.serve_forever, name="central-storage-rows", daemon=True).start()

    def is_up(self) -> None:
        """Returns when it listens."""


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 128  # a replica that finds no room asks again only after a pause
    table: Table

    def verify_request(self, request: Any, client_address: object) -> bool:
        return is_ours(request)


def _listening(where: str, name: str) -> _Server:
    """Listens at the first address that is free. Raises LaunchError if none is."""
    for address in addresses(where, name):
        try:
            return _Server(address, _Answer)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise LaunchError(
        f"the node {node_of(where)} has no free address for the rows of the data set {name!r:.100}: other processes "
        "listen at all of them (ss -xlp shows which); end them"
    )


class _Answer(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        count, seconds = json.loads(self.rfile.readline())
        numbers = np.frombuffer(self.rfile.read(8 * count), np.int64)
        try:
            found = self.server.table.take(numbers, seconds)
        except (CentralStorageError, RayError) as error:  # a block may be lost, or find no room on this node
            kind = next((kind for kind, known in ERRORS.items() if isinstance(error, known)), "refused")
            self.wfile.write(json.dumps({kind: str(error)}).encode() + b"\n")
        else:
            send(self.wfile.write, found)
