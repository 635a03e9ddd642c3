"""The account of the functions that a receiver still holds; sender and receiver keep the same one.

A sender leaves a pickled function out of a message if the receiver has it. Both ends keep a :class:`FunctionCache` of
the same capacity and touch it once for every message, in order, so they agree without asking. The senders (the client
and the holder of a merge_call token) keep a :class:`HeldFunctions` for each worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

__all__ = ["HELD_FUNCTIONS", "FunctionCache", "HeldFunctions"]

#: How many functions of one sender a worker holds.
HELD_FUNCTIONS = 16


class FunctionCache:
    """The last ``capacity`` digests in order of use."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._digests: dict[bytes, None] = {}  # in order of use, the least recent first

    def touch(self, digest: bytes) -> bool:
        """Use ``digest``, and return whether it was held. If there are too many, the least recently used one is
        dropped.

        >>> recent = FunctionCache(2)
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

    def __copy__(self) -> FunctionCache:
        """An independent copy with the same content."""
        copied = FunctionCache(self._capacity)
        copied._digests.update(self._digests)
        return copied

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._digests

    def is_latest(self, digest: bytes) -> bool:
        """Whether ``digest`` was used last."""
        return bool(self._digests) and next(reversed(self._digests)) == digest


class HeldFunctions:
    """The functions of one sender that one worker holds: the last ordinary ones, and every frozen one. Immutable."""

    def __init__(self, recent: FunctionCache | None = None, frozen: frozenset[bytes] = frozenset()) -> None:
        self._recent = recent or FunctionCache(HELD_FUNCTIONS)
        self._frozen = frozen

    def touch(self, digest: bytes, frozen: bool) -> tuple[bool, HeldFunctions]:
        """Send a run of the function ``digest``: whether the worker already has its bytes, and what it holds
        afterwards.

        >>> held, said = HeldFunctions(), []
        >>> for frozen in (True, False, True, False):
        ...     is_held, held = held.touch(b"a", frozen)
        ...     said.append(is_held)
        >>> said
        [False, False, True, True]
        """
        if frozen:
            return (
                (True, self)
                if digest in self._frozen
                else (False, HeldFunctions(self._recent, self._frozen | {digest}))
            )
        if self._recent.is_latest(digest):
            return True, self
        recent = copy(self._recent)
        return recent.touch(digest), HeldFunctions(recent, self._frozen)

    def without(self, frozen: Iterable[bytes]) -> HeldFunctions:
        """What the worker holds after it has forgotten these frozen functions.

        >>> _, held = HeldFunctions().touch(b"a", True)
        >>> held.without([b"a"]).touch(b"a", True)[0]
        False
        """
        return HeldFunctions(self._recent, self._frozen.difference(frozen))
