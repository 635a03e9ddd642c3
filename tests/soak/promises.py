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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.harness.processes import ROOT
from tests.soak import leaving, losing
from tests.soak.history import check
from tests.soak.lossy import Faults
from tests.soak.sessions import Session, Stuck, session

from cs_proto.failpoints import FAILPOINTS

__all__ = ["PROMISES", "Attempt", "Promise"]

#: No session may be given up for having too many deaths: back-off and its end have tests of their own.
_NEVER_GIVES_UP = {"--max-restarts": "100000"}
_DEATHS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV)
# Hits of a place since its process began: a replay passes the first few again, and a replica may not die twice in a
# run. Where the server comes with every message and tick, none may be hit before it serves.
_HITS = (6, 30)
_HITS_BEFORE = dict.fromkeys(("server.heard", "server.decided", "server.send"), 60)


@dataclass
class Attempt:
    """One session on its way: what it may use, and what came of it."""

    seed: int
    trials: int
    on_trial: Callable[[], None] = lambda: None
    tried: int = 0
    violations: list[str] = field(default_factory=list)
    #: The longest that a training stood still after it was hit, seconds.
    slowest: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def tried_once(self, seconds: float = 0.0) -> None:
        """A trial is over; the training went on after ``seconds``."""
        self.tried += 1
        self.slowest = max(self.slowest, seconds)
        self.on_trial()


@dataclass(frozen=True)
class Promise:
    """What is promised, and how it is tried."""

    name: str
    text: str
    #: Of which there are ``long`` in ``make soak``.
    trial: str
    long: int
    per_session: int
    attack: Callable[[Attempt], None]

    def session(self, seed: int, trials: int, on_trial: Callable[[], None] = lambda: None) -> Attempt:
        """Run the session of ``seed``, or the first ``trials`` of it."""
        attempt = Attempt(seed, min(trials, self.per_session), on_trial)
        try:
            self.attack(attempt)
        except Stuck as stuck:
            attempt.violations.append(str(stuck))
        attempt.tried = max(attempt.tried, 1)
        return attempt


def _kind_of_training(rng: random.Random) -> list[str]:
    """Options of the workload: small and large updates, one run at a time and sent ahead."""
    return ["--elements", rng.choice(["1024", "65536", "262144"]), "--ahead", rng.choice(["0", "2"])]


def _places(
    roles: Sequence[str], rng: random.Random, count: int, ranks: Sequence[str], action: str = "kill"
) -> list[str]:
    """``count`` items for CS_FAILPOINTS: places of processes of these roles, each with its own hit."""
    places = [name for name in FAILPOINTS if name.partition(".")[0] in roles]
    chosen = [(rng.choice(places), rng.choice(ranks), rng.randint(*_HITS)) for _ in range(count)]
    items = [f"{name}{rank}={action}@{hit + _HITS_BEFORE.get(name, 0)}" for name, rank, hit in chosen]
    return list(dict.fromkeys(items))


def _deaths(
    attempt: Attempt, roles: Sequence[str], victims: Sequence[str], ranks: Sequence[str], may_lose: bool
) -> None:
    """Half of the deaths come at named places, the other half at random instants."""
    rng = attempt.random
    arguments, launched = _kind_of_training(rng), rng.random() < 0.5
    if may_lose and rng.random() < 0.5:
        arguments.append("--own-reads")
    items = _places(roles, rng, attempt.trials // 2, ranks)
    environment = {"CS_FAILPOINTS": ";".join(items)}
    with session(*arguments, launched=launched, environment=environment, options=_NEVER_GIVES_UP) as attacked:
        attacked.wait_for_steps(1)
        _wait_for_places(attempt, attacked, items)
        while attempt.tried < attempt.trials:
            attacked.watch(rng.uniform(0.0, 0.3))
            if attacked.hit(rng.choice(victims), rng.choice(_DEATHS)):
                attempt.tried_once(attacked.wait_for_steps(3))
        final = attacked.finish()
        attempt.violations += check(attacked.history, final, may_lose="--own-reads" in arguments)
        if attempt.violations:
            attempt.violations.append(attacked.tail())


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
    _deaths(attempt, ("worker",), ("w0", "w1"), ("[0]", "[1]"), may_lose=True)


def _server_deaths(attempt: Attempt) -> None:
    _deaths(attempt, ("server", "commit", "undo"), ("server",), ("",), may_lose=False)


def _pauses(attempt: Attempt) -> None:
    """SIGSTOP for up to three times the time-out, after which a worker has been killed and its place taken."""
    rng, timeout = attempt.random, 0.5
    options = {**_NEVER_GIVES_UP, "--step-timeout": str(timeout)}
    items = _places(("worker",), rng, attempt.trials // 2, ("[0]", "[1]"), "stop")
    environment = {"CS_FAILPOINTS": ";".join(items)}
    arguments = (*_kind_of_training(rng), "--own-reads")
    with session(*arguments, launched=rng.random() < 0.5, options=options, environment=environment) as attacked:
        attacked.wait_for_steps(1)
        _wait_for_places(attempt, attacked, items)
        while attempt.tried < attempt.trials:
            attacked.watch(rng.uniform(0.0, 0.2))
            victim = rng.choice(["server", "server", "w0", "w1", "supervisor"])
            if attacked.hit(victim, signal.SIGSTOP):
                attacked.watch(rng.uniform(0.0, 3 * timeout))
                attacked.hit(victim, signal.SIGCONT)
                attempt.tried_once(attacked.wait_for_steps(3))
        attempt.violations += check(attacked.history, attacked.finish(), may_lose=True)
        if attempt.violations:
            attempt.violations.append(attacked.tail())


def _lossy(attempt: Attempt) -> None:
    done = 0

    def on_updates(count: int) -> None:
        nonlocal done
        done += count
        while attempt.tried < min(done, attempt.trials):
            attempt.tried_once()

    attempt.violations += losing.train(attempt.random, attempt.trials, Faults(), on_updates)
    on_updates(attempt.trials - done)


def _reads(attempt: Attempt) -> None:
    """8 MiB and 4 MiB, while they are updated as fast as it goes and the server is killed now and then."""
    rng = attempt.random
    with session("--elements", str(1 << 20), launched=rng.random() < 0.5, options=_NEVER_GIVES_UP) as trained:
        trained.wait_for_steps(1)
        address = next(line["address"] for line in trained.history if line["op"] == "address")
        next_kill = trained.steps + 10
        command = [sys.executable, "-m", "tests.soak.reader", address, str(attempt.trials)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as reader:
            while reader.poll() is None:
                trained.watch(0.5)
                # What is killed before it has worked is started again ever later.
                if trained.steps >= next_kill and rng.random() < 0.1:
                    trained.hit("server", signal.SIGKILL)
                    next_kill = trained.steps + 30
            said, errors = reader.communicate()
        if reader.returncode:
            attempt.violations.append(f"the reader ended with code {reader.returncode}:\n{errors}")
        else:
            seen = json.loads(said)
            attempt.violations += seen["wrong"]
            if not seen["steps"]:
                attempt.violations.append("nothing was updated while the reader read: nothing was tried")
            for _ in range(seen["reads"]):
                attempt.tried_once()
        attempt.violations += check(trained.history, trained.finish())


def _one_by_one(what: Callable[[random.Random], list[str]]) -> Callable[[Attempt], None]:
    def attack(attempt: Attempt) -> None:
        while attempt.tried < attempt.trials:
            attempt.violations += what(attempt.random)
            attempt.tried_once()

    return attack


def _launches(attempt: Attempt) -> None:
    attempt.violations += leaving.launches(attempt.trials)
    for _ in range(attempt.trials):
        attempt.tried_once()


PROMISES = {
    promise.name: promise
    for promise in (
        Promise("P1", "a worker dies: no update lost, none twice, same bits", "deaths", 1000, 20, _worker_deaths),
        Promise("P2", "the server dies: no update lost, none twice, same bits", "deaths", 500, 20, _server_deaths),
        Promise("P4", "a process is paused: no update twice", "pauses", 200, 20, _pauses),
        Promise("P5", "messages are lost, doubled, delayed: no update twice", "updates", 1_000_000, 50_000, _lossy),
        Promise("P7", "reads from outside are never torn", "reads", 100_000, 5_000, _reads),
        Promise("P16", "whatever is killed, nothing is left behind", "kills", 500, 1, _one_by_one(leaving.killed)),
        Promise("P17", "launches at once do not meet", "launches", 100, 20, _launches),
        Promise("P18", "Ctrl-C at any moment ends it", "Ctrl-Cs", 100, 1, _one_by_one(leaving.interrupted)),
    )
}
