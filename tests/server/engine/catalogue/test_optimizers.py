"""Optimizers by themselves: hyperparameters, sets of variables and slots."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.harness.book import ADAGRAD, ADAM, FTRL, ROWWISE, SGD, Book, block
from tests.harness.playbook import ADDRESSES, allocates

from cs_proto.arrays import Array, Location
from cs_proto.errors import InvalidArgumentError
from cs_proto.messages import ApplyPoint, AssignSlot, Optimizer, OptimizerUpdate, Schedule, SparseGradient
from cs_server.engine.catalogue import optimizers, slabs, updates
from cs_server.engine.store.address_budget import PAGE_NBYTES
from cs_server.engine.store.tables import SlotFill
from cs_server.events import Allocate, Discard, Write

SHORT = replace(ADDRESSES, slab=PAGE_NBYTES, longest_slab=1 << 30)


FILLS_A_PAGE = PAGE_NBYTES // 4


def write_slot(book: Book, variable: int, slot: str, value: Array) -> Write:
    return optimizers.write_slot(book.state, AssignSlot("c", 1, 1, variable, slot, value))


def test_an_optimizer_is_made_and_changed(book: Book) -> None:
    made = optimizers.configure(book.state, 0, "SGD", SGD)
    assert made == Optimizer(1, "SGD", "sgd", tuple(SGD.items()), None, 0)
    changed = optimizers.configure(book.state, 1, "SGD", {"learning_rate": 0.5})
    assert dict(changed.hyperparameters) == {**SGD, "learning_rate": 0.5}
    assert optimizers.get(book.state, 1) == changed
    assert optimizers.configure(book.state, 0, "SGD", SGD).number == 2


def test_a_schedule_stays_until_a_learning_rate_replaces_it(book: Book) -> None:
    decay = Schedule("ExponentialDecay", (0.1, 10.0, 0.5, 0.0))
    assert optimizers.configure(book.state, 0, "SGD", SGD, decay, 3).iterations == 3
    assert optimizers.configure(book.state, 1, "SGD", {"momentum": 0.0}).schedule == decay
    assert optimizers.configure(book.state, 1, "SGD", {}, None, 20).schedule == decay
    number, _ = optimizers.variable_set(book.state, 1, (book.make("w"),))
    point = [ApplyPoint(0, "x:1", (OptimizerUpdate(1, number, ()),), 0)] * 2
    rates = [
        dict(updates.apply(book.state, [number], point, earlier).updates[0].hyperparameters)["learning_rate"]
        for earlier in ({}, {number: 10})
    ]
    assert rates == pytest.approx([0.1 * 0.5**2, 0.1 * 0.5**3])
    optimizers.applied(book.state, number)
    assert updates.apply(book.state, [number], point, {}).updates[0].t == 22
    assert optimizers.configure(book.state, 1, "SGD", {"learning_rate": 0.5}).schedule is None


@pytest.mark.parametrize(
    ("number", "kind", "given", "reason"),
    [
        (0, "Sgd", SGD, "unknown optimizer 'Sgd'"),
        (0, "SGD", {"learning_rate": 0.1}, "momentum"),
        (0, "SGD", {**SGD, "beta": 1.0}, "no hyperparameter 'beta'"),
        (1, "Adam", ADAM, "optimizer 1 is SGD and cannot become Adam"),
        (1, "SGD", {"momentum": 2.0}, "momentum must be"),
        (1, "SGD", {"momentum": 0.5}, "made with momentum 0"),
        (1, "SGD", {"nesterov": True}, "nesterov was fixed"),
        (1, "SGD", {"lazy": True}, "lazy was fixed"),
        (0, "SGD", {**SGD, "clipnorm": 1.0, "global_clipnorm": 1.0}, "exclude each other"),
        (3, "SGD", SGD, "no optimizer 3"),
    ],
)
def test_what_the_rule_cannot_take_is_refused(
    book: Book, number: int, kind: str, given: dict[str, float], reason: str
) -> None:
    optimizers.configure(book.state, 0, "SGD", SGD)
    with pytest.raises(InvalidArgumentError, match=reason):
        optimizers.configure(book.state, number, kind, given)
    assert [dict(o.hyperparameters) for o in book.tables.optimizers.values()] == [SGD]


def test_the_first_set_of_variables_makes_its_slots(book: Book) -> None:
    book.make("w", (2,))
    book.make("b", ())
    book.make("empty", (0,))
    optimizers.configure(book.state, 0, "Adam", ADAM)
    book.out.clear()
    assert optimizers.variable_set(book.state, 1, (2, 1)) == (
        1,
        (
            SlotFill("slots/1/m/float32", "float32", 0, 2, 0.0, False),
            SlotFill("slots/1/v/float32", "float32", 0, 2, 0.0, False),
            SlotFill("slots/1/m/float32", "float32", 16, 17, 0.0, False),
            SlotFill("slots/1/v/float32", "float32", 16, 17, 0.0, False),
        ),
    )
    assert book.out == [
        allocates("slots/1/m/float32", 0, 8),
        allocates("slots/1/v/float32", 0, 8),
        allocates("slots/1/m/float32", 64, 68),
        allocates("slots/1/v/float32", 64, 68),
    ]
    book.out.clear()
    assert optimizers.variable_set(book.state, 1, (1, 2)) == (1, ())  # the same set
    number, fills = optimizers.variable_set(book.state, 1, (1, 3))  # w has its slots
    assert (number, fills) == (2, ())
    assert book.out == [allocates("slots/1/m/float32", 128, 128), allocates("slots/1/v/float32", 128, 128)]
    assert slabs.slot_nbytes(book.state) == 2 * 12
    assert slabs.parameter_nbytes(book.state) == 12


def test_a_rule_of_rows_has_a_number_for_each_row(book: Book) -> None:
    table = book.make("table", (100, 64), sparse=True)
    dense, scalar = book.make("w", (3, 4)), book.make("b", ())
    optimizers.configure(book.state, 0, "rowwise_adagrad", ROWWISE)
    book.out.clear()
    number, fills = optimizers.variable_set(book.state, 1, (table, dense, scalar))
    assert fills == (
        SlotFill("slots/1/sum/sparse/float32", "float32", 0, 100, 0.0, True),
        SlotFill("slots/1/sum/float32", "float32", 0, 3, 0.0, False),
        SlotFill("slots/1/sum/float32", "float32", 16, 17, 0.0, False),
    )
    assert [(each.segment, each.stop - each.start) for each in book.out if isinstance(each, Allocate)] == [
        ("slots/1/sum/sparse/float32", 400),
        ("slots/1/sum/float32", 12),
        ("slots/1/sum/float32", 4),
    ]
    assert slabs.slot_nbytes(book.state) == 416
    shapes = [optimizers.slots(book.state, 1, each)[0][1].shape for each in (table, dense, scalar)]
    assert shapes == [(100,), (3,), ()]
    write_slot(book, table, "sum", block("float32", 100))
    with pytest.raises(InvalidArgumentError, match=r"slot 'sum' of variable 'table' is float32\[100, 64\]"):
        write_slot(book, table, "sum", block("float32", 100, 64))
    book.tables.flush()
    book.reopen()
    names = {each.segment for each in slabs.allocations(book.state)}
    assert {name for name in names if name.startswith("slots")} == {"slots/1/sum/float32", "slots/1/sum/sparse/float32"}
    rows = SparseGradient(table, block("float32", 2, 64), block("int64", 2))
    points = [ApplyPoint(0, "x:1", (OptimizerUpdate(1, number, (), (rows,)),), buffers) for buffers in (0, 1)]
    (update,) = updates.apply(book.state, [number], points, {}).updates
    assert update.dense == ()
    assert [(each.shape, each.first, [indices for _, indices in each.gradients]) for each in update.sparse] == [
        ((100, 64), 0, [rows.indices, rows.indices]),
        ((3, 4), 0, [None, None]),
        ((1, 1), 16, [None, None]),
    ]
    places = [values.place for values, _ in update.sparse[1].gradients]
    assert places == [Location("gradients/0/0/float32", 0), Location("gradients/1/1/float32", 0)]
    book.out.clear()
    optimizers.free(book.state, [table])
    assert Discard("slots/1/sum/sparse/float32", 0, 400) in book.out


def test_a_rule_of_rows_takes_no_variable_on_a_gpu() -> None:
    book = Book(device="gpu:0")
    number = book.make("table", (4, 2))
    optimizers.configure(book.state, 0, "rowwise_adagrad", ROWWISE)
    refusal = "rowwise_adagrad updates variables in the machine's memory only, and variable 'table' is on gpu:0"
    for ask in (optimizers.make_slots, optimizers.variable_set):
        with pytest.raises(InvalidArgumentError, match=refusal):
            ask(book.state, 1, (number,))
    assert not book.tables.slots


def test_an_optimizer_keeps_the_rule_it_was_made_with(book: Book) -> None:
    book.make("w", (2,))
    optimizers.configure(book.state, 0, "SGD", {**SGD, "momentum": 0.9})
    number, _ = optimizers.variable_set(book.state, 1, (1,))
    assert optimizers.configure(book.state, 1, "SGD", {"momentum": 0.0}).rule == "sgd_momentum"
    apply = updates.apply(book.state, [number], [ApplyPoint(0, "x:1", (OptimizerUpdate(1, number, ()),), 0)] * 2, {})
    (update,) = apply.updates
    assert (update.rule, dict(update.hyperparameters)["momentum"]) == ("sgd_momentum", 0.0)
    assert update.dense[0].slots == ("slots/1/momentum/float32",)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [((1, 1), "twice"), ((1, 9), "no variable 9"), ((1, 2), "'n' is int64; only floating-point")],
)
def test_a_set_that_cannot_be_updated_is_refused(book: Book, variables: tuple[int, ...], reason: str) -> None:
    book.make("w")
    book.make("n", (), "int64")
    optimizers.configure(book.state, 0, "SGD", SGD)
    with pytest.raises(InvalidArgumentError, match=reason):
        optimizers.variable_set(book.state, 1, variables)


def test_slots_of_a_variable_with_sparse_gradients_begin_without_memory(book: Book) -> None:
    book.make("table", (1000, 8))
    optimizers.configure(book.state, 0, "Adam", ADAM)
    book.out.clear()
    _, fills = optimizers.variable_set(book.state, 1, (1,), [1])
    assert [fill.is_lazy for fill in fills] == [True, True]
    assert book.out == [replace(allocates(f"slots/1/{slot}/float32", stop=32000), is_lazy=True) for slot in "mv"]


def test_slots_are_described_and_written(book: Book) -> None:
    book.make("w", (2, 3))
    optimizers.configure(book.state, 0, "Adagrad", ADAGRAD)
    place = Array("float32", (2, 3), Location("slots/1/accumulator/float32", 0))
    fills = optimizers.make_slots(book.state, 1, (1,))
    assert fills == (SlotFill("slots/1/accumulator/float32", "float32", 0, 6, 0.1, False),)
    assert optimizers.make_slots(book.state, 1, (1,)) == ()
    assert optimizers.slots(book.state, 1, 1) == (("accumulator", place),)
    value = block("float32", 2, 3)
    assert write_slot(book, 1, "accumulator", value) == Write(place, "assign", None, (value,))
    with pytest.raises(InvalidArgumentError, match="no slot 'm'; its slots: accumulator"):
        write_slot(book, 1, "m", value)
    with pytest.raises(InvalidArgumentError, match=r"slot 'accumulator' of variable 'w' is float32\[3, 2\]"):
        write_slot(book, 1, "accumulator", block("float32", 3, 2))


def test_a_bound_of_every_element_is_not_for_complex_variables(book: Book) -> None:
    book.make("z", (2,), "complex64")
    optimizers.configure(book.state, 0, "SGD", {**SGD, "clipvalue": 1.0})
    with pytest.raises(InvalidArgumentError, match="'z' is complex64; clipvalue"):
        optimizers.variable_set(book.state, 1, (1,))
    optimizers.configure(book.state, 0, "Ftrl", FTRL)
    with pytest.raises(
        InvalidArgumentError, match="this rule takes no complex ones; keep real and imaginary parts on an axis"
    ):
        optimizers.variable_set(book.state, 2, (1,))
