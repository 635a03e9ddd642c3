"""Trains over every transport of this machine and says what came of it: a service and a script of its own for each."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from central_storage.diagnostics.error_report import read
from central_storage.diagnostics.gpu_inventory import visible_gpus
from central_storage.launch.checks.finding import Finding, bad, good, hider, slower
from central_storage.launch.packages import python_path
from central_storage.launch.parent_death import end_with_parent
from central_storage.launch.run_directory import clean_up
from cs_proto.frozen import frozen, with_changes
from cs_runtime.transport.rings import IS_ORDERED

from .extras import has
from .trial_script import STEPS, expected

__all__ = ["ON_GPU", "TRANSPORTS", "Transport", "Trial", "attempt", "judged", "remove_abandoned", "transports"]

# What the user has set for trainings means nothing to a trial.
_NOT_FOR_TRIALS = (
    "CS_ADDRESS",
    "CS_CHECK_NUMERICS",
    "CS_DEVICES",
    "CS_ERROR_FILE",
    "CS_ESTIMATE",
    "CS_LOG",
    "CS_LOG_DIR",
    "CS_MAILBOXES",
    "CS_MESSAGES_DIR",
    "CS_NAME_WAITS",
    "CS_PARAMETER_DEVICE",
    "CS_TIMELINE",
    "CS_TIMES",
)
# Seconds. After SIGTERM a launcher ends everything within four.
_GRACE = 8.0
# The directories of trials, and the seconds after which one that nobody holds is abandoned.
_DIRECTORIES, _DIRECTORY = "cs-doctor-", re.compile(r"cs-doctor-\w{8}")
_ABANDONED_AFTER = 60.0
_TOO_LATE = "it has not ended after {seconds:g} s"
_REPORT = "see docs/troubleshooting.md, and report it with this text"


@frozen
class Transport:
    """A way of messages and of values, with the options of ``cs-launch`` that choose it."""

    title: str
    options: tuple[str, ...]
    has_mailboxes: bool
    is_shared: bool
    parameter_device: str = "cpu:0"


#: Every transport of a service on one machine.
TRANSPORTS = (
    Transport("mailboxes, shared memory", ("--mailboxes", "on", "--memory", "memfd"), True, True),
    Transport("ZeroMQ, shared memory", ("--mailboxes", "off", "--memory", "memfd"), False, True),
    Transport("ZeroMQ, no shared memory", ("--mailboxes", "off", "--memory", "frames"), False, False),
)
#: The usual transport, with variables on a GPU: it shows that driver and CuPy fit each other, and compiles a kernel.
ON_GPU = Transport(
    "shared memory, variables on gpu:0", ("--mailboxes", "on", "--memory", "memfd"), IS_ORDERED, True, "gpu:0"
)


@frozen
class Trial:
    """What came of a training over one transport. All but ``transport`` and ``failure`` is None if it has failed.

    Attributes:
        transport: The title of the transport.
        failure: Why it has failed; empty if it has not.
        steps: Steps that were trained.
        seconds: What these took, without the start.
        digest: SHA-256 of the variable and the losses.
        is_right: Whether NumPy computes the same bits.
        mailbox_messages: Answers that the server has sent by mailbox.
        sums: A checksum of the variable for each process that has read it.
        maps: Whether the script and each worker map the memory of the variable.
    """

    transport: str
    failure: str
    steps: int | None = None
    seconds: float | None = None
    digest: str | None = None
    is_right: bool | None = None
    mailbox_messages: int | None = None
    sums: Mapping[str, int] | None = None
    maps: Mapping[str, bool] | None = None


def transports() -> tuple[Transport, ...]:
    """The transports that this machine has; with :data:`ON_GPU` if it has a GPU and CuPy."""
    on_cpus = tuple(transport for transport in TRANSPORTS if IS_ORDERED or not transport.has_mailboxes)
    return (*on_cpus, ON_GPU) if visible_gpus() and has("cupy") else on_cpus


def attempt(transport: Transport, timeout: float) -> Trial:
    """Train over a transport. After ``timeout`` seconds, everything that was started is ended."""
    try:
        trial = _attempt(transport, timeout)
    except OSError as error:  # no place for files, no process
        trial = Trial(transport.title, f"it cannot be started ({error.strerror or error})")
    return with_changes(trial, failure=hider()(trial.failure))


def _attempt(transport: Transport, timeout: float) -> Trial:
    with _directory() as directory:
        result, error = os.path.join(directory, "result"), os.path.join(directory, "error")
        command = [
            *(sys.executable, "-P", "-m", "central_storage.launch.cli", *transport.options),
            *("--devices", "cpu:0,cpu:1", "--parameter-device", transport.parameter_device),
            *("--start-timeout", f"{timeout:g}", "--max-restarts", "0", "--server-recovery", "off"),
            *("--error-file", error, "-m", f"{__package__}.trial_script", result),
        ]
        with (
            open(os.path.join(directory, "output"), "w+", errors="replace") as output,
            _running(command, directory, output) as process,
        ):
            code = _code(process, timeout)
            output.seek(0)
            lines = output.read().splitlines()
        if code is None:
            last = f"; the last line that was printed: {lines[-1]:.300}" if lines else ""
            return Trial(transport.title, _TOO_LATE.format(seconds=timeout) + last)
        if code != 0 or not os.path.exists(result):
            return Trial(transport.title, _why(error, lines, code))
        found: dict[str, Any] = json.loads(Path(result).read_text())
    return Trial(
        transport.title,
        "",
        STEPS,
        found["seconds"],
        found["digest"],
        found["digest"] == expected(),
        found["posted"],
        found["sums"],
        found["maps"],
    )


def judged(trials: Sequence[Trial]) -> Iterator[Finding]:
    """The findings of the trials: of each alone, and of all together."""
    by_title = {transport.title: transport for transport in (*TRANSPORTS, ON_GPU)}
    for trial in trials:
        yield from _judged(by_title[trial.transport], trial)
    digests = {trial.digest for trial in trials if not trial.failure}
    if len(digests) > 1:
        yield bad(
            "transports",
            "two transports give different results",
            f"run cs-ctl doctor again; if it stays so, {_REPORT}",
        )
    elif len(digests) == 1 and len(trials) > 1:
        yield good("transports", "the results are equal, bit for bit, over all transports that have ended")


def _judged(transport: Transport, trial: Trial) -> Iterator[Finding]:
    subject = f"training over {trial.transport}"
    if trial.failure:
        is_late = trial.failure.startswith(_TOO_LATE.partition("{")[0])
        remedy = "run cs-ctl doctor again with --timeout 300: a first start compiles kernels; if it hangs again, "
        yield bad(subject, trial.failure, (remedy if is_late else "") + _REPORT)
        return
    assert trial.steps is not None
    assert trial.seconds is not None
    assert trial.sums is not None
    assert trial.maps is not None
    if not trial.is_right:
        yield bad(
            subject,
            "the result differs from NumPy's",
            f"remove the kernel cache (see above) and run cs-ctl doctor again; if it stays so, {_REPORT}",
        )
    if len(set(trial.sums.values())) > 1:
        sums = ", ".join(f"{name} {value:08x}" for name, value in trial.sums.items())
        yield bad(subject, f"processes see different bytes of one variable (checksums: {sums})", _REPORT)
    if transport.is_shared and not all(trial.maps.values()):
        without = ", ".join(name for name, maps in trial.maps.items() if not maps)
        yield slower(
            subject,
            f"{without} cannot map the variables, and gets every byte in a message",
            "lift the limit of addresses (ulimit -v unlimited), or allow mappings in the sandbox",
        )
    if transport.has_mailboxes and not trial.mailbox_messages:
        yield slower(
            subject,
            "the server has sent no message by mailbox: all went over ZeroMQ",
            "CS_LOG=debug shows why; " + _REPORT,
        )
    if trial.is_right and len(set(trial.sums.values())) == 1:
        names = list(trial.sums)
        how = "in memory that they map" if all(trial.maps.values()) else "in messages"
        yield good(
            subject,
            f"{trial.steps} steps in {trial.seconds:.2f} s; equal to NumPy, bit for bit; {', '.join(names[:-1])} and "
            f"{names[-1]} see the same bytes, {how}",
        )


def remove_abandoned() -> None:
    """Remove the directories of this user's trials whose doctor was killed."""
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if _DIRECTORY.fullmatch(entry.name):
                with suppress(OSError):  # another doctor removes it, or works in it
                    _remove_if_abandoned(entry.path)


def _remove_if_abandoned(path: str) -> None:
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(held)
        is_ours = status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700
        if is_ours and time.time() - status.st_mtime > _ABANDONED_AFTER:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path)
    finally:
        os.close(held)


@contextmanager
def _directory() -> Iterator[str]:
    """A directory for one trial, which this process holds until it removes it."""
    with tempfile.TemporaryDirectory(prefix=_DIRECTORIES) as path:
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_SH)
            yield path
        finally:
            os.close(held)


@contextmanager
def _running(command: list[str], directory: str, output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher for the length of a block; then it has ended, with all that it has started."""
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_TRIALS}
    if path := python_path(os.environ):
        environment["PYTHONPATH"] = path
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()  # what it has started dies with it
                process.wait()
            clean_up()  # it may have had no time to do so


def _code(process: subprocess.Popen[bytes], timeout: float) -> int | None:
    """The exit code of a process; None if it has not ended in time."""
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None


def _why(error: str, lines: list[str], code: int) -> str:
    """Why a trial failed: the first cause that the launcher wrote down, else its last line."""
    if (said := read(error)) is not None:
        who = said.role if said.rank is None else f"{said.role} {said.rank}"
        return said.message if said.kind == "start" and said.message else f"{who} failed first: {said.cause}"
    return f"exit code {code}: {lines[-1]}" if lines else f"exit code {code}, and nothing was printed"
