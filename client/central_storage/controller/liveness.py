"""Who of the service has died, as far as this client has heard, and what that means for what it does next."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from cs_proto.errors import ReplicaLostError
from cs_proto.messages import Died, Worker

__all__ = ["Liveness", "last_lines"]

# After a worker's death the living replicas get this long to notice before the run is given up without them.
_LOST_TIMEOUT = 2.5


class Liveness:
    """Workers that died for good, and those in whose place another is being started."""

    def __init__(self) -> None:
        self._died: dict[int, Died] = {}
        self._restarting: dict[int, Died] = {}
        self._server: Died | None = None
        self._deadline = 0.0
        #: The death that matters: the first for good, else the last.
        self.last: Died | None = None

    def hear(self, died: Died) -> None:
        """Take note that there was a death, whoever it was."""
        if self.last is None or self.last.restarts:
            self.last = died

    def of_worker(self, died: Died, workers: Sequence[Worker]) -> None:
        """Take note of a worker's death; ``workers`` are those that are known."""
        if died.restarts:
            known = next((worker for worker in workers if worker.replica == died.rank), None)
            if known is None or known.incarnation <= died.incarnation:  # else the server was quicker
                self._restarting[died.rank] = died
            return
        self._restarting.pop(died.rank, None)
        self._died[died.rank] = died
        self._deadline = time.monotonic() + _LOST_TIMEOUT

    def of_server(self, died: Died) -> None:
        """Take note of the death of a server in whose place another is being started."""
        self._server = died

    def server_serves(self) -> None:
        """Another server is in its place."""
        self._server = None

    def took_place(self, replica: int) -> None:
        """Another worker is in the place of one that died."""
        self._restarting.pop(replica, None)

    def has_worker(self, replica: int) -> bool:
        """Whether somebody lives who is that replica, as far as is known."""
        return replica not in self._died and replica not in self._restarting

    def refuse(self) -> None:
        """Raise :class:`ReplicaLostError` where a worker died for good."""
        for died in self._died.values():
            raise ReplicaLostError(
                f"replica {died.rank} (worker w{died.rank}, pid {died.pid}) ended by {died.cause}. Updates that were "
                "committed before stand and variables can still be read; make a new CentralStorageStrategy to train on"
                f"{last_lines(died)}"
            )

    def patience(self) -> float:
        """Seconds for which to wait for a run yet. Raises as :meth:`refuse` does when they are over."""
        if not self._died:
            return math.inf
        left = self._deadline - time.monotonic()
        if left <= 0:
            self.refuse()
        return left

    def first(self) -> str:
        """The first of them, in words."""
        for died in self._died.values():
            return f"worker w{died.rank} (pid {died.pid}) had ended by {died.cause}"
        return "nothing was said about why"

    def restarts_named(self) -> str:
        """Who is being started again, which is what a wait is for."""
        dead = [(f"worker w{replica}", died) for replica, died in self._restarting.items()]
        if self._server is not None:
            dead.append(("the server", self._server))
        return "".join(f"; {who} (pid {d.pid}) ended by {d.cause} and is being started again" for who, d in dead)


def last_lines(died: Died) -> str:
    """What a process printed last, to end a message with."""
    return f". Its last lines:\n{died.log}" if died.log else ""
