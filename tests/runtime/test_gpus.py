"""Which GPU a process means, and what it says where CuPy is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cs_proto.errors import DeviceError
from cs_runtime import gpus


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    return tmp_path / "gpus"


def test_numbers_are_the_users_where_the_process_sees_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CS_GPUS", raising=False)
    assert gpus.local_number("gpu:3") == 3
    monkeypatch.setenv("CS_GPUS", "3,0")
    assert [gpus.local_number(f"gpu:{number}") for number in (3, 0)] == [0, 1]
    monkeypatch.setenv("CS_GPUS", "")
    with pytest.raises(DeviceError, match="gpu:0 is not one of this process's devices: it sees no GPU"):
        gpus.local_number("gpu:0")


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder@U16-I3)  Wed Jul"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Feb 22 01:44:30 UTC 2024\nGCC version:  gcc 13.2.0\n"


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        (
            OPEN.format("580.65.06"),
            r"pip install 'central-storage\[cuda13\]' \(the driver, 580.65.06, supports CUDA 13\)",
        ),
        (
            CLOSED.format("550.54.15"),
            r"pip install 'central-storage\[cuda12\]' \(the driver, 550.54.15, supports CUDA 12\)",
        ),
        (
            CLOSED.format("470.223.02"),
            r"the driver \(470.223.02\) is too old for every CuPy package; install driver 525 or later",
        ),
        ("", r"pip install 'central-storage\[cuda12\]' or, with a driver from 580 on, 'central-storage\[cuda13\]'"),
    ],
)
def test_a_missing_cupy_is_one_line_that_says_what_to_install(
    driver: Path, monkeypatch: pytest.MonkeyPatch, version: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    if version:
        (driver.parent / "version").write_text(version)
    with pytest.raises(DeviceError, match=f"^gpu:1 needs CuPy: {remedy}$"):
        gpus.require_cupy(["cpu:0+gpu:1"], driver)
    gpus.require_cupy(["cpu:0"], driver)


def test_a_cupy_that_is_there_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cupy.py").write_text("1 / 0")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    gpus.require_cupy(["gpu:0"])
