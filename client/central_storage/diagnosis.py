"""Looking inside a process of the service: ``CS_LOG``, stack dumps on SIGUSR1, and the lines its processes print."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from contextlib import suppress
from typing import Literal

__all__ = ["configure_logging", "dump_stacks_on_signal", "show"]


def configure_logging() -> None:
    """Show this project's log lines on stderr at the level that ``CS_LOG`` names (``debug``: every message).

    Without it warnings are shown: waits that last, deaths, messages that were dropped. Handlers that the user has
    set up are left alone.
    """
    logger = logging.getLogger("central_storage")
    level = os.environ.get("CS_LOG", "").upper()
    logger.setLevel(level if level in logging.getLevelNamesMapping() else logging.WARNING)
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(name)s: %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)


def dump_stacks_on_signal() -> None:
    """Have SIGUSR1 print the stacks of all threads to stderr, unless the script uses that signal itself."""
    if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and sys.stderr is not None:
        try:
            faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
        except (ValueError, AttributeError):  # stderr has no descriptor: a notebook's, a test's
            if sys.__stderr__ is not None:
                faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)


def show(stream: Literal["stdout", "stderr"], text: str) -> None:
    """Print lines of the service's processes where this script, or this notebook cell, prints its own."""
    own = sys.stdout if stream == "stdout" else sys.stderr
    if own is not None:
        with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            own.write(text)
            own.flush()
