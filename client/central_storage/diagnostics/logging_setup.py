"""Tools to look inside a process of the service: ``CS_LOG``, ``CS_MESSAGES_DIR``, stack dumps on SIGUSR1, and the lines
that its processes print."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import Literal

from cs_proto.printable import printable
from cs_runtime import stacks
from cs_runtime.logs import Formatter, MessagesFile, asked_level

from .bars import above_bars

__all__ = ["announce", "announces", "configure_logging", "dump_stacks_on_signal", "show"]


def configure_logging(role: str, name: str = "central_storage") -> None:
    """Show this project's log lines on stderr at the level that ``CS_LOG`` names (``debug``: every message).

    Without it warnings are shown: long waits, deaths, dropped messages. Handlers that the user has set up are left
    alone. If ``CS_MESSAGES_DIR`` names a directory, all lines are also written to ``<role>.<pid>.messages`` there.
    ``name`` is the name of the logger; the server has another one. Raises ConfigurationError as
    :func:`cs_runtime.logs.asked_level` does.
    """
    logger = logging.getLogger(name)
    asked = asked_level(logging.WARNING)
    logger.setLevel(asked)
    if not logger.handlers and not logging.getLogger().handlers:
        shown = _AboveBars(sys.stderr)
        shown.setFormatter(Formatter())
        shown.setLevel(asked)
        logger.addHandler(shown)
    if directory := os.environ.get("CS_MESSAGES_DIR"):
        path = os.path.join(directory, f"{role}.{os.getpid()}.messages")
        if not any(getattr(handler, "baseFilename", None) == os.path.abspath(path) for handler in logger.handlers):
            logger.addHandler(MessagesFile(directory, role))
        logger.setLevel(logging.DEBUG)


def announces() -> bool:
    """Whether the line with the devices is shown at a start: unless ``CS_LOG`` asks for warnings or errors only."""
    asked = logging.getLevelNamesMapping().get(os.environ.get("CS_LOG", "").upper(), logging.INFO)
    return asked <= logging.INFO


def announce(line: str) -> None:
    """Show the line with the devices, on stderr."""
    if announces():
        show("stderr", f"{printable(line)}\n")


def dump_stacks_on_signal() -> None:
    """Make SIGUSR1 print the stacks of all threads to stderr, unless the script uses that signal itself. Keep them
    ready for ``cs-ctl stack``, too."""
    stacks.keep_ready()
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and sys.stderr is not None:
        try:
            faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
        except (ValueError, AttributeError):  # stderr has no descriptor, as in a notebook or a test
            if sys.__stderr__ is not None:
                faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)


def show(stream: Literal["stdout", "stderr"], text: str) -> None:
    """Print lines of the service's processes to the place where this script, or this notebook cell, prints."""
    own = sys.stdout if stream == "stdout" else sys.stderr
    if own is not None:
        # Its reader is gone, it is closed, or another thread of the user makes bars.
        with suppress(OSError, ValueError, RuntimeError), above_bars(own):
            own.write(text)
            own.flush()


class _AboveBars(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes log lines above progress bars."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with above_bars(self.stream):
                super().emit(record)
        except Exception:  # noqa: BLE001  (of a bar of the user's: a line of a log raises nothing)
            self.handleError(record)
