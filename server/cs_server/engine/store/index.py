"""What is derived from the tables for fast look-ups: the names of variables, and the sets that they are in.

The index can be made from the tables at any time. It follows when they are rolled back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from cs_server.events import Dense, Rows

from .counts import Counts
from .tables import Tables, VariableSet

__all__ = ["Index", "base_of"]

# Characters that a variable's name has at most.
_NAME_LENGTH = 512


class Index:
    """Derived from ``tables``. A function that changes variables or sets there tells it here."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        #: The number of each variable, by name.
        self.numbers = {variable.spec.name: number for number, variable in tables.variables.items()}
        # For a name that was taken: the count that was free last. All lower counts are taken.
        self._counts: dict[str, int] = {}
        self._derive_sets()
        self.derive_together()

    def derive_together(self) -> None:
        """The rows of what was written together have changed in another way than by their counts."""
        #: The number of the row of variables that were written together.
        self.together: dict[tuple[int, ...], int] = {}
        #: The rows that a variable is in.
        self.together_of: dict[int, list[int]] = {}
        for number, row in self._tables.together.items():
            self.together[row.variables] = number
            for member in row.variables:
                self.together_of.setdefault(member, []).append(number)

    def _derive_sets(self) -> None:
        #: The variable sets that a variable is in.
        self.sets_of: dict[int, list[int]] = {}
        #: The number of a variable set, by optimizer and ascending variables.
        self.set_numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        #: The sparse variables in a variable set.
        self.sparse_of: dict[int, tuple[int, ...]] = {}
        #: The dense part of an apply, for each of its parts the place in ``variables`` of one variable, and the rows
        #: of the sparse variables without gradients: by set, sparse variables, whether gradients are clipped, buffers,
        #: exempt names, and groups of variables with equal counts. It changes only with the names of variables, since
        #: variables do not move.
        self.dense: dict[tuple[Any, ...], tuple[tuple[Dense, ...], tuple[int, ...], tuple[Rows, ...]]] = {}
        #: Sets, by number, of which no two have a variable in common.
        self.apart: set[tuple[int, ...]] = set()
        self.counts = Counts(self._tables)
        for number, variable_set in self._tables.sets.items():
            self.add_set(number, variable_set)

    @contextmanager
    def rolled_back(self) -> Iterator[None]:
        """The block rolls the tables back; the index follows."""
        variables, is_stale = self._tables.variables, self._tables.sets.is_changed or self._tables.slots.is_changed
        has_together = self._tables.together.is_changed
        changed = variables.changed
        for number in changed:
            if number in variables:
                self.drop_name(variables[number].spec.name)
        yield
        for number in changed:
            if number in variables:
                self.numbers[variables[number].spec.name] = number
        if is_stale:
            self._derive_sets()
        if has_together:
            self.derive_together()

    def add_set(self, number: int, variable_set: VariableSet) -> None:
        """There is a new variable set."""
        self.set_numbers[variable_set.optimizer, variable_set.variables] = number
        known = self._tables.variables
        self.sparse_of[number] = tuple(member for member in variable_set.variables if known[member].spec.sparse)
        self.counts.add_set(number, variable_set)
        for member in variable_set.variables:
            self.sets_of.setdefault(member, []).append(number)

    def drop_set(self, number: int, variable_set: VariableSet) -> None:
        """The variable set is gone."""
        del self.set_numbers[variable_set.optimizer, variable_set.variables]
        del self.sparse_of[number]
        self.counts.forget(variable_set.optimizer)
        for member in variable_set.variables:
            self.sets_of[member].remove(number)
            if not self.sets_of[member]:
                del self.sets_of[member]
        self.dense = {key: dense for key, dense in self.dense.items() if key[0] != number}
        self.apart = {numbers for numbers in self.apart if number not in numbers}

    def free_name(self, name: str) -> str:
        """``name``, or where it is taken the first of ``name_1``, ``name_2``, … that is free."""
        if name not in self.numbers:
            return name
        count = self._counts.get(name, 1)
        while (free := _counted(name, count)) in self.numbers:
            count += 1
        if free.startswith(name):  # a shortened name does not show from which name it was made
            self._counts[name] = count
        return free

    def drop_name(self, name: str) -> None:
        """The variable of that name is gone."""
        del self.numbers[name]
        self._counts.pop(name, None)
        base = base_of(name)
        if base in self._counts:
            self._counts[base] = min(self._counts[base], max(1, int(name[len(base) + 1 :])))

    def move_names(self, numbers: Iterable[int], asked: str) -> list[tuple[int, str]]:
        """Give the variables ``numbers``, which all ``asked`` for one name, the names that they get if they are made
        now, in this order. Returns those whose name changes, with the new one."""
        before = {number: self._tables.variables[number].spec.name for number in numbers}
        for name in before.values():
            self.drop_name(name)
        moved = []
        for number, name in before.items():
            free = self.free_name(asked)
            self.numbers[free] = number
            if free != name:
                moved.append((number, free))
        return moved


def base_of(name: str) -> str:
    """``w`` of ``w_3``; empty where no number ends the name."""
    base, _, count = name.rpartition("_")
    return base if count.isdecimal() else ""


def _counted(name: str, count: int) -> str:
    suffix = f"_{count}"
    return name[: _NAME_LENGTH - len(suffix)] + suffix
