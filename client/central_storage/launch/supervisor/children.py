"""A child process: started so that it dies with the supervisor, watched by pidfd, ended with everything it started.

A child of a service leads a session of its own, so a Ctrl-C at the terminal does not reach it and what it starts can
be found. It must be started by the thread that lives as long as the supervisor: the kernel's parent-death signal
belongs to the thread. Only the supervisor's loop uses this module.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from central_storage.launch.plan import Command
from cs_proto.messages import Introduce
from cs_runtime import open_files
from cs_runtime.transport.readiness import is_readable

from .connections import Peer
from .loop import Loop, Timer
from .output import Lines, Stream, Tail

__all__ = ["Child", "Processes", "Running", "end_leftovers", "reap_adopted"]

_READ_NBYTES = 65536
# Of what a child has left in its pipes when it ends, at most this much is read per pipe.
_DRAIN_NBYTES = 1 << 20
# A process that is to be killed gets this long to print the stacks of its threads.
_STACKS_SECONDS = 0.3
# A line that has not ended after so long is shown as far as it has come.
_FLUSH_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class Running(Protocol):
    """What the supervisor needs of something that it has started."""

    command: Command
    tail: Tail
    asked: bool
    #: Since when it can work, on the clock of ``time.monotonic``; None before.
    ready_since: float | None
    #: Whether it has done a piece of work to the end.
    has_worked: bool
    returncode: int | None
    pid: int
    #: Whether it runs in this container, so that ``pid`` means anything here.
    is_here: bool

    @property
    def name(self) -> str:
        """How it is called in messages."""

    @property
    def cause(self) -> str:
        """Why it ended."""

    def listen(self, wanted: bool = True) -> None:
        """Read its output as it comes, or leave it where it is for now."""

    def signal(self, number: int) -> None:
        """SIGTERM: asked to end. SIGKILL: ended."""

    def kill(self, reason: str) -> None:
        """End it for a reason that becomes part of its cause, with its stacks in its output."""

    def interrupt(self) -> None:
        """The run that it carries out is cancelled, which it has been told: have it look."""

    def show_stacks(self) -> None:
        """Have it print the stacks of its threads."""

    def is_run_by(self, peer: Peer) -> bool:
        """Whether ``peer``, which says that it is this process, may be."""


class Processes(list[Running]):
    """The processes of a service, the server first, each as its last incarnation."""

    @property
    def living_pids(self) -> set[int]:
        """Those started here that have not ended."""
        return {child.pid for child in self if child.returncode is None and child.is_here}

    def workers(self, replica: int, incarnation: int | None = None) -> list[Running]:
        """The worker of a replica: one or, where another ``incarnation`` is meant, none."""
        return [
            child
            for child in self
            if (child.command.role, child.command.rank) == ("worker", replica)
            and incarnation in (None, child.command.incarnation)
        ]

    def of(self, peer: Peer, who: Introduce | None = None) -> Running | None:
        """The process that speaks there: what ``peer`` introduced itself as or, before it has, ``who`` says. None where
        it is none of these."""
        who = who or peer.introduction
        if who is None:
            return None
        identity = (who.role, who.rank, who.incarnation)
        for child in self:
            command = child.command
            if (command.role, command.rank, command.incarnation) == identity and child.is_run_by(peer):
                return child
        return None

    def listen(self, wanted: bool = True) -> None:
        """Read their output as it comes, or leave it where it is for now."""
        for child in self:
            child.listen(wanted)

    def end_at_once(self) -> None:
        """SIGKILL to all."""
        for child in self:
            child.signal(signal.SIGKILL)


class Child:
    """A running or ended process. Raises OSError where it cannot be started."""

    is_here = True

    def __init__(
        self,
        loop: Loop,
        command: Command,
        *,
        on_lines: Callable[[Child, Stream, list[str]], None] | None,
        on_end: Callable[[Child], None],
        open_files_limit: int | None = None,
    ) -> None:
        """Start ``command``. With ``on_lines`` it is a service: own session, no input, its output is read here;
        without, it shares this process's terminal. It may open ``open_files_limit`` files or, by default,
        as many as this process."""
        self.command = command
        self.tail = Tail()
        self.asked = False  # to end
        self.ready_since: float | None = None
        self.has_worked = False
        self.returncode: int | None = None
        self._reason = ""
        self._loop = loop
        self._on_lines = on_lines
        self._on_end = on_end
        piped = on_lines is not None
        with _kept_on(command.processors):
            self._process = subprocess.Popen(
                command.argv,
                env=dict(command.environment),
                stdin=subprocess.DEVNULL if piped else None,
                stdout=subprocess.PIPE if piped else None,
                stderr=subprocess.PIPE if piped else None,
                bufsize=0,
                start_new_session=piped,
                preexec_fn=_prepared(os.getpid(), open_files_limit),
            )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._pipes: dict[int, tuple[Stream, Lines]] = {}
        self._flushes: dict[int, Timer] = {}
        self._fresh: set[int] = set()  # read since the timer was set
        for stream, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
            if pipe is not None:
                os.set_blocking(pipe.fileno(), False)
                self._pipes[pipe.fileno()] = (stream, Lines())  # type: ignore[assignment]
        loop.on_readable(self._pidfd, self._ended)
        self.listen()

    @property
    def name(self) -> str:
        """How it is called in messages: ``worker w0 (pid 12)``."""
        command = self.command
        called = f"worker {command.label}" if command.role == "worker" else f"the {command.role}"
        return f"{called} (pid {self.pid})"

    @property
    def cause(self) -> str:
        """Why it ended: ``exit code 3``, ``SIGKILL``, ``SIGKILL by the supervisor: it was not ready within 60 s``,
        ``SIGSEGV: something wrote in place to ...``."""
        if self.returncode is None:
            return "still running"
        if self.returncode >= 0:
            return f"exit code {self.returncode}"
        if self._reason and -self.returncode in (signal.SIGKILL, signal.SIGUSR1):
            return f"SIGKILL by the supervisor: {self._reason}"
        try:
            name = signal.Signals(-self.returncode).name
        except ValueError:
            return f"signal {-self.returncode}"
        return self.tail.last_line_with_prefix(f"{name}: ") or name  # the process may have printed more

    def listen(self, wanted: bool = True) -> None:
        """Read its output as it comes, or leave it in the pipes for now."""
        for descriptor in self._pipes:
            self._loop.on_readable(descriptor, partial(self._read, descriptor) if wanted else None)

    def signal(self, number: int) -> None:
        """Send a signal: to the whole group of a service, to the process alone where it shares our terminal."""
        if self.returncode is not None:
            return
        if self._on_lines is None:
            signal.pidfd_send_signal(self._pidfd, number)
        else:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self, reason: str) -> None:
        """Have it print its stacks, which takes a moment, then send SIGKILL."""
        if self.returncode is None and not self._reason:
            self._reason = reason
            self.show_stacks()
            self._loop.call_later(_STACKS_SECONDS, partial(self.signal, signal.SIGKILL))

    def interrupt(self) -> None:
        """Send SIGINT to the process alone: what the user's code has started is not the worker."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGINT)

    def show_stacks(self) -> None:
        """Send SIGUSR1, where that does not end it: the user's code may have taken our handler away. One that is
        stopped prints nothing."""
        if self.returncode is None and _handles(self.pid, signal.SIGUSR1):
            signal.pidfd_send_signal(self._pidfd, signal.SIGUSR1)

    def is_run_by(self, peer: Peer) -> bool:
        """Whether the kernel says so."""
        return peer.pid == self.pid

    def _read(self, descriptor: int, limit: int = _READ_NBYTES) -> None:
        stream, lines = self._pipes[descriptor]
        while limit > 0:
            try:
                data = os.read(descriptor, _READ_NBYTES)
            except BlockingIOError:
                if lines.has_partial and descriptor not in self._flushes:
                    self._flushes[descriptor] = self._loop.call_later(_FLUSH_SECONDS, partial(self._flush, descriptor))
                return
            limit -= len(data)
            self._fresh.add(descriptor)
            self._tell(stream, lines.feed(data) if data else lines.finish())
            if not data:
                self._close_pipe(descriptor)
                return

    def _flush(self, descriptor: int) -> None:
        """Show what has come of a line: a prompt, dots, a progress bar that ends no line."""
        # More may come of the line, or may be there where somebody reads slowly.
        if descriptor in self._fresh or is_readable(descriptor, 0):
            self._fresh.discard(descriptor)
            self._flushes[descriptor] = self._loop.call_later(_FLUSH_SECONDS, partial(self._flush, descriptor))
            return
        del self._flushes[descriptor]
        stream, lines = self._pipes[descriptor]
        self._tell(stream, lines.flush())

    def _ended(self) -> None:
        # Not reaped yet, it still holds its process group's number: nobody else can be hit.
        if self._on_lines is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.returncode = self._process.wait()
        self._loop.forget(self._pidfd)
        os.close(self._pidfd)
        for descriptor in list(self._pipes):
            self._read(descriptor, _DRAIN_NBYTES)
        for descriptor, (stream, lines) in list(self._pipes.items()):
            self._tell(stream, lines.finish())
            self._close_pipe(descriptor)
        self._on_end(self)

    def _tell(self, stream: Stream, lines: list[str]) -> None:
        if lines and self._on_lines is not None:
            self.tail.add(lines)
            self._on_lines(self, stream, lines)

    def _close_pipe(self, descriptor: int) -> None:
        self._loop.forget(descriptor)
        if descriptor in self._flushes:
            self._flushes.pop(descriptor).cancel()
        stream, _ = self._pipes.pop(descriptor)
        pipe = self._process.stdout if stream == "stdout" else self._process.stderr
        if pipe is not None:
            pipe.close()


def end_leftovers(run_directory: str, role: str | None = None, rank: int | None = None, timeout: float = 1.0) -> None:
    """Kill what a service's processes have started and left behind, whatever session it fled to; wait for its end.

    They are known by the environment they inherited. The script's own descendants are not a service's. ``role`` and
    ``rank`` limit it to what one process left; ``timeout`` is in seconds.
    """
    wanted = {f"CS_RUN_DIRECTORY={run_directory}".encode()}
    if rank is not None and role == "worker":
        wanted.add(f"RANK={rank}".encode())
    roles = {f"CS_ROLE={r}".encode() for r in ([role] if role else ["server", "worker"])}
    killed = []
    for entry in os.listdir("/proc"):
        if not entry.isdecimal() or int(entry) == os.getpid():
            continue
        with suppress(OSError):  # gone meanwhile, or not ours
            if not _environment(entry) >= wanted or not _environment(entry) & roles:
                continue
            pidfd = os.pidfd_open(int(entry))
            killed.append(pidfd)
            if _environment(entry) >= wanted:  # the number still stands for the process that was looked at
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    poller = select.poll()
    for pidfd in killed:
        poller.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + timeout
    alive = set(killed)
    while alive and (ready := poller.poll(max(0.0, deadline - time.monotonic()) * 1000)):
        for pidfd, _ in ready:
            poller.unregister(pidfd)
            alive.discard(pidfd)
    for pidfd in killed:
        os.close(pidfd)


def reap_adopted(own: Collection[int]) -> None:
    """Collect ended processes that we inherited when their parent died, as process 1 of a container does.

    ``own`` are the pids of living children, whose ends are read elsewhere.
    """
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)


def _handles(pid: int, number: signal.Signals) -> bool:
    with suppress(OSError, StopIteration):  # it has ended
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        caught = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> number - 1 & 1)
    return False


def _environment(pid: str) -> set[bytes]:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return set(file.read().split(b"\0"))


@contextmanager
def _kept_on(processors: frozenset[int]) -> Iterator[None]:
    """This thread runs there, so that a child starts there, before any library of it asks how many there are."""
    before = os.sched_getaffinity(0)
    try:
        if processors:
            with suppress(OSError):  # somebody has taken them away meanwhile: then anywhere
                os.sched_setaffinity(0, processors)
        yield
    finally:
        if processors:
            with suppress(OSError):
                os.sched_setaffinity(0, before)


def _prepared(parent: int, open_files_limit: int | None) -> Callable[[], None]:
    """A function for the child to call before it becomes another program: it ends the child when ``parent`` dies, and
    sets its limit of open files."""

    def prepare() -> None:
        if open_files_limit is not None:
            open_files.lower_limit(open_files_limit)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died first
            os._exit(1)

    return prepare
