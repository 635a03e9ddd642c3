"""Executions that are too rare for a short search, told step by step, with the rule and without it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
from tests.model.checks import BrokenPromise
from tests.model.client import Step
from tests.model.rules import Rules
from tests.model.search import QUIET, Execution
from tests.model.supervisor import Script

SEEDS = range(20)


def mail_of_a_client_that_left(execution: Execution) -> None:
    """w0 has not read its mail of c1, which leaves. It carries out the first run of c2, and then a step of c1, over
    whose gradients the server commits the run of c2."""
    unread = ["w0.1 hears c1", "w0.1 hears supervisor"]
    for _ in range(3):
        execution.play("client sends", hold=[*unread, "w1.1 begins"])
    execution.kill("c1")
    execution.play("w0.1 hears c2", hold=unread)
    execution.play("w0.1 goes on", hold=[*unread, "server"])
    for _ in range(3):
        execution.play("w0.1 goes on", hold=["server", "w0.1 hears supervisor"])
    execution.run()


def a_worker_that_is_taken_for_dead(execution: Execution) -> None:
    """w0 is stopped in a run and taken for dead. Its successor is a run ahead when it writes its gradients."""
    execution.play("w0.1 begins 2")
    execution.kill("w0.1")
    stopped = ["w0.1 goes on", "w0.1 ends"]
    execution.play("w0.2 begins 3", hold=stopped)
    for _ in range(7):
        execution.play("w0.2 goes on", hold=["server", *stopped])
    for _ in range(3):
        execution.play("w0.1 goes on", hold=["server", "w0.1 ends"])
    execution.run()


class Story(NamedTuple):
    """``promise``: words of the one that breaks without the rule. ``script``: of every client."""

    tell: Callable[[Execution], None]
    promise: str
    script: list[Step]


SERIES = [Step(1, "f", "plain")] * 6
STORIES = {
    "worker_knows_clients": Story(mail_of_a_client_that_left, "is committed|waits for ever", SERIES),
    "died_means_reaped": Story(a_worker_that_is_taken_for_dead, "is committed", SERIES),
}


def broken(rule: str, rules: Rules) -> list[str]:
    """The promises that the story breaks."""
    story, found = STORIES[rule], []
    for seed in SEEDS:
        execution = Execution(seed, rules, QUIET, scripts=[Script(story.script)] * 2)
        try:
            story.tell(execution)
        except BrokenPromise as error:
            found.append(f"seed {seed}: {error}\n" + "\n".join(execution.trace))
    return found


@pytest.mark.parametrize("rule", STORIES)
def test_a_story_ends_well_with_its_rule(rule: str) -> None:
    assert broken(rule, Rules()) == []


@pytest.mark.parametrize("rule", STORIES)
def test_a_story_ends_badly_without_its_rule(rule: str) -> None:
    found = broken(rule, Rules(**{rule: False}))
    assert any(re.search(STORIES[rule].promise, each.splitlines()[0]) for each in found)
