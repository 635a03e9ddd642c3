"""The names of moving averages and accumulators, and the variables that nobody needs any more."""

from __future__ import annotations

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
