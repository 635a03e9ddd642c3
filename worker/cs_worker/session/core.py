"""Decides what becomes of each record that a worker hears. It opens nothing, waits for nothing and asks no clock.

A worker first registers with the server and then serves one controller after the other. The controller's work is
queued while a run is under way. A step of a series waits until the server has said that the step before it is over.
The server's answers are kept until a wait claims them. A nested run is carried out only while this worker waits at
exactly the merge_call that the run belongs to. A server in the place of one that died is told again what it may not
have heard. Any other record is refused, or dropped if nobody needs an answer.

:class:`~cs_worker.session.conversation.Conversation` gives the records to :meth:`SessionCore.hear`, and carries out the
outputs in their order. It says when a run or a wait begins and ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from cs_proto import messages
from cs_proto.errors import Fenced, code_of
from cs_proto.frozen import frozen
from cs_proto.messages import Forget, Introduce, Prepare, Return, Run, RunId
from cs_proto.peers import HOLDER, SERVER, SUPERVISOR
from cs_proto.records import Record

from .marked_returns import MarkedReturns

__all__ = [
    "COLLEAGUE",
    "Drop",
    "Execute",
    "FailWait",
    "GiveUp",
    "NoteCancel",
    "NoteWorkers",
    "Output",
    "Refuse",
    "RefuseRegistration",
    "SendServer",
    "SendSupervisor",
    "SessionCore",
    "Work",
    "path_text",
]

T = TypeVar("T")

#: The sender of what another worker answers to this one, which holds a token.
COLLEAGUE = b"\0w"

_FENCED = code_of(Fenced)

#: What a controller sends to be acted on, in its order.
Work = Forget | Prepare | Run

# --- outputs ----------------------------------------------------------------------------------------------------------


@frozen
class SendServer:
    """Send this record to the server."""

    record: Record


@frozen
class SendSupervisor:
    """Send this record to the supervisor."""

    record: Record


@frozen
class Refuse:
    """Log that ``what`` of this peer is refused, and tell the peer why."""

    peer: bytes
    what: str
    why: str


@frozen
class Drop:
    """The record changes nothing. ``why`` is for the log."""

    sender: bytes
    record: Record
    why: str


@frozen
class NoteCancel:
    """A Cancel has arrived, or the controller has gone. Either comes with a SIGINT."""


@frozen
class NoteWorkers:
    """The server says which workers there are now, or which one waits for a nested run."""

    record: messages.Registered | messages.WorkerRestarted


@frozen
class Execute:
    """Carry out this nested run; then call :meth:`SessionCore.end_nested_run`."""

    holder: bytes
    run: Run


@frozen
class FailWait:
    """The innermost wait ends with a PeerProtocolError."""

    reason: str


@frozen
class RefuseRegistration:
    """The server does not register this worker."""

    reason: str


@frozen
class GiveUp:
    """End this process: another worker has its place."""

    reason: str


Output = (
    SendServer
    | SendSupervisor
    | Refuse
    | Drop
    | NoteCancel
    | NoteWorkers
    | Execute
    | FailWait
    | RefuseRegistration
    | GiveUp
)


# --- the core ---------------------------------------------------------------------------------------------------------


@frozen
class _Wait:
    """A wait for the server: the ``question`` that a new server is asked again, and the path of the merge_call whose
    nested runs are carried out meanwhile."""

    question: Record | None
    merge_point: RunId | None
    is_for_bytes: bool


class SessionCore:
    """The state of one worker's session."""

    def __init__(self, register: messages.Register, peers: Mapping[bytes, Introduce]) -> None:
        """``register`` is what the worker says to a server that does not know it. ``peers`` are the processes that the
        supervisor has introduced so far, by the senders as which records come from them."""
        #: The server's answer to ``register``; None as long as there is none.
        self.registered: messages.Registered | None = None
        #: The death of a server in whose place no other one comes.
        self.dead_server: messages.Died | None = None
        #: Counts the moments at which variables may have changed: a run or a nested run begins, or a wait for anything
        #: but bytes begins or ends.
        self.waits = 0
        #: The step that begins when the server has said that the step before it is over, if :meth:`next_work` has found
        #: one.
        self.waiting_step: Run | None = None
        #: The controller whose further steps need not wake this worker: the server's word comes before them.
        self.quiet_peer: bytes | None = None
        #: What the server has of this worker's Returns, so that a mark may say the next one.
        self.returns = MarkedReturns()
        self._register = register
        self._peers = peers
        self._work: deque[tuple[bytes, Work]] = deque()
        self._requests = 0
        # A run is known by its controller, too: the next one uses the numbers of runs of which the server never heard.
        self._run: tuple[bytes, RunId] | None = None
        self._cancelled: tuple[bytes, messages.Cancel] | None = None
        self._client = ""  # of the run under way
        self._gone_client = ""
        self._gone_controller = b""
        # The last step that began, until the server says that it is over; and the series that failed last, until the
        # controller sends another run: it has heard the end of all before, and may go on with the series if a server
        # that has forgotten a step took it as failed.
        self._step: tuple[bytes, Run] | None = None
        self._failed: tuple[bytes, int] | None = None
        # The waits that are under way, outermost first, and None for each nested run that is carried out in one.
        self._waiting: list[_Wait | None] = []
        self._unclaimed: list[Record] = []
        # What the server got without a question and may not have heard, with the path of the run or merge_call that
        # each ends. What was said by a mark is made into a record when another server needs it.
        self._said: list[tuple[RunId, Record | Callable[[], Record]]] = []
        # The last nested run that was taken at each merge_call of the run under way. If the holder of the token is
        # replaced, the next holder sends nested runs again.
        self._taken: dict[RunId, int] = {}

    # --- work ---------------------------------------------------------------------------------------------------------

    def next_work(self) -> tuple[bytes, Work] | None:
        """The controller's next record to act on, with the controller's identity; None if it has to wait."""
        self.waiting_step = None
        if not self._work:
            return None
        controller, work = self._work[0]
        if self._step is not None and isinstance(work, Run) and work.series:
            before, step = self._step
            if before == controller and step.series == work.series:
                # Variables are read without a question, so the step before must have been committed.
                self.waiting_step = work
                return None
        return self._work.popleft()

    def begin_run(self, controller: bytes, run: Run) -> None:
        """A run of the controller begins, so the run before it is over."""
        self.waits += 1
        self._run, self.returns.controller = (controller, run.run), controller
        self._client = self._peers[controller].client
        self._step, self.quiet_peer = ((controller, run), controller) if run.series else (None, None)
        self._unclaimed, self._said, self._taken = [], [], {}

    def end_run(self) -> list[Output]:
        """The run has returned, and its Return has been said."""
        controller = self._run[0] if self._run is not None else None
        self._run = None
        return self._confirm_gone() if controller == self._gone_controller else []

    def end_nested_run(self) -> None:
        """The run of the last :class:`Execute` has returned, and its Return has been said."""
        self._waiting.pop()

    @property
    def run_under_way(self) -> RunId | None:
        """The controller's run that is carried out now."""
        return self._run[1] if self._run is not None else None

    @property
    def client(self) -> str:
        """The name that the controller of the run under way gave itself."""
        return self._client if self._run is not None else ""

    def is_cancelled(self) -> bool:
        """Whether the controller has given up the run under way, or has gone."""
        if self._run is None:
            return False
        controller, run = self._run
        if controller == self._gone_controller:
            return True
        if self._cancelled is None:
            return False
        sender, cancel = self._cancelled
        if sender != controller or len(cancel.run) > 1:
            return False
        return cancel.run[0] <= run[0] <= cancel.run[0] + cancel.later

    # --- what the server is told --------------------------------------------------------------------------------------

    def next_request(self) -> int:
        """A number for a request to the server, to know its answer by."""
        self._requests += 1
        return self._requests

    def note_said(self, path: RunId, record: Record, sent: int) -> None:
        """The server was sent a record that it does not answer, which ends the run or the merge_call ``path``. It was
        the record number ``sent``."""
        self._said.append((path, record))
        if isinstance(record, Return) and self._run is not None:
            self.returns.said(record, sent)

    def note_marked(self, path: RunId, in_full: Callable[[], Return]) -> None:
        """A mark has said that the run ``path`` has returned. ``in_full`` makes the Return for which it stands."""
        self._said.append((path, in_full))

    def note_over(self, path: RunId) -> None:
        """The nested run or merge_call ``path`` is over, and so are those before it at the same place: the server has
        heard all that was said of them."""
        depth = len(path)

        def is_heard(said: RunId) -> bool:
            return len(said) >= depth and said[: depth - 1] == path[:-1] and said[depth - 1] <= path[-1]

        self._said = [(said, record) for said, record in self._said if not is_heard(said)]

    def server_serves(self) -> list[Output]:
        """A server serves that may not have heard what it has not answered: say it again."""
        if self.registered is None:
            return [SendServer(self._register)]
        questions = [wait.question for wait in self._waiting if wait is not None and wait.question is not None]
        self.returns.forget()
        in_full = [said if isinstance(said, Record) else said() for _, said in self._said]
        again = [SendServer(record) for record in (*in_full, *questions)]
        return [*again, *self._confirm_gone()]

    # --- waits --------------------------------------------------------------------------------------------------------

    def begin_wait(
        self,
        question: Record | None = None,
        merge_point: RunId | None = None,
        *,
        is_for_bytes: bool = False,
    ) -> None:
        """A wait for the server begins. Its ``question``, if any, has been sent. The runs that are nested in the
        merge_call ``merge_point`` are carried out meanwhile. A wait ``is_for_bytes`` if a process that maps the
        server's memory would not wait: nothing is committed meanwhile."""
        self.waits += not is_for_bytes
        self._waiting.append(_Wait(question, merge_point, is_for_bytes))

    def end_wait(self) -> None:
        """The innermost wait ends, with an answer or without one."""
        wait = self._waiting.pop()
        assert wait is not None
        self.waits += not wait.is_for_bytes

    def claim(self, wanted: Callable[[Record], T | None]) -> T | None:
        """The first result of ``wanted`` over the server's answers that nobody has claimed; None if none is wanted. An
        answer that a nested wait leaves may be for the wait around it. Raises what ``wanted`` raises, which claims the
        answer, too."""
        for number, record in enumerate(self._unclaimed):
            try:
                found = wanted(record)
            except BaseException:  # the error that the answer carries, a replica's KeyboardInterrupt or SystemExit too
                del self._unclaimed[number]
                raise
            if found is not None:
                del self._unclaimed[number]
                return found
        return None

    def leave_merge_call(self, point: RunId) -> None:
        """The merge_call ``point`` has its answer, so everything nested in it is over."""
        self.note_over(point)
        for earlier in [each for each in self._taken if each[:-1] == point[:-1] and each[-1] < point[-1]]:
            del self._taken[earlier]

    # --- what this worker hears ---------------------------------------------------------------------------------------

    def hear(self, sender: bytes, record: Record) -> list[Output]:
        """What follows from a record, in order."""
        if sender == SERVER:
            return self._hear_server(record) if self.registered is not None else self._hear_of_registration(record)
        if sender == SUPERVISOR:
            return self._hear_supervisor(record)
        if sender == COLLEAGUE:
            return self._hear_colleague(record)
        who = self._peers.get(sender)
        is_controller = who is not None and who.role == "controller"
        if type(record) is Run and (not is_controller or len(record.run) > 1):
            return self._hear_nested_run(sender, record)
        if is_controller:
            return self._hear_controller(sender, record)
        return _refuse(sender, record, "a worker accepts Prepare, Run, Cancel and Forget from a controller only")

    def _hear_of_registration(self, record: Record) -> list[Output]:
        if isinstance(record, messages.Refused):
            worker = self._register.worker
            name = f"w{worker.replica}.{worker.incarnation}"
            return [RefuseRegistration(f"the server refuses worker {name}: {record.error.message}")]
        if isinstance(record, messages.Registered):
            self.registered = record
            return [SendSupervisor(messages.Ready()), *self._confirm_gone()]
        return [Drop(SERVER, record, "this worker is not registered yet")]

    def _hear_server(self, record: Record) -> list[Output]:
        if isinstance(record, messages.StepFinished) and self._step is not None and record.run == self._step[1].run:
            finished, self._step, self.quiet_peer = self._step, None, None
            self._said.clear()
            self.returns.is_taken = True
            return self._fail_series(*finished) if record.failed else []
        if isinstance(record, messages.Registered | messages.WorkerRestarted):
            return [NoteWorkers(record)]
        if isinstance(record, messages.Refused) and record.error.exception == _FENCED:
            return [GiveUp(record.error.message)]
        if self._run is None and not self._waiting:
            return [Drop(SERVER, record, "nobody waits for it")]
        self._unclaimed.append(record)
        return []

    def _fail_series(self, controller: bytes, step: Run) -> list[Output]:
        """No later step begins of the series of ``step``, which has failed."""
        self._failed = (controller, step.series)
        dropped = self._drop_work(
            lambda sender, work: isinstance(work, Run) and (sender, work.series) == self._failed,
            "a step before it failed",
        )
        if any(isinstance(work, Run) for _, work in self._work):
            self._failed = None
        return dropped

    def _hear_supervisor(self, record: Record) -> list[Output]:
        if isinstance(record, messages.Died) and record.role == "server" and not record.restarts:
            self.dead_server = record
        elif isinstance(record, messages.Serving):
            return self.server_serves()
        elif isinstance(record, messages.ClientGone):
            self._gone_client = record.client
            self._gone_controller = next((n for n, who in self._peers.items() if who.client == record.client), b"")
            dropped = self._drop_work(lambda sender, work: sender == self._gone_controller, "its controller has gone")
            return [*dropped, NoteCancel(), *self._confirm_gone()]
        return []

    def _confirm_gone(self) -> list[Output]:
        """Tell the server that of the controller that has gone no other run is carried out here, once none is."""
        is_under_way = self._run is not None and self._run[0] == self._gone_controller
        if self.registered is None or not self._gone_client or is_under_way:
            return []
        return [SendServer(messages.ClientGone(self._gone_client))]

    def _hear_colleague(self, record: Record) -> list[Output]:
        if isinstance(record, messages.Refused) and self._is_waiting:
            return [FailWait(f"another worker refuses a nested run: {record.error.message}")]
        return _refuse(COLLEAGUE, record, "no nested run is waiting for it")

    def _hear_controller(self, controller: bytes, record: Record) -> list[Output]:
        if type(record) is messages.Cancel:
            self._cancelled = (controller, record)
            return [NoteCancel()]
        if type(record) is not Run and not isinstance(record, Work):
            return _refuse(
                controller, record, "a worker accepts Prepare, Run, Cancel and Forget from a controller only"
            )
        if controller == self._gone_controller:
            return [Drop(controller, record, "its controller has gone")]
        if type(record) is Run:
            if (controller, record.series) == self._failed:
                return [Drop(controller, record, "a step before it failed")]
            self._failed = None
            if not record.series and self._run is None:
                self.returns.is_taken = True
        self._work.append((controller, record))
        return []

    def _hear_nested_run(self, sender: bytes, run: Run) -> list[Output]:
        point, number = run.run[:-1], run.run[-1]
        if number <= self._taken.get(point, -1):
            return [Drop(sender, run, "it was taken already")]
        wait = self._waiting[-1] if self._waiting else None
        who = self._peers.get(sender)
        is_holder = who is not None and (who.role, who.rank) == ("worker", HOLDER)
        if not is_holder or wait is None or wait.merge_point != point:
            return _refuse(sender, run, "runs come from a controller, nested runs from the merge_call that waits here")
        self._taken[point] = number
        self.note_over((*point, number - 1))
        self.waits += 1
        self._waiting.append(None)
        return [Execute(sender, run)]

    @property
    def _is_waiting(self) -> bool:
        return bool(self._waiting) and self._waiting[-1] is not None

    def _drop_work(self, is_dropped: Callable[[bytes, Work], bool], why: str) -> list[Output]:
        """Take work out of the queue that will never be done."""
        dropped: list[Output] = [Drop(*entry, why) for entry in self._work if is_dropped(*entry)]
        self._work = deque(entry for entry in self._work if not is_dropped(*entry))
        return dropped


def _refuse(sender: bytes, record: Record, why: str) -> list[Output]:
    what = f"run {path_text(record.run)}" if isinstance(record, Run) else f"a {type(record).__name__}"
    return [Refuse(sender, what, why)]


def path_text(run: RunId) -> str:
    """A run as text.

    Examples:
        >>> path_text((5, 2, 0))
        '5.2.0'
    """
    return ".".join(map(str, run))
