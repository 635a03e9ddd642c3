"""The command line of the server, ``cs-server``: turns options into a configuration, and the end into an exit code.

The supervisor starts servers with it; users never type it. No other module of the server reads the environment:
``CS_LOG`` names the lowest level that goes to stderr, ``CS_MESSAGES_DIR`` the directory of the log files, and
``CS_LOG_VALUES=on`` has them show bytes.
"""

from __future__ import annotations

import argparse
import atexit
import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from cs_proto.errors import ConfigurationError, DeviceError, LaunchError, MemoryPlanError
from cs_proto.printable import printable
from cs_proto.version import __version__
from cs_runtime import machine, open_files, stacks
from cs_runtime.logs import Formatter, MessagesFile, asked_level
from cs_runtime.waits import name_waits_after

from .config import ServerConfig

__all__ = ["main", "run"]


def run(arguments: Sequence[str] | None = None) -> NoReturn:
    """Be the process ``cs-server``: serve, and end with the exit code of `main`.

    The interpreter is not finalized. That would crash while a compiler runs in another thread, and takes a tenth of a
    second.
    """
    code = 1
    try:
        code = main(arguments)
    except Exception:  # noqa: BLE001  (printed here, because nothing above would)
        sys.excepthook(*sys.exc_info())
    atexit._run_exitfuncs()  # noqa: SLF001  (there is no public name)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to end. Exit codes: 0 ended when told, 1 failed, 2 an invalid command line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    stacks.keep_ready()
    open_files.raise_limit()
    try:
        _configure_logging()
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
            name_after=name_waits_after(),
        )
    except (ConfigurationError, DeviceError) as error:
        print(printable(f"{parser.prog}: {type(error).__name__}: {error}", lines=True), file=sys.stderr)  # noqa: T201
        return 2
    gc.disable()  # imported modules stay; collecting garbage among them takes a fifth of the import time
    from .serving import serve  # zmq and the kernels: not for --help

    gc.freeze()
    gc.enable()
    try:
        serve(config)
    except (ConfigurationError, LaunchError, MemoryPlanError) as error:
        print(printable(f"{parser.prog}: {type(error).__name__}: {error}", lines=True), file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "cs-server",
        description="The server of a Central Storage service, which holds its variables. cs-launch starts it.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--run-directory", required=True, help="directory of the service's sockets")
    parser.add_argument("--parameter-device", required=True, help="device that holds the variables, such as cpu:0")
    parser.add_argument("--replicas", required=True, type=int, help="number of workers")
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="number of cores that an update may use (default: all)",
    )
    parser.add_argument(
        "--incarnation", type=int, default=1, help="number of this start of the server, from 1 (default: 1)"
    )
    parser.add_argument(
        "--recovery", choices=("on", "off"), default="on", help="keep what a replacement server needs (default: on)"
    )
    parser.add_argument(
        "--step-timeout",
        type=float,
        help="seconds without a message after which an awaited replica is killed (default: never)",
    )
    return parser


def _configure_logging() -> None:
    """Log to stderr from the level that ``CS_LOG`` names, and log every line to a file in ``CS_MESSAGES_DIR`` if set.

    ``debug`` shows every message; the default is warnings.
    """
    asked = asked_level(logging.WARNING)
    shown = logging.StreamHandler(sys.stderr)
    shown.setLevel(asked)
    shown.setFormatter(Formatter())
    handlers: list[logging.Handler] = [shown]
    if directory := os.environ.get("CS_MESSAGES_DIR"):
        handlers.append(MessagesFile(directory, "server"))
    logging.basicConfig(level=asked if len(handlers) == 1 else logging.DEBUG, handlers=handlers)
    logging.getLogger("numba").setLevel(logging.WARNING)  # it logs every step of the compiler
