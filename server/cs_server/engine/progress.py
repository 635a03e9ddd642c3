"""How a run goes on: what follows from what its replicas have brought so far.

Owns the decisions: which merge points are agreed, when they are committed, who is answered, when a run is at an end.
It is asked after every event and looks at nothing but the tables, so being asked once more changes nothing. Replicas
look at variables without asking, so nothing is committed before each of them has returned or waits, and nobody who
waits is let go on while a commit is under way. A replica that waits is asked to preserve the views
that its function holds, before the commit.
"""

from __future__ import annotations

from cs_proto.errors import CentralStorageError
from cs_proto.failures import error_of
from cs_proto.messages import (
    Accepted,
    ApplyPoint,
    AssignPoint,
    CreatedInRun,
    CreatePoint,
    GatherPoint,
    MergeCallPoint,
    PointFailed,
    Preserve,
    ReadPoint,
    Reduced,
    ReducePoint,
    RunId,
)
from cs_proto.records import replace
from cs_server.events import Apply, Command, Compute, Computed, Send, Write

from . import merge
from .catalogue import Catalogue
from .commits import Commits
from .replay_check import ReplayCheck
from .runs import Runs
from .sessions import Sessions
from .state import Computation, Failure, Job, Point, ReplicaProgress, RunState, SlotFill, Tables

__all__ = ["Progress"]

# Of a large set of variables this many are named.
_NAMED = 4


class Progress:
    """Takes runs from what was brought to what is answered."""

    def __init__(
        self,
        tables: Tables,
        out: list[Command],
        sessions: Sessions,
        catalogue: Catalogue,
        commits: Commits,
        runs: Runs,
        recollection: ReplayCheck,
        replicas: int,
    ) -> None:
        self._tables = tables
        self._out = out
        self._sessions = sessions
        self._catalogue = catalogue
        self._commits = commits
        self._runs = runs
        self._recollection = recollection
        self._replicas = range(replicas)

    def advance(self) -> None:
        """Do for every run what can be done."""
        for run in sorted(self._tables.runs):
            self._advance(run)

    def _advance(self, run: RunId) -> None:
        if self._tables.runs[run].is_finished and not self._waiting(run):
            return
        if self._commits.is_busy or self._runs.is_deferred(run) or self._recollection.is_checking(run):
            return
        self._agree(run)
        if self._commits.is_busy:
            return
        if not self._waiting(run) and not self._is_stopped(run):
            return  # somebody is at work, and the others have returned
        self._answer(run)
        if self._is_stopped(run) and self._must_commit(run):
            if not self._is_preserved(run):
                return
            self._commit(run)
            if self._commits.is_busy:
                return
        self._hand_out_token(run)
        self._answer(run)
        state = self._tables.runs[run]
        if not self._is_stopped(run) or state.is_finished:
            return
        if self._waiting(run):
            if not any(computation.run == run for computation in self._tables.computations.values()):
                self._fail(run)
                self._answer(run)
        else:
            if state.failure is None and any(s.count > state.agreed for s in self._stands(run)):
                self._fail(run)
            self._tables.runs[run] = state = replace(self._tables.runs[run], is_finished=True)
            self._tables.tally.runs += 1
            self._runs.finish(run, state)

    # --- agreement ----------------------------------------------------------------------------------------------------

    def _agree(self, run: RunId) -> None:
        """Accept merge points, in order, as far as all replicas have brought them and they fit each other."""
        while (state := self._tables.runs[run]).failure is None:
            k = state.agreed
            points = [self._tables.points[run, r, k] for r in self._replicas if k < self._tables.stands[run, r].again]
            if len(points) < len(self._replicas):
                return
            if len({merge.kind_of(point, self._catalogue.known_set) for point in points}) > 1:
                return
            try:
                self._accept(run, k, points)
            except CentralStorageError as error:
                failed = error_of(error, merge_index=k)
                if not all(self._tables.stands[run, replica].waiting == k for replica in self._replicas):
                    self._tables.runs[run] = replace(state, failure=Failure("operation", -1, failed))
                    return
                self._tables.outcomes[run, k] = PointFailed(run, k, failed, False)
            self._tables.runs[run] = replace(state, agreed=k + 1)

    def _accept(self, run: RunId, k: int, points: list[Point]) -> None:
        """Check merge point ``k`` and begin what must be done before it can be answered.

        Raises what is wrong with the operation itself, before anything has changed.
        """
        is_awaited = any(self._tables.stands[run, replica].waiting == k for replica in self._replicas)
        match points[0]:
            case ApplyPoint(optimizer=optimizer):
                self._catalogue.check_gradients([point for point in points if isinstance(point, ApplyPoint)])
                number, fills = self._set_of(optimizer, points)
                if fills:
                    self._commits.submit(Job("slots", (), 0, 0, False, "", fills))
                if is_awaited:
                    self._tables.outcomes[run, k] = Accepted(run, k, number)
            case AssignPoint():
                self._write(points)
                if is_awaited:
                    self._tables.outcomes[run, k] = Accepted(run, k, 0)
            case CreatePoint(variable=spec, value=value):
                variable, _ = self._catalogue.create(spec, value)
                self._commits.submit(Job("create", run, k, variable.number, False, "", ()))
            case ReducePoint() | GatherPoint():
                ticket = self._tables.next_ticket()
                self._tables.computations[ticket] = Computation(run, k)
                self._out.append(self.compute(ticket))

    def _set_of(self, optimizer: int, points: list[Point]) -> tuple[int, tuple[SlotFill, ...]]:
        applies = [point for point in points if isinstance(point, ApplyPoint)]
        for point in applies:
            if point.variable_set:
                return point.variable_set, ()
        sparse = [gradient.variable for gradient in applies[0].sparse]
        return self._catalogue.variable_set(optimizer, applies[0].variables, sparse)

    def compute(self, ticket: int) -> Compute:
        """The command for a computation: the same however often it is asked for."""
        computation = self._tables.computations[ticket]
        points = [self._tables.points[computation.run, replica, computation.k] for replica in self._replicas]
        arrays = tuple(point.arrays for point in points if isinstance(point, ReducePoint | GatherPoint))
        first = points[0]
        if isinstance(first, GatherPoint):
            return Compute(ticket, None, first.axis, arrays)
        return Compute(ticket, first.op if isinstance(first, ReducePoint) else None, 0, arrays)

    def computed(self, event: Computed) -> None:
        """Record the outcome of a computation, unless nobody can want it any more."""
        computation = self._tables.computations.get(event.ticket)
        if computation is None:
            return
        del self._tables.computations[event.ticket]
        run, k = computation.run, computation.k
        self._tables.outcomes[run, k] = (
            Reduced(run, k, event.arrays)
            if event.error is None
            else PointFailed(run, k, replace(event.error, merge_index=k), False)
        )

    # --- commits ------------------------------------------------------------------------------------------------------

    def operations(self, job: Job) -> tuple[Apply | Write, ...]:
        """What a commit of merge points, or of the write notes after the last one, consists of."""
        run, end = job.run, job.k
        writes: dict[int, list[Write]] = {}
        for _, note in self._runs.writes(run):
            write = self._catalogue.write(note.variable, note.op, None, (note.value,), note.indices)
            writes.setdefault(note.k, []).append(write)
        if job.kind == "writes":
            return tuple(writes.get(end, ()))
        operations: list[Apply | Write] = []
        steps: dict[int, int] = {}
        for k in range(self._tables.runs[run].committed, end):
            operations += writes.get(k, ())
            if not self._runs.changes(run, k):
                continue
            points = [self._tables.points[run, replica, k] for replica in self._replicas]
            applies = [point for point in points if isinstance(point, ApplyPoint)]
            if applies:
                number, _ = self._set_of(applies[0].optimizer, points)
                before = steps.get(applies[0].optimizer, 0)
                operations.append(self._catalogue.apply(number, applies, before))
                steps[applies[0].optimizer] = before + 1
            else:
                operations.append(self._write(points))
        return tuple(operations)

    def created(self, job: Job) -> None:
        """The value of a variable made at a merge point is written."""
        self._tables.outcomes[job.run, job.k] = CreatedInRun(job.run, job.k, self._catalogue.variable(job.number))
        self._tables.tally.commits += 1
        state = self._tables.runs[job.run]
        self._tables.runs[job.run] = replace(state, commits=state.commits + 1)

    def creation(self, job: Job) -> Write:
        """What writing the value of such a variable consists of: replica 0's value counts."""
        point = self._tables.points[job.run, 0, job.k]
        assert isinstance(point, CreatePoint)
        return self._catalogue.write(job.number, "assign", None, (point.value,))

    def committed(self, run: RunId, end: int) -> None:
        """The merge points before ``end`` are committed: count them."""
        self.written(run, end)
        state = self._tables.runs[run]
        commits = 0
        for k in range(state.committed, end):
            if not self._runs.changes(run, k):
                continue
            commits += 1
            points = [self._tables.points[run, replica, k] for replica in self._replicas]
            if isinstance(points[0], ApplyPoint):
                self._catalogue.applied(self._set_of(points[0].optimizer, points)[0])
            elif isinstance(points[0], AssignPoint):
                self._catalogue.written(points[0].variable)
        self._tables.tally.commits += commits
        self._tables.runs[run] = replace(state, committed=end, commits=state.commits + commits)

    def written(self, run: RunId, end: int) -> None:
        """The write notes before merge point ``end`` are committed: count and forget them."""
        for key, note in self._runs.writes(run):
            if note.k < end:
                self._catalogue.written(note.variable)
                del self._tables.writes[key]
                self._tables.tally.commits += 1
                state = self._tables.runs[run]
                self._tables.runs[run] = replace(state, commits=state.commits + 1)

    def _must_commit(self, run: RunId) -> bool:
        """Whether somebody needs what is agreed and not committed. All replicas have stopped; of a run that has
        failed none waits any more, because whoever waited has been told."""
        state = self._tables.runs[run]
        if not self._waiting(run):
            stands = state.failure is None or state.failure.cause in ("mismatch", "operation")
            return stands and (state.committed < state.agreed or self._has_writes(run, state.agreed + 1))
        if state.committed == state.agreed:
            return False
        reads = (self._tables.stands[run, replica].read for replica in self._waiting(run))
        return self._is_merge_call(run, state) or any(read is not None and read.k <= state.agreed for read in reads)

    def _is_preserved(self, run: RunId) -> bool:
        """Whether all replicas that wait have preserved their views. Asks the others to do so."""
        waiting = self._waiting(run)
        for replica in waiting:
            stand, peer = self._tables.stands[run, replica], self._sessions.worker_peer(replica)
            if stand.views == "live" and peer is not None:
                self._tables.stands[run, replica] = replace(stand, views="asked")
                self._out.append(Send(peer, Preserve(run, stand.waiting if stand.read is None else stand.read.k)))
        return all(self._tables.stands[run, replica].views == "preserved" for replica in waiting)

    def _commit(self, run: RunId) -> None:
        state = self._tables.runs[run]
        changes = any(self._runs.changes(run, k) for k in range(state.committed, state.agreed))
        if changes or self._has_writes(run, state.agreed):
            self._commits.submit(Job("run", run, state.agreed, 0, False, "", ()))
            return
        self.committed(run, state.agreed)
        if not self._waiting(run) and self._has_writes(run, state.agreed + 1):
            self._commits.submit(Job("writes", run, state.agreed, 0, False, "", ()))

    def _has_writes(self, run: RunId, end: int) -> bool:
        """Whether there are write notes before merge point ``end``."""
        return any(note.k < end for _, note in self._runs.writes(run))

    def _write(self, points: list[Point]) -> Write:
        assigns = [point for point in points if isinstance(point, AssignPoint)]
        number, op = assigns[0].variable, assigns[0].op
        self._catalogue.write(number, op, None, [point.value for point in assigns])  # refuses what does not fit
        reduce, sources = merge.aggregated(self._catalogue.variable(number).spec, assigns)
        return self._catalogue.write(number, op, reduce, sources)

    # --- answers ------------------------------------------------------------------------------------------------------

    def _hand_out_token(self, run: RunId) -> None:
        state = self._tables.runs[run]
        if state.failure is None and state.committed == state.agreed and self._is_merge_call(run, state):
            self._tables.runs[run] = replace(state, token=state.agreed - 1)

    def _is_merge_call(self, run: RunId, state: RunState) -> bool:
        """Whether the last agreed merge point is a merge_call whose function has not been called."""
        k = state.agreed - 1
        is_called = state.token >= 0 or (run, k) in self._tables.outcomes
        return not is_called and isinstance(self._tables.points.get((run, 0, k)), MergeCallPoint)

    def _answer(self, run: RunId) -> None:
        """Let those go on whose answer is known."""
        for replica in self._waiting(run):
            stand = self._tables.stands[run, replica]
            k = stand.waiting if stand.read is None else stand.read.k
            answer = self._runs.answer(run, replica, k, stand.read is not None)
            if answer is None:
                continue
            peer = self._sessions.worker_peer(replica)
            if peer is not None:
                self._out.append(Send(peer, answer))
            self._tables.stands[run, replica] = replace(stand, waiting=-1, read=None)

    def _fail(self, run: RunId) -> None:
        """The replicas cannot meet any more."""
        k = self._tables.runs[run].agreed
        stands = self._stands(run)
        brought = [self._tables.points.get((run, replica, k)) for replica in self._replicas]
        awaited = [
            self._tables.points[run, replica, stand.waiting] if stand.waiting >= 0 else stand.read
            for replica, stand in enumerate(stands)
        ]
        error = merge.mismatch(k, stands, brought, awaited, self._of_what)
        self._tables.runs[run] = replace(self._tables.runs[run], failure=Failure("mismatch", -1, error))

    def _of_what(self, point: Point | ReadPoint) -> str:
        """What a merge point is about, by name: what tells two apart that are of one kind."""
        match point:
            case ApplyPoint():
                numbers = point.variables or self._tables.sets[point.variable_set].variables
                names = [self._name(number) for number in numbers[:_NAMED]]
                more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
                rows = ", ".join(self._name(gradient.variable) for gradient in point.sparse[:_NAMED])
                return f" to {', '.join(names)}{more}" + f" (rows of {rows})" * bool(rows)
            case AssignPoint():
                return f", {self._name(point.variable)}"
            case ReducePoint() | GatherPoint():
                return f" of {len(point.arrays)} array{'s' * (len(point.arrays) != 1)}"
        return ""

    def _name(self, number: int) -> str:
        known = self._tables.variables.get(number)
        return repr(known.spec.name) if known is not None else f"variable {number}, which does not exist"

    # --- where replicas stand -----------------------------------------------------------------------------------------

    def _stands(self, run: RunId) -> list[ReplicaProgress]:
        return [self._tables.stands[run, replica] for replica in self._replicas]

    def _is_stopped(self, run: RunId) -> bool:
        for replica in self._replicas:  # noqa: SIM110  (asked after every event: a generator costs more than a loop)
            if not self._tables.stands[run, replica].is_stopped:
                return False
        return True

    def _waiting(self, run: RunId) -> list[int]:
        stands = self._tables.stands
        return [replica for replica in self._replicas if stands[run, replica].is_waiting]
