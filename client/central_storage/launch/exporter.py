"""The exporter, a process beside the service that serves its metrics to Prometheus: its socket, its token, its life.

The launcher listens before anything starts, so an address that is in use is an error at once. It keeps the socket and
gives it to the exporter. If the exporter dies, another one takes the same socket, and scrapers that connect meanwhile
wait in its queue. The exporter ends with the launcher, whatever kills that. ``foreground`` and ``remote.serve`` use
this module.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

from cs_proto.errors import ConfigurationError, LaunchError
from cs_proto.frozen import frozen

from .packages import python_path
from .plan import exporter_command
from .supervisor.children import Child
from .supervisor.loop import Loop, Timer
from .supervisor.restarts import WORKED_SECONDS, Restarts

__all__ = ["TOKEN_FILE", "Endpoint", "Exporter", "read_token"]

#: Its name in the run directory.
TOKEN_FILE = "metrics-token"
_TOKEN_NBYTES = 32
# What a file with a token may have in it; RFC 6750 calls it b64token.
_TOKEN = re.compile(rb"[A-Za-z0-9._~+/=-]{16,4096}")
_WAITING_CONNECTIONS = 64


@frozen
class Endpoint:
    """Where metrics are served: a socket that listens, and the file with the token that scrapers must show."""

    listener: socket.socket
    token_file: str

    @classmethod
    def open(cls, address: str, port: int, token_file: str | None, run_directory: str) -> Self:
        """Listen on ``address`` and ``port`` (0: a free one). Without a ``token_file``, make a token in the run
        directory.

        Raises ConfigurationError for an address that this machine does not have and for a token file that others can
        read, and LaunchError for a port that is in use.
        """
        if token_file is not None:
            token_file = os.path.abspath(token_file)
            read_token(token_file)
        with ExitStack() as undo:
            listener = undo.enter_context(_listen(address, port))
            endpoint = cls(listener, token_file or _make_token(run_directory))
            undo.pop_all()
        return endpoint

    @property
    def url(self) -> str:
        """What Prometheus scrapes."""
        host, port = self.listener.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    def __str__(self) -> str:
        return f"metrics on {self.url}, token in {self.token_file}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.listener.close()


class Exporter:
    """Keeps one exporter running. Use it in a ``with`` block, outside of that of the service's end."""

    def __init__(self, loop: Loop, say: Callable[[str], None], endpoint: Endpoint | None, run_directory: str) -> None:
        """Starts nothing yet, and never does without an ``endpoint``. ``say`` prints a line of the supervisor."""
        self._loop = loop
        self._say = say
        self._endpoint = endpoint
        self._run_directory = run_directory
        self._child: Child | None = None
        self._started = 0.0
        self._restarts = Restarts(sys.maxsize)
        self._timer: Timer | None = None
        self._is_over = False

    @property
    def living_pids(self) -> set[int]:
        """The exporter, if it has not ended."""
        return {self._child.pid} if self._child is not None and self._child.returncode is None else set()

    def start(self) -> None:
        """Start it."""
        if self._endpoint is None:
            return
        descriptor = self._endpoint.listener.fileno()
        command = exporter_command(
            self._run_directory,
            self._endpoint.token_file,
            descriptor,
            os.environ,
            python=sys.executable,
            python_path=python_path(os.environ),
        )
        self._started = time.monotonic()
        try:
            self._child = Child(
                self._loop, command, on_lines=lambda *_: None, on_end=self._ended, descriptors=(descriptor,)
            )
        except OSError as error:
            self._start_again(f"the exporter could not be started ({command.argv[0]}: {error.strerror})")

    def close(self) -> None:
        """End it, and wait for its end. It holds nothing that would be lost. Idempotent."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._child is not None:
            self._child.signal(signal.SIGKILL)
            while self._child.returncode is None:
                self._loop.turn()

    def _ended(self, child: Child) -> None:
        if not self._is_over:
            last = child.tail.text().rpartition("\n")[2]
            self._start_again(f"the exporter (pid {child.pid}) ended by {child.cause}{last and f': {last}'}")

    def _start_again(self, why: str) -> None:
        has_worked = time.monotonic() - self._started >= WORKED_SECONDS
        pause = self._restarts.next("exporter", has_worked=has_worked) or 0.0
        self._say(f"{why}; there are no metrics until another one works" + f", in {pause:g} s" * (pause > 0))
        self._timer = self._loop.call_later(pause, self.start)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_token(path: str) -> bytes:
    """The token in a file, without white space around it. Raises ConfigurationError if the file is not private to this
    user, or holds no token."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigurationError(f"--metrics-token-file: {path} is no regular file")
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigurationError(
                    f"--metrics-token-file: {path} must belong to you and be closed to other users (chmod 600)"
                )
            token = file.read(8192).strip()
    except OSError as error:
        raise ConfigurationError(f"--metrics-token-file: {path} cannot be read: {error.strerror}") from error
    if not _TOKEN.fullmatch(token):
        raise ConfigurationError(
            f"--metrics-token-file: {path} holds no token: 16 to 4,096 of the characters A-Z a-z 0-9 . _ ~ + / = -, "
            "such as openssl rand -hex 32 makes"
        )
    return token


def _make_token(run_directory: str) -> str:
    import secrets  # late: a supervisor without metrics does not need it

    path = os.path.join(run_directory, TOKEN_FILE)
    with suppress(FileNotFoundError):  # of a run that was killed
        os.unlink(path)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
        file.write(f"{secrets.token_hex(_TOKEN_NBYTES)}\n")
    return path


def _listen(address: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, place = found[0][0], found[0][4]
        return socket.create_server(place, family=family, backlog=_WAITING_CONNECTIONS)
    except (OSError, UnicodeError) as error:
        said = getattr(error, "strerror", None) or str(error)
        if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno != errno.EADDRNOTAVAIL:
            raise LaunchError(
                f"--metrics-port {port}: nobody can listen on {address} port {port}: {_reason(error)}; choose another "
                "port, or 0 for a free one"
            ) from error
        raise ConfigurationError(f"--metrics-address {address!r} is no address of this machine: {said}") from error


def _reason(error: OSError) -> str:
    """The reason without what Python adds to it."""
    return os.strerror(error.errno) if error.errno else str(error)
