"""``cs-launch --join``: one worker of a service that another container's ``cs-launch --serve`` keeps.

It waits for the service, is assigned a worker, and runs that worker as a child. Everything that only this container can
see or do (how the child ends, its last lines, a signal to it) goes over the connection. If the service's supervisor is
killed and its memory outlives it, launcher and worker wait for the next one. ``cli`` calls :func:`join`.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

from central_storage.launch.foreground import START_FAILED, WORKER_FAILED
from central_storage.launch.plan import Command, of_incarnation
from central_storage.launch.supervisor.children import Child, reap_adopted
from central_storage.launch.supervisor.connections import Peer
from central_storage.launch.supervisor.lifecycle import STOP_GRACE
from cs_proto.errors import LaunchError
from cs_proto.failures import text_of
from cs_proto.frozen import with_changes
from cs_proto.messages import PROTOCOL, Died, Join, Joined, StartFailed
from cs_proto.records import Record
from cs_runtime.run_file import RunFile
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.supervisor_link import NAME_VARIABLE

from .launcher import Terminal, WorkerLauncher

__all__ = ["join"]

# Seconds between two checks whether the service exists.
_TRY_EVERY = 0.2


def join(run_directory: str, command_of: Callable[[Joined], Command], start_timeout: float) -> int:
    """Run one worker of the service in ``run_directory`` until the service ends or releases it; ``command_of`` returns
    the command to start it. A worker that dies is started again when the service asks for that.

    Returns the exit code: 0 after SIGTERM or Ctrl-C, or if the service ended in order, 3 if there is no place for this
    worker, 4 if the worker ended otherwise. Raises LaunchError if no service appears within ``start_timeout`` seconds.
    """
    return _Joining(run_directory, command_of, start_timeout).run()


class _Joining(WorkerLauncher):
    def __init__(self, run_directory: str, command_of: Callable[[Joined], Command], start_timeout: float) -> None:
        super().__init__(run_directory, command_of, Terminal())
        self._deadline = time.monotonic() + start_timeout
        self._service: Peer | None = None
        self._died: Died | None = None  # the service may not have been told
        self._is_waiting = False  # for the next supervisor
        self._run: RunFile | None = None  # another supervisor may take it up
        self._command: Command | None = None  # of the worker that was started last
        self._name = b""  # of that worker
        self._next: Joined | None = None  # to be started when the one that runs has ended

    def run(self) -> int:
        with self._terminal.signals(self._signalled):
            self._loop.call_later(0.0, self._connect)
            try:
                while self._code is None:
                    self._loop.turn()
            finally:
                self._close()
        return self._code

    def _connect(self) -> None:
        try:
            link = supervisor_link.connect(self._run_directory)
        except LaunchError:
            if time.monotonic() > self._deadline:
                raise
            self._loop.call_later(_TRY_EVERY, self._connect)
            return
        self._run = RunFile.read(self._run_directory)
        self._meet(link, Join(PROTOCOL, os.getpid()))

    def _meet(self, link: socket.socket, join: Join) -> None:
        self._service = Peer(self._loop, link, self._heard, self._gone)
        self._service.send(join)

    def _may_come_back(self) -> bool:
        left = RunFile.read(self._run_directory)
        is_same = left is not None and self._run is not None and left.run == self._run.run
        return is_same and self._command is not None and not self._told

    def _come_back(self) -> None:
        """Connect to the next supervisor after one was killed, when it exists."""
        assert self._run is not None
        assert self._command is not None
        if not self._may_come_back():
            self._service_is_over("the service is gone")
        elif time.monotonic() > self._deadline:
            limit = f"within {self._run.return_timeout:g} s after its supervisor was killed"
            self._service_is_over(f"the service in {self._run_directory} has not come back {limit}")
        else:
            try:
                link = supervisor_link.connect(self._run_directory)
            except LaunchError:
                self._loop.call_later(_TRY_EVERY, self._come_back)
                return
            self._meet(link, Join(PROTOCOL, os.getpid(), self._command.rank, self._command.incarnation, self._name))
            if self._died is not None and self._service is not None:
                self._service.send(self._died)

    def _heard(self, service: Peer, record: Record) -> None:
        if isinstance(record, Joined) and not self._told:
            self._is_waiting = False
            if self._worker is None:
                self._start(record)
            elif self._worker.command.incarnation < record.incarnation:
                self._next = record
                self._worker.signal(signal.SIGKILL)
            else:
                self._say(f"the service is back, worker w{record.rank} continues")
        elif isinstance(record, StartFailed):
            self._say(text_of(record.error))
            self._code = START_FAILED
        else:
            self._heed(record)

    def _start(self, joined: Joined) -> None:
        self._has_failed, self._died, self._next = False, None, None
        command = of_incarnation(self._command_of(joined), joined.incarnation)
        command = with_changes(command, environment={**command.environment, NAME_VARIABLE: joined.name.hex()})
        self._command, self._name = command, joined.name
        self._say(f"worker {command.label} of {joined.replicas} on {command.device}, transport {joined.transport}")
        self._start_child(command)

    def _go_on(self, worker: Child) -> None:
        self._say(f"{worker.name} ended by {worker.cause}")
        if self._next is not None:
            self._start(self._next)
            return
        self._died = self._failed(worker)
        if self._service is not None and not self._service.closed:
            self._service.send(self._died)
        elif not self._is_waiting:
            self._code = WORKER_FAILED

    def _gone(self, service: Peer) -> None:
        """The supervisor or its container has ended. The worker notices it, too, and waits as well."""
        if self._run is None or not self._may_come_back():
            self._service_is_over("the service is gone")
            return
        if not self._is_waiting:
            self._is_waiting = True
            self._deadline = time.monotonic() + self._run.return_timeout
            self._say(f"the supervisor of the service is gone; it has {self._run.return_timeout:g} s to come back")
        self._loop.call_later(_TRY_EVERY, self._come_back)

    def _service_is_over(self, why: str) -> None:
        was_waiting, self._is_waiting = self._is_waiting, False
        if not self._told and (was_waiting or self._worker is not None):
            self._say(why)
        if self._worker is None:
            failed = WORKER_FAILED if self._has_failed else START_FAILED
            self._code = 0 if self._told else failed
        elif not self._told:
            self._worker.asked = True
            self._loop.call_later(STOP_GRACE, self._kill)

    def _signalled(self, number: int) -> None:
        if number == signal.SIGCHLD:
            reap_adopted(set() if self._worker is None or self._worker.returncode is not None else {self._worker.pid})
        elif self._told:
            self._kill()
        else:
            self._end()

    def _close(self) -> None:
        self._terminal.flush(lambda: self._service is not None and bool(self._service.waiting))
        self._kill()
        if self._service is not None:
            self._service.close()
