"""Random state of a replica: a function of (strategy seed, draw, replica), whatever ran before in this process.

A draw is a path like a run's id, with the ``draw`` of its ``Run`` as the first number.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import struct
from collections.abc import Callable

import numpy as np

from cs_proto.messages import RunId

from .torch_generators import GENERATORS

__all__ = ["Seeds", "kept_random_state"]

#: NumPy's global generator draws from 624 words, and counts how many of them it has used.
_STATE_NBYTES = 625 * 4
#: Of so many runs the state is made at once.
_AHEAD = 8


class Seeds:
    """The random state of the controller's draws, one after the other. NumPy's state takes longest to make,
    mostly when the code is not in the processor's cache. So the states of some draws are made together, by a separate
    generator, after the worker has sent its answer."""

    def __init__(self, device: Callable[[int], None]) -> None:
        """``device`` seeds the generator of the replica's device, with a number of 32 bits."""
        self._device = device
        GENERATORS.watch()
        self._own = np.random.MT19937()
        self._maker = np.random.RandomState(self._own)
        # Seeds for Python, the device and torch, and NumPy's state.
        self._made: dict[tuple[int, RunId, int], tuple[int, int, int, bytes]] = {}
        self._generator, self._memory = self._own, _memory_of(self._own)  # NumPy's global one, when it was last seen
        self._written = b""

    def begin(self, seed: int, draw: RunId, replica: int) -> None:
        """Seed ``random``, ``numpy.random``'s global generator, the device's, and torch's."""
        made = self._made.pop((seed, draw, replica), None)
        generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if made is None or type(generator) is not np.random.MT19937:
            python, device, torch, words = _numbers(seed, draw, replica)
            np.random.seed(words)
        else:
            python, device, torch, state = made
            if generator is not self._generator:
                self._generator, self._memory, self._written = generator, _memory_of(generator), b""
            with generator.lock:
                is_drawn = self._memory[-8:] != self._written[-8:]  # a word of the state, and how many of them are used
                self._memory[:] = self._written = state
            if is_drawn:  # forgets the second normal number of a pair, too
                np.random.set_bit_generator(generator)  # type: ignore[attr-defined]
        random.seed(python)
        self._device(device)
        GENERATORS.seed(torch)

    def expect(self, seed: int, draw: RunId, replica: int) -> None:
        """Prepare this draw of the controller and the next ones, which will probably be used next."""
        if (seed, draw, replica) in self._made:
            return
        self._made.clear()
        own = _memory_of(self._own)
        for number in range(draw[0], draw[0] + _AHEAD):
            key = (seed, (number,), replica)
            python, device, torch, words = _numbers(*key)
            self._maker.seed(words)
            self._made[key] = python, device, torch, bytes(own)


def _memory_of(generator: np.random.MT19937) -> memoryview:
    """The state of a generator, where it is: uint8[n]."""
    address = generator.ctypes.state_address
    return memoryview((ctypes.c_char * _STATE_NBYTES).from_address(address)).cast("B")


def _numbers(seed: int, draw: RunId, replica: int) -> tuple[int, int, int, tuple[int, ...]]:
    """The seeds of the generators of Python (128 bits), the device (32 bits), torch (64 bits) and NumPy (four words of
    32 bits)."""
    # A hash, because neighbouring draws differ by one and generators want seeds that differ everywhere.
    key = ",".join(map(str, (seed, *draw, replica)))
    digest = hashlib.blake2b(key.encode(), digest_size=32).digest()
    words = struct.unpack("<4I", digest[16:])
    return int.from_bytes(digest[:16], "little"), words[0], words[1] | words[2] << 32, words


def kept_random_state(device: Callable[[], Callable[[], None]] | None = None) -> Callable[[], None]:
    """Remember the random state, torch's too, and with ``device`` the device's. The result is a function that restores
    it. For the run around a nested run."""
    python, numpy, restore_device = random.getstate(), np.random.get_state(), device and device()
    restore_torch = GENERATORS.keep()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        restore_torch()
        if restore_device is not None:
            restore_device()

    return restore
