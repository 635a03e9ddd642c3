"""The benchmark of workers on other machines finds, compares and draws; how fast anything is, is nobody's test."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from tests.harness.processes import ROOT, run

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of benchmarks/ are found."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_single_points_are_drawn() -> None:
    import scaling

    axis = scaling.Axis("Workers", "workers", (1, 100), {"formula": [1e-3, 1e-1]}, {"measured": [(10, 1e-2)]})
    drawing = ElementTree.fromstring(scaling.drawing([axis]))
    places = [(each.get("cx"), each.get("cy")) for each in drawing.iter("{http://www.w3.org/2000/svg}circle")]
    assert places == [("195.0", "150.0"), ("79.0", "319.0")]  # in the middle of both scales, and beside its name


def test_the_page_of_many_machines_has_the_figures_of_one_run() -> None:
    import scaling_out

    results = json.loads(scaling_out.RESULTS.read_text())
    assert results["failures"] == []
    page = (ROOT / "docs" / "scaling-out.md").read_text()
    assert scaling_out.written(page, results) == page, "run python benchmarks/scaling_out.py"
    assert (ROOT / "docs" / "scaling-out.svg").read_text() == scaling_out.drawing(results)
    with pytest.raises(ValueError, match="no place for the table goals"):
        scaling_out.written(page.replace("<!-- /goals -->", ""), results)


def test_steps_on_many_machines_are_shown_beside_the_formula() -> None:
    import scaling_out

    seconds = {("adam-16MB", "relay, 1 Gbit/s"): 0.6, ("adam-16MB", "relay, 1 Gbit/s, 8 workers"): 2.1}
    (line,) = [line for line in scaling_out.steps(seconds).splitlines() if "16 MB" in line]
    # 2 * 2 * 16 MB at 125 MB/s, 16 MB of Adam with two gradients, and two workers' messages
    assert line == "| Adam, 16 MB | 520 ms | 600 ms | 1.15 | - | - | - |"
    seconds |= {("adam-16MB", "one outpost, 1 Gbit/s"): 0.4, ("adam-16MB", "one outpost, 1 Gbit/s, 8 workers"): 1.2}
    lines = scaling_out.growth(seconds).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 2", "| 8"]
    # 16 and 9 times 16 MB at 125 MB/s, 16 MB of Adam with eight gradients, and eight workers' messages
    assert lines[3].split(" | ")[1:5] == ["2.07 s", "2.10 s", "1.17 s", "1.20 s"]
    (line,) = [line for line in scaling_out.shared(seconds).splitlines() if "16 MB" in line]
    assert line == "| Adam, 16 MB | 520 ms | 600 ms | 392 ms | 400 ms | 1.02 |"


def test_the_messages_of_a_step_are_a_line_through_empty_runs() -> None:
    import cluster
    import report
    import scaling_out

    ways = (*cluster.CONTROL["relay"], *cluster.CONTROL["one outpost"])
    took = {("empty-run", way.name): [1e-3 + way.copies * 5e-4 + way.replicas * 2e-4] for way in ways}
    rows = report.rows_of(took | {("empty-run", "one machine"): [3e-4]})  # one point is no line
    assert cluster.control(rows) == ["messages to other machines: 1.00 ms + 0.50 ms M + 0.20 ms N"]
    lines = scaling_out.messages({(row.work, row.peer): row.seconds for row in rows}).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 1", "| 2", "| 4"]
    assert lines[3].split(" | ")[2::2] == ["300 µs", "2.40 ms", "1.90 ms |"]


def test_who_cannot_be_measured_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import cluster
    import environments

    def fails(family: str) -> None:
        raise subprocess.CalledProcessError(1, ["pip", family])

    monkeypatch.setattr(environments, "make", fails)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = cluster.missing(list(cluster.WAYS))
    assert {name.partition(",")[0] for name in found} == {"ddp-gloo", "ray-ps", "tf-ps", "a killed node"}
    assert found["tf-ps"] == "pip could not install tensorflow-cpu"
    assert found["a killed node"].endswith("make .venv/.installed-ray")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "need root" in cluster.missing([cluster.RELAY])["relay"]
    assert cluster.missing([cluster.ONE_MACHINE]) == {}


def test_a_part_that_is_measured_anew_leaves_the_other_figures(tmp_path: Path) -> None:
    import cluster
    import report

    options = SimpleNamespace(results=tmp_path)
    first = {("adam-1MB", "relay"): [1.0], ("empty-run", "relay"): [2.0], ("adam-1MB", "tf-ps"): [3.0]}
    cluster._write(options, list(cluster.WAYS), report.rows_of(first), ["relay failed: once", "tf-ps failed: once"])
    cluster._write(options, [cluster.RELAY], report.rows_of({("empty-run", "relay"): [4.0]}), [])
    known = json.loads((tmp_path / "cluster.json").read_text())
    assert {(row["work"], row["peer"]): row["seconds"] for row in known["rows"]} == {
        ("adam-1MB", "relay"): 1.0,
        ("empty-run", "relay"): 4.0,
        ("adam-1MB", "tf-ps"): 3.0,
    }
    assert known["failures"] == ["tf-ps failed: once"]


def test_goals_of_many_machines_are_ratios() -> None:
    import cluster
    import report

    by_way = {way.name: way.works for way in cluster.WAYS}
    for goal in cluster.GOALS:
        assert goal.work in by_way[goal.ours]
        models = (cluster.MODEL, cluster.SHARED, cluster.MORE, cluster.LIMIT)
        assert goal.other in models or goal.work in by_way[goal.other]
    figures = {
        ("adam-1MB", "ray-ps"): [0.010],
        ("adam-1MB", "relay"): [0.004],
        ("adam-16MB", "relay, 1 Gbit/s"): [0.768],  # one and a half times 2 * 2 * 16 MB at 125 MB/s
        ("adam-100MB", "one outpost, 1 Gbit/s"): [2.4],  # 3 * 100 MB at 125 MB/s
        ("empty-run", "one machine"): [0.001],
        ("empty-run", "relay"): [0.003],
        ("killed-node/room", "a killed node"): [2.5],
        ("embedding-1e5", "relay, 1 Gbit/s"): [0.02],
        ("embedding-1e7", "relay, 1 Gbit/s"): [0.022],
    }
    reached = {
        (goal["work"], goal["sign"]): (round(goal["reached"], 6), goal["is_met"])
        for goal in cluster.verdicts(report.rows_of(figures))
        if goal["reached"] is not None
    }
    assert reached == {
        ("adam-1MB", ">="): (2.5, True),
        ("adam-16MB", "<="): (1.5, False),
        ("adam-100MB", "<="): (1.0, True),
        ("empty-run", "<="): (1.5, False),
        ("killed-node/room", "<="): (0.5, True),
        ("rows", "<="): (1.1, True),
    }


def test_works_of_another_number_of_replicas() -> None:
    """All replicas' gradients are in the sum that a program without replicas is given, and in the check."""
    command = (sys.executable, "-m", "peers.numpy_one_process", "adam-1MB=3")
    run(*command, directory=BENCHMARKS, environment={"BENCHMARK_REPLICAS": "5"}).ok()
    program = "import works; print(float(works.WORKS['adam-1MB'].gradients_sum().min()) >= 5 / 2)"
    ended = run("-c", program, directory=BENCHMARKS, environment={"BENCHMARK_REPLICAS": "5"}).ok()
    assert ended.lines == ["True"]


def test_the_halt_of_a_training_is_found() -> None:
    import killed_node

    watch = killed_node.Watch(SimpleNamespace(stdout=io.StringIO("1.0\n3.0\n3.1\n3.2\n9.5\n9.6\n"), wait=lambda: 4))
    assert watch.after_halt(3.05) == 9.5  # an earlier halt does not count
    assert watch.next() == 9.6
    with pytest.raises(RuntimeError, match="the training has ended with status 4"):
        watch.next()
