"""Why a run was not captured: the reasons that ``strategy.statistics()`` counts, in words for users.

The tally counts them by their place in :data:`WORDS`, so a new one is added at the end.
"""

from __future__ import annotations

from cs_proto.messages import ApplyPoint, Ask, AssignPoint, CreatePoint, GatherPoint, MergeCallPoint, ReducePoint, RunId

__all__ = [
    "AFTER",
    "AHEAD",
    "CAPTURED",
    "FAILED",
    "FIRST",
    "KINDS",
    "LARGE",
    "MERGE_CALL",
    "SLOW",
    "UNQUIET",
    "WORDS",
    "note",
    "reason_of",
]

#: Stands for no reason.
CAPTURED = -1
FIRST, COMBINED, MERGE_CALL, READ, NUMBER, CREATED, LARGE, AFTER, SLOW, UNQUIET, FAILED, AHEAD, KINDS = range(13)

WORDS = (
    "the first gradients for a set of variables",
    "all_reduce or all_gather of more than 64 KiB in a replica",
    "merge_call in a replica, or a run inside it",
    "a replica read a variable or an optimizer that it had updated",
    "several replicas assigned a Python number",
    "a variable made in a replica",
    "more than 1 MiB of results and notes, or 16 MiB in the steps that were sent ahead",
    "another request during the step or just before it, or a step just before it that was not captured",
    "a step of more than a second",
    "just after a failure, the death of a process or the start of a script",
    "a failure or Ctrl-C",
    "a lookahead of more than 16 steps",
    "more than eight kinds of steps in turns",
)

_OF_POINTS = {
    ApplyPoint: FIRST,
    ReducePoint: COMBINED,
    GatherPoint: COMBINED,
    MergeCallPoint: MERGE_CALL,
    AssignPoint: NUMBER,
    CreatePoint: CREATED,
}
# Those of runs in which a replica waited for an answer.
_OF_QUESTIONS = frozenset({*_OF_POINTS.values(), READ})
# The reasons that are remembered, by run.
_REASONS = 256


def reason_of(question: Ask) -> int:
    """Why the run of a question is not captured."""
    if len(question.run) > 1:
        return MERGE_CALL
    return _OF_POINTS.get(type(question.point), READ)


def note(known: dict[RunId, int], run: RunId, reason: int) -> None:
    """Note in ``known`` why a run is not captured, or that it is. Of several reasons the first counts, and a question
    of a replica more than a wait."""
    if reason == CAPTURED or (known.get(run) == SLOW and reason in _OF_QUESTIONS):
        known[run] = reason
    else:
        known.setdefault(run, reason)
    if len(known) > _REASONS:
        del known[next(iter(known))]
