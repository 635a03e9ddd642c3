"""``cs-launch --join``: one worker of a service of another container, or workers of one of another machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING

from central_storage.core.devices import device_names
from cs_proto.errors import ConfigurationError
from cs_proto.messages import Joined
from cs_proto.printable import printable
from cs_runtime.gpus import require_cupy

from .affinity import Machine, machine
from .gpu_usage import busy
from .packages import python_path
from .plan import Command, Options, service_commands
from .run_directory import RunDirectory

if TYPE_CHECKING:
    from cs_runtime.transport.curve import WorkerKeys

__all__ = ["add_arguments", "check", "hold", "is_remote", "join", "warn_of_busy"]

_HERE = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--join``."""
    parser.add_argument(
        "--join",
        nargs="?",
        const=_HERE,
        metavar="tcp://ADDRESS:PORT",
        help="run no script: run one worker of a service that --serve has started, in this run directory; or, with "
        "--keys DIR, one on each of --devices for a service on another machine, where it listens at that address "
        "(--listen)",
    )


def is_remote(options: argparse.Namespace) -> bool:
    """Whether a service on another machine is to be joined."""
    return bool(options.join)


def check(options: argparse.Namespace) -> None:
    """Raise ConfigurationError for options that do not fit, and for keys that are missing or open to others."""
    if options.serve is not None and options.devices:
        raise ConfigurationError(
            "--serve does not go together with --devices: workers name their devices where they join (CS_DEVICES "
            "counts as --devices)"
        )
    if not is_remote(options):
        return
    if not options.join.startswith("tcp://"):
        raise ConfigurationError(f"--join takes no script, and {options.join!r:.200} is no tcp://ADDRESS:PORT")
    from cs_runtime.transport import curve  # late: only a worker of another machine needs keys

    _, port = curve.check_endpoint(options.join, "--join")
    if not port:
        raise ConfigurationError(f"--join {options.join} names no port; the service's launcher prints it")
    if options.keys is None:
        raise ConfigurationError(
            f"--join {options.join} needs --keys DIR: service.key and one worker-NAME.key_secret, which cs-launch keys "
            "DIR --worker NAME makes on the machine of the service"
        )
    curve.WorkerKeys.read(options.keys)


def join(options: argparse.Namespace, address: Callable[[], str]) -> int:
    """Run the worker until it is released; the exit code. ``address`` gives the run directory if no option names it."""
    if is_remote(options):
        from cs_runtime.transport.curve import WorkerKeys

        keys = WorkerKeys.read(options.keys)
        return hold(
            options.join,
            keys,
            options.devices,
            options.run_directory,
            options.start_timeout,
            mailboxes=options.mailboxes == "on",
        )
    chosen = _devices(options.devices)
    if len(chosen) > 1:
        raise ConfigurationError(
            f"--join runs one worker here, but --devices names {len(chosen)} devices: {', '.join(chosen)}; give "
            "each worker a cs-launch --join of its own"
        )
    from .remote.join import join as join_here  # it imports NumPy, which a supervisor does not need

    run_directory = options.run_directory or address()
    (command_of,) = _commands(options.devices, chosen, [run_directory])
    return join_here(run_directory, command_of, options.start_timeout)


def hold(
    endpoint: str,
    keys: WorkerKeys,
    devices: str | None,
    run_directory: str | None,
    start_timeout: float,
    *,
    mailboxes: bool,
) -> int:
    """Run a worker on each of ``devices``, of the service behind ``endpoint``, until they are released, in
    ``run_directory`` or a new one; the exit code. Without ``mailboxes``, all their messages go over ZeroMQ.

    Raises ConfigurationError and DeviceError for ``devices`` that this machine does not have, and as
    :func:`central_storage.launch.remote.outpost.hold`."""
    chosen = _devices(devices)
    from .remote.outpost import hold as hold_outpost  # it imports NumPy, as above

    with ExitStack() as undo:
        places = _run_directories(run_directory, len(chosen), undo)
        commands = _commands(devices, chosen, places)
        held = list(zip(places, commands, strict=True))
        return hold_outpost(endpoint, keys, held, start_timeout, mailboxes=mailboxes)


def _run_directories(path: str | None, count: int, undo: ExitStack) -> list[str]:
    """A run directory for each of ``count`` workers; if there are several, below ``path``. ``undo`` removes them."""
    paths = [path] * count
    if path is not None and count > 1:
        if not os.path.exists(path):
            undo.callback(_remove_if_empty, path)
        paths = [os.path.join(path, str(number)) for number in range(count)]
    held = []
    for each in paths:
        made = RunDirectory(each)
        undo.callback(made.remove)
        held.append(made.path)
    return held


def _remove_if_empty(path: str) -> None:
    """Remove a directory unless something of others has come into it."""
    with suppress(OSError):
        os.rmdir(path)


def warn_of_busy(used: Sequence[str], here: Machine) -> None:
    """Name GPUs that other processes use, too."""
    for line in busy(used, here.gpus):
        print(printable(f"cs-launch: warning: {line}"), file=sys.stderr)


def _devices(devices: str | None) -> list[str]:
    """The devices of the workers to run here."""
    chosen = device_names.compute_devices(devices, 1)
    require_cupy(chosen)
    warn_of_busy(chosen, machine())
    return chosen


def _commands(
    devices: str | None, chosen: Sequence[str], run_directories: Sequence[str]
) -> list[Callable[[Joined], Command]]:
    """What starts the worker that was assigned, for each of the ``chosen`` devices and its run directory."""
    is_any = devices is None or devices.strip().lower() == "auto" or devices.strip().isdecimal()
    here, path = machine(), python_path(os.environ)

    def command_of(own: str, run_directory: str, joined: Joined) -> Command:
        # All processors are alike, so the number of the device only tells the replicas apart.
        device = f"cpu:{joined.rank}" if is_any and own.startswith("cpu:") else own
        everyone = ["elsewhere"] * joined.replicas
        everyone[joined.rank] = device
        plan = Options(tuple(everyone), "cpu:0", run_directory)
        commands = service_commands(plan, os.environ, python=sys.executable, machine=here, python_path=path)
        return commands[1 + joined.rank]

    return [partial(command_of, *each) for each in zip(chosen, run_directories, strict=True)]
