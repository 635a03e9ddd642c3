"""Descriptors run short: whoever connects too often is refused, and the training goes on with the same bits."""

from __future__ import annotations

import os
import re
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.harness.processes import Child, run, start
from tests.harness.timing import unit

import central_storage as cs
from central_storage import errors
from central_storage.observer.blocking import Observer

#: What the service under test may open, however it is started.
LIMIT = 256
#: More than any limit that is in the way by default.
FLOOD = 1100

#: By what a process of the service is known.
ROLES = {
    "supervisor": r"launch\.background",
    "server": r"cs_server",
    "w0": r"cs_worker.*--replica 0",
    "w1": r"cs_worker.*--replica 1",
}

TRAINS = """
import os, resource, sys, time
import numpy as np
import central_storage as cs

resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))
with cs.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
    with strategy.scope():
        w = cs.Variable(np.zeros(1000, np.float32), name="w", aggregation=cs.VariableAggregation.SUM)

    @cs.function
    def step():
        w.assign_add(np.full(1000, 0.1, np.float32))

    expected, tenth = np.zeros(1000, np.float32), np.float32(0.1)
    for number in range(1_000_000):
        strategy.run(step)
        expected += tenth + tenth
        time.sleep(0.05)  # most of the processors is for what disturbs it
        if number == 0:
            print("trains in", strategy.address, flush=True)
        if os.path.exists(os.path.join(strategy.address, "enough")):
            break
    print("same bits:", np.asarray(w).tobytes() == expected.tobytes(), flush=True)
"""

MANY_FILES = """
import os, resource
import numpy as np

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
import central_storage as cs
with cs.CentralStorageStrategy(["cpu:0"]) as strategy:
    with strategy.scope():
        w = cs.Variable(np.zeros(3))
    strategy.run(lambda: w.assign_add(np.ones(3)))
    print(np.asarray(w).tolist(), max(files) > 1024)
"""


#: cs-launch, started with a soft limit of 300.
LAUNCHES = """
import os, resource, sys
from central_storage.launch.cli import main

resource.setrlimit(resource.RLIMIT_NOFILE, (300, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sys.exit(main(["--devices", "cpu:0", sys.argv[1]]))
"""

LAUNCHED = """
import resource
import central_storage as cs

def limits():
    return resource.getrlimit(resource.RLIMIT_NOFILE)

with cs.CentralStorageStrategy() as strategy:
    in_worker = strategy.run(limits)
    print(limits()[0], in_worker[0] == min(in_worker[1], 1 << 20))
"""


@dataclass
class Training:
    """A script that trains until it is told to end."""

    child: Child
    address: str
    #: The pids of the service's processes, by role.
    pids: dict[str, int]

    def descriptors(self, role: str) -> int:
        return len(os.listdir(f"/proc/{self.pids[role]}/fd"))


def service_pids(child: Child) -> dict[str, int]:
    found = {}
    for process in child.processes():
        words = " ".join(process.cmdline())
        for role, pattern in (
            ("server", r"cs_server"),
            ("w0", r"cs_worker.*--replica 0"),
            ("w1", r"cs_worker.*--replica 1"),
            ("supervisor", r"launch\.background"),
        ):
            if re.search(pattern, words):
                found[role] = process.pid
    return found


@pytest.fixture(scope="module")
def roomy() -> Iterator[None]:
    """This process may open what all the peers of a flood have."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture(scope="module")
def training(roomy: None) -> Iterator[Training]:
    """One whose service may open few files. All tests of this file disturb it, and at the end it has computed right."""
    with start("-c", TRAINS, str(LIMIT)) as child:
        address = child.wait_for(r"trains in (\S+)")[1]
        made = Training(child, address, service_pids(child))
        assert made.pids.keys() == {"supervisor", "server", "w0", "w1"}
        yield made
        Path(address, "enough").touch()
        ended = child.wait()
        assert ended.ok().out.endswith("same bits: True\n"), ended
        assert "ended by" not in ended.err, ended


def flooded(path: str, kind: int, count: int, links: list[socket.socket]) -> None:
    """Connect ``count`` times without a word. As many as the service may have descriptors wait for a moment where
    others wait already."""
    for number in range(count):
        link = socket.socket(socket.AF_UNIX, kind)
        links.append(link)
        link.setblocking(number < LIMIT)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 2000))
        with suppress(BlockingIOError):
            link.connect(path)


def until(condition: object, limit: float = 30) -> None:
    """Wait until ``condition()`` holds."""
    assert callable(condition)
    deadline = time.monotonic() + unit(limit)
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        os.sched_yield()


@pytest.mark.parametrize(
    ("role", "kind"),
    [("server", socket.SOCK_STREAM), ("w0", socket.SOCK_STREAM), ("supervisor", socket.SOCK_SEQPACKET)],
)
def test_a_flood_of_connections_ends_nobody(training: Training, role: str, kind: int) -> None:
    before = training.descriptors(role)
    links: list[socket.socket] = []
    name = {"w0": "w0.1"}.get(role, role)
    try:
        flooded(f"{training.address}/{name}", kind, FLOOD, links)
        assert service_pids(training.child) == training.pids
        assert before + 50 < training.descriptors(role) < LIMIT
    finally:
        for link in links:
            link.close()
    until(lambda: training.descriptors(role) < before + 10)
    with cs.connect(training.address) as observer:
        assert observer.get("w").shape == (1000,)


def test_a_program_that_forgets_to_close_observers_is_told(training: Training) -> None:
    before = training.descriptors("server")
    forgotten: list[Observer] = []

    def forget() -> None:
        for _ in range(LIMIT):
            forgotten.append(stack.enter_context(cs.connect(training.address)))  # noqa: PERF401  (one may raise)

    with ExitStack() as stack:
        with pytest.raises(errors.DescriptorLimitError, match=r"\d+ of 256 descriptors open.*close observers"):
            forget()
        assert len(forgotten) > 50
        assert forgotten[0].get("w").shape == forgotten[-1].get("w").shape == (1000,)
    until(lambda: training.descriptors("server") < before + 10)
    assert service_pids(training.child) == training.pids


@pytest.mark.slow
def test_a_script_with_many_open_files_trains() -> None:
    ended = run("-c", MANY_FILES)
    assert ended.ok().out == "[1.0, 1.0, 1.0] True\n"


@pytest.mark.slow
def test_a_launched_script_keeps_its_limit_and_workers_have_the_hard_one(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LAUNCHED)
    ended = run("-c", LAUNCHES, tmp_path / "script.py")
    assert "300 True" in ended.ok().lines
