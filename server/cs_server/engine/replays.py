"""What a worker's death means: a run is replayed by the worker in its place, or lost, and who has to hear of it.

A run, with those nested in it, is replayed as long as nothing of it is committed; its records stay and answer the
replay, which ``replay_check`` compares with them, while the other replicas wait. A run that kills the same replica
twice is given up. Whoever sends runs is told of the new worker as soon as that may begin one: not while a step from
which the replica has returned is still to be committed, since variables are read without asking.
"""

from __future__ import annotations

from cs_proto.messages import CreatedInRun, Died, Resent, RunId, WorkerRestarted
from cs_proto.records import replace
from cs_server.events import Command, Fingerprinted, Send

from .commits import Commits
from .replay_check import ReplayCheck
from .runs import Runs, name
from .sessions import Sessions
from .state import Tables

__all__ = ["Replays"]


class Replays:
    """Takes deaths to replays, and replays to their end."""

    def __init__(
        self,
        tables: Tables,
        out: list[Command],
        sessions: Sessions,
        commits: Commits,
        runs: Runs,
        recollection: ReplayCheck,
    ) -> None:
        self._tables = tables
        self._out = out
        self._sessions = sessions
        self._commits = commits
        self._runs = runs
        self._recollection = recollection

    def died(self, died: Died) -> None:
        """A worker is dead: what becomes of the runs from which it has not returned."""
        replica = died.rank
        if died.restarts and not self._was_in_run(died):
            return  # what was so before it was started is so still
        for top in [run for run in self._tables.runs if len(run) == 1]:
            stand = self._tables.stands[top, replica]
            if stand.returned is not None or stand.is_lost:
                continue
            why = self._cannot_replay(top, died)
            for run in self._tree(top):
                if why is None:
                    self._begin(run, replica)
                else:
                    self._runs.lost(run, died, why)

    def resent(self, record: Resent, now: float) -> None:
        """The controller has sent a run again to a worker in the place of one that died with it."""
        self._sessions.check_exists(record.replica)
        if len(record.run) == 1 and self._runs.begin_again(record.run, now, record.series):
            stand = self._tables.stands[record.run, record.replica]
            self._tables.stands[record.run, record.replica] = replace(stand, deaths=max(1, stand.deaths))

    def fingerprinted(self, event: Fingerprinted) -> None:
        """A digest is made; where it shows that a replay is another, the run is lost."""
        found = self._recollection.fingerprinted(event)
        if found is not None:
            check, diverged = found
            self._runs.diverged(check.run, check.replica, diverged)

    def announce(self) -> None:
        """Tell the controller of workers that have come in the place of others, once they may begin a run."""
        if self._commits.is_busy:
            return
        for replica, session in self._tables.workers.items():
            if session.is_announced or replica in self._tables.deaths or self._is_returning(replica):
                continue
            self._tables.workers[replica] = replace(session, is_announced=True)
            controller = self._sessions.controller_peer()
            if controller is not None:
                self._out.append(Send(controller, WorkerRestarted((self._owes_from(replica),), session.worker)))

    def announce_again(self) -> None:
        """The controller may not have heard of workers that came before this server did."""
        controller = self._sessions.controller_peer()
        for replica, session in self._tables.workers.items():
            if controller is not None and session.is_announced and session.worker.incarnation > 1:
                self._out.append(Send(controller, WorkerRestarted((self._owes_from(replica),), session.worker)))
                for run, state in self._tables.runs.items():
                    if state.token >= 0 and self._tables.stands[run, replica].waiting == state.token:
                        self._runs.tell_holder(run, replica)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _cannot_replay(self, top: RunId, died: Died) -> str | None:
        """Why the run is lost; None where it is replayed."""
        state, stand = self._tables.runs[top], self._tables.stands[top, died.rank]
        if not died.restarts:
            return "it is not started again; make a new CentralStorageStrategy to train on"
        if state.failure is not None:
            return "the next run works"
        if stand.deaths > 0:
            return (
                f"it was the second worker of this replica that died in {name(top)}, which is not tried again; look "
                "for what its function does there (memory, native code, os._exit). The next run works"
            )
        has_written = any(request.run == top[0] for request in self._tables.requests.values())
        if has_written or any(self._changes(run) for run in self._tree(top)):
            return "what a replica has read of its own update cannot be replayed; the next run works"
        if died.rank == 0 and not all(map(self._can_repeat, self._tree(top)[1:])):
            return "runs nested in it that are over cannot be repeated; the next run works"
        return None

    def _was_in_run(self, died: Died) -> bool:
        """Whether the worker that died may have begun a run: not while it was being started."""
        session = self._tables.workers.get(died.rank)
        if session is None or session.worker.incarnation < died.incarnation:
            return False
        return session.worker.incarnation > died.incarnation or session.is_announced

    def _changes(self, run: RunId) -> bool:
        """Whether something of ``run`` has been committed, or is being. A variable that was made is no such thing: it
        is there for the replay, too, with the same value."""
        outcomes = (self._tables.outcomes.get((run, k)) for k in range(self._tables.runs[run].agreed))
        made = sum(isinstance(outcome, CreatedInRun) for outcome in outcomes)
        return self._runs.standing_commits(run) > made

    def _can_repeat(self, nested: RunId) -> bool:
        """Whether the holder of a token may have this nested run once more: not where others before it are forgotten,
        nor where replica 0 got what may have been overwritten since."""
        point = self._tables.runs[nested[:-2]].token
        if nested[-2] != point:
            return True
        return nested[-1] == 0 and not self._runs.has_large_results(nested)

    def _begin(self, run: RunId, replica: int) -> None:
        """The run is to be replayed: nothing but the record is left of what the replica was about."""
        stand = self._tables.stands[run, replica]
        if stand.returned is not None or stand.is_lost:
            return
        state = self._tables.runs[run]
        if state.failure is not None or state.is_finished:
            self._tables.stands[run, replica] = replace(stand, waiting=-1, read=None, is_lost=True)
            return
        if not stand.is_replaying:
            self._recollection.take(run, replica)
        self._tables.stands[run, replica] = replace(
            stand, waiting=-1, read=None, again=0, writes_again=0, deaths=stand.deaths + 1
        )

    def _tree(self, top: RunId) -> list[RunId]:
        """The run and those nested in it, outermost first."""
        return sorted((run for run in self._tables.runs if run[: len(top)] == top), key=len)

    def _is_returning(self, replica: int) -> bool:
        """Whether the replica has returned from a run that is not over."""
        return any(
            len(run) == 1 and not state.is_finished and self._tables.stands[run, replica].returned is not None
            for run, state in self._tables.runs.items()
        )

    def _owes_from(self, replica: int) -> int:
        """The first run of the client that the replica has to carry out yet."""
        known = [run for run in self._tables.runs if len(run) == 1]
        owed = [
            run[0]
            for run in known
            if self._tables.runs[run].failure is None
            and self._tables.stands[run, replica].returned is None
            and not self._tables.stands[run, replica].is_lost
        ]
        return min(owed, default=max((run[0] for run in known), default=0) + 1)
