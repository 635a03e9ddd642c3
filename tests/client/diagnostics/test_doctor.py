"""What a machine is told about itself."""

from __future__ import annotations

import platform

import pytest
from tests.harness.processes import run

from central_storage.diagnostics import doctor
from central_storage.launch import cli

OTHER_SYSTEM = "import sys; sys.platform = 'darwin'; import central_storage"


def test_another_system_than_linux_is_named_by_the_import() -> None:
    ended = run("-c", OTHER_SYSTEM)
    assert ended.code == 1
    assert ended.err.splitlines()[-1].startswith(
        "ImportError: central_storage runs on Linux only, and this system is 'darwin'"
    )


def test_the_doctor_says_what_is_slower_on_arm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cli.main(["--doctor"]) == 0
    slower = [line for line in capsys.readouterr().out.splitlines() if line.startswith("slower here: ")]
    assert ["mailbox" in slower[0], "observers" in slower[1]] == [True, True]
    assert all("aarch64" in line for line in slower)


def test_nothing_is_slower_on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert doctor.slower_here() == []
    assert "slower here: nothing" in doctor.report()
