"""The supervisor: introduces clients, reaps processes, says who died, starts others in their place. It never dies."""

from __future__ import annotations

from collections import deque
from functools import partial

from tests.model.client import Client, Step
from tests.model.engine import Tables
from tests.model.records import Appoint, Died, Introduce, Left, Record, Serving
from tests.model.server import Server
from tests.model.worker import Worker
from tests.model.world import SERVER, SUPERVISOR, Action, World


class Script:
    """What one client of the service will do."""

    def __init__(self, steps: list[Step], cancels: int = 0) -> None:
        self.steps, self.cancels = steps, cancels


class Supervisor:
    """Starts the service and keeps it going."""

    def __init__(self, world: World, scripts: list[Script]) -> None:
        self.world = world
        world.supervisor = self
        self.scripts = deque(scripts)
        self.clients = 0
        self.incarnations = [0] * world.replicas
        self.unreaped: list[str] = []
        self.to_start: list[int] = []
        self.zombies: list[str] = []
        self.lost: list[str] = []  # all workers that have died
        self.deaths: dict[int, Died] = {}
        self.left: list[Left] = []
        self.appointed = ""
        world.open_inbox(SUPERVISOR)
        self._start_service()

    def actions(self) -> list[Action]:
        world = self.world
        found = [Action("notices", f"{name} is reaped", partial(self._reap, name)) for name in self.unreaped]
        found += [Action("start", f"w{r} starts", partial(self._start_worker, r)) for r in self.to_start]
        found += [Action("zombie", f"{name} ends at last", partial(self._end, name)) for name in self.zombies]
        if world.server is None and SERVER not in self.unreaped:
            found.append(Action(SERVER, "server starts", self._start_server))
        if world.client is None and self.scripts and not self.unreaped:
            found.append(Action("script", "client starts", self._start_client))
        if world.mail(SUPERVISOR):
            found.append(Action("notices", "the supervisor hears the server", self._hear))
        return found

    # --- deaths -------------------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """kill -9."""
        world = self.world
        if name == SERVER:
            world.server = None
        elif name in world.workers:
            worker = world.workers[name]
            self.lost.append(name)
            if worker.doing is not None and not world.rules.died_means_reaped:
                worker.is_zombie = True  # it is stopped for now, and taken for dead
                self.zombies.append(name)
            else:
                del world.workers[name]
        else:
            world.client = None
        world.bury(name)
        self.unreaped.append(name)

    def _reap(self, name: str) -> None:
        self.unreaped.remove(name)
        if name == SERVER:
            return
        if name[0] == "c":
            self.left.append(Left(name))
            self.world.send(SUPERVISOR, SERVER, Left(name))  # the workers hear it when the server has
            return
        replica, incarnation = name[1:].split(".")
        died = self.deaths[int(replica)] = Died(int(replica), int(incarnation))
        self.to_start.append(int(replica))
        for receiver in self._peers():
            self.world.send(SUPERVISOR, receiver, died)

    def _end(self, name: str) -> None:
        self.zombies.remove(name)
        del self.world.workers[name]

    def _peers(self) -> list[str]:
        return [name for name in self.world.inboxes if name != SUPERVISOR]

    # --- starts -------------------------------------------------------------------------------------------------------

    def _start_service(self) -> None:
        self.world.store = Tables(self.world.replicas)
        self._start_server()
        for replica in range(self.world.replicas):
            self._start_worker(replica)

    def _start_server(self) -> None:
        self.world.server = Server(self.world)
        notices: list[Record] = [*self.deaths.values(), *self.left]  # the one before it may not have heard
        for notice in notices:
            self.world.send(SUPERVISOR, SERVER, notice)

    def server_serves(self) -> None:
        """The server has taken up what the one before it left: everybody hears of it, whenever."""
        for receiver in self._peers():
            if receiver != SERVER:
                self.world.send(SUPERVISOR, receiver, Serving())

    def _start_worker(self, replica: int) -> None:
        world = self.world
        if replica in self.to_start:
            self.to_start.remove(replica)
        self.incarnations[replica] += 1
        incarnation = self.incarnations[replica]
        worker = Worker(world, replica, incarnation)
        world.workers[worker.name] = worker
        if self.appointed:
            world.send(SUPERVISOR, worker.name, Introduce(self.appointed))

    def _start_client(self) -> None:
        script = self.scripts.popleft()
        self.clients += 1
        self.world.client = Client(self.world, f"c{self.clients}", script.steps, script.cancels)

    def _hear(self) -> None:
        record = self.world.take(SUPERVISOR, SERVER)
        if isinstance(record, Appoint):
            self.appointed = record.client
            for name in self.world.workers:
                self.world.send(SUPERVISOR, name, Introduce(record.client))
            self.world.send(SUPERVISOR, SERVER, record)
        elif isinstance(record, Left) and record in self.left:
            self.left.remove(record)
            self.appointed = "" if self.appointed == record.client else self.appointed
            for name in self.world.workers:
                self.world.send(SUPERVISOR, name, record)
