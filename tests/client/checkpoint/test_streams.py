"""A large table is saved and restored in pieces of rows, so it is never in memory a second time as a whole."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from central_storage.checkpoint import disk, entries, stored
from central_storage.strategy.service_strategy import DefaultStrategy
from central_storage.train import Checkpoint, export_checkpoint
from central_storage.variables.variable import Variable
from cs_proto.errors import CheckpointDamagedError

assert DefaultStrategy  # variables outside every strategy belong to the one that this module sets

#: 96 MiB in rows of 384 bytes; a piece has 1 MiB.
ROWS, COLUMNS, PART = 262_144, 96, 1 << 20
TABLE = ROWS * COLUMNS * 4


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], object]], int]]:
    """Calls a function and returns the bytes that were allocated at most meanwhile, with pieces of 1 MiB."""
    monkeypatch.setattr(disk, "PART", PART)
    tracemalloc.start()

    def peak(call: Callable[[], object]) -> int:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        call()
        return tracemalloc.get_traced_memory()[1] - before

    yield peak
    tracemalloc.stop()


def table() -> Variable:
    return Variable(np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS))


def test_the_memory_of_a_save_and_of_a_restore(
    tmp_path: Path, traced: Callable[[Callable[[], object]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, path = Checkpoint(table=table()), tmp_path / "big"
    saving = traced(lambda: checkpoint.write(path))
    restored = Checkpoint(table=Variable(np.zeros((ROWS, COLUMNS), np.float32)))
    restoring = traced(lambda: restored.read(path).assert_consumed())
    exporting = traced(lambda: export_checkpoint(path, tmp_path / "big.npz"))
    print(f"\n{TABLE} bytes: {saving} to save, {restoring} to restore, {exporting} to export")
    assert max(saving, restoring, exporting) < 8 * PART
    assert (restored.table.numpy() == checkpoint.table.numpy()).all()
    # Without pieces, this test would notice.
    monkeypatch.setattr(entries, "of_variable", lambda v: entries.Entry(v.dtype, v.shape, v.current, v.assign))
    assert traced(lambda: checkpoint.write(path)) > TABLE / 2
    assert traced(lambda: restored.read(path).assert_consumed()) > TABLE / 2


SHAPES = [(7,), (1, 5), (13, 3), (3, 0), (0, 3), (), (5, 1, 2), (40,)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bool", "uint8", "float64", "complex128"])
def test_every_shape_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: str
) -> None:
    value = (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 3).astype(dtype)
    whole = Path(Checkpoint(w=Variable(value)).write(tmp_path / "x")).read_bytes()
    monkeypatch.setattr(disk, "PART", 20)  # smaller than some rows
    assert Path(Checkpoint(w=Variable(value)).write(tmp_path / "x")).read_bytes() == whole
    w = Variable(np.zeros(shape, dtype))
    Checkpoint(w=w).read(tmp_path / "x").assert_consumed()
    assert w.numpy().tobytes() == value.tobytes()
    if dtype != "complex128":
        assert load_file(tmp_path / "x.safetensors")["w"].tobytes() == value.tobytes()


def test_a_piece_that_changes_after_the_check_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PART", 64)
    path = Path(Checkpoint(w=Variable(np.arange(100.0))).write(tmp_path / "x"))
    verify = stored.Stored.verify

    def damage(opened: stored.Stored) -> None:
        verify(opened)
        with path.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\xff")

    monkeypatch.setattr(stored.Stored, "verify", damage)
    w = Variable(np.zeros(100))
    with pytest.raises(CheckpointDamagedError, match="changed while it was being read"):
        Checkpoint(w=w).read(path)
    assert w.numpy()[96:].tolist() == [0.0] * 4
