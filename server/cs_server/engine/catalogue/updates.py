"""Updates: what one step of an optimizer on a set of variables consists of, and where gradients lie."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from cs_proto import segment_names
from cs_proto.arithmetic.optimizers import CLIPS, WITHOUT_DECAY
from cs_proto.arithmetic.schedules import rate
from cs_proto.arrays import Array, Location
from cs_proto.errors import InvalidArgumentError
from cs_proto.messages import ApplyPoint, Optimizer
from cs_proto.ranges import merged
from cs_proto.records import replace
from cs_server.engine.store.state import State
from cs_server.events import Apply, Dense, Rows

from . import optimizers, slabs, variables


def check_gradients(server: State, points: Sequence[ApplyPoint]) -> None:
    """Raise InvalidArgumentError if a sparse gradient does not fit its variable, or its variable is not in the set, or
    a sparse variable has a dense gradient, or gradients lie in a second set of buffers that does not exist."""
    for point in points:
        _check_sparse(server, point)
        if point.buffers % 2:
            _check_second(server, point)
        for gradient in point.sparse:
            spec, values = variables.row(server, gradient.variable).spec, gradient.values
            if gradient.variable not in (point.variables or server.tables.sets[point.variable_set].variables):
                raise InvalidArgumentError(
                    f"the update has a sparse gradient of {spec.name!r}, but does not name this variable"
                )
            if not spec.shape or values.dtype != spec.dtype or values.shape[1:] != spec.shape[1:]:
                raise InvalidArgumentError(
                    f"the sparse gradient of variable {spec.name!r} is {values.dtype}{list(values.shape)}; the "
                    f"variable is {spec.dtype}{list(spec.shape)}"
                )


def _check_sparse(server: State, point: ApplyPoint) -> None:
    named = {gradient.variable for gradient in point.sparse}
    members = point.variables or server.index.sparse_of[point.variable_set]
    check_dense(server, [number for number in members if number not in named])


def check_dense(server: State, numbers: Iterable[int]) -> None:
    """Raise InvalidArgumentError if one of these variables cannot have a dense gradient."""
    for number in numbers:
        spec = variables.row(server, number).spec
        if spec.sparse:
            raise InvalidArgumentError(
                f"variable {spec.name!r} was made with sparse=True, so it has no gradient buffers: its gradient must "
                "be IndexedSlices of its rows"
            )


def _check_second(server: State, point: ApplyPoint) -> None:
    missing = [dtype for dtype, slab in server.tables.slabs.items() if slab.gradient_sets == 1]
    if not missing:
        return
    sparse = {gradient.variable for gradient in point.sparse}
    for number in point.variables or server.tables.sets[point.variable_set].variables:
        spec = variables.row(server, number).spec
        if number not in sparse and spec.dtype in missing:
            raise InvalidArgumentError(
                f"the gradient of {spec.name!r} is said to lie in the second set of buffers, but no Locate asked "
                f"for that of {spec.dtype} variables"
            )


def apply(server: State, number: int, points: Sequence[ApplyPoint], steps_before: int) -> Apply:
    """One step on a variable set. ``points`` say for every replica which of its gradient buffers it used, and where its
    sparse gradients lie. ``steps_before`` counts this optimizer's earlier steps in the commit."""
    optimizer = optimizers.get(server, server.tables.sets[number].optimizer)
    step = optimizer.iterations + steps_before
    sparse = tuple(gradient.variable for gradient in points[0].sparse)
    is_clipped = any(name in CLIPS for name, _ in optimizer.hyperparameters)
    buffers = tuple(point.buffers for point in points)
    key = (number, sparse, is_clipped, buffers, optimizer.exempt)
    dense = server.index.dense.get(key)
    if dense is None:
        dense = server.index.dense[key] = tuple(
            Dense(
                dtype=dtype,
                ranges=ranges,
                parameters=segment_names.parameters(dtype),
                slots=optimizers.slot_segments(server, optimizer, dtype),
                gradients=tuple(_gradients(server, r, each, dtype) for r, each in enumerate(buffers)),
                rule=rule,
            )
            for dtype, rule, ranges in _ranges_of(server, number, optimizer, sparse, is_clipped)
        )
    rows = []
    for position, member in enumerate(sparse):
        variable = variables.row(server, member)
        spec = variable.spec
        gradients = tuple((point.sparse[position].values, point.sparse[position].indices) for point in points)
        rows.append(
            Rows(
                dtype=spec.dtype,
                first=slabs.elements(variable)[0],
                shape=(spec.shape[0], math.prod(spec.shape[1:])),
                parameters=variable.place.segment,
                slots=optimizers.slot_segments(server, optimizer, slabs.slab_of(spec)),
                gradients=gradients,
                rule=_rule_of(optimizer, spec.name),
            )
        )
    updated = server.tables.sets[number].variables
    return Apply(optimizer.rule, _at(step, optimizer), step + 1, dense, tuple(rows), updated)


def gradient_place(server: State, replica: int, buffers: int, variable: Array) -> Array:
    """The place of a variable's gradient in a set of buffers."""
    return replace(
        variable, place=Location(_gradients(server, replica, buffers, variable.dtype), slabs.offset_of(variable))
    )


def _gradients(server: State, replica: int, buffers: int, dtype: str) -> str:
    """Sets on a GPU (``buffers`` 2 and 3) exist only for dtypes that lie there."""
    return segment_names.gradients(replica, buffers if slabs.on_device(server, dtype, 1) else buffers % 2, dtype)


def _rule_of(optimizer: Optimizer, name: str) -> str:
    """The rule for a variable of this name; empty where it is the optimizer's."""
    is_exempt = any(re.search(pattern, name) for pattern in optimizer.exempt)
    return WITHOUT_DECAY[optimizer.rule] if is_exempt else ""


def _ranges_of(
    server: State, number: int, optimizer: Optimizer, sparse: tuple[int, ...], by_variable: bool
) -> tuple[tuple[str, str, tuple[tuple[int, int], ...]], ...]:
    """For each dtype and rule of a set the elements of its variables, without the ``sparse`` ones. Adjacent variables
    are one range unless ``by_variable``."""
    by_kind: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for member in server.tables.sets[number].variables:
        if member not in sparse:
            variable = variables.row(server, member)
            kind = variable.spec.dtype, _rule_of(optimizer, variable.spec.name)
            by_kind.setdefault(kind, []).append(slabs.elements(variable))
    found = {
        kind: tuple(r for r in sorted(ranges) if r[0] < r[1]) if by_variable else tuple(merged(ranges))
        for kind, ranges in sorted(by_kind.items())
    }
    return tuple((*kind, ranges) for kind, ranges in found.items() if ranges)


def _at(step: int, optimizer: Optimizer) -> tuple[tuple[str, float], ...]:
    """The hyperparameters of the update that follows ``step`` earlier ones."""
    schedule, given = optimizer.schedule, dict(optimizer.hyperparameters)
    decay = given.get("decay")
    if schedule is None and not decay:
        return optimizer.hyperparameters
    now = given["learning_rate"] if schedule is None else rate(schedule.kind, schedule.numbers, step)
    return tuple({**given, "learning_rate": now / (1 + decay * step) if decay else now}.items())
