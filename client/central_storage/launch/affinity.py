"""Processors: how many this process may use, their NUMA nodes, and the share of each worker.

Workers are pinned at most to a whole NUMA node, never to single cores, because a second run would choose the same
cores. If this process is already restricted to some processors, nothing is pinned.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from central_storage.diagnostics.gpu_inventory import Gpu, visible_gpus
from cs_proto.frozen import frozen

__all__ = ["Machine", "Share", "core_count", "machine", "numa_nodes", "shares"]

_SYS = Path("/sys")


@frozen
class Machine:
    """What the workers share: ``cores`` usable ones, the NUMA nodes' processors where workers may be kept on a node
    (else none), the GPUs that the user sees, and the node of each, -1 where it is not known."""

    cores: int
    nodes: Mapping[int, frozenset[int]] = MappingProxyType({})
    gpus: Sequence[Gpu] = ()
    gpu_nodes: Sequence[int] = ()


@frozen
class Share:
    """The share of a worker: the number of its ``threads``, and its ``processors`` (empty: any)."""

    threads: int
    processors: frozenset[int] = frozenset()


def machine(system: Path = _SYS) -> Machine:
    """This machine as this process may use it."""
    gpus = visible_gpus()
    cores = core_count()
    return Machine(
        cores,
        numa_nodes(frozenset(os.sched_getaffinity(0)), cores, system),
        gpus,
        [_node_of(gpu, system) for gpu in gpus],
    )


def numa_nodes(allowed: frozenset[int], cores: int, system: Path = _SYS) -> dict[int, frozenset[int]]:
    """The processors of each NUMA node that has any, where a choice among them is nobody else's: this process may use
    all the machine has (``allowed``, as many as ``cores``) and there is more than one node. Else none."""
    try:
        online = _processors((system / "devices/system/cpu/online").read_text())
        nodes = {
            int(node.name.removeprefix("node")): _processors((node / "cpulist").read_text()) & online
            for node in (system / "devices/system/node").glob("node[0-9]*")
        }
    except (OSError, ValueError):
        return {}
    nodes = {number: nodes[number] for number in sorted(nodes) if nodes[number]}
    return nodes if allowed == online and cores == len(online) and len(nodes) > 1 else {}


def shares(devices: Sequence[str], machine: Machine) -> list[Share]:
    """The share of the worker on each of ``devices`` (short form).

    One on a GPU gets the node its GPU hangs at, where that is one and is known. Workers that are all on CPUs get the
    nodes in equal numbers, where the numbers fit. All others may run anywhere. Cores are shared alike.
    """
    nodes = [_node(rank, devices, machine) for rank in range(len(devices))]
    crowd = Counter(nodes)
    fair = max(1, machine.cores // len(devices))
    return [
        Share(fair)
        if node is None
        else Share(max(1, min(fair, len(machine.nodes[node]) // crowd[node])), machine.nodes[node])
        for node in nodes
    ]


def _node(rank: int, devices: Sequence[str], machine: Machine) -> int | None:
    if not machine.nodes or devices[rank] == "elsewhere":
        return None
    if any("gpu:" in device for device in devices):
        own = {machine.gpu_nodes[int(name[4:])] for name in devices[rank].split("+") if name.startswith("gpu:")}
        node = own.pop() if len(own) == 1 else None
        return node if node in machine.nodes else None
    if len(devices) % len(machine.nodes):
        return None
    return list(machine.nodes)[rank * len(machine.nodes) // len(devices)]


def core_count(control_groups: Path = _SYS / "fs/cgroup", membership: Path = Path("/proc/self/cgroup")) -> int:
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


def _node_of(gpu: Gpu, system: Path) -> int:
    try:
        return int((system / "bus/pci/devices" / gpu.address.lower() / "numa_node").read_text()) if gpu.address else -1
    except (OSError, ValueError):
        return -1


def _processors(ranges: str) -> frozenset[int]:
    """``0-3,8`` as a set."""
    found: set[int] = set()
    for part in filter(None, ranges.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
