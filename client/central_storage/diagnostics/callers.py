"""The line of the user's program that called this package, for messages and warnings."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

__all__ = ["call_site", "warn"]

_PACKAGE = str(Path(__file__).parents[1])


def call_site() -> str:
    """``file:line`` of the nearest caller outside this package."""
    frame = _caller()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def warn(message: str, category: type[Warning]) -> None:
    """``warnings.warn`` at the line of the nearest caller outside this package.

    A ``stacklevel`` would count this package's frames, whose number depends on how a public name was reached.
    """
    frame = _caller()
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, registry)


def _caller() -> FrameType:
    frame = sys._getframe(1)  # noqa: SLF001  (the one way to a caller without building a whole stack)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return frame
