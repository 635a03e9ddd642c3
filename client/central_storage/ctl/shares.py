"""What the bars of ``cs-top`` show: how long each process has computed between two looks, or the parts of a step.

Processor time costs a training nothing. For the parts of a step the training notes its step times, so :class:`Parts`
reads them only while somebody wants to see them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from central_storage.timeline.rings import Rings, Window, steps
from cs_proto.printable import counted

from .profile import Profile, duration, summary
from .reading import Reading
from .screen import Bars

__all__ = ["Parts", "parts", "processor", "processor_bars"]

# The bars show the means of at most so many steps, and of as many as so many places of each process contain. A
# process reaches about 10 places in a step, and to decode them takes processor time from the training.
_STEPS, _PLACES = 40, 400
# Seconds: what was noted earlier is not shown.
_WINDOW = 60.0


def processor(before: Reading | None, now: Reading) -> dict[str, float]:
    """Shares by process for the time between two readings of one service: 1 is the time of one processor, and a process
    that computes on several at once has more."""
    if before is None or now.time <= before.time:
        return {}
    known = {each.pid: each.cpu_seconds for each in before.processes}
    found = {}
    for each in now.processes:
        earlier = known.get(each.pid)
        if each.cpu_seconds is not None and earlier is not None:
            found[each.label] = max(0.0, (each.cpu_seconds - earlier) / (now.time - before.time))
    return found


def processor_bars(shares: Mapping[str, float], why: str = "") -> Bars:
    """The bars of what :func:`processor` has found. ``why``: why these are not the parts of a step."""
    because = f"; no parts of a step: {why}" if why else ""
    return Bars(f"processor time since the last look{because}", tuple(shares.items()))


def parts(found: Profile) -> tuple[tuple[str, float], ...]:
    """Names and shares of a step, those of the whole service first."""
    seconds = {
        "commit": found.commit,
        "messages": found.messages,
        "script data": found.data,
        "script waiting": found.script_waiting,
    }
    for replica, each in enumerate(found.replicas):
        seconds[f"w{replica} function"] = each.function
        seconds[f"w{replica} waiting"] = each.waiting
    return tuple((name, taken / found.step) for name, taken in seconds.items()) if found.step else ()


class Parts:
    """The parts of the last steps of one service. From :meth:`look` to :meth:`close` the training notes its step times;
    a later look begins anew."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._rings: Rings | None = None
        self._window: Window | None = None
        self._since = 0.0
        self._text = "parts of a step: not sampled yet"
        self._shares: tuple[tuple[str, float], ...] = ()

    @property
    def bars(self) -> Bars:
        """What the last look has found."""
        noted = "nothing is noted now" if self._rings is None else "the training notes step times"
        return Bars(f"{self._text} ({noted})", self._shares)

    def look(self) -> None:
        """Take in the steps that have ended. Raises as :class:`central_storage.timeline.rings.Rings`."""
        if self._rings is not None and self._rings.is_over():
            self.close()  # another supervisor may have taken over
        if self._rings is None or self._window is None:
            self._rings = Rings(self._address)
            self._window = Window(self._rings, places=_PLACES, seconds=_WINDOW)
            self._since = time.monotonic()
        found = summary(steps(self._window.read())[-_STEPS:])
        self._shares = parts(found)
        self._text = f"parts of the last {counted(found.steps, 'step')}, {duration(found.step)} each"
        if not found.steps:
            self._text = f"parts of a step: none ended in the last {min(_WINDOW, time.monotonic() - self._since):.0f} s"

    def close(self) -> None:
        """Have nothing noted any more. What the last look has found stays. Idempotent."""
        if self._rings is not None:
            self._rings.close()
        self._rings = self._window = None
