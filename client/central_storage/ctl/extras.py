"""Libraries that only some users need: an error names the extra that brings them."""

from __future__ import annotations

from importlib.util import find_spec

from cs_proto.errors import ConfigurationError

__all__ = ["has", "require"]


def has(module: str) -> bool:
    """Whether ``module`` is installed."""
    return find_spec(module) is not None


def require(module: str, extra: str) -> None:
    """Raise ConfigurationError, which names the ``extra`` of this package, if ``module`` is not installed.

    Examples:
        >>> require("no_such_module", "ctl")
        Traceback (most recent call last):
        ...
        cs_proto.errors.ConfigurationError: this needs no_such_module: pip install 'central-storage[ctl]'
    """
    if not has(module):
        raise ConfigurationError(f"this needs {module}: pip install 'central-storage[{extra}]'")
