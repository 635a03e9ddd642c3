"""What the supervisor tells those who look at its service: how the service is, and what its processes have printed.

It keeps the last events, the fates of processes and the last lines, all of them bounded, and decides nothing. Step
times are noted as long as anybody who reads them is connected.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Literal, cast

from central_storage.launch.memory import Memory
from cs_proto.messages import Died, LogLine, LogLines, ServiceProcess, ServiceReport, ServiceState, ShowLog
from cs_proto.printable import counted

from .children import Running
from .connections import Peer
from .output import Stream
from .restarts import Restarts

__all__ = ["Reporter"]

_EVENTS = 20
_EVENT_LIMIT = 500
_LINES = 1000
_LINE_LIMIT = 500
# Characters of lines in one packet; a character takes at most four bytes.
_PACKET_LIMIT = 16_384
# Characters of all causes of death in one report.
_CAUSES_LIMIT, _CAUSE_LIMIT = 16_384, 300
_CONTROLLERS, _CLIENT_LIMIT = 100, 64


class Reporter:
    """Answers questions about a service."""

    def __init__(self, transport: str, memory: Memory) -> None:
        self._transport = transport
        self._memory = memory
        self._watchers: set[Peer] = set()
        memory.note_watched(False)  # whoever read the rings of a supervisor before this one has lost it
        self._since = time.time()
        self._events: deque[tuple[float, str]] = deque(maxlen=_EVENTS)
        self._lines: deque[LogLine] = deque(maxlen=_LINES)
        # Those who follow the lines, and how many were dropped since they last read in time.
        self._followers: dict[Peer, int] = {}
        self._deaths: Counter[tuple[str, int]] = Counter()
        #: For each role and rank, the newest process that ended unexpectedly, whatever came after it.
        self.last_deaths: dict[tuple[str, int], Died] = {}

    def note(self, event: str) -> None:
        """Remember what the supervisor has said."""
        self._events.append((time.time(), event[:_EVENT_LIMIT]))

    def note_death(self, died: Died) -> None:
        """Remember that a process has ended unexpectedly."""
        self._deaths[died.role, died.rank] += died.restarts
        self.last_deaths[died.role, died.rank] = died

    def add(self, label: str, stream: Stream, lines: Iterable[str]) -> None:
        """Remember lines, shortened, without what others are drawn over, and send them to those who follow."""
        now = time.time()
        added = [LogLine(now, label, stream, line[:_LINE_LIMIT]) for line in lines if not line.endswith("\r")]
        self._lines.extend(added)
        for peer, dropped in list(self._followers.items()):
            if peer.closed:
                del self._followers[peer]
            elif peer.is_slow:
                self._followers[peer] += len(added)
            else:
                self._followers[peer] = 0
                lost = f"dropped {counted(dropped, 'line')}, not read in time"
                notice = [LogLine(now, "supervisor", "stderr", lost)] if dropped else []
                for packet in _packets([*notice, *added]):
                    peer.send(packet)

    def show_log(self, peer: Peer, request: ShowLog) -> None:
        """Send the last lines, and from now on those that come if the peer follows. A peer that does not read gets no
        answer."""
        if peer.is_slow:
            return
        packets = _packets(list(self._lines)) or [LogLines((), False)]
        for packet in packets[:-1]:
            peer.send(packet)
        peer.send(LogLines(packets[-1].lines, True))
        if request.follow:
            self._followers.setdefault(peer, 0)

    def watch_times(self, peer: Peer) -> None:
        """Have step times noted as long as ``peer`` is connected."""
        self._watchers.add(peer)
        self._memory.note_watched(True)

    def forget(self, peer: Peer) -> None:
        """A peer has gone."""
        self._followers.pop(peer, None)
        if peer in self._watchers:
            self._watchers.remove(peer)
            self._memory.note_watched(bool(self._watchers))

    def show_service(
        self, peer: Peer, state: ServiceState, processes: Sequence[Running], peers: Sequence[Peer], restarts: Restarts
    ) -> None:
        """Say how the service is. A peer that does not read gets no answer."""
        if not peer.is_slow:
            peer.send(self._report(state, processes, peers, restarts))

    def _report(
        self, state: ServiceState, processes: Sequence[Running], peers: Sequence[Peer], restarts: Restarts
    ) -> ServiceReport:
        limit = min(_CAUSE_LIMIT, _CAUSES_LIMIT // max(1, len(processes)))
        controllers = tuple(
            (peer.pid, peer.introduction.client[:_CLIENT_LIMIT])
            for peer in peers[:_CONTROLLERS]
            if peer.introduction is not None and peer.introduction.role == "controller"
        )
        described = tuple(self._process(child, limit) for child in processes)
        return ServiceReport(
            state,
            self._since,
            self._transport,
            described,
            controllers,
            tuple(self._events),
            restarts.count,
            restarts.limit,
        )

    def _process(self, child: Running, limit: int) -> ServiceProcess:
        command = child.command
        key = command.role, command.rank
        is_over = child.returncode is not None
        died = self.last_deaths.get(key)
        return ServiceProcess(
            cast(Literal["server", "worker"], command.role),
            command.rank,
            command.incarnation,
            child.pid,
            command.device,
            "ended" if is_over else "starting" if child.ready_since is None else "ready",
            self._deaths[key],
            (died.cause if died is not None else child.cause if is_over else "")[:limit],
            child.node,
        )


def _packets(lines: Sequence[LogLine]) -> list[LogLines]:
    packets: list[list[LogLine]] = []
    size = _PACKET_LIMIT
    for line in lines:
        size += len(line.text) + 50
        if size > _PACKET_LIMIT:
            packets.append([])
            size = len(line.text) + 50
        packets[-1].append(line)
    return [LogLines(tuple(packet), False) for packet in packets]
