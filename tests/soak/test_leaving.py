"""The short tier of P16, P17 and P18: a few seeds of what ``make soak`` tries by the hundred."""

from __future__ import annotations

import random

import pytest
from tests.soak import leaving
from tests.soak.sessions import sabotaged


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_whatever_is_killed_nothing_is_left_behind(seed: int) -> None:
    assert leaving.killed(random.Random(seed)) == (1, [])


@pytest.mark.parametrize("seed", [1, 4])
def test_ctrl_c_at_any_moment_ends_it(seed: int) -> None:
    assert leaving.interrupted(random.Random(seed)) == []


def test_a_ctrl_c_that_nobody_hears_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in sabotaged("deaf").items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(leaving, "_GONE_WITHIN", 1.0)
    assert "still there after" in leaving.interrupted(random.Random(1))[0]


def test_launches_at_once_do_not_meet() -> None:
    assert leaving.launches(random.Random(0), 3) == []
