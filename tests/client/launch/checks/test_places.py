"""Run directories and the cache of kernels."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from central_storage.launch.checks import places


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only place for run directories."""
    path = Path(os.environ["TMPDIR"]) / "place"
    path.mkdir(mode=0o700)
    monkeypatch.setattr("central_storage.launch.run_directory._places", lambda: [str(path)])
    yield path
    assert list(path.iterdir()) == []
    path.rmdir()


def mounted(tmp_path: Path, where: Path, kind: str) -> Path:
    """A /proc that shows a file system at the place."""
    (tmp_path / "self").mkdir()
    lines = (
        "22 1 0:20 / / rw - ext4 /dev/sda rw",
        f"30 22 0:26 / {os.path.realpath(where.parent)} rw shared:4 - tmpfs tmpfs rw",
        f"31 30 0:27 / {os.path.realpath(where)} rw - {kind} somewhere rw",
        f"32 22 0:28 / {os.path.realpath(where)}2 rw - xfs elsewhere rw",
    )
    (tmp_path / "self/mountinfo").write_text("\n".join(lines))
    return tmp_path


def test_a_run_directory_is_made_and_removed(where: Path, tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(where)}
    [finding] = places.run_directories(mounted(tmp_path, where, "tmpfs"), environment)
    assert (finding.level, finding.text) == ("good", f"in {where} (tmpfs), closed to other users")


def test_a_place_that_is_passed_over_is_told(where: Path, tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": "/run/user/0/" + "long" * 30, "TMPDIR": str(where)}
    [finding] = places.run_directories(tmp_path, environment)
    assert finding.text == (
        f"in {where} (unknown file system), closed to other users; XDG_RUNTIME_DIR is not used: it is full, too "
        "long for sockets, not there, or not yours"
    )


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs"])
def test_a_place_that_is_not_local_is_slow(where: Path, tmp_path: Path, kind: str) -> None:
    [finding] = places.run_directories(mounted(tmp_path, where, kind), {})
    assert (finding.level, kind in finding.text) == ("slower", True)
    assert finding.remedy.startswith("set XDG_RUNTIME_DIR or TMPDIR to a private, local directory")


def test_a_place_from_which_others_may_remove_is_bad(where: Path, tmp_path: Path) -> None:
    where.chmod(0o777)
    [finding] = places.run_directories(tmp_path, {})
    assert finding.level == "bad"
    assert f"others may write to {where}, above it, and replace what lies there (its mode is 777)" in finding.text


def test_a_place_from_which_others_may_remove_is_told_where_another_is_used(where: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    [finding] = places.run_directories(tmp_path, {"XDG_RUNTIME_DIR": str(tmp_path / "open"), "TMPDIR": str(where)})
    assert finding.level == "good"
    assert f"; XDG_RUNTIME_DIR is not used: others may write to {tmp_path}/open, above it, and replace" in finding.text


def test_no_place_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("central_storage.launch.run_directory._places", lambda: ["/nowhere"])
    [finding] = places.run_directories()
    assert finding.level == "bad"
    assert finding.text == "there is no place for a run directory: in /nowhere, this user may not write"
    assert "short path" in finding.remedy


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("os.mkdir", "there is no place for a run directory: in {}, nothing can be made (No space left on device)"),
        ("central_storage.launch.checks.places.socket.socket", "none can be made in {} (No space left on device)"),
    ],
)
def test_a_place_that_takes_no_directory_or_socket_is_bad(
    where: Path, call: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(call, full)
        [finding] = places.run_directories()
    assert finding.level == "bad"
    assert finding.text.startswith(says.format(where))
    assert "XDG_RUNTIME_DIR" in finding.remedy


def test_a_place_that_is_full_is_not_the_one_that_is_used(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("central_storage.launch.run_directory._places", lambda: [str(where), os.environ["TMPDIR"]])
    mkdir = os.mkdir

    def full(path: str, mode: int = 0o777) -> None:
        if os.path.dirname(path) == str(where):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        mkdir(path, mode)

    with monkeypatch.context() as patch:
        patch.setattr("os.mkdir", full)
        [finding] = places.run_directories(environment={"TMPDIR": str(where)})
    assert finding.text.startswith(f"in {os.environ['TMPDIR']} (")
    assert "TMPDIR is not used: it is full, " in finding.text


@pytest.mark.parametrize("variable", ["CS_CACHE_DIR", "XDG_CACHE_HOME"])
def test_a_cache_with_kernels_is_good(tmp_path: Path, variable: str) -> None:
    path = tmp_path if variable == "CS_CACHE_DIR" else tmp_path / "central-storage"
    kernels = path / "kernels-0123"
    kernels.mkdir(parents=True)
    [finding] = places.kernel_cache({variable: str(tmp_path)})
    assert (finding.level, "is empty" in finding.text) == ("good", True)
    (kernels / "adam-float32").touch()
    [finding] = places.kernel_cache({variable: str(tmp_path)})
    assert (finding.level, finding.text) == ("good", f"{path}, 1 compiled kernels of this version and others")


def test_the_usual_cache_is_in_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    [finding] = places.kernel_cache({"XDG_CACHE_HOME": "relative"})
    assert finding.text.startswith(f"{tmp_path}/.cache/central-storage is empty")
    assert not (tmp_path / ".cache").exists()


def cache_that_is(kind: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "a file":
        path.write_text("")
        return
    path.mkdir(mode=0o700)
    if kind == "open to others":
        path.chmod(0o777)
    elif kind == "another user's":
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    elif kind == "not writable":
        monkeypatch.setattr(os, "access", lambda *_: False)
    elif kind == "a link to nothing":
        path.rmdir()
        path.symlink_to("nothing")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("a file", "is no directory"),
        ("open to others", "belongs to another user, or others may write there"),
        ("another user's", "belongs to another user, or others may write there"),
        ("not writable", "is not writable"),
        ("a link to nothing", "cannot be used (No such file or directory)"),
    ],
)
def test_a_cache_that_cannot_be_used_is_slow(
    kind: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache"
    cache_that_is(kind, path, monkeypatch)
    [finding] = places.kernel_cache({"CS_CACHE_DIR": str(path)})
    monkeypatch.undo()
    assert finding.level == "slower"
    assert finding.text.startswith(f"{path} {text}; every service compiles its kernels anew")
    assert finding.remedy.startswith("CS_CACHE_DIR=DIR")
