"""A server as a process or as a thread: its sockets and signals, its kernels, and the loop until the end."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from cs_proto.errors import LaunchError, ShutdownError
from cs_proto.messages import Ready
from cs_runtime import machine
from cs_runtime.trace import is_on
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.supervisor_link import SupervisorLink
from cs_runtime.waits import name_waits_after

from .config import ServerConfig
from .kernel_loading import Loading
from .memory.segments import Segments
from .service import Service

__all__ = ["ThreadedServer", "serve"]

_log = logging.getLogger("cs_server.service")

# In one process, server, workers and script each map the segments.
_SHARERS = 3


def serve(config: ServerConfig) -> None:
    """Serve until SIGTERM comes or the supervisor is gone. Must be called in the main thread, once.

    A thread may still compile kernels afterwards; a compiler in a thread crashes where the interpreter is finalized.

    Raises LaunchError if there is no supervisor, ConfigurationError if the endpoint cannot be bound, and any other
    error that keeps the server from starting or continuing.
    """
    with ExitStack() as stack:
        wake, wake_writer = stack.enter_context(_wake_up())
        supervisor = _connected(config, stack)
        loading = Loading(Path(config.run_directory), wake_writer)  # begun first, because it takes longest
        try:
            service = _put_together(config, supervisor, wake, stack)
            if is_on():
                service.keep_times()
            while not service.is_told_to_end and not loading.is_done:
                service.turn()
            if not service.is_told_to_end:
                loading.check()
                # These objects live as long as the process, so garbage collections need not visit them again.
                gc.collect()
                gc.freeze()
                supervisor.send(Ready())
                service.listen()
            while not service.is_told_to_end:
                service.turn()
        except ShutdownError as gone:
            _log.info("%s", gone)


class ThreadedServer:
    """A server that is a thread of a script and not a process of its own."""

    def __init__(self, run_directory: str, parameter_device: str, replicas: int) -> None:
        """Raises ConfigurationError and DeviceError as :class:`~.config.ServerConfig` does. The kernels must be
        loaded before, if possible in the main thread: a compiler in another thread would crash at the end of the
        interpreter.
        """
        # One thread for updates: the pools of a script end before its last functions are called.
        # The server, the script and the memory end together, so there is nothing to recover.
        self._config = ServerConfig(
            run_directory,
            parameter_device,
            replicas,
            threads=1,
            machine_nbytes=machine.total_nbytes(),
            address_nbytes=machine.address_nbytes() // _SHARERS,
            recovery=False,
            name_after=name_waits_after(),
        )
        self._wake, self._wake_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> None:
        """Serve until :meth:`terminate` is called or the supervisor is gone; raises as :func:`serve` does."""
        with ExitStack() as stack:
            supervisor = _connected(self._config, stack)
            try:
                service = _put_together(self._config, supervisor, self._wake, stack)
                supervisor.send(Ready())
                service.listen()
                while not service.is_told_to_end:
                    service.turn()
            except ShutdownError as gone:
                _log.info("%s", gone)

    @property
    def is_hanging(self) -> bool:
        """A server runs no code that could hang."""
        return False

    def interrupt(self) -> None:
        """Do nothing: the server does not interrupt a cancelled run."""

    def terminate(self) -> None:
        """End, as SIGTERM ends a process. May be called from any thread before :meth:`close`."""
        os.write(self._wake_writer, bytes([signal.SIGTERM]))

    def abandon(self) -> None:
        """Stop waiting for the thread; an update under way ends on its own."""

    def close(self) -> None:
        """Close the resources that only a thread needs. Call this once, when :meth:`run` has returned or will never be
        called."""
        os.close(self._wake)
        os.close(self._wake_writer)


def _connected(config: ServerConfig, stack: ExitStack) -> SupervisorLink:
    try:
        socket = supervisor_link.connect(config.run_directory)
    except LaunchError as error:
        raise LaunchError(
            f"{error}. A server is started by cs-launch or by a script that makes a CentralStorageStrategy"
        ) from error
    supervisor = SupervisorLink(socket, "server", 0, config.incarnation)
    stack.callback(supervisor.close)
    supervisor.await_name()
    return supervisor


def _put_together(config: ServerConfig, supervisor: SupervisorLink, wake: int, stack: ExitStack) -> Service:
    """A service that listens only to the supervisor so far; ``stack`` takes it apart."""
    segments = Segments(supervisor)
    stack.callback(segments.close)
    service = Service(config, supervisor, segments, wake)
    stack.callback(service.close)
    service.prepare()
    return service


@contextmanager
def _wake_up() -> Iterator[tuple[int, int]]:
    """A pipe that becomes readable when SIGTERM comes; SIGINT belongs to the script, which has the same terminal."""
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    previous_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    previous = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: None),
    }
    try:
        yield reader, writer
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_wakeup)
        os.close(reader)
        os.close(writer)
