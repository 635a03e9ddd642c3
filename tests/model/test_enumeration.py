"""Every cut of a small world: two workers, one run that makes the base and two that pass, and every death."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.model.checks import BrokenPromise
from tests.model.client import Step
from tests.model.rules import Rules
from tests.model.search import QUIET, Execution
from tests.model.supervisor import Script

VICTIMS = [
    ("server",),
    ("w0.1",),
    ("w1.1",),
    ("server", "w0.1"),
    ("server", "w1.1"),
    ("w0.1", "w1.1"),
    ("server", "w0.1", "w1.1"),
]
#: COMMITS odd, TAG, three stores for each piece, DONE, COMMITS even, three of the account, COMMITTED, the doorbells,
#: RunFinished; and the end of the pass.
STORES = 16


def execution(series: int, seed: int, rules: Rules | None = None) -> Execution:
    """The small world; ``series`` is 0 for single runs."""
    return Execution(seed, rules or Rules(), QUIET, scripts=[Script([Step(series, "f", "plain")] * 3)])


def cuts_in_passes(trace: list[str]) -> Iterator[int]:
    """The cuts after each store of each pass."""
    left = 0
    for number, name in enumerate(trace):
        left = STORES if name.startswith("server passes") else left
        if left and name.startswith("server"):
            yield number + 1
            left -= 1


def broken(series: int, seed: int, cut: int, victims: tuple[str, ...], rules: Rules | None = None) -> str:
    """What promise the execution breaks that is cut there; '' if none."""
    cut_short = execution(series, seed, rules)
    try:
        cut_short.run(cut, victims)
    except BrokenPromise as error:
        return f"seed {seed}, {victims} after {cut} actions: {error}\n" + "\n".join(cut_short.trace[cut - 30 :])
    return ""


def test_the_small_world_passes_two_runs() -> None:
    for series in (0, 1):
        whole = execution(series, 0)
        whole.run()
        assert [name for name in whole.trace if name.startswith("server passes")] == [
            "server passes 1002",
            "server passes 1003",
        ]
        assert whole.world.memory.committed == 1003
        assert len(list(cuts_in_passes(whole.trace))) == 2 * STORES


@pytest.mark.parametrize("series", [0, 1], ids=["single runs", "a series"])
def test_a_death_after_every_store_of_a_pass(series: int) -> None:
    for seed in range(3):
        whole = execution(series, seed)
        whole.run()
        for cut in cuts_in_passes(whole.trace):
            for victims in VICTIMS:
                found = broken(series, seed, cut, victims)
                assert not found, found


@pytest.mark.parametrize(
    ("series", "rule"),
    [(0, "answer_after_committed"), (1, "committed_last"), (1, "account_before_committed")],
)
def test_the_enumeration_finds_a_wrong_order_of_stores(series: int, rule: str) -> None:
    rules = Rules(**{rule: False})
    for seed in range(20):
        whole = execution(series, seed, rules)
        whole.run()
        if any(broken(series, seed, cut, ("server",), rules) for cut in cuts_in_passes(whole.trace)):
            return
    pytest.fail(f"no cut shows what {rule} is for")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("series", [0, 1], ids=["single runs", "a series"])
def test_a_death_after_every_action(series: int) -> None:
    for seed in range(4):
        whole = execution(series, seed)
        whole.run()
        for cut in range(1, len(whole.trace)):
            for victims in VICTIMS:
                found = broken(series, seed, cut, victims)
                assert not found, found
