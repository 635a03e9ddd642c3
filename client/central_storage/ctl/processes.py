"""What the kernel says of processes: parents, states, processor time, memory by kind. It needs nothing of a service.

Every function returns None or nothing for a process that has ended, or that belongs to somebody else.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

from cs_proto.frozen import frozen

__all__ = [
    "KINDS",
    "Memory",
    "Status",
    "descendants",
    "handles",
    "ignores",
    "kind_of_segment",
    "memory",
    "open_pid",
    "segment_nbytes",
    "send",
    "status",
    "variables_of",
]

#: The kinds of shared memory that are told apart.
KINDS = ("parameters", "slots", "gradients", "arenas", "other")
# The memory file of a segment is ``/memfd:cs-<run>-<segment>``; the file of one is ``segment.<writer>.<segment>`` with
# commas for slashes. Memory that is no segment, such as that of mailboxes, is called ``cs-<run>-`` and more, too.
_SEGMENT = re.compile(r"/memfd:cs-[^ ]*?-(?P<memory>[a-z]+)(?=[/ ]|$)|/segment\.[a-z0-9]+\.(?P<file>[a-z]+)")
_KIND_OF = {
    "parameters": "parameters",
    "slots": "slots",
    "gradients": "gradients",
    "arena": "arenas",
    "inputs": "arenas",
}
# A line of ``smaps`` that begins a mapping, or that has one of the numbers that are read. It is searched for in bytes:
# to look at each line took longer than the kernel does to write them.
_SMAPS = re.compile(rb"\n(?:([0-9a-f]+-[0-9a-f]+ [^\n]*)|(Rss|Anonymous|Private_\w+): +(\d+) kB)")
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk", "T": "stopped", "t": "stopped", "Z": "ended"}
_TICKS = os.sysconf("SC_CLK_TCK")


@frozen
class Status:
    """A process as ``/proc/<pid>/stat`` shows it. ``started`` is in ticks since the machine's start: with the pid it
    identifies a process."""

    pid: int
    parent: int
    state: str
    started: int
    cpu_seconds: float


@frozen
class Memory:
    """The resident memory of a process, in bytes. ``private`` is what nobody else shares; ``shared`` is what it maps of
    the service's segments, by kind, which other processes map, too."""

    resident: int
    private: int
    shared: dict[str, int]


def status(pid: int) -> Status | None:
    """The process of that number."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # a name may be cut within a character
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    cpu = (int(fields[11]) + int(fields[12])) / _TICKS
    return Status(pid, int(fields[1]), _STATES.get(fields[0], "sleeping"), int(fields[19]), cpu)


def memory(pid: int) -> Memory | None:
    """The memory of a process, from its page tables, which takes milliseconds for a large one."""
    try:
        text = b"\n" + Path(f"/proc/{pid}/smaps").read_bytes()
    except OSError:
        return None
    resident = private = 0
    shared: Counter[str] = Counter()
    kind: str | None = None
    rss = anonymous = own = 0

    def add() -> None:
        nonlocal resident, private
        resident += rss
        if kind is None:
            private += own
        else:
            private += anonymous  # pages of a segment that the process has got copies of
            shared[kind] += rss - anonymous

    for mapping, name, kilobytes in _SMAPS.findall(text):
        if mapping:
            add()
            kind, rss, anonymous, own = kind_of_segment(os.fsdecode(mapping)), 0, 0, 0
        elif name == b"Rss":
            rss = int(kilobytes) * 1024
        elif name == b"Anonymous":
            anonymous = int(kilobytes) * 1024
        else:
            own += int(kilobytes) * 1024
    add()
    return Memory(resident, private, {name: shared[name] for name in KINDS})


def kind_of_segment(path: str) -> str | None:
    """The kind of the segment whose file ``path`` names, somewhere in the text; None if it names none.

    Examples:
        >>> kind_of_segment("/memfd:cs-1f3a22bb-parameters/float32 (deleted)"), kind_of_segment("/usr/lib/libc.so.6")
        ('parameters', None)
    """
    found = _SEGMENT.search(path)
    return None if found is None else _KIND_OF.get(found["memory"] or found["file"], "other")


def segment_nbytes(supervisor: int) -> dict[str, int] | None:
    """The memory that a service's segments take, by kind. The supervisor holds them all; each counts once, however many
    processes map it."""
    found: Counter[str] = Counter()
    try:
        entries = os.listdir(f"/proc/{supervisor}/fd")
    except OSError:
        return None
    seen = set()
    for entry in entries:
        path = f"/proc/{supervisor}/fd/{entry}"
        with suppress(OSError):
            kind = kind_of_segment(os.readlink(path))
            held = os.stat(path)
            if kind is not None and held.st_ino not in seen:
                seen.add(held.st_ino)
                found[kind] += held.st_blocks * 512
    return {name: found[name] for name in KINDS}


def descendants(pid: int) -> list[Status]:
    """The children of a process, their children, and so on."""
    children: dict[int, list[Status]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (found := status(int(entry))) is not None:
            children.setdefault(found.parent, []).append(found)
    result, left = [], [pid]
    while left:
        for child in children.get(left.pop(), []):
            result.append(child)
            left.append(child.pid)
    return result


def variables_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = [entry.partition(b"=") for entry in data.split(b"\0") if b"=" in entry]
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def handles(pid: int, number: int) -> bool:
    """Whether a signal calls a handler of the process. Otherwise it may end it."""
    return _is_in_mask(pid, "SigCgt:", number)


def ignores(pid: int, number: int) -> bool:
    """Whether a process ignores a signal: a shell ignores SIGINT for what it runs in the background."""
    return _is_in_mask(pid, "SigIgn:", number)


def _is_in_mask(pid: int, name: str, number: int) -> bool:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        mask = next(line for line in lines if line.startswith(name))
        return bool(int(mask.split()[1], 16) >> number - 1 & 1)
    return False


def open_pid(pid: int) -> int | None:
    """A descriptor of the process; the caller closes it."""
    try:
        return os.pidfd_open(pid)
    except (OSError, ValueError, OverflowError):
        return None


def send(pidfd: int, number: int) -> bool:
    """Send a signal. False if the process has ended."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except OSError:
        return False
    return True
