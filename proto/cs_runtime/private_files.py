"""Files for their owner only, in directories that may be anybody's."""

from __future__ import annotations

import os
from typing import TextIO

__all__ = ["open_private"]


def open_private(path: str, mode: str) -> TextIO:
    """Open a text file with mode 0600, whatever the umask: ``x`` makes a new one, ``a`` appends, also to one that is
    there. No link is followed. Raises OSError, and PermissionError if the file belongs to another user.

    Example::

        with open_private("/tmp/error.json.12", "x") as file:
            file.write("{}")
    """
    how = {"x": os.O_EXCL, "a": os.O_APPEND}[mode]
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | how, 0o600)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(1, "it belongs to another user", path)
        os.fchmod(descriptor, 0o600)
        return open(descriptor, "a", encoding="utf-8", errors="backslashreplace")
    except OSError:
        os.close(descriptor)
        raise
