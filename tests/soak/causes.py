"""P20: ten ways in which a training fails, and what is said of each: on the terminal, in the error file, by the exit
code."""

from __future__ import annotations

import json
import random
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.harness.processes import run

__all__ = ["CASES", "any_failed", "failed"]

SCRIPT = """
import os, signal, sys, threading
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy({devices})
replica = lambda: int(cs.get_replica_context().replica_id_in_sync_group)

def good():
    cs.get_replica_context().all_reduce("SUM", np.ones(2))

def step():
    if replica() == {rank}:
        print("about to fail", flush=True)
        {body}
    good()

for _ in range({good}):
    strategy.run(good)
strategy.run(step)
"""


@dataclass(frozen=True)
class Case:
    """What the function does in one replica, and what is said of it."""

    body: str
    cause: str
    code: int
    kind: str = "death"
    role: str = "worker"
    log: str = "about to fail"
    devices: str = "cpu:0,cpu:1"
    failpoints: str | None = None


CASES = {
    "exception": Case("{}['x']", r"KeyError: 'x'", 1, "exception"),
    "exit code": Case("os._exit(3)", r"exit code 3", 4),
    "early exit 0": Case("os._exit(0)", r"exit code 0", 4),
    "segmentation fault": Case("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", 4, log=" in step"),
    "killed": Case("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL", 4),
    "memory limit": Case(
        # Threads of a process whose limit it has passed already could not go on.
        "import psutil, resource; limit = psutil.Process().memory_info().vms + (1 << 34); "
        "resource.setrlimit(resource.RLIMIT_AS, (limit, -1)); np.ones(1 << 32)",
        r"(numpy\._core\._exceptions\._Array|_Array)?MemoryError: Unable to allocate 32\.0 GiB.*",
        1,
        "exception",
    ),
    "import error": Case(
        "import no_such_module", r"ModuleNotFoundError: No module named 'no_such_module'", 1, "exception"
    ),
    "function that cannot be sent": Case(
        "lock.acquire()\n\nlock = threading.Lock()\nbefore = step\nstep = lambda: (lock, before())\n\ndef unused():",
        r"ShippingError: .*lock.*",
        1,
        "exception",
        "script",
        "",
    ),
    "bad device": Case("pass", r"DeviceError: .*gpu:77.*", 2, "usage", "launcher", "", "cpu:0,gpu:77"),
    "server error": Case(
        "pass", r"exit code 1", 5, "death", "server", "FailpointError", failpoints="server.heard=raise@4"
    ),
}


def failed(name: str, rank: int = 1, good: int = 0, launched: bool = True) -> list[str]:
    """Run the case ``name`` in replica ``rank`` after ``good`` steps that go well; what of it is told wrongly, in
    words. Without a launcher the service is the script's own, and its code is 1 for whatever was raised."""
    case = CASES[name]
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        script, report = Path(directory, "train.py"), Path(directory, "error.json")
        made = "" if launched else f"{case.devices.split(',')}, max_restarts=0"
        words = {"{devices}": made, "{rank}": str(rank), "{good}": str(good), "{body}": case.body}
        script.write_text(re.sub("|".join(map(re.escape, words)), lambda found: words[found[0]], SCRIPT))
        command = ("cs-launch", "--devices", case.devices, "--max-restarts", "0", "--error-file", report, script)
        ended = run(
            *(command if launched else (script,)),
            directory=Path(directory),
            environment={"CS_FAILPOINTS": case.failpoints, "CS_ERROR_FILE": str(report)},
        )
        if not report.exists():
            return [f"{name}: no error file\n{ended}"]
        record = json.loads(report.read_text())
    code = case.code if launched else 1
    kind, role = (case.kind, case.role) if launched or case.kind != "usage" else ("exception", "script")
    right = {"kind": kind, "role": role, "rank": rank if role == "worker" else None, "exit_code": code}
    found = [f"{key} is {record[key]!r}, not {value!r}" for key, value in right.items() if record[key] != value]
    if ended.code != code:
        found.append(f"the exit code is {ended.code}, not {code}")
    if not re.fullmatch(case.cause, record["cause"]):
        found.append(f"the cause is {record['cause']!r}")
    # Of an exception a script without a launcher is told the traceback, and prints the lines as they come.
    if case.log not in record["log"] and (launched or case.kind == "death"):
        found.append(f"the last lines are {record['log']!r}")
    if not isinstance(record["pid"], int):
        found.append(f"the pid is {record['pid']!r}")
    if not (launched and case.kind == "usage"):
        last = ended.err.rpartition("cs-launch")[2] if launched else ended.err
        words = [record["cause"].partition(":")[0], *([f"(pid {record['pid']})"] if launched else [])]
        found += [f"the terminal does not say {word!r}" for word in words if word not in last]
    return [f"{name}: {what}\n{ended}" for what in found]


def any_failed(rng: random.Random) -> list[str]:
    """One of them, somewhere."""
    return failed(rng.choice(list(CASES)), rng.randrange(2), rng.choice([0, 1, 3]), rng.random() < 0.5)
