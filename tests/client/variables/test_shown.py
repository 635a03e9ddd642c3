"""What a notebook shows of variables, strategies and data sets."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import central_storage as cs


@pytest.fixture(scope="module")
def strategy() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        yield strategy


def shown(thing: Any) -> tuple[str, dict[str, str], list[float]]:
    """The title, the rows of the table, and the heights of the bars."""
    page = ElementTree.fromstring(thing._repr_html_())
    rows = [[cell.text or "" for cell in row.iter("td")] for row in page.iter("tr")]
    title = page.find("b")
    assert title is not None
    return (
        title.text or "",
        dict(row for row in rows if len(row) == 2),
        [  # type: ignore[misc]
            float(bar.get("height", "")) for bar in page.iter("rect")
        ],
    )


def variable(strategy: cs.CentralStorageStrategy, value: Any, name: str = "w") -> cs.Variable:
    with strategy.scope():
        return cs.Variable(value, name=name)


def test_a_variable_shows_its_range_and_a_histogram(strategy: cs.CentralStorageStrategy) -> None:
    w = variable(strategy, np.float32([[0, 1], [1, 3]]), "<i>w</i>")
    before = repr(w)
    title, rows, bars = shown(w)
    assert title == "cs.Variable <i>w</i>"
    assert rows["shape"] == "(2, 2)"
    assert rows["dtype"] == "float32, 16 bytes"
    assert rows["device"].endswith("CPU:0")
    assert rows["range"] == "0 to 3, mean 1.25"
    assert (len(bars), bars[0], bars[-1], max(bars)) == (40, 24.0, 24.0, 48.0)
    assert repr(w) == before


def test_values_that_are_not_finite_are_counted(strategy: cs.CentralStorageStrategy) -> None:
    _, rows, bars = shown(variable(strategy, np.float64([1, np.nan, np.inf, -np.inf, 2])))
    assert (rows["not finite"], rows["range"]) == ("3", "1 to 2, mean 1.5")
    assert sum(height > 0 for height in bars) == 2
    _, rows, bars = shown(variable(strategy, np.full(3, np.nan, np.float32)))
    assert (rows["not finite"], "range" in rows, bars) == ("3", False, [])


@pytest.mark.parametrize(
    ("value", "row", "said"),
    [
        (np.array([True, False]), "range", "0 to 1, mean 0.5"),
        (np.array([3 + 4j]), "magnitude", "5 to 5, mean 5"),
        (np.int8([-128, 127]), "range", "-128 to 127, mean -0.5"),
        (np.float64([-1.7e308, 1.7e308]), "range", "-1.7e+308 to 1.7e+308, mean 0"),
        (np.float16([60000] * 4), "range", "60000 to 60000, mean 60000"),
        (np.uint64([2**64 - 1]), "range", "1.84467e+19 to 1.84467e+19, mean 1.84467e+19"),
    ],
)
def test_every_dtype_is_shown(strategy: cs.CentralStorageStrategy, value: np.ndarray, row: str, said: str) -> None:
    _, rows, bars = shown(variable(strategy, value))
    assert rows[row] == said
    assert max(bars) == 48.0


def test_one_without_values_and_one_without_axes(strategy: cs.CentralStorageStrategy) -> None:
    assert shown(variable(strategy, np.zeros((0, 3), np.float32)))[1]["shape"] == "(0, 3)"
    assert shown(variable(strategy, np.float32(2)))[1]["range"] == "2 to 2, mean 2"
    assert shown(cs.Variable([1.0, 2.0]))[1]["range"] == "1 to 2, mean 1.5"  # of no strategy


def test_of_a_large_one_a_sample_is_shown_and_said(strategy: cs.CentralStorageStrategy) -> None:
    _, rows, _ = shown(variable(strategy, np.arange(250_000, dtype=np.float32).reshape(500, 500)))
    [(name, said)] = [item for item in rows.items() if item[0].startswith("range")]
    assert name == "range of 83334 of 250000 values"
    assert said.startswith("0 to 249999, ")


def test_a_run_under_way_is_not_waited_for(strategy: cs.CentralStorageStrategy) -> None:
    w = variable(strategy, np.zeros(3))
    begun, goes_on = threading.Event(), threading.Event()

    def operates() -> None:
        with strategy.controller.exclusively():
            begun.set()
            goes_on.wait()

    running = threading.Thread(target=operates)
    running.start()
    begun.wait()
    try:
        _, rows, bars = shown(w)
        assert "a run is under way" in rows["values"]
        assert bars == []
        assert "worker 1" in strategy._repr_html_()
    finally:
        goes_on.set()
        running.join()
    assert "range" in shown(w)[1]


def test_one_whose_service_has_ended_says_so() -> None:
    with cs.CentralStorageStrategy(in_process=True) as strategy:
        w = variable(strategy, np.zeros(3))
    assert "not readable here: " in shown(w)[1]["values"]
    assert "this strategy was shut down" in strategy._repr_html_()


def test_a_strategy_shows_its_processes(strategy: cs.CentralStorageStrategy) -> None:
    page = ElementTree.fromstring(strategy._repr_html_())
    rows = [[cell.text for cell in row.iter("td")] for row in page.iter("tr")][1:]
    names = ("server", "worker 0", "worker 1")
    assert [row[0] for row in rows] == [f"{name}, a thread of this process" for name in names]
    assert {row[1] for row in rows} == {str(os.getpid())}
    assert all(re.fullmatch(r"[\d.]+ [kMG]B", row[4] or "") for row in rows)


def test_data_sets_show_how_many_elements_they_have_and_read_none(strategy: cs.CentralStorageStrategy) -> None:
    read: list[Any] = []
    mapped = cs.data.Dataset.range(6).map(lambda x: read.append(x) or x).batch(2)
    assert shown(mapped)[1] == {"elements": "3"}
    assert "TensorSpec(shape=(2,)" in shown(cs.data.Dataset.from_tensor_slices(np.zeros((3, 2))))[1]["element"]
    data = strategy.experimental_distribute_dataset(mapped)
    title, rows, _ = shown(data)
    assert title == "DistributedDataset"
    assert (rows["elements"], rows["replicas"], "handed out" in rows) == ("3", "2", False)
    assert read == []
    elements = iter(data)
    next(elements)
    assert shown(data)[1]["handed out"] == "1 element of iteration 0"
    assert shown(cs.data.Dataset.range(2).repeat())[1]["elements"] == "infinitely many"
