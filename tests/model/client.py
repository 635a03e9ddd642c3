"""The script: sends runs, takes RunFinished, serves workers in the place of dead ones. Nothing here knows of marks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tests.model.records import (
    LOOKAHEAD,
    Cancel,
    Cancelled,
    Hello,
    Record,
    Resent,
    Run,
    RunFinished,
    Serving,
    Welcome,
    WorkerRestarted,
)
from tests.model.world import SERVER, SUPERVISOR, Action, World, worker_name


class Step(NamedTuple):
    """One line of the script. Steps of the same ``series`` (0: none) belong together, also around a step of none."""

    series: int
    function: str
    kind: str


@dataclass
class Sent:
    """A run that is not answered. ``arguments`` by replica; ``batch`` is the script's own object."""

    run: int
    series: int
    step: Step
    arguments: tuple[int, ...]
    batch: list[int]


class Client:
    """One script, from Hello to its last line."""

    def __init__(self, world: World, name: str, script: list[Step], cancels: int) -> None:
        self.world, self.name = world, name
        self.script = list(script)
        self.cancels = cancels  # how often Ctrl-C may be pressed
        self.runs = -1  # the last run; -1 before the Welcome
        self.incarnations: list[int] = []
        self.unanswered: list[Sent] = []
        self.early: dict[int, RunFinished] = {}
        self.numbers: dict[int, int] = {}  # the first run of each series of the script
        self.told: list[Resent] = []
        self.cancelling: Cancel | None = None
        self.workers_know = False
        self.batch = [0] * world.replicas  # one array, which the script fills again for every step
        self.doing: Iterator[str] | None = None
        world.open_inbox(name)
        world.send(name, SERVER, Hello(name))

    @property
    def is_done(self) -> bool:
        return self.runs >= 0 and not self.script and not self.unanswered and self.doing is None

    def actions(self) -> list[Action]:
        if self.doing is not None:
            return [Action(self.name, "client goes on", self._go)]
        if self.unanswered and self.unanswered[0].run in self.early:
            # Before anything else is heard: a worker that is new must not be sent steps that never begin.
            return [Action(self.name, "client reads", self._read)]
        found = [
            Action(
                f"notices of {self.name}" if sender == SUPERVISOR else self.name,
                f"{self.name} hears {sender}",
                partial(self._hear, sender),
            )
            for sender in self.world.mail(self.name)
        ]
        if self._may_send():
            found.append(Action(self.name, "client sends", self._begin_sending))
        return found

    def may_cancel(self) -> bool:
        """Whether Ctrl-C would cancel something now."""
        return self.cancels > 0 and bool(self.unanswered) and self.cancelling is None and self.doing is None

    def cancel(self) -> None:
        """Ctrl-C: the server hears it first, and the workers when it has."""
        self.cancels -= 1
        first, last = self.unanswered[0].run, self.unanswered[-1].run
        self.cancelling, self.workers_know = Cancel(first, last - first), False
        self.world.send(self.name, SERVER, self.cancelling)

    def _go(self) -> None:
        assert self.doing is not None
        if next(self.doing, None) is None:
            self.doing = None

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _may_send(self) -> bool:
        if self.runs < 0 or not self.script or self.cancelling is not None:
            return False
        if not self.unanswered:
            return True
        step = self.script[0]
        is_same_series = step.series != 0 and self.unanswered[-1].step.series == step.series
        return is_same_series and len(self.unanswered) <= LOOKAHEAD

    def _begin_sending(self) -> None:
        self.doing = self._send(self.script.pop(0))

    def _send(self, step: Step) -> Iterator[str]:
        self.runs += 1
        run = self.runs
        series = self.numbers.setdefault(step.series, run) if step.series else 0
        for replica in range(self.world.replicas):
            self.batch[replica] = run * 10 + replica
        sent = Sent(run, series, step, tuple(self.batch), self.batch)
        self.world.ledger.sent(self.name, run, step, sent.arguments)
        self.unanswered.append(sent)
        for replica in range(self.world.replicas):
            self._post(sent, replica, sent.arguments[replica])
            yield "sent to one worker"
        for replica in range(self.world.replicas):
            self.batch[replica] = -1  # the script goes on with its array

    def _post(self, sent: Sent, replica: int, argument: int) -> None:
        worker = worker_name(replica, self.incarnations[replica])
        record = Run(sent.run, sent.series, self.name, sent.step.function, sent.step.kind, argument)
        self.world.send(self.name, worker, record)

    def _read(self) -> None:
        sent = self.unanswered.pop(0)
        finished = self.early.pop(sent.run)
        self.world.ledger.answered(self.name, finished)
        if finished.failed:
            self.unanswered.clear()  # the steps after it never begin
            self.early.clear()
            if sent.step.series:
                self.script = [step for step in self.script if step.series != sent.step.series]
        self.told = [told for told in self.told if any(told.run == each.run for each in self.unanswered)]
        if not self.unanswered and self.cancelling is not None:
            self.cancelling = None
            self.script = [step for step in self.script if not sent.step.series or step.series != sent.step.series]

    # --- what it hears ------------------------------------------------------------------------------------------------

    def _hear(self, sender: str) -> None:
        record = self.world.take(self.name, sender)
        match record:
            case RunFinished():
                if any(sent.run == record.run for sent in self.unanswered):
                    self.early[record.run] = record
            case Welcome():
                if self.runs < 0:
                    self.runs, self.incarnations = record.last_run, list(record.workers)
            case Cancelled():
                if self.cancelling is not None and self.cancelling.run == record.run:
                    self.workers_know = True
                    for replica in range(self.world.replicas):
                        self._cancel_at(replica)
            case WorkerRestarted():
                self._take_up(record)
            case Serving():
                again: list[Record] = [Hello(self.name), *self.told]
                if self.cancelling is not None:
                    again.append(self.cancelling)
                for each in again:
                    self.world.send(self.name, SERVER, each)

    def _cancel_at(self, replica: int) -> None:
        assert self.cancelling is not None
        self.world.send(self.name, worker_name(replica, self.incarnations[replica]), self.cancelling)

    def _take_up(self, restarted: WorkerRestarted) -> None:
        replica = restarted.replica
        if self.runs < 0 or restarted.incarnation <= self.incarnations[replica]:
            return
        self.incarnations[replica] = restarted.incarnation
        owed = [sent for sent in self.unanswered if sent.run >= restarted.run]
        if owed:
            resent = Resent(owed[0].run, owed[0].series, replica)
            self.told.append(resent)
            self.world.send(self.name, SERVER, resent)
        for sent in owed:
            kept = sent.arguments if self.world.rules.arguments_by_value else sent.batch
            self._post(sent, replica, kept[replica])
        if self.cancelling is not None and self.workers_know:
            self._cancel_at(replica)
