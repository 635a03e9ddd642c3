"""The profile of a running training: samples its steps, and names what takes the most of their time.

It reads the rings of the processes and asks the server for the sizes of the variables. The training notes
its moments meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from central_storage.observer.blocking import connect
from central_storage.timeline.rings import RecordedMoments, Rings, Step, steps
from cs_proto import segment_names
from cs_proto.errors import CentralStorageError, InvalidArgumentError
from cs_proto.frozen import frozen
from cs_proto.printable import counted

from .printing import number

__all__ = [
    "Commits",
    "Profile",
    "Replica",
    "as_json",
    "bandwidth",
    "bottleneck",
    "check",
    "duration",
    "lines",
    "profile",
    "summary",
]

# Seconds between two looks at the rings: in this time a process notes far fewer moments than a ring has places.
_LOOK_EVERY = 0.2
# A replica is named as slower than another one from this ratio on.
_SLOWER = 1.15
# Where commits change at least so many variables, of fewer bytes on average, most of the work is done for each
# variable, and not for each byte.
_MANY = 100
_TINY_NBYTES = 1024
# Bytes that are copied to measure the bandwidth of the memory: more than a cache holds.
_COPIED_NBYTES = 64 << 20


@frozen
class Replica:
    """Mean seconds of a step in the function of one replica, and in its wait for the other replicas."""

    function: float
    waiting: float


@frozen
class Commits:
    """The bytes of the dense variables that a commit changes, the bytes that it reads and writes for that, the
    bytes a second that a copy reads and writes here, and the number of these variables."""

    variable_nbytes: int
    moved_nbytes: int
    bandwidth: float
    variables: int


@frozen
class Profile:
    """What :func:`profile` has seen. Times are mean seconds of a step. ``missing`` is how many moments were overwritten
    before they were read; ``commits`` is None where nothing dense was committed."""

    steps: int
    step: float
    replicas: tuple[Replica, ...]
    commit: float
    messages: float
    data: float
    script_waiting: float
    commits: Commits | None
    missing: int
    bottleneck: str


def profile(address: str, count: int = 200, seconds: float = 5.0) -> Profile:
    """Sample ``count`` steps of the service in the run directory ``address``, or the steps of ``seconds``.

    Raises InvalidArgumentError for numbers that make no sense, and otherwise as
    :class:`central_storage.timeline.rings.Rings` and :func:`central_storage.connect` do. A service that ends meanwhile
    is not an error.
    """
    check(count, seconds)
    connect(address).close()  # a service that is just starting has all rings when it answers
    with Rings(address) as rings:
        committed = _Committed(address, rings)
        recorded = RecordedMoments(rings)
        found, is_last = list[Step](), False
        deadline = time.monotonic() + seconds
        while len(found) < count and not is_last:
            time.sleep(_LOOK_EVERY)
            is_last = rings.is_over() or time.monotonic() >= deadline
            recorded.look()
            if is_last or recorded.count("w0", "returned") > count:
                found = steps(recorded.moments())
        missing = sum(recorded.missing.values())
        return summary(found[:count], committed.commits(len(rings.rings) - 2), missing)


def check(count: int, seconds: float) -> None:
    """Raise InvalidArgumentError if a profile cannot sample so many steps, or for so many seconds."""
    if count < 1 or not 0 < seconds < 1e6:
        raise InvalidArgumentError(
            f"a profile needs at least one step and a time of more than 0 and less than 1e6 seconds, not {count} steps "
            f"in {seconds!r} seconds"
        )


def summary(found: Sequence[Step], commits: Commits | None = None, missing: int = 0) -> Profile:
    """The means over these steps."""

    def mean(of: Callable[[Step], float]) -> float:
        return sum(map(of, found)) / len(found) / 1e9 if found else 0.0

    count = len(found[0].functions) if found else 0
    replicas = tuple(
        Replica(mean(lambda step, r=r: step.functions[r]), mean(lambda step, r=r: step.waits[r]))  # type: ignore[misc]
        for r in range(count)
    )
    whole, commit = mean(lambda step: step.whole), mean(lambda step: step.commit)
    data, messages = mean(lambda step: step.data), mean(lambda step: step.messages)
    waiting = mean(lambda step: step.script_waits)
    named = bottleneck(whole, replicas, commit, messages, data, commits)
    return Profile(len(found), whole, replicas, commit, messages, data, waiting, commits, missing, named)


def bottleneck(
    step: float, replicas: Sequence[Replica], commit: float, messages: float, data: float, commits: Commits | None
) -> str:
    """The part that takes the most of a step, in a sentence."""
    if not replicas:
        return "no step ended while it was sampled: cs-ctl status says what it waits for; --seconds samples for longer"
    slowest, fastest = (pick(replicas, key=lambda each: each.function) for pick in (max, min))
    parts = {"data": data, "function": slowest.function, "commit": commit, "messages": messages}
    most = max(parts, key=parts.__getitem__)
    share = f"{100 * parts[most] / step:.0f} % of each step" if step else "most of each step"
    if most == "data":
        return f"the script's data takes {share}: pass more ahead"
    if most == "messages":
        return f"messages and wake-ups take {share}: give each step more work, or send steps ahead with run_steps"
    many = _many_variables(commits)
    if most == "commit":
        if commits is None or many:
            return f"commits take {share}{many}"
        of_bandwidth = commits.moved_nbytes / commit / commits.bandwidth
        return (
            f"commits take {share}: {commits.variable_nbytes / 1e6:.3g} MB at {100 * of_bandwidth:.0f} % of memory "
            "bandwidth"
        )
    ratio = slowest.function / fastest.function if fastest.function else 1.0
    if ratio >= _SLOWER:
        named = f"replica {replicas.index(slowest)} is {ratio:.1f} times slower than replica {replicas.index(fastest)}"
        return f"{named}, and its function takes {share}"
    return f"the replicas' function takes {share}{many}"


def _many_variables(commits: Commits | None) -> str:
    """What to do about the number of variables, if there are many tiny ones, and otherwise nothing."""
    if commits is None or commits.variables < _MANY or commits.variable_nbytes >= _TINY_NBYTES * commits.variables:
        return ""
    mean = commits.variable_nbytes / commits.variables
    return f", with {commits.variables} variables of {mean:.0f} B on average: make one variable of them"


class _Committed:
    """Which of the variables that exist when a sample begins its commits change."""

    def __init__(self, address: str, rings: Rings) -> None:
        self._address = address
        with connect(address) as observer:
            self._variables = observer.variables()
        self._versions = rings.mapped(segment_names.versions())
        self._before = self._numbers()

    def commits(self, replicas: int) -> Commits | None:
        """What a commit changes, if the server still answers."""
        before, after = self._before, self._numbers()
        changed = [
            each.array.nbytes
            for each, *numbers in zip(self._variables, before, after, strict=True)
            if not each.spec.sparse and numbers[0] != numbers[1]
        ]
        nbytes = sum(changed)
        if not nbytes:
            return None
        with suppress(CentralStorageError), connect(self._address) as observer:
            counters = observer.statistics()
            slots = counters.slot_nbytes * nbytes // counters.parameter_nbytes
            # Each value and each slot is read and written, and the gradient of each replica is read.
            return Commits(nbytes, (2 + replicas) * nbytes + 2 * slots, bandwidth(), len(changed))
        return None

    def _numbers(self) -> list[int]:
        """One number for each variable, which changes with every commit that changes the variable."""
        if self._versions is None:
            return [0] * len(self._variables)
        numbers = self._versions.elements("uint64")
        return [int(numbers[each.number]) for each in self._variables]


def bandwidth(nbytes: int = _COPIED_NBYTES) -> float:
    """Bytes a second that a copy of ``nbytes`` reads and writes in one thread here: the best of three."""
    source = np.ones(nbytes, np.uint8)
    target = np.empty_like(source)
    best = float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - begun)
    return 2 * nbytes / best


def as_json(found: Profile) -> dict[str, object]:
    """The profile as JSON's values: times in seconds, sizes in bytes."""
    commits = found.commits
    return {
        "steps": found.steps,
        "step": found.step,
        "replicas": [{"function": each.function, "waiting": each.waiting} for each in found.replicas],
        "commit": found.commit,
        "messages": found.messages,
        "script": {"data": found.data, "waiting": found.script_waiting},
        "commits": None
        if commits is None
        else {
            "variable_nbytes": commits.variable_nbytes,
            "moved_nbytes": commits.moved_nbytes,
            "bandwidth": commits.bandwidth,
            "variables": commits.variables,
        },
        "missing_moments": found.missing,
        "bottleneck": found.bottleneck,
    }


def lines(found: Profile) -> list[str]:
    """The profile as lines of text, of which the last names the bottleneck."""
    if not found.steps:
        return [found.bottleneck]
    shown = [f"{counted(found.steps, 'step')}, {duration(found.step)} each (means)"]
    for replica, each in enumerate(found.replicas):
        shown.append(_line(f"replica {replica}: function", each.function, found.step))
        shown.append(_line(f"replica {replica}: waiting for others", each.waiting, found.step))
    shown.append(_line("commit", found.commit, found.step))
    shown.append(_line("messages and wake-ups", found.messages, found.step))
    shown.append(_line("script: data, as far as waited for", found.data, found.step))
    shown.append(_line("script: waiting", found.script_waiting, found.step))
    if found.missing:
        shown.append(f"overwritten before this command read: {counted(found.missing, 'moment')}")
    return [*shown, found.bottleneck]


def _line(what: str, seconds: float, step: float) -> str:
    return f"  {what:<36}{duration(seconds):>10}{100 * seconds / step:>6.0f} %"


def duration(seconds: float) -> str:
    """How long something lasts, with three digits that count.

    Examples:
        >>> duration(0.00561), duration(0.00002), duration(1.114), duration(1234.5)
        ('5.61 ms', '20 µs', '1.11 s', '1234 s')
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{number(seconds / unit)} {name}"
    return f"{number(seconds * 1e6)} µs"
