"""The worker's connections: to the server, the controller, other workers and the supervisor.

A channel (:mod:`cs_runtime.transport.channel`) waits for all of them. The controller, and the holder of a merge_call
token, connect to this worker; it connects to the server and, while it holds the token itself, to other workers.
:mod:`cs_worker.session.core` decides what a record means and who may send it.
"""

from __future__ import annotations

import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from cs_proto import messages, peers
from cs_proto.codec import BULK_LIMITS, WORK_LIMITS, Decoder, encode
from cs_proto.errors import ConfigurationError, ContextError, PeerProtocolError, ShutdownError
from cs_proto.failures import error_of
from cs_proto.peers import SERVER
from cs_proto.records import Buffer, Record, altered
from cs_runtime.logs import Complaints
from cs_runtime.trace import moments
from cs_runtime.transport.channel import Channel
from cs_runtime.transport.supervisor_link import SupervisorLink
from cs_worker.baton import Baton
from cs_worker.config import Config

from .core import COLLEAGUE

__all__ = ["Link", "moment"]

_log = logging.getLogger("central_storage.worker")
_complaints = Complaints(_log)

#: Notes where in a step this process is.
moment = moments("worker")

# The most answers that wait for a peer of the ROUTER that does not read; it can do without the others.
_UNREAD = 1000
# The records that may be about a mailbox.
_ABOUT_MAILBOXES = (messages.Offer, messages.Serving)
_FINISHED = messages.StepFinished((1,), False)
_COLLEAGUE_NBYTES = len(COLLEAGUE)
# What is being sent when the process ends gets this long to leave, in milliseconds.
_LINGER = 100
# The worker looks for mail this long before it sleeps, in seconds: longer than a client or server takes to answer.
_PATIENCE = 300e-6


class Link:
    """The connections of one worker. Used by the thread that is the worker only."""

    def __init__(
        self, config: Config, lifeline: SupervisorLink, gone: Callable[[], NoReturn], doorbell: int, turns: Baton
    ) -> None:
        """Listen and connect. The supervisor must have given this process its name. ``gone`` is called where the
        supervisor is gone, and must not return; the descriptor ``doorbell`` is readable after a signal, whose handler
        then runs here; ``turns`` hears of every wait."""
        self._config = config
        self._lifeline = lifeline
        #: The processes that may send messages to this worker.
        self.peers: Mapping[bytes, messages.Introduce] = lifeline.peers
        self._gone = gone
        #: Whether the user's code forked this process from the worker: nothing that is sent here would ever leave.
        self.is_inherited = False
        _links.add(self)
        #: How many records the server was sent.
        self.sent = 0
        self._is_logged = _log.isEnabledFor(logging.DEBUG)  # a process is told at its start; asked at every message
        self._server_decoder, self._decoder = Decoder(BULK_LIMITS), Decoder(WORK_LIMITS)
        self._channel = Channel(
            lifeline,
            doorbell,
            moment,
            self._read,
            linger=_LINGER,
            patience=_PATIENCE,
            on_wake=lambda: os.read(doorbell, 64),
            while_asleep=turns.paused if turns.is_shared else None,
            read_mark=self._step_finished,
        )
        try:
            self._channel.listen(config.endpoint.removeprefix("ipc://"), WORK_LIMITS, _UNREAD)
        except OSError as error:
            self._channel.close()
            raise ConfigurationError(f"cannot listen at {config.endpoint}: {error.strerror}") from error
        self._channel.admit()
        self._channel.connect(SERVER, peers.server_endpoint(config.run_directory))

    def receive(self, timeout: float | None, quiet: bytes | None = None) -> tuple[bytes, Record] | None:
        """The next record and who sent it, whatever carried it; None after ``timeout`` seconds (None: no limit). What
        ``quiet`` posts wakes nobody: nothing can be done with it before others have spoken.

        Bytes that are no record are dropped with a logged line. Does not return where the supervisor is gone.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            try:
                received = self._channel.receive(
                    None if timeout is None else max(0.0, deadline - time.monotonic()), quiet
                )
                if received is not None:
                    peer, record, _ = received
                    if type(record) not in _ABOUT_MAILBOXES or not self._is_of_mailbox(peer, record):
                        return COLLEAGUE if peer[:_COLLEAGUE_NBYTES] == COLLEAGUE else peer, record
            except ShutdownError:
                self._gone()
            if received is None and time.monotonic() >= deadline:
                return None

    def offer_mailbox(self) -> None:
        """Have what fits there go to the server by mailbox, where the supervisor makes one."""
        self.sent += 1
        try:
            self._channel.offer_mailbox(SERVER, "server")
        except ShutdownError:
            self._gone()

    def _is_of_mailbox(self, peer: bytes, record: Record) -> bool:
        """Whether it is about the mailbox of the controller, and so done with. Another server gets another mailbox."""
        who = self.peers.get(peer)  # nobody introduces the server, or a worker to which this one connects
        if isinstance(record, messages.Offer) and who is not None and who.role == "controller":
            for other in self._channel.mailboxes.peers():
                if other not in (SERVER, peer):  # there is one controller at a time
                    self._channel.mailboxes.forget(other)
            accepted = self._channel.open_mailbox(peer, record)
            if accepted is not None:
                self.send_peer(peer, accepted)
            return True
        if isinstance(record, messages.Serving):
            self.offer_mailbox()
        return False

    def send_server(self, record: Record) -> None:
        """Send to the server. Raises LocalProtocolError where the record is too large to travel."""
        self._send(SERVER, record)
        self.sent += 1

    def mark_server(self, number: int, body: bytes) -> bool:
        """Leave a mark for the server, in the place of the mark before. False if there is no mailbox, or if ``body`` is
        too long."""
        moment("sent", number)  # before the server sees the mark: no commit is noted before what it commits
        if not self._channel.mailboxes.mark(SERVER, number, body):
            return False
        if self._is_logged:
            _log.debug("leave the mark of run %d", number)
        return True

    def send_peer(self, identity: bytes, record: Record) -> None:
        """Answer a peer of the ROUTER; dropped where it has gone."""
        self._send(identity, record)

    def send_worker(self, worker: messages.Worker, record: Record) -> None:
        """Send to another worker, as the holder of a token."""
        peer = _colleague(worker)
        if not self._channel.is_connected(peer):
            endpoint = peers.worker_endpoint(self._config.run_directory, worker.replica, worker.incarnation)
            self._channel.connect(peer, endpoint, WORK_LIMITS)
        self._send(peer, record)

    def forget_worker(self, worker: messages.Worker) -> None:
        """Another worker is gone, and what was to be sent to it with it."""
        self._channel.disconnect(_colleague(worker))

    def give_up(self, reason: str) -> NoReturn:
        """End this worker at once: another has its place."""
        _log.error("%s ends: %s", self._config.name, reason)
        self._gone()

    def send_supervisor(self, record: Record) -> None:
        """Send to the supervisor."""
        try:
            self._lifeline.send(record)
        except ShutdownError:
            self._gone()

    def close(self) -> None:
        """Close the sockets."""
        if not self.is_inherited:
            self._channel.close()

    def _send(self, peer: bytes, record: Record) -> None:
        if self._is_logged:
            _log.debug("send %.300r", record)
        parts = encode(record)
        if self.is_inherited:
            raise ContextError(
                "a process that a replica function forks is not a replica; use variables, optimizers and the context "
                "in the function itself"
            )
        # Before the peer can act on it, as in `mark_server`.
        moment("sent", messages.run_of(record))
        self._channel.send(peer, parts)

    def _read(self, sender: bytes, parts: Sequence[Buffer]) -> Record | None:
        try:
            record = (self._server_decoder if sender == SERVER else self._decoder).decode(parts)
        except PeerProtocolError as error:
            _complaints.warn(sender, "%s: dropped a malformed message from %r: %s", self._config.name, sender, error)
            if sender != SERVER and not sender.startswith(COLLEAGUE):
                self.send_peer(sender, messages.Refused(0, error_of(error)))
            return None
        moment("decoded", record.run[0] if type(record) is messages.Run else messages.run_of(record))
        if self._is_logged:
            _log.debug("received from %r: %.300r", sender, record)
        return record

    def _step_finished(self, peer: bytes, number: int, body: bytes) -> Record:
        """What a mark of the server stands for."""
        moment("decoded", number)
        if self._is_logged:
            _log.debug("received from %r: the mark of run %d", peer, number)
        return altered(_FINISHED, run=(number,))


def _inherit() -> None:
    for link in _links:
        link.is_inherited = True


_links: weakref.WeakSet[Link] = weakref.WeakSet()
os.register_at_fork(after_in_child=_inherit)


def _colleague(worker: messages.Worker) -> bytes:
    return b"%sw%d.%d" % (COLLEAGUE, worker.replica, worker.incarnation)
