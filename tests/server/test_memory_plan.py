"""The arithmetic of an estimate follows the layouts of the server."""

from __future__ import annotations

import pytest

from cs_proto import memory_plan
from cs_server.compute import undo
from cs_server.engine.store import account
from cs_server.rules import RULES


@pytest.mark.parametrize("replicas", [1, 2, 7])
def test_the_account(replicas: int) -> None:
    assert memory_plan.account_nbytes(replicas) == account.account_nbytes(replicas)


def test_the_rules_that_need_norms() -> None:
    assert {rule.name for rule in RULES.values() if rule.direction is not None} == memory_plan.BY_NORM


def test_the_old_values() -> None:
    """What an estimate counts is at most the area of the lanes."""
    whole = 4 * memory_plan.KEPT_NBYTES
    assert memory_plan.undo_nbytes(undo.LANES, whole, 1 << 20) <= undo.UNDO_NBYTES + undo.LANES * 2 * 4096
    assert memory_plan.undo_nbytes(3, whole, 1 << 20) >= undo.used_nbytes(3) - undo.used_nbytes(0)
