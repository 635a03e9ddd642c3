"""What the design promises. ``Ledger`` knows what was sent and answered; it looks at memory after every action."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.model.records import RunFinished, Update
from tests.model.world import Board, World

if TYPE_CHECKING:
    from tests.model.client import Step


class BrokenPromise(Exception):
    """An execution that the design must not have."""


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
        self.runs: dict[int, Known] = {}
        self.succeeded: set[int] = set()
        self.failed: set[int] = set()
        self._whole: dict[tuple[int, int], int] = {}
        self._lengths = [0 for _ in world.memory.pieces]

    def begin_anew(self) -> None:
        """A new service: nothing of the old one counts."""
        self.runs.clear()
        self.succeeded.clear()
        self.failed.clear()
        self._whole.clear()
        self._lengths = [0 for _ in self._lengths]

    # --- what is told -------------------------------------------------------------------------------------------------

    def sent(self, client: str, run: int, step: Step, arguments: tuple[int, ...]) -> None:
        """The client sends a run."""
        self.runs[run] = Known(client, step, arguments)

    def answered(self, finished: RunFinished) -> None:
        """The client reads what came of a run."""
        run = finished.run
        counts = [sum(update.run == run for update in piece) for piece in self.world.memory.pieces]
        if finished.failed:
            self.failed.add(run)
            _require(not any(counts), f"run {run} is answered as failed, but committed")
            _require(self._may_fail(run), f"run {run} fails for no reason: {self.runs[run]}")
            return
        self.succeeded.add(run)
        _require(all(count == 1 for count in counts), f"run {run} is answered, but committed {counts} times")
        known = self.runs[run]
        _require(finished.values == known.arguments, f"run {run} is answered with {finished.values} for {known}")

    def _may_fail(self, run: int) -> bool:
        """Its function fails, it is cancelled, or it may have lost the same worker twice."""
        world, kind = self.world, self.runs[run].step.kind
        cancel = world.client.cancelling if world.client is not None else None
        return kind in ("fail", "refused") or cancel is not None or len(world.supervisor.lost) > 1

    def returns(self, board: Board, run: int) -> None:
        """A worker begins to return by its board: its return before must be over."""
        before = board.returned
        if before not in self.runs or self.runs[before].client != self.runs[run].client:
            return
        is_committed = all(any(update.run == before for update in piece) for piece in self.world.memory.pieces)
        _require(is_committed or before in self._decided(), f"runs {before} and {run} are both undecided on one board")

    def returned(self, replica: int, incarnation: int, run: int) -> None:
        """A worker has returned by its board."""
        self._whole[replica, run] = incarnation

    def refused(self, replica: int, run: int) -> None:
        """The server does not take this return by the board."""
        self._whole.pop((replica, run), None)

    def begins(self, replica: int, incarnation: int, run: int) -> None:
        """A worker begins a run."""
        by = self._whole.get((replica, run), incarnation)
        _require(
            by == incarnation, f"w{replica}.{incarnation} begins run {run}, from which w{replica}.{by} has returned"
        )

    def _decided(self) -> set[int]:
        tables = self.world.server.engine.tables if self.world.server is not None else self.world.store
        stored = self.world.store.over.keys() | tables.over.keys() | self.failed
        last = max(tables.last, self.world.store.last)
        return stored | {run for run in self.runs if run <= last}

    # --- after every action -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Safety: every update that an action has made is right."""
        for number, piece in enumerate(self.world.memory.pieces):
            if len(piece) > self._lengths[number]:
                self._check_update(number, piece)
            self._lengths[number] = len(piece)

    def _check_update(self, number: int, piece: tuple[Update, ...]) -> None:
        update, before = piece[-1], piece[:-1]
        run, known = update.run, self.runs.get(update.run)
        _require(known is not None, f"run {run} is committed, but nobody sent it")
        assert known is not None
        _require(all(earlier.run != run for earlier in before), f"run {run} is committed twice")
        _require(run not in self.failed, f"run {run} is committed after it was answered as failed")
        _require(update.function == known.step.function, f"run {run} is committed as {update.function}: {known}")
        same = [earlier.t for earlier in before if earlier.function == update.function]
        _require(update.t == len(same) + 1, f"run {run} is committed with t={update.t} after {same}")
        for replica, gradient in enumerate(update.gradients):
            _require(gradient is not None, f"run {run} is committed while w{replica} writes its gradients")
            assert gradient is not None
            is_of_run = (gradient.run, gradient.replica) == (run, replica)
            is_right = is_of_run and gradient.argument == known.arguments[replica]
            _require(is_right, f"run {run} is committed with {gradient} for {known}")
            _require(gradient.read[number] == len(before), f"{gradient} is of other variables than run {run} changes")
        server = self.world.server
        client = server.engine.tables.client if server is not None else ""
        is_open = known.client == client or run in self._under_way()
        _require(is_open, f"run {run} of {known.client} is committed in the session of {client or 'nobody'}")

    def _under_way(self) -> set[int]:
        """A commit of the general way that was decided before the client left."""
        server = self.world.server
        commit = server.engine.tables.commit if server is not None else None
        return {commit.run} if commit is not None else set()

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
        for run in self.succeeded:
            _require(sum(update.run == run for update in memory.pieces[0]) == 1, f"run {run} is lost")
        newest = {(replica, incarnation) for replica, incarnation in enumerate(world.supervisor.incarnations)}
        leaked = set(memory.boards) - newest if world.rules.incarnation_has_own_board else set()
        _require(not leaked, f"boards {leaked} are never freed")


def _require(holds: bool, promise: str) -> None:
    if not holds:
        raise BrokenPromise(promise)
