"""Data sets of Hugging Face, grain and torch go into a strategy unmodified, and a restored training goes on in them."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.processes import ROOT
from tests.harness.services import connected

import central_storage as cs
from central_storage.data.distributed import DistributedDataset
from central_storage.train import Checkpoint
from cs_proto.errors import CheckpointError, NotADatasetError, UnbatchedDatasetError

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*set_vital.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
datasets = importlib.import_module("datasets")
grain = importlib.import_module("grain")
torch = importlib.import_module("torch")
stateful = importlib.import_module("torchdata.stateful_dataloader")
datasets.disable_progress_bars()

X, Y = np.arange(20, dtype=np.float32).reshape(10, 2), list(range(10))


@pytest.fixture(scope="module")
def two() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        yield connected(strategy)


def rows() -> Any:
    return datasets.Dataset.from_dict({"x": X, "y": Y, "t": [str(y) for y in Y]})


def tensors() -> Any:
    return torch.utils.data.TensorDataset(torch.from_numpy(X), torch.arange(10))


def source() -> Any:
    return grain.MapDataset.source(Y).map(lambda y: {"x": X[y], "y": y})


def loader(kind: Any, **options: Any) -> Any:
    generator = torch.Generator()
    generator.manual_seed(3)
    return kind(tensors(), batch_size=4, generator=generator, **options)


SOURCES: dict[str, Callable[[], Any]] = {
    "hugging face": lambda: rows().batch(4),
    "hugging face, numpy": lambda: rows().with_format("numpy").batch(4),
    "hugging face, torch": lambda: rows().batch(4).with_format("torch"),
    "hugging face, shuffled": lambda: rows().shuffle(seed=1).batch(4),
    "hugging face, stream": lambda: rows().to_iterable_dataset(num_shards=2).batch(4),
    "hugging face, shuffled stream": lambda: (
        rows().to_iterable_dataset(num_shards=2).shuffle(seed=2, buffer_size=4).with_format("numpy").batch(4)
    ),
    "grain, map": lambda: source().shuffle(seed=1).batch(4),
    "grain, iter": lambda: source().shuffle(seed=1).to_iter_dataset().batch(4),
    "torch": lambda: loader(torch.utils.data.DataLoader),
    "torchdata": lambda: loader(stateful.StatefulDataLoader),
}


def numbers(element: Any) -> Any:
    return element["y"] if isinstance(element, dict) else element[1]


@pytest.mark.parametrize("name", SOURCES)
def test_every_row_comes_once_and_again(two: cs.CentralStorageStrategy, name: str) -> None:
    data = two.experimental_distribute_dataset(SOURCES[name]())
    for _ in range(2):
        shares = [two.experimental_local_results(numbers(element)) for element in data]
        assert [[len(share) for share in both] for both in shares] == [[2, 2], [2, 2], [1, 1]]
        assert sorted(int(y) for both in shares for share in both for y in share) == Y
    spec = data.element_spec
    assert numbers(spec).values[0].dtype == np.int64
    total = two.run(
        lambda element: (element["x"] if isinstance(element, dict) else element[0]).sum(), (next(iter(data)),)
    )
    assert two.reduce("SUM", total, axis=None).dtype.kind == "f"


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("taken", [1, 2, 3])
def test_a_restored_training_goes_on_at_the_same_element(name: str, taken: int, tmp_path: Path) -> None:
    def seen(elements: Iterator[Any]) -> list[Any]:
        return [np.asarray(numbers(element)).tolist() for element in elements]

    data = DistributedDataset(SOURCES[name](), 1)
    elements = iter(data)
    before = seen(next(elements) for _ in range(taken))
    path = Checkpoint(data=data).save(str(tmp_path / "at"))
    rest = seen(elements)
    assert sorted(y for part in before + rest for y in part) == Y
    again = DistributedDataset(SOURCES[name](), 1)
    Checkpoint(data=again).restore(path).assert_consumed()
    assert seen(iter(again)) == rest
    assert sorted(y for part in seen(iter(again)) for y in part) == Y  # the next epoch is whole


def test_a_source_with_a_state_does_not_read_again(tmp_path: Path) -> None:
    read: list[int] = []

    def make() -> DistributedDataset:
        return DistributedDataset(grain.MapDataset.source(Y).map(lambda y: read.append(y) or y).batch(2), 1)

    data = make()
    elements = iter(data)
    for _ in range(3):
        next(elements)
    path = Checkpoint(data=data).save(str(tmp_path / "at"))
    again = make()
    Checkpoint(data=again).restore(path)
    elements.close()
    read.clear()
    rest = iter(again)
    assert next(rest).tolist() == [6, 7]
    rest.close()
    assert 0 not in read


def test_a_state_that_does_not_fit(tmp_path: Path) -> None:
    data = DistributedDataset(SOURCES["grain, map"](), 1)
    elements = iter(data)
    next(elements)
    path = Checkpoint(data=data).save(str(tmp_path / "at"))
    again = DistributedDataset(SOURCES["torchdata"](), 1)
    Checkpoint(data=again).restore(path)
    with pytest.raises(CheckpointError, match="make it of the data"):
        next(iter(again))


def test_a_tensor_becomes_an_array_without_a_copy() -> None:
    batch = torch.arange(4.0)
    (element,) = DistributedDataset([(batch,)], 1)
    assert element[0].__array_interface__["data"][0] == batch.data_ptr()


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (rows, UnbatchedDatasetError, r"\.batch\(size\)"),
        (lambda: rows().to_iterable_dataset(), UnbatchedDatasetError, r"\.batch\(size\)"),
        (lambda: rows().select_columns(["t"]), UnbatchedDatasetError, r"\.batch\(size\)"),
        (source, UnbatchedDatasetError, r"\.batch\(size\)"),
        (lambda: torch.utils.data.DataLoader(tensors(), batch_size=None), UnbatchedDatasetError, "batch_size=size"),
        (tensors, NotADatasetError, r"DataLoader\(dataset, batch_size=size\)"),
        (lambda: datasets.DatasetDict(train=rows()), NotADatasetError, "'train'"),
        (lambda: rows().iter(4), NotADatasetError, r"dataset\.batch\(size\)"),
        (lambda: iter(source().batch(4)), NotADatasetError, "pass the data set that made it"),
        (lambda: rows().with_format("pandas"), NotADatasetError, "with_format"),
    ],
)
def test_what_is_not_batched(make: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        list(DistributedDataset(make(), 2))


def test_a_column_that_is_ragged_is_named() -> None:
    ragged = datasets.Dataset.from_dict({"ids": [[1], [2, 3]]}).batch(2)
    with pytest.raises(ValueError, match="'ids'"):
        list(DistributedDataset(ragged, 2))


def test_the_length_of_what_grain_repeats() -> None:
    assert DistributedDataset(source().batch(4).repeat(), 2).cardinality == cs.data.INFINITE_CARDINALITY


def test_the_guides_table_of_grain(tmp_path: Path) -> None:
    """Evaluates the column for grain in docs/guide/data.md. The last row starts no process."""
    page = (ROOT / "docs/guide/data.md").read_text().partition("\n## grain\n")[2]
    interleave, pad, window, records, parallel = re.findall(r"\| `([^`]+)` \|$", page, re.MULTILINE)
    path = tmp_path / "rows.tfrecord"
    path.write_bytes(b"".join(map(tf_record, (b"one", b"two"))))
    names: dict[str, Any] = {"grain": grain, "path": str(path), "pad": lambda row: np.pad(row, (0, 3 - len(row)))}

    def elements(code: str, **more: Any) -> list[Any]:
        return [np.asarray(each).tolist() for each in eval(code, names | more)]

    parts = [grain.MapDataset.source([first, first + 1]) for first in (0, 10)]
    assert elements(interleave, parts=parts) == [0, 10, 1, 11]
    ragged = grain.MapDataset.source([np.array([1]), np.array([1, 2])])
    assert elements(pad, source=ragged, n=2) == [[[1, 0, 0], [1, 2, 0]]]
    numbers = grain.MapDataset.source(range(5))
    assert elements(window, source=numbers, n=2) == [[0, 1], [2, 3], [4]]
    assert elements(records) == [b"one", b"two"]
    assert elements(parallel, source=numbers, n=0) == [0, 1, 2, 3, 4]


def tf_record(data: bytes) -> bytes:
    """One record of a TFRecord file: its length and its bytes, each with a masked CRC-32C."""

    def checked(part: bytes) -> bytes:
        rest = 0xFFFFFFFF
        for byte in part:
            rest ^= byte
            for _ in range(8):
                rest = rest >> 1 ^ (0x82F63B78 if rest & 1 else 0)
        rest ^= 0xFFFFFFFF
        masked = (rest >> 15 | rest << 17) + 0xA282EAD8 & 0xFFFFFFFF
        return part + masked.to_bytes(4, "little")

    return checked(len(data).to_bytes(8, "little")) + checked(data)
