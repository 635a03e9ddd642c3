"""The catalogue: which variables, optimizers, slots and sets of variables there are, and where they lie.

Owns names, numbers, places and the plan that keeps the service inside the machine's memory. It knows nothing of runs
and of who asks; ``requests`` and ``progress`` call it. Every method that can refuse does so before it changes anything.

A slab holds the variables of one dtype one after the other. Its reservation is fixed when it is made and far larger
than the memory (only touched pages count), so that growth never moves anything. Slots and gradient buffers are
segments of their own with the slab's offsets.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from cs_proto import segments
from cs_proto.arrays import Array, Location
from cs_proto.errors import InvalidArgumentError, MemoryPlanError
from cs_proto.messages import Optimizer, ReduceOpName, Variable, VariableSpec, WriteOp

from .events import Allocate, Apply, Command, Write
from .tables import Slab, SlotFill, SlotNames, Steps, Tables, VariableSet
from .updates import Rule, resolve

__all__ = ["SLACK_NBYTES", "Catalogue"]

#: Every variable begins at a multiple of this.
_ALIGNMENT = 64
#: Beside each variable lies as much again, up to this: room for a commit that must leave old values whole.
SLACK_NBYTES = 256 * 1024
#: A slab's address range, in multiples of the machine's memory, and the page size it is a multiple of (a huge page).
_RESERVATION = 4
_PAGE_NBYTES = 2 << 20


class Catalogue:
    """Variables and optimizers. Commands that make segments go to ``out``."""

    def __init__(self, tables: Tables, out: list[Command], replicas: int, machine_nbytes: int) -> None:
        self._tables = tables
        self._out = out
        self._replicas = replicas
        self._reservation = -(-_RESERVATION * machine_nbytes // _PAGE_NBYTES) * _PAGE_NBYTES
        self.forget()

    def forget(self) -> None:
        """The tables were rolled back: derive again what is only derived from them."""
        self._numbers = {variable.spec.name: number for number, variable in self._tables.variables.items()}
        self._sets_of: dict[int, list[int]] = {}
        self._set_numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        for number, variable_set in self._tables.sets.items():
            self._note_set(number, variable_set)
        self._ranges: dict[int, tuple[tuple[str, tuple[tuple[int, int], ...]], ...]] = {}

    # --- variables ----------------------------------------------------------------------------------------------------

    def variable(self, number: int) -> Variable:
        """The variable as it stands. Raises InvalidArgumentError where there is none of that number."""
        variable = self._variable(number)
        # An apply counts once in its set, not once in each of a thousand variables.
        applied = sum(self._tables.steps[each].count for each in self._sets_of.get(number, ()))
        return replace(variable, version=variable.version + applied) if applied else variable

    def named(self, name: str) -> Variable:
        """The variable called ``name``. Raises InvalidArgumentError, which says what is called like it."""
        number = self._numbers.get(name)
        if number is None:
            close = difflib.get_close_matches(name, self._numbers, n=3)
            raise InvalidArgumentError(
                f"there is no variable {name!r}; "
                + (f"did you mean {' or '.join(map(repr, close))}?" if close else self._inventory())
            )
        return self.variable(number)

    def variables(self) -> tuple[Variable, ...]:
        """All of them, by number."""
        return tuple(self.variable(number) for number in sorted(self._tables.variables))

    def create(self, spec: VariableSpec, value: Array | None) -> Variable:
        """Make a variable of that spec, under a name of its own. ``value``, if any, is only compared with it.

        Raises MemoryPlanError where variable and gradient buffers do not fit the memory that is left.
        """
        if value is not None:
            _check_fits(f"the value of variable {spec.name!r}", value, spec)
        name = self._free_name(spec.name)
        nbytes = Array(spec.dtype, spec.shape, Location(segments.parameters(spec.dtype), 0)).nbytes
        may_be_idle = nbytes if spec.trainable and _is_optimizable(spec.dtype) else 0
        self._check_plan(
            f"variable {name!r}", nbytes + self._replicas * may_be_idle, "for its value and its gradient buffers"
        )
        slab = self._tables.slabs.get(spec.dtype) or Slab(self._reservation, 0, 0, 0)
        end = slab.tail + _aligned(nbytes) + _aligned(min(nbytes, SLACK_NBYTES))
        if end > slab.reservation:
            raise MemoryPlanError(
                f"variable {name!r}: {nbytes} bytes planned, but of the {slab.reservation} bytes of addresses reserved "
                f"for {spec.dtype} variables {slab.reservation - slab.tail} are available"
            )
        place = Location(segments.parameters(spec.dtype), slab.tail)
        if spec.dtype not in self._tables.slabs:
            for segment, writer in self._segments_of_slab(spec.dtype):
                self._out.append(Allocate(segment, slab.reservation, writer))
        if nbytes:
            self._out.append(Allocate(place.segment, slab.reservation, "", place.offset, place.offset + nbytes))
        self._tables.slabs[spec.dtype] = Slab(
            slab.reservation, end, slab.nbytes + nbytes, slab.idle_nbytes + may_be_idle
        )
        self._tables.tally.variables += 1
        variable = Variable(self._tables.tally.variables, replace(spec, name=name), place, 0)
        self._tables.variables[variable.number] = variable
        self._numbers[name] = variable.number
        return variable

    def write(
        self,
        number: int,
        op: WriteOp,
        reduce: ReduceOpName | None,
        sources: Sequence[Array],
        indices: Array | None = None,
    ) -> Write:
        """The operation that writes ``sources``. Raises InvalidArgumentError where they do not fit the variable."""
        variable = self._variable(number)
        what, spec = f"{op} to variable {variable.spec.name!r}", variable.spec
        if (indices is None) == op.startswith("scatter"):
            raise InvalidArgumentError(f"{what}: a scatter, and nothing else, has indices")
        if indices is not None:
            if not spec.shape or len(indices.shape) != 1 or np.dtype(indices.dtype).kind not in "iu":
                raise InvalidArgumentError(
                    f"{what}: indices are {indices.dtype}{list(indices.shape)}; they must be integers [k] that count "
                    f"rows of {spec.dtype}{list(spec.shape)}"
                )
            spec = replace(spec, shape=(*indices.shape, *spec.shape[1:]))
        for source in sources:
            _check_fits(what, source, spec)
        if spec.dtype == "bool" and op not in ("assign", "scatter_update"):
            raise InvalidArgumentError(f"{what}: bool cannot be added")
        return Write(variable.array, op, reduce, tuple(sources), indices)

    def written(self, number: int) -> int:
        """A write was committed: the variable's new version."""
        variable = self._variable(number)
        self._tables.variables[number] = replace(variable, version=variable.version + 1)
        return self.variable(number).version

    # --- optimizers ---------------------------------------------------------------------------------------------------

    def optimizer(self, number: int) -> Optimizer:
        """The optimizer as it stands. Raises InvalidArgumentError where there is none of that number."""
        optimizer = self._tables.optimizers.get(number)
        if optimizer is None:
            known = ", ".join(f"{n} ({o.kind})" for n, o in self._tables.optimizers.items())
            raise InvalidArgumentError(f"there is no optimizer {number}; there are {known or 'none'}")
        return optimizer

    def configure(
        self, number: int, kind: str, hyperparameters: Mapping[str, float]
    ) -> tuple[Optimizer, tuple[SlotFill, ...]]:
        """Make an optimizer (0) or change some of its hyperparameters; and the slots that only now come to be.

        Raises InvalidArgumentError where the rule cannot take them.
        """
        given = hyperparameters
        iterations = 0
        if number:
            known = self.optimizer(number)
            if known.kind != kind:
                raise InvalidArgumentError(f"optimizer {number} is {known.kind} and cannot become {kind}; make another")
            given = {**dict(known.hyperparameters), **hyperparameters}
            iterations = known.iterations
        pairs = tuple(given.items())
        rule = _rule(kind, pairs)
        optimizer = Optimizer(number or self._tables.tally.optimizers + 1, kind, pairs, iterations)
        fills = self._add_slots(optimizer, rule, [v for o, v in self._tables.slots if o == number])
        self._tables.tally.optimizers = max(self._tables.tally.optimizers, optimizer.number)
        self._tables.optimizers[optimizer.number] = optimizer
        return optimizer, fills

    def members(self, optimizer: int, variables: tuple[int, ...]) -> tuple[int, ...]:
        """``variables`` as a set that ``optimizer`` can update, ascending. Raises InvalidArgumentError."""
        self.optimizer(optimizer)
        if len(set(variables)) < len(variables):
            raise InvalidArgumentError(f"optimizer {optimizer}: a variable appears twice; add its gradients first")
        for number in variables:
            spec = self._variable(number).spec
            if not _is_optimizable(spec.dtype):
                raise InvalidArgumentError(
                    f"variable {spec.name!r} is {spec.dtype}; only floating-point variables can be optimized"
                )
        return tuple(sorted(variables))

    def known_set(self, optimizer: int, variables: Iterable[int]) -> int | None:
        """The number of a variable set, in whatever order its variables are named; None where it has none yet."""
        return self._set_numbers.get((optimizer, tuple(sorted(variables))))

    def variable_set(self, optimizer: int, variables: tuple[int, ...]) -> tuple[int, tuple[SlotFill, ...]]:
        """The number of that set, and the slots that only now come to be.

        Raises InvalidArgumentError, and MemoryPlanError where the slots do not fit the memory that is left.
        """
        members = self.members(optimizer, variables)
        known = self.known_set(optimizer, variables)
        if known is not None:
            return known, ()
        record = self.optimizer(optimizer)
        fills = self._add_slots(record, _rule(record.kind, record.hyperparameters), members)
        self._tables.tally.sets += 1
        made = self._tables.tally.sets
        self._tables.sets[made] = VariableSet(optimizer, members)
        self._tables.steps[made] = Steps(0)
        self._note_set(made, self._tables.sets[made])
        return made, fills

    def apply(self, number: int, buffers: Sequence[int], steps_before: int) -> list[Apply]:
        """One step on a variable set: an operation for each dtype. ``buffers`` says for every replica in which of its
        gradient buffers its gradients lie; ``steps_before`` counts this optimizer's earlier steps in the commit."""
        optimizer = self.optimizer(self._tables.sets[number].optimizer)
        rule = _rule(optimizer.kind, optimizer.hyperparameters)
        return [
            Apply(
                kind=optimizer.kind,
                hyperparameters=optimizer.hyperparameters,
                t=optimizer.iterations + steps_before + 1,
                dtype=dtype,
                ranges=ranges,
                parameters=segments.parameters(dtype),
                slots=tuple(segments.slots(optimizer.number, slot, dtype) for slot in rule.slots),
                gradients=tuple(segments.gradients(replica, b, dtype) for replica, b in enumerate(buffers)),
            )
            for dtype, ranges in self._ranges_of(number)
        ]

    def applied(self, number: int) -> None:
        """A step on the variable set was committed."""
        self._tables.steps[number] = Steps(self._tables.steps[number].count + 1)
        optimizer = self.optimizer(self._tables.sets[number].optimizer)
        self._tables.optimizers[optimizer.number] = replace(optimizer, iterations=optimizer.iterations + 1)

    # --- memory -------------------------------------------------------------------------------------------------------

    def parameter_nbytes(self) -> int:
        """Bytes of all variables."""
        return sum(slab.nbytes for slab in self._tables.slabs.values())

    def slot_nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(
            len(slots.names) * self._tables.variables[variable].array.nbytes
            for (_, variable), slots in self._tables.slots.items()
        )

    def allocations(self) -> list[Allocate]:
        """Every segment there is, to be opened again by a server that was restarted."""
        made = [
            Allocate(segment, slab.reservation, writer)
            for dtype, slab in self._tables.slabs.items()
            for segment, writer in self._segments_of_slab(dtype)
        ]
        names = {
            (segments.slots(optimizer, slot, dtype), dtype)
            for (optimizer, variable), slots in self._tables.slots.items()
            for slot in slots.names
            for dtype in [self._tables.variables[variable].spec.dtype]
        }
        return made + [Allocate(name, self._tables.slabs[dtype].reservation, "") for name, dtype in sorted(names)]

    def _segments_of_slab(self, dtype: str) -> Iterable[tuple[str, str]]:
        yield segments.parameters(dtype), ""
        if _is_optimizable(dtype):
            for replica in range(self._replicas):
                for buffers in (0, 1):
                    yield segments.gradients(replica, buffers, dtype), f"w{replica}"

    def _add_slots(self, optimizer: Optimizer, rule: Rule, variables: Iterable[int]) -> tuple[SlotFill, ...]:
        """Make the slots that ``rule`` has and these variables lack."""
        missing: list[tuple[Variable, tuple[str, ...], list[int]]] = []
        for number in variables:
            held = self._tables.slots.get((optimizer.number, number))
            names = held.names if held else ()
            lacking = [position for position, slot in enumerate(rule.slots) if slot not in names]
            if held is None or lacking:
                missing.append((self._variable(number), names, lacking))
        touched = {number for _, number in self._tables.slots}
        idle = [v for v, _, _ in missing if v.spec.trainable and v.number not in touched]
        self._check_plan(
            f"optimizer {optimizer.number} ({optimizer.kind})",
            sum(len(lacking) * variable.array.nbytes for variable, _, lacking in missing),
            f"for the slots {', '.join(rule.slots)} of {len(missing)} variables",
            touched_nbytes=sum(variable.array.nbytes for variable in idle),
        )
        for variable in idle:
            slab = self._tables.slabs[variable.spec.dtype]
            self._tables.slabs[variable.spec.dtype] = replace(
                slab, idle_nbytes=slab.idle_nbytes - variable.array.nbytes
            )
        initial = rule.initial(dict(optimizer.hyperparameters))
        fills: list[SlotFill] = []
        for variable, names, lacking in missing:
            dtype, nbytes, offset = variable.spec.dtype, variable.array.nbytes, variable.place.offset
            reservation = self._tables.slabs[dtype].reservation
            for position in lacking:
                segment = segments.slots(optimizer.number, rule.slots[position], dtype)
                self._out.append(Allocate(segment, reservation, "", offset, offset + nbytes))
                if nbytes:
                    first, last = _elements(variable)
                    fills.append(SlotFill(segment, dtype, first, last, float(initial[position])))
            added = tuple(rule.slots[position] for position in lacking)
            self._tables.slots[optimizer.number, variable.number] = SlotNames(names + added)
        return tuple(fills)

    def _check_plan(self, what: str, nbytes: int, purpose: str, touched_nbytes: int = 0) -> None:
        """Raise where ``nbytes`` do not fit. ``touched_nbytes`` of idle variables have just been touched."""
        available = self._tables.tally.available_nbytes
        idle_nbytes = sum(slab.idle_nbytes for slab in self._tables.slabs.values()) - touched_nbytes
        promised = self._replicas * idle_nbytes
        if nbytes and 0 <= available < nbytes + promised:
            raise MemoryPlanError(
                f"{what}: {nbytes} bytes planned {purpose} beside {promised} bytes promised to gradient buffers of "
                f"other variables, {available} bytes available; use smaller or fewer variables, fewer replicas, or "
                "give the service more memory"
            )

    # --- names, numbers, ranges ---------------------------------------------------------------------------------------

    def _variable(self, number: int) -> Variable:
        variable = self._tables.variables.get(number)
        if variable is None:
            raise InvalidArgumentError(f"there is no variable {number}; {self._inventory()}")
        return variable

    def _inventory(self) -> str:
        known = [f"{n} ({self._tables.variables[n].spec.name})" for n in sorted(self._tables.variables)]
        shown = ", ".join(known if len(known) <= 8 else [*known[:4], "...", *known[-3:]])
        return f"there are {shown}" if known else "there are none"

    def _free_name(self, name: str) -> str:
        free, count = name, 0
        while free in self._numbers:
            count += 1
            suffix = f"_{count}"
            free = name[: 512 - len(suffix)] + suffix
        return free

    def _note_set(self, number: int, variable_set: VariableSet) -> None:
        self._set_numbers[variable_set.optimizer, variable_set.variables] = number
        for member in variable_set.variables:
            self._sets_of.setdefault(member, []).append(number)

    def _ranges_of(self, number: int) -> tuple[tuple[str, tuple[tuple[int, int], ...]], ...]:
        """For each dtype of a set the elements that its variables cover. Places never change, so it is kept."""
        if number not in self._ranges:
            by_dtype: dict[str, list[tuple[int, int]]] = {}
            for variable in map(self._variable, self._tables.sets[number].variables):
                by_dtype.setdefault(variable.spec.dtype, []).append(_elements(variable))
            merged = {dtype: _merged(ranges) for dtype, ranges in sorted(by_dtype.items())}
            self._ranges[number] = tuple((dtype, ranges) for dtype, ranges in merged.items() if ranges)
        return self._ranges[number]


@lru_cache(maxsize=256)
def _rule(kind: str, hyperparameters: tuple[tuple[str, float], ...]) -> Rule:
    return resolve(kind, dict(hyperparameters))


def _is_optimizable(dtype: str) -> bool:
    return np.dtype(dtype).kind in "fc"


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _elements(variable: Variable) -> tuple[int, int]:
    itemsize = np.dtype(variable.spec.dtype).itemsize
    first = variable.place.offset // itemsize
    return first, first + variable.array.nbytes // itemsize


def _merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Ascending, without empty ones, adjacent ones as one."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], last)
        elif first < last:
            merged.append((first, last))
    return tuple(merged)


def _check_fits(what: str, value: Array, spec: VariableSpec) -> None:
    if value.dtype != spec.dtype or value.shape != spec.shape:
        raise InvalidArgumentError(
            f"{what} is {value.dtype}{list(value.shape)}; it must be {spec.dtype}{list(spec.shape)}"
        )
