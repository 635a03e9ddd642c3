"""torch in a replica function and torch's data sets: the same numbers as torch alone, and no copy either way."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.processes import run
from tests.harness.services import connected
from tests.harness.timing import unit

import central_storage as cs
from central_storage.core.context import current_replica

EXAMPLE = "examples/torch_step.py"
pytestmark = pytest.mark.timeout(unit(300))  # three processes import torch


@pytest.fixture(scope="module")
def two() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        strategy.run(lambda: __import__("torch").get_num_threads())  # imported, and every socket is connected
        yield strategy


def test_the_example_trains_as_torch_alone() -> None:
    lines = run(sys.executable, "-W", "error", EXAMPLE, timeout=unit(200)).ok().lines
    losses = [float(found[1]) for line in lines if (found := re.fullmatch(r"epoch \d  loss (\d\.\d{4})", line))]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 4
    difference = re.fullmatch(r"largest difference from torch alone: (\S+)", lines[-1])
    assert difference is not None
    assert float(difference[1]) < 1e-4


def test_tensors_as_arguments_and_results(two: cs.CentralStorageStrategy) -> None:
    def twice(x: Any) -> dict[str, Any]:
        assert isinstance(x, torch.Tensor)
        return {"twice": x * 2, "grad": x.clone().requires_grad_() * 1}

    for x in (torch.arange(3.0), torch.ones(40_000)):
        result = two.run(twice, args=(x,))
        for value in two.experimental_local_results(result["twice"]):
            assert isinstance(value, np.ndarray)
            assert value.tolist() == (x * 2).tolist()
        assert result["grad"].values[0].tolist() == x.tolist()


class Squares(torch.utils.data.Dataset):  # type: ignore[misc]
    """Row n is n and n squared."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return torch.full((2,), float(row)), row**2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader(two: cs.CentralStorageStrategy, workers: int) -> None:
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=workers)
    distributed = two.experimental_distribute_dataset(loader)
    assert distributed.cardinality == 3
    assert distributed.element_spec[1].values[0].dtype == np.int64

    def look(batch: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        x, y = batch
        return x[:, 0] * 1, y * 1

    for _ in range(2):
        seen = [two.run(look, args=(batch,)) for batch in distributed]
        rows = [[share.tolist() for share in x.values] for x, _ in seen]
        assert rows == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]
        assert [share.tolist() for share in seen[2][1].values] == [[64], [81]]


def test_a_data_loader_left_half_way(two: cs.CentralStorageStrategy) -> None:
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=1)
    for number, _ in enumerate(two.experimental_distribute_dataset(loader)):
        if number == 2:
            break
    assert [thread.name for thread in threading.enumerate() if thread.name == "cs-read-ahead"] == []


def test_a_data_loader_that_fails(two: cs.CentralStorageStrategy) -> None:
    class Broken(Squares):
        def __getitem__(self, row: int) -> tuple[Any, int]:
            if row == 5:
                raise KeyError("row 5")
            return super().__getitem__(row)

    loader = torch.utils.data.DataLoader(Broken(), batch_size=2)
    iterator = iter(two.experimental_distribute_dataset(loader))
    next(iterator), next(iterator)
    with pytest.raises(KeyError, match="row 5"):
        next(iterator)


@pytest.mark.parametrize("make", [lambda: torch.ones(4, dtype=torch.bfloat16), lambda: torch.ones(4).to_sparse()])
def test_tensors_that_no_array_can_hold(make: Any) -> None:
    with pytest.raises(cs.errors.InvalidArgumentError, match="Tensor"):
        next(iter(cs.get_strategy().experimental_distribute_dataset([make()])))


@pytest.fixture(scope="module")
def mortal() -> Iterator[cs.CentralStorageStrategy]:
    """A strategy of one replica whose workers may die as often as a test likes."""
    with cs.CentralStorageStrategy(["cpu:0"], max_restarts=1000) as strategy:
        yield connected(strategy)


@pytest.mark.parametrize("size", [10, 2_000_000])
def test_a_write_to_a_protected_variable_is_named_as_the_cause(mortal: cs.CentralStorageStrategy, size: int) -> None:
    with mortal.scope():
        weights = cs.Variable(np.zeros(size, np.float32), name="weights")
    number = weights._cs_handle()[1]

    def step() -> None:
        import torch

        backend = current_replica(mortal)
        assert backend is not None
        backend.protect([number])
        torch.set_num_threads(4)  # which a large operation uses
        torch.from_dlpack(weights).add_(1)

    named = rf"variable 'weights\w*' \(float32\[{size}\]\)"
    with pytest.raises(cs.errors.ReplicaLostError, match=f"SIGSEGV: something wrote in place to {named}.*clone"):
        mortal.run(step)
    assert not weights.numpy().any()
    assert mortal.run(lambda: 5) == 5


def test_a_tensor_over_a_variable_keeps_its_value_through_updates(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        w = cs.Variable(np.ones((300, 100), np.float32))
        optimizer = cs.optimizers.SGD(learning_rate=1.0)

    def step() -> float:
        old = torch.from_dlpack(w)
        parts = [old[3:, 1], old.T, torch.as_tensor(np.asarray(w)), torch.from_numpy(w[2:5])]
        seen = [part.clone() for part in (old, *parts)]
        optimizer.apply_gradients([(np.full(w.shape, -1, np.float32), w)])
        new = torch.from_dlpack(w)
        optimizer.apply_gradients([(np.full(w.shape, -1, np.float32), w)])
        newest = torch.from_dlpack(w)
        assert all(torch.equal(part, before) for part, before in zip((old, *parts), seen, strict=True))
        assert float((newest - new).min()) == float((new - old).max()) == 2
        return float(old[0, 0])

    assert two.experimental_local_results(two.run(step)) == (1.0, 1.0)
    assert two.experimental_local_results(two.run(step)) == (5.0, 5.0)
