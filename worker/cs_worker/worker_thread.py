"""A worker that is a thread of the script: what the command line, signals and the end of a process are to the others.

``central_storage.launch.threads`` makes it. Everything behind it, from the sockets to the user's function, is what a
process runs; what belongs to the whole process (signals, path, directory, streams) is the script's and left alone.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import NoReturn

from central_storage.core import context
from central_storage.pickling import reconstruct
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.supervisor_link import SupervisorLink

from .baton import ThreadBaton
from .config import Config
from .devices.device import open_device
from .loop import Loop
from .session.conversation import make_conversation
from .session.interrupts import ThreadInterrupts
from .session.session import Link

__all__ = ["ThreadedWorker"]


class ThreadedWorker:
    """One worker. :meth:`run` is its thread's; the rest may be called from any thread until :meth:`close` is."""

    def __init__(self, run_directory: str, replica: int, device: str) -> None:
        """Raises ConfigurationError as :class:`~.config.Config` does."""
        self._config = Config(run_directory, replica, 1, device)
        self._interrupts = ThreadInterrupts()
        self._turns = ThreadBaton(run_directory, replica)
        self._doorbell, self._ringer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> None:
        """Work until :meth:`terminate` is called or the supervisor is gone, which raises SystemExit.

        Raises DeviceError where the device cannot be used, ConfigurationError where the server refuses the worker.
        """
        config = self._config
        context.become_worker(whole_process=False)
        reconstruct.keep_classes_apart(config.name)
        self._interrupts.install()
        with ExitStack() as stack:
            stack.callback(self._turns.leave)
            device = open_device(config.device)
            stack.callback(device.close)
            self._turns.keep_device = device.keep_random_state
            connection = SupervisorLink(
                supervisor_link.connect(config.run_directory), "worker", config.replica, config.incarnation
            )
            stack.callback(connection.close)
            connection.await_name()
            link = Link(config, connection, self._gone, self._doorbell, self._turns)
            stack.callback(link.close)
            conversation = make_conversation(config, device.name, link, self._interrupts)
            registered = conversation.register()
            Loop(config, device, registered, connection, conversation, self._interrupts, self._turns).serve()

    @property
    def is_hanging(self) -> bool:
        """Whether the user's code was to be interrupted or ended and has not come back to the interpreter since."""
        return self._interrupts.is_unheard

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the user's code if the run under way is cancelled, as SIGINT does in a process.
        The Cancel has been sent."""
        self._interrupts.ring()

    def terminate(self) -> None:
        """End, as SIGTERM ends a process."""
        self._interrupts.terminate()
        self._turns.end()
        os.write(self._ringer, b"!")

    def abandon(self) -> None:
        """Let others have their turns: this thread does not end."""
        self._turns.leave()

    def close(self) -> None:
        """Close what only a thread needs. To be called once, when :meth:`run` has returned or will never be called."""
        os.close(self._doorbell)
        os.close(self._ringer)

    def _gone(self) -> NoReturn:
        self._interrupts.terminating = True
        raise SystemExit(0)
