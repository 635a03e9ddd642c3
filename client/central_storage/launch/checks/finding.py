"""What a check of the machine finds, and texts of findings without secrets."""

from __future__ import annotations

import os
import pwd
import re
import socket
from collections.abc import Callable
from typing import Literal

from cs_proto.frozen import frozen

__all__ = ["Finding", "Level", "bad", "good", "hider", "slower"]

#: ``slower``: trainings work, with less than on other machines. ``bad``: a training may fail here.
Level = Literal["good", "slower", "bad"]

# Names that are the same on many machines, so they tell nothing.
_COMMON = ("docker", "localhost", "python", "root", "server", "ubuntu", "user", "worker")
# A shorter name would be found in the middle of other things.
_SHORTEST = 3


@frozen
class Finding:
    """One thing that was found.

    Attributes:
        level: See :data:`Level`.
        subject: What was checked, in one or two words.
        text: What was found.
        remedy: What to do; empty if there is nothing to do.
    """

    level: Level
    subject: str
    text: str
    remedy: str = ""


def good(subject: str, text: str, remedy: str = "") -> Finding:
    """A finding of something that is as it should be; ``remedy`` is for those who need more."""
    return Finding("good", subject, text, remedy)


def slower(subject: str, text: str, remedy: str) -> Finding:
    """A finding of something with which trainings work, but slower or with less comfort."""
    return Finding("slower", subject, text, remedy)


def bad(subject: str, text: str, remedy: str) -> Finding:
    """A finding of something with which a training may fail."""
    return Finding("bad", subject, text, remedy)


def hider() -> Callable[[str], str]:
    """A function that takes the home directory, the user's name and the host's name out of a text.

    Examples:
        >>> import os
        >>> hide = hider()
        >>> hide(os.path.expanduser("~/.cache"))
        '~/.cache'
    """
    homes, users = {os.path.expanduser("~")}, {os.environ.get(name, "") for name in ("USER", "LOGNAME")}
    try:
        entry = pwd.getpwuid(os.geteuid())
    except KeyError:  # a container with a user that has no name
        pass
    else:
        homes.add(entry.pw_dir)
        users.add(entry.pw_name)
    host = socket.gethostname()
    words = {**dict.fromkeys(users, "<user>"), host: "<host>", host.partition(".")[0]: "<host>"}
    # The longest come first: a home directory contains the user's name, and a host's long name its short one.
    pairs = [(home, r"(?![\w-])", "~") for home in homes if home.count("/") > 1 or home == "/root"]
    pairs += [(word, r"(?!\w)", mark) for word, mark in words.items() if len(word) >= _SHORTEST and word not in _COMMON]
    patterns = [
        (re.compile(rf"(?<!\w){re.escape(name)}{end}"), mark)
        for name, end, mark in sorted(pairs, key=lambda pair: -len(pair[0]))
    ]

    def hide(text: str) -> str:
        for pattern, mark in patterns:
            text = pattern.sub(mark, text)
        return text

    return hide
