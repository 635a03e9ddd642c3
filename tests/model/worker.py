"""A worker: carries out runs, and returns by its board where the return is as the last one that the server keeps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from tests.model.records import (
    Answer,
    Ask,
    Cancel,
    Dropped,
    Gradient,
    Left,
    Register,
    Registered,
    Return,
    Run,
    SayInFull,
    Serving,
    StepFinished,
)
from tests.model.world import SERVER, SUPERVISOR, Action, Board, World, worker_name


class Base(NamedTuple):
    """A full Return that the server may keep: its number, and its notes, for which the function stands."""

    number: int
    function: str
    run: int


class Worker:
    """One incarnation of one worker."""

    def __init__(self, world: World, replica: int, incarnation: int, board: Board) -> None:
        self.world, self.replica, self.incarnation = world, replica, incarnation
        self.name = worker_name(replica, incarnation)
        self.board = board
        self.is_registered = False
        self.queue: deque[Run] = deque()
        self.under_way: Run | None = None
        self.last: Run | None = None
        self.doing: Iterator[str] | None = None
        # As in today's session: the last step that may not be over, the series that failed last, clients that have
        # left, what a new server is told again.
        self.step: Run | None = None
        self.failed_series = 0
        self.finished = 0
        self.cancelled: Cancel | None = None
        self.gone: set[str] = set()
        self.said: Return | None = None
        self.question: Ask | None = None
        self.answer: Answer | None = None
        # The board.
        self.numbers = 0
        self.base: Base | None = None
        self.has_mailbox = True
        self.is_asleep = False
        #: Only where Died does not mean that the process is reaped: it goes on with its run, and hears nothing.
        self.is_zombie = False
        self._next_store = Action(self.name, f"{self.name} goes on", self._go)
        world.open_inbox(self.name)
        world.send(self.name, SERVER, Register(replica, incarnation))

    def actions(self) -> list[Action]:
        if self.doing is not None and self.question is None:
            return [self._next_store]
        if self.is_zombie:
            return []
        senders = self.world.mail(self.name)
        if not self.is_registered:
            senders = [sender for sender in senders if sender in (SERVER, SUPERVISOR)]
        if not self.world.rules.worker_hears_all_channels and self.queue and SUPERVISOR in senders:
            senders.remove(SUPERVISOR)
        found = [
            Action(
                {SUPERVISOR: f"notices of {self.name}", SERVER: self.name}.get(sender, f"mail of {sender}"),
                f"{self.name} hears {sender}",
                partial(self._hear, sender),
            )
            for sender in senders
        ]
        if self.doing is not None:
            if self.answer is not None or self._is_cancelled(self.under_way):
                found.append(self._next_store)
            return found
        if self.queue and not self.is_asleep:
            if self._may_begin(self.queue[0]):
                found.append(Action(self.name, f"{self.name} begins {self.queue[0].run}", self._begin))
            else:
                # The sleep word is stored, and COMMITTED is looked at once more behind a fence: one action.
                found.append(Action(self.name, f"{self.name} sleeps", self._sleep))
        return found

    def wake(self) -> None:
        """The doorbell of the server. It is a word of the mailbox, and rings for nobody without one."""
        if self.has_mailbox:
            self.is_asleep = False

    def lose_mailbox(self) -> None:
        """A message in the mailbox is damaged: sockets from now on."""
        self.has_mailbox = False

    def may_tick(self) -> bool:
        """Whether time can wake this worker."""
        return self.is_asleep and (self.has_mailbox or self.world.rules.sleep_is_bounded)

    def tick(self) -> None:
        """A second has passed."""
        self.is_asleep = False

    def _sleep(self) -> None:
        self.is_asleep = True

    def _go(self) -> None:
        assert self.doing is not None
        if next(self.doing, None) is None:
            self.doing = self.under_way = None
            self._confirm_gone()

    # --- a run --------------------------------------------------------------------------------------------------------

    def _may_begin(self, run: Run) -> bool:
        """Variables are read without asking, so the step before of the series must be over."""
        rules, committed = self.world.rules, self.world.memory.committed
        if not rules.predecessor_is_of_series:
            is_first = run.run == run.series or not run.series
            return is_first or max(committed, self.finished) >= run.run - 1
        if not run.series or self.step is None or self.step.series != run.series or not rules.step_waits:
            return True
        return committed >= self.step.run

    def _begin(self) -> None:
        run = self.queue.popleft()
        if self.last is not None and run.run <= self.last.run and self.world.rules.worker_takes_growing_runs:
            return  # of a client that has left, or sent once more
        self.world.ledger.begins(self.replica, self.incarnation, run.run)
        self.step = run if run.series else None
        self.said, self.answer, self.under_way, self.last = None, None, run, run
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
        memory.gradients[replica] = Gradient(run.run, replica, run.argument, read)
        yield "gradients"
        failed = run.kind == "fail" and replica == 1
        if run.kind == "ask":
            self.question = Ask(run.run, run.series, replica)
            self.world.send(self.name, SERVER, self.question)
            yield "Ask"
            self.question = None
            failed = self.answer is None or self.answer.failed
        if run.kind != "ask" and not failed and self._may_use_board(run):
            assert self.base is not None
            yield from self._return_by_board(run, self.base)
        else:
            self._say_in_full(run, failed=failed)
            yield "Return"

    def _may_use_board(self, run: Run) -> bool:
        return self.has_mailbox and self.base is not None and self.base.function == run.function

    def _return_by_board(self, run: Run, base: Base) -> Iterator[str]:
        self.world.ledger.returns(self.board, run.run)
        slot = self.board.slots[run.run % len(self.board.slots)]
        if not self.world.rules.slot_before_returned:
            self.board.returned = run.run
            yield "RETURNED"
        slot.run, slot.series = run.run, run.series
        yield "half of the slot"
        slot.base, slot.value = base.number, run.argument
        yield "slot"
        if self.world.rules.slot_before_returned:
            self.board.returned = run.run
            self.world.ledger.returned(self.replica, self.incarnation, run.run)
            yield "RETURNED"

    def _say_in_full(self, run: Run, *, failed: bool) -> None:
        number = 0
        if run.kind != "ask" and not failed:
            self.numbers = self.numbers + 1 if self.world.rules.bases_only_grow else 1
            number = self.numbers
            self.base = Base(number, run.function, run.run)
        value = 0 if failed else run.argument
        who = (self.replica, self.incarnation)
        self.said = Return(run.run, run.series, *who, number, run.function, run.kind, failed, value)
        self.world.send(self.name, SERVER, self.said)

    def _is_cancelled(self, run: Run | None) -> bool:
        if run is None or run.client in self.gone:
            return run is not None
        cancel = self.cancelled
        return cancel is not None and cancel.run <= run.run <= cancel.run + cancel.later

    # --- what it hears ------------------------------------------------------------------------------------------------

    def _hear(self, sender: str) -> None:
        record = self.world.take(self.name, sender)
        self.is_asleep = False
        match record:
            case Run():
                if record.client in self.gone or (record.series and record.series == self.failed_series):
                    return
                self.failed_series = 0
                self.queue.append(record)
            case Cancel():
                self.cancelled = record
            case StepFinished():
                self.finished = max(self.finished, record.run)
                if self.step is not None and self.step.run == record.run:
                    self._finish_step(self.step, record.failed)
            case SayInFull():
                self._repeat(record.run)
            case Answer():
                if self.question is not None and self.question.run == record.run:
                    self.answer = record
            case Registered():
                self.is_registered = True
                self._confirm_gone()
            case Left():
                self.gone.add(record.client)
                self.queue = deque(run for run in self.queue if run.client not in self.gone)
                self._confirm_gone()
            case Serving():
                self._server_serves()

    def _finish_step(self, step: Run, failed: bool) -> None:
        self.step = self.said = None
        if failed:
            if self.base is not None and self.base.run == step.run:
                self.base = None
            self.failed_series = step.series
            self.queue = deque(run for run in self.queue if run.series != step.series)
            if self.queue:
                self.failed_series = 0

    def _repeat(self, run: int) -> None:
        """The server does not hold the base of this return. If this is the run after which this worker waits, it is
        said again; otherwise nobody needs it."""
        if self.last is not None and self.last.run == run and self.said is None and self.under_way is None:
            self._say_in_full(self.last, failed=False)

    def _server_serves(self) -> None:
        if not self.is_registered:
            self.world.send(self.name, SERVER, Register(self.replica, self.incarnation))
            return
        if self.said is not None:
            self.world.send(self.name, SERVER, self.said)
        if self.question is not None:
            self.world.send(self.name, SERVER, self.question)
        self._confirm_gone()

    def _confirm_gone(self) -> None:
        if self.is_registered and self.under_way is None:
            for client in sorted(self.gone):
                self.world.send(self.name, SERVER, Dropped(client, self.replica))
