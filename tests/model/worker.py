"""A worker: carries out runs, and says a Return by a mark where it differs from a base in its run and value only."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial

from tests.model.marks import Bases, Body, Mailbox
from tests.model.records import (
    Accepted,
    Answer,
    Ask,
    Cancel,
    Dropped,
    Gradient,
    Introduce,
    Left,
    Offer,
    Record,
    Register,
    Registered,
    Return,
    Run,
    Serving,
    StepFinished,
)
from tests.model.world import SERVER, SUPERVISOR, Action, World, worker_name

#: After a Return that is no base: no number of records equals it.
_NEVER = -1


class Worker:
    """One incarnation of one worker."""

    def __init__(self, world: World, replica: int, incarnation: int) -> None:
        self.world, self.replica, self.incarnation = world, replica, incarnation
        self.rules = world.rules
        self.name = worker_name(replica, incarnation)
        self.is_registered = False
        self.queue: deque[Run] = deque()
        self.under_way: Run | None = None
        self.doing: Iterator[str] | None = None
        # The last step that may not be over, the series that failed last, the clients that may send runs and those that
        # have left, what a new server is told again.
        self.step: Run | None = None
        self.failed_series: tuple[str, int] | None = None
        self.cancelled: tuple[str, Cancel] | None = None
        self.known: set[str] = set()
        self.gone: set[str] = set()
        self.said: Return | None = None
        self.question: Ask | None = None
        self.answer: Answer | None = None
        # The mailbox that both ends use, and the number of the one that is offered.
        self.box: Mailbox | None = None
        self.offered = -1
        # As in marked_returns: the bases and their client; how many records the server was sent, and how many up to the
        # last Return; whether that one was acted on.
        self.bases, self.client = Bases(), ""
        self.sent, self.sent_then, self.is_taken = 0, _NEVER, False
        #: Only where Died does not mean that the process is reaped: it goes on with its run, and hears nothing.
        self.is_zombie = False
        self._next_store = Action(self.name, f"{self.name} goes on", self._go)
        world.open_inbox(self.name)
        self._offer()
        self._tell(Register(replica, incarnation))

    def actions(self) -> list[Action]:
        if self.doing is not None and self.question is None:
            return [self._next_store]
        if self.is_zombie:
            return []
        found = [
            Action(
                {SUPERVISOR: f"notices of {self.name}", SERVER: self.name}.get(sender, f"mail of {sender}"),
                f"{self.name} hears {sender}",
                partial(self._hear, sender),
            )
            for sender in self.world.mail(self.name)
            if self._may_hear(sender)
        ]
        if self._has_mark:
            found.append(Action(self.name, f"{self.name} hears a mark", self._hear_mark))
        if self.doing is not None:
            if self.answer is not None or self._is_cancelled(self.under_way):
                found.append(self._next_store)
            return found
        if self.queue and self.is_registered and self._may_begin(self.queue[0]):
            found.append(Action(self.name, f"{self.name} begins {self.queue[0].run}", self._begin))
        return found

    def lose_mailbox(self) -> None:
        """A message in the mailbox is damaged: it is left, and everything goes elsewhere from now on."""
        if self.box is not None and self.doing is None:
            self.doing = self._leave(self.box)

    def _leave(self, box: Mailbox) -> Iterator[str]:
        box.to_worker.left = True
        yield "LEFT"
        if box.to_worker.is_new:
            self._hear_mark()
        self.box = None
        yield "left"

    @property
    def _has_mark(self) -> bool:
        return self.box is not None and self.box.to_worker.is_new

    def _may_hear(self, sender: str) -> bool:
        """A mark comes before the messages of its sender, and the mail of a client after its introduction."""
        if sender == SERVER:
            return not self._has_mark
        return sender == SUPERVISOR or sender in self.known or not self.rules.worker_knows_clients

    def _go(self) -> None:
        assert self.doing is not None
        if next(self.doing, None) is None:
            self.doing = self.under_way = None
            self._confirm_gone()

    def _tell(self, record: Record) -> None:
        self.sent += 1
        self.world.send(self.name, SERVER, record)

    def _offer(self) -> None:
        self.world.mailboxes.append(Mailbox())
        self.box, self.offered = None, len(self.world.mailboxes) - 1
        self._tell(Offer(self.offered))

    # --- a run --------------------------------------------------------------------------------------------------------

    def _may_begin(self, run: Run) -> bool:
        """Variables are read without asking, so the step before of the series must be over."""
        step = self.step
        is_next = step is not None and run.series > 0 and (step.client, step.series) == (run.client, run.series)
        return not is_next or not self.rules.step_waits

    def _begin(self) -> None:
        run = self.queue.popleft()
        self.step = run if run.series else None
        self.said, self.answer, self.under_way = None, None, run
        self.doing = self._carry_out(run)

    def _carry_out(self, run: Run) -> Iterator[str]:
        memory, replica = self.world.memory, self.replica
        if self._is_cancelled(run):
            self._say_in_full(run, failed=True)
            yield "Return"
            return
        read = tuple(map(len, memory.pieces))
        yield "variables read"
        memory.gradients[replica] = None
        yield "half of the gradients"
        memory.gradients[replica] = Gradient(run.client, run.run, replica, run.argument, read)
        yield "gradients"
        failed = run.kind == "fail" and replica == 1
        if run.kind == "ask":
            self.question = Ask(run.run, run.series, run.client, replica, self.incarnation)
            self._tell(self.question)
            yield "Ask"
            self.question = None
            failed = self.answer is None or self.answer.failed
        base = None if failed or run.kind != "plain" else self._base(run)
        if base is not None and self.box is not None and not self.box.to_server.left:
            yield from self._mark(run, base, self.box)
        else:
            self._say_in_full(run, failed=failed)
            yield "Return"

    def _base(self, run: Run) -> Return | None:
        """The base of the mark that says the Return of ``run``. None if it has to be said in full."""
        if run.client != self.client and self.rules.bases_are_of_their_client:
            return None
        if (not self.is_taken or self.sent != self.sent_then) and self.rules.mark_waits_until_all_is_taken:
            return None
        return self.bases.find(run.series, run.function)

    def _mark(self, run: Run, base: Return, box: Mailbox) -> Iterator[str]:
        lane, rules = box.to_server, self.rules
        if not rules.body_before_mark:
            lane.mark = run.run
            yield "MARK"
        lane.body = Body(base.run, run.argument)
        yield "BODY"
        if rules.body_before_mark:
            lane.mark = run.run
            yield "MARK"
        if lane.left and rules.left_mark_is_said_again:
            self._say_in_full(run, failed=False)
            return
        self.is_taken = False
        self.said = base._replace(run=run.run, value=run.argument)

    def _say_in_full(self, run: Run, *, failed: bool) -> None:
        value = 0 if failed else run.argument
        who = (run.client, self.replica, self.incarnation)
        self.said = Return(run.run, run.series, *who, run.function, run.kind, failed, value)
        self._tell(self.said)
        if self.client != run.client:
            self.client = run.client
            if self.rules.bases_are_of_their_client:
                self.bases = Bases()
        self.sent_then = self.sent if self.bases.keep(self.said) else _NEVER
        self.is_taken = False

    def _is_cancelled(self, run: Run | None) -> bool:
        if run is None or run.client in self.gone:
            return run is not None
        if self.cancelled is None or self.cancelled[0] != run.client:
            return False
        cancel = self.cancelled[1]
        return cancel.run <= run.run <= cancel.run + cancel.later

    # --- what it hears ------------------------------------------------------------------------------------------------

    def _hear_mark(self) -> None:
        assert self.box is not None
        run, _ = self.box.to_worker.take()
        self._finish_step(StepFinished(run, failed=False))

    def _hear(self, sender: str) -> None:
        record = self.world.take(self.name, sender)
        match record:
            case Run():
                self._take(record)
            case Cancel():
                self.cancelled = sender, record
            case StepFinished():
                self._finish_step(record)
            case Answer():
                if self.question is not None and self.question.run == record.run:
                    self.answer = record
            case Registered():
                self.is_registered = True
                self._confirm_gone()
            case Accepted():
                if record.mailbox == self.offered:
                    self.box, self.offered = self.world.mailboxes[record.mailbox], -1
            case Introduce():
                self.known.add(record.client)
            case Left():
                self.gone.add(record.client)
                self.queue = deque(run for run in self.queue if run.client not in self.gone)
                self._confirm_gone()
            case Serving():
                self._server_serves()

    def _take(self, run: Run) -> None:
        if run.client in self.gone or (run.client, run.series) == self.failed_series:
            return
        self.failed_series = None
        if not run.series and self.under_way is None:
            self.is_taken = True  # the controller has the results of all runs before
        self.queue.append(run)

    def _finish_step(self, finished: StepFinished) -> None:
        step = self.step
        if step is None or step.run != finished.run:
            return
        self.step = self.said = None
        self.is_taken = True
        if finished.failed:
            self.failed_series = failed = step.client, step.series
            self.queue = deque(run for run in self.queue if (run.client, run.series) != failed)
            if self.queue:
                self.failed_series = None

    def _server_serves(self) -> None:
        self._offer()
        if not self.is_registered:
            self._tell(Register(self.replica, self.incarnation))
            return
        if self.rules.new_server_has_no_bases:
            self.bases = Bases()
        if self.said is not None and self.rules.last_return_is_said_again:
            self._tell(self.said)
        if self.question is not None:
            self._tell(self.question)
        self._confirm_gone()

    def _confirm_gone(self) -> None:
        if self.is_registered and self.under_way is None:
            for client in sorted(self.gone):
                self._tell(Dropped(client, self.replica))
