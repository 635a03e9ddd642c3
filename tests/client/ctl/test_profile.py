"""What a profile says of steps, and what it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from central_storage.ctl.cli import NO_SERVICE, main
from central_storage.ctl.profile import Commits, Profile, as_json, bandwidth, lines, profile, summary
from central_storage.timeline.rings import Step
from cs_proto.errors import InvalidArgumentError

MS = 1_000_000


def seen(*functions: int, commit: int = 1, data: int = 0, messages: int = 1, commits: Commits | None = None) -> Profile:
    """Of two equal steps; milliseconds."""
    longest = max(functions)
    waits = tuple((longest - each) * MS for each in functions)
    whole = (longest + commit + data + messages) * MS
    step = Step(7, whole, tuple(each * MS for each in functions), waits, commit * MS, data * MS, 0, messages * MS)
    return summary([step, step], commits)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            seen(10, 14, commit=3, messages=3),
            "replica 1 is 1.4 times slower than replica 0, and its function takes 70 %",
        ),
        (seen(10, 10, commit=5, messages=5), "the replicas' function takes 50 % of each step"),
        (seen(2, data=6), "the script's data takes 60 % of each step: pass more ahead"),
        (seen(1, 1, messages=2), "messages and wake-ups take 50 % of each step"),
        (seen(1, commit=8), "commits take 80 % of each step"),
        (
            seen(1, commit=8, commits=Commits(400_000_000, 72_000_000, 1e10, 1)),
            "commits take 80 % of each step: 400 MB at 90 % of memory bandwidth",
        ),
        (
            seen(1, commit=8, commits=Commits(64_000, 320_000, 1e10, 2000)),
            "commits take 80 % of each step, with 2000 variables of 32 B on average: make one variable of them",
        ),
        (
            seen(9, commit=1, commits=Commits(64_000, 320_000, 1e10, 2000)),
            "the replicas' function takes 82 % of each step, with 2000 variables of 32 B on average: make one",
        ),
        (summary([]), "no step ended while it was sampled"),
    ],
)
def test_the_bottleneck_is_named(found: Profile, said: str) -> None:
    assert found.bottleneck.startswith(said)
    assert lines(found)[-1] == found.bottleneck


def test_a_profile_has_the_means_of_each_part() -> None:
    found = seen(10, 14, commit=3, data=2, messages=1)
    assert lines(found)[:-1] == [
        "2 steps, 20 ms each (means)",
        "  replica 0: function                      10 ms    50 %",
        "  replica 0: waiting for others             4 ms    20 %",
        "  replica 1: function                      14 ms    70 %",
        "  replica 1: waiting for others             0 µs     0 %",
        "  commit                                    3 ms    15 %",
        "  messages and wake-ups                     1 ms     5 %",
        "  script: data, as far as waited for        2 ms    10 %",
        "  script: waiting                           0 µs     0 %",
    ]
    assert json.loads(json.dumps(as_json(found))) == {
        "steps": 2,
        "step": 0.02,
        "replicas": [{"function": 0.01, "waiting": 0.004}, {"function": 0.014, "waiting": 0.0}],
        "commit": 0.003,
        "messages": 0.001,
        "script": {"data": 0.002, "waiting": 0.0},
        "commits": None,
        "missing_moments": 0,
        "bottleneck": found.bottleneck,
    }


def test_a_copy_takes_time() -> None:
    assert bandwidth(1 << 16) > 0


@pytest.mark.parametrize(("steps", "seconds"), [(0, 5.0), (200, 0.0), (200, -1.0), (200, float("nan"))])
def test_a_sample_has_steps_and_time(steps: int, seconds: float) -> None:
    with pytest.raises(InvalidArgumentError, match="at least one step"):
        profile("/nowhere", steps, seconds)


def test_the_command_needs_a_service(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile"]) == NO_SERVICE
    assert main(["profile", str(place)]) == NO_SERVICE
    assert capsys.readouterr().err.startswith("cs-ctl: error: no service runs")
