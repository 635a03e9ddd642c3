"""in_process=True: the same service in threads of the script; same results, one replica at a time, nothing left."""

from __future__ import annotations

import logging
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.processes import run, start
from tests.harness.replicas import context, replica
from tests.harness.services import connected
from tests.harness.timing import unit
from tests.processes.test_truth import assert_same_bits, trained_by, trained_here
from threadpoolctl import threadpool_limits

import central_storage as cs
from central_storage import errors
from cs_runtime.transport.readiness import is_readable


def threads(replicas: int) -> cs.CentralStorageStrategy:
    return cs.CentralStorageStrategy([f"cpu:{r}" for r in range(replicas)], in_process=True)


@pytest.fixture(scope="module")
def here() -> Iterator[cs.CentralStorageStrategy]:
    """A strategy of two replicas in this process, kept for all tests of the file."""
    with threads(2) as strategy:
        yield connected(strategy, nested=True)


def meet() -> float:
    return float(context().all_reduce("SUM", np.ones(2))[0])


# --- the same results -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_training_has_the_bits_of_one_process(replicas: int) -> None:
    with threadpool_limits(1), threads(replicas) as strategy:
        for in_place in (True, False):
            assert_same_bits(trained_by(strategy, "adam", in_place=in_place), trained_here("adam", replicas))


Both = tuple[cs.CentralStorageStrategy, cs.CentralStorageStrategy]


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    """A strategy with threads and one with processes, new, and given the same runs: numbers follow from a run's."""
    with threads(2) as strategy, cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as processes:
        yield connected(strategy, nested=True), connected(processes, nested=True)


def test_random_numbers_are_those_of_processes(both: Both) -> None:
    def merge(strategy: Any) -> Any:
        return strategy.run(lambda: (random.random(), np.random.random()))

    def step() -> Any:
        drawn = [random.random(), np.random.normal()]
        meet()
        drawn += [random.random(), np.random.normal()]
        nested = context().merge_call(merge)
        return np.array([*drawn, *nested, random.random(), np.random.normal()])

    def runs(strategy: cs.CentralStorageStrategy) -> list[np.ndarray]:
        return [each for _ in range(2) for each in strategy.experimental_local_results(strategy.run(step))]

    np.testing.assert_array_equal(*map(runs, both))


def test_random_numbers_of_a_data_set_and_of_replicas_do_not_mix(both: Both) -> None:
    def draw(row: Any) -> Any:
        return row + np.random.random()

    def train(strategy: cs.CentralStorageStrategy) -> list[Any]:
        np.random.seed(5)
        dataset = cs.data.Dataset.range(40).map(draw).batch(4)
        return [
            strategy.experimental_local_results(strategy.run(lambda x: x + np.random.random(), args=(batch,)))
            for batch in strategy.experimental_distribute_dataset(dataset)
        ]

    np.testing.assert_array_equal(*map(train, both))


def test_random_numbers_of_steps_ahead_and_of_their_loop_do_not_mix(both: Both) -> None:
    def train(strategy: cs.CentralStorageStrategy) -> list[Any]:
        np.random.seed(5)
        with strategy.scope():
            total = cs.Variable(0.0, dtype="float64", aggregation=cs.VariableAggregation.SUM)
        batches = strategy.experimental_distribute_dataset(cs.data.Dataset.range(40).batch(4))

        def step(x: np.ndarray) -> Any:
            total.assign_add(np.random.random())
            return x + total

        found = []
        for result in strategy.run_steps(step, batches):
            found.append((strategy.experimental_local_results(result), np.random.random()))
            if len(found) == 4:
                total.assign(100.0)  # falls between the same two steps
        return found

    for (one, drawn), (other, expected) in zip(*map(train, both), strict=True):
        np.testing.assert_array_equal(one, other)
        assert drawn == expected


def test_the_scripts_own_random_state_is_left_alone(here: cs.CentralStorageStrategy) -> None:
    def step() -> float:
        meet()
        return random.random() + np.random.random()

    random.seed(3)
    np.random.seed(3)
    expected = [(random.random(), np.random.random()) for _ in range(5)]
    random.seed(3)
    np.random.seed(3)
    found = []
    for _ in range(5):
        here.run(step)
        found.append((random.random(), np.random.random()))
    assert found == expected


def test_what_is_captured_is_copied_as_for_a_process(here: cs.CentralStorageStrategy) -> None:
    class Counter:
        counted = 0

    seen: list[int] = []

    def step(array: np.ndarray) -> Any:
        seen.append(1)
        Counter.counted += 1
        return Counter.counted, array.flags.writeable, len(seen)

    counts = here.run(step, args=(np.zeros(3),))
    assert counts == (1, False, 1)
    assert Counter.counted == 0
    assert seen == []


def test_a_class_comes_back_as_the_scripts_own(here: cs.CentralStorageStrategy) -> None:
    class Mine(ValueError):
        pass

    def merge(strategy: Any) -> Any:
        def nested() -> None:
            raise Mine("from a nested run")

        try:
            strategy.run(nested)
        except Mine as error:
            return str(error)

    def fail() -> None:
        raise Mine("as it is")

    assert here.run(lambda: context().merge_call(merge)) == "from a nested run"
    with pytest.raises(Mine, match="as it is"):
        here.run(fail)


def test_a_run_in_a_merge_call_and_an_observer(here: cs.CentralStorageStrategy) -> None:
    with here.scope():
        total = cs.Variable(np.zeros(2), aggregation=cs.VariableAggregation.SUM, name="in_process_total")

    def merge(strategy: Any, values: Any) -> Any:
        strategy.run(lambda: total.assign_add(np.ones(2)))
        return strategy.reduce("SUM", values, axis=None) + total.numpy()

    result = here.run(lambda: context().merge_call(merge, args=(np.full(2, 10.0 * (1 + replica())),)))
    assert {tuple(each) for each in here.experimental_local_results(result)} == {(32, 32)}
    with cs.connect(here.address) as observer:
        assert list(observer.get("in_process_total")) == [2, 2]
    statistics = here.statistics()
    assert {each.pid for each in statistics.replicas} == {statistics.pid} == {os.getpid()}


# --- one at a time ----------------------------------------------------------------------------------------------------


def test_replicas_run_one_at_a_time_and_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    def step() -> None:
        for part in "abc":
            print(part, replica(), "first")
            print(part, replica(), "then")
            meet()

    with threads(3) as strategy:
        for _ in range(5):
            strategy.run(step)
    lines = [f"{part} {r} {when}" for part in "abc" for r in range(3) for when in ("first", "then")]
    assert capsys.readouterr().out.splitlines() == lines * 5


def test_two_strategies_in_two_threads(here: cs.CentralStorageStrategy) -> None:
    def step(own: int) -> Any:
        drawn = [np.random.random() for _ in range(3) if meet()]
        return own, np.array(drawn)

    def train(strategy: cs.CentralStorageStrategy, own: int, into: list[Any]) -> None:
        with strategy:
            into += [strategy.run(step, args=(own,)) for _ in range(20)]

    found: list[list[Any]] = [[], [], []]
    trainers = [threading.Thread(target=train, args=(threads(2), own, found[own])) for own in range(2)]
    for trainer in trainers:
        trainer.start()
    for trainer in trainers:
        trainer.join(unit(30))
    train(threads(2), 2, found[2])
    for own in range(3):
        assert [result[0] for result in found[own]] == [own] * 20
        for result, alone in zip(found[own], found[2], strict=True):
            np.testing.assert_array_equal(result[1].values, alone[1].values)


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_an_exception_has_the_replicas_traceback(here: cs.CentralStorageStrategy) -> None:
    def step() -> None:
        if replica() == 1:
            raise KeyError("what I looked for")
        meet()

    with pytest.raises(KeyError, match="what I looked for") as caught:
        here.run(step)
    notes = "".join(caught.value.__notes__)
    assert "in replica 1" in notes
    assert f"{__file__}" in notes
    assert here.experimental_local_results(here.run(meet)) == (2, 2)


@pytest.mark.parametrize(
    ("step", "error", "text"),
    [
        (lambda: meet() if replica() else None, errors.MergeMismatchError, r"(?s)replica 0.*replica 1"),
        (lambda: sys.exit(3), SystemExit, "3"),
        (lambda: cs.CentralStorageStrategy(["cpu:0"], in_process=True), errors.ContextError, "inside a worker"),
        (lambda: cs.CentralStorageStrategy(["cpu:0"]), errors.ContextError, "inside a worker"),
        (lambda: object(), errors.ResultError, "object"),
        (lambda: cs.get_strategy().shutdown(), errors.ContextError, "in your script"),  # type: ignore[attr-defined]
    ],
    ids=["mismatch", "sys.exit", "strategy", "service", "result", "shutdown"],
)
def test_a_mistake_is_the_error_it_is_with_processes(
    here: cs.CentralStorageStrategy, step: Callable[[], Any], error: type[BaseException], text: str
) -> None:
    with pytest.raises(error, match=text):
        here.run(step)
    assert here.experimental_local_results(here.run(meet)) == (2, 2)


def test_a_device_that_cannot_be_used_is_a_failed_start() -> None:
    with pytest.raises(errors.DeviceError):
        cs.CentralStorageStrategy(["gpu:999"], in_process=True)


def test_after_shutdown_the_strategy_says_so() -> None:
    strategy = threads(1)
    strategy.shutdown()
    strategy.shutdown()
    with pytest.raises(errors.ShutdownError):
        strategy.run(meet)


INTERRUPTED = """
import os, sys, central_storage as cs
import central_storage.controller.core
os.environ["CS_NAME_WAITS"] = "0.2"
def replica(): return int(cs.get_replica_context().replica_id_in_sync_group)
strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True)
pipe = os.pipe()[0]
def compute():
    print("at work", flush=True)
    while True: pass
def wait():
    if replica() == 1: compute()
    cs.get_replica_context().merge_call(lambda strategy: None)
def hang():
    while replica() == 1:
        try:
            print("at work", flush=True)
            os.read(pipe, 1)
        except BaseException: pass  # a Ctrl-C that came before the read
with strategy.scope(): variable = cs.Variable([1.0])
def read():
    print("at work", flush=True)
    while True: variable.numpy()
for name in ("compute", "wait", "read", "hang"):
    try: strategy.run(globals()[name])
    except KeyboardInterrupt: print("interrupted", flush=True)
    try: print(name, strategy.run(replica).values, flush=True)
    except cs.errors.ShutdownError as error: print("ended:", error, flush=True)
"""


def test_ctrl_c_interrupts_the_function_and_a_second_one_goes_on_without_code_that_does_not_hear_it() -> None:
    with start("-c", INTERRUPTED) as child:
        for number, name in enumerate(("compute", "wait", "read"), start=1):
            child.wait_for(rf"(at work[\s\S]*){{{number}}}")
            child.press_ctrl_c()
            child.wait_for(rf"interrupted\n{name} \(0, 1\)$")
        child.wait_for(r"read \(0, 1\)\nat work$")
        child.press_ctrl_c()
        child.wait_for("replica 1 does not react to Ctrl-C: it is at <string>:", stream="err")
        child.press_ctrl_c()
        ended = child.wait().ok()
    assert ended.lines[-2] == "interrupted"
    assert ended.lines[-1].startswith("ended: its service has ended: a second Ctrl-C")
    assert "replica 1 still hangs in a thread of this script, at <string>:" in ended.lines[-1]
    assert "Traceback" not in ended.err


class _Bell(logging.Handler):
    """Writes to a descriptor as soon as the server names a wait."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        """Look for a wait."""
        if "waiting" in record.getMessage():
            os.write(self._descriptor, b"!")


def test_the_server_names_waits_when_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CS_NAME_WAITS", "0.1")
    reader, writer = os.pipe()
    bell, limit = _Bell(writer), unit(5.0)

    def step() -> float:
        assert replica() == 0 or is_readable(reader, limit)  # by default the wait is named after 10 s
        return meet()

    logging.getLogger("cs_server").addHandler(bell)
    try:
        with threads(2) as strategy:
            assert strategy.experimental_local_results(strategy.run(step)) == (2, 2)
    finally:
        logging.getLogger("cs_server").removeHandler(bell)
        os.close(reader)
        os.close(writer)


# --- a debugger -------------------------------------------------------------------------------------------------------

DEBUGGED = """
import numpy as np, central_storage as cs
strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True)
def step(secret):
    number = int(cs.get_replica_context().replica_id_in_sync_group)
    breakpoint()
    total = cs.get_replica_context().all_reduce("SUM", np.array([number + 1.0]))
    return float(total[0]) + secret
print("results", *strategy.run(step, args=(40,)).values)
"""


def test_a_breakpoint_in_a_replica_function(tmp_path: Path) -> None:
    script = tmp_path / "debugged.py"
    script.write_text(DEBUGGED)
    # Replica 0 stops, steps over the merge point into which replica 1 has to come, and goes on when that has.
    begin = ["n"] if sys.version_info >= (3, 13) else []  # from then on the debugger stops in the very line
    here = [*begin, "p ('replica', number, secret)"]
    commands = [*here, "n", *here, "c", "p ('sum', total)", "c"]
    ended = subprocess.run(
        [sys.executable, script], input="\n".join(commands) + "\n", capture_output=True, text=True, timeout=unit(30)
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    shown = [
        "('replica', 0, 40)",
        "('replica', 1, 40)",
        "('sum', <cs.Tensor: shape=(1,), dtype=float64, numpy=array([3.])>)",
        "results 43.0 43.0",
    ]
    if sys.version_info >= (3, 14):  # both replicas share one debugger there, so the first "c" ends it for both
        del shown[2]
    places = [ended.stdout.index(line) for line in shown]
    assert places == sorted(places)
    assert "debugged.py(7)step()" in ended.stdout


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_script_that_just_ends_leaves_nothing() -> None:
    ended = run("-c", "import central_storage as cs; cs.CentralStorageStrategy(['cpu:0', 'cpu:1'], in_process=True)")
    assert (ended.code, ended.out) == (0, "")
    assert ended.err.startswith("[central-storage] 2 replicas (cpu:0, cpu:1), ")
    assert ended.err.count("\n") == 1


def test_a_script_that_fails_ends_and_its_log_shows_the_messages_of_all_roles() -> None:
    program = "import central_storage as cs; cs.CentralStorageStrategy(['cpu:0'], in_process=True).run(lambda: 1 / 0)"
    ended = run("-c", program, environment={"CS_LOG": "debug"})
    assert ended.code == 1
    # A thread may log between two pieces of the line.
    assert re.search(r"^\S*ZeroDivisionError", ended.err, re.MULTILINE), ended
    for line in (
        "central_storage.link: send Run(",
        "central_storage.worker: received",
        "cs_server.service: from b'w0.1'",
    ):
        assert line in ended.err


@pytest.mark.slow
def test_a_forked_child_ends_alone() -> None:
    program = """
import os, central_storage as cs
strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True)
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    print(strategy.run(lambda: 7))
else:
    try: strategy.run(lambda: 8)
    except cs.errors.ShutdownError: print("not mine", flush=True)
"""
    assert run("-c", program, environment={"PYTHONWARNINGS": "ignore"}).ok().lines == ["not mine", "7"]


@pytest.mark.slow
def test_under_cs_launch_it_is_a_service_of_the_scripts_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, central_storage as cs
with cs.CentralStorageStrategy(in_process=True) as strategy:
    statistics = strategy.statistics()
    print("replicas", [each.device for each in statistics.replicas], statistics.pid == os.getpid())
print("launched", cs.CentralStorageStrategy().statistics().pid != os.getpid())
"""
    )
    ended = run("cs-launch", "--devices", "cpu:0,cpu:1", script).ok()
    assert "replicas ['cpu:0', 'cpu:1'] True" in ended.out
    assert "launched True" in ended.out
