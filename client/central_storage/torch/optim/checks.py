"""Checks of what an optimizer is given: its parameters, and the bounds of their gradient."""

from __future__ import annotations

import math
from typing import Any

from cs_proto.errors import InvalidArgumentError

__all__ = ["bound", "strategy_of"]


def strategy_of(params: list[Any], group: str, first: Any) -> Any:
    """The strategy of the parameters of a group, which is that of the optimizer's ``first`` parameter. Raises
    InvalidArgumentError for one that was not centralized, and for another strategy's."""
    for number, p in enumerate(params):
        variable = getattr(p, "variable", None)
        if variable is None or variable.strategy is None:
            raise InvalidArgumentError(
                f"{group}: parameter {number}, of shape {tuple(p.shape)}, lies in this process and not in the server; "
                "call cst.centralize(module) first, and make the optimizer of the module's parameters"
            )
        if variable.strategy is not first.variable.strategy:
            raise InvalidArgumentError(
                f"{group}: {variable.name} and {first.variable.name} belong to different strategies; make an optimizer "
                "for each"
            )
    return first.variable.strategy


def bound(name: str, value: float | None) -> float | None:
    """A bound of the gradient; an infinite one is none."""
    if value is None or value == math.inf:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise InvalidArgumentError(f"{name} must be a number of at least 0, or None, not {value!r}")
    return float(value)
