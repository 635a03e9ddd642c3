"""An error about a write to a read-only array names the remedy, wherever a function of the user raised it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.harness.services import connected

import central_storage as cs
from central_storage.diagnostics.remedies import READ_ONLY, explain


@pytest.fixture(scope="module")
def strategy() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as made:
        yield connected(made)


def add(x: Any) -> None:
    x += 1


def put(x: Any) -> None:
    x[0] = 1


WRITES: list[Callable[[Any], Any]] = [add, put, lambda x: x.sort(), lambda x: x.setflags(write=True)]


@pytest.mark.parametrize("write", WRITES)
def test_in_a_replica(strategy: cs.CentralStorageStrategy, write: Callable[[Any], Any]) -> None:
    with strategy.scope():
        w = cs.Variable([2.0, 1.0])
    rows = np.float32([2, 1])
    for call in (lambda: strategy.run(write, (rows,)), lambda: strategy.run(lambda: write(np.asarray(w)))):
        with pytest.raises(ValueError, match=r"read-only|WRITEABLE") as caught:
            call()
        assert READ_ONLY in "".join(traceback.format_exception(caught.value))


def test_in_functions_of_a_data_set_and_in_the_default_strategy() -> None:
    data = cs.data.Dataset.from_tensor_slices(np.ones((4, 2), np.float32))
    element = next(iter(data.batch(2)))
    for call in (
        lambda: list(data.map(add)),
        lambda: list(data.filter(add)),
        lambda: cs.get_strategy().run(put, (element,)),
    ):
        with pytest.raises(ValueError, match="read-only") as caught:
            call()
        assert caught.value.__notes__ == [READ_ONLY]


def test_other_errors_are_left_alone_and_one_note_is_enough() -> None:
    for error in (ValueError("shapes differ"), OSError("read-only file system"), RuntimeError("read-only")):
        explain(error)
        assert not hasattr(error, "__notes__")
    twice = ValueError("output array is read-only")
    explain(twice)
    explain(twice)
    assert twice.__notes__ == [READ_ONLY]
