"""`make bench-models` measures whole models in every program, and notices a program that computes something else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.harness.processes import ROOT, run
from tests.harness.timing import unit

FOLDER = ROOT / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the benchmark."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import bench_models

    return bench_models


def measured(folder: Path, *options: str) -> tuple[list[str], Any]:
    command = (sys.executable, FOLDER / "bench_models.py", "--small", "--rounds", "1", "--results", folder, *options)
    lines = run(*command, timeout=unit(300)).ok().lines
    return lines, json.loads((folder / "models.json").read_text())


@pytest.mark.slow  # every program imports its framework in several processes
@pytest.mark.timeout(unit(600))
@pytest.mark.parametrize("model", ["dlrm", "gpt", "convnet", "jax-mlp", "jax-transformer"])
def test_every_program_trains_every_model(benchmark: Any, model: str, tmp_path: Path) -> None:
    lines, found = measured(tmp_path, "--models", model, "--parts")
    assert [row["peer"] for row in found["rows"]] == list(benchmark.MODELS[model])
    for row in found["rows"]:
        assert row["work"] == model
        assert row["seconds"] > 0
        assert row["megabytes"] > 50
    goals = [goal for goal in benchmark.GOALS if goal.work == model]
    assert [{name: goal[name] for name in vars(goals[0])} for goal in found["goals"]] == [*map(vars, goals)]
    said = [line.split()[-1] for line in lines if line]
    assert said.count("met") + said.count("missed") == len(goals)
    assert any(line.startswith(f"parts of {model}") for line in lines)
    assert found["machine"]["versions"].keys() >= {"torch", "jax", "numpy"}
    drawing = ElementTree.parse(tmp_path / "models.svg").getroot()
    assert len(drawing.findall("{http://www.w3.org/2000/svg}rect[@x]")) == len(found["rows"])


@pytest.mark.timeout(unit(200))
def test_the_service_and_torch_alone_compute_the_same(tmp_path: Path) -> None:
    _, found = measured(tmp_path, "--models", "dlrm", "--programs", "central-storage", "torch-one-process")
    assert [row["peer"] for row in found["rows"]] == ["central-storage", "torch-one-process"]
    goals = {(goal["what"], goal["other"]): goal for goal in found["goals"]}
    goal = goals["seconds", "torch-one-process"]
    ours, alone = found["rows"]
    assert goal["reached"] == pytest.approx(alone["seconds"] / ours["seconds"])
    assert goal["is_met"] == (goal["reached"] >= 1.2)
    assert goals["memory", "ddp-gloo"]["is_met"] is None  # it was not started


def program(benchmark: Any, name: str, seconds: list[float], losses: list[float], megabytes: float = 1.0) -> Any:
    return benchmark.Program(name, SimpleNamespace(), seconds, losses, megabytes=megabytes)


def test_another_loss_than_that_of_one_process_is_noticed(benchmark: Any) -> None:
    alone = program(benchmark, "torch-one-process", [1.0], [3.0, 2.0])
    same, other, none = (
        program(benchmark, "central-storage", [1.0], [3.0, loss]) for loss in (2.0001, 2.01, float("nan"))
    )
    benchmark.check("gpt", [same, alone])
    benchmark.check("convnet", [other, alone])  # its dropout has other random numbers
    with pytest.raises(AssertionError, match=r"gpt, central-storage: the loss is 2\.01, not 2\.0"):
        benchmark.check("gpt", [other, alone])
    with pytest.raises(AssertionError, match="losses"):
        benchmark.check("convnet", [none, alone])


def test_goals_are_ratios_of_the_same_rounds_and_of_the_faster_way(benchmark: Any) -> None:
    programs = [
        program(benchmark, "central-storage", [4.0, 40.0, 5.0], [1.0], 50.0),
        program(benchmark, "central-storage-ahead", [3.0, 30.0, 4.0], [1.0], 60.0),
        program(benchmark, "ddp-gloo", [10.0, 100.0, 16.0], [1.0], 100.0),
        program(benchmark, "torch-one-process", [3.0, 30.0, 4.0], [1.0], 40.0),
    ]
    found = benchmark.verdicts("dlrm", programs)
    assert [(goal["other"], goal["reached"], goal["is_met"]) for goal in found] == [
        ("ddp-gloo", pytest.approx(1 / 0.3), True),
        ("torch-one-process", 1.0, False),
        ("ddp-gloo", 0.5, True),
    ]
    row = benchmark.table("dlrm", programs).splitlines()[3].split()
    assert row[:3] == ["ddp-gloo", "16.0", "s"]
    assert row[-3:] == ["100", "MB", "2.00"]
