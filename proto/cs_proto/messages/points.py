"""Merge points of a replica, sent alone or as notes that travel with its next message. Codes 20 and 50-57."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from cs_proto.descriptors import Array
from cs_proto.records import Count, Finite, NotNegative, Range, Record, record, shown

from .shared import AssignOp, Number, ReduceOpName, Value, VariableSpec, WriteOp


@record(20)
class SparseGradient(Record):
    """The gradient of some rows of a variable: ``values[i]`` belongs to row ``indices[i]``; rows named twice add up."""

    variable: Number
    values: Array
    indices: Array

    def check(self) -> None:
        if self.indices.dtype != "int64" or self.values.shape[:1] != self.indices.shape or not self.values.shape:
            self.refuse("every row of values needs one int64 index")


@record(58)
class OptimizerUpdate(Record):
    """The part of one optimizer in an apply: the set of variables that it updates.

    The set is named by its number ``variable_set``, or by its ``variables`` if that number is not known (0). The
    gradients of ``sparse`` (ascending by variable) name rows.
    """

    optimizer: Number
    variable_set: Count
    variables: tuple[Number, ...]
    sparse: tuple[SparseGradient, ...] = ()

    def check(self) -> None:
        if self.sparse:
            numbers = [gradient.variable for gradient in self.sparse]
            if any(later <= earlier for earlier, later in pairwise(numbers)):
                self.refuse("sparse gradients must ascend by variable number")
        if (self.variable_set == 0) == (not self.variables):
            self.refuse("give either variables or the number of their set")


class _Point(Record):
    """Base of merge points. ``k`` counts a replica's merge points in a run from 0; ``site`` is file:line."""

    k: Count
    site: str

    def check(self) -> None:
        if len(self.site) > 4096:
            self.refuse(f"the call site has {len(self.site)} characters; it must be file:line, with at most 4096")


@record(50)
class ApplyPoint(_Point):
    """Gradients for one or more optimizers, which take one step each in one commit.

    The gradients lie in the gradient buffers ``buffers``, at the variables' offsets: 0 or 1 in segments, 2 or 3 on the
    GPU of the variables, for those that have a place there. Only the sparse ones lie elsewhere.

    The server multiplies all gradients of this replica by ``weight`` before it adds up those of the replicas. A weight
    of 0 leaves the gradients out. ``global_clipnorm`` bounds the norm of the sums of all ``updates`` together: the
    server multiplies them by ``min(1, global_clipnorm / (norm + clip_epsilon))``. The replicas agree on both, but not
    on the weight. ``is_watched``: the server warns of gradients that lie in buffers if their sum is not finite.

    A point with a set of variables that has no number yet is *checked*: the replica waits. The answer has the numbers
    of the sets, and later applies carry only these.
    """

    k: Count
    site: str
    updates: tuple[OptimizerUpdate, ...]
    buffers: Annotated[int, Range(0, 3)]
    weight: NotNegative = 1.0
    global_clipnorm: NotNegative | None = None
    clip_epsilon: NotNegative = 0.0
    is_watched: bool = False

    @property
    def needs_answer(self) -> bool:
        """Whether the replica waits for the numbers of the sets of variables."""
        return any(not update.variable_set for update in self.updates)

    def check(self) -> None:
        super().check()
        optimizers = [update.optimizer for update in self.updates]
        if not optimizers or len(set(optimizers)) < len(optimizers):
            self.refuse(f"name at least one optimizer, and each once, not {shown(tuple(optimizers))}")
        if self.clip_epsilon and self.global_clipnorm is None:
            self.refuse("clip_epsilon belongs to a global_clipnorm")


@record(51)
class AssignPoint(_Point):
    """An aggregated assign. If ``checked``, the replica waits for the answer: for values that came from Python scalars,
    only the comparison of the replicas can find an error."""

    k: Count
    site: str
    variable: Number
    op: AssignOp
    value: Array
    checked: bool


@record(52)
class CreatePoint(_Point):
    """A variable made inside a run; replica 0's value counts."""

    k: Count
    site: str
    variable: VariableSpec
    value: Array


@record(53)
class ReducePoint(_Point):
    """all_reduce of the leaves of a nest."""

    k: Count
    site: str
    op: ReduceOpName
    arrays: tuple[Array, ...]


@record(54)
class GatherPoint(_Point):
    """all_gather of the leaves of a nest along ``axis``."""

    k: Count
    site: str
    axis: Annotated[int, Range(-(1 << 62), (1 << 62) - 1)]
    arrays: tuple[Array, ...]


@record(55)
class MergeCallPoint(_Point):
    """merge_call: this replica's (args, kwargs) as data. Replica 0's function is called in replica 0's worker."""

    k: Count
    site: str
    arguments: Value


Point = ApplyPoint | AssignPoint | CreatePoint | ReducePoint | GatherPoint | MergeCallPoint


@record(56)
class ReadPoint(_Point):
    """Not a merge point: this replica reads a variable that it wrote before point ``k``, so those points must be
    committed."""

    k: Count
    site: str


@record(57)
class WriteNote(_Point):
    """A write on which replicas need not agree. It is not a merge point and needs no answer.

    It comes after ``k`` merge points, as this replica's ``number``-th write note of the run, from 0. In a scatter
    ``value`` goes to the rows ``indices``.
    """

    k: Count
    number: Count
    site: str
    variable: Number
    op: WriteOp
    value: Array
    indices: Array | None


Note = ApplyPoint | AssignPoint | WriteNote


@record(59)
class OptimizerChange(Record):
    """New values of some hyperparameters of an optimizer, which hold from the run on that brings them."""

    optimizer: Number
    hyperparameters: tuple[tuple[str, Finite], ...]
