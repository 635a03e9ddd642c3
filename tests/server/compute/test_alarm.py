"""The alarm of a commit: it is set if a sum of gradients is not finite, whatever carries out the commit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.server.compute.test_executor import SGD, Bytes

from cs_server.compute import plans
from cs_server.compute.executor import Executor
from cs_server.compute.programs import Program
from cs_server.compute.undo import UNDO_NBYTES
from cs_server.events import Apply, Commit, Dense, Update

# Two ranges with a gap between them, and many pieces of the kernels.
SIZE, RANGES = 5000, ((3, 2100), (2200, 4990))
GAP, INSIDE = 2150, 4321


class World:
    """Two replicas' gradients of ones, and an executor of SGD."""

    def __init__(self, dtype: str, threads: int, has_undo: bool) -> None:
        names = ("w", "momentum", "g0", "g1")
        self.memory = Bytes(**{name: np.ones(SIZE, dtype) for name in names})
        self.executor = Executor(self.memory, threads, undo=np.zeros(UNDO_NBYTES, np.uint8) if has_undo else None)
        self.part = Dense(dtype, RANGES, "w", ("momentum",), ("g0", "g1"))
        self.tickets = 0

    def gradient(self, replica: int) -> np.ndarray:
        return self.memory.segments[f"g{replica}"]

    def apply(self, weights: tuple[float, ...] = (), **given: float) -> Apply:
        return Apply((Update("sgd_momentum", (*SGD, *given.items()), 1, (self.part,)),), (), weights)

    def commit(self, apply: Apply, *, by_program: bool = False) -> bool:
        """Whether the alarm is set afterwards; then it is reset."""
        self.tickets += 1
        if by_program:
            prepared = self.executor.prepare((apply,))
            assert prepared is not None
            assert prepared.alarm_address == self.executor.alarm.ctypes.data
            prepared.set_ticket(self.tickets)
            assert Program(prepared.instructions, [prepared]).run()
        else:
            self.executor.commit(Commit(self.tickets, (apply,)))
        is_set = bool(self.executor.alarm[0])
        self.executor.alarm[0] = 0
        return is_set


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(plans, "_ELEMENTS_PER_THREAD", 1)
    found: int = request.param
    return found


@pytest.fixture(params=["kernel", "program", "no undo", "reference", "complex"])
def way(request: pytest.FixtureRequest, threads: int) -> Iterator[Any]:
    """A world, and whether a program carries out its commits."""
    name = request.param
    dtype = {"reference": "float16", "complex": "complex64"}.get(name, "float32")
    world = World(dtype, threads, name != "no undo")
    yield world, name == "program"
    world.executor.close()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("weights", [(), (0.5, 2.0)])
def test_a_bad_number_of_any_replica_sets_it(way: Any, value: float, weights: tuple[float, ...]) -> None:
    world, by_program = way
    assert not world.commit(world.apply(weights), by_program=by_program)
    for replica in range(2):
        world.gradient(replica)[INSIDE] = value
        assert world.commit(world.apply(weights), by_program=by_program)
        world.gradient(replica)[INSIDE] = 1
        assert not world.commit(world.apply(weights), by_program=by_program)


def test_what_is_not_updated_does_not_count(way: Any) -> None:
    world, by_program = way
    world.gradient(0)[[0, GAP, SIZE - 1]] = np.nan
    assert not world.commit(world.apply(), by_program=by_program)
    world.gradient(1)[:] = np.inf
    assert not world.commit(world.apply((1.0, 0.0)), by_program=by_program)


@pytest.mark.parametrize("by_program", [False, True])
def test_a_sum_of_finite_numbers_that_overflows_sets_it(threads: int, by_program: bool) -> None:
    world = World("float32", threads, True)
    for replica in range(2):
        world.gradient(replica)[INSIDE] = 3e38
    assert world.commit(world.apply(), by_program=by_program)
    assert not world.commit(world.apply((0.25, 0.25)), by_program=by_program)
    world.executor.close()


@pytest.mark.parametrize("by_program", [False, True])
def test_a_bound_on_elements_hides_nothing(threads: int, by_program: bool) -> None:
    world = World("float32", threads, True)
    world.gradient(0)[INSIDE] = np.inf
    assert world.commit(world.apply(clipvalue=0.5), by_program=by_program)
    assert np.isfinite(world.memory.segments["w"]).all()
    world.gradient(0)[INSIDE] = 1e30
    assert not world.commit(world.apply(clipvalue=0.5), by_program=by_program)
    world.executor.close()


@pytest.mark.parametrize("bounds", [{"clipvalue": 0.5}, {"clipnorm": 1.0}])
def test_halves_that_overflow_before_they_are_bounded_set_it(threads: int, bounds: dict[str, float]) -> None:
    world = World("float16", threads, True)
    for replica in range(2):
        world.gradient(replica)[INSIDE] = 4e4
    assert world.commit(world.apply(**bounds))
    assert not world.commit(world.apply())  # they are added up in single precision
    world.executor.close()


@pytest.mark.parametrize("bounds", [{}, {"clipvalue": 0.5}, {"clipnorm": 1.0}])
def test_many_finite_halves_do_not_set_it(threads: int, bounds: dict[str, float]) -> None:
    world = World("float16", threads, True)
    for replica in range(2):
        world.gradient(replica)[:] = 1000
    assert not world.commit(world.apply(**bounds))
    world.executor.close()


def test_the_next_server_finds_it_set() -> None:
    """Of a commit that this one has ended, or has left."""
    memory, undo = World("float32", 1, True), np.zeros(UNDO_NBYTES, np.uint8)
    memory.gradient(1)[INSIDE] = np.nan
    first = Executor(memory.memory, 1, undo=undo)
    first.commit(Commit(1, (memory.apply(),)))
    first.close()
    second = Executor(memory.memory, 1, undo=undo)
    memory.gradient(1)[INSIDE] = 1
    second.commit(Commit(1, (memory.apply(),)))
    assert second.alarm[0] == 1
    second.close()
    memory.executor.close()
