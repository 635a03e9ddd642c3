"""``cs-worker``: one worker process from start to end. The supervisor starts it."""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from central_storage.core import context
from central_storage.diagnostics.logging_setup import configure_logging, dump_stacks_on_signal
from cs_proto.errors import CentralStorageError, ContextError, ShutdownError
from cs_proto.printable import printable
from cs_proto.version import __version__
from cs_runtime import open_files, stacks
from cs_runtime.transport import supervisor_link
from cs_runtime.transport.supervisor_link import NAME_VARIABLE, SupervisorLink

from .baton import ProcessBaton
from .config import Config
from .devices.device import open_device
from .devices.faults import name_faults
from .loop import Loop
from .session.conversation import make_conversation
from .session.interrupts import Interrupts, ring_doorbell
from .session.session import Link

__all__ = ["main"]

_log = logging.getLogger("central_storage.worker")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one worker until it is told to end. Exit codes: 0 after SIGTERM, 1 if the service is gone, 2 if it cannot
    start."""
    options = _parser().parse_args(arguments)
    open_files.raise_limit()
    try:
        configure_logging(f"w{options.replica}")
    except CentralStorageError as error:
        print(printable(f"cs-worker: {error}"), file=sys.stderr)  # noqa: T201
        return 2
    interrupts, turns = Interrupts(), ProcessBaton()
    interrupts.install()
    dump_stacks_on_signal()
    if "PYTHONBREAKPOINT" not in os.environ:  # the variable may name a debugger that reaches a worker
        sys.breakpointhook = _refuse_breakpoint
    context.become_worker(whole_process=True)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    try:
        config = Config(options.run_directory, options.replica, options.incarnation, options.device)
        # JAX would take three quarters of a GPU at its first use, and CuPy and other workers there need memory, too.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        device = open_device(config.device)
        link_to_supervisor = supervisor_link.connect(config.run_directory)
        connection = SupervisorLink(
            *(link_to_supervisor, "worker", config.replica, config.incarnation),
            run_directory=config.run_directory,
            name=bytes.fromhex(os.environ.pop(NAME_VARIABLE, "")),
        )
        _end_with(connection)
        connection.await_name()
        # A process that the user's code forks is not a worker.
        os.register_at_fork(after_in_child=connection.close)
        os.register_at_fork(after_in_child=interrupts.forget)
        link = Link(config, connection, _end, ring_doorbell(), turns)
    except ShutdownError:  # the supervisor has gone
        _end()
    except CentralStorageError as error:
        print(printable(f"cs-worker: {error}", lines=True), file=sys.stderr)  # noqa: T201  (a command line prints)
        return 2
    try:
        conversation = make_conversation(config, device.name, link, interrupts)
        loop = Loop(config, device, conversation.register(), connection, conversation, interrupts, turns)
        name_faults(loop.what_lies_at)
        loop.serve()
    except ShutdownError:  # the supervisor has gone, and this thread has seen it before the one that watches
        _end()
    except CentralStorageError as error:
        print(printable(f"cs-worker: {error}", lines=True), file=sys.stderr)  # noqa: T201
        return 2
    finally:
        link.close()
    return 0


def _refuse_breakpoint(*args: object, **kwargs: object) -> NoReturn:
    raise ContextError(
        "breakpoint() needs a terminal, which a worker process does not have; make the strategy with in_process=True"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cs-worker", description="One worker of a Central Storage service. cs-launch starts it."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--run-directory", required=True, metavar="D", help="directory of the service's sockets")
    parser.add_argument("--replica", required=True, type=int, metavar="R", help="number of the replica, from 0")
    parser.add_argument(
        "--incarnation",
        type=int,
        default=1,
        metavar="I",
        help="number of this start of the worker, from 1 (default: 1)",
    )
    parser.add_argument("--device", default="cpu:0", help="compute device (default: cpu:0)")
    return parser


def _end_with(connection: SupervisorLink) -> None:
    """End this process as soon as the supervisor is gone for good, also in the middle of a long computation.

    If a next supervisor takes over the service, this thread connects to it."""
    poller = select.poll()
    poller.register(connection.fileno(), 0)  # only hang-ups: the receive function reads the records

    def watch() -> None:
        # When a stopped process continues, any of its threads may handle the signals, but only the thread that runs
        # Python code can print stacks safely.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, stacks.SIGNAL})
        with suppress(ShutdownError):
            while True:
                poller.poll()
                connection.mend()
        _end()

    threading.Thread(target=watch, name="cs-lifeline", daemon=True).start()


def _end() -> NoReturn:
    """End at once: without its service, this process has no more work."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(1)
