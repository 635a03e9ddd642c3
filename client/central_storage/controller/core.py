"""What the script's side of the conversation decides, without a socket, a clock or a thread.

A :class:`ControllerCore` is told what happens: the script asks something or sends a run, a record comes, Ctrl-C is
pressed, time passes. It answers with commands (``commands.py``), which its owner (``session.py``) carries out in order.
``now`` is in seconds since any fixed moment.

The script waits for one thing at a time (``waits.py``). But while it reads the results of a run it may have to ask the
server something, so waits form a stack, and what is heard is for whichever of them it fits.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from central_storage.core.pipeline import Sent, Series, made_sent
from cs_proto import messages
from cs_proto.codec import RunEncoder
from cs_proto.errors import ReplicaLostError
from cs_proto.failures import last_lines
from cs_proto.function_cache import HeldFunctions
from cs_proto.messages import Counters, Died, Refused, Run, RunFinished, RunId, Worker
from cs_proto.pace import NAME_AFTER, Pace
from cs_proto.peers import SERVER
from cs_proto.records import Buffer, Record, replace

from .commands import (
    Command,
    Connect,
    Deliver,
    End,
    Fail,
    Interrupt,
    NameWait,
    OfferMailbox,
    Post,
    Raise,
    Refuse,
    worker_name,
)
from .liveness import Liveness
from .waits import Question, Settling, Wait, number_of

__all__ = ["Beginning", "ControllerCore"]

# After this long the server is told of a wait for a run.
_LATE_AFTER = 1.0
# After Ctrl-C a wait is named so soon, once the server has had time to say for whom it is.
_AFTER_CTRL_C = 1.0
# The server says about every ten seconds whom a run waits for; a server that has not for so long may be stopped.
_WORDS_HOLD = 25.0


class Beginning(NamedTuple):
    """The numbers of the next run: its ``step`` among the runs of the function of this ``name``, the first run of its
    ``series`` (0: it is on its own), the part of the arena for its arguments and into how many it is divided. By
    replica: whether the worker ``lacks`` the function, and which functions it ``holds`` then. ``function`` is its
    digest, and whether it is frozen."""

    run: RunId
    name: str
    step: int
    series: int
    lookahead: int
    part: int
    parts: int
    lacks: list[bool]
    holds: list[HeldFunctions]
    function: tuple[bytes, bool]


_made_beginning = partial(tuple.__new__, Beginning)  # as made_sent


class ControllerCore:
    """One controller's conversation with its service, from Hello on."""

    def __init__(self, client: str, pid: int, *, in_process: bool = False, name_after: float = NAME_AFTER) -> None:
        """``client`` is what the controller calls itself. ``in_process``: the workers are threads of this process. A
        wait is named after ``name_after`` seconds."""
        self._answer_pace, self._run_pace = Pace(name_after), Pace(name_after)
        self._hello = messages.Hello(messages.PROTOCOL, "controller", client, pid)
        self._in_process = in_process
        self._sequence = 0
        self._waits: list[Wait] = []  # innermost last
        #: A write that Ctrl-C left unanswered, and that :meth:`finish_write` waits for.
        self.left_off: Question | None = None
        self._deaths = Liveness()
        #: The workers that died for good. With one no run can begin, and ``refuse_lost`` raises ReplicaLostError.
        self.lost, self.refuse_lost = self._deaths.died, self._deaths.refuse
        self._server_pid = 0
        self._welcome: messages.Welcome | None = None
        #: The workers in replica order, each as the latest incarnation that the server has named.
        self.workers: tuple[Worker, ...] = ()
        self._peers: list[bytes] = []
        # What each worker holds; and the function of the last run, which needs no further account in the next one.
        self._held: list[HeldFunctions] = []
        self._held_last: tuple[bytes, bool] | None = None
        self._lacks: list[bool] = []  # whether each worker lacks that one
        self._encoder = RunEncoder()
        self._prepared: messages.Prepare | None = None  # what workers were told last, and from what it was made
        #: The ``sys.path`` and the directory of the script that the workers know; None before they do.
        self.where: tuple[list[str], str] | None = None
        #: The number of the last run that was begun here or by an earlier controller; 0 if there was none.
        self.run = 0
        #: The runs by the name of their function, continued from a restored checkpoint, without steps that never began.
        self.steps: Counter[str] = Counter()
        #: The series of which runs may be unanswered.
        self.latest: Series | None = None
        self._early: dict[RunId, RunFinished] = {}  # what came of runs that has not been read yet
        # What another server is told again, as long as the run is unanswered.
        self._told: list[messages.Resent | messages.WaitReport] = []
        self._awaited_for: tuple[messages.WaitingFor, float] | None = None  # as the server said last, and when

    # --- what the script does -----------------------------------------------------------------------------------------

    def hello(self, now: float) -> tuple[Question, list[Command]]:
        """Say hello, and wait for the Welcome."""
        question = Question(self._hello, 0, messages.Welcome, now, self._answer_pace)
        self._waits.append(question)
        return question, [Post(SERVER, self._hello)]

    def next_sequence(self) -> int:
        """The number of the next request."""
        self._sequence += 1
        return self._sequence

    def ask(self, request: Record, kind: type[Record], now: float) -> tuple[Question, list[Command]]:
        """Ask the server, and wait for its answer, a ``kind``."""
        question = Question(request, number_of(request), kind, now, self._answer_pace)
        question.asked = (request,)
        self._waits.append(question)
        return question, [Post(SERVER, request)]

    def finish_write(self, now: float) -> Question | None:
        """Wait for the answer to a write that Ctrl-C has left: until it comes the server may read what the write names,
        and takes no other. None if there is no such write."""
        question, self.left_off = self.left_off, None
        if question is not None:
            question.restart(now)
            self._waits.append(question)
        return question

    def forget_functions(self, digests: Sequence[bytes]) -> list[Command]:
        """Nobody runs these frozen functions again, and no run is unanswered: the workers forget them."""
        self._now_hold([held.without(digests) for held in self._held])
        return self._to_workers(messages.Forget((), functions=tuple(digests)))

    def forget_write(self) -> None:
        """Do not wait for the answer to a write that Ctrl-C has left."""
        self.left_off = None

    def prepare(self, path: list[str], directory: str) -> list[Command]:
        """Tell the workers where the script lives, if that has changed: its ``sys.path`` and directory."""
        if self._in_process or self.where == (path, directory):
            return []
        self.where = ([*path], directory)
        self._prepared = messages.Prepare(tuple(map(str, path)), directory)
        return self._to_workers(self._prepared)

    def next_run(self, series: Series, name: str, digest: bytes, frozen: bool) -> Beginning:
        """The numbers of the next run, of the function ``digest``. Nothing is counted before :meth:`begin_run`."""
        run, parts, function = self.run + 1, series.lookahead + 1, (digest, frozen)
        first = series.number or run
        lacks, holds = self._lacks, self._held
        if function != self._held_last:
            touched = [held.touch(digest, frozen) for held in holds]
            lacks, holds = [not is_held for is_held, _ in touched], [after for _, after in touched]
        number = first if series.lookahead else 0
        part = (run - first) % parts
        step = self.steps[name]
        return _made_beginning(((run,), name, step, number, series.lookahead, part, parts, lacks, holds, function))

    def begin_run(
        self,
        series: Series,
        beginning: Beginning,
        said: list[tuple[Any, ...]],
        function: bytes,
        arguments: Sequence[tuple[bytes, tuple[memoryview, ...]]],
    ) -> list[tuple[bytes, list[Buffer]]]:
        """Begin the run. Returns the workers and the messages for them. ``said`` has the values of each replica's Run;
        the pickled ``function`` and the pickled ``arguments`` are kept until the run is over. Raises LocalProtocolError
        where one of the messages is too large, and then no replica begins."""
        encoded = self._encoder.encode(said)
        held = self._held if series.lookahead else []
        sent = made_sent((beginning.run, beginning.name, said, function, arguments, held))
        self.run = beginning.run[0]
        if beginning.function != self._held_last:
            self._now_hold(beginning.holds, beginning.function)
        self.steps[beginning.name] = beginning.step + 1
        series.number = series.number or self.run
        series.unanswered.append(sent)
        self.latest = series
        return [*zip(self._peers, encoded, strict=True)]

    def unsettled(self, series: Series | None) -> Series | None:
        """The steps for which an operation has to wait first, unless it is one of the same ``series``. None while
        results are read, which may need operations."""
        latest = self.latest
        if latest is None or latest is series or not latest.unanswered:
            return None
        return None if any(isinstance(wait, Settling) and wait.is_reading for wait in self._waits) else latest

    @property
    def has_unanswered(self) -> bool:
        """Whether runs are unanswered, also the one whose results are being read: the server may refuse writes."""
        return self.latest is not None and bool(self.latest.unanswered)

    def settle(self, series: Series, left: int, now: float, *, cancel: bool = False) -> tuple[Settling, list[Command]]:
        """Wait until at most ``left`` runs of ``series`` are unanswered; or ``cancel`` them and wait for all."""
        wait = Settling(series, left, not self._in_process, now, self._run_pace)
        self._waits.append(wait)
        if len(series.unanswered) > left and not cancel and not self._early:
            return wait, []
        if not cancel or not series.unanswered:
            return wait, self._advance(wait)
        return wait, [*self._cancel(wait), *self._advance(wait)]

    def delivered(self, outcome: list[Any] | BaseException, now: float) -> list[Command]:
        """What came of the first unanswered run has been read: the results, or what to raise in their place."""
        wait = self._waits[-1]
        assert type(wait) is Settling
        series = wait.series
        wait.is_reading = False
        sent = series.unanswered[0]
        if self._early.pop(sent.run).error is None:
            series.answered(outcome)
            if not series.unanswered:
                self.latest = None
        else:
            assert isinstance(outcome, BaseException)
            dropped = self._drop(series, outcome)
            if dropped:  # workers drop them, with the functions that these brought
                self._now_hold(dropped[0].held)
        if self._told:
            unanswered = [sent.run for sent in series.unanswered]
            self._told = [told for told in self._told if told.run in unanswered]
        if not wait.cancelled and len(series.unanswered) <= wait.left:
            wait.is_over = True
            return []
        wait.restart(now)
        return self._advance(wait)

    def fail(self, wait: Settling, error: BaseException) -> list[Command]:
        """The runs of ``wait`` are given up: the first of them fails with ``error``, the rest never begin."""
        if wait.series.unanswered:
            self._drop(wait.series, error)
        self._told.clear()
        return self._advance(wait)

    def leave(self, wait: Wait) -> None:
        """``wait`` is over, or the script does not wait any longer."""
        if self._waits[-1] is wait:
            del self._waits[-1]
        else:
            del self._waits[self._waits.index(wait) :]

    # --- what happens while the script waits --------------------------------------------------------------------------

    def pause(self, now: float) -> float:
        """Seconds until :meth:`tick` has something to do if nothing is heard; 0 if it has now."""
        wait = self._waits[-1]
        if type(wait) is not Settling:
            due = wait.due
        elif self._early and wait.series.unanswered[0].run in self._early:
            return 0.0
        else:
            due = wait.started + _LATE_AFTER if wait.is_unreported else wait.due
            if due > self._deaths.deadline:
                due = self._deaths.deadline
        return due - now if due > now else 0.0

    def tick(self, now: float) -> list[Command]:
        """Time has passed."""
        wait = self._waits[-1]
        commands: list[Command] = []
        if isinstance(wait, Settling):
            if commands := self._advance(wait):
                return commands
            if self._deaths.deadline <= now:
                try:
                    self._deaths.refuse()
                except ReplicaLostError as error:
                    return self.fail(wait, error)
            if wait.is_unreported and now - wait.started >= _LATE_AFTER:
                wait.is_unreported = False
                series = wait.series.number if wait.series.lookahead else 0
                run = wait.series.unanswered[0].run
                commands.append(self._tell(messages.WaitReport(run, now - wait.started, series)))
        if wait.is_due(now):
            is_cancelled = isinstance(wait, Settling) and bool(wait.cancelled)
            what = wait.what(self._server_pid) + self._whom(now, is_cancelled)
            if isinstance(wait, Settling) and wait.cancelled:
                what += f"; press Ctrl-C{' again' * wait.is_after_ctrl_c} to end the service"
            commands.append(NameWait(now - wait.started, what, wait.is_run))
        return commands

    def interrupt(self, now: float, raised: Exception | None = None) -> list[Command]:
        """Ctrl-C. It leaves a question; it cancels runs and is raised when they are over; a second one ends the
        service, and the first one if runs are cancelled already. ``raised``: a handler of a signal has raised this,
        which cancels runs, too, but ends no service.

        The server hears of a Ctrl-C first, and the replicas when it has: if their interrupted returns came before the
        Cancel, it would commit what they agreed on.
        """
        wait = self._waits[-1]
        if not isinstance(wait, Settling):
            if isinstance(wait, Question) and hasattr(wait.request, "sequence"):
                self.left_off = wait
            return [Fail(KeyboardInterrupt)]
        if wait.cancelled and raised is None:
            why = "a second Ctrl-C shut it down" if wait.raised is None else "Ctrl-C shut it down"
            wait.raised = None
            return [End(why), Fail(KeyboardInterrupt)]
        if not wait.was_interrupted:
            wait.was_interrupted, wait.raised = True, raised
        if wait.cancelled:
            return []
        if not wait.series.unanswered:  # an operation of the handler has waited for the runs
            return self._advance(wait)
        wait.pace = Pace(_AFTER_CTRL_C)
        wait.restart(now)
        return self._cancel(wait)

    def hear(self, record: Record, now: float) -> list[Command]:
        """A record came, from the server, a worker or the supervisor."""
        if type(record) is RunFinished:
            for sent in self.latest.unanswered if self.latest is not None else ():
                if sent.run == record.run:
                    self._early[sent.run] = record
                    break
            wait = self._waits[-1] if self._waits else None
            return self._next(wait) if type(wait) is Settling and not wait.is_over else []
        if isinstance(record, messages.WorkerRestarted):
            return self._take_up(record)
        if isinstance(record, Died):
            return self._hear_death(record, now)
        if isinstance(record, messages.Serving):
            return self._server_serves()
        if isinstance(record, messages.WaitingFor):
            self._awaited_for = record, now
            return []
        if isinstance(record, messages.Welcome):
            self._server_pid = record.server_pid
            if self._welcome is None:
                self._welcome, self.workers, self.run = record, record.workers, record.last_run
                self._peers = [worker_name(worker.replica) for worker in record.workers]
                self._now_hold([HeldFunctions() for _ in record.workers])
                for worker in record.workers:
                    self._deaths.took_place(worker)
        return self._hear_answer(record, now)

    def _hear_answer(self, record: Record, now: float) -> list[Command]:
        for wait in self._waits:
            if isinstance(wait, Question) and wait.answers(record):
                wait.answer, wait.is_over = record, True
                if isinstance(wait.request, messages.Free) and isinstance(record, messages.Done):
                    asked = wait.request
                    return self._to_workers(messages.Forget(asked.variables, asked.optimizers, record.renamed))
                return []
            if isinstance(wait, Settling) and type(record) is Counters and record.request == wait.cancelled:
                wait.workers_know = True
                wait.restart(now)
                alive = [worker.replica for worker in self.workers if self._deaths.has_worker(worker.replica)]
                return [*self._to_workers(wait.cancel), *map(Interrupt, alive)]
        if isinstance(record, Refused) and record.number == 0:  # to a message that has no number of its own
            return [Refuse(record.error)]
        return []

    def _hear_death(self, died: Died, now: float) -> list[Command]:
        self._deaths.hear(died, self.workers, now)
        if died.role != "server" or died.restarts:
            return []
        cause = f"the server (pid {died.pid}) ended by {died.cause}"
        why = (
            f"{cause} and is not started again (server_recovery is off, max_restarts are used up, or its run directory "
            f"was removed); its variables are gone with it. Make a new CentralStorageStrategy{last_lines(died)}"
        )
        return [End(cause), Fail(ReplicaLostError, why)]

    def _server_serves(self) -> list[Command]:
        """Another server, which may not have heard what the one before it was told."""
        self._deaths.server_serves()
        again = (self._hello, *self._told, *self.asked)
        return [OfferMailbox(), *(Post(SERVER, record) for record in again)]

    def _take_up(self, restarted: messages.WorkerRestarted) -> list[Command]:
        """A worker is in the place of one that died: send it what it has to carry out yet, from the run on that the
        server names. Arguments still lie where they were; it holds no function."""
        if self._welcome is None:
            return []  # the Welcome will name this worker
        worker = restarted.worker
        replica, name = worker.replica, self._peers[worker.replica]
        if worker.incarnation <= self.workers[replica].incarnation:
            return []
        self._deaths.took_place(worker)
        self.workers = (*self.workers[:replica], worker, *self.workers[replica + 1 :])
        commands: list[Command] = [Connect(worker)]
        if self._prepared is not None:
            commands.append(Post(name, self._prepared))
        holds, is_first = HeldFunctions(), True
        unanswered = self.latest.unanswered if self.latest is not None else deque[Sent]()
        for place, sent in enumerate(list(unanswered)):
            if sent.held:
                unanswered[place] = sent._replace(held=_replaced(sent.held, replica, holds))  # noqa: SLF001
            if sent.run < restarted.run:
                continue
            run = Run(*sent.said[replica])
            if is_first:
                commands.append(self._tell(messages.Resent(sent.run, replica, run.series)))
            is_first = False
            is_held, holds = holds.touch(run.digest, run.frozen)
            commands.append(Post(name, replace(run, function=None), None if is_held else sent.function))
        self._now_hold(_replaced(self._held, replica, holds))
        for wait in self._waits:
            if isinstance(wait, Settling) and wait.workers_know and wait.series.unanswered:
                commands += [Post(name, wait.cancel), Interrupt(replica)]
        return commands

    # --- what others may know -----------------------------------------------------------------------------------------

    @property
    def welcome(self) -> messages.Welcome:
        """What the server said at first."""
        assert self._welcome is not None
        return self._welcome

    @property
    def server_pid(self) -> int:
        """The process id of the server."""
        return self._server_pid

    @property
    def asked(self) -> list[Record]:
        """What another server would be asked again."""
        left_off = () if self.left_off is None else self.left_off.asked
        return [*left_off, *(record for wait in self._waits for record in wait.asked)]

    @property
    def last_death(self) -> Died | None:
        """The death that matters: the first for good, else the last."""
        return self._deaths.last

    def first_death(self) -> str:
        """The first death for good, in words."""
        return self._deaths.first()

    # --- parts --------------------------------------------------------------------------------------------------------

    def _advance(self, wait: Settling) -> list[Command]:
        """What follows now that more may be known of the runs of ``wait``."""
        unanswered = wait.series.unanswered
        if len(unanswered) <= (0 if wait.cancelled else wait.left):
            wait.is_over = True
            if wait.raised is not None:
                return [Raise(wait.raised)]
            return [Fail(KeyboardInterrupt)] if wait.was_interrupted else []
        return self._next(wait)

    def _next(self, wait: Settling) -> list[Command]:
        """Read the results of the first unanswered run of ``wait``, if they have come."""
        if wait.is_reading or (run := wait.series.unanswered[0].run) not in self._early:
            return []
        wait.is_reading = True
        return [Deliver(self._early[run])]

    def _drop(self, series: Series, error: BaseException) -> list[Sent]:
        """The first unanswered run has failed; the rest, which never begin."""
        dropped = series.failed(error)
        self.steps.subtract(sent.name for sent in dropped)  # later runs have the steps they have without these
        return dropped

    def _now_hold(self, held: list[HeldFunctions], last: tuple[bytes, bool] | None = None) -> None:
        """The workers hold these functions from now on. ``last`` is the function of the last run, which all of them
        hold; None if a worker may have lost it since."""
        self._held, self._held_last = held, last
        if len(self._lacks) != len(held):
            self._lacks = [False] * len(held)

    def _cancel(self, wait: Settling) -> list[Command]:
        """Tell the server to give up what is not over, and ask a question that it answers when it has heard."""
        wait.cancelled = self.next_sequence()
        wait.asked = (wait.cancel, messages.Statistics(wait.cancelled))
        return [Post(SERVER, record) for record in wait.asked]

    def _tell(self, record: messages.Resent | messages.WaitReport) -> Post:
        """Tell the server something about a run, and another in its place once more."""
        self._told.append(record)
        return Post(SERVER, record)

    def _to_workers(self, record: Record) -> list[Command]:
        return [Post(peer, record) for peer in self._peers]

    def _whom(self, now: float, is_cancelled: bool) -> str:
        """Of whom is known that a wait is for them, to end its name with."""
        restarts = self._deaths.restarts_named()
        unanswered = self.latest.unanswered if self.latest is not None else ()
        if not unanswered or self._in_process:
            return restarts
        said, when = self._awaited_for or (None, 0.0)
        if said is not None and said.run == unanswered[0].run and now - when < _WORDS_HOLD:
            return f": {said.whom}"
        if is_cancelled and now - self._waits[-1].started < _WORDS_HOLD:
            return restarts
        return restarts or f": the server (pid {self._server_pid}) does not say for whom; it may be stopped"


def _replaced(held: list[HeldFunctions], replica: int, holds: HeldFunctions) -> list[HeldFunctions]:
    """Another list, since runs share one."""
    return [*held[:replica], holds, *held[replica + 1 :]]
