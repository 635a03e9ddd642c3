"""Losses over a global batch and look-ups, without a service."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import central_storage as cs
from central_storage import nn
from central_storage.core.context import enter_replica, in_cross_replica
from cs_proto.errors import ContextError, InvalidArgumentError


class ThreeReplicas:
    """A strategy and the backend of one of its replicas, as far as losses look."""

    num_replicas_in_sync = replicas = 3
    replica = 0

    def array_module(self) -> Any:
        return np


@pytest.fixture
def replica() -> Any:
    three: Any = ThreeReplicas()
    with enter_replica(three, three) as context:
        yield context


def test_the_default_size_is_this_replicas_rows_times_the_replicas(replica: Any) -> None:
    loss = nn.compute_average_loss(np.array([[1, 2], [3, 4]], np.float32))
    assert (loss.dtype, loss.shape, float(loss)) == (np.float32, (), np.float32(10 / 6))


def test_a_given_size_counts_in_every_context(replica: Any) -> None:
    assert float(nn.compute_average_loss([1.0, 2.0], global_batch_size=np.int64(6))) == 0.5
    strategy: Any = ThreeReplicas()
    assert float(in_cross_replica(strategy, lambda: nn.compute_average_loss([1.0, 2.0], global_batch_size=6))) == 0.5


def test_outside_everything_there_is_one_replica() -> None:
    assert float(nn.compute_average_loss([1.0, 3.0])) == 2.0
    assert float(nn.scale_regularization_loss([1.0, 3.0])) == 4.0


def test_a_share_without_rows_adds_nothing(replica: Any) -> None:
    for size in (None, 0, 8):
        assert float(nn.compute_average_loss(np.zeros(0, np.float32), global_batch_size=size)) == 0.0


def test_a_share_of_a_regularization_loss(replica: Any) -> None:
    assert float(nn.scale_regularization_loss(np.array([1.0, 2.0, 3.0]))) == 2.0
    assert float(nn.scale_regularization_loss(np.array([1, 3]))) == 4 / 3
    assert nn.scale_regularization_loss(np.float32(3)).dtype == np.float32


def test_in_the_cross_replica_context_there_is_no_share() -> None:
    strategy: Any = ThreeReplicas()
    with pytest.raises(ContextError, match="compute_average_loss"):
        in_cross_replica(strategy, lambda: nn.compute_average_loss([1.0]))
    with pytest.raises(ContextError, match="scale_regularization_loss"):
        in_cross_replica(strategy, lambda: nn.scale_regularization_loss(1.0))


@given(
    losses=arrays.arrays(np.float64, st.tuples(st.integers(0, 5), st.integers(1, 3)), elements=st.floats(-9, 9)),
    size=st.integers(1, 20),
    data=st.data(),
)
def test_weights_scale_the_sum_and_not_the_size(losses: np.ndarray, size: int, data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from([(), (len(losses),), losses.shape, (*losses.shape, 1)]))
    weights = data.draw(arrays.arrays(np.float64, shape, elements=st.floats(-9, 9)))
    whole = weights.reshape(losses.shape) if weights.size == losses.size and weights.ndim > 1 else weights
    whole = whole[:, None] if weights.ndim == 1 else whole
    found = nn.compute_average_loss(losses, weights, size)
    np.testing.assert_allclose(found, (losses * whole).sum() / size, rtol=1e-12, atol=1e-12)


def test_the_dtype_is_the_losses() -> None:
    found = nn.compute_average_loss(np.ones(2, np.float16), np.ones(2, np.float64))
    assert (found.dtype, float(found)) == (np.float16, 1.0)


@pytest.mark.parametrize(
    ("losses", "weights", "size", "says"),
    [
        (1.0, None, 4, "at least one axis"),
        ([1.0, 2.0], [1.0, 2.0, 3.0], 4, "does not fit"),
        ([1.0, 2.0], [[1.0, 2.0], [1.0, 2.0]], 4, "have more axes than the values"),
        ([1.0], None, -1, "at least 0"),
        ([True], None, 4, "must hold numbers"),
        ([1.0], None, [4], "one integer"),
    ],
)
def test_what_does_not_fit(losses: Any, weights: Any, size: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        nn.compute_average_loss(losses, weights, size)


@pytest.mark.parametrize("size", [2.0, "a"])
def test_a_size_is_an_integer(size: Any) -> None:
    with pytest.raises(TypeError, match="an integer"):
        nn.compute_average_loss([1.0], None, size)


@pytest.mark.parametrize(("dtype", "of_loss"), [(np.int8, np.float32), (np.int32, np.float64)])
def test_integer_losses_have_a_fractional_mean(dtype: Any, of_loss: Any) -> None:
    found = nn.compute_average_loss(np.array([1, 2], dtype), global_batch_size=2)
    assert (found.dtype, float(found)) == (of_loss, 1.5)


def test_rows_of_an_array() -> None:
    table = np.arange(12).reshape(4, 3)
    ids = np.array([[3, 0], [3, 3]])
    np.testing.assert_array_equal(nn.embedding_lookup(table, ids), table[ids])
    assert nn.embedding_lookup(table, []).shape == (0, 3)


@pytest.mark.parametrize(("ids", "says"), [([0, 4], "id 4"), ([-1], "id -1"), ([0.5], "integers")])
def test_ids_that_are_none(ids: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        nn.embedding_lookup(np.zeros((4, 3)), ids)


def test_a_table_has_rows() -> None:
    with pytest.raises(InvalidArgumentError, match="at least one axis"):
        nn.embedding_lookup(np.array(1.0), [0])


def test_rows_are_counted_over_all_replicas() -> None:
    shares = cs.PerReplica([np.zeros((3, 2)), np.zeros((1, 2))]), cs.PerReplica([np.zeros(3), np.zeros(1)])
    assert nn.global_batch_size(shares) == 4
    assert nn.global_batch_size({"x": np.zeros((3, 2)), "y": np.zeros(3)}) == 3
    with pytest.raises(InvalidArgumentError, match="same number of rows"):
        nn.global_batch_size((np.zeros(3), np.zeros(4)))
    with pytest.raises(InvalidArgumentError, match="same number of rows"):
        nn.global_batch_size(())
    with pytest.raises(InvalidArgumentError, match="scalar"):
        nn.global_batch_size(np.float32(3))


def test_replicas_add_their_rows_and_the_loss_is_that_of_the_batch() -> None:
    rows = np.arange(7, dtype=np.float32)

    def loss(batch: Any, size: int) -> Any:
        assert nn.global_batch_size(batch) == size
        return nn.compute_average_loss(batch, global_batch_size=size)

    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        data = strategy.experimental_distribute_dataset(cs.data.Dataset.from_tensor_slices(rows).batch(4))
        for batch, mean in zip(data, (1.5, 5.0), strict=True):
            size = nn.global_batch_size(batch)
            assert float(strategy.reduce("SUM", strategy.run(loss, args=(batch, size)), axis=None)) == mean
