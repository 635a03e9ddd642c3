"""Tables that are larger than a GPU: only their rows are copied there. The GPUs are stand-ins, whose memory torch takes
for its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.harness.guides import python_blocks, table
from tests.harness.services import connected
from tests.harness.stand_in_gpus import stand_in_gpus
from tests.harness.timing import unit
from torch.nn.functional import cross_entropy

import central_storage as cs
import central_storage.torch as cst
from central_storage import errors

from .beside import difference, train_alone

pytestmark = pytest.mark.timeout(unit(120))

GPU = 4 << 20
HEIGHT, WIDTH = 200_000, 16  # 12.8 MB


def _take_stand_ins() -> None:
    """In a worker: let torch have tensors over the memory of a stand-in, as it has over that of a real GPU."""
    import ctypes

    import numpy as np

    plain, kept = torch.from_dlpack, {}

    def from_dlpack(value: Any, **options: Any) -> torch.Tensor:
        if isinstance(value, np.ndarray):
            return plain(value, **options)
        xp = cs.get_array_module()
        array = xp.ascontiguousarray(xp.asarray(value))
        xp.cuda.get_current_stream().synchronize()
        if not array.size:
            return torch.empty(array.shape, dtype=getattr(torch, str(array.dtype)))
        kept[array.data.ptr] = array
        memory = (ctypes.c_char * array.nbytes).from_address(array.data.ptr)
        return torch.from_numpy(np.frombuffer(memory, array.dtype).reshape(array.shape))

    torch.from_dlpack = from_dlpack  # type: ignore[assignment]


@pytest.fixture(scope="module")
def gpus() -> Iterator[None]:
    with stand_in_gpus(2, nbytes=GPU):
        yield


@pytest.fixture(scope="module")
def two(gpus: None) -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["gpu:0", "gpu:1"]) as strategy:
        strategy.run(_take_stand_ins)
        yield connected(strategy)


class Net(torch.nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(HEIGHT, WIDTH, sparse=sparse, padding_idx=3)
        self.bags = torch.nn.EmbeddingBag(HEIGHT, WIDTH, sparse=sparse, mode="mean", padding_idx=5)
        self.last = torch.nn.Linear(2 * WIDTH, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([self.words(ids[:, 0]), self.bags(ids[:, 1:])], dim=1))


def batch_of(seed: int, rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 20, (rows, 4), generator=generator) * torch.tensor([1, 1, 1, 9_000])
    return ids, torch.randint(0, 3, (rows,), generator=generator)


def test_tables_larger_than_the_gpu_train_as_with_torch_alone(two: cs.CentralStorageStrategy) -> None:
    net = Net()
    alone = copy.deepcopy(net)
    with two.scope():
        model = cst.centralize(net)

    def optimizers(package: Any, module: Any) -> list[Any]:
        tables = [*module.words.parameters(), *module.bags.parameters()]
        return [package.SparseAdam(tables, lr=0.05), package.Adam(module.last.parameters(), lr=0.05)]

    @cst.step(model, *optimizers(cst.optim, model))
    def train(ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(ids), y)

    before = copied(two)
    losses = [train(batch_of(seed)) for seed in range(6)]
    expected = train_alone(
        alone,
        optimizers(torch.optim, alone),
        map(batch_of, range(6)),
        lambda module, ids, y: cross_entropy(module(ids), y),
    )
    assert losses == pytest.approx(expected, rel=1e-5)
    assert difference(model, alone) < 1e-5
    assert copied(two) - before < 6 * 50_000  # bytes: rows, and no table

    @cst.evaluate(model)
    def scores(ids: torch.Tensor) -> torch.Tensor:
        return model(ids)

    torch.testing.assert_close(scores(batch_of(9)[0]), alone(batch_of(9)[0]), rtol=1e-5, atol=1e-5)


def test_batches_are_normalized_over_replicas_on_gpus(two: cs.CentralStorageStrategy) -> None:
    """What a collective returns there is an array of CuPy, which NumPy refuses to take."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3))
    alone = copy.deepcopy(net)
    with two.scope():
        model = cst.centralize(net, sync_batchnorm=True)

    @cst.step(model, cst.optim.SGD(model.parameters(), lr=0.1))
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(x), y)

    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(10, 4, generator=generator), torch.randint(0, 3, (10,), generator=generator)

    losses = [train(batch(seed)) for seed in range(4)]
    optimizers = [torch.optim.SGD(alone.parameters(), lr=0.1)]
    expected = train_alone(alone, optimizers, map(batch, range(4)), lambda module, x, y: cross_entropy(module(x), y))
    assert losses == pytest.approx(expected, rel=1e-5)
    assert difference(model, alone) < 1e-5


def copied(strategy: cs.CentralStorageStrategy) -> int:
    """The bytes that were copied to the first GPU."""
    counts = strategy.run(lambda: cs.get_array_module().counts()["host_to_device_nbytes"])  # type: ignore[attr-defined]
    return int(strategy.experimental_local_results(counts)[0])


@pytest.mark.parametrize(
    ("use", "why"),
    [
        pytest.param(lambda net: (net.words.weight**2).mean(), "needs all of it", id="dense"),
        pytest.param(lambda net: net.words.weight.T.sum(), "needs all of it", id="view"),
        pytest.param(
            lambda net: torch.nn.functional.embedding(torch.tensor([1]), net.words.weight, max_norm=1.0).sum(),
            "max_norm would write to it",
            id="max_norm",
        ),
    ],
)
def test_what_needs_a_whole_table_is_refused(
    two: cs.CentralStorageStrategy, use: Callable[[Any], torch.Tensor], why: str
) -> None:
    with two.scope():
        model = cst.centralize(Net())
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(ids), y) + use(model)

    with pytest.raises(errors.InvalidArgumentError, match=f"words.weight is a table .* {why}"):
        train(batch_of(0))


def test_a_table_with_dense_gradients_needs_the_memory(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        model = cst.centralize(Net(sparse=False))
    optimizer = cst.optim.SGD(model.parameters(), lr=0.1)

    @cst.step(model, optimizer)
    def train(ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(ids), y)

    with pytest.raises(errors.DeviceMemoryError, match=r"words.weight|bags.weight"):
        train(batch_of(0))


class Recommender(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(HEIGHT, WIDTH, sparse=True) for _ in range(2))
        self.top = torch.nn.Linear(2 * WIDTH + 2, 1)

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        rows = [table(column) for table, column in zip(self.tables, categories.T, strict=True)]
        return self.top(torch.cat([numbers, *rows], dim=1))[:, 0]


def test_the_page_about_large_tables(gpus: None) -> None:
    [program] = python_blocks("large-tables.md")
    names: dict[str, Any] = {
        "cs": cs,
        "cst": cst,
        "Recommender": Recommender,
        "binary_cross_entropy_with_logits": torch.nn.functional.binary_cross_entropy_with_logits,
    }
    exec(program, names)
    strategy, train, rows = names["strategy"], names["train"], names["rows"]
    try:
        strategy.run(_take_stand_ins)
        batch = torch.ones(6, 2), torch.arange(12).view(6, 2), torch.ones(6)
        losses = [train(batch) for _ in range(10)]
        assert losses[-1] < losses[0]
        assert copied(strategy) < HEIGHT * WIDTH
        # the table of memory says the same
        [shown] = [row[1] for row in table("large-tables.md", "for a table") if row[0] == "RowwiseAdagrad"]
        assert shown == "4 rows more"
        assert [state["sum"].numel() for state in rows.state_dict()["state"].values()] == [HEIGHT] * 2
    finally:
        strategy.shutdown()
