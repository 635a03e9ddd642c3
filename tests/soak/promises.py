"""The promises that are tried over and over: what each says, how a session of it is attacked, and how often.

A session is made from one seed and has up to ``per_session`` trials. The seed decides who is hit, how, when and in
which kind of training; what the machine does at that instant it cannot decide, so a seed that has failed once may
have to be run more than once.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import psutil
from tests.harness.processes import ROOT, marked
from tests.harness.stand_in_gpus import stand_in_gpus
from tests.harness.timing import unit
from tests.soak import causes, leaving, losing, policy, returning, same, steady, waiting
from tests.soak.elsewhere import elsewhere
from tests.soak.history import check, reads_its_own
from tests.soak.lossy import Faults
from tests.soak.sessions import LATE, PATIENCE, Late, Session, Stuck, session

from cs_runtime.failpoints import FAILPOINTS

__all__ = ["PROMISES", "UNVISITED", "VISITED", "Attempt", "Promise"]

#: No session may be given up for having too many deaths: back-off and its end have tests of their own.
_NEVER_GIVES_UP = {"--max-restarts": "100000"}
#: After which a worker for which others wait is replaced, seconds.
_STEP_TIMEOUT = 0.5
#: How long a late worker that was continued may live, seconds.
_REFUSED_WITHIN = 5.0
#: Steps after a hit until the next: those that were under way, and some with all processes there again.
_STEPS_AFTER = 6
#: Who read at once.
_READERS = 3
#: How often a kill hits every victim, where there are several.
_ALL_AT_ONCE = 0.25
#: The places to which no training of the soak comes: it saves no checkpoint, and all of its sums are finite.
UNVISITED = {"server.looked", *(name for name in FAILPOINTS if name.startswith("save."))}
#: The places to which it comes.
VISITED = [name for name in FAILPOINTS if name not in UNVISITED]
# A commit on a GPU is written down as a whole, so it has neither pieces nor phases, and no program carries it out.
_NOT_ON_A_GPU = {"server.kept", "server.phase", "server.pass"}
_GPU = ("--parameter-device", "gpu:0")
_DEATHS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV)
#: Who is hit where workers run elsewhere, and who together, by the number of outposts. A worker that dies twice in a
#: run is not replaced.
_ELSEWHERE = {
    1: ("w0", "w1", "outpost0", "gateway", "server", "link0"),
    2: ("w0", "w1", "outpost0", "outpost1", "gateway", "server", "link0", "link1"),
}
_ELSEWHERE_AT_ONCE = {
    1: [("w0", "w1"), ("server", "outpost0"), ("server", "gateway"), ("server", "w1"), ("server", "link0")],
    2: [("w0", "w1"), ("outpost0", "outpost1"), ("server", "gateway"), ("server", "w1"), ("link0", "link1")],
}
# Hits of a place since its process began: a replay passes the first few again, and a replica may not die twice in a
# run. Where the server comes with every message and tick, none may be hit before it serves.
_HITS = (6, 30)
_HITS_BEFORE = dict.fromkeys(("server.heard", "server.decided", "server.send"), 60)


S = TypeVar("S", bound=Session)


@dataclass
class Attempt:
    """One session on its way: what it may use, and what came of it."""

    seed: int
    trials: int
    on_trial: Callable[[], None] = lambda: None
    tried: int = 0
    violations: list[str] = field(default_factory=list)
    #: What was done later than it should be, but was done: as a busy machine has it.
    late: list[str] = field(default_factory=list)
    #: How many histories were compared with what the variables hold, and how many of them were wrong (P8).
    histories: int = 0
    wrong_histories: int = 0
    #: What was measured, in words.
    measured: list[str] = field(default_factory=list)
    #: The longest that a training stood still after it was hit, seconds.
    slowest: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def tried_once(self, seconds: float = 0.0) -> None:
        """A trial is over; the training went on after ``seconds``."""
        self.tried += 1
        self.slowest = max(self.slowest, seconds)
        self.on_trial()

    def tried_more(self, count: int) -> None:
        """So many more trials are over; what goes beyond the planned ones does not count."""
        for _ in range(min(count, self.trials - self.tried)):
            self.tried_once()

    def note(self, found: Iterable[str]) -> None:
        """Take in what was found, in words; what is :class:`Late` is no violation."""
        for line in found:
            (self.late if isinstance(line, Late) else self.violations).append(line)

    @contextmanager
    def training(
        self, *arguments: str, made: Callable[..., AbstractContextManager[S]] = session, **options: Any
    ) -> Iterator[S]:
        """:func:`~tests.soak.sessions.session`, or another one, of which is noted what was late."""
        with made(*arguments, **options) as attacked:
            try:
                yield attacked
            finally:
                self.late += attacked.late

    def compare(self, attacked: Session, may_lose: Callable[[int], bool] = lambda k: False) -> None:
        """End the training of ``attacked``, and compare what it said of itself with what it leaves."""
        wrong = check(attacked.history, attacked.finish(), may_lose=may_lose)
        self.histories += 1
        self.wrong_histories += bool(wrong)
        self.violations += wrong
        if self.violations:
            self.violations.append(attacked.tail())


@dataclass(frozen=True)
class Promise:
    """What is promised, and how it is tried.

    ``beside``: what a session of it can have beside it. What is measured, or takes all of the machine itself, has
    nothing; what mostly waits does not count among the sessions at once.
    """

    name: str
    text: str
    #: Of which there are ``long`` in ``make soak``.
    trial: str
    long: int
    per_session: int
    attack: Callable[[Attempt], None]
    beside: Literal["some", "nothing", "all"] = "some"

    def session(self, seed: int, trials: int, on_trial: Callable[[], None] = lambda: None) -> Attempt:
        """Run the session of ``seed``, or the first ``trials`` of it."""
        attempt = Attempt(seed, min(trials, self.per_session), on_trial)
        try:
            self.attack(attempt)
        except (Stuck, AssertionError) as error:
            attempt.violations.append(str(error))
        attempt.tried = max(attempt.tried, 1)
        return attempt


def _kind_of_training(rng: random.Random) -> list[str]:
    """Options of the workload: small and large updates, one run at a time and sent ahead."""
    return ["--elements", rng.choice(["1024", "65536", "262144"]), "--ahead", rng.choice(["0", "2"])]


def _places(
    roles: Sequence[str],
    rng: random.Random,
    count: int,
    ranks: Sequence[str],
    action: str = "kill",
    leaves_out: Container[str] = (),
) -> list[str]:
    """``count`` items for CS_FAILPOINTS: places of processes of these roles, each with its own hit."""
    places = [name for name in VISITED if name.partition(".")[0] in roles and name not in leaves_out]
    chosen = [(rng.choice(places), rng.choice(ranks), rng.randint(*_HITS)) for _ in range(count)]
    items = [f"{name}{rank}={action}@{hit + _HITS_BEFORE.get(name, 0)}" for name, rank, hit in chosen]
    return list(dict.fromkeys(items))


def _deaths(
    attempt: Attempt,
    roles: Sequence[str],
    victims: Sequence[str],
    ranks: Sequence[str],
    has_own_reads: bool,
    *,
    on_gpu: bool = False,
) -> None:
    """Half of the deaths come at named places, the other half at random instants."""
    rng = attempt.random
    arguments, launched = _kind_of_training(rng), rng.random() < 0.5
    has_own_reads = has_own_reads and rng.random() < 0.5
    if has_own_reads:
        arguments.append("--own-reads")
    items = _places(roles, rng, attempt.trials // 2, ranks, leaves_out=_NOT_ON_A_GPU if on_gpu else ())
    if attempt.seed % 2 == 0:  # compiled code carries out the programs of these sessions, as it does for users
        items = [item for item in items if not item.startswith("server.pass")]
    environment = {"CS_FAILPOINTS": ";".join(items)}
    options = {**_NEVER_GIVES_UP, **dict([_GPU] if on_gpu else [])}
    with attempt.training(*arguments, launched=launched, environment=environment, options=options) as attacked:
        attacked.wait_for_steps(1)
        _wait_for_places(attempt, attacked, items)
        while attempt.tried < attempt.trials:
            attacked.watch(rng.uniform(0.0, 0.3))
            # Now and then all of them die at once.
            left = attempt.trials - attempt.tried
            hit = list(victims) if len(victims) <= left and rng.random() < _ALL_AT_ONCE else [rng.choice(victims)]
            died = [victim for victim in hit if attacked.hit(victim, rng.choice(_DEATHS))]
            if died:
                seconds = attacked.wait_for_steps(_STEPS_AFTER)
                for _ in died:
                    attempt.tried_once(seconds)
        attempt.compare(attacked, may_lose=lambda k: has_own_reads and reads_its_own(k))


def _wait_for_places(attempt: Attempt, attacked: Session, items: Sequence[str]) -> None:
    """Let the training come to every place that was named."""
    fired: set[str] = set()
    for _ in range(20 * len(items)):
        attacked.wait_for_steps(_HITS[1])
        for _ in attacked.fired - fired:
            attempt.tried_once()
        fired = attacked.fired
        if len(fired) == len(items):
            return
    if items:
        attempt.violations.append(f"the training never came to {set(items) - fired}")


def _worker_deaths(attempt: Attempt) -> None:
    _deaths(attempt, ("worker",), ("w0", "w1"), ("[0]", "[1]"), has_own_reads=True)


def _server_deaths(attempt: Attempt) -> None:
    _deaths(attempt, ("server", "commit", "undo"), ("server",), ("",), has_own_reads=False)


def _gpu_server_deaths(attempt: Attempt) -> None:
    """The variables lie on a stand-in for a GPU, whose memory ends with the server."""
    with stand_in_gpus(1):
        _deaths(attempt, ("server", "commit"), ("server",), ("",), has_own_reads=False, on_gpu=True)


def _deaths_elsewhere(attempt: Attempt) -> None:
    """Of workers elsewhere, their launchers, the process that listens, the server; and links that are cut. In half of
    the sessions both workers are at one outpost."""
    rng = attempt.random
    arguments, outposts = _kind_of_training(rng), rng.choice([1, 2])
    one, together = _ELSEWHERE[outposts], _ELSEWHERE_AT_ONCE[outposts]
    with attempt.training(*arguments, made=elsewhere, options=_NEVER_GIVES_UP, outposts=outposts) as attacked:
        attacked.wait_for_steps(1)
        while attempt.tried < attempt.trials:
            attacked.watch(rng.uniform(0.0, 0.3))
            left = attempt.trials - attempt.tried
            hit = rng.choice(together) if left > 1 and rng.random() < _ALL_AT_ONCE else [rng.choice(one)]
            died = [
                attacked.cut(each, rng) if each in attacked.links else attacked.hit(each, signal.SIGKILL)
                for each in hit
            ]
            if any(died):
                seconds = attacked.wait_for_steps(_STEPS_AFTER)
                for _ in range(sum(died)):
                    attempt.tried_once(seconds)
        attempt.compare(attacked)


def _pauses(attempt: Attempt) -> None:
    """SIGSTOP for up to three times the time-out, after which a worker has been killed and its place taken."""
    rng, timeout = attempt.random, unit(_STEP_TIMEOUT)
    options = {**_NEVER_GIVES_UP, "--step-timeout": str(timeout)}
    items = _places(("worker",), rng, attempt.trials // 2, ("[0]", "[1]"), "stop")
    environment = {"CS_FAILPOINTS": ";".join(items)}
    arguments = (*_kind_of_training(rng), "--own-reads")
    with attempt.training(
        *arguments, launched=rng.random() < 0.5, options=options, environment=environment
    ) as attacked:
        attacked.wait_for_steps(1)
        _wait_for_places(attempt, attacked, items)
        while attempt.tried < attempt.trials:
            attacked.watch(rng.uniform(0.0, 0.2))
            victim = rng.choice(["server", "server", "w0", "w1", "supervisor", "script"])
            if attacked.hit(victim, signal.SIGSTOP):
                attacked.watch(rng.uniform(0.0, 3 * timeout))
                attacked.hit(victim, signal.SIGCONT)
                attempt.tried_once(attacked.wait_for_steps(_STEPS_AFTER))
        # On a machine that is busy enough another worker is late, too, and perhaps twice in a run.
        attempt.compare(attacked, may_lose=lambda k: True)


def _late_messages(attempt: Attempt) -> None:
    """A worker is stopped just before it sends, replaced, and continued: what it sends is refused, and it ends."""
    rng = attempt.random
    # Twice as long: nobody else may be late twice in a run, which would be lost then.
    options = {**_NEVER_GIVES_UP, "--step-timeout": str(unit(2 * _STEP_TIMEOUT))}
    names = [f"worker.{place}[{rank}]" for place in ("ask", "return") for rank in (0, 1)]
    hits = rng.sample([(name, hit) for name in names for hit in range(_HITS[0], 2 * _HITS[1])], attempt.trials)
    environment = {"CS_FAILPOINTS": ";".join(f"{name}=stop@{hit}" for name, hit in hits)}
    with attempt.training(
        *_kind_of_training(rng), launched=True, launcher="tests.soak.late", options=options, environment=environment
    ) as attacked:
        while attempt.tried < attempt.trials and not attempt.violations:
            attacked.wait_for_steps(3)
            for process in [process for process in marked(attacked.mark) if process.status() == psutil.STATUS_STOPPED]:
                attempt.note(_continue_late(attacked, process))
                attempt.tried_once()
        attempt.compare(attacked)


def _continue_late(attacked: Session, process: psutil.Process) -> list[str]:
    replica, incarnation = _place(process)
    name, begun = f"w{replica}.{incarnation}", time.monotonic()
    while not any(_place(other) == (replica, incarnation + 1) for other in marked(attacked.mark)):
        if time.monotonic() - begun > unit(PATIENCE * LATE):
            raise Stuck(f"{name} is stopped, and nobody takes its place\n{attacked.tail()}")
        attacked.watch(0.05)
    attacked.wait_for_steps(3)  # another has its place, and has worked there
    took = time.monotonic() - begun
    process.send_signal(signal.SIGCONT)
    what = f"{name} was continued after it was replaced {took:.1f} s before"
    found = attacked.within(_REFUSED_WITHIN, f"{what}, and goes on", lambda: not process.is_running())
    attacked.watch(0.1)
    refused = f"worker {name} has been replaced"
    return found if found or refused in attacked.said else [f"{what}: not {refused!r}"]


def _place(process: psutil.Process) -> tuple[int, int]:
    """Replica and incarnation of a worker; those of nobody for another process."""
    with suppress(psutil.Error):
        command = process.cmdline()
        if "--replica" in command:
            return int(command[command.index("--replica") + 1]), int(command[command.index("--incarnation") + 1])
    return -1, 0


def _lossy(attempt: Attempt) -> None:
    attempt.histories = 1  # every step says what it saw
    attempt.violations += losing.train(attempt.random, attempt.trials, Faults(), attempt.tried_more)
    attempt.wrong_histories = bool(attempt.violations)
    attempt.tried_more(attempt.trials - attempt.tried)


def _reads(attempt: Attempt) -> None:
    """8 MiB and 4 MiB, by several readers, while they are updated as fast as it goes and the server is killed now and
    then."""
    rng = attempt.random
    elements = str(1 << 20)
    with attempt.training("--elements", elements, launched=rng.random() < 0.5, options=_NEVER_GIVES_UP) as trained:
        trained.wait_for_steps(1)
        address = next(line["address"] for line in trained.history if line["op"] == "address")
        shares = [attempt.trials // _READERS + (n < attempt.trials % _READERS) for n in range(_READERS)]
        commands = [[sys.executable, "-m", "tests.soak.reader", address, str(share)] for share in shares if share]
        with ExitStack() as stack:
            readers = []
            for command in commands:
                reader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
                stack.enter_context(reader)
                stack.callback(reader.kill)
                readers.append(reader)
            next_kill = trained.steps + 10
            while any(reader.poll() is None for reader in readers):
                trained.watch(0.5)
                # What is killed before it has worked is started again ever later.
                if trained.steps >= next_kill and rng.random() < 0.1:
                    trained.hit("server", signal.SIGKILL)
                    next_kill = trained.steps + 30
            for reader in readers:
                said, errors = reader.communicate()
                if reader.returncode:
                    attempt.violations.append(f"a reader ended with code {reader.returncode}:\n{errors}")
                    continue
                seen = json.loads(said)
                attempt.violations += seen["wrong"]
                if not seen["steps"]:
                    attempt.violations.append("nothing was updated while a reader read: nothing was tried")
                for _ in range(seen["reads"]):
                    attempt.tried_once()
        attempt.compare(trained)


def _one_by_one(what: Callable[[random.Random], list[str]]) -> Callable[[Attempt], None]:
    def attack(attempt: Attempt) -> None:
        while attempt.tried < attempt.trials:
            attempt.note(what(attempt.random))
            attempt.tried_once()

    return attack


def _at_once(what: Callable[[random.Random, int], list[str]]) -> Callable[[Attempt], None]:
    def attack(attempt: Attempt) -> None:
        attempt.note(what(attempt.random, attempt.trials))
        for _ in range(attempt.trials):
            attempt.tried_once()

    return attack


def _kills(attempt: Attempt) -> None:
    while attempt.tried < attempt.trials and not attempt.violations:
        kills, found = leaving.killed(attempt.random, attempt.trials - attempt.tried)
        attempt.note(found)
        for _ in range(kills):
            attempt.tried_once()


def _returns(attempt: Attempt) -> None:
    attempt.measured += returning.returns(attempt.random, attempt.trials, attempt.tried_once)


def _ages(attempt: Attempt) -> None:
    attempt.note(steady.updates(attempt.random, attempt.trials, attempt.tried_more, attempt.measured.append))
    attempt.tried_more(attempt.trials - attempt.tried)


def _connects(attempt: Attempt) -> None:
    attempt.note(steady.connects(attempt.trials, attempt.tried_once))


PROMISES = {
    promise.name: promise
    for promise in (
        Promise("P1", "a worker dies: no update lost, none twice, same bits", "deaths", 1000, 40, _worker_deaths),
        Promise("P2", "the server dies: no update lost, none twice, same bits", "deaths", 500, 40, _server_deaths),
        Promise("P2-1GiB", "the server is back over 1 GiB of parameters", "deaths", 20, 10, _returns, "nothing"),
        Promise("P3", "the server dies with variables on a GPU: the same", "deaths", 100, 20, _gpu_server_deaths),
        Promise("P4", "a process is paused: no update twice", "pauses", 200, 25, _pauses),
        Promise("P5", "messages are lost, doubled, delayed: no update twice", "updates", 1_000_000, 50_000, _lossy),
        Promise("P6", "what a replaced worker says late is refused", "late workers", 200, 25, _late_messages),
        Promise("P7", "reads from outside are never torn", "reads", 100_000, 10_000, _reads),
        Promise("P9", "same seed, same bits; resumed is uninterrupted", "pairs", 50, 10, _at_once(same.pairs)),
        Promise("P16", "whatever is killed, nothing is left behind", "kills", 500, 20, _kills),
        Promise("P17", "launches at once do not meet", "launches", 100, 20, _at_once(leaving.launches), "nothing"),
        Promise("P18", "Ctrl-C at any moment ends it", "Ctrl-Cs", 100, 20, _one_by_one(leaving.interrupted)),
        Promise("P20", "the first cause is named", "failures", 200, 10, _one_by_one(causes.any_failed)),
        Promise("P21", "no wait over 10 s is silent", "waits", 30, 5, _at_once(waiting.named), "all"),
        Promise(
            "P22", "restarts are as many and as late as said", "scripts", 20, 5, _one_by_one(policy.any_policy), "all"
        ),
        Promise("P23", "nothing grows with the updates", "updates", 3_500_000, 3_500_000, _ages),
        Promise("P24", "nothing grows with the clients", "connects", 10_000, 10_000, _connects),
        Promise(
            "P44",
            "deaths and cut links elsewhere: none lost, none twice, same bits",
            "kills",
            200,
            20,
            _deaths_elsewhere,
        ),
    )
}
