"""What the server says, and counts, of gradients whose sum is not finite."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from tests.server.compute.test_executor import Bytes

from cs_proto.arrays import Array, Location, array_of
from cs_proto.messages import Counters, ReplicaStatistics, Return, Value, Variable, VariableSpec
from cs_proto.records import replace
from cs_server.events import Apply, Commit, Dense, Rows, Update
from cs_server.numerics import Numerics

SHAPES: dict[int, tuple[int, ...]] = {1: (2, 3), 2: (), 3: (4,)}
FIRST = {1: 0, 2: 8, 3: 16}


class World:
    """Three variables in a slab, and two replicas' gradients of ones."""

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype = dtype
        self.memory = Bytes(g0=np.ones(24, dtype), g1=np.ones(24, dtype))
        self.numerics = Numerics(self.memory, self.variable)
        self.hear(7, 5)

    def variable(self, number: int) -> Variable:
        itemsize = np.dtype(self.dtype).itemsize
        spec = VariableSpec(f"v{number}", self.dtype, SHAPES[number], True, 0, 0)
        return Variable(number, spec, Location("w", FIRST[number] * itemsize), 0)

    def hear(self, run: int, step: int, name: str = "train.step") -> None:
        self.numerics.heard(
            Return((run,), 0, 1, (), 0, Value(b"", ()), None, name=name, offset=step - run if name else 0)
        )

    def look(
        self,
        weights: tuple[float, ...] = (),
        step: tuple[str, int] | None = None,
        watched: str = "train.py:9",
        **changes: Any,
    ) -> list[Any]:
        """Look at a commit of all, and return the counts: of commits, of overflows, by replica."""
        part = changes.get("part") or Dense(self.dtype, ((0, 9), (16, 20)), "w", (), ("g0", "g1"))
        update = Update("sgd", (("learning_rate", 1.0), *changes.get("given", ())), 1, (part,))
        self.numerics.look(Commit(1, (Apply((update,), (1, 2, 3), weights, watched=watched),)), step)
        empty = tuple(ReplicaStatistics(replica, 1, "cpu:0", 0, 0, 0) for replica in range(2))
        found = self.numerics.counted(Counters(1, 1, 1.0, 0, 0, 0, 0, 0, 0, empty))
        return [found.not_finite, found.overflowed, *[each.not_finite for each in found.replicas]]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, "cs_server.numerics")

    def taken() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return lines

    return taken


def test_the_first_number_of_each_replica_is_named(said: Any) -> None:
    world = World()
    world.memory.segments["g0"][[5, 16]] = np.nan
    world.memory.segments["g1"][8] = -np.inf
    assert world.look() == [1, 0, 1, 1]
    assert said() == [
        "the gradient of 'v1' has nan at [1, 2], in step 5 of train.step on replica 0 (train.py:9); so are those of 1 "
        "more variables; the update is not held back",
        "the gradient of 'v2' has -inf, in step 5 of train.step on replica 1 (train.py:9); the update is not held back",
    ]


def test_a_table_at_the_offset_of_a_bad_gradient_is_not_named(said: Any) -> None:
    world = World()
    own = world.variable

    def variable(number: int) -> Variable:
        found = own(number)
        return found if number != 1 else replace(found, place=Location("tables", 0))

    world.numerics = Numerics(world.memory, variable)
    world.hear(7, 5)
    world.memory.segments["g0"][0] = world.memory.segments["g0"][8] = np.nan
    assert world.look() == [1, 0, 1, 0]
    assert said() == [
        "the gradient of 'v2' has nan, in step 5 of train.step on replica 0 (train.py:9); the update is not held back"
    ]


def test_rows_count_in_place_of_a_gradient_that_lies_in_a_buffer(said: Any) -> None:
    world = World()
    world.memory.segments["g0"][:] = np.nan
    rows = array_of(np.float32([[1, np.inf, 1]])), array_of(np.array([1]))
    part = Dense("float32", ((0, 6),), "w", (), ("g0", "g1"), rows=(rows, None))
    assert world.look(part=part) == [1, 0, 1, 0]
    assert said() == [
        "the gradient of 'v1' has inf at [1, 1], in step 5 of train.step on replica 0 (train.py:9); the update is not "
        "held back"
    ]


def test_a_step_by_a_program_has_its_own_name(said: Any) -> None:
    world = World()
    world.memory.segments["g0"][0] = np.nan
    world.look(step=("other.step", 17))
    assert "in step 17 of other.step on replica 0" in said()[0]


def test_lines_come_at_powers_of_ten(said: Any) -> None:
    world = World()
    world.memory.segments["g1"][3] = np.inf
    counts = [world.look() for _ in range(100)]
    assert counts[-1] == [100, 0, 0, 100]
    lines = said()
    assert len(lines) == 3
    assert "; so it was 10 times; the update" in lines[1]
    assert "; so it was 100 times; the update" in lines[2]


def test_a_sum_that_overflows_is_told_from_a_bad_gradient(said: Any) -> None:
    world = World()
    for name in ("g0", "g1"):
        world.memory.segments[name][17] = -3e38
    assert world.look() == [1, 1, 0, 0]
    assert said() == [
        "the sum of the gradients of 'v3' overflows: it has -inf at [1], and each is finite, in step 5 of train.step "
        "(train.py:9); the update is not held back"
    ]
    assert world.look(weights=(0.5, 0.5)) == [2, 1, 0, 0]
    world.memory.segments["g0"][17] = np.inf
    assert world.look() == [3, 1, 1, 0]


def test_halves_overflow_only_where_they_are_bounded(said: Any) -> None:
    world = World("float16")
    for name in ("g0", "g1"):
        world.memory.segments[name][2] = 4e4
    assert world.look() == [1, 0, 0, 0]
    assert said() == []
    assert world.look(given=(("clipnorm", 1.0),)) == [2, 1, 0, 0]
    assert "the sum of the gradients of 'v1' overflows: it has inf at [0, 2]" in said()[0]


def test_what_is_not_watched_is_only_counted(said: Any) -> None:
    world = World()
    world.memory.segments["g0"][0] = np.nan
    assert world.look(watched="") == [1, 0, 0, 0]
    assert said() == []


def test_a_replica_without_weight_and_what_lies_between_do_not_count(said: Any) -> None:
    world = World()
    world.memory.segments["g1"][0] = world.memory.segments["g0"][12] = np.nan
    assert world.look(weights=(1.0, 0.0)) == [1, 0, 0, 0]
    assert said() == []


def test_a_step_that_nobody_has_named_is_left_out(said: Any) -> None:
    world = World()
    world.numerics = Numerics(world.memory, world.variable)
    world.hear(7, 5, name="")
    world.memory.segments["g0"][0] = np.nan
    world.look()
    assert said() == ["the gradient of 'v1' has nan at [0, 0] on replica 0 (train.py:9); the update is not held back"]


def test_rows_are_left_to_the_workers(said: Any) -> None:
    world = World()
    world.memory.segments["g0"][0] = np.nan
    gone = Array("float32", (2, 3), Location("gone", 0)), Array("int64", (2,), Location("gone", 64))
    rows = Rows("float32", 0, (2, 3), "w", (), (gone, gone))  # in a commit by a program they lie elsewhere by now
    update = Update("sgd", (("learning_rate", 1.0),), 1, (), (rows,))
    world.numerics.look(Commit(1, (Apply((update,), (1,), watched="train.py:9"),)))
    assert said() == []
