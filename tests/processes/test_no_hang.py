"""No silent hang: deaths, Ctrl-C and replicas that disagree end a run within seconds, with the reason in words."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness.processes import start
from tests.harness.replicas import context, replica
from tests.harness.timing import unit

import central_storage as cs
from central_storage import errors

SOON = 10  # units; it takes well under a second, and 5 s is what is promised


def meet() -> float:
    return float(context().all_reduce("SUM", np.ones(2))[0])


@pytest.fixture
def total(mortal: cs.CentralStorageStrategy) -> cs.Variable:
    with mortal.scope():
        return cs.Variable(np.zeros(2), aggregation=cs.VariableAggregation.SUM)


# --- deaths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moment", ["before a merge point", "others wait", "after a merge point"])
def test_a_worker_is_killed_in_a_run(
    mortal: cs.CentralStorageStrategy, total: cs.Variable, victim: int, moment: str
) -> None:
    def step() -> None:
        if moment == "after a merge point":
            meet()
        if replica() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        if moment == "others wait":
            meet()

    mortal.run(lambda: total.assign_add(np.ones(2)))
    begun = time.monotonic()
    with pytest.raises(errors.ReplicaLostError) as caught:
        mortal.run(step)
    assert time.monotonic() - begun < unit(SOON)
    for words in (rf"replica {victim} .*w{victim}\.\d+", "SIGKILL", "it was the second worker of this replica"):
        assert re.search(words, str(caught.value))
    np.testing.assert_array_equal(total.numpy(), [2, 2])
    assert mortal.experimental_local_results(mortal.run(replica)) == (0, 1)  # by a third worker


def test_a_worker_that_exits_in_a_run_tells_its_last_lines(mortal: cs.CentralStorageStrategy) -> None:
    def step() -> None:
        print("these are my last words", flush=True)
        os._exit(3)

    with pytest.raises(errors.ReplicaLostError, match=r"(?s)exit code 3.*these are my last words"):
        mortal.run(step)


@pytest.fixture
def unprotected() -> Iterator[cs.CentralStorageStrategy]:
    with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], server_recovery=False) as strategy:
        yield strategy


@pytest.mark.parametrize("moment", ["in a run", "between runs"])
def test_the_server_is_killed_without_recovery(unprotected: cs.CentralStorageStrategy, moment: str) -> None:
    own = unprotected
    pid = own.statistics().pid

    def step() -> None:
        if replica() == 1:
            os.kill(pid, signal.SIGKILL)
        meet()

    def ask() -> None:
        os.kill(pid, signal.SIGKILL)
        own.statistics()

    begun = time.monotonic()
    with pytest.raises(errors.ReplicaLostError, match=rf"the server \(pid {pid}\) ended by SIGKILL and is not"):
        own.run(step) if moment == "in a run" else ask()
    assert time.monotonic() - begun < unit(SOON)
    with pytest.raises(errors.ShutdownError, match="make a new CentralStorageStrategy"):
        own.run(replica)


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------

INTERRUPTED = """
import time
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"])

def meet():
    return cs.get_replica_context().all_reduce("SUM", np.ones(2))

def asleep():
    time.sleep(600)

def busy():
    while True:
        pass

def one_waits():
    if cs.get_replica_context().replica_id_in_sync_group == 0:
        meet()
    time.sleep(600)

def stubborn():
    while True:
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            print("no")

for function in (asleep, busy, one_waits, stubborn):
    name = function.__name__
    with strategy.scope():
        total = cs.Variable(np.zeros(2), aggregation=cs.VariableAggregation.SUM)

    def step():
        total.assign_add(np.ones(2))
        print(name, "inside", flush=True)
        function()

    try:
        strategy.run(step)
    except KeyboardInterrupt:
        print(name, "interrupted", flush=True)
    print(name, "total", total.numpy()[0], strategy.run(meet).values[0][0], flush=True)
"""


def test_ctrl_c_leaves_the_strategy_usable_and_a_second_one_ends_the_service() -> None:
    with start("-c", INTERRUPTED) as child:
        for name in ("asleep", "busy", "one_waits"):
            child.wait_for(rf"{name} inside[\s\S]*{name} inside")
            child.press_ctrl_c()
            child.wait_for(f"{name} interrupted", unit(SOON))
            # What the cancelled run had not committed is not committed, and the next run works.
            assert child.wait_for(rf"{name} total (\S+) (\S+)").groups() == ("0.0", "2.0")
        child.wait_for(r"stubborn inside[\s\S]*stubborn inside")
        child.press_ctrl_c()
        child.wait_for("no$")
        child.press_ctrl_c()
        assert child.wait(unit(SOON)).code != 0
        assert "ShutdownError" in child.err
        assert child.left() == []


# --- forked children --------------------------------------------------------------------------------------------------

FORKED_DURING_A_RUN = """
import os, sys, threading
import numpy as np
import central_storage as cs

def step(inside, done):
    os.write(os.open(inside, os.O_WRONLY), b"!")
    os.read(os.open(done, os.O_RDONLY), 1)

pipes = [(os.path.join(sys.argv[1], f"inside{n}"), os.path.join(sys.argv[1], f"done{n}")) for n in range(2)]
for pair in pipes:
    os.mkfifo(pair[0])
    os.mkfifo(pair[1])
strategy = cs.CentralStorageStrategy(["cpu:0", "cpu:1"])
[batch] = strategy.experimental_distribute_dataset([(np.array([a for a, _ in pipes]), np.array([b for _, b in pipes]))])
thread = threading.Thread(target=strategy.run, args=(lambda b: step(str(b[0][0]), str(b[1][0])), (batch,)))
thread.start()
for inside, _ in pipes:
    os.read(os.open(inside, os.O_RDONLY), 1)
child = os.fork()
if child == 0:
    try:
        strategy.run(print)
    except cs.errors.ShutdownError as error:
        print("refused:", error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
for _, done in pipes:
    os.write(os.open(done, os.O_WRONLY), b"!")
thread.join()
print("went on", strategy.run(lambda: 1), flush=True)
"""


def test_a_child_forked_during_a_run_of_another_thread_is_refused_at_once(tmp_path: Path) -> None:
    with start("-c", FORKED_DURING_A_RUN, tmp_path) as child:
        child.wait_for("refused: .*forked child")
        child.wait_for("went on 1")
        child.wait().ok()
        assert child.left() == []


# --- replicas that disagree -------------------------------------------------------------------------------------------


def only_one_meets() -> None:
    if replica() == 0:
        meet()


def one_gathers() -> None:
    if replica() == 0:
        meet()
    else:
        context().all_gather(np.ones(2), axis=0)


def one_means() -> None:
    context().all_reduce("SUM" if replica() == 0 else "MEAN", np.ones(2))


def one_meets_again() -> None:
    meet()
    if replica() == 1:
        meet()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (only_one_meets, ("all_reduce", "returned")),
        (one_gathers, ("all_reduce", "all_gather")),
        (one_means, ("SUM", "MEAN")),
        (one_meets_again, ("all_reduce", "returned")),
    ],
)
def test_replicas_that_disagree(
    two: cs.CentralStorageStrategy, function: Callable[[], Any], words: tuple[str, ...]
) -> None:
    begun = time.monotonic()
    with pytest.raises(errors.MergeMismatchError) as caught:
        two.run(function)
    assert time.monotonic() - begun < unit(SOON)
    message = str(caught.value)
    for word in ("replica 0", "replica 1", *words):
        assert word in message
    assert re.search(rf"{re.escape(__file__)}:\d+", message), message
    assert two.experimental_local_results(two.run(meet)) == (2.0, 2.0)


def test_an_error_of_the_function_goes_before_the_mismatch_it_caused(two: cs.CentralStorageStrategy) -> None:
    def one_fails() -> None:
        if replica() == 1:
            raise LookupError("the reason")
        meet()

    with pytest.raises(LookupError, match="the reason"):
        two.run(one_fails)
    assert two.experimental_local_results(two.run(meet)) == (2.0, 2.0)


def test_unequal_numbers_of_updates_are_a_mismatch_after_the_agreed_ones(two: cs.CentralStorageStrategy) -> None:
    with two.scope():
        total = cs.Variable(np.zeros(2), aggregation=cs.VariableAggregation.SUM)

    def step() -> None:
        for _ in range(2 + replica()):
            total.assign_add(np.ones(2))

    with pytest.raises(errors.MergeMismatchError, match="replica 1"):
        two.run(step)
    np.testing.assert_array_equal(total.numpy(), [4, 4])
