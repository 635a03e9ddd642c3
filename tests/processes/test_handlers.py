"""Handlers of signals that the script has set, while it trains."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.harness.processes import start

# A step ends when the handler has been called, or is cancelled.
SCRIPT = """
import pathlib, signal, sys, time

import central_storage as cs

there = pathlib.Path(sys.argv[1])
strategy = cs.CentralStorageStrategy(["cpu:0"])
with strategy.scope():
    w = cs.Variable(0.0, aggregation=cs.VariableAggregation.SUM)


def step():
    w.assign_add(1.0)
    print("computing", flush=True)
    while not there.exists():
        time.sleep(0.01)
"""

READS = """
def handler(*_):
    there.touch()
    print("read", float(w.numpy()), flush=True)

signal.signal(signal.SIGUSR1, handler)
strategy.run(step)
strategy.run(step)
print("then", float(w.numpy()))
"""

_RUNS = """
signal.signal(signal.SIGUSR1, handler)
try:
    strategy.run(step)
except TimeoutError as error:
    print("raised", error)
there.touch()
strategy.run(step)
print("then", float(w.numpy()))
"""

RAISES = f"""
def handler(*_):
    raise TimeoutError("too long")
{_RUNS}"""

READS_AND_RAISES = f"""
def handler(*_):
    there.touch()
    print("read", float(w.numpy()), flush=True)
    raise TimeoutError("too long")
{_RUNS}"""

RAISES_AMONG_STEPS = """
def handler(*_):
    raise TimeoutError("too long")

signal.signal(signal.SIGUSR1, handler)
data = strategy.experimental_distribute_dataset(cs.data.Dataset.range(8).batch(1))
try:
    for _ in strategy.run_steps(lambda _: step(), data):
        print("passed")
except TimeoutError as error:
    print("raised", error)
there.touch()
strategy.run(step)
print("then", float(w.numpy()))
"""

# What the step prints wakes the thread that shows it, which then waits for the end of the run.
SHUTS_DOWN = """
def handler(*_):
    there.touch()
    strategy.shutdown()


def prints():
    while not there.exists():
        print("computing", flush=True)
        time.sleep(0.001)


signal.signal(signal.SIGUSR1, handler)
try:
    strategy.run(prints)
except cs.errors.ShutdownError as error:
    print("raised", str(error).partition(";")[0])
"""

NOTES = """
def handler(*_):
    there.touch()

signal.signal(signal.SIGUSR1, handler)
signal.signal(signal.SIGINT, handler)
strategy.run(step)
print("then", float(w.numpy()))
"""


@pytest.mark.parametrize(
    ("handler", "signum", "printed"),
    [
        (READS, signal.SIGUSR1, "read 1.0\nthen 2.0\n"),
        (RAISES, signal.SIGUSR1, "raised too long\nthen 1.0\n"),
        (READS_AND_RAISES, signal.SIGUSR1, "read 1.0\nraised too long\nthen 2.0\n"),
        (RAISES_AMONG_STEPS, signal.SIGUSR1, "raised too long\nthen 1.0\n"),
        (SHUTS_DOWN, signal.SIGUSR1, "raised this strategy was shut down\n"),
        (NOTES, signal.SIGUSR1, "then 1.0\n"),
        (NOTES, signal.SIGINT, "then 1.0\n"),
    ],
    ids=["reads", "raises", "reads and raises", "raises among steps", "shuts down", "notes", "notes Ctrl-C"],
)
def test_a_handler_is_called_while_a_step_computes(
    tmp_path: Path, handler: str, signum: signal.Signals, printed: str
) -> None:
    script = tmp_path / "trains.py"
    script.write_text(SCRIPT + handler)
    with start(script, tmp_path / "there") as child:
        child.wait_for("computing")
        child.signal(signum)
        ended = child.wait()
    assert ended.code == 0, ended
    assert ended.out.replace("[w0] ", "").replace("computing\n", "") == printed


LEAVES_STEPS = """
def passes(number):
    w.assign_add(1.0)
    while number.sum() == 1 and not there.exists():
        time.sleep(0.01)


def steps():
    data = cs.data.Dataset.range(5).batch(1)
    return strategy.run_steps(passes, strategy.experimental_distribute_dataset(data))


def handler(*_):
    there.touch()
    left.append(steps())
    next(left[0])


def in_the_first_wait(timeout):
    session.receive = receive
    signal.raise_signal(signal.SIGUSR1)


left = []
signal.signal(signal.SIGUSR1, handler)
first = steps()
next(first)
session = strategy.controller._session
receive, session.receive = session.receive, in_the_first_wait
print("read", float(w.numpy()), left[0]._series.ahead)
print("left", sum(1 for _ in left[0]))
"""


def test_an_operation_waits_for_the_steps_that_a_handler_sends_ahead_in_its_wait(tmp_path: Path) -> None:
    script = tmp_path / "trains.py"
    script.write_text(SCRIPT + LEAVES_STEPS)
    with start(script, tmp_path / "there") as child:
        ended = child.wait()
    assert ended.code == 0, ended
    assert ended.out == "read 6.0 0\nleft 4\n"
