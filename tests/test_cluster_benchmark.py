"""The benchmark of workers on other machines finds, compares and draws; how fast anything is, is nobody's test."""

from __future__ import annotations

import io
import json
import sys
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
    assert line == "| Adam, 16 MB | 517 ms | 600 ms | 1.16 | - | - | - |"
    lines = scaling_out.growth(seconds).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| 2", "| 8"]
    assert lines[3].split(" | ")[2] == "2.10 s"


def test_goals_of_many_machines_are_ratios() -> None:
    import cluster
    import report

    by_way = {way.name: way.works for way in cluster.WAYS}
    for goal in cluster.GOALS:
        assert goal.work in by_way[goal.ours]
        assert goal.other in (cluster.MODEL, cluster.MORE, cluster.LIMIT) or goal.work in by_way[goal.other]
    figures = {
        ("adam-1MB", "ray-ps"): [0.010],
        ("adam-1MB", "relay"): [0.004],
        ("adam-16MB", "relay, 1 Gbit/s"): [0.768],  # one and a half times 2 * 2 * 16 MB at 125 MB/s
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
