"""What all optimizers share: hyperparameters kept in the server, and ``apply_gradients`` in a replica."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from central_storage.context import call_site, current_replica, get_replica_context, get_strategy, has_strategy
from central_storage.handles import Handle
from central_storage.values import IndexedSlices, convert_to_tensor
from central_storage.variable import Variable, constraints_after
from cs_proto.errors import ContextError, InvalidArgumentError
from cs_proto.messages import Optimizer as OptimizerRecord

if TYPE_CHECKING:
    from central_storage.backend import Strategy


class Optimizer(Handle):
    """Base of the optimizers. The server sums the replicas' gradients in replica order, then applies the rule once.

    Made under ``strategy.scope()`` it belongs to that strategy; made outside every scope, to the first strategy whose
    ``run`` takes it along. Hyperparameters are changed in the client only.
    """

    #: The name of the rule in the server's table.
    kind: ClassVar[str]

    def __init__(self, name: str | None, **hyperparameters: float | bool) -> None:
        self.name = name or self.kind
        self._strategy: Strategy | None = None
        self._number = 0
        self._hyperparameters = {key: _number(self.kind, key, value) for key, value in hyperparameters.items()}
        if has_strategy():
            self.adopt(get_strategy())

    @classmethod
    def from_record(cls, strategy: Strategy, record: OptimizerRecord) -> Self:
        """The handle of an optimizer that the server already has."""
        self = cls.__new__(cls)
        self.name = cls.kind
        self._strategy = strategy
        self._number = record.number
        self._hyperparameters = dict(record.hyperparameters)
        return self

    def adopt(self, strategy: Strategy) -> None:
        """Become an optimizer of ``strategy``. Raises ContextError (a RuntimeError) where it belongs to another."""
        if self._strategy is strategy:
            return
        if self._strategy is not None:
            raise ContextError(f"optimizer {self.name} belongs to another strategy; make one for each")
        self._number = strategy.controller.configure(0, self.kind, self._hyperparameters).number
        self._strategy = strategy
        strategy.remember(self)

    def _cs_handle(self) -> tuple[str, int]:
        return ("optimizer", self._number)

    @property
    def learning_rate(self) -> float:
        """The learning rate; assignable in the client at any step."""
        return self._get("learning_rate")

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._set("learning_rate", value)

    @property
    def iterations(self) -> int:
        """How many apply_gradients have been committed; one a call, whatever the number of replicas."""
        return self._record().iterations if self._strategy is not None else 0

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> None:
        """Bring this replica's gradients: summed over the replicas, then one step of the rule for every variable.

        Only inside a replica function. Pairs whose gradient is None are dropped; none left is a ValueError. A gradient
        has its variable's shape and dtype, else InvalidArgumentError (a ValueError). Gradients that were computed into
        ``gradient_buffers`` are not copied. A variable's ``constraint`` is applied after the update, by replica 0,
        which commits; with a sparse gradient it is a RuntimeError. Averaging is the caller's business: divide the loss
        by the global batch.
        """
        if not experimental_aggregate_gradients:
            raise NotImplementedError(
                "experimental_aggregate_gradients=False is not served: gradients are always summed"
            )
        context = get_replica_context()
        if context is None or not has_strategy():
            raise ContextError("apply_gradients must be called inside a replica function (strategy.run)")
        strategy = get_strategy()
        if self._strategy is not strategy:
            raise ContextError(f"optimizer {self.name} belongs to another strategy")
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
        if not pairs:
            raise ValueError(f"{self.name}.apply_gradients: every gradient is None, so nothing is left to apply")
        numbers = [self._checked(variable) for _, variable in pairs]
        constrain = constraints_after(pairs)
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"{self.name}.apply_gradients: a variable appears twice; add its gradients first")
        context.backend.apply(
            self._number,
            [(_fitting(gradient, variable), variable.number) for gradient, variable in pairs],
            call_site(),
        )
        if constrain is not None:
            context.merge_call(constrain)

    def get_config(self) -> dict[str, float]:
        """The hyperparameters by name."""
        return {"name": self.name, **self._hyperparameters}  # type: ignore[dict-item]

    def __repr__(self) -> str:
        numbers = ", ".join(f"{key}={value:g}" for key, value in self._hyperparameters.items())
        return f"<{self.kind} {numbers}>"

    def _checked(self, variable: object) -> int:
        if not isinstance(variable, Variable):
            raise TypeError(
                f"{self.name}.apply_gradients takes (gradient, Variable) pairs, not {type(variable).__name__}"
            )
        if variable.strategy is not self._strategy:
            raise ContextError(f"variable {variable.name} belongs to another strategy than optimizer {self.name}")
        return variable.number

    def _record(self) -> OptimizerRecord:
        assert self._strategy is not None
        backend = current_replica(self._strategy) or self._strategy.controller
        return backend.optimizer(self._number)

    def _get(self, key: str) -> float:
        if self._strategy is None:
            return self._hyperparameters[key]
        return dict(self._record().hyperparameters)[key]

    def _set(self, key: str, value: float) -> None:
        if get_replica_context() is not None and has_strategy():
            raise ContextError(f"{key} is set in the client, between runs, not inside a replica")
        changed = {**self._hyperparameters, key: _number(self.kind, key, value)}
        if self._strategy is not None:
            self._strategy.controller.configure(self._number, self.kind, changed)
        self._hyperparameters = changed


def _number(kind: str, key: str, value: object) -> float:
    if isinstance(value, (bool, int, float, np.number)) and math.isfinite(value):
        return float(value)
    remedy = "; schedules are not served by this version: assign it before each run" if callable(value) else ""
    raise InvalidArgumentError(f"{kind}: {key} must be a finite number, not {value!r}{remedy}")


def _fitting(gradient: Any, variable: Variable) -> np.ndarray:
    if isinstance(gradient, IndexedSlices):
        raise NotImplementedError(
            f"the gradient of {variable.name} is an IndexedSlices; sparse gradients are not served by this version"
        )
    array = convert_to_tensor(gradient)
    if array.shape != variable.shape:
        raise InvalidArgumentError(
            f"the gradient of {variable.name} has shape {array.shape}, but the variable has shape {variable.shape}"
        )
    if array.dtype != variable.dtype:
        raise InvalidArgumentError(
            f"the gradient of {variable.name} has dtype {array.dtype}, the variable {variable.dtype}; convert it with "
            f"astype('{variable.dtype}'), or make what it is computed from {variable.dtype}"
        )
    return array
