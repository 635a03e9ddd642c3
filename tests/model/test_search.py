"""The search finds nothing wrong with what was built, and finds what each rule is for.

A *mutation* is the model without one rule. test_stories.py has those whose executions are too rare for a short search.
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
    "calm": Plan(odd_kinds=(), changes=0.05, scripts=1, cancels=0, damages=0, steps=(8, 14), blocks=1, trouble=0.02),
    "turns": Plan(
        odd_kinds=("note",),
        odd=0.05,
        changes=0.4,
        scripts=1,
        cancels=0,
        kills=2,
        steps=(10, 16),
        blocks=1,
        trouble=0.02,
    ),
    "leaving": Plan(scripts=3, kills=3, odd=0.03, changes=0.02, leaving=6, damages=0),
    "damaging": Plan(odd_kinds=(), scripts=2, kills=1, damages=3, changes=0.02, trouble=0.05),
}
#: Each rule with the plan whose executions show what it is for, how many seeds that takes, and how the promise breaks.
MUTATIONS = {
    "body_before_mark": ("usual", 50, "waits for ever"),
    "left_mark_is_said_again": ("damaging", 200, "waits for ever"),
    "both_keep_as_many_bases": ("usual", 50, "waits for ever"),
    "new_server_has_no_bases": ("calm", 100, "waits for ever"),
    "events_end_program": ("usual", 50, "is committed, but nobody"),
    "program_compares_bases": ("calm", 50, "is committed as"),
    "account_before_begun": ("calm", 50, "is answered with"),
    "begun_before_commit": ("calm", 50, "is committed twice"),
    "ends_after_commit": ("usual", 50, "is committed"),
    "answer_after_commit": ("usual", 50, "is answered, but committed"),
    "step_is_stored": ("usual", 50, "is committed twice"),
    "account_has_number": ("calm", 200, "is committed twice"),
    "fold_ends_account": ("calm", 300, "is committed, but nobody"),
    "fold_before_renewal": ("calm", 120, "is committed twice"),
    "account_counts_kinds": ("turns", 50, "is answered, but committed"),
    "account_exceeds_lookahead": ("turns", 100, "is answered with"),
    "store_has_span": ("turns", 100, "waits for ever"),
    "stored_step_counts": ("usual", 50, "is committed with t="),
    "events_unfold": ("usual", 50, "waits for ever"),
    "held_returns_are_heard": ("usual", 50, "waits for ever"),
    "last_step_is_under_way": ("usual", 50, "is answered, but committed"),
    "last_return_is_said_again": ("usual", 50, "waits for ever"),
    "returns_are_answered_again": ("calm", 100, "waits for ever"),
    "hello_repeats_answers": ("calm", 100, "waits for ever"),
    "step_waits": ("usual", 50, "is committed with Gradient"),
    "welcome_comes_first": ("turns", 50, "waits for ever"),
    "numbers_go_on": ("leaving", 150, "waits for ever"),
    "returns_name_client": ("usual", 50, "is committed with Gradient"),
    "arguments_by_value": ("usual", 50, "is committed with Gradient"),
}
#: The rules that no execution of the search needs alone.
NOT_NEEDED = {
    "mark_comes_before_message",
    "mark_waits_until_all_is_taken",
    "bases_are_of_their_client",
    "program_stays_in_series",
    "late_worker_is_fenced",
}


@cache
def clean(plan: str, seeds: int) -> None:
    """The whole model with the seeds of the mutations, once for each plan."""
    found = search(range(seeds), plan=PLANS[plan])
    assert found is None, found


@pytest.mark.parametrize("plan", PLANS)
def test_the_model_keeps_its_promises(plan: str) -> None:
    clean(plan, max([200, *(seeds for name, seeds, _ in MUTATIONS.values() if name == plan)]))


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
        "server carries out ",
        "server hears the mark of w.",
        "server hears Ask of w.",
        "server hears Cancel of c",
        "server hears Resent of c",
        "server hears Died of supervisor",
        "server hears Left of supervisor",
        "w. hears a mark",
        "kill server",
        "kill w.",
        "kill c",
        "w. leaves the mailbox of w.",
        "server leaves the mailbox of w.",
        "a second passes",
        "Ctrl-C",
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", PLANS)
def test_the_model_keeps_its_promises_in_many_executions(plan: str) -> None:
    found = search(range(10_000, 14_000), plan=PLANS[plan])
    assert found is None, found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("replicas", [1, 3])
def test_the_model_keeps_its_promises_with_other_numbers_of_workers(replicas: int) -> None:
    found = search(range(2_000), plan=PLANS["usual"], replicas=replicas)
    assert found is None, found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", sorted(NOT_NEEDED))
def test_the_model_does_not_need_a_rule(rule: str) -> None:
    found = search(range(1_000), Rules(**{rule: False}))
    assert found is None, found
