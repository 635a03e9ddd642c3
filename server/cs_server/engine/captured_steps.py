"""Captured steps: most steps of a training are decided in one pass, when all replicas have returned.

In a captured step the replicas bring only what needs no answer: gradients of known variable sets, aggregated assigns,
and write notes. All of it is one commit. So only the messages are written down, as they came, and the other tables do
not change. Steps that do the same again and again are carried out by a program, which puts what the replicas returned
into the account. Before anything else needs the tables, :meth:`CapturedSteps.unfold` brings them up to date: it hears
the messages again in the general way. A server that takes the place of this one does the same. ``engine`` asks here
before every event. Decisions 21, 33 and 34 have the reasons.

Questions of ``all_reduce`` and ``all_gather`` that fit into messages are captured, too: ``open_step``, decision 35. A
step with another merge point that needs an answer (a ``merge_call``, the first gradients of a set, an assigned Python
number) is not. Nor is one in which a replica reads its own update, which takes a commit of its own.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from cs_proto.arrays import Location
from cs_proto.errors import CentralStorageError
from cs_proto.messages import (
    MOST_AHEAD,
    ApplyPoint,
    Ask,
    Configure,
    Counters,
    Describe,
    Done,
    GatherPoint,
    Get,
    Locate,
    Reduced,
    ReducePoint,
    Return,
    RunFinished,
    Statistics,
    StepFinished,
    WaitReport,
    WriteNote,
)
from cs_proto.records import altered, replace
from cs_server.events import Apply, Command, Commit, Computed, Event, Finished, Received, Send, Tick, Write

from . import dispatch, sessions, stored_steps
from .captured_ground import Ground, ground_of
from .catalogue import optimizers, updates
from .open_step import Held, OpenStep, whole
from .step_kinds import Kind, Shape, do_meet, kind_of, shape_of
from .step_plans import NextStep, Plan, Plans
from .steps import merge, progress, watchdog
from .store import reasons
from .store.account import KINDS, Account
from .store.control_log import ControlFull
from .store.state import State
from .stored_steps import Place, place_of, with_account

__all__ = ["CapturedSteps", "is_small"]

_log = logging.getLogger("cs_server.engine")

# A larger result is not written at once.
_SMALL_NBYTES = 4096
# The most bytes of all messages of a captured step, which are written down as one record, and of all these records.
_STEP_NBYTES, _STEPS_NBYTES = 1 << 20, 16 << 20
# The longest lookahead: that many steps are heard again when the tables are brought up to date.
_MOST_AHEAD = 16
# To hear the last steps again costs as much as to hear them in the general way. So if something else comes after fewer
# captured steps than that, the next step is not captured.
_WORTH = 2
# The shapes of a replica's notes that are remembered.
_SHAPES = 64
# Requests that change nothing that a later step depends on.
_READS = (Get, Describe, Locate, Statistics)


class CapturedSteps:
    """The steps that were decided and that the other tables do not have yet, and the messages of the current step."""

    def __init__(self, server: State, account: Account) -> None:
        """``account`` is as the last server left it, if there was one. Its steps become captured ones."""
        self._server = server
        self._account = account
        self._may_begin = False
        self._forget()
        for place, step in server.tables.captured.items():
            if step.account == account.number and account.begun:
                server.tables.write_captured(with_account(server.tables.captured, place, account, {}, step.since[-1]))
        account.renew()

    def _forget(self) -> None:
        """The other tables have everything."""
        self._ground: Ground | None = None
        self._held: list[Held] = []
        self._open = OpenStep(self._server.tables)
        self._computing = 0  # the ticket of the computation of the last answer
        self._run = self._series = self._lookahead = 0  # the last ones
        self._returns: list[Return] = []  # of the last one that came as messages, in replica order
        self._kind: Kind | None = None  # of the last one
        self._began = 0.0  # when its first return came
        self._committing = 0  # the ticket of its commit
        self._shapes: dict[Shape, bool] = {}  # those whose sets exist: whether they have write notes, to be checked
        self._kinds: dict[tuple[Shape, ...], Kind] = {}
        self._counts = [0] * KINDS  # of the steps of each kind that the other tables do not have
        self._tickets = 0  # of their commits and computations
        self._applied = defaultdict[int, int](int)  # in them, by variable set
        self._sizes: dict[tuple[int, int], int] = {}  # bytes of what is written down of them, by place
        self._nbytes = 0
        self._has_changes = False  # whether steps among them have brought changes of hyperparameters
        self._plans = Plans()
        self._followed: Place | None = None  # the place of the step that the account follows
        self._next: tuple[NextStep, Plan, defaultdict[int, int]] | None = None  # with what is applied after it

    def hear(self, event: Event, now: float) -> list[Command] | None:
        """The commands that follow from ``event``. None if the event needs the general way."""
        if type(event) is Finished and self._committing and event.ticket == self._committing:
            self._committing = 0
            return self._answers()
        if type(event) is Computed and self._computing and event.ticket == self._computing:
            self._computing = 0
            if (answers := self._answered(event)) is not None:
                return answers
        self._fold()
        reason = reasons.AFTER
        if type(event) is Received:
            record = event.record
            if type(record) is Return or type(record) is Ask:
                held = self._hold(event, record, now)
                if not isinstance(held, int):
                    self._held.append(held)
                    if len(self._held) < len(self._server.replicas):
                        return []
                    decided = self._decide() if type(record) is Return else self._ask()
                    if not isinstance(decided, int):
                        return decided
                    self._held.pop()
                    held = decided
                reason = held
                reasons.note(self._server.reasons, record.run, reason)
            elif isinstance(record, _READS) or (type(record) is Configure and _only_changes_numbers(record)):
                if self._ground is None:
                    return None
                if (answer := self._answer(event, record, now)) is not None:
                    return answer
            elif type(record) is WaitReport:
                reason = reasons.SLOW
                reasons.note(self._server.reasons, record.run, reason)
        elif type(event) is Finished:
            if self._ground is None:
                return None
        elif type(event) is Computed:
            reason = reasons.COMBINED if event.error is None else reasons.FAILED
        elif type(event) is Tick:
            self._server.rate.note(now, self._server.tables.tally.runs + sum(self._counts))
            if self._ground is None:
                return None
            if not self._is_slow(now):
                return []
            reason = reasons.SLOW
        self._leave(event, reason)
        return None

    def _leave(self, event: Event, reason: int) -> None:
        """The event needs the general way: what that means for the step that it comes into, and for the next one."""
        count = sum(self._counts)
        if under_way := self._under_way:
            reasons.note(self._server.reasons, under_way[0].record.run, reason)
        if self._ground is None:
            self._may_begin = type(event) is Received and type(event.record) is Return
            # What was found for a return that was not taken is found again for the next one.
            self._run = self._series = self._lookahead = 0
            self._shapes.clear()
        else:
            self._may_begin = count >= _WORTH
            if _log.isEnabledFor(logging.DEBUG):
                what = type(event.record if isinstance(event, Received) else event).__name__
                _log.debug("%d steps were captured, until a %s came: %s", count, what, reasons.WORDS[reason])

    def unfold(self) -> list[tuple[Received, float]]:
        """Bring the other tables up to date, as if everything had been heard in the general way. What the store lacks
        is kept for the next flush. Returns the messages of a step of which not all replicas have returned, and when
        they came: they have to be heard in the general way now."""
        self._fold()
        server, tables = self._server, self._server.tables
        held = [(each.event, each.now) for each in self._held]
        if self._ground is None and not tables.captured:
            return []
        if tables.captured:
            # A server that took over cannot know whether the last commit had begun: it takes it as under way.
            # That commit was over if a step is open.
            is_committing = self._committing != 0 or (self._ground is None and not stored_steps.opened(tables))
            seen = [*tables.tally.seen]
            stored_steps.replay(server, is_committing)
            tables.tally.seen = list(map(max, seen, tables.tally.seen))
            for key in tables.captured:
                del tables.captured[key]
            tables.keep()
        self._forget()
        return held

    # --- what is captured ---------------------------------------------------------------------------------------------

    def _hold(self, event: Received, record: Return | Ask, now: float) -> Held | int:
        """A message of a step that may be captured; or the reason why it is not."""
        if len(record.run) > 1:
            return reasons.MERGE_CALL
        if isinstance(record, Ask) and not _is_inline(record):
            return reasons.reason_of(record)
        if self._committing or self._computing or (self._ground is None and not self._may_begin):
            return reasons.AFTER
        ground = self._ground or ground_of(self._server)
        if ground is None:
            return reasons.UNQUIET
        if self._ground is None:
            self._run, self._series, self._lookahead = ground.last
        if not 0 <= record.replica < len(ground.workers):
            return reasons.FAILED
        is_theirs = (event.peer, record.incarnation) == ground.workers[record.replica]
        if not self._is_next(record) or not is_theirs or record.client not in ("", ground.client):
            return reasons.UNQUIET
        if isinstance(record, Return):
            if record.lookahead > _MOST_AHEAD:
                return reasons.AHEAD
            if record.value is None:
                return reasons.FAILED
        shape = shape_of(record, self._open.shape(record.replica))
        if shape is None or not self._fits(record, shape):
            return reasons.FAILED
        if self._ground is None:
            self._ground = ground
            _log.debug("steps are captured from run %d on", record.run[0])
        return Held(event, record, now, shape)

    def _is_next(self, record: Return | Ask) -> bool:
        """Whether a message is of the step that all replicas are in, or of the next one if none is under way."""
        run, series = record.run[0], record.series
        # Of a series that was left no step comes again.
        is_next = series == self._series or series in (0, run)
        is_next = is_next and self._run < run <= self._run + 1 + MOST_AHEAD
        if type(record) is Return and series == self._series:  # within a series the lookahead stays
            is_next = is_next and record.lookahead == self._lookahead
        for held in (*self._open.asked[-1:], *self._held):
            other = held.record
            is_next = is_next and (other.run, other.series, other.changes) == (record.run, series, record.changes)
        for held in self._held:
            other = held.record
            is_next = is_next and type(other) is type(record) and other.replica != record.replica
            if type(record) is Return and type(other) is Return:
                is_next = is_next and other.lookahead == record.lookahead
        return is_next

    @property
    def _under_way(self) -> list[Held]:
        """The messages of the step that is not decided, in the order in which they came."""
        return self._open.asked or self._held

    def _fits(self, record: Return | Ask, shape: Shape) -> bool:
        """Whether the notes would be taken as they come, before those of the other replicas are known. So would the
        changes of a question, which is answered before the step is decided."""
        server, writes = self._server, self._shapes.get(shape)
        is_asked = type(record) is Ask and record.changes
        if writes is False and not is_asked:
            return True
        if writes is None:
            for part in shape:
                if type(part) is tuple and len(part) == 4:
                    for optimizer, number, _ in part[0]:
                        known = server.tables.sets.get(number)
                        if known is None or known.optimizer != optimizer:
                            return False
            if len(self._shapes) == _SHAPES:
                self._shapes.clear()
            writes = self._shapes[shape] = any(type(part) is int for part in shape)
        if writes or is_asked:
            try:
                if is_asked:
                    optimizers.changed(server, record.changes)
                progress.make(
                    server, (), [note for note in record.notes if isinstance(note, WriteNote)], defaultdict(int)
                )
            except Exception:  # noqa: BLE001  (the general way meets it again, and says what is wrong)
                return False
        return True

    # --- what follows -------------------------------------------------------------------------------------------------

    def _decide(self) -> list[Command] | int:
        """All replicas have returned: write the step down and begin its commit. The reason if it is not captured."""
        server, tables = self._server, self._server.tables
        in_order = sorted(self._held, key=lambda held: held.record.replica)
        returns = [held.record for held in in_order if isinstance(held.record, Return)]
        kind = self._kind_of(tuple([held.shape for held in in_order]))
        if isinstance(kind, int):
            return kind
        place = place_of(kind.number, returns[0])
        step = self._open.ended(self._held, self._counts[kind.number] + 1)
        size = sum(map(len, step.heard))
        grows = size - self._sizes.get(place, 0)
        if size > _STEP_NBYTES or self._nbytes + grows > _STEPS_NBYTES:
            return reasons.LARGE
        self._plans.decided(kind, returns, size, by_marks=not any(held.event.parts for held in self._held))
        most = self._plans.nbytes
        # Another server has the changes of a step only from its message, which those of the account may replace.
        is_followed = most > 0 and not returns[0].changes and self._nbytes + grows + most <= _STEPS_NBYTES
        if is_followed:
            step = replace(step, account=self._account.number)
        try:
            if tables.is_ahead:
                tables.flush()
            changed = optimizers.changed(server, returns[0].changes)
            for optimizer in changed:
                tables.optimizers[optimizer.number] = optimizer
            brought = self._open.brought(in_order) if kind.questions else [held.record.notes for held in in_order]
            operations = self._operations(brought, self._applied, has_writes=kind.notes > 0)
            tables.write_captured({place: step, **dict.fromkeys(self._open.places)})
        except Exception as error:  # noqa: BLE001  (the general way meets it again, and says what is wrong)
            server.rollback()
            return reasons.LARGE if isinstance(error, ControlFull) else reasons.FAILED
        if changed:
            self._has_changes = True
            # The next step writes them. Until then the message of this one has them, and whoever hears it again, and
            # those after it, finds the same numbers.
            tables.keep()
        self._followed = place if is_followed else None
        self._note_size(place, size)
        self._note_step(kind, returns[0], returns[0].run[0], step.since[0])
        self._returns, self._held = returns, []
        if kind.questions:
            self._open = OpenStep(tables)
        if not kind.commits:
            return self._answers()
        self._tickets += 1
        self._committing = tables.tally.tickets + self._tickets
        return [Commit(self._committing, operations)]

    def _kind_of(self, shapes: tuple[Shape, ...]) -> Kind | int:
        """The kind of a step of these shapes, by replica. The reason if it is not captured."""
        kind = self._kinds.get(shapes)
        if kind is None:
            if len(self._kinds) == KINDS:
                return reasons.KINDS
            if not do_meet(shapes):
                return reasons.FAILED
            kind = self._kinds[shapes] = kind_of(len(self._kinds), shapes)
        return kind

    def _operations(
        self, brought: Sequence[Sequence[Any]], applied: defaultdict[int, int], *, has_writes: bool
    ) -> tuple[Apply | Write, ...]:
        """What is committed of these notes, by replica. Raises as the general way does where they do not fit."""
        notes: list[WriteNote] = []
        if has_writes:
            notes = [note for each in brought for note in each if type(note) is WriteNote]
            brought = [[note for note in each if type(note) is not WriteNote] for each in brought]
        points = list(zip(*brought, strict=True))
        for each in points:
            if type(each[0]) is ApplyPoint:
                updates.check_gradients(self._server, each)
        return progress.make(self._server, points, notes, applied)

    # --- questions ----------------------------------------------------------------------------------------------------

    def _ask(self) -> list[Command] | int:
        """All replicas have asked: write that down and compute the answer. The reason if it is not captured."""
        server, tables = self._server, self._server.tables
        in_order = sorted(self._held, key=lambda held: held.record.replica)
        points: list[Any] = [held.record.point for held in in_order if isinstance(held.record, Ask)]
        kinds = {merge.kind_of(point, lambda *_: None) for point in points}
        if len(kinds) > 1 or not do_meet([held.shape for held in in_order]):
            return reasons.FAILED
        asked = whole(self._held)
        if self._open.nbytes + sum(map(len, asked.heard)) > _STEP_NBYTES:
            return reasons.LARGE
        try:
            if tables.is_ahead:
                tables.flush()
            # What would be refused is refused now: whoever hears these messages again has to take them.
            self._operations([held.record.notes for held in in_order], defaultdict(int), has_writes=True)
            self._open.ask(self._held, asked)
        except Exception as error:  # noqa: BLE001  (the general way meets it again, and says what is wrong)
            server.rollback()
            return reasons.LARGE if isinstance(error, ControlFull) else reasons.FAILED
        self._held = []
        self._tickets += 1
        self._computing = tables.tally.tickets + self._tickets
        return [progress.combine(self._computing, points)]

    def _answered(self, event: Computed) -> list[Command] | None:
        """Answer the replicas. None if the general way has to."""
        ground, asked = self._ground, self._open.asked[-1].record
        assert ground is not None
        assert isinstance(asked, Ask)
        if event.error is not None or any(isinstance(array.place, Location) for array in event.arrays):
            return None
        reduced = Reduced(asked.run, asked.point.k, event.arrays)
        self._open.answer(reduced)
        return [Send(peer, reduced) for peer, _ in ground.workers]

    # --- answers ------------------------------------------------------------------------------------------------------

    def _answers(self) -> list[Command]:
        ground, returns, kind = self._ground, self._returns, self._kind
        assert ground is not None
        assert kind is not None
        run = returns[0].run
        commands: list[Command] = []
        if self._series:
            finished = StepFinished(run, False)
            commands += [Send(peer, finished) for peer, _ in ground.workers]
        values = tuple([record.value for record in returns if record.value is not None])
        commands.append(Send(ground.controller, RunFinished(run, values, None, kind.commits)))
        return commands

    # --- steps by a program -------------------------------------------------------------------------------------------

    def next_step(self, base: Return | None = None) -> NextStep | None:
        """The step after the last one, for a program to carry out. None if it has to come as messages. The first
        replica brings what it brought with ``base``; without it, the kind is the one that is expected."""
        if self._followed is None or self._committing:
            return None
        ground, kind, run = self._ground, self._kind, self._run + 1
        assert ground is not None
        assert kind is not None
        plan = self._plans.expected(kind) if base is None else self._plans.alike(base)
        if plan is None:
            return None
        first, number = plan.returns[0], plan.kind.number
        # Nothing is under way. Of a series that was left no step comes again, and within one the lookahead stays.
        if first.lookahead != self._lookahead if first.series == self._series else first.series:
            return None
        applied, counts = self._applied.copy(), self._counts.copy()
        try:
            ticket = self._server.tables.tally.tickets + self._tickets + 1
            commit = plan.commit_after(self._server, self._applied, applied, ticket)
        except Exception:  # noqa: BLE001  (the general way meets it again, and says what is wrong)
            return None
        counts[number] += 1
        step = NextStep(run, number, counts, plan.returns, first.series > 0, ground.peers, commit, plan.alike)
        self._next = step, plan, applied
        return step

    def refuse(self) -> None:
        """No program carries out steps like that of :meth:`next_step`."""
        assert self._next is not None
        self._plans.refuse(self._next[0].kind)

    def passed(self, now: float) -> Send:
        """The answer to the controller in the step of :meth:`next_step`, which a program has carried out. The workers
        have theirs."""
        ground = self._ground
        assert self._next is not None
        assert ground is not None
        step, plan, self._applied = self._next
        self._note_step(plan.kind, plan.returns[0], step.run, now)
        self._tickets += bool(plan.kind.commits)
        values = plan.values(self._account.bodies(step.run))
        return Send(ground.controller, altered(plan.finished, run=(step.run,), values=values))

    def _note_step(self, kind: Kind, returned: Return, run: int, began: float) -> None:
        """A step of that kind is the last one. The first replica has ``returned`` that, but for run and value."""
        self._plans.follow(self._kind, kind)
        self._counts[kind.number] += 1
        self._run, self._series, self._lookahead = run, returned.series, returned.lookahead
        self._kind, self._began = kind, began

    def _fold(self) -> None:
        """Write the steps of the account to the store. From now on they are captured ones like others."""
        if self._followed is None:
            return
        place, self._followed, self._next = self._followed, None, None
        if self._account.begun:
            _log.debug("%d steps were carried out by a program, up to run %d", self._account.begun, self._run)
            captured = self._server.tables.captured
            steps = with_account(captured, place, self._account, self._plans.returns, self._began)
            self._server.tables.write_captured(steps)
            for each, folded in steps.items():
                self._note_size(each, sum(map(len, folded.heard)))
        self._account.renew()

    def _note_size(self, place: tuple[int, int], size: int) -> None:
        self._nbytes += size - self._sizes.get(place, 0)
        self._sizes[place] = size

    # --- what comes between -------------------------------------------------------------------------------------------

    def _is_slow(self, now: float) -> bool:
        """Whether a tick has something to say of the step that is under way."""
        under_way = self._under_way
        if not under_way and not self._committing:
            return False
        began = under_way[0].now if under_way else self._began
        return now - began >= watchdog.patience(self._server)

    def _answer(self, event: Received, record: Any, now: float) -> list[Command] | None:
        """The answer to a request that changes at most the numbers of an optimizer. The tables count the steps while
        it is looked up, and not longer, because the store has these steps only as captured ones. None if the general
        way has to answer."""
        server, tables = self._server, self._server.tables
        under_way = self._under_way
        if self._committing or self._computing:
            return None
        if under_way and (type(record) is Statistics or under_way[0].record.changes):
            return None
        if type(record) is Locate and record.buffers == 1:  # may make the second set
            return None
        if type(record) is Configure and (under_way or self._has_changes):
            return None
        try:
            for kind in self._kinds.values():
                stored_steps.count(server, kind, self._counts[kind.number])
            dispatch.hear(server, event, now)
            answer = [self._with_run(each) for each in server.out]
        except Exception:  # noqa: BLE001  (the general way meets it again, and says what is wrong)
            return None
        finally:
            server.rollback()
        if type(record) is Configure:
            return self._configured(event, record, answer, now)
        tables.tally.messages += 1
        if (replica := sessions.replica_at(server, event.peer)) is not None:
            tables.tally.seen[replica] = now
        tables.keep()
        return answer

    def _with_run(self, command: Command) -> Command:
        """The answer, in which the last captured step is the last finished run."""
        if not self._run or not isinstance(command, Send) or not isinstance(command.record, Counters):
            return command
        return Send(command.peer, replace(command.record, run=self._run))

    def _configured(
        self, event: Received, record: Configure, answer: list[Command], now: float
    ) -> list[Command] | None:
        """Change the numbers of an optimizer, and answer. The steps before are finished, so it does not matter for
        them that the change is written first; they have brought no changes of their own, which would come again later
        than this one."""
        tables, key = self._server.tables, (False, record.client)
        reply = answer[0].record if len(answer) == 1 and isinstance(answer[0], Send) else None
        if not isinstance(reply, Done):
            return None
        try:
            dispatch.hear(self._server, event, now)
            tables.requests[key] = replace(tables.requests[key], reply=reply)  # that counts the captured steps
            tables.flush()
        except CentralStorageError:
            self._server.rollback()
            return None
        self._server.out.clear()
        return answer


def _only_changes_numbers(record: Configure) -> bool:
    """Whether it sets hyperparameters, and neither makes an optimizer, nor changes its schedule or what it counts. A
    schedule would be evaluated for finished steps, too, when they are heard again."""
    is_of_numbers = record.schedule is None and record.exempt is None and not record.steps
    return record.optimizer > 0 and record.iterations < 0 and is_of_numbers


def _is_inline(question: Ask) -> bool:
    """Whether all arrays of an all_reduce or all_gather lie in its message."""
    point = question.point
    return isinstance(point, ReducePoint | GatherPoint) and not any(isinstance(a.place, Location) for a in point.arrays)


def is_small(record: Return) -> bool:
    """Whether a record is so small that an error in its place would need as much room."""
    value = record.value
    if value is None or not all(isinstance(note, ApplyPoint) for note in record.notes):
        return False
    return len(value.body) + sum(array.nbytes for array in value.arrays) <= _SMALL_NBYTES
