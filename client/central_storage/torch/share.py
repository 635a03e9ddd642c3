"""The part of one replica in a batch, and which part the function that runs now has."""

from __future__ import annotations

import threading
from typing import NamedTuple

__all__ = ["Share", "here"]


class Share(NamedTuple):
    """The part of one replica in a batch."""

    replica: int
    #: What its rows count in the mean over the batch, between 0 and 1.
    weight: float
    #: Whether it has no rows of its own. Then the replica computes with rows of replica 0, which count nothing there:
    #: so no function ever sees a batch without rows.
    is_empty: bool
    #: The number of replicas that have rows.
    replicas: int


class _Here(threading.local):
    share: Share | None = None
    #: Whether the function is called once more, on its own, to find a line of it.
    is_repeating = False


#: The share of the function that this thread runs.
here = _Here()
