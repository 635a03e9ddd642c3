"""The directories above a run directory: from which of them another user could replace it."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cs_proto.errors import LaunchError
from cs_runtime.ancestors import why_replaceable
from cs_runtime.transport.supervisor_link import checked

OTHER = 65534
#: A group with several users.
SHARED = 100

Pretend = Callable[[str | Path, int, int], None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Show a directory with another owner and mode: only root could change the owner."""
    true, shown = os.stat, dict[str, tuple[int, int]]()

    def looked_at(path: Any, **options: Any) -> os.stat_result:
        status = true(path, **options)
        if not isinstance(path, str) or path not in shown:
            return status
        owner, mode = shown[path]
        return os.stat_result((stat.S_IFDIR | mode, *status[1:4], owner, SHARED, *status[6:10]))

    monkeypatch.setattr(os, "stat", looked_at)
    return lambda path, owner, mode: shown.update({str(path): (owner, mode)})


@pytest.mark.parametrize(
    ("owner", "mode", "expected"),
    [
        (os.geteuid(), 0o700, None),
        (os.geteuid(), 0o755, None),
        (os.geteuid(), 0o1770, None),
        (0, 0o755, None),
        (0, 0o1777, None),
        (os.geteuid(), 0o777, "(its mode is 777); close it (chmod go-w), give it the sticky bit (chmod +t), or choose"),
        (os.geteuid(), 0o775, "(its mode is 775)"),
        (0, 0o2777, "(its mode is 2777)"),
        (OTHER, 0o700, f"belongs to user {OTHER}, who can replace what lies there, and not to you"),
        (OTHER, 0o1777, f"belongs to user {OTHER}"),
    ],
)
def test_who_may_replace_it_from_above(
    tmp_path: Path, pretend: Pretend, owner: int, mode: int, expected: str | None
) -> None:
    nearest, farther = tmp_path / "a" / "b", tmp_path / "a"
    nearest.mkdir(parents=True)
    for above in (nearest, farther):
        pretend(nearest, os.geteuid(), 0o700)
        pretend(above, owner, mode)
        for path in (nearest / "run", nearest / "missing" / "run"):
            found = why_replaceable(str(path))
            if expected is None:
                assert found is None
            else:
                assert found is not None
                assert expected in found
                assert f"{above}, above it, " in found


def test_what_cannot_be_looked_at_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true = os.stat

    def looked_at(path: Any, **options: Any) -> os.stat_result:
        if path == str(tmp_path):
            raise PermissionError(13, "Permission denied")
        return true(path, **options)

    monkeypatch.setattr(os, "stat", looked_at)
    found = why_replaceable(str(tmp_path / "run"))
    assert found == f"{tmp_path}, above it, cannot be looked at (Permission denied); choose another directory"


@pytest.mark.parametrize(
    ("group", "name", "members", "mode", "is_replaceable"),
    [
        (1000, "ada", [], 0o775, False),
        (1000, "ada", ["ada"], 0o775, False),
        (1000, "ada", [], 0o777, True),
        (1000, "ada", ["ada", "bob"], 0o775, True),
        (1000, "users", [], 0o775, True),
        (1001, "ada", [], 0o775, True),
    ],
)
def test_the_group_of_one_user_is_that_user(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: int,
    name: str,
    members: list[str],
    mode: int,
    is_replaceable: bool,
) -> None:
    ada = pwd.struct_passwd(("ada", "x", os.geteuid(), 1000, "", "/home/ada", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: ada)
    monkeypatch.setattr(grp, "getgrgid", lambda _: grp.struct_group((name, "x", group, members)))
    (run := tmp_path / "open" / "run").mkdir(mode=0o700, parents=True)
    run.parent.chmod(mode)
    assert (why_replaceable(str(run)) is not None) == is_replaceable


def test_a_group_without_a_name_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> grp.struct_group:
        raise KeyError

    monkeypatch.setattr(grp, "getgrgid", unknown)
    (run := tmp_path / "open" / "run").mkdir(mode=0o700, parents=True)
    run.parent.chmod(0o775)
    assert why_replaceable(str(run)) is not None


def test_in_a_user_namespace_the_owner_of_all_counts_as_root(tmp_path: Path, pretend: Pretend) -> None:
    pretend(tmp_path, OTHER, 0o755)
    assert why_replaceable(str(tmp_path / "run")) is not None
    pretend("/", OTHER, 0o755)
    assert why_replaceable(str(tmp_path / "run")) is None


@pytest.mark.parametrize(
    ("uid_map", "place", "mode", "is_replaceable"),
    [
        ("0 1000 1\n", "/tmp", 0o1777, False),
        ("0 1000 1\n1 100000 65533\n", "/tmp", 0o1777, False),
        ("0 1000 1\n", "/tmp", 0o777, True),
        ("0 1000 1\n", "/usr", 0o755, True),
        ("0 0 4294967295\n", "/tmp", 0o1777, True),
        ("0 1000 1\n1 100000 65536\n", "/tmp", 0o1777, True),
    ],
)
def test_a_container_shows_directories_of_root_as_those_of_nobody(
    pretend: Pretend, monkeypatch: pytest.MonkeyPatch, uid_map: str, place: str, mode: int, is_replaceable: bool
) -> None:
    true = Path.read_text
    shown = {"/proc/self/uid_map": uid_map, "/proc/sys/kernel/overflowuid": f"{OTHER}\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: shown.get(str(path)) or true(path))
    pretend(place, OTHER, mode)
    pretend("/", 0, 0o755)
    assert (why_replaceable(f"{place}/cs-01234567") is not None) == is_replaceable


def test_a_container_may_hide_which_users_it_knows(
    tmp_path: Path, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", hidden)
    assert why_replaceable(str(tmp_path / "run")) is None
    pretend("/tmp", OTHER, 0o1777)
    assert why_replaceable("/tmp/cs-01234567") is not None


def test_a_client_refuses_what_others_could_replace(tmp_path: Path) -> None:
    (run := tmp_path / "open" / "run").mkdir(mode=0o700, parents=True)
    assert checked(str(run)) == str(run)
    (link := tmp_path / "link").symlink_to(run)  # the directory counts to which it leads
    run.parent.chmod(0o777)
    for address in (run, link):
        with pytest.raises(
            LaunchError,
            match=f"^other users could replace the run directory {address}: others may write to {run.parent}, above it",
        ):
            checked(str(address))
    run.parent.chmod(0o1777)
    assert checked(str(link)) == str(run)
