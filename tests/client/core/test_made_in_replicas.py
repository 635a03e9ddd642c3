"""The names of moving averages and accumulators, and the variables that nobody needs any more."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

import central_storage as cs
from central_storage.core.made_in_replicas import MadeInReplicas


def _nothing(kind: str, name: Any) -> None:
    pass


@pytest.mark.parametrize("asked", [("average", "average_1"), ("average_1", "average"), ("average", "average")])
def test_averages_whose_variables_could_be_confused_get_other_names(asked: tuple[str, str]) -> None:
    made, averages = MadeInReplicas(_nothing), [cs.train.ExponentialMovingAverage(0.5, name=name) for name in asked]
    for average, name in zip(averages, asked, strict=True):
        made.claim(average, name)
    made.settle()
    assert [average.name for average in averages] == [asked[0], f"{asked[1]}.1"]


def test_accumulators_with_numbered_names_keep_them() -> None:
    made, names = MadeInReplicas(_nothing), ["sums", "sums_1"]
    accumulators = [cs.optimizers.GradientAccumulator(name) for name in names]
    for accumulator, name in zip(accumulators, names, strict=True):
        made.claim(accumulator, name)
    made.settle()
    assert [accumulator.name for accumulator in accumulators] == names


class _Interleaved:
    """An owner that lets another thread do ``what`` while its first name is compared, for as long as that can go on."""

    def __init__(self, what: Any) -> None:
        self.name = ""
        self._other = threading.Thread(target=what)

    def names_of_variables(self, name: str) -> re.Pattern[str]:
        if self._other.ident is None:
            self._other.start()
            self._other.join(0.3)  # in vain if it has to wait for this thread
        return re.compile(name)

    def rename(self, name: str) -> None:
        self.name = name

    def join(self) -> None:
        self._other.join()


def test_two_threads_that_give_names_give_no_name_twice() -> None:
    made = MadeInReplicas(_nothing)
    first, second = _Interleaved(made.settle), cs.train.ExponentialMovingAverage(0.5, name="average")
    made.claim(first, "average")
    made.claim(second, "average")
    made.settle()
    first.join()
    assert (first.name, second.name) == ("average", "average.1")


def test_no_thread_hears_that_all_have_names_before_they_have() -> None:
    made, seen = MadeInReplicas(_nothing), list[tuple[bool, str]]()
    owner = _Interleaved(lambda: seen.append((made.is_settled, owner.name)))
    made.claim(owner, "average")
    made.settle()
    owner.join()
    assert seen == [(True, "average")]


def test_two_threads_that_give_names_to_one_do_not_fail() -> None:
    made, claimed = MadeInReplicas(_nothing), threading.Event()

    class Unnamed(list):  # type: ignore[type-arg]
        """Lets another thread take the only one before this one does."""

        def __bool__(self) -> bool:
            is_there = len(self) > 0
            if is_there and not claimed.is_set():
                claimed.set()
                other.start()
                other.join(0.3)  # in vain if it has to wait for this one
            return is_there

    other = threading.Thread(target=made.settle)
    made._unnamed = Unnamed()
    average = cs.train.ExponentialMovingAverage(0.5)
    made.claim(average, "average")
    made.settle()
    other.join()
    assert made.owners(cs.train.ExponentialMovingAverage) == {"average": average}
