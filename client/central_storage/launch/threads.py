"""A service in the script itself: supervisor, server and workers as threads, for a debugger and for fast tests.

They run the code that processes run, over the same sockets and the same kind of memory, in a run directory of their
own; only what starts and ends them is different. This is the one module that imports another role: it puts the roles
together. All threads are daemons: one that hangs in the user's code does not keep the script from ending.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from central_storage.core.recovery_options import Recovery
from central_storage.diagnostics.logging_setup import configure_logging
from cs_proto.codec import encode
from cs_proto.messages import Introduce, Shutdown
from cs_server.compute import kernels
from cs_server.serving import ThreadedServer
from cs_worker.worker_thread import ThreadedWorker

from .plan import Command
from .run_directory import RunDirectory
from .service_file import ServiceFile, origin
from .supervisor.connections import OwnerSink, Peer
from .supervisor.lifecycle import STOP_GRACE, Service
from .supervisor.loop import Loop
from .supervisor.output import Tail

__all__ = ["ServiceThreads", "start"]

_log = logging.getLogger("central_storage.launch")

# When its grace is over the supervisor gives up what has not ended, and ends.
_STOP_TIMEOUT = STOP_GRACE + 5.0

_services: weakref.WeakSet[ServiceThreads] = weakref.WeakSet()


class Part(Protocol):
    """A server or a worker, to be run by a thread. What is not ``run`` is called by other threads."""

    def run(self) -> None:
        """Serve until told to end."""

    @property
    def is_hanging(self) -> bool:
        """Whether it runs code that does not hear what it was told."""

    def interrupt(self) -> None:
        """The run under way is cancelled."""

    def terminate(self) -> None:
        """End soon."""

    def abandon(self) -> None:
        """Go on without the thread, which does not end."""

    def close(self) -> None:
        """Let go of what is left. Called once, last."""


class ThreadChild:
    """A running or ended thread, as the supervisor sees a child process."""

    is_here = True
    node = ""

    def __init__(self, loop: Loop, command: Command, part: Part, on_end: Callable[[ThreadChild], None]) -> None:
        self.command = command
        self.tail = Tail()
        self.asked = False  # to end
        self.ready_since: float | None = None
        self.has_worked = False
        self.returncode: int | None = None
        self.pid = os.getpid()
        self.name = f"{'worker ' if command.role == 'worker' else 'the '}{command.label} (a thread of pid {self.pid})"
        self.cause = "its own choice"
        self.part = part
        self._loop = loop
        self._on_end = on_end
        self._lock = threading.Lock()
        self._is_given_up = False
        self._over = os.eventfd(0, os.EFD_CLOEXEC)
        loop.on_readable(self._over, self._ended)
        self.thread = threading.Thread(target=self._run, name=f"cs-{command.label}", daemon=True)
        self.thread.start()

    def listen(self, wanted: bool = True) -> None:
        """There is nothing to read: what a thread prints, the script prints."""

    def signal(self, number: int) -> None:
        """SIGTERM asks the thread to end. SIGKILL, since nothing can kill a thread, goes on without it."""
        if self.returncode is not None:
            return
        if number == signal.SIGTERM:
            self.part.terminate()
        else:
            with self._lock:
                self._is_given_up = True
            _log.warning("%s does not end: it is in %s", self.name, self.place())
            self.part.abandon()
            self._finish()

    def kill(self, reason: str) -> None:
        """Nothing can kill a thread, and nobody asks for it: such a service has no ``step_timeout``."""

    def interrupt(self) -> None:
        """The script does it by itself, see :meth:`ServiceThreads.interrupt`."""

    def show_stacks(self) -> None:
        """Nothing: a replica of this process may be at a debugger's prompt, and who hangs is named at a Ctrl-C."""

    def is_run_by(self, peer: Peer, who: Introduce) -> bool:
        """Whether it is in this process."""
        return peer.pid == self.pid

    def place(self) -> str:
        """``file:line`` where the thread is now."""
        frame = sys._current_frames().get(self.thread.ident or 0)  # noqa: SLF001  (there is no public name)
        return "no code of Python" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"

    def _run(self) -> None:
        try:
            self.part.run()
        except SystemExit:
            pass
        except BaseException as error:  # noqa: BLE001  (the supervisor says it to the script)
            self.cause = f"{type(error).__name__}: {error}"
            self.tail.add(traceback.format_exc().splitlines())
        with self._lock:
            if not self._is_given_up:
                os.eventfd_write(self._over, 1)
                return
        self.part.close()
        os.close(self._over)

    def _ended(self) -> None:
        self.thread.join()
        self._finish()
        os.close(self._over)
        self.part.close()

    def _finish(self) -> None:
        self._loop.forget(self._over)
        self.returncode = 0
        self._on_end(self)


class ServiceThreads:
    """A service of this process; ``socket`` is connected to its supervisor and speaks records, one a packet."""

    def __init__(self, devices: Sequence[str], parameter_device: str, start_timeout: float) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._owner = os.getpid()
        self._devices = tuple(devices)
        self._parameter_device = parameter_device
        self._start_timeout = start_timeout
        self._children: list[ThreadChild] = []
        with ExitStack() as undo:
            undo.callback(self.socket.close)
            undo.callback(theirs.close)
            self._run_directory = RunDirectory()
            undo.callback(self._run_directory.remove)
            script, kind = origin()
            ServiceFile.of(
                self._run_directory.path,
                script,
                "notebook" if kind == "notebook" else "in-process",
                devices=devices,
                parameter_device=parameter_device,
                script_pid=os.getpid(),
            ).write(self._run_directory.path)
            # Compiling takes seconds, and no compiler survives the end of the interpreter in a thread of its own.
            kernels.load(Path(self._run_directory.path), is_awaited=True)
            self._thread = threading.Thread(target=self._supervise, args=(theirs,), name="cs-supervisor", daemon=True)
            self._thread.start()
            undo.pop_all()

    def interrupt(self, replica: int) -> None:
        """Raise KeyboardInterrupt in the function that this replica runs; a Cancel of the run has been sent to it."""
        self._worker(replica).part.interrupt()

    @property
    def hanging(self) -> list[tuple[int, str]]:
        """The replicas that were interrupted or told to end and have not heard it, with ``file:line`` of each."""
        return [(child.command.rank, child.place()) for child in self._children if child.part.is_hanging]

    def stop(self) -> None:
        """End the service and wait for it, at most about 8 s. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        with suppress(OSError):  # closed already, which says the same
            self.socket.send(b"".join(encode(Shutdown("stop"))), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        self.socket.close()
        self._thread.join(_STOP_TIMEOUT)
        self._children = [child for child in self._children if child.part.is_hanging]
        gc.collect()  # what a process gives back when it ends: the memory of the service

    def forget(self) -> None:
        """In a forked child: let go of what only the parent's threads use."""
        self.socket.close()
        self._run_directory.forget()

    def _worker(self, replica: int) -> ThreadChild:
        return next(c for c in self._children if (c.command.role, c.command.rank) == ("worker", replica))

    def _supervise(self, owner: socket.socket) -> None:
        loop, sink = Loop(), OwnerSink()
        commands = [Command("server", 0, (), {}, device=self._parameter_device)]
        commands += [Command("worker", rank, (), {}, device=device) for rank, device in enumerate(self._devices)]
        service = Service(
            loop,
            self._run_directory.path,
            commands,
            sink,
            start_timeout=self._start_timeout,
            start_child=self._start_child,
            recovery=Recovery(max_restarts=0, server_recovery=False),  # a thread does not die alone
            mailboxes=False,  # who looks for mail keeps the others from running
        )
        try:
            sink.peer = service.own(owner)
            service.start()
            while not service.stopped:
                loop.turn()
        finally:
            service.close()
            self._run_directory.remove()

    def _start_child(
        self, loop: Loop, command: Command, *, on_lines: object, on_end: Callable[[ThreadChild], None]
    ) -> ThreadChild:
        child = ThreadChild(loop, command, self._part(command), on_end)
        self._children.append(child)
        return child

    def _part(self, command: Command) -> Part:
        path = self._run_directory.path
        if command.role == "server":
            return ThreadedServer(path, self._parameter_device, len(self._devices))
        return ThreadedWorker(path, command.rank, self._devices[command.rank])


def start(devices: Sequence[str], parameter_device: str, start_timeout: float = 60.0) -> ServiceThreads:
    """Start a service on these devices (short form) in threads of this process, and return at once.

    Whether it comes up within ``start_timeout`` seconds, which do not count the loading of the server's kernels, is
    said on the socket, as Serving or StartFailed. Raises LaunchError where there is no place for its sockets.
    """
    configure_logging("server", "cs_server")
    service = ServiceThreads(devices, parameter_device, start_timeout)
    _services.add(service)
    return service


def _forget_all() -> None:
    for service in list(_services):
        service.forget()


os.register_at_fork(after_in_child=_forget_all)
