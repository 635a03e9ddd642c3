"""Nothing is left behind: processes killed at any instant, many starts at once, Ctrl-C at any moment.

The instants are shares of the time that an undisturbed start takes on this machine, so imports are hit as often as
training is, on a slow machine too.
"""

from __future__ import annotations

import os
import pty
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import psutil
from tests.harness import leftovers
from tests.harness.processes import MARK, ROOT, describe, living_after, marked, reap
from tests.harness.timing import unit
from tests.soak.sessions import LATE, LAUNCH, Late, Session, role_of, session

from central_storage.launch.run_directory import RunDirectory
from cs_runtime.transport.readiness import is_readable

__all__ = ["VICTIMS", "interrupted", "killed", "launches"]

#: Who is killed: by what it is, or everything at once.
VICTIMS = ("supervisor", "script", "server", "w0", "all")
#: Who is started again.
_REPLACED = ("server", "w0")
_SMALL = ("--elements", "1024")
_GONE_WITHIN = 5.0


@lru_cache
def _start_time(launched: bool) -> float:
    """How long it takes until the first step is answered, seconds."""
    begun = time.monotonic()
    with session(*_SMALL, launched=launched) as undisturbed:
        undisturbed.wait_for_steps(1)
        took = time.monotonic() - begun
        undisturbed.finish()
    return took


def killed(rng: random.Random, limit: int = 1) -> tuple[int, list[str]]:
    """Start a training in one of two ways and SIGKILL its processes, each at some instant, up to ``limit`` of them and
    until one ends the training: how many, and what was left, in words."""
    launched = rng.random() < 0.5
    before = leftovers.take()
    kills: list[str] = []
    with session(*_SMALL, launched=launched, options={"--max-restarts": "100"}) as attacked:
        begun = time.monotonic()
        while len(kills) < limit and attacked.process.poll() is None:
            victim = rng.choice(VICTIMS)
            attacked.watch(rng.uniform(0.0, 0.5 if kills else 1.5) * _start_time(launched))
            if not _kill(attacked, victim):
                break  # it has ended by then
            kills.append(f"{victim} killed {time.monotonic() - begun:.2f} s")
            if victim not in _REPLACED:
                break
            if any(line["op"] == "run" for line in attacked.history):  # else the start has failed
                attacked.wait_for_steps(1)
        else:
            attacked.finish()
        (attacked.directory / "stop").touch()
        what = f"{', '.join(kills)} after {'cs-launch' if launched else 'the script'} began"
        found = _living(attacked.mark, what)
        if found:
            found.append(attacked.tail())
        if not kills:
            found.append(f"the training ended before anything was killed\n{attacked.tail()}")
    _next_start()
    if left := leftovers.since(before):
        found.append(f"{what}: left behind: {left}")
        left.end()
    return len(kills), [*attacked.late, *found]


def _kill(attacked: Session, victim: str) -> bool:
    """SIGKILL a process as soon as it is there, or all that are; False where the training has ended before."""
    if victim == "all":
        for process in (living := marked(attacked.mark)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        return bool(living)
    while not (is_hit := attacked.hit(victim, signal.SIGKILL)) and attacked.process.poll() is None:
        attacked.watch(0.02)
    return is_hit


def launches(_: random.Random, count: int, limit: float = 300.0) -> list[str]:
    """``count`` launches at once, each of a script that trains one step; which of them went wrong, in words."""
    before = leftovers.take()
    mark = f"{os.environ.get(MARK, os.getpid())}/launches"
    found = []
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        script = Path(directory, "one.py")
        script.write_text(
            "import central_storage as cs\n"
            "strategy = cs.CentralStorageStrategy()\n"
            "print(strategy.address, strategy.reduce('SUM', strategy.run(lambda: 1.0), axis=None))\n"
        )
        started = [
            subprocess.Popen(
                [*LAUNCH, "--start-timeout", str(unit(limit)), str(script)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, MARK: mark},
                start_new_session=True,
            )
            for _ in range(count)
        ]
        addresses = set()
        for process in started:
            try:
                out, err = process.communicate(timeout=unit(limit))
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
            address, _, total = out.strip().partition(" ")
            addresses.add(address)
            if process.returncode or total != "2.0":
                found.append(f"a launch of {count} at once ended by {process.returncode}: {out}{err}")
    if not found and len(addresses) != count:
        found.append(f"{count} launches had {len(addresses)} run directories")
    found += _living(mark, f"{count} launches")
    if left := leftovers.since(before):
        found.append(f"left behind: {left}")
        left.end()
    return found


def interrupted(rng: random.Random) -> list[str]:
    """Press Ctrl-C at a terminal at some instant of a training; what went wrong, in words."""
    launched = rng.random() < 0.5
    instant = rng.uniform(0.0, 1.5) * _start_time(launched)
    before = leftovers.take()
    mark = f"{os.environ.get(MARK, os.getpid())}/ctrl-c"
    what = f"Ctrl-C {instant:.2f} s after {'cs-launch' if launched else 'the script'} began"
    found = []
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        os.mkfifo(Path(directory, "history"))
        history = os.open(Path(directory, "history"), os.O_RDWR)  # of which nobody reads: it holds enough lines
        module = ("-m", "tests.soak.workload", directory, *_SMALL)
        process, terminal = _at_a_terminal([*LAUNCH, *module] if launched else [sys.executable, *module], mark)
        os.read(terminal, 1)  # before that there is nobody to whom the terminal would tell it
        printed = _read_until(terminal, process, time.monotonic() + instant)
        if process.poll() is None:
            begun = time.monotonic()
            os.write(terminal, b"\x03")
            printed += _read_until(terminal, process, begun + LATE * unit(_GONE_WITHIN))
            took = time.monotonic() - begun
            if process.poll() is None:
                found.append(f"{what}: still there after {took:.0f} s:\n{printed[-4000:]}")
            elif took > unit(_GONE_WITHIN):
                found.append(Late(f"{what}: it ended {took:.1f} s later:\n{printed[-4000:]}"))
        found += _living(mark, what)
        # NumPy makes an ImportError of a Ctrl-C in the middle of its own import, which the script asked for.
        # Python itself ends with a fatal error, or without the module that it was to run, for one in its own start.
        others = "Importing the numpy C-extensions failed", "Fatal Python error: init_", "Could not import runpy module"
        is_of_others = process.poll() == 1 and any(words in printed for words in others)
        if process.poll() not in (130, -signal.SIGINT, None) and not is_of_others:
            found.append(f"{what}: ended by {process.returncode}:\n{printed[-4000:]}")
        reap(marked(mark))
        process.wait()
        os.close(terminal)
        os.close(history)
    _next_start()
    if left := leftovers.since(before):
        found.append(f"{what}: left behind: {left}")
        left.end()
    return found


def _at_a_terminal(command: Sequence[str], mark: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start a command as the foreground of a terminal of its own; it and our end of the terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _TAKES_THE_TERMINAL, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env={**os.environ, MARK: mark},
        start_new_session=True,
    )
    os.close(theirs)
    return process, ours


# Without a handler of its own, which would take the signal along when it becomes the command.
_TAKES_THE_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.write(1, b".")
os.execv(sys.argv[1], sys.argv[1:])
"""


def _read_until(terminal: int, process: subprocess.Popen[bytes], deadline: float) -> str:
    """What is printed until the process ends or the deadline has come."""
    text = b""
    while process.poll() is None and (left := deadline - time.monotonic()) > 0:
        if is_readable(terminal, min(left, 0.05)):
            try:
                text += os.read(terminal, 1 << 16)
            except OSError:  # the last one at the other end has gone
                process.wait(unit(_GONE_WITHIN))
    return text.decode(errors="replace")


def _living(mark: str, what: str) -> list[str]:
    """What of a session does not end within 5 s, in words."""
    begun = time.monotonic()
    while (living := marked(mark)) and time.monotonic() - begun < LATE * unit(_GONE_WITHIN):
        living_after(0.05, living)
    took = time.monotonic() - begun
    if living or took <= unit(_GONE_WITHIN):
        return [f"{what}: left running: {role_of(process) or 'helper'} {describe(process)}" for process in living]
    return [Late(f"{what}: the last process ended {took:.1f} s later")]


def _next_start() -> None:
    """What the next start does with what it finds; its own directory stays while it does."""
    living = RunDirectory()
    RunDirectory().remove()
    assert Path(living.path, "lock").exists(), "a start has removed the run directory of a living run"
    living.remove()
