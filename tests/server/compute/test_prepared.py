"""A prepared commit does to memory what `Executor.commit` does, and whichever of the two ends in the midst of it, the
next server ends the commit with the same bits."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from tests.harness.updates import HYPERPARAMETERS
from tests.server.compute.test_executor import Bytes, at
from tests.server.compute.test_undo import (
    GIVEN,
    SMALL,
    Cut,
    Fuse,
    InPython,
    Operation,
    Server,
    dense,
    moved,
    sparse,
    tables,
)

from cs_proto.arrays import Array, Location, array_of
from cs_proto.errors import InvalidArgumentError
from cs_proto.frozen import with_changes
from cs_server.compute import kernels, norms, plans, prepared
from cs_server.compute import sparse as sparse_updates
from cs_server.compute.executor import Executor
from cs_server.compute.object_loader import Bound
from cs_server.compute.prepared import Prepared
from cs_server.compute.programs import Op, Program
from cs_server.compute.undo import UNDO_NBYTES, used_nbytes
from cs_server.events import Apply, Commit, Dense, Fill, Update, Write
from cs_server.rules import RULES, Rule

LAZY = tuple((GIVEN | {"lazy": 1.0}).items())
COMPILED = [rule.name for rule in RULES.values() if rule.is_compiled and rule.row is None and rule.direction is None]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything consists of many pieces, and an ordinary commit is spread over all threads."""
    monkeypatch.setattr(plans, "_ELEMENTS_PER_THREAD", 1)
    monkeypatch.setattr(plans, "_ELEMENTS_PER_CUT", 4)
    monkeypatch.setattr(kernels, "KEPT_BLOCK_NBYTES", SMALL)
    monkeypatch.setattr(sparse_updates, "_PIECE", 16)


class Twins:
    """The same memory twice: over the one commits are prepared, over the other they are not."""

    def __init__(
        self, make: Callable[[], tuple[Bytes, tuple[Operation, ...]]], has_undo: bool = True, threads: int = 1
    ) -> None:
        self.memories = []
        self.undos = [np.zeros(UNDO_NBYTES, np.uint8) if has_undo else None for _ in range(2)]
        for _ in range(2):
            memory, self.operations = make()
            self.memories.append(memory)
        self.executors = [
            Executor(memory, threads, undo=undo) for memory, undo in zip(self.memories, self.undos, strict=True)
        ]
        self.tickets = 0

    def step(self, operations: tuple[Operation, ...] | None = None) -> Prepared:
        operations = self.operations if operations is None else operations
        self.tickets += 1
        prepared = prepared_of(self.executors[0], operations)
        prepared.set_ticket(self.tickets)
        assert Program(prepared.instructions, [prepared]).run()
        self.executors[1].commit(Commit(self.tickets, operations))
        self.check()
        return prepared

    def check(self) -> None:
        for name, segment in self.memories[0].segments.items():
            assert segment.tobytes() == self.memories[1].segments[name].tobytes(), name
        if self.undos[0] is not None and self.undos[1] is not None:
            own, other = (undo[: used_nbytes(4)].tobytes() for undo in self.undos if undo is not None)
            assert own == other

    def close(self) -> None:
        for each in self.executors:
            each.close()


@pytest.fixture
def spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prepared commit has as many lanes as there are threads."""
    monkeypatch.setattr(prepared, "_ELEMENTS_OF_ONE_LANE", 0)


def prepared_of(arithmetic: Executor, operations: tuple[Operation, ...]) -> Prepared:
    prepared = arithmetic.prepare(operations)
    assert prepared is not None
    return prepared


def next_of(operations: Sequence[Operation], **changes: Any) -> tuple[Operation, ...]:
    """The same one step later, with another learning rate, and what else is to be changed in each operation."""
    later = []
    for each in operations:
        assert isinstance(each, Apply)
        updates = []
        for update in each.updates:
            given = dict(update.hyperparameters)
            given["learning_rate"] *= 0.5
            updates.append(with_changes(update, t=update.t + 1, hyperparameters=tuple(given.items())))
        later.append(with_changes(each, updates=tuple(updates), **changes))
    return tuple(later)


def several() -> tuple[Bytes, tuple[Operation, ...]]:
    """Two operations: of several optimizers with a count for each part and weights, and of one that is scaled."""
    memory, (first,) = dense("adam", "float32")
    assert isinstance(first, Apply)
    (update,) = first.updates
    (part,) = update.dense
    ranges = ((90, 97),)
    update = with_changes(update, dense=(part, with_changes(part, ranges=ranges)), counts=(3, 8))
    taken = [Apply((update,))]
    for rule, dtype in (("sgd", "float64"), ("adagrad", "float32")):
        other, (apply,) = dense(rule, dtype)
        assert isinstance(apply, Apply)
        memory.segments |= {f"{rule}_{name}": segment for name, segment in other.segments.items()}
        taken.append(moved(apply, f"{rule}_"))
    *own, (last,) = [apply.updates for apply in taken]
    together = Apply(tuple(update for updates in own for update in updates), (), (0.25, 1.5))
    return memory, (together, Apply((with_changes(last, factor=0.3),)), Apply(()))


def bounded(
    bounds: tuple[dict[str, float], ...] = ({"clipnorm": 0.5}, {"global_clipnorm": 2.0}, {"clipvalue": 0.25}),
    common: tuple[float | None, float] = (1.5, 1e-6),
) -> tuple[Bytes, tuple[Operation, ...]]:
    """As `several`, where each optimizer has bounds of its own, and those of the first operation one for all."""
    memory, (first, second, *others) = several()
    assert isinstance(first, Apply)
    assert isinstance(second, Apply)

    def with_bounds(apply: Apply, own: Sequence[dict[str, float]]) -> Apply:
        updates = zip(apply.updates, own, strict=True)
        changes = [with_changes(u, hyperparameters=(*u.hyperparameters, *given.items())) for u, given in updates]
        return with_changes(apply, updates=tuple(changes))

    first = with_bounds(first, bounds[: len(first.updates)])
    second = with_bounds(second, bounds[len(first.updates) :])
    return memory, (with_changes(first, global_clipnorm=common[0], clip_epsilon=common[1]), second, *others)


BOUNDS = {
    "of all": (({}, {}, {}), (1.5, 1e-6)),
    "of each optimizer": (({"clipnorm": 0.5}, {"global_clipnorm": 2.0}, {"clipvalue": 0.25}), (None, 0.0)),
    "of both": (
        ({"clipnorm": 0.5, "clipvalue": 1.0}, {"clipvalue": 0.5, "global_clipnorm": 2.0}, {"clipnorm": 0.1}),
        (0.5, 0.0),
    ),
    "of zero": (({"clipnorm": 0.0}, {"clipvalue": 0.0}, {"global_clipnorm": 0.0}), (0.0, 0.0)),
}


def rows(rule: str, dtype: str, width: int) -> tuple[Bytes, tuple[Operation, ...]]:
    return sparse(rule, dtype, width, {"lazy": 1.0})


def mixed() -> tuple[Bytes, tuple[Operation, ...]]:
    """Small and large tables, dense variables between them, and a table in an operation of its own."""
    memory, (together,) = tables()
    dense_memory, (apply,) = dense("adam", "float32")
    other_memory, (other,) = rows("rowwise_adagrad", "float64", 5)
    assert isinstance(together, Apply)
    assert isinstance(apply, Apply)
    assert isinstance(other, Apply)
    memory.segments |= {f"dense_{name}": segment for name, segment in dense_memory.segments.items()}
    memory.segments |= {f"other_{name}": segment for name, segment in other_memory.segments.items()}
    first = Apply((*together.updates, *moved(apply, "dense_").updates))
    return memory, (first, moved(other, "other_"))


TABLES: dict[str, Callable[[], tuple[Bytes, tuple[Operation, ...]]]] = {
    "adagrad": lambda: rows("adagrad", "float32", 5),
    "adam, with wide rows": lambda: rows("adam", "float64", 40),
    "sgd": lambda: rows("sgd", "float32", 3),
    "by row": lambda: rows("rowwise_adagrad", "float32", 40),
    "mixed": mixed,
}


@pytest.mark.usefixtures("spread")
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("which", TABLES)
def test_rows_of_tables(which: str, threads: int) -> None:
    twins = Twins(TABLES[which], threads=threads)
    first = twins.step()
    assert first.tables == (5 if which == "mixed" else 1)
    assert Op.HAND in [each[0] for each in first.instructions] or threads == 1
    operations = next_of(twins.operations)
    assert twins.step(operations) is first
    assert twins.step(next_of(operations)) is first
    twins.close()


PLACES = [[(9, 0, 768), (6, 256, 1024)], [(0, 64, 64), (13, 320, 896)], [(16, 0, 1024), (16, 512, 768)]]
"""Of each step and replica how many rows there are, and where the values and the indices lie."""


def placed(places: Sequence[tuple[int, int, int]], rule: str = "adagrad") -> tuple[Bytes, tuple[Operation, ...]]:
    """A table whose gradients lie in a segment of each replica, which holds 256 values and 100 indices."""
    memory, (apply,) = rows(rule, "float32", 4)
    assert isinstance(apply, Apply)
    random, gradients = np.random.default_rng(3), []
    for replica, (count, values, indices) in enumerate(places):
        segment = random.standard_normal(456).astype(np.float32)
        segment[192:392].view(np.int64)[:] = random.integers(-1, 13, 100)  # some lie outside of the table
        memory.segments[f"arena{replica}"] = segment
        pair = [Array("float32", (count, 4), Location(f"arena{replica}", values))]
        pair.append(Array("int64", (count,), Location(f"arena{replica}", indices)))
        gradients.append(tuple(pair))
    (update,) = apply.updates
    (part,) = update.sparse
    part = with_changes(part, gradients=tuple(gradients))
    return memory, (Apply((with_changes(update, sparse=(part,)),)),)


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_taken_from_where_the_replicas_say(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_updates, "_PIECE", 1 << 16 if threads == 1 else 2)
    twins = Twins(lambda: placed(PLACES[2]), threads=threads)
    first = twins.step()
    program = Program(first.instructions, [first])
    for places in PLACES[:1] if threads == 3 else PLACES:
        twins.tickets += 1
        assert prepared_of(twins.executors[0], twins.operations) is first
        assert first.take([list(each) for each in places])
        first.set_ticket(twins.tickets)
        assert program.run()
        twins.executors[1].commit(Commit(twins.tickets, placed(places)[1]))
        twins.check()
    twins.close()


def test_the_numbers_of_tables_are_those_of_the_step_wherever_its_rows_lie() -> None:
    """What was prepared is only told of new numbers and places: of the step, and where they differ, of each table."""
    twins = Twins(lambda: placed(PLACES[2], "adam"))
    first = twins.step()
    program = Program(first.instructions, [first])
    for number, places in enumerate(PLACES, 2):
        later = {"t": number, "hyperparameters": (*LAZY, ("learning_rate", 0.5**number))}
        counts = (5 * number,) if number > 2 else ()
        twins.tickets += 1
        first.set_numbers(changed(twins.operations, **later, counts=counts))
        assert first.take([list(each) for each in places])
        first.set_ticket(twins.tickets)
        assert program.run()
        operations = changed(placed(places, "adam")[1], **later, counts=counts)
        twins.executors[1].commit(Commit(twins.tickets, operations))
        twins.check()
    twins.close()


def test_rows_are_taken_from_memory_that_was_mapped_anew_since() -> None:
    """Another commit may make the server map more of a segment. The memory that this one reads stays, even if it was
    prepared with copies of gradients that kernels cannot read."""
    memory, operations = placed([(16, 2, 1028), (16, 514, 772)])
    arithmetic = Executor(memory, 1)
    first = prepared_of(arithmetic, operations)
    mapped = [weakref.ref(memory.segments[f"arena{replica}"]) for replica in range(2)]
    memory.segments |= {f"arena{replica}": np.zeros(999, np.float32) for replica in range(2)}
    del operations
    gc.collect()
    assert all(each() is not None for each in mapped)
    assert first.take([[9, 0, 768], [6, 256, 1024]])
    arithmetic.close()


@pytest.mark.parametrize(
    "place",
    [
        (9, 8, 768),  # values and indices begin where no kernel reads them
        (9, 0, 776),
        (9, 1824 - 128, 768),  # they end behind the segment
        (9, 0, 1824 - 64),
        (1 << 61, 0, 768),
        (9, 1 << 61, 768),
        (1024, 0, 0),  # too many rows in all
    ],
)
def test_rows_that_lie_where_they_may_not_are_not_taken(place: tuple[int, int, int]) -> None:
    _, operations = placed(PLACES[2])
    memory, _ = placed(PLACES[2])
    memory.segments |= {f"arena{replica}": np.zeros(456, np.float32) for replica in range(2)}
    if place[0] == 1024:
        memory.segments |= {f"arena{replica}": np.zeros(1 << 14, np.float32) for replica in range(2)}
    first = prepared_of(Executor(memory, 1), operations)
    assert first.take([[16, 0, 1024], [16, 512, 768]])
    assert not first.take([[16, 0, 1024], list(place)])
    assert not first.take([list(place), [16, 0, 1024]])


def test_more_rows_than_one_lane_updates_need_another_commit() -> None:
    _, operations = placed(PLACES[0])
    memory, _ = placed(PLACES[0])
    arithmetic = Executor(memory, 3)
    first = prepared_of(arithmetic, operations)
    assert first.take([[9, 0, 768], [6, 256, 1024]])
    assert not first.take([[4, 0, 768], [3, 256, 1024]])  # so few are updated beside those of other tables
    assert not first.take([[4, 0, 768], [7, 256, 1024]])  # and these by fewer lanes
    assert prepared_of(arithmetic, operations) is first
    others = prepared_of(arithmetic, placed([(4, 0, 768), (3, 256, 1024)])[1])
    assert others is not first
    assert others.take([[4, 0, 768], [3, 256, 1024]])
    arithmetic.close()


@pytest.mark.usefixtures("spread")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("value", [None, np.nan, np.inf])
@pytest.mark.parametrize("which", BOUNDS)
def test_bounded_gradients(which: str, value: float | None, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_PIECE", 40)

    def make() -> tuple[Bytes, tuple[Operation, ...]]:
        memory, operations = bounded(*BOUNDS[which])
        if value is not None:
            memory.segments["g0"][60] = value
        return memory, operations

    twins = Twins(make, threads=threads)
    first = twins.step()
    operations = next_of(twins.operations)
    assert twins.step(operations) is first
    assert twins.step(next_of(operations)) is first
    twins.close()


@pytest.mark.parametrize("dtype", kernels.KERNEL_DTYPES)
@pytest.mark.parametrize("rule", COMPILED)
def test_every_compiled_rule(rule: str, dtype: str) -> None:
    twins = Twins(lambda: dense(rule, dtype, HYPERPARAMETERS))
    first = twins.step()
    operations = next_of(twins.operations)
    assert twins.step(operations) is first
    assert twins.step(next_of(operations)) is first


@pytest.mark.parametrize("has_undo", [True, False])
def test_several_operations(has_undo: bool) -> None:
    twins = Twins(several, has_undo)
    first = twins.step()
    assert [instruction[0] for instruction in first.instructions].count(Op.CALL) == 2
    assert len(first.instructions) == 3 + 2 * (5 if has_undo else 2)
    operations = next_of(twins.operations)
    assert twins.step(operations) is first
    twins.tickets += 1
    for arithmetic in twins.executors:  # and one that is not prepared
        arithmetic.commit(Commit(twins.tickets, operations))
    twins.check()
    assert twins.step(next_of(operations)) is first
    assert [arithmetic.has_done(twins.tickets) for arithmetic in twins.executors] == [True, True]


@pytest.mark.usefixtures("spread")
@pytest.mark.parametrize("has_undo", [True, False])
def test_several_lanes(has_undo: bool) -> None:
    twins = Twins(several, has_undo, threads=3)
    first = twins.step()
    ops = [instruction[0] for instruction in first.instructions]
    assert [ops.count(op) for op in (Op.CALL, Op.HAND, Op.JOIN)] == [2, 4, 4]
    operations = twins.operations
    for _ in range(20):
        operations = next_of(operations)
        assert twins.step(operations) is first
    twins.close()


def test_weights_are_those_of_the_step() -> None:
    twins = Twins(lambda: dense("adam", "float32"))
    weighted = twins.step(next_of(twins.operations, weights=(0.5, 2.0)))
    plain = twins.step()
    assert plain is not weighted
    assert twins.step(next_of(twins.operations, weights=(0.0, 0.25))) is weighted
    assert twins.step(next_of(twins.operations)) is plain


def test_nothing_to_do_is_a_commit() -> None:
    empty = Dense("float32", (), "w", (), ("g",))
    for operations in ((), (Apply(()),), (Apply((Update("sgd", tuple(GIVEN.items()), 1, (empty,)),)),)):
        Twins(lambda: (Bytes(w=np.ones(4, np.float32), g=np.ones(4, np.float32)), operations)).step()  # noqa: B023


def changed(operations: tuple[Operation, ...], **changes: Any) -> tuple[Operation, ...]:
    """The first update with other fields."""
    first = operations[0]
    assert isinstance(first, Apply)
    return (with_changes(first, updates=(with_changes(first.updates[0], **changes),)),)


def test_what_is_not_prepared() -> None:
    memory, operations = dense("adam", "float32")
    tables, (rows,) = sparse("adam", "float32", 5, {})
    by_reference, power = dense("ftrl_power", "float32")
    more = memory.segments
    more |= tables.segments | by_reference.segments | more
    more |= {"half": np.ones(200, np.float16)}
    more |= {f"{name}_half": np.ones(200, np.float16) for name in "mvg"}
    arithmetic = Executor(memory, 1, undo=np.zeros(UNDO_NBYTES, np.uint8))
    (first,) = operations
    assert isinstance(first, Apply)
    add = Write(at("w", 40, np.empty(7, np.float32)), "assign_add", None, (array_of(np.ones(7, np.float32)),))
    assert isinstance(rows, Apply)
    lazy = with_changes(rows, updates=(with_changes(rows.updates[0], hyperparameters=LAZY),))
    (part,) = rows.updates[0].sparse
    many = Array("float32", (1 << 15, 5), Location("w", 0)), Array("int64", (1 << 15,), Location("w", 0))
    mixed = (part.gradients[0], *[None] * (len(first.updates[0].dense[0].gradients) - 1))
    of_halves = Dense("float16", ((0, 200),), "half", ("m_half", "v_half"), ("g_half",))
    for not_prepared in (
        (add,),
        (first, add),
        (Fill("w", "float32", 0, 3, 0.5), first),
        (with_changes(first, global_clipnorm=1.0), rows),
        changed(operations, sparse=rows.updates[0].sparse),
        (first, rows),  # Adam moves all rows
        (with_changes(lazy, global_clipnorm=1.0),),
        (with_changes(lazy, weights=(0.5, 1.0)),),
        changed((lazy,), factor=0.5),
        changed((lazy,), hyperparameters=(*lazy.updates[0].hyperparameters, ("clipnorm", 1.0))),
        changed((lazy,), sparse=(with_changes(part, gradients=(part.gradients[0], (part.gradients[1][0], None))),)),
        changed((lazy,), sparse=(with_changes(part, gradients=(many, many)),)),
        changed(operations, rule="lamb"),
        changed(operations, dense=(of_halves,)),
        changed(operations, dense=(with_changes(first.updates[0].dense[0], ranges=((0, 10),), rows=mixed),)),
        power,
    ):
        assert arithmetic.prepare(not_prepared) is None
        assert arithmetic.prepare(not_prepared) is None
    assert arithmetic.prepare(operations) is not None
    for _ in range(2):
        assert arithmetic.prepare((lazy,)) is not None
        assert arithmetic.prepare((rows,)) is None  # the same, but for a number that may be set between two steps


def test_only_more_elements_than_one_lane_takes_are_spread() -> None:
    size = 1 << 19
    memory = Bytes(**{name: np.ones(size + 1, np.float32) for name in "wg"})
    arithmetic = Executor(memory, 2)
    for count, is_spread in ((size, False), (size + 1, True)):
        part = Dense("float32", ((0, count),), "w", (), ("g",))
        found = prepared_of(arithmetic, (Apply((Update("sgd", tuple(GIVEN.items()), 1, (part,)),)),))
        assert [each[0] for each in found.instructions].count(Op.HAND) == is_spread
    arithmetic.close()


def test_only_the_last_prepared_commits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "_KEPT", 1)
    memory, operations = dense("sgd", "float32")
    arithmetic = Executor(memory, 1)
    first = prepared_of(arithmetic, operations)
    assert prepared_of(arithmetic, operations) is first
    other = prepared_of(arithmetic, (*operations, *operations))
    assert prepared_of(arithmetic, (*operations, *operations)) is other
    assert prepared_of(arithmetic, operations) is not first


# --- a server ends in the midst of a prepared commit --------------------------------------------------------------


class CompiledByPython(InPython):
    """Kernels that a program can call, and that Python runs."""

    def kernel(self, rule: Rule, dtype: Any, *, is_sparse: bool = False) -> Any:
        plain = super().kernel(rule, dtype, is_sparse=is_sparse)

        def bind(*given: Any) -> Bound:
            assert plain is not None
            run = plain(*given)

            def call(*words: int) -> int:
                try:
                    run()
                except Cut:
                    return 1
                return 0

            function = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(call)
            address = ctypes.cast(function, ctypes.c_void_p).value
            assert address is not None
            return Bound(function, address, ())

        return bind


def run_until(server: Server, command: Commit, left: int | None) -> int:
    """Run the prepared commit until an event: the end of an instruction, or a store of a kernel. Returns the number of
    events."""
    fuse = Fuse(left)

    def say(words: Any, which: int, value: int) -> None:
        fuse.burn()
        words[which] = value

    by_python = CompiledByPython(fuse, say)
    with pytest.MonkeyPatch.context() as patch:
        by_python.patch(patch)
        arithmetic = Executor(server.memory, 2, undo=server.undo)
        prepared = prepared_of(arithmetic, command.operations)
        prepared.set_ticket(command.ticket)
        program = Program(prepared.instructions, [prepared])
        with suppress(Cut, *() if left is None else (RuntimeError,)):  # a kernel that was cut ends with a status
            program.run_in_python(fuse.burn)
        arithmetic.close()
    by_python.spoil(np.random.default_rng(left))
    return fuse.count


# Every eighth event, and in the slow tests the others.
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(1, 8))])
@pytest.mark.parametrize("elements_of_one_lane", [1 << 19, 0])
@pytest.mark.parametrize(
    "make",
    [
        lambda: dense("adam", "float32"),
        lambda: dense("sgd", "float64"),
        several,
        bounded,
        TABLES["adam, with wide rows"],
        mixed,
    ],
)
def test_cut_anywhere_it_is_ended_by_the_next_server(
    make: Callable[[], tuple[Bytes, tuple[Operation, ...]]],
    elements_of_one_lane: int,
    first: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prepared, "_ELEMENTS_OF_ONE_LANE", elements_of_one_lane)
    memory, operations = make()
    command = Commit(7, operations)
    untouched = {name: segment.copy() for name, segment in memory.segments.items()}
    Executor(memory, 1).commit(command)
    expected = {name: segment.tobytes() for name, segment in memory.segments.items()}

    def restore() -> None:
        for name, segment in memory.segments.items():
            segment[...] = untouched[name]

    def again(left: int | None) -> tuple[Server, int]:
        restore()
        server = Server(memory, 2)
        server.commit(Commit(6, operations))  # one before it has left its words behind
        restore()
        return server, run_until(server, command, left)

    def check(server: Server, what: str) -> None:
        for _ in range(2):
            for name, segment in memory.segments.items():
                assert segment.tobytes() == expected[name], f"{name} differs, {what}"
            server.commit(command)  # the engine had not heard that it is done

    whole, events = again(None)
    check(whole, "undisturbed")
    assert events > 100  # not only the ends of instructions
    for left in range(first, events, 8):
        server, _ = again(left)
        server.commit(command, threads=1 + left % 3)
        check(server, f"cut at event {left} of {events}")
        following = prepared_of(Executor(memory, 1, undo=server.undo), operations)
        following.set_ticket(8)  # and what was ended so leaves nothing behind


@pytest.mark.parametrize("make", [several, bounded])
def test_cut_after_every_instruction_of_compiled_code(make: Callable[[], tuple[Bytes, tuple[Operation, ...]]]) -> None:
    for count in range(3 + 2 * 5 + (3 if make is bounded else 0)):
        memory, operations = make()
        twin, _ = make()
        Executor(twin, 1).commit(Commit(7, operations))
        server = Server(memory, 1)
        first = prepared_of(Executor(memory, 1, undo=server.undo), operations)
        first.set_ticket(7)
        assert Program(first.instructions[:count], [first]).run()
        server.commit(Commit(7, operations), threads=3)
        for name, segment in memory.segments.items():
            assert segment.tobytes() == twin.segments[name].tobytes(), (name, count)


@pytest.mark.parametrize("left", [1, 9, 40])
def test_what_has_been_begun_with_more_lanes_is_not_begun_again(left: int) -> None:
    memory, operations = dense("adam", "float32")
    twin, _ = dense("adam", "float32")
    undisturbed = Executor(twin, 1)
    server = Server(memory, 2)
    server.commit_until(Commit(7, operations), left + 1)
    arithmetic = Executor(memory, 2, undo=server.undo)
    first = prepared_of(arithmetic, operations)
    for ticket in (6, 7):
        with pytest.raises(InvalidArgumentError, match=f"commit {ticket} cannot begin: 7 has begun"):
            first.set_ticket(ticket)
    arithmetic.commit(Commit(7, operations))
    undisturbed.commit(Commit(7, operations))
    assert prepared_of(arithmetic, operations) is first
    first.set_ticket(8)
    assert Program(first.instructions, [first]).run()
    undisturbed.commit(Commit(8, operations))
    for name, segment in memory.segments.items():
        assert segment.tobytes() == twin.segments[name].tobytes(), name
    arithmetic.close()
