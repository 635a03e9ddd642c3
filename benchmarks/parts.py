"""Where the time of a step goes, in the real processes: its parts, its messages and its wake-ups.

A step of ``run`` lasts from the call to its results. Where the script is ahead, one lasts from a commit to the next:
what the script does meanwhile is waited for by nobody but who wants its processor, and stands apart.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import report
from works import EMPTY, FIRST_STEP, WORKS, Apply, Digits, Embedding

from central_storage.timeline.rings import PARTS, SCRIPT

if TYPE_CHECKING:
    from bench import Bench, Peer

STEPS = 200
SHOWN = (EMPTY, "digits", "read-400MBx1000", "sgd-1MB", "embedding")

#: Who wakes whom: a wake-up counts from the last message of the one to the first sign of the other. What is first named
#: is waited for in a step of ``run``, what is last named where the script is ahead.
WAKES = {
    ("client", "worker"): "wake: client to worker",
    ("server", "client"): "wake: server to client",
    ("worker", "server"): "wake: worker to server",
    ("server", "worker"): "wake: server to worker",
}

Moments = list[tuple[str, int]]
#: Nanoseconds by part, how many messages were sent and how often somebody was woken.
Step = tuple[Counter[str], int, int]


def table(peer: Peer, bench: Bench, works: Iterable[str]) -> str:
    """For people: medians over steps of ``peer``; of what two workers do, the longer. Empty where ``bench`` notes that
    it failed."""
    shown = []
    for work in works:
        if work == FIRST_STEP:
            continue
        left = recorded(peer, bench, work)
        if left is None:
            return ""
        shown += ["", *lines(work, left, is_ahead(work))]
    return "\n".join(shown).strip("\n")


def recorded(peer: Peer, bench: Bench, work: str) -> list[tuple[str, Moments]] | None:
    """The moments of every process of ``peer`` at a work, by role. None where ``bench`` notes that something failed."""
    known = len(bench.failures)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "timeline.json")
        os.environ["CS_TIMELINE"] = str(path)
        bench.run(peer, {work: STEPS})
        del os.environ["CS_TIMELINE"]
        return left_in(path) if len(bench.failures) == known else None


def left_in(timeline: Path) -> list[tuple[str, Moments]]:
    """The moments of every process in the timeline of a service, by role."""
    events = json.loads(timeline.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    roles = {"script": "client", "server": "server", "worker": "worker"}
    return [
        (
            roles[name.split()[0]],
            sorted(
                # A slice of a row ends at a moment.
                [
                    (event["args"]["moment"], round(1000 * (event["ts"] + event["dur"])))
                    for event in events
                    if event["pid"] == row and event.get("cat") == "step"
                ],
                key=lambda moment: moment[1],
            ),
        )
        for row, name in names.items()
    ]


def bounds(left: Sequence[tuple[str, Moments]], is_ahead: bool, steps: int) -> list[tuple[int, int]]:
    """Between which moments the last ``steps`` lie."""
    if is_ahead:
        return [*pairwise(_whens(left, "server", "committed")[-steps - 1 :])]
    begun, over = (_whens(left, "client", name)[-steps:] for name in ("begun", "over"))
    return [*zip(begun, over, strict=True)]


def lines(work: str, left: Sequence[tuple[str, Moments]], is_ahead: bool, steps: int = STEPS) -> list[str]:
    """The table of the last ``steps`` of one work, from the moments of every process, by role."""
    taken = [_step(left, first, last) for first, last in bounds(left, is_ahead, steps)]
    script, wakes = [*SCRIPT.values()], [*WAKES.values()]
    parts = [*PARTS.values(), *wakes[2:]] if is_ahead else [*script[:3], *PARTS.values(), *script[3:], *wakes[:3]]
    shown = [f"{'parts of ' + work:<32}{'median':>10}", *_medians([*parts, "all"], taken)]
    if is_ahead:
        shown += ["  meanwhile, in the script:", *_medians(script, taken)]
    for what, place in (("messages", 1), ("wake-ups", 2)):
        shown.append(f"  {what:<30}{statistics.median([step[place] for step in taken]):>10g}")
    return shown


def is_ahead(work: str) -> bool:
    """Whether the script is ahead of its steps."""
    kind = WORKS[work]
    return kind.is_ahead if isinstance(kind, Digits) else isinstance(kind, Apply | Embedding)


def _whens(left: Sequence[tuple[str, Moments]], role: str, name: str) -> list[int]:
    return [when for each, moments in left if each == role for noted, when in moments if noted == name]


def _medians(parts: Iterable[str], steps: list[Step]) -> list[str]:
    """A line for each part: its median over the steps that have it, and how many have it if not all do."""
    found = [(part, [durations[part] / 1e9 for durations, _, _ in steps if part in durations]) for part in parts]
    shown = []
    for part, each in found:
        share = "" if len(each) == len(steps) else f"   in {len(each) / len(steps):.0%} of the steps"
        if each:
            shown.append(f"  {part:<30}{report.shown(statistics.median(each)):>10}{share}")
    return shown


def _step(left: Sequence[tuple[str, Moments]], first: int, last: int) -> Step:
    """What lies between two moments."""
    longest: Counter[str] = Counter({"all": last - first})
    sent: dict[str, list[int]] = {}
    woken: dict[str, list[int]] = {}
    heard: dict[str, list[int]] = {}  # whether it slept or was looking
    for role, moments in left:
        whens = [when for _, when in moments]
        mine = moments[bisect_left(whens, first) : bisect_right(whens, last)]
        durations: Counter[str] = Counter()
        for (_, before), (name, when) in pairwise(mine):
            part = PARTS.get((role, name)) or SCRIPT.get((role, name))
            if part:
                durations[part] += when - before
        for part, nanoseconds in durations.items():
            longest[part] = max(longest[part], nanoseconds)
        sent.setdefault(role, []).extend(when for name, when in mine if name == "sent")
        woken.setdefault(role, []).extend(when for name, when in mine if name == "woken")
        heard.setdefault(role, []).extend(when for name, when in mine if name in ("woken", "found"))
    for (waker, sleeper), wake in WAKES.items():
        said = sent.get(waker, [])
        signs = [when for when in heard.get(sleeper, []) if when > min(said, default=first)]
        if sleeper == "worker":  # the first of several
            said = [when for when in said if when < min(signs, default=last)]
        since = max(said, default=first)
        after = [when for when in signs if when > since]
        if after:
            longest[wake] = min(after) - since
    return longest, sum(map(len, sent.values())), sum(map(len, woken.values()))
