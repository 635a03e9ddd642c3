"""The general way: what the server decides from one event, as its engine does today, in small.

The tables are what a flush stores. ``Engine`` changes them and says in ``out`` what follows, which the server carries
out in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tests.model.records import (
    LOOKAHEAD,
    SESSION,
    Answer,
    Ask,
    Cancel,
    Cancelled,
    Died,
    Dropped,
    Free,
    Hello,
    Left,
    Record,
    Register,
    Registered,
    Resent,
    Return,
    RunFinished,
    SayInFull,
    StepFinished,
    Welcome,
    WorkerRestarted,
)
from tests.model.rules import Rules
from tests.model.world import SUPERVISOR, worker_name


class Base(NamedTuple):
    """A full Return that the server keeps, of one incarnation."""

    incarnation: int
    number: int
    function: str


class Outcome(NamedTuple):
    """What became of a run that is over."""

    series: int
    failed: bool
    values: tuple[int, ...]


class Commit(NamedTuple):
    """The commit that is under way."""

    ticket: int
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
    """``client``: who has the session, if anybody; ``owner``: who had it last, whose runs are open. ``first``: the
    number before the first run of the session. ``over``: of the last LOOKAHEAD + 1 runs that are
    over; all up to ``last`` are. ``accounted``: how many passes of the account are counted in ``t``. ``announced``: the
    incarnations that the client knows or the Welcome will name."""

    replicas: int
    session: int = 0
    client: str = ""
    owner: str = ""
    first: int = 0
    workers: dict[int, int] = field(default_factory=dict)
    announced: dict[int, int] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    runs: dict[int, Open] = field(default_factory=dict)
    over: dict[int, Outcome] = field(default_factory=dict)
    last: int = 0
    ticket: int = 0
    commit: Commit | None = None
    t: dict[str, int] = field(default_factory=dict)
    bases: dict[int, Base] = field(default_factory=dict)
    accounted: int = 0

    def copy(self) -> Tables:
        return Tables(
            self.replicas,
            self.session,
            self.client,
            self.owner,
            self.first,
            dict(self.workers),
            dict(self.announced),
            set(self.dead),
            {run: state.copy() for run, state in self.runs.items()},
            dict(self.over),
            self.last,
            self.ticket,
            self.commit,
            dict(self.t),
            dict(self.bases),
            self.accounted,
        )


class Engine:
    """Decides. ``out``: what follows. ``must_write``: a flush comes before it. ``Commit`` in ``out`` is carried out,
    then :meth:`committed` is called."""

    def __init__(self, tables: Tables, rules: Rules) -> None:
        self.tables, self.rules = tables, rules
        self.out: list[Send | Commit] = []
        self.must_write = False
        self.hello = ""  # a client that waits for its Welcome

    # --- what the pass needs ------------------------------------------------------------------------------------------

    def is_quiet(self) -> bool:
        """Whether nothing is open, failing, dead, new or being committed, and a client is there."""
        tables = self.tables
        is_calm = not tables.runs and not tables.dead and tables.commit is None and tables.client != ""
        return is_calm and len(tables.workers) == tables.replicas and tables.workers == tables.announced

    def plan(self) -> str | None:
        """The function of the one plan: the bases of all workers agree. None if there is none."""
        tables = self.tables
        functions = {base.function for base in tables.bases.values()}
        if len(tables.bases) < tables.replicas or len(functions) > 1 or not self.is_quiet():
            return None
        if any(tables.workers[replica] != base.incarnation for replica, base in tables.bases.items()):
            return None
        return functions.pop()

    def is_of_session(self, run: int) -> bool:
        """Whether a run is of the session that is open."""
        return self.tables.client != "" and run > self.tables.first

    def passed(self, run: int, ticket: int, count: int, recent: dict[int, Outcome]) -> None:
        """``count`` runs have passed since the last time, ``run`` with ``ticket`` last. ``recent``: the last of them,
        as if their returns were heard again."""
        tables = self.tables
        functions = {base.function for base in tables.bases.values()}
        assert len(functions) == 1, f"passes are told, but the bases are {tables.bases}"
        function = functions.pop()
        tables.t[function] = tables.t.get(function, 0) + count
        tables.accounted += count
        tables.ticket = ticket
        for number, outcome in sorted(recent.items()):
            self._remember(number, outcome)
        tables.last = run

    # --- events -------------------------------------------------------------------------------------------------------

    def hear(self, record: Record, sender: str) -> None:
        match record:
            case Return():
                if sender == worker_name(record.replica, self.tables.workers.get(record.replica, 0)):
                    self.returned(record)
            case Ask():
                if sender == worker_name(record.replica, self.tables.workers.get(record.replica, 0)):
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
        """A Return, in full or from the board."""
        tables = self.tables
        if record.run <= tables.last:
            self._repeat(record.run)
        elif self._begin(record.run, record.series):
            state = tables.runs[record.run]
            if record.replica in state.returns or record.replica in state.lost:
                return
            state.returns[record.replica] = record
            if record.failed or record.kind == "refused":
                state.failed = True
            self._settle()

    def refuse(self, replica: int, run: int) -> None:
        """A return on the board has a base that is not held."""
        if run <= self.tables.last:
            self._repeat(run)
        elif self.is_of_session(run) and self.rules.refusals_are_answered:
            self._say(worker_name(replica, self.tables.workers[replica]), SayInFull(run))

    def committed(self) -> None:
        """The commit under way is done. Its end is not written: the next server finds it done, and answers again."""
        commit, tables = self.tables.commit, self.tables
        assert commit is not None
        tables.commit = None
        tables.t[commit.function] = commit.t
        for replica, record in tables.runs[commit.run].returns.items():
            if record.base:
                by_its_own = self.rules.base_is_of_its_incarnation
                incarnation = record.incarnation if by_its_own else tables.workers[replica]
                tables.bases[replica] = Base(incarnation, record.base, record.function)
        self._finish(commit.run, failed=False)
        self._settle()

    def resume(self) -> None:
        """A new server says again what the one before it may not have said."""
        for run in sorted(self.tables.over) if self.rules.resume_repeats_answers else ():
            self._repeat(run)
        for replica, incarnation in self.tables.announced.items():
            if incarnation > 1:
                self._announce(replica, incarnation)
        for replica, incarnation in self.tables.workers.items():
            for before in range(1, incarnation):
                self._say(SUPERVISOR, Free(replica, before))
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
            tables.bases.pop(replica, None)
            self.must_write = True
            for incarnation in range(before, record.incarnation):
                self._say(SUPERVISOR, Free(replica, incarnation))
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
        if client == tables.client and self.rules.hello_keeps_session:
            self._welcome()
        elif client == tables.client:
            tables.client, self.hello = "", client
        else:
            self.hello = client

    def _welcome_next(self) -> None:
        """A client that waits is welcomed when nothing of the one before it is open, and all workers are there."""
        tables = self.tables
        if not self.hello or tables.client or tables.runs or tables.workers != tables.announced or tables.dead:
            return
        if len(tables.workers) < tables.replicas:
            return
        tables.session += 1
        if not self.rules.runs_grow:
            tables.first = 0
        elif not self.rules.runs_begin_by_session:
            tables.first = tables.last
        else:
            tables.first = tables.session * SESSION
        tables.client, tables.owner, self.hello = self.hello, self.hello, ""
        self.must_write = True
        self._welcome()

    def _welcome(self) -> None:
        tables = self.tables
        workers = tuple(tables.announced.get(replica, 0) for replica in range(tables.replicas))
        self._say(tables.client, Welcome(tables.client, tables.first, workers))

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
        if run <= tables.last or not self.is_of_session(run):
            return False
        tables.runs[run] = Open(series)
        return True

    def _asked(self, record: Ask) -> None:
        if self._begin(record.run, record.series):
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
        tables.commit = Commit(tables.ticket, run, function, tables.t.get(function, 0) + 1)
        self.out.append(tables.commit)

    def _finish(self, run: int, *, failed: bool) -> None:
        state = self.tables.runs.pop(run)
        values = () if failed else tuple(state.returns[replica].value for replica in sorted(state.returns))
        self._remember(run, Outcome(state.series, failed, values))
        self._repeat(run)

    def _remember(self, run: int, outcome: Outcome) -> None:
        over = self.tables.over
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
