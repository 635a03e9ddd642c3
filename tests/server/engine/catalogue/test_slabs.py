"""Slabs by themselves: places, the memory plan, and what a server that was restarted opens again."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.book import ADAM, SGD, Book
from tests.harness.playbook import ADDRESSES, allocates

from cs_proto.errors import DeviceMemoryError, MemoryPlanError
from cs_proto.failures import error_of
from cs_proto.memory_plan import room_of
from cs_server.engine.catalogue import optimizers, slabs, variables
from cs_server.engine.store.address_budget import PAGE_NBYTES, Addresses, divided
from cs_server.events import Allocate, Discard, Load, LoadKernel


def test_variables_of_a_dtype_lie_aligned_and_next_to_each_other(book: Book) -> None:
    shapes: list[tuple[int, ...]] = [(3,), (17, 3), (), (0, 5), (16,), (2,)]
    places = [variables.get(book.state, book.make(f"v{n}", shape)).place for n, shape in enumerate(shapes)]
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


def test_dtypes_without_gradients_have_no_gradient_buffers(book: Book) -> None:
    book.make("n", (2,), "int64")
    assert book.out == [allocates("parameters/int64", 64, 64), allocates("parameters/int64", 0, 16)]


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
    optimizers.configure(book.state, 0, "SGD", SGD)
    optimizers.variable_set(book.state, 1, (1,))  # now they are touched
    book.make("n", (), "int32")


def test_variables_that_no_optimizer_may_touch_promise_nothing(book: Book) -> None:
    book.tables.tally.available_nbytes = 400
    book.make("w", (100,), trainable=False)
    book.make("n", (100,), "int32")


def test_sparse_variables_lie_apart_and_have_no_gradient_buffers(book: Book) -> None:
    book.make("w", (8,))
    book.tables.tally.available_nbytes = 400 + 2 * 32  # what is promised to the gradients of w
    book.out.clear()
    table = book.make("table", (50, 2), sparse=True)
    reservation, end = ADDRESSES.slab, room_of(400)
    assert book.out == [
        Allocate("parameters/sparse/float32", reservation, "", end, end),
        Allocate("parameters/sparse/float32", reservation, "", 0, 400, is_lazy=True),
    ]
    book.out.clear()
    sparse = slabs.segments_of(book.state, "sparse/float32", book.tables.slabs["sparse/float32"].gradient_sets)
    assert list(sparse) == [("parameters/sparse/float32", "")]
    slabs.use_second_gradients(book.state, ["sparse/float32"])
    assert book.out == []
    book.tables.flush()
    book.reopen()
    made = {each.segment for each in slabs.allocations(book.state)}
    assert {name for name in made if "sparse" in name} == {"parameters/sparse/float32"}
    book.out.clear()
    optimizers.free(book.state, [table])
    assert book.out == [Discard("parameters/sparse/float32", 0, 400)]
    assert book.make("again", (50, 2), sparse=True)
    assert book.tables.slabs["sparse/float32"].tail == room_of(400)


def test_slots_of_sparse_variables_are_lazy_however_they_are_made(book: Book) -> None:
    first, second = (book.make("table", (50, 2), sparse=True) for _ in range(2))
    for _ in range(2):
        optimizers.configure(book.state, 0, "Adam", ADAM)
    _, by_update = optimizers.variable_set(book.state, 1, (first,), ())
    by_look = optimizers.make_slots(book.state, 2, (second,))
    for number, fills in [(1, by_update), (2, by_look)]:
        assert [fill.segment for fill in fills] == [f"slots/{number}/{slot}/sparse/float32" for slot in "mv"]
        assert all(fill.is_lazy for fill in fills)
    lazy = [each.is_lazy for each in book.out if isinstance(each, Allocate) and each.segment.startswith("slots/")]
    assert lazy == [True] * 4


def test_slots_count_when_they_are_made(book: Book) -> None:
    book.make("w", (100,))
    optimizers.configure(book.state, 0, "Adam", ADAM)
    book.out.clear()
    book.tables.tally.available_nbytes = 799  # its gradient buffers have been touched by now
    with pytest.raises(MemoryPlanError, match=r"optimizer 1 \(Adam\): 800 bytes planned .* slots m, v"):
        optimizers.variable_set(book.state, 1, (1,))
    assert book.out == []
    book.tables.tally.available_nbytes = 800
    assert optimizers.variable_set(book.state, 1, (1,))[0] == 1


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
    optimizers.configure(book.state, 0, "Adam", ADAM)
    with pytest.raises(DeviceMemoryError, match=r"optimizer 1 \(Adam\): 800 bytes planned on gpu:1 for the slots m, v"):
        optimizers.variable_set(book.state, 1, (1,))
    book.tables.tally.device_nbytes = 800
    optimizers.variable_set(book.state, 1, (1,))
    assert LoadKernel("adam", "float32") in book.out
    assert optimizers.kernels(book.state) == [LoadKernel("adam", "float32")]
    assert slabs.loads(book.state) == [
        Load("parameters/float32", 0, 400),
        Load("slots/1/m/float32", 0, 400),
        Load("slots/1/v/float32", 0, 400),
    ]


def test_nothing_is_loaded_where_variables_lie_in_the_machines_memory(book: Book) -> None:
    book.make("w", (100,))
    optimizers.configure(book.state, 0, "Adam", ADAM)
    optimizers.variable_set(book.state, 1, (1,))
    assert slabs.loads(book.state) == optimizers.kernels(book.state) == []


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
    optimizers.configure(book.state, 0, "Adam", ADAM)
    optimizers.variable_set(book.state, 1, (1,))
    book.out.clear()
    start = PAGE_NBYTES
    assert variables.get(book.state, book.make("b", (2,))).place.offset == start
    end, length = start + 64, 2 * PAGE_NBYTES
    assert book.out == [
        Allocate("parameters/float32", length, "", end, end),
        Allocate("gradients/0/0/float32", length, "w0", end, end),
        Allocate("gradients/1/0/float32", length, "w1", end, end),
        Allocate("parameters/float32", length, "", start, start + 8),
    ]
    book.out.clear()
    optimizers.variable_set(book.state, 1, (2,))  # slots follow when there is something to keep in them
    assert book.out == [Allocate(f"slots/1/{slot}/float32", length, "", start, start + 8) for slot in "mv"]
    book.tables.flush()
    book.reopen()
    assert {each.reservation for each in slabs.allocations(book.state)} == {length}
    book.make("large", (FILLS_A_PAGE,))
    assert book.tables.slabs["float32"].reservation == 2 * length
    book.make("larger", (8 * FILLS_A_PAGE,), trainable=False)
    assert book.tables.slabs["float32"].reservation == 11 * PAGE_NBYTES


def test_a_hole_extends_nothing() -> None:
    book = Book(addresses=SHORT)
    first = book.make("w", (FILLS_A_PAGE,))
    optimizers.free(book.state, [first])
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
    slabs.use_second_gradients(book.state, ["float32", "int64", "float32"])
    second = [allocates(f"gradients/{r}/1/float32", 64, 64, writer=f"w{r}") for r in (0, 1)]
    assert book.out == second
    book.tables.flush()
    book.reopen()
    slabs.use_second_gradients(book.state, ["float32"])
    assert book.out == []
    assert {each.segment for each in slabs.allocations(book.state)} >= {each.segment for each in second}
    optimizers.free(book.state, [number])
    assert {each.segment for each in book.out} >= {each.segment for each in second}  # what it held is given back


def test_the_second_set_of_gradients_may_be_refused(book: Book) -> None:
    book.make("w", (2,))
    refused = allocates("gradients/1/1/float32", 64, 64, writer="w1")
    book.state.refused = {refused: error_of(MemoryPlanError("no addresses"))}
    with pytest.raises(MemoryPlanError, match="the second set of float32 gradient buffers: no addresses"):
        slabs.use_second_gradients(book.state, ["float32"])
    assert book.tables.slabs["float32"].gradient_sets == 1


def test_a_slab_is_extended_as_far_as_it_must_be_where_twice_as_long_cannot_be_had() -> None:
    book = Book(addresses=Addresses(PAGE_NBYTES, 64 * PAGE_NBYTES, PAGE_NBYTES, PAGE_NBYTES, PAGE_NBYTES))
    nbytes = 3 * PAGE_NBYTES
    book.make("first", (nbytes // 8,), "int64", trainable=False)
    book.out.clear()
    twice, end = 2 * nbytes, nbytes + 64
    refused = Allocate("parameters/int64", twice, "", end, end)
    book.state.refused = {refused: error_of(MemoryPlanError("too few addresses"))}
    book.make("second", (8,), "int64", trainable=False)
    made = {each.reservation for each in book.out if isinstance(each, Allocate) and "int64" in each.segment}
    assert made == {nbytes + PAGE_NBYTES}


def test_a_restarted_server_opens_every_segment_again(book: Book) -> None:
    book.make("w", (2,))
    book.make("n", (), "int32")
    optimizers.configure(book.state, 0, "Adam", ADAM)
    optimizers.variable_set(book.state, 1, (1,))
    made = {command.segment for command in book.out if isinstance(command, Allocate)}
    again = slabs.allocations(book.state)
    assert {allocation.segment for allocation in again} == made
    assert all((a.start, a.stop) == (0, 0) for a in again)
    assert {a.writer for a in again if a.segment.startswith("gradients/1/")} == {"w1"}


def test_freed_memory_is_no_longer_promised_to_gradients() -> None:
    book = Book(replicas=2)
    book.tables.tally.available_nbytes = 3000
    v = book.make("v", (250,))
    with pytest.raises(MemoryPlanError):
        book.make("w", (250,))
    optimizers.free(book.state, [v])
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
            assert optimizers.free(book.state, [there.pop(random.randrange(len(there)))])[0] == 1
            book.tables.flush()
        taken = sorted(
            (v.place.offset, v.place.offset + v.array.nbytes) for v in variables.every(book.state) if v.array.nbytes
        )
        assert all(one[1] <= other[0] for one, other in pairwise(taken))
        holes = sorted((offset, offset + hole.nbytes) for (_, offset), hole in book.tables.holes.items())
        assert all(one[1] < other[0] for one, other in pairwise(holes))
        for start, stop in holes:
            assert all(stop <= first or last <= start for first, last in taken)
    slab = book.tables.slabs.get("uint8")
    optimizers.free(book.state, there)
    assert slab is None or book.tables.slabs["uint8"] == replace(slab, nbytes=0, idle_nbytes=0)
    assert [hole.nbytes for hole in book.tables.holes.values()] == ([slab.tail] if slab and slab.tail else [])
