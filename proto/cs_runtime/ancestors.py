"""The directories above a private one: whether other users could put a directory of theirs in its place."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

__all__ = ["why_replaceable"]

# Directories that root of the machine owns. A container may show them as those of an owner that it does not know.
_OF_ROOT = frozenset(("/dev", "/dev/shm", "/home", "/run", "/tmp", "/var", "/var/tmp"))


def why_replaceable(path: str) -> str | None:
    """How another user could rename or replace ``path``, and the remedy, as the end of a sentence; None if nobody can
    but this user and root. ``path`` has no symbolic links (``os.path.realpath``) and need not exist.

    Each directory above ``path`` must belong to this user or to root. Others may not write there, unless the sticky bit
    keeps them from what is not theirs; the group may, if this user is alone in it.
    """
    trusted = {os.geteuid(), 0, os.stat("/").st_uid}  # whoever owns "/" can replace everything anyway
    stranger = _unknown_owner()
    above = path
    while above != (above := os.path.dirname(above)):
        try:
            status = os.stat(above)
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{above}, above it, cannot be looked at ({error.strerror}); choose another directory"
        mode = stat.S_IMODE(status.st_mode)
        is_of_root = above in _OF_ROOT and status.st_uid == stranger
        if status.st_uid not in trusted and not is_of_root:
            return (
                f"{above}, above it, belongs to user {status.st_uid}, who can replace what lies there, and not to you "
                f"(user {os.geteuid()}) or root; choose another directory"
            )
        is_open = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_alone_in(status.st_gid))
        if is_open and not mode & stat.S_ISVTX:
            return (
                f"others may write to {above}, above it, and replace what lies there (its mode is {mode:o}); close it "
                "(chmod go-w), give it the sticky bit (chmod +t), or choose another directory"
            )
    return None


def _is_alone_in(group: int) -> bool:
    """Whether this is the group that many systems make for each user, whose new files it may write."""
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    own = (user.pw_gid, user.pw_name)
    return (found.gr_gid, found.gr_name) == own and set(found.gr_mem) <= {user.pw_name}


def _unknown_owner() -> int | None:
    """The user as whom the kernel shows owners whom this user namespace does not know; None if it knows that one."""
    try:
        unknown = int(Path("/proc/sys/kernel/overflowuid").read_text())
        ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except OSError:  # a container may hide them
        return None
    return None if any(first <= unknown < first + count for first, _, count in ranges) else unknown
