"""Random state of a replica: a function of (strategy seed, draw, replica), whatever ran before in this process.

A draw is a path like a run's id, with the ``draw`` of its ``Run`` as the first number.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable

import numpy as np

from cs_proto.messages import RunId

from .torch_generators import GENERATORS

__all__ = ["Seeds", "kept_random_state"]


class Seeds:
    """Seeds the random generators of a worker's process for each run."""

    def __init__(self, device: Callable[[int], None]) -> None:
        """``device`` seeds the generator of the replica's device, with a number of 32 bits."""
        self._device = device
        GENERATORS.watch()

    def begin(self, seed: int, draw: RunId, replica: int) -> None:
        """Seed ``random``, ``numpy.random``'s global generator, the device's, and torch's."""
        python, device, torch, words = _numbers(seed, draw, replica)
        random.seed(python)
        np.random.seed(words)
        self._device(device)
        GENERATORS.seed(torch)


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
