"""Services that several tests share."""

from __future__ import annotations

from tests.harness.replicas import context

import central_storage as cs

__all__ = ["connected"]


def connected(strategy: cs.CentralStorageStrategy, *, nested: bool = False) -> cs.CentralStorageStrategy:
    """The strategy, when every socket is connected: one that still is to be would be taken for the first test's
    leftover. It has one run behind it. ``nested``: that run calls ``merge_call``, so the socket through which a merge
    function calls the service is connected too."""
    strategy.run(_nested if nested else _nothing)
    return strategy


def _nested() -> None:
    context().merge_call(lambda strategy: strategy.run(_nothing))


def _nothing() -> None:
    pass
