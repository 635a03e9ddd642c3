"""``cs-launch --join tcp://ADDRESS:PORT``: one worker of a service on another machine.

It is linked to the gateway of the service, is assigned a worker, and runs it as a child, in a private run directory
with surroundings of its own (:mod:`.node`). A cut of the link changes nothing as long as it is mended in time. If the
gateway was started again, the worker is, too. ``join_options`` calls :func:`hold`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial

from central_storage.cluster import items
from central_storage.cluster.link import Link
from central_storage.launch.plan import Command, of_incarnation
from central_storage.launch.supervisor.children import Child
from cs_proto.codec import decode, encode
from cs_proto.errors import CentralStorageError, ConfigurationError, Fenced, LaunchError, PeerProtocolError
from cs_proto.messages import PROTOCOL, Join, Joined
from cs_proto.records import Buffer
from cs_runtime import heap, open_files
from cs_runtime.transport.curve import WorkerKeys

from .launcher import WorkerLauncher
from .node import Node, wake

__all__ = ["hold"]

# Seconds after which somebody who waits for the gateway hears what for.
_SAY_AFTER = 4.0


def hold(
    endpoint: str,
    keys: WorkerKeys,
    run_directory: str,
    command_of: Callable[[Joined], Command],
    start_timeout: float,
) -> int:
    """Run one worker of the service behind ``endpoint`` until the service ends or releases it. The worker's sockets lie
    in ``run_directory``; ``command_of`` returns the command to start it. A worker that dies is started again when the
    service asks for that.

    Returns the exit code: 0 after SIGTERM or Ctrl-C, or if the service ended in order, 4 otherwise. Raises LaunchError
    if no service answers within ``start_timeout`` seconds or if it has no place for this worker, and
    ConfigurationError if it does not admit the key.
    """
    open_files.raise_limit()
    heap.keep_freed_blocks()
    return _Outpost(endpoint, keys, run_directory, command_of, start_timeout).run()


class _Outpost(WorkerLauncher):
    def __init__(
        self,
        endpoint: str,
        keys: WorkerKeys,
        run_directory: str,
        command_of: Callable[[Joined], Command],
        start_timeout: float,
    ) -> None:
        super().__init__(run_directory, command_of)
        self._endpoint, self._keys, self._start_timeout = endpoint, keys, start_timeout
        self._link: Link | None = None
        self._node = Node(self._loop, run_directory, self._put)
        self._has_joined = False

    def run(self) -> int:
        with self._signals():
            try:
                self._node.open()
                self._connect()
                while self._code is None:
                    self._loop.turn(None if self._link is None else self._link.timeout())
                    self._look()
            finally:
                self._close()
        return self._code

    def _connect(self) -> None:
        """Ask the gateway for a worker."""
        self._link = Link.connect(self._endpoint, self._keys, self._start_timeout)
        self._loop.on_readable(self._link.fileno(), wake)
        self._loop.call_later(_SAY_AFTER, partial(self._say_if_unanswered, self._link))
        self._put(items.JOIN, encode(Join(PROTOCOL, os.getpid())))

    def _say_if_unanswered(self, link: Link) -> None:
        """Say what is waited for, if that may be in vain."""
        if link is self._link and not link.is_open and not self._told:
            left = max(0.0, self._start_timeout - _SAY_AFTER)
            self._say(
                f"no gateway answers at {self._endpoint} yet, and is waited for {left:g} s: {link.why_not_open()}"
            )

    def _put(self, kind: bytes, parts: Sequence[Buffer]) -> None:
        if self._link is not None:
            self._link.put(kind, parts)

    def _look(self) -> None:
        """Pass on all that has come, from either side, until nothing more comes."""
        try:
            while (link := self._link) is not None:
                link.turn()
                for kind, parts in link.received():
                    self._heard(kind, parts)
                if not self._node.turn():
                    break
        except CentralStorageError as error:
            self._hang_up(error)
        if self._link is not None and self._link.is_over:
            self._hang_up(self._link.reason or LaunchError("the service is gone"))

    def _hang_up(self, reason: CentralStorageError) -> None:
        """The session is over: the worker ends, and another session begins if the gateway was only started again."""
        assert self._link is not None
        self._loop.forget(self._link.fileno())
        self._link.close()
        self._link = None
        if self._told:
            return
        if not self._has_joined:
            raise reason if isinstance(reason, ConfigurationError | LaunchError) else LaunchError(str(reason))
        is_anew = isinstance(reason, Fenced)
        self._say(f"{reason}{'; another worker is asked for' if is_anew else ''}")
        if not is_anew:
            self._has_failed = True
            self._end()
        elif self._worker is None:
            self._connect()
        else:
            self._worker.asked = True
            self._worker.signal(signal.SIGKILL)

    # --- the worker ---------------------------------------------------------------------------------------------------

    def _heard(self, kind: bytes, parts: Sequence[Buffer]) -> None:
        if kind == items.JOIN:
            record = decode(parts)
            if not isinstance(record, Joined) or self._worker is not None:
                raise PeerProtocolError(f"the gateway sent a {type(record).__name__} where it had to assign a worker")
            if not self._told:
                self._start(record)
        elif kind == items.LAUNCHER:
            self._heed(decode(parts))
        elif self._worker is not None:
            self._node.pass_on(kind, parts)

    def _start(self, assigned: Joined) -> None:
        self._has_joined, self._has_failed = True, False
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
        if self._link is None:
            self._connect()
        else:
            self._say(f"{worker.name} ended by {worker.cause}")
            self._put(items.LAUNCHER, encode(self._failed(worker)))

    def _close(self) -> None:
        self._told = True
        self._kill()
        while self._worker is not None:
            self._loop.turn()
        self._flush()
        self._node.close()
        if self._link is not None:
            self._loop.forget(self._link.fileno())
            self._link.close()
