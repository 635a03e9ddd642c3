"""Where the time of a step goes, in the real processes: the parts of a run, its messages and its wake-ups."""

from __future__ import annotations

import os
import statistics
import tempfile
from bisect import bisect_left, bisect_right
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import report
from works import EMPTY

if TYPE_CHECKING:
    from bench import Bench, Peer

STEPS = 300
WORKS = (EMPTY, "digits")

#: By role and moment: the part of the step that ends there. What is not named is not waited for by anybody.
PARTS = {
    ("client", "pickled"): "pickle check",
    ("client", "sent"): "encode, send (client)",
    ("worker", "decoded"): "decode (worker)",
    ("worker", "called"): "arguments, seeds",
    ("worker", "returned"): "function",
    ("worker", "sent"): "result, encode, send (worker)",
    ("server", "decoded"): "decode (server)",
    ("server", "decided"): "merge: decide, write down",
    ("server", "committed"): "commit",
    ("server", "sent"): "encode, send (server)",
    ("client", "decoded"): "decode (client)",
    ("client", "over"): "result (client)",
}
#: Who wakes whom: a wake-up counts from the last message of the one to the first sign of the other.
WAKES = (("client", "worker", "wake: client to worker"), ("worker", "server", "wake: worker to server"))
LAST = ("server", "client", "wake: server to client")

Moments = list[tuple[str, int]]


def table(peer: Peer, bench: Bench) -> str:
    """For people: medians over steps of ``peer``; of what two workers do, the longer. Empty where ``bench`` notes that
    it failed."""
    shown = []
    for work in WORKS:
        with tempfile.TemporaryDirectory() as directory:
            os.environ["CS_MOMENTS"] = directory
            bench.run(peer, {work: STEPS})
            del os.environ["CS_MOMENTS"]
            if bench.failures:
                return ""
            shown += ["", *lines(work, _left(Path(directory)))]
    return "\n".join(shown).strip("\n")


def _left(directory: Path) -> list[tuple[str, Moments]]:
    """The moments of every process, by role."""
    found = []
    for path in sorted(directory.iterdir()):
        moments = [line.split() for line in path.read_text().splitlines()]
        found.append((path.name.partition("-")[0], [(name, int(when)) for name, when in moments]))
    return found


def lines(work: str, left: list[tuple[str, Moments]]) -> list[str]:
    """The table of one work, from the moments of every process, by role."""
    client = next(moments for role, moments in left if role == "client")
    begun = [when for name, when in client if name == "begun"][-STEPS:]
    over = [when for name, when in client if name == "over"][-STEPS:]
    steps = [_step(left, first, last) for first, last in zip(begun, over, strict=True)]
    shown = [f"{'parts of ' + work:<32}{'median':>10}"]
    for part in [*PARTS.values(), *(wake for _, _, wake in (*WAKES, LAST)), "all"]:
        seconds = [durations[part] / 1e9 for durations, _, _ in steps if part in durations]
        if seconds:
            shown.append(f"  {part:<30}{report.shown(statistics.median(seconds)):>10}")
    for what, place in (("messages", 1), ("wake-ups", 2)):
        shown.append(f"  {what:<30}{statistics.median([step[place] for step in steps]):>10g}")
    return shown


def _step(left: list[tuple[str, Moments]], first: int, last: int) -> tuple[Counter[str], int, int]:
    """Nanoseconds by part, how many messages were sent and how often somebody was woken, between two moments."""
    longest: Counter[str] = Counter({"all": last - first})
    sent: dict[str, list[int]] = {}
    woken: dict[str, list[int]] = {}
    heard: dict[str, list[int]] = {}  # whether it slept or was looking
    for role, moments in left:
        whens = [when for _, when in moments]
        mine = moments[bisect_left(whens, first) : bisect_right(whens, last)]
        durations: Counter[str] = Counter()
        for (_, before), (name, when) in pairwise(mine):
            if (role, name) in PARTS:
                durations[PARTS[role, name]] += when - before
        for part, nanoseconds in durations.items():
            longest[part] = max(longest[part], nanoseconds)
        sent.setdefault(role, []).extend(when for name, when in mine if name == "sent")
        woken.setdefault(role, []).extend(when for name, when in mine if name == "woken")
        heard.setdefault(role, []).extend(when for name, when in mine if name in ("woken", "found"))
    for waker, sleeper, wake in (*WAKES, LAST):
        since = max(sent.get(waker, [first]), default=first)
        after = [when for when in heard.get(sleeper, []) if when > since]
        if after:
            longest[wake] = min(after) - since
    return longest, sum(map(len, sent.values())), sum(map(len, woken.values()))
