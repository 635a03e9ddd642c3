"""How many processors this process may use: its affinity, cut to the quota of its control group."""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["core_count"]


def core_count(control_groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Usable cores, at least 1. A quota of 1.5 processors counts as 2."""
    cores = len(os.sched_getaffinity(0))
    for group in _groups(control_groups, membership):
        try:
            quota, period = (group / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue  # the root group has no quota
        if quota != "max":
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def _groups(control_groups: Path, membership: Path) -> list[Path]:
    """This process's control group (version 2) and those around it, innermost first."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith("0::"):
            group = control_groups / line[3:].lstrip("/")
            return [group, *(parent for parent in group.parents if parent.is_relative_to(control_groups))]
    return []
