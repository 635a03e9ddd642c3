"""The bars of ``cs-ctl top``: how long each process has computed between two looks. The parts of a step would make the
training note its step times for as long as somebody watches; ``cs-ctl profile`` has them.
"""

from __future__ import annotations

from .reading import Reading

__all__ = ["TITLE", "shares"]

#: What the bars show.
TITLE = "processor time since the last look"


def shares(before: Reading | None, now: Reading) -> list[tuple[str, float]]:
    """Names and shares from 0 to 1 for the time between two readings of one service. A process that computes on several
    processors at once has a share of 1."""
    if before is None or now.time <= before.time:
        return []
    known = {each.pid: each.cpu_seconds for each in before.processes}
    found = []
    for each in now.processes:
        earlier = known.get(each.pid)
        if each.cpu_seconds is not None and earlier is not None:
            found.append((each.label, min(1.0, max(0.0, (each.cpu_seconds - earlier) / (now.time - before.time)))))
    return found
