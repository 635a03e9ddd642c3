"""Numbers of bytes in messages, in readable units."""

from __future__ import annotations

__all__ = ["in_units"]

_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def in_units(nbytes: int) -> str:
    """A large number of bytes in larger units, in brackets; empty for a small number.

    >>> in_units(3_221_225_472), in_units(4096)
    (' (3.0 GiB)', '')
    """
    if nbytes < 10_000:
        return ""
    size, power = float(nbytes), -1
    while size >= 1023.95 and power + 1 < len(_UNITS):  # which would be printed as 1024.0
        size, power = size / 1024, power + 1
    return f" ({size:.1f} {_UNITS[power]})"
