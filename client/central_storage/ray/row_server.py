"""The actor that gives the replicas of its node the rows of a data set of Ray.

It has references to all blocks of the data set, and Ray brings a block to the node when its first row is wanted. Ray
starts an actor that has ended again, with the arguments of its constructor, which therefore begins to listen.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from ray.data.block import BlockAccessor
from ray.exceptions import RayError

from cs_proto.errors import InvalidArgumentError

from .row_client import address, is_ours, send

__all__ = ["RowServer", "Table"]


class Table:
    """The rows of blocks, by number."""

    def __init__(self, blocks: Sequence[Any], counts: Sequence[int]) -> None:
        """``blocks`` are references, and ``counts`` are the numbers of their rows."""
        self._blocks, self._ends = blocks, np.cumsum(counts, dtype=np.int64)

    def take(self, numbers: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of these rows. Raises InvalidArgumentError for a row that is not there, and for a column that is
        no array."""
        outside = numbers[(numbers < 0) | (numbers >= self._ends[-1])]
        if outside.size:
            raise InvalidArgumentError(f"the data set has the rows 0 to {self._ends[-1] - 1}, and no row {outside[0]}")
        block_of = np.searchsorted(self._ends, numbers, side="right")
        order = np.argsort(block_of, kind="stable")
        parts = [self._of_block(block, numbers[order[block_of[order] == block]]) for block in np.unique(block_of)]
        if not parts:  # no rows, but columns
            parts = [self._of_block(int(np.searchsorted(self._ends, 0, side="right")), numbers)]
        found = {}
        for name in parts[0]:
            column = _array(name, [part[name] for part in parts])
            found[name] = np.empty_like(column)
            found[name][order] = column
        return found

    def _of_block(self, block: int, numbers: np.ndarray) -> dict[str, np.ndarray]:
        begin = self._ends[block - 1] if block else 0
        blocks = BlockAccessor.for_block(ray.get(self._blocks[block]))
        taken = blocks.take((numbers - begin).tolist()) if numbers.size else blocks.slice(0, 0)
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
        self._server = _Server(address(where, name), _Answer)
        self._server.table = Table(blocks, counts)
        threading.Thread(target=self._server.serve_forever, name="central-storage-rows", daemon=True).start()

    def is_up(self) -> None:
        """Returns when it listens."""


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    table: Table

    def verify_request(self, request: Any, client_address: object) -> bool:
        return is_ours(request)


class _Answer(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        count = int(self.rfile.readline())
        numbers = np.frombuffer(self.rfile.read(8 * count), np.int64)
        try:
            found = self.server.table.take(numbers)
        except (InvalidArgumentError, RayError) as error:  # a block may be lost, or find no room on this node
            self.wfile.write(json.dumps(str(error)).encode() + b"\n")
        else:
            send(self.wfile.write, found)
