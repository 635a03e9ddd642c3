"""Mailboxes and marks, and the bases that a worker and its server keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tests.model.records import BASES, Return


class Body(NamedTuple):
    """The bytes of a mark: the number of the base, and the value."""

    base: int
    value: int


NO_BODY = Body(0, 0)


@dataclass
class Lane:
    """One direction of a mailbox, without its messages. A mark is the number of a run. The reader stores ``left``, the
    writer everything else; ``taken`` is the reader's own."""

    mark: int = 0
    body: Body = NO_BODY
    left: bool = False
    taken: int = 0

    @property
    def is_new(self) -> bool:
        """Whether there is a mark that was not taken."""
        return self.mark != self.taken

    def take(self) -> tuple[int, Body]:
        """The run and the bytes of the last mark."""
        self.taken = self.mark
        return self.mark, self.body


@dataclass
class Mailbox:
    """Between one server and one worker. Both processes end with what only they know of it."""

    to_server: Lane = field(default_factory=Lane)
    to_worker: Lane = field(default_factory=Lane)


class Bases:
    """The last Returns that were sent as messages and that a mark may name."""

    def __init__(self, limit: int = BASES) -> None:
        self._limit = limit
        self._kept: dict[int, Return] = {}  # the oldest first

    def keep(self, record: Return) -> bool:
        """Keep a Return that was sent as a message. False if it is no base."""
        if record.failed or record.kind != "plain":
            return False
        self._kept.pop(record.run, None)
        self._kept[record.run] = record
        if len(self._kept) > self._limit:
            del self._kept[next(iter(self._kept))]
        return True

    def get(self, number: int) -> Return | None:
        """The base with this number."""
        return self._kept.get(number)

    def find(self, series: int, function: str) -> Return | None:
        """The newest base of runs that bring this."""
        for base in reversed(self._kept.values()):
            if (base.series, base.function) == (series, function):
                return base
        return None
