"""Variables on a GPU, over the stand-in: commits give what they give in the machine's memory, and are mirrored."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.harness.cupy_stand_in.c_kernels import COMPILER
from tests.harness.stand_in_gpus import StandInGpus, stand_in_gpus
from tests.harness.updates import ELEMENTWISE, HYPERPARAMETERS

from cs_proto.arrays import Array, Location, array_of, frame_view
from cs_proto.errors import DeviceError, DeviceMemoryError
from cs_proto.memory_plan import GPU_DTYPES
from cs_proto.segment_names import JOURNAL
from cs_runtime.shared_memory.mapping import Mapping
from cs_server.compute import kernels
from cs_server.compute.executor import Executor
from cs_server.events import Apply, Commit, Dense, Fill, Rows, Update, Write
from cs_server.gpu import blocks, cuda, staging, store, updates
from cs_server.gpu import memory as gpu_memory
from cs_server.gpu.dirty_ranges import Change
from cs_server.gpu.memory import DeviceMemory, is_on_device
from cs_server.gpu.redo_journal import RedoJournal
from cs_server.gpu.store import GpuStore
from cs_server.rules import RULES

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no gcc here to run kernels without a GPU")

NBYTES = 1 << 24


class Segments:
    """Segments as the service has them, each made when it is first named."""

    def __init__(self) -> None:
        self.mappings: dict[str, Mapping] = {}

    def get(self, name: str) -> Mapping:
        if name not in self.mappings:
            descriptor = os.memfd_create(name)
            os.ftruncate(descriptor, NBYTES)
            self.mappings[name] = Mapping(name, descriptor, NBYTES, writable=True)
        return self.mappings[name]

    def extend(self, name: str) -> tuple[Mapping, Mapping]:
        """The mapping of a segment, and one of twice its length that takes its place."""
        before = self.mappings[name]
        descriptor = os.dup(before._descriptor)
        os.ftruncate(descriptor, 2 * NBYTES)
        after = self.mappings[name] = Mapping(name, descriptor, 2 * NBYTES, writable=True)
        return before, after

    def view(self, array: Array) -> np.ndarray:
        return self.get(array.place.segment).view(array) if isinstance(array.place, Location) else frame_view(array)

    def elements(self, name: str, dtype: str) -> np.ndarray:
        return self.get(name).elements(dtype)

    def discard(self, name: str, start: int, stop: int) -> None:
        self.get(name).discard(start, stop)


def at(segment: str, first: int, like: np.ndarray) -> Array:
    return Array(like.dtype.name, like.shape, Location(segment, first * like.itemsize))


@pytest.fixture
def gpus() -> Iterator[StandInGpus]:
    with stand_in_gpus(2, nbytes=128 << 20) as gpus:
        yield gpus


@pytest.fixture(autouse=True)
def _by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is expected is computed by NumPy: no test waits for a compiler. Memory that every server takes is as small
    as the variables: a stand-in writes to all of it."""
    monkeypatch.setattr(kernels, "KERNEL_DTYPES", ())
    monkeypatch.setattr(staging, "_STAGE_NBYTES", 1 << 20)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything takes several pieces, launches and stages."""
    for module in (store, blocks, staging):
        monkeypatch.setattr(module, "PIECE", 16)
    for module in (updates, staging):
        monkeypatch.setattr(module, "TABLE_NBYTES", 1024)
    monkeypatch.setattr(store, "_FILL_BLOCKS", 3)
    monkeypatch.setattr(updates, "_LAUNCH", 3)
    monkeypatch.setattr(updates, "_SQUARES_NBYTES", 8 * 257 * 2)
    monkeypatch.setattr(staging, "_STAGE_NBYTES", 16 * 8 * 4)
    monkeypatch.setattr(gpu_memory, "_BLOCK_NBYTES", 512)
    monkeypatch.setattr(gpu_memory, "_GRAIN_NBYTES", 256)


@pytest.fixture(params=["page-locked", pytest.param("not page-locked", marks=pytest.mark.long)])
def locking(request: pytest.FixtureRequest, gpus: StandInGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """With page-locked gradients, and on a machine that refuses."""

    def refuse(*_: object) -> None:
        raise runtime.CUDARuntimeError(1)

    runtime = gpus.cupy.cuda.runtime
    if request.param == "not page-locked":
        monkeypatch.setattr(runtime, "hostRegister", refuse)


class Both:
    """The same variables on a GPU and in the machine's memory."""

    def __init__(self, *, journal: bool = True, replicas: int = 2) -> None:
        self.here, self.there = Segments(), Segments()
        self.replicas = replicas
        self.has_journal = journal
        self.plain = Executor(self.there, 1)
        self.gpu = self.server()
        self.ticket = 0
        self.made: list[tuple[str, int, int]] = []

    def server(self) -> GpuStore:
        """A server that begins with what the segments hold."""
        journal = RedoJournal(lambda nbytes: self.here.get(JOURNAL)) if self.has_journal else None
        return GpuStore("gpu:0", self.replicas, self.here, Executor(self.here, 1), journal)

    def again(self) -> None:
        """The server ends, and another takes its place."""
        self.gpu.close()
        self.gpu = self.server()
        for segment, start, stop in self.made:
            self.gpu.make(segment, start, stop, load=True)

    def make(self, segment: str, first: int, values: np.ndarray) -> None:
        """A variable or slot of those values."""
        start, stop = first * values.itemsize, first * values.itemsize + values.nbytes
        self.made.append((segment, start, stop))
        self.gpu.make(segment, start, stop)
        self.commit(Write(at(segment, first, values), "assign", None, (array_of(values),)))

    def brings(self, segment: str, first: int, values: np.ndarray) -> None:
        """A gradient."""
        for memory in (self.here, self.there):
            memory.elements(segment, values.dtype.name)[first : first + values.size] = values.reshape(-1)

    def commit(self, *operations: Apply | Write | Fill) -> None:
        self.ticket += 1
        self.load(*operations)
        self.gpu.commit(Commit(self.ticket, operations))
        self.plain.commit(Commit(self.ticket, operations))

    def load(self, *operations: Apply | Write | Fill) -> None:
        """The kernels that these need, as the first apply of a set of variables has them loaded."""
        for each in operations:
            if isinstance(each, Apply):
                for update in each.updates:
                    for part in (*update.dense, *update.sparse):
                        if part.dtype in GPU_DTYPES:
                            self.gpu.load_kernel(update.rule, part.dtype)

    def mirrored(self) -> None:
        """Have the mirror hold slots too."""
        self.gpu.mirror(
            Array(dtype, ((stop - start) // np.dtype(dtype).itemsize,), Location(segment, start))
            for segment, start, stop in self.made
            for dtype in [segment.rpartition("/")[2]]
        )

    def assert_same(self, rtol: float = 0.0) -> None:
        self.mirrored()
        for segment, start, stop in self.made:
            dtype = segment.rpartition("/")[2]
            found, expected = (
                memory.elements(segment, "uint8")[start:stop].view(dtype) for memory in (self.here, self.there)
            )
            if rtol:
                np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol, err_msg=segment)
            else:
                np.testing.assert_array_equal(found, expected, err_msg=segment)

    def close(self) -> None:
        self.gpu.close()
        self.plain.close()
        del self.gpu, self.plain
        self.here.mappings.clear()
        self.there.mappings.clear()


@pytest.fixture(params=[pytest.param(True, id="journal"), pytest.param(False, id="no journal", marks=pytest.mark.slow)])
def both(request: pytest.FixtureRequest, gpus: StandInGpus) -> Iterator[Both]:
    made = Both(journal=request.param)
    yield made
    made.close()


RANGES = {"float16": ((0, 70),), "float32": ((0, 50), (64, 200)), "float64": ((8, 9),), "complex64": ((0, 20),)}


def variables(both: Both, rule: str, dtypes: Sequence[str]) -> tuple[Dense, ...]:
    """Variables, slots and gradients of many magnitudes, and the dense part of an update of them."""
    random = np.random.default_rng(3)
    parts = []
    for dtype in dtypes:
        slots = tuple(f"slots/1/{slot}/{dtype}" for slot in RULES[rule].slots)
        gradients = tuple(f"gradients/{r}/0/{dtype}" for r in range(both.replicas))
        for first, last in RANGES[dtype]:
            both.make(f"parameters/{dtype}", first, random.standard_normal(last - first).astype(dtype))
            for name, value in zip(slots, RULES[rule].initial(HYPERPARAMETERS), strict=True):
                both.make(name, first, np.full(last - first, value, dtype))
            for name in gradients:
                both.brings(name, first, random.standard_normal(last - first).astype(dtype))
        parts.append(Dense(dtype, RANGES[dtype], f"parameters/{dtype}", slots, gradients))
    return tuple(parts)


def table(
    both: Both,
    rule: str,
    height: int,
    width: int,
    rows: Sequence[Sequence[int]],
    first: int = 0,
    dtype: str = "float32",
) -> Rows:
    """A table of which the replicas' gradients name rows."""
    random = np.random.default_rng(4)
    slots = tuple(f"slots/1/{slot}/{dtype}" for slot in RULES[rule].slots)
    both.make(f"parameters/{dtype}", first, random.standard_normal((height, width)).astype(dtype))
    for name, value in zip(slots, RULES[rule].initial(HYPERPARAMETERS), strict=True):
        both.make(name, first, np.full((height, width), value, dtype))
    gradients = [
        (array_of(random.standard_normal((len(named), width)).astype(dtype)), array_of(np.array(named, np.int64)))
        for named in rows
    ]
    return Rows(dtype, first, (height, width), f"parameters/{dtype}", slots, tuple(gradients))


def apply(rule: str, dense: Sequence[Dense] = (), sparse: Sequence[Rows] = (), t: int = 1, **given: float) -> Apply:
    return Apply((Update(rule, tuple((HYPERPARAMETERS | given).items()), t, tuple(dense), tuple(sparse)),))


# --- commits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ELEMENTWISE)
@pytest.mark.usefixtures("narrow")
def test_a_dense_update(gpus: StandInGpus, rule: str) -> None:
    both = Both()
    dtypes = ["float32", "float64"] + ([] if RULES[rule].is_real else ["complex64"])
    dense = variables(both, rule, dtypes)
    for t in range(1, 4):
        both.commit(apply(rule, dense, t=t))
    both.assert_same(0.0 if RULES[rule].is_compiled else 1e-4)
    both.close()


@pytest.mark.usefixtures("narrow", "locking")
def test_a_dense_update_of_any_gradients(both: Both) -> None:
    dense = variables(both, "adam", ["float32", "float64", "complex64"])
    for t in range(1, 4):
        both.commit(apply("adam", dense, t=t))
    both.assert_same()


@pytest.mark.usefixtures("narrow")
def test_parts_of_an_update_have_numbers_of_their_own(both: Both) -> None:
    dense = variables(both, "torch_adam", ["float32", "float64"])
    sparse = table(both, "torch_adam", 9, 7, [[3, 1, 3], [8, 1]], first=256)
    operation = apply("torch_adam", dense, [sparse])
    both.commit(replace(operation, updates=(replace(operation.updates[0], counts=(2, 9, 4)),)))
    both.assert_same()


@pytest.mark.parametrize("bound", [{}, {"clipnorm": 0.5}, {"global_clipnorm": 0.5}])
@pytest.mark.parametrize("dtypes", [["float32"], ["float32", "complex64"]])
@pytest.mark.usefixtures("narrow")
def test_rows_of_one_replica_are_added_to_the_gradient_of_another(
    both: Both, dtypes: list[str], bound: dict[str, float]
) -> None:
    parts, mixed = variables(both, "sgd_momentum", dtypes), []
    for part in parts:
        first, last = part.ranges[0]
        values = np.arange(15, dtype=part.dtype).reshape(3, 5)
        rows = array_of(values), array_of(np.array([3, 1, 3]))
        mixed.append(replace(part, ranges=((first, last),), rows=(None, rows)))
    rest = replace(parts[0], ranges=parts[0].ranges[1:])
    for t in range(1, 4):
        both.commit(apply("sgd_momentum", [*mixed, rest], t=t, **bound))
    both.assert_same(1e-5 if bound else 0.0)


@pytest.mark.parametrize("bound", [{}, {"clipnorm": 0.5}])
@pytest.mark.parametrize("rule", ["sgd_momentum", "adagrad", "adam"])
@pytest.mark.usefixtures("narrow")
def test_halves_are_computed_in_single_precision(gpus: StandInGpus, rule: str, bound: dict[str, float]) -> None:
    both = Both()
    dense = variables(both, rule, ["float16"])
    both.commit(apply(rule, dense, [table(both, rule, 20, 9, [[2, 2, 5], [6]], first=1000, dtype="float16")], **bound))
    both.assert_same(2e-3 if bound else 0.0)
    both.close()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.usefixtures("narrow")
def test_halves_of_a_rule_that_needs_norms(gpus: StandInGpus, replicas: int) -> None:
    """The reference adds up the gradients of several replicas in half precision, and the GPU in single precision."""
    both = Both(replicas=replicas)
    both.commit(apply("lamb", variables(both, "lamb", ["float16"])))
    both.assert_same(1e-3 if replicas == 1 else 4e-3)
    for slot in ("m", "v"):
        here, there = (each.elements(f"slots/1/{slot}/float16", "uint8")[:140] for each in (both.here, both.there))
        assert np.array_equal(here, there) is (replicas == 1)
    both.close()


@pytest.mark.usefixtures("narrow")
def test_gradients_of_halves_are_added_up_in_single_precision(gpus: StandInGpus) -> None:
    """What halves cannot hold on the way does not matter."""
    both = Both(replicas=3)
    (dense,) = variables(both, "sgd", ["float16"])
    for replica, value in enumerate((60_000, 60_000, -60_000)):
        both.brings(f"gradients/{replica}/0/float16", 0, np.full(70, value, "float16"))
    before = both.here.elements("parameters/float16", "float16")[:70].astype("float32")
    both.load(apply("sgd", [dense]))
    both.gpu.commit(Commit(9, (apply("sgd", [dense]),)))
    after = both.here.elements("parameters/float16", "float16")[:70]
    rate = np.float32(HYPERPARAMETERS["learning_rate"])
    assert after.tolist() == (before - rate * np.float32(60_000)).astype("float16").tolist()
    both.close()


@pytest.mark.parametrize("lazy", [0.0, 1.0])
@pytest.mark.parametrize("rule", ["sgd", "sgd_momentum", "rmsprop", "adam", "nadam", "torch_sgd", "lamb"])
@pytest.mark.parametrize(
    ("height", "width", "named"), [(9, 7, [[3, 1, 3], [8, 1]]), (200, 40, [[5, 7], []]), (3, 0, [[1], [1]])]
)
@pytest.mark.usefixtures("narrow")
def test_a_sparse_update(both: Both, rule: str, lazy: float, height: int, width: int, named: list[list[int]]) -> None:
    sparse = table(both, rule, height, width, named, first=16)
    for t in range(1, 4):
        both.commit(apply(rule, sparse=[sparse], t=t, lazy=lazy))
    both.assert_same()


@pytest.mark.parametrize("weights", [(), (0.25, 1.5), (0.0, 1.0), (0.0, 0.0)])
@pytest.mark.parametrize(
    ("bound", "own"), [(None, {}), (0.5, {}), (0.5, {"clipvalue": 0.25}), (0.5, {"clipnorm": 0.5})]
)
@pytest.mark.parametrize("dtypes", [["float32"], ["float32", "float64"], ["float32", "complex64"]])
@pytest.mark.usefixtures("narrow", "locking")
def test_several_optimizers_weights_and_one_bound(
    gpus: StandInGpus, weights: tuple[float, ...], bound: float | None, own: dict[str, float], dtypes: list[str]
) -> None:
    both = Both()
    if "clipvalue" in own:  # of real gradients only
        dtypes = [dtype for dtype in dtypes if dtype != "complex64"]
    dense = variables(both, "sgd_momentum", dtypes)
    rows = table(both, "sgd_momentum", 20, 9, [[2, 2, 5], [6]], first=1000)
    (first,) = apply("sgd_momentum", dense[:1], **own).updates
    (second,) = apply("sgd_momentum", dense[1:], [rows], learning_rate=0.5).updates
    both.commit(Apply((first, second), (), weights, bound, 1e-6 if bound else 0.0))
    both.assert_same(1e-5 if bound else 0.0)
    both.close()


def test_a_row_beyond_the_table_is_left_out(both: Both) -> None:
    both.commit(apply("adam", sparse=[table(both, "adam", 4, 10, [[-1, 2], [4]])]))
    both.assert_same()


@pytest.mark.parametrize(
    "bound",
    [
        {"clipvalue": 0.5},
        {"clipnorm": 0.5},
        {"global_clipnorm": 2.0},
        {"clipvalue": 0.5, "clipnorm": 1.0},
        {"global_clipnorm": 1e9},
    ],
)
@pytest.mark.parametrize("dtypes", [["float32"], ["float32", "float64"], ["float32", "complex64"]])
@pytest.mark.usefixtures("narrow", "locking")
def test_a_bounded_update(gpus: StandInGpus, bound: dict[str, float], dtypes: list[str]) -> None:
    both = Both()
    if "clipvalue" in bound:  # of real gradients only
        dtypes = [dtype for dtype in dtypes if dtype != "complex64"]
    dense = variables(both, "sgd_momentum", dtypes)
    sparse = [] if dtypes[1:] else [table(both, "sgd_momentum", 20, 9, [[2, 2, 5], [6]], first=1000)]
    both.commit(apply("sgd_momentum", dense, sparse, **bound))
    both.assert_same(1e-6)
    if bound != {"global_clipnorm": 1e9}:
        before = both.here.elements("parameters/float32", "float32").copy()
        both.commit(apply("sgd_momentum", dense, sparse, t=2))
        assert (both.here.elements("parameters/float32", "float32") != before).any()
    both.close()


@pytest.mark.parametrize("norm", [np.nan, np.inf])
def test_a_norm_that_is_not_finite(both: Both, norm: float) -> None:
    dense = variables(both, "sgd", ["float32", "complex64"])
    both.brings("gradients/1/0/float32", 3, np.array([norm], "float32"))
    with np.errstate(invalid="ignore"):
        both.commit(apply("sgd", dense, global_clipnorm=1.0))
    both.assert_same()
    assert np.isnan(both.here.elements("parameters/float32", "float32")[:50]).all()


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
@pytest.mark.usefixtures("narrow")
def test_writes(both: Both, dtype: str) -> None:
    segment, shape = f"parameters/{dtype}", (30, 9)
    random = np.random.default_rng(5)

    def values(*shape: int) -> Array:
        return array_of((random.standard_normal(shape) * 3).astype(dtype))

    both.make(segment, 40, (random.standard_normal(shape) * 3).astype(dtype))
    target = Array(dtype, shape, Location(segment, 40 * np.dtype(dtype).itemsize))
    rows = array_of(np.array([3, 29, 3, -1, 30, 4]))
    both.commit(
        Write(target, "assign", None, (values(*shape),)), Write(target, "scatter_update", None, (values(6, 9),), rows)
    )
    if dtype != "bool":
        both.commit(
            Write(target, "assign_add", "SUM", (values(*shape), values(*shape))),
            Write(target, "scatter_add", None, (values(6, 9),), rows),
            Write(target, "assign_sub", None, (values(*shape),)),
        )
        both.commit(Write(target, "scatter_sub", None, (values(6, 9),), rows))
    both.commit(Write(target, "scatter_update", None, (values(1, 9),), array_of(np.array([77]))))
    both.assert_same()


def test_a_scalar_and_nothing_at_all(both: Both) -> None:
    for at, shape in ((0, ()), (16, (0, 3))):
        both.make("parameters/float64", at, np.ones(shape))
        target = Array("float64", shape, Location("parameters/float64", at * 8))
        both.commit(Write(target, "assign_add", None, (array_of(np.full(shape, 2.0)),)))
    both.assert_same()
    assert both.here.elements("parameters/float64", "float64")[0] == 3


@pytest.mark.usefixtures("narrow")
def test_a_commit_of_many_operations(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation begins with what the one before it left, and what is changed twice is mirrored as it ends. What
    the journal needs for it was reserved with the variables."""

    def reserve(journal: RedoJournal, nbytes: int) -> None:
        assert nbytes <= both.gpu._made_nbytes

    dense = variables(both, "adam", ["float32", "float64", "complex64"])
    sparse = table(both, "adam", 50, 20, [[2, 2, 5], [6]], first=1000)
    w = Array("float32", (50,), Location("parameters/float32", 0))
    t = Array("float32", (50, 20), Location("parameters/float32", 4000))
    add = Write(w, "assign_add", None, (array_of(np.ones(50, "float32")),))
    scatter = Write(t, "scatter_add", None, (array_of(np.ones((1, 20), "float32")),), array_of(np.array([9])))
    monkeypatch.setattr(RedoJournal, "reserve", reserve)
    both.commit(add, apply("adam", dense, [sparse]), add, scatter, apply("adam", dense, [sparse], t=2), scatter)
    both.commit(apply("adam", dense, [sparse], t=3))
    both.commit(apply("adam", dense, [replace(sparse, gradients=sparse.gradients[:1])], t=4, lazy=1.0))
    both.assert_same()


@pytest.mark.parametrize("value", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["float16", "float32", "complex64"])
def test_fills(both: Both, value: float, dtype: str) -> None:
    segment = f"slots/1/m/{dtype}"
    both.make(segment, 0, np.ones(5000, dtype))
    both.commit(Fill(segment, dtype, 10, 4990, value, is_lazy=value == 0))
    both.assert_same()
    assert both.here.elements(segment, dtype)[[9, 10, 4989, 4990]].tolist() == [
        1,
        np.array(value, dtype),
        np.array(value, dtype),
        1,
    ]


# --- the mirror and the journal ---------------------------------------------------------------------------------------


def test_without_a_journal_slots_are_mirrored_when_somebody_asks(gpus: StandInGpus) -> None:
    both = Both(journal=False)
    both.commit(apply("adam", variables(both, "adam", ["float32"])))
    assert not both.here.elements("slots/1/m/float32", "float32")[:50].any()
    both.assert_same()
    both.close()


@pytest.mark.usefixtures("narrow")
def test_a_server_that_begins_anew_goes_on_from_the_mirror(gpus: StandInGpus) -> None:
    both = Both()
    dense = variables(both, "adam", ["float32", "complex64"])
    sparse = table(both, "adam", 50, 20, [[2, 2, 5], [6]], first=1000)
    for t in range(1, 4):
        both.commit(apply("adam", dense, [sparse], t=t))
        both.again()
    both.assert_same()
    both.close()


class Ended(Exception):
    """The server is no more."""


@pytest.mark.parametrize("where", ["place", "finish", "replay", "replayed"])
def test_a_commit_is_whole_or_has_not_been_wherever_the_server_ends(
    gpus: StandInGpus, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    both = Both()
    dense = variables(both, "adam", ["float32", "float64"])
    sparse = table(both, "adam", 50, 20, [[2, 2, 5], [6]], first=1000)
    w = Array("float32", (50,), Location("parameters/float32", 0))
    operations = (
        apply("adam", dense, [sparse]),
        Write(w, "assign_add", None, (array_of(np.ones(50, "float32")),)),
    )
    before = both.here.elements("parameters/float32", "float32").copy()
    left = 2

    def end(*_: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise Ended
        return original(*_)

    name, original = {
        "place": ("place", RedoJournal.place),
        "finish": ("finish", RedoJournal.finish),
        "replay": ("replay", RedoJournal.replay),
        "replayed": ("replay", RedoJournal.replay),
    }[where]
    if where == "finish":
        left = 1
    if where == "replay":
        original_put = Change.put

        def end_in_the_midst(*_: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                raise Ended
            original_put(*_)

        monkeypatch.setattr(Change, "put", end_in_the_midst)
    elif where != "replayed":
        monkeypatch.setattr(RedoJournal, name, end)
    both.ticket += 1
    both.load(*operations)
    command = Commit(both.ticket, operations)
    if where == "replayed":
        both.gpu.commit(command)
    else:
        with pytest.raises(Ended):
            both.gpu.commit(command)
        monkeypatch.undo()
        if where != "replay":
            np.testing.assert_array_equal(both.here.elements("parameters/float32", "float32"), before)
    both.again()
    both.load(*operations)
    both.gpu.commit(command)  # the engine has not heard that it is finished
    both.plain.commit(command)
    both.assert_same()
    both.close()


def test_the_mirror_is_copied_from_page_locked_memory_while_kernels_run(gpus: StandInGpus) -> None:
    """Gradients are read where they lie, and each byte that changed is copied once."""
    both = Both()
    dense = variables(both, "adam", ["float32"])
    both.commit(apply("adam", dense))
    before = gpus.cupy.counts()
    both.commit(apply("adam", dense, t=2))
    after = gpus.cupy.counts()
    counted = {name: after[name] - before[name] for name in after}
    assert counted["device_to_host_nbytes"] == 3 * 4 * (50 + 136)
    assert counted["host_to_device_nbytes"] == 8 * 2 * (4 + 2 + 2 * 2)  # the table of two pieces
    assert (counted["launches"], counted["allocated_nbytes"]) == (1, 0)
    both.close()
    assert gpus.cupy.counts()["page_locked_nbytes"] == 0


# --- memory -----------------------------------------------------------------------------------------------------------


def test_what_lies_on_the_gpu() -> None:
    assert is_on_device("parameters/float16")
    assert is_on_device("slots/3/momentum/float64")
    assert not is_on_device("parameters/int64")
    assert not is_on_device("parameters/complex64")
    assert is_on_device("gradients/0/2/float32")
    assert not is_on_device("gradients/0/1/float32")
    assert not is_on_device("gradients/0/3/complex64")
    assert not is_on_device("control")


@pytest.mark.usefixtures("narrow")
def test_a_variable_that_takes_the_place_of_another(both: Both) -> None:
    """Places are taken again in other sizes than they were made in; no other variable notices."""
    sizes = [(0, 100), (128, 100), (256, 300), (600, 90)]
    for first, size in sizes:
        both.make("parameters/float32", first, np.full(size, first + 1, "float32"))
    for first, size in sizes[1:3]:
        both.gpu.discard("parameters/float32", 4 * first, 4 * (first + size))
        both.made.remove(("parameters/float32", 4 * first, 4 * (first + size)))
    both.make("parameters/float32", 128, np.full(400, 7, "float32"))
    both.make("parameters/float32", 540, np.full(20, 8, "float32"))
    both.assert_same()
    for first, size in ((0, 100), (128, 400), (540, 20), (600, 90)):
        target = Array("float32", (size,), Location("parameters/float32", 4 * first))
        both.commit(Write(target, "assign_add", None, (array_of(np.ones(size, "float32")),)))
    both.assert_same()


def test_memory_that_nobody_needs_is_given_back_to_the_gpu(gpus: StandInGpus) -> None:
    both = Both()
    free = both.gpu.available_nbytes()
    size = gpu_memory._BLOCK_NBYTES // 4 // 8
    both.make("parameters/float32", 0, np.ones(size, "float32"))
    both.make("parameters/float32", size, np.ones(size, "float32"))
    assert both.gpu.available_nbytes() == free - gpu_memory._BLOCK_NBYTES
    both.gpu.discard("parameters/float32", 0, 4 * size)
    assert both.gpu.available_nbytes() == free - gpu_memory._BLOCK_NBYTES
    both.gpu.discard("parameters/float32", 4 * size, 8 * size)
    assert both.gpu.available_nbytes() == free
    both.close()


@pytest.mark.parametrize("journal", [True, False])
def test_what_is_page_locked_follows_a_segment_that_is_extended(gpus: StandInGpus, journal: bool) -> None:
    both = Both(journal=journal)
    dense = variables(both, "adam", ["float32"])
    both.commit(apply("adam", dense))
    locked = gpus.cupy.counts()["page_locked_nbytes"]
    for name in ("parameters/float32", "gradients/0/0/float32", "gradients/1/0/float32"):
        before, after = both.here.extend(name)
        both.gpu.extended(before, after)
    both.brings("gradients/0/0/float32", 0, np.full(200, 5, "float32"))
    both.commit(apply("adam", dense, t=2))
    both.assert_same()
    assert gpus.cupy.counts()["page_locked_nbytes"] == locked
    del before, after
    both.close()
    assert gpus.cupy.counts()["page_locked_nbytes"] == 0


def test_page_locks_go_before_the_pages(gpus: StandInGpus) -> None:
    both = Both()
    dense = variables(both, "sgd", ["float32"])
    both.commit(apply("sgd", dense))
    locked = gpus.cupy.counts()["page_locked_nbytes"]
    both.gpu.discard("gradients/0/0/float32", 0, 200)
    assert gpus.cupy.counts()["page_locked_nbytes"] == locked - 4096
    both.here.discard("gradients/0/0/float32", 0, 4096)
    both.brings("gradients/0/0/float32", 0, np.full(200, 5, "float32"))
    both.commit(apply("sgd", dense, t=2))
    both.assert_same()
    assert gpus.cupy.counts()["page_locked_nbytes"] == locked
    both.close()


def test_a_full_gpu_says_what_was_planned() -> None:
    with stand_in_gpus(1, nbytes=64 << 20):
        both = Both()
        with pytest.raises(DeviceMemoryError, match=r"67109136 bytes planned on gpu:0, \d+ bytes of it available"):
            both.gpu.make("parameters/float32", 0, 64 << 20)
        both.make("parameters/float32", 0, np.ones(9, "float32"))
        both.assert_same()
        both.close()


def take_the_rest(gpus: StandInGpus, both: Both, left: int) -> Any:
    """All of the GPU's memory but ``left`` bytes."""
    return gpus.cupy.cuda.Memory(both.gpu.available_nbytes() - left)


@pytest.mark.long
def test_a_commit_takes_nothing_of_a_gpu_that_is_full(
    gpus: StandInGpus, monkeypatch: pytest.MonkeyPatch, both: Both
) -> None:
    """Kernels are loaded with what needs them; of every kind of operation none makes an event, a module or memory."""
    dense = variables(both, "adam", GPU_DTYPES)
    sparse = [table(both, "adam", 40, 20, [[1, 2], [1]], first=1000)]
    rows = Array("float32", (40, 20), Location("parameters/float32", 4000))
    both.load(apply("adam", dense, sparse))
    rest = take_the_rest(gpus, both, 0)
    for where, name in ((gpus.cupy, "RawModule"), (gpus.cupy.cuda, "Event"), (gpus.cupy.cuda, "Memory")):
        monkeypatch.delattr(where, name)
    for t in range(1, 30):
        both.commit(apply("adam", dense, sparse, t=t))
    both.assert_same()
    both.commit(apply("adam", dense, sparse, t=30, clipnorm=0.5))
    both.commit(Write(rows, "scatter_add", None, (array_of(np.ones((1, 20), "float32")),), array_of(np.array([3]))))
    for dtype in GPU_DTYPES:
        both.commit(Fill(f"slots/1/m/{dtype}", dtype, 8, 9, 0.5))
    both.assert_same(2e-3)  # a norm of halves
    del rest


@pytest.mark.long
def test_a_kernel_for_which_a_gpu_has_no_room_is_refused(gpus: StandInGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variable or the optimizer that needs it, and by name; there is room later."""

    def refuse(*_: object) -> None:
        raise gpus.cupy.cuda.runtime.CUDARuntimeError(2)

    both = Both()
    both.make("parameters/float32", 0, np.ones(9, "float32"))
    rest = take_the_rest(gpus, both, 1000)
    with pytest.raises(
        DeviceMemoryError, match=r"the kernel adam_float32 planned on gpu:0, 1000 bytes of it available"
    ):
        both.gpu.load_kernel("adam", "float32")
    with pytest.raises(DeviceMemoryError, match=r"the kernel copy planned on gpu:0, 1000 bytes"):
        both.gpu.make("parameters/float16", 0, 18)
    both.gpu.make("parameters/float32", 64, 100)  # has all that it needs
    del rest
    monkeypatch.setattr(gpus.cupy.cuda.runtime, "memsetAsync", refuse)
    with pytest.raises(DeviceMemoryError, match="zeros planned on gpu:0"):
        both.gpu.make("parameters/float16", 0, 18)
    both.gpu.discard("parameters/float16", 0, 18)
    monkeypatch.undo()
    both.gpu.load_kernel("adam", "float32")
    both.gpu.make("parameters/float16", 0, 18)
    both.close()


def test_a_kernel_that_a_gpu_does_not_take_is_named(gpus: StandInGpus) -> None:
    gpu = cuda.Gpu("gpu:0")
    with pytest.raises(DeviceError, match="the kernel wrong cannot be compiled for gpu:0: "):
        gpu.load('extern "C" __global__ void wrong(int a) { b; }', "wrong", (np.int32(0),))
    with pytest.raises(DeviceError, match=r"gpu:0 cannot provide the kernel right: .*illegal memory access"):
        gpu.load('extern "C" __global__ void right(int *a) { a = a; }', "right", (7,))
    gpu.close()


def test_a_gpu_that_cannot_be_used(gpus: StandInGpus) -> None:
    both = Both()
    with pytest.raises(DeviceError, match=r"variables cannot be kept on gpu:7: .*invalid device ordinal"):
        GpuStore("gpu:7", 1, both.here, both.plain, None)
    both.close()


def test_nothing_is_dropped_twice(gpus: StandInGpus) -> None:
    from cs_server.gpu.cuda import Gpu

    gpu = Gpu("gpu:1")
    memory = DeviceMemory(gpu)
    assert memory.drop("parameters/float32", 0) == 0
    memory.make("parameters/float32", 0, 8)
    memory.make("parameters/float32", 8, 8)
    assert (memory.drop("parameters/float32", 0), memory.drop("parameters/float32", 0)) == (8, 0)
    gpu.close()


def test_an_exported_block_stays(gpus: StandInGpus) -> None:
    both = Both()
    size = gpu_memory._BLOCK_NBYTES // 4
    both.make("parameters/float32", 16, np.ones(size, "float32"))
    free = both.gpu.available_nbytes()
    place = both.gpu._on_device.export("parameters/float32", 4 * 20)
    assert (len(place.handle), place.offset) == (64, 256 + 16)
    block = gpus.cupy.cuda.UnownedMemory(next(iter(both.gpu._on_device._exported)), place.size, None, 0)
    for offset in place.marked:
        mark = gpus.cupy.ndarray((16,), np.uint8, gpus.cupy.cuda.MemoryPointer(block, offset))
        assert mark.get().tobytes() == place.mark
    assert place.size % gpu_memory._GRAIN_NBYTES == 0
    both.gpu.discard("parameters/float32", 64, 64 + 4 * size)
    assert both.gpu.available_nbytes() == free
    both.close()


# --- what workers on the same GPU are shown ---------------------------------------------------------------------------


def bytes_at(gpus: StandInGpus, both: Both, array: Array) -> np.ndarray:
    """The memory of an array on the GPU, as a worker that opened it would have it."""
    assert isinstance(array.place, Location)
    start, stop = array.place.offset, array.place.offset + array.nbytes
    ((_, _, address),) = both.gpu._on_device.spans(array.place.segment, start, stop)
    memory = gpus.cupy.cuda.UnownedMemory(address, array.nbytes, both, 0)
    return gpus.cupy.ndarray(array.shape, array.dtype, gpus.cupy.cuda.MemoryPointer(memory, 0))


@pytest.mark.parametrize("bound", [{}, {"clipnorm": 0.5}])
@pytest.mark.usefixtures("narrow")
def test_gradients_are_read_where_they_are_on_the_gpu(gpus: StandInGpus, both: Both, bound: dict[str, float]) -> None:
    """Those of one replica; the other's lie in the machine's memory, or on the GPU of a server that is no more, which
    had a journal."""
    (dense,) = variables(both, "adam", ["float32"])
    others = "gradients/1/3/float32" if both.has_journal else "gradients/1/1/float32"
    lost = replace(dense, gradients=("gradients/0/2/float32", others))
    both.brings("gradients/1/1/float32", 0, both.here.elements("gradients/1/0/float32", "float32")[:200].copy())
    for first, last in dense.ranges:
        array = Array("float32", (last - first,), Location("gradients/0/2/float32", 4 * first))
        in_memory = both.here.elements("gradients/0/0/float32", "float32")[first:last]
        assert both.gpu.view(array).tolist() == in_memory.tolist()
        place = both.gpu.export(array)
        assert (len(place.handle), len(place.mark)) == (64, 16)
        assert both.gpu.export(array) == place
        bytes_at(gpus, both, array)[...] = gpus.cupy.asarray(in_memory)
        gpus.cupy.cuda.Device().synchronize()
        assert both.gpu.view(array).tolist() == in_memory.tolist()
        in_memory[:] = np.nan
        with np.errstate(invalid="ignore"):
            assert np.isfinite(both.gpu.view(array)).all()
    both.ticket += 1
    both.load(apply("adam", [lost]))
    both.gpu.commit(Commit(both.ticket, (apply("adam", [lost], **bound),)))
    both.plain.commit(Commit(both.ticket, (apply("adam", [dense], **bound),)))
    both.assert_same(1e-6 if bound else 0.0)
    both.gpu.discard("gradients/0/0/float32", 0, 200)
    assert np.isnan(both.gpu.view(Array("float32", (50,), Location("gradients/0/2/float32", 0)))).all()


@pytest.mark.usefixtures("narrow")
def test_gradients_that_lie_nowhere_are_an_error(gpus: StandInGpus) -> None:
    """Without a journal workers write no gradient to the machine's memory, whose zeros would be taken for one."""
    both = Both(journal=False)
    (dense,) = variables(both, "adam", ["float32"])
    both.load(apply("adam", [dense]))
    nowhere = replace(dense, gradients=("gradients/0/2/float32", "gradients/1/1/float32"))
    with pytest.raises(DeviceError, match="gpu:0 does not hold the gradients gradients/0/2/float32"):
        both.gpu.commit(Commit(1, (apply("adam", [nowhere]),)))
    both.close()


def test_memory_that_cannot_be_exported_is_read_through_the_machines_and_that_is_said_once(
    gpus: StandInGpus, both: Both, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise runtime.CUDARuntimeError(801)

    runtime = gpus.cupy.cuda.runtime
    monkeypatch.setattr(runtime, "ipcGetMemHandle", refuse)
    for at in (0, 64):
        both.make("parameters/float32", at, np.ones(9, "float32"))
        assert both.gpu.export(Array("float32", (9,), Location("parameters/float32", 4 * at))).handle == b""
    both.assert_same()
    assert [record.message for record in caplog.records] == [
        "transport staging: memory of gpu:0 cannot be exported by CUDA IPC (cudaErrorNotSupported: operation not "
        "supported)"
    ]


def test_gradients_are_not_on_a_gpu_that_has_no_ample_memory_for_them() -> None:
    with stand_in_gpus(1, nbytes=64 << 20):
        both = Both()
        array = Array("float32", (both.gpu.available_nbytes() // 6,), Location("gradients/0/2/float32", 0))
        assert both.gpu.export(array).handle == b""
        assert both.gpu.export(replace(array, shape=(0,))).handle == b""
        assert both.gpu.export(replace(array, place=Location("gradients/0/2/complex64", 0))).handle == b""
        assert both.gpu.export(replace(array, shape=(9,))).handle != b""
        both.close()


def test_a_server_that_takes_anothers_place_waits_for_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in_gpus(1, nbytes=20 << 20):
        before = Both()
        pauses = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            before.close()

        monkeypatch.setattr(cuda.time, "sleep", pause)
        with pytest.raises(DeviceMemoryError):
            Both()
        assert not pauses
        memory = Segments()
        GpuStore("gpu:0", 1, memory, Executor(memory, 1), None, patience=1000.0).close()
        assert len(pauses) == 1
        memory.mappings.clear()


def test_a_refused_page_lock_is_said_once(
    gpus: StandInGpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise runtime.CUDARuntimeError(801)

    runtime = gpus.cupy.cuda.runtime
    monkeypatch.setattr(runtime, "hostRegister", refuse)
    both = Both()
    both.commit(apply("sgd", variables(both, "sgd", ["float32"])))
    both.close()
    assert [record.message for record in caplog.records] == [
        "transport pageable memory: shared memory cannot be page-locked (cudaErrorNotSupported: operation not "
        "supported); copies to and from gpu:0 are slower"
    ]
