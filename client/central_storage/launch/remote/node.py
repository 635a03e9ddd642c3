"""The service as one worker on another machine sees it: its supervisor, its server, its peers and its memory.

A node makes all of them in a run directory of its own, so the worker is the one that runs anywhere. Only the memory of
dense variables is that of all workers of the machine. What the worker says goes to the gateway as it is, behind the
bytes that it stands for; what the others say comes from there. The worker knows them by names that the node has made: a
name means something on one machine only. :mod:`.seat` starts the worker, and :mod:`.outpost` knows the gateway.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

from central_storage.cluster import items
from central_storage.cluster.doorbells import Doorbells
from central_storage.cluster.memory import NodeMemory, is_shared
from central_storage.cluster.ranges import Catalogue
from central_storage.cluster.sockets import Sockets, Wire
from central_storage.launch.memory import Memfd
from central_storage.launch.supervisor.children import Child
from central_storage.launch.supervisor.connections import Peer
from central_storage.launch.supervisor.introductions import new_name
from central_storage.launch.supervisor.loop import Loop
from central_storage.launch.supervisor.mailboxes import Mailroom, why_no_mailboxes
from central_storage.launch.supervisor.reception import Reception, as_record
from cs_proto import messages, segment_names
from cs_proto.codec import BULK_LIMITS, LIMITS, WORK_LIMITS, Decoder, decode, encode
from cs_proto.errors import InvalidArgumentError, LaunchError, PeerProtocolError
from cs_proto.messages import Introduce, Joined, MakeMailbox, OpenMailbox, OpenSegment, Segment, SegmentRefused
from cs_proto.peers import HOLDER, SERVER, server_endpoint, worker_endpoint
from cs_proto.records import Buffer, Record, replace
from cs_runtime.logs import Complaints
from cs_runtime.transport.mailboxes import Mailboxes
from cs_runtime.transport.rings import Mark

__all__ = ["Node", "wake"]

_log = logging.getLogger("central_storage.launch")
_complaints = Complaints(_log)

_ELSEWHERE = "the worker is on another machine"
# So many clients that have gone are remembered, as every process does.
_GONE_CLIENTS = 8


class _Incarnation:
    """What belongs to one worker process and ends with it."""

    def __init__(self, assigned: Joined, child: Child, doorbells: Doorbells) -> None:
        self.child = child
        self.rank, self.incarnation = assigned.rank, assigned.incarnation
        #: The worker's connection to its supervisor, and its name; None and empty before it has introduced itself.
        self.peer: Peer | None = None
        self.name = b""
        #: What the supervisor said before that.
        self.early: list[Record] = []
        #: What the service has granted it of the memory that all workers share.
        self.granted: dict[str, Segment] = {}
        self.memory, self.catalogue = NodeMemory(f"worker {self.rank}"), Catalogue(self.rank)
        self.from_worker = Decoder(LIMITS)
        self.from_server, self.from_peers = Decoder(BULK_LIMITS), Decoder(WORK_LIMITS)
        #: Those that may send messages to the worker, under the names that they have here.
        self.introduced: dict[bytes, Introduce] = {}
        #: The sockets that stand for them: of those that connect to the worker, and of those to which it connects.
        self.callers: dict[bytes, Wire] = {}
        self.colleagues: dict[bytes, Wire] = {}
        #: The mailboxes with the worker, by the process at whose other end this one stands.
        self.mailboxes: Mailboxes[bytes] = Mailboxes(doorbells, 0.0)
        #: Clients that have gone, the last one last.
        self.gone: list[bytes] = []

    def close_mailboxes(self) -> None:
        """Close them, and wait for none of them any more."""
        for peer in self.mailboxes.peers():
            self.mailboxes.forget(peer)
        self.mailboxes.close()


class Node:
    """The surroundings of one worker of an outpost, from one incarnation to the next."""

    def __init__(
        self,
        loop: Loop,
        run_directory: str,
        put: Callable[[bytes, Sequence[Buffer]], None],
        shared: NodeMemory,
        *,
        mailboxes: bool = True,
    ) -> None:
        """``put`` puts an item for the gateway. ``shared`` is the memory of all workers of the outpost. Without
        ``mailboxes``, all messages go over ZeroMQ. Nothing is opened yet."""
        self._loop, self._run_directory, self._put, self._shared = loop, run_directory, put, shared
        self._reception = Reception(loop, self._record, self._gone, lambda peer: False, lambda what: None)
        self._sockets = Sockets()
        run, why_none = os.path.basename(run_directory).removeprefix("cs-"), why_no_mailboxes(Memfd(), wanted=mailboxes)
        self._mailroom = Mailroom(run, why_none, is_passed_on=True)
        self._doorbells = Doorbells(loop.on_readable, loop.forget)
        self._server: Wire | None = None
        self._now: _Incarnation | None = None

    def open(self) -> None:
        """Listen as supervisor and as server. Raises LaunchError if that cannot be done in the run directory."""
        try:
            self._reception.open(os.path.join(self._run_directory, "supervisor"))
            self._server = self._watched(self._sockets.router(server_endpoint(self._run_directory), LIMITS))
        except OSError as error:
            raise LaunchError(f"no socket can be made in {self._run_directory}: {error.strerror}") from error

    def begin(self, assigned: Joined, child: Child) -> None:
        """``child`` is the worker now."""
        self.end()
        self._now = _Incarnation(assigned, child, self._doorbells)

    def end(self) -> None:
        """The worker has ended: what belongs to it is dropped. Idempotent."""
        now, self._now = self._now, None
        if now is not None:
            for wire in (*now.callers.values(), *now.colleagues.values()):
                self._drop(wire)
            now.close_mailboxes()
            if now.peer is not None:
                self._mailroom.forget(now.peer)
                now.peer.close()
            self._mailroom.forget(now)
            now.memory.close()

    def close(self) -> None:
        """Close everything. Idempotent."""
        self.end()
        self._mailroom.close()
        if not self._reception.is_closed:
            self._reception.close()
            if self._server is not None:
                self._loop.forget(self._server.fileno())
            self._sockets.close()

    # --- from the gateway ---------------------------------------------------------------------------------------------

    def pass_on(self, kind: bytes, parts: Sequence[Buffer]) -> None:
        """Do what an item of the gateway stands for. If no worker runs, only the memory of all workers is written.
        Raises PeerProtocolError for what no gateway sends."""
        now = self._now
        if kind == items.MEMORY:
            piece = items.piece_of(parts)
            if is_shared(piece.segment):
                self._shared.write(piece)
            elif now is not None:
                now.memory.write(piece)
            return
        if now is None:
            return
        if kind == items.SUPERVISOR:
            self._heed(now, decode(parts))
        elif kind == items.SERVER:
            now.catalogue.learn(now.from_server.decode(parts))
            self._say_as_server(now, parts)
        elif kind == items.CONTROLLER:
            now.catalogue.learn(now.from_peers.decode(parts[1:]))
            self._say_as(now, bytes(parts[0]), parts[1:])
        elif kind == items.COLLEAGUE:
            if (colleague := now.colleagues.get(bytes(parts[0]))) is not None:
                colleague.send([now.name, *parts[1:]])
        else:
            raise PeerProtocolError(f"the gateway sent an item of kind {kind!r:.20}")

    def _heed(self, now: _Incarnation, record: Record) -> None:
        """The supervisor of the service says something."""
        if isinstance(record, Segment):
            self._hand_out(now, record)
        elif isinstance(record, SegmentRefused):
            if now.peer is not None:
                now.peer.send(record)
        elif isinstance(record, Introduce):
            self._introduce(now, record)
        else:
            if isinstance(record, messages.Serving):
                record = replace(record, run_directory=self._run_directory)
            self._tell(now, record)
            if isinstance(record, messages.Died) and record.role == "worker":
                self._forget(now, b"w%d.%d" % (record.rank, record.incarnation))
            elif isinstance(record, messages.ClientGone):
                now.gone += [peer for peer, who in now.introduced.items() if who.client == record.client]
                for peer in now.gone[:-_GONE_CLIENTS]:  # not earlier: its last messages may come after this
                    self._forget(now, peer)

    def _hand_out(self, now: _Incarnation, segment: Segment) -> None:
        if now.peer is None:
            return
        name = segment.segment
        if segment_names.is_sparse(name):  # its bytes are not here: rows of it are fetched from the server
            now.peer.send(replace(segment, writable=False, is_elsewhere=True))
            return
        memory = self._shared if is_shared(name) else now.memory
        memory.hold(name, segment.reservation)
        if memory is self._shared:
            now.granted[name] = segment
        answer = replace(segment, reservation=memory.reservation(name))
        now.peer.send(answer, memory.descriptor(name, writable=segment.writable))

    def _introduce(self, now: _Incarnation, who: Introduce) -> None:
        """A process may send messages to the worker; its name is what it is called."""
        self._forget(now, who.name)
        named = now.introduced[who.name] = replace(who, name=new_name())
        self._tell(now, named)
        if who.role == "worker" and now.rank == HOLDER:
            endpoint = worker_endpoint(self._run_directory, who.rank, who.incarnation)
            now.colleagues[who.name] = self._watched(self._sockets.router(endpoint, WORK_LIMITS))

    def _tell(self, now: _Incarnation, record: Record) -> None:
        if now.peer is not None:
            now.peer.send(record)
        elif not isinstance(record, Introduce):
            now.early.append(record)

    def _say_as_server(self, now: _Incarnation, parts: Sequence[Buffer]) -> None:
        if not now.mailboxes.post(SERVER, parts):
            assert self._server is not None
            self._server.send([now.name, *parts])
            now.mailboxes.sent(SERVER)

    def _say_as(self, now: _Incarnation, peer: bytes, parts: Sequence[Buffer]) -> None:
        """Send a message of one of those that connect to the worker."""
        wire = now.callers.get(peer)
        if wire is None:
            if peer not in now.introduced:
                raise PeerProtocolError(f"the gateway sent a message of {peer!r:.40}, which it has not introduced")
            endpoint = worker_endpoint(self._run_directory, now.rank, now.incarnation)
            made = self._sockets.dealer(endpoint, now.introduced[peer].name, LIMITS)
            wire = now.callers[peer] = self._watched(made)
            if now.introduced[peer].role == "controller":
                mailbox = self._mailroom.make(now, "controller", f"w{now.rank}")
                if (offer := now.mailboxes.offer(peer, *mailbox)) is not None:
                    wire.send(encode(offer))
                    now.mailboxes.sent(peer)
        if not now.mailboxes.post(peer, parts):
            wire.send(parts)
            now.mailboxes.sent(peer)

    def _forget(self, now: _Incarnation, peer: bytes) -> None:
        now.gone = [each for each in now.gone if each != peer]
        now.introduced.pop(peer, None)
        now.mailboxes.forget(peer)
        for wire in (now.callers.pop(peer, None), now.colleagues.pop(peer, None)):
            if wire is not None:
                self._drop(wire)

    # --- from the worker ----------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Put what the worker has said. False if there was nothing; then the loop may wait."""
        # asked without a worker, too: otherwise their descriptors stay readable
        has_input, now = self._sockets.have_input(), self._now
        if now is None or self._server is None:
            return False
        self._doorbells.woken(now.mailboxes)
        has_spoken = has_input and self._hear_sockets(now, self._server)
        has_spoken |= self._hear_mail(now)
        return has_spoken or now.mailboxes.is_there()

    def _hear_sockets(self, now: _Incarnation, server: Wire) -> bool:
        """Take what has come over ZeroMQ. False if that was nothing of the worker."""
        has_spoken = False
        while (parts := server.take()) is not None:
            has_spoken = True
            if bytes(parts[0]) == now.name:
                now.mailboxes.came(SERVER, parts[1:])
                self._hear_mail(now)  # before the next one: if it offers a mailbox, that counts all that follow
        for peer, wire in list(now.callers.items()):
            while (parts := wire.take()) is not None:
                has_spoken = True
                now.mailboxes.came(peer, parts)
                self._hear_mail(now)
        for peer, wire in list(now.colleagues.items()):
            while (parts := wire.take()) is not None:
                has_spoken = True
                if bytes(parts[0]) == now.name:
                    self._pass_up(now, items.COLLEAGUE, parts[1:], [peer])
        return has_spoken

    def _hear_mail(self, now: _Incarnation) -> bool:
        """Put what the worker has said to the server and to those that connect to it, to each in order. False if there
        was nothing."""
        has_spoken = False
        while (found := now.mailboxes.take()) is not None:
            has_spoken = True
            peer, parts = found
            if isinstance(parts, Mark):  # it was told that none is taken
                _complaints.warn(peer, "dropped a mark of worker w%d", now.rank)
            elif peer == SERVER:
                self._pass_up(now, items.SERVER, parts)
            elif peer in now.callers:  # else it has gone
                self._pass_up(now, items.CONTROLLER, parts, [peer])
        return has_spoken

    def _accept(self, now: _Incarnation, offer: messages.Offer) -> None:
        """The worker offers the server a mailbox."""
        if offer.mailbox != now.mailboxes.number(SERVER):
            opened = self._mailroom.open("server", offer.mailbox)
            self._say_as_server(now, encode(now.mailboxes.open(SERVER, *opened)))

    def _pass_up(self, now: _Incarnation, kind: bytes, parts: Sequence[Buffer], label: Sequence[Buffer] = ()) -> None:
        """Put a message of the worker, behind the bytes that it stands for."""
        try:
            record = (now.from_worker if kind == items.SERVER else now.from_peers).decode(parts)
        except PeerProtocolError as error:
            _complaints.warn(kind, "dropped a malformed message of worker w%d: %s", now.rank, error)
            return
        if isinstance(record, messages.Offer) and not label:
            self._accept(now, record)
            return
        if isinstance(record, messages.MailboxAccepted) and label:
            now.mailboxes.taken(bytes(label[0]), record)
            return
        now.catalogue.learn(record)
        if not now.catalogue.is_repeated(record):
            for piece in now.memory.pieces(now.catalogue.up(record)):
                self._put(items.MEMORY, items.parts_of(piece))
        self._put(kind, [*label, *parts])

    def _record(self, peer: Peer, record: Record) -> None:
        now = self._now
        if isinstance(record, Introduce):
            self._meet(peer, record)
        elif now is None or peer is not now.peer:
            self._reception.refuse(peer, f"process {peer.pid} is not the worker of this outpost")
        elif isinstance(record, OpenSegment):
            self._open(now, peer, record)
        elif isinstance(record, MakeMailbox | OpenMailbox):
            mailbox, descriptors = self._mailroom.answer(peer, peer.label, record)
            peer.send(mailbox, *descriptors)
        elif isinstance(record, messages.Ready | messages.MadeProgress):
            self._put(items.SUPERVISOR, encode(record))
        else:
            _complaints.warn(peer.pid, "dropped a %s of worker w%d", type(record).__name__, now.rank)

    def _open(self, now: _Incarnation, peer: Peer, record: OpenSegment) -> None:
        """The worker asks for a segment. It asks again for one in which it has preserved what it had read, which may be
        in every step. Then the service is asked only if it may have made the segment longer."""
        name = record.segment
        granted = now.granted.get(name)
        if segment_names.is_times(name):
            error = InvalidArgumentError(f"no step times are kept: {_ELSEWHERE}")
            peer.send(SegmentRefused(name, as_record(error)))
        elif granted is not None and 0 < record.stop <= self._shared.reservation(name):
            self._hand_out(now, granted)
        else:
            self._put(items.SUPERVISOR, encode(record))

    def _meet(self, peer: Peer, who: Introduce) -> None:
        """A process introduces itself: the worker, or one that has no business here."""
        now = self._now
        said = (who.role, who.rank, who.incarnation)
        if now is None or said != ("worker", now.rank, now.incarnation) or not now.child.is_run_by(peer, who):
            why = "here runs a worker of a service on another machine; ask there (its address: cs-launch --join)"
            self._reception.turn_away(peer, LaunchError(why))
            return
        if now.peer is not None:
            self._reception.refuse(peer, f"worker w{now.rank} introduced itself twice")
            return
        now.peer, now.name = peer, new_name()
        peer.introduction = replace(who, name=now.name)
        peer.send(peer.introduction)
        for record in (*now.introduced.values(), *now.early):
            peer.send(record)
        now.early.clear()

    def _gone(self, peer: Peer) -> None:
        """A connection has ended. The kernel tells the outpost of the end of its worker."""

    def _watched(self, wire: Wire) -> Wire:
        self._loop.on_readable(wire.fileno(), wake)
        return wire

    def _drop(self, wire: Wire) -> None:
        self._loop.forget(wire.fileno())
        wire.close()


def wake() -> None:
    """The loop has a turn, after which everything is looked at."""
