"""How often each variable was updated by an optimizer, which some kinds of optimizers need.

A step is counted once, in its variable set (``Steps``). The count of a variable is that of its sets and what its
``SlotNames`` adds to it. Most steps update the same set as the step before, so sums over the other sets are kept, and
follow when another set was updated. They can be made from the tables at any time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .tables import Tables, VariableSet

__all__ = ["Counts"]


@dataclass
class _Sums:
    """The counts of one optimizer: by variable, and the count of each set that they include."""

    totals: dict[int, int] = field(default_factory=dict)
    included: dict[int, int] = field(default_factory=dict)
    #: By set: the lowest count of its variables, and what each has more; nothing if all have the same.
    known: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)


class Counts:
    """Derived from ``tables``. A function that makes or drops sets or slots there, or changes what slots add, tells it
    here."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._sums: dict[int, _Sums] = {}

    def add_slots(self, optimizer: int, variable: int) -> None:
        """The optimizer has new slots beside a variable."""
        if optimizer in self._sums:
            self._sums[optimizer].totals[variable] = 0

    def add_set(self, number: int, variable_set: VariableSet) -> None:
        """There is a new variable set, which was not updated yet."""
        if variable_set.optimizer in self._sums:
            self._sums[variable_set.optimizer].included[number] = 0

    def forget(self, optimizer: int) -> None:
        """The counts of an optimizer have changed in another way than by steps."""
        self._sums.pop(optimizer, None)

    def of(self, optimizer: int) -> dict[int, int]:
        """The count of each variable beside which the optimizer has slots."""
        sums = self._sums_of(optimizer)
        found = dict(sums.totals)
        for number, count in sums.included.items():
            if more := self._tables.steps[number].count - count:
                for member in self._tables.sets[number].variables:
                    found[member] += more
        return found

    def next_of(self, number: int, before: Mapping[int, int]) -> tuple[int, tuple[int, ...]]:
        """The count of the next update of a variable set, from 1: the lowest of its variables, and what each has more;
        nothing if all have the same. ``before`` has the steps of each set that the tables do not count yet."""
        tables, steps = self._tables, self._tables.steps
        members, sums = tables.sets[number].variables, self._sums_of(tables.sets[number].optimizer)
        for other, count in sums.included.items():
            more = steps[other].count + before.get(other, 0) - count
            if more and other != number:
                for member in tables.sets[other].variables:
                    sums.totals[member] += more
                sums.included[other] += more
                sums.known.clear()
        known = sums.known.get(number)
        if known is None:
            counts = [sums.totals[member] for member in members]
            lowest = min(counts)
            known = sums.known[number] = lowest, tuple([c - lowest for c in counts] if max(counts) > lowest else ())
        own = steps[number].count + before.get(number, 0) - sums.included[number]
        return known[0] + own + 1, known[1]

    def _sums_of(self, optimizer: int) -> _Sums:
        sums, tables = self._sums.get(optimizer), self._tables
        if sums is None:
            sums = self._sums[optimizer] = _Sums()
            sums.totals = {each: slots.steps for (number, each), slots in tables.slots.items() if number == optimizer}
            sums.included = {each: 0 for each, made in tables.sets.items() if made.optimizer == optimizer}
        return sums
