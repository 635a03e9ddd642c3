"""Updates by themselves: what a step covers, and which gradients fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.harness.book import ADAGRAD, ADAM, SGD, Book, block
from tests.harness.playbook import ADDRESSES

from cs_proto.errors import InvalidArgumentError
from cs_proto.messages import ApplyPoint, OptimizerUpdate, SparseGradient
from cs_server.engine.catalogue import optimizers, slabs, updates, variables
from cs_server.engine.store.address_budget import PAGE_NBYTES
from cs_server.events import Apply, Dense, Rows, Update

SHORT = replace(ADDRESSES, slab=PAGE_NBYTES, longest_slab=1 << 30)


FILLS_A_PAGE = PAGE_NBYTES // 4


def test_an_apply_covers_each_slab_once_in_ascending_ranges(book: Book) -> None:
    book.make("w", (3,))
    book.make("d", (2,), "float64")
    book.make("b", ())
    book.make("empty", (0,))
    adam = optimizers.configure(book.state, 0, "Adam", ADAM)
    number, _ = optimizers.variable_set(book.state, 1, (3, 4, 2, 1))
    wide, narrow = "float64", "float32"
    points = [ApplyPoint(0, "x:1", (OptimizerUpdate(1, number, ()),), buffers) for buffers in (0, 1)]
    parts = tuple(
        Dense(
            dtype=dtype,
            ranges=ranges,
            parameters=f"parameters/{dtype}",
            slots=(f"slots/1/m/{dtype}", f"slots/1/v/{dtype}"),
            gradients=(f"gradients/0/0/{dtype}", f"gradients/1/1/{dtype}"),
        )
        for dtype, ranges in [(narrow, ((0, 3), (16, 17))), (wide, ((0, 2),))]
    )
    assert updates.apply(book.state, [number], points, {1: 1}) == Apply(
        (Update("adam", adam.hyperparameters, 2, parts, ()),), (1, 2, 3, 4)
    )


def test_a_sparse_gradient_takes_its_variable_out_of_the_ranges(book: Book) -> None:
    book.make("a", (16,))
    book.make("table", (5, 2, 3))
    book.make("b", (16,))
    optimizers.configure(book.state, 0, "Adagrad", ADAGRAD)
    rows = [SparseGradient(2, block("float32", k, 2, 3), block("int64", k)) for k in (4, 0)]
    points = [
        ApplyPoint(0, "x:1", (OptimizerUpdate(1, 0, (1, 2, 3), (row,)),), buffers) for buffers, row in enumerate(rows)
    ]
    with pytest.raises(InvalidArgumentError, match="'a' is said to lie in the second set of buffers, but no Locate"):
        updates.check_gradients(book.state, points)
    slabs.use_second_gradients(book.state, ["float32"])
    updates.check_gradients(book.state, points)
    number, fills = optimizers.variable_set(book.state, 1, (1, 2, 3), [2])
    assert [fill.is_lazy for fill in fills] == [False] * 3  # the accumulator begins at 0.1
    apply = updates.apply(book.state, [number], points, {})
    (offset,) = {v.place.offset for v in variables.every(book.state) if v.spec.name == "table"}
    assert apply.updates[0].sparse == (
        Rows(
            dtype="float32",
            first=offset // 4,
            shape=(5, 6),
            parameters="parameters/float32",
            slots=("slots/1/accumulator/float32",),
            gradients=tuple((row.values, row.indices) for row in rows),
        ),
    )
    assert [last - first for first, last in apply.updates[0].dense[0].ranges] == [16, 16]
    dense = [ApplyPoint(0, "x:1", (OptimizerUpdate(1, number, ()),), buffers) for buffers in (0, 1)]
    (update,) = updates.apply(book.state, [number], dense, {}).updates
    assert sum(last - first for first, last in update.dense[0].ranges) == 62


@pytest.mark.parametrize(
    ("gradient", "reason"),
    [
        (
            SparseGradient(1, block("float64", 2, 3), block("int64", 2)),
            r"'table' is float64\[2, 3\]; .* float32\[4, 3\]",
        ),
        (SparseGradient(1, block("float32", 2, 4), block("int64", 2)), r"float32\[2, 4\]"),
        (SparseGradient(2, block("float32", 2), block("int64", 2)), r"'scalar' is float32\[2\]"),
        (SparseGradient(3, block("float32", 2), block("int64", 2)), "'other', but does not name this variable"),
        (SparseGradient(9, block("float32", 2), block("int64", 2)), "no variable 9"),
    ],
)
def test_a_sparse_gradient_that_does_not_fit_is_refused(book: Book, gradient: SparseGradient, reason: str) -> None:
    for name, shape in [("table", (4, 3)), ("scalar", ()), ("other", (2,))]:
        book.make(name, shape)
    with pytest.raises(InvalidArgumentError, match=reason):
        updates.check_gradients(book.state, [ApplyPoint(0, "x:1", (OptimizerUpdate(1, 0, (1, 2), (gradient,)),), 0)])


@pytest.mark.parametrize("is_known", [False, True])
def test_a_dense_gradient_of_a_sparse_variable_is_refused(book: Book, is_known: bool) -> None:
    table, other = book.make("table", (4, 3), sparse=True), book.make("w", (4, 3))
    optimizers.configure(book.state, 0, "SGD", SGD)
    number, _ = optimizers.variable_set(book.state, 1, (table, other))
    rows = SparseGradient(table, block("float32", 2, 3), block("int64", 2))
    where = (number, ()) if is_known else (0, (table, other))
    by_rows = ApplyPoint(0, "x:1", (OptimizerUpdate(1, *where, (rows,)),), 0)
    dense = ApplyPoint(0, "x:1", (OptimizerUpdate(1, *where),), 0)
    for _ in range(2):
        updates.check_gradients(book.state, [by_rows, by_rows])
        with pytest.raises(InvalidArgumentError, match=r"'table' was made with sparse=True.* must be IndexedSlices"):
            updates.check_gradients(book.state, [by_rows, dense])
        book.tables.flush()
        book.reopen()


def test_bounded_gradients_keep_variables_apart(book: Book) -> None:
    for _ in range(2):
        book.make("w", (16,))
    optimizers.configure(book.state, 0, "SGD", {**SGD, "clipnorm": 1.0})
    number, _ = optimizers.variable_set(book.state, 1, (1, 2))
    apply = updates.apply(book.state, [number], [ApplyPoint(0, "x:1", (OptimizerUpdate(1, number, ()),), 0)] * 2, {})
    assert [last - first for first, last in apply.updates[0].dense[0].ranges] == [16, 16]


def test_a_variable_that_is_exempt_by_its_name_stays_exempt_when_it_gets_another(book: Book) -> None:
    old, kept, other = book.make("w"), book.make("w"), book.make("w")
    exempt = ("^w_1$", "bias")
    optimizers.configure(book.state, 0, "AdamW", {**ADAM, "weight_decay": 0.1}, exempt=exempt)
    number, _ = optimizers.variable_set(book.state, 1, (kept, other))
    point = ApplyPoint(0, "x:1", (OptimizerUpdate(1, number, ()),), 0)

    def exempted() -> list[tuple[tuple[int, int], ...]]:
        applied = updates.apply(book.state, [number], (point,), {})
        return [part.ranges for part in applied.updates[0].dense if part.rule == "adam"]

    before = exempted()
    assert before == [(slabs.elements(variables.row(book.state, kept).array),)]
    assert optimizers.free(book.state, [old])[1] == ((kept, "w"), (other, "w_1"))
    for _ in range(2):
        assert exempted() == before
        assert optimizers.get(book.state, 1).exempt == ("^w$", "bias")
        book.tables.flush()
        book.reopen()


def test_a_name_that_comes_back_counts_for_the_patterns(book: Book) -> None:
    old, kept = book.make("w"), book.make("w")
    optimizers.configure(book.state, 0, "AdamW", {**ADAM, "weight_decay": 0.1}, exempt=("w_",))
    number, _ = optimizers.variable_set(book.state, 1, (kept,))
    point = ApplyPoint(0, "x:1", (OptimizerUpdate(1, number, ()),), 0)
    assert [part.rule for part in updates.apply(book.state, [number], (point,), {}).updates[0].dense] == ["adam"]
    optimizers.free(book.state, [old])
    assert [part.rule for part in updates.apply(book.state, [number], (point,), {}).updates[0].dense] == [""]
