"""docker-compose.yml with a real engine: what a user's ``docker-compose up`` does, and what can go wrong with it."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from tests.containers.conftest import COMPOSES, IMAGE, LOOK_EVERY, Project, Script, docker, wait_for
from tests.harness.processes import ROOT, run
from tests.harness.timing import unit

from central_storage.launch.cli import _parser

pytestmark = pytest.mark.timeout(unit(240))

Make = Callable[..., Project]

SECCOMP = ROOT / "tests/containers/no_shared_memory.json"
#: In how many trainings processes and containers die.
ROUNDS = int(os.environ.get("CS_CONTAINER_ROUNDS", "1"))

# With a number as its second argument it stops at so many doors, in the midst of a step: replica 0 computes until the
# file is there, the others wait for it at a merge point.
TRAIN = """
import hashlib, os, runpy, sys, time
import numpy as np
import central_storage as cs

digits = runpy.run_path(sys.argv[1])
doors = int(sys.argv[2]) if len(sys.argv) > 2 else 0
x, y, _, _ = digits["split_digits"]()
strategy = cs.CentralStorageStrategy()
rng = np.random.default_rng(1)
with strategy.scope():
    shapes = (64, 32), (32,), (32, 10), (10,)
    parameters = [cs.Variable(rng.normal(0, 0.1, shape).astype(np.float32)) for shape in shapes]
    optimizer = cs.optimizers.Adam(learning_rate=0.002)

def step(x, y, door):
    context = cs.get_replica_context()
    gradients = [np.empty_like(p) for p in map(np.asarray, parameters)]
    weights = np.full(len(y), 1 / 64, np.float32)
    loss = digits["loss_and_gradients"](x, y, weights, list(map(np.asarray, parameters)), gradients)
    optimizer.apply_gradients(zip(gradients, parameters, strict=True))
    if door and context.replica_id_in_sync_group == 0:
        print("at", door, flush=True)
        while not os.path.exists(door):
            time.sleep(0.02)
    return context.all_reduce("SUM", np.float64(loss))

losses = []
batches = cs.data.Dataset.from_tensor_slices((x, y)).batch(64)
for number, (x, y) in enumerate(strategy.experimental_distribute_dataset(batches)):
    is_door = number % 4 == 3 and number // 4 < doors
    door = f"/run/central-storage/door.{number // 4}" if is_door else ""
    losses += strategy.experimental_local_results(strategy.run(step, args=(x, y, door)))
weights = b"".join(p.numpy().tobytes() for p in parameters)
print(strategy.num_replicas_in_sync, hashlib.sha256(weights + repr(losses).encode()).hexdigest())
"""
# How long what is told to end may take where nothing is saved, seconds: 10 s on a machine of the usual speed.
GRACE = str(round(unit(10)))
DIGITS = "/examples/digits.py"
OBSERVE = """
import central_storage as cs
with cs.connect() as service:
    names = [variable.spec.name for variable in service.variables()]
    print(service.replicas, service.transport, [service.get(name).shape for name in names])
"""
# The names of the network devices, and whether what may hold files refuses programs, set-uid bits and devices.
CONFINED = """
import os
print(sorted(os.listdir("/sys/class/net")))
for place in ("/tmp", "/run/central-storage"):
    flags = os.statvfs(place).f_flag
    print(place, *(bool(flags & each) for each in (os.ST_NOEXEC, os.ST_NOSUID, os.ST_NODEV)))
"""
KILL = """
import os, signal, sys
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline", "rb").read()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        continue
    if f"\\0-m\\0{sys.argv[1]}\\0".encode() in words:
        os.kill(int(pid), signal.SIGKILL)
        print("killed", pid)
"""


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


@pytest.fixture(scope="module", autouse=True)
def demonstration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Project, Callable[[], tuple[int, str]]]]:
    """What a user types first, and the wait for its exit code and output. It begins with the first test here: until the
    engine has found the server healthy, which takes ten seconds, there is nothing to compute."""
    made = Project()
    output = tmp_path_factory.mktemp("demonstration") / "output"
    up = ("up", "--no-build", "--no-color", "--timeout", GRACE, "--exit-code-from", "train")
    with output.open("wb") as stream, made.start(*up, stdout=stream, stderr=subprocess.STDOUT) as process:

        def wait() -> tuple[int, str]:
            return process.wait(unit(120)), output.read_text()

        try:
            # docker-compose is a process of several, and prints when all are there: what starts later would count as
            # left behind by the test in which it does.
            deadline = time.monotonic() + unit(30)
            while not output.stat().st_size:
                assert process.poll() is None, "docker-compose has ended, and printed nothing"
                assert time.monotonic() < deadline, "docker-compose prints nothing"
                time.sleep(LOOK_EVERY)
            yield made, wait
        finally:
            process.terminate()
            process.wait(unit(30))
            made.close()


@pytest.mark.parametrize("command", COMPOSES, ids=" ".join)
@pytest.mark.parametrize("overlays", [(), ("docker-compose.gpu.yml",)], ids=["plain", "gpu"])
def test_the_files_are_valid(project: Make, command: tuple[str, ...], overlays: tuple[str, ...]) -> None:
    checked = project(*overlays).compose("config", command=command)
    assert checked.returncode == 0, checked.stderr
    reserved = re.findall(r"device_ids:\s*- '?\"?(\d)", checked.stdout)
    assert reserved == (["0", "1"] if overlays else [])
    assert checked.stdout.count("no-new-privileges:true") == (4 if overlays else 3)
    assert checked.stdout.count("read_only: true") >= (4 if overlays else 3)
    assert checked.stdout.count("restart: unless-stopped") == (3 if overlays else 2)
    assert checked.stdout.count("network_mode: none") == (4 if overlays else 3)
    assert checked.stdout.count("pids_limit: 1024") == (4 if overlays else 3)
    assert checked.stdout.count("/tmp:noexec,nosuid,nodev") == (4 if overlays else 3)
    graces = re.findall(r"stop_grace_period: (\d+)s", checked.stdout)
    assert len(graces) == (4 if overlays else 3)
    assert min(map(float, graces)) > _parser().get_default("stop_grace")


def test_the_same_weights_as_outside_and_what_an_observer_sees(service: Project, weights: Callable[[int], str]) -> None:
    assert service.run("-c", TRAIN, DIGITS).last == weights(2)
    seen = "2 ipc + bytes in frames [(64, 32), (32,), (32, 10), (10,)]"
    observed = service.compose("run", "--rm", "--no-deps", "-T", "train", "python", "-c", OBSERVE)
    assert observed.stdout.splitlines() == [seen], observed.stderr
    # Where the volume cannot even be written, an observer gets its bytes all the same.
    volume = f"{service.name}_run:/run/central-storage:ro"
    assert docker("run", "--rm", "--read-only", "-v", volume, IMAGE, "python", "-c", OBSERVE) == seen


def test_a_script_that_cannot_share_memory_says_so_and_trains_the_same(
    service: Project, weights: Callable[[int], str]
) -> None:
    options = ("--read-only", "--security-opt", f"seccomp={SECCOMP}")
    ended = Script(service, "-c", TRAIN, DIGITS, options=options).end()
    assert ended.last == weights(2)
    transport, plan = [line for line in ended.err.splitlines() if line.startswith("[central-storage]")]
    assert transport == (
        "[central-storage] 2 replicas (cpu:0, cpu:1), parameters on cpu:0, transport ipc + bytes in frames: "
        "the service's memory cannot be mapped here (Operation not permitted)"
    )
    assert plan.startswith("[central-storage] planned memory: ")


def test_containers_have_limits_no_network_and_nowhere_to_run_what_was_written(service: Project) -> None:
    for container in service.containers():
        limits = docker("inspect", "-f", "{{.HostConfig.Memory}} {{.HostConfig.PidsLimit}}", container)
        assert limits == f"{4 << 30} 1024"
        said = docker("exec", container, "python", "-c", CONFINED).splitlines()
        assert said[0] == "['lo']"
        assert said[1:] == ["/tmp True True True", "/run/central-storage True True True"]


@pytest.mark.parametrize("directory", ["/tmp", "/run/central-storage"])
def test_what_was_written_cannot_be_run(service: Project, directory: str) -> None:
    written = f"cd {directory} && cp /bin/true here; ./here; echo $?; rm here"
    assert docker("exec", service.server, "sh", "-c", written).splitlines()[-1] == "126"


def test_a_network_may_be_chosen(project: Make) -> None:
    made = project(CS_NETWORK="bridge").up()
    assert docker("exec", made.server, "python", "-c", CONFINED).splitlines()[0] == "['eth0', 'lo']"


def test_all_are_healthy_within_20_seconds(service: Project) -> None:
    service.wait_until_healthy(20)


@pytest.mark.parametrize("number", range(ROUNDS))
def test_processes_and_containers_die_in_the_midst_of_training_and_the_weights_are_the_same(
    service: Project, project: Make, weights: Callable[[int], str], number: int
) -> None:
    """Four kills and a pause in a training. Each further one has a project of its own, and so new logs and restarts."""
    made = project().up() if number else service
    server, first, second = made.server, made.worker(0), made.worker(1)
    script = Script(made, "-c", TRAIN, DIGITS, "5")

    def at(door: int, times: int = 1) -> None:
        wait_for(first, rf"(at /run/central-storage/door.{door}\n.*){{{times}}}")

    def open_door(door: int) -> None:
        docker("exec", first, "touch", f"/run/central-storage/door.{door}")

    at(0)  # a worker's process
    assert docker("exec", first, "python", "-c", KILL, "cs_worker").startswith("killed ")
    wait_for(server, r"worker w0 .* ended by SIGKILL; restart 1 of 3")
    at(0, times=2)
    open_door(0)

    at(1)  # the server's process
    assert docker("exec", server, "python", "-c", KILL, "cs_server").startswith("killed ")
    wait_for(server, r"the server .* ended by SIGKILL; restart 2 of 3.*serves in its place")
    open_door(1)

    at(2)  # the server stands still for ten seconds
    docker("pause", server)
    open_door(2)
    time.sleep(10)
    script.wait_for(r"waiting .* s for run \d+: ")  # scripts before it have counted, too
    docker("unpause", server)

    at(3)  # the server's container
    docker("kill", server)
    open_door(3)
    wait_for(second, "the supervisor of the service is gone; it has 60 s to come back")
    docker("start", server)
    wait_for(server, "it takes up the run of the supervisor that was killed")

    at(4)  # a worker's container, while the first replica computes
    docker("kill", second)
    wait_for(server, "worker w1 .* ended by the end of its connection .*; restart 1 of 3")
    docker("start", second)
    wait_for(server, "worker w1 .* works in its place")
    open_door(4)

    ended = script.end()
    assert ended.last == weights(2)
    assert "the service in /run/central-storage is back" in ended.err


def test_three_workers_that_cannot_share_memory_beside_another_project(
    service: Project, project: Make, weights: Callable[[int], str]
) -> None:
    second = project("tests/containers/no_shared_memory.yml", CS_WORKERS="3").up()
    ended = second.run("-c", TRAIN, DIGITS)
    assert ended.last == weights(3)
    assert "3 replicas (cpu:0, cpu:0, cpu:0), parameters on cpu:0, transport ipc + mailboxes + " in ended.err
    said = r"transport ipc \+ bytes in frames: the service's memory cannot be mapped here \(Operation not permitted\)"
    assert len(re.findall(rf"\[w[012]\] .*{said}", second.logs())) == 3
    assert second.run("-c", OBSERVE).last.startswith("3 ")
    second.close()
    assert service.run("-c", OBSERVE).last.startswith("2 ")


def test_nothing_is_compiled_in_a_new_container_and_nobody_is_root() -> None:
    code = "import os; from cs_server.compute import kernels; print(os.getuid(), kernels.load().compiled)"
    assert docker("run", "--rm", "--read-only", IMAGE, "python", "-c", code) == "10001 0"


def test_a_volume_that_is_too_small_is_refused_with_both_numbers_and_a_server_that_stays_away_is_named(
    project: Make,
) -> None:
    made = project(CS_MEMORY="8m", CS_SERVE="--return-timeout 2").up()
    script = Script(made, "-c", TOO_LARGE)
    script.wait_for("trained on")
    for container in made.containers():  # no SIGBUS
        assert docker("exec", container, "cs-launch", "--health").startswith("serving 2 replicas, ")
    for worker in made.containers("worker"):
        wait_for(worker, "at work")

    docker("kill", made.server)
    ended = script.end()
    assert ended.code != 0
    assert re.search(r"refused: .*'large'.* \d+ bytes planned .* \d{7} bytes available", ended.out), ended.out
    assert "trained on [3.0, 3.0, 3.0, 3.0]" in ended.out
    away = r"the service in /run/central-storage has not come back within 2 s after its supervisor was killed"
    assert re.search(f"ShutdownError: {away}", ended.err), ended.err
    for worker in made.containers("worker"):  # which the engine starts again
        wait_for(worker, away)


TOO_LARGE = """
import time
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy()
with strategy.scope():
    try:
        cs.Variable(np.ones(4 << 20, np.float32), name="large")
    except MemoryError as error:
        print("refused:", error)
    small = cs.Variable(np.ones(4, np.float32), aggregation=cs.VariableAggregation.SUM)
strategy.run(lambda: small.assign_add(small))
print("trained on", small.numpy().tolist(), flush=True)

def step():
    print("at work", flush=True)
    time.sleep(600)

strategy.run(step)
"""


def test_up_trains_to_the_accuracy_and_everything_stops_in_time(
    demonstration: tuple[Project, Callable[[], tuple[int, str]]],
) -> None:
    made, wait = demonstration
    code, output = wait()
    assert code == 0, output
    found = re.search(r"test accuracy (0\.\d+)", output)
    assert found is not None, output
    assert float(found[1]) >= 0.97
    words = r"transport ipc \+ mailboxes \+ shared memory \(files in the run directory\)"
    for who in (r"server_1 +\| \[supervisor\]", r"worker_1 +\| ", r"worker_2 +\| ", r"train_1 +\| \[central-storage\]"):
        assert re.search(rf"(?m)^{who}.*{words}", output.replace("-1  |", "_1  |")), output
    mine = f"label=com.docker.compose.project={made.name}"
    states = docker("ps", "-a", "--filter", mine, "--format", "{{.Names}} {{.Status}}")
    assert len(states.splitlines()) == 4
    assert "(137)" not in states, states  # that is SIGKILL: the grace time was over


def test_a_stop_in_the_midst_of_training_needs_no_kill_and_leaves_no_zombies(service: Project) -> None:
    script = Script(service, "-c", ORPHANS)
    containers = service.containers()
    assert len(containers) == 3
    for worker in service.containers("worker"):
        wait_for(worker, "with children")
    deadline = time.monotonic() + unit(10)
    for container in containers:
        while "Z" in (states := docker("exec", container, "python", "-c", STATES).split()):
            assert time.monotonic() < deadline, states
    service.compose("stop", "-t", GRACE, "worker", "server")
    codes = docker("inspect", "-f", "{{.State.ExitCode}}", *containers).split()
    assert "137" not in codes, codes
    assert script.end().code != 0


ORPHANS = """
import subprocess, time
import central_storage as cs

def step():
    children = [subprocess.Popen(["sh", "-c", "sleep 0.1 & echo $!"], stdout=subprocess.PIPE) for _ in range(5)]
    for child in children:
        child.communicate()  # until the orphan has closed it, too
    print("with children", flush=True)
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
