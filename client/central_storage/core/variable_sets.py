"""Variable sets that come back in every step: found by identity, so that the variables need no check one by one."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

__all__ = ["Numbers", "VariableSet", "VariableSets"]

# The number of cached sets.
_KEPT = 16


class _Variable(Protocol):
    """The part of a variable that a set needs."""

    @property
    def number(self) -> int: ...

    @property
    def constraint(self) -> Any: ...


class Numbers(tuple[int, ...]):
    """Numbers of variables, with cached properties of the whole set."""

    def __init__(self, numbers: Iterable[int]) -> None:
        #: The numbers as bytes: other sets of numbers have others. Python keeps the hash of bytes, not of tuples.
        self.key = array("q", self).tobytes()
        self._hash = super().__hash__()
        self.members = frozenset(self)
        #: Whether no number occurs twice.
        self.are_different = len(self.members) == len(self)
        self._ascending = tuple(sorted(self))
        self._divided: dict[tuple[tuple[int, int], ...], tuple[tuple[int, Numbers], ...]] = {}

    def __hash__(self) -> int:
        return self._hash

    @property
    def ascending(self) -> tuple[int, ...]:
        """The numbers in ascending order."""
        return self._ascending

    def divided(self, counts: tuple[tuple[int, int], ...]) -> tuple[tuple[int, Numbers], ...]:
        """The numbers of each optimizer, in order; ``counts`` says of each optimizer how many. The same counts come
        again with every step."""
        if len(counts) == 1:
            return ((counts[0][0], self),)
        found = self._divided.get(counts)
        if found is None:
            if len(self._divided) >= _KEPT:
                self._divided.clear()
            ends = list(accumulate(count for _, count in counts))
            starts = [0, *ends]
            found = self._divided[counts] = tuple(
                (optimizer, Numbers(self[start:end]))
                for (optimizer, _), start, end in zip(counts, starts, ends, strict=False)
            )
        return found


class VariableSet(NamedTuple):
    """Variables of one strategy; a variable may occur more than once."""

    variables: tuple[Any, ...]
    numbers: Numbers
    #: Whether none of them has a constraint.
    is_free: bool


class VariableSets:
    """A cache of the last sets."""

    def __init__(self) -> None:
        # By the variables. A variable as a key is itself.
        self._known: dict[tuple[Any, ...], VariableSet] = {}

    def find(self, variables: Sequence[object]) -> VariableSet | None:
        """The set of exactly these objects in this order, if it is cached."""
        try:
            return self._known.get(tuple(variables))
        except TypeError:  # one of them cannot be a key, so it is no variable
            return None

    def add(self, variables: Sequence[_Variable]) -> VariableSet:
        """Cache the set of these variables."""
        if len(self._known) >= _KEPT:
            self._known.clear()
        key = tuple(variables)
        made = self._known[key] = VariableSet(
            key,
            Numbers(variable.number for variable in variables),
            all(variable.constraint is None for variable in variables),
        )
        return made

    def forget(self) -> None:
        """Clear the cache, because a variable has got a constraint."""
        self._known.clear()
