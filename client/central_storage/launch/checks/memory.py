"""The memory of the machine, of the control groups and limits around this process, and how the kernel hands it out."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from cs_runtime import machine

from .finding import Finding, bad, good, slower

__all__ = ["amount", "huge_pages", "mapping_limits", "shared_memory_files", "size", "swap"]

# Bytes. A service of two replicas with small variables takes about so much; most of it is Python and NumPy.
_LEAST = 500 << 20
# The share of the swap from which on it counts as in use.
_SWAPPED = 0.2
# In this mode the kernel counts whole mappings instead of touched pages.
_STRICT = "2"


def size(nbytes: int) -> str:
    """``1.5 GiB`` for a number of bytes.

    Examples:
        >>> size(3 << 29), size(64 << 20)
        ('1.5 GiB', '64 MiB')
    """
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.0f} MiB"


def amount(proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Memory that this process may touch, and the control group that leaves the least of it."""
    total, available = machine.total_nbytes(), machine.available_nbytes(proc / "self")
    text = f"{size(available)} of the machine's {size(total)} are available"
    groups = [group for group in machine.group_limits(proc / "self") if group[0] < total]
    if groups:
        limit, left, kind = min(groups, key=lambda group: group[1])
        version = 2 if kind == "cgroup2" else 1
        text += f"; a control group (version {version}) limits this process to {size(limit)}, of which {size(left)} "
        text += "are left" if left > 0 else "is left"
    if available < _LEAST:
        yield bad(
            "memory",
            f"{text}; a service of two replicas takes about {size(_LEAST)}",
            "end other processes, or raise the limit of the container (docker run --memory, or systemd's MemoryMax)",
        )
    else:
        yield good("memory", text)


def swap(proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Swap, and whether much of it is in use."""
    said = {}
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        said[name] = int(value.split()[0]) * 1024
    total, free = said.get("SwapTotal", 0), said.get("SwapFree", 0)
    if not total:
        yield good("swap", "none")
    elif total - free > _SWAPPED * total:
        yield slower(
            "swap",
            f"{size(total - free)} of {size(total)} are in use, so variables may lie on a disk",
            "end other processes, or give the machine more memory",
        )
    else:
        yield good("swap", f"{size(total - free)} of {size(total)} are in use")


def mapping_limits(proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Limits of a process that keep it from mapping the service's memory, or from mapping it writable."""
    is_good = True
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY and addresses < 4 * machine.total_nbytes():
        is_good = False
        yield slower(
            "addresses",
            f"a process may have {size(addresses)} of addresses (ulimit -v), and some segments are as long as the "
            "machine's memory; a process that cannot map them gets every byte in a message",
            "ulimit -v unlimited",
        )
    if resource.getrlimit(resource.RLIMIT_DATA)[0] != resource.RLIM_INFINITY:
        is_good = False
        yield slower(
            "data limit",
            "the data of a process is limited (ulimit -d), so variables are mapped read-only: a write in place ends "
            "the worker instead of failing the run",
            "ulimit -d unlimited",
        )
    try:
        mode = (proc / "sys/vm/overcommit_memory").read_text().strip()
    except OSError:
        mode = "unknown"
    if mode == _STRICT:
        is_good = False
        yield slower(
            "overcommit",
            "vm.overcommit_memory is 2: the kernel counts whole mappings, so variables are mapped read-only, and a "
            "write in place ends the worker instead of failing the run",
            "sysctl vm.overcommit_memory=0",
        )
    if is_good:
        yield good("mappings", f"no limit of addresses or data; vm.overcommit_memory is {mode}")


def shared_memory_files(directory: Path = Path("/dev/shm")) -> Iterator[Finding]:
    """The size of /dev/shm. Only ``cs-launch --memory files`` with a run directory there uses it."""
    use = "not used: variables lie in anonymous memory; only cs-launch --memory files with --run-dir there uses it"
    try:
        status = os.statvfs(directory)
    except OSError:
        yield good("/dev/shm", f"not there, and {use}")
        return
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    yield good("/dev/shm", f"{size(total)}, {size(free)} free; {use}")


def huge_pages(system: Path = Path("/sys")) -> Iterator[Finding]:
    """The kernel's settings for transparent huge pages, for private memory and for shared memory."""
    directory = system / "kernel/mm/transparent_hugepage"
    chosen = {}
    for name in ("enabled", "shmem_enabled"):
        try:
            chosen[name] = (directory / name).read_text().partition("[")[2].partition("]")[0] or "unknown"
        except OSError:
            chosen[name] = "unknown"
    if set(chosen.values()) == {"unknown"}:
        yield good("huge pages", "the kernel has no transparent huge pages")
    else:
        yield good("huge pages", f"{chosen['enabled']} for private memory, {chosen['shmem_enabled']} for shared memory")
