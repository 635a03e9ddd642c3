"""A small world in which every cut within the steps of programs is tried: each store, and every death."""

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
#: The first run goes the general way and says the bases, and the marks of the second make the plan.
FIRST, LAST = 3, 5
#: The kind and two bodies in the account, BEGUN, COMMITS odd, TAG, three stores for each piece, DONE, COMMITS even,
#: RunFinished, and the end of the program; in a series two marks, too.
STORES = {0: 16, 1: 18}


def execution(series: int, seed: int, rules: Rules | None = None) -> Execution:
    """The small world; ``series`` is 0 for single runs."""
    return Execution(seed, rules or Rules(), QUIET, scripts=[Script([Step(series, "f", "plain")] * LAST)])


def cuts_in_programs(trace: list[str], stores: int) -> Iterator[int]:
    """The cuts after each store of each program."""
    left = 0
    for number, name in enumerate(trace):
        left = stores if name.startswith("server carries out") else left
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


@pytest.mark.parametrize("series", [0, 1], ids=["single runs", "a series"])
def test_the_small_world_carries_out_runs_by_programs(series: int) -> None:
    whole = execution(series, 0)
    whole.run()
    found = [name for name in whole.trace if name.startswith("server carries out")]
    assert found == [f"server carries out {run}" for run in range(FIRST, LAST + 1)]
    assert len(list(cuts_in_programs(whole.trace, STORES[series]))) == (LAST - FIRST + 1) * STORES[series]


@pytest.mark.parametrize("series", [0, 1], ids=["single runs", "a series"])
def test_a_death_after_every_store_of_a_program(series: int) -> None:
    whole = execution(series, 0)
    whole.run()
    for cut in cuts_in_programs(whole.trace, STORES[series]):
        for victims in VICTIMS:
            found = broken(series, 0, cut, victims)
            assert not found, found


@pytest.mark.parametrize(
    ("series", "rule"),
    [(0, "account_before_begun"), (1, "begun_before_commit"), (1, "ends_after_commit"), (0, "answer_after_commit")],
)
def test_the_enumeration_finds_a_wrong_order_of_stores(series: int, rule: str) -> None:
    rules = Rules(**{rule: False})
    for seed in range(20):
        whole = execution(series, seed, rules)
        try:
            whole.run()
        except BrokenPromise:
            return  # without a death
        cuts = cuts_in_programs(whole.trace, STORES[series])
        if any(broken(series, seed, cut, ("server",), rules) for cut in cuts):
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
