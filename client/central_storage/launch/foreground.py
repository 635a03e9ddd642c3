"""``cs-launch`` at work: a service and the user's script, from the first line to the exit code.

The script shares this process's terminal and process group, so it is a program like any other: it reads the
keyboard, its output passes untouched, and Ctrl-C reaches it. Here a signal only sets a limit to how long it may take
to end. ``cli`` calls :func:`run`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

from central_storage.core.recovery_options import Recovery
from central_storage.diagnostics.error_report import Failure, died_failure, read, write
from central_storage.diagnostics.logging_setup import announces
from cs_proto.errors import ReplicaLostError
from cs_proto.frozen import frozen, with_changes
from cs_proto.messages import DeviceChoice
from cs_proto.printable import printable
from cs_runtime import open_files, saving_mark

from .memory import Medium
from .plan import Command, error_file
from .run_directory import RunDirectory
from .service_file import ServiceFile
from .sidecar import Beside, Sidecars
from .supervisor.children import Child, Running, reap_adopted
from .supervisor.lifecycle import STOP_GRACE, Service
from .supervisor.loop import Loop, Signals
from .supervisor.output import Console, LogFiles

__all__ = ["SERVER_FAILED", "START_FAILED", "WORKER_FAILED", "Plan", "described", "run"]

START_FAILED = 3
WORKER_FAILED = 4
SERVER_FAILED = 5

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# After a signal: what the script gets, each so many seconds after the one before. Ctrl-C has reached it through the
# terminal already.
_AFTER_CTRL_C = ((1.0, signal.SIGINT), (1.0, signal.SIGTERM), (1.0, signal.SIGKILL))
_AFTER_SIGNAL = ((0.0, signal.SIGTERM), (3.0, signal.SIGKILL))
# How often a script that saves a checkpoint is looked at, seconds.
_LOOK_EVERY = 0.1
# After a signal everything has ended by then, seconds.
_SIGNAL_LIMIT = 4.0
# After a signal, a terminal that takes no output is not waited for any longer than this.
_LAST_WORDS = 0.4


@frozen
class Plan:
    """The processes of a service, the line that names their devices, and these; processes that stand by have none
    yet."""

    commands: Sequence[Command]
    banner: str
    devices: tuple[str, ...] = ()
    parameter_device: str = ""


def run(
    run_directory: RunDirectory,
    plan: Plan,
    script: Command,
    *,
    choose: Callable[[DeviceChoice | None], Plan] | None,
    start_timeout: float,
    logs: LogFiles | None,
    service_file: ServiceFile,
    keeps_logs: bool,
    medium: Medium,
    recovery: Recovery,
    mailboxes: bool,
    error_path: str | None,
    sidecars: Sequence[Beside],
    stop_grace: float,
    start_child: Callable[..., Running] = Child,
) -> int:
    """Start the service and the script, wait for the script, end everything, remove the directory; the exit code.

    With ``choose``, the processes of ``plan`` stand by until the script has chosen; ``choose`` raises DeviceError for a
    choice that cannot be started.

    0 or the script's own code; 3, 4 or 5 where the script failed after the start, a worker or the server did; 128
    and the signal's number where one ended the run or the script. What failed first is told in the file ``error_path``.
    The ``sidecars`` run beside the service. A script that saves a checkpoint when the run is to end gets
    ``stop_grace`` seconds for it. ``start_child`` starts a process of the service, or finds a place for one from
    elsewhere.
    """
    foreground = _Foreground(
        run_directory,
        plan,
        script,
        choose,
        start_timeout,
        logs,
        service_file,
        keeps_logs,
        medium,
        recovery,
        mailboxes,
        sidecars,
        stop_grace,
        start_child,
    )
    code = foreground.run()
    if error_path and foreground.failure is not None:
        write(error_path, foreground.failure, code)
    return code


class _Foreground:
    def __init__(
        self,
        run_directory: RunDirectory,
        plan: Plan,
        script: Command,
        choose: Callable[[DeviceChoice | None], Plan] | None,
        start_timeout: float,
        logs: LogFiles | None,
        service_file: ServiceFile,
        keeps_logs: bool,
        medium: Medium,
        recovery: Recovery,
        mailboxes: bool,
        sidecars: Sequence[Beside],
        stop_grace: float,
        start_child: Callable[..., Running],
    ) -> None:
        self._stop_grace = stop_grace
        self._limit_before = open_files.raise_limit()  # the script gets this limit: it may use select()
        self._directory = run_directory
        self._loop = Loop()
        self._console = Console(self._loop)
        self._logs = logs
        self._file = service_file
        self._keeps_logs = keeps_logs
        self._service = Service(
            self._loop,
            run_directory.path,
            plan.commands,
            self._console,
            start_timeout=start_timeout,
            logs=logs,
            start_child=start_child,
            medium=medium,
            recovery=recovery,
            mailboxes=mailboxes,
            choose=self._choose if choose is not None else None,
        )
        self._sidecars = Sidecars(self._loop, self._service.say, sidecars)
        self._plan = plan
        self._plan_for = choose
        self._command = script
        self._script: Child | None = None
        self._signal: int | None = None
        self._limit = self._saved_by = 0.0
        #: What went wrong first, once the run is over; None where it ended well or was ended.
        self.failure: Failure | None = None

    def run(self) -> int:
        with Signals(self._loop, (*_ENDING, signal.SIGCHLD), self._signalled):
            if self._plan_for is None:
                self._announce(self._plan)
            self._file = self._file.write(self._directory.path)
            try:
                with self._sidecars:
                    self._service.start()
                    self._start_script()
                    self._sidecars.start()
                    while not self._service.stopped:
                        self._loop.turn()
            finally:
                self._service.close()
                self.failure = self._find_failure()
                self._directory.remove()
            self._report()
            self._flush()
        if self._logs is not None:
            self._logs.close()
        return self._exit_code()

    def _announce(self, plan: Plan) -> None:
        if announces():
            self._console.write("stderr", f"{printable(plan.banner, lines=True)}\n")

    def _choose(self, choice: DeviceChoice | None) -> Sequence[Command]:
        """What the service runs for this choice of the script."""
        assert self._plan_for is not None
        plan = self._plan_for(choice)
        self._file = self._file.write(
            self._directory.path, devices=plan.devices, parameter_device=plan.parameter_device
        )
        self._announce(plan)
        return plan.commands

    def _start_script(self) -> None:
        try:
            self._script = Child(
                self._loop, self._command, on_lines=None, on_end=self._script_ended, open_files_limit=self._limit_before
            )
        except OSError as error:
            self._console.write("stderr", f"[cs-launch] {self._command.argv[0]}: {error.strerror}\n")
            self._service.stop()
        else:
            self._file = self._file.write(self._directory.path, script_pid=self._script.pid)

    def _script_ended(self, script: Child) -> None:
        grace = STOP_GRACE
        if self._signal is not None:
            grace = min(grace, max(0.0, self._limit - time.monotonic()))
        self._service.stop(grace)

    # --- signals --------------------------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        if number == signal.SIGCHLD:
            script = {self._script.pid} if self._script is not None and self._script.returncode is None else set()
            reap_adopted(self._service.living_pids | self._sidecars.living_pids | script)
        elif self._signal is not None:  # the second one means now
            self._to_script(signal.SIGKILL)
            self._service.stop(0.0)
        else:
            self._signal = number
            self._limit = time.monotonic() + _SIGNAL_LIMIT
            if self._script is None or self._script.returncode is not None:
                self._service.stop()
            self._saved_by = time.monotonic() + self._stop_grace
            self._end_script(_AFTER_CTRL_C if number == signal.SIGINT else _AFTER_SIGNAL)

    def _end_script(self, steps: Sequence[tuple[float, int]]) -> None:
        if steps:
            self._loop.call_later(steps[0][0], partial(self._press, steps))

    def _press(self, steps: Sequence[tuple[float, int]]) -> None:
        """Send the script the next signal. If it saves a checkpoint, wait until that is done, and then once more."""
        (pause, number), *rest = steps
        if pause and saving_mark.is_set(self._directory.path) and time.monotonic() < self._saved_by:
            self._limit = time.monotonic() + _SIGNAL_LIMIT
            self._loop.call_later(_LOOK_EVERY, partial(self._press_later, steps))
        else:
            self._to_script(number)
            self._end_script(rest)

    def _press_later(self, steps: Sequence[tuple[float, int]]) -> None:
        if saving_mark.is_set(self._directory.path):
            self._press(steps)
        else:
            self._end_script(steps)

    def _to_script(self, number: int) -> None:
        if self._script is not None and self._script.returncode is None:
            if number == signal.SIGINT:
                self._console.write(
                    "stderr", "[cs-launch] the script is still running; press Ctrl-C again to end it at once\n"
                )
            self._script.signal(number)

    # --- the end --------------------------------------------------------------------------------------------------

    def _find_failure(self) -> Failure | None:
        """The script's own word where it left one, since an exception of the user's code is known to it alone."""
        died = self._service.first_failure
        if self._service.start_failure is not None:
            first = Failure("start", "launcher", None, None, "a failed start") if died is None else died_failure(died)
            return with_changes(first, kind="start", message=self._service.start_failure)
        if self._signal is not None or not self._script_code():
            return None
        if (said := read(error_file(self._directory.path))) is not None:
            if said.kind == "death" or said.cause.startswith(ReplicaLostError.__name__):
                # The server's answer may have come before the supervisor's notice: the script knew of an older death.
                known = died if said.kind == "exception" else None
                newest = self._service.last_deaths.get((said.role, said.rank or 0), known)
                if newest is not None:
                    return with_changes(died_failure(newest), message=said.message, traceback=said.traceback)
            return with_changes(said, log=said.log or self._service.last_lines(said.role, said.rank))
        if died is not None:
            return died_failure(died)
        if self._script is None:
            return Failure("start", "script", None, None, "a failed start")
        return Failure("death", "script", None, self._script.pid, self._script.cause)

    def _report(self) -> None:
        """Name the first failure, where there is one."""
        died = self._service.first_failure
        if self.failure is not None and self.failure.role == "script" and self.failure.kind == "death":
            report = str(self.failure)
        elif self.failure is not None:
            report = ("" if self.failure.kind == "start" else "first failure: ") + described(self.failure)
        elif died is not None:  # others have gone on without it
            report = f"the run went on after this: {described(died_failure(died))}"
        else:
            report = ""
        if self._logs is not None and self._keeps_logs:
            report += f"\nlog files: {self._logs.directory}" if report else f"log files: {self._logs.directory}"
        if report:
            first, *more = report.splitlines()
            lines = [f"[cs-launch] {first}", *(f"    {line}" for line in more)]
            self._console.write("stderr", "".join(f"{printable(line)}\n" for line in lines))

    def _flush(self) -> None:
        deadline = time.monotonic() + _LAST_WORDS
        while not self._console.empty and (self._signal is None or time.monotonic() < deadline):
            self._loop.turn(_LAST_WORDS)

    def _script_code(self) -> int:
        code = self._script.returncode if self._script is not None else START_FAILED
        if code is None:
            return START_FAILED
        return code if code >= 0 else 128 - code

    def _exit_code(self) -> int:
        if self._signal is not None:
            return 128 + self._signal
        code = self._script_code()
        if code != 1:  # the script's own word
            return code
        if self.failure is None or self.failure.kind == "exception":
            return code
        if self.failure.kind == "start":
            return START_FAILED
        return {"server": SERVER_FAILED, "worker": WORKER_FAILED}.get(self.failure.role, code)


def described(failure: Failure) -> str:
    """Who failed how, and the last lines of what died."""
    if failure.kind != "death":
        return str(failure)
    return f"{failure}\nlast lines:\n{failure.log}" if failure.log else f"{failure}\nit wrote nothing"
