"""Gradients that are added up over several batches before an optimizer applies them."""

from __future__ import annotations

import re
import uuid
import weakref
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from central_storage.core.composites import Composite
from central_storage.core.context import (
    current_replica,
    get_array_module,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica,
    refuse_in_replica,
)
from central_storage.core.tensors.tensor import as_tensor
from central_storage.core.values import IndexedSlices, convert_to_tensor
from central_storage.variables.variable import Variable
from cs_proto.errors import ContextError, InvalidArgumentError
from cs_proto.printable import counted

if TYPE_CHECKING:
    from central_storage.core.backends import ReplicaBackend, Strategy

__all__ = ["GradientAccumulator"]

_Sums = list[Any]


class GradientAccumulator(Composite):
    """Adds up the gradients of several batches, of each replica on its own, until an optimizer applies them.

    Call it in a replica function with a list of gradients, always of the same number and shapes. ``gradients`` are the
    sums so far, for ``apply_gradients``, which adds them over the replicas; then call ``reset()``. To average, divide
    by ``step``.

    The sums lie in variables of the strategy, one row for each replica, so they outlive a worker that dies, and a run
    that is repeated adds nothing twice. The first call makes the variables. One accumulator belongs to one strategy. A
    checkpoint that holds sums can be restored only into a strategy with as many replicas: apply them before you save.

    Args:
        name: The beginning of the names of its variables.

    Raises:
        ContextError: Made in a replica, or used in a second strategy (a RuntimeError).

    Examples:
        >>> import numpy as np
        >>> import central_storage as cs
        >>> with cs.CentralStorageStrategy(["cpu:0", "cpu:1"], in_process=True) as strategy:
        ...     with strategy.scope():
        ...         w, sgd = cs.Variable(np.zeros(2, np.float32)), cs.optimizers.SGD(1.0)
        ...         accumulator = cs.optimizers.GradientAccumulator()
        ...     def step(row):
        ...         accumulator([row])
        ...         if accumulator.step == 2:
        ...             sgd.apply_gradients([(accumulator.gradients[0] / 2, w)])
        ...             accumulator.reset()
        ...     for row in np.float32([[1, 0], [3, 2]]):
        ...         strategy.run(step, (row,))
        ...     print(w.numpy(), accumulator.step)
        [-4. -2.] 0
    """

    def __init__(self, name: str = "GradientAccumulator") -> None:
        refuse_in_replica("an accumulator")
        self._name = name
        self._strategy: Strategy | None = None
        # By position: the sums, a row for each replica. At -1: steps and positions of each replica.
        self._kept: dict[int, Variable] = {}
        self._identity = uuid.uuid4().hex
        self._begin()
        if has_strategy():
            self.adopt(get_strategy())

    def _begin(self) -> None:
        #: The sums of a replica in its present run. Its own writes are not read back: a run that has read its own
        #: writes cannot be repeated.
        self._now: weakref.WeakKeyDictionary[ReplicaBackend, tuple[int, _Sums]] = weakref.WeakKeyDictionary()

    @property
    def name(self) -> str:
        """The beginning of the names of its variables, unique in its strategy."""
        if self._strategy is not None:
            self._strategy.settle_owners()
        return self._name

    def rename(self, name: str) -> None:
        """Take the name that the strategy gives."""
        self._name = name

    @property
    def strategy(self) -> Strategy | None:
        """The strategy it belongs to, if any yet."""
        return self._strategy

    @property
    def step(self) -> int:
        """How many times it was called since the last reset: in a replica by this one, elsewhere by replica 0."""
        return self._here()[0]

    @property
    def gradients(self) -> list[Any]:
        """The sums so far, read-only: in a replica its own, elsewhere those of all replicas together. None where every
        gradient was None."""
        if current_replica(self._strategy) is not None:
            return list(map(as_tensor, self._here()[1]))
        self._find()
        kept = map(self._kept.get, range(self._count(0)))
        return [None if each is None else as_tensor(each.numpy().sum(axis=0)) for each in kept]

    def __call__(self, gradients: Iterable[Any]) -> None:
        """Add the gradients of one batch.

        Args:
            gradients: Arrays, IndexedSlices with a ``dense_shape``, or None, as many and of the same shapes at every
                call, on all replicas alike.

        Raises:
            ContextError: Called outside a replica (a RuntimeError).
            InvalidArgumentError: Their number, a shape or a dtype differs from the first call (a ValueError).

        Examples:
            >>> import central_storage as cs
            >>> accumulator = cs.optimizers.GradientAccumulator()
            >>> cs.get_strategy().run(lambda: accumulator([[1.0, 2.0], None]))
            >>> cs.get_strategy().run(lambda: accumulator([[1.0, 2.0], None]))
            >>> [None if total is None else total.tolist() for total in accumulator.gradients]
            [[2.0, 4.0], None]
        """
        if get_replica_context() is None or (self._strategy is not None and current_replica(self._strategy) is None):
            raise ContextError(f"{self.name} adds up gradients inside a replica function only (strategy.run)")
        steps, sums = self._here()
        given = [_array(gradient) for gradient in gradients]
        if sums and len(given) != len(sums):
            raise InvalidArgumentError(f"{self.name} adds up {counted(len(sums), 'gradient')}, not {len(given)}")
        totals = sums or [None] * len(given)
        for position, (total, gradient) in enumerate(zip(totals, given, strict=True)):
            fits = total is None or gradient is None
            if not fits and (total.shape != gradient.shape or total.dtype != gradient.dtype):
                raise InvalidArgumentError(
                    f"{self.name}: gradient {position} was {total.dtype}{list(total.shape)}, and is now "
                    f"{gradient.dtype}{list(gradient.shape)}; an accumulator keeps to one set of variables"
                )
        self._make({position: gradient for position, gradient in enumerate(given) if gradient is not None})
        self._write(steps + 1, [_sum(*pair) for pair in zip(totals, given, strict=True)])

    def reset(self) -> None:
        """Set the sums to zero: in a replica its own sums, elsewhere those of all replicas."""
        if current_replica(self._strategy) is not None:
            module = get_array_module()
            self._write(0, [None if total is None else module.zeros_like(total) for total in self._here()[1]])
            return
        self._find()
        for position, kept in self._kept.items():  # the number of gradients stays
            kept.assign(kept.numpy() * [0, 1] if position < 0 else np.zeros(kept.shape, kept.dtype))

    def adopt(self, strategy: Strategy) -> None:
        """Become an accumulator of ``strategy``. Raises ContextError (a RuntimeError) if it belongs to another."""
        if self._strategy is None:
            self._strategy = strategy
            strategy.claim(self, self._name)
            for kept in self._kept.values():
                kept.adopt(strategy, shared=True)
        elif self._strategy is not strategy:
            raise ContextError(f"accumulator {self.name} belongs to another strategy; make one for each")

    def sums(self) -> list[tuple[str, Variable]]:
        """The variables that there are by now, a row for each replica, by their names after the slash."""
        self._find()
        return [(_name_of(position), kept) for position, kept in sorted(self._kept.items())]

    def is_name(self, name: str) -> bool:
        """Whether one of the variables may have that name after the slash."""
        return self.names_of_variables(self.name).fullmatch(f"{self.name}/{name}") is not None

    def start(self, name: str, value: np.ndarray) -> None:
        """Make the variable of that name after the slash, with that value, outside replicas."""
        strategy = self._strategy

        def make() -> Variable:
            return Variable(value, trainable=False, name=f"{self.name}/{name}")

        self._kept[_position_of(name)] = make() if strategy is None else in_cross_replica(strategy, make)

    # --- what is kept -----------------------------------------------------------------------------------------

    def _here(self) -> tuple[int, _Sums]:
        """The steps and the sums of this replica: of its present run, or as they were committed."""
        replica = current_replica(self._strategy)
        if replica is not None and replica in self._now:
            return self._now[replica]
        self._find()
        rank = 0 if replica is None else replica.replica
        kept = map(self._kept.get, range(self._count(rank)))
        found = self._steps(rank), [None if each is None else each.sparse_read([rank])[0] for each in kept]
        if replica is not None:
            self._now[replica] = found
        return found

    def _write(self, steps: int, sums: _Sums) -> None:
        replica = current_replica(self._strategy)
        rank = 0 if replica is None else replica.replica
        for position, row in enumerate([np.array([steps, len(sums)]), *sums], start=-1):
            if row is not None:
                self._kept[position].scatter_update(IndexedSlices(row[None], np.array([rank])))
        for total in sums:
            if isinstance(total, np.ndarray):
                total.flags.writeable = False
        if replica is not None:
            self._now[replica] = steps, sums

    def _make(self, gradients: dict[int, Any]) -> None:
        """Make the variables that are missing; all replicas do so together."""
        if self._kept.keys() >= {-1, *gradients}:
            return
        self._find(anew=True)
        replica = current_replica(self._strategy)
        rows = 1 if replica is None else replica.replicas
        for position, like in {-1: np.zeros(2, np.int64), **gradients}.items():
            if position not in self._kept:
                zeros = np.zeros((rows, *like.shape), like.dtype)
                name = f"{self.name}/{_name_of(position)}"
                self._kept[position] = Variable(zeros, trainable=False, name=name)

    def _steps(self, rank: int) -> int:
        return int(self._kept[-1].numpy()[rank, 0]) if -1 in self._kept else 0

    def _count(self, rank: int) -> int:
        """The number of gradients at a call, those that are None too."""
        return int(self._kept[-1].numpy()[rank, 1]) if -1 in self._kept else 0

    def _find(self, anew: bool = False) -> None:
        """Learn of the variables that replicas have made: they have no way to tell, but the names say it."""
        if self._strategy is None or (-1 in self._kept and not anew):
            return
        pattern = self.names_of_variables(self.name)
        for variable in self._strategy.variables:
            if pattern.fullmatch(variable.name):
                self._kept.setdefault(_position_of(variable.name.rpartition("/")[2]), variable)

    @staticmethod
    def names_of_variables(name: str) -> re.Pattern[str]:
        """The names of the variables of one of this ``name``."""
        return re.compile(rf"{re.escape(name)}/(?:steps|\d+)")

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientAccumulator:
        return self  # its sums are known by its name

    def _cs_key(self) -> tuple[Hashable, ...]:
        return () if self._strategy is None else (id(self._strategy), self._identity)

    def _cs_state(self) -> dict[str, Any]:
        own = {"_name": self.name, "_strategy": self._strategy, "_identity": self._identity}
        return {**own, "_kept": list(self._kept.items())}

    def _cs_update(self, state: dict[str, Any]) -> None:
        known = vars(self).get("_kept", {})  # also those that were found here
        vars(self).update(state, _kept={**known, **dict(state["_kept"])})
        if "_now" not in vars(self):
            self._begin()

    def __repr__(self) -> str:
        return f"<GradientAccumulator {self.name!r}>"


def _name_of(position: int) -> str:
    return "steps" if position < 0 else str(position)


def _position_of(name: str) -> int:
    return -1 if name == "steps" else int(name)


def _array(gradient: Any) -> Any:
    if gradient is None:
        return None
    module = get_array_module()
    if isinstance(gradient, IndexedSlices):
        gradient = gradient.to_dense()
    on_device = module is not np and hasattr(gradient, "__cuda_array_interface__")
    return module.asarray(gradient if on_device else convert_to_tensor(gradient))


def _sum(total: Any, gradient: Any) -> Any:
    """A new array, or None."""
    if total is None or gradient is None:
        return total if gradient is None else gradient.copy()
    return total + gradient
