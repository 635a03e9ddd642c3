"""docker-compose.yml with a real engine: what a user's ``docker-compose up`` does, and what can go wrong with it."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable

import pytest
from tests.containers.conftest import COMPOSES, Project, docker
from tests.harness.processes import ROOT, run
from tests.harness.timing import unit

pytestmark = pytest.mark.timeout(180)

Make = Callable[..., Project]

IMAGE = os.environ.get("CS_IMAGE", "central-storage")
SECCOMP = ROOT / "tests/containers/no_shared_memory.json"

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
    deadline = time.monotonic() + unit(60)
    while not re.search(pattern, project.logs(), re.DOTALL):
        assert time.monotonic() < deadline, project.logs()
        time.sleep(0.5)


class Blocked:
    """A script that is in the midst of a step, in a container of its own."""

    def __init__(self, project: Project, code: str) -> None:
        self._ended: list[subprocess.CompletedProcess[str]] = []
        self._thread = threading.Thread(target=lambda: self._ended.append(project.run(code)))
        self._thread.start()
        wait_for(project, "at work.*at work")

    def end(self) -> subprocess.CompletedProcess[str]:
        self._thread.join(unit(60))
        assert self._ended, "it hangs"
        return self._ended[0]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """What TRAIN prints outside containers, by the number of replicas."""
    script = tmp_path_factory.mktemp("outside") / "train.py"
    script.write_text(TRAIN)

    @functools.cache
    def outside(replicas: int) -> str:
        devices = ",".join(f"cpu:{number}" for number in range(replicas))
        return run("cs-launch", "--devices", devices, script, "examples/digits.py").ok().lines[-1]

    return outside


@pytest.mark.parametrize("command", COMPOSES, ids=" ".join)
@pytest.mark.parametrize("overlays", [(), ("docker-compose.gpu.yml",)], ids=["plain", "gpu"])
def test_the_files_are_valid(project: Make, command: tuple[str, ...], overlays: tuple[str, ...]) -> None:
    checked = project(*overlays).compose("config", command=command)
    assert checked.returncode == 0, checked.stderr
    reserved = re.findall(r"device_ids:\s*- '?\"?(\d)", checked.stdout)
    assert reserved == (["0", "1"] if overlays else [])
    assert checked.stdout.count("no-new-privileges:true") == (4 if overlays else 3)
    assert checked.stdout.count("read_only: true") >= (4 if overlays else 3)


def test_up_trains_to_the_accuracy_and_everything_stops_in_time(project: Make) -> None:
    made = project()
    ended = made.compose("up", "--no-build", "--no-color", "--exit-code-from", "train")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(r"test accuracy (0\.\d+)", ended.stdout)
    assert found is not None, ended.stdout
    assert float(found[1]) >= 0.97
    words = r"transport ipc \+ shared memory \(files in the run directory\)"
    for who in (r"server_1 +\| \[supervisor\]", r"worker_1 +\| ", r"worker_2 +\| ", r"train_1 +\| \[central-storage\]"):
        assert re.search(rf"(?m)^{who}.*{words}", ended.stdout.replace("-1  |", "_1  |")), ended.stdout
    mine = f"label=com.docker.compose.project={made.name}"
    states = docker("ps", "-a", "--filter", mine, "--format", "{{.Names}} {{.Status}}")
    assert len(states.splitlines()) == 4
    assert "(137)" not in states, states  # that is SIGKILL: the grace time was over


def test_all_are_healthy_within_20_seconds(service: Project) -> None:
    service.wait_until_healthy(20)


def test_the_same_weights_as_outside_and_what_an_observer_sees(service: Project, weights: Callable[[int], str]) -> None:
    assert trained(service.run(TRAIN)) == weights(2)
    seen = "2 ipc + bytes in frames [(64, 32), (32,), (32, 10), (10,)]"
    assert trained(service.run(OBSERVE)) == seen
    # Where the volume cannot even be written, an observer gets its bytes all the same.
    volume = f"{service.name}_run:/run/central-storage:ro"
    assert docker("run", "--rm", "--read-only", "-v", volume, IMAGE, "python", "-c", OBSERVE) == seen


def test_a_script_that_cannot_share_memory_says_so_and_trains_the_same(
    service: Project, weights: Callable[[int], str]
) -> None:
    ended = subprocess.run(
        [
            *("docker", "run", "--rm", "--read-only", "--security-opt", f"seccomp={SECCOMP}"),
            *("-v", f"{service.name}_run:/run/central-storage", IMAGE, "python", "-c", TRAIN),
        ],
        capture_output=True,
        text=True,
        timeout=unit(90),
    )
    assert trained(ended) == weights(2)
    said = [line for line in ended.stderr.splitlines() if line.startswith("[central-storage]")]
    assert said == [
        "[central-storage] 2 replicas (cpu:0, cpu:1), parameters on cpu:0, transport ipc + bytes in frames: "
        "the service's memory cannot be mapped here (Operation not permitted)"
    ]


def test_three_workers_that_cannot_share_memory_beside_another_project(
    service: Project, project: Make, weights: Callable[[int], str]
) -> None:
    second = project("tests/containers/no_shared_memory.yml", CS_WORKERS="3").up()
    ended = second.run(TRAIN)
    assert trained(ended) == weights(3)
    assert "3 replicas (cpu:0, cpu:0, cpu:0), parameters on cpu:0, transport ipc + shared memory" in ended.stderr
    said = r"transport ipc \+ bytes in frames: the service's memory cannot be mapped here \(Operation not permitted\)"
    assert len(re.findall(rf"\[w[012]\] .*{said}", second.logs())) == 3
    assert trained(second.run(OBSERVE)).startswith("3 ")
    second.close()
    assert trained(service.run(OBSERVE)).startswith("2 ")


def test_nothing_is_compiled_in_a_new_container_and_nobody_is_root() -> None:
    code = "import os; from cs_server import kernels; print(os.getuid(), kernels.load().compiled)"
    assert docker("run", "--rm", "--read-only", IMAGE, "python", "-c", code) == "10001 0"


def test_a_volume_that_is_too_small_is_refused_with_both_numbers(project: Make) -> None:
    made = project(CS_MEMORY="8m").up()
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
    for container in made.containers():  # no SIGBUS
        assert docker("exec", container, "cs-launch", "--health").startswith("serving 2 replicas, ")


def test_a_container_that_is_killed_ends_the_training_with_the_reason(project: Make) -> None:
    made = project(CS_SERVE="--max-restarts 0").up()
    blocked = Blocked(made, BLOCK)
    docker("kill", made.containers("worker")[0])
    ended = blocked.end()
    assert ended.returncode != 0
    said = ended.stdout + ended.stderr
    assert re.search(r"ReplicaLostError: replica \d \(worker w\d, pid \d+\) ended by the end of its connection", said)
    made.close()

    made.up()
    blocked = Blocked(made, BLOCK)
    docker("kill", *made.containers("server"))
    ended = blocked.end()
    assert ended.returncode != 0
    assert re.search("ShutdownError: the supervisor is gone, and the service with it", ended.stderr)
    workers = made.containers("worker")
    assert docker("wait", *workers).split() == ["4", "4"], made.logs()


def test_a_stop_in_the_midst_of_training_needs_no_kill_and_leaves_no_zombies(service: Project) -> None:
    blocked = Blocked(service, ORPHANS)
    containers = service.containers()
    assert len(containers) == 3
    for container in containers:
        states = docker("exec", container, "python", "-c", STATES)
        assert "Z" not in states.split(), states
    service.compose("stop", "-t", "10", "worker", "server")
    codes = [docker("inspect", "-f", "{{.State.ExitCode}}", each) for each in containers]
    assert "137" not in codes, codes
    assert blocked.end().returncode != 0


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
