"""A worker's waits: it receives records, has the session core decide, and carries out what follows.

Used by the loop, the replica, the merge controller and the catalogue. What an answer means is theirs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from cs_proto import messages
from cs_proto.errors import ConfigurationError, PeerProtocolError, ReplicaLostError
from cs_proto.failures import error_of
from cs_proto.messages import Note, Run, RunId, Value
from cs_proto.records import Record
from cs_runtime.logs import Complaints
from cs_runtime.waits import pace_of
from cs_worker.config import Config

from . import core
from .core import SessionCore
from .interrupts import Interrupts
from .session import Link

__all__ = ["Conversation", "make_conversation"]

_log = logging.getLogger("central_storage.worker")
_complaints = Complaints(_log)

T = TypeVar("T")


class Conversation:
    """One worker's session: its core, its link, and what interrupts it."""

    def __init__(self, session: SessionCore, link: Link, interrupts: Interrupts) -> None:
        self.session = session
        self.link = link
        #: Carries out a nested run and sends its Return. The loop sets it before the first run.
        self.execute: Callable[[bytes, Run], None] = _not_yet
        #: Called, perhaps more than once, with a step that waits for the end of the step before it. The loop sets it.
        self.prepare: Callable[[Run], None] = _not_yet
        #: Called when the server says which workers there are. The merge controller sets it before the first run.
        self.note_workers: Callable[[messages.Registered | messages.WorkerRestarted], None] = _not_yet
        self._interrupts = interrupts
        self._cancels = 0
        interrupts.attend_to(session.is_cancelled, self._fetch_cancel)

    def register(self) -> messages.Registered:
        """Make this worker known to the server, wait until all workers are, and tell the supervisor.

        Raises :class:`ConfigurationError` where the server refuses. There is no time limit here: the supervisor has
        one.
        """
        self.link.offer_mailbox()
        self._carry_out(self.session.server_serves())
        while self.session.registered is None:
            self._receive(None)
        return self.session.registered

    def next_work(self) -> tuple[bytes, core.Work]:
        """The controller's next record to act on, and the controller's identity. The run before it is over."""
        session = self.session
        if outputs := session.end_run():
            self._carry_out(outputs)
        while (work := session.next_work()) is None:
            if session.waiting_step is not None:
                self.prepare(session.waiting_step)
            received = self.link.receive(None, session.quiet_peer)
            if received is not None and (outputs := session.hear(*received)):
                self._carry_out(outputs)
        return work

    def begin_run(self, controller: bytes, run: Run) -> None:
        """A run of the controller begins."""
        self.session.begin_run(controller, run)
        # If it is cancelled, its SIGINT may come late: a step can be cancelled before it begins.
        if self._cancels and not self.session.is_cancelled():
            self._interrupts.begin_run()

    def say(self, path: RunId, record: Record) -> None:
        """Send the server a record that it does not answer, which ends the run or the merge_call ``path``. Raises
        LocalProtocolError where it is too large to travel."""
        self.link.send_server(record)
        self.session.note_said(path, record, self.link.sent)

    def mark_return(self, run: Run, notes: Sequence[Note], count: int, value: Value) -> bool:
        """Say by a mark that ``run`` has returned ``value``, with ``notes``, after ``count`` merge points. False if its
        Return has to be sent."""
        session, link = self.session, self.link
        mark = session.returns.mark_of(run, notes, count, value, link.sent)
        if mark is None or not link.mark_server(run.run[0], mark[0]):
            return False
        session.note_marked(run.run, mark[1])
        return True

    def wait(
        self,
        what: str,
        wanted: Callable[[Record], T | None],
        merge_point: RunId | None = None,
        question: Record | None = None,
    ) -> T:
        """The first result of ``wanted`` over the server's answers that is not None (it may raise). ``question`` has
        been sent.

        At the merge_call ``merge_point`` the runs that are nested in it are carried out meanwhile. Raises
        KeyboardInterrupt where the run is cancelled, ReplicaLostError where the server has died and PeerProtocolError
        where another worker refuses a nested run. ``what`` names the wait.
        """
        return self._wait(what, wanted, question, merge_point)

    def wait_for_bytes(self, what: str, wanted: Callable[[Record], T | None], question: Record) -> T:
        """As :meth:`wait`, for what another process would have read or written without asking: a run that is cancelled
        meanwhile goes on to its next wait."""
        return self._wait(what, wanted, question, is_for_bytes=True)

    def _wait(
        self,
        what: str,
        wanted: Callable[[Record], T | None],
        question: Record | None,
        merge_point: RunId | None = None,
        *,
        is_for_bytes: bool = False,
    ) -> T:
        _log.debug("waiting for %s", what)
        started, pace = time.monotonic(), pace_of("server")
        with self._interrupts.own_code():  # what is half done in the worker's code must not be torn apart
            self.session.begin_wait(question, merge_point, is_for_bytes=is_for_bytes)
            try:
                while (found := self.session.claim(wanted)) is None:
                    if self.session.is_cancelled() and not is_for_bytes:
                        raise KeyboardInterrupt
                    if (died := self.session.dead_server) is not None:
                        raise ReplicaLostError(f"the server (pid {died.pid}) ended by {died.cause} during {what}")
                    waited = time.monotonic() - started
                    if not self._receive(max(0.0, pace.after - waited)) and pace.is_due(time.monotonic() - started):
                        _log.info("waiting %.0f s for %s", time.monotonic() - started, what)
            finally:
                self.session.end_wait()
            if merge_point is not None:
                self.session.leave_merge_call(merge_point)
            return found

    def _receive(self, timeout: float | None) -> bool:
        """Receive one record and do what follows; False where none came within ``timeout`` seconds."""
        received = self.link.receive(timeout)
        if received is None:
            return False
        if outputs := self.session.hear(*received):
            self._carry_out(outputs)
        return True

    def _fetch_cancel(self, timeout: float) -> None:
        """Take in what has arrived until a Cancel is among it. Called between two steps of the user's code."""
        deadline = time.monotonic() + timeout
        before = self._cancels
        while self._cancels == before and self._receive(max(0.0, deadline - time.monotonic())):
            pass

    def _carry_out(self, outputs: Iterable[core.Output]) -> None:
        for output in outputs:
            match output:
                case core.SendServer(record):
                    self.link.send_server(record)
                case core.SendSupervisor(record):
                    self.link.send_supervisor(record)
                case core.Refuse(peer, what, why):
                    self._refuse(peer, what, why)
                case core.Drop(sender, record, why):
                    _log.debug("dropped %.300r of %r: %s", record, sender, why)
                case core.NoteCancel():
                    self._cancels += 1
                    self._interrupts.note_cancel()
                case core.NoteWorkers(record):
                    self.note_workers(record)
                case core.Execute(holder, run):
                    try:
                        self.execute(holder, run)
                    finally:
                        self.session.end_nested_run()
                case core.FailWait(reason):
                    raise PeerProtocolError(reason)
                case core.RefuseRegistration(reason):
                    raise ConfigurationError(reason)
                case core.GiveUp(reason):
                    self.link.give_up(reason)

    def _refuse(self, peer: bytes, what: str, why: str) -> None:
        _complaints.warn(peer, "refused %s of peer %r: %s", what, peer, why)
        if peer != core.COLLEAGUE:  # which sends answers only
            refused = error_of(PeerProtocolError(f"{what} is refused: {why}"))
            self.link.send_peer(peer, messages.Refused(0, refused))


def make_conversation(config: Config, device: str, link: Link, interrupts: Interrupts) -> Conversation:
    """The conversation of a worker that is not registered yet, in this process and on ``device``."""
    worker = messages.Worker(config.replica, config.incarnation, os.getpid(), device)
    return Conversation(SessionCore(messages.Register(messages.PROTOCOL, worker), link.peers), link, interrupts)


def _not_yet(*of: object) -> None:
    raise AssertionError("before the loop is made, no run has begun")
