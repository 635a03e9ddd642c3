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


def kept_random_state() -> Callable[[], None]:
    """Remember the state as it is; the answer puts it back. For the run around a nested run."""
    python, numpy = random.getstate(), np.random.get_state()

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)

    return restore
