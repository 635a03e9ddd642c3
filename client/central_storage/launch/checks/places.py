"""The directories of a service: run directories and the cache of compiled kernels."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from central_storage.launch.run_directory import RunDirectory, place
from cs_proto.errors import LaunchError
from cs_runtime.ancestors import why_replaceable

from .finding import Finding, bad, good, slower

__all__ = ["kernel_cache", "run_directories"]

_FAR = ("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gpfs", "lustre", "nfs", "smb")
_SHORTER = "set XDG_RUNTIME_DIR or TMPDIR to a private, local directory with a short path"


def run_directories(proc: Path = Path("/proc"), environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Make a run directory with a socket, as a service does, and remove it."""
    where = place()
    try:
        directory = RunDirectory()
        where = os.path.dirname(directory.path)  # another one if that is full
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(os.path.join(directory.path, "supervisor"))
                listener.listen()
        finally:
            directory.remove()
    except LaunchError as error:
        yield bad("run directories", str(error).rpartition(";")[0], _SHORTER)
        return
    except OSError as error:
        yield bad("run directories", f"none can be made in {where} ({error.strerror})", _SHORTER)
        return
    kind = _file_system(where, proc)
    text = f"in {where} ({kind or 'unknown file system'}), closed to other users"
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        named = environment.get(name, "")
        if named and os.path.realpath(named) == where:
            break
        if named:
            objection = why_replaceable(os.path.join(os.path.realpath(named), "cs"))
            text += f"; {name} is not used: {objection or 'it is full, too long for sockets, not there, or not yours'}"
    if kind.startswith(_FAR):
        yield slower("run directories", f"{text}; it is not a local file system", _SHORTER)
    else:
        yield good("run directories", text)


def kernel_cache(environment: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Whether compiled kernels are kept, and whether there are any yet."""
    path, variable = _cache(environment)
    again = "every service compiles its kernels anew, which takes a minute or more"
    remedy = f"{variable}=DIR names a directory of your own to which nobody else may write (chmod 700)"
    nearest = path
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    try:
        status = nearest.stat()
    except OSError as error:
        yield slower("kernel cache", f"{path} cannot be used ({error.strerror}); {again}", remedy)
        return
    is_open = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(status.st_mode):
        yield slower("kernel cache", f"{nearest} is no directory; {again}", remedy)
    elif nearest == path and (status.st_uid != os.geteuid() or is_open):
        yield slower("kernel cache", f"{path} belongs to another user, or others may write there; {again}", remedy)
    elif not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
        yield slower("kernel cache", f"{nearest} is not writable; {again}", remedy)
    elif count := len(list(path.glob("kernels-*/*"))):
        yield good("kernel cache", f"{path}, {count} compiled kernels of this version and others")
    else:
        yield good(
            "kernel cache", f"{path} is empty: the next service compiles its kernels, which takes a minute or more"
        )


def _cache(environment: Mapping[str, str]) -> tuple[Path, str]:
    """The directory in which the server keeps compiled kernels, and the variable that moves it."""
    if named := environment.get("CS_CACHE_DIR"):
        return Path(named).absolute(), "CS_CACHE_DIR"
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path(os.path.expanduser("~")) / ".cache"
    return base / "central-storage", "CS_CACHE_DIR"


def _file_system(path: str, proc: Path) -> str:
    """The type of the file system on which ``path`` lies; empty if it is unknown."""
    path, longest, kind = os.path.realpath(path), "", ""
    try:
        lines = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        mount, _, rest = line.partition(" - ")
        point = mount.split()[4].encode().decode("unicode_escape")
        # Of two mounts at the same place, the later one counts.
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(longest):
            longest, kind = point, rest.split()[0]
    return kind
