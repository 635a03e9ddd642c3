"""The server: carries out steps that repeat by a program, captures others, and has its engine hear everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from tests.model.captured import Captured, CapturedSteps, Next, place_of, with_account
from tests.model.engine import Commit, Engine
from tests.model.marks import Bases, Lane, Mailbox
from tests.model.records import (
    BASES,
    KINDS,
    PIECES,
    Accepted,
    Appoint,
    Died,
    Hello,
    Left,
    Offer,
    Record,
    Register,
    Return,
    RunFinished,
    StepFinished,
    Update,
    Welcome,
)
from tests.model.world import SERVER, SUPERVISOR, Action, World, worker_name

#: If fewer steps were captured before something else came, the next one is not.
_WORTH = 2


class Server:
    """One incarnation of the server, from the store and the account of the one before it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rules, self.memory, self.account = world.rules, world.memory, world.memory.account
        self.engine = Engine(world.store.copy(), world.rules)
        self.steps = CapturedSteps()
        self.boxes: dict[str, Mailbox] = {}
        self.bases: dict[str, Bases] = {}
        self.program: Next | None = None
        self.welcomes: dict[str, list[Record]] = {}
        world.open_inbox(SERVER)
        self.doing: Iterator[str] | None = self._resume()
        self._next_store = [Action(SERVER, "server goes on", self._go)]

    # --- what it can do -----------------------------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        if self.doing is not None:
            return self._next_store
        found, program = [], self.program
        if program is None:
            for name, box in self.boxes.items():
                if box.to_server.is_new:
                    hear = partial(self._begin, self._hear_mark, name)
                    found.append(Action(SERVER, f"server hears the mark of {name}", hear))
        else:
            lanes = self._lanes()
            are_new = [lane.is_new for lane in lanes]
            if any(lane.is_new and lane.mark != program.run for lane in lanes):
                found.append(Action(SERVER, "server stops its program", self._stop))
            elif all(are_new):
                run = partial(self._begin, self._run_program)
                found.append(Action(SERVER, f"server carries out {program.run}", run))
        for sender in self.world.mail(SERVER):
            record = self.world.inboxes[SERVER][sender][0]
            if self._is_due(sender, record):
                pace = "notices of server" if sender == SUPERVISOR else SERVER
                name = f"server hears {type(record).__name__} of {sender}"
                found.append(Action(pace, name, partial(self._begin, self._hear, sender)))
        return found

    def may_tick(self) -> bool:
        """Whether time can do something here."""
        return self.doing is None

    def tick(self) -> None:
        """A second has passed: the account is written to the store."""
        self._begin(self._hear_nothing)

    def lose_mailbox(self, name: str) -> None:
        """A message in this mailbox is damaged."""
        if self.doing is None and name in self.boxes:
            self._begin(self._leave, name)

    def _is_due(self, sender: str, record: Record) -> bool:
        """Notices are heard before a new process is let in, and what a client has said before it has left."""
        if isinstance(record, Left):
            return self.world.is_silent(SERVER, record.client)
        if isinstance(record, Hello | Register) and not self.world.is_silent(SERVER, SUPERVISOR):
            return _subject(self.world.inboxes[SERVER][SUPERVISOR][0]) == sender
        return True

    def _begin(self, task: Callable[..., Iterator[str]], *about: object) -> None:
        self.doing = task(*about)
        self._go()

    def _go(self) -> None:
        assert self.doing is not None
        if next(self.doing, None) is None:
            self.doing = None

    def _stop(self) -> None:
        self.program = None

    # --- programs -----------------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        workers = self.engine.tables.workers
        return [worker_name(replica, workers[replica]) for replica in range(self.world.replicas)]

    def _lanes(self) -> list[Lane]:
        return [self.boxes[name].to_server for name in self._names() if name in self.boxes]

    def _prepare(self, base: Return | None = None) -> None:
        """Look for the marks of the next step, if a program may carry it out."""
        steps, tables = self.steps, self.engine.tables
        plan = steps.plan(base, self.rules)
        if plan is None or not all(name in self.boxes for name in self._names()):
            return
        first, numbers = plan.returns[0], list[int]()
        for name in self._names():
            found = self.bases[name].find(first.series, first.function) if name in self.bases else None
            if found is None:
                return
            numbers.append(found.run)
        counts = list(steps.counts)
        counts[plan.kind] += 1
        t = tables.t.get(first.function, 0) + steps.applied.get(first.function, 0) + 1
        ticket = tables.ticket + steps.tickets + 1
        self.program = Next(steps.run + 1, plan, tuple(counts), ticket, t, self.account.number, tuple(numbers))

    def _fits(self) -> bool:
        """Whether the marks that are there are those of the program."""
        program, lanes = self.program, self._lanes()
        assert program is not None
        if program.account != self.account.number and self.rules.events_end_program:
            return False
        named = tuple(lane.body.base for lane in lanes)
        is_named = named == program.bases or not self.rules.program_compares_bases
        return is_named and not any(self.boxes[name].to_worker.left for name in self._names())

    def _run_program(self) -> Iterator[str]:
        """Carry out one step, store by store."""
        if not self._fits():
            named = self.bases[self._names()[0]].get(self._lanes()[0].body.base)
            self.program = None
            if named is not None:
                self._prepare(named)
            if self.program is None or self.program.run != self._lanes()[0].mark or not self._fits():
                self.program = None
                yield "the marks are mail"
                return
        program, rules = self.program, self.rules
        assert program is not None
        first = program.plan.returns[0]
        client = self.engine.tables.client
        values = tuple(lane.body.value for lane in self._lanes())
        commit = Commit(program.ticket, client, program.run, first.function, program.t)
        if not rules.account_before_begun:
            yield from self._count()
        yield from self._fill_account(program)
        if rules.account_before_begun and rules.begun_before_commit:
            yield from self._count()
        if not rules.ends_after_commit:
            yield from self._end_steps(program)
        if not rules.answer_after_commit:
            self.world.send(SERVER, client, RunFinished(program.run, False, values))
            yield "RunFinished"
        yield from self._commit(commit)
        if rules.account_before_begun and not rules.begun_before_commit:
            yield from self._count()
        for lane in self._lanes():
            lane.take()
        if rules.ends_after_commit:
            yield from self._end_steps(program)
        if rules.answer_after_commit:
            self.world.send(SERVER, client, RunFinished(program.run, False, values))
            yield "RunFinished"
        self.program = None
        self.steps.note(program.plan.kind, first, program.run)
        self._prepare()

    def _fill_account(self, program: Next) -> Iterator[str]:
        begun = self.account.of(program.run)
        begun.kind, begun.counts = program.plan.kind, program.counts
        yield "account: kind"
        for replica, lane in enumerate(self._lanes()):
            begun.bodies[replica] = lane.body
            yield "account: body"

    def _count(self) -> Iterator[str]:
        self.account.begun += 1
        yield "account: begun"

    def _end_steps(self, program: Next) -> Iterator[str]:
        for name in self._names() if program.plan.returns[0].series else ():
            yield from self._finish_step(name, program.run)

    def _finish_step(self, name: str, run: int) -> Iterator[str]:
        """Say by a mark that a step is over, which takes the place of the mark before; else by a message."""
        box = self.boxes.get(name)
        if box is not None and not box.to_worker.left:
            lane = box.to_worker
            lane.mark = run
            yield "MARK of the end"
            if not lane.left or not self.rules.left_mark_is_said_again:
                return
        self.world.send(SERVER, name, StepFinished(run, failed=False))
        yield "StepFinished"

    # --- the store ----------------------------------------------------------------------------------------------------

    def _flush(self) -> Iterator[str]:
        self.engine.must_write = False
        self.world.store = self.engine.tables.copy()
        yield "flush"

    def _fold(self) -> Iterator[str]:
        """Add the steps of the account to the store by one write."""
        place, self.steps.followed = self.steps.followed, None
        if place is not None:
            yield from self._fold_after(place)

    def _fold_after(self, place: tuple[int, int]) -> Iterator[str]:
        captured, account, rules = self.engine.tables.captured, self.account, self.rules
        made = with_account(captured, place, account, rules) if account.begun else {}
        captured.update(made)
        if made and rules.fold_before_renewal:
            yield from self._flush()
        account.begun = 0
        yield "account: none begun"
        account.number += 1
        yield "account: number"
        if made and not rules.fold_before_renewal:
            yield from self._flush()

    def _unfold(self) -> Iterator[str]:
        """Bring the other tables up to date, and hear the returns of a step that is not decided in the general way."""
        yield from self._fold()
        held = [record for record, _ in self.steps.held]
        if self.engine.tables.captured:
            self.engine.replay(is_committing=False)
        self.steps.forget()
        for record in held if self.rules.held_returns_are_heard else ():
            self.engine.hear(record, worker_name(record.replica, record.incarnation))
            yield from self._carry_out()

    # --- commits ------------------------------------------------------------------------------------------------------

    def _apply(self, commit: Commit, begin: int) -> Iterator[str]:
        """The kernels from piece ``begin`` on, each under undo."""
        memory = self.memory
        for piece in range(begin, PIECES):
            memory.kept = (commit.ticket, piece, memory.pieces[piece])
            yield "kept"
            update = Update(commit.client, commit.run, commit.function, commit.t, tuple(memory.gradients))
            memory.pieces[piece] = (*memory.pieces[piece], update)
            yield "piece"
            memory.tag = (commit.ticket, piece + 1)
            yield "TAG"

    def _commit(self, commit: Commit) -> Iterator[str]:
        """A commit, by a program or not. One that a server before this one began is taken up."""
        memory = self.memory
        if memory.done != commit.ticket:
            memory.commits |= 1
            yield "COMMITS odd"
            if memory.tag[0] != commit.ticket:
                memory.tag = (commit.ticket, 0)
                yield "TAG"
            begin = memory.tag[1]
            if memory.kept[:2] == (commit.ticket, begin):
                memory.pieces[begin] = memory.kept[2]
                yield "piece given back"
            yield from self._apply(commit, begin)
            memory.done = commit.ticket
            yield "DONE"
        if memory.commits % 2:
            memory.commits += 1
            yield "COMMITS even"

    # --- what it hears ------------------------------------------------------------------------------------------------

    def _hear(self, sender: str) -> Iterator[str]:
        """The next message of a process, or its mark, which comes before."""
        if self.rules.events_end_program:
            self.program = None
        box = self.boxes.get(sender)
        if box is not None and box.to_server.is_new and self.rules.mark_comes_before_message:
            yield from self._hear_mark(sender)
            return
        record = self.world.take(SERVER, sender)
        yield "message taken"
        if isinstance(record, Offer):
            if sender in self.world.inboxes:
                self.boxes[sender] = self.world.mailboxes[record.mailbox]
                self.world.send(SERVER, sender, Accepted(record.mailbox))
        elif isinstance(record, Appoint):
            for waiting in self.welcomes.pop(record.client, ()):
                self.world.send(SERVER, record.client, waiting)
        else:
            if isinstance(record, Died):
                yield from self._hear_last_words(worker_name(record.replica, record.incarnation))
            yield from self._hear_event(record, sender)
        if self.program is None:
            self._prepare()

    def _hear_last_words(self, name: str) -> Iterator[str]:
        """What lies in the mailbox of a dead worker; what went elsewhere may come later."""
        if name in self.boxes and self.boxes[name].to_server.is_new:
            yield from self._hear_mark(name)
        for _ in range(self.world.rng.randint(0, len(self.world.inboxes[SERVER].get(name, ())))):
            record = self.world.take(SERVER, name)
            if not isinstance(record, Offer):
                yield from self._hear_event(record, name)
        self.boxes.pop(name, None)
        self.bases.pop(name, None)

    def _hear_mark(self, name: str) -> Iterator[str]:
        """A mark as a message: the Return that it stands for. One that names no base is refused."""
        run, body = self.boxes[name].to_server.take()
        base = self.bases[name].get(body.base) if name in self.bases else None
        yield "mark taken"
        if base is not None:
            yield from self._hear_event(base._replace(run=run, value=body.value), name, is_mark=True)
        if self.program is None:
            self._prepare()

    def _leave(self, name: str) -> Iterator[str]:
        self.program = None
        box = self.boxes[name]
        box.to_server.left = True
        yield "LEFT"
        if box.to_server.is_new:
            yield from self._hear_mark(name)
        del self.boxes[name]
        self.program = None
        yield "left"

    def _hear_nothing(self) -> Iterator[str]:
        """A tick."""
        self.program = None
        yield from self._fold()
        yield "heard"
        self._prepare()

    def _hear_event(self, record: Record, sender: str, *, is_mark: bool = False) -> Iterator[str]:
        steps = self.steps
        if isinstance(record, Return) and not is_mark:
            limit = BASES if self.rules.both_keep_as_many_bases else 1
            self.bases.setdefault(sender, Bases(limit)).keep(record)
        is_return = isinstance(record, Return)
        if self.rules.events_unfold or is_return:
            yield from self._fold()
        if isinstance(record, Return) and self._may_hold(record, sender):
            steps.held.append((record, is_mark))
            if len(steps.held) < self.world.replicas:
                return
            kind = self._kind()
            if kind is not None:
                yield from self._decide(kind)
                return
            steps.held.pop()
        if self.rules.events_unfold or is_return:
            steps.may_begin = sum(steps.counts) >= _WORTH if steps.is_on else is_return
            yield from self._unfold()
        self.engine.hear(record, sender)
        yield from self._carry_out()

    # --- captured steps -----------------------------------------------------------------------------------------------

    def _may_hold(self, record: Return, sender: str) -> bool:
        """Whether a Return is of a step that may be captured."""
        steps, engine = self.steps, self.engine
        if not steps.is_on:
            if not steps.may_begin or not engine.is_quiet():
                return False
            tables = engine.tables
            steps.run = tables.last
            steps.series = tables.over[tables.last].series if tables.last in tables.over else 0
        if record.failed or record.kind not in ("plain", "note") or not engine.is_heard(record, sender):
            return False
        if record.client != engine.tables.client and self.rules.returns_name_client:
            return False
        steps.is_on = steps.is_next(record) or steps.is_on
        return steps.is_next(record)

    def _kind(self) -> int | None:
        """The number of the kind of a step of which all replicas have returned. None if it is not captured."""
        kinds = {(record.function, record.kind) for record, _ in self.steps.held}
        if len(kinds) > 1:
            return None
        known = self.steps.kinds
        return known.setdefault(kinds.pop(), len(known)) if len(known) < KINDS else known.get(kinds.pop())

    def _decide(self, kind: int) -> Iterator[str]:
        """Store the step, commit it and answer."""
        steps, tables, rules = self.steps, self.engine.tables, self.rules
        returns = tuple([record for record, _ in sorted(steps.held, key=lambda held: held[0].replica)])
        first, place = returns[0], place_of(kind, returns[0], rules)
        by_marks = all(is_mark for _, is_mark in steps.held)
        steps.decided(kind, by_marks=by_marks, returns=returns)
        is_followed = bool(steps.plans)
        if self.engine.is_ahead:
            self.engine.is_ahead = False
            yield from self._flush()
        number = self.account.number if is_followed else 0
        tables.captured[place] = Captured(steps.counts[kind] + 1, number, returns)
        if rules.step_is_stored:
            yield from self._flush()
        steps.followed = place if is_followed else None
        steps.note(kind, first, first.run)
        steps.held = []
        t = tables.t.get(first.function, 0) + steps.applied[first.function]
        client = tables.client
        yield from self._commit(Commit(tables.ticket + steps.tickets, client, first.run, first.function, t))
        if first.series:
            for name in self._names():
                yield from self._finish_step(name, first.run)
        self.world.send(SERVER, client, RunFinished(first.run, False, tuple(record.value for record in returns)))
        yield "RunFinished"

    def _carry_out(self) -> Iterator[str]:
        """What the engine has decided: a flush first, where others may see what follows."""
        engine, rules = self.engine, self.rules
        while engine.out:
            out, engine.out = engine.out, []
            if engine.must_write:
                engine.is_ahead = False
                yield from self._flush()
            for command in out:
                if isinstance(command, Commit):
                    yield from self._commit(command)
                    engine.committed()
                elif isinstance(command.record, StepFinished) and not command.record.failed:
                    yield from self._finish_step(command.receiver, command.record.run)
                elif isinstance(command.record, Welcome):
                    self.welcomes[command.receiver] = [command.record]
                    self.world.send(SERVER, SUPERVISOR, Appoint(command.receiver))
                    yield "Appoint"
                elif command.receiver in self.welcomes and rules.welcome_comes_first:
                    self.welcomes[command.receiver].append(command.record)
                else:
                    self.world.send(SERVER, command.receiver, command.record)
                    yield "sent"

    def _resume(self) -> Iterator[str]:
        """Take up what the server before this one left."""
        tables, account, rules = self.engine.tables, self.account, self.rules
        for place, step in list(tables.captured.items()):
            is_followed = step.account == account.number if rules.account_has_number else step.account > 0
            if is_followed and account.begun:
                yield from self._fold_after(place)
                break
        else:
            account.begun = 0
            yield "account: none begun"
            account.number += 1
            yield "account: number"
        if tables.captured:
            self.engine.replay(is_committing=rules.last_step_is_under_way)
        if tables.commit is not None:
            yield from self._commit(tables.commit)
            self.engine.committed()
            yield from self._carry_out()
        self.world.supervisor.server_serves()
        yield "serves"


def _subject(notice: Record) -> str:
    """The process that a notice is about."""
    if isinstance(notice, Left):
        return notice.client
    return worker_name(notice.replica, notice.incarnation) if isinstance(notice, Died) else ""
