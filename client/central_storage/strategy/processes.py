"""What a notebook shows of a strategy: the processes of its service, with their state and memory of this moment."""

from __future__ import annotations

import os

from central_storage.core.backends import ControllerBackend
from central_storage.diagnostics.html import section, table
from cs_proto.sizes import rounded

__all__ = ["shown"]

#: The state of a process in /proc, in words.
_STATES = {"R": "computes", "S": "waits", "D": "waits for a device", "T": "stopped", "t": "stopped", "Z": "has died"}
_HEAD = ("process", "pid", "device", "state", "allocated memory", "processor time")


def shown(title: str, backend: ControllerBackend) -> str:
    """The processes as HTML."""
    if backend.ended is not None:
        return section(title, backend.ended)
    found = backend.processes()
    return section(title, table([_row(*each) for each in found], _HEAD)) if found else section(title)


def _row(name: str, pid: int, device: str, node: str) -> tuple[object, ...]:
    """A row of the table. A process that another container has, or that has just died, is not to be seen."""
    if node:  # where the pid means another process than here
        return name, pid, device, f"on {node}", "", ""
    if pid == os.getpid():
        name = f"{name}, a thread of this process"
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:  # in another container the number may be another's
            if pid != os.getpid() and b"cs_" not in file.read():
                return name, pid, device, "not to be seen from here", "", ""
        with open(f"/proc/{pid}/statm") as file:
            resident, shared = map(int, file.read().split()[1:3])
        with open(f"/proc/{pid}/stat") as file:
            state, *numbers = file.read().rpartition(")")[2].split()
    except OSError:
        return name, pid, device, "has died, or is not to be seen from here", "", ""
    own = (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    seconds = (int(numbers[10]) + int(numbers[11])) / os.sysconf("SC_CLK_TCK")
    return name, pid, device, _STATES.get(state, state), rounded(own), f"{seconds:.1f} s"
