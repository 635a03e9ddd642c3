"""Random numbers of the device: a state for each, which is not the host's."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from . import _arrays, _machine

_states: dict[int, RandomState] = {}


class RandomState:
    """The generator of one device."""

    def __init__(self, seed: int | None = None) -> None:
        _machine.gpu()
        self._host = np.random.RandomState(None if seed is None else seed % 2**32)

    def seed(self, seed: int | None = None) -> None:
        self._host.seed(None if seed is None else seed % 2**32)

    def __getattr__(self, name: str) -> Any:
        draw = getattr(self._host, name)

        def on_device(*args: Any, dtype: Any = None, **kwargs: Any) -> Any:
            drawn = np.asarray(draw(*args, **kwargs))
            return _arrays.array(drawn if dtype is None else drawn.astype(dtype))

        return on_device


class Philox4x3210:
    """The bits of a generator of the current device. As CuPy's, it makes 32 bits of the seed."""

    def __init__(self, seed: int | None = None, *, size: int = -1) -> None:
        _machine.gpu()
        self.seed = int(np.random.SeedSequence(seed).generate_state(1, np.uint32)[0])


class Generator:
    """The newer interface; the distributions are NumPy's."""

    def __init__(self, bit_generator: Philox4x3210) -> None:
        self.bit_generator = bit_generator
        self._host = np.random.Generator(np.random.Philox(bit_generator.seed))

    def __getattr__(self, name: str) -> Any:
        draw = getattr(self._host, name)

        def on_device(*args: Any, **kwargs: Any) -> Any:
            return _arrays.array(np.asarray(draw(*args, **kwargs)))

        return on_device


def get_random_state() -> RandomState:
    """The state of the current device."""
    device = _machine.gpu().number
    if device not in _states:
        seed = os.environ.get("CUPY_SEED")
        _states[device] = RandomState(None if seed is None else int(seed))
    return _states[device]


def set_random_state(rs: RandomState) -> None:
    """Set the state of the current device."""
    if not isinstance(rs, RandomState):
        raise TypeError(f"Random state must be an instance of RandomState. Actual: {type(rs)}")
    _states[_machine.gpu().number] = rs


def seed(seed: int | None = None) -> None:
    """Seed the state of the current device."""
    get_random_state().seed(seed)


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(get_random_state(), name)
