"""``cs-launch --join``: one worker of a service of another container, or of another machine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
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
        help="run no script: run one worker of a service that --serve has started, in this run directory or, with "
        "--keys DIR, on another machine, where it listens at that address (--listen)",
    )


def is_remote(options: argparse.Namespace) -> bool:
    """Whether a service on another machine is to be joined."""
    return bool(options.join)


def check(options: argparse.Namespace) -> None:
    """Raise ConfigurationError for options that do not fit, and for keys that are missing or open to others."""
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
        return hold(options.join, keys, options.devices, options.run_directory, options.start_timeout)
    command_in = _commands(options.devices)
    from .remote.join import join as join_here  # it imports NumPy, which a supervisor does not need

    run_directory = options.run_directory or address()
    return join_here(run_directory, command_in(run_directory), options.start_timeout)


def hold(endpoint: str, keys: WorkerKeys, devices: str | None, run_directory: str | None, start_timeout: float) -> int:
    """Run a worker of the service behind ``endpoint`` until it is released, in ``run_directory`` or a new one; the exit
    code. Raises ConfigurationError and DeviceError for ``devices`` that are not one of this machine's, and as
    :func:`central_storage.launch.remote.outpost.hold`."""
    command_in = _commands(devices)
    from .remote.outpost import hold as hold_outpost  # it imports NumPy, as above

    held = RunDirectory(run_directory)
    try:
        return hold_outpost(endpoint, keys, held.path, command_in(held.path), start_timeout)
    finally:
        held.remove()


def warn_of_busy(used: Sequence[str], here: Machine) -> None:
    """Name GPUs that other processes use, too."""
    for line in busy(used, here.gpus):
        print(printable(f"cs-launch: warning: {line}"), file=sys.stderr)


def _commands(devices: str | None) -> Callable[[str], Callable[[Joined], Command]]:
    """What starts the worker that was assigned, in a run directory."""
    is_any = devices is None or devices.strip().lower() == "auto"
    chosen = device_names.compute_devices(devices, 1)
    if len(chosen) > 1:
        raise ConfigurationError(
            f"--join runs one worker, but --devices names {len(chosen)} devices: {', '.join(chosen)}; give "
            "each worker a cs-launch --join of its own"
        )
    require_cupy(chosen)
    here = machine()
    warn_of_busy(chosen, here)

    def command_in(run_directory: str) -> Callable[[Joined], Command]:
        def command_of(joined: Joined) -> Command:
            # All processors are alike, so the number of the device only tells the replicas apart.
            device = f"cpu:{joined.rank}" if is_any and chosen == ["cpu:0"] else chosen[0]
            everyone = ["elsewhere"] * joined.replicas
            everyone[joined.rank] = device
            plan = Options(tuple(everyone), "cpu:0", run_directory)
            path = python_path(os.environ)
            commands = service_commands(plan, os.environ, python=sys.executable, machine=here, python_path=path)
            return commands[1 + joined.rank]

        return command_of

    return command_in
