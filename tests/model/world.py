"""The world: shared memory, the server's store, FIFO channels, mailboxes and the processes.

A process is a small class. Its ``actions()`` are those that it can take now. A sequence of stores is a generator that
yields after every single store; while one is under way its next store is the only action of the process. A kill drops
the process with its generator: what is stored stays, the rest never happens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from tests.model.marks import NO_BODY, Body, Mailbox
from tests.model.records import KINDS, PIECES, STEPS, Gradient, Record, Update
from tests.model.rules import Rules

if TYPE_CHECKING:
    from tests.model.checks import Ledger
    from tests.model.client import Client
    from tests.model.engine import Tables
    from tests.model.server import Server
    from tests.model.supervisor import Supervisor
    from tests.model.worker import Worker

SERVER = "server"
SUPERVISOR = "supervisor"


def worker_name(replica: int, incarnation: int) -> str:
    """The name of an incarnation of a worker, by which others write to it."""
    return f"w{replica}.{incarnation}"


class Action(NamedTuple):
    """``pace`` names what may be slow as one: a process, or what comes from the supervisor."""

    pace: str
    name: str
    take: Callable[[], None]


# --- memory -----------------------------------------------------------------------------------------------------------


@dataclass
class Begun:
    """What the account has of one run: its kind, how many steps of each kind there were up to it, and the bytes of the
    marks."""

    kind: int = 0
    counts: tuple[int, ...] = (0,) * KINDS
    bodies: list[Body] = field(default_factory=list)


@dataclass
class Account:
    """``number`` is that of the stored step that the account follows; ``begun`` counts the steps after it."""

    number: int = 1
    begun: int = 0
    size: int = STEPS
    replicas: int = 2
    steps: dict[int, Begun] = field(default_factory=dict)

    def of(self, run: int) -> Begun:
        """The place of a run."""
        return self.steps.setdefault(run % self.size, Begun(bodies=[NO_BODY] * self.replicas))


@dataclass
class Memory:
    """What outlives every process."""

    account: Account = field(default_factory=Account)
    #: By replica, of all incarnations.
    gradients: list[Gradient | None] = field(default_factory=list)
    #: The variables: all updates of each piece.
    pieces: list[tuple[Update, ...]] = field(default_factory=lambda: [() for _ in range(PIECES)])
    #: COMMITS: odd while the variables change.
    commits: int = 0
    #: The undo area: TAG is (ticket, next piece); KEPT is (ticket, piece, what it was); DONE is a ticket.
    tag: tuple[int, int] = (0, 0)
    kept: tuple[int, int, tuple[Update, ...]] = (0, 0, ())
    done: int = 0


# --- processes and channels -------------------------------------------------------------------------------------------


class World:
    """Everything there is. ``store`` is the last flush of the server."""

    def __init__(self, rules: Rules, replicas: int, rng: random.Random) -> None:
        self.rules, self.replicas, self.rng = rules, replicas, rng
        account = Account(size=STEPS if rules.account_exceeds_lookahead else 1, replicas=replicas)
        self.memory = Memory(account, [None] * replicas)
        self.store: Tables
        self.ledger: Ledger
        self.supervisor: Supervisor
        self.server: Server | None = None
        self.client: Client | None = None
        self.workers: dict[str, Worker] = {}
        #: By number: what a worker has offered, for a server that opens it.
        self.mailboxes: list[Mailbox] = []
        #: By receiver that is alive, then by sender.
        self.inboxes: dict[str, dict[str, deque[Record]]] = {}

    def open_inbox(self, name: str) -> None:
        """A process begins; whatever was sent to one of its name before is gone."""
        self.inboxes[name] = {}

    def send(self, sender: str, receiver: str, record: Record) -> None:
        """A channel to a process that is dead drops."""
        inbox = self.inboxes.get(receiver)
        if inbox is not None:
            inbox.setdefault(sender, deque()).append(record)

    def mail(self, name: str) -> list[str]:
        """Who has written to this process."""
        inbox = self.inboxes[name]
        return [sender for sender in inbox if inbox[sender]]

    def take(self, name: str, sender: str) -> Record:
        """The next record of this channel."""
        return self.inboxes[name][sender].popleft()

    def is_silent(self, receiver: str, sender: str) -> bool:
        """Whether nothing of ``sender`` is on its way to ``receiver``."""
        return not self.inboxes[receiver].get(sender)

    def bury(self, name: str) -> None:
        """A process is dead: nobody hears it any more, and of what it has sent the last part may be lost."""
        self.inboxes.pop(name, None)
        for inbox in self.inboxes.values():
            channel = inbox.get(name)
            if channel and self.rng.random() < 0.5:
                for _ in range(self.rng.randint(1, len(channel))):
                    channel.pop()

    def actions(self) -> list[Action]:
        """What can happen next."""
        found = self.supervisor.actions()
        if self.server is not None:
            found += self.server.actions()
        if self.client is not None:
            found += self.client.actions()
        for worker in self.workers.values():
            found += worker.actions()
        return found
