"""Captured steps: stored as the Returns of the replicas, and brought to the other tables when something else comes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tests.model.records import KINDS, LOOKAHEAD, Return
from tests.model.rules import Rules
from tests.model.world import Account

#: The number of a kind, and a number that tells some of its steps apart.
Place = tuple[int, int]


class Captured(NamedTuple):
    """A stored step. ``count``: of its kind up to this one. ``account``: the number of the account that follows it."""

    count: int
    account: int
    returns: tuple[Return, ...]


class Plan(NamedTuple):
    """What a program may repeat."""

    kind: int
    returns: tuple[Return, ...]


class Next(NamedTuple):
    """The step that a program looks for. ``bases``: the numbers that the marks name, by replica."""

    run: int
    plan: Plan
    counts: tuple[int, ...]
    ticket: int
    t: int
    account: int
    bases: tuple[int, ...]


def span_of(record: Return, rules: Rules) -> int:
    """For the results of how many steps a peer may ask."""
    return 1 + LOOKAHEAD if record.series and rules.store_has_span else 1


def place_of(kind: int, record: Return, rules: Rules) -> Place:
    """The place of a step."""
    return kind, record.run % span_of(record, rules)


def last_of_kinds(captured: Mapping[Place, Captured]) -> dict[int, Place]:
    """The place of the last step of each kind."""
    last: dict[int, Place] = {}
    for place, step in captured.items():
        if place[0] not in last or step.count > captured[last[place[0]]].count:
            last[place[0]] = place
    return last


def with_account(
    captured: Mapping[Place, Captured], place: Place, account: Account, rules: Rules
) -> dict[Place, Captured]:
    """The captured steps that change by the steps of the account, which follow the one at ``place``."""
    last, followed = last_of_kinds(captured), captured[place]
    made = {place: followed._replace(account=0) if rules.fold_ends_account else followed}
    first = followed.returns[0].run
    end = first + account.begun
    counts, newest = account.of(end).counts, account.of(end).kind
    span, behind = span_of(captured[last[newest]].returns[0], rules), set(last)
    for run in range(max(first + 1, end + 1 - span), end + 1):
        begun = account.of(run)
        brought = captured[last[begun.kind]].returns
        bodies = zip(brought, begun.bodies, strict=True)
        ended = tuple([record._replace(run=run, value=body.value) for record, body in bodies])
        made[place_of(begun.kind, ended[0], rules)] = Captured(begun.counts[begun.kind], made[place].account, ended)
        behind.discard(begun.kind)
    for kind in behind:
        where = last[kind]
        if counts[kind] > captured[where].count and rules.account_counts_kinds:
            made[where] = made.get(where, captured[where])._replace(count=counts[kind])
    return made


class CapturedSteps:
    """What one server knows of the steps that the other tables do not have."""

    def __init__(self) -> None:
        self.may_begin = False
        self.forget()

    def forget(self) -> None:
        """The other tables have everything."""
        self.is_on = False
        self.held: list[tuple[Return, bool]] = []  # and whether a mark said it
        self.run = self.series = 0
        self.kinds: dict[tuple[str, str], int] = {}
        self.counts = [0] * KINDS
        self.tickets = 0
        self.applied: dict[str, int] = {}
        self.kind = -1
        self.plans: dict[int, Plan] = {}
        self.followers: dict[int, int] = {}
        self.followed: Place | None = None

    def is_next(self, record: Return) -> bool:
        """Whether a Return is of the step that all replicas are in, or of the next one if none is under way."""
        is_next = record.series in (self.series, 0, record.run) and record.run > self.run
        for other, _ in self.held:
            is_next = is_next and (other.run, other.series) == (record.run, record.series)
            is_next = is_next and other.replica != record.replica
        return is_next

    def decided(self, kind: int, *, by_marks: bool, returns: tuple[Return, ...]) -> None:
        """A step is the last one of its kind, and its plan if all Returns came by marks."""
        self.plans.pop(kind, None)
        if by_marks:
            self.plans[kind] = Plan(kind, returns)

    def note(self, kind: int, returned: Return, run: int) -> None:
        """A step of that kind is the last one."""
        if self.kind >= 0:
            self.followers[self.kind] = kind
        self.kind, self.run, self.series = kind, run, returned.series
        self.counts[kind] += 1
        self.tickets += 1
        self.applied[returned.function] = self.applied.get(returned.function, 0) + 1

    def plan(self, base: Return | None, rules: Rules) -> Plan | None:
        """The plan of the next step: the one that is expected, or the one of which the first replica names ``base``."""
        if self.followed is None:
            return None
        found = self.plans.get(self.followers.get(self.kind, self.kind))
        if base is not None:
            alike = (each for each in self.plans.values() if _alike(each.returns[0], base))
            found = next(alike, None)
        if found is None or (found.returns[0].series not in (0, self.series) and rules.program_stays_in_series):
            return None
        return found


def _alike(record: Return, base: Return) -> bool:
    return record._replace(run=0, value=0) == base._replace(run=0, value=0)
