"""Which functions a receiver still holds, kept alike by whoever sends functions and whoever holds them.

A sender leaves a pickled function out of a message where the receiver has it. Both ends keep a :class:`Recent` of one
capacity and touch it once for every message, in order, so they agree without asking. Senders, which are the client and
the holder of a merge_call token, keep a :class:`Held` for each worker.
"""

from __future__ import annotations

from copy import copy

__all__ = ["HELD_FUNCTIONS", "Held", "Recent"]

#: How many functions of one sender a worker holds.
HELD_FUNCTIONS = 16


class Recent:
    """The last ``capacity`` digests in order of use."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._digests: dict[bytes, None] = {}  # in order of use, the least recent first

    def touch(self, digest: bytes) -> bool:
        """Use ``digest``: whether it was held. The least recently used one goes where there are too many.

        >>> recent = Recent(2)
        >>> [recent.touch(digest) for digest in (b"a", b"b", b"a", b"c", b"b")]
        [False, False, True, False, False]
        """
        held = digest in self._digests
        if held:
            del self._digests[digest]
        elif len(self._digests) == self._capacity:
            del self._digests[next(iter(self._digests))]
        self._digests[digest] = None
        return held

    def __copy__(self) -> Recent:
        """One that knows the same and goes its own way."""
        copied = Recent(self._capacity)
        copied._digests.update(self._digests)
        return copied

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests


class Held:
    """What one worker holds, by its sender: the last ordinary functions, and every frozen one."""

    def __init__(self) -> None:
        self._recent = Recent(HELD_FUNCTIONS)
        self._frozen: set[bytes] = set()

    def touch(self, digest: bytes, frozen: bool) -> bool:
        """Send a run of the function ``digest``: whether the worker has its bytes already; it has them from now on.

        >>> held = Held()
        >>> [held.touch(b"a", frozen) for frozen in (True, False, True, False)]
        [False, False, True, True]
        """
        if not frozen:
            return self._recent.touch(digest)
        is_held = digest in self._frozen
        self._frozen.add(digest)
        return is_held

    def __copy__(self) -> Held:
        """One that knows the same and goes its own way."""
        copied = Held()
        copied._recent, copied._frozen = copy(self._recent), copy(self._frozen)
        return copied
