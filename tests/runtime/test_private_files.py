"""Private files: for their owner alone, through no link, and never somebody else's."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cs_runtime.private_files import open_private


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
