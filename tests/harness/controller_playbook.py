"""Conversations with the controller's core: an event, then the commands that must follow, with a readable difference.

A :class:`Playbook` does what the owner of a core does: it leaves waits that are over and tells the core of errors. It
keeps its own account of the runs that are unanswered, of what the server was told of them and of what it was asked, so
generated conversations can say what must follow without looking into the core.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from central_storage.controller.commands import (
    Command,
    Connect,
    End,
    Fail,
    Interrupt,
    NameWait,
    OfferMailbox,
    Post,
    Raise,
    Refuse,
    worker_name,
)
from central_storage.controller.core import ControllerCore
from central_storage.controller.waits import Question, Settling, Wait
from central_storage.core.pipeline import Series
from cs_proto import messages
from cs_proto.arrays import bytes_array
from cs_proto.codec import WORK_LIMITS, decode
from cs_proto.messages import Counters, Died, Error, Resent, Run, RunFinished, WaitReport, Worker, WorkerRestarted
from cs_proto.peers import SERVER
from cs_proto.records import Record, replace

HELLO = messages.Hello(messages.PROTOCOL, "controller", "c", 7)
SERVING = messages.Serving("/run", "ipc")
SEED = 5
#: The name of every function.
NAME = "module.function"
ANSWERS: dict[type[Record], type[Record]] = {
    messages.Assign: messages.Done,
    messages.Create: messages.Created,
    messages.Free: messages.Done,
    messages.Get: messages.Got,
    messages.Statistics: Counters,
}


# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hears:
    """A record comes."""

    record: Record


@dataclass(frozen=True)
class CtrlC:
    """Ctrl-C is pressed, or the handler of a signal has ``raised``."""

    raised: Exception | None = None


@dataclass(frozen=True)
class Passes:
    """So many seconds pass."""

    seconds: float


@dataclass(frozen=True)
class Prepares:
    """The script is about to send a run from this directory, with one entry in its path."""

    path: str
    directory: str


@dataclass(frozen=True)
class Sends:
    """The script sends the next run of the series."""

    function: bytes = b"f"
    frozen: bool = False


@dataclass(frozen=True)
class Settles:
    """The script waits until at most ``left`` runs are unanswered."""

    left: int = 0
    cancel: bool = False


@dataclass(frozen=True)
class Reads:
    """The script has read what came of a run; ``error`` is what it got in place of results."""

    error: BaseException | None = None


@dataclass(frozen=True)
class Asks:
    """The script asks the server."""

    request: Record


Event = Hears | CtrlC | Passes | Prepares | Sends | Settles | Reads | Asks


@dataclass(frozen=True)
class Names:
    """Stands for a NameWait with the pattern in it."""

    pattern: str
    is_run: bool = True

    def fits(self, command: Command) -> bool:
        return (
            isinstance(command, NameWait)
            and command.is_run == self.is_run
            and re.search(self.pattern, command.what) is not None
        )


Expected = Command | Names


# --- records --------------------------------------------------------------------------------------------------------


def worker(replica: int, incarnation: int = 1) -> Worker:
    return Worker(replica, incarnation, 100 * incarnation + replica, f"cpu:{replica}")


def welcome(replicas: int, pid: int = 1) -> messages.Welcome:
    return messages.Welcome(replicas, "CPU:0", pid, tuple(map(worker, range(replicas))))


def digest_of(function: bytes) -> bytes:
    return function.ljust(16, b".")


def a_run(
    number: int,
    replica: int,
    *,
    step: int | None = None,
    function: bytes = b"f",
    brings: bool = False,
    frozen: bool = False,
    series: int = 0,
    lookahead: int = 0,
) -> Run:
    """The Run of ``replica``; ``step`` None is the number of the run, which is counted from 1, less 1."""
    return Run(
        run=(number,),
        step=number - 1 if step is None else step,
        replica=replica,
        seed=SEED,
        digest=digest_of(function),
        function=bytes_array(function) if brings else None,
        frozen=frozen,
        arguments=b"arguments %d" % replica,
        buffers=(),
        series=series,
        lookahead=lookahead,
        held=(),
        name=NAME,
    )


def runs(number: int, replicas: int = 2, **fields: Any) -> list[Command]:
    """Every worker is sent its Run."""
    return [Post(worker_name(replica), a_run(number, replica, **fields)) for replica in range(replicas)]


def finished(number: int, error: Error | None = None) -> RunFinished:
    return RunFinished((number,), (), error, 0)


def fault(code: str = "ValueError") -> Error:
    return Error(code, "no", None, "", 0, 0, "")


def died(role: Any, rank: int = 0, *, incarnation: int = 1, restarts: bool = True) -> Died:
    return Died(role, rank, incarnation, 100 * incarnation + rank, "SIGKILL", "", restarts)


def restarted(number: int, replica: int, incarnation: int = 2) -> WorkerRestarted:
    return WorkerRestarted((number,), worker(replica, incarnation))


def counters(number: int) -> Counters:
    return Counters(number, 1, 1.0, 0, 0, 0, 0, 0, 0, ())


def asked(request: Record) -> Post:
    return Post(SERVER, request)


def cancels(number: int, later: int, sequence: int) -> list[Command]:
    """The server is told to give the runs up, and asked whether it has heard."""
    return [asked(messages.Cancel((number,), later)), asked(messages.Statistics(sequence))]


def interrupts(number: int, later: int, replicas: Iterable[int] = (0, 1)) -> list[Command]:
    """The workers are told, too, and those that live are interrupted."""
    told = [Post(worker_name(replica), messages.Cancel((number,), later)) for replica in (0, 1)]
    return [*told, *map(Interrupt, replicas)]


# --- the playbook ---------------------------------------------------------------------------------------------------


class Playbook:
    """One script and its service, seen from the core."""

    def __init__(self, replicas: int = 2, *, lookahead: int = 0, in_process: bool = False) -> None:
        self.replicas = replicas
        self.core = ControllerCore("c", 7, in_process=in_process)
        self.now = 100.0
        self.waits: list[Wait] = []
        self.answers: list[Any] = []
        self.has_ended = False
        self.transcript: list[str] = []
        self.begin(lookahead)
        # The account: the messages of the runs that are unanswered, by replica, and their functions; the Prepare; what
        # the server was told of the runs, and what it was asked and has not answered.
        self.unanswered: list[tuple[list[Run], bytes]] = []
        self.prepared: list[Record] = []
        self.told: list[Resent | WaitReport] = []
        self.asked: list[Record] = []

    def begin(self, lookahead: int = 0) -> Playbook:
        """The next runs are of a series of their own."""
        self.series = Series(cast(Any, None), lookahead)
        return self

    def welcomed(self) -> Playbook:
        """The controller has said hello and is welcome."""
        question, commands = self.core.hello(self.now)
        assert commands == [asked(HELLO)]
        assert self.core.hear(welcome(self.replicas), self.now) == []
        assert question.is_over
        self.core.leave(question)
        return self

    def on(self, event: Event, *expected: Expected) -> Playbook:
        """Give ``event``; exactly ``expected`` must follow, in order."""
        commands = self.does(event)
        wanted = list(expected)
        fits = len(wanted) == len(commands) and all(
            e.fits(c) if isinstance(e, Names) else e == c for e, c in zip(wanted, commands, strict=True)
        )
        if not fits:
            lines = difflib.ndiff([str(item) for item in wanted], [str(item) for item in commands])
            raise AssertionError(
                "\n".join(["the conversation:", *self.transcript[-30:], "expected (-), happened (+):", *lines])
            )
        return self

    def does(self, event: Event) -> list[Command]:
        """Give ``event``; what the core commands, and the Runs that it has sent."""
        commands = self._give(event)
        self._account(event, commands)
        self.transcript += [f"> {event}", *(f"    {command}" for command in commands)]
        for command in commands:
            if isinstance(command, End):
                self.has_ended = True
            elif isinstance(command, Fail | Raise | Refuse) and self.waits:
                wait, is_over = self.waits[-1], isinstance(command, Raise) or command == Fail(KeyboardInterrupt)
                if isinstance(wait, Settling) and not is_over:
                    assert self.core.fail(wait, RuntimeError(str(command))) == []
                self._leave()
        while self.waits and self.waits[-1].is_over:
            self._leave()
        return commands

    def _leave(self) -> None:
        wait = self.waits.pop()
        self.core.leave(wait)
        if isinstance(wait, Question):
            self.answers.append(wait.answer)
            if not wait.is_over and hasattr(wait.request, "sequence"):
                return  # it was left off, and its answer is yet to come
        self.asked = [request for request in self.asked if request not in wait.asked]

    def _give(self, event: Event) -> list[Command]:
        core = self.core
        match event:
            case Hears(record):
                return core.hear(record, self.now)
            case CtrlC(raised):
                return core.interrupt(self.now, raised)
            case Passes(seconds):
                self.now += seconds
                return core.tick(self.now)
            case Reads(error):
                return core.delivered(error or [None] * self.replicas, self.now)
            case Prepares(path, directory):
                return core.prepare([path], directory)
            case Sends(function, frozen):
                return self._send(function, frozen)
            case Settles(left, cancel):
                settling, commands = core.settle(self.series, left, self.now, cancel=cancel)
                self.waits.append(settling)
                return commands
            case Asks(request):
                question, commands = core.ask(request, ANSWERS[type(request)], self.now)
                self.waits.append(question)
                return commands

    def _send(self, function: bytes, frozen: bool) -> list[Command]:
        beginning = self.core.next_run(self.series, NAME, digest_of(function), frozen)
        runs = [
            Run(
                run=beginning.run,
                step=beginning.step,
                replica=replica,
                seed=SEED,
                digest=digest_of(function),
                function=bytes_array(function) if lacks else None,
                frozen=frozen,
                arguments=b"arguments %d" % replica,
                buffers=(),
                series=beginning.series,
                lookahead=beginning.lookahead,
                held=(),
                name=beginning.name,
                check_numerics="off",
                changes=(),
            )
            for replica, lacks in enumerate(beginning.lacks)
        ]
        said = [tuple(run.__dict__.values()) for run in runs]
        encoded = self.core.begin_run(self.series, beginning, said, function, [])
        return [Post(peer, decode(parts, WORK_LIMITS)) for peer, parts in encoded]

    def _account(self, event: Event, commands: list[Command]) -> None:
        posts = [command for command in commands if isinstance(command, Post)]
        if isinstance(event, Sends):
            self.unanswered.append(([cast(Run, post.message) for post in posts], event.function))
        if isinstance(event, Prepares) and posts:
            self.prepared = [cast(Record, posts[0].message)]
        if isinstance(event, Reads):
            self.unanswered = [] if event.error is not None else self.unanswered[1:]
        if event != Hears(SERVING):
            for post in posts:
                if isinstance(post.message, Resent | WaitReport):
                    self.told.append(post.message)
                elif post.peer == SERVER:
                    self.asked.append(cast(Record, post.message))
        numbers = [said[0].run for said, _ in self.unanswered]
        self.told = [told for told in self.told if told.run in numbers]

    def gives_up(self) -> None:
        """No run is unanswered any more."""
        self.unanswered, self.told = [], []

    def finishes_write(self) -> bool:
        """The script waits for a write that Ctrl-C has left; whether there is one."""
        question = self.core.finish_write(self.now)
        if question is not None:
            self.waits.append(question)
        return question is not None

    def taken_up(self, first: int, replica: int, incarnation: int = 2) -> list[Command]:
        """What must follow when ``replica`` has a new worker that needs the runs from ``first`` on."""
        peer = worker_name(replica)
        commands: list[Command] = [Connect(worker(replica, incarnation))]
        commands += [Post(peer, prepared) for prepared in self.prepared]
        again = [(said[replica], function) for said, function in self.unanswered if said[0].run >= (first,)]
        brought: set[bytes] = set()
        for run, function in again:
            if not brought:
                commands.append(asked(Resent(run.run, replica, run.series)))
            commands.append(Post(peer, replace(run, function=None), None if function in brought else function))
            brought.add(function)
        return commands

    def told_again(self) -> list[Command]:
        """What must follow when another server serves."""
        return [OfferMailbox(), asked(HELLO), *map(asked, self.told), *map(asked, self.asked)]
