"""How many processors there are, where they lie, and who gets which; over made-up ``/sys`` trees."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from central_storage.diagnostics.gpu_inventory import Gpu
from central_storage.launch import affinity
from central_storage.launch.affinity import Machine, Share, core_count, machine, numa_nodes, shares
from central_storage.launch.plan import Command
from central_storage.launch.supervisor.children import Child
from central_storage.launch.supervisor.loop import Loop


def test_cores_are_cut_to_the_quotas_of_the_control_group_and_those_around_it(tmp_path: Path) -> None:
    group = tmp_path / "groups" / "outer" / "inner"
    group.mkdir(parents=True)
    membership = tmp_path / "cgroup"
    membership.write_text("1:cpu:/elsewhere\n0::/outer/inner\n")
    allowed = len(os.sched_getaffinity(0))
    assert core_count(tmp_path / "groups", membership) == allowed
    (group / "cpu.max").write_text("max 100000\n")
    assert core_count(tmp_path / "groups", membership) == allowed
    (group.parent / "cpu.max").write_text("50000 100000\n")
    assert core_count(tmp_path / "groups", membership) == 1
    assert core_count(tmp_path / "groups", tmp_path / "none") == allowed


def system(directory: Path, **nodes: str) -> Path:
    """A ``/sys`` with these processors on each node and eight in all."""
    (directory / "devices/system/cpu").mkdir(parents=True)
    (directory / "devices/system/cpu/online").write_text("0-7\n")
    for name, processors in nodes.items():
        (directory / "devices/system/node" / name).mkdir(parents=True)
        (directory / "devices/system/node" / name / "cpulist").write_text(f"{processors}\n")
    return directory


ALL = frozenset(range(8))


def test_nodes_are_read_in_order_and_one_without_processors_is_none(tmp_path: Path) -> None:
    tree = system(tmp_path, node10="4-5", node2="0-1,6-7", node3="2-3,9", node4="")
    nodes = numa_nodes(ALL, 8, tree)
    assert list(nodes.items()) == [(2, {0, 1, 6, 7}), (3, {2, 3}), (10, {4, 5})]  # 9 is switched off


def test_what_somebody_has_limited_is_not_limited_further(tmp_path: Path) -> None:
    tree = system(tmp_path, node0="0-3", node1="4-7")
    assert len(numa_nodes(ALL, 8, tree)) == 2
    assert numa_nodes(frozenset({0, 1, 4, 5}), 4, tree) == {}  # taskset, or a cpuset
    assert numa_nodes(ALL, 3, tree) == {}  # a quota


def test_one_node_or_none_that_can_be_read_is_nothing_to_choose_from(tmp_path: Path) -> None:
    assert numa_nodes(ALL, 8, system(tmp_path / "one", node0="0-7")) == {}
    assert numa_nodes(ALL, 8, tmp_path / "none") == {}
    assert numa_nodes(ALL, 8, system(tmp_path / "odd", node0="0-3", node1="what?")) == {}


def test_the_node_of_a_gpu_is_that_of_its_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for address, node in (("0000:0a:00.0", "1"), ("0000:0b:00.0", "-1"), ("0000:0c:00.0", "none")):
        (tmp_path / "bus/pci/devices" / address).mkdir(parents=True)
        (tmp_path / "bus/pci/devices" / address / "numa_node").write_text(node)
    gpus = [Gpu("0", address=f"0000:{slot}:00.0") for slot in ("0A", "0b", "0c", "0d")] + [Gpu("4")]
    monkeypatch.setattr(affinity, "visible_gpus", lambda: gpus)
    found = machine(tmp_path)
    assert (found.gpus, found.gpu_nodes) == (gpus, [1, -1, -1, -1, -1])
    assert (found.cores, found.nodes) == (core_count(), {})


NODES = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}
TWO_NODES = Machine(8, NODES, [Gpu(str(n)) for n in range(4)], [1, 1, 0, -1])


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (["gpu:0"], [(4, 1)]),
        (["gpu:0", "gpu:1", "gpu:2"], [(2, 1), (2, 1), (2, 0)]),
        (["gpu:0", "gpu:1"], [(2, 1), (2, 1)]),
        (["gpu:0+gpu:1", "gpu:2+gpu:0"], [(4, 1), (4, None)]),  # its GPUs hang at different nodes
        (["gpu:3", "gpu:2"], [(4, None), (4, 0)]),
        (["cpu:0", "gpu:0"], [(4, None), (4, 1)]),
        (["cpu:0"], [(8, None)]),  # one worker has them all
        (["cpu:0", "cpu:1"], [(4, 0), (4, 1)]),
        (["cpu:0", "cpu:1", "cpu:2"], [(2, None)] * 3),
        (["cpu:0"] * 4, [(2, 0), (2, 0), (2, 1), (2, 1)]),
        (["elsewhere", "gpu:0", "elsewhere"], [(2, None), (2, 1), (2, None)]),
        (["elsewhere", "cpu:1"], [(4, None), (4, 1)]),
        (["cpu:0"] * 20, [(1, 0)] * 10 + [(1, 1)] * 10),
    ],
)
def test_workers_stay_near_their_gpus_and_spread_over_the_nodes(
    devices: list[str], expected: list[tuple[int, int | None]]
) -> None:
    nothing = frozenset[int]()
    assert shares(devices, TWO_NODES) == [Share(n, nothing if node is None else NODES[node]) for n, node in expected]


def test_where_nothing_is_known_of_nodes_only_threads_are_shared() -> None:
    assert shares(["gpu:0", "cpu:0"], Machine(5, {}, [Gpu("0")], [1])) == [Share(2), Share(2)]
    assert shares(["cpu:0"] * 3, Machine(1)) == [Share(1)] * 3


@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    places=st.lists(st.integers(-1, 4), min_size=1, max_size=8),
    cpus=st.integers(0, 9),
)
def test_no_node_gets_more_threads_than_processors(sizes: list[int], places: list[int], cpus: int) -> None:
    ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    nodes = {n: frozenset(range(end - size, end)) for n, (size, end) in enumerate(zip(sizes, ends, strict=True))}
    gpus = [Gpu(str(n)) for n in range(len(places))]
    devices = [f"gpu:{n}" for n in range(len(places))] + [f"cpu:{n}" for n in range(cpus)]
    split = shares(devices, Machine(sum(sizes), nodes, gpus, places))
    for node in nodes.values():
        there = [share for share in split if share.processors == node]
        assert sum(share.threads for share in there) <= max(len(node), len(there))
    assert all(share.threads >= 1 for share in split)
    known = [place in nodes for place in places] + [False] * cpus
    assert [bool(share.processors) for share in split] == known


@pytest.mark.parametrize("processors", [frozenset({max(os.sched_getaffinity(0))}), frozenset(), frozenset({100_000})])
def test_a_child_is_kept_on_its_processors_and_the_launcher_is_not(processors: frozenset[int]) -> None:
    before = os.sched_getaffinity(0)
    printed: list[str] = []
    ended: list[Child] = []
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    command = Command("worker", 0, (sys.executable, "-S", "-c", code), os.environ, processors=processors)
    loop = Loop()
    Child(loop, command, on_lines=lambda child, stream, lines: printed.extend(lines), on_end=ended.append)
    assert os.sched_getaffinity(0) == before
    while not ended:
        loop.turn()
    assert printed == [str(sorted(processors & before or before))]
