"""Numbers of bytes in messages, in readable units."""

from __future__ import annotations

__all__ = ["in_units", "rounded"]

_DECIMAL = ("B", "kB", "MB", "GB", "TB")
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


def rounded(nbytes: int) -> str:
    """A number of bytes in decimal units, with two or three digits.

    >>> rounded(1_500_000_000), rounded(999), rounded(12_345)
    ('1.5 GB', '999 B', '12 kB')
    """
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < len(_DECIMAL) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_DECIMAL[unit]}" if unit and value < 9.95 else f"{value:.0f} {_DECIMAL[unit]}"
