"""Optimizers, the sets of variables that they update, and the slots that they keep beside variables.

The module knows nothing of runs and peers; ``requests`` and ``progress`` call it. Every function that can refuse does
so before it changes anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from cs_proto import segment_names
from cs_proto.arithmetic.optimizers import (
    SLOTS,
    WITHOUT_DECAY,
    check_change,
    check_exempt,
    counts_by_variable,
    only,
    rule_of,
)
from cs_proto.arithmetic.schedules import Schedule
from cs_proto.arrays import Array, Location, rows_of
from cs_proto.errors import InvalidArgumentError
from cs_proto.memory_plan import gradient_nbytes
from cs_proto.messages import AssignSlot, Optimizer, OptimizerChange
from cs_proto.printable import counted
from cs_proto.records import replace
from cs_server.engine.store.state import State
from cs_server.engine.store.tables import Seat, SlotFill, SlotNames, Steps, VariableSet
from cs_server.events import Allocate, Discard, LoadKernel, Write
from cs_server.rules import RULES

from . import slabs, variables


def get(server: State, number: int) -> Optimizer:
    """The optimizer with its present numbers. Raises InvalidArgumentError if there is none."""
    optimizer = server.tables.optimizers.get(number)
    if optimizer is None:
        known = ", ".join(f"{n} ({o.kind})" for n, o in server.tables.optimizers.items())
        raise InvalidArgumentError(f"there is no optimizer {number}; there are {known or 'none'}")
    return optimizer


def configure(
    server: State,
    number: int,
    kind: str,
    hyperparameters: Mapping[str, float],
    schedule: Schedule | None = None,
    iterations: int = -1,
    exempt: tuple[str, ...] | None = None,
) -> Optimizer:
    """Make an optimizer (``number`` 0), or change its hyperparameters, its schedule, its iterations (-1: keep them) or
    what is exempt from weight decay (None: keep it).

    Raises InvalidArgumentError if its kind cannot take them. An optimizer keeps its rule.
    """
    if number:
        known = get(server, number)
        if known.kind != kind:
            raise InvalidArgumentError(f"optimizer {number} is {known.kind} and cannot become {kind}; make another")
        check_exempt(kind, known.rule, exempt or ())
        made = _changed(known, hyperparameters, schedule)
    else:
        rule = rule_of(kind, hyperparameters)
        check_exempt(kind, rule, exempt or ())
        server.tables.tally.optimizers += 1
        number = server.tables.tally.optimizers
        made = Optimizer(number, kind, rule, tuple(hyperparameters.items()), schedule, 0)
        taken = {seat.number for seat in server.tables.seats.values()}
        server.tables.seats[number] = Seat(next(seat for seat in itertools.count(1) if seat not in taken))
    server.tables.optimizers[number] = made = replace(
        made,
        iterations=made.iterations if iterations < 0 else iterations,
        exempt=made.exempt if exempt is None else exempt,
    )
    return made


def changed(server: State, changes: Iterable[OptimizerChange]) -> list[Optimizer]:
    """The optimizers as the changes of a run make them. Raises InvalidArgumentError if one cannot take its change."""
    found = []
    for change in changes:
        known = get(server, change.optimizer)
        found.append(_changed(known, dict(change.hyperparameters)))
    return found


def _changed(known: Optimizer, hyperparameters: Mapping[str, float], schedule: Schedule | None = None) -> Optimizer:
    before = dict(known.hyperparameters)
    given = {**before, **hyperparameters}
    check_change(known.kind, known.rule, before, given)
    if schedule is None and "learning_rate" not in hyperparameters:
        schedule = known.schedule
    return replace(known, hyperparameters=tuple(given.items()), schedule=schedule)


def members(server: State, optimizer: int, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """The variables ``numbers`` as a set that ``optimizer`` can update, ascending. Raises InvalidArgumentError."""
    rule = RULES[get(server, optimizer).rule]
    is_bounded = "clipvalue" in dict(get(server, optimizer).hyperparameters)
    if len(set(numbers)) < len(numbers):
        raise InvalidArgumentError(f"optimizer {optimizer}: a variable appears twice; add its gradients first")
    rows = variables.rows(server, numbers)
    for spec in {row.spec.dtype: row.spec for row in reversed(rows)}.values():  # the first one of each dtype
        if not rule.takes(np.dtype(spec.dtype)):
            raise InvalidArgumentError(
                f"variable {spec.name!r} is {spec.dtype}; only floating-point variables can be optimized"
                + (
                    ", and this rule takes no complex ones; keep real and imaginary parts on an axis of a real one"
                    if rule.is_real
                    else ""
                )
            )
        if rule.row is not None and slabs.on_device(server, spec.dtype, 1):
            raise InvalidArgumentError(
                f"{get(server, optimizer).kind} updates variables in the machine's memory only, and variable "
                f"{spec.name!r} is on {server.config.parameter_device}; start the service with parameter_device='cpu:0'"
            )
        if is_bounded and np.dtype(spec.dtype).kind == "c":
            raise InvalidArgumentError(f"variable {spec.name!r} is {spec.dtype}; clipvalue bounds real gradients only")
    return tuple(sorted(numbers))


def known_set(server: State, optimizer: int, numbers: Iterable[int]) -> int | None:
    """The number of a variable set, in whatever order its variables are named. None if it has no number yet."""
    return server.index.set_numbers.get((optimizer, tuple(sorted(numbers))))


def variable_set(
    server: State, optimizer: int, numbers: tuple[int, ...], sparse: Collection[int] = ()
) -> tuple[int, tuple[SlotFill, ...]]:
    """The number of a variable set, which is made if it is new, and the slots that are made with it. The slots of
    ``sparse`` variables take memory only where rows are touched.

    Raises InvalidArgumentError; MemoryPlanError if the slots do not fit into the memory that is left; DeviceMemoryError
    if they, or the kernels that update them, do not fit on the GPU.
    """
    ascending = members(server, optimizer, numbers)
    known = known_set(server, optimizer, ascending)
    if known is not None:
        return known, ()
    record = get(server, optimizer)
    slabs.allocate(server, _described(record), _kernels_of(server, record, ascending))
    fills = _add_slots(server, record, ascending, sparse)
    server.tables.tally.sets += 1
    made = server.tables.tally.sets
    server.tables.sets[made] = VariableSet(optimizer, ascending)
    server.tables.steps[made] = Steps(0)
    server.index.add_set(made, server.tables.sets[made])
    return made, fills


def slot_segments(server: State, optimizer: Optimizer, slab: str) -> tuple[str, ...]:
    """The segments of the slots of an optimizer beside the variables of a slab."""
    seat = server.tables.seats[optimizer.number].number
    return tuple(segment_names.slots(seat, slot, slab) for slot in SLOTS[optimizer.rule])


def free(
    server: State, numbers: Iterable[int], optimizers: Iterable[int] = ()
) -> tuple[int, tuple[tuple[int, str], ...]]:
    """Forget the variables ``numbers`` and these optimizers, with the slots that they have, and give their memory back;
    numbers that stand for nothing are left out. Return how many variables they were, and the variables that are called
    otherwise now, with their names."""
    tables = server.tables
    gone, gone_optimizers = set(numbers) & tables.variables.keys(), set(optimizers) & tables.optimizers.keys()
    touched = {variable for _, variable in tables.slots}
    for number, variable_set in tables.sets.items():
        if variable_set.optimizer in gone_optimizers or not gone.isdisjoint(variable_set.variables):
            _drop_set(server, number, variable_set)
    for optimizer, number in list(tables.slots):
        if optimizer in gone_optimizers or number in gone:
            _drop_slots(server, optimizer, number)
            server.index.counts.forget(optimizer)
            if number not in gone:  # its gradient buffers stay present
                tables.slots[0, number] = SlotNames(())
    for optimizer in gone_optimizers:
        del tables.optimizers[optimizer]
        del tables.seats[optimizer]
    names = {number: variable.spec.name for number, variable in tables.variables.items()}
    renamed = variables.free(server, gone, touched)
    _follow(server, {only(names[number]): only(name) for number, name in renamed})
    return len(gone), renamed


def _follow(server: State, patterns: Mapping[str, str]) -> None:
    """Keep exempt from weight decay the variables that are called otherwise now."""
    for number, optimizer in list(server.tables.optimizers.items()):
        exempt = tuple(patterns.get(pattern, pattern) for pattern in optimizer.exempt)
        if exempt != optimizer.exempt:
            server.tables.optimizers[number] = replace(optimizer, exempt=exempt)


def _drop_set(server: State, number: int, variable_set: VariableSet) -> None:
    """Forget a variable set; its steps count in the versions of its variables, and in their updates, as before."""
    tables = server.tables
    count = tables.steps[number].count
    for member in variable_set.variables:
        variable, slots = tables.variables[member], tables.slots[variable_set.optimizer, member]
        tables.variables[member] = replace(variable, version=variable.version + count)
        tables.slots[variable_set.optimizer, member] = replace(slots, steps=slots.steps + count)
    server.index.drop_set(number, variable_set)
    del tables.sets[number]
    del tables.steps[number]


def _drop_slots(server: State, optimizer: int, number: int) -> None:
    for array in slabs.slots_of(server, optimizer, number):
        if array.nbytes and isinstance(array.place, Location):
            server.out.append(Discard(array.place.segment, array.place.offset, array.place.offset + array.nbytes))
    del server.tables.slots[optimizer, number]


def applied(server: State, number: int, count: int = 1) -> None:
    """``count`` steps on the variable set were committed."""
    server.tables.steps[number] = Steps(server.tables.steps[number].count + count)
    optimizer = get(server, server.tables.sets[number].optimizer)
    server.tables.optimizers[optimizer.number] = replace(optimizer, iterations=optimizer.iterations + count)


def counts(server: State, optimizer: int) -> dict[int, int]:
    """How often the optimizer updated each variable beside which it has slots."""
    record = get(server, optimizer)
    if counts_by_variable(record.kind):
        return server.index.counts.of(optimizer)
    return dict.fromkeys(slotted(server, optimizer), record.iterations)


def set_counts(server: State, optimizer: int, given: Mapping[int, int]) -> tuple[SlotFill, ...]:
    """Let the next update of these variables be the one after so many; the slots that are made with it.

    Raises InvalidArgumentError if the optimizer does not count by variable or cannot update one of them, and
    MemoryPlanError as ``variable_set`` does.
    """
    record = get(server, optimizer)
    if not counts_by_variable(record.kind):
        raise InvalidArgumentError(
            f"{_described(record)} counts its updates for all variables together; assign its iterations"
        )
    fills = _add_slots(server, record, members(server, optimizer, tuple(given)), ())
    now = server.index.counts.of(optimizer)
    for number, count in given.items():
        slots = server.tables.slots[optimizer, number]
        server.tables.slots[optimizer, number] = replace(slots, steps=slots.steps + count - now[number])
    server.index.counts.forget(optimizer)
    return fills


def kernels(server: State) -> list[LoadKernel]:
    """The kernels that a restarted server loads for the updates of variables on a GPU."""
    sets = server.tables.sets.values()
    return [*dict.fromkeys(k for s in sets for k in _kernels_of(server, get(server, s.optimizer), s.variables))]


def _kernels_of(server: State, optimizer: Optimizer, numbers: Iterable[int]) -> list[LoadKernel]:
    dtypes = {variables.row(server, number).spec.dtype for number in numbers}
    rules = [optimizer.rule, *([WITHOUT_DECAY[optimizer.rule]] if optimizer.exempt else [])]
    return [LoadKernel(r, dtype) for dtype in sorted(dtypes) if slabs.on_device(server, dtype, 1) for r in rules]


def make_slots(server: State, optimizer: int, numbers: tuple[int, ...]) -> tuple[SlotFill, ...]:
    """Make the missing slots of these variables.

    Raises InvalidArgumentError if one of them cannot be updated, and MemoryPlanError as ``variable_set`` does.
    """
    return _add_slots(server, get(server, optimizer), members(server, optimizer, numbers), ())


def slots(server: State, optimizer: int, variable: int) -> tuple[tuple[str, Array], ...]:
    """The name and the place of every slot that an optimizer has, or would have, beside a variable. Raises
    InvalidArgumentError if there is no such optimizer or variable."""
    names = SLOTS[get(server, optimizer).rule]
    return tuple(zip(names, slabs.slots_of(server, optimizer, variables.row(server, variable).number), strict=True))


def place_of_slot(optimizer: Optimizer, slot: str) -> int:
    """Which of its slots ``slot`` is. Raises InvalidArgumentError if the optimizer has no such slot."""
    names = SLOTS[optimizer.rule]
    if slot not in names:
        has = ", ".join(names) or "none"
        raise InvalidArgumentError(f"optimizer {optimizer.number} has no slot {slot!r}; its slots: {has}")
    return names.index(slot)


def slotted(server: State, optimizer: int) -> tuple[int, ...]:
    """The variables beside which an optimizer has slots."""
    return tuple(sorted(variable for number, variable in server.tables.slots if number == optimizer))


def write_slot(server: State, record: AssignSlot) -> Write:
    """The operation that sets a slot, or rows of it; the slot must exist. Raises InvalidArgumentError if the value does
    not fit."""
    place = place_of_slot(get(server, record.optimizer), record.slot)
    _, target = slots(server, record.optimizer, record.variable)[place]
    spec, value, first = variables.row(server, record.variable).spec, record.value, record.first
    what = f"the value of slot {record.slot!r} of variable {spec.name!r}"
    if first is not None:
        stop = first + value.shape[0] if value.shape else -1
        if not target.shape or not first <= stop <= target.shape[0]:
            raise InvalidArgumentError(
                f"{what} is {value.dtype}{list(value.shape)} for the rows from {first} on; the slot is "
                f"{target.dtype}{list(target.shape)}"
            )
        target = rows_of(target, first, stop)
    variables.check_fits(what, value, replace(spec, shape=target.shape, sparse=False))
    return Write(target, "assign", None, (value,))


def _add_slots(
    server: State, optimizer: Optimizer, numbers: Iterable[int], sparse: Collection[int]
) -> tuple[SlotFill, ...]:
    """Make the missing slots of these variables."""
    names = SLOTS[optimizer.rule]
    missing = [variables.row(server, v) for v in numbers if (optimizer.number, v) not in server.tables.slots]
    if not missing:
        return ()
    touched = {number for _, number in server.tables.slots}
    idle = [v for v in missing if v.number not in touched]
    slots = {variable.number: slabs.slots_of(server, optimizer.number, variable.number) for variable in missing}
    nbytes = sum(array.nbytes for arrays in slots.values() for array in arrays)
    slabs.check_plan(
        server,
        _described(optimizer),
        nbytes,
        f"for the slots {', '.join(names)} of {counted(len(missing), 'variable')}",
        touched_nbytes=sum(gradient_nbytes(variable.spec, variable.array.nbytes) for variable in idle),
        device_nbytes=sum(slabs.on_device(server, a.dtype, a.nbytes) for arrays in slots.values() for a in arrays),
    )
    initial = RULES[optimizer.rule].initial(dict(optimizer.hyperparameters))
    fills: list[SlotFill] = []
    needed: list[Allocate] = []
    for variable in missing:
        reservation = server.tables.slabs[slabs.slab_of(variable.spec)].reservation
        for array, value in zip(slots[variable.number], initial, strict=True):
            assert isinstance(array.place, Location)
            segment, start = array.place.segment, array.place.offset
            is_lazy = (variable.spec.sparse or variable.number in sparse) and value == 0
            needed.append(Allocate(segment, reservation, "", start, start + array.nbytes, is_lazy))
            if array.nbytes:
                fills.append(SlotFill(segment, array.dtype, *slabs.elements(array), float(value), is_lazy))
    slabs.allocate(server, f"the slots of {_described(optimizer)}", needed)
    for variable in idle:
        slab = slabs.slab_of(variable.spec)
        before = server.tables.slabs[slab]
        left = before.idle_nbytes - gradient_nbytes(variable.spec, variable.array.nbytes)
        server.tables.slabs[slab] = replace(before, idle_nbytes=left)
    for variable in missing:
        server.tables.slots[optimizer.number, variable.number] = SlotNames(names)
        server.index.counts.add_slots(optimizer.number, variable.number)
    return tuple(fills)


def _described(optimizer: Optimizer) -> str:
    return f"optimizer {optimizer.number} ({optimizer.kind})"
