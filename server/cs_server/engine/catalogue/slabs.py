"""Slabs: where variables lie, and the plan that keeps the service inside the machine's memory.

A slab holds the variables of one dtype one after the other, in a reservation of addresses of which only touched pages
take memory. If a variable does not fit, the slab is extended and nothing moves. Slots and gradient buffers are segments
of their own with the slab's offsets. Sparse variables have slabs of their own, without gradient buffers. Every
function that can refuse does so before it changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from cs_proto import segment_names
from cs_proto.arithmetic.optimizers import SLOTS, slot_shape
from cs_proto.arrays import Array, Location
from cs_proto.errors import DeviceMemoryError, MemoryPlanError, replica_exception_class
from cs_proto.memory_plan import gradient_nbytes, has_gradients, room_of
from cs_proto.memory_plan import on_device as nbytes_on_device
from cs_proto.messages import Variable, VariableSpec
from cs_proto.records import replace
from cs_proto.sizes import in_units
from cs_server.engine.store.address_budget import pages
from cs_server.engine.store.state import State
from cs_server.engine.store.tables import Hole, Slab
from cs_server.events import Allocate, Discard, Load, Needed


def extended(server: State, what: str, name: str, slab: Slab, end: int) -> tuple[int, list[Allocate]]:
    """The reservation of the slab called ``name`` that ends at byte ``end``, and the commands that extend its segments
    if they are too short.

    Every process maps an extended segment again, so the length is doubled if possible; otherwise it becomes as long as
    needed. Raises MemoryPlanError if even that is impossible.
    """
    if 0 < slab.reservation >= end:
        return slab.reservation, []
    longest = server.config.addresses.longest_slab
    if end > longest:
        nbytes = end - slab.tail
        raise MemoryPlanError(
            f"{what}: {nbytes} bytes planned{in_units(nbytes)}, but only {longest - slab.tail} of the {longest} "
            f"bytes of addresses{in_units(longest)} for {name} variables are available; use smaller or "
            "fewer variables"
        )
    # All segments of the slab are extended at once: a commit that reads gradients cannot extend one.
    segments = list(segments_of(server, name, slab.gradient_sets))
    best = min(longest, max(server.config.addresses.slab, 2 * slab.reservation, pages(end)))
    needed = [Allocate(segment, best, writer, end, end) for segment, writer in segments]
    if not any(each in server.refused for each in needed):
        return best, needed
    least = pages(max(end, 1))
    return least, [Allocate(segment, least, writer, end, end) for segment, writer in segments]


def use_second_gradients(server: State, dtypes: Iterable[str]) -> None:
    """Make the second set of every replica's gradient buffers of these dtypes. Raises MemoryPlanError if it does not
    fit."""
    for dtype in dict.fromkeys(dtypes):
        slab = server.tables.slabs[dtype]
        if slab.gradient_sets == 1:
            needed = [
                Allocate(
                    segment_names.gradients(replica, 1, dtype), slab.reservation, f"w{replica}", slab.tail, slab.tail
                )
                for replica in server.replicas
            ]
            allocate(server, f"the second set of {dtype} gradient buffers", needed)
            server.tables.slabs[dtype] = replace(slab, gradient_sets=2)


def hole_for(server: State, slab: str, room: int) -> int | None:
    """Where the smallest hole of at least ``room`` bytes begins; of equal ones the first. None if there is none."""
    fitting = [(h.nbytes, at) for (of, at), h in server.tables.holes.items() if of == slab and h.nbytes >= room > 0]
    return min(fitting)[1] if fitting else None


def give_back(server: State, variable: Variable, *, is_idle: bool) -> None:
    """Turn the bytes of a variable into a hole, merged with the holes beside it. ``is_idle``: no optimizer has touched
    it."""
    name, nbytes, offset = slab_of(variable.spec), variable.array.nbytes, variable.place.offset
    slab = server.tables.slabs[name]
    if nbytes:
        for segment, _ in segments_of(server, name, slab.gradient_sets):
            server.out.append(Discard(segment, offset, offset + nbytes))
    holes, room = server.tables.holes, room_of(nbytes)
    for other, hole in holes.items():
        if other[0] == name and room and (other[1] + hole.nbytes == offset or other[1] == offset + room):
            offset, room = min(offset, other[1]), room + hole.nbytes
            del holes[other]
    if room:  # at the tail, too: what lies beyond the tail is zero
        holes[name, offset] = Hole(room)
    idle_nbytes = gradient_nbytes(variable.spec, nbytes) if is_idle else 0
    server.tables.slabs[name] = replace(slab, nbytes=slab.nbytes - nbytes, idle_nbytes=slab.idle_nbytes - idle_nbytes)


def parameter_nbytes(server: State) -> int:
    """Bytes of all variables."""
    return sum(slab.nbytes for slab in server.tables.slabs.values())


def slot_nbytes(server: State) -> int:
    """Bytes of all slots."""
    return sum(array.nbytes for array in _every_slot(server))


def allocations(server: State) -> list[Allocate]:
    """Every segment that a restarted server opens again."""
    made = [
        Allocate(segment, slab.reservation, writer)
        for name, slab in server.tables.slabs.items()
        for segment, writer in segments_of(server, name, slab.gradient_sets)
    ]
    names = {
        (array.place.segment, slab_of(server.tables.variables[number].spec))
        for optimizer, number in server.tables.slots
        for array in slots_of(server, optimizer, number)
        if isinstance(array.place, Location)
    }
    return made + [Allocate(segment, server.tables.slabs[name].reservation, "") for segment, name in sorted(names)]


def discards(server: State) -> list[Discard]:
    """The bytes between variables, which the server before may not have given back."""
    return [
        Discard(segment, offset, offset + hole.nbytes)
        for (name, offset), hole in server.tables.holes.items()
        for segment, _ in segments_of(server, name, server.tables.slabs[name].gradient_sets)
    ]


def loads(server: State) -> list[Load]:
    """What a restarted server brings to the GPU; nothing if no variables lie there."""
    places = [*(variable.array for variable in server.tables.variables.values()), *_every_slot(server)]
    return [
        Load(array.place.segment, offset_of(array), offset_of(array) + array.nbytes)
        for array in places
        if isinstance(array.place, Location) and on_device(server, array.dtype, array.nbytes)
    ]


def segments_of(server: State, slab: str, gradient_sets: int) -> Iterator[tuple[str, str]]:
    """The segments of a slab, slots excepted, each with the name of its writer."""
    yield segment_names.parameters(slab), ""
    for replica in server.replicas:
        for buffers in range(gradient_sets):
            yield segment_names.gradients(replica, buffers, slab), f"w{replica}"


def slots_of(server: State, optimizer: int, number: int) -> list[Array]:
    """The slots that an optimizer has beside a variable: they begin where it does. No others begin before it ends."""
    if not optimizer:  # no slots: the row says that the variable's gradient buffers are present
        return []
    variable, rule = server.tables.variables[number], server.tables.optimizers[optimizer].rule
    seat, shape = server.tables.seats[optimizer].number, slot_shape(rule, variable.spec.shape)
    names = [segment_names.slots(seat, slot, slab_of(variable.spec)) for slot in SLOTS[rule]]
    return [Array(variable.spec.dtype, shape, Location(name, variable.place.offset)) for name in names]


def _every_slot(server: State) -> Iterator[Array]:
    for optimizer, number in server.tables.slots:
        yield from slots_of(server, optimizer, number)


def allocate(server: State, what: str, needed: Sequence[Needed]) -> None:
    """Command these allocations. If one of them was refused, raise that error: the plan allowed what cannot be had."""
    for each in needed:
        if (error := server.refused.get(each)) is not None:
            raise replica_exception_class(error.exception)(f"{what}: {error.message}")
    server.out += needed


def on_device(server: State, dtype: str, nbytes: int) -> int:
    """How many of ``nbytes`` lie on a GPU."""
    return nbytes_on_device(server.config.parameter_device, dtype, nbytes)


def check_plan(
    server: State, what: str, nbytes: int, purpose: str, touched_nbytes: int = 0, device_nbytes: int = 0
) -> None:
    """Raise MemoryPlanError or DeviceMemoryError if ``nbytes`` do not fit. ``touched_nbytes`` of idle variables have
    just been touched. ``device_nbytes`` lie on a GPU as well, and the journal has room for each of them."""
    free, device = server.tables.tally.device_nbytes, server.config.parameter_device
    if 0 <= free < device_nbytes:
        raise DeviceMemoryError(
            f"{what}: {device_nbytes} bytes planned{in_units(device_nbytes)} on {device} {purpose}, {free} "
            f"bytes of it available{in_units(free)}; use smaller or fewer variables, end what else uses it, or "
            "keep the variables in the machine's memory (parameter_device='cpu:0')"
        )
    nbytes += device_nbytes
    available = server.tables.tally.available_nbytes
    idle_nbytes = sum(slab.idle_nbytes for slab in server.tables.slabs.values()) - touched_nbytes
    promised = len(server.replicas) * idle_nbytes
    if nbytes and 0 <= available < nbytes + promised:
        raise MemoryPlanError(
            f"{what}: {nbytes} bytes planned{in_units(nbytes)} {purpose} beside {promised} bytes promised"
            f"{in_units(promised)} to gradient buffers of other variables, {available} bytes available"
            f"{in_units(available)}; use smaller or fewer variables, fewer replicas, or "
            "give the service more memory; a table that gets sparse gradients only needs no gradient buffers if it "
            "is made with sparse=True"
        )


# --- bytes --------------------------------------------------------------------------------------------------------


def slab_of(spec: VariableSpec) -> str:
    """The name of the slab in which a variable lies."""
    return segment_names.slab(spec.dtype, sparse=spec.sparse)


def new_slab(spec: VariableSpec) -> Slab:
    """The slab of such variables before the first one is made."""
    return Slab(0, 0, 0, 0, gradient_sets=int(has_gradients(spec)))


def elements(array: Array) -> tuple[int, int]:
    """The elements of its segment that an array covers: the first, and the one after the last."""
    itemsize = np.dtype(array.dtype).itemsize
    first = offset_of(array) // itemsize
    return first, first + array.nbytes // itemsize


def offset_of(array: Array) -> int:
    """Where an array that lies in a segment begins there."""
    assert isinstance(array.place, Location)
    return array.place.offset
