"""Random state of a replica: a function of (strategy seed, run, replica), whatever ran before in this process."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable

import numpy as np

from cs_proto.messages import RunId

__all__ = ["kept_random_state", "seed_random_state"]


def seed_random_state(seed: int, run: RunId, replica: int, device: Callable[[int], None]) -> None:
    """Seed ``random``, ``numpy.random``'s global generator and the device's, with a number of 32 bits."""
    # A hash, because neighbouring runs differ by one and generators want seeds that differ everywhere.
    key = ",".join(map(str, (seed, *run, replica)))
    digest = hashlib.blake2b(key.encode(), digest_size=32).digest()
    random.seed(int.from_bytes(digest[:16], "little"))
    words = struct.unpack("<4I", digest[16:])
    np.random.seed(words)
    device(words[0])


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
