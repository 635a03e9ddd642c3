"""Private files: for their owner alone, through no link, and never somebody else's."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cs_runtime import saving_mark
from cs_runtime.private_files import open_private, read_file
from cs_runtime.run_file import RunFile


@pytest.fixture(autouse=True)
def open_to_all() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_whatever_the_umask_only_the_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with open_private(str(path), "x") as file:
        file.write("a")
    path.chmod(0o666)
    with open_private(str(path), "a") as file:
        file.write("b")
    assert path.read_text() == "ab"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", ["x", "a"])
def test_no_link_is_followed(tmp_path: Path, mode: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "planted").symlink_to(victim)
    with pytest.raises(OSError, match="planted"):
        open_private(str(tmp_path / "planted"), mode)
    assert victim.read_text() == "mine"


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PermissionError, match="another user"):
        open_private(str(tmp_path / "file"), "a")
    assert len(os.listdir("/proc/self/fd")) == descriptors


def _pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


@pytest.mark.parametrize("make", [_pipe, _device, _socket, Path.mkdir])
def test_what_is_no_file_is_refused_at_once(make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(os.environ["TMPDIR"])  # a short path, for the socket
    path = Path("planted")
    make(path)
    descriptors = len(os.listdir("/proc/self/fd"))
    try:
        with pytest.raises(OSError, match="planted"):
            read_file(str(path))
        with pytest.raises(OSError, match="planted"):
            open_private(str(path), "a")
        assert len(os.listdir("/proc/self/fd")) == descriptors
    finally:
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", 1 << 40)
    with pytest.raises(OSError, match="long"):
        read_file(str(tmp_path / "long"))


def test_pipes_in_a_run_directory_hold_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run", "saving"):
        os.mkfifo(tmp_path / name)
    monkeypatch.setenv("CS_RUN_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("CS_ROLE", "script")
    assert RunFile.read(str(tmp_path)) is None
    with saving_mark.setting():
        assert saving_mark.is_set(str(tmp_path))
    assert not saving_mark.is_set(str(tmp_path))


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", "7"])
def test_a_file_of_a_run_that_is_not_one_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "run").write_text(text)
    assert RunFile.read(str(tmp_path)) is None
