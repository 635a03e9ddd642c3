"""Libraries that only some users need: the error about one that is missing names the extra that installs it."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["require"]


def require(library: str, extra: str, what: str) -> None:
    """Raise ModuleNotFoundError (an ImportError) if ``library``, which ``what`` needs, is not installed.

    >>> require("a_library", "progress", "a progress bar")
    Traceback (most recent call last):
    ModuleNotFoundError: a progress bar needs a_library: pip install 'central-storage[progress]'
    """
    if find_spec(library) is None:
        raise ModuleNotFoundError(f"{what} needs {library}: pip install 'central-storage[{extra}]'", name=library)
