"""The benchmark measures, notices wrong results and says what came of it; how fast anything is, is nobody's test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.client.timeline.test_rings import TRAINING
from tests.harness.processes import ROOT, run
from tests.harness.timing import unit

from central_storage.timeline.chrome_trace import chrome_trace


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of benchmarks/ that need no other package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench
    import report
    import works
    from peers import numpy_one_process

    monkeypatch.setattr(bench, "MOST", 3)
    monkeypatch.setenv(works.DIGITS, "")  # prepare() sets it
    bench.prepare()
    return SimpleNamespace(bench=bench, report=report, works=works, plain=numpy_one_process)


@pytest.mark.slow  # as `make bench-quick` does
@pytest.mark.timeout(180)
@pytest.mark.parametrize("number", range(6))
def test_our_own_peers_compute_what_numpy_does(benchmark: Any, number: int) -> None:
    peer = benchmark.bench.OWN[number]
    asked = [work for work in ("adam-1MB", "read-1MBx1", "digits", "embedding-1e5", "empty-run") if work in peer.works]
    bench = benchmark.bench.Bench()
    measured = dict(bench.run(peer, dict.fromkeys(asked, 2)))
    assert not bench.failures
    assert list(measured) == asked
    assert all(seconds > 0 for seconds in measured.values())


def test_the_calls_of_each_process_are_counted(benchmark: Any) -> None:
    import calls

    found = calls.counted("empty-run", 100)
    assert list(found) == ["script", "worker", "server"]
    for role, called in (
        ("script", "ControllerCore.begin_run (core.py)"),
        ("worker", "Loop.serve_once (loop.py)"),
        ("server", "CapturedSteps.passed (captured_steps.py)"),
    ):
        assert 0.5 < found[role][called] < 1.5, role  # a step may take another way now and then
    assert calls.sums({"f (a.py)": 2.0, "g (a.py)": 0.5, "C: len": 4.0}) == (2.5, 4.0)


@pytest.mark.parametrize("name", ["sgd-1MB", "adam-1MB", "digits", "embedding-1e5"])
def test_a_wrong_result_is_noticed(benchmark: Any, name: str) -> None:
    work = benchmark.works.WORKS[name]
    with benchmark.plain.opened(work, 4) as trial:
        trial.run(3)
        trial.check()
        if name == "digits":
            results, said = trial.weights, [3, 4]
        elif name == "embedding-1e5":
            results, said = trial.rule.table, [trial.ids[:3], trial.ids]
        else:
            results, said = trial.rule.weight, [3, 4]
        work.check(results, said[0])
        with pytest.raises(AssertionError, match="wrong by"):
            work.check(results, said[1])  # a step is missing
        wrong = results[0] if name == "digits" else results
        wrong[trial.ids[0, 0, 0] if name == "embedding-1e5" else 7] += np.float32(0.01)
        with pytest.raises(AssertionError, match="wrong by"):
            trial.check()


def test_what_is_read_must_be_what_was_written_last(benchmark: Any) -> None:
    work = benchmark.works.WORKS["read-1MBx1"]
    work.check([array + 1 for array in work.initial()])
    with pytest.raises(AssertionError):
        work.check(work.initial())


def test_a_peer_that_fails_is_named_and_the_others_go_on(benchmark: Any) -> None:
    nobody = benchmark.bench.Peer("nobody", "nobody", ("sgd-1MB",))
    floor = benchmark.bench.Peer("numpy-one-process", "numpy_one_process", ("sgd-1MB",))
    bench = benchmark.bench.Bench()
    bench.measure((nobody, floor), ["sgd-1MB"], rounds=1)
    assert list(bench.figures) == [("sgd-1MB", "numpy-one-process")]
    [failure] = bench.failures
    assert failure.startswith("nobody failed at sgd-1MB (exit code 1)")
    assert "No module named peers.nobody" in failure


def test_every_work_has_its_rounds_and_nothing_is_measured_twice(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("sgd-1MB", "adam-400MB", "adam-400MB-copied", "read-1MBx1", "embedding", "embedding-1e7")
    ours, theirs, off = (
        benchmark.bench.Peer("ours", "ours", names, has_places=True),
        benchmark.bench.Peer("theirs", "theirs", names, ways=("slow", "fast")),
        benchmark.bench.Peer("off", "off", ("adam-400MB",)),
    )
    seconds = {"sgd-1MB": 1e-4, "adam-400MB": 1.0, "adam-400MB-copied": 1.5, "embedding": 0.1, "embedding-1e7": 0.2}
    seconds["read-1MBx1"] = 1e-3
    programs: list[tuple[str, dict[str, int]]] = []

    def run(bench: Any, peer: Any, steps: dict[str, int], limit: float) -> list[tuple[str, float]]:
        programs.append((peer.module, steps))
        return [(name, seconds[name.partition("/")[0]] * (1 if name.endswith("/fast") else 2)) for name in steps]

    monkeypatch.setattr(benchmark.bench, "MOST", 1000)
    monkeypatch.setattr(benchmark.bench.Bench, "run", run)
    bench = benchmark.bench.Bench()
    bench.measure((ours, theirs, off), names, rounds=5)
    expected = {(work, "ours"): [seconds[work] * 2] * 5 for work in names}
    expected |= {(work, "theirs"): [seconds[work]] * 5 for work in names}  # the faster way
    expected["read-1MBx1", "theirs"] = [2e-3] * 5  # there is one way
    expected["adam-400MB-copied", "theirs"] = [1.0] * 5
    expected["adam-400MB", "off"] = [2.0] * 5
    assert bench.figures == expected
    done = {peer.module: [steps for module, steps in programs if module == peer.module] for peer in (ours, theirs, off)}
    assert done["theirs"][0] == {"sgd-1MB/slow": 3, "sgd-1MB/fast": 3}
    assert done["theirs"][3:6] == [
        {"sgd-1MB/fast": 1000},
        {"adam-400MB/fast": 3, "read-1MBx1/slow": 250},
        {"embedding-1e7/fast": 5, "embedding/fast": 5},
    ]
    assert done["off"] == [{"adam-400MB": 3}] * 5  # no more than in the search, which counts
    first = [{"adam-400MB": 3, "adam-400MB-copied": 3, "read-1MBx1": 250}] * 4
    last = {"adam-400MB-copied": 3, "read-1MBx1": 250}
    assert [steps for steps in done["ours"] if "adam-400MB-copied" in steps] == [*first, last]
    assert [steps["embedding-1e7"] for steps in done["ours"] if "embedding-1e7" in steps] == [3] * 5


def test_what_would_end_too_late_does_not_begin(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lasts, limits, now = {"short": 1.0, "long": 10.0}, [], [100.0]

    def run(bench: Any, peer: Any, steps: dict[str, int], limit: float) -> list[tuple[str, float]]:
        limits.append(limit)
        now[0] += lasts[peer.name]
        return [("sgd-1MB", 1e-4)]

    monkeypatch.setattr(benchmark.bench, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(benchmark.bench, "MOST", 1000)
    monkeypatch.setattr(benchmark.bench.Bench, "run", run)
    bench = benchmark.bench.Bench(deadline=136.0)
    bench.measure([benchmark.bench.Peer(name, name, ("sgd-1MB",)) for name in lasts], ["sgd-1MB"], rounds=5)
    assert bench.figures == {("sgd-1MB", "short"): [1e-4] * 5, ("sgd-1MB", "long"): [1e-4] * 2}
    assert bench.left_out == [f"round {number} of long at sgd-1MB" for number in (3, 4, 5)]
    assert now[0] == 136.0
    assert limits[:2] == [36 + benchmark.bench.GRACE, 35 + benchmark.bench.GRACE]
    [first, *others] = bench.times(100.0)
    assert first == "0.6 minutes: long 0.5, short 0.1"
    assert others == [f"no time was left for {each}" for each in bench.left_out]


def test_every_goal_can_be_measured(benchmark: Any) -> None:
    bench, works = benchmark.bench, benchmark.works.WORKS
    peers = {peer.name: peer.works for peer in bench.OWN + bench.OTHERS}
    for goal in bench.GOALS:
        assert goal.work in peers[benchmark.report.OURS]
        assert goal.other in works or goal.work in peers[goal.other]


def test_goals_stand_beside_what_was_reached(benchmark: Any) -> None:
    seconds = {("sgd-1MB", "central-storage"): 1e-3, ("sgd-1MB", "tf-central-storage"): 8e-3}
    seconds |= {("sgd-1MB", "ddp-gloo"): 2e-2, ("read-1MBx1", "central-storage"): 6e-4}
    seconds |= {("read-400MBx1000", "central-storage"): 9e-4, ("embedding-1e7", "central-storage"): 1e-3}
    works = ("sgd-1MB", "read-1MBx1", "read-400MBx1000", "embedding-1e7")
    rows = benchmark.report.rows_of({key: [value] for key, value in seconds.items()})
    found = benchmark.bench.verdicts(rows, works)
    assert [(goal["other"], goal["reached"], goal["is_met"]) for goal in found] == [
        ("tf-central-storage", pytest.approx(8), True),
        ("ddp-gloo", pytest.approx(20), False),
        ("read-1MBx1", pytest.approx(1.5), True),
        ("reference", None, None),
    ]
    assert [line.split() for line in benchmark.report.goals_table(found).splitlines()[1:]] == [
        ["sgd-1MB:", "tf-central-storage", "/", "central-storage", ">=", "7.00", "8.00", "met"],
        ["sgd-1MB:", "ddp-gloo", "/", "central-storage", ">=", "25.00", "20.00", "missed"],
        ["read-400MBx1000:", "central-storage", "/", "read-1MBx1", "<=", "2.00", "1.50", "met"],
        ["embedding-1e7:", "central-storage", "/", "reference", "<=", "1.00", "not", "measured"],
    ]


def test_a_missed_goal_is_no_failure(
    benchmark: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"central-storage": 1.0, "numpy-one-process": 0.5}
    bench = benchmark.bench

    def run(self: Any, peer: Any, steps: dict[str, int], limit: float) -> list[tuple[str, float]]:
        return [(name, seconds[peer.name]) for name in steps if peer.name in seconds]

    monkeypatch.setattr(bench.Bench, "run", run)
    monkeypatch.setattr(bench.memory, "table", lambda: "")
    monkeypatch.setattr(bench.parts, "table", lambda *_: "")
    monkeypatch.setattr("sys.argv", ["bench.py", "--quick", "--works", "adam-1MB"])
    bench.main()
    said = [line.split()[-2:] for line in capsys.readouterr().out.splitlines() if line.startswith("  adam-1MB:")]
    assert said == [["not", "measured"], ["not", "measured"], ["0.50", "missed"]]


def test_a_peer_that_is_not_installed_is_left_out(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(family: str) -> None:
        if family == "tensorflow":
            raise subprocess.CalledProcessError(1, ["pip", "install"])

    monkeypatch.setattr(benchmark.bench.environments, "make", make)
    monkeypatch.setattr(benchmark.bench.environments, "versions", lambda family: {family: "1.0"})
    bench, machine = benchmark.bench.Bench(), {"versions": {}}
    names = [peer.name for peer in benchmark.bench.installed(bench, machine)]
    assert "ddp-gloo" in names
    assert "tf-central-storage" not in names
    assert machine == {"versions": {"torch": "1.0"}}
    [failure] = bench.failures
    assert failure.startswith("tensorflow was not installed")


def test_a_model_that_fails_is_named(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def figures(model: str, rounds: int) -> None:
        raise RuntimeError("hogwild has ended with status 1")

    monkeypatch.setattr(benchmark.bench.bench_models, "figures", figures)
    bench = benchmark.bench.Bench()
    benchmark.bench.measure_model(bench, "dlrm", 5, {})
    assert bench.failures == ["dlrm failed: hogwild has ended with status 1"]


def test_a_training_that_fails_is_named(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = benchmark.bench.Bench()
    monkeypatch.setattr(benchmark.bench, "HERE", Path("nowhere"))  # has no program
    assert benchmark.bench.measure_training(bench, "training-dlrm", 5) == ([], [])
    [failure] = bench.failures
    assert failure.startswith("training-dlrm failed: ")
    assert "No such file" in failure
    assert bench.figures == {}


def test_a_training_brings_rows_and_goals(benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = {"seconds": {"central-storage": [1e-3]}, "goals": [{"work": "w"}], "lines": ["  not captured: 1"]}
    (tmp_path / "trainings.py").write_text(f"import sys; print(sys.argv[1:]); print({json.dumps(json.dumps(said))})")
    bench = benchmark.bench.Bench()
    monkeypatch.setattr(benchmark.bench, "HERE", tmp_path)
    assert benchmark.bench.measure_training(bench, "training-dlrm", 5) == (said["goals"], said["lines"])
    assert bench.figures == {("training-dlrm", "central-storage"): [1e-3]}
    assert not bench.failures


def test_rows_are_shown_written_and_drawn(benchmark: Any, tmp_path: Path) -> None:
    report = benchmark.report
    highlight = report.rows_of({("adam-400MB", "central-storage"): [1e-1, 2e-1]})
    rows = report.rows_of({("adam-1MB", "central-storage"): [2e-3, 1e-3, 4e-3], ("adam-1MB", "ray-ps"): [1.0, 3.0]})
    shown = report.table(rows).splitlines()
    assert shown[2].split() == ["central-storage", "2.00", "ms", "1.00", "ms", "…", "4.00", "ms", "1.00"]
    assert shown[3].split() == ["ray-ps", "2.00", "s", "1.00", "s", "…", "3.00", "s", "1000.00"]
    goals = [report.Goal("adam-1MB", ">=", 11, "ray-ps").verdict(1000.0)]
    report.save(rows + highlight, goals, report.machine(), tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["machine"]["cpus"]
    first = {"work": "adam-1MB", "peer": "central-storage", "seconds": 2e-3, "lo": 1e-3, "hi": 4e-3, "rounds": 3}
    assert results["rows"][0] == first
    assert results["goals"] == goals
    namespace = {"": "http://www.w3.org/2000/svg"}
    drawing = ElementTree.parse(tmp_path / "results.svg").getroot()
    bars = [float(bar.get("width", "")) for bar in drawing.iterfind("rect[@x]", namespace)]
    assert len(bars) == 3
    highlights = ElementTree.parse(tmp_path / "highlights.svg").getroot()
    assert [title.text for title in highlights.iterfind("text[@font-weight]", namespace)] == ["adam-400MB"]
    assert bars[1] - bars[0] == pytest.approx(560 * 3 / 4, abs=0.2)  # three powers of ten apart, on an axis of four


def test_growth_is_shown_and_drawn(benchmark: Any) -> None:
    import scaling

    axis = scaling.Axis("Bytes", "bytes", (1_000, 10_000_000), {"step": [1e-3, 1.0], "limit": [1e-4, 1e-2]})
    assert scaling.table(axis).splitlines()[4].split() == ["10,000,000", "1.00", "s", "10.0", "ms"]
    drawing = ElementTree.fromstring(scaling.drawing([axis]))
    [step, limit] = [path.get("d") for path in drawing.iter("{http://www.w3.org/2000/svg}path") if path.get("fill")]
    assert step == "M70.0 205.0L320.0 40.0"  # from one power of ten above the lowest to the highest of four
    assert limit == "M70.0 260.0L320.0 150.0"


def test_pauses_are_shown_beside_their_goals(benchmark: Any) -> None:
    import pauses

    seconds = {"mailboxes": [1e-3] * 96 + [4e-3] * 4, "zmq": [2e-3] * 100}
    assert pauses.lines(2, "run", 50, seconds) == [
        "| 2 | run | 50 | mailboxes | 1000 | 4000 | 4000 | 4.0 |",
        "| 2 | run | 50 | zmq | 2000 | 2000 | 2000 | 1.0 |",
    ]
    assert [(goal["what"], goal["reached"], goal["is_met"]) for goal in pauses.verdicts("run", 50, seconds)] == [
        ("median", pytest.approx(0.5), True),
        ("p99", pytest.approx(2), False),
    ]


@pytest.mark.slow  # two services, beside two processes that compute all the time
@pytest.mark.timeout(unit(180))
def test_the_pauses_of_a_script_are_measured() -> None:
    command = (sys.executable, ROOT / "benchmarks" / "pauses.py", "--rounds", "1", "--steps", "3")
    lines = run(*command, timeout=unit(120)).ok().lines
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith(("| none", "| 2"))]
    ways = [(way, pause) for way in ("run", "run_steps") for pause in ("0", "50", "500")]
    expected = [[others, *way, carrier] for others in ("none", "2") for way in ways for carrier in ("mailboxes", "zmq")]
    assert [row[:4] for row in rows] == expected
    for row in rows:
        median, p99, longest = map(int, row[4:7])
        assert 0 < median <= p99 <= longest
        assert row[1] == "run" or median >= int(row[2])  # the pause is in the step
    assert len([line for line in lines if "over ZeroMQ  " in line]) == 2 * len(ways)


def test_looks_for_bad_numbers_are_shown_beside_their_goals(benchmark: Any) -> None:
    import numerics

    seconds = {"off": [1e-3, 9e-3, 1e-3], "warn": [1.01e-3] * 3, "raise": [1.2e-3] * 3}
    assert numerics.lines("1MB", seconds) == [
        "| 1MB | off | 1.000 | 1.000 |",
        "| 1MB | warn | 1.010 | 1.010 |",
        "| 1MB | raise | 1.200 | 1.200 |",
    ]
    assert [(goal["ours"], goal["reached"], goal["is_met"]) for goal in numerics.verdicts("1MB", seconds)] == [
        ("warn", pytest.approx(1.01), True),
        ("raise", pytest.approx(1.2), False),
    ]


@pytest.mark.slow
def test_looks_for_bad_numbers_are_measured() -> None:
    command = (sys.executable, ROOT / "benchmarks" / "numerics.py", "--rounds", "1", "--steps", "3", "--sizes", "1MB")
    lines = run(*command, timeout=unit(60)).ok().lines
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| 1MB")]
    assert [row[:2] for row in rows] == [["1MB", "off"], ["1MB", "warn"], ["1MB", "raise"]]
    assert all(float(cell) > 0 for row in rows for cell in row[2:])
    assert len([line for line in lines if line.startswith("  Adam, 1MB: ")]) == 2


@pytest.mark.slow
def test_the_places_of_variables_are_measured() -> None:
    """On a CPU, because the program asks for nothing that only a GPU has."""
    command = (sys.executable, ROOT / "benchmarks" / "gpus.py", "--device", "cpu:0", "--sizes", "1", "--steps", "2")
    rows = [line.strip("| ").split(" | ") for line in run(*command, timeout=unit(60)).ok().lines]
    assert [row[0] for row in rows if "---" not in row[0]] == ["step", "SGD, 1 MB", "Adam, 1 MB"]
    assert all(float(cell.removesuffix(" ms")) > 0 for row in rows[2:] for cell in row[1:])


def test_observers_are_shown_beside_their_goals(benchmark: Any) -> None:
    import observing

    def turns(*seconds: float, workers: float = 1.5e-3, observer: float = 0.0) -> list[Any]:
        return [observing.Turn(each, workers, 5e-4, observer) for each in seconds]

    found = observing.Figures(turns(1e-3, 2e-3, 1e-3), turns(1.008e-3, 2e-3, 1.5e-3, workers=1.58e-3, observer=4e-6))
    assert observing.line(1, "exporter", found) == (
        "| 1 ms | exporter | each second | 1.000 | 1.500 | 1.008 | 1.004 … 1.254 "
        "| 1.042 | 1.042 … 1.042 | 0.20 | 0.20 … 0.20 | 0.3 |"
    )
    in_script = observing.Figures(turns(1e-3), [observing.Turn(1e-3, 1.5e-3, 5.4e-4, 0.0)])
    assert observing.line(10, "timeline", in_script).endswith(" | 1.020 | 1.020 … 1.020 | 2.00 | 2.00 … 2.00 |  |")
    goals = [observing.verdict(1, "exporter", found), observing.verdict(10, "timeline", in_script)]
    assert [(goal["work"], goal["is_met"]) for goal in goals] == [
        ("a step of 1 ms, exporter", True),
        ("a step of 10 ms, timeline", False),
    ]


@pytest.mark.slow  # it starts each observer
@pytest.mark.timeout(unit(180))
def test_the_cost_of_observers_is_measured(benchmark: Any) -> None:
    import observing

    command = (sys.executable, ROOT / "benchmarks" / "observing.py", "--quick", "--sizes", "1")
    lines = run(*command, timeout=unit(150)).ok().lines
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| 1 ms")]
    assert [row[1] for row in rows] == list(observing.OBSERVERS)
    assert all(float(cell) > 0 for row in rows for cell in row[3:6])
    assert len([line for line in lines if line.startswith("  a step of 1 ms, ")]) == len(rows) - 1


def test_floods_are_shown_beside_their_goals(benchmark: Any) -> None:
    import floods

    quiet = floods.Turns([[1e-3] * 100, [1e-3] * 100])
    flooded = floods.Turns([[2e-3] * 100, [4e-3] * 100], [(0.1, 0.25, 0.01), (0.3, 0.35, 0.01)])
    found = {"nobody": quiet, "unread": flooded}
    assert list(floods.lines(found)) == [
        "| nobody | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 … 1.00 |  |  |  |",
        "| unread | 3.00 | 3.00 | 4.00 | 3.00 | 3.00 | 2.50 … 3.50 | 20 | 30 | 1 |",
    ]
    assert floods.verdict("unread", found)["is_met"] is False
    found["unread"].turns[1] = [1e-3] * 100
    goal = floods.verdict("unread", found)
    assert (goal["work"], goal["reached"], goal["is_met"]) == ("p99 of a step, unread", 1.5, True)


@pytest.mark.slow  # a training beside floods
@pytest.mark.timeout(unit(180))
def test_steps_beside_floods_are_measured(benchmark: Any) -> None:
    import floods

    command = (sys.executable, ROOT / "benchmarks" / "floods.py", "--quick")
    lines = run(*command, timeout=unit(150)).ok().lines
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][2:]
    names = [[kind, f"{kind}: control"] if kind != "computes" else [kind] for kind in floods.FLOODS]
    assert [row[0] for row in rows] == [each for kind in names for each in ("nobody", *kind)]
    assert all(float(cell) > 0 for row in rows for cell in row[1:6])
    assert len([line for line in lines if line.startswith("  p99 of a step, ")]) == len(floods.FLOODS) - 1


def test_growth_has_goals(benchmark: Any) -> None:
    import scaling

    replicas = scaling.Axis(
        "", "", (1, 4, 8), {"step": [1.0, 2.0, 3.0], "empty run": [1.0] * 3, "limit of the step": [1.0, 1.6, 1.0]}
    )
    found = [(goal["work"], goal["reached"], goal["is_met"]) for goal in scaling.replica_goals(replicas, cores=2)]
    assert found == [("4 replicas", 1.25, True), ("8 replicas", 3.0, False)]
    assert [goal["is_met"] for goal in scaling.replica_goals(replicas, cores=4)] == [None, None]
    variables = scaling.Axis("", "", (1, 10, 1_000), {"step": [2.0, 1.0, 3.0], "limit": [1.0] * 3})
    [goal] = scaling.variable_goals(variables)
    assert (goal["work"], goal["reached"], goal["is_met"]) == ("1,000 variables", 1.5, False)


def test_too_few_rounds_are_refused(
    benchmark: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.py", "--rounds", "2"])
    with pytest.raises(SystemExit) as ended:
        benchmark.bench.main()
    assert ended.value.code == 2
    assert "fewer than 5 rounds" in capsys.readouterr().err


def test_the_parts_of_a_step_are_put_together(benchmark: Any) -> None:
    client = [
        ("begun", 0),
        ("pickled", 10),
        ("sent", 15),
        ("sent", 20),
        ("woken", 200),
        ("decoded", 203),
        ("over", 210),
    ]
    worker = [("woken", 50), ("decoded", 55), ("called", 65), ("returned", 95), ("sent", 100)]
    other = [("found", 30), ("decoded", 36), ("called", 40), ("returned", 60), ("sent", 62)]
    server = [("woken", 90), ("decoded", 92), ("decided", 97), ("woken", 130), ("decoded", 133), ("decided", 140)]
    server += [("committed", 160), ("decided", 164), ("sent", 180)]
    assert parts_of("digits", 1000, client=[client], worker=[worker, other], server=[server]) == {
        "pickle check": "10.0 µs",
        "encode, send (client)": "10.0 µs",
        "decode (worker)": "6.00 µs",
        "arguments, seeds": "10.0 µs",
        "function": "30.0 µs",
        "result, encode, send (worker)": "5.00 µs",
        "decode (server)": "5.00 µs",
        "merge: decide, write down": "16.0 µs",
        "commit": "20.0 µs",
        "encode, send (server)": "16.0 µs",
        "decode (client)": "3.00 µs",
        "result (client)": "7.00 µs",
        "wake: client to worker": "10.0 µs",
        "wake: worker to server": "30.0 µs",
        "wake: server to client": "20.0 µs",
        "all": "210 µs",
        "messages": "5",
        "wake-ups": "4",  # one was looking when its message came
    }


def test_where_the_script_is_ahead_a_step_lies_between_two_commits(benchmark: Any) -> None:
    # Workers take turns; the script sends the next step meanwhile, which wakes nobody.
    server = [("committed", 0), ("decided", 4), ("sent", 10), ("sent", 12), ("woken", 90), ("decoded", 93)]
    server += [("decided", 95), ("sent", 99), ("found", 130), ("decoded", 132), ("decided", 140)]
    worker = [("woken", 20), ("decoded", 25), ("called", 30), ("looked-up", 50), ("sliced", 53), ("applied", 60)]
    worker += [("returned", 61), ("sent", 70)]
    other = [("found", 40), ("decoded", 44), ("called", 50), ("looked-up", 75), ("sliced", 77), ("applied", 86)]
    other += [("returned", 88), ("sent", 100)]
    client = [("woken", 101), ("decoded", 105), ("over", 106), ("begun", 110), ("pickled", 113), ("sent", 118)]
    assert parts_of("embedding", 200, client=[client], worker=[worker, other], server=[server]) == {
        "decode (worker)": "5.00 µs",
        "arguments, seeds": "6.00 µs",
        "function: look-up": "25.0 µs",
        "function: IndexedSlices": "3.00 µs",
        "function: apply_gradients": "9.00 µs",
        "function": "2.00 µs",
        "result, encode, send (worker)": "12.0 µs",
        "decode (server)": "5.00 µs",
        "merge: decide, write down": "14.0 µs",
        "commit": "60.0 µs",
        "encode, send (server)": "12.0 µs",
        "wake: worker to server": "30.0 µs",
        "wake: server to worker": "8.00 µs",
        "all": "200 µs",
        "meanwhile, in the script:": "",
        "between runs (script)": "4.00 µs",
        "pickle check": "3.00 µs",
        "encode, send (client)": "5.00 µs",
        "decode (client)": "4.00 µs",
        "result (client)": "1.00 µs",
        "messages": "6",
        "wake-ups": "3",
    }


def test_the_typical_step_of_a_program_is_drawn(benchmark: Any) -> None:
    import timeline

    length = 200_000

    def times(moments: list[tuple[str, int, int]], steps: int) -> list[tuple[str, int]]:
        # In every second step the commit takes 20 microseconds longer, and the third one goes without a program.
        return [
            ("decided" if (name, step) == ("found", 2) else name, step * length + (when + late * (step % 2)) * 1000)
            for step in range(steps)
            for name, when, late in moments
        ]

    server = [("found", 90, 0), ("committed", 120, 20), ("sent", 150, 0), ("prepared", 160, 0)]
    worker = [("found", 10, 0), ("decoded", 20, 0), ("called", 30, 0), ("returned", 70, 0), ("sent", 80, 0)]
    client = [("begun", 0, 0), ("pickled", 5, 0), ("sent", 8, 0), ("woken", 152, 0), ("decoded", 155, 0)]
    client += [("over", 170, 0)]
    left = [("server", times(server, 5)), ("worker", times(worker, 5)), ("worker", times(worker, 5))]
    left.append(("client", times(client, 5)))
    step = timeline.typical("digits", left, is_ahead=False, steps=5)
    assert step.nanoseconds == 170_000
    lanes = {lane: [block for block in step.blocks if block.lane == lane] for lane in ("script", "worker 1", "server")}
    assert [(block.label, block.begin) for block in lanes["script"]] == [
        ("pickle check 5", 0),
        ("encode, send 3", 5_000),
        ("decode 3", 152_000),
        ("result 15", 155_000),
    ]
    assert [block.part for block in lanes["worker 1"]] == [
        "decode",
        "arguments, seeds",
        "function",
        "result, encode, send",
    ]
    assert [block.label for block in lanes["server"]] in (
        ["commit 30", "encode, send 30", "next step prepared 10"],
        ["commit 50", "encode, send 10", "next step prepared 10"],
    )
    drawing = ElementTree.fromstring(timeline.drawing([step]))
    namespace = {"": "http://www.w3.org/2000/svg"}
    blocks = [rect for rect in drawing.iterfind("rect", namespace) if "block" in rect.get("class", "")]
    assert len(blocks) == len(step.blocks)
    assert sum(float(rect.get("width", "")) for rect in blocks) == pytest.approx(
        timeline.WIDTH * sum(block.end - block.begin for block in step.blocks) / step.nanoseconds, abs=1
    )
    said = [text.text for text in drawing.iterfind("text", namespace)]
    assert {block.label for block in step.blocks} | {"script", "worker 0", "worker 1", "server"} <= {*said}


def test_steps_without_a_program_are_not_drawn(benchmark: Any) -> None:
    import timeline

    server = [(name, step * 100 + when) for step in range(5) for name, when in [("decided", 10), ("committed", 20)]]
    with pytest.raises(ValueError, match="sgd-1MB: a program has carried out 0 of 4 steps"):
        timeline.typical("sgd-1MB", [("server", server)], is_ahead=True, steps=4)


def test_the_parts_come_from_the_moments_of_a_timeline(benchmark: Any, tmp_path: Path) -> None:
    """But for the first moment of each process, at which no slice ends."""
    import parts  # found when benchmarks/ is on the path

    (tmp_path / "timeline.json").write_text(json.dumps(chrome_trace(TRAINING)))
    expected = [(role, TRAINING[process]) for role, process in (("client", "controller"), ("server", "server"))]
    expected += [("worker", TRAINING["w0"]), ("worker", TRAINING["w1"])]
    assert parts.left_in(tmp_path / "timeline.json") == [
        (role, [(each.name, each.when) for each in moments[1:]]) for role, moments in expected
    ]


def parts_of(work: str, length: int, **moments: list[list[tuple[str, int]]]) -> dict[str, str]:
    """The two columns that are shown of processes which do the same in every step, of so many µs."""
    import parts  # found when benchmarks/ is on the path

    left = [
        # The last of these steps begins the commit that is the end of the one before.
        (role, [(name, (step * length + when) * 1000) for step in range(parts.STEPS + 1) for name, when in mine])
        for role, processes in moments.items()
        for mine in processes
    ]
    columns = {line[:32].strip(): line[32:].strip() for line in parts.lines(work, left, is_ahead=work == "embedding")}
    assert columns.pop(f"parts of {work}") == "median"
    return columns
