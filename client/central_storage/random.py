"""Random numbers in replicas, which follow from the strategy's seed, the function, its step and the replica.

A replica function draws the same numbers in every training with the same seed, when it is repeated after a death, and
after a checkpoint is restored. Runs of other functions, such as an evaluation, do not shift its numbers.

Examples:
    >>> import central_storage as cs
    >>> def step():
    ...     return cs.random.generator().random() < 0.5
    >>> with cs.CentralStorageStrategy(seed=1, in_process=True) as strategy:
    ...     kept = [strategy.run(step) for _ in range(3)]
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from cs_proto.errors import ContextError, InvalidArgumentError

from .core import context
from .core.random_streams import Purpose, Streams
from .diagnostics.tensorflow_names import attributes

__all__ = ["generator", "jax_key"]

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, "tf.random")


def generator(step: int | None = None) -> np.random.Generator:
    """The random generator of this replica in this step: a ``numpy.random.Generator`` over Philox, or CuPy's in a
    replica on a GPU.

    Its numbers follow from the strategy's seed, the function that ``run`` was given, the step and the replica. The step
    of a run is the number of earlier runs of its function in this service, continued from the checkpoint that was
    restored. A function is known by its module and qualified name.

    A second call in the same run gives the same object: its stream goes on, and no number comes twice.

    Args:
        step: The step whose numbers are wanted, from 0 to 2**64 - 1, such as ``optimizer.iterations``. None is the step
            of this run. Every step has a generator of its own, which begins again in each run.

    Raises:
        ContextError: Called outside a function that a strategy runs (a RuntimeError). In the script, use
            ``numpy.random.default_rng(seed)``.
        TypeError: ``step`` is no integer.
        InvalidArgumentError: ``step`` is out of range (a ValueError).

    Examples:
        >>> import numpy as np
        >>> import central_storage as cs
        >>> def dropout(x, rate=0.5):
        ...     kept = cs.random.generator().random(x.shape) >= rate
        ...     return np.where(kept, x / (1 - rate), 0)
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     first = strategy.run(dropout, (np.ones(50),))
        ...     masks = strategy.experimental_local_results(first)
        ...     print(bool((masks[0] == masks[1]).all()))
        False
    """
    made: np.random.Generator = _streams("generator").generator(_checked(step))
    return made


def jax_key(step: int | None = None) -> Any:
    """A key for ``jax.random``, which follows from the same numbers as :func:`generator`.

    Every call in one run gives another key. Call it outside of what ``jax.jit`` traces, and hand the key over as an
    argument: a traced function is called once, and would keep its first key. Only this function imports JAX.

    Args:
        step: As for :func:`generator`.

    Returns:
        A key of shape () for JAX's implementation ``threefry2x32``.

    Raises:
        ModuleNotFoundError: JAX is not installed.
        ContextError: Called outside a function that a strategy runs (a RuntimeError).
        TypeError: ``step`` is no integer.
        InvalidArgumentError: ``step`` is out of range (a ValueError).

    Examples:
        >>> import central_storage as cs
        >>> def noise():
        ...     import jax
        ...     return jax.random.normal(cs.random.jax_key(), (3,)).tolist()
    """
    import jax

    words = _streams("jax_key").words(Purpose.JAX, _checked(step), 1)
    return jax.random.wrap_key_data(words.view(np.uint32), impl="threefry2x32")


def _streams(name: str) -> Streams:
    streams = context.streams_here()
    if streams is None:
        raise ContextError(
            f"cs.random.{name}() works in a function that a strategy runs, in the thread of that function; elsewhere "
            "(the script, a scope, a merge function), make a generator with numpy.random.default_rng(seed)"
        )
    return streams


def _checked(step: int | None) -> int | None:
    if step is None:
        return None
    number = operator.index(step)
    if not 0 <= number < 1 << 64:
        raise InvalidArgumentError(f"step must be from 0 to 2**64 - 1, not {number}")
    return number
