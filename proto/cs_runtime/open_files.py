"""The number of descriptors that this process may open, the number that is free, and whether they suffice for a peer.

ZeroMQ ends a process that has no descriptor left when a peer connects, so every process of a service counts before it
lets a peer in.
"""

from __future__ import annotations

import os
import resource

from cs_proto.errors import DescriptorLimitError

__all__ = ["check", "free", "limit", "lower_limit", "may_have_guests", "raise_limit", "shortage"]

# Some containers allow 2**30. Programs that close all possible descriptors one by one would take minutes then.
_HIGHEST = 1 << 20
# Observers are refused when fewer descriptors are free: the limit divided by the first number, but at most the second.
_SHARE, _MOST = 4, 256


def raise_limit() -> int:
    """Raise the soft limit of open files of this process, and of those that it starts, to the hard limit, but at most
    to 2**20. Returns the previous soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _HIGHEST if hard == resource.RLIM_INFINITY else min(hard, _HIGHEST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return soft


def lower_limit(soft: int) -> None:
    """Set the soft limit to ``soft``, which :func:`raise_limit` returned. Raises ValueError if it is above the hard
    limit."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def limit() -> int:
    """The number of descriptors that this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _HIGHEST if soft == resource.RLIM_INFINITY else soft


def free() -> int:
    """The number of descriptors that this process may still open."""
    return limit() - _in_use()


def may_have_guests() -> bool:
    """Whether this process has descriptors for another observer. It keeps some for the processes of the service, which
    may have to connect again."""
    return free() >= min(limit() // _SHARE, _MOST)


def shortage(who: str) -> DescriptorLimitError:
    """The error for a peer for which ``who``, a process of the service, has no descriptor."""
    return DescriptorLimitError(
        f"{who} has {_in_use()} of {limit()} descriptors open and keeps the rest for itself: close observers that are "
        "no longer used (with central_storage.connect() as observer: ...), or start the service with a larger limit "
        "(ulimit -Hn)"
    )


def check(needed: int, what: str) -> None:
    """Raise :class:`DescriptorLimitError` if this process may not open ``needed`` more descriptors for ``what``.
    Without this check ZeroMQ would end the process."""
    if free() < needed:
        raise DescriptorLimitError(
            f"{what} needs up to {needed} descriptors, and this process has {_in_use()} of {limit()} open: close files "
            "and observers that are no longer used (with central_storage.connect() as observer: ...), or raise the "
            "limit (ulimit -n)"
        )


def _in_use() -> int:
    try:
        # From Linux 6.2 on, the size is the number of descriptors. Before that it is 0.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1
    except OSError:  # no descriptor is left to list them with
        return limit()
