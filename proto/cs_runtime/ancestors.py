"""The directories above a private one: whether other users could put a directory of theirs in its place."""

from __future__ import annotations

import os
import stat

__all__ = ["why_replaceable"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def why_replaceable(path: str) -> str | None:
    """How another user could rename or replace ``path``, and the remedy, as the end of a sentence; None if nobody can
    but this user and root. ``path`` has no symbolic links (``os.path.realpath``) and need not exist.

    Each directory above ``path`` must belong to this user or to root. Others may not write there, unless the sticky bit
    keeps them from what is not theirs.
    """
    # In a user namespace, root of the machine is shown as nobody. Whoever owns "/" can replace everything anyway.
    trusted = {os.geteuid(), 0, os.stat("/").st_uid}
    above = path
    while above != (above := os.path.dirname(above)):
        try:
            status = os.stat(above)
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{above}, above it, cannot be looked at ({error.strerror}); choose another directory"
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid not in trusted:
            return (
                f"{above}, above it, belongs to user {status.st_uid}, who can replace what lies there, and not to you "
                f"(user {os.geteuid()}) or root; choose another directory"
            )
        if mode & _OTHERS_WRITE and not mode & stat.S_ISVTX:
            return (
                f"others may write to {above}, above it, and replace what lies there (its mode is {mode:o}); close it "
                "(chmod go-w), give it the sticky bit (chmod +t), or choose another directory"
            )
    return None
