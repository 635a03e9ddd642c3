"""The gateway's end of the outposts: for each of their workers a launcher, and a stand-in for each incarnation.

To the supervisor, a passage is what ``cs-launch --join`` is in another container: it asks for a place, is assigned a
worker, reports how that ends, and passes on what the launcher is to do. An outpost has a passage for each of its
workers. When it is gone for good, all of them hang up, and the supervisor counts the workers as dead.
``python -m central_storage.gateway`` runs :class:`Passages`.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from cs_proto import messages
from cs_proto.codec import PACKET_NBYTES, decode, encode
from cs_proto.errors import CentralStorageError, ConfigurationError, LaunchError, PeerProtocolError, ShutdownError
from cs_proto.failures import text_of
from cs_proto.printable import counted
from cs_proto.records import Buffer, Record, replace
from cs_runtime.transport import supervisor_link

from . import items
from .link import WorkerLink
from .mirror import Copy
from .stand_in import SYSTEM_ERRORS, Put, StandIn, Watching, typed

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
        passages = Passages(relay, run_directory, keys.places_of)
        while True:
            relay.turn()
            passages.turn()
    """

    def __init__(self, loop: Linked, run_directory: str, places_of: Callable[[str], int]) -> None:
        """``places_of`` tells how many workers the outpost with the key of a role may run."""
        self._loop, self._run_directory, self._places_of = loop, run_directory, places_of
        self._outposts: list[_Outpost] = []

    def turn(self) -> None:
        """Pass on what outposts have said."""
        known = {id(outpost.link) for outpost in self._outposts}
        for link in list(self._loop.links):
            if id(link) not in known:
                self._outposts.append(_Outpost(self._loop, self._run_directory, link, self._places_of(link.role)))
        for outpost in self._outposts:
            outpost.turn()
        self._outposts = [outpost for outpost in self._outposts if not outpost.is_over]


class _Outpost:
    """The passages of one session."""

    def __init__(self, loop: Watching, run_directory: str, link: WorkerLink, most: int) -> None:
        """The key of the outpost admits ``most`` workers."""
        self.link, self.copy = link, Copy()
        self.is_over = False
        self._loop, self._run_directory, self._most = loop, run_directory, most
        self._places = items.Places(messages.MOST_REPLICAS, link.put)
        self._passages: dict[int, _Passage] = {}

    def turn(self) -> None:
        try:
            for kind, parts in self.link.received():
                if self.is_over:
                    return
                place = self._places.of(kind, parts)
                if place is not None:
                    self._passage(place).hear(kind, parts)
            for passage in self._passages.values():
                if not self.is_over:
                    passage.turn()
        except CentralStorageError as error:
            self.end(error)
        except SYSTEM_ERRORS as error:
            self.end(typed(error))
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
        for passage in self._passages.values():
            passage.close()

    def _passage(self, place: int) -> _Passage:
        found = self._passages.get(place)
        if found is None:
            self.check(place + 1)
            put = partial(self._places.put, place)
            found = self._passages[place] = _Passage(self._loop, self._run_directory, self, place, put)
        return found

    def check(self, workers: int) -> None:
        """Raise ConfigurationError if the key of the outpost does not admit so many workers."""
        if workers > self._most:
            raise ConfigurationError(
                f"the key of {self.link.role} is for {counted(self._most, 'worker')}, and its machine has "
                f"{workers} to run: name fewer devices there (--devices), or make a key for so many (cs-launch keys "
                f"DIR --worker NAME --places {workers})"
            )


class _Passage:
    """One worker of an outpost."""

    def __init__(self, loop: Watching, run_directory: str, outpost: _Outpost, place: int, put: Put) -> None:
        self._loop, self._run_directory, self._outpost, self._put = loop, run_directory, outpost, put
        self._place = place
        self._launcher: socket.socket | None = None
        self._stand_in: StandIn | None = None

    def turn(self) -> None:
        if self._stand_in is not None:
            self._stand_in.turn()

    def close(self) -> None:
        """Hang up to the service."""
        if self._stand_in is not None:
            self._stand_in.close()
        if self._launcher is not None:
            self._loop.unwatch(self._launcher.fileno())
            self._launcher.close()

    def hear(self, kind: bytes, parts: Sequence[Buffer]) -> None:
        """Do what an item of the outpost stands for."""
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
        self._outpost.check(self._place + record.workers)
        self._launcher = supervisor_link.connect(self._run_directory, _TIMEOUT)
        self._launcher.setblocking(False)
        self._loop.watch(self._launcher.fileno(), self._hear_launcher)
        # Whatever it ran before, it runs no worker now.
        node = self._outpost.link.node
        self._tell_supervisor(messages.Join(messages.PROTOCOL, record.pid, node=node, workers=record.workers))

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
            while not self._outpost.is_over and self._launcher is not None:
                try:
                    packet = self._launcher.recv(PACKET_NBYTES)
                except BlockingIOError:
                    return
                except OSError as error:
                    raise ShutdownError(_GONE) from error
                if not packet:
                    raise ShutdownError(_GONE)
                self._heed(decode([packet]), packet)
        except CentralStorageError as error:
            self._outpost.end(error)
        except SYSTEM_ERRORS as error:
            self._outpost.end(typed(error))

    def _heed(self, record: Record, packet: bytes) -> None:
        if isinstance(record, messages.StartFailed):
            raise LaunchError(text_of(record.error))
        if not isinstance(record, messages.Joined):
            self._put(items.LAUNCHER, [packet])
            return
        if self._stand_in is not None:
            raise LaunchError(f"worker w{record.rank} is replaced while it runs")
        # Its name is for this machine: the outpost gives its worker another one. It hears of its peers after that.
        self._put(items.JOIN, encode(replace(record, name=b"")))
        outpost = self._outpost
        self._stand_in = StandIn(
            self._loop,
            self._run_directory,
            record,
            self._put,
            lambda: outpost.link.waiting,
            outpost.end,
            copy=outpost.copy,
            node=outpost.link.node,
        )
        if outpost.is_over:  # it has failed at once
            self._stand_in.close()
