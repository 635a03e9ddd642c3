"""The death of a worker at every event of a run: what follows is what would have followed, or an error that says why
not; and each rule of replays by itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tests.harness.playbook import (
    CONTROLLER,
    Playbook,
    Says,
    applies,
    assigns,
    dies,
    first_apply,
    hears,
    lies,
    makes,
    merge_calls,
    notes_write,
    reads,
    reduces,
    register,
    result,
    scalar,
    spec,
    to,
    w,
    worker,
)

from cs_proto.messages import (
    Accepted,
    Ask,
    Assign,
    Cancel,
    Committed,
    CreatedInRun,
    Done,
    Hello,
    MergeCallPoint,
    MergeCallReturn,
    Merged,
    PointFailed,
    Preserve,
    ReadPoint,
    Reduced,
    Refused,
    Registered,
    Resent,
    Return,
    RunFinished,
    StepFinished,
    Token,
    Welcome,
    WorkerRestarted,
)
from cs_server.events import Command, Commit, Compute, Computed, Event, Fingerprint, Fingerprinted, Log, Send

# --- a service whose workers may die at any event -------------------------------------------------------------------

ANSWERS = (Accepted, Committed, CreatedInRun, Merged, PointFailed, Preserve, Reduced, Token)
PRESERVED = (ReadPoint, MergeCallPoint)


def fell(replica: int, incarnation: int = 1, *, restarts: bool = True) -> Event:
    """A worker's death, after which another is started."""
    event = dies(replica, incarnation)
    return replace(event, died=replace(event.died, restarts=restarts))


class Actor:
    """A worker: it carries out a program, step by step, as ``cs_worker`` would."""

    def __init__(self, replica: int, incarnation: int) -> None:
        self.replica, self.incarnation = replica, incarnation
        self.sets: dict[int, int] = {}
        self.run: tuple[int, ...] | None = None

    def begin(self, run: tuple[int, ...], program: list[str], series: int) -> None:
        self.run, self.series = run, series
        self.program = list(program)
        self.notes: list[Any] = []
        self.k = self.writes = 0
        self.waits: Any = None
        self.next: Any = None
        self.asked: Any = None

    def step(self) -> Event | None:
        """What it sends next; None while it waits or has nothing to do."""
        if self.run is not None and self.next is not None:
            said, self.next = self.next, None
            return hears(w(self.replica, self.incarnation), said)
        if self.run is None or self.waits is not None:
            return None
        while True:
            what = self.program.pop(0)
            value = 10 * self.replica + self.k
            if what.startswith("first "):  # what only replica 0 does
                if self.replica:
                    continue
                what = what.removeprefix("first ")
            if what == "apply" and 1 in self.sets:
                self._note(applies(self.k, self.sets[1], line=self.incarnation))
            elif what == "assign":
                self._note(assigns(self.k, scalar(value), variable=2, line=self.incarnation))
            elif what == "write":
                self.notes.append(self._write(value))
                self.writes += 1
            elif what == "return":
                head = (self.run, self.replica, self.incarnation, tuple(self.notes))
                self.run = None
                return self._says(Return(*head, self.k, result(self.replica), None, self.series))
            else:
                return self._ask(self._point(what, value))

    def hear(self, record: Any) -> None:
        if self.run is None or self.waits is None or record.run != self.run or record.k != self.waits.k:
            return
        if isinstance(record, Preserve):
            self.next = self.asked = replace(self.asked, preserved=True)
            return
        self.next = None
        if isinstance(record, Accepted):
            self.sets[1] = record.variable_sets[0]
        if isinstance(record, PointFailed):
            self.program, self.notes = ["return"], []
        if isinstance(record, Token):
            self.next = MergeCallReturn(record.run, record.k, tuple(map(result, range(len(record.arguments)))), None)
        self.waits = None

    def _write(self, value: float) -> Any:
        return notes_write(self.k, self.writes, scalar(value), variable=3, op="assign_add", line=self.incarnation)

    def _note(self, point: Any) -> None:
        self.notes.append(point)
        self.k += 1

    def _point(self, what: str, value: float) -> Any:
        match what:
            case "apply":
                return first_apply(self.k, 1, line=self.incarnation)
            case "reduce":  # too large for a frame; it lies elsewhere in each incarnation
                there = lies(f"arena/{self.replica}", 64 * self.incarnation, (1000,))
                return reduces(self.k, scalar(value), there, line=self.incarnation)
            case "create":
                return makes(self.k, spec(f"made {self.k}"), scalar(value))
            case "read":
                return reads(self.k)
            case "merge_call":
                return merge_calls(self.k, bytes([self.replica]))
        raise AssertionError(what)

    def _ask(self, point: Any) -> Event:
        is_preserved = isinstance(point, PRESERVED)
        head = (self.run or (), self.replica, self.incarnation, tuple(self.notes))
        ask = self.asked = Ask(*head, point, self.series, preserved=is_preserved)
        self.notes, self.waits = [], point
        self.k += not isinstance(point, type(reads(0)))
        return self._says(ask)

    def _says(self, record: Any) -> Event:
        return hears(w(self.replica, self.incarnation), record)


@cache
def _begun(replicas: int) -> Playbook:
    """What every world begins with."""
    book = Playbook(replicas).begin()
    return book.has(spec("w"), spec("n"), replace(spec("local"), ordinary=True)).has_optimizer()


class World:
    """A controller that sends runs and workers that carry them out, around one engine; one of them dies once."""

    def __init__(self, programs: list[list[str]], replicas: int = 2, series: bool = False) -> None:
        self.book = _begun(replicas).copy()
        self.programs = programs
        self.series = series
        self.actors = [Actor(replica, 1) for replica in range(replicas)]
        self.said: list[Any] = []
        self.done: list[Any] = []
        self.sent = 0
        self.finished = 0
        self.failed = False
        self.events = 0
        self.deaths: list[tuple[int, int]] = []
        self.pending: list[Event] = []
        self.changing: set[int] = set()

    def play(self, death: tuple[int, int] | None = None, *, late: bool = False) -> World:
        """Until nothing happens any more. ``death``: of this replica before that event; its successor comes at once,
        or ``late``, when nobody else can go on."""
        while True:
            if death is not None and death[1] == self.events:
                replica, death = death[0], None
                self.kill(replica)
                if late:
                    while self.turn():
                        pass
                self.restart(replica)
            if not self.turn():
                if death is None:
                    return self
                self.events += 1  # past the end: it dies idle

    def kill(self, replica: int) -> None:
        actor = self.actors[replica]
        self.deaths.append((self.finished, len(self.done)))
        actor.run = None
        self.give(fell(replica, actor.incarnation))

    def restart(self, replica: int) -> None:
        incarnation = self.actors[replica].incarnation + 1
        self.actors[replica] = Actor(replica, incarnation)
        self.give(hears(w(replica, incarnation), register(replica, incarnation)))

    def turn(self) -> bool:
        """One event more; False where there is none."""
        self.events += 1
        if self.pending:
            self.give(self.pending.pop(0))
            return True
        ahead = 2 if self.series else 0
        if self.sent < len(self.programs) and self.sent <= self.finished + ahead and not (self.failed and self.series):
            self.sent += 1
            return True
        self.begin()
        for actor in self.actors:
            event = actor.step()
            if event is not None:
                self.give(event)
                return True
        self.events -= 1
        return False

    def begin(self) -> None:
        """Workers begin what they have been sent: a step of a series when the one before it is over."""
        for actor in self.actors:
            if actor.run is None and self.started(actor) < min(self.sent, self.finished + 1):
                self.at[actor] = self.started(actor) + 1
                number = self.at[actor]
                actor.begin((number,), self.programs[number - 1], int(self.series))

    @property
    def at(self) -> dict[Actor, int]:
        return self.__dict__.setdefault("_at", {})

    def started(self, actor: Actor) -> int:
        return self.at.get(actor, 0 if actor.incarnation == 1 else 1 << 20)

    def give(self, event: Event) -> None:
        for command in self.book.does(event):
            self.carry_out(command)

    def carry_out(self, command: Command) -> None:
        match command:
            case Commit(ticket, operations):
                self.done.append(operations)
                self.pending.append(self.book.finished())
                assert ticket
            case Compute(ticket, _, _, components):
                values = [part.place for part, _ in components]
                self.done.append(values)
                self.pending.append(Computed(ticket, (scalar(7), scalar(8)), None))
            case Fingerprint(ticket):
                self.pending.insert(0, Fingerprinted(ticket, b"the same"))
            case Send(peer, WorkerRestarted(run, there)) if peer == CONTROLLER:
                self.at[self.actors[there.replica]] = run[0] - 1
                if run[0] <= self.sent:
                    self.give(hears(CONTROLLER, Resent(run, there.replica)))
            case Send(peer, RunFinished() as record) if peer == CONTROLLER:
                self.said.append(record)
                self.finished += 1
                self.failed |= record.error is not None
            case Send(peer, record):
                for actor in self.actors:
                    if peer == w(actor.replica, actor.incarnation) and isinstance(record, ANSWERS):
                        actor.hear(record)

    def outcome(self) -> tuple[list[Any], list[Any]]:
        return self.said, self.done


PLAIN = ["apply", "reduce", "assign", "return"]
NOTES = ["write", "apply", "assign", "write", "return"]
MAKES = ["create", "reduce", "reduce", "apply", "write", "return"]
MERGES = ["reduce", "merge_call", "reduce", "assign", "return"]
READS = ["reduce", "apply", "read", "reduce", "assign", "return"]
ONE_READS = ["reduce", "apply", "first read", "reduce", "assign", "return"]


def deaths(programs: list[list[str]], replicas: int, series: bool) -> list[tuple[int, int]]:
    undisturbed = World(programs, replicas, series).play()
    return [(replica, event) for replica in range(replicas) for event in range(1, undisturbed.events + 2)]


def of_thirds(found: list[tuple[int, int]], thirds: tuple[int, ...]) -> list[tuple[int, int]]:
    """Every third of them, beginning with these: their remainders by 4, which decide what is late, take turns."""
    return [death for number, death in enumerate(found) if number % 3 in thirds]


@pytest.mark.parametrize(
    ("series", "thirds"),
    [
        pytest.param(False, (0,), id="runs, a third of all events"),
        pytest.param(True, (1,), id="steps, a third of all events", marks=pytest.mark.long),
        pytest.param(False, (1, 2), id="runs, the other events", marks=pytest.mark.slow),
        pytest.param(True, (0, 2), id="steps, the other events", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("program", [PLAIN, NOTES, MAKES, MERGES], ids=["plain", "notes", "makes", "merges"])
def test_a_death_at_any_event_changes_nothing(
    program: list[str], replicas: int, series: bool, thirds: tuple[int, ...]
) -> None:
    programs = [program, PLAIN]
    wanted = World(programs, replicas, series).play().outcome()
    assert [record.error for record in wanted[0]] == [None] * 2
    for death in of_thirds(deaths(programs, replicas, series), thirds):
        world = World(programs, replicas, series).play(death, late=sum(death) % 4 < 2)
        assert world.outcome() == wanted, f"{death}\n" + "\n".join(world.book.transcript[-60:])


@pytest.mark.parametrize(
    "thirds",
    [
        pytest.param((0,), id="a third of all events"),
        pytest.param((1, 2), id="the other events", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("replicas", "reads"),
    [(1, READS), *(pytest.param(2, reads, marks=pytest.mark.long) for reads in (READS, ONE_READS))],
)
def test_a_run_that_has_read_its_own_update_is_lost_and_says_what_stands(
    replicas: int, reads: list[str], thirds: tuple[int, ...]
) -> None:
    programs = [PLAIN, reads, PLAIN]
    wanted = World(programs, replicas).play()
    lost = 0
    tried = of_thirds(deaths(programs, replicas, False), thirds)
    for death in tried:
        world = World(programs, replicas).play(death, late=sum(death) % 2 == 0)
        before, second, after = world.said
        assert before.error is after.error is None
        if second.error is None:
            assert world.outcome() == wanted.outcome()
            continue
        lost += 1
        assert second.error.exception == "cs.ReplicaLostError"
        assert "1 commit of this run is kept, the rest was dropped; what a replica has read" in second.error.message
        assert second.commits == 1
        assert len(world.done) < len(wanted.done)  # what came after was not committed
    assert 0 < lost < len(tried) / 2


def test_two_deaths_of_different_replicas_in_one_run_change_nothing() -> None:
    wanted = World([PLAIN, PLAIN]).play().outcome()
    for first in range(2, 20, 2):
        world = World([PLAIN, PLAIN])
        for _ in range(first):
            world.turn()
        world.kill(1)
        world.turn()
        world.kill(0)
        world.restart(0)
        world.turn()
        world.restart(1)
        assert world.play().outcome() == wanted


def test_one_that_dies_while_it_is_started_again_is_started_once_more() -> None:
    wanted = World([PLAIN]).play().outcome()
    for event in range(1, 12):
        world = World([PLAIN])
        for _ in range(event):
            world.turn()
        world.kill(1)
        for incarnation in (2, 3):  # before they register
            world.give(fell(1, incarnation))
        world.actors[1].incarnation = 3
        world.restart(1)
        assert world.play().outcome() == wanted


# --- each rule by itself --------------------------------------------------------------------------------------------


def again(replica: int, incarnation: int = 2, replicas: int = 2) -> list[Any]:
    """What follows when the successor of a worker registers."""
    workers = tuple(worker(r, incarnation if r == replica else 1) for r in range(replicas))
    registered = Registered(replicas, "CPU:0", workers)
    return [Send(w(r, incarnation if r == replica else 1), registered) for r in range(replicas)]


def replaced(book: Playbook, replica: int, *, owes: int, incarnation: int = 2) -> None:
    """A worker dies, and another takes its place."""
    book.does(fell(replica, incarnation - 1))
    answer = book.does(hears(w(replica, incarnation), register(replica, incarnation)))
    restarted = WorkerRestarted((owes,), worker(replica, incarnation))
    assert answer[-1] == Send(CONTROLLER, restarted)


def asked(replica: int, point: Any, *notes: Any, incarnation: int = 2, run: tuple[int, ...] = (1,)) -> Event:
    is_preserved = isinstance(point, PRESERVED)
    return hears(w(replica, incarnation), Ask(run, replica, incarnation, notes, point, preserved=is_preserved))


def returned(replica: int, count: int, *notes: Any, incarnation: int = 2, run: tuple[int, ...] = (1,)) -> Event:
    return hears(w(replica, incarnation), Return(run, replica, incarnation, notes, count, result(replica), None))


def test_a_worker_that_dies_idle_is_announced_when_it_is_back() -> None:
    book = Playbook(2).begin()
    book.does(returned(0, 0, incarnation=1))
    book.does(returned(1, 0, incarnation=1))
    death = fell(1)
    died = book.does(death)
    assert [type(command) for command in died] == [Log]
    restarted = WorkerRestarted((2,), worker(1, 2))
    book.on(hears(w(1, 2), register(1, 2)), *again(1), Send(CONTROLLER, restarted))
    late = hears(w(1), Return((2,), 1, 1, (), 0, result(1), None))
    book.on(late, to(w(1), Refused, "cs.Fenced", "w1.1 has been replaced"))


def test_a_run_that_begins_while_a_worker_is_started_again_waits_for_it() -> None:
    book = Playbook(2).begin()
    book.does(fell(1))
    book.on(asked(0, reduces(0, scalar(1)), incarnation=1))
    book.on(hears(w(1, 2), register(1, 2)), *again(1), Send(CONTROLLER, WorkerRestarted((1,), worker(1, 2))))
    assert any(isinstance(command, Compute) for command in book.does(asked(1, reduces(0, scalar(2)))))


def test_nobody_is_told_of_a_worker_while_a_step_it_returned_from_is_not_over() -> None:
    book = Playbook(2).begin()
    book.does(hears(w(1), Return((1,), 1, 1, (), 0, result(1), None, 1)))
    book.does(fell(1))
    book.on(hears(w(1, 2), register(1, 2)), *again(1))
    over = book.does(hears(w(0), Return((1,), 0, 1, (), 0, result(0), None, 1)))
    assert [command.record for command in over if isinstance(command, Send)] == [
        StepFinished((1,), False),
        StepFinished((1,), False),
        RunFinished((1,), (result(0), result(1)), None, 0),
        WorkerRestarted((2,), worker(1, 2)),
    ]


def test_nobody_is_told_of_a_worker_while_values_are_written() -> None:
    """Else it would begin a run, and read a value of which a part is written."""
    book = Playbook(2).begin().has(spec("w"))
    book.does(fell(1))
    assign = Assign("c", book.sequence(), 1, "assign_add", scalar(1))
    assert any(isinstance(command, Commit) for command in book.does(hears(CONTROLLER, assign)))
    book.on(hears(w(1, 2), register(1, 2)), *again(1))
    done, restarted = Done(assign.sequence, 1, 1), WorkerRestarted((1,), worker(1, 2))
    book.on(book.finished(), Send(CONTROLLER, done), Send(CONTROLLER, restarted))


def test_nobody_is_told_of_a_worker_while_a_run_fails() -> None:
    """Else it would begin the step after, and the one that fails would be over before the other replica returns."""
    book = Playbook(2).begin()
    book.does(fell(0))
    book.on(hears(CONTROLLER, Cancel((1,), 2)))
    book.on(hears(w(0, 2), register(0, 2)), *again(0))
    book.on(
        hears(w(1), Return((1,), 1, 1, (), 0, result(1), None, 1)),
        Send(w(1), StepFinished((1,), True)),
        to(CONTROLLER, RunFinished, "KeyboardInterrupt"),
        Send(CONTROLLER, WorkerRestarted((2,), worker(0, 2))),
    )


WROTE = notes_write(0, 0, scalar(4), variable=3, op="assign_add")


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            asked(1, reduces(0, scalar(3)), WROTE),
            r"diverged at all_reduce SUM .*, merge point 0.*other values",
        ),
        (asked(1, reduces(0, scalar(2), op="MEAN"), WROTE), "diverged at all_reduce MEAN .*reached all_reduce SUM"),
        (asked(1, reads(0), replace(WROTE, value=scalar(5))), "replay diverged at assign_add of variable 3"),
        (returned(1, 0), "it returned after 0 merge points, but had reached 1 merge point and sent 1 write notes"),
    ],
    ids=["value", "op", "write", "returns early"],
)
def test_a_replay_that_differs_is_refused(event: Event, words: str) -> None:
    book = Playbook(2).begin().has(spec("w"), spec("n"), replace(spec("local"), ordinary=True))
    book.does(asked(1, reduces(0, scalar(2)), WROTE, incarnation=1))
    replaced(book, 1, owes=1)
    book.does(event)
    book.does(returned(0, 0, incarnation=1))
    if isinstance(event.record, Ask):
        error = failed_error(book)
        assert error.exception == "cs.ReplicaLostError"
        book.does(hears(w(1, 2), Return((1,), 1, 2, (), 1, None, error)))
    (finished,) = [c.record for c in book.commands if isinstance(c, Send) and isinstance(c.record, RunFinished)]
    assert to(CONTROLLER, RunFinished, "cs.ReplicaLostError", words).fits(Send(CONTROLLER, finished))
    assert "The next run works" in finished.error.message


def test_other_bytes_behind_the_same_record_are_another_replay() -> None:
    book = Playbook(2).begin()
    large = lies("arena/1", 0, (1000,))
    book.does(asked(1, reduces(0, large), incarnation=1))
    first = next(c for c in book.does(fell(1)) if isinstance(c, Fingerprint))
    assert first.arrays == (large,)
    book.on(Fingerprinted(first.ticket, b"one"))
    book.does(hears(w(1, 2), register(1, 2)))
    book.does(asked(0, reduces(0, large), incarnation=1))
    moved = lies("arena/1", 64, (1000,))
    (check,) = book.does(asked(1, reduces(0, moved)))
    assert check == Fingerprint(check.ticket, (moved,))
    assert book.resume() == [check]
    why = "replay diverged at all_reduce.*merge point 0: its values differ from those before"
    failed = [to(w(0), PointFailed, "cs.ReplicaLostError", why), to(w(1, 2), PointFailed, "cs.ReplicaLostError", why)]
    book.on(Fingerprinted(check.ticket, b"another"), *failed)


def test_gradients_are_compared_where_they_lie() -> None:
    book = Playbook(2).begin().has(spec("w", (4,)), spec("v", (2,))).has_optimizer().has_set(1, 2)
    book.does(asked(1, reduces(1, scalar(1)), applies(0), incarnation=1, run=(2,)))
    (_, asked_for) = book.does(fell(1))
    assert asked_for.arrays == (lies("gradients/1/0/float32", 0, (4,)), lies("gradients/1/0/float32", 64, (2,)))


def test_a_run_that_kills_the_same_replica_twice_is_given_up() -> None:
    book = Playbook(2).begin()
    book.does(asked(0, reduces(0, scalar(1)), incarnation=1))
    replaced(book, 1, owes=1)
    why = r"replica 1 \(pid 101, w1.2\) was lost in run 1: SIGKILL. 0 commits .* second worker of this replica"
    failed = to(w(0), PointFailed, "cs.ReplicaLostError", why)
    book.on(fell(1, 2), Says("died"), failed)
    echo = hears(w(0), Return((1,), 0, 1, (), 1, None, failed_error(book)))
    book.on(echo, to(CONTROLLER, RunFinished, "cs.ReplicaLostError", why, commits=0))
    answer = book.does(hears(w(1, 3), register(1, 3)))
    assert answer[-1] == Send(CONTROLLER, WorkerRestarted((2,), worker(1, 3)))  # the next run works


def test_a_death_that_nobody_told_is_known_by_that_of_the_next_worker() -> None:
    """A supervisor may end after it started a worker and before it told the death of the one before."""
    book = Playbook(2).begin()
    book.does(asked(0, reduces(0, scalar(1)), incarnation=1))
    book.does(asked(1, reduces(0, scalar(1)), incarnation=1, run=(2,)))
    book.on(fell(1, 2), Says("died"))
    answer = book.does(hears(w(1, 3), register(1, 3)))
    assert answer[-1] == Send(CONTROLLER, WorkerRestarted((1,), worker(1, 3)))
    failed = to(w(0), PointFailed, "cs.ReplicaLostError", "second worker of this replica")
    *_, last = book.does(fell(1, 3))
    assert failed.fits(last)


def failed_error(book: Playbook) -> Any:
    return next(
        c.record.error for c in reversed(book.commands) if isinstance(c, Send) and hasattr(c.record, "ends_run")
    )


def test_a_run_of_which_nothing_was_heard_is_known_by_its_being_sent_again() -> None:
    book = Playbook(1).begin()
    replaced(book, 0, owes=1)
    book.on(hears(CONTROLLER, Resent((1,), 0)))
    *_, finished = book.does(fell(0, 2))
    assert to(CONTROLLER, RunFinished, "cs.ReplicaLostError", "second worker").fits(finished)
    book.on(hears(CONTROLLER, Resent((1,), 0)))  # late: it is over


def test_a_run_that_fails_does_not_wait_for_another_worker_that_is_started_again() -> None:
    book = Playbook(2).begin()
    book.does(fell(0))
    book.does(fell(1))
    book.does(hears(w(0, 2), register(0, 2)))
    book.on(hears(CONTROLLER, Resent((1,), 0)))
    *_, finished = book.does(fell(0, 2))
    assert to(CONTROLLER, RunFinished, "cs.ReplicaLostError", "second worker").fits(finished)
    answer = book.does(hears(w(1, 2), register(1, 2)))
    assert answer[-1] == Send(CONTROLLER, WorkerRestarted((2,), worker(1, 2)))


def test_no_more_restarts_is_the_end_of_the_run() -> None:
    book = Playbook(2).begin()
    book.does(asked(0, reduces(0, scalar(1)), incarnation=1))
    book.does(fell(1))
    why = "w1.2. was lost in run 1: SIGKILL. .*its worker is not restarted; make a new CentralStorageStrategy"
    *_, failed = book.does(fell(1, 2, restarts=False))
    assert to(w(0), PointFailed, "cs.ReplicaLostError", why).fits(failed)


def test_a_cancelled_run_does_not_wait_for_a_worker_that_is_started_again() -> None:
    book = Playbook(2).begin()
    book.does(asked(0, reduces(0, scalar(1)), incarnation=1))
    book.does(fell(1))
    book.on(hears(CONTROLLER, Cancel((1,))), to(w(0), PointFailed, "KeyboardInterrupt"))
    error = failed_error(book)
    echo = hears(w(0), Return((1,), 0, 1, (), 1, None, error))
    book.on(echo, to(CONTROLLER, RunFinished, "KeyboardInterrupt"))
    book.on(hears(w(1, 2), register(1, 2)), *again(1), Send(CONTROLLER, WorkerRestarted((2,), worker(1, 2))))


def test_a_new_worker_that_was_named_owes_a_run_that_is_cancelled_then() -> None:
    """Its name is lost with the server, so the next server names it again."""
    book = Playbook(2).begin()
    book.does(returned(0, 0, incarnation=1))
    replaced(book, 1, owes=1)
    book.on(hears(CONTROLLER, Cancel((1,))))
    again = book.does(hears(CONTROLLER, Hello(1, "controller", "c", 7)))
    assert again[1:] == [Send(CONTROLLER, WorkerRestarted((1,), worker(1, 2)))]
    book.on(hears(CONTROLLER, Resent((1,), 1)))
    book.on(returned(1, 0), to(CONTROLLER, RunFinished, "KeyboardInterrupt"))


def test_a_controller_that_comes_meanwhile_waits_for_its_welcome() -> None:
    book = Playbook(2)
    for replica in range(2):
        book.does(hears(w(replica), register(replica)))
    book.does(fell(1))
    book.on(hears(CONTROLLER, Hello(1, "controller", "c", 7)))
    *_, welcome = book.does(hears(w(1, 2), register(1, 2)))
    assert isinstance(welcome.record, Welcome)
    assert welcome.record.workers[1] == worker(1, 2)


# --- merge_call -----------------------------------------------------------------------------------------------------


def with_token(replicas: int = 2) -> Playbook:
    """Replica 0 holds the token of merge point 0 of run 1."""
    book = Playbook(replicas).begin().has(spec("w"))
    for replica in range(replicas):
        book.does(asked(replica, merge_calls(0), incarnation=1))
    return book


NESTED = (1, 0, 0)


def test_a_replica_that_comes_to_a_merge_call_again_is_named_to_the_holder() -> None:
    book = with_token()
    book.does(asked(0, reduces(0, scalar(1)), incarnation=1, run=NESTED))
    replaced(book, 1, owes=1)
    book.on(asked(1, merge_calls(0)), Send(w(0), WorkerRestarted(NESTED, worker(1, 2))))
    (computed,) = book.does(asked(1, reduces(0, scalar(2)), run=NESTED))
    assert isinstance(computed, Compute)


def test_a_server_in_the_place_of_another_says_again_who_came() -> None:
    book = with_token()
    replaced(book, 1, owes=1)
    book.does(asked(1, merge_calls(0)))
    told = book.does(hears(CONTROLLER, Hello(1, "controller", "c", 7)))
    assert told[1:] == [
        Send(CONTROLLER, WorkerRestarted((1,), worker(1, 2))),
        Send(w(0), WorkerRestarted(NESTED, worker(1, 2))),
    ]


def test_a_holder_that_dies_gets_the_token_again_and_the_nested_run_goes_on() -> None:
    book = with_token()
    book.does(asked(1, reduces(0, scalar(2)), incarnation=1, run=NESTED))
    replaced(book, 0, owes=1)
    book.on(asked(0, merge_calls(0)), to(w(0, 2), Token, run=(1,), k=0))
    (computed,) = book.does(asked(0, reduces(0, scalar(1)), run=NESTED))
    assert isinstance(computed, Compute)


def test_a_holder_that_dies_after_its_merge_function_gets_what_it_returned() -> None:
    book = with_token()
    values = (result(0), result(1))
    book.does(hears(w(0), MergeCallReturn((1,), 0, values, None)))
    replaced(book, 0, owes=1)
    book.on(asked(0, merge_calls(0)), Send(w(0, 2), Merged((1,), 0, result(0))))


def test_a_merge_function_that_has_written_is_not_repeated() -> None:
    book = with_token()
    book.does(hears(w(0), Assign("1.0", 1, 1, "assign", scalar(3))))
    book.does(book.finished())
    *_, failed = book.does(fell(1))
    assert isinstance(failed, Log)  # replica 0 is at work and is told at its next point
    book.does(hears(w(0), MergeCallReturn((1,), 0, (result(0), result(1)), None)))
    *_, finished = book.does(returned(0, 1, incarnation=1))
    assert to(CONTROLLER, RunFinished, "cs.ReplicaLostError", "what a replica has read of its own").fits(finished)


def test_nested_runs_that_are_forgotten_cannot_be_repeated_by_another_holder() -> None:
    book = with_token()
    for run in (NESTED, (1, 0, 1)):
        for replica in range(2):
            book.does(returned(replica, 0, incarnation=1, run=run))
    book.does(fell(0))
    *_, finished = book.does(returned(1, 1, incarnation=1))
    assert to(CONTROLLER, RunFinished, "cs.ReplicaLostError", "nested in it that are over").fits(finished)
