"""A run from its beginning to its end.

The controller, or during a merge_call the holder of the token, sends it to the workers (codes 90-109). Replicas send
merge points and return (60-69), the server answers (80-89) and asks (140). The controller cancels a run or reports that
it waits (36, 43-45).
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Annotated

from cs_proto.descriptors import Array
from cs_proto.records import Count, Frame, Range, Record, Seconds, record, shown

from .points import (
    Note,
    OptimizerChange,
    Point,
    ReadPoint,
)
from .shared import (
    Error,
    Incarnation,
    Lookahead,
    Number,
    NumericsCheck,
    OfRun,
    OfStep,
    Replica,
    RunId,
    Value,
    Variable,
    Worker,
)

_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")

# --- client to worker (and, during a merge_call, token holder to worker) --------------------------------------------


@record(90)
class Prepare(Record):
    """Where the script lives: its ``sys.path`` and directory. Sent before the first run and when they change."""

    path: tuple[str, ...]
    directory: str


@record(91)
class Run(OfStep):
    """Run a function as one replica.

    The random numbers of the run follow from the strategy's ``seed``, ``name``, ``step`` and the replica. ``name`` is
    the module and the qualified name of the function, and ``step`` is the number of runs of functions of this name that
    began before. The controller counts them from 0, and continues from the counts of a checkpoint that it restores. So
    ``step`` may become smaller, while the number of the run only grows. A nested run has the name and the step of the
    run around it, and a path of its own.

    ``digest`` names the pickled function; ``function`` gives its place, for a worker that does not hold it. ``frozen``
    keeps the unpickled object for good (``cs.function``). ``arguments`` is a pickle of (args, kwargs), or the place of
    one that is too large for a frame; ``buffers`` gives the places of its large buffers.

    A step of a ``series`` may be sent while up to ``lookahead`` earlier steps are not over; it begins when the step
    before it is over. ``held`` lists the ranges of bytes in the worker's arena in which the script still holds results:
    whole pages in ascending order. ``changes`` are hyperparameters that hold from this run on. The replicas hand them
    to the server, which takes them over once, with the first message of the run. ``check_numerics``: the replica looks
    for gradients that are not finite, and raises NumericsError; for a warning, it lets the server look where that can.
    """

    run: RunId
    step: Count
    replica: Replica
    seed: Annotated[int, Range(0, (1 << 63) - 1)]
    digest: bytes
    function: Array | None
    frozen: bool
    arguments: bytes | Frame | Array
    buffers: tuple[Array, ...]
    series: Count = 0
    lookahead: Lookahead = 0
    held: tuple[tuple[Count, Count], ...] = ()
    name: str = ""
    changes: tuple[OptimizerChange, ...] = ()
    check_numerics: NumericsCheck = "off"

    @property
    def part(self) -> tuple[int, int]:
        """The part of the arenas that this run uses, and into how many they are divided."""
        parts = self.lookahead + 1
        return (self.run[0] - self.series) % parts, parts

    def check(self) -> None:
        super().check()
        if len(self.digest) != 16:
            self.refuse("a digest must have 16 bytes")
        if self.held:
            edges = [edge for part in self.held for edge in part]
            if any(edge % _PAGE_NBYTES for edge in edges) or any(later < earlier for earlier, later in pairwise(edges)):
                self.refuse(f"{shown(self.held)} are not whole pages in ascending order")
        for pickled in (self.function, self.arguments):
            if isinstance(pickled, Array) and (pickled.dtype != "uint8" or len(pickled.shape) != 1):
                self.refuse(f"a pickle must be uint8[n], not {pickled.dtype}{list(pickled.shape)}")


@record(95)
class Forget(Record):
    """Client to worker: the server frees these variables and optimizers, so the worker forgets where they lie. Other
    variables have new names, by number (``renamed``). Frozen functions with these digests never run again."""

    variables: tuple[Number, ...]
    optimizers: tuple[Number, ...] = ()
    renamed: tuple[tuple[Number, str], ...] = ()
    functions: tuple[bytes, ...] = ()


# --- replica to server ----------------------------------------------------------------------------------------------


@record(60)
class Ask(OfStep):
    """Replica to server: the notes since the last message, and a point that needs an answer.

    ``client`` is the client of the run: the next client uses the numbers of runs of which the server never heard.
    ``preserved``: a commit changes no array that the function has read (:class:`Preserve`). ``changes`` are those of
    the :class:`Run`. Where the server warns of gradients, it names the step: by the ``name`` of the run, and the number
    of its step, which is that of the run plus ``offset``.
    """

    run: RunId
    replica: Replica
    incarnation: Incarnation
    notes: tuple[Note, ...]
    point: Point | ReadPoint
    series: Count = 0
    client: str = ""
    preserved: bool = False
    changes: tuple[OptimizerChange, ...] = ()
    name: str = ""
    offset: Annotated[int, Range(-(1 << 62), (1 << 62) - 1)] = 0


@record(61)
class Return(OfStep):
    """Replica to server: the function returned or raised, after ``count`` merge points.

    The Return of a step of a ``series`` is answered with :class:`StepFinished`; the controller has the answers of all
    steps before the last ``lookahead``. ``client``, ``changes``, ``name`` and ``offset`` are as in :class:`Ask`.
    """

    run: RunId
    replica: Replica
    incarnation: Incarnation
    notes: tuple[Note, ...]
    count: Count
    value: Value | None
    error: Error | None
    series: Count = 0
    lookahead: Lookahead = 0
    client: str = ""
    changes: tuple[OptimizerChange, ...] = ()
    name: str = ""
    offset: Annotated[int, Range(-(1 << 62), (1 << 62) - 1)] = 0

    def check(self) -> None:
        super().check()
        if (self.value is None) == (self.error is None):
            self.refuse("a replica must return a value or an error, and not both")


@record(62)
class MergeCallReturn(OfRun):
    """Holder of the token to server: the merge function of point ``k`` returned one value per replica, or raised."""

    run: RunId
    k: Count
    values: tuple[Value, ...]
    error: Error | None


# --- what the server answers ----------------------------------------------------------------------------------------


@record(80)
class Reduced(OfRun):
    """Answer to a ReducePoint or GatherPoint: the results, leaf by leaf."""

    run: RunId
    k: Count
    arrays: tuple[Array, ...]


@record(81)
class Token(OfRun):
    """Answer to replica 0 at a MergeCallPoint: it is the controller from now on. ``arguments`` are those of all
    replicas."""

    run: RunId
    k: Count
    arguments: tuple[Value, ...]


@record(82)
class Merged(OfRun):
    """Answer to the other replicas at a MergeCallPoint: the replica's component of the merge function's result."""

    run: RunId
    k: Count
    value: Value


@record(83)
class Accepted(OfRun):
    """Answer to a checked ApplyPoint or AssignPoint: compared and recorded. ``variable_sets`` are the numbers of the
    sets of the ApplyPoint's updates; there are none for an AssignPoint."""

    run: RunId
    k: Count
    variable_sets: tuple[Number, ...] = ()


@record(84)
class CreatedInRun(OfRun):
    """Answer to a CreatePoint."""

    run: RunId
    k: Count
    variable: Variable


@record(85)
class Committed(OfRun):
    """Answer to a ReadPoint: all points before ``k`` are committed."""

    run: RunId
    k: Count


@record(86)
class PointFailed(OfRun):
    """Answer to any point: it fails with this error. ``ends_run`` where no further point of the run can succeed."""

    run: RunId
    k: Count
    error: Error
    ends_run: bool


@record(87)
class RunFinished(OfRun):
    """Server to the controller of a run, once: every replica's result in replica order, or the run's error."""

    run: RunId
    values: tuple[Value, ...]
    error: Error | None
    commits: Count


@record(88)
class StepFinished(OfRun):
    """Server to the replicas of a step of a series, once all have returned and their updates are committed: the next
    step may begin. If this step ``failed``, no later step of the series begins. A mark in a mailbox
    (the number of the run) stands for this record without ``failed``."""

    run: RunId
    failed: bool


@record(89)
class WorkerRestarted(OfRun):
    """Server to the controller: this worker is in the place of one that died, and needs ``run`` and those after it that
    have been sent. To the holder of a token, when that worker waits at the merge_call again: ``run`` is nested in it.
    """

    run: RunId
    worker: Worker


# --- the controller, about runs under way ---------------------------------------------------------------------------


@record(36)
class Cancel(OfRun):
    """Controller to server and to workers: give this run up; only its commits are kept.

    ``later`` counts the steps of a series that were sent after it. The first of all these that is not over is given
    up, and the later ones never begin.
    """

    run: RunId
    later: Lookahead = 0

    def check(self) -> None:
        super().check()
        if self.later and len(self.run) > 1:
            self.refuse(f"{self.later} steps after {shown(self.run)}")


@record(43)
class Resent(OfStep):
    """Controller to server: the worker of ``replica`` died, and its successor has been sent ``run`` again. Not
    answered. It tells the server of a run that kills its worker before the worker sends anything."""

    run: RunId
    replica: Replica
    series: Count = 0


@record(44)
class WaitReport(OfStep):
    """Controller to server: the controller has waited ``seconds`` for the end of ``run``. Not answered. It tells the
    server of a run whose replicas have not sent anything yet."""

    run: RunId
    seconds: Seconds
    series: Count = 0


@record(45)
class WaitingFor(Record):
    """Server to a controller that has sent WaitReport, every ten seconds: the replicas that ``run`` waits for, in
    words."""

    run: RunId
    whom: str


# --- what the server asks -------------------------------------------------------------------------------------------


@record(140)
class Preserve(OfRun):
    """Server to a replica that waits at point ``k``: another replica reads its own update, so a commit comes in the
    middle of the run. Preserve the views that the function holds, and send the same Ask again, ``preserved``."""

    run: RunId
    k: Count
