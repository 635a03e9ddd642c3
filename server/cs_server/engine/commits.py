"""The queue of commits: one at a time, in the order in which they were decided.

Owns tickets and turns. What a commit consists of and what follows from it is told by whoever submits it; ``engine``
connects the two.
"""

from __future__ import annotations

from collections.abc import Callable

from cs_server.events import Apply, Command, Commit, Fill, Write

from .state import Job, Tables

__all__ = ["Commits", "Operations"]

Operations = tuple[Apply | Write | Fill, ...]


class Commits:
    """Commits that are decided and not yet finished. ``operations`` says what a job consists of."""

    def __init__(self, tables: Tables, out: list[Command], operations: Callable[[Job], Operations]) -> None:
        self._tables = tables
        self._out = out
        self._operations = operations

    @property
    def is_busy(self) -> bool:
        """Whether variables are being written, so that nobody may be let go on or look at them."""
        jobs = self._tables.jobs
        return bool(jobs) and any(job.kind != "slots" for job in jobs.values())

    def concerns(self, run: tuple[int, ...]) -> bool:
        """Whether a commit of ``run``, or of one nested in it, is not finished."""
        jobs = self._tables.jobs
        return bool(jobs) and any(job.run[: len(run)] == run for job in jobs.values())

    def submit(self, job: Job) -> None:
        """Have ``job`` done when its turn comes."""
        self._tables.jobs[self._tables.next_ticket()] = job

    def start(self) -> None:
        """Begin the first job where none is under way."""
        if not self._tables.tally.committing and self._tables.jobs:
            ticket = min(self._tables.jobs)
            self._tables.tally.committing = ticket
            self._out.append(self.command(ticket))

    def command(self, ticket: int) -> Commit:
        """The command that does the job: the same however often it is asked for, until the job is finished."""
        return Commit(ticket, self._operations(self._tables.jobs[ticket]))

    def finished(self, ticket: int) -> Job | None:
        """The job that is done; None where ``ticket`` was not under way."""
        if ticket != self._tables.tally.committing:
            return None
        self._tables.tally.committing = 0
        job = self._tables.jobs[ticket]
        del self._tables.jobs[ticket]
        return job
