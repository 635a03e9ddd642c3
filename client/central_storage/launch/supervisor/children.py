"""A child process: it dies with the supervisor, a pidfd watches it, and its end takes its descendants along.

A child of a service leads its own session, so Ctrl-C at the terminal does not reach it and its descendants can be
found. The thread that starts it must live as long as the supervisor, because the kernel sends the parent-death signal
when that thread ends. Only the supervisor's loop uses this module.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from central_storage.launch.parent_death import end_with_parent
from central_storage.launch.plan import Command
from cs_proto.messages import Introduce
from cs_runtime import open_files
from cs_runtime.transport.readiness import is_readable

from .connections import Peer
from .loop import Loop, Timer
from .output import Lines, Stream, Tail

__all__ = ["Child", "Processes", "Running", "Standbys", "end_leftovers", "reap_adopted"]

_READ_NBYTES = 65536
# The most bytes that are read from each pipe of a child after its end.
_DRAIN_NBYTES = 1 << 20
# Before a process is killed, it gets this time to print the stacks of its threads.
_STACKS_SECONDS = 0.3
# A line that has not ended after so long is shown as far as it has come.
_FLUSH_SECONDS = 0.2
# Larger than any other score: a process that fills the whole memory has 1000 without it.
_OOM_FIRST = "1000"
# Seconds that a process has for becoming another program: the kernel shows no environment of it meanwhile.
_BECOMING = 0.02


class Running(Protocol):
    """A process of the service, run here or elsewhere."""

    command: Command
    tail: Tail
    #: Whether it was asked to end.
    asked: bool
    #: The time at which it became ready, by ``time.monotonic``; None before.
    ready_since: float | None
    #: Whether it has finished a piece of work.
    has_worked: bool
    returncode: int | None
    pid: int
    #: Whether it runs in this container, where ``pid`` names it.
    is_here: bool
    #: The address of the machine on which it runs; "" for this one.
    node: str

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def cause(self) -> str:
        """Why it ended."""

    def listen(self, wanted: bool = True) -> None:
        """Read its output as it arrives, or stop reading for now."""

    def signal(self, number: int) -> None:
        """Ask it to end (SIGTERM), or end it (SIGKILL)."""

    def kill(self, reason: str) -> None:
        """Kill it after it has printed its stacks. ``reason`` becomes part of its cause."""

    def interrupt(self) -> None:
        """Interrupt it, because the run that it carries out is cancelled."""

    def show_stacks(self) -> None:
        """Make it print the stacks of its threads."""

    def is_run_by(self, peer: Peer, who: Introduce) -> bool:
        """Whether ``peer``, which introduced itself as ``who``, can be this process."""


class Processes(list[Running]):
    """The last incarnations of a service's processes, the server first."""

    @property
    def living_pids(self) -> set[int]:
        """The pids of the processes that were started here and have not ended."""
        return {child.pid for child in self if child.returncode is None and child.is_here}

    def workers(self, replica: int, incarnation: int | None = None) -> list[Running]:
        """The worker of a replica in a list; an empty list if it is not of this ``incarnation``."""
        return [
            child
            for child in self
            if (child.command.role, child.command.rank) == ("worker", replica)
            and incarnation in (None, child.command.incarnation)
        ]

    def of(self, peer: Peer, who: Introduce | None = None) -> Running | None:
        """The process at the other end of ``peer``, by its introduction or, before that is accepted, by ``who``. None
        if it is not one of these processes."""
        who = who or peer.introduction
        if who is None:
            return None
        identity = (who.role, who.rank, who.incarnation)
        for child in self:
            command = child.command
            if (command.role, command.rank, command.incarnation) == identity and child.is_run_by(peer, who):
                return child
        return None

    def listen(self, wanted: bool = True) -> None:
        """Read their output as it arrives, or stop reading for now."""
        for child in self:
            child.listen(wanted)

    def end_at_once(self) -> None:
        """Send SIGKILL to all."""
        for child in self:
            child.signal(signal.SIGKILL)


class Child:
    """A running or ended process. Raises OSError if it cannot be started."""

    is_here = True
    node = ""

    def __init__(
        self,
        loop: Loop,
        command: Command,
        *,
        on_lines: Callable[[Child, Stream, list[str]], None] | None,
        on_end: Callable[[Child], None],
        open_files_limit: int | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Start ``command``. With ``on_lines`` it belongs to a service: it leads its own session, has no input, and its
        output is read here. Without, it shares this process's terminal. It may open ``open_files_limit`` files, by
        default as many as this process. It inherits ``descriptors``, under the same numbers."""
        self.command = command
        self.tail = Tail()
        self.asked = False
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
                stdin=subprocess.PIPE if command.is_standby else subprocess.DEVNULL if piped else None,
                stdout=subprocess.PIPE if piped else None,
                stderr=subprocess.PIPE if piped else None,
                bufsize=0,
                start_new_session=piped,
                pass_fds=descriptors,
                preexec_fn=_prepared(os.getpid(), open_files_limit, goes_first=command.role == "worker"),
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

    def become(self, command: Command) -> bool:
        """Tell a process that stands by what it is. False if it has ended."""
        if self.returncode is not None:
            return False
        before = self.command.environment
        changed = {name: value for name, value in command.environment.items() if before.get(name) != value}
        told = {
            "arguments": command.argv[command.argv.index("-m") + 2 :],
            "environment": changed | dict.fromkeys(before.keys() - command.environment.keys()),
            "processors": sorted(command.processors),
        }
        assert self._process.stdin is not None
        try:
            with self._process.stdin as pipe:
                pipe.write(json.dumps(told).encode() + b"\n")  # less than an empty pipe takes
        except OSError:
            return False
        self.command = command
        return True

    @property
    def name(self) -> str:
        """Its name in messages: ``worker w0 (pid 12)``."""
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

    def move(self, loop: Loop) -> None:
        """Be watched by another loop from now on."""
        for timer in self._flushes.values():
            timer.cancel()
        self._flushes.clear()
        if self.returncode is None:
            for descriptor in (self._pidfd, *self._pipes):
                self._loop.forget(descriptor)
            loop.on_readable(self._pidfd, self._ended)
        self._loop = loop
        self.listen()

    def listen(self, wanted: bool = True) -> None:
        """Read its output as it arrives, or leave it in the pipes for now."""
        for descriptor in self._pipes:
            self._loop.on_readable(descriptor, partial(self._read, descriptor) if wanted else None)

    def signal(self, number: int) -> None:
        """Send a signal: to the whole process group, or only to the process if it shares our terminal."""
        if self.returncode is not None:
            return
        if self._on_lines is None:
            signal.pidfd_send_signal(self._pidfd, number)
        else:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def kill(self, reason: str) -> None:
        """Make it print its stacks, and send SIGKILL a moment later."""
        if self.returncode is None and not self._reason:
            self._reason = reason
            self.show_stacks()
            self._loop.call_later(_STACKS_SECONDS, partial(self.signal, signal.SIGKILL))

    def interrupt(self) -> None:
        """Send SIGINT only to the process, and not to processes that the user's code has started."""
        if self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGINT)

    def show_stacks(self) -> None:
        """Send SIGUSR1, unless that would end the process: the user's code may have removed our handler. A stopped
        process prints nothing."""
        if self.returncode is None and _handles(self.pid, signal.SIGUSR1):
            signal.pidfd_send_signal(self._pidfd, signal.SIGUSR1)

    def is_run_by(self, peer: Peer, who: Introduce) -> bool:
        """Whether the kernel reports this pid for the connection."""
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
        # The process is not reaped yet, so no other process group can have its number.
        if self._on_lines is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.returncode = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
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


class Standbys(list[Child]):
    """Processes that stand by until they are told what they are, and those of them that were not needed."""

    def start(self, commands: Iterable[Command], start: Callable[[Command], Child]) -> None:
        """Start them. What cannot be started is missing: the process itself will say why."""
        for command in commands:
            with suppress(OSError):
                self.append(start(command))

    def take(self, command: Command) -> Child | None:
        """The process that has become ``command``; None if none stands by for it."""
        for child in self:
            if (child.command.role, child.command.rank) == (command.role, command.rank) and child.become(command):
                self.remove(child)
                return child
        return None

    def end_at_once(self) -> None:
        """End all that is left."""
        for child in self:
            child.signal(signal.SIGKILL)


def end_leftovers(run_directory: str, role: str | None = None, rank: int | None = None, timeout: float = 1.0) -> None:
    """Kill the processes that a service's processes have left behind, in whatever session, and wait for their end.

    They are found by the environment that they inherited. The script's own descendants do not belong to the service.
    ``role`` and ``rank`` limit the search to descendants of one process; ``timeout`` is in seconds.
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
            if not (environment := _environment(entry)) >= wanted or not environment & roles:
                continue
            pidfd = os.pidfd_open(int(entry))
            killed.append(pidfd)
            if _environment(entry) >= wanted:  # the pid was not reused since the first look
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
    """Reap ended processes that this process adopted when their parent died, as process 1 of a container does.

    ``own`` are the pids of living children, which are reaped elsewhere.
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
    """The variables that a process has inherited. Raises OSError if it has ended, or is not ours."""
    deadline = time.monotonic() + _BECOMING
    while True:
        with open(f"/proc/{pid}/environ", "rb") as file:
            found = file.read()
        if found or time.monotonic() > deadline:
            return set(found.split(b"\0"))
        os.readlink(f"/proc/{pid}/exe")  # what has ended has none
        time.sleep(_BECOMING / 20)


@contextmanager
def _kept_on(processors: frozenset[int]) -> Iterator[None]:
    """Move this thread to ``processors``, so that a child starts there, before its libraries count processors."""
    before = os.sched_getaffinity(0)
    try:
        if processors:
            with suppress(OSError):  # they were taken away meanwhile, so the child may run anywhere
                os.sched_setaffinity(0, processors)
        yield
    finally:
        if processors:
            with suppress(OSError):
                os.sched_setaffinity(0, before)


def _prepared(parent: int, open_files_limit: int | None, *, goes_first: bool) -> Callable[[], None]:
    """A function for the child to call before it becomes another program: it ends the child when ``parent`` dies, and
    sets its limit of open files. If ``goes_first``, the kernel kills the child before any other process of the service
    where memory runs out: another worker takes the place of a worker, but nobody that of the supervisor."""

    def prepare() -> None:
        if goes_first:
            with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # without /proc nobody is chosen
                file.write(_OOM_FIRST)
        if open_files_limit is not None:
            open_files.lower_limit(open_files_limit)
        end_with_parent(parent, signal.SIGKILL)

    return prepare
