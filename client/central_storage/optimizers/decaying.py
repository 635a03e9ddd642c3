"""What the optimizers with decoupled weight decay have in common: variables that are excluded from it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from central_storage.variables.variable import Variable
from cs_proto.arithmetic.optimizers import check_exempt, only
from cs_proto.errors import ContextError, InvalidArgumentError

from .optimizer import Optimizer
from .update import checked_variable

__all__ = ["DecayingOptimizer", "patterns"]


class DecayingOptimizer(Optimizer):
    """Base of the optimizers with decoupled weight decay."""

    def exclude_from_weight_decay(
        self, var_list: Iterable[Variable] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Let no weight decay act on some variables. What was excluded before no longer is. In the script, before the
        first update.

        Args:
            var_list: Variables, by their names.
            var_names: Regular expressions, which are searched in the names of variables.

        Raises:
            InvalidArgumentError: A pattern is not a regular expression, or the optimizer has made updates (a
                ValueError).
            ContextError: Called in a replica, or a variable belongs to no strategy yet (a RuntimeError).

        Examples:
            >>> import central_storage as cs
            >>> optimizer = cs.optimizers.AdamW()
            >>> optimizer.exclude_from_weight_decay(var_names=["bias"])
            >>> optimizer.get_config()["exclude_from_weight_decay"]
            ['bias']
        """
        self._refuse_in_replica("exclude_from_weight_decay")
        variables = [checked_variable(self, variable) for variable in var_list or ()]
        local = next((variable.name for variable in variables if variable.strategy is None), None)
        if local is not None:
            raise ContextError(
                f"variable {local} belongs to no strategy yet, which may still change its name; make it under the "
                "strategy's scope, or exclude it by var_names"
            )
        if self.slots():
            raise InvalidArgumentError(
                f"{self.name} has made updates already; call exclude_from_weight_decay before the first one"
            )
        exempt = (*(only(variable.name) for variable in variables), *patterns(var_names or ()))
        check_exempt(self.kind, self._rule, exempt)
        if self.strategy is not None:
            self._controller.configure(self._number, self.kind, {}, None, -1, exempt)
        self._exempt = exempt

    def get_config(self) -> dict[str, Any]:
        """The name, the hyperparameters and the patterns as :meth:`from_config` takes them.

        Examples:
            >>> import central_storage as cs
            >>> cs.optimizers.AdamW(exclude_from_weight_decay=["bias"]).get_config()["weight_decay"]
            0.004
        """
        found = self._exempt if self.strategy is None else self._record().exempt
        exempt = {"exclude_from_weight_decay": list(found)} if found else {}
        return super().get_config() | exempt


def patterns(given: Iterable[str]) -> tuple[str, ...]:
    """The patterns that a user gives. Raises TypeError for a text, which would be taken for one pattern a letter."""
    if isinstance(given, str):
        raise TypeError(f"exclude_from_weight_decay takes a list of patterns, not the text {given!r}: pass [{given!r}]")
    return tuple(given)
