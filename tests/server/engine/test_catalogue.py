"""The catalogue by itself: names, places, the memory plan, slots and what an apply covers."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.playbook import ADDRESSES, allocates, array, lies, scalar, spec

from cs_proto.arrays import Array, Location, array_of
from cs_proto.errors import DeviceMemoryError, InvalidArgumentError, MemoryPlanError
from cs_proto.failures import error_of
from cs_proto.messages import ApplyPoint, Optimizer, Schedule, SparseGradient, VariableSpec
from cs_server.engine.address_budget import PAGE_NBYTES, Addresses, divided
from cs_server.engine.catalogue import Catalogue
from cs_server.engine.control_log import ControlMemory
from cs_server.engine.state import SlotFill, Tables
from cs_server.events import Allocate, Apply, Command, Dense, Discard, Load, LoadKernel, Rows, Write

SGD = {"learning_rate": 0.1, "momentum": 0.0, "nesterov": 0.0}
ADAGRAD = {"learning_rate": 0.1, "initial_accumulator_value": 0.1, "epsilon": 1e-7}
FTRL = {
    "learning_rate": 0.1,
    "learning_rate_power": -0.5,
    "initial_accumulator_value": 0.1,
    "l1_regularization_strength": 0.0,
    "l2_regularization_strength": 0.0,
    "l2_shrinkage_regularization_strength": 0.0,
    "beta": 0.0,
}
ADAM = {"learning_rate": 0.1, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7, "amsgrad": 0.0}


def block(dtype: str, *shape: int) -> Array:
    return array_of(np.zeros(shape, dtype))


class Book:
    """A catalogue over a store of its own."""

    def __init__(self, replicas: int = 2, addresses: Addresses = ADDRESSES, device: str = "cpu:0") -> None:
        self.control = ControlMemory()
        self.replicas = replicas
        self.addresses = addresses
        self.device = device
        self.reopen()

    def reopen(self) -> None:
        self.tables = Tables(self.control, self.replicas)
        self.out: list[Command] = []
        self.catalogue = Catalogue(self.tables, self.out, self.replicas, self.addresses, self.device)

    def make(self, name: str, shape: tuple[int, ...] = (), dtype: str = "float32", trainable: bool = True) -> int:
        made, _ = self.catalogue.create(VariableSpec(name, dtype, shape, trainable, 0, 0), None)
        self.tables.flush()
        return made.number


@pytest.fixture
def book() -> Book:
    return Book()


# --- names and places ---------------------------------------------------------------------------------------------


def test_a_name_that_is_taken_gets_a_number(book: Book) -> None:
    for name in ["w", "w", "w_1", "w", "b"]:
        book.make(name)
    assert [variable.spec.name for variable in book.catalogue.variables()] == ["w", "w_1", "w_1_1", "w_2", "b"]
    assert book.catalogue.named("w_2").number == 4


def test_a_longest_name_that_is_taken_stays_a_name(book: Book) -> None:
    book.make("x" * 512)
    book.make("x" * 512)
    assert book.catalogue.variable(2).spec.name == "x" * 510 + "_1"


def test_variables_of_a_dtype_lie_aligned_and_next_to_each_other(book: Book) -> None:
    shapes: list[tuple[int, ...]] = [(3,), (17, 3), (), (0, 5), (16,), (2,)]
    places = [book.catalogue.variable(book.make(f"v{n}", shape)).place for n, shape in enumerate(shapes)]
    assert {place.segment for place in places} == {"parameters/float32"}
    assert [place.offset for place in places] == [0, 64, 320, 384, 384, 448]


def test_the_first_of_a_dtype_makes_its_segments_and_each_is_made_present(book: Book) -> None:
    book.make("w", (2,))
    assert book.out == [
        allocates("parameters/float32", 64, 64),
        allocates("gradients/0/0/float32", 64, 64, writer="w0"),
        allocates("gradients/1/0/float32", 64, 64, writer="w1"),
        allocates("parameters/float32", 0, 8),
    ]
    book.out.clear()
    book.make("b", ())
    book.make("empty", (0,))
    assert book.out == [allocates("parameters/float32", 64, 68)]


def test_a_table_without_dense_gradients_is_touched_by_what_is_written(book: Book) -> None:
    number = book.make("table", (1000, 3), trainable=False)
    assert book.out[-1] == replace(allocates("parameters/float32", 0, 12_000), is_lazy=True)
    book.make("after")
    book.catalogue.free([number])
    _, [fill] = book.catalogue.create(replace(spec("again", (10, 3)), trainable=False), None)
    assert fill.is_lazy
    book.out.clear()
    book.catalogue.create(replace(spec("small", (2,)), trainable=False), array(1, 2))
    assert book.out == [allocates("parameters/float32", 128, 136)]


def test_dtypes_without_gradients_have_no_gradient_buffers(book: Book) -> None:
    book.make("n", (2,), "int64")
    assert book.out == [allocates("parameters/int64", 64, 64), allocates("parameters/int64", 0, 16)]


def test_each_page_of_versions_is_made_with_its_first_variable(book: Book) -> None:
    book.make("before", (0,))
    book.tables.tally.variables = 510
    book.make("last", (0,))
    book.out.clear()
    book.make("first", (0,))
    assert book.out == [Allocate("versions", ADDRESSES.versions, "", 4096, 8192, is_lazy=True)]


def test_unknown_variables_and_optimizers_are_named_with_what_there_is(book: Book) -> None:
    with pytest.raises(InvalidArgumentError, match=r"no variable 1, or no more: .*; there are none"):
        book.catalogue.variable(1)
    for name in ["weights", "bias"]:
        book.make(name)
    with pytest.raises(
        InvalidArgumentError, match=r"no variable 7, or no more: .*; there are 1 \(weights\), 2 \(bias\)"
    ):
        book.catalogue.variable(7)
    with pytest.raises(InvalidArgumentError, match="no variable 'weight'; did you mean 'weights'"):
        book.catalogue.named("weight")
    with pytest.raises(InvalidArgumentError, match=r"no variable 'q'; there are 1 \(weights\)"):
        book.catalogue.named("q")
    book.catalogue.configure(0, "SGD", SGD)
    with pytest.raises(InvalidArgumentError, match=r"no optimizer 2; there are 1 \(SGD\)"):
        book.catalogue.optimizer(2)


def test_a_long_inventory_is_cut(book: Book) -> None:
    for n in range(20):
        book.make(f"v{n}")
    with pytest.raises(InvalidArgumentError, match=r"1 \(v0\), .*, 4 \(v3\), \.\.\., 18 \(v17\), .*20 \(v19\)$"):
        book.catalogue.variable(99)


def test_a_value_has_the_shape_and_dtype_of_its_variable(book: Book) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'w' is float32\[1\]; it must be float32\[2\]"):
        book.catalogue.create(spec("w", (2,)), array(1))
    with pytest.raises(InvalidArgumentError, match=r"'w' is int32\[2\]; it must be float32\[2\]"):
        book.catalogue.create(spec("w", (2,)), array(1, 2, dtype="int32"))
    book.make("w", (2,))
    with pytest.raises(InvalidArgumentError, match="assign_add to variable 'w'"):
        book.catalogue.write(1, "assign_add", None, (array(1, 2), scalar(1)))
    assert book.catalogue.write(1, "assign_add", "SUM", (array(1, 2), array(3, 4))) == Write(
        lies("parameters/float32", 0, (2,)), "assign_add", "SUM", (array(1, 2), array(3, 4)), None, (1,)
    )


def test_truth_values_cannot_be_added(book: Book) -> None:
    book.make("flag", (), "bool")
    with pytest.raises(InvalidArgumentError, match="bool"):
        book.catalogue.write(1, "assign_add", None, (scalar(1, "bool"),))


# --- the plan -----------------------------------------------------------------------------------------------------


def test_a_variable_counts_once_and_once_for_each_replicas_gradients(book: Book) -> None:
    book.tables.tally.available_nbytes = 1199
    with pytest.raises(MemoryPlanError, match=r"variable 'w': 1200 bytes planned .* 1199 bytes available"):
        book.make("w", (100,))
    assert book.out == []
    assert not book.tables.variables.items()
    book.tables.tally.available_nbytes = 1200
    book.make("w", (100,))


def test_gradient_buffers_that_nobody_has_touched_are_promised(book: Book) -> None:
    book.tables.tally.available_nbytes = 1200
    book.make("w", (100,))
    book.tables.tally.available_nbytes = 800  # its own 400 have been touched
    with pytest.raises(MemoryPlanError, match=r"4 bytes planned .* beside 800 bytes promised"):
        book.make("n", (), "int32")
    book.make("nothing", (0,))
    book.catalogue.configure(0, "SGD", SGD)
    book.catalogue.variable_set(1, (1,))  # now they are touched
    book.make("n", (), "int32")


def test_variables_that_no_optimizer_may_touch_promise_nothing(book: Book) -> None:
    book.tables.tally.available_nbytes = 400
    book.make("w", (100,), trainable=False)
    book.make("n", (100,), "int32")


def test_slots_count_when_they_are_made(book: Book) -> None:
    book.make("w", (100,))
    book.catalogue.configure(0, "Adam", ADAM)
    book.out.clear()
    book.tables.tally.available_nbytes = 799  # its gradient buffers have been touched by now
    with pytest.raises(MemoryPlanError, match=r"optimizer 1 \(Adam\): 800 bytes planned .* slots m, v"):
        book.catalogue.variable_set(1, (1,))
    assert book.out == []
    book.tables.tally.available_nbytes = 800
    assert book.catalogue.variable_set(1, (1,))[0] == 1


def test_what_lies_on_a_gpu_must_fit_there_and_mirror_and_journal_beside() -> None:
    book = Book(device="gpu:1")
    book.tables.tally.available_nbytes, book.tables.tally.device_nbytes = 1599, 399
    with pytest.raises(DeviceMemoryError, match=r"variable 'w': 400 bytes planned on gpu:1 for its .* 399 bytes of it"):
        book.make("w", (100,))
    book.tables.tally.device_nbytes = 400
    with pytest.raises(MemoryPlanError, match="variable 'w': 1600 bytes planned"):
        book.make("w", (100,))
    assert book.out == []
    book.tables.tally.available_nbytes = 1600
    book.make("w", (100,))
    book.tables.tally.available_nbytes, book.tables.tally.device_nbytes = 1600, 799
    book.make("n", (100,), "int64")
    book.catalogue.configure(0, "Adam", ADAM)
    with pytest.raises(DeviceMemoryError, match=r"optimizer 1 \(Adam\): 800 bytes planned on gpu:1 for the slots m, v"):
        book.catalogue.variable_set(1, (1,))
    book.tables.tally.device_nbytes = 800
    book.catalogue.variable_set(1, (1,))
    assert LoadKernel("adam", "float32") in book.out
    assert book.catalogue.kernels() == [LoadKernel("adam", "float32")]
    assert book.catalogue.loads() == [
        Load("parameters/float32", 0, 400),
        Load("slots/1/m/float32", 0, 400),
        Load("slots/1/v/float32", 0, 400),
    ]


def test_nothing_is_loaded_where_variables_lie_in_the_machines_memory(book: Book) -> None:
    book.make("w", (100,))
    book.catalogue.configure(0, "Adam", ADAM)
    book.catalogue.variable_set(1, (1,))
    assert book.catalogue.loads() == book.catalogue.kernels() == []


def test_a_slab_never_outgrows_its_reservation() -> None:
    book = Book(addresses=divided(64 << 40, 1 << 20, 2))  # 4 MiB of addresses
    book.make("half", (500_000,), trainable=False)
    with pytest.raises(
        MemoryPlanError, match=r"'w': 2400000 bytes planned \(2.3 MiB\), but only 2194304 of the 4194304 bytes"
    ):
        book.make("w", (600_000,))
    book.make("other", (600_000,), "int32")  # a slab of its own


SHORT = replace(ADDRESSES, slab=PAGE_NBYTES, longest_slab=1 << 30)
FILLS_A_PAGE = PAGE_NBYTES // 4


def test_what_does_not_fit_extends_every_segment_of_its_slab() -> None:
    book = Book(addresses=SHORT)
    book.make("w", (FILLS_A_PAGE,))
    book.catalogue.configure(0, "Adam", ADAM)
    book.catalogue.variable_set(1, (1,))
    book.out.clear()
    start = PAGE_NBYTES
    assert book.catalogue.variable(book.make("b", (2,))).place.offset == start
    end, length = start + 64, 2 * PAGE_NBYTES
    assert book.out == [
        Allocate("parameters/float32", length, "", end, end),
        Allocate("gradients/0/0/float32", length, "w0", end, end),
        Allocate("gradients/1/0/float32", length, "w1", end, end),
        Allocate("parameters/float32", length, "", start, start + 8),
    ]
    book.out.clear()
    book.catalogue.variable_set(1, (2,))  # slots follow when there is something to keep in them
    assert book.out == [Allocate(f"slots/1/{slot}/float32", length, "", start, start + 8) for slot in "mv"]
    book.tables.flush()
    book.reopen()
    assert {each.reservation for each in book.catalogue.allocations()} == {length}
    book.make("large", (FILLS_A_PAGE,))
    assert book.tables.slabs["float32"].reservation == 2 * length
    book.make("larger", (8 * FILLS_A_PAGE,), trainable=False)
    assert book.tables.slabs["float32"].reservation == 11 * PAGE_NBYTES


def test_a_hole_extends_nothing() -> None:
    book = Book(addresses=SHORT)
    first = book.make("w", (FILLS_A_PAGE,))
    book.catalogue.free([first])
    book.tables.flush()
    book.out.clear()
    book.make("again", (FILLS_A_PAGE,))
    assert book.out == [allocates("parameters/float32", 0, PAGE_NBYTES, reservation=PAGE_NBYTES)]


def test_a_variable_beyond_the_longest_slab_is_refused_and_changes_nothing() -> None:
    book = Book(addresses=replace(SHORT, longest_slab=5 * PAGE_NBYTES))
    book.make("w", (FILLS_A_PAGE,))
    with pytest.raises(
        MemoryPlanError, match=r"'b': 8388672 bytes planned .* only 8388608 of the 10485760 bytes of addresses"
    ):
        book.make("b", (4 * FILLS_A_PAGE + 16,))
    assert book.tables.slabs["float32"].reservation == PAGE_NBYTES
    book.make("b", (3 * FILLS_A_PAGE,))
    assert book.tables.slabs["float32"].reservation == 4 * PAGE_NBYTES
    book.make("c", (16,))
    assert book.tables.slabs["float32"].reservation == 5 * PAGE_NBYTES


def test_the_second_set_of_gradients_is_made_when_it_is_used(book: Book) -> None:
    number = book.make("w", (2,))
    book.make("n", (2,), "int64")
    book.out.clear()
    book.catalogue.use_second_gradients(["float32", "int64", "float32"])
    second = [allocates(f"gradients/{r}/1/float32", 64, 64, writer=f"w{r}") for r in (0, 1)]
    assert book.out == second
    book.tables.flush()
    book.reopen()
    book.catalogue.use_second_gradients(["float32"])
    assert book.out == []
    assert {each.segment for each in book.catalogue.allocations()} >= {each.segment for each in second}
    book.catalogue.free([number])
    assert {each.segment for each in book.out} >= {each.segment for each in second}  # what it held is given back


def test_the_second_set_of_gradients_may_be_refused(book: Book) -> None:
    book.make("w", (2,))
    refused = allocates("gradients/1/1/float32", 64, 64, writer="w1")
    book.catalogue.refused = {refused: error_of(MemoryPlanError("no addresses"))}
    with pytest.raises(MemoryPlanError, match="the second set of float32 gradient buffers: no addresses"):
        book.catalogue.use_second_gradients(["float32"])
    assert book.tables.slabs["float32"].gradient_sets == 1


# --- optimizers and slots -----------------------------------------------------------------------------------------


def test_an_optimizer_is_made_and_changed(book: Book) -> None:
    made = book.catalogue.configure(0, "SGD", SGD)
    assert made == Optimizer(1, "SGD", "sgd", tuple(SGD.items()), None, 0)
    changed = book.catalogue.configure(1, "SGD", {"learning_rate": 0.5})
    assert dict(changed.hyperparameters) == {**SGD, "learning_rate": 0.5}
    assert book.catalogue.optimizer(1) == changed
    assert book.catalogue.configure(0, "SGD", SGD).number == 2


def test_a_schedule_stays_until_a_learning_rate_replaces_it(book: Book) -> None:
    decay = Schedule("ExponentialDecay", (0.1, 10.0, 0.5, 0.0))
    assert book.catalogue.configure(0, "SGD", SGD, decay, 3).iterations == 3
    assert book.catalogue.configure(1, "SGD", {"momentum": 0.0}).schedule == decay
    assert book.catalogue.configure(1, "SGD", {}, None, 20).schedule == decay
    number, _ = book.catalogue.variable_set(1, (book.make("w"),))
    point = [ApplyPoint(0, "x:1", 1, number, (), 0)] * 2
    rates = [dict(book.catalogue.apply(number, point, earlier).hyperparameters)["learning_rate"] for earlier in (0, 10)]
    assert rates == pytest.approx([0.1 * 0.5**2, 0.1 * 0.5**3])
    book.catalogue.applied(number)
    assert book.catalogue.apply(number, point, 0).t == 22
    assert book.catalogue.configure(1, "SGD", {"learning_rate": 0.5}).schedule is None


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
    book.catalogue.configure(0, "SGD", SGD)
    with pytest.raises(InvalidArgumentError, match=reason):
        book.catalogue.configure(number, kind, given)
    assert [dict(o.hyperparameters) for o in book.tables.optimizers.values()] == [SGD]


def test_the_first_set_of_variables_makes_its_slots(book: Book) -> None:
    book.make("w", (2,))
    book.make("b", ())
    book.make("empty", (0,))
    book.catalogue.configure(0, "Adam", ADAM)
    book.out.clear()
    assert book.catalogue.variable_set(1, (2, 1)) == (
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
    assert book.catalogue.variable_set(1, (1, 2)) == (1, ())  # the same set
    number, fills = book.catalogue.variable_set(1, (1, 3))  # w has its slots
    assert (number, fills) == (2, ())
    assert book.out == [allocates("slots/1/m/float32", 128, 128), allocates("slots/1/v/float32", 128, 128)]
    assert book.catalogue.slot_nbytes() == 2 * 12
    assert book.catalogue.parameter_nbytes() == 12


def test_an_optimizer_keeps_the_rule_it_was_made_with(book: Book) -> None:
    book.make("w", (2,))
    book.catalogue.configure(0, "SGD", {**SGD, "momentum": 0.9})
    number, _ = book.catalogue.variable_set(1, (1,))
    assert book.catalogue.configure(1, "SGD", {"momentum": 0.0}).rule == "sgd_momentum"
    apply = book.catalogue.apply(number, [ApplyPoint(0, "x:1", 1, number, (), 0)] * 2, 0)
    assert (apply.rule, dict(apply.hyperparameters)["momentum"]) == ("sgd_momentum", 0.0)
    assert apply.dense[0].slots == ("slots/1/momentum/float32",)


@pytest.mark.parametrize(
    ("variables", "reason"),
    [((1, 1), "twice"), ((1, 9), "no variable 9"), ((1, 2), "'n' is int64; only floating-point")],
)
def test_a_set_that_cannot_be_updated_is_refused(book: Book, variables: tuple[int, ...], reason: str) -> None:
    book.make("w")
    book.make("n", (), "int64")
    book.catalogue.configure(0, "SGD", SGD)
    with pytest.raises(InvalidArgumentError, match=reason):
        book.catalogue.variable_set(1, variables)


def test_an_apply_covers_each_slab_once_in_ascending_ranges(book: Book) -> None:
    book.make("w", (3,))
    book.make("d", (2,), "float64")
    book.make("b", ())
    book.make("empty", (0,))
    adam = book.catalogue.configure(0, "Adam", ADAM)
    number, _ = book.catalogue.variable_set(1, (3, 4, 2, 1))
    wide, narrow = "float64", "float32"
    points = [ApplyPoint(0, "x:1", 1, number, (), buffers) for buffers in (0, 1)]
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
    assert book.catalogue.apply(number, points, 1) == Apply("adam", adam.hyperparameters, 2, parts, (), (1, 2, 3, 4))


def test_a_slab_is_extended_as_far_as_it_must_be_where_twice_as_long_cannot_be_had() -> None:
    book = Book(addresses=Addresses(PAGE_NBYTES, 64 * PAGE_NBYTES, PAGE_NBYTES, PAGE_NBYTES, PAGE_NBYTES))
    nbytes = 3 * PAGE_NBYTES
    book.make("first", (nbytes // 8,), "int64", trainable=False)
    book.out.clear()
    twice, end = 2 * nbytes, nbytes + 64
    refused = Allocate("parameters/int64", twice, "", end, end)
    book.catalogue.refused = {refused: error_of(MemoryPlanError("too few addresses"))}
    book.make("second", (8,), "int64", trainable=False)
    made = {each.reservation for each in book.out if isinstance(each, Allocate) and "int64" in each.segment}
    assert made == {nbytes + PAGE_NBYTES}


def test_a_sparse_gradient_takes_its_variable_out_of_the_ranges(book: Book) -> None:
    book.make("a", (16,))
    book.make("table", (5, 2, 3))
    book.make("b", (16,))
    book.catalogue.configure(0, "Adagrad", ADAGRAD)
    rows = [SparseGradient(2, block("float32", k, 2, 3), block("int64", k)) for k in (4, 0)]
    points = [ApplyPoint(0, "x:1", 1, 0, (1, 2, 3), buffers, (row,)) for buffers, row in enumerate(rows)]
    with pytest.raises(InvalidArgumentError, match="'a' is said to lie in the second set of buffers, but no Locate"):
        book.catalogue.check_gradients(points)
    book.catalogue.use_second_gradients(["float32"])
    book.catalogue.check_gradients(points)
    number, fills = book.catalogue.variable_set(1, (1, 2, 3), [2])
    assert [fill.is_lazy for fill in fills] == [False] * 3  # the accumulator begins at 0.1
    apply = book.catalogue.apply(number, points, 0)
    (offset,) = {v.place.offset for v in book.catalogue.variables() if v.spec.name == "table"}
    assert apply.sparse == (
        Rows(
            dtype="float32",
            first=offset // 4,
            shape=(5, 6),
            parameters="parameters/float32",
            slots=("slots/1/accumulator/float32",),
            gradients=tuple((row.values, row.indices) for row in rows),
        ),
    )
    assert [last - first for first, last in apply.dense[0].ranges] == [16, 16]
    dense = [ApplyPoint(0, "x:1", 1, number, (), buffers) for buffers in (0, 1)]
    assert sum(last - first for first, last in book.catalogue.apply(number, dense, 0).dense[0].ranges) == 62


def test_slots_of_a_variable_with_sparse_gradients_begin_without_memory(book: Book) -> None:
    book.make("table", (1000, 8))
    book.catalogue.configure(0, "Adam", ADAM)
    book.out.clear()
    _, fills = book.catalogue.variable_set(1, (1,), [1])
    assert [fill.is_lazy for fill in fills] == [True, True]
    assert book.out == [replace(allocates(f"slots/1/{slot}/float32", stop=32000), is_lazy=True) for slot in "mv"]


@pytest.mark.parametrize(
    ("gradient", "reason"),
    [
        (
            SparseGradient(1, block("float64", 2, 3), block("int64", 2)),
            r"'table' is float64\[2, 3\]; .* float32\[4, 3\]",
        ),
        (SparseGradient(1, block("float32", 2, 4), block("int64", 2)), r"float32\[2, 4\]"),
        (SparseGradient(2, block("float32", 2), block("int64", 2)), r"'scalar' is float32\[2\]"),
        (SparseGradient(3, block("float32", 2), block("int64", 2)), "'other', which is not to be updated"),
        (SparseGradient(9, block("float32", 2), block("int64", 2)), "no variable 9"),
    ],
)
def test_a_sparse_gradient_that_does_not_fit_is_refused(book: Book, gradient: SparseGradient, reason: str) -> None:
    for name, shape in [("table", (4, 3)), ("scalar", ()), ("other", (2,))]:
        book.make(name, shape)
    with pytest.raises(InvalidArgumentError, match=reason):
        book.catalogue.check_gradients([ApplyPoint(0, "x:1", 1, 0, (1, 2), 0, (gradient,))])


def test_slots_are_described_and_written(book: Book) -> None:
    book.make("w", (2, 3))
    book.catalogue.configure(0, "Adagrad", ADAGRAD)
    place = Array("float32", (2, 3), Location("slots/1/accumulator/float32", 0))
    slots, fills = book.catalogue.slots(1, 1)
    assert slots == (("accumulator", place),)
    assert fills == (SlotFill("slots/1/accumulator/float32", "float32", 0, 6, 0.1, False),)
    assert book.catalogue.slots(1, 1) == (slots, ())
    value = block("float32", 2, 3)
    assert book.catalogue.write_slot(1, 1, "accumulator", value) == Write(place, "assign", None, (value,))
    with pytest.raises(InvalidArgumentError, match="no slot 'm'; its slots: accumulator"):
        book.catalogue.write_slot(1, 1, "m", value)
    with pytest.raises(InvalidArgumentError, match=r"slot 'accumulator' of variable 'w' is float32\[3, 2\]"):
        book.catalogue.write_slot(1, 1, "accumulator", block("float32", 3, 2))


def test_a_bound_of_every_element_is_not_for_complex_variables(book: Book) -> None:
    book.make("z", (2,), "complex64")
    book.catalogue.configure(0, "SGD", {**SGD, "clipvalue": 1.0})
    with pytest.raises(InvalidArgumentError, match="'z' is complex64; clipvalue"):
        book.catalogue.variable_set(1, (1,))
    book.catalogue.configure(0, "Ftrl", FTRL)
    with pytest.raises(InvalidArgumentError, match="complex ones not by this rule"):
        book.catalogue.variable_set(2, (1,))


def test_bounded_gradients_keep_variables_apart(book: Book) -> None:
    for _ in range(2):
        book.make("w", (16,))
    book.catalogue.configure(0, "SGD", {**SGD, "clipnorm": 1.0})
    number, _ = book.catalogue.variable_set(1, (1, 2))
    apply = book.catalogue.apply(number, [ApplyPoint(0, "x:1", 1, number, (), 0)] * 2, 0)
    assert [last - first for first, last in apply.dense[0].ranges] == [16, 16]


def test_versions_count_writes_and_the_steps_of_every_set(book: Book) -> None:
    for name in ["w", "b"]:
        book.make(name)
    book.catalogue.configure(0, "SGD", SGD)
    both, _ = book.catalogue.variable_set(1, (1, 2))
    one, _ = book.catalogue.variable_set(1, (1,))
    book.catalogue.applied(both)
    book.catalogue.applied(one)
    assert book.catalogue.written(1) == 3
    for _ in range(2):
        assert [variable.version for variable in book.catalogue.variables()] == [3, 1]
        assert book.catalogue.optimizer(1).iterations == 2
        book.tables.flush()
        book.reopen()


def test_a_rolled_back_change_is_forgotten_whole(book: Book) -> None:
    book.make("w")
    book.catalogue.configure(0, "SGD", SGD)
    book.tables.flush()
    book.catalogue.create(spec("x"), None)
    number, _ = book.catalogue.variable_set(1, (1,))
    book.catalogue.applied(number)
    with book.catalogue.undoing():
        book.tables.rollback()
    assert [v.version for v in book.catalogue.variables()] == [0]
    with pytest.raises(InvalidArgumentError):
        book.catalogue.named("x")
    assert book.catalogue.create(spec("y"), None)[0].place == Location("parameters/float32", 64)


@given(st.lists(st.tuples(st.sampled_from(["make", "undone", "free", "free, undone"]), st.integers(0, 7)), max_size=25))
def test_names_are_those_that_another_server_would_give(moves: list[tuple[str, int]]) -> None:
    book, asked = Book(), ["w", "w_1", "w_2", "w_1_1", "x" * 511, "x" * 512, "w_007", "w"]
    for move, which in moves:
        known = list(book.tables.variables)
        if "free" not in move:
            book.catalogue.create(spec(asked[which]), None)
        elif known:
            book.catalogue.free([known[which % len(known)]])
        if "undone" in move:
            with book.catalogue.undoing():
                book.tables.rollback()
        else:
            book.tables.flush()
        found = {number: variable.spec.name for number, variable in book.tables.variables.items()}
        assert len(set(found.values())) == len(found)
        assert all(book.catalogue.named(name).number == number for number, name in found.items())
    given_here = [book.catalogue.create(spec(name), None)[0].spec.name for name in asked]
    with book.catalogue.undoing():
        book.tables.rollback()
    book.reopen()
    assert [book.catalogue.create(spec(name), None)[0].spec.name for name in asked] == given_here


def test_a_restarted_server_opens_every_segment_again(book: Book) -> None:
    book.make("w", (2,))
    book.make("n", (), "int32")
    book.catalogue.configure(0, "Adam", ADAM)
    book.catalogue.variable_set(1, (1,))
    made = {command.segment for command in book.out if isinstance(command, Allocate)}
    again = book.catalogue.allocations()
    assert {allocation.segment for allocation in again} == made
    assert all((a.start, a.stop) == (0, 0) for a in again)
    assert {a.writer for a in again if a.segment.startswith("gradients/1/")} == {"w1"}


# --- freeing ------------------------------------------------------------------------------------------------------


def test_a_freed_place_is_zeroed_for_the_next_one_that_fits(book: Book) -> None:
    first, second, third = (book.make(name, (20,)) for name in "abc")
    place = book.catalogue.variable(second).place
    book.out.clear()
    assert book.catalogue.free([second, 99]) == 1
    book.tables.flush()
    start, stop = place.offset, place.offset + 80
    names = ["parameters/float32", *(f"gradients/{r}/0/float32" for r in (0, 1))]
    assert book.out == [Discard(name, start, stop) for name in names]
    with pytest.raises(InvalidArgumentError, match="no variable 2"):
        book.catalogue.variable(second)
    assert book.catalogue.free([second]) == 0
    book.reopen()
    large, fills = book.catalogue.create(spec("d", (80,)), None)
    assert (large.place.offset > book.catalogue.variable(third).place.offset, fills) == (True, ())
    small, fills = book.catalogue.create(spec("b", (10,)), None)
    assert (small.number, small.spec.name, small.version, small.place) == (5, "b", 0, place)
    assert fills == (SlotFill("parameters/float32", "float32", start // 4, start // 4 + 10, 0.0, False),)
    other, _ = book.catalogue.create(spec("e", (10,), "float64"), None)
    assert other.place == Location("parameters/float64", 0)
    assert book.catalogue.free([first, third, small.number, large.number]) == 4
    assert book.catalogue.create(spec("f", (100,)), None)[0].place.offset == 0  # all is one again
    assert book.catalogue.parameter_nbytes() == 400 + 80


def test_what_an_optimizer_has_taken_up_stays(book: Book) -> None:
    optimizer = book.catalogue.configure(0, "SGD", SGD).number
    v, w = book.make("v"), book.make("w")
    book.catalogue.variable_set(optimizer, (v,))
    assert book.catalogue.free([v, w]) == 1
    assert [variable.number for variable in book.catalogue.variables()] == [v]


def test_freed_memory_is_no_longer_promised_to_gradients() -> None:
    book = Book(replicas=2)
    book.tables.tally.available_nbytes = 3000
    v = book.make("v", (250,))
    with pytest.raises(MemoryPlanError):
        book.make("w", (250,))
    book.catalogue.free([v])
    book.make("w", (250,))


@given(st.lists(st.one_of(st.integers(0, 300_000), st.none()), max_size=40), st.randoms(use_true_random=False))
def test_places_never_overlap_and_nothing_is_lost(sizes: list[int | None], random: Random) -> None:
    """``None`` frees one of those there are, a number makes one of so many elements."""
    book = Book(replicas=1)
    there: list[int] = []
    for size in sizes:
        if size is not None:
            there.append(book.make("v", (size,), "uint8"))
        elif there:
            assert book.catalogue.free([there.pop(random.randrange(len(there)))]) == 1
            book.tables.flush()
        taken = sorted(
            (v.place.offset, v.place.offset + v.array.nbytes) for v in book.catalogue.variables() if v.array.nbytes
        )
        assert all(one[1] <= other[0] for one, other in pairwise(taken))
        holes = sorted((offset, offset + hole.nbytes) for (_, offset), hole in book.tables.holes.items())
        assert all(one[1] < other[0] for one, other in pairwise(holes))
        for start, stop in holes:
            assert all(stop <= first or last <= start for first, last in taken)
    slab = book.tables.slabs.get("uint8")
    book.catalogue.free(there)
    assert slab is None or book.tables.slabs["uint8"] == replace(slab, nbytes=0, idle_nbytes=0)
    assert [hole.nbytes for hole in book.tables.holes.values()] == ([slab.tail] if slab and slab.tail else [])
