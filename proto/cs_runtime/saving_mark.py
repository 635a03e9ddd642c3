"""The mark by which a script tells its launcher that it saves a checkpoint: a locked file in the run directory.

The launcher waits longer for such a script before it ends it. The system releases the lock when the script dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

__all__ = ["is_set", "setting"]

_NAME = "saving"
# Without O_NONBLOCK, a pipe of this name would wait for its writer.
_HOW = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def setting() -> Iterator[None]:
    """Set the mark for the length of the block, if ``cs-launch`` runs this script. Blocks may overlap."""
    file = _open()
    try:
        yield
    finally:
        if file >= 0:
            os.close(file)


def _open() -> int:
    """The file, locked. -1 without a launcher, and where the run directory is gone."""
    directory = os.environ.get("CS_RUN_DIRECTORY")
    if os.environ.get("CS_ROLE") != "script" or not directory:
        return -1
    with contextlib.suppress(OSError):
        path = os.path.join(directory, _NAME)
        file = os.open(path, _HOW | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise
        return file
    return -1


def is_set(directory: str) -> bool:
    """Whether a script has set the mark in the run directory ``directory``."""
    try:
        file = os.open(os.path.join(directory, _NAME), _HOW)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    else:
        return False
    finally:
        os.close(file)
