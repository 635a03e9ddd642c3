"""A commit that is cut off anywhere is carried to its end by the next server, with the bits of one that nobody cut.

`survives` runs a commit once for each store that tells how far it is, and for each element that the loops of `jit`
write: until there, no further. Those loops are the compiled ones' own source, run by Python here; the rest is done by
the compiled ones. What lies in a piece that is being overwritten may be anything, so it is filled with noise.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import numpy as np
import pytest
from tests.server.compute.test_executor import Bytes, at

from cs_proto.arrays import array_of
from cs_proto.frozen import with_changes
from cs_proto.messages import WriteOp
from cs_server.compute import executor, jit, kernels, plans, undo
from cs_server.compute import sparse as sparse_updates
from cs_server.compute.executor import Executor
from cs_server.compute.undo import UNDO_NBYTES, Lane, Undo
from cs_server.events import Apply, Commit, Dense, Fill, Rows, Update, Write
from cs_server.rules import RULES, Rule, summed

Operation = Apply | Write | Fill
GIVEN = {
    "learning_rate": 0.25,
    "momentum": 0.5,
    "beta_1": 0.9,
    "beta_2": 0.99,
    "epsilon": 1e-3,
    "rho": 0.8,
    "learning_rate_power": -0.4,
    "l1_regularization_strength": 0.02,
    "l2_regularization_strength": 0.01,
    "l2_shrinkage_regularization_strength": 0.03,
    "beta": 0.5,
    "weight_decay": 0.1,
}
SMALL = 128  # bytes of a piece


def ways(*quick: tuple[int, int], slow: Sequence[tuple[int, int]]) -> pytest.MarkDecorator:
    """The threads of a server, and at every how many of the events it is cut off."""
    return pytest.mark.parametrize(
        ("threads", "every"), [*quick, *(pytest.param(*way, marks=pytest.mark.slow) for way in slow)]
    )


WAYS = ways((1, 11), (3, 7), slow=[(1, 2), (3, 5)])
WAYS_OF_MANY_EVENTS = ways((1, 53), (3, 47), slow=[(1, 7), (3, 11)])


class Cut(BaseException):
    """The server ends here."""


class NotCut(Exception):
    """It had fewer events."""


class Fuse:
    """Burns down by one with each event; from 0 on nothing happens any more, in any thread."""

    def __init__(self, left: int | None) -> None:
        self.left = left
        self.count = 0
        self._lock = threading.Lock()

    def burn(self) -> None:
        with self._lock:
            self.count += 1
            if self.left is not None:
                if self.left <= 0:
                    raise Cut
                self.left -= 1


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything consists of many pieces, and of as many shares as there are threads."""
    monkeypatch.setattr(plans, "_ELEMENTS_PER_THREAD", 1)
    monkeypatch.setattr(plans, "_ELEMENTS_PER_CUT", 4)
    monkeypatch.setattr(kernels, "CHUNK_NBYTES", SMALL)
    monkeypatch.setattr(kernels, "KEPT_BLOCK_NBYTES", SMALL)
    monkeypatch.setattr(executor, "KEPT_NBYTES", SMALL)
    monkeypatch.setattr(sparse_updates, "KEPT_NBYTES", SMALL)
    monkeypatch.setattr(sparse_updates, "_PIECE", 16)


class InPython:
    """The loops of kernels as Python runs them; every element that is written is an event."""

    def __init__(self, fuse: Fuse, say: Callable[..., None]) -> None:
        self.fuse = fuse
        self.say = say
        self.at_hand: dict[int, tuple[Any, ...]] = {}  # by lane: its progress, the piece's number, arrays and place

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Have every update done by Python."""
        replaced = {"_done": jit._done.py_func, "_foresee": lambda *_: None, "_share": share}
        replaced |= {"_elements": elements, "_addends": addends, "_scaled": sums}
        replaced |= {"_addends_of_row": jit._addends_of_row.py_func, "_prefetch": lambda *_: None}
        replaced["_tell"] = lambda progress, value: self.say(progress, 0, value)
        replaced["_add_mean"] = self.add_mean
        for name, function in replaced.items():
            patch.setattr(jit, name, function)
        patch.setattr(kernels, "_kernel", self.kernel)

    def kernel(self, rule: Rule, dtype: Any, *, is_sparse: bool = False) -> Callable[..., Callable[[], None]] | None:
        if not rule.is_compiled or dtype.name not in kernels.KERNEL_DTYPES:
            return None

        def step(*values: Any) -> tuple[Any, ...]:
            self.fuse.burn()
            with np.errstate(all="ignore"):
                return rule.step(*values)

        is_by_row = rule.row is not None
        of_rule, _ = (
            jit.unrolled(0, lambda *values: step(*values)[:1], dtype)
            if is_by_row
            else jit.unrolled(len(rule.slots), step, dtype)
        )

        def piece(*given: Any) -> None:
            arrays, start, stop, *_, number, _, progress, _, _ = given
            if progress.size:
                self.at_hand[progress.ctypes.data] = progress, number, arrays, slice(start, stop)
            of_rule(*given)

        def bind(numbers: Any, progress: Any, area: Any, scratch: Any, alarm: Any, *given: Any) -> Callable[[], None]:
            last = len(given) - 1 - len(rule.slots)
            written, own = given[last:], (progress, area, scratch, alarm)

            def run() -> None:
                if is_sparse:
                    where, memory = given[:4], given[4:7]
                    loop = jit.rowwise(jit.squares(rule.row), piece) if rule.row is not None else jit.sparse(piece)
                    loop(*where, memory, *given[7:last], written, tuple(numbers), own)
                else:
                    loop = jit.dense(piece, dtype)
                    loop(*given[:last], written, tuple(numbers), own)

            return run

        return bind

    def spoil(self, noise: np.random.Generator) -> None:
        """Fill with noise what is just being overwritten."""
        for progress, number, arrays, place in self.at_hand.values():
            if progress[0] == 2 * number - 1:
                for array in arrays:
                    array[place] = noise.standard_normal(array[place].shape).astype(array.dtype)

    def add_mean(self, slot: Any, row: int, partial: Any, width: int, number: int, progress: Any, area: Any) -> None:
        if progress.size:
            self.at_hand[progress.ctypes.data] = progress, number, (slot,), slice(row, row + 1)
        plain_add_mean(slot, row, partial, width, number, progress, area)


def elements(address: int, like: Any, count: int) -> Any:
    return np.frombuffer((ctypes.c_char * (count * like.itemsize)).from_address(int(address)), like.dtype)


def addends(addresses: Any, like: Any, scratch: Any, start: int, stop: int) -> Any:
    total = np.full(stop - start, -0.0, like.dtype)
    *firsts, last = (elements(address, like, like.size)[start:stop] for address in addresses)
    for array in firsts:
        total += array
    return total, last


def sums(addresses: Any, like: Any, scale: Any, factor: Any, scratch: Any, start: int, stop: int, alarm: Any) -> Any:
    gradients = [elements(address, like, like.size)[start:stop] for address in addresses]
    total = np.clip(summed(gradients, scale[:-1].tolist(), like.dtype), -scale[-1], scale[-1]) * factor
    return np.full(stop - start, -0.0, like.dtype), total


plain_share, plain_add_mean = jit._share.py_func, jit._add_mean.py_func


def share(*given: Any) -> Any:
    with np.errstate(over="ignore"):  # of the hash
        return plain_share(*given)


class Server:
    """Arithmetic over some memory, as one incarnation after the other has it."""

    def __init__(self, memory: Bytes, threads: int) -> None:
        self.memory = memory
        self.undo = np.zeros(UNDO_NBYTES, np.uint8)
        self.threads = threads

    def commit(self, command: Commit, threads: int = 0) -> None:
        undisturbed = Executor(self.memory, threads or self.threads, undo=self.undo)
        try:
            undisturbed.commit(command)
        finally:
            undisturbed.close()

    def commit_until(self, command: Commit, left: int | None) -> int:
        """Do what happens before an event; the number of events where that is None. Fill with noise what is just being
        overwritten."""
        fuse = Fuse(left)
        at_hand: dict[int, tuple[Lane, int, Any]] = {}
        plain_say, plain_give_back, plain_enter = undo._say, Lane.give_back, Lane.enter

        def say(words: Any, which: int, value: int) -> None:
            fuse.burn()
            plain_say(words, which, value)

        def give_back(lane: Lane, places: Any) -> bool:
            at_hand[id(lane)] = lane, lane.done, places
            return plain_give_back(lane, places)

        def enter(lane: Lane, tag: int) -> bool:
            at_hand.pop(id(lane), None)
            return plain_enter(lane, tag)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(undo, "_say", say)
            patch.setattr(Lane, "give_back", give_back)
            patch.setattr(Lane, "enter", enter)
            by_python = InPython(fuse, say)
            by_python.patch(patch)
            if left is None:
                self.commit(command)
                return fuse.count
            try:
                self.commit(command)
            except Cut:
                pass
            else:
                raise NotCut
        noise = np.random.default_rng(left)
        for lane, done, places in at_hand.values():
            if lane.is_kept and lane.done == done:
                for array, index in places:
                    array[index] = noise.standard_normal(array[index].shape).astype(array.dtype)
        by_python.spoil(noise)
        return fuse.count


def survives(make: Callable[[], tuple[Bytes, tuple[Operation, ...]]], threads: int = 1, every: int = 3) -> None:
    memory, operations = make()
    command = Commit(7, operations)
    untouched = {name: segment.copy() for name, segment in memory.segments.items()}
    plain = Executor(memory, 1)
    plain.commit(command)
    expected = {name: segment.tobytes() for name, segment in memory.segments.items()}
    assert any(expected[name] != untouched[name].tobytes() for name in expected)

    def again(left: int | None) -> tuple[Server, int]:
        for name, segment in memory.segments.items():
            segment[...] = untouched[name]
        server = Server(memory, threads)
        server.commit(Commit(6, operations))  # one before it has left its words behind
        for name, segment in memory.segments.items():
            segment[...] = untouched[name]
        return server, server.commit_until(command, left)

    def check(server: Server, what: str) -> None:
        for name, segment in memory.segments.items():
            assert segment.tobytes() == expected[name], f"{name} differs, {what}"
        server.commit(command)  # the engine had not heard that it is done
        for name, segment in memory.segments.items():
            assert segment.tobytes() == expected[name], f"{name} was changed twice, {what}"

    whole, events = again(None)
    check(whole, "undisturbed")
    for left in range(0, events, every):
        server, _ = again(left)
        server.commit(command, threads=1 + left % 3)
        check(server, f"cut at event {left} of {events}")
    for left in range(0, events, max(7, 2 * every + 1)):  # and where the second server ends, too
        server, _ = again(left)
        with suppress(NotCut):
            server.commit_until(command, (left * 5) % 11)
        server.commit(command)
        check(server, f"cut at event {left} of {events} and again")


def arrays(dtype: str, count: int, length: int, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [np.abs(random.standard_normal(length)).astype(dtype) for _ in range(count)]


def dense(rule: str, dtype: str, given: dict[str, float] | None = None) -> tuple[Bytes, tuple[Operation, ...]]:
    slots = RULES[rule].slots
    names = ["w", *slots, "g0", "g1"]
    memory = Bytes(**dict(zip(names, arrays(dtype, len(names), 150), strict=True)))
    part = Dense(dtype, ((1, 90), (97, 149)), "w", slots, ("g0", "g1"))
    return memory, (Apply((Update(rule, tuple((GIVEN | (given or {})).items()), 3, (part,)),)),)


def mixed(rule: str, dtype: str, given: dict[str, float] | None = None) -> tuple[Bytes, tuple[Operation, ...]]:
    """One replica brings rows of the second variable, and the other a dense gradient."""
    memory, (apply,) = dense(rule, dtype, given)
    (update,) = apply.updates
    (part,) = update.dense
    one, other = part.ranges
    values = np.random.default_rng(5).standard_normal((3, 13)).astype(dtype)
    rows = (array_of(values), array_of(np.array([2, 0, 2]))), None
    parts = with_changes(part, ranges=(one,)), with_changes(part, ranges=(other,), rows=rows)
    return memory, (with_changes(apply, updates=(with_changes(update, dense=parts),)),)


def together(**bounds: float) -> tuple[Bytes, tuple[Operation, ...]]:
    """Steps of several optimizers in one apply: of compiled rules and the reference, of two dtypes and of rows."""
    memory, (first,) = dense("adam", "float32")
    taken = [first]
    for rule, dtype, given in (("sgd", "float64", {}), ("adagrad", "float32", bounds), ("adam", "float16", {})):
        other, (apply,) = dense(rule, dtype, given)
        prefix = f"{rule}_{dtype}_"
        memory.segments |= {prefix + name: segment for name, segment in other.segments.items()}
        taken.append(moved(apply, prefix))
    other, (apply,) = sparse("adagrad", "float32", 5, {})
    memory.segments |= {f"rows_{name}": segment for name, segment in other.segments.items()}
    taken.append(moved(apply, "rows_"))
    steps = tuple(update for apply in taken for update in apply.updates)
    return memory, (Apply(steps, (), (0.25, 1.5), 0.75, 1e-6), first)


def moved(apply: Apply, prefix: str) -> Apply:
    """The same with other names of segments."""

    def named(part: Any) -> Any:
        names = {"parameters": prefix + part.parameters, "slots": tuple(prefix + slot for slot in part.slots)}
        if isinstance(part, Dense):
            names["gradients"] = tuple(prefix + name for name in part.gradients)
        return with_changes(part, **names)

    (update,) = apply.updates
    return Apply(
        (with_changes(update, dense=tuple(map(named, update.dense)), sparse=tuple(map(named, update.sparse))),)
    )


@WAYS_OF_MANY_EVENTS
@pytest.mark.parametrize("bounds", [{}, {"clipvalue": 0.5}], ids=str)
def test_updates_of_several_optimizers(bounds: dict[str, float], threads: int, every: int) -> None:
    survives(lambda: together(**bounds), threads, every)


@WAYS
@pytest.mark.parametrize(
    ("rule", "dtype"), [("sgd", "float32"), ("adagrad", "float64"), ("adam", "float32"), ("adam_amsgrad", "float64")]
)
def test_dense_updates_of_every_number_of_slots(rule: str, dtype: str, threads: int, every: int) -> None:
    survives(lambda: dense(rule, dtype), threads, every)


@pytest.mark.parametrize(
    ("rule", "dtype"), [("adam", "float16"), ("sgd_momentum", "complex64"), ("ftrl_power", "float64")]
)
def test_dense_updates_by_the_reference(rule: str, dtype: str) -> None:
    survives(lambda: dense(rule, dtype), 2)


@pytest.mark.parametrize(
    ("dtype", "bound"), [("float32", {"clipnorm": 0.3}), ("float64", {"clipvalue": 0.5, "global_clipnorm": 1.0})]
)
def test_clipped_updates(dtype: str, bound: dict[str, float]) -> None:
    survives(lambda: dense("adam", dtype, bound), 2)


@pytest.mark.parametrize(
    ("rule", "dtype", "given"),
    [("adam", "float32", {}), ("adam", "float16", {"clipnorm": 0.3}), ("lamb", "float32", {"global_clipnorm": 0.3})],
)
def test_rows_that_meet_a_dense_gradient(rule: str, dtype: str, given: dict[str, float]) -> None:
    survives(lambda: mixed(rule, dtype, given), 2)


@WAYS_OF_MANY_EVENTS
@pytest.mark.parametrize(("dtype", "group"), [("float32", 1), ("float64", 504), ("float16", 2)])
def test_updates_by_the_norms_of_variables(
    dtype: str, group: int, threads: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norms are those before the update, also where the server ends when a part of a variable is updated."""
    monkeypatch.setattr(executor, "NUMBERS", group)
    survives(lambda: dense("lamb", dtype), threads, every)
    survives(lambda: dense("lamb", dtype, {"clipnorm": 0.3}), threads, every)


@pytest.mark.parametrize(
    ("dtype", "given"), [("float32", {}), ("float64", {"lazy": 1.0}), ("float32", {"clipvalue": 0.5})]
)
def test_updates_of_rows_by_norms(dtype: str, given: dict[str, float]) -> None:
    survives(lambda: sparse("lamb", dtype, 5, given), 2)


def sparse(rule: str, dtype: str, width: int, given: dict[str, float]) -> tuple[Bytes, tuple[Operation, ...]]:
    slots, height = RULES[rule].slots, 12 if width < 16 else 5  # wide rows have events enough
    names = ["w", *slots]
    memory = Bytes(**dict(zip(names, arrays(dtype, len(names), 3 + height * width), strict=True)))
    random = np.random.default_rng(5)
    gradients = tuple(
        (array_of(random.standard_normal((9, width)).astype(dtype)), array_of(random.integers(0, height, 9)))
        for _ in range(2)
    )
    part = Rows(dtype, 3, (height, width), "w", slots, gradients)
    return memory, (Apply((Update(rule, tuple((GIVEN | given).items()), 2, (), (part,)),)),)


@WAYS
@pytest.mark.parametrize(
    ("rule", "dtype", "width", "given"),
    [
        ("adagrad", "float32", 5, {}),
        ("adagrad", "float64", 40, {}),  # a row is wider than a piece
        ("rowwise_adagrad", "float32", 5, {}),
        ("rowwise_adagrad", "float64", 40, {}),
        ("rowwise_adagrad", "float16", 70, {}),
        ("rowwise_adagrad", "float32", 4, {"clipnorm": 0.5}),
        ("adam", "float32", 5, {}),
        ("adam", "float32", 5, {"lazy": 1.0}),
        ("adam", "float16", 70, {}),
        ("rmsprop", "float64", 3, {}),
        ("sgd", "float32", 4, {"clipnorm": 0.5}),
    ],
)
def test_sparse_updates(rule: str, dtype: str, width: int, given: dict[str, float], threads: int, every: int) -> None:
    survives(lambda: sparse(rule, dtype, width, given), threads, every)


def tables() -> tuple[Bytes, tuple[Operation, ...]]:
    """Three tables with little to do, of two optimizers, and one with more; their gradients have weights."""
    memory, updates = Bytes(), []
    for number, (rule, rows) in enumerate([("adagrad", 9), ("adam", 4), ("sgd", 3), ("adagrad", 2)]):
        prefix = f"{number}_"
        other, (apply,) = sparse(rule, "float32", 3, {"lazy": 1.0})
        memory.segments |= {prefix + name: segment for name, segment in other.segments.items()}
        (update,) = moved(apply, prefix).updates
        (part,) = update.sparse
        views = [[other.view(array) for array in pair] for pair in part.gradients]
        pairs = tuple([(array_of(values[:rows]), array_of(indices[:rows])) for values, indices in views])
        updates.append(with_changes(update, sparse=(with_changes(part, gradients=pairs),)))
    return memory, (Apply(tuple(updates), (), (0.25, 1.5)),)


@WAYS
def test_tables_side_by_side(threads: int, every: int) -> None:
    survives(tables, threads, every)


def test_no_lane_waits_for_another_between_small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes: list[Lane] = []
    spread: list[int] = []
    apply_in, plain = sparse_updates.Table.apply_in, Executor._spread

    def noted(table: Any, lane: Lane, *given: Any) -> None:
        lanes.append(lane)
        apply_in(table, lane, *given)

    def noted_spread(arithmetic: Executor, count: int, share: Callable[[int], None]) -> None:
        before = len(lanes)
        plain(arithmetic, count, share)
        spread.append(len(lanes) - before)

    monkeypatch.setattr(sparse_updates.Table, "apply_in", noted)
    monkeypatch.setattr(Executor, "_spread", noted_spread)
    memory, operations = tables()
    arithmetic = Executor(memory, 2, undo=np.zeros(UNDO_NBYTES, np.uint8))
    try:
        arithmetic.commit(Commit(1, operations))
    finally:
        arithmetic.close()
    assert [len(lanes), len(set(map(id, lanes))), max(spread)] == [3, 2, 3]


def written(op: WriteOp, dtype: str) -> tuple[Bytes, tuple[Operation, ...]]:
    slab = (np.arange(200) % 7).astype(dtype)
    target = np.empty((15, 12), dtype)
    random = np.random.default_rng(3)
    if not op.startswith("scatter"):
        sources = tuple(array_of(random.integers(1, 9, (15, 12)).astype(dtype)) for _ in range(2))
        return Bytes(slab=slab), (Write(at("slab", 8 * target.itemsize, target), op, "SUM", sources),)
    indices = array_of(np.array([3, 1, 99, 3, 3, -1, 14, 0, 1]))
    value = array_of(random.integers(1, 9, (9, 12)).astype(dtype))
    return Bytes(slab=slab), (Write(at("slab", 8 * target.itemsize, target), op, None, (value,), indices),)


@pytest.mark.parametrize("dtype", ["float32", "int64", "uint8"])
@pytest.mark.parametrize("op", ["assign", "assign_add", "assign_sub", "scatter_update", "scatter_add", "scatter_sub"])
def test_writes(op: WriteOp, dtype: str) -> None:
    survives(lambda: written(op, dtype), 2)


def everything() -> tuple[Bytes, tuple[Operation, ...]]:
    memory, (first,) = dense("adam", "float32")
    other, (second,) = sparse("adagrad", "float32", 5, {})
    third, (fourth,) = written("scatter_add", "float64")
    memory.segments |= {f"other_{name}": segment for name, segment in other.segments.items()} | third.segments
    assert isinstance(second, Apply)
    (update,) = second.updates
    (part,) = update.sparse
    part = Rows(part.dtype, part.first, part.shape, "other_w", tuple(f"other_{s}" for s in part.slots), part.gradients)
    second = Apply((Update(update.rule, update.hyperparameters, update.t, (), (part,)),))
    fill = Fill("other_w", "float32", 0, 3, 0.5)
    add = Write(at("w", 40, np.empty(7, np.float32)), "assign_add", None, (array_of(np.ones(7, np.float32)),))
    return memory, (first, add, first, second, fill, fourth, add)


@WAYS
def test_several_operations_of_one_commit(threads: int, every: int) -> None:
    survives(everything, threads, every)


def test_a_scalar_and_an_empty_variable() -> None:
    def make() -> tuple[Bytes, tuple[Operation, ...]]:
        empty = np.empty((0, 4), np.float32)
        return Bytes(slab=np.ones(8, np.float32)), (
            Write(at("slab", 4, np.empty((), np.float32)), "assign_add", None, (array_of(np.array(2, np.float32)),)),
            Write(at("slab", 0, empty), "assign_add", None, (array_of(empty),)),
            Write(at("slab", 0, empty), "scatter_add", None, (array_of(empty),), array_of(np.empty(0, np.int64))),
        )

    survives(make, every=1)


class Gone:
    """Memory of which nothing can be read any more: replicas have freed it."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} of memory that is gone")


def test_a_commit_that_is_done_is_not_done_again_whatever_has_become_of_what_it_was_made_of() -> None:
    memory, operations = everything()
    kept = np.zeros(UNDO_NBYTES, np.uint8)
    first = Executor(memory, 1, array_of, kept)
    first.commit(Commit(1, operations))
    first.close()
    for segment in memory.segments.values():
        segment.view(np.uint8)[...] = 7
    for there in (memory, Gone()):
        another = Executor(there, 1, array_of, kept)
        another.commit(Commit(1, operations))
        another.close()
    assert all(np.all(segment.view(np.uint8) == 7) for segment in memory.segments.values())
    another = Executor(memory, 1, array_of, kept)
    another.commit(Commit(2, operations[-1:]))
    another.close()
    assert not all(np.all(segment.view(np.uint8) == 7) for segment in memory.segments.values())


def test_without_memory_nothing_is_kept() -> None:
    memory, operations = dense("adam", "float32")
    plain = Executor(memory, 2)
    plain.commit(Commit(1, operations))
    plain.commit(Commit(1, operations))
    plain.close()
    lane = Undo(None, 2).lane(0)
    lane.keep([(np.ones(3), slice(None))])
    assert not lane.is_kept
    assert not lane.progress.size


# A process is stopped at some instruction, again and again, until that is in the midst of overwriting; then it is
# killed.
KILLED = """
import mmap, os, signal, sys
import numpy as np
from cs_server.compute.executor import Executor
from cs_server.compute.programs import Program
from cs_server.events import Apply, Commit, Dense, Update
from cs_server.compute.undo import _HEAD_NBYTES, _LINE_NBYTES, _PHASES, UNDO_NBYTES
from tests.server.compute.test_executor import Bytes

def shared(nbytes):
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)

COUNT, ONE_LANE = 500_000, sys.argv[2] == "prepared"

def filled(count):
    array = shared(4 * count).view(np.float32)
    array[:] = np.random.default_rng(count).standard_normal(count)
    return array

memory = Bytes(w=filled(COUNT), m=shared(4 * COUNT), v=shared(4 * COUNT), g=filled(COUNT))
plain = Bytes(**{name: segment.copy() for name, segment in memory.segments.items()})
undo = shared(UNDO_NBYTES)
head, lane = undo[:8].view(np.int64), undo[_HEAD_NBYTES : _HEAD_NBYTES + _LINE_NBYTES].view(np.int64)
given = (("learning_rate", 0.1), ("beta_1", 0.9), ("beta_2", 0.99), ("epsilon", 1e-3))

def commit(ticket):
    def update(first, last, **changes):
        part = Dense("float32", ((first, last),), "w", ("m", "v"), ("g", "g"))
        return Update("adam", tuple((dict(given) | changes).items()), ticket, (part,))

    several = update(5, COUNT // 3), update(COUNT // 3, COUNT - 70, learning_rate=0.2)
    return Commit(ticket, (Apply(several, (), (0.25, 0.5)),))

def serve(first):
    arithmetic, program = Executor(memory, 2, undo=undo), None
    for ticket in range(first, 1 << 20):
        if not ONE_LANE:
            arithmetic.commit(commit(ticket))
            continue
        prepared = arithmetic.prepare(commit(ticket).operations)
        program = program or Program(prepared.instructions, [prepared])
        prepared.set_ticket(ticket)
        program.run()

def same():
    return all(memory.segments[name].tobytes() == plain.segments[name].tobytes() for name in memory.segments)

def at_work():
    return (*head.tolist(), *lane.tolist())

reference = Executor(plain, 1)
reference.commit(commit(1))  # loads the kernel
Executor(memory, 1, undo=undo).commit(commit(1))
done = 1  # by the reference
for trial in range(int(sys.argv[1])):
    child = os.fork()
    if not child:
        serve(done + 1)
    while True:
        before = at_work()
        while at_work() == before:
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        ticket, phase = divmod(int(head[0]), _PHASES)
        if ticket > done and phase == 0:
            for done in range(done + 1, ticket):
                reference.commit(commit(done))
            if not same():
                break
        os.kill(child, signal.SIGCONT)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    arithmetic = Executor(memory, 2, undo=undo)
    arithmetic.commit(commit(ticket))
    arithmetic.close()
    reference.commit(commit(ticket))
    done = ticket
    assert same(), (trial, ticket)
"""


@pytest.mark.parametrize("how", ["committed", "prepared"])
def test_a_process_that_is_killed_in_the_midst_of_compiled_code(how: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLED, "8", how], capture_output=True, text=True, env={**os.environ}, check=False
    )
    assert done.returncode == 0, done.stderr
