"""What a service needs from the kernel: every feature is tried."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from central_storage.launch.memory import Memfd
from cs_proto.frozen import frozen
from cs_runtime.shared_memory.pagemap import Pagemap

from .finding import Finding, Level, bad, good, slower

__all__ = ["FEATURES", "Feature", "clock", "features", "release"]

_PR_GET_PDEATHSIG = 2
_FUTEX_WAKE_PRIVATE = 129
_FUTEX = {"x86_64": 202}.get(platform.machine(), 98)
# A read of these takes about a microsecond, because it leaves the process.
_SLOW_CLOCKS = ("acpi_pm", "hpet", "jiffies", "pit", "refined-jiffies")
_OLDEST = (5, 3)


@frozen
class Feature:
    """A feature of the kernel: ``attempt`` uses it, and raises OSError if that is not possible."""

    subject: str
    use: str
    attempt: Callable[[], None]
    level: Level
    remedy: str


def release(system: str | None = None, version: str | None = None) -> Iterator[Finding]:
    """The kernel's release; pidfd, which every service needs, came with Linux 5.3."""
    system, version = system or platform.system(), version or platform.release()
    text = f"{system} {version} on {platform.machine()}"
    numbers = [int(part) for part in version.split("-")[0].split(".")[:2] if part.isdecimal()]
    if system != "Linux" or tuple(numbers) < _OLDEST:
        yield bad("kernel", f"{text} is too old: a service needs Linux 5.3", "use Linux 5.3 or later")
    else:
        yield good("kernel", text)


def features(tried: tuple[Feature, ...] | None = None) -> Iterator[Finding]:
    """A finding for each feature that does not work, and one for all that do."""
    works = []
    for feature in FEATURES if tried is None else tried:
        try:
            feature.attempt()
        except OSError as error:
            why = error.strerror or str(error)
            yield Finding(feature.level, feature.subject, f"{feature.use}: does not work ({why})", feature.remedy)
        else:
            works.append(feature.subject)
    if works:
        yield good("kernel features", f"{', '.join(works)} work")


def clock(system: Path = Path("/sys")) -> Iterator[Finding]:
    """The clock of step times: the processor's counter, or one that is slow to read."""
    try:
        name = (system / "devices/system/clocksource/clocksource0/current_clocksource").read_text().strip()
    except OSError:
        yield good("clock", "the kernel does not name its source")
        return
    if name in _SLOW_CLOCKS:
        yield slower(
            "clock",
            f"its source is {name}, which is slow to read; every step reads it some times",
            "see why the kernel does not use the processor's counter (dmesg | grep -i tsc); "
            "in a virtual machine, give it a clock such as kvm-clock",
        )
    else:
        yield good("clock", f"its source is {name}")


def _memfd() -> None:
    with ExitStack() as undo:
        writable = Memfd().make("doctor", mmap.PAGESIZE, "")
        undo.callback(os.close, writable)
        if not fcntl.fcntl(writable, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise OSError("the seal is not kept")
        readable = Memfd().open_reader(writable)
        undo.callback(os.close, readable)
        ours = undo.enter_context(mmap.mmap(writable, mmap.PAGESIZE))
        theirs = undo.enter_context(mmap.mmap(readable, mmap.PAGESIZE, mmap.MAP_SHARED, mmap.PROT_READ))
        ours[:4] = b"same"
        if theirs[:4] != b"same":
            raise OSError("two mappings of the same memory differ")


def _pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _eventfd() -> None:
    descriptor = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    try:
        os.eventfd_read(descriptor)
    finally:
        os.close(descriptor)


def _socket() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        socket.send_fds(ours, [b"."], [ours.fileno()])
        received = socket.recv_fds(theirs, 1, 1)[1]
        for descriptor in received:
            os.close(descriptor)
        if not received:
            raise OSError("the descriptor did not arrive")


def _futex() -> None:
    word = ctypes.c_uint32(0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_FUTEX, ctypes.byref(word), _FUTEX_WAKE_PRIVATE, 1, None) < 0:
        raise OSError(number := ctypes.get_errno(), os.strerror(number))


def _death_signal() -> None:
    number = ctypes.c_int(0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0) < 0:
        raise OSError(code := ctypes.get_errno(), os.strerror(code))


def _affinity() -> None:
    os.sched_setaffinity(0, os.sched_getaffinity(0))


def _pagemap() -> None:
    Pagemap()


_SECCOMP = (
    "allow this call in the seccomp profile of the container (docker run --security-opt seccomp=FILE), or leave the "
    "sandbox that refuses it"
)

#: What is tried, in this order.
FEATURES = (
    Feature(
        "memfd",
        "anonymous shared memory with seals, memfd_create",
        _memfd,
        "bad",
        f"{_SECCOMP}; or set sysctl vm.memfd_noexec=1 if it is 2; or run cs-launch --memory files with --run-dir on a "
        "tmpfs",
    ),
    Feature("pidfd", "descriptors of processes, pidfd_open", _pidfd, "bad", _SECCOMP),
    Feature("eventfd", "the doorbells of mailboxes, eventfd", _eventfd, "bad", _SECCOMP),
    Feature("SCM_RIGHTS", "unix sockets (SOCK_SEQPACKET) that carry descriptors", _socket, "bad", _SECCOMP),
    Feature("futex", "sleeping threads of the server, futex", _futex, "bad", _SECCOMP),
    Feature("PDEATHSIG", "the end of processes whose parent dies, prctl", _death_signal, "bad", _SECCOMP),
    Feature("affinity", "processors of a worker, sched_setaffinity", _affinity, "bad", _SECCOMP),
    Feature(
        "pagemap",
        "writes in place are not found, and such a write ends the worker; /proc/self/pagemap",
        _pagemap,
        "slower",
        "mount /proc, or use another sandbox than gVisor; docs/troubleshooting.md, 'A write in place', says more",
    ),
)
