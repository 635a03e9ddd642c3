"""Sets of variables that are met again in every step: known by identity, so that they need no look one by one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple, Protocol

__all__ = ["Numbers", "VariableSet", "VariableSets"]

# So many sets are known at once.
_KEPT = 16


class _Variable(Protocol):
    """What a set must know of a variable."""

    @property
    def number(self) -> int: ...

    @property
    def constraint(self) -> Any: ...


class Numbers(tuple[int, ...]):
    """Numbers of variables, and what is asked of all of them again and again."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._hash = super().__hash__()
        self.members = frozenset(self)
        self._ascending = tuple(sorted(self))

    def __hash__(self) -> int:
        return self._hash

    @property
    def ascending(self) -> tuple[int, ...]:
        """They in order."""
        return self._ascending


class VariableSet(NamedTuple):
    """Variables of one strategy, which may have been named more than once."""

    variables: tuple[Any, ...]
    numbers: Numbers
    #: Whether none of them has a constraint.
    is_free: bool


class VariableSets:
    """The sets that were met last."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int], VariableSet] = {}

    def find(self, variables: Sequence[object]) -> VariableSet | None:
        """The set of just these objects in this order, if it is known."""
        if not variables:
            return None
        found = self._known.get((len(variables), id(variables[0]), id(variables[-1])))
        return found if found is not None and all(map(is_, variables, found.variables)) else None

    def add(self, variables: Sequence[_Variable]) -> VariableSet:
        """Know these from now on."""
        if len(self._known) >= _KEPT:
            self._known.clear()
        made = VariableSet(
            tuple(variables),
            Numbers(variable.number for variable in variables),
            all(variable.constraint is None for variable in variables),
        )
        self._known[len(variables), id(variables[0]), id(variables[-1])] = made
        return made

    def forget(self) -> None:
        """Know none any more: a variable has got a constraint."""
        self._known.clear()
