"""How much memory may still be touched: the machine's and every control group's, whichever is least."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from cs_runtime import machine

MACHINE = 1 << 40


@pytest.fixture(autouse=True)
def a_large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"MemAvailable": MACHINE, "MemTotal": 2 * MACHINE}
    monkeypatch.setattr(machine, "_kernel_nbytes", said.__getitem__)


def proc(tmp_path: Path, cgroup: str, mounts: list[str]) -> Path:
    directory = tmp_path / "proc"
    directory.mkdir()
    (directory / "cgroup").write_text(cgroup)
    (directory / "mountinfo").write_text("22 1 0:20 / /proc rw - proc proc rw\n" + "".join(f"{m}\n" for m in mounts))
    return directory


def second(directory: Path, limit: int | str, used: int, inactive_file: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")


def first(directory: Path, limit: int, used: int, inactive_file: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive_file}\n")


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.total_nbytes() == 2 * MACHINE
    assert 0 <= machine.available_nbytes() <= MACHINE
    monkeypatch.undo()
    assert machine.total_nbytes() == psutil.virtual_memory().total
    assert 0 < machine.available_nbytes() < machine.total_nbytes()


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    assert machine.available_nbytes(tmp_path / "nothing") == MACHINE


def test_the_second_version(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    second(mount / "user/app", "max", 400)
    second(mount / "user", 1000, 600, inactive_file=50)
    where = proc(tmp_path, "0::/user/app\n", [f"30 22 0:26 / {mount} rw shared:4 - cgroup2 cgroup2 rw"])
    assert machine.available_nbytes(where) == 450
    second(mount / "user/app", 700, 400)
    assert machine.available_nbytes(where) == 300
    second(mount / "user/app", 300, 400)
    assert machine.available_nbytes(where) == 0


@pytest.mark.parametrize(
    ("cgroup", "mounts", "available"),
    [
        pytest.param(
            "7:cpu,cpuacct:/b\n4:memory:/a\n",
            [
                "32 31 0:29 / {}/cpu rw - cgroup cgroup rw,cpu",
                "35 31 0:32 / {}/memory rw,relatime - cgroup cgroup rw,memory",
            ],
            4010,
            id="the first",
        ),
        pytest.param(
            "4:memory:/a\n0::/b\n",
            [
                "35 31 0:32 / {}/memory rw - cgroup cgroup rw,memory",
                "41 31 0:38 / {}/unified rw - cgroup2 cgroup2 rw",
            ],
            500,
            id="both",
        ),
    ],
)
def test_the_first_version_and_both(tmp_path: Path, cgroup: str, mounts: list[str], available: int) -> None:
    first(tmp_path / "memory/a", 5000, 1000, inactive_file=10)
    first(tmp_path / "memory", 9223372036854771712, 100)
    second(tmp_path / "unified/b", 3000, 2500)
    where = proc(tmp_path, cgroup, [mount.format(tmp_path) for mount in mounts])
    assert machine.available_nbytes(where) == available


def test_a_container_whose_mount_shows_only_its_own_group(tmp_path: Path) -> None:
    first(tmp_path / "memory", 2000, 500)
    first(tmp_path / "memory/inner", 1500, 400)
    mounts = [f"35 31 0:32 /docker/f00 {tmp_path}/memory rw - cgroup cgroup rw,memory"]
    where = proc(tmp_path, "4:memory:/docker/f00/inner\n", mounts)
    assert machine.available_nbytes(where) == 1100
    (where / "cgroup").write_text("4:memory:/elsewhere\n")
    assert machine.available_nbytes(where) == 1500


def test_files_that_do_not_read_as_numbers_set_no_limit(tmp_path: Path) -> None:
    second(tmp_path / "cgroup", "a lot", 1)
    where = proc(tmp_path, "0::/\n", [f"30 22 0:26 / {tmp_path}/cgroup rw - cgroup2 cgroup2 rw"])
    assert machine.available_nbytes(where) == MACHINE


def test_each_group_that_has_a_limit_is_told_from_the_innermost_outwards(tmp_path: Path) -> None:
    mount = tmp_path / "cgroup"
    second(mount / "outer", 1000, 100)
    second(mount / "outer/inner", "max", 100)
    where = proc(tmp_path, "0::/outer/inner\n", [f"30 20 0:26 / {mount} rw - cgroup2 cgroup2 rw"])
    assert [limit for limit, _, _ in machine.group_limits(where)] == [1000]
    second(mount / "outer/inner", 400, 100)
    assert [limit for limit, _, _ in machine.group_limits(where)] == [400, 1000]
    assert list(machine.group_limits(tmp_path / "nothing")) == []


def test_the_number_of_version_1_for_no_limit_is_none(tmp_path: Path) -> None:
    first(tmp_path / "memory", 9223372036854771712, 100)
    where = proc(tmp_path, "4:memory:/\n", [f"35 31 0:32 / {tmp_path}/memory rw - cgroup cgroup rw,memory"])
    assert list(machine.group_limits(where)) == []
    assert machine.available_nbytes(where) == MACHINE
