"""The account: which steps a program has carried out that the control store does not have yet.

A *program* (:mod:`cs_server.compute.programs`) carries out steps without the engine, while the server waits. It writes
nothing to the control store. Before a step it copies the kind of the step and what the workers returned to the account,
and counts the step. The account outlives the server, like the control store. The number in it says to which step of the
store it belongs.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from cs_proto.codec import MARK_NBYTES

__all__ = ["BODY_NBYTES", "KINDS", "KIND_NBYTES", "STEPS", "Account", "account_nbytes"]

#: The steps whose bodies are kept: more than a client may still ask for.
STEPS = 32
#: The most kinds of steps.
KINDS = 8
_WORD_NBYTES = 8
#: Bytes of what one worker returned: their number, then the bytes of its mark.
BODY_NBYTES = _WORD_NBYTES + MARK_NBYTES
_KIND = struct.Struct(f"<{1 + KINDS}Q")
#: Bytes of the kind of a step, and of the number of steps of each kind up to this one.
KIND_NBYTES = _KIND.size
# The words at the head, which is as long as a cache line and the one that is prefetched with it.
_NUMBER, _BEGUN = 0, 1
_HEAD_NBYTES = 128


def account_nbytes(replicas: int) -> int:
    """Bytes of the memory of an account."""
    return _HEAD_NBYTES + STEPS * (KIND_NBYTES + replicas * BODY_NBYTES)


class Account:
    """The account of one service. Used by one thread."""

    def __init__(self, memory: NDArray[np.uint8], replicas: int) -> None:
        """``memory`` has :func:`account_nbytes`, zeros at first, or what an earlier server has left there."""
        nbytes = account_nbytes(replicas)
        self._bytes, self._words = memory.data, memory[:nbytes].view(np.uint64).data
        self._step_nbytes = (nbytes - _HEAD_NBYTES) // STEPS
        self._address = memory.__array_interface__["data"][0]
        if not self._words[_NUMBER]:
            self._words[_NUMBER] = 1

    @property
    def number(self) -> int:
        """From 1. A step of the control store to which the account belongs has the same number."""
        return self._words[_NUMBER]

    @property
    def begun(self) -> int:
        """The steps that were begun since that one. All but the last are finished."""
        return self._words[_BEGUN]

    def renew(self) -> None:
        """Begin anew: no step of the control store has the next number yet."""
        self._words[_BEGUN] = 0
        self._words[_NUMBER] += 1

    def kind(self, run: int) -> tuple[int, tuple[int, ...]]:
        """The kind of a run that is among the last :data:`STEPS`, and how many steps of each kind there were up to this
        one."""
        kind, *counts = _KIND.unpack_from(self._bytes, self._place(run))
        return kind, tuple(counts)

    def bodies(self, run: int) -> list[bytes]:
        """What the workers returned of a run that is among the last :data:`STEPS`, by replica."""
        found, step = [], self._place(run)
        for at in range(step + KIND_NBYTES, step + self._step_nbytes, BODY_NBYTES):
            size, first = self._words[at // _WORD_NBYTES], at + _WORD_NBYTES
            found.append(bytes(self._bytes[first : first + (size if size < MARK_NBYTES else MARK_NBYTES)]))
        return found

    def _place(self, run: int) -> int:
        return _HEAD_NBYTES + run % STEPS * self._step_nbytes

    @property
    def number_address(self) -> int:
        """The address of the word of :attr:`number`."""
        return int(self._address + _NUMBER * _WORD_NBYTES)

    @property
    def begun_address(self) -> int:
        """The address of the word of :attr:`begun`."""
        return int(self._address + _BEGUN * _WORD_NBYTES)

    def kind_address(self, run: int) -> int:
        """The address at which a program puts the words of :meth:`kind`."""
        return int(self._address + self._place(run))

    def body_address(self, run: int, replica: int) -> int:
        """The address at which a program puts the :data:`BODY_NBYTES` of a worker."""
        return self.kind_address(run) + KIND_NBYTES + replica * BODY_NBYTES
