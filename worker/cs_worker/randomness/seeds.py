"""Random state of a replica: a function of (strategy seed, function, step, replica), whatever ran before.

The states are set as a whole, from one stream of Philox (``central_storage/core/random_streams.py``). Its 626 words of
64 bits are, each with its lower half first: 624 words of 32 bits for the Mersenne Twister of ``numpy.random``, as many
for that of ``random``, 64 bits that seed torch, and 32 that seed CuPy.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from central_storage.core.random_streams import Purpose, Streams

from .torch_generators import GENERATORS

__all__ = ["Seeds", "kept_random_state"]

# A state of the Mersenne Twister is so many words. The next one is drawn after the last of them: all are new then.
_WORDS = 624
# A state of Python's generator that can be told from others.
_PYTHON = (3, (*range(1, _WORDS + 1), _WORDS), None)
# The place of the step in the counter of a stream.
_STEP = 3


class Seeds:
    """Sets the state of the random generators of a worker's process for each run.

    Python and NumPy take a state as 624 numbers, and to make and read these takes longer than all else that a worker
    does for a small run. So the words are copied to where they lie in memory. That is still a sixth of what a worker
    does for a small run, so it is done before the run comes, if the run can be foreseen. It cannot wait until a number
    is drawn, because neither generator says that before it draws.
    """

    def __init__(self, device: Callable[[int], None] | None) -> None:
        """``device`` seeds the generator of the replica's device, with a number of 32 bits; None if it has none of its
        own."""
        self._device = device
        # One object for all runs: to make another takes ten times as long as to set its state.
        self._philox = np.random.Philox(0)
        self._state: Any = self._philox.state
        # What the stream in it follows from, but for the step.
        self._source: tuple[object, ...] = ()
        self._generator: Any = getattr(random.random, "__self__", None)
        self._python = _words_of(self._generator)
        # NumPy's bit generator, and its state in memory: the words, and the place of the next one, uint32 [625]. None
        # if the user's code has put one of another kind in its place.
        self._numpy: tuple[object, np.ndarray] | None = None
        # The run for which the states are set already, the words, and the states as bytes.
        self._foreseen: tuple[object, np.ndarray, tuple[bytes, bytes]] | None = None
        GENERATORS.watch()

    def begin(self, streams: Streams) -> None:
        """Set the states of ``random`` and of ``numpy.random``'s global generator; seed the device's and torch's."""
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None and foreseen[0] == streams.place and foreseen[2] == self._in_memory():
            words = foreseen[1]
        else:
            words = self._set(streams)
        GENERATORS.seed(int(words[-2]))
        if self._device is not None:
            self._device(int(words[-1]) & 0xFFFFFFFF)

    def foresee(self, streams: Streams) -> None:
        """The next run is probably this one: set its states now. If it is, and nobody has drawn a number or set a state
        meanwhile, :meth:`begin` leaves them as they are. A thread of the user's that draws between two runs gets
        numbers that the next run draws, too."""
        words, in_memory = self._set(streams), self._in_memory()
        self._foreseen = None if in_memory is None else (streams.place, words, in_memory)

    def _in_memory(self) -> tuple[bytes, bytes] | None:
        """The present states as bytes; None if they cannot be told."""
        if self._python is None or self._numpy is None or self._generator.gauss_next is not None:
            return None
        if self._numpy[0] is not np.random.get_bit_generator():  # type: ignore[attr-defined]
            return None
        return self._python.tobytes(), self._numpy[1].tobytes()

    def _set(self, streams: Streams) -> np.ndarray:
        """Set the states, and return the words of the stream."""
        seed, path, function, step, replica = streams.place
        source = seed, path, function, replica
        if self._source != source:  # in few runs
            self._state["state"] = streams.beginning(Purpose.STATES)
            self._source = source
        self._state["state"]["counter"][_STEP] = step
        self._philox.state = self._state
        words = self._philox.random_raw(_WORDS + 2)
        halves = words.view(np.uint32)
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if self._numpy is None or self._numpy[0] is not bits:
            self._numpy = (bits, _words_of_numpy(bits)) if type(bits) is np.random.MT19937 else None
        np.random.set_bit_generator(bits)  # type: ignore[attr-defined]  # forgets the second number of a pair
        if self._numpy is None:
            np.random.seed(words[:4].tolist())
        else:
            self._numpy[1][:_WORDS] = halves[:_WORDS]
            self._numpy[1][_WORDS] = _WORDS
        python = halves[_WORDS : 2 * _WORDS]
        if self._python is None:
            random.setstate((3, (*python.tolist(), _WORDS), None))
        else:
            self._python[0] = _WORDS
            self._python[1:] = python
            self._generator.gauss_next = None  # the second number of a normal pair
        return words


def _words_of(generator: Any) -> np.ndarray | None:
    """The state of ``random``'s generator in memory: the place of the next word, and the words, uint32 [625]. Where
    they lie in such an object is found by a state that is known; None if they do not."""
    known = random.Random()
    known.setstate(_PYTHON)
    memory = ctypes.string_at(id(known), sys.getsizeof(known))
    at = memory.find(np.array((_WORDS, *_PYTHON[1][:-1]), np.uint32).tobytes())
    if at < 0 or type(generator) is not random.Random:
        return None
    return np.ctypeslib.as_array((ctypes.c_uint32 * (1 + _WORDS)).from_address(id(generator) + at))


def _words_of_numpy(bits: Any) -> np.ndarray:
    """The state of NumPy's bit generator in memory: the words, and the place of the next one, uint32 [625]."""
    return np.ctypeslib.as_array((ctypes.c_uint32 * (_WORDS + 1)).from_address(bits.ctypes.state_address))


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
