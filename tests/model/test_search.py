"""The search finds nothing wrong with the design, and finds what each rule is for.

A *mutation* is the design without one rule. README.md lists dangerous executions by number, with the rules against
them. Here are those that a short search finds; test_stories.py has the rest. Some of the list do not exist in this
design, because runs go by message and there is one lane, one plan and one base for each worker:

- 3, a new worker finds old runs on a board: no run is on a board. That each incarnation has a board of its own protects
  from nothing else that the model has, as a test here says.
- 5, a run overtakes a message, and 17, the area of arguments stays full: they are of the client's way onto a board.
- 8, two threads claim one lane: there is no second lane.
- 11, a message and the word of the last run are read in the wrong order: there is no such word. The order of a message
  and RETURNED is free: a return that the server sees too late for one event is heard before the next, and the board of
  a worker is left only when its successor registers.
- 13, tables of functions drift: captured runs carry their function, since they are messages.
- 18, an array on a board loses its layout: arguments keep their encoding.
- 21, the client is woken too late: nobody is told to wake later.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache

import pytest
from tests.model.rules import Rules
from tests.model.search import Execution, Plan, search
from tests.model.test_stories import STORIES

PLANS = {
    "usual": Plan(),
    "calm": Plan(odd_kinds=(), changes=0.02, scripts=1, cancels=0),
    "crashing": Plan(scripts=1, kills=4, cancels=0, damages=0, odd=0, changes=0, trouble=0.05),
    "leaving": Plan(scripts=3, kills=3, odd=0.03, changes=0.02, leaving=6, damages=0),
    "changing": Plan(changes=0.3, odd=0.3, kills=1),
    "losing": Plan(lost_stores=1, odd=0.03, changes=0.02),
}
#: Each rule with the plan whose executions show what it is for, how many seeds that takes, and how the promise breaks.
MUTATIONS = {
    "answer_after_committed": ("usual", 400, "is answered, but committed"),
    "committed_last": ("usual", 400, "are both undecided"),
    "account_before_committed": ("calm", 400, "waits for ever|with t="),
    "account_has_two_halves": ("calm", 400, "is committed twice"),
    "arming_flushes": ("usual", 400, "is committed twice"),
    "arming_reads_t": ("calm", 100, "is committed with t="),
    "events_disarm": ("calm", 100, "is committed with t="),
    "only_passes_raise_committed": ("usual", 400, "is committed with t="),
    "pass_compares_bases": ("changing", 400, "is committed as f"),
    "board_comes_before_event": ("calm", 400, "from which .* has returned"),
    "passes_come_before_event": ("leaving", 100, "is answered, but committed"),
    "heard_is_set_first": ("changing", 100, "goes round for ever"),
    "refusals_are_answered": ("changing", 100, "waits for ever"),
    "resume_counts_passes": ("usual", 100, "is answered, but committed"),
    "resume_hears_boards": ("usual", 100, "is committed twice"),
    "resume_repeats_answers": ("calm", 100, "waits for ever"),
    "new_store_has_new_boards": ("losing", 400, "waits for ever"),
    "slots_exceed_lookahead": ("crashing", 400, "waits for ever"),
    "board_outlives_worker": ("calm", 400, "from which .* has returned"),
    "slot_before_returned": ("leaving", 100, "is answered with"),
    "bases_only_grow": ("changing", 100, "is committed as"),
    "predecessor_is_of_series": ("usual", 100, "waits for ever"),
    "step_waits": ("calm", 100, "are both undecided|is committed with Gradient"),
    "worker_hears_all_channels": ("usual", 100, "waits for ever"),
    "sleep_is_bounded": ("calm", 400, "waits for ever"),
    "runs_grow": ("usual", 100, "waits for ever"),
    "runs_begin_by_session": ("leaving", 400, "are both undecided|is committed"),
    "hello_keeps_session": ("usual", 100, "waits for ever"),
    "arguments_by_value": ("usual", 100, "is committed with Gradient"),
}
#: The rules that no execution of the model needs.
NOT_NEEDED = {"incarnation_has_own_board"}


@cache
def clean(plan: str, seeds: int) -> None:
    """The whole design with the seeds of the mutations, once for each plan."""
    found = search(range(seeds), plan=PLANS[plan])
    assert found is None, found


@pytest.mark.parametrize("plan", PLANS)
def test_the_design_keeps_its_promises(plan: str) -> None:
    clean(plan, max([400, *(seeds for name, seeds, _ in MUTATIONS.values() if name == plan)]))


@pytest.mark.parametrize("rule", MUTATIONS)
def test_the_search_finds_what_a_rule_is_for(rule: str) -> None:
    plan, seeds, promise = MUTATIONS[rule]
    found = search(range(seeds), Rules(**{rule: False}), PLANS[plan], promise=promise)
    assert found is not None, f"without {rule}, {seeds} executions keep all promises"


def test_every_rule_has_a_mutation() -> None:
    assert {field.name for field in fields(Rules)} == MUTATIONS.keys() | STORIES.keys() | NOT_NEEDED


def test_the_executions_are_of_all_kinds() -> None:
    """What a search does not do, it does not check."""
    seen: set[str] = set()
    for seed in range(100):
        execution = Execution(seed, Rules(), PLANS["usual"])
        execution.run()
        seen |= {"".join(each for each in name if not each.isdigit()) for name in execution.trace}
    assert seen >= {
        "server passes ",
        "server hears the board",
        "server arms",
        "server hears Ask of w.",
        "server hears Cancel of c",
        "server hears Resent of c",
        "server hears Died of supervisor",
        "server hears Left of supervisor",
        "kill server",
        "kill w.",
        "kill c",
        "w. loses its mailbox",
        "w. sleeps",
        "a second passes",
        "Ctrl-C",
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", PLANS)
def test_the_design_keeps_its_promises_in_many_executions(plan: str) -> None:
    found = search(range(10_000, 14_000), plan=PLANS[plan])
    assert found is None, found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_design_keeps_its_promises_with_other_numbers_of_workers(replicas: int) -> None:
    found = search(range(2_000), plan=PLANS["usual"], replicas=replicas)
    assert found is None, found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", ["usual", "crashing"])
def test_one_board_for_each_replica_would_do(plan: str) -> None:
    """Since Died means that the process is reaped, and the server knows a base by its incarnation, too."""
    found = search(range(4_000), Rules(incarnation_has_own_board=False), PLANS[plan])
    assert found is None, found
