"""Exponential moving averages of variables: a shadow beside each, which follows it more slowly."""

from __future__ import annotations

import re
import uuid
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from central_storage.core.composites import Composite
from central_storage.core.context import (
    current_replica,
    get_strategy,
    has_strategy,
    in_cross_replica,
    refuse_in_replica,
)
from central_storage.core.values import VariableAggregation
from cs_proto.errors import ContextError, InvalidArgumentError

from .variable import Variable

if TYPE_CHECKING:
    from central_storage.core.backends import Strategy

__all__ = ["ExponentialMovingAverage"]


class ExponentialMovingAverage(Composite):
    """Keeps for every variable it is applied to an average: ``average -= (1 - decay) (average - value)``.

    The average of ``w`` is a variable named ``w/ExponentialMovingAverage``, which begins as the value of ``w`` when the
    average is first applied to it; a second moving average of a strategy gets a name of its own. One that is made under
    ``strategy.scope()`` belongs to that strategy; one that is made outside every scope, to the first whose ``run``
    takes it along.

    Args:
        decay: A number from 0 to 1, usually near 1.
        num_updates: A number or a variable. The smaller of ``decay`` and ``(1 + num_updates) / (10 + num_updates)``
            counts, so that the average follows faster at first. None: ``decay`` counts.
        name: The end of the names of the averages.

    Raises:
        InvalidArgumentError: ``decay`` is outside [0, 1] (a ValueError).
        ContextError: Made in a replica, or used in a second strategy (a RuntimeError).

    Examples:
        >>> import central_storage as cs
        >>> w, average = cs.Variable(1.0, name="w"), cs.train.ExponentialMovingAverage(0.75)
        >>> average.apply([w])
        >>> average.apply([w.assign(3.0)])
        >>> float(average.average(w))
        1.5
        >>> average.average_name(w)
        'w/ExponentialMovingAverage'
        >>> len(average.averages())
        1
    """

    def __init__(self, decay: float, num_updates: Any = None, name: str = "ExponentialMovingAverage") -> None:
        refuse_in_replica("a moving average")
        if not 0 <= decay <= 1:
            raise InvalidArgumentError(f"decay must be a number from 0 to 1, not {decay!r}")
        self._decay = float(decay)
        self._num_updates = num_updates
        self._name = name
        self._strategy: Strategy | None = None
        self._averages: dict[Variable, Variable] = {}
        # Of averages that replicas have made, the number, with that of their variable. Its name may change.
        self._numbers: dict[int, int] = {}
        self._identity = uuid.uuid4().hex
        if has_strategy():
            self.adopt(get_strategy())

    @property
    def decay(self) -> float:
        """The decay, without ``num_updates``."""
        return self._decay

    @property
    def name(self) -> str:
        """Its name, which ends the names of its averages."""
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

    def apply(self, var_list: Iterable[Variable]) -> None:
        """Bring the average of each variable up to date, once, whatever the number of replicas; all replicas must do
        it.

        Args:
            var_list: The variables.

        Raises:
            TypeError: One is not a variable of a floating-point dtype.
        """
        variables = list(var_list)
        for variable in variables:
            if not isinstance(variable, Variable) or variable.dtype.kind not in "fc":
                raise TypeError(f"a moving average takes variables of a floating-point dtype, not {variable!r}")
        self._find(variables)
        for variable in variables:
            average = self._averages.get(variable)
            if average is None:
                self._make(variable, variable.numpy())
            else:
                follow = variable.dtype.type(1 - self._decay_now())
                average.assign_sub((average.current() - variable.current()) * follow)

    def average(self, var: Variable) -> Variable | None:
        """The variable that holds the average of ``var``; None where there is none yet.

        Args:
            var: A variable.

        Raises:
            ShutdownError: The strategy was shut down (a RuntimeError).
        """
        self._find([var])
        return self._averages.get(var)

    def average_name(self, var: Variable) -> str:
        """The name of the average of ``var``.

        Args:
            var: A variable.

        Raises:
            AttributeError: ``var`` is not a variable.
        """
        return f"{var.name}/{self.name}"

    def averages(self) -> list[tuple[Variable, Variable]]:
        """Every variable that has an average, with it."""
        if self._strategy is not None:
            self._find(self._strategy.variables)
        return list(self._averages.items())

    def start(self, variable: Variable, value: np.ndarray) -> None:
        """Set the average of ``variable``; make it where there is none yet."""
        average = self.average(variable)
        if average is None:
            self._make(variable, value)
        else:
            average.assign(value)

    def adopt(self, strategy: Strategy) -> None:
        """Become a moving average of ``strategy``. Raises ContextError (a RuntimeError) where it is another's."""
        if self._strategy is None:
            self._strategy = strategy
            strategy.claim(self, self._name)
            for average in self._averages.values():
                average.adopt(strategy, shared=True)
        elif self._strategy is not strategy:
            raise ContextError(f"moving average {self.name} belongs to another strategy; make one for each")

    def _make(self, variable: Variable, value: np.ndarray) -> None:
        strategy = variable.strategy
        if strategy is not None:
            self.adopt(strategy)
        is_here = current_replica(strategy) is not None

        def make() -> Variable:
            return Variable(
                value,
                trainable=False,
                name=self.average_name(variable),
                # The replicas compute the same average from the same value.
                aggregation=VariableAggregation.ONLY_FIRST_REPLICA,
            )

        self._averages[variable] = make() if strategy is None or is_here else in_cross_replica(strategy, make)

    def _find(self, variables: Iterable[Variable]) -> None:
        """Learn of averages that replicas have made: they have no way to tell, but the names say it."""
        ours = [v for v in variables if v.strategy is self._strategy and v not in self._averages]
        unknown = {self.average_name(variable): variable for variable in ours}
        by_number = {variable.number: variable for variable in ours}
        if unknown and self._strategy is not None:
            for found in self._strategy.variables:
                # An earlier variable of that name, freed since, may have left an average, so that this one's name got a
                # number; what is older than its variable is not its average.
                if found.number in self._numbers:
                    variable = by_number.get(self._numbers[found.number])
                else:
                    variable = unknown.get(found.name, unknown.get(re.sub(r"_\d+$", "", found.name)))
                if variable is not None and found.number > variable.number:
                    self._averages.setdefault(variable, found)

    @staticmethod
    def names_of_variables(name: str) -> re.Pattern[str]:
        """The names of the averages of one of this ``name``; the group is the name of the variable."""
        return re.compile(rf"(.+)/{re.escape(name)}(?:_\d+)?")

    def learn(self, average: int, variable: int | None) -> int | None:
        """The number of the variable to which an average belongs: ``variable``, whose name says so now, if it is older
        than the average and none was known yet."""
        if variable is not None and variable < average:
            self._numbers.setdefault(average, variable)
        return self._numbers.get(average)

    def _decay_now(self) -> float:
        if self._num_updates is None:
            return self._decay
        updates = float(self._num_updates)
        return min(self._decay, (1 + updates) / (10 + updates))

    def __deepcopy__(self, memo: dict[int, Any]) -> ExponentialMovingAverage:
        return self  # its averages are known by its name

    def _cs_key(self) -> tuple[Hashable, ...]:
        return () if self._strategy is None else (id(self._strategy), self._identity)

    def _cs_state(self) -> dict[str, Any]:
        return {**vars(self), "_name": self.name, "_averages": list(self._averages.items())}

    def _cs_update(self, state: dict[str, Any]) -> None:
        known = vars(self).get("_averages", {})  # also those that were found here
        vars(self).update(state, _averages={**known, **dict(state["_averages"])})

    def __repr__(self) -> str:
        return f"<ExponentialMovingAverage {self.name!r} decay={self._decay:g}>"
