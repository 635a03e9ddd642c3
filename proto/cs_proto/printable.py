"""Text of peers and users, as a terminal or a log may show it.

A name, an error or a line of output may hold characters that steer a terminal (ANSI escapes, C0 and C1), turn the
reading direction (bidi), or begin a line that looks like one of another process. Whatever this project prints or logs
goes through :func:`printable`. What the user's own functions print is shown as it is.
"""

from __future__ import annotations

__all__ = ["counted", "printable"]


def printable(text: str, *, lines: bool = False) -> str:
    r"""``text`` in which every character that ``str.isprintable`` does not call printable is escaped; a tab becomes a
    space. With ``lines``, line feeds stay.

    Examples:
        >>> print(printable("w0: \x1b[2Jdone, ünï\n[server] ready"))
        w0: \x1b[2Jdone, ünï\n[server] ready
        >>> printable("a\nb\x9b", lines=True)
        'a\nb\\x9b'
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or (lines and c == "\n") else " " if c == "\t" else c.encode("unicode_escape").decode()
        for c in text
    )


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number of things. ``plural``: where it is not the noun with an s.

    Examples:
        >>> counted(1, "step"), counted(2, "step"), counted(0, "axis", "axes")
        ('1 step', '2 steps', '0 axes')
    """
    return f"{count} {noun if count == 1 else plural or noun + 's'}"
