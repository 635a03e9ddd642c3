"""The command line of the server, ``cs-server``: options in, a configuration out, an exit code at the end.

The supervisor starts servers with it; nobody needs to type it. The only place of the server that reads the
environment: ``CS_LOG`` names the level of what is written to stderr, ``CS_MESSAGES_DIR`` where every line is kept.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence

from cs_proto.errors import ConfigurationError, DeviceError, LaunchError, MemoryPlanError
from cs_runtime import machine, open_files

from .config import ServerConfig

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to end. Exit codes: 0 ended when told, 1 failed, 2 a command line that makes no sense."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    open_files.raise_limit()
    _configure_logging()
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        config = ServerConfig(
            run_directory=options.run_directory,
            parameter_device=options.parameter_device,
            replicas=options.replicas,
            threads=options.threads,
            machine_nbytes=machine.total_nbytes(),
            address_nbytes=machine.address_nbytes(),
            incarnation=options.incarnation,
            recovery=options.recovery == "on",
            step_timeout=options.step_timeout,
        )
    except (ConfigurationError, DeviceError) as error:
        print(f"{parser.prog}: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    gc.disable()  # what is imported stays: to look through it for garbage is a fifth of what the imports take
    from .serving import serve  # zmq and the kernels: not for --help

    gc.freeze()
    gc.enable()
    try:
        serve(config)
    except (ConfigurationError, LaunchError, MemoryPlanError) as error:
        print(f"{parser.prog}: {type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("cs-server", description="The parameter process of a Central Storage service.")
    parser.add_argument("--run-directory", required=True, help="where the supervisor listens and the server will")
    parser.add_argument("--parameter-device", required=True, help="where the variables are: cpu:0")
    parser.add_argument("--replicas", required=True, type=int, help="how many workers there will be")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="cores that an update may use"
    )
    parser.add_argument("--incarnation", type=int, default=1, help="counts the servers of a run")
    parser.add_argument(
        "--recovery", choices=("on", "off"), default="on", help="whether another server may take this one's place"
    )
    parser.add_argument(
        "--step-timeout", type=float, help="seconds after which a silent replica is to be killed (default: never)"
    )
    return parser


def _configure_logging() -> None:
    """Warnings and what ``CS_LOG`` asks for (``debug``: every message, ``info``) go to stderr, all lines to a file in
    ``CS_MESSAGES_DIR`` where that is set."""
    asked = logging.getLevelNamesMapping().get(os.environ.get("CS_LOG", "").upper(), logging.WARNING)
    shown = logging.StreamHandler(sys.stderr)
    shown.setLevel(asked)
    handlers: list[logging.Handler] = [shown]
    if directory := os.environ.get("CS_MESSAGES_DIR"):
        handlers.append(logging.FileHandler(os.path.join(directory, f"server.{os.getpid()}.messages")))
    logging.basicConfig(
        level=asked if len(handlers) == 1 else logging.DEBUG,
        handlers=handlers,
        format="%(asctime)s.%(msecs)03d %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("numba").setLevel(logging.WARNING)  # a compiler's inner life
