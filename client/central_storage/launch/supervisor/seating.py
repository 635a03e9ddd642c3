"""Assigns workers to launchers elsewhere: the launchers that wait, and the places that are free."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from cs_proto.errors import LaunchError
from cs_proto.messages import PROTOCOL, Died, Introduce, Join, Joined, StartFailed
from cs_proto.printable import counted, printable

from .children import Processes, Running
from .connections import Peer
from .introductions import new_name
from .reception import as_record
from .seats import Elsewhere

__all__ = ["Seating", "on_nodes"]


def on_nodes(nodes: Sequence[str]) -> str:
    """Where the workers are, by the node of each; "" is the machine of the service.

    >>> on_nodes(["10.0.0.4", "10.0.0.7", "10.0.0.7", "10.0.0.7", "10.0.0.4", ""])
    '6 workers on 3 nodes (10.0.0.4: w0, w4; 10.0.0.7: w1-w3; this machine: w5)'
    """
    where: dict[str, list[list[int]]] = {}
    for worker, node in enumerate(nodes):
        ranges = where.setdefault(node or "this machine", [])
        if ranges and ranges[-1][1] == worker - 1:
            ranges[-1][1] = worker
        else:
            ranges.append([worker, worker])
    named = "; ".join(
        f"{node}: " + ", ".join(f"w{first}" if first == last else f"w{first}-w{last}" for first, last in ranges)
        for node, ranges in where.items()
    )
    return f"{counted(len(nodes), 'worker')} on {counted(len(where), 'node')} ({named})"


def _no_place(workers: int, left: int, places: int) -> LaunchError:
    """Why a launcher gets no worker."""
    more = "tell its server of more (cs-launch --serve N)"
    if not left:
        return LaunchError(f"all {places} workers of this service run already; {more}")
    return LaunchError(
        f"this machine has {counted(workers, 'worker')} to run, and the service only {left} of {places} left; {more}, "
        "or name fewer devices here"
    )


class Seating:
    """Gives the places of a service's workers to launchers elsewhere."""

    def __init__(
        self,
        children: Processes,
        deaths: Mapping[tuple[str, int], Died],
        transport: str,
        say: Callable[[str], None],
    ) -> None:
        """``children`` are the service's processes. ``deaths`` holds, for each process, the last incarnation that ended
        unexpectedly, until its successor is ready. ``say`` prints a line of the supervisor."""
        self._children = children
        self._deaths = deaths
        self._transport = transport
        self._say = say
        self._places: dict[Peer, Elsewhere] = {}
        self._queue: list[tuple[Peer, Join]] = []  # launchers for which there may be a place
        self._is_full = False  # all have joined, and their nodes were named
        # By the node and the pid of a launcher that has more workers to run: how many places are kept for them.
        self._kept: dict[tuple[str, int], int] = {}

    @property
    def places(self) -> list[Elsewhere]:
        """The workers that launchers elsewhere run."""
        return [child for child in self._children if isinstance(child, Elsewhere)]

    def is_waiting(self, launcher: Peer) -> bool:
        """Whether the launcher waits for a place."""
        return any(waiting is launcher for waiting, _ in self._queue)

    def join(self, launcher: Peer, request: Join) -> None:
        """Give a launcher the worker that it ran for the previous supervisor, or one that no launcher runs yet."""
        places = self.places
        if request.incarnation and request.rank < len(places) and places[request.rank].is_awaited:
            self._come_back(places[request.rank], launcher, request)
        else:
            self._queue.append((launcher, request))
        self.fill()

    def _come_back(self, place: Elsewhere, launcher: Peer, request: Join) -> None:
        """Give a launcher its worker back. If the worker has died meanwhile, the launcher reports that next. If its
        successor was to be started, the launcher gets that incarnation."""
        if request.incarnation == place.command.incarnation:
            place.ready_since = time.monotonic()
            self._give(place, launcher, request.pid, request.node, request.name)
        else:
            self._give(place, launcher, request.pid, request.node)
        self._say(f"worker w{place.command.rank} is back")

    def fill(self) -> None:
        """Give free places to waiting launchers, and turn away launchers for which no place can become free."""
        places = self.places
        for waiting in list(self._queue):
            if waiting not in self._queue:  # it has gone meanwhile
                continue
            peer, request = waiting
            whose = request.node, request.pid
            open_to_it = sum(child.is_free or child.is_awaited or self._is_started_again(child) for child in places)
            kept = sum(count for machine, count in self._kept.items() if machine != whose)
            open_to_it = max(0, open_to_it - kept)
            place = next((child for child in places if child.is_free), None)
            if open_to_it < request.workers:
                self._queue.remove(waiting)
                peer.send(StartFailed(as_record(_no_place(request.workers, open_to_it, len(places)))))
            elif place is not None:
                self._queue.remove(waiting)
                self._keep(whose, request.workers - 1)
                self._give(place, peer, request.pid, request.node)
                self._say_joined(place, places)

    def _keep(self, machine: tuple[str, int], count: int) -> None:
        """Keep so many places for the further workers of a launcher, and none that were kept before."""
        self._kept.pop(machine, None)
        if count:
            self._kept[machine] = count

    def hand_on(self, ended: Elsewhere, place: Elsewhere) -> None:
        """Give the next incarnation of a worker to the launcher that ran the last one. If that launcher is gone,
        another one has to join."""
        launcher = ended.launcher
        if launcher is not None and not launcher.closed:
            self._give(place, launcher, ended.pid, ended.node)
        self.fill()

    def has_died(self, launcher: Peer, died: Died) -> bool:
        """Take a launcher's report that its worker has died. False if the launcher has none."""
        place = self._places.get(launcher)
        if place is None:
            return False
        if died.incarnation == place.command.incarnation:
            place.end(printable(died.cause), died.log)
        return True

    def forget(self, peer: Peer) -> None:
        """Drop a peer whose connection has ended, if it is a launcher."""
        self._queue = [(launcher, request) for launcher, request in self._queue if launcher is not peer]
        if peer in self._places:
            place = self._places.pop(peer)
            self._keep((place.node, place.pid), 0)
            place.leave()

    def _say_joined(self, place: Elsewhere, places: list[Elsewhere]) -> None:
        """Say who has joined, and once all have, on which nodes they are."""
        waiting = sum(child.is_free for child in places)
        joined = f"worker w{place.command.rank} of {len(places)} has joined"
        joined += f" from {place.node}" if place.node else ""
        self._say(joined + (f", {waiting} to come" if waiting else ""))
        if not waiting and not self._is_full:
            self._is_full = True
            if any(child.node for child in places):
                self._say(on_nodes([child.node for child in places]))

    def _give(self, place: Elsewhere, launcher: Peer, pid: int, node: str, name: bytes = b"") -> None:
        command, name = place.command, name or new_name()
        launcher.introduction = Introduce(PROTOCOL, "worker", command.rank, command.incarnation, pid)
        place.take(launcher, pid, name, node)
        self._places[launcher] = place
        launcher.send(Joined(command.rank, command.incarnation, len(self.places), self._transport, name))

    def _is_started_again(self, child: Running) -> bool:
        died = self._deaths.get((child.command.role, child.command.rank))
        return child.returncode is not None and died is not None and died.restarts
