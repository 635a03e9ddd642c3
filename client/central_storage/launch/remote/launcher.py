"""What the launchers of workers share: a worker as a child, what a supervisor asks of its launcher, and signals.

:mod:`.join` is the launcher in another container. On another machine, :mod:`.outpost` is one process that has a
:mod:`.seat` for each of its workers.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from central_storage.launch.foreground import WORKER_FAILED
from central_storage.launch.plan import Command
from central_storage.launch.supervisor.children import Child, end_leftovers
from central_storage.launch.supervisor.lifecycle import STOP_GRACE
from central_storage.launch.supervisor.loop import Loop, Signals
from central_storage.launch.supervisor.output import Console, Screen, Stream
from cs_proto.messages import Died, Interrupt, Joined, Kill, ShowStacks, Shutdown
from cs_proto.printable import printable
from cs_proto.records import Record

__all__ = ["Terminal", "WorkerLauncher"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds for the last messages at the end.
_LAST_WORDS = 0.5


class Terminal:
    """What a launcher has once, however many workers it runs: the loop, the terminal, and the signals."""

    def __init__(self) -> None:
        self.loop = Loop()
        self._console = Console(self.loop)
        self.screen = Screen(self._console)

    def signals(self, heed: Callable[[int], None]) -> Signals:
        """Hands signals to ``heed`` for the length of a block."""
        return Signals(self.loop, (*_ENDING, signal.SIGCHLD), heed)

    def say(self, text: str) -> None:
        """Print lines of the launcher."""
        self.screen.write("stderr", "cs-launch", printable(text, lines=True).split("\n"))

    def flush(self, is_waiting: Callable[[], bool] = lambda: False) -> None:
        """Give the terminal, and whatever else waits, a moment."""
        deadline = time.monotonic() + _LAST_WORDS
        while (not self._console.empty or is_waiting()) and (left := deadline - time.monotonic()) > 0:
            self.loop.turn(left)
        with suppress(OSError, ValueError):  # nobody reads it any more
            sys.stderr.flush()


class WorkerLauncher:
    """The launcher of one worker. A subclass connects to the service, and says what follows from the worker's end."""

    def __init__(self, run_directory: str, command_of: Callable[[Joined], Command], terminal: Terminal) -> None:
        self._run_directory, self._command_of, self._terminal = run_directory, command_of, terminal
        self._loop, self._say = terminal.loop, terminal.say
        self._worker: Child | None = None
        self._told = False  # told to end, by a signal or by the service
        self._has_failed = False  # the worker has died, and none runs in its place
        self._code: int | None = None

    # --- the worker ---------------------------------------------------------------------------------------------------

    def _start_child(self, command: Command) -> None:
        """Start the worker; if that fails, this launcher ends."""
        try:
            self._worker = Child(self._loop, command, on_lines=self._lines, on_end=self._ended)
        except OSError as error:
            self._say(f"the worker could not be started ({command.argv[0]}: {error.strerror})")
            self._code = WORKER_FAILED

    def _lines(self, worker: Child, stream: Stream, lines: list[str]) -> None:
        self._terminal.screen.write(stream, worker.command.label, lines)

    def _ended(self, worker: Child) -> None:
        """The worker has ended, and so does what it has started."""
        end_leftovers(self._run_directory, worker.command.role, worker.command.rank)
        self._follow_end(worker)
        self._worker = None
        if self._told:
            self._code = WORKER_FAILED if self._has_failed else 0
        else:
            self._go_on(worker)

    def _follow_end(self, worker: Child) -> None:
        """Drop what ends with the worker."""

    def _go_on(self, worker: Child) -> None:
        """The worker has ended although this launcher was not told to."""
        raise NotImplementedError

    def _failed(self, worker: Child) -> Died:
        """The worker has died. Returns what the supervisor is told, which decides whether to start another one."""
        self._has_failed = True
        command = worker.command
        who = (command.role, command.rank, command.incarnation)
        return Died(*who, worker.pid, worker.cause, worker.tail.text())

    def _heed(self, record: Record) -> None:
        """The supervisor asks something of the launcher."""
        worker = self._worker
        if isinstance(record, Shutdown):
            self._end()
        elif worker is None:
            return
        elif isinstance(record, Interrupt):
            worker.interrupt()
        elif isinstance(record, Kill) and worker.command.incarnation == record.incarnation:
            worker.kill(record.reason)
        elif isinstance(record, ShowStacks) and worker.command.incarnation == record.incarnation:
            worker.show_stacks()

    # --- the end ------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        if self._told:
            return
        self._told = True
        if self._worker is None:
            self._code = WORKER_FAILED if self._has_failed else 0
        else:
            self._worker.asked = True
            self._worker.signal(signal.SIGTERM)
            self._loop.call_later(STOP_GRACE, self._kill)

    def _kill(self) -> None:
        if self._worker is not None:
            self._worker.signal(signal.SIGKILL)
