"""P14 and P15: where there is little memory a launch works, or is refused with the remedy, and no process is killed.

P14: a mount namespace of its own has a tmpfs of the size that is tried in the place of /dev/shm. The segments lie in
memory that it does not limit (``--memory memfd``), or are files in it. No process gets SIGBUS.

P15: a control group or a limit of addresses. A refusal says how many bytes were planned and are available, and the
kernel kills no process for lack of memory.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from itertools import cycle, islice, product
from pathlib import Path

import pytest
from tests.harness.mounts import UNSHARE, need_mount_namespaces
from tests.harness.processes import start
from tests.harness.timing import unit

#: The exit code of a launch whose service does not start.
START_FAILED = 3
#: What a refusal says: the bytes planned, and those available.
REFUSAL = re.compile(
    r"(?:: | of )(\d+) bytes (?:planned|\().*?[ :](\d+) bytes (?:of addresses \(.*?\) are )?available", re.S
)
KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
#: Bytes of the variable: one that most volumes hold, and one that only the largest may.
VARIABLES = (16 * KIB, 2 * MIB, 24 * MIB)

TRAINS = """
import sys
import time
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy()
begun = time.monotonic()
try:
    with strategy.scope():
        x = cs.Variable(np.zeros(int(sys.argv[1]) // 4, np.float32), name="large")
        adam = cs.optimizers.Adam(0.5)

    def step(values):
        (gradient,) = cs.gradient_buffers([x])  # no memory that the service does not know of
        gradient[:] = 1
        adam.apply_gradients([(gradient, x)])
        return float(values.sum())

    def is_trained():
        return bool(np.asarray(x).max() < -1)

    for _ in range(3):
        begun = time.monotonic()
        assert strategy.run(step, args=(np.ones(50_000),)) == 50_000.0
    assert strategy.run(is_trained)
    print("works")
except cs.errors.MemoryPlanError as error:
    print(f"refused {time.monotonic() - begun} {error}")
"""

LAUNCHES = """
import json
import subprocess
import sys
import time

found = []
for size, memory, nbytes in json.loads(sys.argv[2]):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", "/dev/shm"], check=True)
    place = ["--memory", "files", "--run-dir", "/dev/shm/run"] if memory == "files" else []
    launch = [sys.executable, "-m", "central_storage.launch.cli", *place, "--devices", "cpu:0"]
    begun = time.monotonic()
    ended = subprocess.run([*launch, sys.argv[1], str(nbytes)], capture_output=True, text=True)
    took = time.monotonic() - begun
    found.append([size, memory, nbytes, ended.returncode, took, ended.stdout, ended.stderr])
    subprocess.run(["umount", "/dev/shm"], check=True)
print(json.dumps(found))
"""


LIMITS = """
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

script, group, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
limit_file, kills_file = ("memory.max", "memory.events") if (group / "memory.max").exists() else (
    "memory.limit_in_bytes", "memory.oom_control"
)
found = []
for kind, limit, nbytes in settings:

    def confine():
        if kind == "group":
            (group / "cgroup.procs").write_text(str(os.getpid()))
        else:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    if kind == "group":
        (group / limit_file).write_text(str(limit))
    command = [sys.executable, "-m", "central_storage.launch.cli", "--devices", "cpu:0", script, str(nbytes)]
    ended = subprocess.run(command, capture_output=True, text=True, preexec_fn=confine)
    lines = (group / kills_file).read_text().split("\\n") if kind == "group" else []
    kills = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
    found.append([kind, limit, nbytes, ended.returncode, kills, ended.stdout, ended.stderr])
print(json.dumps(found))
"""
#: Bytes of a limit, and of variables that fit, may fit, and do not.
GROUPS = [
    *product(["group"], [384 * MIB], [MIB, 32 * MIB, 48 * MIB, 384 * MIB]),
    *product(["group"], [512 * MIB], [16 * MIB, 64 * MIB, 72 * MIB, 512 * MIB]),
    *product(["group"], [1024 * MIB], [100 * MIB, 160 * MIB, 250 * MIB, 1024 * MIB]),
]
ADDRESSES = [
    *product(["addresses"], [512 * MIB, 1024 * MIB], [MIB, 64 * MIB]),
    *product(["addresses"], [2048 * MIB, 3072 * MIB], [MIB, 512 * MIB]),
]

#: Of every kind of launch one: those that ``make test`` tries, and with the others those of ``make test-slow``.
FEW = [
    (64 * KIB, "memfd", 2 * MIB),
    (64 * KIB, "files", 16 * KIB),
    (4 * MIB, "files", 2 * MIB),
    (16 * MIB, "files", 2 * MIB),
    (64 * MIB, "files", 24 * MIB),
]
MANY = [
    *product(SIZES, ["files"], VARIABLES),
    *product([64 * KIB, 64 * MIB], ["memfd"], VARIABLES),
]


@pytest.fixture
def namespace() -> None:
    """Skip where no mount namespace is permitted."""
    need_mount_namespaces("P14 is not tested with a small /dev/shm")


@pytest.mark.long
@pytest.mark.usefixtures("namespace")
@pytest.mark.parametrize(
    "tried",
    [
        pytest.param(FEW, id="5"),
        pytest.param(list(islice(cycle(MANY), 50)), id="50", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_launches_with_a_small_dev_shm(tmp_path: Path, tried: list[tuple[int, str, int]]) -> None:
    script, launches = tmp_path / "trains.py", tmp_path / "launches.py"
    script.write_text(TRAINS)
    launches.write_text(LAUNCHES)
    command = (*UNSHARE, sys.executable, launches, script, json.dumps(tried))
    with start(*command) as child:
        found = json.loads(child.wait(unit(500)).ok().out)
    times, works = [], 0
    for size, memory, nbytes, code, took, out, err in found:
        told = f"{memory} in {size} bytes, a variable of {nbytes} bytes: code {code} after {took:.1f} s\n{out}{err}"
        assert "SIGBUS" not in err, told
        if out == "works\n":
            works += 1
            assert code == 0, told
        elif out:  # the variable, its gradients or its slots do not fit
            assert code == 0, told
            seconds, _, error = out.removeprefix("refused ").partition(" ")
            assert re.search(r"bytes planned .* bytes available .*; use smaller or fewer variables", error), told
            times.append(float(seconds))
        else:  # nor does the service itself
            assert code == START_FAILED, told
            assert "make the volume of the run directory larger" in err, told
            times.append(took)
        assert memory == "files" or out == "works\n", told  # which /dev/shm does not limit
    print(f"\n{works} work, {len(times)} are refused, the slowest after {max(times):.1f} s, 0 SIGBUS")
    assert len(found) == len(tried)
    assert min(works, len(times)) >= len(tried) // 3


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of memory inside that of the tests, of version 1 or 2; skip where none can be made."""
    entries = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    places = {kinds: path.lstrip("/") for _, kinds, path in entries}
    parents = [Path("/sys/fs/cgroup/memory", places.get("memory", "")), Path("/sys/fs/cgroup", places.get("", ""))]
    made = next((each / f"central-storage-{os.getpid()}" for each in parents if _has_limits(each)), None)
    if made is None:
        pytest.skip("P15 is not tested with a control group: none can be made here")
    try:
        yield made
    finally:
        deadline = time.monotonic() + unit(10)
        while True:
            try:
                made.rmdir()
                break
            except OSError:  # its last process is about to end
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def _has_limits(parent: Path) -> bool:
    """Whether a group can be made in ``parent``, which stays, that has a limit of memory."""
    made = parent / f"central-storage-{os.getpid()}"
    try:
        made.mkdir()
    except OSError:
        return False
    if any((made / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
        return True
    made.rmdir()
    return False


@pytest.mark.long
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([GROUPS[4], GROUPS[7], ADDRESSES[0], ADDRESSES[2]], id="4"),
        pytest.param(GROUPS + ADDRESSES, id="20", marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_launches_under_a_limit_of_memory(tmp_path: Path, group: Path, settings: list[tuple[str, int, int]]) -> None:
    script, limits = tmp_path / "trains.py", tmp_path / "limits.py"
    script.write_text(TRAINS)
    limits.write_text(LIMITS)
    # A library that starts a thread for each processor would need addresses for each.
    environment = {"OPENBLAS_NUM_THREADS": "1"}
    with start(sys.executable, limits, script, group, json.dumps(settings), environment=environment) as child:
        found = json.loads(child.wait(unit(500)).ok().out)
    works = 0
    for kind, limit, nbytes, code, kills, out, err in found:
        told = f"{kind} of {limit} bytes, a variable of {nbytes} bytes: code {code}, kills {kills}\n{out}{err}"
        assert kills == ([0] if kind == "group" else []), told
        assert "SIGKILL" not in err, told
        if out == "works\n":
            works += 1
            assert code == 0, told
            assert nbytes < limit, told
            continue
        assert code == (0 if out else START_FAILED), told  # a small limit is not enough for the service itself
        planned, available = REFUSAL.search(out or err).group(1, 2)  # type: ignore[union-attr]
        assert int(planned) > int(available) < limit, told
    print(f"\n{len(found)} settings: {works} work, {len(found) - works} are refused, 0 are killed")
    assert len(found) == len(settings)
    assert min(works, len(found) - works) >= len(settings) // 4
