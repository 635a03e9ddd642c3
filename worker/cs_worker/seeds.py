"""Random state of a replica: a function of (strategy seed, run, replica), whatever ran before in this process."""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from cs_proto.messages import RunId

__all__ = ["Seeds", "kept_random_state"]

#: NumPy's global generator draws from 624 words, and counts how many of them it has used.
_STATE_NBYTES = 625 * 4


class Seeds:
    """The random state of the controller's runs, one after the other. The greater part of it is made while the worker
    has nothing else to do, where the process is its own; it counts if it is still as it was made when the run begins,
    since unpickling, too, runs the user's code."""

    def __init__(self, device: Callable[[int], None]) -> None:
        """``device`` seeds the generator of the replica's device, with a number of 32 bits."""
        self._device = device
        self._made: tuple[int, RunId, int] | None = None
        self._state = b""

    def begin(self, seed: int, run: RunId, replica: int) -> None:
        """Seed ``random``, ``numpy.random``'s global generator and the device's."""
        python, words = _numbers(seed, run, replica)
        random.seed(python)
        if self._made != (seed, run, replica) or self._state != _state():
            np.random.seed(words)
        self._made = None
        self._device(words[0])

    def expect(self, seed: int, run: RunId, replica: int) -> None:
        """This run is the one that begins next, in all likelihood."""
        with suppress(Exception):  # the user's code may have replaced what is called here; the run itself says so
            if type(_generator()) is np.random.MT19937:
                np.random.seed(_numbers(seed, run, replica)[1])
                self._made, self._state = (seed, run, replica), _state()


def _numbers(seed: int, run: RunId, replica: int) -> tuple[int, tuple[int, ...]]:
    """What Python's and NumPy's generators are seeded with."""
    # A hash, because neighbouring runs differ by one and generators want seeds that differ everywhere.
    key = ",".join(map(str, (seed, *run, replica)))
    digest = hashlib.blake2b(key.encode(), digest_size=32).digest()
    return int.from_bytes(digest[:16], "little"), struct.unpack("<4I", digest[16:])


def _generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]


def _state() -> bytes:
    """All that NumPy's global generator draws from; empty where it is of another kind than at first."""
    generator = _generator()
    if type(generator) is not np.random.MT19937:
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _STATE_NBYTES)


def kept_random_state(device: Callable[[], Callable[[], None]] | None = None) -> Callable[[], None]:
    """Remember the state as it is, with ``device`` the device's, too; the answer puts it back. For the run around a
    nested run."""
    python, numpy, restore_device = random.getstate(), np.random.get_state(), device and device()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        if restore_device is not None:
            restore_device()

    return restore
