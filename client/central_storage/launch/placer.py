"""The launcher's side of Ray: keeps the placer, a child process that asks Ray for the workers' places.

Ray's threads, signal handlers and imports stay in that process (:mod:`central_storage.ray.placer`). It first reserves
all places, before anything else of the run starts, so what Ray refuses is an error at once. When the gateway listens,
it is told where, and lets the workers' nodes join. It ends with its connection, whatever ends the launcher. One that
dies is started again; its workers have died with it. ``cli`` and ``foreground`` use this module.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from cs_proto.errors import CentralStorageError, ConfigurationError, LaunchError
from cs_proto.frozen import frozen
from cs_proto.printable import printable

from .packages import python_path
from .placement import Request
from .plan import Command
from .supervisor.children import Child
from .supervisor.loop import Loop, Timer
from .supervisor.restarts import WORKED_SECONDS, Restarts

__all__ = ["Placed", "Placer", "environment_of"]

# Seconds beyond the time that the placer itself allows Ray, after which it counts as hanging.
_MARGIN = 10.0
# Seconds that it has for its end: it gives the places back, and ends what it has started.
_END_TIMEOUT = 5.0
_READ_NBYTES = 65536
# How often Ray tries to connect to a cluster that is there.
_TRIES = "6"
# What the script and the processes of the service are told means nothing to nodes.
_NOT_FOR_NODES = ("CS_ADDRESS", "CS_DEVICES", "CS_PARAMETER_DEVICE", "CS_RUN_DIRECTORY", "CS_ROLE", "CS_ERROR_FILE")


@frozen
class Placed:
    """Where the workers have their places."""

    #: This node's address, as Ray knows it.
    address: str
    #: The address of each worker's node.
    nodes: tuple[str, ...]
    #: Ray's version, and the number of nodes in its cluster.
    version: str
    cluster_nodes: int
    #: Ray's name of each worker's node. Pretend nodes share an address.
    ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For the banner.

        >>> str(Placed("10.0.0.4", ("10.0.0.4", "10.0.0.7", "10.0.0.7"), "2.60.0", 5))
        'Ray 2.60.0 with 5 nodes: 1 worker on 10.0.0.4, 2 on 10.0.0.7'
        """
        counts = [(self.nodes.count(node), node) for node in dict.fromkeys(self.nodes)]
        first, *more = [f"{count} on {node}" for count, node in counts]
        count = counts[0][0]
        first = first.replace(" on", f" worker{'s' * (count > 1)} on", 1)
        return f"Ray {self.version} with {self.cluster_nodes} node{'s' * (self.cluster_nodes != 1)}: " + ", ".join(
            [first, *more]
        )


class Placer:
    """The placer of one run, kept beside the service. ::

    placer = Placer(request, keys)
    placed = placer.place()  # raises what Ray refuses
    placer.listens_at("tcp://192.0.2.7:40123")
    placer.kept(loop, print).start()
    """

    def __init__(self, request: Request, keys: str) -> None:
        """Starts nothing yet. The public keys of nodes go into the directory ``keys``, which has the service's own."""
        self._loop = Loop()
        self._request = request
        self._command = _command(request, keys)
        self._say: Callable[[str], None] = _say_plainly
        self._child: Child | None = None
        self._link: socket.socket | None = None
        self._received = b""
        self._placed: Placed | None = None
        self._refused: CentralStorageError | None = None
        self._endpoint = ""
        self._is_kept = self._is_begun = self._is_over = False
        self._started = 0.0
        self._restarts = Restarts(sys.maxsize)
        self._timer: Timer | None = None

    @property
    def living_pids(self) -> set[int]:
        """Its pid, unless it has ended."""
        return {self._child.pid} if self._child is not None and self._child.returncode is None else set()

    def place(self, owner: int | None = None) -> Placed:
        """Start it, and wait until Ray has given all workers their places. ``owner`` is a descriptor that is readable
        when nobody wants them any more.

        Raises ConfigurationError or LaunchError with what Ray lacks or refuses, and SystemExit after SIGTERM and if
        nobody wants the places.
        """
        heeded = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, _exit) for number in heeded}
        try:
            if owner is not None:
                self._loop.on_readable(owner, sys.exit)
            self._begin()
            placed = self._wait()
        finally:
            if owner is not None:
                self._loop.forget(owner)
            for number, handler in before.items():
                signal.signal(number, handler)
        self._is_kept = True
        return placed

    @property
    def placed(self) -> Placed:
        """Where the workers have their places, once :meth:`place` has returned."""
        assert self._placed is not None
        return self._placed

    def listens_at(self, endpoint: str) -> None:
        """Say where the service listens for its workers."""
        self._endpoint = endpoint

    def kept(self, loop: Loop, say: Callable[[str], None]) -> Self:
        """This, watched by ``loop`` from now on; ``say`` prints its lines."""
        if self._child is not None:
            self._child.move(loop)
        if self._link is not None:
            self._loop.forget(self._link.fileno())
            loop.on_readable(self._link.fileno(), self._read)
        self._loop, self._say = loop, say
        return self

    def start(self) -> None:
        """Let the nodes join."""
        self._is_begun = True
        if self._timer is None and not self.living_pids:  # it ended as soon as it had placed them
            self._retry(self._its_end())
        else:
            self._go()

    def close(self) -> None:
        """End it, and wait for its end, which gives the places back. Idempotent."""
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._hang_up()
        child = self._child
        if child is None or child.returncode is not None:
            return
        if self._placed is None:  # it may be busy with Ray, and not look
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + _END_TIMEOUT
        while child.returncode is None:
            left = deadline - time.monotonic()
            if left <= 0:
                child.signal(signal.SIGKILL)
            self._loop.turn(max(0.1, left))

    def _begin(self) -> None:
        self._started, self._placed, self._received = time.monotonic(), None, b""
        self._link, theirs = socket.socketpair()
        self._link.setblocking(False)
        self._loop.on_readable(self._link.fileno(), self._read)
        argv = (*self._command.argv, "--descriptor", str(theirs.fileno()))
        with theirs:
            try:
                self._child = Child(
                    self._loop,
                    Command("observer", 0, argv, self._command.environment),
                    on_lines=lambda *_: None,
                    on_end=self._ended,
                    descriptors=(theirs.fileno(),),
                )
            except OSError as error:
                self._hang_up()
                raise LaunchError(f"the placer could not be started ({argv[0]}: {error.strerror})") from error

    def _wait(self) -> Placed:
        limit = self._request.start_timeout + _MARGIN
        while self._placed is None:
            if self._refused is not None:
                raise self._refused
            if not self.living_pids:
                raise LaunchError(f"Ray cannot be asked for workers: {self._its_end()}")
            if (left := self._started + limit - time.monotonic()) <= 0:
                raise LaunchError(f"Ray ({self._request.address}) has not answered within {limit:g} s")
            self._loop.turn(left)
        return self._placed

    def _begin_again(self) -> None:
        try:
            self._begin()
        except LaunchError as error:
            self._retry(str(error))

    def _retry(self, why: str) -> None:
        has_worked = self._placed is not None and time.monotonic() - self._started >= WORKED_SECONDS
        pause = max(1.0, self._restarts.next("placer", has_worked=has_worked) or 0.0)
        self._say(f"{why}; its workers are gone, and another placer starts in {pause:g} s")
        self._timer = self._loop.call_later(pause, self._begin_again)

    def _read(self) -> None:
        if self._link is not None and not self._hear_more():
            self._loop.forget(self._link.fileno())  # it ends, which its pidfd tells

    def _hear_more(self) -> bool:
        """Hear what has come; False if there is nothing."""
        assert self._link is not None
        try:
            data = self._link.recv(_READ_NBYTES)
        except OSError:
            return False
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self._hear(json.loads(line))
        return bool(data)

    def _hear(self, said: Mapping[str, object]) -> None:
        if "refused" in said:
            kind = ConfigurationError if said["is_usage"] else LaunchError
            self._refused = kind(str(said["refused"]))
        elif "nodes" in said:
            assert isinstance(said["nodes"], list)
            assert isinstance(said["cluster_nodes"], int)
            nodes, ids = tuple(said["nodes"]), said.get("ids", ())
            assert isinstance(ids, list | tuple)
            self._placed = Placed(str(said["address"]), nodes, str(said["version"]), said["cluster_nodes"], tuple(ids))
            self._go()
        else:
            self._say(str(said["say"]))

    def _go(self) -> None:
        if self._is_begun and self._placed is not None and self._link is not None:
            with suppress(OSError):  # it has just ended
                self._link.send(json.dumps({"endpoint": self._endpoint}).encode() + b"\n")

    def _hang_up(self) -> None:
        if self._link is not None:
            self._loop.forget(self._link.fileno())
            self._link.close()
            self._link = None

    def _ended(self, child: Child) -> None:
        while self._link is not None and self._hear_more():
            pass
        self._hang_up()
        if self._is_kept and not self._is_over:
            why, self._refused = self._refused, None
            self._retry(str(why) if why is not None else self._its_end())

    def _its_end(self) -> str:
        if self._child is None:
            return "there is no placer"
        said = f"the placer (pid {self._child.pid}) ended by {self._child.cause}"
        last = self._child.tail.text().rpartition("\n")[2]
        is_why = (self._child.returncode or 0) > 0 and last  # a signal ends it whatever it has printed before
        return f"{said}: {last:.300}" if is_why else said


def environment_of(request: Request, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which Ray is asked, from the user's.

    A cluster that the run starts stays on loopback, asks for a token that nobody else knows, and reports nothing about
    its use. Its workers have the priority of the server, and not Ray's lower one. At other clusters, Ray uses a token
    that the user has only if it is told to, and tries a few times to connect: each try takes a second, and the twenty
    of its own show a wrong token no better.
    """
    kept = {name: value for name, value in environment.items() if name not in _NOT_FOR_NODES}
    if path := python_path(environment):
        kept["PYTHONPATH"] = path
    if request.pretend_nodes:
        for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH"):
            kept.pop(name, None)
        return kept | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
        }
    has_token = kept.get("RAY_AUTH_TOKEN") or kept.get("RAY_AUTH_TOKEN_PATH")
    if has_token or Path(kept.get("HOME", "/"), ".ray", "auth_token").is_file():
        kept.setdefault("RAY_AUTH_MODE", "token")
    kept.setdefault("RAY_NUM_REDIS_GET_RETRIES", _TRIES)
    return kept


def _command(request: Request, keys: str) -> Command:
    argv = (
        *(sys.executable, "-P", "-m", "central_storage.ray.placer"),
        *("--keys", keys, "--request", request.to_json()),
    )
    return Command("observer", 0, argv, environment_of(request, os.environ))


def _exit(number: int, frame: object) -> None:
    """End this process by way of the ends of all blocks."""
    sys.exit(128 + number)


def _say_plainly(text: str) -> None:
    print(printable(f"cs-launch: {text}"), file=sys.stderr, flush=True)
