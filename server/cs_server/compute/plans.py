"""Plans of dense updates: which lane updates what, by which kernels. They are made once for the places of an update."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cs_proto.arithmetic.optimizers import Hyperparameters
from cs_server.events import Dense, Rows, Update
from cs_server.rules import RULES, Rule

from .kernels import BoundRanges, Factors, UpdateNumbers, in_turn
from .undo import Lane

__all__ = ["Arrays", "Given", "Plan", "lanes_for", "rule_of", "shares_of"]

# An update of fewer elements than this finishes before another thread would wake up.
_ELEMENTS_PER_THREAD = 1 << 17
# Ranges are cut between cache lines, whatever the dtype.
_ELEMENTS_PER_CUT = 64

Arrays: TypeAlias = tuple[np.ndarray, tuple[np.ndarray, ...], tuple[np.ndarray, ...]]

Given: TypeAlias = tuple[Update, Hyperparameters]
"""A step of an optimizer, and its hyperparameters again."""


class Plan:
    """Updates of the same parts: their places, the shares of the lanes, the kernels of each share, and the numbers of
    the next update."""

    def __init__(
        self,
        updates: Sequence[Update],
        arrays: Callable[[Dense], Arrays],
        lanes: int,
        factors: NDArray[np.float64] | None = None,
    ) -> None:
        """``arrays`` finds the memory of a part of the updates. ``factors``: where the factors of the summed gradients
        will be when an update is made, float64 [ranges of all updates]. Without it, `set` takes the factors."""
        parts = [
            (which, number, part, arrays(part), rule_of(part, RULES[update.rule]))
            for which, update in enumerate(updates)
            for number, part in enumerate(update.dense)
        ]
        # The number of the update, that of the part there, the arrays, and the numbers of the next update.
        self._parts = [
            (which, number, own, UpdateNumbers(rule, own[0].dtype, len(own[2])))
            for which, number, _, own, rule in parts
        ]
        ranges = [part.places for _, _, part, *_ in parts]
        self.shares = shares_of(tuple(ranges), lanes)
        # Of each part the first elements of its ranges, and how many ranges the parts before it have.
        self._firsts = [np.array([first for first, _ in each], np.int64) for each in ranges]
        self._before = np.cumsum([0, *map(len, ranges)])
        self._finds_factors = factors is None
        self._factors: NDArray[np.float64] = np.ones(self._before[-1]) if factors is None else factors
        self._is_scaled = False
        # By share, and whether something is scaled.
        self._updates: dict[tuple[int, bool], Callable[[], None]] = {}

    def set(self, steps: Sequence[Given], weights: tuple[float, ...], factors: Sequence[float] = ()) -> None:
        """Let the next update be that of these steps. ``factors``: of each range, in order; none: all are 1, or
        something else finds them."""
        is_scaled = bool(weights) or len(factors) > 0
        for _, given in steps:
            is_scaled = is_scaled or "clipvalue" in given
        self._is_scaled = is_scaled or not self._finds_factors
        if is_scaled and self._finds_factors:
            self._factors[:] = factors or 1.0
        for which, number, _, numbers in self._parts:
            update, given = steps[which]
            t = update.counts[number] if update.counts else update.t
            if self._is_scaled:
                numbers.bound(weights, given.get("clipvalue", math.inf))
            numbers.set(given, t)

    def update(self, share: int, lane: Lane) -> Callable[[], None]:
        """What updates a share. The same lane always has the same share."""
        update = self._updates.get((share, self._is_scaled))
        if update is None:
            update = self._updates[share, self._is_scaled] = self._bound(share, lane)
        return update

    def _bound(self, share: int, lane: Lane) -> Callable[[], None]:
        updates, before = [], 0
        for part, ranges in self.shares[share]:
            _, _, arrays, numbers = self._parts[part]
            within = np.searchsorted(self._firsts[part], ranges[:, 0], side="right") - 1
            factors = Factors(self._factors, self._before[part] + within)
            bound = BoundRanges(numbers, ranges, *arrays, lane, before, factors)
            updates.append(bound.update(self._is_scaled))
            before += bound.pieces
        return in_turn(updates)


def rule_of(part: Dense | Rows, rule: Rule) -> Rule:
    """The rule of a part of an update that follows ``rule``."""
    return RULES[part.rule] if part.rule else rule


def lanes_for(elements: int, threads: int) -> int:
    """How many of the threads take part in an update of so many elements."""
    return max(1, min(threads, elements // _ELEMENTS_PER_THREAD))


def shares_of(
    parts: Sequence[tuple[tuple[int, int], ...]], threads: int
) -> tuple[tuple[tuple[int, np.ndarray], ...], ...]:
    """The ranges of several parts cut into up to ``threads`` shares of about as many elements. A share names some parts
    by their number, each with an int64 array of ranges of shape [n, 2]."""
    total = sum(last - first for ranges in parts for first, last in ranges)
    count = lanes_for(total, threads)
    size = -(-total // count)
    shares: list[dict[int, list[tuple[int, int]]]] = [{}]
    room = size
    for part, ranges in enumerate(parts):
        for first, last in ranges:
            while last - first > room and len(shares) < count:
                # A cut lies between cache lines, so no two threads ever write one; it may fall where the range begins.
                cut = max(first, (first + room) // _ELEMENTS_PER_CUT * _ELEMENTS_PER_CUT)
                if cut > first:
                    shares[-1].setdefault(part, []).append((first, cut))
                shares.append({})
                first, room = cut, size
            shares[-1].setdefault(part, []).append((first, last))
            room -= last - first
    return tuple(
        tuple((part, np.array(ranges, np.int64).reshape(-1, 2)) for part, ranges in share.items()) for share in shares
    )
