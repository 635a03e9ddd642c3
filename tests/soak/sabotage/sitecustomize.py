"""Switches guarantees of the service off, so that a test can see that the trials of a promise notice.

Python imports this module at the start of every process that finds its directory on PYTHONPATH
(``tests/soak/test_promises.py``). ``CS_SABOTAGE`` names the guarantee. Two more names concern the programs of the soak
itself, ``unguarded-read`` and ``naive-retry``; ``reader.py`` and ``workload.py`` look for them.
"""

from __future__ import annotations

import os
import sys
from typing import Any

#: The programs that run a server: its own process, and a session with the service inside.
_SERVERS = {"cs_server", "tests.soak.run"}


def no_dedup() -> None:
    """The server acts on a request of a client as often as it comes."""
    from cs_server.engine.requests import Requests

    write = Requests.write

    def write_again(self: Requests, peer: bytes, record: Any) -> None:
        key = (self._is_token_of(peer, record), record.client)
        known = self._tables.requests.get(key)
        if known is not None and known.reply is not None:
            del self._tables.requests[key]
        write(self, peer, record)

    Requests.write = write_again  # type: ignore[method-assign]


def no_undo() -> None:
    """A server that is started again begins the commit at hand anew."""
    from cs_server.compute import undo

    begin, enter = undo.Undo.begin, undo.Lane.enter

    def begin_anew(self: undo.Undo, ticket: int) -> None:
        self._head[undo._TAG] = -1
        begin(self, ticket)

    def enter_anew(self: undo.Lane, tag: int) -> None:
        if len(self._words):
            self._words[undo._LANE_TAG] = -1
        enter(self, tag)

    undo.Undo.begin = begin_anew  # type: ignore[method-assign]
    undo.Undo.is_done = lambda self, ticket: False  # type: ignore[method-assign]
    undo.Lane.enter = enter_anew  # type: ignore[method-assign]


def replay_committed() -> None:
    """A run is replayed although something of it is committed."""
    from cs_server.engine.replays import Replays

    Replays._changes = lambda self, run: False  # type: ignore[method-assign]


def no_fence() -> None:
    """The server acts on what a worker says after another took its place."""
    from cs_server.engine.sessions import Sessions

    check = Sessions.check_replica

    def check_no_incarnation(self: Sessions, peer: bytes, replica: int, incarnation: int) -> None:
        known = self._tables.workers.get(replica)
        if known is None or incarnation >= known.worker.incarnation:
            check(self, peer, replica, incarnation)

    Sessions.check_replica = check_no_incarnation  # type: ignore[method-assign]


SABOTAGES = {
    "no-dedup": no_dedup,
    "no-undo": no_undo,
    "replay-committed": replay_committed,
    "no-fence": no_fence,
}

if (chosen := os.environ.get("CS_SABOTAGE")) in SABOTAGES and _SERVERS & set(sys.orig_argv):
    SABOTAGES[chosen]()
