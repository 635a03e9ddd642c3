"""What a test left behind: processes, threads, descriptors, run directories, files in /dev/shm.

A snapshot is taken before a test and compared afterwards, so that what a fixture of a larger scope keeps is left in
peace, also where it was renewed meanwhile: a service may start its processes again, and is then connected to them by
another socket; a node of Ray starts its workers as it needs them. A service may also accept a connection late, whose
other end is reported, and a script connects to its workers a moment after the service is there. Processes are found by
the mark of this test session and by descent, among those only that the machine did not have before: there are thousands
of tests.
"""

from __future__ import annotations

import gc
import os
import re
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from .processes import MARK, describe, living_after, marked_process, reap
from .timing import unit

__all__ = ["Leftovers", "Snapshot", "since", "take"]

_KINDS_OF_DESCRIPTOR = ("socket:", "/memfd:", "anon_inode:")
_WORKER_SOCKET = re.compile(r"/w\d+\.\d+[^/]*$")


@dataclass(frozen=True)
class Snapshot:
    """What there was at one moment."""

    pids: frozenset[int]
    threads: frozenset[threading.Thread]
    descriptors: Counter[str]
    files: frozenset[Path]


@dataclass
class Leftovers:
    """What has come since a snapshot and is still there."""

    processes: list[psutil.Process] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    descriptors: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.processes or self.threads or self.descriptors or self.files)

    def __str__(self) -> str:
        lines = [f"process {describe(process)}" for process in self.processes]
        lines += [f"thread {thread.name!r}" for thread in self.threads]
        lines += [f"open descriptor {descriptor}" for descriptor in self.descriptors]
        lines += [f"file {path}" for path in self.files]
        return "\n".join(lines)

    def end(self) -> None:
        """End what can be ended, so that the next test starts clean."""
        reap(self.processes)


def take() -> Snapshot:
    """The state of this process, of everything it started and of the places where the project makes files."""
    return Snapshot(
        frozenset(psutil.pids()), frozenset(threading.enumerate()), Counter(_descriptors()), frozenset(_files())
    )


def since(before: Snapshot, timeout: float | None = None) -> Leftovers:
    """What has come since ``before`` and does not go within ``timeout`` seconds."""
    deadline = time.monotonic() + (unit(2) if timeout is None else timeout)
    while (left := _compare(before)) and time.monotonic() < deadline:
        gc.collect()
        living_after(unit(0.05), left.processes)
        for thread in left.threads:
            thread.join(unit(0.05))
        if not left.processes and not left.threads:
            time.sleep(unit(0.01))
    return left


def _compare(before: Snapshot) -> Leftovers:
    return Leftovers(
        [process for process in _processes(before.pids) if not _is_restarted(process, before)],
        [thread for thread in threading.enumerate() if thread not in before.threads and _counts(thread)],
        _new_descriptors(before),
        sorted(path for path in _files() - before.files if not _is_in_use(path)),
    )


def _processes(known: frozenset[int]) -> set[psutil.Process]:
    """Ours that live and are not among the ``known``."""
    return {process for pid in psutil.pids() if pid not in known and (process := _ours(pid))}


def _ours(pid: int) -> psutil.Process | None:
    """The process of that number, where it lives, and has the mark or descends from this one."""
    if MARK in os.environ and (process := marked_process(pid, os.environ[MARK])):
        return process
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        if psutil.Process() in process.parents() and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def _counts(thread: threading.Thread) -> bool:
    return not thread.daemon or thread.name.startswith("cs-")


def _is_restarted(process: psutil.Process, before: Snapshot) -> bool:
    """Whether it was started by a service, or by a node of Ray, that was there before."""
    with suppress(psutil.Error):
        parent = process.parent()
        if parent is not None and parent.pid in before.pids and parent.name() == "raylet":
            return True
        return Path(process.environ().get("CS_RUN_DIRECTORY", "")) in before.files
    return False


def _new_descriptors(before: Snapshot) -> list[str]:
    now = Counter(_descriptors())
    new = sorted(link for link in (now - before.descriptors).elements() if not _kept(link, before))
    renewed = sum(link.startswith("socket:") for link in (before.descriptors - now).elements())
    return [link for link in new if not link.startswith("socket:") or (renewed := renewed - 1) < 0]


def _kept(link: str, before: Snapshot) -> bool:
    """Whether a descriptor belongs to a service that was there before: a segment that it maps when it is needed, a
    socket in its run directory, or a connection to one of its workers."""
    return any(path.name in link for path in before.files)


def _descriptors() -> list[str]:
    """What the descriptors of this process link to; for sockets, with the path that :func:`_socket_path` finds."""
    links = []
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{entry}")
            if link.startswith(_KINDS_OF_DESCRIPTOR):
                path = _socket_path(int(entry)) if link.startswith("socket:") else ""
                links.append(f"{link} {path}" if path else link)
    return links


def _socket_path(descriptor: int) -> str:
    """The path at which a Unix socket is bound, or at which the worker listens to which it is connected, or ""."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as opened:
        if opened.family == socket.AF_UNIX:
            if name := opened.getsockname():
                return os.fsdecode(name)
            peer = os.fsdecode(opened.getpeername())
            return peer if _WORKER_SOCKET.search(peer) else ""
    return ""


def _files() -> set[Path]:
    """Run directories, and shared memory with names like ours or like those of ``multiprocessing``. The link to a run
    directory that is gone is none: the next start removes what a killed supervisor has registered."""
    found: set[Path] = set()
    for directory in {tempfile.gettempdir(), os.environ.get("XDG_RUNTIME_DIR", tempfile.gettempdir())}:
        found.update(path for path in _named(directory, "cs-") if path.exists())
    for path in _named("/dev/shm", "cs-", "psm_", "sem.mp-"):
        with suppress(FileNotFoundError):
            if path.stat().st_uid == os.getuid():
                found.add(path)
    return found


def _is_in_use(path: Path) -> bool:
    """Whether another process has mapped the file. It may belong to a test that runs beside this one; if the process is
    ours, it is found itself."""
    if path.parent == Path("/dev/shm"):
        for pid in psutil.pids():
            with suppress(OSError):
                if pid != os.getpid() and str(path) in Path(f"/proc/{pid}/maps").read_text():
                    return True
    return False


def _named(directory: str, *beginnings: str) -> Iterator[Path]:
    with suppress(FileNotFoundError):
        yield from (Path(directory, name) for name in os.listdir(directory) if name.startswith(beginnings))
