"""Mount namespaces, in which a test sees a file system of its own."""

from __future__ import annotations

import pytest

from .processes import run

__all__ = ["UNSHARE", "need_mount_namespaces"]

#: The beginning of a command that runs in a mount namespace of its own, as root of a user namespace.
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount")


def need_mount_namespaces(untested: str) -> None:
    """Skip the test, and say what is not tested, where no mount namespace is permitted."""
    try:
        tried = run(*UNSHARE, "true")
    except FileNotFoundError:
        pytest.skip(f"{untested}: there is no command unshare")
    if tried.code:
        pytest.skip(f"{untested}: no mount namespace is permitted ({tried.err.strip()})")
