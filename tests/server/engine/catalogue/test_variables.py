"""Variables by themselves: names, numbers, versions and what is written."""

from __future__ import annotations

import difflib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.book import ADAM, SGD, Book
from tests.harness.playbook import ADDRESSES, allocates, array, lies, scalar, spec

from cs_proto.arrays import Location
from cs_proto.errors import InvalidArgumentError
from cs_server.engine.catalogue import optimizers, slabs, variables
from cs_server.engine.store.address_budget import PAGE_NBYTES
from cs_server.engine.store.tables import SlotFill, Table
from cs_server.events import Allocate, Discard, Renamed, Write


def test_a_name_that_is_taken_gets_a_number(book: Book) -> None:
    for name in ["w", "w", "w_1", "w", "b"]:
        book.make(name)
    assert [variable.spec.name for variable in variables.every(book.state)] == ["w", "w_1", "w_1_1", "w_2", "b"]
    assert variables.named(book.state, "w_2").number == 4


def test_a_longest_name_that_is_taken_stays_a_name(book: Book) -> None:
    book.make("x" * 512)
    book.make("x" * 512)
    assert variables.get(book.state, 2).spec.name == "x" * 510 + "_1"


def test_a_table_without_dense_gradients_is_touched_by_what_is_written(book: Book) -> None:
    number = book.make("table", (1000, 3), trainable=False)
    assert book.out[-1] == replace(allocates("parameters/float32", 0, 12_000), is_lazy=True)
    book.make("after")
    optimizers.free(book.state, [number])
    _, [fill] = variables.create(book.state, replace(spec("again", (10, 3)), trainable=False), None)
    assert fill.is_lazy
    book.out.clear()
    variables.create(book.state, replace(spec("small", (2,)), trainable=False), array(1, 2))
    assert book.out == [allocates("parameters/float32", 128, 136)]


def test_each_page_of_versions_is_made_with_its_first_variable(book: Book) -> None:
    book.make("before", (0,))
    book.tables.tally.variables = 510
    book.make("last", (0,))
    book.out.clear()
    book.make("first", (0,))
    assert book.out == [Allocate("versions", ADDRESSES.versions, "", 4096, 8192, is_lazy=True)]


def test_a_mistyped_name_is_compared_with_few(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing it with 10,000 names held up the training for half a second, whenever an observer asked for it."""
    names = {f"model/layer_{number}/kernel": number for number in range(10_000)}
    monkeypatch.setattr(book.state.index, "numbers", names)
    compared, find = [], difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", lambda *args, **how: compared.append(args) or find(*args, **how))
    for number in (0, 77, 5000, 9999):
        with pytest.raises(InvalidArgumentError, match=f"did you mean .*'model/layer_{number}/kernel'"):
            variables.named(book.state, f"model/layer_{number}/kernal")
    assert [len(candidates) <= 100 for _, candidates in compared] == [True] * 4


def test_of_many_variables_some_are_named(book: Book) -> None:
    for number in range(9):
        book.make(f"v{number}")
    with pytest.raises(
        InvalidArgumentError, match=r"1 \(v0\), 2 \(v1\), 3 \(v2\), 4 \(v3\), \.\.\., 7 \(v6\), .*v8\)$"
    ):
        variables.named(book.state, "q")


def test_unknown_variables_and_optimizers_are_named_with_what_there_is(book: Book) -> None:
    with pytest.raises(InvalidArgumentError, match=r"no variable 1; .*; there are none"):
        variables.get(book.state, 1)
    for name in ["weights", "bias"]:
        book.make(name)
    with pytest.raises(InvalidArgumentError, match=r"no variable 7; .*; there are 1 \(weights\), 2 \(bias\)"):
        variables.get(book.state, 7)
    with pytest.raises(InvalidArgumentError, match="no variable 'weight'; did you mean 'weights'"):
        variables.named(book.state, "weight")
    with pytest.raises(InvalidArgumentError, match=r"no variable 'q'; there are 1 \(weights\)"):
        variables.named(book.state, "q")
    optimizers.configure(book.state, 0, "SGD", SGD)
    with pytest.raises(InvalidArgumentError, match=r"no optimizer 2; there are 1 \(SGD\)"):
        optimizers.get(book.state, 2)


def test_a_long_inventory_is_cut(book: Book) -> None:
    for n in range(20):
        book.make(f"v{n}")
    with pytest.raises(InvalidArgumentError, match=r"1 \(v0\), .*, 4 \(v3\), \.\.\., 18 \(v17\), .*20 \(v19\)$"):
        variables.get(book.state, 99)


def test_a_value_has_the_shape_and_dtype_of_its_variable(book: Book) -> None:
    with pytest.raises(InvalidArgumentError, match=r"'w' is float32\[1\]; it must be float32\[2\]"):
        variables.create(book.state, spec("w", (2,)), array(1))
    with pytest.raises(InvalidArgumentError, match=r"'w' is int32\[2\]; it must be float32\[2\]"):
        variables.create(book.state, spec("w", (2,)), array(1, 2, dtype="int32"))
    book.make("w", (2,))
    with pytest.raises(InvalidArgumentError, match="assign_add to variable 'w'"):
        variables.write(book.state, 1, "assign_add", None, (array(1, 2), scalar(1)))
    assert variables.write(book.state, 1, "assign_add", "SUM", (array(1, 2), array(3, 4))) == Write(
        lies("parameters/float32", 0, (2,)), "assign_add", "SUM", (array(1, 2), array(3, 4)), None, (1,)
    )


def test_truth_values_cannot_be_added(book: Book) -> None:
    book.make("flag", (), "bool")
    with pytest.raises(InvalidArgumentError, match="bool"):
        variables.write(book.state, 1, "assign_add", None, (scalar(1, "bool"),))


SHORT = replace(ADDRESSES, slab=PAGE_NBYTES, longest_slab=1 << 30)


FILLS_A_PAGE = PAGE_NBYTES // 4


def test_versions_count_writes_and_the_steps_of_every_set(book: Book) -> None:
    for name in ["w", "b"]:
        book.make(name)
    optimizers.configure(book.state, 0, "SGD", SGD)
    both, _ = optimizers.variable_set(book.state, 1, (1, 2))
    one, _ = optimizers.variable_set(book.state, 1, (1,))
    optimizers.applied(book.state, both)
    optimizers.applied(book.state, one)
    variables.written(book.state, 1)
    assert variables.get(book.state, 1).version == 3
    for _ in range(2):
        assert [variable.version for variable in variables.every(book.state)] == [3, 1]
        assert optimizers.get(book.state, 1).iterations == 2
        book.tables.flush()
        book.reopen()


@given(
    moves=st.lists(
        st.tuples(
            st.sampled_from(["together", "one", "free", "make"]),
            st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
            st.sampled_from(["flushed", "kept", "undone"]),
        ),
        max_size=20,
    )
)
def test_versions_count_what_is_written_together(moves: list[tuple[str, list[int], str]]) -> None:
    book, counts = Book(), dict.fromkeys(range(1, 5), 0)
    for name in "abcd":
        book.make(name)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(variables, "_FEW", 2)
        for move, which, end in moves:
            before, numbers = counts, [number for at, number in enumerate(counts) if at in which]
            if move == "together":
                variables.written_together(book.state, tuple(reversed(numbers)))
                counts = counts | {number: counts[number] + 1 for number in numbers}
            elif move == "one" and numbers:
                variables.written(book.state, numbers[0])
                counts = counts | {numbers[0]: counts[numbers[0]] + 1}
            elif move == "free":
                optimizers.free(book.state, numbers)
                counts = {number: count for number, count in counts.items() if number not in numbers}
            elif move == "make":
                counts = counts | {variables.create(book.state, spec("x"), None)[0].number: 0}
            if end == "undone":
                book.state.rollback()
                counts = before
            elif end == "kept":
                book.tables.keep()
            else:
                book.tables.flush()
            assert {variable.number: variable.version for variable in variables.every(book.state)} == counts
        book.tables.flush()
        book.reopen()
        assert {variable.number: variable.version for variable in variables.every(book.state)} == counts


def test_rows_of_what_is_written_together_are_bounded(book: Book) -> None:
    numbers = tuple(book.make(f"v{n}") for n in range(40))
    for left in range(24):
        variables.written_together(book.state, numbers[left:])
        rows = book.tables.together.values()
        assert sum(len(row.variables) for row in rows) <= 2 * len(numbers)
    assert len(rows) == 2
    assert [variable.version for variable in variables.every(book.state)] == [*range(1, 25), *[24] * 16]


def test_what_is_written_together_again_changes_one_row(book: Book) -> None:
    numbers = tuple(book.make(f"v{n}") for n in range(100))
    for count in (1, 2, 3):
        variables.written_together(book.state, numbers)
        changed = [table.letter for table in vars(book.tables).values() if isinstance(table, Table) and table.changed]
        assert (changed, len(book.tables.together.changed)) == ([b"z"], 1)
        assert {variable.version for variable in variables.every(book.state)} == {count}
        book.tables.flush()
    optimizers.free(book.state, numbers[:99])
    assert variables.get(book.state, numbers[99]).version == 3
    optimizers.free(book.state, numbers[99:])
    assert not len(book.tables.together)


def test_a_rolled_back_change_is_forgotten_whole(book: Book) -> None:
    book.make("w")
    optimizers.configure(book.state, 0, "SGD", SGD)
    book.tables.flush()
    variables.create(book.state, spec("x"), None)
    number, _ = optimizers.variable_set(book.state, 1, (1,))
    optimizers.applied(book.state, number)
    book.state.rollback()
    assert [v.version for v in variables.every(book.state)] == [0]
    with pytest.raises(InvalidArgumentError):
        variables.named(book.state, "x")
    assert variables.create(book.state, spec("y"), None)[0].place == Location("parameters/float32", 64)


@given(st.lists(st.tuples(st.sampled_from(["make", "undone", "free", "free, undone"]), st.integers(0, 7)), max_size=25))
def test_names_are_those_that_another_server_would_give(moves: list[tuple[str, int]]) -> None:
    book, asked = Book(), ["w", "w_1", "w_2", "w_1_1", "x" * 511, "x" * 512, "w_007", "w"]
    for move, which in moves:
        known = list(book.tables.variables)
        if "free" not in move:
            variables.create(book.state, spec(asked[which]), None)
        elif known:
            optimizers.free(book.state, [known[which % len(known)]])
        if "undone" in move:
            book.state.rollback()
        else:
            book.tables.flush()
        found = {number: variable.spec.name for number, variable in book.tables.variables.items()}
        assert len(set(found.values())) == len(found)
        assert all(variables.named(book.state, name).number == number for number, name in found.items())
    given_here = [variables.create(book.state, spec(name), None)[0].spec.name for name in asked]
    book.state.rollback()
    book.reopen()
    assert [variables.create(book.state, spec(name), None)[0].spec.name for name in asked] == given_here


def test_a_freed_place_is_zeroed_for_the_next_one_that_fits(book: Book) -> None:
    first, second, third = (book.make(name, (20,)) for name in "abc")
    place = variables.get(book.state, second).place
    book.out.clear()
    assert optimizers.free(book.state, [second, 99])[0] == 1
    book.tables.flush()
    start, stop = place.offset, place.offset + 80
    names = ["parameters/float32", *(f"gradients/{r}/0/float32" for r in (0, 1))]
    assert book.out == [Discard(name, start, stop) for name in names]
    with pytest.raises(InvalidArgumentError, match="no variable 2"):
        variables.get(book.state, second)
    assert optimizers.free(book.state, [second])[0] == 0
    book.reopen()
    large, fills = variables.create(book.state, spec("d", (80,)), None)
    assert (large.place.offset > variables.get(book.state, third).place.offset, fills) == (True, ())
    small, fills = variables.create(book.state, spec("b", (10,)), None)
    assert (small.number, small.spec.name, small.version, small.place) == (5, "b", 0, place)
    assert fills == (SlotFill("parameters/float32", "float32", start // 4, start // 4 + 10, 0.0, False),)
    other, _ = variables.create(book.state, spec("e", (10,), "float64"), None)
    assert other.place == Location("parameters/float64", 0)
    assert optimizers.free(book.state, [first, third, small.number, large.number])[0] == 4
    assert variables.create(book.state, spec("f", (100,)), None)[0].place.offset == 0  # all is one again
    assert slabs.parameter_nbytes(book.state) == 400 + 80


def test_a_freed_variable_takes_its_slots_and_sets_along(book: Book) -> None:
    optimizer = optimizers.configure(book.state, 0, "Adam", ADAM).number
    v, w = book.make("v", (20,)), book.make("w", (20,))
    both, _ = optimizers.variable_set(book.state, optimizer, (v, w))
    alone, _ = optimizers.variable_set(book.state, optimizer, (w,))
    optimizers.applied(book.state, both, 2)
    optimizers.applied(book.state, alone)
    book.out.clear()
    assert optimizers.free(book.state, [v]) == (1, ())
    slots = [Discard(f"slots/1/{slot}/float32", 0, 80) for slot in ("m", "v")]
    assert book.out[:2] == slots
    book.tables.flush()
    for _ in range(2):
        assert slabs.slot_nbytes(book.state) == 2 * 80
        assert optimizers.known_set(book.state, optimizer, (v, w)) is None
        assert optimizers.known_set(book.state, optimizer, (w,)) == alone
        assert (variables.get(book.state, w).version, optimizers.get(book.state, optimizer).iterations) == (3, 3)
        assert optimizers.slotted(book.state, optimizer) == (w,)
        book.reopen()


def test_a_freed_optimizer_gives_its_seat_to_the_next_one(book: Book) -> None:
    v = book.make("v", (20,))
    places = []
    for number in (1, 2):
        assert optimizers.configure(book.state, 0, "Adam", ADAM).number == number
        optimizers.variable_set(book.state, number, (v,))
        places.append([array.place for _, array in optimizers.slots(book.state, number, v)])
        idle = book.tables.slabs["float32"].idle_nbytes
        assert optimizers.free(book.state, [], [number, 99]) == (0, ())
        assert (slabs.slot_nbytes(book.state), book.tables.slabs["float32"].idle_nbytes, idle) == (0, 0, 0)
        book.tables.flush()
        book.reopen()
        with pytest.raises(InvalidArgumentError, match=f"no optimizer {number}"):
            optimizers.get(book.state, number)
    assert places[0] == places[1]
    assert optimizers.free(book.state, [v]) == (1, ())
    assert not len(book.tables.slots)
    assert book.tables.slabs["float32"].idle_nbytes == 0


def test_names_come_back_when_the_ones_before_them_are_freed(book: Book) -> None:
    old = [book.make(name) for name in ("w", "Variable", "Variable")]
    new = [book.make(name) for name in ("w", "Variable", "Variable")]
    assert optimizers.free(book.state, old[:1]) == (1, ((new[0], "w"),))
    assert optimizers.free(book.state, old[1:]) == (2, ((new[1], "Variable"), (new[2], "Variable_1")))
    assert book.out.count(Renamed()) == 2
    book.tables.flush()
    book.reopen()
    assert [variables.get(book.state, number).spec.name for number in new] == ["w", "Variable", "Variable_1"]
    assert not optimizers.free(book.state, [new[2]])[1]  # nothing was made after it


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=25))
def test_names_are_those_of_a_program_that_made_only_what_is_left(moves: list[tuple[bool, int]]) -> None:
    book, asked = Book(), {}
    for is_free, which in moves:
        known = list(book.tables.variables)
        if is_free and known:
            optimizers.free(book.state, [known[which % len(known)]])
            book.tables.flush()
        elif not is_free:
            name = ("w", "x", "x", "Variable")[which]
            asked[book.make(name)] = name
    fresh = Book()
    for number in book.tables.variables:
        fresh.make(asked[number])
    names = [variable.spec.name for variable in variables.every(book.state)]
    assert names == [variable.spec.name for variable in variables.every(fresh.state)]
