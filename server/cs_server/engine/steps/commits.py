"""The queue of commits: one at a time, in the order in which they were decided.

Owns tickets and turns. ``engine`` knows what a commit consists of, and what follows from it.
"""

from __future__ import annotations

from cs_server.engine.store.state import State
from cs_server.engine.store.tables import Job


def is_busy(server: State) -> bool:
    """Whether variables are being written. Until that is over, no replica may go on and nobody may look at them."""
    jobs = server.tables.jobs
    return bool(jobs) and any(job.kind != "slots" for job in jobs.values())


def concerns(server: State, run: tuple[int, ...]) -> bool:
    """Whether a commit of ``run``, or of one nested in it, is not finished."""
    jobs = server.tables.jobs
    return bool(jobs) and any(job.run[: len(run)] == run for job in jobs.values())


def submit(server: State, job: Job) -> None:
    """Append ``job`` to the queue."""
    server.tables.jobs[server.tables.next_ticket()] = job


def next_to_start(server: State) -> int | None:
    """The ticket of the job that begins now. None if a job is under way or none waits."""
    if server.tables.tally.committing or not server.tables.jobs:
        return None
    server.tables.tally.committing = min(server.tables.jobs)
    return server.tables.tally.committing


def finished(server: State, ticket: int) -> Job | None:
    """The job that is done. None if ``ticket`` was not under way."""
    if ticket != server.tables.tally.committing:
        return None
    server.tables.tally.committing = 0
    job = server.tables.jobs[ticket]
    del server.tables.jobs[ticket]
    return job
