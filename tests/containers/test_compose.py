"""docker-compose.yml with a real engine: what a user's ``docker-compose up`` does, and what can go wrong with it."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.containers.conftest import Project, docker
from tests.harness.processes import run
from tests.harness.timing import unit

pytestmark = pytest.mark.timeout(180)

Make = Callable[..., Project]

TRAIN = """
import hashlib, runpy, sys
import numpy as np
import central_storage as cs

digits = runpy.run_path(sys.argv[1] if len(sys.argv) > 1 else "/examples/digits.py")
x, y, _, _ = digits["split_digits"]()
strategy = cs.CentralStorageStrategy()
rng = np.random.default_rng(1)
with strategy.scope():
    shapes = (64, 32), (32,), (32, 10), (10,)
    parameters = [cs.Variable(rng.normal(0, 0.1, shape).astype(np.float32)) for shape in shapes]
    optimizer = cs.optimizers.Adam(learning_rate=0.002)

def step(x, y):
    gradients = [np.empty_like(p) for p in map(np.asarray, parameters)]
    weights = np.full(len(y), 1 / 64, np.float32)
    digits["loss_and_gradients"](x, y, weights, list(map(np.asarray, parameters)), gradients)
    optimizer.apply_gradients(zip(gradients, parameters, strict=True))

batches = cs.data.Dataset.from_tensor_slices((x, y)).batch(64)
for batch in strategy.experimental_distribute_dataset(batches):
    strategy.run(step, args=batch)
weights = b"".join(p.numpy().tobytes() for p in parameters)
print(strategy.num_replicas_in_sync, hashlib.sha256(weights).hexdigest())
"""
OBSERVE = """
import central_storage as cs
with cs.connect() as service:
    names = [variable.spec.name for variable in service.variables()]
    print(service.replicas, service.transport, [service.get(name).shape for name in names])
"""
BLOCK = """
import time
import central_storage as cs

def step():
    print("at work", flush=True)
    time.sleep(600)

cs.CentralStorageStrategy().run(step)
"""


def trained(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.splitlines()[-1]


def wait_for(project: Project, pattern: str) -> None:
    deadline = time.monotonic() + unit(30)
    while not re.search(pattern, project.logs(), re.DOTALL):
        assert time.monotonic() < deadline, project.logs()
        time.sleep(0.2)


def test_up_trains_to_the_accuracy_and_everything_stops_in_time(project: Make) -> None:
    made = project()
    ended = made.compose("up", "--no-build", "--no-color", "--exit-code-from", "train")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"test accuracy (0\.\d+)", ended.stdout)
    assert found is not None, ended.stdout
    assert float(found[1]) >= 0.97
    assert "transport ipc + shared memory (files in the run directory)" in ended.stdout
    states = docker(
        *("ps", "-a", "--filter", f"label=com.docker.compose.project={made.name}", "--format", "{{.Names}} {{.Status}}")
    )
    assert len(states.splitlines()) == 4
    assert "(137)" not in states, states  # that is SIGKILL: the grace time was over


def test_the_same_weights_as_outside_and_what_an_observer_sees(project: Make, tmp_path: Path) -> None:
    made = project()
    made.up()
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    outside = run("cs-launch", "--devices", "cpu:0,cpu:1", script, "examples/digits.py").ok()
    assert trained(made.run(TRAIN)) == outside.lines[-1]
    seen = "2 ipc + bytes in frames [(64, 32), (32,), (32, 10), (10,)]"
    assert trained(made.run(OBSERVE)) == seen
    # Where the volume cannot even be written, no memory of the run can be shared: bytes in frames.
    volume = f"{made.name}_run:/run/central-storage:ro"
    assert docker("run", "--rm", "--read-only", "-v", volume, "central-storage:test", "python", "-c", OBSERVE) == seen


def test_nothing_is_compiled_in_a_new_container_and_nobody_is_root() -> None:
    code = "import os; from cs_server import kernels; print(os.getuid(), kernels.load().compiled)"
    assert docker("run", "--rm", "--read-only", "central-storage:test", "python", "-c", code) == "10001 0"


def test_two_projects_side_by_side_one_with_three_workers(project: Make) -> None:
    first, second = project(), project(CS_WORKERS="3")
    first.up()
    second.up()
    assert trained(first.run(TRAIN)).startswith("2 ")
    assert trained(second.run(TRAIN)).startswith("3 ")
    first.close()
    assert trained(second.run(OBSERVE)).startswith("3 ")


def test_a_volume_that_is_too_small_is_refused_with_both_numbers(project: Make) -> None:
    made = project(CS_MEMORY="8m")
    made.up()
    ended = made.run(
        "import numpy as np, central_storage as cs\n"
        "strategy = cs.CentralStorageStrategy()\n"
        "with strategy.scope():\n"
        "    try:\n"
        "        cs.Variable(np.ones(4 << 20, np.float32), name='large')\n"
        "    except MemoryError as error:\n"
        "        print('refused:', error)\n"
        "    small = cs.Variable(np.ones(4, np.float32), aggregation=cs.VariableAggregation.SUM)\n"
        "strategy.run(lambda: small.assign_add(small))\n"
        "print(small.numpy().tolist())\n"
    )
    assert trained(ended) == "[3.0, 3.0, 3.0, 3.0]"
    assert re.search(r"refused: .*'large'.* \d+ bytes planned .* \d{7} bytes available", ended.stdout), ended.stdout
    assert made.is_healthy()


def test_a_worker_container_that_is_killed_ends_the_training_with_the_reason(project: Make) -> None:
    made = project()
    made.up()
    ended: list[subprocess.CompletedProcess[str]] = []
    thread = threading.Thread(target=lambda: ended.append(made.run(BLOCK)))
    thread.start()
    wait_for(made, "at work.*at work")
    docker("kill", made.containers("worker")[0])
    thread.join(unit(60))
    assert ended
    assert ended[0].returncode != 0
    said = ended[0].stdout + ended[0].stderr
    assert re.search(r"ReplicaLostError: replica \d \(worker w\d, pid \d+\) ended by the end of its connection", said)


def test_a_stop_in_the_midst_of_training_needs_no_kill_and_leaves_no_zombies(project: Make) -> None:
    made = project()
    made.up()
    thread = threading.Thread(target=lambda: made.run(ORPHANS))
    thread.start()
    wait_for(made, "at work.*at work")
    for container in made.containers():
        states = docker("exec", container, "python", "-c", STATES)
        assert "Z" not in states.split(), states
    containers = made.containers()
    assert len(containers) == 3
    made.compose("stop", "-t", "10", "worker", "server")
    codes = [docker("inspect", "-f", "{{.State.ExitCode}}", each) for each in containers]
    assert "137" not in codes, codes
    thread.join(unit(60))
    assert not thread.is_alive()


ORPHANS = """
import subprocess, time
import central_storage as cs

def step():
    for _ in range(5):
        subprocess.run(["sh", "-c", "sleep 0.1 &"], check=True)
    time.sleep(1)
    print("at work", flush=True)
    time.sleep(600)

cs.CentralStorageStrategy().run(step)
"""
STATES = """
import glob
for name in glob.glob("/proc/[0-9]*/stat"):
    try:
        print(open(name).read().rpartition(")")[2].split()[0])
    except OSError:
        pass
"""
