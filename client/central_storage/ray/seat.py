"""The place of a rank's worker in a training of Ray Train."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

import ray

from central_storage.launch.supervisor.restarts import WORKED_SECONDS, Restarts
from cs_proto.errors import LaunchError

from .host import Host

__all__ = ["Seat"]


class Seat:
    """Keeps the launcher of one worker in the process of its rank. A launcher that ends is replaced."""

    def __init__(self, name: str, training: str, head: Any, version: str, protocol: int) -> None:
        """For the worker with this name, of the service that the actor ``head`` keeps for this training, and which has
        this version and protocol."""
        self._name, self._training, self._head, self._version, self._protocol = name, training, head, version, protocol
        self._host = Host()
        self._is_left = threading.Event()
        self._is_taken: Future[None] = Future()
        # The launcher ends with the thread that has started it, so one thread starts all of them.
        self._thread = threading.Thread(target=self._keep, name=f"central-storage-{name}", daemon=True)

    def take(self) -> None:
        """Start the launcher, and return when the service admits it. Raises LaunchError if this node cannot run a
        worker, or if the service has not started."""
        self._thread.start()
        self._is_taken.result()

    def leave(self) -> None:
        """End the launcher, unless it has ended with the service, and wait for it."""
        self._is_left.set()
        self._host.end()
        self._thread.join()

    def _keep(self) -> None:
        try:
            self._replace_what_ends()
        except BaseException as error:  # noqa: BLE001 - of the first launcher: take() raises it
            if not self._is_taken.done():
                self._is_taken.set_exception(error)
            # Of a later one: the head has died, and all ranks are started again.
        finally:
            self._host.end()

    def _replace_what_ends(self) -> None:
        restarts = Restarts(sys.maxsize)
        while True:
            began = time.monotonic()
            try:
                what = self._run_one()
            except (LaunchError, OSError) as error:
                if not self._is_taken.done():
                    raise
                what = f"could not be started: {error}"  # the service waits for this worker, so it is tried again
            if self._is_left.is_set() or ray.get(self._head.is_over.remote()):
                return
            has_worked = time.monotonic() - began >= WORKED_SECONDS
            pause = restarts.next(self._name, has_worked=has_worked) or 0.0
            print(f"the launcher of {self._name} {what}; another one starts in {pause:g} s")
            if self._is_left.wait(pause):
                return

    def _run_one(self) -> str:
        """Start a launcher, and return when it has ended, with its end in words."""
        said = self._host.open(self._version, self._protocol, training=self._training)
        if "refused" in said:
            raise LaunchError(f"the node {said['address']} {said['refused']}")
        endpoint, service_key = ray.get(self._head.admit.remote(self._name, said["key"], said["node"]))
        if not self._is_taken.done():
            self._is_taken.set_result(None)
        if self._is_left.is_set():
            return "is not wanted any more"
        code, _ = self._host.run(self._name, endpoint, service_key)
        return f"ended by exit code {code}"
