"""How a run goes on: what follows from what its replicas have brought so far.

Owns the decisions: which merge points are agreed, when they are committed, who is answered, when a run is over. It is
asked after every event and looks only at the tables, so asking once more changes nothing. Replicas read variables
without asking. So nothing is committed before each replica has returned or waits, and no waiting replica goes on while
a commit is under way. Before the commit, a replica that waits is asked to preserve the views that its function holds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter

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
    OptimizerUpdate,
    Point,
    PointFailed,
    Preserve,
    ReadPoint,
    Reduced,
    ReducePoint,
    RunId,
    WriteNote,
)
from cs_proto.records import replace
from cs_server.engine import sessions
from cs_server.engine.catalogue import optimizers, updates, variables
from cs_server.engine.store.state import State
from cs_server.engine.store.tables import Computation, Failure, Job, ReplicaProgress, RunState, SlotFill
from cs_server.events import Apply, Compute, Computed, Send, Write

from . import commits, merge, replay_check, runs

# An error names this many variables of a large set.
_NAMED = 4


def advance(server: State) -> None:
    """Take every run as far as it can go."""
    for run in sorted(server.tables.runs):
        _advance(server, run)


def _advance(server: State, run: RunId) -> None:
    if server.tables.runs[run].is_finished and not _waiting(server, run):
        return
    if commits.is_busy(server) or runs.is_deferred(server, run) or replay_check.is_checking(server, run):
        return
    _agree(server, run)
    if commits.is_busy(server):
        return
    if not _waiting(server, run) and not _is_stopped(server, run):
        return  # a replica is at work, and the others have returned
    _answer(server, run)
    if _is_stopped(server, run) and _must_commit(server, run):
        if not _is_preserved(server, run):
            return
        _commit(server, run)
        if commits.is_busy(server):
            return
    _hand_out_token(server, run)
    _answer(server, run)
    state = server.tables.runs[run]
    if not _is_stopped(server, run) or state.is_finished:
        return
    if _waiting(server, run):
        if not any(computation.run == run for computation in server.tables.computations.values()):
            _fail(server, run)
            _answer(server, run)
    else:
        if state.failure is None and any(s.count > state.agreed for s in _stands(server, run)):
            _fail(server, run)
        server.tables.runs[run] = state = replace(server.tables.runs[run], is_finished=True)
        runs.count(server, run, state)
        runs.finish(server, run, state)


# --- agreement ----------------------------------------------------------------------------------------------------


def _agree(server: State, run: RunId) -> None:
    """Accept merge points, in order, as long as all replicas have brought them and they agree."""
    known_set = partial(optimizers.known_set, server)
    while (state := server.tables.runs[run]).failure is None:
        k = state.agreed
        points = [server.tables.points[run, r, k] for r in server.replicas if k < server.tables.stands[run, r].again]
        if len(points) < len(server.replicas):
            return
        if len({merge.kind_of(point, known_set) for point in points}) > 1:
            return
        try:
            _accept(server, run, k, points)
        except CentralStorageError as error:
            failed = error_of(error, merge_index=k)
            if not all(server.tables.stands[run, replica].waiting == k for replica in server.replicas):
                server.tables.runs[run] = replace(state, failure=Failure("operation", -1, failed))
                return
            server.tables.outcomes[run, k] = PointFailed(run, k, failed, False)
        server.tables.runs[run] = replace(state, agreed=k + 1)


def _accept(server: State, run: RunId, k: int, points: list[Point]) -> None:
    """Check merge point ``k`` and begin what must be done before it can be answered.

    Raises an error of the operation itself, before anything has changed.
    """
    is_awaited = any(server.tables.stands[run, replica].waiting == k for replica in server.replicas)
    match points[0]:
        case ApplyPoint():
            applies = [point for point in points if isinstance(point, ApplyPoint)]
            updates.check_gradients(server, applies)
            numbers = _make_sets(server, applies)
            if is_awaited:
                server.tables.outcomes[run, k] = Accepted(run, k, numbers)
        case AssignPoint():
            _write(server, points)
            if is_awaited:
                server.tables.outcomes[run, k] = Accepted(run, k)
        case CreatePoint(variable=spec, value=value):
            variable, _ = variables.create(server, spec, value)
            commits.submit(server, Job("create", run, k, variable.number, False, "", ()))
        case ReducePoint() | GatherPoint():
            ticket = server.tables.next_ticket()
            server.tables.computations[ticket] = Computation(run, k)
            server.out.append(compute(server, ticket))


def _make_sets(server: State, points: list[ApplyPoint]) -> tuple[int, ...]:
    """The numbers of the sets of variables, with those that are made now. What can be refused is refused before the
    first is made; if the memory ends at a later one, the sets before it stay, with their slots."""
    first = points[0]
    for update in first.updates:
        if update.variables:
            optimizers.members(server, update.optimizer, update.variables)
    fills: tuple[SlotFill, ...] = ()
    numbers = []
    try:
        for update, known in zip(first.updates, _sets_of(server, points), strict=True):
            if known is None:
                sparse = [gradient.variable for gradient in update.sparse]
                known, made = optimizers.variable_set(server, update.optimizer, update.variables, sparse)
                fills += made
            numbers.append(known)
    finally:
        if fills:
            commits.submit(server, Job("slots", (), 0, 0, False, "", fills))
    return tuple(numbers)


def _sets_of(server: State, points: list[ApplyPoint]) -> list[int | None]:
    """The number of each update's set of variables, as far as there is one. Some replicas may name a set by its
    number, and others by its variables."""
    return [
        next((update.variable_set for update in each if update.variable_set), None)
        or optimizers.known_set(server, each[0].optimizer, each[0].variables)
        for each in zip(*[point.updates for point in points], strict=True)
    ]


def compute(server: State, ticket: int) -> Compute:
    """The command for a computation. It is the same however often it is asked for."""
    computation = server.tables.computations[ticket]
    return combine(ticket, [server.tables.points[computation.run, r, computation.k] for r in server.replicas])


def combine(ticket: int, points: Sequence[Point]) -> Compute:
    """The command that computes the answer to an all_reduce or all_gather, of which ``points`` are by replica."""
    arrays = tuple(point.arrays for point in points if isinstance(point, ReducePoint | GatherPoint))
    first = points[0]
    if isinstance(first, GatherPoint):
        return Compute(ticket, None, first.axis, arrays)
    return Compute(ticket, first.op if isinstance(first, ReducePoint) else None, 0, arrays)


def computed(server: State, event: Computed) -> None:
    """Record the outcome of a computation, unless its run has forgotten it."""
    computation = server.tables.computations.get(event.ticket)
    if computation is None:
        return
    del server.tables.computations[event.ticket]
    run, k = computation.run, computation.k
    server.tables.outcomes[run, k] = (
        Reduced(run, k, event.arrays)
        if event.error is None
        else PointFailed(run, k, replace(event.error, merge_index=k), False)
    )


# --- commits ------------------------------------------------------------------------------------------------------


def operations(server: State, job: Job) -> tuple[Apply | Write, ...]:
    """The operations of a commit of merge points and write notes."""
    run = job.run
    changing = [k for k in range(server.tables.runs[run].committed, job.k) if runs.changes(server, run, k)]
    points = [[server.tables.points[run, replica, k] for replica in server.replicas] for k in changing]
    notes = [note for _, note in runs.writes(server, run) if note.k < job.end_of_writes]
    return make(server, points, notes, defaultdict(int))


def make(
    server: State, points: Iterable[Sequence[Point]], notes: Sequence[WriteNote], steps: defaultdict[int, int]
) -> tuple[Apply | Write, ...]:
    """The operations of a commit: those of merge points, of each what the replicas brought, and of write notes, those
    of replica 0 first and each replica's in order. ``steps`` are those of each variable set that the tables do not
    count yet; the new ones are added."""
    made: list[Apply | Write] = []
    left = deque(sorted(notes, key=attrgetter("k"))) if notes else ()
    for brought in points:
        while left and left[0].k <= brought[0].k:
            made.append(_noted(server, left.popleft()))
        if applies := [point for point in brought if isinstance(point, ApplyPoint)]:
            numbers = _known_sets(server, applies)
            made.append(updates.apply(server, numbers, applies, steps))
            for number in numbers:
                steps[number] += 1
        else:
            made.append(_write(server, brought))
    made += [_noted(server, note) for note in left]
    return tuple(made)


def _noted(server: State, note: WriteNote) -> Write:
    return variables.write(server, note.variable, note.op, None, (note.value,), note.indices)


def _known_sets(server: State, points: list[ApplyPoint]) -> list[int]:
    """The numbers of the sets of an apply that was accepted."""
    numbers = [update.variable_set for update in points[0].updates]
    if all(numbers):
        return numbers
    return [number for number in _sets_of(server, points) if number is not None]


def created(server: State, job: Job) -> None:
    """The value of a variable that was made at a merge point is written."""
    server.tables.outcomes[job.run, job.k] = CreatedInRun(job.run, job.k, variables.get(server, job.number))
    server.tables.tally.commits += 1
    state = server.tables.runs[job.run]
    server.tables.runs[job.run] = replace(state, commits=state.commits + 1)


def creation(server: State, job: Job) -> Write:
    """The operation that writes the value of such a variable: the value of replica 0."""
    point = server.tables.points[job.run, 0, job.k]
    assert isinstance(point, CreatePoint)
    return variables.write(server, job.number, "assign", None, (point.value,))


def committed(server: State, job: Job) -> None:
    """Merge points, and the write notes before them, are committed: count them."""
    _written(server, job.run, job.end_of_writes)
    _count(server, job.run, job.k)


def _count(server: State, run: RunId, end: int) -> None:
    """The merge points before ``end`` are committed."""
    state = server.tables.runs[run]
    count = 0
    for k in range(state.committed, end):
        if not runs.changes(server, run, k):
            continue
        count += 1
        points = [server.tables.points[run, replica, k] for replica in server.replicas]
        applies = [point for point in points if isinstance(point, ApplyPoint)]
        if applies:
            for number in _known_sets(server, applies):
                optimizers.applied(server, number)
        elif isinstance(points[0], AssignPoint):
            variables.written(server, points[0].variable)
    server.tables.tally.commits += count
    server.tables.runs[run] = replace(state, committed=end, commits=state.commits + count)


def _written(server: State, run: RunId, end: int) -> None:
    """The write notes before merge point ``end`` are committed: count and forget them."""
    for key, note in runs.writes(server, run):
        if note.k < end:
            variables.written(server, note.variable)
            del server.tables.writes[key]
            server.tables.tally.commits += 1
            state = server.tables.runs[run]
            server.tables.runs[run] = replace(state, commits=state.commits + 1)


def _must_commit(server: State, run: RunId) -> bool:
    """Whether a replica, or the end of the run, needs what is agreed and not committed. All replicas have stopped. In a
    failed run none waits any more: each was told of the failure."""
    state = server.tables.runs[run]
    if runs.is_spoiled(server, run):
        return False
    if not _waiting(server, run):
        stands = state.failure is None or state.failure.cause in ("mismatch", "operation")
        return stands and (state.committed < state.agreed or _has_writes(server, run, state.agreed + 1))
    if state.committed == state.agreed:
        return False
    reads = (server.tables.stands[run, replica].read for replica in _waiting(server, run))
    return _is_merge_call(server, run, state) or any(read is not None and read.k <= state.agreed for read in reads)


def _is_preserved(server: State, run: RunId) -> bool:
    """Whether all replicas that wait have preserved their views. Asks those that have not."""
    waiting = _waiting(server, run)
    for replica in waiting:
        stand, peer = server.tables.stands[run, replica], sessions.worker_peer(server, replica)
        if stand.views == "live" and peer is not None:
            server.tables.stands[run, replica] = replace(stand, views="asked")
            server.out.append(Send(peer, Preserve(run, stand.waiting if stand.read is None else stand.read.k)))
    return all(server.tables.stands[run, replica].views == "preserved" for replica in waiting)


def _commit(server: State, run: RunId) -> None:
    state = server.tables.runs[run]
    job = Job("run" if _waiting(server, run) else "rest", run, state.agreed, 0, False, "", ())
    changes = any(runs.changes(server, run, k) for k in range(state.committed, state.agreed))
    if changes or _has_writes(server, run, job.end_of_writes):
        commits.submit(server, job)
    else:
        _count(server, run, state.agreed)


def _has_writes(server: State, run: RunId, end: int) -> bool:
    """Whether there are write notes before merge point ``end``."""
    return any(note.k < end for _, note in runs.writes(server, run))


def _write(server: State, points: Sequence[Point]) -> Write:
    assigns = [point for point in points if isinstance(point, AssignPoint)]
    number, op = assigns[0].variable, assigns[0].op
    variables.write(server, number, op, None, [point.value for point in assigns])  # refuses what does not fit
    reduce, sources = merge.aggregated(variables.get(server, number).spec, assigns)
    return variables.write(server, number, op, reduce, sources)


# --- answers ------------------------------------------------------------------------------------------------------


def _hand_out_token(server: State, run: RunId) -> None:
    state = server.tables.runs[run]
    if state.failure is None and state.committed == state.agreed and _is_merge_call(server, run, state):
        server.tables.runs[run] = replace(state, token=state.agreed - 1)


def _is_merge_call(server: State, run: RunId, state: RunState) -> bool:
    """Whether the last agreed merge point is a merge_call whose function has not been called."""
    k = state.agreed - 1
    is_called = state.token >= 0 or (run, k) in server.tables.outcomes
    return not is_called and isinstance(server.tables.points.get((run, 0, k)), MergeCallPoint)


def _answer(server: State, run: RunId) -> None:
    """Answer the replicas whose answers are known."""
    for replica in _waiting(server, run):
        stand = server.tables.stands[run, replica]
        k = stand.waiting if stand.read is None else stand.read.k
        answer = runs.answer(server, run, replica, k, stand.read is not None)
        if answer is None:
            continue
        peer = sessions.worker_peer(server, replica)
        if peer is not None:
            server.out.append(Send(peer, answer))
        server.tables.stands[run, replica] = replace(stand, waiting=-1, read=None)


def _fail(server: State, run: RunId) -> None:
    """The replicas can no longer meet."""
    k = server.tables.runs[run].agreed
    stands = _stands(server, run)
    brought = [server.tables.points.get((run, replica, k)) for replica in server.replicas]
    awaited = [
        server.tables.points[run, replica, stand.waiting] if stand.waiting >= 0 else stand.read
        for replica, stand in enumerate(stands)
    ]
    error = merge.mismatch(k, stands, brought, awaited, partial(_of_what, server))
    server.tables.runs[run] = replace(server.tables.runs[run], failure=Failure("mismatch", -1, error))


def _of_what(server: State, point: Point | ReadPoint) -> str:
    """The operands of a merge point by name: they tell two points of one kind apart."""
    match point:
        case ApplyPoint():
            return " and".join(_of_update(server, update) for update in point.updates)
        case AssignPoint():
            return f", {_name(server, point.variable)}"
        case ReducePoint() | GatherPoint():
            return f" of {len(point.arrays)} array{'s' * (len(point.arrays) != 1)}"
    return ""


def _of_update(server: State, update: OptimizerUpdate) -> str:
    numbers = updates.members(server, update)
    names = [_name(server, number) for number in numbers[:_NAMED]]
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    rows = ", ".join(_name(server, gradient.variable) for gradient in update.sparse[:_NAMED])
    return f" to {', '.join(names)}{more}" + f" (rows of {rows})" * bool(rows)


def _name(server: State, number: int) -> str:
    known = server.tables.variables.get(number)
    return repr(known.spec.name) if known is not None else f"variable {number}, which does not exist"


# --- where replicas stand -----------------------------------------------------------------------------------------


def _stands(server: State, run: RunId) -> list[ReplicaProgress]:
    return [server.tables.stands[run, replica] for replica in server.replicas]


def _is_stopped(server: State, run: RunId) -> bool:
    for replica in server.replicas:  # noqa: SIM110  (asked after every event: a generator costs more than a loop)
        if not server.tables.stands[run, replica].is_stopped:
            return False
    return True


def _waiting(server: State, run: RunId) -> list[int]:
    stands = server.tables.stands
    return [replica for replica in server.replicas if stands[run, replica].is_waiting]
