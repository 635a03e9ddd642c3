"""The catalogue: which variables, optimizers, slots and sets of variables there are, and where they lie.

Owns names, numbers, places and the plan that keeps the service inside the machine's memory. It knows nothing of runs
and of who asks; ``requests`` and ``progress`` call it. Every method that can refuse does so before it changes anything.

A slab holds the variables of one dtype one after the other, in a reservation of addresses of which only touched pages
take memory. If a variable does not fit, the slab is extended and nothing moves. Slots and gradient buffers are segments
of their own with the slab's offsets.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from cs_proto import segment_names
from cs_proto.arrays import Array, Location
from cs_proto.errors import DeviceMemoryError, InvalidArgumentError, MemoryPlanError, replica_exception_class
from cs_proto.messages import ApplyPoint, Error, Optimizer, ReduceOpName, Variable, VariableSpec, WriteOp
from cs_proto.optimizers import CLIPS, SLOTS, check_change, rule_of
from cs_proto.ranges import merged
from cs_proto.records import replace
from cs_proto.schedules import Schedule, rate
from cs_proto.sizes import in_units
from cs_server.events import Allocate, Apply, Command, Dense, Discard, Load, LoadKernel, Needed, Rows, Write
from cs_server.rules import GPU_DTYPES, RULES

from . import versions
from .address_budget import Addresses, pages
from .state import Hole, Slab, SlotFill, SlotNames, Steps, Tables, VariableSet

__all__ = ["Catalogue"]

#: Every variable begins at a multiple of this.
_ALIGNMENT = 64
# Characters that a variable's name has at most.
_NAME_LENGTH = 512


class Catalogue:
    """Variables and optimizers. Commands that make segments go to ``out``."""

    def __init__(
        self, tables: Tables, out: list[Command], replicas: int, addresses: Addresses, device: str = "cpu:0"
    ) -> None:
        """``addresses``: the lengths of segments, in bytes. ``device``: where the variables lie."""
        self._tables = tables
        self._out = out
        self._replicas = replicas
        self._device = device
        #: What was refused to the event at hand: whoever needs it fails with that.
        self.refused: dict[Needed, Error] = {}
        self._addresses = addresses
        self._numbers = {variable.spec.name: number for number, variable in tables.variables.items()}
        #: Of a name that was taken, the count at which a free one was found last: those before are taken.
        self._counts: dict[str, int] = {}
        self._derive_sets()

    @contextmanager
    def undoing(self) -> Iterator[None]:
        """The tables are rolled back in the block: what is only derived from them follows."""
        variables, is_stale = self._tables.variables, self._tables.sets.is_changed
        changed = variables.changed
        for number in changed:
            if number in variables:
                self._drop_name(variables[number].spec.name)
        yield
        for number in changed:
            if number in variables:
                self._numbers[variables[number].spec.name] = number
        if is_stale:
            self._derive_sets()

    def _derive_sets(self) -> None:
        self._sets_of: dict[int, list[int]] = {}
        self._set_numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        for number, variable_set in self._tables.sets.items():
            self._note_set(number, variable_set)
        # Of each set and choice of buffers, since places never change: whoever updates knows it again by its identity.
        self._dense: dict[tuple[int, tuple[int, ...], bool, tuple[int, ...]], tuple[Dense, ...]] = {}

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
            import difflib  # late: only mistakes need it

            close = difflib.get_close_matches(name, self._numbers, n=3)
            raise InvalidArgumentError(
                f"there is no variable {name!r}; "
                + (f"did you mean {' or '.join(map(repr, close))}?" if close else self._inventory())
            )
        return self.variable(number)

    def variables(self) -> tuple[Variable, ...]:
        """All of them, by number."""
        return tuple(self.variable(number) for number in sorted(self._tables.variables))

    def create(self, spec: VariableSpec, value: Array | None) -> tuple[Variable, tuple[SlotFill, ...]]:
        """Make a variable of that spec, under a name of its own. ``value``, if any, is only compared with it. And what
        makes it zeros, where another one was in its place.

        Raises MemoryPlanError where variable and gradient buffers do not fit into the free memory, or into the
        addresses that the service may take.
        """
        if value is not None:
            _check_fits(f"the value of variable {spec.name!r}", value, spec)
        name = self._free_name(spec.name)
        nbytes = Array(spec.dtype, spec.shape, Location(segment_names.parameters(spec.dtype), 0)).nbytes
        may_be_idle = nbytes if spec.trainable and _is_optimizable(spec.dtype) else 0
        self._check_plan(
            f"variable {name!r}",
            nbytes + self._replicas * may_be_idle,
            "for its value and its gradient buffers",
            device_nbytes=self._on_device(spec.dtype, nbytes),
        )
        slab = self._tables.slabs.get(spec.dtype) or Slab(0, 0, 0, 0)
        room = _room(nbytes)
        hole = self._hole_for(spec.dtype, room)
        end = slab.tail if hole is not None else slab.tail + room
        place = Location(segment_names.parameters(spec.dtype), slab.tail if hole is None else hole)
        needed: list[Allocate] = []
        reservation, is_lazy = slab.reservation, False
        for longer in self._reservations(f"variable {name!r}", spec.dtype, slab, end):
            # Extend all segments of the slab: a commit that reads gradients cannot extend one.
            made = self._segments_of_slab(spec.dtype, slab.gradient_sets)
            reservation, needed = longer, [Allocate(each, longer, writer, end, end) for each, writer in made]
            if not any(each in self.refused for each in needed):
                break
        if nbytes:
            # A large table that has no dense gradients may be zeros, of which nothing is touched before it is named.
            is_lazy = value is None and not spec.trainable
            needed.append(Allocate(place.segment, reservation, "", place.offset, place.offset + nbytes, is_lazy))
        if (page := versions.page_of(self._tables.tally.variables + 1)) is not None:
            if page[1] > self._addresses.versions:
                raise MemoryPlanError(
                    f"variable {name!r}: {page[1]} bytes needed{in_units(page[1])} to count the changes of all "
                    f"variables that were ever made, {self._addresses.versions} bytes of addresses available"
                    f"{in_units(self._addresses.versions)}; keep variables instead of making new ones, or start the "
                    "service again"
                )
            needed.append(Allocate(segment_names.versions(), self._addresses.versions, "", *page, is_lazy=True))
        self._allocate(f"variable {name!r}", needed)
        self._tables.slabs[spec.dtype] = replace(
            slab,
            reservation=reservation,
            tail=end,
            nbytes=slab.nbytes + nbytes,
            idle_nbytes=slab.idle_nbytes + may_be_idle,
        )
        self._tables.tally.variables += 1
        variable = Variable(self._tables.tally.variables, replace(spec, name=name), place, 0)
        self._tables.variables[variable.number] = variable
        self._numbers[name] = variable.number
        if hole is None:
            return variable, ()
        left = self._tables.holes[spec.dtype, hole].nbytes - room
        del self._tables.holes[spec.dtype, hole]
        if left:
            self._tables.holes[spec.dtype, hole + room] = Hole(left)
        return variable, (SlotFill(place.segment, spec.dtype, *_elements(variable), 0.0, is_lazy),)

    def _reservations(self, what: str, dtype: str, slab: Slab, end: int) -> tuple[int, ...]:
        """How long the segments of a slab that ends at byte ``end`` may become, the better length first; nothing where
        they are long enough. Every process maps a segment anew that is extended, so it becomes twice as long where that
        can be had, and else as long as it must be. Raises MemoryPlanError."""
        if 0 < slab.reservation >= end:
            return ()
        longest = self._addresses.longest_slab
        if end > longest:
            nbytes = end - slab.tail
            raise MemoryPlanError(
                f"{what}: {nbytes} bytes planned{in_units(nbytes)}, but only {longest - slab.tail} of the {longest} "
                f"bytes of addresses{in_units(longest)} for {dtype} variables are available; use smaller or "
                "fewer variables"
            )
        return min(longest, max(self._addresses.slab, 2 * slab.reservation, pages(end))), pages(max(end, 1))

    def use_second_gradients(self, dtypes: Iterable[str]) -> None:
        """Make the second set of every replica's gradient buffers of these dtypes. Raises MemoryPlanError if it does
        not fit."""
        for dtype in dict.fromkeys(dtypes):
            slab = self._tables.slabs[dtype]
            if _is_optimizable(dtype) and slab.gradient_sets < 2:
                needed = [
                    Allocate(
                        segment_names.gradients(replica, 1, dtype),
                        slab.reservation,
                        f"w{replica}",
                        slab.tail,
                        slab.tail,
                    )
                    for replica in range(self._replicas)
                ]
                self._allocate(f"the second set of {dtype} gradient buffers", needed)
                self._tables.slabs[dtype] = replace(slab, gradient_sets=2)

    def free(self, numbers: Iterable[int]) -> int:
        """Forget those of the variables that no optimizer has taken up, and give their memory back; how many."""
        count = 0
        taken_up = {number for _, number in self._tables.slots} | self._sets_of.keys()
        for number in numbers:
            variable = self._tables.variables.get(number)
            if variable is not None and number not in taken_up:
                self._free(variable)
                count += 1
        return count

    def _free(self, variable: Variable) -> None:
        dtype, nbytes, offset = variable.spec.dtype, variable.array.nbytes, variable.place.offset
        del self._tables.variables[variable.number]
        self._drop_name(variable.spec.name)
        if nbytes:
            for segment, _ in self._segments_of_slab(dtype, self._tables.slabs[dtype].gradient_sets):
                self._out.append(Discard(segment, offset, offset + nbytes))
        idle_nbytes = nbytes if variable.spec.trainable and _is_optimizable(dtype) else 0
        holes, room, slab = self._tables.holes, _room(nbytes), self._tables.slabs[dtype]
        for other, hole in holes.items():
            if other[0] == dtype and room and (other[1] + hole.nbytes == offset or other[1] == offset + room):
                offset, room = min(offset, other[1]), room + hole.nbytes
                del holes[other]
        if room:  # at the tail, too: what lies beyond the tail is zero
            holes[dtype, offset] = Hole(room)
        self._tables.slabs[dtype] = replace(
            slab, nbytes=slab.nbytes - nbytes, idle_nbytes=slab.idle_nbytes - idle_nbytes
        )

    def _hole_for(self, dtype: str, room: int) -> int | None:
        """Where the smallest hole of so many bytes begins; of equal ones the first. None where there is none."""
        fitting = [(h.nbytes, at) for (of, at), h in self._tables.holes.items() if of == dtype and h.nbytes >= room > 0]
        return min(fitting)[1] if fitting else None

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
        return Write(variable.array, op, reduce, tuple(sources), indices, (number,))

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
        self,
        number: int,
        kind: str,
        hyperparameters: Mapping[str, float],
        schedule: Schedule | None = None,
        iterations: int = -1,
    ) -> Optimizer:
        """Make an optimizer (0) or change some of its hyperparameters, its schedule or its iterations (-1: not them).

        Raises InvalidArgumentError where its kind cannot take them, or its rule, which it keeps.
        """
        if number:
            known = self.optimizer(number)
            if known.kind != kind:
                raise InvalidArgumentError(f"optimizer {number} is {known.kind} and cannot become {kind}; make another")
            before = dict(known.hyperparameters)
            given = {**before, **hyperparameters}
            check_change(kind, known.rule, before, given)
            if schedule is None and "learning_rate" not in hyperparameters:
                schedule = known.schedule
            made = replace(known, hyperparameters=tuple(given.items()), schedule=schedule)
        else:
            rule = rule_of(kind, hyperparameters)
            self._tables.tally.optimizers += 1
            number = self._tables.tally.optimizers
            made = Optimizer(number, kind, rule, tuple(hyperparameters.items()), schedule, 0)
        self._tables.optimizers[number] = made = replace(
            made, iterations=made.iterations if iterations < 0 else iterations
        )
        return made

    def members(self, optimizer: int, variables: tuple[int, ...]) -> tuple[int, ...]:
        """``variables`` as a set that ``optimizer`` can update, ascending. Raises InvalidArgumentError."""
        rule = RULES[self.optimizer(optimizer).rule]
        is_bounded = "clipvalue" in dict(self.optimizer(optimizer).hyperparameters)
        if len(set(variables)) < len(variables):
            raise InvalidArgumentError(f"optimizer {optimizer}: a variable appears twice; add its gradients first")
        for number in variables:
            spec = self._variable(number).spec
            if not rule.takes(np.dtype(spec.dtype)):
                raise InvalidArgumentError(
                    f"variable {spec.name!r} is {spec.dtype}; only floating-point variables can be optimized"
                    + (", and complex ones not by this rule" if rule.is_real else "")
                )
            if is_bounded and np.dtype(spec.dtype).kind == "c":
                raise InvalidArgumentError(
                    f"variable {spec.name!r} is {spec.dtype}; clipvalue bounds real gradients only"
                )
        return tuple(sorted(variables))

    def known_set(self, optimizer: int, variables: Iterable[int]) -> int | None:
        """The number of a variable set, in whatever order its variables are named; None where it has none yet."""
        return self._set_numbers.get((optimizer, tuple(sorted(variables))))

    def variable_set(
        self, optimizer: int, variables: tuple[int, ...], sparse: Collection[int] = ()
    ) -> tuple[int, tuple[SlotFill, ...]]:
        """The number of that set, and the slots that only now come to be; those of ``sparse`` variables take memory
        only where rows are touched.

        Raises InvalidArgumentError, and MemoryPlanError where the slots do not fit the memory that is left, or
        DeviceMemoryError where they, or the kernels that update them, do not fit the GPU's.
        """
        members = self.members(optimizer, variables)
        known = self.known_set(optimizer, variables)
        if known is not None:
            return known, ()
        record = self.optimizer(optimizer)
        self._allocate(_described(record), self._kernels_of(record, members))
        fills = self._add_slots(record, members, sparse)
        self._tables.tally.sets += 1
        made = self._tables.tally.sets
        self._tables.sets[made] = VariableSet(optimizer, members)
        self._tables.steps[made] = Steps(0)
        self._note_set(made, self._tables.sets[made])
        return made, fills

    def check_gradients(self, points: Sequence[ApplyPoint]) -> None:
        """Raise InvalidArgumentError where a sparse gradient does not fit its variable, or that is not in the set; and
        where gradients are said to lie in the second set of buffers, which is not there."""
        for point in points:
            if point.buffers % 2:
                self._check_second(point)
            for gradient in point.sparse:
                spec, values = self._variable(gradient.variable).spec, gradient.values
                if gradient.variable not in (point.variables or self._tables.sets[point.variable_set].variables):
                    raise InvalidArgumentError(f"the sparse gradient of {spec.name!r}, which is not to be updated")
                if not spec.shape or values.dtype != spec.dtype or values.shape[1:] != spec.shape[1:]:
                    raise InvalidArgumentError(
                        f"the sparse gradient of variable {spec.name!r} is {values.dtype}{list(values.shape)}; the "
                        f"variable is {spec.dtype}{list(spec.shape)}"
                    )

    def _check_second(self, point: ApplyPoint) -> None:
        missing = [dtype for dtype, slab in self._tables.slabs.items() if slab.gradient_sets < 2]
        if not missing:
            return
        sparse = {gradient.variable for gradient in point.sparse}
        for number in point.variables or self._tables.sets[point.variable_set].variables:
            spec = self._variable(number).spec
            if number not in sparse and spec.dtype in missing:
                raise InvalidArgumentError(
                    f"the gradient of {spec.name!r} is said to lie in the second set of buffers, but no Locate asked "
                    f"for that of {spec.dtype} variables"
                )

    def apply(self, number: int, points: Sequence[ApplyPoint], steps_before: int) -> Apply:
        """One step on a variable set. ``points`` say for every replica in which of its gradient buffers its gradients
        lie, and where the sparse ones; ``steps_before`` counts this optimizer's earlier steps in the commit."""
        optimizer = self.optimizer(self._tables.sets[number].optimizer)
        step = optimizer.iterations + steps_before
        sparse = tuple(gradient.variable for gradient in points[0].sparse)
        is_clipped = any(name in CLIPS for name, _ in optimizer.hyperparameters)
        buffers = tuple(point.buffers for point in points)
        key = (number, sparse, is_clipped, buffers)
        dense = self._dense.get(key)
        if dense is None:
            dense = self._dense[key] = tuple(
                Dense(
                    dtype=dtype,
                    ranges=ranges,
                    parameters=segment_names.parameters(dtype),
                    slots=self._slot_segments(optimizer, dtype),
                    gradients=tuple(self._gradients(r, each, dtype) for r, each in enumerate(buffers)),
                )
                for dtype, ranges in self._ranges_of(number, sparse, is_clipped)
            )
        rows = []
        for position, member in enumerate(sparse):
            variable = self._variable(member)
            spec = variable.spec
            gradients = tuple((point.sparse[position].values, point.sparse[position].indices) for point in points)
            rows.append(
                Rows(
                    dtype=spec.dtype,
                    first=_elements(variable)[0],
                    shape=(spec.shape[0], math.prod(spec.shape[1:])),
                    parameters=variable.place.segment,
                    slots=self._slot_segments(optimizer, spec.dtype),
                    gradients=gradients,
                )
            )
        variables = self._tables.sets[number].variables
        return Apply(optimizer.rule, _at(step, optimizer), step + 1, dense, tuple(rows), variables)

    def gradient(self, replica: int, buffers: int, variable: Array) -> Array:
        """The place of a variable's gradient in a set of buffers."""
        return replace(variable, place=Location(self._gradients(replica, buffers, variable.dtype), _offset(variable)))

    def _gradients(self, replica: int, buffers: int, dtype: str) -> str:
        """Of a set on a GPU (``buffers`` 2 and 3) there is only what concerns variables that lie there."""
        return segment_names.gradients(replica, buffers if self._on_device(dtype, 1) else buffers % 2, dtype)

    def _slot_segments(self, optimizer: Optimizer, dtype: str) -> tuple[str, ...]:
        return tuple(segment_names.slots(optimizer.number, slot, dtype) for slot in SLOTS[optimizer.rule])

    def applied(self, number: int, count: int = 1) -> None:
        """``count`` steps on the variable set were committed."""
        self._tables.steps[number] = Steps(self._tables.steps[number].count + count)
        optimizer = self.optimizer(self._tables.sets[number].optimizer)
        self._tables.optimizers[optimizer.number] = replace(optimizer, iterations=optimizer.iterations + count)

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
            for segment, writer in self._segments_of_slab(dtype, slab.gradient_sets)
        ]
        names = {
            (segment_names.slots(optimizer, slot, dtype), dtype)
            for (optimizer, variable), slots in self._tables.slots.items()
            for slot in slots.names
            for dtype in [self._tables.variables[variable].spec.dtype]
        }
        return made + [Allocate(name, self._tables.slabs[dtype].reservation, "") for name, dtype in sorted(names)]

    def discards(self) -> list[Discard]:
        """The bytes between variables: a server that was restarted may not have given them back."""
        return [
            Discard(segment, offset, offset + hole.nbytes)
            for (dtype, offset), hole in self._tables.holes.items()
            for segment, _ in self._segments_of_slab(dtype, self._tables.slabs[dtype].gradient_sets)
        ]

    def loads(self) -> list[Load]:
        """What has to be brought to the GPU by a server that was restarted; nothing where variables lie on none."""
        places = [variable.array for variable in self._tables.variables.values()]
        for (optimizer, number), slots in self._tables.slots.items():
            array = self._tables.variables[number].array
            names = (segment_names.slots(optimizer, slot, array.dtype) for slot in slots.names)
            places += [replace(array, place=Location(name, _offset(array))) for name in names]
        return [
            Load(array.place.segment, _offset(array), _offset(array) + array.nbytes)
            for array in places
            if isinstance(array.place, Location) and self._on_device(array.dtype, array.nbytes)
        ]

    def kernels(self) -> list[LoadKernel]:
        """What a GPU has to have ready for the updates of a server that was restarted; nothing where variables lie on
        none."""
        sets = self._tables.sets.values()
        return [*dict.fromkeys(k for s in sets for k in self._kernels_of(self.optimizer(s.optimizer), s.variables))]

    def _kernels_of(self, optimizer: Optimizer, variables: Iterable[int]) -> list[LoadKernel]:
        dtypes = {self._variable(number).spec.dtype for number in variables}
        return [LoadKernel(optimizer.rule, dtype) for dtype in sorted(dtypes) if self._on_device(dtype, 1)]

    def _segments_of_slab(self, dtype: str, gradient_sets: int) -> Iterable[tuple[str, str]]:
        yield segment_names.parameters(dtype), ""
        if _is_optimizable(dtype):
            for replica in range(self._replicas):
                for buffers in range(gradient_sets):
                    yield segment_names.gradients(replica, buffers, dtype), f"w{replica}"

    def slots(self, optimizer: int, variable: int) -> tuple[tuple[tuple[str, Array], ...], tuple[SlotFill, ...]]:
        """Name and place of every slot beside a variable, and those that only now come to be.

        Raises InvalidArgumentError for what cannot be updated, and MemoryPlanError as ``variable_set`` does.
        """
        record, (number,) = self.optimizer(optimizer), self.members(optimizer, (variable,))
        fills = self._add_slots(record, (number,), ())
        found = self._variable(number)
        places = (Location(name, found.place.offset) for name in self._slot_segments(record, found.spec.dtype))
        arrays = (Array(found.spec.dtype, found.spec.shape, place) for place in places)
        return tuple(zip(SLOTS[record.rule], arrays, strict=True)), fills

    def slotted(self, optimizer: int) -> tuple[int, ...]:
        """The variables beside which an optimizer has slots."""
        return tuple(sorted(variable for number, variable in self._tables.slots if number == optimizer))

    def write_slot(self, optimizer: int, variable: int, slot: str, value: Array) -> Write:
        """The operation that sets a slot, which is there. Raises InvalidArgumentError where ``value`` does not fit."""
        slots, _ = self.slots(optimizer, variable)
        target = dict(slots).get(slot)
        if target is None:
            has = ", ".join(name for name, _ in slots) or "none"
            raise InvalidArgumentError(f"optimizer {optimizer} has no slot {slot!r}; its slots: {has}")
        spec = self._variable(variable).spec
        _check_fits(f"the value of slot {slot!r} of variable {spec.name!r}", value, spec)
        return Write(target, "assign", None, (value,))

    def _add_slots(
        self, optimizer: Optimizer, variables: Iterable[int], sparse: Collection[int]
    ) -> tuple[SlotFill, ...]:
        """Make the slots of those of these variables that have none."""
        slots = SLOTS[optimizer.rule]
        missing = [self._variable(v) for v in variables if (optimizer.number, v) not in self._tables.slots]
        touched = {number for _, number in self._tables.slots}
        idle = [v for v in missing if v.spec.trainable and v.number not in touched]
        self._check_plan(
            _described(optimizer),
            sum(len(slots) * variable.array.nbytes for variable in missing),
            f"for the slots {', '.join(slots)} of {len(missing)} variables",
            touched_nbytes=sum(variable.array.nbytes for variable in idle),
            device_nbytes=sum(len(slots) * self._on_device(v.spec.dtype, v.array.nbytes) for v in missing),
        )
        initial = RULES[optimizer.rule].initial(dict(optimizer.hyperparameters))
        fills: list[SlotFill] = []
        needed: list[Allocate] = []
        for variable in missing:
            dtype, nbytes, offset = variable.spec.dtype, variable.array.nbytes, variable.place.offset
            reservation = self._tables.slabs[dtype].reservation
            for slot, value in zip(slots, initial, strict=True):
                segment = segment_names.slots(optimizer.number, slot, dtype)
                is_lazy = variable.number in sparse and value == 0
                needed.append(Allocate(segment, reservation, "", offset, offset + nbytes, is_lazy))
                if nbytes:
                    first, last = _elements(variable)
                    fills.append(SlotFill(segment, dtype, first, last, float(value), is_lazy))
        self._allocate(f"the slots of {_described(optimizer)}", needed)
        for variable in idle:
            slab = self._tables.slabs[variable.spec.dtype]
            self._tables.slabs[variable.spec.dtype] = replace(
                slab, idle_nbytes=slab.idle_nbytes - variable.array.nbytes
            )
        for variable in missing:
            self._tables.slots[optimizer.number, variable.number] = SlotNames(slots)
        return tuple(fills)

    def _allocate(self, what: str, needed: Sequence[Needed]) -> None:
        """Have these made. Raises, as the one that was refused says, where the plan allowed what cannot be had."""
        for each in needed:
            if (error := self.refused.get(each)) is not None:
                raise replica_exception_class(error.exception)(f"{what}: {error.message}")
        self._out += needed

    def _on_device(self, dtype: str, nbytes: int) -> int:
        """How many of ``nbytes`` lie on a GPU."""
        return nbytes if self._device.startswith("gpu") and dtype in GPU_DTYPES else 0

    def _check_plan(
        self, what: str, nbytes: int, purpose: str, touched_nbytes: int = 0, device_nbytes: int = 0
    ) -> None:
        """Raise where ``nbytes`` do not fit. ``touched_nbytes`` of idle variables have just been touched;
        ``device_nbytes`` lie on a GPU, too, and there is room in the journal for each of them."""
        free = self._tables.tally.device_nbytes
        if 0 <= free < device_nbytes:
            raise DeviceMemoryError(
                f"{what}: {device_nbytes} bytes planned{in_units(device_nbytes)} on {self._device} {purpose}, {free} "
                f"bytes of it available{in_units(free)}; use smaller or fewer variables, end what else uses it, or "
                "keep the variables in the machine's memory (parameter_device='cpu:0')"
            )
        nbytes += device_nbytes
        available = self._tables.tally.available_nbytes
        idle_nbytes = sum(slab.idle_nbytes for slab in self._tables.slabs.values()) - touched_nbytes
        promised = self._replicas * idle_nbytes
        if nbytes and 0 <= available < nbytes + promised:
            raise MemoryPlanError(
                f"{what}: {nbytes} bytes planned{in_units(nbytes)} {purpose} beside {promised} bytes promised"
                f"{in_units(promised)} to gradient buffers of other variables, {available} bytes available"
                f"{in_units(available)}; use smaller or fewer variables, fewer replicas, or "
                "give the service more memory; a table that gets sparse gradients only needs no gradient buffers if it "
                "is made with trainable=False"
            )

    # --- names, numbers, ranges ---------------------------------------------------------------------------------------

    def _variable(self, number: int) -> Variable:
        variable = self._tables.variables.get(number)
        if variable is None:
            raise InvalidArgumentError(
                f"there is no variable {number}, or no more: one that the script holds no handle of is freed; "
                + self._inventory()
            )
        return variable

    def _inventory(self) -> str:
        known = [f"{n} ({self._tables.variables[n].spec.name})" for n in sorted(self._tables.variables)]
        shown = ", ".join(known if len(known) <= 8 else [*known[:4], "...", *known[-3:]])
        return f"there are {shown}" if known else "there are none"

    def _free_name(self, name: str) -> str:
        if name not in self._numbers:
            return name
        count = self._counts.get(name, 1)
        while (free := _counted(name, count)) in self._numbers:
            count += 1
        if free.startswith(name):  # else it is no longer seen of which name it was made
            self._counts[name] = count
        return free

    def _drop_name(self, name: str) -> None:
        del self._numbers[name]
        self._counts.pop(name, None)
        base, _, count = name.rpartition("_")
        if base in self._counts and count.isdecimal():
            self._counts[base] = min(self._counts[base], max(1, int(count)))

    def _note_set(self, number: int, variable_set: VariableSet) -> None:
        self._set_numbers[variable_set.optimizer, variable_set.variables] = number
        for member in variable_set.variables:
            self._sets_of.setdefault(member, []).append(number)

    def _ranges_of(
        self, number: int, sparse: tuple[int, ...], by_variable: bool
    ) -> tuple[tuple[str, tuple[tuple[int, int], ...]], ...]:
        """For each dtype of a set the elements that its variables cover, but for ``sparse`` ones; adjacent variables
        as one range unless ``by_variable``."""
        by_dtype: dict[str, list[tuple[int, int]]] = {}
        for member in self._tables.sets[number].variables:
            if member not in sparse:
                variable = self._variable(member)
                by_dtype.setdefault(variable.spec.dtype, []).append(_elements(variable))
        found = {
            dtype: tuple(r for r in sorted(ranges) if r[0] < r[1]) if by_variable else tuple(merged(ranges))
            for dtype, ranges in sorted(by_dtype.items())
        }
        return tuple((dtype, ranges) for dtype, ranges in found.items() if ranges)


def _at(step: int, optimizer: Optimizer) -> tuple[tuple[str, float], ...]:
    """The hyperparameters of the update before which ``step`` have been made."""
    schedule = optimizer.schedule
    if schedule is None:
        return optimizer.hyperparameters
    now = rate(schedule.kind, schedule.numbers, step)
    return tuple((name, now if name == "learning_rate" else value) for name, value in optimizer.hyperparameters)


def _described(optimizer: Optimizer) -> str:
    return f"optimizer {optimizer.number} ({optimizer.kind})"


def _counted(name: str, count: int) -> str:
    suffix = f"_{count}"
    return name[: _NAME_LENGTH - len(suffix)] + suffix


def _is_optimizable(dtype: str) -> bool:
    return np.dtype(dtype).kind in "fc"


def _room(nbytes: int) -> int:
    """What a variable takes of its slab."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _elements(variable: Variable) -> tuple[int, int]:
    itemsize = np.dtype(variable.spec.dtype).itemsize
    first = variable.place.offset // itemsize
    return first, first + variable.array.nbytes // itemsize


def _offset(array: Array) -> int:
    assert isinstance(array.place, Location)
    return array.place.offset


def _check_fits(what: str, value: Array, spec: VariableSpec) -> None:
    if value.dtype != spec.dtype or value.shape != spec.shape:
        raise InvalidArgumentError(
            f"{what} is {value.dtype}{list(value.shape)}; it must be {spec.dtype}{list(spec.shape)}"
        )
