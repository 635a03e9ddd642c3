"""What a loss may do while JAX traces it: draw keys, but read nothing that would become a constant."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, NoReturn, Self

import jax
import numpy as np
from jax.extend.core import get_opaque_trace_state

from central_storage import random
from central_storage.core.backends import ReplicaBackend
from central_storage.core.context import current_replica, enter_replica, get_strategy, streams_here
from central_storage.core.random_streams import Purpose
from cs_proto.errors import ContextError

from .trees import refuse_in_trace

__all__ = ["Tracing", "draw_words", "key"]


class _Here(threading.local):
    tracing: Tracing | None = None


_here = _Here()


def key() -> Any:
    """A random key of this replica in this step, which follows from the strategy's seed, the function, the step and
    the replica; the same bits when a step is repeated after the death of a worker.

    Every call in one step gives another key. Call it in the loss of :func:`step`, or in a replica function outside of
    ``jax.jit``. In the loss, call it outside of nested ``jit``, ``vmap``, ``scan`` and ``checkpoint``, and pass the key
    in, because JAX may trace the body of these once for several uses.

    Returns:
        A key of shape () for JAX's implementation ``threefry2x32``.

    Raises:
        ContextError: Called outside a function that a strategy runs, or in a nested function that JAX traces (a
            RuntimeError).

    Examples:
        >>> import jax
        >>> import central_storage as cs, central_storage.jax as csj
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], seed=1, in_process=True) as strategy:
        ...     draws = strategy.run(lambda: float(jax.random.normal(csj.key())))
        ...     len(set(strategy.experimental_local_results(draws)))
        2
    """
    if _here.tracing is not None:
        return _here.tracing.key()
    refuse_in_trace("csj.key")
    return random.jax_key()


def draw_words() -> np.ndarray:
    """In a replica: the words of the next key, uint32 [2]."""
    streams = streams_here()
    assert streams is not None
    return streams.words(Purpose.JAX, None, 1).view(np.uint32)


class Tracing:
    """The context in which a loss is traced. ``words`` are those of the key from which all its keys are made: an
    argument of the compiled function, so that every step has others."""

    def __init__(self, loss: str, words: Any) -> None:
        self._loss = loss
        self._words = words
        self._drawn = 0

    def __enter__(self) -> Self:
        strategy = get_strategy()
        backend = current_replica(strategy)
        assert backend is not None
        refusing: Any = _Refusing(self._loss, backend)
        streams: Any = _NoStreams(self._loss)
        self._replica = enter_replica(strategy, refusing, streams)
        self._replica.__enter__()
        self._state, self._outer, _here.tracing = get_opaque_trace_state(), _here.tracing, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _here.tracing = self._outer
        self._replica.__exit__(kind, error, traceback)

    def key(self) -> Any:
        """The next key. Raises ContextError in a nested function that JAX traces."""
        if get_opaque_trace_state() != self._state:
            raise ContextError(
                f"csj.key() was called in a nested jit, vmap, scan, grad or checkpoint of the loss {self._loss}, whose "
                "body JAX may trace once for several uses: call it in the loss itself and pass the key in"
            )
        self._drawn += 1
        return jax.random.fold_in(jax.random.wrap_key_data(self._words, impl="threefry2x32"), self._drawn)


class _Refusing:
    """The backend of a replica whose function JAX traces: it says where the replica is, and refuses the rest."""

    def __init__(self, loss: str, backend: ReplicaBackend) -> None:
        self._loss = loss
        self._backend = backend
        self.replica, self.replicas, self.devices = backend.replica, backend.replicas, backend.devices

    def array_module(self) -> Any:
        """As the backend's."""
        return self._backend.array_module()

    def variable(self, number: int) -> Any:
        """As the backend's."""
        return self._backend.variable(number)

    def view(self, number: int) -> NoReturn:
        """Refuse to read a variable."""
        name = self._backend.variable(number).spec.name
        raise ContextError(
            f"variable {name} is read in the loss {self._loss}, which JAX traces: its present value would stay in the "
            "compiled function. Put the variable into the tree of csj.step; the loss gets that tree as arrays"
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise ContextError(
            f"{name} is used in the loss {self._loss}, which JAX traces once for many steps: the loss computes from "
            "its arguments alone; do this in a replica function of your own"
        )


class _NoStreams:
    """The random streams of a traced function."""

    def __init__(self, loss: str) -> None:
        self._loss = loss

    def __getattr__(self, name: str) -> NoReturn:
        raise ContextError(
            f"cs.random is used in the loss {self._loss}, which JAX traces: its numbers would stay in the compiled "
            "function; draw with jax.random and csj.key()"
        )
