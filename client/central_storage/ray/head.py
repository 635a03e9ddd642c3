"""The actor beside rank 0 of a training of Ray Train: it keeps the service, admits the workers of all ranks, and tells
the other ranks when rank 0 reports."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress

from central_storage.launch.packages import python_path
from central_storage.launch.parent_death import end_with_parent
from cs_proto.errors import LaunchError
from cs_runtime.transport.curve import read_public, write_public

from .service import remove

__all__ = ["Head"]

_LISTENS = re.compile(r"workers and observers on (tcp://\S+), keys in ")
# What the processes around a service are told means nothing to one that begins.
_NOT_FOR_SERVICES = re.compile("CS_(ADDRESS|DEVICES|PARAMETER_DEVICE|RUN_DIRECTORY|ROLE|ERROR_FILE)")
# Lines of the service's output that are kept for an error.
_KEPT_LINES = 20
# Seconds in which the service ends its processes.
_END_TIMEOUT = 10.0


class Head:
    """Rank 0 makes one, on its own node, and Ray ends it with rank 0. The service ends with it."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._process: asyncio.subprocess.Process | None = None
        self._output: asyncio.Task[None] | None = None
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        #: What the output of the service has told: its directories, and where it listens; "" if it has ended before.
        self._directories: dict[str, str] = {}
        self._endpoint = ""
        #: How many workers there are, and the nodes of those that were admitted, by name.
        self._workers, self._nodes = 0, dict[str, str]()
        self._is_up = asyncio.Event()
        #: How many reports rank 0 has begun, and whether it makes no more.
        self._reports, self._is_over = 0, False
        self._changed = asyncio.Condition()

    async def serve(self, workers: int, address: str) -> tuple[str, str]:
        """Start a service for so many workers, which listens at this node's ``address``. Returns its run directory, and
        a directory for what is written before Ray has it. Raises LaunchError if it does not start."""
        self._workers = workers
        try:
            await self._start(workers, address)
        except BaseException:  # also if the call is cancelled: the ranks in admit() wait for this event
            self._is_up.set()
            raise
        await self._until_up()
        return self._directories["run"], self._directories["drafts"]

    async def _start(self, workers: int, address: str) -> None:
        parent = os.getpid()
        environment = {name: value for name, value in os.environ.items() if not _NOT_FOR_SERVICES.fullmatch(name)}
        if path := python_path(os.environ):
            environment["PYTHONPATH"] = path
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "central_storage.ray.service"),
            *("--workers", str(workers), "--address", address),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: end_with_parent(parent, signal.SIGTERM),
        )
        self._output = asyncio.ensure_future(self._read(self._process.stdout))

    async def admit(self, name: str, key: str, node: str) -> tuple[str, str]:
        """Let the worker on this node, with this public key, join. Returns where the service listens, and its own
        public key. Raises LaunchError if the service has not started."""
        await self._until_up()
        keys = self._directories["keys"]
        write_public(keys, name, key.encode())
        async with self._changed:
            self._nodes[name] = node
            self._changed.notify_all()
        return self._endpoint, read_public(os.path.join(keys, "service.key")).decode()

    async def nodes(self) -> set[str]:
        """The nodes of all workers, when all were admitted."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._nodes) == self._workers)
            return set(self._nodes.values())

    async def report(self) -> None:
        """Rank 0 reports once more, and so must all ranks."""
        async with self._changed:
            self._reports += 1
            self._changed.notify_all()

    async def after(self, reports: int) -> bool:
        """Wait until rank 0 has reported more often than that; False if it makes no more reports."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._reports > reports or self._is_over)
            return self._reports > reports

    async def is_over(self) -> bool:
        """Whether the function of rank 0 has ended."""
        return self._is_over

    async def end(self) -> None:
        """End the service, and with it the launchers of all workers; then tell the other ranks."""
        self._is_over = True
        try:
            if self._process is not None and self._output is not None:
                with suppress(ProcessLookupError):
                    self._process.terminate()
                try:
                    await asyncio.wait_for(self._process.wait(), _END_TIMEOUT)
                except TimeoutError:
                    self._process.kill()
                    if found := self._directories:
                        remove([os.path.dirname(found["run"]), found["drafts"]])
                await self._output
        finally:  # the other ranks would wait for ever
            async with self._changed:
                self._changed.notify_all()

    async def _until_up(self) -> None:
        await self._is_up.wait()
        if not self._endpoint:
            raise LaunchError(f"the service of the training did not start: {'; '.join(self._last)}")

    async def _read(self, output: asyncio.StreamReader | None) -> None:
        """Pass the output of the service on to Ray's log of this actor, and find in it where the service is."""
        assert output is not None
        try:
            async for text in _lines(output):
                if not self._directories and text.startswith("{"):
                    self._directories = json.loads(text)
                    continue
                print(text, flush=True)
                self._last.append(text)
                if found := _LISTENS.search(text):
                    self._endpoint = found[1]
                    self._is_up.set()
        finally:
            self._is_up.set()


async def _lines(output: asyncio.StreamReader) -> AsyncIterator[str]:
    while True:
        try:
            line = await output.readline()
        except ValueError:
            continue  # longer than asyncio takes; it is dropped, since a service whose output nobody reads stands still
        if not line:
            return
        yield line.decode(errors="replace").rstrip("\n")
