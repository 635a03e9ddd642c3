"""A step of training from a loss: gradients by JAX in every replica, and one update by the server."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from central_storage.core.context import get_array_module
from central_storage.core.options import RunOptions
from central_storage.core.public_objects import Closed
from central_storage.core.values import DistributedValues, PerReplica, local_results, regroup, select_replicas
from central_storage.data.arguments import can_take
from central_storage.data.distributed import DistributedDataset, DistributedFromFunction, DistributedIterator
from central_storage.data.splitting import plain_array, split
from central_storage.data.weighted import Weighted, is_weighted, share_of, weighted, weights_of
from central_storage.pickling.function import function
from central_storage.strategy.run_steps import LOOKAHEAD, steps_of
from central_storage.strategy.step_bar import known, with_bar
from central_storage.variables.gradient_buffers import gradient_buffers
from cs_proto.errors import InvalidArgumentError
from cs_proto.printable import counted

from .batches import batches
from .optimizer import Optimizer, apply, as_optimizer
from .tracing import Tracing, draw_words
from .trees import Leaves, refuse_changed

__all__ = ["Step", "step"]

#: The settings of JAX that change what a function computes, and their contexts: workers compute with the script's.
_SETTINGS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_numpy_rank_promotion": jax.numpy_rank_promotion,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
    "jax_disable_jit": jax.disable_jit,
}
_KEEP = RunOptions(keep_per_replica=True)


def step(tree: Any, optimizer: Optimizer, has_aux: bool = False) -> Callable[[Callable[..., Any]], Step]:
    """Decorate ``loss(tree, *share)``, and get a step of training.

    Every replica calls ``jit(value_and_grad(loss))`` with the tree as arrays, which lie in the server's memory, and
    with its share of the global batch. The trained loss is the mean over the rows of the global batch, whatever the
    shares; so the loss of a share must be a mean over its rows. For an empty share nothing is computed. JAX traces the
    loss once for each shape of a share. The loss computes from its arguments alone, and draws with :func:`key`.

    Args:
        tree: What :func:`centralize` returned. Its constants (numbers, functions) are those of now.
        optimizer: One of ``csj.optim``. Several steps may share it: those of one tree share a state, and another tree
            has a state and a count of updates of its own, as in optax.
        has_aux: Whether the loss returns a pair ``(loss, aux)``, where ``aux`` is a nest of arrays.

    Returns:
        A decorator, which makes a :class:`Step`.

    Raises:
        InvalidArgumentError: The tree has a leaf that was not centralized, or of another strategy, or nothing that is
            trained; or the optimizer does not fit it (a ValueError).
        TypeError: ``optimizer`` is none of ``csj.optim``, such as one of optax itself.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> import central_storage as cs, central_storage.jax as csj
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     with strategy.scope():
        ...         model = csj.centralize({"w": jnp.zeros(2)})
        ...
        ...     @csj.step(model, csj.optim.sgd(0.5))
        ...     def train(model, x, y):
        ...         return jnp.mean((x @ model["w"] - y) ** 2)
        ...
        ...     x, y = np.eye(2, dtype=np.float32), np.float32([1, 2])
        ...     print(train((x, y)), csj.read(model)["w"])
        2.5 [0.5 1. ]
    """
    leaves = Leaves(tree, "csj.step")
    chosen = as_optimizer(optimizer, "csj.step")

    def decorate(loss: Callable[..., Any]) -> Step:
        return Step(loss, leaves, chosen, has_aux)

    return decorate


class Step(Closed):
    """A step of training; :func:`step` makes one.

    Called with a global batch, it trains on it. :meth:`ahead` does so with every batch of a data set, and sends steps
    before the loop has the earlier results.

    Examples:
        >>> import jax.numpy as jnp, numpy as np
        >>> import central_storage as cs, central_storage.jax as csj
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     with strategy.scope():
        ...         model = csj.centralize({"w": jnp.ones(())})
        ...     train: csj.Step = csj.step(model, csj.optim.sgd(0.5))(lambda model, x: model["w"] ** 2 * x.mean())
        ...     print(list(train.ahead(csj.batches(strategy, [np.ones(4, np.float32)] * 3))))
        [1.0, 0.0, 0.0]
    """

    def __init__(self, loss: Callable[..., Any], leaves: Leaves, optimizer: Optimizer, has_aux: bool) -> None:
        if not callable(loss):
            raise TypeError(f"csj.step decorates a function loss(tree, *share), not {loss!r:.100}")
        functools.update_wrapper(self, loss)
        self._name = _name(loss)
        self._strategy = leaves.strategy
        self._rule = optimizer.record
        self._has_aux = has_aux
        self._groups = groups = optimizer.record.bind(leaves)
        program = Program()
        settings = {name: getattr(jax.config, name) for name in _SETTINGS}

        @functools.wraps(loss)
        def replica(share: tuple[Any, Any]) -> Any:
            with ExitStack() as contexts:
                for name, value in settings.items():
                    if getattr(jax.config, name) != value:
                        contexts.enter_context(_SETTINGS[name](value))
                return _train(program, loss, leaves, groups, has_aux, share)

        self._replica = function(replica)

    def __call__(self, *batch: Any) -> Any:
        """Train on a global batch.

        Args:
            *batch: An element of :func:`batches`; or a nest of arrays, whose rows all count the same, given whole or as
                its parts; or an element of another distributed data set.

        Returns:
            The mean loss of the global batch before the update, a float. With ``has_aux`` a pair of it and the nest of
            ``aux``, where every leaf is a ``cs.PerReplica`` of NumPy arrays, one for each replica that had rows.

        Raises:
            FloatingPointError: The loss of a replica is not finite. Nothing has changed.
            InvalidArgumentError: The loss is not a real scalar, or does not depend on the tree; or the batch has no
                rows (a ValueError).
            Exception: As ``strategy.run``.
        """
        element = self._element(batch[0] if len(batch) == 1 else batch)
        self._rule.push(self._groups)
        return self._outcome(self._strategy.run(self._replica, args=(tuple(element),), options=_KEEP))

    def ahead(
        self, batches: Any, steps: int | None = None, *, lookahead: int = LOOKAHEAD, progress: bool | str = False
    ) -> Iterator[Any]:
        """The results of the steps with every batch, the same bits as one call after the other, with steps sent ahead.

        A learning rate that the loop sets takes effect after the steps in flight; a schedule of the optimizer is right
        for every step.

        Args:
            batches: What :func:`csj.batches <batches>` returned, an iterator of it, or what that function takes.
            steps: The largest number of batches; None: all.
            lookahead: The number of steps sent ahead, as for ``strategy.run_steps``.
            progress: Whether a bar shows the steps and their loss, as for ``strategy.run_steps``.

        Returns:
            An iterator over what :meth:`__call__` returns.

        Raises:
            InvalidArgumentError: ``batches`` is a distributed data set that :func:`csj.batches <batches>` did not make
                (a ValueError).
            Exception: As ``strategy.run_steps``, and while it is iterated, as :meth:`__call__`.
        """
        data = batches
        if isinstance(data, DistributedDataset | DistributedFromFunction | DistributedIterator):
            if not is_weighted(data):
                raise InvalidArgumentError(
                    "step.ahead takes what csj.batches(strategy, data) returned, because the rows of its batches have "
                    "weights; this data set has none"
                )
        else:
            data = _batches(self._strategy, data)
        return with_bar(self._outcomes(data, steps, lookahead), progress, known(steps_of(data, steps), steps))

    def _outcomes(self, data: Any, steps: int | None, lookahead: int) -> Iterator[Any]:
        with (
            self._rule.ahead(self._groups) as rates,
            self._strategy.run_steps(
                self._replica, data, steps, lookahead=lookahead, options=_KEEP, rates=rates
            ) as results,
        ):
            for result in results:
                yield self._outcome(result)

    def _element(self, batch: Any) -> Weighted:
        n = self._strategy.num_replicas_in_sync
        if isinstance(batch, Weighted):
            replicas = len(batch.weights.values) if isinstance(batch.weights, DistributedValues) else 1
            if replicas != n:
                raise InvalidArgumentError(
                    f"the batch is split over {replicas} replica(s), and the strategy of the model has {n}: call "
                    "csj.batches with that strategy"
                )
            return batch
        leaves = jax.tree.leaves(batch, is_leaf=lambda leaf: isinstance(leaf, DistributedValues))
        if not any(isinstance(leaf, DistributedValues) for leaf in leaves):
            element: Weighted = split(weighted(batch), n)
            return element
        return Weighted(batch, PerReplica(weights_of(select_replicas(n, batch))))

    def _outcome(self, result: Any) -> Any:
        shares = local_results(result, self._strategy.num_replicas_in_sync)
        mean = math.fsum(share * loss for share, loss, _ in shares)
        if not self._has_aux:
            return mean
        return mean, regroup([aux.values[0] for share, _, aux in shares if share], always_wrap=True)

    def __repr__(self) -> str:
        return f"<csj.step of {self._name}>"


_batches = batches


class Program:
    """What a process keeps of a step between its runs: the compiled function. It travels empty."""

    def __init__(self) -> None:
        self._compiled: Callable[..., Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Program, ()

    def compiled(self, loss: Callable[..., Any], leaves: Leaves, has_aux: bool) -> Callable[..., Any]:
        """``jit(value_and_grad)`` of the loss: a function of the trained arrays, the other variables' arrays, the words
        of a key, and the share. It gives ((loss, aux), gradients)."""
        if self._compiled is None:

            def forward(trained: list[Any], fixed: list[Any], words: Any, rows: Any) -> tuple[Any, Any]:
                whole = type(rows) not in (tuple, list) or not can_take(loss, 1 + len(rows))
                tree = leaves.tree(trained, fixed)
                before = jax.tree.leaves(tree)
                with Tracing(_name(loss), words):
                    given = loss(tree, *([rows] if whole else rows))
                refuse_changed(tree, before, _name(loss))
                value, aux = _pair(given, loss) if has_aux else (given, None)
                _check(value, trained[0], loss)
                return value, aux

            self._compiled = jax.jit(jax.value_and_grad(forward, has_aux=True))
        return self._compiled


def _train(
    program: Program, loss: Callable[..., Any], leaves: Leaves, groups: Any, has_aux: bool, share: tuple[Any, Any]
) -> tuple[float, float, PerReplica]:
    """In a replica: compute the loss and its gradients, and take the step. What the share counts, its loss, its aux."""
    rows, weights = share
    weight = share_of(weights)
    buffers = gradient_buffers(leaves.trained)  # with a weight of 0 their content does not count
    value, aux = 0.0, None
    if weight:
        compute = program.compiled(loss, leaves, has_aux)
        (loss_value, aux), gradients = compute(*leaves.arrays(), draw_words(), _operands(rows))
        value = float(loss_value)
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the loss {_name(loss)} is {value} for a share of {counted(len(weights), 'row')}; the step has "
                "changed nothing"
            )
        for buffer, gradient in zip(buffers, gradients, strict=True):
            _put(buffer, gradient)
        aux = jax.tree.map(_as_data, aux)
    apply(groups, buffers, leaves.trained, weight)
    return weight, value, PerReplica([aux])


def _operands(rows: Any) -> Any:
    """A share as JAX takes it: on a GPU its leaves are arrays of CuPy, which JAX reads where they lie."""
    return jax.tree.map(plain_array if get_array_module() is np else _of_cupy, rows)


def _of_cupy(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | jax.Array) or not hasattr(leaf, "__dlpack__"):
        return leaf
    narrowed = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)
    return jax.dlpack.from_dlpack(get_array_module().ascontiguousarray(narrowed))


def _put(buffer: Any, gradient: jax.Array) -> None:
    """Copy a gradient to its buffer. It waits until JAX has computed, so nothing reads the parameters afterwards."""
    if isinstance(buffer, np.ndarray):
        np.copyto(buffer, gradient)
    else:  # of CuPy
        computed = jax.block_until_ready(gradient.astype(buffer.dtype))
        buffer[...] = get_array_module().from_dlpack(computed)


def _as_data(leaf: Any) -> np.ndarray:
    """A leaf of aux as an array that can travel: floats narrower than 32 bits as float32."""
    array = np.array(leaf)  # a copy: it may be a parameter, which lies where the server writes
    return array.astype(np.float32) if jnp.issubdtype(array.dtype, jnp.floating) and array.itemsize < 4 else array


def _pair(given: Any, loss: Callable[..., Any]) -> tuple[Any, Any]:
    if not isinstance(given, tuple) or len(given) != 2:
        raise InvalidArgumentError(
            f"the loss {_name(loss)} must return a pair (loss, aux), because of has_aux=True, not {given!r:.200}"
        )
    return given


def _check(value: Any, trained: Any, loss: Callable[..., Any]) -> None:
    """Raise InvalidArgumentError where a loss is no real scalar or does not depend on the arrays, of which ``trained``
    is one. Both are tracers of the derivative then, and what is constant for it is not."""
    if isinstance(value, tuple):
        raise InvalidArgumentError(
            f"the loss {_name(loss)} returns a tuple; for a pair (loss, aux) use csj.step(..., has_aux=True)"
        )
    if not isinstance(value, jax.Array | np.ndarray | np.generic | float | int):
        raise InvalidArgumentError(f"the loss {_name(loss)} must return a scalar, not {value!r:.200}")
    if jnp.shape(value) != () or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise InvalidArgumentError(
            f"the loss {_name(loss)} must be one real number, the mean over the rows of its share, not an array of "
            f"shape {jnp.shape(value)} and dtype {jnp.result_type(value)}"
        )
    if not isinstance(value, type(trained)):
        raise InvalidArgumentError(
            f"the loss {_name(loss)} does not depend on the tree that it gets, so nothing would be trained: compute it "
            "from the first argument"
        )


def _name(loss: Callable[..., Any]) -> str:
    return getattr(loss, "__name__", type(loss).__name__)
