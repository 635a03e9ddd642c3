"""Tables of torch models: rows in, gradients of rows out, and no copy on a CPU but into the memory that the server
reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import central_storage as cs
from cs_proto.arrays import Array
from cs_runtime.shared_memory.arena import Arena
from cs_runtime.shared_memory.mapping import Mapping, address_of
from cs_server.compute.kernels import BoundRows

HEIGHT, WIDTH, RATE, EPSILON = 1_000, 64, 0.05, 1e-10


@pytest.fixture
def one() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0"], in_process=True) as strategy:
        yield strategy


def ids_of(step: int, replica: int) -> torch.Tensor:
    """Many of them twice."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randint(0, HEIGHT // 4, (600,), generator=generator)


def gradient_of(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The gradient of each looked-up row, by autograd."""
    leaf = rows.detach().requires_grad_()
    (leaf * torch.sin(leaf + ids[:, None])).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_rows_and_gradients_are_copied_once(one: cs.CentralStorageStrategy, monkeypatch: pytest.MonkeyPatch) -> None:
    with one.scope():
        table = cs.Variable(np.ones((HEIGHT, WIDTH), np.float32), sparse=True)
        optimizer = cs.optimizers.RowwiseAdagrad(RATE)
    put: list[tuple[int, int]] = []
    read: list[bool] = []
    plain_put, plain_take = Arena.put_all, BoundRows.take

    def noting_put(arena: Arena, values: Sequence[np.ndarray]) -> list[Array]:
        put.extend([(address_of(value), value.nbytes) for value in values])
        return plain_put(arena, values)

    def noting_take(bound: BoundRows, gradients: Any) -> None:
        read.extend(array.flags.owndata for pair in gradients for array in pair)
        plain_take(bound, gradients)

    def step() -> Any:
        ids = ids_of(0, 0)
        given = gradient_of(torch.from_numpy(np.asarray(cs.nn.embedding_lookup(table, ids))), ids)
        optimizer.apply_gradients([(cs.IndexedSlices(given, ids), table)])
        return [(each.data_ptr(), each.nbytes) for each in (given, ids)]

    monkeypatch.setattr(Arena, "put_all", noting_put)
    monkeypatch.setattr(BoundRows, "take", noting_take)
    given = one.run(step)
    assert put[-2:] == given  # the very memory of torch
    assert read == [False, False]  # views of segments


def test_rows_are_read_where_the_server_has_them(
    one: cs.CentralStorageStrategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one.scope():
        table = cs.Variable(np.arange(HEIGHT * WIDTH, dtype=np.float32).reshape(HEIGHT, WIDTH), sparse=True)
    asked: list[str] = []
    monkeypatch.setattr(Mapping, "write", lambda mapping, array, value: asked.append(mapping.name))

    def step() -> Any:
        whole = np.asarray(table)
        rows = cs.nn.embedding_lookup(table, torch.tensor([[7, 3], [7, 0]]))
        return not whole.flags.owndata and np.array_equal(rows, whole[[[7, 3], [7, 0]]])

    assert one.run(step)
    assert asked == []


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_row_wise_adagrad_is_that_of_torch(one: cs.CentralStorageStrategy, decay: float) -> None:
    """The formula of FBGEMM in torch, over the sparse gradient of an embedding, whose duplicates it sums itself."""
    start = torch.randn(HEIGHT, WIDTH, generator=torch.Generator().manual_seed(1))
    with one.scope():
        table = cs.Variable(start.numpy().copy(), sparse=True)
        optimizer = cs.optimizers.RowwiseAdagrad(RATE, epsilon=EPSILON, weight_decay=decay)
    alone = torch.nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=True)
    sums = torch.zeros(HEIGHT)

    def step(number: int) -> None:
        ids = ids_of(number, 0)
        given = gradient_of(torch.from_numpy(np.asarray(cs.nn.embedding_lookup(table, ids))), ids)
        optimizer.apply_gradients([(cs.IndexedSlices(given, ids), table)])

    for number in range(30):
        one.run(step, (number,))
        ids = ids_of(number, 0)
        alone.zero_grad()
        looked_up = alone(ids)
        (looked_up * torch.sin(looked_up + ids[:, None])).sum().backward()
        assert alone.weight.grad is not None
        gradient = alone.weight.grad.coalesce()
        (rows,), values = gradient.indices(), gradient.values()
        with torch.no_grad():
            values = values + decay * alone.weight[rows]
            sums[rows] += values.square().mean(dim=1)
            alone.weight[rows] -= RATE / (sums[rows].sqrt() + EPSILON)[:, None] * values
    np.testing.assert_allclose(table.numpy(), alone.weight.detach().numpy(), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(optimizer.get_slot(table, "sum").numpy(), sums.numpy(), rtol=1e-5)
