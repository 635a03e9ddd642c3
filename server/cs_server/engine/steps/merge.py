"""When replicas agree: the rules of merge points, as functions of what the replicas sent.

Owns the comparison of merge points, the aggregation of assigns, and the errors of replicas that differ. It keeps
nothing and sends nothing; ``progress`` asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cs_proto.arrays import Array
from cs_proto.errors import (
    InvalidArgumentError,
    MergeMismatchError,
    NumericsError,
    StructureMismatchError,
    VariableWrittenError,
    code_of,
)
from cs_proto.failures import error_of
from cs_proto.messages import (
    ApplyPoint,
    AssignPoint,
    CreatePoint,
    Error,
    GatherPoint,
    MergeCallPoint,
    Point,
    ReadPoint,
    ReduceOpName,
    ReducePoint,
    VariableSpec,
)
from cs_proto.records import Frame
from cs_server.engine.store.tables import Failure, ReplicaProgress

#: The code of the error of a replica in which a variable was written in place.
WRITTEN = code_of(VariableWrittenError)
#: The codes of errors that say that numbers are wrong, so nothing more of the run is committed.
SPOILING = frozenset((WRITTEN, code_of(NumericsError)))

# The numbers of VariableAggregation.
_NONE, _SUM, _MEAN, _ONLY_FIRST_REPLICA = range(4)


def kind_of(point: Point, known_set: Callable[[int, tuple[int, ...]], int | None]) -> tuple[object, ...]:
    """What must be equal on all replicas. Call sites, shapes and values may differ, and which gradients are sparse.

    ``known_set`` finds the number of a variable set: some replicas may name a set by its number and others by its
    variables.
    """
    match point:
        case ApplyPoint():
            updates = [
                (
                    update.optimizer,
                    update.variable_set
                    or known_set(update.optimizer, update.variables)
                    or tuple(sorted(update.variables)),
                )
                for update in point.updates
            ]
            return ("apply", point.global_clipnorm, point.clip_epsilon, *updates)
        case AssignPoint():
            return ("assign", point.variable, point.op)
        case CreatePoint():
            return ("create",)
        case ReducePoint():
            return ("all_reduce", point.op, len(point.arrays))
        case GatherPoint():
            return ("all_gather", point.axis, len(point.arrays))
        case MergeCallPoint():
            return ("merge_call",)


def title(point: Point | ReadPoint, of_what: str = "") -> str:
    """A merge point for people, with its call site: ``all_reduce SUM (train.py:31)``. With ``of_what``, which names the
    operands, ``all_reduce SUM of 2 arrays (train.py:31)``."""
    match point:
        case ApplyPoint():
            numbers = " and ".join(str(update.optimizer) for update in point.updates)
            what = f"apply_gradients of optimizer{'s' * (len(point.updates) > 1)} {numbers}"
            if point.global_clipnorm is not None:
                what += f" with global_clipnorm={point.global_clipnorm}, clip_epsilon={point.clip_epsilon}"
        case AssignPoint():
            what = f"{point.op} of variable {point.variable}"
        case CreatePoint():
            what = f"the creation of variable {point.variable.name!r}"
        case ReducePoint():
            what = f"all_reduce {point.op}"
        case GatherPoint():
            what = f"all_gather along axis {point.axis}"
        case MergeCallPoint():
            what = "merge_call"
        case ReadPoint():
            what = "a read of what it wrote"
    return f"{what}{of_what} ({point.site})"


def writes(point: Point) -> bool:
    """Whether its commit changes variables."""
    return isinstance(point, ApplyPoint | AssignPoint)


def aggregated(spec: VariableSpec, points: Sequence[AssignPoint]) -> tuple[ReduceOpName | None, tuple[Array, ...]]:
    """How the values that replicas assign become one: the reduction, if any, and the values that count.

    Raises InvalidArgumentError if the variable's aggregation forbids it. One replica needs no aggregation.
    """
    values = tuple(point.value for point in points)
    what = f"{points[0].op} to variable {spec.name!r} in a replica ({points[0].site})"
    is_one_scalar = all(point.checked and _same(point.value, values[0]) for point in points)
    if len(points) == 1:
        return None, values
    if spec.aggregation == _NONE:
        raise InvalidArgumentError(
            f"{what}: the variable has aggregation NONE, but {len(points)} replicas assign a value; make it with "
            "another aggregation, or assign in the cross-replica context"
        )
    if spec.aggregation == _ONLY_FIRST_REPLICA:
        return None, values[:1]
    if spec.aggregation == _SUM:
        if is_one_scalar:
            raise InvalidArgumentError(
                f"{what}: every replica assigns the same Python number, and the variable's aggregation is SUM; pass an "
                "array to add up the values, or use MEAN or ONLY_FIRST_REPLICA to assign the number once"
            )
        if spec.dtype == "bool":
            raise InvalidArgumentError(f"{what}: bool cannot be summed")
        return "SUM", values
    if is_one_scalar:
        return None, values[:1]
    if spec.dtype == "bool" or "int" in spec.dtype:
        raise InvalidArgumentError(
            f"{what}: the mean of {spec.dtype} values is a floating-point number, which the variable cannot hold"
        )
    return "MEAN", values


def mismatch(
    k: int,
    stands: Sequence[ReplicaProgress],
    brought: Sequence[Point | None],
    awaited: Sequence[Point | ReadPoint | None],
    of_what: Callable[[Point | ReadPoint], str],
) -> Error:
    """The error of replicas that do not meet at merge point ``k``. By replica: its progress, what it brought as number
    ``k``, and the point at which it waits. ``of_what`` names the operands of a point."""
    sentences = []
    for replica, (stand, point, waits) in enumerate(zip(stands, brought, awaited, strict=True)):
        if waits is not None:
            sentence = f"replica {replica} waits at {title(waits, of_what(waits))}"
            if point is not None and point is not waits:
                sentence += f" after {title(point, of_what(point))} as its merge point {k}"
        elif stand.returned is None:
            sentence = f"replica {replica} is lost"
        elif stand.returned.error is not None:
            sentence = f"replica {replica} raised {_name(stand.returned.error)} after {counted(stand.returned.count)}"
        else:
            error, count = stand.returned.error, stand.returned.count
            done = f"raised {_name(error)}" if error is not None else "returned"
            sentence = f"replica {replica} "
            sentence += (
                f"reached {title(point, of_what(point))} and {done}" if point else f"{done} after {counted(count)}"
            )
        sentences.append(sentence)
    kind = StructureMismatchError if _differ_in_structure(awaited) else MergeMismatchError
    return error_of(kind(f"replicas do not meet at merge point {k}: {'; '.join(sentences)}"), merge_index=k)


def _differ_in_structure(points: Sequence[Point | ReadPoint | None]) -> bool:
    """Whether all replicas want the same combination of nests whose structures differ."""
    wanted = {
        point.op if isinstance(point, ReducePoint) else point.axis if isinstance(point, GatherPoint) else None
        for point in points
    }
    return len(wanted) == 1 and None not in wanted


def counted(count: int) -> str:
    """``1 merge point``, ``2 merge points``."""
    return f"{count} merge point{'s' * (count != 1)}"


def verdict(failure: Failure | None, returned: Sequence[Error | None]) -> Error | None:
    """The error of a run, from the reason why it could not go on and the errors of its replicas (in replica order).

    The lowest (merge index, replica) counts, but a write in place to a variable counts before all others: it says that
    numbers were wrong. A mismatch counts only if nothing else happened. An error that a replica
    raised because it was told of a mismatch, a lost replica or a cancellation is not a cause.
    """
    if failure is None and not any(returned):
        return None
    if failure is not None and failure.cause == "cancelled":
        return failure.error
    echoes = {"cs.MergeMismatchError", "cs.StructureMismatchError"}
    if failure is not None and failure.cause == "lost":
        echoes.add("cs.ReplicaLostError")
    causes = [
        (error.merge_index, replica, error)
        for replica, error in enumerate(returned)
        if error is not None and error.exception not in echoes
    ]
    if failure is not None and failure.cause != "mismatch":
        causes.append((failure.error.merge_index, failure.replica, failure.error))
    if causes:
        return min(causes, key=lambda cause: (cause[2].exception != WRITTEN, *cause[:2]))[2]
    if failure is not None:
        return failure.error
    return next((error for error in returned if error is not None), None)


def _same(one: Array, other: Array) -> bool:
    return isinstance(one.place, Frame) and one == other


def _name(error: Error) -> str:
    return error.origin.rpartition(":")[2] or error.exception
