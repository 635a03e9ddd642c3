"""Warnings at the user's line."""

from __future__ import annotations

import warnings
from typing import Any

from central_storage.diagnostics.callers import call_site, warn

CALL = compile("warn('no gradient', UserWarning)\nwarn('no gradient', UserWarning)", "step.py", "exec")


def test_a_function_that_is_sent_again_in_every_run_warns_once_a_line() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for _ in range(3):
            exec(CALL, {"warn": warn, "__name__": "user"})
    assert [(warning.filename, warning.lineno) for warning in told] == [("step.py", 1), ("step.py", 2)]


def test_the_users_filters_hold() -> None:
    def told_under(action: Any) -> int:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter(action)
            for _ in range(2):
                exec(CALL, {"warn": warn, "__name__": "user"})
        return len(told)

    assert [told_under(action) for action in ("always", "ignore", "default", "default")] == [4, 0, 2, 2]


def site_of(source: str) -> tuple[str, ...]:
    told: dict[str, object] = {"call_site": call_site, "__name__": "user"}
    exec(compile(source, "step.py", "exec"), told)
    return tuple(str(told[name]) for name in ("first", "second"))


def test_a_call_site_is_that_of_this_code_and_this_line() -> None:
    """Also when code comes and goes, so that other code has the identity of the code before it."""
    for number in range(600):
        lines = number % 7
        assert site_of("\n" * lines + "first = call_site()\nsecond = call_site()") == (
            f"step.py:{lines + 1}",
            f"step.py:{lines + 2}",
        )
