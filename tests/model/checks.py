"""What the design promises. ``Ledger`` knows what was sent and answered; it looks at memory after every action."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.model.records import RunFinished, Update
from tests.model.world import World

if TYPE_CHECKING:
    from tests.model.client import Step


class BrokenPromise(Exception):
    """An execution that the design must not have."""


#: A run is known by its client, too: each client counts from 1.
Name = tuple[str, int]


class Known(NamedTuple):
    """What the client sent for a run."""

    client: str
    step: Step
    arguments: tuple[int, ...]


class Ledger:
    """The promises, and what is needed to check them."""

    def __init__(self, world: World) -> None:
        self.world = world
        world.ledger = self
        self.runs: dict[Name, Known] = {}
        self.succeeded: set[Name] = set()
        self.failed: set[Name] = set()
        self._lengths = [0 for _ in world.memory.pieces]

    # --- what is told -------------------------------------------------------------------------------------------------

    def sent(self, client: str, run: int, step: Step, arguments: tuple[int, ...]) -> None:
        """The client sends a run."""
        self.runs[client, run] = Known(client, step, arguments)

    def answered(self, client: str, finished: RunFinished) -> None:
        """The client reads what came of a run."""
        name = client, finished.run
        counts = [sum((update.client, update.run) == name for update in piece) for piece in self.world.memory.pieces]
        if finished.failed:
            self.failed.add(name)
            _require(not any(counts), f"run {name} is answered as failed, but committed")
            _require(self._may_fail(name), f"run {name} fails for no reason: {self.runs[name]}")
            return
        self.succeeded.add(name)
        _require(all(count == 1 for count in counts), f"run {name} is answered, but committed {counts} times")
        known = self.runs[name]
        _require(finished.values == known.arguments, f"run {name} is answered with {finished.values} for {known}")

    def _may_fail(self, name: Name) -> bool:
        """Its function fails, it is cancelled, or it may have lost the same worker twice."""
        world, kind = self.world, self.runs[name].step.kind
        cancel = world.client.cancelling if world.client is not None else None
        return kind == "fail" or cancel is not None or len(world.supervisor.lost) > 1

    # --- after every action -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Safety: every update that an action has made is right."""
        for number, piece in enumerate(self.world.memory.pieces):
            if len(piece) > self._lengths[number]:
                self._check_update(number, piece)
            self._lengths[number] = len(piece)

    def _check_update(self, number: int, piece: tuple[Update, ...]) -> None:
        update, before = piece[-1], piece[:-1]
        name = run = update.client, update.run
        known = self.runs.get(name)
        _require(known is not None, f"run {run} is committed, but nobody sent it")
        assert known is not None
        _require(all((each.client, each.run) != name for each in before), f"run {run} is committed twice")
        _require(name not in self.failed, f"run {run} is committed after it was answered as failed")
        _require(update.function == known.step.function, f"run {run} is committed as {update.function}: {known}")
        same = [earlier.t for earlier in before if earlier.function == update.function]
        _require(update.t == len(same) + 1, f"run {run} is committed with t={update.t} after {same}")
        for replica, gradient in enumerate(update.gradients):
            _require(gradient is not None, f"run {run} is committed while w{replica} writes its gradients")
            assert gradient is not None
            is_of_run = (gradient.client, gradient.run, gradient.replica) == (*name, replica)
            is_right = is_of_run and gradient.argument == known.arguments[replica]
            _require(is_right, f"run {run} is committed with {gradient} for {known}")
            _require(gradient.read[number] == len(before), f"{gradient} is of other variables than run {run} changes")

    # --- at the end ---------------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Liveness: nothing can happen any more, so everybody must be done."""
        world = self.world
        _require(world.client is not None and world.client.is_done, "the client waits for ever")
        for worker in world.workers.values():
            waits = worker.doing is not None or bool(worker.queue)
            _require(not waits, f"{worker.name} waits for ever: {worker.under_way or list(worker.queue)}")
        memory = world.memory
        _require(memory.commits % 2 == 0, "COMMITS stays odd")
        _require(len(set(memory.pieces)) == 1, "the pieces of the variables differ")
        for name in self.succeeded:
            count = sum((update.client, update.run) == name for update in memory.pieces[0])
            _require(count == 1, f"run {name} is lost")


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise BrokenPromise(promise)
