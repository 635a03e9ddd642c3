"""How many descriptors this process may have open, how many are left, and whether they suffice for more connections.

ZeroMQ ends a process that has no descriptor left when a peer connects, so every process of a service counts before it
lets a peer in.
"""

from __future__ import annotations

import os
import resource

from .errors import DescriptorLimitError

__all__ = ["check", "free", "limit", "lower_limit", "may_have_guests", "raise_limit", "shortage"]

# Some containers allow 2**30. Programs that close "all possible" descriptors one by one would take minutes.
_HIGHEST = 1 << 20
# What a process keeps for the service when observers come: this share of its limit, but at most so many.
_SHARE, _MOST = 4, 256


def raise_limit() -> int:
    """Let this process, and what it starts, open as many files as it may allow itself: the soft limit becomes the hard
    one, but at most 2**20. Returns the soft limit of before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _HIGHEST if hard == resource.RLIM_INFINITY else min(hard, _HIGHEST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft


def lower_limit(soft: int) -> None:
    """Make ``soft``, which :func:`raise_limit` returned, the limit again."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def limit() -> int:
    """How many descriptors this process may have open now."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _HIGHEST if soft == resource.RLIM_INFINITY else soft


def free() -> int:
    """How many more this process may open."""
    return limit() - _in_use()


def may_have_guests() -> bool:
    """Whether another observer may have a connection of this process: a part of the descriptors is kept for the
    service itself, whose own processes may have to connect again."""
    return free() >= min(limit() // _SHARE, _MOST)


def shortage(who: str) -> DescriptorLimitError:
    """The error for a peer that ``who``, a process of the service, has no descriptor for."""
    return DescriptorLimitError(
        f"{who} has {_in_use()} of {limit()} descriptors open and keeps the rest for itself: close observers that are "
        "no longer used (with central_storage.connect() as observer: ...), or start the service with a larger limit "
        "(ulimit -Hn)"
    )


def check(needed: int, what: str) -> None:
    """Raise :class:`DescriptorLimitError` where this process may not open ``needed`` more descriptors for ``what``.
    ZeroMQ would end the process."""
    if free() < needed:
        raise DescriptorLimitError(
            f"{what} needs up to {needed} descriptors, and this process has {_in_use()} of {limit()} open: close files "
            "and observers that are no longer used (with central_storage.connect() as observer: ...), or raise the "
            "limit (ulimit -n)"
        )


def _in_use() -> int:
    try:
        # Linux tells the number as the size from 6.2 on. Before that it is 0.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1
    except OSError:  # no descriptor is left to list them with
        return limit()
