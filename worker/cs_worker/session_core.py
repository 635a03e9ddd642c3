"""Who may say what to this worker, and when.

Everything that arrives comes through here: work of the controller is queued while a run is under way, and a step of a
series until the server has said that the one before it is over; Cancels are remembered, answers of the server go to
whoever waits for them, a nested run is carried out only while this worker waits at exactly the merge_call it belongs
to. A server in the place of one that died is told once more what may not have been heard. Whatever else arrives is
refused: a logged line, and a ``Refused`` to the sender. Called by the loop, the replica, the token holder and the
catalogue; which function a run names and what an answer means is theirs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from cs_proto import messages
from cs_proto.codec import encode_values
from cs_proto.errors import Fenced, PeerProtocolError, ReplicaLostError, code_of
from cs_proto.failures import error_of
from cs_proto.messages import Forget, Prepare, Run, RunId
from cs_proto.records import Buffer, Record

from .interrupts import Interrupts
from .session import COLLEAGUE, SERVER, SUPERVISOR, Link

__all__ = ["Conversation", "path_text"]

_log = logging.getLogger("central_storage.worker")

T = TypeVar("T")

# A wait this long is named, and again after as long.
_NAME_WAIT_EVERY = 10.0
_FENCED = code_of(Fenced)


class Conversation:
    """Sorts what the link receives."""

    def __init__(self, link: Link, interrupts: Interrupts, execute: Callable[[bytes, Run], None]) -> None:
        """``execute`` carries out a nested run and sends its Return."""
        #: Told of workers that take the place of others, which may happen at any time.
        self.hear_of_workers: Callable[[messages.Registered | messages.WorkerRestarted], None] = _ignored
        self.link = link
        self._interrupts = interrupts
        self._execute = execute
        self._work: deque[tuple[bytes, Forget | Prepare | Run]] = deque()
        self._unclaimed: list[Record] = []
        # With the controller: the next one counts its runs from 1 again.
        self._run: tuple[bytes, RunId] | None = None
        self._cancelled: tuple[bytes, messages.Cancel] | None = None
        # The step this worker returned from without knowing yet that it is over, and the series that has failed.
        self._step: tuple[bytes, Run] | None = None
        self._failed: tuple[bytes, int] | None = None
        self._cancels = 0
        self._left = b""  # the controller that has gone
        self._dead_server: messages.Died | None = None
        # What another server is told again: what this run has said without waiting, and the questions, outermost first.
        self._said: list[tuple[RunId, list[Buffer]]] = []  # with the path of what that ends
        self._asked: list[Record] = []
        self._requests = 0
        #: Counts the events at which variables may have changed: begins of runs, nested ones too, and begins and ends
        #: of waits for anything but bytes.
        self.waits = 0
        # Of the run under way, by merge_call, the last nested run that was taken: another holder of the same token
        # sends them once more.
        self._nested: dict[RunId, int] = {}
        interrupts.attend_to(self.is_cancelled, self._fetch_cancel)

    def next_work(self) -> tuple[bytes, Forget | Prepare | Run]:
        """The controller's next record to act on, and the controller's identity."""
        self._run = None
        while not self._may_begin():
            # What the controller sends behind a step that is not over waits for it.
            received = self.link.receive(None, self._step[0] if self._step else None)
            if received is not None:
                self._sort(*received)
        return self._work.popleft()

    def _may_begin(self) -> bool:
        """Whether there is work and its time has come. Steps of a series that has failed are dropped: variables are
        read without asking, so a step that begins must know that the one before it is committed."""
        while self._work:
            sender, work = self._work[0]
            if not isinstance(work, Run) or not work.series:
                return True
            if self._failed != (sender, work.series):
                return self._step is None or (self._step[0], self._step[1].series) != (sender, work.series)
            _log.debug("run %s is dropped: a step before it failed", path_text(work.run))
            self._work.popleft()
        return False

    def begin_run(self, controller: bytes, run: Run) -> None:
        """A run of the controller begins, so the one before it is over."""
        self.waits += 1
        self._run = (controller, run.run)
        self._step = (controller, run) if run.series else None
        self._unclaimed.clear()
        self._said.clear()
        self._nested.clear()
        if not self.is_cancelled():  # else its SIGINT may still be on its way: a step can be cancelled before it begins
            self._interrupts.begin_run()

    @property
    def run_under_way(self) -> RunId | None:
        """The controller's run that is carried out now."""
        return self._run[1] if self._run is not None else None

    @property
    def client(self) -> str:
        """Whose run is carried out now: as the client calls itself."""
        return self._run[0][1:].decode(errors="replace") if self._run is not None else ""

    def is_cancelled(self) -> bool:
        """Whether the controller has given up the run under way."""
        if self._run is not None and self._run[0] == self._left:
            return True
        if self._cancelled is None or self._run is None:
            return False
        (sender, cancel), (controller, run) = self._cancelled, self._run
        if sender != controller or len(cancel.run) > 1:
            return False
        return cancel.run[0] <= run[0] <= cancel.run[0] + cancel.later

    def next_request(self) -> int:
        """A number for a request to the server, to know its answer by."""
        self._requests += 1
        return self._requests

    def say(self, path: RunId, kind: type[Record], *values: Any) -> None:
        """Send ``kind(*values)`` to the server, which does not answer it: what ends the run, or the merge_call, that
        ``path`` is. Raises LocalProtocolError where it is too large to travel."""
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("send %.300r", kind(*values))
        parts = encode_values(kind, values)
        self.link.send_server_parts(parts)
        self._said.append((path, parts))

    def is_over(self, path: RunId) -> None:
        """A nested run, or a merge_call, and those before it at the same place are over: the server has heard all that
        was said of them."""
        depth = len(path)

        def is_heard(where: RunId) -> bool:
            return len(where) >= depth and where[: depth - 1] == path[:-1] and where[depth - 1] <= path[-1]

        self._said = [(where, parts) for where, parts in self._said if not is_heard(where)]

    def _is_taken(self, run: RunId) -> bool:
        return run[-1] <= self._nested.get(run[:-1], -1)

    def wait(
        self,
        what: str,
        wanted: Callable[[Record], T | None],
        merge_point: tuple[RunId, int] | None = None,
        asked: Record | None = None,
    ) -> T:
        """What ``wanted`` makes of the first answer of the server of which it makes something (it may raise). ``asked``
        is the question, which has been sent.

        At a ``merge_point`` (run, k), the runs nested in it are carried out meanwhile. Raises KeyboardInterrupt where
        the run is cancelled and ReplicaLostError where the server has died. ``what`` names the wait.
        """
        self.waits += 1
        with self._interrupts.own_code(), self._asking(asked):  # what is half-done here must not be torn apart
            found = self._wait(what, wanted, merge_point)
        self.waits += 1
        if merge_point is not None:
            run, k = merge_point
            self.is_over((*run, k))
            for point in [each for each in self._nested if each[:-1] == run and each[-1] < k]:
                del self._nested[point]
        return found

    def wait_for_bytes(self, what: str, wanted: Callable[[Record], T | None], asked: Record) -> T:
        """As :meth:`wait`, for what another process would have read or written without asking: a run that is cancelled
        meanwhile goes on to its next wait."""
        with self._interrupts.own_code(), self._asking(asked):
            return self._wait(what, wanted, None, heeds_cancel=False)

    @contextmanager
    def _asking(self, asked: Record | None) -> Iterator[None]:
        if asked is not None:
            self._asked.append(asked)
        try:
            yield
        finally:
            if asked is not None:
                self._asked.pop()

    def _wait(
        self,
        what: str,
        wanted: Callable[[Record], T | None],
        merge_point: tuple[RunId, int] | None,
        *,
        heeds_cancel: bool = True,
    ) -> T:
        _log.debug("waiting for %s", what)
        if (found := self._claim(wanted)) is not None:
            return found
        started = time.monotonic()
        while True:
            if heeds_cancel and self.is_cancelled():
                raise KeyboardInterrupt
            if self._dead_server is not None:
                died = self._dead_server
                raise ReplicaLostError(f"the server (pid {died.pid}) ended by {died.cause} during {what}")
            received = self.link.receive(_NAME_WAIT_EVERY)
            if received is None:
                _log.info("waiting %.0f s for %s", time.monotonic() - started, what)
                continue
            sender, record = received
            if sender == SERVER:
                self._keep_answer(record)
                if (found := self._claim(wanted)) is not None:
                    return found
            elif sender == COLLEAGUE and isinstance(record, messages.Refused):
                raise PeerProtocolError(f"another worker refuses a nested run: {record.error.message}")
            elif isinstance(record, Run) and len(record.run) > 1 and not self._is_taken(record.run):
                if merge_point is None or sender[:1] != b"t" or record.run[:-1] != (*merge_point[0], merge_point[1]):
                    self._refuse(sender, record, "a nested run is taken only while its merge_call waits here")
                else:
                    self._nested[record.run[:-1]] = record.run[-1]
                    self.is_over((*record.run[:-1], record.run[-1] - 1))
                    self.waits += 1
                    self._execute(sender, record)
                    if (found := self._claim(wanted)) is not None:  # it came while the nested run waited
                        return found
            else:
                self._sort(sender, record)

    def _claim(self, wanted: Callable[[Record], T | None]) -> T | None:
        """Try the answers nobody has claimed. One that a nested wait leaves may be for the wait around it."""
        for record in list(self._unclaimed):
            try:
                found = wanted(record)
            except BaseException:  # what the answer says, a replica's KeyboardInterrupt too: it has been claimed
                self._unclaimed.remove(record)
                raise
            if found is not None:
                self._unclaimed.remove(record)
                return found
        return None

    def _sort(self, sender: bytes, record: Record) -> None:
        """Put away a record for which nobody waits."""
        if sender == SERVER:
            if isinstance(record, messages.StepFinished) and self._step and record.run == self._step[1].run:
                sender, step = self._step
                self._step, self._failed = None, (sender, step.series) if record.failed else self._failed
                self._said.clear()
            elif not self._is_for_worker(record):
                _log.debug("nobody waits for %.300r", record)
        elif sender == SUPERVISOR:
            if isinstance(record, messages.Died) and record.role == "server" and not record.restarts:
                self._dead_server = record
            elif isinstance(record, messages.ClientGone):
                self._left = b"c" + record.client.encode()
                self._work = deque(work for work in self._work if work[0] != self._left)
                self._note_cancel()
            elif isinstance(record, messages.Serving):
                for _, parts in self._said:
                    self.link.send_server_parts(parts)
                for asked in self._asked:
                    self.link.send_server(asked)
        elif sender[:1] == b"c" and isinstance(record, messages.Cancel):
            self._cancelled = (sender, record)
            self._note_cancel()
        elif sender[:1] == b"c" and (
            isinstance(record, Forget | Prepare) or (isinstance(record, Run) and len(record.run) == 1)
        ):
            if sender != self._left:
                self._work.append((sender, record))
        elif isinstance(record, Run) and self._is_taken(record.run):
            _log.debug("run %s was taken already", path_text(record.run))
        elif isinstance(record, Run):
            self._refuse(sender, record, "runs come from the controller, nested ones from the holder of a token")
        else:
            self._refuse(sender, record, "a worker takes Prepare, Run, Cancel and Forget")

    def _note_cancel(self) -> None:
        self._cancels += 1
        self._interrupts.note_cancel()

    def _keep_answer(self, record: Record) -> None:
        """Put away what the server says for whoever waits for it."""
        if not self._is_for_worker(record):
            self._unclaimed.append(record)

    def _is_for_worker(self, record: Record) -> bool:
        """Whether the server speaks to the worker itself and not to whoever waits. Does not return where it says that
        another has taken this worker's place."""
        if isinstance(record, messages.Registered | messages.WorkerRestarted):
            self.hear_of_workers(record)
            return True
        if isinstance(record, messages.Refused) and record.error.exception == _FENCED:
            self.link.give_up(record.error.message)
        return False

    def _refuse(self, sender: bytes, record: Record, why: str) -> None:
        what = f"run {path_text(record.run)}" if isinstance(record, Run) else f"a {type(record).__name__}"
        _log.warning("refused %s of peer %r: %s", what, sender, why)
        if sender not in (SERVER, SUPERVISOR, COLLEAGUE):
            refused = error_of(PeerProtocolError(f"{what} is refused: {why}"))
            self.link.send_peer(sender, messages.Refused(0, refused))

    def _fetch_cancel(self, timeout: float) -> None:
        """Take in what has arrived until a Cancel is among it. Called between two steps of the user's code."""
        deadline = time.monotonic() + timeout
        before = self._cancels
        while self._cancels == before:
            received = self.link.receive(max(0.0, deadline - time.monotonic()))
            if received is None:
                return
            if received[0] == SERVER:
                self._keep_answer(received[1])
            else:
                self._sort(*received)


def _ignored(record: messages.Registered | messages.WorkerRestarted) -> None:
    pass


def path_text(run: RunId) -> str:
    """A run as text, e.g. ``5`` or ``5.2.0``."""
    return ".".join(map(str, run))
