"""The random streams of a replica: every number follows from (strategy seed, function, step, replica).

A stream is Philox4x64-10 (J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a function from
a key and a counter to four words of 64 bits. Any library can compute it, so it defines the bits here:

- The key is the BLAKE2b digest, 16 bytes, of the text ``seed:function``, as two little-endian words. In a nested run
  the text is ``seed,k,j,...:function``, with the path of the run behind its first number.
- The counter is the words (0, purpose, replica, step), the least significant first. Purposes are in :class:`Purpose`.
- NumPy's ``Philox`` counts before it computes, so the first four words of a stream are those of counter word 0 = 1.

docs/guide/randomness.md says what follows for users. Decision 29 gives the reasons.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np

__all__ = ["Purpose", "Streams", "function_name"]


class Purpose(IntEnum):
    """What the words of a stream are for."""

    #: ``cs.random.generator()``.
    GENERATOR = 0
    #: The states of ``np.random``, ``random``, torch and CuPy at the beginning of the run.
    STATES = 1
    #: Keys of JAX, half a word each way: ``cs.random.jax_key()``.
    JAX = 2


class Streams:
    """The streams of one replica in one run. What is asked for twice goes on, so that no number is given twice."""

    __slots__ = ("_made", "_make", "place")

    def __init__(
        self,
        seed: int,
        function: str,
        step: int,
        replica: int,
        path: tuple[int, ...] = (),
        make: Callable[[np.random.Philox], Any] | None = None,
    ) -> None:
        """``function`` is a :func:`function_name`, ``path`` that of a nested run behind its first number. ``make``
        makes the generator of the replica's device; None: NumPy's."""
        #: What all numbers follow from.
        self.place = seed, path, function, step, replica
        self._make = make
        self._made: dict[tuple[Purpose, int], Any] = {}

    def beginning(self, purpose: Purpose, step: int | None = None) -> dict[str, np.ndarray]:
        """Where the stream of ``purpose`` begins: ``key`` (uint64 [2]) and ``counter`` (uint64 [4]) of Philox. ``step``
        None is the run's own."""
        seed, path, function, own, replica = self.place
        counter = np.array((0, purpose, replica, own if step is None else step), np.uint64)
        return {"counter": counter, "key": _key(seed, path, function)}

    def generator(self, step: int | None) -> Any:
        """The generator of ``step`` on the replica's device."""
        return self._one(Purpose.GENERATOR, step, self._make or np.random.Generator)

    def words(self, purpose: Purpose, step: int | None, count: int) -> np.ndarray:
        """The next ``count`` words of the stream, uint64."""
        words: np.ndarray = self._one(purpose, step, lambda bits: bits).random_raw(count)
        return words

    def _one(self, purpose: Purpose, step: int | None, make: Callable[[np.random.Philox], Any]) -> Any:
        where = (purpose, self.place[3] if step is None else step)
        if where not in self._made:
            self._made[where] = make(np.random.Philox(**self.beginning(*where)))
        return self._made[where]


@functools.lru_cache(256)
def _key(seed: int, path: tuple[int, ...], function: str) -> np.ndarray:
    text = f"{','.join(map(str, (seed, *path)))}:{function}"
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), "<u8")


def function_name(function: Callable[..., Any]) -> str:
    """The module and the qualified name of ``function``: the name under which its runs are counted.

    A ``functools.partial`` has the name of its function, a callable object that of its class. Lambdas of one scope have
    one name. A cell of a notebook that defines a function again defines one of the same name.
    """
    while isinstance(function, functools.partial):
        function = function.func
    named: Any = function
    if not isinstance(getattr(named, "__qualname__", None), str):
        named = type(function)
    module = getattr(named, "__module__", None)
    name = f"{module}.{named.__qualname__}" if isinstance(module, str) else named.__qualname__
    return name if name.isascii() else name.encode(errors="backslashreplace").decode()  # a message holds UTF-8
