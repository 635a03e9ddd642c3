"""``run_steps`` over a real service: the same as the loop it stands for, and nothing lost wherever it ends."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.harness.processes import start

import central_storage as cs
from central_storage import errors
from central_storage.strategy.run_steps import LOOKAHEAD

ROWS = 30 * 8 + 3  # 31 batches of 8, the last one of 3


@pytest.fixture
def batches(two: cs.CentralStorageStrategy) -> cs.DistributedDataset:
    """31 batches of the numbers 1 to 243."""
    numbers = np.arange(1, ROWS + 1, dtype=np.float64)
    return two.experimental_distribute_dataset(cs.data.Dataset.from_tensor_slices(numbers).batch(8))


@pytest.fixture
def total(two: cs.CentralStorageStrategy) -> cs.Variable:
    with two.scope():
        return cs.Variable(np.zeros(3), aggregation=cs.VariableAggregation.SUM)


@pytest.fixture
def adding(total: cs.Variable) -> Callable[[Any], float]:
    """A step that adds to ``total`` and returns the sum of its share."""

    def step(batch: np.ndarray) -> float:
        total.assign_add(np.full(3, batch.sum()))
        return float(batch.sum())

    return step


class Model:
    """A variable, Adam and a step in which everything that a run has a say in leaves its mark."""

    def __init__(self, strategy: cs.CentralStorageStrategy, *, draws: bool = True) -> None:
        self.strategy = strategy
        with strategy.scope():
            w = self.w = cs.Variable(np.linspace(-1, 1, 500, dtype=np.float32))
            optimizer = self.optimizer = cs.optimizers.Adam(0.01)

        def step(batch: np.ndarray, scale: float = 1.0) -> np.ndarray:
            context = cs.get_replica_context()
            assert context is not None
            (gradient,) = cs.gradient_buffers([w])
            gradient[...] = np.asarray(w) * scale + batch.sum() * (np.random.rand(500) if draws else 1)
            optimizer.apply_gradients([(gradient, w)])
            return context.all_reduce("SUM", np.asarray(batch.sum()))

        self.step = step

    def digits(self) -> bytes:
        return bytes(self.w.numpy().tobytes())


def values(results: Any) -> list[Any]:
    return [[float(value) for value in result.values] for result in results]


# --- the same as the loop -------------------------------------------------------------------------------------------


@cache
def trained(devices: int, way: str) -> tuple[tuple[str, bytes], ...]:
    """Results and bits of a step and of a frozen one, in a service of their own: random numbers follow from a run's
    number. ``way``: by run in a loop with replicas in the script, by run_steps, or by run_steps with such replicas."""
    ended = []
    names = [f"cpu:{number}" for number in range(devices)]
    with cs.CentralStorageStrategy(names, seed=5, in_process=way != "run_steps") as strategy:
        for frozen in (False, True):
            model = Model(strategy)
            step = cs.function(model.step) if frozen else model.step
            numbers = cs.data.Dataset.from_tensor_slices(np.arange(ROWS, dtype=np.float64)).batch(8)
            batches = strategy.experimental_distribute_dataset(numbers)
            if way == "loop":
                results = [strategy.run(step, (batch,), {"scale": 0.5}) for batch in batches]
            else:
                results = list(strategy.run_steps(step, batches, kwargs={"scale": 0.5}))
            results.append(strategy.run(np.random.rand))  # and so is what comes after it
            ended.append((repr(results), model.digits()))
    return tuple(ended)


@pytest.mark.parametrize(
    "devices", [pytest.param(1, id="one replica", marks=pytest.mark.slow), pytest.param(2, id="two replicas")]
)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "cs.function"])
def test_the_bits_are_those_of_the_loop(devices: int, frozen: bool) -> None:
    assert trained(devices, "run_steps")[frozen] == trained(devices, "loop")[frozen]


def test_replicas_in_the_script_do_the_same() -> None:
    assert trained(2, "in the script") == trained(2, "run_steps")


@pytest.mark.parametrize("lookahead", [0, 1, 2, 5, 64])
def test_the_lookahead_changes_nothing(
    two: cs.CentralStorageStrategy, batches: Any, total: cs.Variable, adding: Any, lookahead: int
) -> None:
    results = values(two.run_steps(adding, batches, lookahead=lookahead))
    assert results == values(two.run(float_sum, (batch,)) for batch in batches)
    np.testing.assert_array_equal(total.numpy(), np.full(3, ROWS * (ROWS + 1) / 2))


def float_sum(batch: np.ndarray) -> float:
    return float(batch.sum())


def test_a_learning_rate_of_the_loop_falls_between_the_same_two_steps(two: cs.CentralStorageStrategy) -> None:
    ended = set()
    for slow in (False, True):
        model = Model(two, draws=False)
        numbers = cs.data.Dataset.from_tensor_slices(np.arange(64, dtype=np.float64)).batch(4)
        batches = two.experimental_distribute_dataset(numbers)
        for k, _ in enumerate(two.run_steps(model.step, batches)):
            if slow:
                time.sleep(0.01)  # by then all that was sent is over
            model.optimizer.learning_rate = 0.1 / (k + 1)
        ended.add(model.digits())
    assert len(ended) == 1


def test_a_learning_rate_that_only_the_script_can_work_out(two: cs.CentralStorageStrategy) -> None:
    ended = set()
    for way in ("loop", "run_steps"):
        model = Model(two, draws=False)
        model.optimizer.learning_rate = lambda step: 0.1 / (1 + step)
        numbers = cs.data.Dataset.from_tensor_slices(np.arange(64, dtype=np.float64)).batch(8)
        batches = two.experimental_distribute_dataset(numbers)
        if way == "loop":
            for batch in batches:
                two.run(model.step, (batch,))
        else:
            assert len(list(two.run_steps(model.step, batches))) == 8
        ended.add(model.digits())
    assert len(ended) == 1


def test_an_operation_of_the_loop_comes_after_the_steps_that_were_sent(
    two: cs.CentralStorageStrategy, batches: Any, total: cs.Variable, adding: Any
) -> None:
    sums = np.cumsum([float(np.arange(k, min(k + 8, ROWS + 1)).sum()) for k in range(1, ROWS + 1, 8)])
    for k, _ in enumerate(two.run_steps(adding, batches)):
        assert total.numpy()[0] == sums[min(k + LOOKAHEAD, len(sums) - 1)]


def test_loops_may_alternate(two: cs.CentralStorageStrategy, batches: Any, total: cs.Variable, adding: Any) -> None:
    results = []
    for one, other in zip(two.run_steps(adding, batches), two.run_steps(adding, batches), strict=True):
        results += values([one, other])
    assert results[::2] == results[1::2]
    assert total.numpy()[0] == ROWS * (ROWS + 1)


def test_what_a_loop_changes_is_seen_by_the_step_that_is_sent_next(two: cs.CentralStorageStrategy) -> None:
    seen = {"n": 0}
    ten = two.experimental_distribute_dataset(cs.data.Dataset.range(20).batch(2))

    def step(batch: np.ndarray) -> int:
        return seen["n"]

    results = []
    for k, result in enumerate(two.run_steps(step, ten), start=1):
        seen["n"] = k
        results.append(result)
    assert results == [0] * (LOOKAHEAD + 1) + list(range(1, 10 - LOOKAHEAD))


# --- how far it is ahead --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
def test_exactly_the_lookahead_is_sent(two: cs.CentralStorageStrategy, batches: Any, lookahead: int) -> None:
    before = two.statistics().runs
    iterator = iter(batches)
    for k, _ in enumerate(two.run_steps(float_sum, iterator, lookahead=lookahead), start=1):
        assert iterator.position == min(k + lookahead, 31)
        if k % 7 == 0:
            assert two.statistics().runs - before == min(k + lookahead, 31)


def test_a_worker_begins_the_next_step_without_the_client(
    two: cs.CentralStorageStrategy, batches: Any, tmp_path: Path
) -> None:
    path = str(tmp_path)

    def step(batch: np.ndarray) -> None:
        context = cs.get_replica_context()
        assert context is not None
        if context.replica_id_in_sync_group == 0:
            Path(path, str(batch[0])).touch()
            while batch[0] == 1 and not Path(path, "door").exists():
                pass

    steps = two.run_steps(step, batches)
    Path(path, "door").touch()
    next(steps)
    while len(list(tmp_path.iterdir())) < 1 + 1 + LOOKAHEAD:  # the client does nothing meanwhile
        pass
    steps.close()
    assert len(list(tmp_path.iterdir())) == 1 + 1 + LOOKAHEAD


@pytest.mark.parametrize(("steps", "count"), [(0, 0), (1, 1), (7, 7), (31, 31), (40, 31), (None, 31)])
def test_at_most_so_many_steps(two: cs.CentralStorageStrategy, batches: Any, steps: int | None, count: int) -> None:
    iterator = iter(batches)
    running = two.run_steps(float_sum, iterator, steps)
    assert len(list(running)) == count
    assert running.steps == iterator.position == count
    assert list(running) == []
    assert len(list(iterator)) == 31 - count


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [False, True], ids=["", "the loop reads"])
@pytest.mark.parametrize("k", [1, 2, 5, 31])
def test_after_a_step_that_fails_none_begins(
    two: cs.CentralStorageStrategy, batches: Any, total: cs.Variable, k: int, reads: bool
) -> None:
    def step(batch: np.ndarray) -> None:
        context = cs.get_replica_context()
        assert context is not None
        if 8 * (k - 1) < batch[0] <= 8 * k and context.replica_id_in_sync_group == 0:
            raise KeyError("no more")
        total.assign_add(np.ones(3))

    iterator = iter(batches)
    steps = two.run_steps(step, iterator)
    results = 0

    def loop() -> None:
        nonlocal results
        for _ in steps:
            results += 1
            if reads:
                total.numpy()

    with pytest.raises(KeyError, match="no more"):
        loop()
    assert results == steps.steps == k - 1
    assert total.numpy()[0] == 2 * (k - 1)
    assert list(steps) == []
    assert iterator.position == k
    left = [float(batch.values[0][0]) for batch in iterator]
    assert left == [8 * each + 1 for each in range(k, 31)]
    assert values([two.run(float_sum, (batch,)) for batch in [cs.PerReplica([np.ones(1), np.ones(2)])]]) == [[1, 2]]


def test_a_function_that_a_dropped_step_brought_is_sent_again(two: cs.CentralStorageStrategy, batches: Any) -> None:
    def loop() -> None:
        captured = np.zeros(20_000)  # too large for a frame

        def step(batch: np.ndarray) -> float:
            if batch[0] > 8:
                raise KeyError
            return float(captured.sum())

        for _ in two.run_steps(step, batches):
            captured = captured + 1

    for _ in range(3):
        with pytest.raises(KeyError):
            loop()


@pytest.mark.parametrize("k", [0, 1, 5])
def test_an_error_of_the_data_set_comes_out_at_its_element(
    two: cs.CentralStorageStrategy, total: cs.Variable, adding: Any, k: int
) -> None:
    def elements() -> Iterator[np.ndarray]:
        for _ in range(k):
            yield np.ones(4)
        raise OSError("the disk is full")

    dataset = cs.data.Dataset.from_generator(elements, output_signature=cs.data.TensorSpec((4,), np.float64))
    steps = two.run_steps(adding, two.experimental_distribute_dataset(dataset))
    for _ in range(k):
        next(steps)
    with pytest.raises(OSError, match="the disk is full"):
        next(steps)
    assert list(steps) == []
    assert total.numpy()[0] == 4 * k


def test_what_cannot_be_sent_comes_out_at_its_element(two: cs.CentralStorageStrategy, batches: Any) -> None:
    captured: list[object] = []

    def step(batch: np.ndarray) -> int:
        return len(captured)

    iterator = iter(batches)
    steps = two.run_steps(step, iterator)
    assert next(steps) == 0
    captured.append(threading.Lock())  # lives in this process
    assert next(steps) == next(steps) == 0
    with pytest.raises(errors.ShippingError):
        next(steps)
    assert iterator.position == steps.steps == 1 + LOOKAHEAD


def test_where_it_makes_no_sense(two: cs.CentralStorageStrategy, batches: Any) -> None:
    of_one = cs.get_strategy().experimental_distribute_dataset([np.ones(4)])
    for wrong, kind, words in [
        (lambda: two.run_steps(3, batches), TypeError, "fn must be callable"),  # type: ignore[arg-type]
        (lambda: two.run_steps(float_sum, [1]), TypeError, "experimental_distribute_dataset"),  # type: ignore[arg-type]
        (lambda: two.run_steps(float_sum, of_one), ValueError, "split over 1 replica, this strategy has 2"),
        (lambda: two.run_steps(float_sum, iter(of_one)), ValueError, "distribute it with this strategy"),
        (lambda: two.run_steps(float_sum, batches, -1), ValueError, "steps must not be negative"),
        (lambda: two.run_steps(float_sum, batches, True), TypeError, "steps must be an int"),
        (lambda: two.run_steps(float_sum, batches, lookahead=-1), ValueError, "lookahead must not be negative"),
        (
            lambda: two.run_steps(float_sum, batches, lookahead=65),
            ValueError,
            "lookahead must be at most 64, but is 65",
        ),
        (lambda: two.run_steps(float_sum, batches, kwargs=[1]), TypeError, "kwargs must be a mapping"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(kind, match=words):
            wrong()

    def inside() -> None:
        cs.get_strategy().run_steps(float_sum, None)

    def merging() -> None:
        context = cs.get_replica_context()
        assert context is not None
        context.merge_call(lambda strategy: strategy.run_steps(float_sum, None))

    for step in (inside, merging):
        with pytest.raises(errors.ContextError, match="run_steps cannot be called inside a"):
            two.run(step)


# --- leaving it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["break", "close", "with", "raise"])
def test_what_was_sent_stands_when_the_loop_is_left(
    two: cs.CentralStorageStrategy, batches: Any, total: cs.Variable, adding: Any, way: str
) -> None:
    iterator = iter(batches)
    steps = two.run_steps(adding, iterator)
    if way == "with":
        with steps:
            next(steps), next(steps), next(steps)
    elif way == "raise":
        with suppress(OverflowError):
            for k, _ in enumerate(steps):
                if k == 2:
                    raise OverflowError
    else:
        for k, _ in enumerate(steps):
            if k == 2:
                break
        if way == "close":
            steps.close()
    sent = 3 + LOOKAHEAD
    assert steps.steps == iterator.position == sent
    assert total.numpy()[0] == sum(range(8 * sent + 1))
    assert next(iterator).values[0][0] == 8 * sent + 1
    if way in ("close", "with"):
        assert list(steps) == []
    else:
        assert len(list(steps)) == 31 - 3 - 1  # one was taken above


def test_a_loop_that_nobody_holds_is_over_when_it_is_left(
    two: cs.CentralStorageStrategy, batches: Any, tmp_path: Path
) -> None:
    path = str(tmp_path)

    def step(batch: np.ndarray) -> None:
        Path(path, str(batch[0])).touch()

    for _ in two.run_steps(step, batches):
        break
    assert len(list(tmp_path.iterdir())) == 2 * (1 + LOOKAHEAD)


def test_a_failure_after_the_loop_was_left_is_named(
    two: cs.CentralStorageStrategy, batches: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def step(batch: np.ndarray) -> None:
        if batch[0] > 8:
            raise KeyError("too late to be raised")

    iterator = iter(batches)
    steps = two.run_steps(step, iterator)
    next(steps)
    steps.close()
    assert re.search(r"step 2 failed after its loop was left: .*too late to be raised", caplog.text)
    assert steps.steps == 1
    assert iterator.position == 2


# --- memory ---------------------------------------------------------------------------------------------------------


def test_large_batches_and_results_reuse_the_memory_of_those_before(own: cs.CentralStorageStrategy) -> None:
    rows = 1 << 16  # a batch and its results are 512 KiB each

    def elements() -> Iterator[np.ndarray]:
        for k in range(60):
            yield np.full(rows, k, np.float64)

    spec = cs.data.TensorSpec((rows,), np.float64)
    batches = own.experimental_distribute_dataset(cs.data.Dataset.from_generator(elements, output_signature=spec))
    for k, result in enumerate(own.run_steps(lambda batch: batch + 1, batches)):
        for value in result.values:
            assert value.shape == (rows // 2,)
            assert (value == k + 1).all()
    assert k == 59
    arenas = arena_nbytes(own.statistics().pid)
    assert len(arenas) >= 3
    assert all(0 < nbytes <= (LOOKAHEAD + 2) * rows * 8 for nbytes in arenas)


def arena_nbytes(server: int) -> list[int]:
    """The bytes of each arena that are present and not none; the supervisor has them all open."""
    directory = Path(f"/proc/{psutil.Process(server).ppid()}/fd")
    links = [link for link in directory.iterdir() if "arena" in os.readlink(link)]
    return [nbytes for link in links if (nbytes := link.stat().st_blocks * 512)]


# --- the end of everything ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_a_step_that_kills_its_worker_again_ends_it(mortal: cs.CentralStorageStrategy, victim: int) -> None:
    with mortal.scope():
        total = cs.Variable(np.zeros(2), aggregation=cs.VariableAggregation.SUM)

    def step(batch: np.ndarray) -> None:
        context = cs.get_replica_context()
        assert context is not None
        if batch[0] >= 16 and context.replica_id_in_sync_group == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        total.assign_add(np.ones(2))

    iterator = iter(mortal.experimental_distribute_dataset(cs.data.Dataset.range(80).batch(8)))
    steps = mortal.run_steps(step, iterator)
    for _ in range(2):
        next(steps)
    with pytest.raises(errors.ReplicaLostError, match=f"replica {victim} .*SIGKILL"):
        next(steps)
    assert steps.steps == 2
    assert list(steps) == []
    np.testing.assert_array_equal(total.numpy(), np.full(2, 2.0 * steps.steps))
    assert iterator.position == steps.steps + 1
    mortal.run(step, (np.zeros(1),))  # the strategy goes on
    np.testing.assert_array_equal(total.numpy(), np.full(2, 2.0 * steps.steps + 2))


def test_a_server_that_dies_is_waited_for(mortal: cs.CentralStorageStrategy) -> None:
    pid = mortal.statistics().pid
    with mortal.scope():
        total = cs.Variable(np.zeros(2), aggregation=cs.VariableAggregation.SUM)

    def step(batch: np.ndarray) -> float:
        if batch[0] >= 16:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        total.assign_add(np.ones(2))
        return float(batch[0])

    steps = mortal.run_steps(step, mortal.experimental_distribute_dataset(cs.data.Dataset.range(80).batch(8)))
    assert [mortal.experimental_local_results(result)[0] for result in steps] == [8.0 * k for k in range(10)]
    assert mortal.statistics().pid != pid
    assert total.numpy().tolist() == [20.0, 20.0]


def test_a_service_that_ends_while_the_loop_does_something_else_ends_it(own: cs.CentralStorageStrategy) -> None:
    iterator = iter(own.experimental_distribute_dataset(cs.data.Dataset.range(80).batch(8)))
    steps = own.run_steps(float_sum, iterator)
    next(steps)
    session = own.controller._session  # type: ignore[attr-defined]
    with session.lock:
        session.end("the server (pid 1) ended by SIGKILL")  # what the thread that listens does
    with pytest.raises(errors.ShutdownError, match=r"the server \(pid 1\) ended by SIGKILL; make a new"):
        next(steps)
    assert steps.steps == 1
    assert list(steps) == []


def test_a_shutdown_in_the_loop_ends_it(own: cs.CentralStorageStrategy, tmp_path: Path) -> None:
    path = str(tmp_path)

    def step(batch: np.ndarray) -> None:
        Path(path, str(batch[0])).touch()

    steps = own.run_steps(step, own.experimental_distribute_dataset(cs.data.Dataset.range(80).batch(8)))
    next(steps)
    own.shutdown()
    assert len(list(tmp_path.iterdir())) == 2 * (1 + LOOKAHEAD)
    assert [next(steps) for _ in range(LOOKAHEAD)] == [None] * LOOKAHEAD
    with pytest.raises(errors.ShutdownError):
        next(steps)
    assert list(steps) == []


INTERRUPTED = """
import sys
import threading
import time
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"])
main = threading.get_ident()
results = 0

def watch(name):
    said = -1
    while name == now:
        names, frame = set(), sys._current_frames()[main]
        taken = results
        while frame is not None:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        if taken > said and "settle" in names and taken == results:
            said = taken
            # One write, so that no line of the main thread comes between.
            print(f"{name} waits after {said}\\n", end="", flush=True)
        time.sleep(0.01)

def loop(name, k, body):
    global results, now
    with strategy.scope():
        total = cs.Variable(np.zeros(2), aggregation=cs.VariableAggregation.SUM)

    def step(batch):
        total.assign_add(np.ones(2))
        if k * 8 <= batch[0]:
            print(name, "inside", flush=True)
            time.sleep(600)

    iterator = iter(strategy.experimental_distribute_dataset(cs.data.Dataset.range(160).batch(16)))
    steps = strategy.run_steps(step, iterator)
    results, now = 0, name
    threading.Thread(target=watch, args=(name,), daemon=True).start()
    try:
        for _ in steps:
            results += 1
            body(total)
    except KeyboardInterrupt:
        print(name, "interrupted after", results, flush=True)
    print(name, "total", total.numpy()[0], "steps", steps.steps, "position", iterator.position, flush=True)
    steps.close()
    print(name, "and", strategy.run(lambda: 5), flush=True)

def wait(total):
    print("waiting", flush=True)
    time.sleep(600)

loop("first", 0, lambda total: None)
loop("fourth", 6, lambda total: None)
loop("operation", 6, lambda total: total.numpy())
loop("left", 100, wait)
now = None
"""


@pytest.mark.timeout(120)
def test_ctrl_c_cancels_the_step_at_hand_and_those_after_it_and_leaves_what_was_sent() -> None:
    """In the first step, in the fourth, in an operation of the loop, which ends with that step, and between steps."""
    with start("-c", INTERRUPTED) as child:
        for name, begun, waits in (("first", 0, 0), ("fourth", 3, 3), ("operation", 3, 2)):
            child.wait_for(f"{name} inside")
            child.wait_for(f"^{name} waits after {waits}$")
            child.press_ctrl_c()
            child.wait_for(rf"^{name} interrupted after \d")
            child.wait_for(rf"^{name} total {2.0 * begun} steps {begun} position {begun + 1}$")
            child.wait_for(f"^{name} and 5$")
        child.wait_for("^waiting$")
        child.press_ctrl_c()
        sent = 1 + LOOKAHEAD
        child.wait_for("^left interrupted after 1$")
        child.wait_for(rf"^left total {2.0 * sent} steps {sent} position {sent}$")
        child.wait_for("^left and 5$")
        ended = child.wait().ok()
    assert "ignored" not in ended.err
    assert "failed" not in ended.err


# --- without a service ----------------------------------------------------------------------------------------------


def test_the_default_strategy() -> None:
    strategy = cs.get_strategy()
    batches = strategy.experimental_distribute_dataset(cs.data.Dataset.range(20).batch(4))
    seen: list[int] = []

    def step(batch: np.ndarray, scale: int) -> int:
        seen.append(int(batch[0]))
        if batch[0] == 12:
            raise KeyError("no more")
        return int(batch.sum()) * scale

    steps = strategy.run_steps(step, batches, kwargs={"scale": 2})
    assert next(steps) == 12
    assert seen == [0]
    assert [next(steps), next(steps)] == [44, 76]
    with pytest.raises(KeyError):
        next(steps)
    assert steps.steps == 3
    assert list(steps) == []
    assert len(list(strategy.run_steps(step, batches, 2, {"scale": 1}))) == 2
