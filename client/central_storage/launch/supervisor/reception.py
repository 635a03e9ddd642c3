"""The supervisor's socket, and the peers that are connected to it."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from functools import partial

from cs_proto.errors import CentralStorageError, code_of
from cs_proto.messages import Error, Role, StartFailed
from cs_proto.records import Record
from cs_runtime import open_files
from cs_runtime.logs import Complaints

from .connections import Peer
from .loop import Loop, Timer

__all__ = ["Reception", "as_record"]

_log = logging.getLogger("central_storage.launch")
_complaints = Complaints(_log)

# At the end, peers get this many seconds to read their last records.
_FAREWELL = 0.5
# Seconds until the next try where a connection could not be accepted.
_ACCEPT_AGAIN = 1.0
# After so many connections, none is accepted for so many seconds: those that come without end leave the processors to
# others.
_AT_ONCE, _REST = 16, 20e-3
# A process that connects must introduce itself within this many seconds, or its connection is closed.
_INTRODUCTION = 5.0
# So many processes may be connected without having introduced themselves. If there are more, the first of them goes: an
# honest one introduces itself at once.
_STRANGERS = 64
# This fraction of the descriptors stays free for segments, mailboxes and restarted processes. No connection is accepted
# while fewer are free.
_FREE_SHARE = 8


class Reception:
    """Accepts connections and keeps them. Refuses processes of other users, and those that do not introduce
    themselves."""

    def __init__(
        self,
        loop: Loop,
        on_record: Callable[[Peer, Record], None],
        on_end: Callable[[Peer], None],
        is_waiting: Callable[[Peer], bool],
        note: Callable[[str], None],
    ) -> None:
        """Does not listen yet. ``on_end`` is called once for each peer, when it has gone or was refused. ``is_waiting``
        tells whether a peer may stay without an introduction for now. ``note`` is told of each refusal."""
        self.peers: list[Peer] = []
        self._loop = loop
        self._on_record = on_record
        self._on_end = on_end
        self._is_waiting = is_waiting
        self._note = note
        self._again: Timer | None = None
        self._accepted = 0
        self._path = ""
        self._inode = 0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def open(self, path: str) -> None:
        """Listen. Raises OSError if no socket can be made at ``path``."""
        self._listener.bind(path)
        self._path, self._inode = path, os.stat(path).st_ino
        self._listener.listen(128)
        self._listener.setblocking(False)
        self._loop.on_readable(self._listener.fileno(), self._accept)

    @property
    def is_reachable(self) -> bool:
        """Whether the socket is still where it was opened, so that a process can connect."""
        try:
            return os.stat(self._path).st_ino == self._inode  # no other has this number as long as the socket is open
        except OSError:
            return False

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._listener.fileno() < 0

    def close(self) -> None:
        """Close all connections, after peers had a moment to read their last records."""
        deadline = time.monotonic() + _FAREWELL
        while any(peer.waiting for peer in self.peers) and (left := deadline - time.monotonic()) > 0:
            self._loop.turn(left)
        for peer in self.peers:
            peer.close()
        if self._again is not None:
            self._again.cancel()
        self._loop.forget(self._listener.fileno())
        self._listener.close()

    def connect(self, link: socket.socket) -> Peer:
        """Take over a connection."""
        peer = Peer(self._loop, link, self._on_record, self._ended)
        self.peers.append(peer)
        return peer

    def has(self, role: Role) -> bool:
        """Whether a peer of that role is connected."""
        return any(peer.introduction is not None and peer.introduction.role == role for peer in self.peers)

    def tell(self, role: Role, record: Record) -> None:
        """Send to all peers of that role."""
        for peer in list(self.peers):
            if peer.introduction is not None and peer.introduction.role == role:
                peer.send(record)

    def tell_all(self, record: Record) -> None:
        """Send to all peers that have introduced themselves."""
        for peer in list(self.peers):
            if peer.introduction is not None:
                peer.send(record)

    def refuse(self, peer: Peer, reason: str) -> None:
        """End a connection."""
        _complaints.warn(peer.pid, "%s; its connection is closed", reason)
        self._note(reason)
        peer.close()
        self._ended(peer)

    def turn_away(self, peer: Peer, error: CentralStorageError) -> None:
        """End a connection, and tell the peer why."""
        peer.send(StartFailed(as_record(error)))
        if not peer.closed:
            self.refuse(peer, f"process {peer.pid} is refused: {error}")

    def _accept(self) -> None:
        free, limit = open_files.free(), open_files.limit()
        if free < limit // _FREE_SHARE:
            needed = limit // _FREE_SHARE
            self._fail_to_accept(f"only {free} of {limit} descriptors are free, and {needed} are needed")
            return
        try:
            link, _ = self._listener.accept()
        except OSError as error:  # too many open files in the whole system, or no memory
            self._fail_to_accept(str(error.strerror))
            return
        self._accepted += 1
        if self._accepted % _AT_ONCE == 0:
            self._accept_after(_REST)
        self._make_room()
        peer = self.connect(link)
        if peer.uid != os.geteuid():
            self.refuse(peer, f"process {peer.pid} of user {peer.uid} connected")
        else:
            self._loop.call_later(_INTRODUCTION, partial(self._expect_introduction, peer))

    def _make_room(self) -> None:
        """Close the connection of the first stranger if there are too many of them."""
        strangers = [each for each in self.peers if each.introduction is None and not self._is_waiting(each)]
        if len(strangers) >= _STRANGERS:
            self.refuse(strangers[0], f"process {strangers[0].pid} did not say who it is, and others want to")

    def _fail_to_accept(self, why: str) -> None:
        _log.warning("no connection is accepted for the moment: %s", why)
        self._accept_after(_ACCEPT_AGAIN)

    def _accept_after(self, seconds: float) -> None:
        """Leave new connections in the queue for so long."""
        listener = self._listener.fileno()
        self._loop.on_readable(listener, None)
        self._again = self._loop.call_later(seconds, partial(self._loop.on_readable, listener, self._accept))

    def _expect_introduction(self, peer: Peer) -> None:
        if peer.introduction is None and not self._is_waiting(peer) and not peer.closed:
            self.refuse(peer, f"process {peer.pid} did not say who it is within {_INTRODUCTION:g} s")

    def _ended(self, peer: Peer) -> None:
        self.peers.remove(peer)
        self._on_end(peer)


def as_record(error: CentralStorageError) -> Error:
    """An error of the supervisor as a record."""
    origin = f"{type(error).__module__}:{type(error).__qualname__}"
    return Error(code_of(type(error)), str(error), None, origin, -1, 0, "")
