"""Handles: one object per id, and no pickler but ours."""

import copy
import gc
import pickle
from collections.abc import Callable

import cloudpickle
import pytest

from central_storage.core.handles import Handle, HandleTable, handle_id
from cs_proto.errors import PeerProtocolError


class Weight(Handle):
    def __init__(self, number: int) -> None:
        self.number = number

    def _cs_handle(self) -> tuple[str, int]:
        return ("variable", self.number)


def test_an_id_is_kind_and_number() -> None:
    assert handle_id(Weight(7)) == ("variable", 7)


@pytest.mark.parametrize("copier", [pickle.dumps, cloudpickle.dumps, copy.copy, copy.deepcopy])
def test_nobody_else_takes_a_handle_along(copier: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match=r"this Weight refers to state .* functions and arguments that strategy.run"):
        copier(Weight(1))
    with pytest.raises(TypeError, match="refers to state in its service"):
        copier([{"a": Weight(1)}]) if copier is not copy.copy else copier(Weight(1))


def test_a_table_makes_an_object_once_for_as_long_as_it_is_held() -> None:
    made = []

    def make(number: int) -> Weight:
        made.append(number)
        return Weight(number)

    table = HandleTable({"variable": make})
    assert table.get("variable", 3) is None
    first = table.resolve("variable", 3)
    assert table.resolve("variable", 3) is first is table.get("variable", 3)
    assert table.resolve("variable", 4) is not first
    del first
    gc.collect()
    assert table.get("variable", 3) is None
    table.resolve("variable", 3)
    assert made == [3, 4, 3]


def test_an_object_that_was_added_is_the_one() -> None:
    table = HandleTable({"variable": Weight})
    weight = Weight(5)
    table.add(weight)
    assert table.resolve("variable", 5) is weight


def test_a_factory_may_add_the_object_itself() -> None:
    def make(number: int) -> Weight:
        table.add(weight := Weight(number))
        return weight

    table = HandleTable({"variable": make})
    weight = table.resolve("variable", 1)
    assert table.get("variable", 1) is weight


def test_an_unknown_kind_is_the_peers_fault() -> None:
    with pytest.raises(PeerProtocolError, match="'spaceship'"):
        HandleTable().resolve("spaceship", 1)


def test_a_handle_without_an_id_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Handle"):
        handle_id(Handle())
