"""Processes beside a service that are no part of it, such as the exporter: each gets a listening socket, and is started
again if it dies.

The launcher listens before anything starts, so an address that is in use is an error at once. It keeps the socket and
gives it to the process. If that dies, another one takes the same socket, and peers that connect meanwhile wait in its
queue. The process ends with the launcher, whatever kills that. ``foreground`` and ``remote.serve`` use this module.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, Self

from cs_proto.errors import ConfigurationError, LaunchError
from cs_proto.frozen import frozen

from .plan import Command
from .supervisor.children import Child
from .supervisor.loop import Loop, Timer
from .supervisor.output import Stream
from .supervisor.restarts import WORKED_SECONDS, Restarts

__all__ = ["Beside", "Kept", "Say", "Sidecar", "Sidecars", "listen"]

_WAITING_CONNECTIONS = 64


class Say(Protocol):
    """Prints lines of the supervisor, or of the process with a label."""

    def __call__(self, text: str, label: str = ...) -> None: ...


class Kept(Protocol):
    """A process that is kept running beside the service."""

    @property
    def living_pids(self) -> set[int]:
        """Its pid, unless it has ended."""

    def start(self) -> None:
        """Start it, when the service is starting."""

    def close(self) -> None:
        """End it, and wait for its end. Idempotent."""


class Beside(Protocol):
    """What is to be kept running beside the service."""

    def kept(self, loop: Loop, say: Say) -> Kept:
        """The process, watched by ``loop``; ``say`` prints a line of the supervisor."""


@frozen
class Sidecar:
    """A process beside the service."""

    #: What it is, such as ``exporter``.
    name: str
    #: What is missing without it, such as ``there are no metrics``.
    missing: str
    command: Command
    #: Its socket, which listens.
    listener: socket.socket

    def kept(self, loop: Loop, say: Say) -> Kept:
        """The process, which is started again if it dies."""
        return _Kept(loop, say, self)


class Sidecars:
    """Keeps some running. Use it in a ``with`` block, outside of that of the service's end."""

    def __init__(self, loop: Loop, say: Say, sidecars: Iterable[Beside]) -> None:
        """Starts nothing yet. ``say`` prints a line of the supervisor."""
        self._kept = [sidecar.kept(loop, say) for sidecar in sidecars]

    @property
    def living_pids(self) -> set[int]:
        """Those that have not ended."""
        return {pid for kept in self._kept for pid in kept.living_pids}

    def start(self) -> None:
        """Start them."""
        for kept in self._kept:
            kept.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with ExitStack() as ends:
            for kept in self._kept:
                ends.callback(kept.close)


class _Kept:
    """Keeps one running."""

    def __init__(self, loop: Loop, say: Say, sidecar: Sidecar) -> None:
        self._loop = loop
        self._say = say
        self._sidecar = sidecar
        self._child: Child | None = None
        self._started = 0.0
        self._restarts = Restarts(sys.maxsize)
        self._timer: Timer | None = None
        self._is_over = False

    @property
    def living_pids(self) -> set[int]:
        return {self._child.pid} if self._child is not None and self._child.returncode is None else set()

    def start(self) -> None:
        sidecar, self._started = self._sidecar, time.monotonic()
        try:
            self._child = Child(
                self._loop,
                sidecar.command,
                on_lines=self._lines,
                on_end=self._ended,
                descriptors=(sidecar.listener.fileno(),),
            )
        except OSError as error:
            self._start_again(f"the {sidecar.name} could not be started ({sidecar.command.argv[0]}: {error.strerror})")

    def close(self) -> None:
        """End it, and wait for its end. It holds nothing that would be lost. Idempotent."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._child is not None:
            self._child.signal(signal.SIGKILL)
            while self._child.returncode is None:
                self._loop.turn()

    def _lines(self, child: Child, stream: Stream, lines: list[str]) -> None:
        """Print what it says, without what others are drawn over: a line that has only begun comes again."""
        if whole := [line for line in lines if not line.endswith("\r")]:
            self._say("\n".join(whole), self._sidecar.name)

    def _ended(self, child: Child) -> None:
        if not self._is_over:
            last = child.tail.text().rpartition("\n")[2]
            self._start_again(
                f"the {self._sidecar.name} (pid {child.pid}) ended by {child.cause}{last and f': {last}'}"
            )

    def _start_again(self, why: str) -> None:
        has_worked = time.monotonic() - self._started >= WORKED_SECONDS
        pause = self._restarts.next(self._sidecar.name, has_worked=has_worked) or 0.0
        self._say(f"{why}; {self._sidecar.missing} until another one works" + f", in {pause:g} s" * (pause > 0))
        self._timer = self._loop.call_later(pause, self.start)


def listen(address: str, port: int, *, address_option: str, port_option: str) -> socket.socket:
    """A socket that listens on ``address`` and ``port`` (0: a free one). The options are named in errors.

    Raises ConfigurationError for an address that this machine does not have, and LaunchError for a port that is in use.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, place = found[0][0], found[0][4]
        return socket.create_server(place, family=family, backlog=_WAITING_CONNECTIONS)
    except (OSError, UnicodeError) as error:
        said = getattr(error, "strerror", None) or str(error)
        if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno != errno.EADDRNOTAVAIL:
            raise LaunchError(
                f"{port_option}: nobody can listen on {address} port {port}: {_reason(error)}; choose another port, or "
                "0 for a free one"
            ) from error
        raise ConfigurationError(f"{address_option} is no address of this machine: {said}") from error


def _reason(error: OSError) -> str:
    """The reason without what Python adds to it."""
    return os.strerror(error.errno) if error.errno else str(error)
