"""Memory: what is available, swap, limits of a process, /dev/shm and huge pages."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from central_storage.launch.checks import memory
from cs_runtime import machine

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc of a process without control groups."""
    (tmp_path / "self").mkdir()
    (tmp_path / "sys/vm").mkdir(parents=True)
    (tmp_path / "sys/vm/overcommit_memory").write_text("0\n")
    return tmp_path


def of_machine(monkeypatch: pytest.MonkeyPatch, total: int, available: int) -> None:
    monkeypatch.setattr(machine, "_kernel_nbytes", {"MemTotal": total, "MemAvailable": available}.__getitem__)


def limit(proc: Path, version: str, allowed: int, used: int) -> None:
    """Put the process into a control group with a limit."""
    mount = proc / "group"
    mount.mkdir()
    if version == "cgroup2":
        names, cgroup, options = ("memory.max", "memory.current"), "0::/\n", "rw"
    else:
        names, cgroup, options = ("memory.limit_in_bytes", "memory.usage_in_bytes"), "4:memory:/\n", "rw,memory"
    for name, value in zip((*names, "memory.stat"), (allowed, used, ""), strict=True):
        (mount / name).write_text(f"{value}\n" if value != "" else "")
    (proc / "self/cgroup").write_text(cgroup)
    (proc / "self/mountinfo").write_text(f"30 22 0:26 / {mount} rw - {version} {version} {options}\n")


def test_this_machine_has_enough() -> None:
    [finding] = memory.amount()
    assert finding.level == "good"


def test_little_memory_is_bad(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_machine(monkeypatch, 8 * GIB, 400 << 20)
    [finding] = memory.amount(proc)
    assert finding.level == "bad"
    assert finding.text.startswith("400 MiB of the machine's 8.0 GiB are available")
    assert "end other processes" in finding.remedy


@pytest.mark.parametrize(("kind", "version"), [("cgroup", 1), ("cgroup2", 2)])
def test_the_limit_of_a_control_group_counts(
    proc: Path, kind: str, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_machine(monkeypatch, 8 * GIB, 6 * GIB)
    limit(proc, kind, GIB, 800 << 20)
    [finding] = memory.amount(proc)
    assert finding.level == "bad"
    assert f"(version {version}) limits this process to 1.0 GiB, of which 224 MiB are left" in finding.text
    assert "docker run --memory" in finding.remedy


def test_a_limit_that_leaves_enough_is_told(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_machine(monkeypatch, 8 * GIB, 6 * GIB)
    limit(proc, "cgroup2", 4 * GIB, GIB)
    [finding] = memory.amount(proc)
    assert (finding.level, finding.remedy) == ("good", "")
    assert "limits this process to 4.0 GiB, of which 3.0 GiB are left" in finding.text


def test_a_limit_above_the_machine_is_none(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_machine(monkeypatch, 8 * GIB, 6 * GIB)
    limit(proc, "cgroup", 1 << 60, GIB)
    [finding] = memory.amount(proc)
    assert "control group" not in finding.text


@pytest.mark.parametrize(
    ("total", "free", "level", "text"),
    [
        (0, 0, "good", "none"),
        (4 << 20, 4 << 20, "good", "0 MiB of 4.0 GiB are in use"),
        (4 << 20, 2 << 20, "slower", "2.0 GiB of 4.0 GiB are in use, so variables may lie on a disk"),
    ],
)
def test_swap_in_use_is_slow(proc: Path, total: int, free: int, level: str, text: str) -> None:
    (proc / "meminfo").write_text(
        f"MemTotal:  99 kB\nSwapTotal: {total} kB\nSwapFree:  {free} kB\nHugePages_Total: 0\n"
    )
    [finding] = memory.swap(proc)
    assert (finding.level, finding.text, bool(finding.remedy)) == (level, text, level == "slower")


def limits(monkeypatch: pytest.MonkeyPatch, **said: int) -> None:
    monkeypatch.setattr(
        resource,
        "getrlimit",
        lambda which: next(
            ((value, value) for name, value in said.items() if getattr(resource, name) == which),
            (resource.RLIM_INFINITY, resource.RLIM_INFINITY),
        ),
    )


def test_no_limits_are_good(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch)
    [finding] = memory.mapping_limits(proc)
    assert (finding.level, finding.text) == ("good", "no limit of addresses or data; vm.overcommit_memory is 0")
    (proc / "sys/vm/overcommit_memory").unlink()
    [finding] = memory.mapping_limits(proc)
    assert finding.text.endswith("vm.overcommit_memory is unknown")


@pytest.mark.parametrize(
    ("said", "mode", "subject", "remedy"),
    [
        ({"RLIMIT_AS": 3 * GIB}, "0", "addresses", "ulimit -v unlimited"),
        ({"RLIMIT_DATA": GIB}, "1", "data limit", "ulimit -d unlimited"),
        ({}, "2", "overcommit", "sysctl vm.overcommit_memory=0"),
    ],
)
def test_each_limit_has_its_remedy(
    proc: Path, said: dict[str, int], mode: str, subject: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits(monkeypatch, **said)
    of_machine(monkeypatch, 8 * GIB, 6 * GIB)
    (proc / "sys/vm/overcommit_memory").write_text(mode)
    [finding] = memory.mapping_limits(proc)
    assert (finding.level, finding.subject, finding.remedy) == ("slower", subject, remedy)


def test_the_size_of_shared_memory_files_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [finding] = memory.shared_memory_files(tmp_path / "shm")
    assert (finding.level, finding.text[:9]) == ("good", "not there")
    said = SimpleNamespace(f_blocks=16384, f_frsize=4096, f_bavail=8192)
    monkeypatch.setattr(os, "statvfs", lambda path: said)
    [finding] = memory.shared_memory_files()
    assert finding.text.startswith("64 MiB, 32 MiB free; not used")


def test_the_settings_of_huge_pages_are_told(tmp_path: Path) -> None:
    [finding] = memory.huge_pages(tmp_path)
    assert finding.text == "the kernel has no transparent huge pages"
    directory = tmp_path / "kernel/mm/transparent_hugepage"
    directory.mkdir(parents=True)
    (directory / "enabled").write_text("always [madvise] never\n")
    [finding] = memory.huge_pages(tmp_path)
    assert finding.text == "madvise for private memory, unknown for shared memory"
    (directory / "shmem_enabled").write_text("always within_size advise [never] deny force\n")
    [finding] = memory.huge_pages(tmp_path)
    assert finding.text == "madvise for private memory, never for shared memory"
