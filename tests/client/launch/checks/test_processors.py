"""Processors: the kind, those that may be used, NUMA nodes, threads of libraries, and mailboxes."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from central_storage.launch.checks import processors
from central_storage.observer import seqlock_reader
from cs_runtime.transport.rings import IS_ORDERED


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with eight processors, all of which may be used."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(processors, "core_count", lambda *_: 8)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A /proc and a /sys without control groups."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("")
    return tmp_path


@pytest.mark.parametrize("machine", ["aarch64", "riscv64"])
def test_what_is_slower_on_arm_is_said(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    found = list(processors.kind())
    assert [(finding.level, finding.subject) for finding in found] == [("slower", "processor"), ("slower", "observers")]
    assert ["mailbox" in found[0].text, "observers" in found[1].text] == [True, True]
    assert all(machine in finding.text and finding.remedy for finding in found)


def test_nothing_is_slower_on_x86(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A Fine One\nmodel\t: 3\n")
    [finding] = processors.kind(tmp_path)
    assert (finding.level, finding.text) == ("good", "A Fine One (x86_64)")
    [finding] = processors.kind(tmp_path / "nothing")
    assert finding.text == "unknown (x86_64)"


def test_the_report_and_the_transport_agree_about_this_processor() -> None:
    levels = {finding.level for finding in processors.kind()}
    assert (levels == {"good"}) == IS_ORDERED
    assert seqlock_reader._ORDERED == processors._X86


@pytest.mark.parametrize(
    ("said", "level", "text"),
    [
        ("off", "slower", "off: every message of a step goes over ZeroMQ"),
        ("maybe", "bad", "its value is neither on nor off, so nothing starts"),
    ],
)
def test_mailboxes_that_are_switched_off_are_named(
    said: str, level: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CS_MAILBOXES", said)
    [finding] = processors.mailboxes()
    assert (finding.level, finding.text, finding.remedy) == (level, text, "unset CS_MAILBOXES")
    monkeypatch.setenv("CS_MAILBOXES", "on")
    assert list(processors.mailboxes()) == []


@pytest.mark.usefixtures("eight")
def test_all_processors_are_good(tree: Path) -> None:
    [finding] = processors.cores(tree, tree)
    assert (finding.level, finding.text) == ("good", "8 of 8 processors may be used")


@pytest.mark.usefixtures("eight")
def test_affinity_and_quotas_are_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(processors, "core_count", lambda *_: 4)
    [finding] = processors.cores(tree, tree)
    assert finding.text == "4 of 8 processors may be used (affinity and cpusets allow 4)"
    monkeypatch.setattr(processors, "core_count", lambda *_: 2)
    [finding] = processors.cores(tree, tree)
    assert finding.text == "2 of 8 processors may be used (affinity and cpusets allow 4, a control group fewer)"


@pytest.mark.usefixtures("eight")
def test_one_processor_is_slow(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "core_count", lambda *_: 1)
    [finding] = processors.cores(tree, tree)
    assert finding.level == "slower"
    assert "take turns" in finding.text
    assert "--cpus" in finding.remedy


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("path", ["docker/1f3a", ""])
def test_a_quota_that_the_service_does_not_see_is_named(tree: Path, path: str) -> None:
    (tree / "self/cgroup").write_text("7:memory:/\n3:cpu,cpuacct:/docker/1f3a\n0::/x\n")
    group = tree / "fs/cgroup/cpu,cpuacct" / path
    group.mkdir(parents=True)
    (group / "cpu.cfs_period_us").write_text("100000\n")
    (group / "cpu.cfs_quota_us").write_text("150000\n")
    [finding] = processors.cores(tree, tree)
    assert finding.level == "slower"
    assert "allows the time of 1.5 processors, and a service counts 8" in finding.text
    assert finding.remedy.startswith("taskset -c 0-1 ")
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    [finding] = processors.cores(tree, tree)
    assert finding.level == "good"


@pytest.mark.usefixtures("eight")
def test_numa_nodes_are_told(tmp_path: Path) -> None:
    (tmp_path / "devices/system/cpu").mkdir(parents=True)
    (tmp_path / "devices/system/cpu/online").write_text("0-7\n")
    for number, processors_of in enumerate(("0-3", "4-7")):
        node = tmp_path / f"devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(processors_of)
    [finding] = processors.nodes(tmp_path)
    assert (finding.level, finding.text) == ("good", "2 nodes; workers are kept on them")
    (tmp_path / "devices/system/cpu/online").write_text("0-15\n")
    [finding] = processors.nodes(tmp_path)
    assert "workers may run on any" in finding.text
    [finding] = processors.nodes(tmp_path / "nothing")
    assert finding.text == "one node"


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("environment", "level", "text", "remedy"),
    [
        ({}, "good", "no variable such as OMP_NUM_THREADS is set: the workers share 8 processors", ""),
        (
            {"OMP_NUM_THREADS": "2"},
            "good",
            "OMP_NUM_THREADS=2; the workers share 8 processors where nothing is set",
            "",
        ),
        (
            {"OMP_NUM_THREADS": "8", "MKL_NUM_THREADS": "secret"},
            "slower",
            "OMP_NUM_THREADS=8, MKL_NUM_THREADS=?: every worker uses so many threads, and two workers have 8 "
            "processors in all",
            "unset OMP_NUM_THREADS MKL_NUM_THREADS: the workers share the processors then",
        ),
        (
            {"OMP_NUM_THREADS": "16,2"},
            "slower",
            "OMP_NUM_THREADS=16,2: every worker uses so many threads, and two workers have 8 processors in all",
            "unset OMP_NUM_THREADS: the workers share the processors then",
        ),
    ],
)
def test_threads_of_libraries(environment: dict[str, str], level: str, text: str, remedy: str) -> None:
    [finding] = processors.library_threads(environment)
    assert (finding.level, finding.text, finding.remedy) == (level, text, remedy)


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize("value", ["many", "0", "-1"])
def test_a_number_of_threads_that_ends_the_server_is_bad(value: str) -> None:
    finding = next(processors.library_threads({"NUMBA_NUM_THREADS": value}))
    assert (finding.level, finding.remedy) == ("bad", "unset NUMBA_NUM_THREADS")


@pytest.mark.usefixtures("eight")
def test_places_of_threads_are_told() -> None:
    _, finding = processors.library_threads({"OMP_PROC_BIND": "true"})
    assert finding.text == "OMP_PROC_BIND is set, so no worker is kept on a NUMA node"
