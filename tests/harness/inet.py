"""Watches a session of tests for inet sockets of services, of which there must be none whatever the tests do (P27), and
for the session's own death.

A process of its own looks at the kernel's lists of sockets a few times a second, as long as a session of tests runs,
and prints a line for each socket that a supervisor, server or worker has. ``cs-launch`` with ``--metrics-port``,
``--listen``, ``--ray`` or ``--join tcp:``, its exporter and its gateway may have some, because a user has asked for
them. A socket that lives shorter than two looks may be missed.

pytest-timeout ends a session without its fixtures, which would end what they have started, such as nodes of Ray. Then
this process ends it, and removes the directories in /tmp that have the mark of the session in their names.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from .processes import ROOT, marked, marked_process, reap

__all__ = ["Watch"]

# Seconds between two looks.
_EVERY = 0.2
_LISTS = ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")
# The supervisor's modules and commands. Servers and workers, and what they start, have CS_ROLE in their environment.
_SUPERVISOR = re.compile(r"central_storage\.launch|/cs-launch\b")
_ROLES = {"server", "worker"}
_ASKED = re.compile(r"--metrics-port|--listen|--ray\b|--join tcp:|central_storage\.(exporter|gateway)")


class Watch:
    """The process that looks, as long as this object is open."""

    def __init__(self, mark: str) -> None:
        """Look at the processes of the test session ``mark``."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.inet", mark],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT / "proto")},
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def found(self) -> list[str]:
        """The sockets that were found since the last call. Raises RuntimeError if nobody looks any more."""
        assert self._process.stdout is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"tests.harness.inet has ended with code {self._process.returncode}")
        return (self._process.stdout.read() or b"").decode().splitlines()

    def wait(self, timeout: float) -> bool:
        """Whether a socket is found within ``timeout`` seconds that :meth:`found` has not told yet."""
        assert self._process.stdout is not None
        poller = select.poll()
        poller.register(self._process.stdout.fileno(), select.POLLIN)
        return bool(poller.poll(timeout * 1000))

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.communicate()


def sockets() -> dict[str, str]:
    """The inet sockets of this network, by inode: ``tcp 0100007F:1F90``."""
    found = {}
    for name in _LISTS:
        with suppress(OSError):  # the kernel has no IPv6
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                fields = line.split()
                found[fields[9]] = f"{name} {fields[1]}"
    found.pop("0", None)  # whose owner has closed it
    return found


def owners(mark: str, wanted: dict[str, str]) -> list[str]:
    """A line for each of these sockets that a process of a service of the session has."""
    lines = []
    for pid in psutil.pids():
        if (process := marked_process(pid, mark)) is not None:
            with suppress(OSError, psutil.Error):  # it has just ended
                if _is_of_a_service(process):
                    links = [os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()]
                    inodes = {link.removeprefix("socket:[").removesuffix("]") for link in links}
                    title = f"pid {pid}, {' '.join(process.cmdline())[:120]}"
                    lines += [f"{wanted[inode]} of {title}" for inode in sorted(wanted.keys() & inodes)]
    return lines


def _is_of_a_service(process: psutil.Process) -> bool:
    words = " ".join(process.cmdline())
    if _ASKED.search(words):
        return False
    return bool(_SUPERVISOR.search(words)) or process.environ().get("CS_ROLE") in _ROLES


def main(mark: str) -> None:
    """Look until standard input ends, and with it the session; then end what it has left."""
    known: dict[str, str] = {}
    poller = select.poll()
    poller.register(sys.stdin.fileno(), select.POLLIN)
    with suppress(BrokenPipeError):  # nobody reads any more
        while not poller.poll(_EVERY * 1000):
            now = sockets()
            new = {inode: title for inode, title in now.items() if inode not in known}
            for line in owners(mark, new) if new else []:
                print(line, flush=True)
            known = now
    while left := marked(mark):  # what starts others may have started one meanwhile
        reap(left)
    for directory in Path("/tmp").glob(f"*-{mark}-*"):
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
