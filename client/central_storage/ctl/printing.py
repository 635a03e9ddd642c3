"""Output for people on a terminal, plain lines in a pipe, and JSON."""

from __future__ import annotations

import json
import shutil
import sys
import time
import unicodedata
from collections.abc import Sequence
from typing import Any, Literal

from cs_proto.printable import printable
from cs_proto.sizes import rounded

from .extras import has

__all__ = ["age", "clock", "cut", "is_terminal", "json_line", "line", "number", "plain", "size", "table", "width"]


def is_terminal() -> bool:
    """Whether a person reads standard output."""
    return sys.stdout.isatty()


def line(text: str) -> None:
    """Print a line of text of a service."""
    print(printable(text))


def json_line(value: object) -> None:
    """Print a value as JSON: indented for people, on one line in a pipe."""
    print(json.dumps(value, indent=2 if is_terminal() else None), flush=True)


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = (), below: Sequence[str] = ()
) -> None:
    """Print rows below the names of their columns. Columns named in ``right`` are aligned to the right. If a terminal
    is too narrow for a table, what columns named in ``below`` say stands below each row, and nothing is cut."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(width, cells)) for cells in zip(columns, *rows, strict=True)]
    is_narrow = is_terminal() and sum(widths) + 2 * (len(columns) - 1) > shutil.get_terminal_size().columns
    if is_terminal() and has("rich") and not is_narrow:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for name in columns:
            side: Literal["left", "right"] = "right" if name in right else "left"
            made.add_column(name, justify=side, no_wrap=True)
        for row in rows:
            made.add_row(*map(Text, row))
        Console().print(made)
        return
    for row in (columns, *rows):
        cells, under = [], []
        for name, cell, room in zip(columns, row, widths, strict=True):
            if is_narrow and name in below:
                under.append(cell)
                continue
            space = " " * (room - width(cell))
            cells.append(space + cell if name in right else cell + space)
        print("  ".join(cells).rstrip())
        for cell in under if row is not columns else ():
            if cell:
                print(f"  {cell}")


def width(text: str) -> int:
    """The columns of a terminal that a text takes.

    Examples:
        >>> width("abc"), width("数据"), width("e\u0301")
        (3, 4, 1)
    """
    return len(text) if text.isascii() else sum(map(_width_of, text))


def cut(text: str, columns: int) -> str:
    """The part of a text that so many columns of a terminal have room for.

    Examples:
        >>> cut("abc", 2), cut("数据", 3)
        ('ab', '数')
    """
    if text.isascii():
        return text[:columns]
    for at, character in enumerate(text):
        columns -= _width_of(character)
        if columns < 0:
            return text[:at]
    return text


def _width_of(character: str) -> int:
    if unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def size(nbytes: int | None) -> str:
    """``1.5 GB`` for a number of bytes, ``-`` for none.

    Examples:
        >>> size(1_500_000_000), size(999), size(12_345), size(None)
        ('1.5 GB', '999 B', '12 kB', '-')
    """
    return "-" if nbytes is None else rounded(nbytes)


def number(value: float | None) -> str:
    """A number with three digits that count, ``-`` for none.

    Examples:
        >>> number(0.01234), number(3.14159), number(1234.5), number(0), number(None)
        ('0.0123', '3.14', '1234', '0', '-')
    """
    if value is None:
        return "-"
    return f"{value:.0f}" if value == 0 or abs(value) >= 100 else f"{value:.3g}"


def age(seconds: float | None) -> str:
    """How long something lasts.

    Examples:
        >>> age(5), age(125), age(7384), age(200_000), age(None)
        ('5s', '2m05s', '2h03m', '2d07h', '-')
    """
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    for unit, name, small, letter in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            return f"{whole // unit}{name}{whole % unit // small:02d}{letter}"
    return f"{whole}s"


def clock(moment: float) -> str:
    """The local time of a Unix time; with the date if it is another day."""
    then, now = time.localtime(moment), time.localtime()
    is_today = then[:3] == now[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", then)


def plain(value: Any) -> str:
    """A value in a table; ``-`` for none."""
    return "-" if value in (None, "") else str(value)
