"""Processors: which kind, how many of them this process may use, NUMA nodes, and the threads of libraries."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path

from central_storage.launch.affinity import core_count, numa_nodes
from central_storage.launch.plan import PLACE_VARIABLES, THREAD_VARIABLES
from central_storage.launch.supervisor.mailboxes import mailboxes_by_default
from cs_proto.errors import ConfigurationError

from .finding import Finding, bad, good, slower

__all__ = ["cores", "kind", "library_threads", "mailboxes", "nodes"]

_X86 = ("x86_64", "AMD64")
_ARM_REMEDY = "nothing is wrong; use x86-64 where a step takes less than a millisecond"


def kind(proc: Path = Path("/proc")) -> Iterator[Finding]:
    """The kind of processor, and what does not work on it."""
    machine = platform.machine()
    if machine in _X86:
        yield good("processor", f"{_model(proc)} ({machine})")
        return
    why = f"{machine} may reorder what a process writes to shared memory"
    yield slower(
        "processor", f"every message of a step goes over ZeroMQ instead of a mailbox, because {why}", _ARM_REMEDY
    )
    yield slower(
        "observers",
        f"observers (cs.connect) ask the server instead of reading shared memory, because {why}",
        _ARM_REMEDY,
    )


def mailboxes() -> Iterator[Finding]:
    """The setting of ``CS_MAILBOXES``."""
    try:
        is_on = mailboxes_by_default() == "on"
    except ConfigurationError:
        yield bad("CS_MAILBOXES", "its value is neither on nor off, so nothing starts", "unset CS_MAILBOXES")
        return
    if not is_on:
        yield slower("CS_MAILBOXES", "off: every message of a step goes over ZeroMQ", "unset CS_MAILBOXES")


def cores(proc: Path = Path("/proc"), system: Path = Path("/sys")) -> Iterator[Finding]:
    """The processors that a service counts, and those that it may use."""
    there, allowed = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    counted = core_count(system / "fs/cgroup", proc / "self/cgroup")
    text = f"{counted} of {there} processors may be used"
    if counted < there:
        text += f" (affinity and cpusets allow {allowed}" + (", a control group fewer)" if counted < allowed else ")")
    quota = _old_quota(proc, system)
    if quota is not None and math.ceil(quota) < counted:
        fits = math.ceil(quota)
        yield slower(
            "processors",
            f"a control group of version 1 allows the time of {quota:.3g} processors, and a service counts {counted}: "
            "it starts too many threads, which stop in the middle of steps",
            f"taskset -c 0-{fits - 1} cs-launch ..., or export OMP_NUM_THREADS={fits} NUMBA_NUM_THREADS={fits}",
        )
    elif counted == 1:
        yield slower(
            "processors",
            f"{text}: server and replicas take turns, and nobody polls its mailbox",
            "allow two processors or more (taskset, docker run --cpus)",
        )
    else:
        yield good("processors", text)


def nodes(system: Path = Path("/sys")) -> Iterator[Finding]:
    """NUMA nodes, and whether workers are kept on them."""
    count = len(list((system / "devices/system/node").glob("node[0-9]*")))
    if count <= 1:
        yield good("NUMA", "one node")
        return
    allowed = frozenset(os.sched_getaffinity(0))
    is_spread = bool(numa_nodes(allowed, core_count(), system))
    yield good(
        "NUMA",
        f"{count} nodes; "
        + (
            "workers are kept on them"
            if is_spread
            else "workers may run on any, because this process is limited to some processors"
        ),
    )


def library_threads(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """The threads of BLAS and similar libraries in each worker, and the server's."""
    count = core_count()
    said = {name: environment[name] for name in THREAD_VARIABLES if environment.get(name)}
    server = said.get("NUMBA_NUM_THREADS", "1")
    if not server.isdecimal() or int(server) < 1:
        yield bad(
            "threads",
            "NUMBA_NUM_THREADS is not a number from 1, so the server does not start",
            "unset NUMBA_NUM_THREADS",
        )
    shown = ", ".join(f"{name}={_numbers(value)}" for name, value in said.items())
    # OMP_NUM_THREADS may be a list, one number for each level of nesting.
    most = max((int(first) for value in said.values() if (first := value.split(",")[0].strip()).isdecimal()), default=0)
    if count > 1 and most * 2 > count:
        yield slower(
            "threads",
            f"{shown}: every worker uses so many threads, and two workers have {count} processors in all",
            f"unset {' '.join(said)}: the workers share the processors then",
        )
    elif said:
        yield good("threads", f"{shown}; the workers share {_counted(count)} where nothing is set")
    else:
        yield good("threads", f"no variable such as OMP_NUM_THREADS is set: the workers share {_counted(count)}")
    if bound := [name for name in PLACE_VARIABLES if environment.get(name)]:
        yield good("threads", f"{', '.join(bound)} is set, so no worker is kept on a NUMA node")


def _counted(count: int) -> str:
    return "one processor" if count == 1 else f"{count} processors"


def _numbers(value: str) -> str:
    """A value that is a number, or a list of them, and a question mark for any other."""
    return value if value.replace(",", "").isdecimal() else "?"


def _model(proc: Path) -> str:
    try:
        lines = (proc / "cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _old_quota(proc: Path, system: Path) -> float | None:
    """The processors' time that a control group of version 1 allows; None if there is no limit."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "cpu" not in controllers.split(","):
            continue
        # In a container, the path is often the host's, and the group is mounted as the root.
        for group in (system / "fs/cgroup" / controllers / path.lstrip("/"), system / "fs/cgroup" / controllers):
            try:
                quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            except (OSError, ValueError):
                continue
            if quota > 0 and period > 0:
                found.append(quota / period)
    return min(found, default=None)
