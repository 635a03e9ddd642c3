"""How often an optimizer has updated each variable."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from central_storage.core.backends import service_of
from central_storage.core.context import get_replica_context, has_strategy
from central_storage.variables.variable import Variable
from cs_proto.arithmetic.optimizers import counts_by_variable
from cs_proto.errors import ContextError, InvalidArgumentError

from .weights import Weights

if TYPE_CHECKING:
    from central_storage.core.backends import ControllerBackend

__all__ = ["Counted"]


class Counted(Weights):
    """Base of :class:`~central_storage.optimizers.Optimizer`: the counts of updates by variable.

    The update rules of torch and optax count the updates of each variable: one that has no gradient in a step keeps its
    count, and with it the correction of its moments. All other optimizers count their own updates.
    """

    #: The name of the optimizer in the table of ``cs_proto.arithmetic.optimizers``.
    kind: str
    #: The counts of a checkpoint that was restored before there was a strategy to hold them.
    _kept_steps: dict[Variable, int]

    @property
    def counts_by_variable(self) -> bool:
        """Whether the rule counts the updates of each variable."""
        return counts_by_variable(self.kind)

    def steps_of(self, variables: Iterable[Variable]) -> list[int]:
        """How often each variable was updated; if the rule does not count that, how often the optimizer made an update.
        In the script only.

        Args:
            variables: Variables of the optimizer's strategy.

        Raises:
            InvalidArgumentError: One of them is not a variable (a ValueError).
            ContextError: Called in a replica (a RuntimeError).

        Examples:
            >>> import numpy as np
            >>> import central_storage as cs
            >>> from central_storage.optimizers import of_kind
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy:
            ...     with strategy.scope():
            ...         a, b, adam = cs.Variable([1.0]), cs.Variable([1.0]), of_kind("torch.Adam", learning_rate=0.1)
            ...     strategy.run(lambda: adam.apply_gradients([(np.ones(1, np.float32), a)]))
            ...     adam.steps_of([a, b])
            [1, 0]
        """
        self._refuse_in_replica("steps_of", "called")
        owned = [self._own(variable) for variable in variables]
        if not self.counts_by_variable:
            return [int(self.iterations)] * len(owned)
        if self._strategy is None:
            return [self._kept_steps.get(variable, 0) for variable in owned]
        found = self._controller.steps_of(self._number)
        return [0 if variable.strategy is None else found.get(variable.number, 0) for variable in owned]

    def set_steps(self, steps: Mapping[Variable, int]) -> None:
        """Set how often variables were updated, as a checkpoint does; their next updates count from there. In the
        script only.

        Args:
            steps: By variable of the optimizer's strategy, a count of at least 0. Other variables keep theirs.

        Raises:
            InvalidArgumentError: A count is negative, or the rule counts by optimizer: assign :attr:`iterations` then
                (a ValueError).
            ContextError: Called in a replica, or a variable belongs to another strategy (a RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> from central_storage.optimizers import of_kind
            >>> with cs.CentralStorageStrategy(in_process=True) as strategy, strategy.scope():
            ...     w, adam = cs.Variable([1.0]), of_kind("torch.Adam", learning_rate=0.1)
            ...     adam.set_steps({w: 7})
            ...     adam.steps_of([w])
            [7]
        """
        self._refuse_in_replica("steps", "set")
        counts = {self._own(variable): operator.index(count) for variable, count in steps.items()}
        wrong = next((count for count in counts.values() if not 0 <= count < 1 << 62), None)
        if wrong is not None:
            raise InvalidArgumentError(f"{self.name}: the count of a variable's updates is at least 0, not {wrong}")
        if not self.counts_by_variable:
            raise InvalidArgumentError(
                f"{self.name} counts its updates for all variables together; assign its iterations"
            )
        if self._strategy is None:
            self._kept_steps |= counts
            return
        for variable in counts:
            variable.adopt(self._strategy, shared=True)
        if counts:
            numbers = {variable.number: count for variable, count in counts.items()}
            self._controller.configure(self._number, self.kind, {}, None, -1, steps=numbers)

    def counted(self) -> list[Variable]:
        """The variables whose counts a checkpoint saves, in the order in which they were made."""
        if not self.counts_by_variable:
            return []
        if self._strategy is None:
            return list(self._kept_steps)
        found = self._controller.steps_of(self._number)
        return [variable for variable in self._strategy.variables if variable.number in found]

    @property
    def _controller(self) -> ControllerBackend:
        assert self._strategy is not None
        return service_of(self._strategy, f"optimizer {self.name}")

    def _own(self, variable: object) -> Variable:
        if not isinstance(variable, Variable):
            raise InvalidArgumentError(
                f"{self.name} updates Variables, not {type(variable).__name__}: pass (gradient, Variable)"
            )
        return variable

    def _refuse_in_replica(self, what: str, done: str = "set") -> None:
        if get_replica_context() is not None and has_strategy():
            raise ContextError(f"{what} can be {done} only in the script, between runs, not in a replica")
