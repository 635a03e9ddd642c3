"""A worker that another launcher runs, in a container of its own, as the supervisor sees its child processes.

The launcher there keeps a connection: what the kernel tells of a child, it tells of this one, and where the connection
ends the worker counts as dead. ``seating`` gives such places away; ``join`` is the other end.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

from central_storage.launch.plan import Command
from cs_proto.messages import Interrupt, Kill, ShowStacks, Shutdown

from .connections import Peer
from .loop import Loop
from .output import Stream, Tail

__all__ = ["Elsewhere"]


class Elsewhere:
    """The place of one worker: free, awaited back, taken or over."""

    is_here = False

    def __init__(
        self,
        loop: Loop,
        command: Command,
        *,
        on_lines: Callable[[Elsewhere, Stream, list[str]], None] | None,
        on_end: Callable[[Elsewhere], None],
    ) -> None:
        """Wait for somebody to run ``command``, of which role, rank and incarnation count. What it prints is printed
        where it runs, so ``on_lines`` is not called."""
        self.command = command
        self.tail = Tail()
        self.asked = False  # to end
        self.ready_since: float | None = None
        self.has_worked = False
        self.returncode: int | None = None
        self.pid = 0
        self.cause = "still running"
        self._on_end = on_end
        #: Who runs it, or ran it last.
        self.launcher: Peer | None = None
        self._worker: Peer | None = None
        #: Whether it was run when the supervisor before this one was killed, and its launcher has not come back yet.
        self.is_awaited = False

    @property
    def name(self) -> str:
        """How it is called in messages: ``worker w0 (pid 12 in another container)``."""
        return f"worker {self.command.label} (pid {self.pid} where it runs)"

    @property
    def is_free(self) -> bool:
        """Whether nobody runs it."""
        return self.launcher is None and self.returncode is None and not self.is_awaited

    def take(self, launcher: Peer, pid: int) -> None:
        """``launcher``, a process with that pid in its own container, runs it from now on."""
        self.launcher, self.pid, self.is_awaited = launcher, pid, False

    def end(self, cause: str, log: str = "") -> None:
        """It has ended by ``cause``, with ``log`` as its last lines. Idempotent."""
        if self.returncode is None:
            self.is_awaited = False
            self.returncode, self.cause = 1, cause
            self.tail.add(log.splitlines())
            self._on_end(self)

    def stop_awaiting(self, timeout: float) -> None:
        """Its launcher had ``timeout`` seconds to come back."""
        if self.is_awaited:
            self.end(f"not coming back within {timeout:g} s after the supervisor was killed")

    def leave(self) -> None:
        """Its launcher is gone."""
        self.launcher = None
        self.end("the end of its connection (its container or process is gone)")

    def listen(self, wanted: bool = True) -> None:
        """There is nothing to read here."""

    def signal(self, number: int) -> None:
        """SIGTERM asks its launcher to end it. SIGKILL lets go of it, which ends it, too."""
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
        """Have its launcher do it."""
        if self.launcher is not None:
            self.launcher.send(Kill(self.command.rank, self.command.incarnation, reason))

    def interrupt(self) -> None:
        """Have its launcher send the signal."""
        if self.launcher is not None:
            self.launcher.send(Interrupt(self.command.rank))

    def show_stacks(self) -> None:
        """Have its launcher send the signal."""
        if self.launcher is not None:
            self.launcher.send(ShowStacks(self.command.rank, self.command.incarnation))

    def is_run_by(self, peer: Peer) -> bool:
        """The first to say so after the place was taken: it is a process of this user, which nobody here can see."""
        if self._worker is None and (self.launcher is not None or self.is_awaited):
            self._worker = peer
        return self._worker is peer
