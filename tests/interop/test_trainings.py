"""`make bench` trains as users do, with mailboxes and over ZeroMQ alone, and counts the captured steps."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from tests.harness.processes import ROOT, run
from tests.harness.timing import unit

FOLDER = ROOT / "benchmarks"


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the benchmark."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import trainings

    return trainings


@pytest.mark.timeout(unit(200))
@pytest.mark.parametrize("name", ["quick-start", "dlrm"])
def test_nearly_all_steps_of_a_training_are_captured(name: str) -> None:
    command = (sys.executable, FOLDER / "trainings.py", "--json", "--rounds", "1", "--trainings", name)
    said = json.loads(run(*command, environment={"BENCHMARK_SMALL_MODELS": "1"}, timeout=unit(150)).ok().lines[-1])
    assert said["work"] == f"training-{name}"
    sides = ["central-storage", "central-storage-ahead", "zeromq", "zeromq-ahead"]
    assert sorted(said["seconds"]) == sides
    assert all(seconds > 0 for [seconds] in said["seconds"].values())
    captured, *times = said["goals"]
    assert (captured["other"], captured["is_met"]) == ("captured steps", True)
    assert [(goal["ours"], goal["other"]) for goal in times] == [(sides[0], sides[2]), (sides[1], sides[3])]
    assert said["lines"] == [f"  {name}, not captured: 1, the first gradients for a set of variables"]


def test_the_goals_compare_the_same_rounds_and_ways(trainings: Any) -> None:
    seconds = {"central-storage": [1.0, 30.0, 2.0], "zeromq": [2.0, 40.0, 5.0]}
    seconds |= {"central-storage-ahead": [3.0, 4.0, 5.0], "zeromq-ahead": [1.0, 1.0, 1.0]}
    found = trainings.Figures("dlrm", seconds, runs=200, captured=197, reasons=(("a step before", 3),))
    assert [(goal["ours"], goal["reached"], goal["is_met"]) for goal in found.verdicts()] == [
        ("all steps", 0.985, False),
        ("central-storage", 0.5, True),
        ("central-storage-ahead", 4.0, False),
    ]
    assert trainings.report.goals_table(found.verdicts()).splitlines()[1].split() == (
        ["training-dlrm:", "captured", "steps", "/", "all", "steps", ">=", "0.99", "0.98", "missed"]
    )
    assert found.lines() == ["  dlrm, not captured: 3, a step before"]
