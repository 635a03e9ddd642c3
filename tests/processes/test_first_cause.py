"""Ten ways in which a training fails under ``cs-launch``: each is named, on the terminal, in the error file and by the
exit code, as what it is and not as what followed from it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.harness.processes import run

SCRIPT = """
import os, signal, sys, threading
import numpy as np
import central_storage as cs

strategy = cs.CentralStorageStrategy()
is_one = lambda: int(cs.get_replica_context().replica_id_in_sync_group) == 1

def step():
    if is_one():
        print("about to fail", flush=True)
        {body}
    cs.get_replica_context().all_reduce("SUM", np.ones(2))

strategy.run(step)
"""


@dataclass(frozen=True)
class Case:
    """What the function does in replica 1, and what is said of it."""

    body: str
    cause: str
    code: int
    kind: str = "death"
    role: str = "worker"
    rank: int | None = 1
    log: str = "about to fail"
    arguments: tuple[str, ...] = ()
    failpoints: str | None = None


CASES = {
    "exception": Case("{}['x']", r"KeyError: 'x'", 1, "exception"),
    "exit code": Case("os._exit(3)", r"exit code 3", 4),
    "early exit 0": Case("os._exit(0)", r"exit code 0", 4),
    "segmentation fault": Case("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV", 4, log='train.py", line 12 in step'),
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
        None,
        "",
    ),
    "bad device": Case(
        "pass", r"DeviceError: .*gpu:77.*", 2, "usage", "launcher", None, "", ("--devices", "cpu:0,gpu:77")
    ),
    "server error": Case(
        "pass", r"exit code 1", 5, "death", "server", None, "FailpointError", failpoints="server.heard=raise@4"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_cause_is_named(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tmp_path / "train.py").write_text(SCRIPT.replace("{body}", case.body))
    options = case.arguments or ("--devices", "cpu:0,cpu:1")
    ended = run(
        *("cs-launch", *options, "--max-restarts", "0", "--error-file", "error.json", "train.py"),
        directory=tmp_path,
        environment={"CS_FAILPOINTS": case.failpoints},
    )
    assert ended.code == case.code, ended
    record = json.loads((tmp_path / "error.json").read_text())
    found = {key: record[key] for key in ("kind", "role", "rank", "exit_code")}
    assert found == {"kind": case.kind, "role": case.role, "rank": case.rank, "exit_code": case.code}, ended
    assert re.fullmatch(case.cause, record["cause"]), record["cause"]
    assert case.log in record["log"], ended
    assert isinstance(record["pid"], int)
    last = ended.err.rpartition("cs-launch")[2]
    if case.kind != "usage":
        assert record["cause"].partition(":")[0] in last, ended
        assert f"(pid {record['pid']})" in last


def test_a_run_that_ends_well_leaves_no_file_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text("{}")
    (tmp_path / "train.py").write_text(SCRIPT.format(body="pass"))
    run("cs-launch", "--devices", "cpu:0,cpu:1", "--error-file", "error.json", "train.py", directory=tmp_path).ok()
    assert not (tmp_path / "error.json").exists()


def test_a_script_without_a_launcher_leaves_one_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        SCRIPT.replace("Strategy()", "Strategy(['cpu:0', 'cpu:1'], max_restarts=0)").replace(
            "{body}", "os.kill(os.getpid(), signal.SIGKILL)"
        )
    )
    ended = run(tmp_path / "train.py", directory=tmp_path, environment={"CS_ERROR_FILE": "error.json"})
    assert ended.code == 1
    record = json.loads((tmp_path / "error.json").read_text())
    assert (record["kind"], record["role"], record["rank"], record["cause"]) == ("death", "worker", 1, "SIGKILL")
    assert "about to fail" in record["log"]
    assert record["message"] in ended.err
