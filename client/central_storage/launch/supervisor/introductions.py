"""The names of introduced processes, and who is told of whom.

A name is the identity of a process's ZeroMQ sockets. Server and workers hear only processes that the supervisor has
introduced to them: the server hears workers and clients, and workers hear each other and the controller. So nobody
becomes somebody else by calling itself so. The kernel says whose process is at the other end of a connection.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from cs_proto.errors import CentralStorageError, ContextError, PeerProtocolError
from cs_proto.messages import Appoint, ClientGone, Introduce
from cs_proto.records import replace
from cs_runtime import open_files

from .connections import Peer
from .reception import Reception

__all__ = ["Introductions", "new_name"]

_NAME_NBYTES = 16


class Introductions:
    """Which processes are introduced, and which of them is the controller: the script that started the service for
    itself, or else the one that the server has welcomed."""

    def __init__(self, reception: Reception) -> None:
        self._reception = reception
        #: The script that started the service for itself; None if anybody's script may use the service.
        self.owner: Peer | None = None
        self._controller: Peer | None = None

    def why_not(self, peer: Peer, who: Introduce) -> CentralStorageError | None:
        """Why a process cannot be introduced as ``who``; None if it can."""
        if who.role == "controller" and self.owner not in (None, peer):
            return ContextError(
                f"process {self.owner.pid} controls this service; a second strategy needs a service of its own (unset "
                "CS_ADDRESS)"
            )
        for other in self._named():
            if who.client and other.client == who.client:
                return PeerProtocolError(f"another process is client {who.client!r:.40}")
            if who.name and other.name == who.name:
                return PeerProtocolError("another process has the name that this one says it has")
        if who.role == "observer" and not open_files.may_have_guests():
            return open_files.shortage(f"the supervisor (pid {os.getpid()})")
        return None

    def introduce(self, peer: Peer, who: Introduce, *, is_back: bool = False) -> None:
        """Give ``peer`` a name, unless it has one. Tell it and the others who may send messages to them. ``is_back``:
        it was the controller of the previous supervisor."""
        peer.introduction = named = replace(who, name=who.name or new_name())
        if named.role == "controller" and (is_back or peer is self.owner):
            self._controller = peer
        others = [p for p in self._reception.peers if p is not peer and p.introduction is not None]
        for other in others:  # before ``peer`` knows its name, and can send anything
            if self._may_send(peer, other):
                other.send(named)
        peer.send(named)
        for other in others:
            if other.introduction is not None and self._may_send(other, peer):
                peer.send(other.introduction)

    def forget(self, peer: Peer) -> None:
        """``peer`` has gone. The server learns of clients and workers in other ways, but not of observers."""
        who = peer.introduction
        if who is not None and who.role == "observer" and who.client:
            self._reception.tell("server", ClientGone(who.client))
        if peer is self._controller:
            self._controller = None

    def appoint(self, client: str, server: Peer) -> None:
        """The script that is called ``client`` is the controller from now on: the workers hear it, and it may write.
        The ``server`` is told when they know it."""
        scripts = (peer for peer in self._reception.peers if peer.label == "controller")
        for peer in scripts:
            if peer.introduction is not None and peer.introduction.client == client and peer is not self._controller:
                self._controller = peer
                for other in list(self._reception.peers):
                    if self._may_send(peer, other):
                        other.send(peer.introduction)
        server.send(Appoint(client))

    def controllers(self) -> set[str]:
        """The clients of all connected scripts."""
        return {who.client for who in self._named() if who.role == "controller"} - {""}

    def label(self, peer: Peer) -> str:
        """The label of ``peer`` as far as its rights go: a script that is not the controller is an observer."""
        return "observer" if peer.label == "controller" and not self.is_controller(peer) else peer.label

    def is_controller(self, peer: Peer) -> bool:
        """Whether ``peer`` is the controller."""
        return peer is self._controller

    def _may_send(self, sender: Peer, receiver: Peer) -> bool:
        """Whether ``receiver`` may get messages of ``sender``. A launcher of a worker has no name, and gets none."""
        who, whom = sender.introduction, receiver.introduction
        if who is None or whom is None or not (who.name and whom.name) or sender is receiver:
            return False
        if whom.role == "server":
            return who.role in ("worker", "controller") or (who.role == "observer" and bool(who.client))
        return whom.role == "worker" and (who.role == "worker" or sender is self._controller)

    def _named(self) -> Iterator[Introduce]:
        for peer in self._reception.peers:
            if peer.introduction is not None:
                yield peer.introduction


def new_name() -> bytes:
    """A name that nobody can guess."""
    while (name := os.urandom(_NAME_NBYTES))[0] == 0:  # ZeroMQ keeps these for itself
        pass
    return name
