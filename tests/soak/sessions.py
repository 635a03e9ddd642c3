"""One service under attack: a workload that runs, and the means to see its progress and to hit its processes.

Output goes to files of the session's directory, so nobody has to read it for the processes to go on; the history
comes through a FIFO, so waiting for a step is waiting for a line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from tests.harness.processes import MARK, ROOT, marked, reap
from tests.harness.timing import unit

from cs_runtime.transport.readiness import is_readable

__all__ = [
    "GATEWAY",
    "LATE",
    "LAUNCH",
    "LAUNCHER",
    "PATIENCE",
    "WAYS",
    "Late",
    "Session",
    "Stuck",
    "role_of",
    "sabotaged",
    "session",
    "way_of",
]

#: How long a step may take with a restart before it, seconds; it takes about one.
PATIENCE = 60.0
#: What has not come in its time is waited for this many times as long: it is late, or it never comes.
LATE = 3
LAUNCHER = "central_storage.launch.cli"
LAUNCH = (sys.executable, "-m", LAUNCHER, "--devices", "cpu:0,cpu:1")
GATEWAY = "central_storage.gateway"


#: How steps go: those that repeat by a program, all by messages, all by messages over ZeroMQ.
WAYS = ("program", "messages", "zeromq")


def sabotaged(name: str) -> dict[str, str]:
    """The environment of processes in which ``sabotage/sitecustomize.py`` switches that off."""
    directory, path = str(Path(__file__).with_name("sabotage")), os.environ.get("PYTHONPATH")
    return {"CS_SABOTAGE": name, "PYTHONPATH": os.pathsep.join([directory, path] if path else [directory])}


def way_of(way: str) -> dict[str, str]:
    """The environment of processes whose steps go one of the :data:`WAYS`."""
    mailboxes = {"CS_MAILBOXES": "off" if way == "zeromq" else "on"}
    return {**mailboxes, **(sabotaged("no-program") if way == "messages" else {})}


class Stuck(Exception):
    """A training did not go on, or ended without being asked to. The message has the end of its output."""


class Late(str):
    """What was found, where something took longer than it should, but came. Whether the machine was too busy or the
    promise was broken is seen where it is tried again with nothing beside it."""


class Session:
    """A running workload. Made by :func:`session`."""

    def __init__(
        self,
        directory: Path,
        arguments: Sequence[str],
        launched: bool,
        environment: Mapping[str, str],
        options: Mapping[str, str],
        launch: Sequence[str],
    ) -> None:
        self.directory = directory
        self.history: list[dict[str, Any]] = []
        self.late: list[str] = []
        self.mark = f"{os.environ.get(MARK, os.getpid())}/{directory.name}"
        os.mkfifo(directory / "history")
        (directory / "places").mkdir()
        places = {"CS_FAILPOINTS_DIR": str(directory / "places")} if environment.get("CS_FAILPOINTS") else {}
        self._fifo = os.open(directory / "history", os.O_RDONLY | os.O_NONBLOCK)
        self._rest = b""
        of_service = [word for pair in options.items() for word in pair]
        module = ["-m", "tests.soak.workload", str(directory), *arguments]
        with (directory / "out").open("wb") as out, (directory / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [*launch, *of_service, *module] if launched else [sys.executable, *module, *of_service],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment, **places, MARK: self.mark},
                start_new_session=True,
            )

    @property
    def fired(self) -> set[str]:
        """The items of CS_FAILPOINTS that have taken effect."""
        return {path.name for path in (self.directory / "places").iterdir()}

    @property
    def steps(self) -> int:
        """How many steps were answered."""
        return sum(line["op"] in ("run", "lost") for line in self.history)

    def wait_for_steps(self, count: int, patience: float = PATIENCE) -> float:
        """Wait until ``count`` more steps are answered; the seconds it took. Raises :class:`Stuck` where they are not
        in several times their time; within that they are noted as late."""
        begun, wanted, is_late = time.monotonic(), self.steps + count, False
        while self.steps < wanted:
            waited = time.monotonic() - begun
            if waited > unit(patience) and not is_late:
                is_late = True
                self._dump()
                self.late.append(f"no step within {unit(patience):g} s\n{self.tail()}")
            if waited > LATE * unit(patience):
                raise Stuck(f"no step within {waited:.0f} s\n{self.tail()}")
            if not self._read(0.5) and self.process.poll() is not None:
                raise Stuck(f"the training ended with code {self.process.returncode}\n{self.tail()}")
        return time.monotonic() - begun

    def within(self, limit: float, what: str, is_so: Callable[[], bool]) -> list[str]:
        """Let it run until something is so: [] within ``limit`` seconds, else ``what`` went wrong, in words."""
        begun = time.monotonic()
        while not is_so():
            if time.monotonic() - begun > LATE * unit(limit):
                return [f"{what}\n{self.tail()}"]
            self.watch(0.05)
        took = time.monotonic() - begun
        return [] if took <= unit(limit) else [Late(f"{what} after {unit(limit):g} s, not after {took:.1f} s")]

    def watch(self, seconds: float) -> None:
        """Let it run, for ``seconds`` at most."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and (self._read(left) or self.process.poll() is None):
            pass

    def finish(self, patience: float = PATIENCE) -> dict[str, np.ndarray] | None:
        """Ask the workload to end; the variables that it leaves, None where it left none."""
        (self.directory / "stop").touch()
        begun = time.monotonic()
        while self.process.poll() is None and (waited := time.monotonic() - begun) < LATE * unit(patience):
            if waited > unit(patience) and not self.late:
                self.late.append(f"not over within {unit(patience):g} s\n{self.tail()}")
            self._read(0.2)
        while self._read(0):
            pass
        final = self.directory / "final.npz"
        if self.process.poll() != 0 or not final.exists():
            return None
        with np.load(final) as arrays:
            return {name: arrays[name] for name in arrays.files}

    def processes(self) -> dict[str, psutil.Process]:
        """What lives of the service, by what it is: ``server``, ``w0``, ``w1``, ``supervisor``, ``script``, and with
        workers elsewhere ``gateway``, ``outpost0``, ``outpost1``."""
        found = {}
        for process in marked(self.mark):
            with suppress(psutil.Error):
                if role := role_of(process):
                    found[role] = process
        return found

    def hit(self, role: str, number: signal.Signals) -> bool:
        """Send a signal to a process; whether it was there. What was answered by then is taken in: only steps after it
        are waited for from here on."""
        process = self.processes().get(role)
        if process is None:
            return False
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
            while self._read(0):
                pass
            return True
        return False

    @property
    def said(self) -> str:
        """What the processes printed on standard error."""
        return (self.directory / "err").read_text(errors="replace")

    def tail(self, lines: int = 40) -> str:
        """The end of what the processes printed."""
        parts = []
        for name in ("out", "err"):
            text = (self.directory / name).read_text(errors="replace").splitlines()[-lines:]
            parts += [f"--- {name}", *text]
        return "\n".join(parts)

    def close(self) -> None:
        """End everything that came of the workload."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        left = marked(self.mark)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        reap(left)
        os.close(self._fifo)

    def _read(self, timeout: float) -> bool:
        """Take in lines of the history that are there within ``timeout`` seconds; whether there were any."""
        if not is_readable(self._fifo, timeout):
            return False
        try:
            data = os.read(self._fifo, 1 << 16)
        except BlockingIOError:
            return False
        if not data:  # nobody writes: not yet, or never again
            time.sleep(0.02)
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.history += map(json.loads, lines)
        return True

    def _dump(self) -> None:
        for process in marked(self.mark):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)
        time.sleep(unit(0.5))


def role_of(process: psutil.Process) -> str | None:
    """What a process of a session is; None for what only helps."""
    command = process.cmdline()
    if "cs_server" in command:
        return "server"
    if "cs_worker" in command:
        return f"w{command[command.index('--replica') + 1]}"
    if GATEWAY in command:
        return "gateway"
    if "--join" in command:  # with keys in a directory that has the number as its name
        return f"outpost{Path(command[command.index('--keys') + 1]).name}"
    if {"central_storage.launch.background", LAUNCHER, "tests.soak.late"} & set(command):
        return "supervisor"
    return "script" if "tests.soak.workload" in command else None


@contextmanager
def session(
    *arguments: str,
    launched: bool = False,
    environment: Mapping[str, str] | None = None,
    options: Mapping[str, str] | None = None,
    launcher: str = LAUNCHER,
) -> Iterator[Session]:
    """A workload for the length of a block; ``launched``: by ``cs-launch``, or a module in its place, to which the
    service's ``options`` go then."""
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        launch = [launcher if word == LAUNCHER else word for word in LAUNCH]
        made = Session(Path(directory), arguments, launched, environment or {}, options or {}, launch)
        try:
            yield made
        finally:
            made.close()
