"""The one protocol of all peers: a program that is given works and prints a line of JSON for each.

    python -m peers.NAME WORK=STEPS ...      {"work": "adam-1MB", "seconds": 0.00021, "at": 5312.25}

A work may be ``WORK/WAY`` where the peer has several ways to do it. ``seconds`` is one step; ``at`` is when the last
one was done, on the clock ``time.monotonic``, which processes share. A program whose result is not that of NumPy fails.
How a trial is opened is all that a peer has to say.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from works import FIRST_STEP, WORKS

WARM = 2  # steps that are not counted


class Trial(Protocol):
    """A work in the hands of a peer, ready for its first step."""

    def run(self, steps: int) -> None:
        """Do so many further steps, and return when the last is done everywhere."""

    def check(self) -> None:
        """Raise AssertionError unless what has been computed is what the work says."""


def main(opened: Callable[..., AbstractContextManager[Trial]], is_speaker: bool = True) -> None:
    """Do what the command line says. ``opened(work, steps)``, with the way as a third argument where there is one,
    gives a trial for at most so many steps in all; where a peer is several processes that all come here, one is the
    speaker.
    """
    for argument in sys.argv[1:]:
        name, _, steps = argument.partition("=")
        seconds, at = _measured(opened, name, int(steps))
        if is_speaker:
            print(json.dumps({"work": name, "seconds": seconds, "at": at}), flush=True)


def _measured(opened: Callable[..., AbstractContextManager[Trial]], name: str, steps: int) -> tuple[float, float]:
    """Seconds a step, and when the last was done. What the trial held is free when this returns."""
    work, *way = name.split("/")
    warm = 0 if work == FIRST_STEP else WARM
    with opened(WORKS[work], warm + steps, *way) as trial:
        trial.run(warm)
        begun = time.perf_counter()
        trial.run(steps)
        seconds = (time.perf_counter() - begun) / steps
        at = time.monotonic()
        trial.check()
    return seconds, at
