"""``cs-launch --serve``: a server that waits for workers and scripts from elsewhere, usually from other containers.

It depends on no script: it serves one script after the other until it is told to end, or until it can no longer serve.
``cli`` calls :func:`serve`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from central_storage.core.recovery_options import Recovery
from central_storage.diagnostics.error_report import Failure, died_failure, write
from central_storage.launch.foreground import SERVER_FAILED, START_FAILED, WORKER_FAILED, described
from central_storage.launch.memory import Medium
from central_storage.launch.plan import Command
from central_storage.launch.run_directory import RunDirectory
from central_storage.launch.sidecar import Beside, Sidecars
from central_storage.launch.supervisor.children import Child, Running, reap_adopted
from central_storage.launch.supervisor.lifecycle import Service
from central_storage.launch.supervisor.loop import Loop, Signals
from central_storage.launch.supervisor.output import Console, LogFiles
from central_storage.launch.supervisor.seats import Elsewhere
from cs_runtime import open_files
from cs_runtime.run_file import RunFile

__all__ = ["serve", "start_child"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Seconds between two checks whether the last script has left a service that has lost a worker.
_LOOK_EVERY = 0.5
# The most seconds to wait for a terminal that takes no output.
_LAST_WORDS = 0.4


def serve(
    run_directory: RunDirectory,
    commands: Sequence[Command],
    *,
    banner: str,
    start_timeout: float,
    logs: LogFiles | None,
    medium: Medium,
    recovery: Recovery,
    run_file: RunFile | None,
    mailboxes: bool,
    error_path: str | None,
    sidecars: Sequence[Beside],
) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns the exit code: 0, 3 if the service did not start, 4 if a worker ended for
    good, 5 if the server did or the run directory was removed. After the end of a worker or of the directory, the
    training script may still read until it leaves. The ``sidecars`` run beside the service."""
    open_files.raise_limit()
    loop = Loop()
    console = Console(loop)
    service = Service(
        loop,
        run_directory.path,
        commands,
        console,
        start_timeout=start_timeout,
        logs=logs,
        start_child=start_child,
        medium=medium,
        recovery=recovery,
        run_file=run_file,
        mailboxes=mailboxes,
    )
    beside = Sidecars(loop, service.say, sidecars)
    told: list[int] = []

    def signalled(number: int) -> None:
        if number == signal.SIGCHLD:
            reap_adopted(service.living_pids | beside.living_pids)
        else:
            service.stop(0.0) if told else service.stop()
            told.append(number)

    with Signals(loop, (*_ENDING, signal.SIGCHLD), signalled):
        service.say(banner)
        try:
            with beside:
                service.start()
                beside.start()
                is_reachable = _turn_until_stopped(loop, service)
        finally:
            service.close()
            run_directory.remove()
        code = _report(service, told, error_path, "" if is_reachable else run_directory.path)
        for _ in range(3):
            if not console.empty:
                loop.turn(_LAST_WORDS)
    if logs is not None:
        logs.close()
    return code


def _turn_until_stopped(loop: Loop, service: Service) -> bool:
    """Turn until the service has stopped. Returns whether it could be reached until then."""
    is_reachable = True
    while not service.stopped:
        is_reachable = is_reachable and service.is_reachable
        is_over = service.has_lost or not is_reachable
        if service.has_failed or (is_over and not service.has_controller):
            service.stop()
        loop.turn(_LOOK_EVERY)
    return is_reachable


def _report(service: Service, told: Sequence[int], error_path: str | None, removed: str) -> int:
    """Say why the service has ended; the exit code. ``removed``: the run directory, if it was removed before."""
    if told:
        return 0
    failure = service.first_failure if service.has_lost or service.has_failed else None
    if service.start_failure is not None:
        first = Failure("start", "launcher", None, None, "a failed start", service.start_failure)
        return _told(error_path, first, START_FAILED)
    if failure is None and removed:
        service.say(
            f"the service ends: nothing can connect to it any more, because its run directory {removed} was removed; "
            "start it again, and keep what removes old files away from there"
        )
        gone = Failure("death", "server", None, None, f"the removal of its run directory {removed}")
        return _told(error_path, gone, SERVER_FAILED)
    if failure is None:
        return 0
    for line in f"the service ends: {described(died_failure(failure))}".splitlines():
        service.say(line)
    return _told(error_path, died_failure(failure), SERVER_FAILED if failure.role == "server" else WORKER_FAILED)


def _told(error_path: str | None, failure: Failure, code: int) -> int:
    if error_path:
        write(error_path, failure, code)
    return code


def start_child(loop: Loop, command: Command, **calls: Callable[..., None]) -> Running:
    """Start the server here; the workers come from elsewhere."""
    kind = Child if command.role == "server" else Elsewhere
    return kind(loop, command, on_lines=calls["on_lines"], on_end=calls["on_end"])
