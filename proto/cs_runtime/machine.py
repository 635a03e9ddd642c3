"""The memory of the machine, the part of it that this process may still touch, and the addresses that it may map.

Memory: the smaller of what the kernel calls available and what is left in every control group around this process
(version 1, version 2, or both). Files in the page cache count as free, because the kernel drops them first. The service
asks before every step that could plan memory.
"""

from __future__ import annotations

import functools
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from cs_proto.sizes import in_units

__all__ = ["address_nbytes", "addresses_left", "available_nbytes", "group_limits", "total_nbytes"]

# A process has 128 TiB of addresses on x86-64. The other half is for extensions of segments and for the rest of the
# process, such as the runtime of a GPU.
_ADDRESS_NBYTES = 64 << 40
# Version 1 has a number for no limit: the largest that is a multiple of the page size.
_NO_LIMIT = 1 << 62
# (limit, usage, key in memory.stat of what the kernel can drop) for each version.
_FILES = {
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
}


def total_nbytes() -> int:
    """The size of the machine's memory in bytes; the same for as long as it runs."""
    return _kernel_nbytes("MemTotal")


def available_nbytes(proc: Path = Path("/proc/self")) -> int:
    """Bytes that this process may still touch."""
    available = _kernel_nbytes("MemAvailable")
    for _, left, _ in group_limits(proc):
        available = min(available, left)
    return max(0, available)


def group_limits(proc: Path = Path("/proc/self")) -> Iterator[tuple[int, int, str]]:
    """The limit of each memory control group around this process that has one, the bytes that are left of it, and
    ``cgroup`` (version 1) or ``cgroup2``; from the innermost group outwards."""
    for directory, version in _groups(proc):
        found = _limit_and_left(directory, version)
        if found is not None:
            yield *found, version


def address_nbytes() -> int:
    """The bytes of addresses that the segments of this process may take: half of all that it may map."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return _ADDRESS_NBYTES if limit == resource.RLIM_INFINITY else min(_ADDRESS_NBYTES, limit // 2)


def addresses_left() -> str:
    """The addresses that this process may still map, as text for an error."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if limit == resource.RLIM_INFINITY:
        return f"{used} bytes of addresses{in_units(used)} are in use, and no limit is set"
    free = max(0, limit - used)
    return f"{free} bytes of addresses{in_units(free)} are available under a limit of {limit} bytes{in_units(limit)}"


def _kernel_nbytes(name: str) -> int:
    """The entry ``name`` of /proc/meminfo, in bytes. psutil could read it, but importing psutil would slow down every
    start of a server."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024  # "MemTotal:       16384 kB"


def _limit_and_left(directory: Path, version: str) -> tuple[int, int] | None:
    """The limit of one control group and the bytes left of it; None if it has no limit."""
    limit, usage, droppable = _FILES[version]
    try:
        allowed = (directory / limit).read_text().strip()
        if allowed == "max" or int(allowed) >= _NO_LIMIT:
            return None
        used = int((directory / usage).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        return int(allowed), int(allowed) - used + int(stat.get(droppable, 0))
    except (OSError, ValueError):
        return None  # a root group has no such files: no limit is set there


def _groups(proc: Path) -> Iterator[tuple[Path, str]]:
    """The directories of this process's memory control groups, from the innermost outwards."""
    return iter(_directories(proc, tuple(_paths(proc))))


@functools.lru_cache(maxsize=4)
def _directories(proc: Path, groups: tuple[tuple[str, str], ...]) -> list[tuple[Path, str]]:
    """Those of a process that is in these groups. It is remembered, because a server asks for every new variable, and
    the list of mounts is long."""
    paths, found = dict(groups), []
    for line in _lines(proc / "mountinfo"):
        # "36 35 98:0 /root /mount options [tags] - type source super-options"
        mount, _, kind = line.partition(" - ")
        version, _, options = kind.partition(" ")
        if version not in _FILES or (version == "cgroup" and "memory" not in options.rpartition(" ")[2].split(",")):
            continue
        _, _, _, root, point, *_ = mount.split()
        path = paths.get(version)
        if path is None:
            continue
        # In a container without a namespace of its own the path is the host's and the mount shows only its end.
        inside = os.path.relpath(path, root) if os.path.commonpath([path, root]) == root else "."
        directory = Path(point, inside)
        while True:
            found.append((directory, version))
            if directory == Path(point) or len(directory.parts) <= 1:
                break
            directory = directory.parent
    return found


def _paths(proc: Path) -> Iterator[tuple[str, str]]:
    """Version and path of the memory control groups: ``4:memory:/a`` of version 1, ``0::/b`` of version 2."""
    for line in _lines(proc / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield "cgroup2", path
        elif "memory" in controllers.split(","):
            yield "cgroup", path


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []  # no control groups, or no /proc: the machine's own figure stands alone
