"""End a service: as Ctrl-C does, and then harder.

The script gets SIGINT, as from Ctrl-C, and after some seconds SIGTERM. With --kill-after, what is still there then gets
SIGKILL. Without it, a script under cs-launch that saves a checkpoint is given the time that it needs. A notebook or
a prompt of Python is only interrupted: its service ends, and the notebook stays.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from central_storage.ctl import printing, processes
from central_storage.ctl.asking import Supervisor
from central_storage.ctl.completing import add_service
from central_storage.ctl.services import Entry, choose
from cs_proto.errors import ConfigurationError, LaunchError, NoAnswerError
from cs_proto.printable import printable
from cs_runtime import saving_mark

__all__ = ["HELP", "add_arguments", "run"]

# How often a script that saves a checkpoint is looked at, seconds.
_LOOK_EVERY = 0.1

HELP = "end a service as Ctrl-C does, and then harder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """As :class:`central_storage.ctl.cli.Command`."""
    add_service(parser)
    parser.add_argument(
        "--wait", type=float, default=10.0, metavar="SECONDS", help="to wait after each signal (default: 10)"
    )
    parser.add_argument(
        "--kill-after", type=float, metavar="SECONDS", help="after SIGTERM, wait so long and then send SIGKILL"
    )


def run(options: argparse.Namespace) -> int:
    """As :class:`central_storage.ctl.cli.Command`. 4: the service is still there."""
    for name in ("wait", "kill_after"):
        seconds = getattr(options, name)
        if seconds is not None and not 0 <= seconds < 1e6:
            raise ConfigurationError(f"--{name.replace('_', '-')} is a number of seconds below 1e6, not {seconds:g}")
    entry = choose(options.service)
    with ExitStack() as undo:
        ending = _Ending(entry, undo)
        begun = time.monotonic()
        sent = ending.end(options.wait, options.kill_after, _quiet if options.json else _say)
    seconds = time.monotonic() - begun
    if options.json:
        printing.json_line({"name": entry.name, "address": entry.path, "signals": sent, "seconds": round(seconds, 3)})
    else:
        printing.line(f"{entry.name} has ended")
    return 0


def _say(text: str) -> None:
    print(printable(text), file=sys.stderr)


def _quiet(text: str) -> None:
    pass


class _Ending:
    """The processes to signal, held by descriptors: a pid may be another process's by the time it is used."""

    def __init__(self, entry: Entry, undo: ExitStack) -> None:
        self._entry = entry
        self._undo = undo
        file = entry.file
        supervisor = file.supervisor if file is not None else self._connected()
        # Held before it is looked at: what is found then is true of the process that gets the signals.
        self._supervisor = self._held(supervisor) if supervisor else None
        if self._supervisor is None and (file is None or entry.is_stale):
            raise LaunchError(f"{entry.name} has ended")
        if self._supervisor is None or not self._is_supervisor(supervisor):
            raise LaunchError(f"{entry.name} runs in another container, whose processes cannot be signalled from here")
        script = entry.script_pid
        self._script = self._held(script) if script else None
        if self._script is not None and entry.script_pid != script:  # it has ended, and its number may be another's
            self._script, script = None, 0
        self._is_notebook = file is not None and file.kind == "notebook"
        self._ignores_ctrl_c = processes.ignores(script or supervisor, signal.SIGINT)
        self._is_thread = script == supervisor
        self._pids = [pid for pid in dict.fromkeys((script, supervisor)) if pid]

    def end(self, wait: float, kill_after: float | None, say: Callable[[str], None]) -> list[str]:
        """Send signals until the service has ended; the names of those that were needed. Raises NoAnswerError."""
        sent = []
        for number, seconds in ((signal.SIGINT, wait), (signal.SIGTERM, wait if kill_after is None else kill_after)):
            targets = self._targets(number)
            if targets:
                sent.append(number.name)
                say(f"{number.name} to {self._entry.name}")
                for target in targets:
                    processes.send(target, number)
                # An interrupted notebook goes on, and so does its service.
                is_left = self._is_notebook and not self._is_thread and number == signal.SIGINT
                if self._has_ended(0.0 if is_left else seconds, may_save=kill_after is None):
                    return sent
        if kill_after is None and self._is_notebook and self._is_thread:
            raise NoAnswerError(f"{self._entry.name} runs in threads of a notebook: shut it down there")
        if kill_after is None and (stopped := self._stopped()):
            pids = " ".join(map(str, stopped))
            raise NoAnswerError(
                f"{self._entry.name} is stopped, perhaps by Ctrl-Z, and hears no signal: kill -CONT {pids} lets it "
                "end; --kill-after SECONDS ends it by SIGKILL"
            )
        if kill_after is None:
            raise NoAnswerError(
                f"{self._entry.name} is still there {wait:g} s after SIGTERM; --kill-after SECONDS ends it by SIGKILL"
            )
        targets = self._targets(signal.SIGKILL)
        if not targets:
            raise NoAnswerError(f"{self._entry.name} runs in threads of a notebook: shut it down there")
        sent.append("SIGKILL")
        say(f"SIGKILL to {self._entry.name}")
        for target in targets:
            processes.send(target, signal.SIGKILL)
        if not self._has_ended(wait):
            raise NoAnswerError(f"{self._entry.name} is still there {wait:g} s after SIGKILL: it waits in the kernel")
        return sent

    def _targets(self, number: signal.Signals) -> list[int]:
        """Who gets a signal. Ctrl-C reaches script and launcher, as from a terminal, but nobody who ignores it. A
        service ends with its script; one of a notebook is ended by itself."""
        assert self._supervisor is not None
        file = self._entry.file
        if self._is_notebook and self._is_thread:  # its process is the notebook, which stays
            return [self._supervisor] if number == signal.SIGINT and not self._ignores_ctrl_c else []
        script = [self._script] if self._script is not None else []
        if not script or self._is_thread or (self._is_notebook and number != signal.SIGINT):
            return [] if number == signal.SIGINT and self._ignores_ctrl_c else [self._supervisor]
        if self._is_notebook:
            return script
        if number == signal.SIGKILL:
            return [*script, self._supervisor]
        is_launched = file is not None and file.kind == "launcher"
        if number == signal.SIGTERM:
            return [self._supervisor] if is_launched else script
        if self._ignores_ctrl_c:
            return []
        return [*script, self._supervisor] if is_launched else script

    def _has_ended(self, seconds: float, *, may_save: bool = False) -> bool:
        """Whether the service ends within so many seconds. ``may_save``: the time in which its script saves a
        checkpoint does not count."""
        assert self._supervisor is not None
        poller = select.poll()
        poller.register(self._supervisor, select.POLLIN)
        if poller.poll(seconds * 1000):
            return True
        # Its launcher ends it if that takes too long. Those that are stopped save nothing, and end nobody.
        while may_save and saving_mark.is_set(self._entry.path) and not self._stopped():
            if poller.poll(_LOOK_EVERY * 1000):
                return True
        return False

    def _stopped(self) -> list[int]:
        """The pids of script and supervisor that are stopped."""
        found = map(processes.status, self._pids)
        return [each.pid for each in found if each is not None and each.state == "stopped"]

    def _held(self, pid: int) -> int | None:
        found = processes.open_pid(pid)
        if found is not None:
            self._undo.callback(os.close, found)
        return found

    def _connected(self) -> int:
        with Supervisor(self._entry.path, 5.0) as supervisor:
            return supervisor.pid

    def _is_supervisor(self, pid: int) -> bool:
        """Whether the process holds the run directory: one of its descriptors is the lock."""
        lock = os.path.join(self._entry.path, "lock")
        try:
            return any(
                os.path.samefile(f"/proc/{pid}/fd/{entry}", lock)
                for entry in os.listdir(f"/proc/{pid}/fd")
                if os.path.exists(f"/proc/{pid}/fd/{entry}")
            )
        except OSError:
            return False
