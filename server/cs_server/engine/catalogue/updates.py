"""Updates: what one step of an optimizer on a set of variables consists of, and where gradients lie."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import TypeAlias

from cs_proto import segment_names
from cs_proto.arithmetic.optimizers import CLIPS, ROWWISE, WITHOUT_DECAY, counts_by_variable
from cs_proto.arithmetic.schedules import rate
from cs_proto.arrays import Array, Location
from cs_proto.errors import InvalidArgumentError
from cs_proto.frozen import with_changes
from cs_proto.messages import ApplyPoint, Optimizer, OptimizerUpdate
from cs_proto.ranges import merged
from cs_proto.records import replace
from cs_server.engine.store.state import State
from cs_server.events import Apply, Dense, Rows, Update
from cs_server.rules import RULES

from . import optimizers, slabs, variables

_CLIPS = frozenset(CLIPS)
# The most dense parts that are kept. A set may have many, one for each grouping of its variables by their counts.
_KNOWN = 1024


def check_gradients(server: State, points: Sequence[ApplyPoint]) -> None:
    """Raise InvalidArgumentError if two optimizers update one variable, if a sparse gradient does not fit its variable,
    or its variable is not in the set, if a sparse variable has a dense gradient, or if gradients lie in a second set of
    buffers that does not exist."""
    for point in points:
        if len(point.updates) > 1:
            _check_apart(server, point)
        for update in point.updates:
            _check_sparse(server, update)
        if point.buffers % 2:
            _check_second(server, point)
        for update in point.updates:
            for gradient in update.sparse:
                spec, values = variables.row(server, gradient.variable).spec, gradient.values
                if gradient.variable not in members(server, update):
                    raise InvalidArgumentError(
                        f"the update has a sparse gradient of {spec.name!r}, but does not name this variable"
                    )
                if not spec.shape or values.dtype != spec.dtype or values.shape[1:] != spec.shape[1:]:
                    raise InvalidArgumentError(
                        f"the sparse gradient of variable {spec.name!r} is {values.dtype}{list(values.shape)}; the "
                        f"variable is {spec.dtype}{list(spec.shape)}"
                    )


def members(server: State, update: OptimizerUpdate) -> tuple[int, ...]:
    """The numbers of the variables that an optimizer updates."""
    return update.variables or server.tables.sets[update.variable_set].variables


def _check_apart(server: State, point: ApplyPoint) -> None:
    known = tuple([update.variable_set for update in point.updates])
    if known in server.index.apart:
        return
    owners: dict[int, int] = {}
    for update in point.updates:
        for number in members(server, update):
            owner = owners.setdefault(number, update.optimizer)
            if owner != update.optimizer:
                raise InvalidArgumentError(
                    f"optimizers {owner} and {update.optimizer} both update variable "
                    f"{variables.row(server, number).spec.name!r} in one apply; give it to one of them"
                )
    if all(known):
        server.index.apart.add(known)


def _check_sparse(server: State, update: OptimizerUpdate) -> None:
    if sparse := update.variables or server.index.sparse_of[update.variable_set]:
        named = {gradient.variable for gradient in update.sparse}
        check_dense(server, [number for number in sparse if number not in named])


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
    for update in point.updates:
        sparse = {gradient.variable for gradient in update.sparse}
        for number in members(server, update):
            spec = variables.row(server, number).spec
            if number not in sparse and spec.dtype in missing:
                raise InvalidArgumentError(
                    f"the gradient of {spec.name!r} is said to lie in the second set of buffers, but no Locate asked "
                    f"for that of {spec.dtype} variables"
                )


def apply(server: State, numbers: Sequence[int], points: Sequence[ApplyPoint], before: Mapping[int, int]) -> Apply:
    """One step of each optimizer of an apply. ``numbers`` are the sets of variables. ``points`` say for every replica
    which of its gradient buffers it used, where its sparse gradients lie, and how much they weigh. ``before`` has the
    steps of each variable set that the tables do not count yet."""
    first, steps = points[0], by_optimizer(server, before)
    buffers = tuple([point.buffers for point in points])
    is_bounded = first.global_clipnorm is not None
    updates = tuple(
        [
            _update(server, number, [point.updates[which] for point in points], buffers, steps, before, is_bounded)
            for which, number in enumerate(numbers)
        ]
    )
    updated = _together(tuple([server.tables.sets[number].variables for number in numbers]))
    weights = tuple([point.weight for point in points])
    return Apply(
        updates,
        updated,
        () if weights.count(1) == len(weights) else weights,
        first.global_clipnorm,
        first.clip_epsilon,
        first.site if first.is_watched else "",
    )


def by_optimizer(server: State, before: Mapping[int, int]) -> dict[int, int]:
    """The steps of each optimizer, of those of each variable set."""
    sets, steps = server.tables.sets, dict[int, int]()
    for number, count in before.items():
        optimizer = sets[number].optimizer
        steps[optimizer] = steps.get(optimizer, 0) + count
    return steps


Numbers: TypeAlias = tuple[tuple[tuple[str, float], ...], int, tuple[int, ...]]
"""What changes from one update of a variable set to the next: the hyperparameters, the number of the update (the lowest
of its variables), and what each variable has more, or nothing if all have the same."""


def numbers_of(
    server: State, number: int, optimizer: Optimizer, steps: Mapping[int, int], before: Mapping[int, int]
) -> Numbers:
    """The numbers of the next update of a variable set of ``optimizer``. ``steps`` are those of ``before``, by
    optimizer."""
    step = optimizer.iterations + steps.get(optimizer.number, 0)
    t, more = server.index.counts.next_of(number, before) if counts_by_variable(optimizer.kind) else (step + 1, ())
    return _at(step, optimizer), t, more


@lru_cache(maxsize=64)
def _together(sets: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The variables of several sets; the same sets come again with every step."""
    return sets[0] if len(sets) == 1 else tuple(chain.from_iterable(sets))


def _update(
    server: State,
    number: int,
    given: Sequence[OptimizerUpdate],
    buffers: tuple[int, ...],
    steps: Mapping[int, int],
    before: Mapping[int, int],
    is_bounded: bool,
) -> Update:
    """The step of one optimizer on a variable set; ``given`` is what each replica brings for it. ``steps`` are those of
    ``before``, by optimizer."""
    updated = server.tables.sets[number].variables
    optimizer = optimizers.get(server, server.tables.sets[number].optimizer)
    hyperparameters, t, more = numbers_of(server, number, optimizer, steps, before)
    brought = [{gradient.variable: (gradient.values, gradient.indices) for gradient in each.sparse} for each in given]
    everywhere = tuple([member for member in brought[0] if all(member in each for each in brought)])
    sparse, mixed = (updated, ()) if optimizer.rule in ROWWISE else (everywhere, _mixed_of(server, brought, everywhere))
    by_variable = (
        is_bounded or RULES[optimizer.rule].direction is not None or not _CLIPS.isdisjoint(dict(hyperparameters))
    )
    groups = tuple(map(sorted(set(more)).index, more)) if more else ()
    key = (number, sparse, mixed, by_variable, buffers, optimizer.exempt, groups)
    known = server.index.dense.get(key)
    if known is None:
        if len(server.index.dense) >= _KNOWN:
            server.index.dense.clear()
        parts = _ranges_of(server, number, optimizer, (*sparse, *mixed), by_variable, groups)
        made = tuple(
            Dense(
                dtype=dtype,
                ranges=ranges,
                parameters=segment_names.parameters(dtype),
                slots=optimizers.slot_segments(server, optimizer, dtype),
                gradients=tuple(_gradients(server, r, each, dtype) for r, each in enumerate(buffers)),
                rule=rule,
            )
            for dtype, rule, ranges, _ in parts
        )
        places = tuple(groups.index(group) if groups else 0 for *_, group in parts)
        by_rows = tuple(_rows(server, optimizer, member) for member in sparse)
        known = server.index.dense[key] = made, places, by_rows
    dense, places, by_rows = known
    dense += tuple([_mixed(server, optimizer, member, brought, buffers) for member in mixed])
    rows = []
    for member, rows_of in zip(sparse, by_rows, strict=True):
        array = variables.row(server, member).array
        gradients = [
            each.get(member) or (gradient_place(server, r, buffers[r], array), None) for r, each in enumerate(brought)
        ]
        rows.append(with_changes(rows_of, gradients=tuple(gradients)))
    counts = [t + more[place] for place in (*places, *map(updated.index, (*mixed, *sparse)))] if more else ()
    return Update(optimizer.rule, hyperparameters, t, dense, tuple(rows), counts=tuple(counts))


def _mixed_of(server: State, brought: Sequence[Mapping[int, object]], everywhere: tuple[int, ...]) -> tuple[int, ...]:
    """The variables, except empty ones, of which some replicas bring sparse gradients and others dense ones."""
    if max(map(len, brought)) == len(everywhere):
        return ()
    mixed = sorted(set().union(*brought) - set(everywhere))
    return tuple(member for member in mixed if variables.row(server, member).array.nbytes)


def _mixed(
    server: State,
    optimizer: Optimizer,
    number: int,
    brought: Sequence[Mapping[int, tuple[Array, Array]]],
    buffers: tuple[int, ...],
) -> Dense:
    """The part of a variable of which some replicas bring a sparse gradient."""
    variable = variables.row(server, number)
    dtype = variable.spec.dtype
    return Dense(
        dtype=dtype,
        ranges=(slabs.elements(variable.array),),
        parameters=segment_names.parameters(dtype),
        slots=optimizers.slot_segments(server, optimizer, dtype),
        gradients=tuple(_gradients(server, r, each, dtype) for r, each in enumerate(buffers)),
        rule=_rule_of(optimizer, variable.spec.name),
        rows=tuple(each.get(number) for each in brought),
    )


def _rows(server: State, optimizer: Optimizer, number: int) -> Rows:
    """The rows of a variable, without gradients."""
    variable = variables.row(server, number)
    spec, shape = variable.spec, variable.spec.shape or (1,)
    return Rows(
        dtype=spec.dtype,
        first=slabs.elements(variable.array)[0],
        shape=(shape[0], math.prod(shape[1:])),
        parameters=variable.place.segment,
        slots=optimizers.slot_segments(server, optimizer, slabs.slab_of(spec)),
        gradients=(),
        rule=_rule_of(optimizer, spec.name),
    )


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
    server: State,
    number: int,
    optimizer: Optimizer,
    sparse: tuple[int, ...],
    by_variable: bool,
    groups: tuple[int, ...],
) -> list[tuple[str, str, tuple[tuple[int, int], ...], int]]:
    """For each dtype, rule and group of a set the elements of its variables, without the ``sparse`` ones. Adjacent
    variables are one range unless ``by_variable``. Without ``groups`` all variables are of group 0."""
    members = server.tables.sets[number].variables
    by_kind: dict[tuple[str, str, int], list[tuple[int, int]]] = {}
    for member, group in zip(members, groups or (0,) * len(members), strict=True):
        if member not in sparse:
            variable = variables.row(server, member)
            kind = variable.spec.dtype, _rule_of(optimizer, variable.spec.name), group
            by_kind.setdefault(kind, []).append(slabs.elements(variable.array))
    found = {
        kind: tuple(r for r in sorted(ranges) if r[0] < r[1]) if by_variable else tuple(merged(ranges))
        for kind, ranges in sorted(by_kind.items())
    }
    return [(dtype, rule, ranges, group) for (dtype, rule, group), ranges in found.items() if ranges]


def _at(step: int, optimizer: Optimizer) -> tuple[tuple[str, float], ...]:
    """The hyperparameters of the update that follows ``step`` earlier ones of its optimizer."""
    given = dict(optimizer.hyperparameters)
    schedule, decay = optimizer.schedule, given.get("decay")
    if schedule is None and not decay:
        return optimizer.hyperparameters
    now = given["learning_rate"] if schedule is None else rate(schedule.kind, schedule.numbers, step)
    return tuple({**given, "learning_rate": now / (1 + decay * step) if decay else now}.items())
