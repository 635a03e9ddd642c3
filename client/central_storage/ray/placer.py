"""The placer of one run: ``python -m central_storage.ray.placer``. The launcher starts it, and it ends with its
connection to the launcher.

It reserves the workers' places in one placement group, or uses one of the user's, and starts an actor in each place, or
one for all workers of a node whose number is given. The actor makes keys on its node; only the public key comes back,
and is put where the gateway looks for it. Then the launcher of these workers joins the service by TCP. What dies is
replaced in its place, with new keys. Nothing of the training passes through Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from ray import cloudpickle
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from central_storage.diagnostics.logging_setup import dump_stacks_on_signal
from central_storage.launch.parent_death import end_with_parent
from central_storage.launch.placement import Request
from central_storage.launch.supervisor.restarts import WORKED_SECONDS, Restarts
from cs_proto.errors import CentralStorageError, ConfigurationError, LaunchError
from cs_proto.frozen import frozen
from cs_proto.messages import PROTOCOL
from cs_proto.version import __version__
from cs_runtime.transport.curve import read_public, write_public

from . import host as host_module
from .connection import connected
from .host import Host

__all__ = ["main"]

# Seconds: between two looks at a placement group, between two lines about one that waits, and for a worker that was
# told to end, as all of them are before this process is.
_LOOK_EVERY, _SAY_EVERY, _END_PAUSE = 1.0, 10.0, 5.0
# Seconds in which the user's placement group must have room.
_ROOM_TIMEOUT = 10.0
# Seconds that the launchers of workers have to end when the service has ended.
_LAUNCHER_TIMEOUT = 3.0
# In what Ray says when the head that answers is not the one to which this process has connected.
_OTHER_CLUSTER = "WrongClusterID"
_FAILURES = (ray.exceptions.RayError, RuntimeError, ValueError)


@frozen
class _Seat:
    """The place of a launcher and its workers: the actor there, the public key that it has made, and its node's address
    and name."""

    launcher: int
    workers: int
    actor: Any
    key: str
    address: str
    auth_mode: str
    node: str


@frozen
class _Keys:
    """The directory into which the workers' public keys go, and the service's own public key."""

    directory: str
    of_service: str


def main(arguments: list[str] | None = None) -> int:
    """Place the workers until the launcher hangs up; the exit code."""
    parser = argparse.ArgumentParser("python -m central_storage.ray.placer", description=__doc__)
    parser.add_argument("--request", required=True)
    parser.add_argument("--keys", required=True)
    parser.add_argument("--descriptor", type=int, required=True)
    options = parser.parse_args(arguments)
    dump_stacks_on_signal()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of the ends of all blocks
    end_with_parent(os.getppid(), signal.SIGTERM)  # the launcher has asked for SIGKILL, as for all its children
    cloudpickle.register_pickle_by_value(host_module)
    began = time.monotonic()
    launcher = socket.socket(fileno=options.descriptor)
    request = Request.of_json(options.request)
    try:
        service_key = read_public(os.path.join(options.keys, "service.key"))  # the secret one stays where it is
        keys = _Keys(options.keys, service_key.decode())
        with connected(request) as address:
            asyncio.run(_Placing(request, keys, address, launcher, began + request.start_timeout).run())
    except CentralStorageError as error:
        _tell(launcher, refused=str(error), is_usage=isinstance(error, ConfigurationError))
        return 1
    return 0


class _Placing:
    def __init__(self, request: Request, keys: _Keys, address: str, launcher: socket.socket, deadline: float) -> None:
        self._request = request
        self._keys = keys
        self._address = address
        self._launcher = launcher
        self._deadline = deadline
        self._group: PlacementGroup | None = None
        #: The calls of actors that run a launcher.
        self._running: set[asyncio.Future[Any]] = set()

    async def run(self) -> None:
        """Place the workers, and keep them in their places until the launcher hangs up."""
        reader, _ = await asyncio.open_connection(sock=self._launcher.dup())
        heard = asyncio.ensure_future(reader.readline())
        placing = asyncio.ensure_future(self._place())
        try:
            await asyncio.wait([heard, placing], return_when=asyncio.FIRST_COMPLETED)
            if heard.done():  # the launcher has gone
                return
            seats = await placing
            self._check_token(seats)
            of_workers = [seat for seat in seats for _ in range(seat.workers)]
            nodes, ids = [seat.address for seat in of_workers], [seat.node for seat in of_workers]
            alive = sum(node["Alive"] for node in ray.nodes())
            self._tell(address=self._address, nodes=nodes, ids=ids, version=ray.__version__, cluster_nodes=alive)
            if line := await heard:
                endpoint = str(json.loads(line)["endpoint"])
                await self._until_gone(reader, [self._keep(seat, endpoint) for seat in seats])
        finally:
            placing.cancel()
            with suppress(asyncio.CancelledError, CentralStorageError):
                await placing
            if self._group is not None and not self._request.group:
                with suppress(*_FAILURES):  # of a cluster that has ended, nothing is left
                    remove_placement_group(self._group)  # which ends its actors

    async def _until_gone(self, reader: asyncio.StreamReader, work: list[Any]) -> None:
        """Do the work, which never ends by itself, until the launcher hangs up."""
        tasks = [asyncio.ensure_future(each) for each in work]
        gone = asyncio.ensure_future(reader.read())
        try:
            done, _ = await asyncio.wait([gone, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if self._running:  # the service has told the launchers to end
                await asyncio.wait(self._running, timeout=_LAUNCHER_TIMEOUT)
        finally:
            for task in [gone, *tasks]:
                task.cancel()

    # --- places -----------------------------------------------------------------------------------------------------

    async def _place(self) -> list[_Seat]:
        """Have all places, and start an actor in each. Raises LaunchError with what Ray lacks."""
        await (self._find_room(self._request.group) if self._request.group else self._reserve())
        opening = asyncio.gather(*(self._open(launcher) for launcher in range(len(self._request.launchers()))))
        try:
            return await asyncio.wait_for(opening, max(1.0, self._deadline - time.monotonic()))
        except TimeoutError as error:
            raise LaunchError(
                f"the actors of the workers did not start within {self._request.start_timeout:g} s (--start-timeout); "
                "a busy machine takes longer, and Ray's logs on the nodes name other reasons"
            ) from error
        except LaunchError:  # a node refuses, and says why
            raise
        except _FAILURES as error:
            raise LaunchError(f"an actor of a worker could not be started: {_lines(error)}") from error

    async def _find_room(self, group: str) -> None:
        """Wait for what ends in the user's placement group, such as actors of an earlier placer of this run."""
        self._group = _of_user(group)
        last = min(self._deadline, time.monotonic() + _ROOM_TIMEOUT)
        while why := self._request.lacking_in_group(_free_of(self._group)):
            if time.monotonic() >= last:
                raise LaunchError(
                    f"{why}; ask for more bundles when the group is made, as by tune.PlacementGroupFactory, or give "
                    "RayCluster an address, to reserve places beside the group"
                )
            await asyncio.sleep(_LOOK_EVERY)

    async def _reserve(self) -> None:
        try:
            self._group = placement_group(self._request.bundles(), strategy=self._request.strategy)
        except _FAILURES as error:
            raise LaunchError(f"Ray takes no such reservation: {error}") from error
        said = time.monotonic()
        while not await asyncio.to_thread(self._group.wait, _LOOK_EVERY):
            if time.monotonic() >= self._deadline:
                waited = f"within {self._request.start_timeout:g} s (--start-timeout)"
                raise LaunchError(f"Ray has no places for the workers {waited}: {self._lacking()}")
            if time.monotonic() - said >= _SAY_EVERY:
                said = time.monotonic()
                self._say(f"waiting for Ray: {self._lacking()}")

    def _lacking(self) -> str:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return self._request.lacking(nodes, ray.available_resources())

    def _actor(self, launcher: int) -> Any:
        """A new actor in the place of a launcher. Its call waits until Ray has the place again, if its node is gone."""
        bundle, workers = self._request.launchers()[launcher]
        resources = {name: workers * amount for name, amount in self._request.resources.items()}
        cpus, gpus, memory = (resources.pop(name, 0) for name in ("CPU", "GPU", "memory"))
        place = PlacementGroupSchedulingStrategy(self._group, -1 if self._request.group else bundle)  # -1: any
        return (
            ray.remote(Host)
            .options(
                num_cpus=cpus,
                num_gpus=gpus,
                resources=resources,
                max_restarts=0,  # each actor makes new keys
                scheduling_strategy=place,
                **({"memory": memory} if memory else {}),
            )
            .remote()
        )

    async def _open(self, launcher: int, actor: Any = None) -> _Seat:
        """Have a launcher started, by this actor or a new one. Raises LaunchError if its node refuses."""
        actor = self._actor(launcher) if actor is None else actor
        _, workers = self._request.launchers()[launcher]
        try:
            said: Mapping[str, str] = await actor.open.remote(__version__, PROTOCOL, workers)
            if "refused" in said:
                raise LaunchError(f"the node {said['address']} {said['refused']}")
        except BaseException:  # also a call that is cancelled: the actor would keep its place
            _end(actor)
            raise
        return _Seat(launcher, workers, actor, said["key"], said["address"], said["auth_mode"], said["node"])

    def _check_token(self, seats: list[_Seat]) -> None:
        """Raise LaunchError if others on a network may run code on the cluster."""
        addresses = {self._address, *(seat.address for seat in seats)}
        if self._request.without_token or all(ipaddress.ip_address(address).is_loopback for address in addresses):
            return
        if not all(_asks_for_a_token(seat.auth_mode, ray.__version__) for seat in seats):
            raise LaunchError(
                f"the Ray cluster at {self._address} asks nobody for a token, so everybody who reaches it may run code "
                "there; start its nodes with RAY_AUTH_MODE=token, or use it as it is (--ray-without-token)"
            )

    # --- workers ----------------------------------------------------------------------------------------------------

    async def _keep(self, seat: _Seat, endpoint: str) -> None:
        """Keep a launcher in its place: what ends is started again, after a growing pause if it does not work."""
        launcher, restarts = seat.launcher, Restarts(sys.maxsize)
        while True:
            began = time.monotonic()
            actor, why, is_told = await self._work(seat, endpoint)
            has_worked = time.monotonic() - began >= WORKED_SECONDS
            pause = restarts.next(str(launcher), has_worked=has_worked) or 0.0
            await asyncio.sleep(max(pause, _END_PAUSE) if is_told else pause)
            which = f"worker-{launcher}" if seat.workers == 1 else f"worker-{launcher} ({seat.workers} workers)"
            self._say(f"{which} on {seat.address} {why}; it is placed again")
            seat = await self._open_again(launcher, actor)

    async def _work(self, seat: _Seat, endpoint: str) -> tuple[Any, str, bool]:
        """Run workers until their launcher or their node has ended. Returns the actor if it lives, the reason, and
        whether the launcher was told to end."""
        name = f"worker-{seat.launcher}"
        try:
            write_public(self._keys.directory, name, seat.key.encode(), seat.workers)
            running = asyncio.ensure_future(_result(seat.actor.run.remote(name, endpoint, self._keys.of_service)))
            self._running.add(running)
            running.add_done_callback(self._running.discard)
            code, last = await running
        except ray.exceptions.RayError as error:
            _end(seat.actor)
            return None, f"is gone: {_lines(error, 1)}", False
        return seat.actor, f"ended by exit code {code}{last and f': {last.rpartition(chr(10))[2]}'}", code == 0

    async def _open_again(self, launcher: int, actor: Any) -> _Seat:
        """Place a launcher again. If its node has died, the first actor waits there until Ray has noticed that, and
        fails.

        Raises LaunchError if another cluster answers: nothing of this one is left, and only a new driver may use that.
        """
        restarts = Restarts(sys.maxsize)
        while True:
            try:
                return await self._open(launcher, actor)
            except (*_FAILURES, LaunchError) as error:
                if _OTHER_CLUSTER in str(error):
                    raise LaunchError("Ray's head has died, and another one has its address") from error
                actor = None
                pause = max(1.0, restarts.next(str(launcher), has_worked=False) or 0.0)
                self._say(f"worker-{launcher} could not be placed: {_lines(error, 1)}; again in {pause:g} s")
                await asyncio.sleep(pause)

    def _say(self, text: str) -> None:
        self._tell(say=text)

    def _tell(self, **said: Any) -> None:
        _tell(self._launcher, **said)


def _of_user(group: str) -> PlacementGroup:
    """The placement group with this ID. Raises LaunchError if the cluster has none."""
    found = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group)))
    if ray.util.placement_group_table(found).get("state") in (None, "REMOVED"):
        raise LaunchError(f"the cluster has no placement group {group}; ray list placement-groups lists those it has")
    return found


def _free_of(group: PlacementGroup) -> list[dict[str, float]]:
    """What is free in each of its bundles."""
    free: list[dict[str, float]] = [{} for _ in range(group.bundle_count)]
    for name, amount in ray.available_resources().items():
        if found := re.fullmatch(rf"(.+)_group_(\d+)_{group.id.hex()}", name):
            free[int(found[2])][found[1]] = amount
    return free


def _asks_for_a_token(mode: str, version: str) -> bool:
    """Whether a node with this ``RAY_AUTH_MODE`` and version of Ray does so: without one, Ray does from 2.61 on."""
    return mode.lower() in ("token", "k8s") or (not mode and tuple(map(int, version.split(".")[:2])) >= (2, 61))


def _tell(launcher: socket.socket, **said: Any) -> None:
    """Tell the launcher something; it reads at once, or is gone."""
    with suppress(OSError):
        launcher.send(json.dumps(said).encode() + b"\n")


async def _result(call: Any) -> Any:
    return await call


def _end(actor: Any) -> None:
    """End an actor that may have ended."""
    with suppress(*_FAILURES):
        ray.kill(actor)


def _lines(error: BaseException, most: int = 5) -> str:
    """The first lines of what Ray has said."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines[:most]) or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
