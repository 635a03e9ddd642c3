"""A large table and its slots are saved and restored in pieces of rows, so they are never in memory a second time as a
whole."""

from __future__ import annotations

import errno
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import central_storage as cs
from central_storage.checkpoint import disk, entries, stored
from central_storage.strategy.service_strategy import DefaultStrategy
from central_storage.train import Checkpoint, export_checkpoint, import_checkpoint
from central_storage.variables.variable import Variable
from cs_proto.errors import CheckpointDamagedError
from cs_runtime.shared_memory import mapping
from cs_server.memory import segments

assert DefaultStrategy  # variables outside every strategy belong to the one that this module sets
assert segments  # the server has its own Mapping by now, which no test replaces

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
    export_checkpoint(path, tmp_path / "plain.safetensors")
    importing = traced(lambda: import_checkpoint(tmp_path / "plain.safetensors", tmp_path / "imported"))
    unpacking = traced(lambda: import_checkpoint(tmp_path / "big.npz", tmp_path / "unpacked"))
    print(f"\n{TABLE} bytes: {saving} to save, {restoring} to restore, {exporting} to export, {importing} to import")
    print(f"{unpacking} to import of an archive")
    assert max(saving, restoring, exporting, importing, unpacking) < 8 * PART
    assert Path(f"{tmp_path}/unpacked.safetensors").read_bytes()[-TABLE:] == checkpoint.table.numpy().tobytes()
    assert Path(f"{tmp_path}/imported.safetensors").read_bytes()[-TABLE:] == checkpoint.table.numpy().tobytes()
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
        export_checkpoint(tmp_path / "x", tmp_path / "plain.safetensors")
        import_checkpoint(tmp_path / "plain.safetensors", tmp_path / "imported")
        assert load_file(tmp_path / "imported.safetensors")["w"].tobytes() == value.tobytes()


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


# --- slots --------------------------------------------------------------------------------------------------------

WAYS = ["mapped", "carried"]


class NotMapped(mapping.Mapping):
    """What a script gets that cannot map memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOMEM, "no address range is left")


@pytest.fixture(scope="module", params=WAYS)
def service(request: pytest.FixtureRequest) -> Iterator[cs.CentralStorageStrategy]:
    """One whose memory the script maps, and one whose bytes come in messages."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "carried":
            patch.setattr(mapping, "Mapping", NotMapped)
        with cs.CentralStorageStrategy(in_process=True) as made:
            yield made


class Work:
    """Variables of these shapes, dense or sparse, with the slots of an optimizer."""

    def __init__(
        self,
        strategy: cs.CentralStorageStrategy | None,
        shapes: list[tuple[int, ...]],
        rule: str = "Adam",
        *,
        sparse: bool = False,
    ) -> None:
        def make() -> None:
            self.variables = [cs.Variable(np.zeros(shape, np.float32), sparse=sparse) for shape in shapes]
            self.optimizer = getattr(cs.optimizers, rule)()

        if strategy is None:
            make()
        else:
            with strategy.scope():
                make()
        self.checkpoint = cs.train.Checkpoint(variables=self.variables, optimizer=self.optimizer)

    def fill(self, seed: int) -> None:
        """Other values in all variables and slots."""
        rng = np.random.default_rng(seed)
        for variable in self.variables:
            variable.assign(rng.normal(size=variable.shape).astype(np.float32))
            for slot in self.optimizer.slot_names:
                shape = self.optimizer._slot_shape(variable)
                self.optimizer.set_slot(variable, slot, rng.normal(size=shape).astype(np.float32))

    def bits(self) -> list[bytes]:
        """Of all of them."""
        slots = [self.optimizer.slot_value(v, slot) for v in self.variables for slot in self.optimizer.slot_names]
        return [np.asarray(value).tobytes() for value in (*(v.numpy() for v in self.variables), *slots)]


def arrays_of(path: str) -> dict[str, bytes]:
    """The bytes of the arrays in a file, without those of a strategy."""
    return {key: array.tobytes() for key, array in load_file(path).items() if not key.startswith("(strategy)")}


def test_the_memory_of_slots(
    service: cs.CentralStorageStrategy,
    tmp_path: Path,
    traced: Callable[[Callable[[], object]], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Script and server are one process here."""
    table = 24 * PART
    saved = Work(service, [(table // 400, 100)], sparse=True)
    saved.fill(1)
    saving = traced(lambda: saved.checkpoint.write(tmp_path / "x"))
    restored = Work(service, [(table // 400, 100)], sparse=True)
    first = traced(lambda: restored.checkpoint.read(tmp_path / "x").assert_consumed())  # makes the slots
    again = traced(lambda: restored.checkpoint.read(tmp_path / "x").assert_consumed())
    print(f"\n{table} bytes each: {saving} to save, {first} and {again} to restore")
    assert max(saving, first, again) < 10 * PART
    assert restored.bits() == saved.bits()
    # Without pieces, this test would notice.
    monkeypatch.setattr(entries, "_is_large", lambda entry: False)
    assert traced(lambda: restored.checkpoint.read(tmp_path / "x").assert_consumed()) > table / 2
    if service.controller.carries:
        assert traced(lambda: saved.checkpoint.write(tmp_path / "x")) > table / 2


def test_what_is_sent_of_slots_takes_the_room_of_a_piece(
    service: cs.CentralStorageStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PART", PART)
    work = Work(service, [(8 * PART // 400, 100)])
    work.fill(1)
    path, expected = work.checkpoint.write(tmp_path / "x"), work.bits()
    work.fill(2)
    sent: list[int] = []
    session = service.controller._session  # type: ignore[attr-defined]
    new = session.arena.new
    monkeypatch.setattr(session.arena, "new", lambda *given: (sent.append(session.arena.mark()), new(*given))[1])
    work.checkpoint.read(path).assert_consumed()
    assert work.bits() == expected
    assert len(sent) >= 3 * 8
    assert max(sent) - min(sent) <= 2 * PART  # where a piece begins: nothing is kept behind the one before it


SLOTTED = [(7,), (1, 5), (13, 3), (0, 3), (), (5, 1, 2), (40,)]


@pytest.mark.parametrize("part", [20, 64, 300])
@pytest.mark.parametrize(
    ("rule", "sparse"), [("Adam", False), ("Adam", True), ("RowwiseAdagrad", True), ("SGD", False)]
)
def test_slots_in_pieces_have_the_same_bits(
    service: cs.CentralStorageStrategy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
    sparse: bool,
    part: int,
) -> None:
    shapes = [shape for shape in SLOTTED if shape or not sparse]
    saved = Work(service, shapes, rule, sparse=sparse)
    saved.fill(1)
    whole = arrays_of(saved.checkpoint.write(tmp_path / "x"))
    monkeypatch.setattr(disk, "PART", part)
    for in_thread in (False, True):
        path = saved.checkpoint.write(tmp_path / "x", cs.train.CheckpointOptions(enable_async=in_thread))
        saved.checkpoint.sync()
        assert arrays_of(path) == whole
    for has_slots in (False, True):
        restored = Work(service, shapes, rule, sparse=sparse)
        if has_slots:
            restored.fill(2)
        restored.checkpoint.read(path).assert_consumed()
        assert restored.bits() == saved.bits()


def test_slots_of_an_optimizer_without_a_strategy_in_pieces(
    service: cs.CentralStorageStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Work(service, SLOTTED)
    saved.fill(1)
    whole = arrays_of(saved.checkpoint.write(tmp_path / "x"))
    monkeypatch.setattr(disk, "PART", 20)
    local = Work(None, SLOTTED)
    for seed in (0, 2):
        if seed:
            local.fill(seed)
        local.checkpoint.read(tmp_path / "x").expect_partial()
        assert local.bits() == saved.bits()
    assert arrays_of(local.checkpoint.write(tmp_path / "y")) == whole
    back = Work(service, SLOTTED)
    back.checkpoint.read(tmp_path / "y").assert_existing_objects_matched()
    assert back.bits() == saved.bits()
    assert arrays_of(back.checkpoint.write(tmp_path / "x")) == whole


def test_a_merge_function_saves_and_restores_slots_in_pieces(
    service: cs.CentralStorageStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PART", 20)
    work = Work(service, [shape for shape in SLOTTED if shape != (0, 3)])
    work.fill(1)
    expected, checkpoint = work.bits(), work.checkpoint

    def in_merge(call: Callable[[Any], object]) -> None:
        def step() -> Any:
            context = cs.get_replica_context()
            assert context is not None
            return context.merge_call(lambda strategy: str(call(strategy)))

        service.run(step)

    in_merge(lambda strategy: checkpoint.write(tmp_path / "merged"))
    assert arrays_of(f"{tmp_path}/merged.safetensors") == arrays_of(checkpoint.write(tmp_path / "x"))
    work.fill(2)
    in_merge(lambda strategy: checkpoint.read(tmp_path / "merged").expect_partial())
    assert work.bits() == expected


def test_a_piece_of_a_slot_that_changes_after_the_check_is_not_set(
    service: cs.CentralStorageStrategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PART", 64)
    work = Work(service, [(100,)])
    work.fill(1)
    path = Path(work.checkpoint.write(tmp_path / "x"))
    last = work.optimizer.slot_value(work.variables[0], "v").tobytes()[-4:]
    place = path.read_bytes().rindex(last)
    work.fill(2)
    before = work.optimizer.slot_value(work.variables[0], "v")
    verify = stored.Stored.verify

    def damage(opened: stored.Stored) -> None:
        verify(opened)
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\xff\xff\xff\xff")

    monkeypatch.setattr(stored.Stored, "verify", damage)
    with pytest.raises(CheckpointDamagedError, match="changed while it was being read"):
        work.checkpoint.read(path)
    assert work.optimizer.slot_value(work.variables[0], "v")[96:].tobytes() == before[96:].tobytes()
