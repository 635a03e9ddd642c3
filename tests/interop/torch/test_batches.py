"""``cst.batches``: what it takes, how rows are split, and what each row counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.timing import unit
from tests.interop.torch.beside import centralized
from torch import nn

import central_storage as cs
import central_storage.torch as cst

pytestmark = pytest.mark.timeout(unit(300))


def rows_of(strategy: cs.CentralStorageStrategy) -> Any:
    model, _ = centralized(strategy, nn.Linear(1, 1))

    @cst.evaluate(model)
    def rows(x: torch.Tensor, *_: Any) -> Any:
        return x

    return rows


@pytest.mark.parametrize("rows", [1, 2, 7, 40_000])
def test_tensors_of_bfloat16_stay_so(three: cs.CentralStorageStrategy, rows: int) -> None:
    model, _ = centralized(three, nn.Linear(1, 1))

    @cst.evaluate(model)
    def seen(x: torch.Tensor, ids: torch.Tensor, narrow: torch.Tensor, none: None) -> Any:
        assert (x.dtype, ids.dtype, narrow.dtype, none) == (torch.float32, torch.int16, torch.bfloat16, None)
        narrow *= 2  # a batch may be changed in place
        return narrow.float().sum(dim=1), ids

    x, ids = torch.randn(rows, 3), torch.arange(rows).to(torch.int16)
    batch = {"x": x, "ids": ids, "narrow": x.bfloat16(), "none": None}
    for given in (batch, next(iter(cst.batches(three, [batch])))):
        sums, found = seen(given)
        assert torch.equal(found, ids)
        assert torch.equal(sums, (x.bfloat16() * 2).float().sum(dim=1))
    assert torch.equal(batch["narrow"], x.bfloat16())


@pytest.mark.parametrize("rows", [4, 40_000])
def test_arrays_that_torch_misunderstands(three: cs.CentralStorageStrategy, rows: int) -> None:
    read, x = rows_of(three), np.arange(rows * 2.0).reshape(rows, 2)
    assert torch.equal(read(x.astype(">f8")), torch.from_numpy(x))
    for feed in (read, lambda batch: list(cst.batches(three, [batch]))):
        with pytest.raises(cs.errors.InvalidArgumentError, match=r"masked array .* use \.filled"):
            feed({"x": np.ma.masked_greater(x, 3)})


def test_loaders_of_every_kind(three: cs.CentralStorageStrategy) -> None:
    rows = rows_of(three)
    x = np.arange(10.0, dtype=np.float32)[:, None]
    data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.arange(10))
    loaders = [
        torch.utils.data.DataLoader(data, batch_size=4),
        torch.utils.data.DataLoader(data, batch_size=4, num_workers=1),
        [x[:4], x[4:8], x[8:]],
        ({"x": torch.from_numpy(x[first : first + 4]), "none": None} for first in (0, 4, 8)),
        cs.data.Dataset.from_tensor_slices((x, np.arange(10))).batch(4),
    ]
    for loader in loaders:
        found = [rows(batch) for batch in cst.batches(three, loader)]
        seen = [each["x"] if isinstance(each, dict) else each for each in found]
        assert [len(each) for each in seen] == [4, 4, 2]
        assert torch.equal(torch.cat(seen), torch.from_numpy(x))
    shuffled = cst.batches(three, cs.data.Dataset.from_tensor_slices(x).shuffle(10, seed=3).batch(4))
    for _ in range(2):
        assert sorted(torch.cat([rows(batch) for batch in shuffled]).flatten().tolist()) == list(range(10))


def test_an_iterator_is_read_once(two: cs.CentralStorageStrategy) -> None:
    batches = cst.batches(two, (torch.ones(n, 1) for n in (3, 1)))
    assert len(list(batches)) == 2
    with pytest.raises(cs.errors.InvalidArgumentError, match="the generator given to cst"):
        list(batches)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (lambda batch: torch.ones(2), r"weight returned the shape \(2,\) for a batch of 3 rows"),
        (lambda batch: -torch.ones(3), "finite numbers of at least 0"),
        (lambda batch: batch[:, 0] * 0, "not all 0"),
        (lambda batch: batch[:, 0] * float("inf"), "finite numbers"),
    ],
)
def test_wrong_weights_are_named(two: cs.CentralStorageStrategy, weight: Any, message: str) -> None:
    with pytest.raises(cs.errors.InvalidArgumentError, match=message):
        list(cst.batches(two, [torch.ones(3, 1)], weight=weight))


def test_wrong_arguments_are_named(two: cs.CentralStorageStrategy) -> None:
    for wrong in (3, torch.ones(3), "text", {"x": 1}):
        with pytest.raises(cs.errors.NotADatasetError):
            cst.batches(two, wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="strategy must be a CentralStorageStrategy"):
        cst.batches(None, [])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weight must be a function of a batch"):
        cst.batches(two, [], weight=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("replicas", [1, 3])
def test_batches_of_another_strategy_are_refused(two: cs.CentralStorageStrategy, replicas: int) -> None:
    model, _ = centralized(two, nn.Linear(1, 1))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)
    before = model.state_dict()["weight"].clone()
    loader = [torch.arange(12.0).reshape(12, 1)]

    @cst.step(model, optimizer)
    def train(x: torch.Tensor) -> torch.Tensor:
        return model(x).mean()

    devices = [f"cpu:{number}" for number in range(replicas)]
    with (
        cs.CentralStorageStrategy(devices, in_process=True) as other,
        pytest.raises(cs.errors.InvalidArgumentError, match=rf"split over {replicas} replica\(s\), .* has 2"),
    ):
        train(next(iter(cst.batches(other, loader))))
    assert torch.equal(model.state_dict()["weight"], before)
    train(next(iter(cst.batches(two, loader))))
    assert not torch.equal(model.state_dict()["weight"], before)
