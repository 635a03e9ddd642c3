"""One incarnation of a worker of another machine, as the processes of this machine see it.

A stand-in introduces itself to the supervisor as that worker, listens where the worker would listen, and connects to
the server and to other workers as the worker would. What they say goes to the outpost as it is, behind the bytes that
it stands for; what the worker says comes from there, and only what a worker may say is passed on. :mod:`.passage` makes
one for each incarnation.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import zmq

from cs_proto import messages, peers, segment_names
from cs_proto.codec import BULK_LIMITS, LIMITS, WORK_LIMITS, Decoder, decode, encode
from cs_proto.errors import CentralStorageError, LaunchError, PeerProtocolError, ShutdownError
from cs_proto.failures import error_of
from cs_proto.messages import Joined, MadeProgress, OpenSegment, Ready, Run, Segment, SegmentRefused
from cs_proto.ranges import merged
from cs_proto.records import Buffer, Record, replace
from cs_runtime import open_files
from cs_runtime.logs import Complaints
from cs_runtime.shared_memory.mapping import Mapping
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.mailboxes import Mailboxes
from cs_runtime.transport.rings import Mark
from cs_runtime.transport.supervisor_link import SupervisorLink

from . import items
from .doorbells import Doorbells
from .memory import PIECE_NBYTES, HeadMemory, Piece
from .mirror import Copy, Mirror
from .ranges import Catalogue, for_node, joined, outside
from .sockets import Sockets, Wire

__all__ = ["SYSTEM_ERRORS", "Put", "StandIn", "Watching", "checked", "typed"]

_log = logging.getLogger("central_storage.gateway")
_complaints = Complaints(_log)

#: What is raised where the system refuses something, such as another descriptor.
SYSTEM_ERRORS = (OSError, zmq.ZMQError)
#: Puts an item of a kind.
Put = Callable[[bytes, Sequence[Buffer]], None]

# Seconds in which the supervisor takes a connection and names it; everybody else waits meanwhile.
_TIMEOUT = 5.0
# While so many bytes wait for the outpost to take them, the server is not heard; ZeroMQ keeps so many of its messages.
_MOST_WAITING, _UNREAD = 64 << 20, 2
# Messages that are taken from one socket before the others have their turn.
_AT_ONCE = 100
# Descriptors that are needed to map a segment: the one that comes, and the one that the mapping keeps.
_MAPS = 2
# What a worker says to its server; the holder of a token says more.
_OF_WORKERS = (
    messages.Register,
    messages.Ask,
    messages.Return,
    messages.ClientGone,
    messages.Get,
    messages.Describe,
    messages.DescribeSlots,
    messages.Fetch,
    messages.Put,
    messages.Locate,
    messages.Statistics,
)
_OF_HOLDERS = (
    messages.MergeCallReturn,
    messages.Create,
    messages.Assign,
    messages.AssignSlot,
    messages.Configure,
)


def checked(record: Record, rank: int, incarnation: int) -> Record:
    """The record, which a worker on another machine sends its server. Raises PeerProtocolError if that worker may not
    say it: no worker does, or it speaks for another one."""
    is_known = isinstance(record, _OF_WORKERS) or (rank == peers.HOLDER and isinstance(record, _OF_HOLDERS))
    said = (rank, incarnation)
    if isinstance(record, messages.Register):
        said = (record.worker.replica, record.worker.incarnation)
    elif isinstance(record, messages.Ask | messages.Return):
        said = (record.replica, record.incarnation)
    if not is_known or said != (rank, incarnation):
        raise PeerProtocolError(
            f"worker w{rank}.{incarnation} of another machine sent a {type(record).__name__} as w{said[0]}.{said[1]}, "
            "which it may not send"
        )
    return record


def typed(error: OSError | zmq.ZMQError) -> CentralStorageError:
    """The error that ends the session of an outpost for which the system has refused something to the gateway."""
    if error.errno == errno.EMFILE:
        return open_files.shortage(f"the gateway (pid {os.getpid()})")
    return LaunchError(f"the gateway cannot go on with this outpost: {error}")


class Watching(Protocol):
    """The loop of the gateway."""

    #: For further sockets.
    context: zmq.Context[Any]

    def watch(self, what: zmq.Socket[bytes] | int, call: Callable[[], None]) -> None:
        """Call ``call`` whenever there is something to read."""

    def unwatch(self, what: zmq.Socket[bytes] | int) -> None:
        """Do so no more."""


class StandIn:
    """The connections, and what is known at the node of the memory of the service."""

    def __init__(
        self,
        loop: Watching,
        run_directory: str,
        assigned: Joined,
        put: Put,
        waiting: Callable[[], int],
        failed: Callable[[CentralStorageError], None],
        *,
        copy: Copy | None = None,
        node: str = "",
    ) -> None:
        """Connect. ``put`` puts an item for the outpost, and ``waiting`` tells how many bytes of them it has not taken.
        ``failed`` is called if the service hangs up, or says what cannot be passed on; :meth:`close` must follow.
        ``copy`` is what that machine has of the variables, which other workers there share; without it, there are none.
        ``node`` is the address of the worker's machine.

        Raises LaunchError, NoAnswerError or ShutdownError if the supervisor does not know the worker ``assigned``, and
        OSError if this process has no descriptors left.
        """
        self.rank, self.incarnation, self._node = assigned.rank, assigned.incarnation, node
        self._loop, self._run_directory, self._put, self._failed = loop, run_directory, put, failed
        self._waiting = waiting
        self._hears_server = True
        self._sockets = Sockets(loop.context)
        # Those of the script with the worker, of which this is the end.
        self._doorbells = Doorbells(loop.watch, loop.unwatch)
        self._mailboxes: Mailboxes[bytes] = Mailboxes(self._doorbells, 0.0)
        self._catalogue, self._mirror = Catalogue(self.rank), Mirror(copy)
        self._memory = HeadMemory(self.rank, self._mapped)
        self._words: dict[str, np.ndarray] = {}
        # The parts of its arena that this incarnation of the worker has brought.
        self._arena, self._brought = segment_names.arena(self.rank), list[tuple[int, int]]()
        self._from_server, self._from_peers = Decoder(BULK_LIMITS), Decoder(WORK_LIMITS)
        self._from_worker = Decoder(LIMITS)
        #: The names by which the outpost was told of peers.
        self._told: dict[bytes, bytes] = {}
        self._colleagues: dict[bytes, Wire] = {}
        self._wires: list[Wire] = []
        link = supervisor_link.connect(run_directory, _TIMEOUT)
        self._link = SupervisorLink(link, "worker", self.rank, self.incarnation, name=assigned.name)
        try:
            name = self._link.await_name(_TIMEOUT)
            self._router = self._sockets.router(self._endpoint(self.rank, self.incarnation), WORK_LIMITS)
            self._wires.append(self._router)
            self._server = self._sockets.dealer(peers.server_endpoint(run_directory), name, unread=_UNREAD)
            self._wires.append(self._server)
        except BaseException:  # also what ends this process: the supervisor must see the connection end
            self._drop()
            raise
        loop.watch(self._link.fileno(), self._guarded(self._hear_supervisor))
        loop.watch(self._router.socket, self._guarded(self._hear_peers))
        loop.watch(self._server.socket, self._guarded(self._hear_server))
        self._guarded(self._hear_supervisor)()  # what came with the name

    def close(self) -> None:
        """Hang up: for the service, this worker has ended. Idempotent."""
        if self._link.fileno() >= 0:
            self._loop.unwatch(self._link.fileno())
            for wire in self._wires:
                if wire is not self._server or self._hears_server:
                    self._loop.unwatch(wire.socket)
            self._forget_mailboxes()
            self._drop()

    def turn(self) -> None:
        """Hear what has come by mailbox, and the server again once the outpost has taken most of what waited. The loop
        may wait then."""
        if self._mailboxes:
            self._doorbells.woken(self._mailboxes)
            while self._mailboxes.is_there():
                self._hear_mail()
            self._hear_waiting()
        if not self._hears_server and self._waiting() < _MOST_WAITING:
            self._hears_server = True
            self._loop.watch(self._server.socket, self._guarded(self._hear_server))

    def _drop(self) -> None:
        for wire in self._wires:
            wire.close()
        self._wires.clear()
        self._link.close()

    # --- from the worker ----------------------------------------------------------------------------------------------

    def pass_on(self, kind: bytes, parts: Sequence[Buffer]) -> None:
        """Do what an item of the outpost stands for. Raises PeerProtocolError for one that no worker sends,
        ShutdownError if the supervisor is gone, and OSError if this process has no descriptors left."""
        if not parts:
            raise PeerProtocolError(f"an outpost sent an item of kind {kind!r:.20} without parts")
        if kind == items.MEMORY:
            piece = items.piece_of(parts)
            self._memory.write(piece)
            if piece.segment == self._arena:
                self._brought = merged([*self._brought, (piece.offset, piece.offset + len(piece.data))])
        elif kind == items.SERVER:
            record = checked(self._from_worker.decode(parts), self.rank, self.incarnation)
            self._catalogue.learn(record)
            if isinstance(record, messages.Register):  # the worker does not know how others see its machine
                record = replace(record, worker=replace(record.worker, node=self._node))
                parts = encode(record)
            self._server.send(parts)
        elif kind == items.SUPERVISOR:
            self._tell_supervisor(decode(parts))
        elif kind == items.CONTROLLER:
            self._answer(bytes(parts[0]), parts[1:])
        elif kind == items.COLLEAGUE:
            self._tell_colleague(bytes(parts[0]), parts[1:])
        else:
            raise PeerProtocolError(f"an outpost sent an item of kind {kind!r:.20}")
        self._hear_waiting()

    def _tell_supervisor(self, record: Record) -> None:
        if isinstance(record, OpenSegment):
            self._open(record.segment)
        elif isinstance(record, Ready) or record == MadeProgress(self.incarnation):
            self._link.send(record)
        else:
            raise PeerProtocolError(f"a worker of another machine sent its supervisor a {type(record).__name__}")

    def _open(self, name: str) -> None:
        """Tell the outpost how long a segment is, and whether the worker may write it."""
        try:
            segment, descriptors = self._link.ask_for_segment(OpenSegment(name))
        except (CentralStorageError, TimeoutError) as error:
            if isinstance(error, ShutdownError):
                raise
            self._put(items.SUPERVISOR, encode(SegmentRefused(name, error_of(error))))
            return
        for descriptor in descriptors:
            os.close(descriptor)
        self._put(items.SUPERVISOR, encode(Segment(name, segment.reservation, segment.writable)))

    def _answer(self, peer: bytes, parts: Sequence[Buffer]) -> None:
        record = decode(parts, LIMITS)
        if not isinstance(record, messages.Refused):
            raise PeerProtocolError(f"a worker of another machine sent {peer!r:.40} a {type(record).__name__}")
        self._say(peer, parts)

    def _say(self, peer: bytes, parts: Sequence[Buffer]) -> None:
        """Send a message to one of those that connect to the worker."""
        who = self._link.peers.get(peer)
        if who is not None and not self._mailboxes.post(peer, parts):  # None: it has gone
            self._router.send([who.name, *parts])
            self._mailboxes.sent(peer)

    def _tell_colleague(self, peer: bytes, parts: Sequence[Buffer]) -> None:
        record = self._from_worker.decode(parts)
        if self.rank != peers.HOLDER or not isinstance(record, Run) or len(record.run) < 2:
            raise PeerProtocolError(f"a worker of another machine sent {peer!r:.40} a {type(record).__name__}")
        who = self._link.peers.get(peer)
        if who is None or who.role != "worker":  # it has died, and the server says so
            return
        self._catalogue.learn(record)
        wire = self._colleagues.get(peer)
        if wire is None:
            wire = self._sockets.dealer(self._endpoint(who.rank, who.incarnation), self._link.name)
            self._colleagues[peer] = wire
            self._wires.append(wire)
            self._loop.watch(wire.socket, self._guarded(lambda: self._hear_colleague(peer, wire)))
        wire.send(parts)

    # --- to the worker ------------------------------------------------------------------------------------------------

    def _hear_supervisor(self) -> None:
        while (record := self._link.receive_nowait()) is not None:
            self._introduce()
            if isinstance(record, messages.Died | messages.Serving | messages.ClientGone):
                self._put(items.SUPERVISOR, encode(record))
        self._introduce()

    def _hear_waiting(self) -> None:
        """What the supervisor said while a segment or a name was awaited: polling does not show it."""
        while self._link.waiting:
            self._hear_supervisor()

    def _introduce(self) -> None:
        """Tell the outpost of the peers whom the supervisor has introduced since. Their names stay here: the outpost
        gives them others."""
        known = self._link.peers
        for peer, who in list(known.items()):
            if self._told.get(peer) != who.name:
                self._told[peer] = who.name
                self._put(items.SUPERVISOR, encode(replace(who, name=peer)))
        for peer in self._told.keys() - known.keys():
            del self._told[peer]
            if (wire := self._colleagues.pop(peer, None)) is not None:
                self._loop.unwatch(wire.socket)
                self._wires.remove(wire)
                wire.close()

    def _hear_peers(self) -> None:
        for _ in range(_AT_ONCE):
            if (parts := self._router.take()) is None:
                return
            peer = self._link.peer_named(bytes(parts[0]))
            if peer is None:
                _complaints.warn(b"", "dropped a message of a process that the supervisor has not introduced")
                continue
            self._hear_supervisor()  # the outpost must know the sender first
            self._mailboxes.came(peer, parts[1:])
            self._hear_mail()  # before the next one: if it offers a mailbox, that counts all that follow

    def _hear_mail(self) -> None:
        """Hear those that connect to the worker, each in the order in which it spoke."""
        while (found := self._mailboxes.take()) is not None:
            peer, parts = found
            if peer in self._link.peers and not isinstance(parts, Mark):  # else it has died; nobody leaves a mark here
                self._pass_down(items.CONTROLLER, self._from_peers, parts, [peer])

    def _accept(self, peer: bytes, offer: messages.Offer) -> None:
        """The script offers the worker a mailbox. There is one script at a time."""
        if offer.mailbox == self._mailboxes.number(peer):
            return
        self._forget_mailboxes()
        opened = self._link.mailbox(messages.OpenMailbox(offer.mailbox))
        self._say(peer, encode(self._mailboxes.open(peer, *opened)))

    def _forget_mailboxes(self) -> None:
        for peer in self._mailboxes.peers():
            self._mailboxes.forget(peer)

    def _hear_server(self) -> None:
        for _ in range(_AT_ONCE):
            if self._waiting() >= _MOST_WAITING:
                self._hears_server = False
                self._loop.unwatch(self._server.socket)
                return
            if (parts := self._server.take()) is None:
                return
            self._pass_down(items.SERVER, self._from_server, parts)

    def _hear_colleague(self, peer: bytes, wire: Wire) -> None:
        for _ in range(_AT_ONCE):
            if (parts := wire.take()) is None:
                return
            self._pass_down(items.COLLEAGUE, self._from_peers, parts, [peer])

    def _pass_down(self, kind: bytes, decoder: Decoder, parts: Sequence[Buffer], label: Sequence[Buffer] = ()) -> None:
        """Put a message for the worker, behind the bytes that it stands for."""
        try:
            record = decoder.decode(parts)
        except PeerProtocolError as error:
            _complaints.warn(kind, "dropped a malformed message for worker w%d: %s", self.rank, error)
            return
        who = self._link.peers.get(bytes(label[0])) if kind == items.CONTROLLER else None
        is_of_script = who is not None and who.role == "controller"
        if is_of_script and isinstance(record, messages.Offer):
            self._accept(bytes(label[0]), record)
            return
        passed = for_node(record)
        self._bring(record, is_of_script=is_of_script)
        self._put(kind, [*label, *(parts if passed is record else encode(passed, BULK_LIMITS))])

    def _bring(self, record: Record, *, is_of_script: bool) -> None:
        """Put the bytes that ``record`` stands for, and variables that have changed since they were put last.

        Only the script writes to what a worker has brought, into results that it holds. Others name it as it was
        brought, and the worker may have written newer bytes there by now.
        """
        self._catalogue.learn(record)
        versions = segment_names.versions()
        counts = self._elements(versions)
        fresh = self._mirror.before(record, self._catalogue, self._elements(segment_names.CONTROL), counts)
        down = self._catalogue.down(record)
        if not is_of_script:
            down = outside(down, self._arena, self._brought)
        for piece in self._memory.pieces(joined([*fresh.ranges, *down])):
            self._put(items.MEMORY, items.parts_of(piece))
        for offset, data in fresh.words:
            for start in range(0, len(data), PIECE_NBYTES):
                piece = Piece(versions, counts.nbytes, offset + start, data[start : start + PIECE_NBYTES])
                self._put(items.MEMORY, items.parts_of(piece))

    def _elements(self, name: str) -> np.ndarray:
        """A whole segment of numbers."""
        found = self._words.get(name)
        if found is None:
            found = self._words[name] = self._mapped(name, 0).elements("uint64")
        return found

    def _mapped(self, name: str, stop: int) -> Mapping:
        segment = self._link.segment(name, stop)
        if not isinstance(segment, Mapping):
            if open_files.free() < _MAPS:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            raise LaunchError(
                f"workers on other machines need a service whose memory the gateway can map, and "
                f"{self._link.carried_because}; start it without --memory frames"
            )
        return segment

    def _guarded(self, call: Callable[[], None]) -> Callable[[], None]:
        """``call``, whose errors end the session of the outpost, with all its workers, and nothing else."""

        def guarded() -> None:
            if self._link.fileno() < 0:
                return
            try:
                call()
                self._hear_waiting()
            except CentralStorageError as error:
                self._failed(error)
            except SYSTEM_ERRORS as error:
                self._failed(typed(error))

        return guarded

    def _endpoint(self, rank: int, incarnation: int) -> str:
        return peers.worker_endpoint(self._run_directory, rank, incarnation)
