"""The general way: what the server decides from one event, as its engine does today, in small.

The tables are what a flush stores. ``Engine`` changes them and says in ``out`` what follows, which the server carries
out in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tests.model.captured import Captured, Place, last_of_kinds, span_of
from tests.model.records import (
    LOOKAHEAD,
    Answer,
    Ask,
    Cancel,
    Cancelled,
    Died,
    Dropped,
    Hello,
    Left,
    Record,
    Register,
    Registered,
    Resent,
    Return,
    RunFinished,
    StepFinished,
    Welcome,
    WorkerRestarted,
)
from tests.model.rules import Rules
from tests.model.world import SUPERVISOR, worker_name


class Outcome(NamedTuple):
    """What became of a run that is over."""

    series: int
    failed: bool
    values: tuple[int, ...]


class Commit(NamedTuple):
    """The commit that is under way."""

    ticket: int
    client: str
    run: int
    function: str
    t: int


class Send(NamedTuple):
    receiver: str
    record: Record


@dataclass
class Open:
    """A run that is not over."""

    series: int
    returns: dict[int, Return] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    asks: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    deaths: dict[int, int] = field(default_factory=dict)
    failed: bool = False

    def copy(self) -> Open:
        sets = set(self.lost), set(self.asks), set(self.waiting)
        return Open(self.series, dict(self.returns), *sets, dict(self.deaths), self.failed)


@dataclass
class Tables:
    """``client``: who has the session, if anybody; ``owner``: who had it last, whose runs are open. ``over``: of the
    last runs that are over; all up to ``last`` are. ``announced``: the incarnations that the client knows or the
    Welcome will name. ``captured``: the steps that the others do not have."""

    replicas: int
    client: str = ""
    owner: str = ""
    departed: set[str] = field(default_factory=set)
    workers: dict[int, int] = field(default_factory=dict)
    announced: dict[int, int] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    runs: dict[int, Open] = field(default_factory=dict)
    over: dict[int, Outcome] = field(default_factory=dict)
    last: int = 0
    ticket: int = 0
    commit: Commit | None = None
    t: dict[str, int] = field(default_factory=dict)
    captured: dict[Place, Captured] = field(default_factory=dict)

    def copy(self) -> Tables:
        return Tables(
            self.replicas,
            self.client,
            self.owner,
            set(self.departed),
            dict(self.workers),
            dict(self.announced),
            set(self.dead),
            {run: state.copy() for run, state in self.runs.items()},
            dict(self.over),
            self.last,
            self.ticket,
            self.commit,
            dict(self.t),
            dict(self.captured),
        )


class Engine:
    """Decides. ``out``: what follows. ``must_write``: a flush comes before it. ``Commit`` in ``out`` is carried out,
    then :meth:`committed` is called."""

    def __init__(self, tables: Tables, rules: Rules) -> None:
        self.tables, self.rules = tables, rules
        self.out: list[Send | Commit] = []
        self.must_write = self.is_ahead = False
        self.hello = ""  # a client that waits for its Welcome

    # --- captured steps -----------------------------------------------------------------------------------------------

    def is_quiet(self) -> bool:
        """Whether nothing is open, failing, dead, new or being committed, and a client is there."""
        tables = self.tables
        is_calm = not tables.runs and not tables.dead and tables.commit is None and tables.client != ""
        is_last_well = tables.last not in tables.over or not tables.over[tables.last].failed
        is_complete = len(tables.workers) == tables.replicas and tables.workers == tables.announced
        return is_calm and is_complete and is_last_well

    def is_heard(self, record: Return | Ask, sender: str) -> bool:
        """Whether a message of a replica comes from its living worker."""
        replica = record.replica
        if not self.rules.late_worker_is_fenced:
            return True
        return replica not in self.tables.dead and sender == worker_name(replica, self.tables.workers.get(replica, 0))

    def replay(self, *, is_committing: bool) -> None:
        """Hear those captured steps again that a peer may ask for, and count the others. The commit of the last one
        stays under way if ``is_committing``."""
        tables, rules = self.tables, self.rules
        steps = sorted(tables.captured.items(), key=lambda each: each[1].returns[0].run)
        last = steps[-1][1].returns
        end, series, function = last[0].run, last[0].series, last[0].function
        first = end - (span_of(last[0], rules) - 1)
        for kind, place in last_of_kinds(tables.captured).items():
            step = tables.captured[place]
            name = step.returns[0].function
            count = step.count if rules.stored_step_counts else sum(each[0] == kind for each in tables.captured)
            tables.t[name] = tables.t.get(name, 0) + count
            tables.ticket += count
        for _, step in steps:
            record = step.returns[0]
            if record.run >= first and record.series == series:
                self._remember(record.run, Outcome(series, False, tuple(each.value for each in step.returns)))
        if is_committing:
            del tables.over[end]
            tables.last = end - 1
            tables.runs[end] = Open(series, dict(enumerate(last)))
            tables.commit = Commit(tables.ticket, tables.owner, end, function, tables.t[function])
        tables.captured.clear()
        self.is_ahead = True

    # --- events -------------------------------------------------------------------------------------------------------

    def hear(self, record: Record, sender: str) -> None:
        self.is_ahead = True
        match record:
            case Return():
                if self.is_heard(record, sender):
                    self.returned(record)
            case Ask():
                if self.is_heard(record, sender):
                    self._asked(record)
            case Register():
                self._register(record)
            case Hello():
                self._hello(record.client)
            case Cancel():
                if sender == self.tables.client:
                    self._cancel(record)
                    self._say(sender, Cancelled(record.run))
            case Resent():
                if sender == self.tables.client and self._begin(record.run, record.series):
                    deaths = self.tables.runs[record.run].deaths
                    deaths[record.replica] = max(1, deaths.get(record.replica, 0))
            case Died():
                self._died(record)
            case Left():
                self._left(record.client)
            case Dropped():
                if sender == worker_name(record.replica, self.tables.workers.get(record.replica, 0)):
                    self._dropped(record)
        self._settle()

    def returned(self, record: Return) -> None:
        """A Return, by a message or by a mark."""
        tables, run = self.tables, record.run
        if record.client != tables.owner and self.rules.returns_name_client:
            return
        if run <= tables.last:
            if self.rules.returns_are_answered_again:
                self._answer_again(record)
        elif self._begin(run, record.series):
            state = tables.runs[run]
            if record.replica in state.returns or record.replica in state.lost:
                return
            state.returns[record.replica] = record
            if record.failed:
                state.failed = True
            self._settle()

    def _answer_again(self, record: Return) -> None:
        """A worker says again that it has returned from a run that is over."""
        tables, run = self.tables, record.run
        has_gone_on = any(record.replica in state.returns for later, state in tables.runs.items() if later > run)
        if run in tables.over:
            self._repeat(run)
        elif record.series and not has_gone_on:
            self._say(worker_name(record.replica, record.incarnation), StepFinished(run, True))

    def committed(self) -> None:
        """The commit under way is done. Its end is not written: the next server finds it done, and answers again."""
        commit, tables = self.tables.commit, self.tables
        assert commit is not None
        tables.commit = None
        tables.t[commit.function] = commit.t
        self._finish(commit.run, failed=False)
        self._settle()

    # --- workers ------------------------------------------------------------------------------------------------------

    def _register(self, record: Register) -> None:
        tables, replica = self.tables, record.replica
        before = tables.workers.get(replica, 0)
        if record.incarnation < before:
            return
        if record.incarnation > before:
            if before and replica not in tables.dead:
                self._died(Died(replica, before))
            tables.workers[replica] = record.incarnation
            tables.dead.discard(replica)
            self.must_write = True
        self._say(worker_name(replica, record.incarnation), Registered(record.incarnation))

    def _died(self, died: Died) -> None:
        tables, replica = self.tables, died.replica
        if tables.workers.get(replica) != died.incarnation or replica in tables.dead:
            return
        tables.dead.add(replica)
        if tables.announced.get(replica) != died.incarnation:
            return  # it had not begun a run
        for state in tables.runs.values():
            state.waiting.discard(replica)
            if replica not in state.returns:
                if state.failed or state.deaths.get(replica, 0):
                    state.failed = True
                    state.lost.add(replica)
                state.deaths[replica] = state.deaths.get(replica, 0) + 1

    def _announce_new(self) -> None:
        """Tell the client of new workers, once they may begin a run."""
        tables = self.tables
        if tables.commit is not None or any(state.failed for state in tables.runs.values()):
            return
        for replica, incarnation in tables.workers.items():
            is_returning = any(replica in state.returns for state in tables.runs.values())
            if tables.announced.get(replica) != incarnation and replica not in tables.dead and not is_returning:
                tables.announced[replica] = incarnation
                self.must_write = True
                self._announce(replica, incarnation)

    def _announce(self, replica: int, incarnation: int) -> None:
        tables = self.tables
        owed = [run for run, state in tables.runs.items() if replica not in state.returns and replica not in state.lost]
        # A run that was cancelled before any replica heard of it may come after ones of which the server has not heard.
        self._say(tables.client, WorkerRestarted(replica, incarnation, min(owed, default=tables.last + 1)))

    def _dropped(self, record: Dropped) -> None:
        for state in self.tables.runs.values():
            if state.failed and record.client == self.tables.owner and record.replica not in state.returns:
                state.lost.add(record.replica)

    # --- clients ------------------------------------------------------------------------------------------------------

    def _hello(self, client: str) -> None:
        tables = self.tables
        if client in tables.departed:
            return
        if client != tables.client:
            self.hello = client
            return
        self._welcome()
        if self.rules.hello_repeats_answers:
            for run in sorted(tables.over):
                self._repeat(run)
            for replica, incarnation in tables.announced.items():
                if incarnation > 1:
                    self._announce(replica, incarnation)

    def _welcome_next(self) -> None:
        """A client that waits is welcomed when nothing of the one before it is open, and all workers are there."""
        tables = self.tables
        if not self.hello or tables.client or tables.runs or tables.workers != tables.announced or tables.dead:
            return
        if len(tables.workers) < tables.replicas:
            return
        tables.client, tables.owner, self.hello = self.hello, self.hello, ""
        tables.over.clear()
        if not self.rules.numbers_go_on:
            tables.last = 0
        self.must_write = True
        self._welcome()

    def _welcome(self) -> None:
        tables = self.tables
        workers = tuple(tables.announced.get(replica, 0) for replica in range(tables.replicas))
        self._say(tables.client, Welcome(tables.client, workers, tables.last))

    def _cancel(self, record: Cancel) -> None:
        for run in range(record.run, record.run + record.later + 1):
            if run <= self.tables.last:
                if run in self.tables.over and self.tables.over[run].failed:
                    return  # the steps after one that failed do not begin
                continue
            if run not in self.tables.runs:
                self._begin(run, 0)
            self.tables.runs[run].failed = True
            self.must_write = True
            return

    def _left(self, client: str) -> None:
        tables = self.tables
        if self.hello == client:
            self.hello = ""
        tables.departed.add(client)
        if client == tables.client:
            tables.client = ""
            for state in tables.runs.values():
                state.failed = True
        self.must_write = True
        self._say(SUPERVISOR, Left(client))  # now the workers may hear it

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _begin(self, run: int, series: int) -> bool:
        """Whether the run is open, now if it was not before."""
        tables = self.tables
        if run in tables.runs:
            state = tables.runs[run]
            state.series = state.series or series
            return True
        if run <= tables.last or not tables.client:
            return False
        tables.runs[run] = Open(series)
        return True

    def _asked(self, record: Ask) -> None:
        if record.client == self.tables.owner and self._begin(record.run, record.series):
            state = self.tables.runs[record.run]
            state.asks.add(record.replica)
            state.waiting.add(record.replica)

    def _settle(self) -> None:
        """What follows from the tables as they are."""
        tables = self.tables
        for run, state in sorted(tables.runs.items()):
            if state.failed:
                absent = {r for r in range(tables.replicas) if self._is_absent(r)} - set(state.returns)
                state.lost |= absent
            if tables.commit is not None and tables.commit.run == run:
                continue
            self._answer_asks(run, state)
            if len(state.returns.keys() | state.lost) == tables.replicas:
                self._decide(run, state)
        self._announce_new()
        self._welcome_next()

    def _is_absent(self, replica: int) -> bool:
        tables = self.tables
        return replica in tables.dead or tables.announced.get(replica) != tables.workers.get(replica)

    def _answer_asks(self, run: int, state: Open) -> None:
        replicas = self.tables.replicas
        if not state.waiting or not (state.failed or len(state.asks) == replicas):
            return
        for replica in sorted(state.waiting):
            self._say(worker_name(replica, self.tables.workers[replica]), Answer(run, state.failed))
        state.waiting.clear()
        self.must_write = True

    def _decide(self, run: int, state: Open) -> None:
        tables = self.tables
        functions = {record.function for record in state.returns.values()}
        self.must_write = True
        if state.failed or state.lost or len(functions) > 1:
            self._finish(run, failed=True)
            return
        function = functions.pop()
        tables.ticket += 1
        tables.commit = Commit(tables.ticket, tables.owner, run, function, tables.t.get(function, 0) + 1)
        self.out.append(tables.commit)

    def _finish(self, run: int, *, failed: bool) -> None:
        state = self.tables.runs.pop(run)
        values = () if failed else tuple(state.returns[replica].value for replica in sorted(state.returns))
        self._remember(run, Outcome(state.series, failed, values))
        self._repeat(run)

    def _remember(self, run: int, outcome: Outcome) -> None:
        over = self.tables.over
        for other in [each for each, known in over.items() if not outcome.series or known.series != outcome.series]:
            del over[other]
        over[run] = outcome
        self.tables.last = max(self.tables.last, run)
        while len(over) > LOOKAHEAD + 1:
            del over[min(over)]

    def _repeat(self, run: int) -> None:
        """Say what became of a run that is over, if that is still known."""
        outcome = self.tables.over.get(run)
        if outcome is None:
            return
        self._say(self.tables.client, RunFinished(run, outcome.failed, outcome.values))
        if outcome.series:
            for replica, incarnation in self.tables.workers.items():
                self._say(worker_name(replica, incarnation), StepFinished(run, outcome.failed))

    def _say(self, receiver: str, record: Record) -> None:
        if receiver:
            self.out.append(Send(receiver, record))
