"""Tickets for the columns of batches, without a cluster of Ray: from the script to a replica and back."""

from __future__ import annotations

import numpy as np
import pytest

import central_storage as cs
from central_storage.core.values import select_replica
from central_storage.data.distributed import DistributedDataset
from central_storage.pickling.pickler import dump_arguments, load_arguments
from central_storage.ray import row_client, tickets
from central_storage.ray.tickets import Column, Tickets
from cs_proto.errors import ContextError

FIRST = {"x": np.array([[0.0, 0.5]]), "text": np.array(["0"])}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The numbers of all rows for which a row server has been asked."""
    found: list[list[int]] = []

    def rows(numbers: np.ndarray, name: str, *, block_timeout: float) -> dict[str, np.ndarray]:
        assert (name, block_timeout, numbers.dtype) == ("train", 7.0, np.int64)
        found.append(numbers.tolist())
        columns = {"x": np.stack([numbers, numbers + 0.5], axis=1), "text": numbers.astype(str)}
        for column in columns.values():
            column.flags.writeable = False
        return columns

    monkeypatch.setattr(tickets, "rows", rows)
    return found


def batches(count: int, batch_size: int, *, drop_remainder: bool = False) -> Tickets:
    return Tickets("train", count, FIRST, batch_size, drop_remainder, 7.0)


def as_a_replica_gets(element: object) -> tuple[dict[str, np.ndarray], int]:
    """What an argument becomes on its way, and the number of bytes on that way."""
    data, buffers = dump_arguments((element,), {}, lambda handle: ("none", 0), lambda buffer: buffer)
    assert not buffers
    (arrived,), _ = load_arguments(data, [], lambda kind, number: None)
    return arrived, len(data)


def test_each_replica_asks_once_for_its_rows_and_the_script_for_none(asked: list[list[int]]) -> None:
    data = DistributedDataset(batches(10, 4), 2)
    elements = list(data)
    assert int(data.cardinality) == len(elements) == 3
    assert [cs.nn.global_batch_size(element) for element in elements] == [4, 4, 2]
    assert repr(data.element_spec["x"]).startswith("PerReplicaSpec(TensorSpec(shape=(None, 2), dtype=np.float64")
    assert asked == []
    for element in elements:
        for replica in range(2):
            arrived, _ = as_a_replica_gets(select_replica(replica, element))
            assert [type(column) for column in arrived.values()] == [cs.Tensor, cs.Tensor]
            assert arrived["x"][:, 0].astype(int).astype(str).tolist() == arrived["text"].tolist()
            assert not arrived["x"].flags.writeable
    assert asked == [[0, 1], [2, 3], [4, 5], [6, 7], [8], [9]]


def test_a_step_that_is_sent_again_asks_for_the_same_rows(asked: list[list[int]]) -> None:
    (element,) = DistributedDataset(batches(3, 3), 1)
    for _ in range(2):
        as_a_replica_gets(element)
    assert asked == [[0, 1, 2]] * 2


def test_a_replica_without_rows(asked: list[list[int]]) -> None:
    (element,) = DistributedDataset(batches(4, 4), 3)
    arrived, _ = as_a_replica_gets(select_replica(2, element))
    assert (arrived["x"].shape, arrived["text"].shape) == ((0, 2), (0,))
    assert asked == [[]]


def test_what_travels_does_not_grow_with_the_rows(asked: list[list[int]]) -> None:
    (small,), (large,) = batches(10, 10), batches(100_000, 100_000)
    assert as_a_replica_gets(large)[1] < as_a_replica_gets(small)[1] + 20


def test_one_column_alone(asked: list[list[int]]) -> None:
    (element,) = batches(2, 2)
    arrived, _ = as_a_replica_gets(element["text"])
    assert np.asarray(arrived).tolist() == ["0", "1"]


def test_the_remainder_may_be_dropped() -> None:
    assert [element["x"].shape for element in batches(7, 3, drop_remainder=True)] == [(3, 2), (3, 2)]
    assert len(batches(7, 3, drop_remainder=True)) == 2


def test_the_script_gets_the_rows_if_it_asks(asked: list[list[int]]) -> None:
    (element,) = DistributedDataset(batches(4, 4), 2)
    assert np.asarray(element["x"].values[1])[:, 0].tolist() == [2, 3]
    copied = np.array(element["x"].values[1], np.float32, copy=True)
    copied[0] = 7
    assert asked == [[2, 3]]
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        assert strategy.gather(element["x"], axis=0)[:, 0].tolist() == [0, 1, 2, 3]


def test_read_ahead_keeps_tickets(asked: list[list[int]]) -> None:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        data = strategy.experimental_distribute_dataset(batches(20, 4))
        total = sum(
            float(strategy.reduce("SUM", result, axis=None))
            for result in strategy.run_steps(lambda batch: batch["x"][:, 0].sum(), data)
        )
    assert total == sum(range(20))
    assert asked == [[first, first + 1] for first in range(0, 20, 2)]


def test_rows_that_are_picked(asked: list[list[int]]) -> None:
    """As ``cst.batches`` does where replicas would get no rows."""
    _, element = batches(6, 3)
    order = np.array([0, 1, 2, 0])
    picked = {name: column[order] for name, column in element.items()}
    (first, second) = (
        as_a_replica_gets({n: c[part] for n, c in picked.items()})[0] for part in (slice(3), slice(3, 6))
    )
    assert first["text"].tolist() + second["text"].tolist() == ["3", "4", "5", "3"]
    assert asked == [[3, 4, 5], [3]]


def test_a_replica_of_another_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one on a machine that Ray does not know."""
    monkeypatch.delenv(row_client.VARIABLE, raising=False)
    (element,) = batches(2, 2)
    with pytest.raises(ContextError, match="only in the function of a CentralStorageTrainer and in replicas"):
        as_a_replica_gets(element)


def test_what_a_ticket_says_of_itself() -> None:
    (element,) = batches(2, 2)
    assert isinstance(element["x"], Column)
    assert repr(element["x"]) == "<2 rows of 'train', column 'x': shape=(2, 2), dtype=float64>"
