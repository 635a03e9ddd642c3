"""The server: passes runs from the boards by itself, and has its engine hear everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from tests.model.engine import Commit, Engine, Outcome
from tests.model.records import LOOKAHEAD, PIECES, Ask, Died, Hello, Left, Record, Register, Return, RunFinished, Update
from tests.model.world import SERVER, SUPERVISOR, Account, Action, Board, Slot, World, worker_name


class Server:
    """One incarnation of the server, from the store of the one before it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rules, self.memory = world.rules, world.memory
        self.engine = Engine(world.store.copy(), world.rules)
        self.heard = [0] * world.replicas
        self.is_armed = False
        self.ticket = 0
        self.t = 0
        self.function = ""
        world.open_inbox(SERVER)
        self.doing: Iterator[str] | None = self._resume()
        self._next_store = [Action(SERVER, "server goes on", self._go)]

    def actions(self) -> list[Action]:
        if self.doing is not None:
            return self._next_store
        found = []
        if self.is_armed:
            run = self._passable()
            if run is not None:
                found.append(Action(SERVER, f"server passes {run}", partial(self._begin, self._pass, run)))
        if not self.is_armed and self._undecided():
            found.append(Action(SERVER, "server hears the board", self.tick))
        if not self.is_armed and self.engine.plan() is not None:
            found.append(Action(SERVER, "server arms", self._arm))
        for sender in self.world.mail(SERVER):
            record = self.world.inboxes[SERVER][sender][0]
            if not self._is_due(sender, record):
                continue
            pace = "notices of server" if sender == SUPERVISOR else SERVER
            name = f"server hears {type(record).__name__} of {sender}"
            found.append(Action(pace, name, partial(self._begin, self._hear, sender)))
        return found

    def may_tick(self) -> bool:
        """Whether time can do something here."""
        return self.doing is None

    def tick(self) -> None:
        """A second has passed: an event like any other."""
        self._begin(self._hear_nothing)

    def _is_due(self, sender: str, record: Record) -> bool:
        """What a dead process has said is heard before its death, and notices before a new process is let in."""
        if isinstance(record, Died | Left):
            return self.world.is_silent(SERVER, _subject(record))
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

    # --- the board ----------------------------------------------------------------------------------------------------

    def _board(self, replica: int) -> Board | None:
        """The board of the incarnation that the tables name."""
        incarnation = self.engine.tables.workers.get(replica, 0)
        if not self.rules.incarnation_has_own_board:
            incarnation = min(incarnation, 1)
        return self.memory.boards.get((replica, incarnation))

    def _undecided(self) -> list[tuple[int, int]]:
        """The replicas and runs of returns on the boards that are not heard."""
        found = []
        for replica in range(self.world.replicas):
            board = self._board(replica)
            if board is not None and board.returned > max(self.memory.committed, self.heard[replica]):
                found.append((replica, board.returned))
        return found

    def _slot(self, replica: int, run: int) -> Slot | None:
        board = self._board(replica)
        slot = board.slots[run % len(board.slots)] if board is not None else None
        return slot if slot is not None and slot.run == run else None

    def _passable(self) -> int | None:
        """The run that all replicas have returned by the board, of the session and with the bases of the plan."""
        undecided = self._undecided()
        runs = {run for _, run in undecided}
        if len(undecided) < self.world.replicas or len(runs) > 1:
            return None
        run = runs.pop()
        if self.rules.pass_is_of_this_session and not self.engine.is_of_session(run):
            return None
        return run if all(self._is_of_plan(replica, run) for replica in range(self.world.replicas)) else None

    def _is_of_plan(self, replica: int, run: int) -> bool:
        slot = self._slot(replica, run)
        base = self.engine.tables.bases.get(replica)
        return (
            slot is not None and base is not None and (slot.base == base.number or not self.rules.pass_compares_bases)
        )

    def _arm(self) -> None:
        if self.rules.arming_flushes:
            self.world.store = self.engine.tables.copy()
        tables, function = self.engine.tables, self.engine.plan()
        assert function is not None
        if self.rules.arming_reads_t or self.function != function:
            self.t = tables.t.get(function, 0)
        self.ticket, self.function, self.is_armed = tables.ticket, function, True

    # --- a pass -------------------------------------------------------------------------------------------------------

    def _pass(self, run: int) -> Iterator[str]:
        """Decide, commit and answer one run, store by store."""
        memory, rules = self.memory, self.rules
        self.ticket, self.t = self.ticket + 1, self.t + 1
        finished = self._finished(run)
        account = self._next_account(run)
        if not rules.committed_last:
            yield from self._count(account)
        memory.commits |= 1
        yield "COMMITS odd"
        memory.tag = (self.ticket, 0)
        yield "TAG"
        yield from self._apply(Commit(self.ticket, run, self.function, self.t), 0)
        memory.done = self.ticket
        yield "DONE"
        memory.commits += 1
        yield "COMMITS even"
        if not rules.answer_after_committed:
            self.world.send(SERVER, self.engine.tables.client, finished)
            yield "RunFinished"
        if rules.committed_last:
            yield from self._count(account)
        for worker in self.world.workers.values():
            worker.wake()
        yield "wake workers"
        if rules.answer_after_committed:
            self.world.send(SERVER, self.engine.tables.client, finished)
            yield "RunFinished"

    def _finished(self, run: int) -> RunFinished:
        values = []
        for replica in range(self.world.replicas):
            slot = self._slot(replica, run)
            assert slot is not None
            values.append(slot.value)
        return RunFinished(run, False, tuple(values))

    def _next_account(self, run: int) -> Account:
        before = self._account()
        return Account(run, self.ticket, before.passed + 1 if before is not None else 1)

    def _account(self) -> Account | None:
        """The half that counts: the one whose run equals COMMITTED."""
        committed = self.memory.committed
        return next((half for half in self.memory.accounts if half.run == committed and committed), None)

    def _count(self, account: Account) -> Iterator[str]:
        memory, rules = self.memory, self.rules
        if not rules.account_before_committed:
            memory.committed = account.run
            yield "COMMITTED"
        counts = [half.run == memory.committed and half.run > 0 for half in memory.accounts]
        half = memory.accounts[1 if counts[0] == rules.account_has_two_halves else 0]
        half.run = account.run
        yield "account: run"
        half.ticket = account.ticket
        yield "account: ticket"
        half.passed = account.passed
        yield "account: passed"
        if rules.account_before_committed:
            memory.committed = account.run
            yield "COMMITTED"

    def _apply(self, commit: Commit, begin: int) -> Iterator[str]:
        """The kernels from piece ``begin`` on, each under undo."""
        memory = self.memory
        for piece in range(begin, PIECES):
            memory.kept = (commit.ticket, piece, memory.pieces[piece])
            yield "kept"
            update = Update(commit.run, commit.function, commit.t, tuple(memory.gradients))
            memory.pieces[piece] = (*memory.pieces[piece], update)
            yield "piece"
            memory.tag = (commit.ticket, piece + 1)
            yield "TAG"

    def _commit(self, commit: Commit) -> Iterator[str]:
        """A commit of the general way. One that a server before this one began, by either way, is taken up."""
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

    # --- everything else ----------------------------------------------------------------------------------------------

    def _hear(self, sender: str) -> Iterator[str]:
        """An event. What is on the board is heard first; it is read after the event has come."""
        rules = self.rules
        self.is_armed = self.is_armed and not rules.events_disarm
        record = self.world.take(SERVER, sender)
        yield "event taken"
        if rules.passes_come_before_event or isinstance(record, Return | Ask):
            yield from self._tell_passes()
        if rules.board_comes_before_event:
            yield from self._hear_boards(self._undecided())
        self.engine.hear(record, sender)
        yield from self._carry_out()

    def _hear_nothing(self) -> Iterator[str]:
        """A tick, or a return by the board while nothing may pass."""
        self.is_armed = self.is_armed and not self.rules.events_disarm
        yield from self._tell_passes()
        yield from self._hear_boards(self._undecided())
        yield "heard"

    def _tell_passes(self) -> Iterator[str]:
        tables, account = self.engine.tables, self._account()
        if account is None or account.passed <= tables.accounted:
            return
        count = account.passed - tables.accounted
        # The bases are those of the plan: they change only in an event, and the passes are told before that.
        self.engine.passed(account.run, account.ticket, count, self._recent(account.run))
        yield "Passed"

    def _recent(self, last: int) -> dict[int, Outcome]:
        """The last passes, from the slots: those that the tables do not know."""
        found: dict[int, Outcome] = {}
        limit = LOOKAHEAD + 1 if self.rules.resume_hears_all_passes else 1
        first = max(self.engine.tables.last, last - self.world.slots) + 1
        for run in range(last, first - 1, -1):
            slots = [slot for slot in (self._slot(r, run) for r in range(self.world.replicas)) if slot is not None]
            if len(slots) == self.world.replicas and len(found) < limit:
                found[run] = Outcome(slots[0].series, False, tuple(slot.value for slot in slots))
        return found

    def _hear_boards(self, undecided: list[tuple[int, int]]) -> Iterator[str]:
        for replica, run in undecided:
            slot, base = self._slot(replica, run), self.engine.tables.bases.get(replica)
            incarnation = self.engine.tables.workers[replica]
            if self.rules.heard_is_set_first:
                self.heard[replica] = max(self.heard[replica], run)
            if slot is not None and base is not None and (base.incarnation, base.number) == (incarnation, slot.base):
                self.heard[replica] = max(self.heard[replica], run)
                record = Return(run, slot.series, replica, incarnation, 0, base.function, "plain", False, slot.value)
                self.engine.returned(record)
            else:
                self.world.ledger.refused(replica, run)
                self.engine.refuse(replica, run)
            yield from self._carry_out()

    def _carry_out(self) -> Iterator[str]:
        """What the engine has decided: a flush first, where others may see what follows."""
        while self.engine.out:
            out, self.engine.out = self.engine.out, []
            if self.engine.must_write:
                self.world.store = self.engine.tables.copy()
                self.engine.must_write = False
                yield "flush"
            for command in out:
                if isinstance(command, Commit):
                    yield from self._commit(command)
                    yield from self._end_commit(command)
                else:
                    self.world.send(SERVER, command.receiver, command.record)
                    yield "sent"

    def _end_commit(self, commit: Commit) -> Iterator[str]:
        if not self.rules.only_passes_raise_committed:
            self.memory.committed = commit.run
            yield "COMMITTED"
        self.engine.committed()

    def _resume(self) -> Iterator[str]:
        """Take up what the server before this one left."""
        rules, tables = self.rules, self.engine.tables
        if rules.resume_counts_passes:
            yield from self._tell_passes()
        else:
            account = self._account()
            tables.accounted = account.passed if account is not None else 0
        if tables.commit is not None:
            yield from self._commit(tables.commit)
            yield from self._end_commit(tables.commit)
            yield from self._carry_out()
        if rules.resume_hears_boards:
            yield from self._hear_boards(self._undecided())
        self.engine.resume()
        yield from self._carry_out()
        self.world.supervisor.server_serves()
        yield "serves"


def _subject(notice: Record) -> str:
    """The process that a notice is about."""
    if isinstance(notice, Left):
        return notice.client
    assert isinstance(notice, Died)
    return worker_name(notice.replica, notice.incarnation)
