"""The supervisor of a script that was started without a launcher, as a process of its own:
``python -m central_storage.launch.background``.

The script holds the other end of one socketpair; its service lives exactly as long as the script does, or until it
says :class:`~cs_proto.messages.Shutdown`. What the processes print goes to the script as records. Started by
``service`` and by nobody else.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from central_storage.core.recovery_options import Recovery
from central_storage.diagnostics.logging_setup import configure_logging, dump_stacks_on_signal
from cs_proto.codec import PACKET_NBYTES, encode
from cs_proto.errors import CentralStorageError, code_of
from cs_proto.messages import Error, StartFailed
from cs_runtime import open_files

from .affinity import machine
from .packages import python_path
from .plan import Command, Options, service_commands
from .run_directory import RunDirectory
from .service_file import ServiceFile
from .sidecar import Beside, Sidecars
from .supervisor.children import Child, Running, reap_adopted
from .supervisor.connections import OwnerSink
from .supervisor.lifecycle import Service
from .supervisor.loop import Loop, Signals
from .supervisor.mailboxes import mailboxes_by_default
from .supervisor.output import LogFiles
from .supervisor.seats import Elsewhere

__all__ = ["main"]

# Of the time that the start may take, the part in which workers from elsewhere must have their places.
_PLACING = 0.75
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: list[str] | None = None) -> int:
    """Run a service until its owner lets go of it; the exit code."""
    options, elsewhere = _parser().parse_known_args(arguments)
    configure_logging("supervisor")
    dump_stacks_on_signal()
    open_files.raise_limit()
    owner = socket.socket(fileno=options.client_descriptor)
    owner.set_inheritable(False)
    try:
        with ExitStack() as undo:
            run_directory = RunDirectory()
            undo.callback(run_directory.remove)
            loop, sink = Loop(), OwnerSink()
            beside, listen = _from_elsewhere(elsewhere, options, run_directory.path, undo) if elsewhere else ([], "")
            service = _service(loop, sink, run_directory.path, options, listen)
            with Sidecars(loop, service.say, beside) as sidecars:
                _serve(loop, service, sink, owner, options.owner_pid, sidecars)
    except CentralStorageError as error:  # there is not even a supervisor to say why
        reason = Error(code_of(type(error)), str(error), None, "", -1, 0, "")
        with suppress(OSError):  # the owner has gone
            owner.sendall(b"".join(encode(StartFailed(reason))))
            _wait_until_read(owner, options.owner_pid)
        return 1
    return 0


def _from_elsewhere(
    words: Sequence[str], options: argparse.Namespace, run_directory: str, undo: ExitStack
) -> tuple[list[Beside], str]:
    """The processes that bring workers from other machines, as these options of ``cs-launch`` say, and where the
    service listens for them. Raises what Ray refuses, and SystemExit if the owner ends before."""
    from . import listen_options, ray_options  # late: most services have their workers here

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ray_options.add_arguments(parser)
    listen_options.add_arguments(parser)
    asked = parser.parse_args(words)
    # What else cs-launch has, by its defaults.
    for name, value in (("devices", None), ("memory", "memfd"), ("serve", asked.workers), ("return_timeout", 60.0)):
        setattr(asked, name, value)
    asked.start_timeout = _PLACING * options.start_timeout
    ray_options.check(asked, [])
    owner = _owner_pidfd(options.owner_pid)
    if owner is None:
        sys.exit()
    try:
        placers, _ = ray_options.placer_of(asked, run_directory, undo, owner)
    finally:
        os.close(owner)
        if asked.runtime_env is not None:  # the script has written it for this process
            os.unlink(asked.runtime_env)
    gateway, _, shown = listen_options.gateway_of(asked, run_directory, undo)
    for placer in placers:
        placer.listens_at(shown["listen"])
    return [*gateway, *placers], shown["listen"]


def _start_child(loop: Loop, command: Command, **calls: Callable[..., None]) -> Running:
    """Start a process of the service, or find a place for a worker from elsewhere."""
    kind = Elsewhere if command.device == "elsewhere" else Child
    return kind(loop, command, on_lines=calls["on_lines"], on_end=calls["on_end"])


def _service(loop: Loop, sink: OwnerSink, run_directory: str, options: argparse.Namespace, listen: str) -> Service:
    parent = os.environ.get("CS_LOG_DIR")
    logs = LogFiles.under(parent, run_directory) if parent else None
    devices = tuple(options.devices.split(","))
    ServiceFile.of(
        run_directory,
        options.script,
        options.kind,
        devices=devices,
        parameter_device=options.parameter_device,
        script_pid=options.owner_pid,
        log_directory=logs.directory if logs else None,
        listen=listen,
    ).write(run_directory)
    recovery = Recovery(options.max_restarts, options.server_recovery == "on", options.step_timeout)
    commands = service_commands(
        Options(devices, options.parameter_device, run_directory, recovery),
        os.environ,
        python=sys.executable,
        machine=machine(),
        python_path=python_path(os.environ),
    )
    return Service(
        loop,
        run_directory,
        commands,
        sink,
        start_timeout=options.start_timeout,
        logs=logs,
        start_child=_start_child,
        recovery=recovery,
        mailboxes=mailboxes_by_default() == "on",
    )


def _serve(
    loop: Loop, service: Service, sink: OwnerSink, owner: socket.socket, owner_pid: int, sidecars: Sidecars
) -> None:
    def signalled(number: int) -> None:
        if number == signal.SIGCHLD:
            reap_adopted(service.living_pids | sidecars.living_pids)
        else:
            service.stop()

    def owner_ended() -> None:
        if pidfd is not None:
            loop.forget(pidfd)
        service.stop()

    with Signals(loop, (*_ENDING, signal.SIGCHLD), signalled):
        sink.peer = service.own(owner)
        # A forked child of the script may keep its end of the socketpair open: the script's own end is what counts.
        pidfd = _owner_pidfd(owner_pid)
        try:
            if pidfd is None:
                service.stop()
            else:
                loop.on_readable(pidfd, owner_ended)
                service.start()
                sidecars.start()
            while not service.stopped:
                loop.turn()
        finally:
            service.close()


def _wait_until_read(owner: socket.socket, owner_pid: int) -> None:
    """Return when the owner has hung up or ended: a hang-up from this side would overtake what was said."""
    pidfd = _owner_pidfd(owner_pid)
    if pidfd is None:
        return
    poller = select.poll()
    poller.register(owner, select.POLLIN)
    poller.register(pidfd, select.POLLIN)
    while all(descriptor != pidfd for descriptor, _ in poller.poll()) and owner.recv(PACKET_NBYTES):
        pass


def _owner_pidfd(pid: int) -> int | None:
    """A descriptor that tells when the script has ended; None where it has already."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if os.getppid() != pid:  # that number may be another process's by now
        os.close(descriptor)
        return None
    return descriptor


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m central_storage.launch.background", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--client-descriptor", type=int, required=True)
    parser.add_argument("--owner-pid", type=int, required=True)
    parser.add_argument("--script", required=True)
    parser.add_argument("--kind", choices=("script", "notebook"), required=True)
    parser.add_argument("--devices", required=True)
    parser.add_argument("--parameter-device", required=True)
    parser.add_argument("--start-timeout", type=float, default=60.0)
    parser.add_argument("--max-restarts", type=int, default=Recovery.max_restarts)
    parser.add_argument("--server-recovery", choices=("on", "off"), default="on")
    parser.add_argument("--step-timeout", type=float)
    return parser


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # the script waits for it, and nothing is left to be done
