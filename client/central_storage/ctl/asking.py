"""Questions to a supervisor, over its socket: how the service is, and what its processes have printed."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self, TypeVar

from central_storage.launch.run_directory import is_beginning, is_free
from cs_proto.codec import PACKET_NBYTES, decode, encode
from cs_proto.errors import (
    ConfigurationError,
    LaunchError,
    NoAnswerError,
    PeerProtocolError,
    ShutdownError,
    code_of,
)
from cs_proto.messages import PROTOCOL, Introduce, LogLine, LogLines, ServiceReport, ShowLog, ShowService, StartFailed
from cs_proto.records import Record
from cs_runtime.transport import supervisor_link

from . import processes

__all__ = ["Supervisor"]

R = TypeVar("R", bound=Record)

_SKEWED = code_of(PeerProtocolError)


class Supervisor:
    """A connection as an observer. Use it in a ``with`` block."""

    def __init__(self, address: str, timeout: float) -> None:
        """Connect to the supervisor in the run directory ``address``. ``timeout`` (seconds) is for each answer. Raises
        ConfigurationError for a timeout that makes no sense, LaunchError if no service is there, and NoAnswerError if
        the supervisor does not listen yet, or not any more."""
        if not 0 < timeout < 1e6:
            raise ConfigurationError(
                f"a timeout is a number of seconds, more than 0 and less than 1e6, not {timeout:g}"
            )
        self._address = address
        self._timeout = timeout
        try:
            self._link = supervisor_link.connect(address, timeout)
        except LaunchError as error:
            if not isinstance(error.__cause__, FileNotFoundError) or is_free(address):
                raise
            why = (
                "has just begun to start; try again"
                if is_beginning(address)
                else "cannot be asked: the socket of its supervisor was removed; keep what removes old files away"
            )
            raise NoAnswerError(f"the service in {address} {why}") from error
        self._link.settimeout(timeout)
        try:
            #: The pid of the supervisor, as the kernel knows it; 0 if it is in a container that hides it.
            self.pid: int = struct.unpack("iII", self._link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            self._link.sendall(b"".join(encode(Introduce(PROTOCOL, "observer", 0, 1, os.getpid()))))
        except TimeoutError as error:
            self._link.close()
            raise self._late() from error
        except OSError as error:
            self._link.close()
            raise LaunchError(f"no service answers in {address}; it has ended") from error

    def report(self) -> ServiceReport:
        """How the service is. Raises NoAnswerError or ShutdownError."""
        self._send(ShowService())
        return self._next(ServiceReport, time.monotonic() + self._timeout)

    def log(self, *, follow: bool) -> Iterator[list[LogLine]]:
        """The last lines of all processes, oldest first; with ``follow``, then lines as they come, until the service
        ends."""
        self._send(ShowLog(follow))
        deadline = time.monotonic() + self._timeout
        kept: list[LogLine] = []
        while True:
            packet = self._next(LogLines, deadline)
            kept += packet.lines
            if packet.is_last:
                break
        yield kept
        while follow:
            try:
                packet = self._next(LogLines, None)
            except ShutdownError:
                return
            yield list(packet.lines)

    def follow(self) -> None:
        """Ask for all lines, also for those that come; :meth:`waiting_lines` has them."""
        self._send(ShowLog(True))

    def waiting_lines(self) -> list[LogLine]:
        """The lines that have come since, without waiting. Raises ShutdownError once the service has ended."""
        found: list[LogLine] = []
        while self._is_readable(0.0):
            record = self._read()
            if isinstance(record, LogLines):
                found += record.lines
        return found

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, record: Record) -> None:
        try:
            self._link.sendall(b"".join(encode(record)))
        except TimeoutError as error:
            raise self._late() from error
        except OSError as error:
            raise self._over() from error

    def _next(self, kind: type[R], deadline: float | None) -> R:
        """The next record of that kind; others, such as notices of deaths, are passed over."""
        while True:
            if not self._is_readable(None if deadline is None else max(0.0, deadline - time.monotonic())):
                raise self._late()
            record = self._read()
            if isinstance(record, kind):
                return record
            if isinstance(record, StartFailed) and record.error.exception == _SKEWED:
                raise PeerProtocolError(record.error.message)

    def _is_readable(self, timeout: float | None) -> bool:
        poller = select.poll()
        poller.register(self._link, select.POLLIN)
        return bool(poller.poll(None if timeout is None else timeout * 1000))

    def _read(self) -> Record:
        try:
            packet = self._link.recv(PACKET_NBYTES)  # no room for descriptors: the kernel closes them
        except OSError as error:
            raise self._over() from error
        if not packet:
            raise self._over()
        return decode([packet])

    def _late(self) -> NoAnswerError:
        found = processes.status(self.pid)
        is_stopped = found is not None and found.state == "stopped"
        remedy = f": it is stopped; kill -CONT {self.pid} lets it go on" if is_stopped else ""
        return NoAnswerError(f"the supervisor in {self._address} did not answer within {self._timeout:g} s{remedy}")

    def _over(self) -> ShutdownError:
        return ShutdownError(f"the service in {self._address} has ended")
