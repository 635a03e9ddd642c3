"""The steps of real trainings are seen from outside, whatever carries them out and whoever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.chrome_traces import checked
from tests.harness.processes import run
from tests.harness.replicas import context

import central_storage as cs
from central_storage.ctl.cli import FOUND, main
from central_storage.ctl.profile import Profile, profile
from central_storage.timeline.chrome_trace import Recorder
from central_storage.timeline.rings import RecordedMoments, Rings, Step, Window, slices, steps
from cs_proto import step_times as layout

STEPS = 60


def training(strategy: cs.CentralStorageStrategy, *, asks: bool = False) -> Callable[[np.ndarray], float]:
    """A replica function that updates a variable; ``asks``: it has a merge point, so no program carries it out."""
    with strategy.scope():
        w = cs.Variable(np.zeros(64, np.float32))
        sgd = cs.optimizers.SGD(0.5)

    @cs.function
    def step(x: np.ndarray) -> float:
        with cs.span("gradient"):
            [gradient] = cs.gradient_buffers([w])
            with cs.span("fill"):
                gradient[...] = total = x.sum()
        if asks:
            total = context().all_reduce("SUM", np.float32(total))
        sgd.apply_gradients([(gradient, w)])
        return float(total)

    return step


def trained(strategy: cs.CentralStorageStrategy, step: Callable[[np.ndarray], float], *, ahead: bool) -> None:
    elements = [np.full(2, k, np.float32) for k in range(STEPS)]
    if ahead:
        for _ in strategy.run_steps(step, strategy.experimental_distribute_dataset(elements)):
            pass
    else:
        for element in elements:
            strategy.run(step, args=(element,))


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("ahead", [False, True])
def test_every_step_is_seen_whatever_carries_it_out(two: cs.CentralStorageStrategy, ahead: bool, asks: bool) -> None:
    step = training(two, asks=asks)
    before = two.statistics()
    with Rings(two.address) as rings:
        trained(two, step, ahead=ahead)
        recording = RecordedMoments(rings)
        seen: list[Step] = []
        while len(seen) < STEPS - 1:  # the server may note that it has sent the results when the script goes on
            recording.look()
            recorded = recording.moments()
            seen = steps(recorded)
    assert not any(recording.missing.values())
    after = two.statistics()
    assert after.captured > before.captured
    runs = [each.run for each in seen]
    assert runs == list(range(runs[0], runs[0] + STEPS - 1))  # the first has no end before it
    assert all(each.commit > 0 and min(each.functions) > 0 and len(each.waits) == 2 for each in seen)
    assert all(each.whole >= max(each.functions) + each.commit for each in seen)
    assert all(0 in each.waits for each in seen)
    assert len([each for each in slices("server", recorded["server"]) if each.part == "commit"]) == STEPS
    most = 24 if asks else 13  # a few moments a message, and not one for each look at a mailbox
    assert max(map(len, recorded.values())) < most * STEPS


def test_step_times_are_noted_as_long_as_somebody_reads(two: cs.CentralStorageStrategy) -> None:
    """A reader that is killed counts no longer, and one of two leaves the other what it reads."""
    step = training(two)
    program = (
        "import sys\n"
        "from central_storage.timeline.rings import Rings\n"
        "rings = Rings(sys.argv[1])\n"
        "print(flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, two.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        reader.stdout.readline()
        with Rings(two.address) as rings:
            reader.kill()
            reader.wait()
            words = [rings.mapped(f"times/{process}") for process in ("server", "controller", "w0", "w1")]
            trained(two, step, ahead=False)
            assert all(len(ring.copied()[0]) for ring in rings.rings.values())
        watched = [ring.memory.cast("Q") for ring in words if ring is not None]
        while any(ring[layout.WATCHED] for ring in watched):  # the supervisor hears of the end
            os.sched_yield()
        before = [ring[layout.WRITTEN] for ring in watched]
        trained(two, step, ahead=True)
        assert [ring[layout.WRITTEN] for ring in watched] == before


def test_a_window_keeps_the_last_places_and_no_spans(two: cs.CentralStorageStrategy) -> None:
    step = training(two)
    with Rings(two.address) as rings, Rings(two.address) as others:
        window, short = Window(rings, places=200), Window(others, seconds=0.0)
        trained(two, step, ahead=False)
        seen = window.read()
        first = steps(seen)
        assert 2 <= len(first) < STEPS - 1
        assert all(len(moments) == 200 and not any(each.edge for each in moments) for moments in seen.values())
        assert window.read().keys() == {"controller", "server", "w0", "w1"}
        trained(two, step, ahead=False)
        again = steps(window.read())
        assert again[0].run > first[-1].run
        asked = time.monotonic_ns()  # the server may note its last places when the script goes on
        assert all(each.when >= asked for moments in short.read().values() for each in moments)


def test_a_timeline_shows_all_processes_spans_and_flows(two: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    step, path = training(two), tmp_path / "timeline.json"
    with two.timeline(path), cs.span("training"):
        trained(two, step, ahead=False)
        trained(two, step, ahead=True)
    trace = checked(json.loads(path.read_text()))
    assert list(tmp_path.iterdir()) == [path]
    assert not any(trace["otherData"]["missing moments"].values())
    events = trace["traceEvents"]
    rows = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert list(rows) == ["script", "server", "worker 0", "worker 1"]
    complete = [event for event in events if event["ph"] == "X"]
    for name, count in [("gradient", 2 * STEPS), ("fill", 2 * STEPS), ("training", 0)]:
        for worker in ("worker 0", "worker 1"):
            assert len([each for each in complete if each["name"] == name and each["pid"] == rows[worker]]) == count
    [whole] = [each for each in complete if each["name"] == "training"]
    assert whole["pid"] == rows["script"]
    for worker in ("worker 0", "worker 1"):  # a span of a replica function lies in its slice
        mine = [each for each in complete if each["pid"] == rows[worker]]
        functions = [(each["ts"], each["ts"] + each["dur"]) for each in mine if each["name"].startswith("function")]
        for each in mine:
            if each["cat"] == "span":
                assert any(a <= each["ts"] and each["ts"] + each["dur"] <= b for a, b in functions)
    assert len([event for event in events if event["ph"] == "f"]) == 2 * 2 * STEPS


def test_a_timeline_outlives_a_worker_and_the_server(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        step = training(strategy)
        with strategy.timeline(path):
            trained(strategy, step, ahead=True)
            os.kill(strategy.statistics().replicas[1].pid, signal.SIGKILL)
            trained(strategy, step, ahead=True)
            os.kill(strategy.statistics().pid, signal.SIGKILL)
            trained(strategy, step, ahead=False)
        pids = [strategy.statistics().pid, *(each.pid for each in strategy.statistics().replicas)]
    trace = checked(json.loads(path.read_text()))
    named = {event["args"]["name"]: event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert named == {"script": os.getpid(), "server": pids[0], "worker 0": pids[1], "worker 1": pids[2]}
    runs = {event["args"]["run"] for event in trace["traceEvents"] if event["name"] == "commit"}
    assert len(runs) >= 3 * STEPS - 2  # a commit that the killed server was in may have no moment


def test_two_timelines_at_once_have_one_path(two: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    with two.timeline(path), cs.span("outer"):
        with two.timeline(path), cs.span("inner"):
            pass
        assert any(event["name"] == "inner" for event in json.loads(path.read_text())["traceEvents"])
    assert any(event["name"] == "outer" for event in json.loads(path.read_text())["traceEvents"])
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_is_no_timeline_before_the_training(two: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    is_trained = False
    with pytest.raises(IsADirectoryError, match="a timeline is a file"), two.timeline(tmp_path):
        is_trained = True
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*/no/t.json'$"):
        two.timeline(tmp_path / "no" / "t.json").__enter__()
    assert not is_trained


def test_a_recorder_keeps_the_last_moments_and_counts_the_others(two: cs.CentralStorageStrategy) -> None:
    step = training(two)
    recorder = Recorder(two.address, limit=4 * 50)
    trained(two, step, ahead=False)
    trace: Any = checked(recorder.finish())
    kept = [event for event in trace["traceEvents"] if event.get("cat") == "step"]
    missing = trace["otherData"]["missing moments"]
    assert set(missing) == {"controller", "server", "w0", "w1"}
    assert len(kept) + sum(missing.values()) > 4 * STEPS


def sampled(strategy: cs.CentralStorageStrategy, train: Callable[[Callable[[], bool]], None]) -> Profile:
    """The profile of ten steps of ``train``, which goes on until its argument says that it is over."""
    found: list[Profile] = []
    over = threading.Event()

    def sample() -> None:
        try:
            found.append(profile(strategy.address, 10, 50.0))
        finally:
            over.set()

    thread = threading.Thread(target=sample)
    thread.start()
    train(over.is_set)
    thread.join()
    [only] = found
    assert only.steps == 10
    return only


def test_a_slow_replica_is_named(two: cs.CentralStorageStrategy) -> None:
    @cs.function
    def step() -> None:
        time.sleep(0.02 + 0.2 * context().replica_id_in_sync_group)

    def train(is_over: Callable[[], bool]) -> None:
        while not is_over():
            two.run(step)

    found = sampled(two, train)
    assert found.bottleneck.startswith("replica 1 is ")
    assert "times slower than replica 0" in found.bottleneck
    assert found.replicas[0].waiting > found.replicas[1].waiting
    assert found.commits is None


@pytest.mark.parametrize("ahead", [False, True])
def test_slow_data_is_named(two: cs.CentralStorageStrategy, ahead: bool) -> None:
    step = training(two)

    def train(is_over: Callable[[], bool]) -> None:
        def data() -> Iterator[np.ndarray]:
            while not is_over():
                time.sleep(0.2)
                yield np.ones(2, np.float32)

        if ahead:
            spec = cs.TensorSpec((2,), np.float32)
            elements = cs.data.Dataset.from_generator(data, output_signature=spec)
            for _ in two.run_steps(step, two.experimental_distribute_dataset(elements)):
                pass
        else:
            for x in data():
                two.run(step, args=(x,))

    found = sampled(two, train)
    assert found.bottleneck.startswith("the script's data takes")
    assert found.commits is not None
    assert found.commits.variable_nbytes == 256
    assert found.commits.variables == 1
    assert found.commits.moved_nbytes >= 4 * 256


def test_a_profile_of_an_idle_service_says_so(
    two: cs.CentralStorageStrategy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", two.address, "--seconds", "0.2", "--json"]) == FOUND
    assert json.loads(capsys.readouterr().out)["bottleneck"].startswith("no step ended while it was sampled: ")


def test_a_profile_outlives_the_service() -> None:
    with cs.CentralStorageStrategy(["cpu:0"]) as strategy:
        step, found = training(strategy), list[Profile]()
        begun = threading.Event()

        def sample() -> None:
            begun.set()
            found.append(profile(strategy.address, 1_000_000, 50.0))

        thread = threading.Thread(target=sample)
        with Rings(strategy.address) as rings:
            thread.start()
            begun.wait()
            recording, seen = RecordedMoments(rings), list[Step]()
            while not seen:
                trained(strategy, step, ahead=True)
                recording.look()
                seen = steps(recording.moments())
    thread.join()
    assert len(found) == 1  # it ended with the service, and not after 50 s


SCRIPT = """
import os, sys
import central_storage as cs
with cs.CentralStorageStrategy(["cpu:0"]) as strategy:
    os.chdir("/")
    for _ in range(5):
        strategy.run(lambda: 1.0)
with cs.CentralStorageStrategy(["cpu:0"]) as strategy:
    strategy.run(lambda: 1.0)
"""


def test_a_launcher_and_a_variable_ask_for_a_timeline(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run("cs-launch", "--timeline", "out.json", script, directory=tmp_path).ok()
    for name, count in [("out.json", 5), ("out.2.json", 1)]:  # the second strategy has a service of its own
        trace = checked(json.loads((tmp_path / name).read_text()))
        functions = [event for event in trace["traceEvents"] if event["name"] == "function"]
        assert len(functions) == count
    ended = run(script, directory=tmp_path, environment={"CS_TIMELINE": str(tmp_path / "nowhere/out.json")}).ok()
    assert "CS_TIMELINE: no timeline is recorded: [Errno 2] No such file or directory: " in ended.err
    assert "/nowhere/out.json'" in ended.err
    refused = run("cs-launch", "--timeline", "out.json", "--serve", "1")
    assert refused.code == 2
    assert "set CS_TIMELINE where the script runs" in refused.err


@pytest.mark.parametrize("in_process", [False, True])
def test_a_service_without_step_times_says_so(
    in_process: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not in_process:
        monkeypatch.setenv("CS_TIMES", "off")
    with cs.CentralStorageStrategy(["cpu:0"], in_process=in_process) as strategy:
        with cs.span("nobody sees it"):
            strategy.run(lambda: 1.0)
        for ask in (lambda: strategy.timeline(tmp_path / "out.json").__enter__(), lambda: profile(strategy.address)):
            with pytest.raises(cs.errors.ConfigurationError, match="keeps no step times"):
                ask()
    assert not list(tmp_path.iterdir())


def test_a_timeline_is_the_scripts(own: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    def step() -> None:
        own.timeline("anywhere")

    with pytest.raises(cs.errors.ContextError, match="recorded by the script"):
        own.run(step)
    with pytest.raises(FileNotFoundError), own.timeline(tmp_path / "nowhere" / "out.json"):
        pass
    own.shutdown()
    with pytest.raises(cs.errors.ShutdownError):
        own.timeline(tmp_path / "out.json")
