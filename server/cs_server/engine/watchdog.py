"""Names whatever has been waiting for long: who waits, where, and for whom; and ends who is awaited for too long.

Owns the sentences and their pace, and the step timeout. It changes nothing else; ``engine`` calls it once a tick.
"""

from __future__ import annotations

from collections.abc import Iterable

from cs_proto.messages import RunId, WaitingFor
from cs_proto.records import replace
from cs_server.events import Command, EndWorker, Log, Send, TraceWorker

from . import merge
from .runs import name
from .sessions import Sessions
from .state import ReplicaProgress, RunState, Tables

__all__ = ["NAME_EVERY", "Watchdog"]

#: Seconds after which a wait is named, and named again.
NAME_EVERY = 10.0
#: How long a wait lasts until those waited for show where they are, seconds: where other replicas wait, and where the
#: controller alone does, since many a step takes long.
_STACKS_AFTER, _ALONE_STACKS_AFTER = 2 * NAME_EVERY, 6 * NAME_EVERY


class Watchdog:
    """Looks for waits that last."""

    def __init__(
        self, tables: Tables, out: list[Command], sessions: Sessions, replicas: int, step_timeout: float | None
    ) -> None:
        self._tables = tables
        self._out = out
        self._sessions = sessions
        self._replicas = range(replicas)
        self._step_timeout = step_timeout

    def tick(self, now: float) -> None:
        """Say what has waited for NAME_EVERY seconds since it began or was last named."""
        for run, state in self._tables.runs.items():
            if not state.is_finished:
                self._tick_run(run, state, now)
                has_nested = any(o[:-2] == run and not s.is_finished for o, s in self._tables.runs.items())
                if self._step_timeout is not None and not has_nested:
                    self._end_silent(run, state, now, self._step_timeout)
        for peer, session in self._tables.clients.items():
            if not session.is_welcome and now - session.named >= NAME_EVERY:
                self._tables.clients[peer] = replace(session, named=now)
                missing = [self._sessions.title(r) for r in self._replicas if self._sessions.worker_peer(r) is None]
                what = f"{' and '.join(missing)} to register" if missing else "the runs of the client before it to end"
                client = f"client {session.hello.client} (pid {session.hello.pid})"
                self._out.append(Log(f"{client}: waiting {now - session.since:.0f} s for {what}", slow=True))

    def _tick_run(self, run: RunId, state: RunState, now: float) -> None:
        stands = [self._tables.stands[run, replica] for replica in self._replicas]
        stopped = self._waiting(state, stands)
        if not stopped or now - max(min(stopped), state.named) < NAME_EVERY:
            return
        self._tables.runs[run] = replace(state, named=now)
        working = [replica for replica, stand in enumerate(stands) if not stand.is_stopped or stand.is_preserving]
        seen = self._tables.tally.seen
        awaited = [
            f"{self._sessions.title(r)}, {'being started again' if r in self._tables.deaths else 'last seen'}"
            + f" {now - seen[r]:.0f} s ago" * (r not in self._tables.deaths)
            for r in working
        ]
        if state.token >= 0:
            awaited.append(f"the merge function of {merge.title(self._tables.points[run, 0, state.token])}")
        if not working:
            awaited = [f"commit {self._tables.tally.committing}" if self._tables.tally.committing else "the service"]
        where = [self._where(run, replica, stand) for replica, stand in enumerate(stands) if stand.is_stopped]
        where = where or ["no replica has come to a merge point"]
        since, whom = f"{now - min(stopped):.0f} s", f"{' and '.join(awaited)}; {'; '.join(where)}"
        self._out.append(Log(f"{name(run)}: waiting {since} for {whom}", slow=True))
        controller = self._sessions.controller_peer()
        if state.awaited and controller is not None:
            self._out.append(Send(controller, WaitingFor(run, whom)))
        waiting = [stand.since for stand in stands if stand.is_stopped and not stand.is_lost]
        due = min(waiting) + _STACKS_AFTER if waiting else state.awaited + _ALONE_STACKS_AFTER
        if state.named < due <= now:  # once in a wait, which is named each time
            self._show_stacks({*working, 0} if state.token >= 0 else working)

    def _show_stacks(self, replicas: Iterable[int]) -> None:
        for replica in sorted(replicas):
            session = self._tables.workers.get(replica)
            if session is not None and replica not in self._tables.deaths:
                self._out.append(TraceWorker(replica, session.worker.incarnation))

    def _waiting(self, state: RunState, stands: list[ReplicaProgress]) -> list[float]:
        """Since when replicas and the controller wait for the others."""
        since = [stand.since for stand in stands if stand.is_stopped and not stand.is_lost]
        return [*since, state.awaited] if state.awaited else since

    def _end_silent(self, run: RunId, state: RunState, now: float, timeout: float) -> None:
        """Have the workers ended that are waited for, and of which nothing was heard for ``timeout`` seconds."""
        stands = [self._tables.stands[run, replica] for replica in self._replicas]
        waiting = self._waiting(state, stands)
        for replica, stand in enumerate(stands):
            session = self._tables.workers.get(replica)
            # With the merge function, too.
            is_at_work = not stand.is_stopped or stand.is_preserving or (replica == 0 and state.token >= 0)
            if not is_at_work or not waiting or session is None or replica in self._tables.deaths:
                continue
            seen = self._tables.tally.seen
            if now - max(seen[replica], min(waiting)) > timeout:
                seen[replica] = now
                what = "preserve what it has read" if stand.is_preserving else "come to its next merge point"
                reason = f"it did not {what} within {timeout:g} s in {name(run)}"
                self._out.append(Log(f"{self._sessions.title(replica)} is ended: {reason}", slow=True))
                self._out.append(EndWorker(replica, session.worker.incarnation, reason))

    def _where(self, run: RunId, replica: int, stand: ReplicaProgress) -> str:
        if stand.read is not None:
            return f"replica {replica} waits at {merge.title(stand.read)}"
        if stand.waiting >= 0:
            return f"replica {replica} waits at {merge.title(self._tables.points[run, replica, stand.waiting])}"
        if stand.returned is not None:
            return f"replica {replica} returned after {merge.counted(stand.returned.count)}"
        return f"replica {replica} is lost"
