"""Writes in place by native code: found, named, undone; and what was preserved is not mistaken for one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from tests.worker.execution.test_kept_views import reduced
from tests.worker.execution.test_replica import Model
from tests.worker.execution.test_write_notes import slices, table
from tests.worker.stand_in import Sent, Service

import central_storage as cs
from central_storage.core.backends import ReplicaBackend
from central_storage.core.context import replica_here
from cs_proto import messages, segment_names
from cs_proto.arrays import Array, Location
from cs_proto.errors import InvalidArgumentError, VariableWrittenError
from cs_proto.records import replace
from cs_runtime.shared_memory.mapping import address_of
from cs_runtime.shared_memory.remote_segment import aligned_copy
from cs_worker.devices.device import open_device
from cs_worker.execution.catalogue import Catalogue

F32 = np.float32
NUMBER = 3.0
PAGE_ROWS = 1024  # float32 of a page


def poke(view: Any, row: int = 0) -> None:
    """Write a number as native code does that knows of no read-only memory."""
    value = np.full(1, NUMBER, view.dtype)
    ctypes.memmove(address_of(view) + row * view.itemsize, address_of(value), view.itemsize)


def backend() -> ReplicaBackend:
    found = replica_here()
    assert found is not None
    return found


def number_of(v: Any) -> int:
    return int(v._cs_handle()[1])


def look(*variables: Any) -> Callable[[], list[float]]:
    """A function that reads the first element of each."""
    return lambda: [float(np.asarray(v).ravel()[0]) for v in variables]


@pytest.fixture
def rarely(alone: Service) -> Iterator[None]:
    """All variables are large: they are looked at in every fifth run."""

    def limits(small: int, runs: int) -> None:
        from cs_worker.execution import written_pages

        written_pages._SMALL_NBYTES, written_pages._RUNS_BETWEEN = small, runs

    def settle() -> None:  # the next look is five runs away
        alone.run(limits, 1 << 24, 100)
        alone.result()

    settle()
    alone.run(limits, 0, 5)
    alone.result()
    yield
    settle()


# --- found, named, undone ---------------------------------------------------------------------------------------------


def test_a_run_that_wrote_fails_and_names_the_variable_and_the_next_one_works(alone: Service) -> None:
    optimizer, v = Model(alone, (5000,)).known()
    w = table(alone, 5000)

    def step(written: bool) -> list[float]:
        shown = np.asarray(v)
        if written:
            poke(shown, 2000)
        optimizer.apply_gradients([(np.ones(5000, F32), v)])
        return [float(shown[2000]), float(np.asarray(w)[0])]

    for _ in range(2):
        alone.run(step, True)
        with pytest.raises(VariableWrittenError) as raised:
            alone.result()
        assert isinstance(raised.value, RuntimeError)
        name = alone.variables[number_of(v)].spec.name
        assert str(raised.value).startswith(
            f"replica 0: something wrote in place to variable {name!r}, which a replica may only read. The write "
            "reached no other process and is undone; this run fails. Earlier runs are right. Write to a copy"
        )
        alone.run(step, False)
        assert alone.result() == [1.0, 0.0]
        assert alone.value(number_of(v))[2000] == 1


def test_numpy_refuses_as_ever(alone: Service) -> None:
    v = table(alone)

    def step() -> None:
        np.asarray(v)[0] = 1

    alone.run(step)
    with pytest.raises(ValueError, match="read-only"):
        alone.result()


def test_after_it_the_servers_writes_are_seen_again(alone: Service) -> None:
    v = table(alone)

    def step() -> float:
        poke(np.asarray(v))
        return float(np.asarray(v)[0])

    alone.run(step)
    with pytest.raises(VariableWrittenError):
        alone.result()
    for count in range(3):
        alone.value(number_of(v))[...] = count
        alone.run(look(v))
        assert alone.result() == [count]


def test_of_variables_that_share_a_page_the_one_with_other_bits_is_named(alone: Service) -> None:
    v, w, x = table(alone), table(alone), table(alone)
    names = [alone.variables[number_of(each)].spec.name for each in (v, w, x)]

    def step(values: list[float]) -> None:
        shown = [np.asarray(each) for each in (v, w, x)]
        for view, value in zip(shown, values, strict=True):
            if value:
                poke(view)

    alone.run(step, [0, 1, 0])
    with pytest.raises(VariableWrittenError, match=f"wrote in place to variable '{names[1]}', which"):
        alone.result()
    alone.run(step, [1, 0, 1])
    with pytest.raises(VariableWrittenError, match=f"at least one of the variables '{names[0]}', '{names[2]}', which"):
        alone.result()
    for each in (v, w, x):
        alone.value(number_of(each))[0] = NUMBER
    alone.run(step, [0, 0, 1])  # the same bits: every one of them may be it
    with pytest.raises(VariableWrittenError, match="at least one of the variables") as raised:
        alone.result()
    assert all(repr(name) in str(raised.value) for name in names)


def test_a_write_across_many_pages_and_variables(alone: Service) -> None:
    variables = [table(alone, 3 * PAGE_ROWS) for _ in range(12)]

    def step() -> None:
        shown = [np.asarray(v) for v in variables]
        for view in shown:
            ctypes.memset(address_of(view), 1, view.nbytes)

    alone.run(step)
    with pytest.raises(VariableWrittenError, match=r"('v\d+', ){7}'v\d+' and 4 more, which a replica"):
        alone.result()
    alone.run(look(*variables))
    assert alone.result() == [0.0] * 12


def test_a_function_that_raises_something_else_fails_for_the_write_and_says_both(alone: Service) -> None:
    v = table(alone)

    def step() -> None:
        poke(np.asarray(v))
        raise KeyError("mine")

    alone.run(step)
    with pytest.raises(VariableWrittenError, match="something wrote in place to variable") as raised:
        alone.result()
    assert "KeyError: 'mine'" in "\n".join(raised.value.__notes__)
    alone.run(look(v))
    assert alone.result() == [0]


def test_a_write_by_an_address_of_an_earlier_run_is_found(alone: Service) -> None:
    v = table(alone)
    alone.run(lambda: address_of(np.asarray(v)))
    address = alone.result()
    alone.run(lambda: ctypes.memset(address, 1, 8) and None)
    with pytest.raises(VariableWrittenError):
        alone.result()


def test_what_was_written_where_a_freed_variable_lay_is_not_taken_for_the_next_one(alone: Service) -> None:
    v = table(alone, 2 * PAGE_ROWS)
    alone.run(lambda: address_of(np.asarray(v)))
    address = alone.result()
    place = alone.variables.pop(number_of(v)).place
    alone.tell(0, messages.Forget((number_of(v),)))
    alone.run(lambda: ctypes.memset(address + 4 * PAGE_ROWS, 1, 8) and None)
    alone.result()  # the place belongs to nobody that this worker knows
    number = alone.add_variable(np.zeros(2 * PAGE_ROWS, F32))
    alone.variables[number] = replace(alone.variables[number], place=place)
    alone.value(number)[...] = 8
    w = Sent("variable", number)

    def least() -> float:
        return float(np.min(w))

    alone.run(least)
    with pytest.raises(VariableWrittenError):
        alone.result()
    alone.run(least)
    assert alone.result() == 8


def test_what_was_written_to_a_freed_variable_fails_the_next_run(alone: Service, rarely: None) -> None:
    v = table(alone, 2 * PAGE_ROWS)
    name = alone.variables[number_of(v)].spec.name
    alone.run(lambda: poke(np.asarray(v)))
    alone.result()
    alone.tell(0, messages.Forget((number_of(v),)))
    alone.run(lambda: None)
    with pytest.raises(VariableWrittenError, match=f"{name}.*may be wrong since run"):
        alone.result()


# --- large variables --------------------------------------------------------------------------------------------------


def test_large_variables_are_looked_at_now_and_then_and_the_error_says_since_when(alone: Service, rarely: None) -> None:
    v = table(alone, 5000)

    def step(written: bool) -> float:
        shown = np.asarray(v)
        if written:
            poke(shown, 4000)
        return float(shown[4000])

    first = alone.run(step, False)  # the second of five: that which set the limits was the first
    assert alone.result() == 0
    alone.run(step, True)
    assert alone.result() == NUMBER  # wrong, and not found yet
    alone.run(step, False)
    assert alone.result() == NUMBER
    alone.run(step, False)
    with pytest.raises(VariableWrittenError, match=r"Numbers of this replica may be wrong since run (\d+)") as raised:
        alone.result()
    assert f"since run {first[0] - 1}: go back to a checkpoint from before it" in str(raised.value)
    for _ in range(6):
        alone.run(step, False)
        assert alone.result() == 0


# --- what is preserved ------------------------------------------------------------------------------------------------


def test_what_is_preserved_is_not_mistaken_for_a_write(alone: Service) -> None:
    optimizer, v = Model(alone, (5000,)).known()
    other = table(alone, 5000)

    def step() -> list[float]:
        held = [np.asarray(v), np.asarray(other)]
        optimizer.apply_gradients([(np.ones(5000, F32), v)])
        return [float(np.asarray(v)[0]), *(float(view[0]) for view in held)]

    for count in range(3):
        before = float(alone.value(number_of(v))[0])
        run = alone.run(step)
        assert alone.asked().preserved
        alone.value(number_of(v))[...] = 5 + count
        alone.answer(0, messages.Committed(run, 1))
        assert alone.result() == [5 + count, before, 0]


@pytest.mark.parametrize("large", [False, True])
def test_a_write_to_a_page_that_is_to_be_preserved_is_found_before_it(
    alone: Service, large: bool, request: pytest.FixtureRequest
) -> None:
    if large:
        request.getfixturevalue("rarely")
    optimizer, v = Model(alone, (5000,)).known()
    other = table(alone, 5000)

    def step() -> str:
        held = np.asarray(v)
        unheld = address_of(np.asarray(other))
        poke(held, 4999)
        ctypes.memset(unheld, 1, 8)
        optimizer.apply_gradients([(np.ones(5000, F32), v)])
        try:
            np.asarray(v)
        except VariableWrittenError as error:
            assert held[4999] == 1  # it shows the server's values again
            return str(error)
        return "nothing was found"

    alone.run(step)
    # Nothing was asked for, so nothing was committed. The run fails although the function handles the error.
    with pytest.raises(VariableWrittenError, match="at least one of the variables"):
        alone.result()
    alone.run(look(v, other))
    assert alone.result() == [1, 0]


def test_a_write_is_found_before_a_commit_also_where_nothing_is_held(alone: Service) -> None:
    optimizer, v = Model(alone, (5000,)).known()

    def step() -> float:
        poke(np.asarray(v), 7)
        optimizer.apply_gradients([(np.ones(5000, F32), v)])
        return float(np.asarray(v)[0])

    alone.run(step)
    with pytest.raises(VariableWrittenError):
        alone.result()


def test_a_replica_that_is_asked_to_preserve_finds_it_and_goes_no_further(pair: Service) -> None:
    v = table(pair)

    def step() -> None:
        held = np.asarray(v)
        if cs.get_replica_context().replica_id_in_sync_group == 0:
            poke(held)
        for _ in range(2):
            with suppress(VariableWrittenError):
                cs.get_replica_context().all_reduce("SUM", np.ones(1))

    run = pair.run(step)
    assert not pair.asked(0).preserved
    pair.answer(0, messages.Preserve(run, 0))
    with pytest.raises(VariableWrittenError, match="replica 0: something wrote"):
        pair.result(0)
    pair.asked(1)
    pair.answer(1, reduced(run))
    pair.asked(1)
    pair.answer(1, reduced(run, 1))
    assert pair.result(1) is None


def test_what_was_mapped_before_the_segment_was_extended_is_looked_at_too(alone: Service) -> None:
    name = segment_names.parameters("int64")  # which no other test maps
    alone.reserved[name] = 4096
    v = Sent("variable", alone.add_variable(np.ones(4, np.int64)))
    alone.run(look(v))
    assert alone.result() == [1]
    del alone.reserved[name]
    w = Sent("variable", alone.add_variable(np.zeros(5000, np.int64)))  # ends beyond the first 4096 bytes

    def step() -> None:
        np.asarray(w)
        poke(np.asarray(v))

    alone.run(step)
    with pytest.raises(VariableWrittenError, match=alone.variables[number_of(v)].spec.name):
        alone.result()
    alone.run(look(v, w))
    assert alone.result() == [1, 0]


# --- for the packages of frameworks -----------------------------------------------------------------------------------


def test_a_backend_restores_the_variables_it_is_told(alone: Service) -> None:
    v, w = table(alone, 2 * PAGE_ROWS), table(alone, 4 * PAGE_ROWS)
    number = number_of(v)

    def step() -> list[float]:
        shown = np.asarray(v), np.asarray(w)
        poke(shown[0])
        before = float(shown[0][0])
        backend().restore([number])
        return [before, float(shown[0][0]), float(shown[1][0])]

    alone.run(step)
    assert alone.result() == [NUMBER, 0, 0]  # nothing is left to be found


def test_a_backend_restores_what_a_noted_write_shows(alone: Service) -> None:
    v = table(alone)
    number = number_of(v)

    def step() -> list[list[float]]:
        v.scatter_add(slices(1, 0))
        shown = np.asarray(v)
        poke(shown, 2)
        wrong = shown.tolist()
        backend().restore([number])
        restored = shown.tolist()
        v.scatter_add(slices(1, 0))
        return [wrong, restored, shown.tolist(), np.asarray(v).tolist()]

    alone.run(step)
    assert alone.result() == [[1, 0, NUMBER], [1, 0, 0], [1, 0, 0], [2, 0, 0]]


def test_a_copy_of_what_cannot_be_mapped_is_restored() -> None:
    class Carrying:
        """A connection by which the bytes of segments travel in frames."""

        def segment_of(self, array: Array) -> Any:
            return self

        def view(self, array: Array) -> np.ndarray:
            return np.arange(4, dtype=F32)

    catalogue = Catalogue(None, Carrying(), 0, open_device("cpu:0"), "cpu:0")  # type: ignore[arg-type]
    spec = messages.VariableSpec("w", "float32", (4,), True, 0, 0, False)
    catalogue.learn(messages.Variable(1, spec, Location("parameters/float32", 64), 0))
    shown = catalogue.copies.made[1] = aligned_copy(np.arange(4, dtype=F32))
    shown.flags.writeable = False
    poke(shown, 2)
    catalogue.restore([1, 7])
    assert shown.tolist() == [0, 1, 2, 3]
    assert not shown.flags.writeable


@pytest.mark.parametrize("handled", [False, True])
def test_a_backend_refuses_a_write_by_the_name_and_the_line(alone: Service, handled: bool) -> None:
    v, w = table(alone), table(alone)
    numbers = [number_of(v), number_of(w)]
    names = [alone.variables[number].spec.name for number in numbers]

    def step() -> None:
        poke(np.asarray(v))
        try:
            backend().refuse_written({numbers[0]: "model.py:12", numbers[1]: ""})
        except VariableWrittenError:
            assert np.asarray(v)[0] == 0
            if not handled:
                raise

    alone.run(step)
    with pytest.raises(VariableWrittenError) as raised:
        alone.result()
    assert f"at least one of the variables '{names[0]}' (model.py:12), '{names[1]}', which" in str(raised.value)
    assert "Earlier runs are right." in str(raised.value)
    alone.run(look(v))
    assert alone.result() == [0]


def test_a_backend_refuses_what_is_no_variable(alone: Service) -> None:
    alone.run(lambda: backend().refuse_written({10_000: ""}))
    with pytest.raises(InvalidArgumentError):
        alone.result()


@pytest.mark.parametrize("when", ["before it is read", "after"])
def test_a_protected_variable_cannot_be_written_nor_can_its_next_mapping(alone: Service, when: str) -> None:
    optimizer, v = Model(alone, (5000,)).known()
    w = table(alone, 5000)
    number = number_of(v)

    def rights(view: np.ndarray) -> str:
        with open("/proc/self/maps") as maps:
            for line in maps:
                start, stop = (int(end, 16) for end in line.split()[0].split("-"))
                if start <= address_of(view) + 8192 < stop:
                    return line.split()[1]
        raise AssertionError

    def step() -> list[str]:
        held = np.asarray(v) if when == "after" else None
        backend().protect([number])
        held = np.asarray(v) if held is None else held
        optimizer.apply_gradients([(np.ones(5000, F32), v)])
        return [rights(held), rights(np.asarray(v)), rights(np.asarray(w))]

    run = alone.run(step)
    alone.asked()
    alone.answer(0, messages.Committed(run, 1))
    assert alone.result() == ["r--p", "r--p", "rw-p"]


# --- arguments --------------------------------------------------------------------------------------------------------


def again(service: Service, record: messages.Run) -> Any:
    """The result of one more run with the same arguments in the same place."""
    service._runs += 1
    service._latest = (service._runs,)
    service.tell(0, replace(record, run=service._latest))
    return service.result()


@pytest.mark.parametrize("rows", [10, 100_000])
def test_an_argument_may_be_written_and_each_run_sees_the_original(alone: Service, rows: int) -> None:
    def step(x: np.ndarray) -> list[Any]:
        before = float(x[-1])
        poke(x, rows - 1)
        return [before, float(x[-1]), x[-3:]]  # a small view is sent as it was written

    record = alone.run_record((1,), 0, step, (np.zeros(rows),))
    for _ in range(3):
        before, after, view = again(alone, record)
        assert (before, after, view.tolist()) == (0, NUMBER, [0, 0, NUMBER])


def test_an_argument_that_was_kept_and_is_written_later_hides_nothing(alone: Service) -> None:
    rows = 100_000
    kept = alone.run_record((1,), 0, lambda x: address_of(x), (np.zeros(rows),))
    address = again(alone, kept)
    other = alone.run_record((1,), 0, lambda x: ctypes.memset(address + 8192, 1, 8) and None, (np.ones(rows),))
    again(alone, other)
    (buffer,) = kept.buffers
    alone.mapping(segment_names.controller_arena()).view(buffer)[...] = 0  # the next batch, in the place of the first
    look_at = alone.run_record((1,), 0, lambda x: float(np.abs(x).max()), (np.zeros(rows),))
    assert again(alone, replace(look_at, buffers=(buffer,))) == 0


def test_private_memory_does_not_grow(alone: Service) -> None:
    v = table(alone, 100 * PAGE_ROWS)

    def step(x: np.ndarray, deed: bool) -> int:
        """The bytes of segments that are copies of this process."""
        if deed:
            for view in (np.asarray(v), x):
                ctypes.memset(address_of(view), 1, view.nbytes)
        private, is_segment = 0, False
        with open("/proc/self/smaps") as maps:
            for line in maps:
                if "-" in line.split()[0]:
                    is_segment = "/segments/" in line
                elif is_segment and line.startswith("Anonymous:"):
                    private += int(line.split()[1]) << 10
        return private

    for count in range(3):
        record = alone.run_record((1,), 0, step, (np.zeros(100_000), True))
        with pytest.raises(VariableWrittenError):
            again(alone, record)
        alone.run(step, np.zeros(1), False)
        assert alone.result() == 0, count


# --- where pages cannot be looked at ----------------------------------------------------------------------------------


def test_where_pages_cannot_be_looked_at_any_more_it_says_so_once_and_gives_all_back(alone: Service) -> None:
    v = table(alone, 2 * PAGE_ROWS)

    def blind() -> None:
        import gc

        from cs_worker.execution.written_pages import WrittenPages

        def refuse(start: int, stop: int) -> None:
            raise PermissionError(13, "Permission denied")

        (found,) = [each for each in gc.get_objects() if type(each) is WrittenPages]
        found._pagemap.own_pages = refuse

    said = "writes in place to variables are not found here"
    before = alone.log(0).count(said)
    alone.run(blind)
    alone.result()

    def step(x: np.ndarray) -> list[float]:
        poke(np.asarray(v))
        seen = float(x[0])
        poke(x)
        return [float(np.asarray(v)[0]), seen]

    record = alone.run_record((1,), 0, step, (np.zeros(100_000),))
    for _ in range(3):
        assert again(alone, record) == [NUMBER, 0]
        alone.run(lambda: float(np.asarray(v)[0]))
        assert alone.result() == 0
    assert alone.log(0).count(said) == before + 1
