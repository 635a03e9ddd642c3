"""Rows by their numbers, without a cluster of Ray: from blocks, and from a row server to a replica."""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pyarrow
import pytest
import ray
from ray.data.extensions import ArrowTensorArray
from tests.harness.timing import unit

from central_storage.ray import row_client, rows
from central_storage.ray.row_server import RowServer, Table
from cs_proto.errors import ContextError, InvalidArgumentError, LaunchError, NoAnswerError

NODE = "training/node"

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")  # about settings of its own


@pytest.fixture(autouse=True)
def _blocks_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference is the block itself."""
    monkeypatch.setattr(ray, "get", lambda block, timeout: block)


@pytest.fixture
def in_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not wait for a row server."""
    monkeypatch.setenv(row_client.VARIABLE, NODE)
    monkeypatch.setattr(row_client, "_PATIENCE", 0.0)


def block(first: int, count: int) -> pyarrow.Table:
    """Rows with an array and a text each."""
    values = np.arange(first, first + count)
    arrays = ArrowTensorArray.from_numpy(np.stack([values, values + 0.5], axis=1)) if count else pyarrow.array([])
    return pyarrow.table({"x": arrays, "text": pyarrow.array(map(str, values), pyarrow.string())})


def table_of(*blocks: pyarrow.Table) -> Table:
    return Table(blocks, [len(each) for each in blocks], "train", "node")


@contextmanager
def serving(name: str, *blocks: pyarrow.Table) -> Iterator[RowServer]:
    """A row server for these blocks."""
    server = RowServer(NODE, name, list(blocks), [len(each) for each in blocks])
    try:
        yield server
    finally:
        server._server.shutdown()  # which only a test does: Ray ends the process
        server._server.server_close()


def first_address(name: str) -> str:
    return next(row_client.addresses(NODE, name))


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3, 4], [3, 4], [4, 0, 3, 3, 1], [2], []])
@pytest.mark.usefixtures("in_a_replica")
def test_rows_in_any_order_from_any_blocks(numbers: list[int]) -> None:
    with serving("train", block(0, 0), block(0, 3), block(3, 0), block(3, 2)):
        found = rows(np.array(numbers, np.int64))
    assert found["x"].dtype == np.float64
    assert found["x"].tolist() == [[number, number + 0.5] for number in numbers]
    assert found["text"].dtype.kind == "U"
    assert found["text"].tolist() == [str(number) for number in numbers]
    assert not found["x"].flags.writeable


class OnGpu:
    """An array of CuPy, as NumPy sees it."""

    __cuda_array_interface__ = None

    def get(self) -> np.ndarray:
        return np.array([1, 0])


@pytest.mark.usefixtures("in_a_replica")
def test_numbers_on_a_gpu() -> None:
    with serving("train", block(0, 2)):
        assert rows(OnGpu())["text"].tolist() == ["1", "0"]


@pytest.mark.parametrize("number", [-1, 5])
@pytest.mark.usefixtures("in_a_replica")
def test_a_row_that_is_not_there(number: int) -> None:
    with (
        serving("train", block(0, 3), block(3, 2)),
        pytest.raises(InvalidArgumentError, match=f"the data set has the rows 0 to 4, and no row {number}"),
    ):
        rows(np.array([2, number]))


@pytest.mark.parametrize(
    "column",
    [
        ArrowTensorArray.from_numpy([np.arange(2), np.arange(3)]),
        pyarrow.array([["a"], None]),
        pyarrow.array(["a", None]),
    ],
)
def test_a_column_that_is_no_array(column: object) -> None:
    table = table_of(pyarrow.table({"x": column}), block(0, 1))
    with pytest.raises(InvalidArgumentError, match="the column 'x' holds values that are no array"):
        table.take(np.array([0, 1]), unit())


@pytest.mark.usefixtures("in_a_replica")
def test_a_block_that_ray_cannot_bring(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(block: object, timeout: float) -> None:
        raise ray.exceptions.ObjectLostError("00", None, "")

    monkeypatch.setattr(ray, "get", lost)
    with serving("train", block(0, 1)), pytest.raises(InvalidArgumentError, match="lost"):
        rows(np.array([0]))


@pytest.mark.usefixtures("in_a_replica")
def test_a_block_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is one for all blocks of a call."""
    limits = []

    def get(block: pyarrow.Table, timeout: float) -> pyarrow.Table:
        limits.append(timeout)
        if len(block) == 2:
            raise ray.exceptions.GetTimeoutError
        return block

    monkeypatch.setattr(ray, "get", get)
    late = (
        r"has not brought block 2 of the data set 'train' \(rows 3 to 4\) to the node node within 7 s; .*block_timeout"
    )
    with (
        serving("train", block(0, 3), block(3, 0), block(3, 2)),
        pytest.raises(NoAnswerError, match=late),
    ):
        rows(np.array([0, 4]), block_timeout=7)
    first, second = limits
    assert 0 < second < first <= 7


@pytest.mark.usefixtures("in_a_replica")
def test_a_row_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose process is stopped."""
    monkeypatch.setattr(row_client, "_GRACE", 0.1)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(first_address("train"))
        listening.listen()
        silent = "the row server of the data set 'train' on the node node has said nothing for 0.2 s; kill its process"
        with pytest.raises(NoAnswerError, match=silent):
            rows(np.array([0]), block_timeout=0.1)


@pytest.mark.usefixtures("in_a_replica")
def test_an_address_that_is_in_use_is_left_to_its_user() -> None:
    """As to a row server that Ray has killed, and the kernel not yet ended."""
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(first_address("train"))
        with serving("train", block(0, 2)):
            assert rows(np.array([1]))["text"].tolist() == ["1"]


def test_a_node_without_a_free_address() -> None:
    with ExitStack() as others:
        for address in row_client.addresses(NODE, "train"):
            others.enter_context(socket.socket(socket.AF_UNIX)).bind(address)
        with pytest.raises(LaunchError, match="the node node has no free address for the rows of the data set 'train'"):
            RowServer(NODE, "train", [block(0, 1)], [1])


def test_arrays_of_other_shapes_in_other_blocks() -> None:
    wide = pyarrow.table({"x": ArrowTensorArray.from_numpy(np.zeros((1, 3)))})
    with pytest.raises(InvalidArgumentError, match="such as rows of different lengths"):
        table_of(block(0, 1), wide).take(np.array([0, 1]), unit())


@pytest.mark.usefixtures("in_a_replica")
def test_a_data_set_that_nobody_serves() -> None:
    with serving("train", block(0, 1)), pytest.raises(NoAnswerError, match=r"row_numbers\('other'\) in the script"):
        rows(np.array([0]), "other")


@pytest.mark.usefixtures("in_a_replica")
@pytest.mark.parametrize("said", [b"", b'[["x"', b'[["x", "<f8", [2]]]\n1234567'])
def test_a_row_server_that_ends_within_an_answer(said: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(first_address("train"))
        listening.listen()

        def answer() -> None:
            link, _ = listening.accept()
            with link:
                link.recv(64)
                link.sendall(said)

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(NoAnswerError, match="it ended before it had answered"):
            rows(np.array([0]))
        answering.join()


@pytest.mark.usefixtures("in_a_replica")
def test_processes_of_other_users_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    with serving("train", block(0, 1)):
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(NoAnswerError, match="a process of another user listens there"):
            rows(np.array([0]))
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(first_address("train"))
            assert link.recv(1) == b""


@pytest.mark.usefixtures("in_a_replica")
@pytest.mark.parametrize("numbers", [np.zeros(2), np.zeros((2, 1), int), 0])
def test_what_is_no_array_of_numbers_of_rows(numbers: object) -> None:
    with pytest.raises(TypeError, match="rows takes an array of ints with one axis"):
        rows(numbers)


@pytest.mark.usefixtures("in_a_replica")
def test_what_is_no_limit() -> None:
    with pytest.raises(TypeError, match="block_timeout must be a number of seconds, not True"):
        rows(np.array([0]), block_timeout=True)
    for wrong in (0, -1.0, math.nan, math.inf):
        with pytest.raises(InvalidArgumentError, match=f"block_timeout must be more than 0 .*, not {wrong}"):
            rows(np.array([0]), block_timeout=wrong)


def test_rows_outside_of_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(row_client.VARIABLE, raising=False)
    with pytest.raises(ContextError, match="only in the function of a CentralStorageTrainer and in replicas"):
        rows(np.array([0]))
