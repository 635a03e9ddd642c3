"""The gateway's end of one outpost: the launcher of a worker, and a stand-in for each incarnation of that worker.

To the supervisor, a passage is what ``cs-launch --join`` is in another container: it asks for a place, is assigned a
worker, reports how that ends, and passes on what the launcher is to do. When the outpost is gone for good, the passage
hangs up, and the supervisor counts the worker as dead. ``python -m central_storage.gateway`` runs :class:`Passages`.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Sequence
from typing import Protocol

from cs_proto import messages
from cs_proto.codec import PACKET_NBYTES, decode, encode
from cs_proto.errors import CentralStorageError, LaunchError, PeerProtocolError, ShutdownError
from cs_proto.failures import text_of
from cs_proto.records import Buffer, Record, replace
from cs_runtime.transport import supervisor_link

from . import items
from .link import WorkerLink
from .stand_in import StandIn, Watching

__all__ = ["Passages"]

_log = logging.getLogger("central_storage.gateway")

# Seconds in which the supervisor must take a connection.
_TIMEOUT = 5.0
_GONE = "the service is gone"


class Linked(Watching, Protocol):
    """The loop of the gateway, and the outposts that are linked to it."""

    @property
    def links(self) -> Iterable[WorkerLink]:
        """The sessions that are not over."""


class Passages:
    """All outposts of one service. ::

    with Relay(...) as relay:
        passages = Passages(relay, run_directory)
        while True:
            relay.turn()
            passages.turn()
    """

    def __init__(self, loop: Linked, run_directory: str) -> None:
        self._loop, self._run_directory = loop, run_directory
        self._passages: list[_Passage] = []

    def turn(self) -> None:
        """Pass on what outposts have said."""
        known = {id(passage.link) for passage in self._passages}
        for link in list(self._loop.links):
            if id(link) not in known:
                self._passages.append(_Passage(self._loop, self._run_directory, link))
        for passage in self._passages:
            passage.turn()
        self._passages = [passage for passage in self._passages if not passage.is_over]


class _Passage:
    def __init__(self, loop: Watching, run_directory: str, link: WorkerLink) -> None:
        self.link = link
        self.is_over = False
        self._loop, self._run_directory = loop, run_directory
        self._launcher: socket.socket | None = None
        self._stand_in: StandIn | None = None

    def turn(self) -> None:
        try:
            for kind, parts in self.link.received():
                if self.is_over:
                    return
                self._hear(kind, parts)
            if self._stand_in is not None and not self.is_over:
                self._stand_in.turn()
        except CentralStorageError as error:
            self.end(error)
        if self.link.is_over and not self.is_over:
            _log.info("%s is gone: %s", self.link.role, self.link.reason)
            self.end(ShutdownError(_GONE))

    def end(self, reason: CentralStorageError) -> None:
        """Hang up to both sides. Idempotent."""
        if self.is_over:
            return
        self.is_over = True
        if not self.link.is_over:
            _log.info("%s is sent away: %s", self.link.role, reason)
            self.link.close(reason)
        if self._stand_in is not None:
            self._stand_in.close()
        if self._launcher is not None:
            self._loop.unwatch(self._launcher.fileno())
            self._launcher.close()

    def _hear(self, kind: bytes, parts: Sequence[Buffer]) -> None:
        if kind == items.JOIN:
            self._join(decode(parts))
        elif kind == items.LAUNCHER:
            self._report(decode(parts))
        elif self._stand_in is not None:
            self._stand_in.pass_on(kind, parts)
        # Else it is of a worker of which the supervisor has heard that it died.

    def _join(self, record: Record) -> None:
        if not isinstance(record, messages.Join) or self._launcher is not None:
            raise PeerProtocolError(f"an outpost sent a {type(record).__name__} where it had to join, once")
        self._launcher = supervisor_link.connect(self._run_directory, _TIMEOUT)
        self._launcher.setblocking(False)
        self._loop.watch(self._launcher.fileno(), self._hear_launcher)
        # Whatever it ran before, it runs no worker now.
        self._tell_supervisor(messages.Join(messages.PROTOCOL, record.pid, node=self.link.node))

    def _report(self, record: Record) -> None:
        """The outpost says that its worker has died."""
        if not isinstance(record, messages.Died) or record.role != "worker":
            raise PeerProtocolError(f"an outpost sent its supervisor a {type(record).__name__}")
        stand_in = self._stand_in
        if stand_in is not None and (stand_in.rank, stand_in.incarnation) == (record.rank, record.incarnation):
            self._stand_in = None
            stand_in.close()  # its last messages are sent before the supervisor hears of the death
            self._tell_supervisor(record)

    def _tell_supervisor(self, record: Record) -> None:
        assert self._launcher is not None
        try:
            self._launcher.send(b"".join(encode(record)))
        except OSError as error:
            raise ShutdownError(_GONE) from error

    def _hear_launcher(self) -> None:
        """The supervisor says something to the launcher."""
        try:
            while not self.is_over and self._launcher is not None:
                try:
                    packet = self._launcher.recv(PACKET_NBYTES)
                except BlockingIOError:
                    return
                if not packet:
                    raise ShutdownError(_GONE)
                self._heed(decode([packet]), packet)
        except OSError:
            self.end(ShutdownError(_GONE))
        except CentralStorageError as error:
            self.end(error)

    def _heed(self, record: Record, packet: bytes) -> None:
        if isinstance(record, messages.StartFailed):
            raise LaunchError(text_of(record.error))
        if not isinstance(record, messages.Joined):
            self.link.put(items.LAUNCHER, [packet])
            return
        if self._stand_in is not None:
            raise LaunchError(f"worker w{record.rank} is replaced while it runs")
        # Its name is for this machine: the outpost gives its worker another one. It hears of its peers after that.
        self.link.put(items.JOIN, encode(replace(record, name=b"")))
        self._stand_in = StandIn(
            self._loop,
            self._run_directory,
            record,
            self.link.put,
            lambda: self.link.waiting,
            self.end,
            node=self.link.node,
        )
        if self.is_over:  # it has failed at once
            self._stand_in.close()
