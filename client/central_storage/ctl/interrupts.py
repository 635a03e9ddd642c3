"""Ctrl-C: it ends a command at once, unless the command has something to undo.

An exception would not do. Python drops one that is raised in a callback, such as one of an import, and the command
would go on; and a library may make another error of it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["CTRL_C", "ending", "raising"]

#: The exit code.
CTRL_C = 130


@contextmanager
def ending() -> Iterator[None]:
    """Let Ctrl-C end this process at once, for the length of the block. What ignores Ctrl-C still does."""
    with _handled(_end):
        yield


@contextmanager
def raising() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, as it does by default, for the length of the block, which has something to
    undo."""
    with _handled(signal.default_int_handler):
        yield


@contextmanager
def _handled(handler: Any) -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    if before not in (_end, signal.default_int_handler):  # it is ignored, or somebody else's
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: object) -> None:
    os._exit(CTRL_C)
