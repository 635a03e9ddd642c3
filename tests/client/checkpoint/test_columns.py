"""Small variables and slots of a service, which are saved, compared, checked and set as columns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import central_storage as cs
from central_storage.checkpoint import disk, entries, graph, stored
from cs_proto.errors import CheckpointDamagedError, CheckpointError

SHAPES = {"a": (5, 7), "b": (), "c": (0, 3), "d": (33,), "e": (4000,), "f": (2, 2)}
DTYPES = {"a": "float32", "b": "float64", "c": "float32", "d": "float32", "e": "float32", "f": "float64"}


@pytest.fixture(scope="module")
def strategy() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(in_process=True) as made:
        yield made


class Work:
    """Variables by name, a table of integers, and an optimizer, whose slots are there after a step."""

    def __init__(self, strategy: cs.CentralStorageStrategy, names: str = "abcdef") -> None:
        with strategy.scope():
            self.trained = {n: cs.Variable(np.zeros(SHAPES[n], DTYPES[n])) for n in names}
            self.table = cs.Variable(np.zeros((3, 2), np.int64))
            self.adam = cs.optimizers.Adam(0.1)
        self.strategy = strategy
        self.checkpoint = cs.train.Checkpoint(**self.trained, table=self.table, adam=self.adam)

    def step(self, seed: int) -> None:
        """Another state."""
        rng = np.random.default_rng(seed)
        gradients = {n: rng.normal(size=v.shape).astype(v.dtype.name) for n, v in self.trained.items()}

        def step() -> None:
            self.adam.apply_gradients([(gradients[n], v) for n, v in self.trained.items()])

        self.strategy.run(step)
        self.table.assign(rng.integers(0, 100, (3, 2)))

    def bits(self) -> dict[str, bytes]:
        """Of all values by name."""
        found = {n: v.numpy().tobytes() for n, v in self.trained.items()} | {"table": self.table.numpy().tobytes()}
        for slot in ("m", "v"):
            found |= {
                f"adam/{slot}/{n}": np.asarray(self.adam.get_slot(v, slot)).tobytes() for n, v in self.trained.items()
            }
        return found


@pytest.fixture(params=["kept", "read again", "in parts"])
def _memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How a restore comes by the checked bytes."""
    if request.param != "kept":
        monkeypatch.setattr(graph, "TOGETHER_NBYTES", 0 if request.param == "read again" else 300)
    if request.param == "in parts":
        monkeypatch.setattr(entries, "TOGETHER_NBYTES", 200)
        monkeypatch.setattr(disk, "SMALL", 500)  # one variable is large, and a read takes few of the others


@pytest.mark.usefixtures("_memory")
@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("has_slots", [False, True])
@pytest.mark.parametrize("names", ["abcdef", "fedcba"])
def test_what_was_saved_comes_back(
    strategy: cs.CentralStorageStrategy, tmp_path: Path, in_thread: bool, has_slots: bool, names: str
) -> None:
    saved = Work(strategy)
    saved.step(1)
    path = saved.checkpoint.write(tmp_path / "x", cs.train.CheckpointOptions(enable_async=in_thread))
    saved.checkpoint.sync()
    found = saved.bits()
    assert {key: load_file(path)[key].tobytes() for key in found} == found
    restored = Work(strategy, names)
    if has_slots:
        restored.step(2)
    restored.checkpoint.read(path).assert_consumed()
    assert restored.bits() == found
    assert int(restored.adam.iterations) == 1


def test_what_only_one_side_has(strategy: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    saved, restored = Work(strategy, "abc"), Work(strategy, "bcd")
    saved.step(1)
    restored.step(2)
    before, there = restored.bits(), saved.bits()
    status = restored.checkpoint.read(saved.checkpoint.write(tmp_path / "x")).expect_partial()
    assert status.missing == ("adam/m/d", "adam/v/d", "d")
    assert status.unused == ("a", "adam/m/a", "adam/v/a")
    assert status.matched == 2 * 3 + 1 + 2  # b and c with their slots, the table, and two numbers of Adam
    assert restored.bits() == {key: before[key] if key[-1] == "d" else there[key] for key in before}


def test_a_misfit_in_a_column_is_named_and_nothing_is_set(
    strategy: cs.CentralStorageStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Work(strategy)
    saved.step(1)
    path = saved.checkpoint.write(tmp_path / "x")
    monkeypatch.setitem(SHAPES, "d", (32,))
    restored = Work(strategy)
    restored.step(2)
    before = restored.bits()
    wrong = r"d is float32\[33\] in the checkpoint, but float32\[32\] here; adam/m/d is .*; adam/v/d is "
    with pytest.raises(CheckpointError, match=wrong):
        restored.checkpoint.read(path)
    assert restored.bits() == before


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_file_that_changes_after_the_check(
    strategy: cs.CentralStorageStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    saved = Work(strategy)
    saved.step(1)
    path = saved.checkpoint.write(tmp_path / "x")
    place = Path(path).read_bytes().index(saved.trained["e"].numpy().tobytes())
    verify = stored.Stored.verify

    def damage(opened: Any) -> None:
        verify(opened)
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"\xff\xff\xff\xff")

    monkeypatch.setattr(stored.Stored, "verify", damage)
    if is_kept:
        restored = Work(strategy)
        restored.checkpoint.read(path).assert_consumed()
        assert restored.bits() == saved.bits()  # what was checked
        return
    monkeypatch.setattr(graph, "TOGETHER_NBYTES", 0)
    restored = Work(strategy)
    restored.step(2)
    before = restored.bits()
    with pytest.raises(CheckpointDamagedError, match="changed while it was being read, after 0 of 23 arrays were set"):
        restored.checkpoint.read(path)
    assert restored.bits() == before
