"""The state of an optimizer as optax's pytree of states, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from cs_proto.errors import InvalidArgumentError

from .optimizer import Optimizer, as_optimizer
from .trees import Leaves

__all__ = ["load_state", "state"]


def state(optimizer: Optimizer, tree: Any) -> Any:
    """The state of ``optimizer`` as optax keeps it: what ``init`` of the same optimizer of optax returns, with the
    numbers of now. A training goes on in optax with it.

    Args:
        optimizer: An optimizer of ``csj.optim``.
        tree: The tree that it trains. Leaves that are not trained count as None.

    Returns:
        optax's named tuples with JAX arrays, which are copies. Slots have the dtype of the variable: float32 also for
        leaves of bfloat16.

    Raises:
        ModuleNotFoundError: optax is not installed.
        InvalidArgumentError: The tree is none of :func:`centralize <central_storage.jax.centralize>`, or a part of the
            one that the optimizer trains, or the optimizer has counted its variables differently (a ValueError).
        TypeError: The optimizer is none of ``csj.optim``.

    Examples:
        >>> import jax.numpy as jnp
        >>> import central_storage as cs, central_storage.jax as csj
        >>> def count(model, optimizer):
        ...     return csj.state(optimizer, model)[0].count  # needs optax
    """
    leaves = Leaves(tree, "csj.state")
    if as_optimizer(optimizer, "csj.state").record.trains_part_of(leaves):
        raise InvalidArgumentError(
            f"csj.state: {optimizer!r} trains variables of this tree as parts of another one, and has one state for "
            "each tree: pass the tree that csj.step was given"
        )
    exchange = _Exchange(optimizer, leaves)
    return jax.tree_util.tree_map_with_path(exchange.read, exchange.template)


def load_state(optimizer: Optimizer, tree: Any, state: Any) -> None:
    """Set the state of ``optimizer`` from one of optax. Everything is checked before the first number is set.

    Args:
        optimizer: An optimizer of ``csj.optim``.
        tree: The tree that it trains.
        state: What the same optimizer of optax, or :func:`state`, returned for a tree of this structure.

    Raises:
        ModuleNotFoundError: optax is not installed.
        InvalidArgumentError: The state has another structure, or an array of another shape, or the tree is none of
            :func:`centralize <central_storage.jax.centralize>` (a ValueError).
        TypeError: The optimizer is none of ``csj.optim``.

    Examples:
        >>> import central_storage.jax as csj
        >>> def resume(model, optimizer, opt_state):
        ...     csj.load_state(optimizer, model, opt_state)  # needs optax
    """
    leaves = Leaves(tree, "csj.load_state")
    exchange = _Exchange(as_optimizer(optimizer, "csj.load_state"), leaves)
    wanted, given = jax.tree.structure(exchange.template), jax.tree.structure(state)
    if wanted != given:
        raise InvalidArgumentError(
            f"csj.load_state: the state of {optimizer!r} has the structure {wanted}, not {given}"
        )
    for path, target, value in exchange.pairs(state):
        if np.shape(value) != target.shape:
            raise InvalidArgumentError(
                f"csj.load_state: {jax.tree_util.keystr(path)} has shape {np.shape(value)}, and needs {target.shape}"
            )
    for path, _, value in exchange.pairs(state):
        exchange.write(path, value)


class _Exchange:
    """The numbers of an optimizer by their paths in the state of optax.

    In a path, the first attribute that is no part of a chain names a slot or a count; the rest leads to the leaf.
    """

    def __init__(self, optimizer: Optimizer, leaves: Leaves) -> None:
        transformation = optimizer.record.transformation(leaves)
        import optax  # late, as in transformation

        arrays = [jax.ShapeDtypeStruct(variable.shape, variable.dtype) for variable in leaves.trained]
        self.template: Any = jax.eval_shape(transformation.init, leaves.of_trained(arrays))
        nodes, _ = jax.tree_util.tree_flatten_with_path(self.template, is_leaf=_is_of(optax.ScaleByScheduleState))
        self._schedules = {path for path, node in nodes if isinstance(node, optax.ScaleByScheduleState)}
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(leaves.of_trained(arrays))[0]]
        groups, _ = optimizer.record.bind(leaves)
        self._groups = [(central, [leaves.trained[place] for place in places]) for central, places in groups]
        self._owners = {
            paths[place]: (central, leaves.trained[place]) for central, places in groups for place in places
        }

    def pairs(self, state: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Path, target and value of every number of a state."""
        targets, _ = jax.tree_util.tree_flatten_with_path(self.template)
        for (path, target), value in zip(targets, jax.tree.leaves(state), strict=True):
            yield path, target, value

    def read(self, path: tuple[Any, ...], target: Any) -> Any:
        """The present number at a path."""
        name, rest = self._split(path)
        if name == "count":
            return jax.numpy.asarray(self._count(path), target.dtype)
        central, variable = self._owners[rest]
        return jax.device_put(central.get_slot(variable, name).numpy())

    def write(self, path: tuple[Any, ...], value: Any) -> None:
        """Set the number at a path."""
        name, rest = self._split(path)
        if name != "count":
            central, variable = self._owners[rest]
            central.get_slot(variable, name).assign(np.asarray(value).astype(variable.dtype))
            return
        for central, variables in self._groups:
            if path[:-1] not in self._schedules:
                central.set_steps(dict.fromkeys(variables, int(value)))
            if path[:-1] in self._schedules or not self._schedules:
                central.iterations = int(value)

    def _split(self, path: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        """The name of a slot, or "count", and the path of the leaf."""
        names = {"count", *(name for central, _ in self._groups for name in central.slot_names)}
        for place, key in enumerate(path):
            name = getattr(key, "name", None)
            if name in names:
                return name, path[place + 1 :]
        raise InvalidArgumentError(f"{jax.tree_util.keystr(path)} of optax's state has no counterpart in the server")

    def _count(self, path: tuple[Any, ...]) -> int:
        if path[:-1] in self._schedules:
            return max(int(central.iterations) for central, _ in self._groups)
        counts = {count for central, variables in self._groups for count in central.steps_of(variables)}
        if len(counts) > 1:
            raise InvalidArgumentError(
                f"the optimizer has made {sorted(counts)} updates of the variables of this tree, and optax's state has "
                "one count for all"
            )
        return counts.pop()


def _is_of(kind: type) -> Callable[[Any], bool]:
    return lambda node: isinstance(node, kind)
