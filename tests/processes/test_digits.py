"""The demonstration as a user runs it, and every way a script may end: nothing of it stays behind."""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tests.harness.digits import DIGITS, quick_digits
from tests.harness.processes import Child, living_after, run, start
from tests.harness.timing import unit

from central_storage.launch.run_directory import RunDirectory

DEVICES = ("--devices", "cpu:0,cpu:1")
LAUNCH = ("cs-launch", *DEVICES, "--parameter-device", "cpu:0")


def numbers(lines: list[str], pattern: str) -> list[tuple[str, ...]]:
    """The groups of ``pattern`` in each line in which it stands."""
    return [found.groups() for line in lines if (found := re.search(pattern, line))]


def test_the_demonstration() -> None:
    ended = run(*LAUNCH, DIGITS, "--epochs", "20", timeout=unit(60)).ok()
    *_, (loss,) = numbers(ended.err.splitlines(), r"training: 20 of 20 epochs in .*, loss (0\.\d+)$")
    assert float(loss) < 0.3
    [(script, steps)] = numbers(ended.lines, r"this script \(pid (\d+)\) sent (\d+) steps")
    [(server, commits)] = numbers(ended.lines, r"server \(pid (\d+)\) made (\d+) commits to 4 variables")
    workers = numbers(ended.lines, r"worker (w\d) \(pid (\d+), cpu:(\d)\) ran (\d+) steps and brought (\d+) gradients")
    assert int(steps) == 20 * 12
    assert int(commits) >= int(steps)
    assert [(worker[0], worker[2], worker[3], worker[4]) for worker in workers] == [
        ("w0", "0", steps, steps),
        ("w1", "1", steps, steps),
    ]
    assert len({script, server, *(worker[1] for worker in workers)}) == 4
    [(accuracy,)] = numbers(ended.lines, r"test accuracy (\d\.\d{4})$")
    assert float(accuracy) >= 0.95


@pytest.mark.slow
def test_all_ways_in_and_steps_sent_ahead_do_the_same(tmp_path: Path) -> None:
    digits, few = quick_digits(tmp_path), ("--epochs", "2")
    launched = run(*LAUNCH, digits, *few).ok()
    alone = run(digits, *DEVICES, *few).ok()
    ahead = run(digits, *DEVICES, *few, "--run-steps").ok()
    for pattern in (r"2 of 2 epochs in .*, loss (\d\.\d+)$", r"sent (\d+) steps", r"test accuracy (\d\.\d{4})$"):
        found, *others = [
            numbers([*ended.err.splitlines(), *ended.lines], pattern) for ended in (launched, alone, ahead)
        ]
        assert [found, found] == others
        assert found != []


# --- how scripts end ------------------------------------------------------------------------------------------------

BEGIN = """
import os, sys, time
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy({devices})
with strategy.scope():
    v = cs.Variable(np.zeros(4, np.float32), aggregation=cs.VariableAggregation.SUM)

def step():
    v.assign_add(np.ones(4, np.float32))
    return int(cs.get_replica_context().replica_id_in_sync_group)

print("replicas", strategy.experimental_local_results(strategy.run(step)), v.numpy()[0], flush=True)
"""
ALONE = BEGIN.format(devices="['cpu:0', 'cpu:1']")
ATTACHED = BEGIN.format(devices="")
TRAINED = re.escape("replicas (0, 1) 2.0")


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("", 0, ""),
        pytest.param("strategy.shutdown(); strategy.shutdown()", 0, "", marks=pytest.mark.slow),
        pytest.param("sys.exit(3)", 3, "", marks=pytest.mark.slow),
        pytest.param("1 / 0", 1, "ZeroDivisionError: division by zero", marks=pytest.mark.slow),
        ("os._exit(4)", 4, ""),
    ],
    ids=["end", "shutdown", "exit", "exception", "death"],
)
def test_a_script_that_ends_leaves_nothing(end: str, code: int, words: str) -> None:
    ended = run("-c", f"{ALONE}\n{end}")
    assert re.search(TRAINED, ended.out), ended
    assert ended.code == code
    assert words in ended.err


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that trains once and then waits in a run that does not end."""
    path = tmp_path / "waits.py"
    path.write_text(f"{ATTACHED}\nprint('waiting', flush=True)\nstrategy.run(lambda: time.sleep(600))\n")
    return path


def is_over(child: Child, *codes: int) -> None:
    ended = child.wait(unit(10))
    assert ended.code in codes, ended
    assert child.left(unit(5)) == []


@pytest.mark.parametrize(
    ("way", "number", "codes"),
    [
        ("alone", signal.SIGKILL, (-9,)),
        ("launched", signal.SIGTERM, (-15, 143)),
        pytest.param("alone", signal.SIGTERM, (-15, 143), marks=pytest.mark.slow),
        pytest.param("launched", signal.SIGKILL, (-9,), marks=pytest.mark.slow),
    ],
)
def test_a_killed_script_or_launcher_takes_all_along(
    script: Path, way: str, number: signal.Signals, codes: tuple[int, ...]
) -> None:
    with start(*(LAUNCH if way == "launched" else ()), script) as child:
        child.wait_for("waiting")
        child.signal(number)
        is_over(child, *codes)
    RunDirectory().remove()  # what a killed supervisor could not remove, the next one does


@pytest.mark.parametrize("way", ["alone", "launched"])
def test_ctrl_c_ends_a_script_that_does_not_catch_it(script: Path, way: str) -> None:
    with start(*(LAUNCH if way == "launched" else ()), script) as child:
        child.wait_for("waiting")
        child.press_ctrl_c()
        is_over(child, {"alone": -2, "launched": 130}[way])
        assert "KeyboardInterrupt" in child.err


def test_a_forked_child_does_not_keep_the_service_of_a_killed_script() -> None:
    forks = f"""{ALONE}
child = os.fork()
if child == 0:
    time.sleep(600)
print("forked", child, flush=True)
time.sleep(600)
"""
    with start("-c", forks) as child:
        forked = int(child.wait_for(r"forked (\d+)").group(1))
        others = [process for process in child.processes() if process.pid != forked]
        child.signal(signal.SIGKILL)
        child.wait()
        living_after(unit(5), others)
        assert [process.pid for process in child.processes()] == [forked]


# --- a notebook -----------------------------------------------------------------------------------------------------

LOUD = """
def loud():
    print("hello from", cs.get_replica_context().replica_id_in_sync_group)
    step()

strategy.run(loud)
strategy.shutdown()  # which hears the last words of its processes
"""


def test_a_notebook_cell_trains_and_shows_what_replicas_print() -> None:
    cells = map(nbformat.v4.new_code_cell, (ALONE, LOUD))
    notebook = nbformat.v4.new_notebook(cells=list(cells))
    asyncio.run(NotebookClient(notebook, timeout=int(unit(30)), kernel_name="python3").async_execute())
    shown = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
    assert re.search(TRAINED, shown[0])
    assert "hello from 0" in shown[1]
    assert "hello from 1" in shown[1]
