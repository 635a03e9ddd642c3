"""One worker of an outpost: its launcher, and its surroundings in a run directory of its own.

What the service says to this worker comes from :mod:`.outpost`, which has the link; what the worker says goes there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from central_storage.cluster import items
from central_storage.cluster.memory import NodeMemory
from central_storage.launch.plan import Command, of_incarnation
from central_storage.launch.supervisor.children import Child
from cs_proto.codec import decode, encode
from cs_proto.errors import CentralStorageError, PeerProtocolError
from cs_proto.messages import Joined
from cs_proto.records import Buffer

from .launcher import Terminal, WorkerLauncher
from .node import Node

__all__ = ["Put", "Seat"]

#: Puts an item of a kind for the gateway. It is dropped if there is no link.
Put = Callable[[bytes, Sequence[Buffer]], None]


class Seat(WorkerLauncher):
    """Runs one worker after the other, until it is told to end."""

    def __init__(
        self,
        terminal: Terminal,
        run_directory: str,
        command_of: Callable[[Joined], Command],
        endpoint: str,
        put: Put,
        shared: NodeMemory,
        is_cut_off: Callable[[], bool],
        *,
        mailboxes: bool,
    ) -> None:
        """``shared`` is the memory of all workers of the outpost. ``is_cut_off`` tells whether the link is gone, so
        nobody can be told of the end of the worker. ``mailboxes`` is as for :class:`.node.Node`."""
        super().__init__(run_directory, command_of, terminal)
        self._endpoint, self._put, self._is_cut_off = endpoint, put, is_cut_off
        self._node = Node(self._loop, run_directory, put, shared, mailboxes=mailboxes)
        #: Whether the service has assigned it a worker, this one or an earlier one.
        self.has_joined = False

    @property
    def code(self) -> int | None:
        """The exit code; None until the seat is over."""
        return self._code

    @property
    def is_told(self) -> bool:
        """Whether it was told to end."""
        return self._told

    @property
    def is_empty(self) -> bool:
        """Whether no worker runs."""
        return self._worker is None

    @property
    def living_pid(self) -> int | None:
        """The pid of the worker; None if it has ended."""
        return None if self._worker is None or self._worker.returncode is not None else self._worker.pid

    def open(self) -> None:
        """Be ready for a worker. Raises LaunchError if that cannot be done in the run directory."""
        self._node.open()

    def heard(self, kind: bytes, parts: Sequence[Buffer]) -> None:
        """Do what an item of the gateway stands for. Raises PeerProtocolError for what no gateway sends."""
        if kind == items.JOIN:
            record = decode(parts)
            if not isinstance(record, Joined) or self._worker is not None:
                raise PeerProtocolError(f"the gateway sent a {type(record).__name__} where it had to assign a worker")
            if not self._told:
                self._start(record)
        elif kind == items.LAUNCHER:
            self._heed(decode(parts))
        else:
            self._node.pass_on(kind, parts)

    def turn(self) -> bool:
        """Put what the worker has said. False if there was nothing; then the loop may wait."""
        return self._node.turn()

    def end(self) -> None:
        """End the worker, and run no other one. Idempotent."""
        self._end()

    def fail(self) -> None:
        """End the worker, because the service is gone."""
        if not self._told:
            self._has_failed = True
            self._end()

    def kill(self) -> None:
        """End the worker at once."""
        self._kill()

    def replace(self) -> None:
        """End the worker at once, because another one is asked for."""
        if self._worker is not None:
            self._worker.asked = True
            self._kill()

    def close(self) -> None:
        """End the worker, and wait for its end."""
        self._told = True
        self._kill()
        while self._worker is not None:
            self._loop.turn()

    def close_node(self) -> None:
        """Close what was opened, after :meth:`close`."""
        self._node.close()

    def _start(self, assigned: Joined) -> None:
        self.has_joined, self._has_failed = True, False
        command = of_incarnation(self._command_of(assigned), assigned.incarnation)
        self._say(
            f"worker {command.label} of {assigned.replicas} on {command.device}, for the service behind "
            f"{self._endpoint}, transport tcp + CURVE"
        )
        self._start_child(command)
        if self._worker is not None:
            self._node.begin(assigned, self._worker)

    def _follow_end(self, worker: Child) -> None:
        try:
            self._node.turn()  # its last messages
        except CentralStorageError as error:  # what follows is the same as if it had died before
            self._say(str(error))
        self._node.end()

    def _go_on(self, worker: Child) -> None:
        if not self._is_cut_off():
            self._say(f"{worker.name} ended by {worker.cause}")
            self._put(items.LAUNCHER, encode(self._failed(worker)))
