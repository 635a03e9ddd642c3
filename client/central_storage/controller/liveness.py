"""Which processes of the service have died, as far as this client has heard, and what it may still do.

Nothing here reads a clock: ``now`` is seconds since any fixed moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cs_proto.errors import ReplicaLostError
from cs_proto.failures import last_lines, pid_of
from cs_proto.messages import Died, Worker

__all__ = ["Liveness"]

# After a worker's death the living replicas get this long to notice before the run is given up without them.
_LOST_TIMEOUT = 2.5


class Liveness:
    """Workers that died for good, and those in whose place another is being started."""

    def __init__(self) -> None:
        #: By replica, the workers that died for good.
        self.died: dict[int, Died] = {}
        self._restarting: dict[int, Died] = {}
        self._server: Died | None = None
        #: When a run is given up, after which :meth:`refuse` raises; infinite while every worker lives or is being
        #: started again.
        self.deadline = math.inf
        #: The death that matters: the first for good, else the last.
        self.last: Died | None = None

    def hear(self, died: Died, workers: Sequence[Worker], now: float) -> None:
        """Take note of a death; ``workers`` are those that are known."""
        if self.last is None or self.last.restarts:
            self.last = died
        if died.role == "server":
            if died.restarts:
                self._server = died
        elif died.restarts:
            known = next((worker for worker in workers if worker.replica == died.rank), None)
            if known is None or known.incarnation <= died.incarnation:  # else the server was quicker
                self._restarting[died.rank] = died
        else:
            self._restarting.pop(died.rank, None)
            self.died[died.rank] = died
            self.deadline = now + _LOST_TIMEOUT

    def server_serves(self) -> None:
        """Another server is in the place of one that died."""
        self._server = None

    def took_place(self, worker: Worker) -> None:
        """``worker`` is in the place of those of its replica before it."""
        died = self._restarting.get(worker.replica)
        if died is not None and died.incarnation < worker.incarnation:
            del self._restarting[worker.replica]

    def has_worker(self, replica: int) -> bool:
        """Whether somebody lives who is that replica, as far as is known."""
        return replica not in self.died and replica not in self._restarting

    def refuse(self) -> None:
        """Raise :class:`ReplicaLostError` where a worker died for good."""
        for died in self.died.values():
            raise ReplicaLostError(
                f"replica {died.rank} (worker w{died.rank}, {pid_of(died)}) ended by {died.cause}. Committed "
                "updates are kept, and variables can still be read; make a new CentralStorageStrategy to continue "
                f"training{last_lines(died)}"
            )

    def first(self) -> str:
        """The first of them, in words."""
        for died in self.died.values():
            return f"worker w{died.rank} ({pid_of(died)}) had ended by {died.cause}"
        return "nothing was said about why"

    def restarts_named(self) -> str:
        """Who is being started again, which is what a wait is for."""
        dead = [(f"worker w{replica}", died) for replica, died in self._restarting.items()]
        if self._server is not None:
            dead.append(("the server", self._server))
        return "".join(f"; {who} ({pid_of(d)}) ended by {d.cause} and is being started again" for who, d in dead)
