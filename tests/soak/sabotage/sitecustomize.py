"""Switches guarantees of the service off, so that a test can see that the trials of a promise notice.

Python imports this module at the start of every process that finds its directory on PYTHONPATH
(``tests/soak/test_promises.py``). ``CS_SABOTAGE`` names the guarantee. Two more names concern the programs of the soak
itself, ``unguarded-read`` and ``naive-retry``; ``reader.py`` and ``workload.py`` look for them. ``no-program`` switches
no guarantee off: the server carries out every step by messages (``tests/soak/run.py``).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cs_server.engine.store.state import State

#: The programs that run a server: its own process, and a session with the service inside.
_SERVERS = {"cs_server", "tests.soak.run"}


def no_dedup() -> None:
    """The server acts on a request of a client as often as it comes."""
    from cs_server.engine import requests

    write = requests.write

    def write_again(server: State, peer: bytes, record: Any) -> None:
        key = (requests._is_token_of(server, peer, record), record.client)
        known = server.tables.requests.get(key)
        if known is not None and known.reply is not None:
            del server.tables.requests[key]
        write(server, peer, record)

    requests.write = write_again


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


def no_redo() -> None:
    """A server that is started again does not carry out what its predecessor has written down of a commit on a GPU."""
    from cs_server.gpu.redo_journal import RedoJournal

    RedoJournal.replay = lambda self, elements: None  # type: ignore[method-assign]


def replay_committed() -> None:
    """A run is replayed although something of it is committed."""
    from cs_server.engine.steps import replays

    replays._changes = lambda server, run: False


def no_fence() -> None:
    """The server acts on what a worker says after another took its place."""
    from cs_server.engine import sessions

    check = sessions.check_replica

    def check_no_incarnation(server: State, peer: bytes, replica: int, incarnation: int) -> None:
        known = server.tables.workers.get(replica)
        if known is None or incarnation >= known.worker.incarnation:
            check(server, peer, replica, incarnation)

    sessions.check_replica = check_no_incarnation


def leak() -> None:
    """The server keeps a descriptor for each worker that dies."""
    from cs_server.engine import sessions

    note_death, kept = sessions.note_death, []

    def note_and_keep(server: State, died: Any) -> Any:
        kept.append(os.open("/dev/null", os.O_RDONLY))
        return note_death(server, died)

    sessions.note_death = note_and_keep


def no_goodbye() -> None:
    """The server remembers observers that have gone."""
    from cs_server.engine import sessions

    sessions._end = lambda server, peer, session: False


def silent() -> None:
    """The script names no wait."""
    from central_storage.controller.session import Session

    Session._name_wait = lambda self, wait: None  # type: ignore[method-assign]


def deaf() -> None:
    """Launcher and script do not hear Ctrl-C."""
    take, is_ctrl_c = signal.signal, signal.SIGINT
    signal.signal = lambda number, handler: take(number, signal.SIG_IGN if number == is_ctrl_c else handler)
    signal.signal(is_ctrl_c, signal.SIG_IGN)


def no_seed() -> None:
    """The random state of a replica does not follow from the seed of the strategy."""
    from cs_worker.randomness.seeds import Seeds

    Seeds.begin = lambda self, streams: None  # type: ignore[method-assign]


def stale_mirror() -> None:
    """A worker elsewhere gets what a variable holds first, and few of its changes."""
    from central_storage.cluster import mirror

    before = mirror.Mirror.before
    brought: set[tuple[int, str, int, int]] = set()

    def before_once(self: Any, *given: Any) -> mirror.Fresh:
        fresh = before(self, *given)
        ranges = [each for each in fresh.ranges if (id(self), *each) not in brought]
        brought.update((id(self), *each) for each in ranges)
        return mirror.Fresh(ranges, fresh.words)

    mirror.Mirror.before = before_once  # type: ignore[method-assign]


def no_program() -> None:
    """No program carries out a step."""
    from cs_server.step_program import StepProgram

    StepProgram.prepare = lambda self, step, bases: False  # type: ignore[method-assign]


SABOTAGES = {
    "no-dedup": no_dedup,
    "no-undo": no_undo,
    "no-redo": no_redo,
    "replay-committed": replay_committed,
    "no-fence": no_fence,
    "leak": leak,
    "no-goodbye": no_goodbye,
    "no-program": no_program,
}
#: What is switched off in the script and its launcher, in workers, or in the process that listens; all else concerns
#: servers.
OF_SCRIPTS = {"silent": silent, "deaf": deaf}
OF_WORKERS = {"no-seed": no_seed}
OF_GATEWAYS = {"stale-mirror": stale_mirror}

if (chosen := os.environ.get("CS_SABOTAGE")) in SABOTAGES and _SERVERS & set(sys.orig_argv):
    SABOTAGES[chosen]()
elif chosen in OF_SCRIPTS and "tests.soak.workload" in sys.orig_argv:
    OF_SCRIPTS[chosen]()
elif chosen in OF_WORKERS and "cs_worker" in sys.orig_argv:
    OF_WORKERS[chosen]()
elif chosen in OF_GATEWAYS and "central_storage.gateway" in sys.orig_argv:
    OF_GATEWAYS[chosen]()
