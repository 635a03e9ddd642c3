"""A worker that a launcher runs in another container, with the interface of a child process.

The launcher reports over its connection what the kernel reports of a child. When the connection ends, the worker counts
as dead. :mod:`.seating` assigns such places to launchers; :mod:`central_storage.launch.remote.join` is the other end.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from central_storage.launch.plan import Command
from cs_proto.messages import Interrupt, Introduce, Kill, ShowStacks, Shutdown

from .connections import Peer
from .loop import Loop
from .output import Stream, Tail

__all__ = ["Elsewhere"]


class Elsewhere:
    """The place of one worker. It is free, awaited, taken or over."""

    is_here = False

    def __init__(
        self,
        loop: Loop,
        command: Command,
        *,
        on_lines: Callable[[Elsewhere, Stream, list[str]], None] | None,
        on_end: Callable[[Elsewhere], None],
    ) -> None:
        """A free place for ``command``, of which only role, rank and incarnation count. The worker's output appears
        where it runs, so ``on_lines`` is not called."""
        self.command = command
        self.tail = Tail()
        self.asked = False
        self.ready_since: float | None = None
        self.has_worked = False
        self.returncode: int | None = None
        self.pid, self.node = 0, ""
        self.cause = "still running"
        self._on_end = on_end
        #: The launcher that runs it, or ran it until it ended; None before that, and once the launcher is gone.
        self.launcher: Peer | None = None
        self._worker: Peer | None = None
        self._name = b""
        #: Whether its launcher ran it for the previous supervisor and has not come back yet.
        self.is_awaited = False

    @property
    def name(self) -> str:
        """Its name in messages: ``worker w0 (pid 12 on 10.0.0.7)``; ``where it runs`` in another container."""
        where = f"on {self.node}" if self.node else "where it runs"
        return f"worker {self.command.label} (pid {self.pid} {where})"

    @property
    def is_free(self) -> bool:
        """Whether no launcher runs it."""
        return self.launcher is None and self.returncode is None and not self.is_awaited

    def take(self, launcher: Peer, pid: int, name: bytes, node: str = "") -> None:
        """Give the place to ``launcher`` on the machine ``node``, whose pid is that of its own container, and which
        tells its worker the name."""
        self.launcher, self.pid, self.node = launcher, pid, node
        self.is_awaited, self._name = False, name

    def end(self, cause: str, log: str = "") -> None:
        """Note the end of the worker, with its cause and its last lines. Idempotent."""
        if self.returncode is None:
            self.is_awaited = False
            self.returncode, self.cause = 1, cause
            self.tail.add(log.splitlines())
            self._on_end(self)

    def stop_awaiting(self, timeout: float) -> None:
        """Note the end of the worker if its launcher has not come back within ``timeout`` seconds."""
        if self.is_awaited:
            self.end(f"not coming back within {timeout:g} s after the supervisor was killed")

    def leave(self) -> None:
        """Note that its launcher is gone."""
        self.launcher = None
        self.end(f"the end of its connection (its {'machine' if self.node else 'container'} or process is gone)")

    def listen(self, wanted: bool = True) -> None:
        """Do nothing: the output appears where the worker runs."""

    def signal(self, number: int) -> None:
        """SIGTERM asks its launcher to end it. SIGKILL closes the connections, which ends it, too."""
        if self.returncode is not None:
            return
        if self.launcher is None or number != signal.SIGTERM:
            if self.launcher is not None:
                self.launcher.close()
            if self._worker is not None:
                self._worker.close()
            self.end("being released by the supervisor")
        else:
            self.launcher.send(Shutdown("the service ends"))

    def kill(self, reason: str) -> None:
        """Ask its launcher to kill it."""
        if self.launcher is not None:
            self.launcher.send(Kill(self.command.rank, self.command.incarnation, reason))

    def interrupt(self) -> None:
        """Ask its launcher to send SIGINT."""
        if self.launcher is not None:
            self.launcher.send(Interrupt(self.command.rank))

    def show_stacks(self) -> None:
        """Ask its launcher to send SIGUSR1."""
        if self.launcher is not None:
            self.launcher.send(ShowStacks(self.command.rank, self.command.incarnation))

    def is_run_by(self, peer: Peer, who: Introduce) -> bool:
        """Whether ``peer`` is the first that introduced itself by the name that the launcher was given. Its pid cannot
        be checked here. While a launcher is awaited, its worker may come first, and nobody knows its name."""
        is_it = who.name == self._name if self.launcher is not None else self.is_awaited
        if self._worker is None and is_it:
            self._worker = peer
        return self._worker is peer
