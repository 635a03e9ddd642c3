"""The search: takes actions at random from a seed, disturbs them, lets them come to rest, and checks the promises."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.model.checks import BrokenPromise, Ledger
from tests.model.client import Step
from tests.model.rules import Rules
from tests.model.supervisor import Script, Supervisor
from tests.model.worker import Worker
from tests.model.world import SERVER, Action, World

#: More actions than any execution needs: one that takes them goes round for ever.
LIMIT = 6000
#: At rest, time passes so often before nothing can be expected of it any more.
_TICKS = 3


@dataclass(frozen=True)
class Plan:
    """What happens in an execution: ``kills`` of processes, ticks, Ctrl-C, damaged mailboxes; scripts."""

    kills: int = 3
    ticks: int = 2
    cancels: int = 1
    damages: int = 1
    scripts: int = 2
    #: How likely a client is killed, where a worker has 1.
    leaving: int = 1
    #: The chance of each action to be followed by something of the above.
    trouble: float = 0.03
    #: How fast a process or a channel is for a while, each as likely.
    paces: tuple[float, ...] = (1.0, 1.0, 1.0, 0.1, 0.01)
    #: A script has at most so many blocks, each of steps of one series, with this chance, or of single runs.
    blocks: int = 2
    series: float = 0.6
    #: The fewest and the most steps of a block.
    steps: tuple[int, int] = (3, 8)
    #: What kinds of steps the scripts have, beside plain ones, and how often.
    odd_kinds: tuple[str, ...] = ("ask", "fail", "note")
    odd: float = 0.12
    changes: float = 0.1


#: Nothing but what a test does.
QUIET = Plan(kills=0, ticks=0, cancels=0, damages=0, trouble=0.0)


class Found(NamedTuple):
    """An execution that breaks a promise."""

    seed: int
    promise: str
    trace: list[str]

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.promise}\n" + "\n".join(self.trace[-80:])


class Execution:
    """One execution of the model."""

    def __init__(
        self, seed: int, rules: Rules, plan: Plan, replicas: int = 2, scripts: Sequence[Script] | None = None
    ) -> None:
        """``scripts``: if they are not to be drawn."""
        self.rng = random.Random(seed)
        self.plan = plan
        self.world = World(rules, replicas, self.rng)
        self.ledger = Ledger(self.world)
        drawn = [self._script() for _ in range(plan.scripts)] if scripts is None else list(scripts)
        self.supervisor = Supervisor(self.world, drawn)
        self.trace: list[str] = []
        self.paces: dict[str, float] = {}
        self.kills, self.ticks = self.rng.randint(0, plan.kills), self.rng.randint(0, plan.ticks)
        self.damages = self.rng.randint(0, plan.damages)

    def run(self, cut: int = -1, victims: Sequence[str] = ()) -> None:
        """From start to rest. ``victims`` are killed after ``cut`` actions. Raises BrokenPromise."""
        ticks = 0
        while True:
            if len(self.trace) > LIMIT:
                raise BrokenPromise("somebody goes round for ever")
            if len(self.trace) % 40 == 0:
                self._change_paces()
            if self.plan.trouble and self.rng.random() < self.plan.trouble:
                self._trouble()
            if len(self.trace) == cut:
                for victim in victims:
                    self.kill(victim)
            actions = self.world.actions()
            if actions:
                ticks = 0 if self._take(actions) else ticks
            elif ticks < _TICKS:
                ticks += 1
                self._pass_time()
            else:
                break
        self.ledger.check_end()

    def play(self, until: str, hold: Sequence[str] = ()) -> None:
        """Take actions until one whose name begins with ``until``, and none whose name begins with one of ``hold``.
        Stops if there is no other."""
        while True:
            actions = [action for action in self.world.actions() if not action.name.startswith(tuple(hold))]
            if not actions or len(self.trace) > LIMIT:
                return
            self._take(actions)
            if self.trace[-1].startswith(until):
                return

    def _take(self, actions: list[Action]) -> bool:
        """Whether it was more than what a tick brings."""
        action = actions[0] if len(actions) == 1 else self._choose(actions)
        self.trace.append(action.name)
        action.take()
        self.ledger.check()
        return not action.name.endswith(("server goes on", "server stops its program"))

    def _choose(self, actions: list[Action]) -> Action:
        weights = [self.paces.get(action.pace, 1.0) for action in actions]
        left = self.rng.random() * sum(weights)
        for action, weight in zip(actions, weights, strict=True):
            left -= weight
            if left < 0:
                return action
        return actions[-1]

    def _change_paces(self) -> None:
        """Some processes and the notices are slow for a while."""
        names = [SERVER, "notices", "script", "start", *self.world.workers, *self.world.inboxes]
        names += [f"notices of {name}" for name in self.world.inboxes]
        names += [f"mail of c{client}" for client in range(1, self.supervisor.clients + 1)]
        self.paces = {name: self.rng.choice(self.plan.paces) for name in names}
        for name in ["zombie", *self.supervisor.zombies]:
            self.paces[name] = self.rng.choice((0.02, 0.002))

    def _pass_time(self) -> None:
        world = self.world
        self.trace.append("a second passes")
        if world.server is not None and world.server.may_tick():
            world.server.tick()
            self.ledger.check()

    # --- trouble ------------------------------------------------------------------------------------------------------

    def _trouble(self) -> None:
        kind = self.rng.choice(("kill", "kill", "tick", "cancel", "damage"))
        world = self.world
        if kind == "kill" and self.kills:
            self._kill()
        elif kind == "tick" and self.ticks:
            self.ticks -= 1
            self._pass_time()
        elif kind == "cancel" and world.client is not None and world.client.may_cancel():
            self.trace.append("Ctrl-C")
            world.client.cancel()
        elif kind == "damage" and self.damages and world.workers:
            self.damages -= 1
            self._damage(self.rng.choice(list(world.workers.values())))

    def _damage(self, worker: Worker) -> None:
        """Something has written over a mailbox: one end leaves it."""
        server = self.world.server
        end = self.rng.choice((worker.name, SERVER))
        self.trace.append(f"{end} leaves the mailbox of {worker.name}")
        if end == SERVER and server is not None:
            server.lose_mailbox(worker.name)
        elif end == worker.name:
            worker.lose_mailbox()

    def _kill(self) -> None:
        world = self.world
        victims = [name for name, worker in world.workers.items() if not worker.is_zombie]
        if world.server is not None:
            victims += [SERVER] * 2
        if world.client is not None and self.supervisor.scripts:
            victims += [world.client.name] * self.plan.leaving
        if not victims:
            return
        self.kills -= 1
        victim = self.rng.choice(victims)
        self.kill(victim)
        workers = [name for name in victims if name in world.workers and name != victim]
        if victim == SERVER and workers and self.rng.random() < 0.3:
            self.kill(self.rng.choice(workers))  # both at once

    def kill(self, name: str) -> None:
        """End a process now."""
        self.trace.append(f"kill {name}")
        self.supervisor.kill(name)

    # --- scripts ------------------------------------------------------------------------------------------------------

    def _script(self) -> Script:
        """Series with single runs between and in them; mostly plain steps of one function."""
        rng, steps = self.rng, []
        function = "f"
        for series in range(1, rng.randint(1, self.plan.blocks) + 1):
            is_series = rng.random() < self.plan.series
            for _ in range(rng.randint(*self.plan.steps)):
                if rng.random() < self.plan.changes:
                    function = "g" if function == "f" else "f"
                is_odd = bool(self.plan.odd_kinds) and rng.random() < self.plan.odd
                kind = rng.choice(self.plan.odd_kinds) if is_odd else "plain"
                is_inner = is_series and rng.random() < 0.1
                steps.append(Step(0 if is_inner or not is_series else series, function, kind))
        return Script(steps, rng.randint(0, self.plan.cancels))


def search(
    seeds: Iterable[int],
    rules: Rules | None = None,
    plan: Plan | None = None,
    *,
    replicas: int = 2,
    promise: str = "",
) -> Found | None:
    """The first execution that breaks a promise, if any: one in whose words ``promise``, a regular expression, is."""
    for seed in seeds:
        execution = Execution(seed, rules or Rules(), plan or Plan(), replicas)
        try:
            execution.run()
        except (BrokenPromise, AssertionError, LookupError) as broken:
            if re.search(promise, str(broken)):
                return Found(seed, str(broken), execution.trace)
    return None
