"""How many runs of a training were captured, by ``strategy.statistics()``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import central_storage as cs

__all__ = ["nearly_all_captured"]


@contextmanager
def nearly_all_captured(strategy: cs.CentralStorageStrategy, runs: int) -> Iterator[None]:
    """The block makes at least that many runs, of which at least 99 % are captured; else the reasons are shown."""
    before = strategy.statistics()
    yield
    after = strategy.statistics()
    made, captured = after.runs - before.runs, after.captured - before.captured
    known = dict(before.uncaptured)
    reasons = {why: count - known.get(why, 0) for why, count in after.uncaptured if count > known.get(why, 0)}
    assert made >= runs
    assert captured + sum(reasons.values()) == made
    assert captured >= 0.99 * made, f"{captured} of {made} runs were captured; the others: {reasons}"
