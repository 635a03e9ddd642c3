"""Executions that are too rare for a short search, told step by step, with the rule and without it."""

from __future__ import annotations

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
    execution.play("w0.1 begins 2001", hold=unread)
    execution.play("w0.1 begins 100", hold=["server", "w0.1 hears supervisor"])
    execution.run()


def steps_of_a_client_that_left(execution: Execution) -> None:
    """Both workers have a step of c1 to begin, which leaves. They return from it when the session is that of c2, and
    they have not heard that c1 has left."""
    execution.play("w0.1 begins 1003")
    execution.play("w1.1 begins 1003", hold=["w0.1"])
    execution.kill("c1")
    deaf = ["w0.1 hears supervisor", "w1.1 hears supervisor"]
    execution.play("client sends", hold=["w0.1", "w1.1"])
    execution.play("server passes 1003", hold=[*deaf, "client", "w0.1 hears", "w1.1 hears"])
    execution.run()


def a_worker_that_is_taken_for_dead(execution: Execution) -> None:
    """w0 is stopped in a run and taken for dead. Its successor is a run ahead when it writes its gradients."""
    execution.play("w0.1 begins 1002")
    execution.kill("w0.1")
    stopped = ["w0.1 goes on", "w0.1 ends"]
    execution.play("w0.2 begins 1003", hold=stopped)
    for _ in range(7):
        execution.play("w0.2 goes on", hold=["server", *stopped])
    for _ in range(3):
        execution.play("w0.1 goes on", hold=["server", "w0.1 ends"])
    execution.run()


def answers_that_are_lost(execution: Execution) -> None:
    """Three runs pass before the client has heard of one of them, and the server dies with its answers unsent."""
    execution.play("client reads")
    execution.play("server passes 1004", hold=["c1 hears server"])
    execution.kill("server")
    execution.run()


def a_base_of_a_worker_that_died(execution: Execution) -> None:
    """w1 dies when it has said its base, and its successor registers before w0 returns, so before the base counts. The
    successor says a base with the same number, which is refused."""
    execution.play("server hears Return of w1.1", hold=["w0.1 begins"])
    execution.kill("w1.1")
    execution.play("server hears Register of w1.2", hold=["w0.1 begins"])
    execution.run()


class Story(NamedTuple):
    """``promise``: words of the one that breaks without the rule. ``script``: of every client."""

    tell: Callable[[Execution], None]
    promise: str
    script: list[Step]


SERIES = [Step(1, "f", "plain")] * 5
CHANGE = [Step(0, "f", "plain"), Step(0, "g", "refused"), Step(0, "g", "plain")]
STORIES = {
    "worker_takes_growing_runs": Story(mail_of_a_client_that_left, "is committed", SERIES),
    "pass_is_of_this_session": Story(steps_of_a_client_that_left, "is committed", SERIES),
    "died_means_reaped": Story(a_worker_that_is_taken_for_dead, "is committed", SERIES),
    "resume_hears_all_passes": Story(answers_that_are_lost, "waits for ever", SERIES),
    "base_is_of_its_incarnation": Story(a_base_of_a_worker_that_died, "fails for no reason", CHANGE),
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
    assert any(STORIES[rule].promise in each.splitlines()[0] for each in found)
