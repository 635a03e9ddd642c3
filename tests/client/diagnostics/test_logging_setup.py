"""What a start prints, as ``CS_LOG`` says."""

from __future__ import annotations

import pytest

from central_storage.diagnostics.logging_setup import announce


@pytest.mark.parametrize(
    ("asked", "is_shown"), [("", True), ("debug", True), ("info", True), ("warning", False), ("ERROR", False)]
)
def test_the_line_with_the_devices_is_shown_unless_only_warnings_are_asked_for(
    asked: str, is_shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CS_LOG", asked)
    announce("2 replicas")
    assert capsys.readouterr().err == "2 replicas\n" * is_shown
