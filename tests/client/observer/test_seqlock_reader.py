"""What an observer copies is of one commit, or not taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from central_storage.observer.seqlock_reader import SeqlockReader
from cs_proto.arrays import Array, Location
from cs_proto.messages import Variable, VariableSpec
from cs_runtime.shared_memory.mapping import Mapping

NAMES = ["a", "b"]


class Memory:
    """A segment of two variables; before one is copied, what is next in ``meanwhile`` happens."""

    def __init__(self) -> None:
        self.counters = np.array([4, 2], np.uint64)
        self.values = {0: np.array([1.0]), 8: np.array([1.0])}
        self.meanwhile: list[Callable[[], None]] = []

    def view(self, array: Array) -> np.ndarray:
        if self.meanwhile:
            self.meanwhile.pop(0)()
        assert isinstance(array.place, Location)
        return self.values[array.place.offset]

    def commits(self) -> None:
        self.counters[0] += 2
        for value in self.values.values():
            value += 1

    def begins(self) -> None:
        self.counters[0] += 1
        self.values[0] += 1


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def sight(memory: Memory) -> SeqlockReader:
    def lies_in(array: Array) -> Mapping:
        assert isinstance(array.place, Location)
        assert array.place.segment == "parameters/float64"
        return cast("Mapping", memory)

    seen = SeqlockReader(memory.counters, lies_in)
    assert not seen.knows(NAMES)
    seen.learn(seen.layout, [variable(number, name) for number, name in enumerate(NAMES)])
    assert seen.knows(NAMES)
    return seen


def variable(number: int, name: str) -> Variable:
    spec = VariableSpec(name, "float64", (1,), True, 0, 0)
    return Variable(number + 1, spec, Location("parameters/float64", 8 * number), 0)


def nothing() -> None:
    pass


def values(seen: Any) -> list[float] | None:
    return None if seen is None else [float(value[0]) for value in seen]


def test_what_nobody_changes_is_copied(memory: Memory, sight: SeqlockReader) -> None:
    seen = sight.read(NAMES)
    memory.commits()
    assert values(seen) == [1.0, 1.0]
    assert values(sight.read(["b"])) == [2.0]


def test_what_a_commit_disturbs_is_read_once_more(memory: Memory, sight: SeqlockReader) -> None:
    memory.meanwhile = [nothing, memory.commits]
    assert values(sight.read(NAMES)) == [2.0, 2.0]
    memory.meanwhile = [nothing, memory.commits, nothing, memory.commits]
    assert sight.read(NAMES) is None


def test_nothing_is_taken_in_the_midst_of_a_commit(memory: Memory, sight: SeqlockReader) -> None:
    memory.meanwhile = [nothing, memory.begins]
    assert sight.read(NAMES) is None
    assert sight.read(["b"]) is None


def test_a_place_that_may_be_another_variables_is_asked_for_again(memory: Memory, sight: SeqlockReader) -> None:
    def frees() -> None:
        memory.counters[1] += 1

    memory.meanwhile = [nothing, frees]
    assert sight.read(NAMES) is None
    assert not sight.knows(NAMES)
    assert sight.read(NAMES) is None
    sight.learn(sight.layout, [variable(0, "b")])
    assert sight.knows(["b"])
    assert not sight.knows(NAMES)
    assert values(sight.read(["b"])) == [1.0]
