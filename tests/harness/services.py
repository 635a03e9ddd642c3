"""Services that several tests share."""

from __future__ import annotations

import central_storage as cs

__all__ = ["connected"]


def connected(strategy: cs.CentralStorageStrategy) -> cs.CentralStorageStrategy:
    """The strategy, when every socket is connected: one that still is to be would be taken for the first test's
    leftover. It has one run behind it."""
    strategy.run(_nothing)
    return strategy


def _nothing() -> None:
    pass
