"""Random state of a replica: a function of (strategy seed, function, step, replica), whatever ran before.

The states are set as a whole, from one stream of Philox (``central_storage/core/random_streams.py``). Its 626 words of
64 bits are, each with its lower half first: 624 words of 32 bits for the Mersenne Twister of ``numpy.random``, as many
for that of ``random``, 64 bits that seed torch, and 32 that seed CuPy.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from central_storage.core.random_streams import Purpose, Streams

from .torch_generators import GENERATORS

__all__ = ["Seeds", "kept_random_state"]

# A state of the Mersenne Twister is so many words. The next one is drawn after the last of them: all are new then.
_WORDS = 624
_STATE = struct.Struct(f"={_WORDS}I")


class _States(NamedTuple):
    """What ``numpy.random.set_state`` and ``random.setstate`` take, and the seeds of torch and of the device."""

    numpy: Any
    python: tuple[Any, ...]
    torch: int
    device: int


class Seeds:
    """Sets the state of the random generators of a worker's process for each run."""

    def __init__(self, device: Callable[[int], None]) -> None:
        """``device`` seeds the generator of the replica's device, with a number of 32 bits."""
        self._device = device
        # One object for all runs: to make another takes ten times as long as to set its state.
        self._philox = np.random.Philox(0)
        self._state = self._philox.state
        self._expected: tuple[object, _States] | None = None
        GENERATORS.watch()

    def begin(self, streams: Streams) -> None:
        """Set the states of ``random`` and of ``numpy.random``'s global generator; seed the device's and torch's."""
        expected, self._expected = self._expected, None
        states = expected[1] if expected is not None and expected[0] == streams.place else self._states(streams)
        try:
            np.random.set_state(states.numpy)
        except ValueError:  # the user's code has put another bit generator in its place
            np.random.seed(states.numpy[1][:4])
        random.setstate(states.python)
        GENERATORS.seed(states.torch)
        self._device(states.device)

    def expect(self, streams: Streams) -> None:
        """Make the states of a run that is likely to be the next. To be called while the worker has nothing to do:
        to make the states takes several times as long as to set them."""
        self._expected = streams.place, self._states(streams)

    def _states(self, streams: Streams) -> _States:
        self._state["state"] = {"counter": streams.counter(Purpose.STATES), "key": streams.key}
        self._philox.state = self._state
        words = self._philox.random_raw(_WORDS + 2)
        numpy = _STATE.unpack_from(words.data)  # numbers: set_state takes ten times as long with an array
        python = (*_STATE.unpack_from(words.data, _STATE.size), _WORDS)
        torch, device = words[-2:].tolist()
        return _States(("MT19937", numpy, _WORDS), (3, python, None), torch, device & 0xFFFFFFFF)


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
