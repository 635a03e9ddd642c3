"""Real processes for system tests: start, wait for a printed line, signal, collect the output, always reap.

Each child leads a session of its own and carries a mark in its environment, which everything it starts inherits; so
whatever comes of it can be found, named and ended, also when it has changed its parent, group or session. Used by
one thread: the output is read while the test waits.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import psutil

from cs_runtime.transport.readiness import is_readable

from .timing import unit

__all__ = ["MAILBOXES", "MARK", "ROOT", "Child", "Ended", "is_alive", "living_after", "marked", "reap", "run", "start"]

#: The environment variable by which a process is known to belong to a test session, and to which child of it.
MARK = "CS_TEST_ID"
ROOT = Path(__file__).resolve().parents[2]
#: In the name of the transport, which is another where ``make test-zeromq`` runs.
MAILBOXES = "" if os.environ.get("CS_MAILBOXES") == "off" else "mailboxes + "

_numbers = count(1)


@dataclass(frozen=True)
class Ended:
    """What a child left: exit code (minus the signal's number where one ended it, None while it runs), output, seconds
    it took."""

    arguments: tuple[str, ...]
    code: int | None
    out: str
    err: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        """The lines of standard output."""
        return self.out.splitlines()

    def ok(self) -> Ended:
        """This, if the exit code is 0; an AssertionError with all the output otherwise."""
        assert self.code == 0, str(self)
        return self

    def __str__(self) -> str:
        return f"{' '.join(self.arguments)}\nexit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Child:
    """A running process of a test. Made by :func:`start`."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str | None], directory: Path) -> None:
        self.arguments = tuple(arguments)
        self.mark = f"{os.environ.get(MARK, os.getpid())}/{next(_numbers)}"
        merged = os.environ | {key: value for key, value in environment.items() if value is not None}
        for key in [key for key, value in environment.items() if value is None]:
            merged.pop(key, None)
        self._begun = time.monotonic()
        self._process = subprocess.Popen(
            self.arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
            env={**merged, MARK: self.mark, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._ended = os.pidfd_open(self.pid)
        self._selector = selectors.DefaultSelector()
        self._texts = {"out": bytearray(), "err": bytearray()}
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        for stream, name in ((self._process.stdout, "out"), (self._process.stderr, "err")):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, name)
        self._selector.register(self._ended, selectors.EVENT_READ, "ended")

    @property
    def out(self) -> str:
        """Standard output so far."""
        return self._texts["out"].decode(errors="replace")

    @property
    def err(self) -> str:
        """Standard error so far."""
        return self._texts["err"].decode(errors="replace")

    def wait_for(self, pattern: str, timeout: float | None = None, stream: str = "out") -> re.Match[str]:
        """The first match of ``pattern`` in the whole lines that the child prints, of which some end with a carriage
        return: the door at which a test acts."""
        deadline = self._deadline(timeout)
        while True:
            text = self._texts[stream].decode(errors="replace")
            ended = self._process.poll() is not None
            whole = len(text) if ended else max(text.rfind("\n"), text.rfind("\r")) + 1
            if found := re.search(pattern, text[:whole], re.MULTILINE):
                return found
            if ended and not self._read(0):
                raise AssertionError(f"ended before it printed {pattern!r}\n{self._result()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"did not print {pattern!r} in time\n{self.explain()}")
            self._read(deadline - time.monotonic())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child alone."""
        self._process.send_signal(number)

    def press_ctrl_c(self) -> None:
        """What a terminal does: SIGINT to the child and everything that is still in its process group."""
        os.killpg(self.pid, signal.SIGINT)

    def wait(self, timeout: float | None = None) -> Ended:
        """The end of the child itself, within ``timeout`` seconds. What it started may live on: see :meth:`left`."""
        deadline = self._deadline(timeout)
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                raise AssertionError(f"did not end in time\n{self.explain()}")
            self._read(deadline - time.monotonic())
        while self._read(0):
            pass
        return self._result()

    def left(self, timeout: float | None = None) -> list[str]:
        """What the child started and what is still there ``timeout`` seconds from now; [] as soon as nothing is."""
        deadline = self._deadline(timeout)
        while (living := [p for p in marked(self.mark) if p.pid != self.pid]) and time.monotonic() < deadline:
            living_after(max(0.0, deadline - time.monotonic()), living)
        return [describe(process) for process in living]

    def processes(self) -> list[psutil.Process]:
        """Everything of this child that lives, itself first."""
        return sorted(marked(self.mark), key=lambda process: process.pid != self.pid)

    def explain(self) -> str:
        """The output, after every process of the child was asked for the stacks of its threads."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + unit()
        while time.monotonic() < until:
            self._read(until - time.monotonic())
        return f"{self._result()}\n--- processes\n" + "\n".join(map(describe, self.processes()))

    def close(self) -> None:
        """End everything that came of the child, and print its output, which pytest shows if the test has failed.
        Idempotent."""
        if self._selector.get_map() is None:  # it is closed
            return
        if self._process.poll() is None:
            print("--- it was still running:")
            self._process.kill()
            self._process.wait()
        reap(marked(self.mark))
        while self._read(0):
            pass
        print(self._result())
        self._selector.close()
        with suppress(OSError):
            os.close(self._ended)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _deadline(self, timeout: float | None) -> float:
        return time.monotonic() + (unit(30) if timeout is None else timeout)

    def _read(self, timeout: float) -> bool:
        """Take in output that is there within ``timeout`` seconds; whether there was any."""
        found = False
        for key, _ in self._selector.select(max(0.0, timeout)):
            if key.data == "ended":
                self._selector.unregister(self._ended)
                continue
            piece = os.read(key.fd, 1 << 16)
            if piece:
                self._texts[key.data] += piece
                found = True
            else:
                self._selector.unregister(key.fileobj)
        return found

    def _result(self) -> Ended:
        return Ended(self.arguments, self._process.poll(), self.out, self.err, time.monotonic() - self._begun)


@contextmanager
def start(
    *arguments: str | Path, environment: Mapping[str, str | None] | None = None, directory: Path = ROOT
) -> Iterator[Child]:
    """A child for the length of a block. A first argument that ends in ``.py`` and ``-c`` run in this Python, a
    command of the project's is the one beside this Python. None as a value of ``environment`` unsets a variable."""
    child = Child(_command(*map(str, arguments)), environment or {}, directory)
    try:
        yield child
    finally:
        child.close()


def run(
    *arguments: str | Path,
    environment: Mapping[str, str | None] | None = None,
    directory: Path = ROOT,
    timeout: float | None = None,
) -> Ended:
    """Run to the end and see that nothing is left: no process, no run directory. Otherwise as :func:`start`."""
    with start(*arguments, environment=environment, directory=directory) as child:
        ended = child.wait(timeout)
        left = child.left(unit(5))
        assert not left, f"left running: {left}\n{ended}"
        return ended


def marked(mark: str) -> list[psutil.Process]:
    """Every process of this user, but for this one, whose mark is ``mark`` or begins with it and a slash."""
    return [process for pid in psutil.pids() if pid != os.getpid() and (process := marked_process(pid, mark))]


def marked_process(pid: int, mark: str) -> psutil.Process | None:
    """The process of that number, where it lives and is marked so."""
    wanted = f"{MARK}={mark}".encode()
    with suppress(psutil.Error, OSError):
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        if any((entry + b"/").startswith(wanted + b"/") for entry in environment.split(b"\0")):
            process = psutil.Process(pid)
            return process if is_alive(process) else None
    return None


def reap(processes: Sequence[psutil.Process]) -> None:
    """End ``processes`` and wait until they are gone."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    living_after(unit(5), processes)


def living_after(timeout: float, processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those of ``processes`` that still run after ``timeout`` seconds; [] as soon as none does.

    Unlike psutil, this does not wait until the parent of each has taken note of its end. Process 1, the parent of
    orphans, may take seconds for that."""
    deadline, living = time.monotonic() + timeout, []
    for process in processes:
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            if not is_readable(descriptor, max(0.0, deadline - time.monotonic())):
                living.append(process)
        finally:
            os.close(descriptor)
    return living


def describe(process: psutil.Process) -> str:
    """One line to know a process by."""
    try:
        return f"pid {process.pid} ({process.status()}): {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return f"pid {process.pid}: has just ended"


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended, even if nobody has taken note of its end."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _command(*arguments: str) -> list[str]:
    first = arguments[0]
    if first == "-c" or first.endswith(".py"):
        return [sys.executable, *arguments]
    if first.startswith("cs-"):
        return [str(Path(sys.executable).with_name(first)), *arguments[1:]]
    return list(arguments)
