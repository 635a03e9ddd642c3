"""Every row of the tables in docs/from-tensorflow.md: what stands under "here" runs.

A new row needs nothing here, unless it uses a name that its section's ``SETUP`` lacks. A row whose third column begins
with "raises `SomeError`" must raise it. A row with an empty third column must be TensorFlow's line under the table of
names. The two tables under "Running TensorFlow's examples" are those of ``test_pages.py``.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import importlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.harness.processes import ROOT
from tests.harness.services import connected
from tests.seeds import pages

import central_storage as cs

PAGE = (ROOT / "docs/from-tensorflow.md").read_text()
HEAD = "| TensorFlow | here | what differs |"


class Row(NamedTuple):
    """A row: its section, the lines of TensorFlow (none where it has none), the lines here, and what differs."""

    section: str
    before: str
    after: str
    differs: str


def sections() -> dict[str, str]:
    """The text of each section, by its heading."""
    return {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}


def code(cell: str) -> str:
    """The lines in a cell; none for a dash."""
    return "" if cell == "–" else "\n".join(re.fullmatch("`(.*)`", line)[1] for line in cell.split("<br>"))  # type: ignore[index]


def rows() -> list[Row]:
    """Every row of every table with the three columns."""
    found = []
    for section, text in sections().items():
        for table in text.split(f"{HEAD}\n| --- | --- | --- |\n")[1:]:
            for line in table.partition("\n\n")[0].splitlines():
                before, after, differs = (cell.strip() for cell in line[1:-1].split("|"))
                found.append(Row(section, code(before), code(after), differs))
    return found


ROWS = rows()
#: The names that every row can use, besides ``strategy``, which has two replicas, and ``directory``, which is empty.
EVERYWHERE = """
x = np.float32([[1, 2], [3, 4]])
y = np.float32([[1, 0], [0, 1]])
fn = lambda x: x * 2
dataset = cs.data.Dataset.from_tensor_slices(x).batch(2)
distributed = strategy.experimental_distribute_dataset(dataset)
with strategy.scope():
    w = cs.Variable(np.zeros((4, 2), np.float32), aggregation=cs.VariableAggregation.SUM)
    v = cs.Variable(x, aggregation=cs.VariableAggregation.MEAN)
    optimizer = cs.optimizers.SGD(0.1)
"""
#: By section, what gives the rows their other names.
SETUP = {
    "The strategy": "iterator = iter(distributed); result = strategy.run(fn, args=(x,))",
    "In a replica function": "gradient = np.ones((4, 2), np.float32)",
    "Tensors, functions, variables": "t = cs.constant(1.0); spec = cs.TensorSpec((None, 2), np.float32)",
    "Data sets": "read = lambda x: cs.data.Dataset.range(2)",
    "Optimizers": "",
    "Metrics and losses": "loss = cs.metrics.Mean()",
    "Checkpoints": """
prefix = directory + "/ckpt"
class Model: pass
model = Model()
model.w = w
checkpoint = cs.train.Checkpoint(w=w, optimizer=optimizer)
path = checkpoint.save(prefix)
manager = cs.train.CheckpointManager(checkpoint, directory, max_to_keep=3)
""",
    "Errors": "error = cs.errors.OutOfRangeError()",
    "Only here": "",
    "Names that are not here": """
import itertools, logging, types
a, text, loss, step, labels, records, error = 2, "a b", 0.5, 3, [1, 2], [x], cs.errors.ReplicaLostError()
update_w, update_v = lambda: w.assign_add(w), lambda: v.assign_add(v)
writer = types.SimpleNamespace(scalar=print)
""",
}
#: The sections whose lines run in every replica, with the names of these.
IN_REPLICAS = {"In a replica function": ["strategy", "x", "w", "gradient", "optimizer"]}


@pytest.fixture(scope="module")
def strategy() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        yield connected(strategy)


@pytest.fixture
def names(strategy: cs.CentralStorageStrategy, tmp_path: Path) -> Iterator[dict[str, Any]]:
    names = {"__name__": "row", "cs": cs, "np": np, "strategy": strategy, "directory": str(tmp_path)}
    yield names
    for value in list(names.values()):
        if isinstance(value, cs.CentralStorageStrategy) and value is not strategy:
            value.shutdown()
    names.clear()  # ends the threads of iterators


def carry_out(lines: str, names: dict[str, Any]) -> None:
    waiting = eval(compile(lines, "row", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if waiting is not None:
        asyncio.run(waiting)


def in_replica(lines: str, given: dict[str, Any]) -> None:
    exec(lines, {"cs": cs, "np": np, "replica": cs.get_replica_context(), **given})


def run(row: Row, names: dict[str, Any]) -> None:
    if row.section in IN_REPLICAS:
        given = {name: names[name] for name in IN_REPLICAS[row.section]}
        names["strategy"].run(in_replica, (row.after, given))
    else:
        carry_out(row.after, names)


@pytest.mark.parametrize("row", ROWS, ids=[row.after.partition("\n")[0][:70] for row in ROWS])
def test_what_stands_under_here_runs(row: Row, names: dict[str, Any]) -> None:
    carry_out(EVERYWHERE + SETUP[row.section], names)
    refused = re.match(r"raises `(\w+)`", row.differs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if refused:
            with pytest.raises(getattr(cs.errors, refused[1], None) or getattr(builtins, refused[1])):
                run(row, names)
        else:
            run(row, names)
    assert not caught or "warns" in row.differs or "deprecated" in row.differs, list(map(str, caught))


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.before and not row.differs], ids=lambda row: row.before[:70]
)
def test_where_nothing_differs_the_line_is_the_same_under_the_table_of_names(row: Row) -> None:
    assert row.after == pages.renamed(row.before)


def test_every_table_has_rows_that_run() -> None:
    for section, text in sections().items():
        heads = re.findall(r"^(\|.*\|)\n\| ---", text, re.MULTILINE)
        assert section == pages.HEADING or set(heads) <= {HEAD}
    assert {row.section for row in ROWS} == SETUP.keys()
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    others = [line for line in pages.section().splitlines() if line.startswith("| ")]
    assert len(lines) - len(others) == len(ROWS) + 2 * PAGE.count(HEAD)


@pytest.mark.parametrize(
    "module",
    [
        "",
        "data",
        "data.experimental",
        "distribute",
        "distribute.experimental",
        "metrics",
        "nest",
        "nn",
        "optimizers",
        "optimizers.schedules",
        "random",
        "train",
    ],
)
def test_every_public_name_is_in_a_row(module: str) -> None:
    found = importlib.import_module(f"central_storage.{module}".rstrip("."))
    rows = "\n".join(line for line in PAGE.splitlines() if line.startswith("| "))
    names = set(found.__all__) - {"optimizer_of"}  # which users need not call
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", rows)] == []
