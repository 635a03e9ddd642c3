"""Another system than Linux."""

from __future__ import annotations

from tests.harness.processes import run

OTHER_SYSTEM = "import sys; sys.platform = 'darwin'; import central_storage"


def test_another_system_than_linux_is_named_by_the_import() -> None:
    ended = run("-c", OTHER_SYSTEM)
    assert ended.code == 1
    assert ended.err.splitlines()[-1].startswith(
        "ImportError: central_storage runs on Linux only, and this system is 'darwin'"
    )
