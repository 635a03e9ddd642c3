"""Saves of a script that is ended or killed: by SIGTERM, which saves once more, and by SIGKILL during a save."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from tests.harness.processes import Child, Ended, start
from tests.harness.timing import unit

import central_storage as cs

#: A training whose state says how many steps it has made. It prints where it is, a replica too.
TRAINS = """
import sys

import numpy as np

import central_storage as cs

directory, ahead = sys.argv[1], int(sys.argv[2])
strategy = cs.CentralStorageStrategy(["cpu:0"])
print("start", flush=True)
with strategy.scope():
    w, sgd = cs.Variable(np.zeros(50_000, np.float32)), cs.optimizers.SGD(1.0)
data = strategy.experimental_distribute_dataset(cs.data.Dataset.range(1 << 20).batch(1))
checkpoint = cs.train.Checkpoint(w=w, sgd=sgd, data=data)
manager = cs.train.CheckpointManager(checkpoint, directory, max_to_keep=2, every_steps=3, on_sigterm=True)
print("made", flush=True)
manager.restore_or_initialize()
print("restored", int(sgd.iterations), flush=True)


def step(element):
    print("computing", flush=True)
    sgd.apply_gradients([(np.ones(50_000, np.float32), w)])
    print("applied", flush=True)


if ahead:
    for _ in strategy.run_steps(step, data):
        print("step", flush=True)
else:
    for element in data:
        print("between", flush=True)
        strategy.run(step, (element,))
        print("step", int(sgd.iterations), flush=True)
        if int(sgd.iterations) % 4 == 0:
            print("saving", flush=True)
            manager.save()
            print("saved", flush=True)
"""
#: What the script prints, and when, as it gets SIGTERM.
PHASES = ["restored 0", "computing", "applied", "between", "step", "saving", "saved"]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saving") / "trains.py"
    path.write_text(TRAINS)
    return path


def loaded(directory: Path) -> int:
    """The number of steps of the newest checkpoint, all of whose values are of one moment."""
    w, sgd = cs.Variable(np.zeros(50_000, np.float32)), cs.optimizers.SGD()
    checkpoint = cs.train.Checkpoint(w=w, sgd=sgd)
    manager = cs.train.CheckpointManager(checkpoint, directory, max_to_keep=2)
    assert manager.restore_or_initialize() is not None
    assert not manager.skipped_checkpoints
    steps = int(sgd.iterations)
    assert set(w.numpy()) == {-float(steps)}
    return steps


def steps_of(out: str) -> int:
    """The last step that the script has printed."""
    return max(map(int, re.findall(r"^step (\d+)", out, re.MULTILINE)), default=0)  # the worker prints in between


def end(script: Path, directory: Path, phase: str, count: int, ahead: int) -> None:
    """End a training by SIGTERM when it has printed ``phase`` for the ``count``-th time."""
    with start(script, directory, str(ahead)) as child:
        child.wait_for(rf"(?s)(^(\[w0\] )?{phase}\b.*?){{{count}}}")
        child.signal(signal.SIGTERM)
        ended = over(child)
    assert ended.code == -signal.SIGTERM, ended  # 143 to a shell
    steps = loaded(directory)
    if ahead:
        assert steps >= ended.out.count("step")
    else:
        assert steps in (steps_of(ended.out), steps_of(ended.out) + 1)  # the last one may not have been printed


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_leaves_a_checkpoint_of_the_last_step(script: Path, tmp_path: Path, phase: str) -> None:
    end(script, tmp_path, phase, 1 if phase == "restored 0" else 2, 0)


def test_sigterm_in_steps_sent_ahead_leaves_a_checkpoint(script: Path, tmp_path: Path) -> None:
    end(script, tmp_path, "computing", 5, 1)


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(42))
def test_sigterm_at_any_moment_leaves_a_checkpoint(script: Path, tmp_path: Path, trial: int) -> None:
    chance = random.Random(trial)
    phase = chance.choice(PHASES)
    end(
        script,
        tmp_path,
        phase,
        1 if phase == "restored 0" else chance.randint(1, 9),
        trial % 2 * (phase in PHASES[1:3]),
    )


def test_sigterm_before_anything_is_restored_hides_no_checkpoint(script: Path, tmp_path: Path) -> None:
    end(script, tmp_path, "step", 2, 0)
    before = loaded(tmp_path)
    with start(script, tmp_path, "0") as child:
        child.wait_for("^start$")
        child.signal(signal.SIGTERM)
        assert over(child).code == -signal.SIGTERM
    assert loaded(tmp_path) >= before > 0


@pytest.mark.parametrize("place", ["save.copied", "save.checked"])
def test_a_kill_in_the_thread_leaves_a_whole_checkpoint(script: Path, tmp_path: Path, place: str) -> None:
    with start(script, tmp_path, "0", environment={"CS_FAILPOINTS": f"{place}=kill@3"}) as child:
        ended = over(child)
    assert ended.code == -signal.SIGKILL
    assert 4 <= loaded(tmp_path) <= steps_of(ended.out) + 1
    found = cs.train.CheckpointManager(cs.train.Checkpoint(w=cs.Variable(0.0)), tmp_path, max_to_keep=2)
    assert len(found.checkpoints) <= 3


@pytest.mark.parametrize("victim", ["cs_server", "cs_worker"])
def test_a_save_outlives_server_and_worker(script: Path, tmp_path: Path, victim: str) -> None:
    """They die while a thread writes the checkpoint of step 3."""
    environment = {"CS_FAILPOINTS": "save.copied=stop"}
    with start(script, tmp_path, "0", environment=environment) as child:
        stopped(child)
        for process in child.processes():
            if victim in " ".join(process.cmdline()):
                process.kill()
        child.signal(signal.SIGCONT)
        child.wait_for("^step 9$")
        child.signal(signal.SIGTERM)
        assert over(child).code == -signal.SIGTERM
    assert loaded(tmp_path) >= 9


def over(child: Child) -> Ended:
    """Wait for the end of the script, and of all that it has started."""
    ended = child.wait()
    assert not child.left(), ended
    return ended


def stopped(child: Child) -> None:
    """Wait until the script has stopped itself."""
    script = psutil.Process(child.pid)
    while script.status() != psutil.STATUS_STOPPED:
        script.parent()  # any system call: the state changes without a signal to this process


ENDS = """
import sys

import central_storage as cs

w = cs.Variable(1.0)
checkpoint = cs.train.Checkpoint(w=w)
checkpoint.save(sys.argv[1] + "/ckpt", options=cs.train.CheckpointOptions(enable_async=True))
if sys.argv[2] == "interrupted":
    raise KeyboardInterrupt
"""


@pytest.mark.parametrize("how", ["ends", "interrupted", "fails"])
def test_the_end_of_the_script_waits_for_the_save(tmp_path: Path, how: str) -> None:
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    directory = tmp_path / "there"
    if how == "fails":
        directory.write_text("a file, so nothing can be saved in it")
    environment = {"CS_FAILPOINTS": "save.copied=sleep(0.5)"}
    with start(script, directory, how, environment=environment) as child:
        ended = over(child)
    if how == "fails":
        assert ended.err.count("ckpt-1.safetensors") >= 2  # when it happened, and at the end
        assert "the script ends without the checkpoint" in ended.err
        assert ended.code == 120
        return
    assert ended.code == (0 if how == "ends" else -signal.SIGINT)
    assert [path.name for path in directory.iterdir()] == ["ckpt-1.safetensors"]


LAST = """
import atexit, sys

import central_storage as cs
from central_storage.checkpoint import disk


def refuse(*_):
    raise OSError(28, "No space left on device")


disk.write_at = refuse
atexit.register(print, "a later handler")
checkpoint = cs.train.Checkpoint(w=cs.Variable(1.0))
manager = cs.train.CheckpointManager(checkpoint, sys.argv[1], max_to_keep=1, if_save_fails=sys.argv[2])
manager.save(options=cs.train.CheckpointOptions(enable_async=True))
print("last words")
"""


@pytest.mark.parametrize(("policy", "code"), [("raise", 120), ("stop", 120), ("continue", 0)])
def test_a_script_does_not_end_well_without_its_last_checkpoint(tmp_path: Path, policy: str, code: int) -> None:
    script = tmp_path / "last.py"
    script.write_text(LAST)
    with start(script, tmp_path / "there", policy) as child:
        ended = over(child)
    assert ended.code == code, ended
    assert "the script ends without the checkpoint" in ended.err
    assert ("CheckpointSaveError" in ended.err) == bool(code)
    assert "last words" in ended.out
    assert "a later handler" in ended.out


FORKS = """
import os, signal, sys, time

import central_storage as cs

checkpoint = cs.train.Checkpoint(w=cs.Variable(1.0))
manager = cs.train.CheckpointManager(checkpoint, sys.argv[1], max_to_keep=2, on_sigterm=True)
manager.restore_or_initialize()
reading, writing = os.pipe()
child = os.fork()
if not child:
    os.write(writing, b"there")
    while True:
        time.sleep(0.01)
os.read(reading, 5)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
print("the child's signal:", os.WTERMSIG(status), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_forked_child_saves_nothing_at_sigterm(tmp_path: Path) -> None:
    """As a worker of multiprocessing, which ends by SIGTERM."""
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    with start(script, tmp_path / "there") as child:
        ended = over(child)
    assert ended.code == -signal.SIGTERM
    assert f"the child's signal: {signal.SIGTERM:d}\n" in ended.out
    assert ended.err.count("saving a checkpoint") == 1
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["ckpt-1.safetensors"]


WAITS = """
import sys, time

import central_storage as cs

strategy = cs.CentralStorageStrategy(["cpu:0"])
with strategy.scope():
    w = cs.Variable(0.0, aggregation=cs.VariableAggregation.SUM)
manager = cs.train.CheckpointManager(cs.train.Checkpoint(w=w), sys.argv[1], max_to_keep=2, on_sigterm=True)
manager.restore_or_initialize()


def step():
    print("computing", flush=True)
    time.sleep(4.0)  # longer than a script without a save gets
    w.assign_add(1.0, read_value=False)


while True:
    strategy.run(step)
"""


@pytest.mark.parametrize("grace", ["30", "0"])
def test_the_launcher_waits_for_a_save(tmp_path: Path, grace: str) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    directory = tmp_path / "there"
    launcher = ("cs-launch", "--stop-grace", grace, str(script), str(directory))
    with start(*launcher) as child:
        child.wait_for("computing")
        child.signal(signal.SIGTERM)
        assert over(child).code == 128 + signal.SIGTERM
    assert list(directory.glob("*.safetensors") if directory.exists() else []) == (
        [directory / "ckpt-1.safetensors"] if grace == "30" else []
    )


SAVES_BY_ITSELF = """
import signal, sys, time

import central_storage as cs
from central_storage.checkpoint import disk


def slow(file):
    print("syncing", flush=True)
    time.sleep(4.0)  # longer than a script without a save gets


disk.sync = slow
strategy = cs.CentralStorageStrategy(["cpu:0"])
with strategy.scope():
    w = cs.Variable(0.0)
manager = cs.train.CheckpointManager(cs.train.Checkpoint(w=w), sys.argv[1], max_to_keep=2)
if sys.argv[2] == "handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved", manager.save())))
print("trains", flush=True)
try:
    while True:
        strategy.run(lambda: None)
except KeyboardInterrupt:
    print("saved", manager.save())
"""


@pytest.mark.parametrize(("how", "number"), [("handler", signal.SIGTERM), ("interrupt", signal.SIGINT)])
def test_the_launcher_waits_for_a_save_without_a_thread(tmp_path: Path, how: str, number: signal.Signals) -> None:
    """Which the script makes in a handler of its own, or after Ctrl-C."""
    script = tmp_path / "saves.py"
    script.write_text(SAVES_BY_ITSELF)
    with start("cs-launch", str(script), str(tmp_path / "there"), how) as child:
        child.wait_for("trains")
        child.signal(number)
        ended = over(child)
    assert "saved" in ended.out, ended
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["ckpt-1.safetensors"]


@pytest.mark.parametrize("trial", [0, *(pytest.param(trial, marks=pytest.mark.slow) for trial in range(1, 20))])
def test_a_stop_by_docker_saves_and_is_in_time(script: Path, tmp_path: Path, trial: int) -> None:
    """``docker stop`` sends SIGTERM to cs-launch, and SIGKILL 10 seconds later."""
    chance = random.Random(trial)
    with start("cs-launch", str(script), str(tmp_path), str(trial % 2)) as child:
        count = chance.randint(1, 12)
        child.wait_for(rf"(?s)({chance.choice(['computing', 'applied', 'step'])}.*?){{{count}}}")
        begun = time.monotonic()
        child.signal(signal.SIGTERM)
        ended = over(child)
        taken = time.monotonic() - begun
    assert ended.code == 128 + signal.SIGTERM, ended
    assert taken < unit(10)
    assert loaded(tmp_path) >= ended.out.count("step")


def test_two_managers_save_to_one_directory_by_themselves(script: Path, tmp_path: Path) -> None:
    with start(script, tmp_path, "0") as one, start(script, tmp_path, "0") as other:
        for child in (one, other):
            child.wait_for(r"(?s)(^step .*?){9}")
        for child in (one, other):
            child.signal(signal.SIGTERM)
            ended = over(child)
            assert ended.code == -signal.SIGTERM
            assert "could not be saved" not in ended.err
    assert loaded(tmp_path) >= 9
