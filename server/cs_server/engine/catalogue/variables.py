"""Variables: their names, numbers and values.

The module knows nothing of runs and peers; ``requests`` and ``progress`` call it. Every function that can refuse does
so before it changes anything.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence

import numpy as np

from cs_proto import segment_names
from cs_proto.arrays import Array, Location
from cs_proto.errors import InvalidArgumentError, MemoryPlanError
from cs_proto.memory_plan import gradient_nbytes, room_of
from cs_proto.messages import ReduceOpName, Variable, VariableSpec, WriteOp
from cs_proto.records import altered, replace
from cs_proto.sizes import in_units
from cs_server.engine.store import versions
from cs_server.engine.store.index import base_of
from cs_server.engine.store.state import State
from cs_server.engine.store.tables import Asked, Hole, SlotFill, WrittenTogether
from cs_server.events import Allocate, Renamed, Write

from . import slabs

# Of fewer variables that are written together, each is counted in its own row.
_FEW = 16
# A name that no variable has is compared with so many.
_COMPARED = 100
# The rows of what was written together have at most so many times as many members as there are variables.
_MOST_MEMBERS = 2


def get(server: State, number: int) -> Variable:
    """The variable with its present version. Raises InvalidArgumentError if there is none."""
    variable = row(server, number)
    # A step is counted once in its set, not in each of its variables.
    more = sum(server.tables.steps[each].count for each in server.index.sets_of.get(number, ()))
    more += sum(server.tables.together[each].count for each in server.index.together_of.get(number, ()))
    return replace(variable, version=variable.version + more) if more else variable


def named(server: State, name: str) -> Variable:
    """The variable called ``name``. Raises InvalidArgumentError, which suggests similar names: of those that stand near
    it in the alphabet, since the training waits for the answer, and anybody may ask."""
    number = server.index.numbers.get(name)
    if number is None:
        import difflib  # late: only mistakes need it

        names = sorted(server.index.numbers)
        first = max(0, bisect.bisect(names, name) - _COMPARED // 2)
        close = difflib.get_close_matches(name, names[first : first + _COMPARED], n=3)
        raise InvalidArgumentError(
            f"there is no variable {name!r}; "
            + (f"did you mean {' or '.join(map(repr, close))}?" if close else _inventory(server))
        )
    return get(server, number)


def every(server: State) -> tuple[Variable, ...]:
    """All variables, by number."""
    return tuple(get(server, number) for number in sorted(server.tables.variables))


def create(server: State, spec: VariableSpec, value: Array | None) -> tuple[Variable, tuple[SlotFill, ...]]:
    """Make a variable of that spec, under a free name. Return it, and the fill that makes it zeros if another variable
    was in its place. ``value``, if any, is only compared with the spec.

    Raises MemoryPlanError if the variable and its gradient buffers do not fit into the free memory, or into the
    addresses that the service may take.
    """
    if value is not None:
        check_fits(f"the value of variable {spec.name!r}", value, spec)
    name = server.index.free_name(spec.name)
    slab_name = slabs.slab_of(spec)
    segment = segment_names.parameters(slab_name)
    nbytes = Array(spec.dtype, spec.shape, Location(segment, 0)).nbytes
    may_be_idle = gradient_nbytes(spec, nbytes)
    slabs.check_plan(
        server,
        f"variable {name!r}",
        nbytes + len(server.replicas) * may_be_idle,
        "for its value and its gradient buffers",
        device_nbytes=slabs.on_device(server, spec.dtype, nbytes),
    )
    slab = server.tables.slabs.get(slab_name) or slabs.new_slab(spec)
    room = room_of(nbytes)
    hole = slabs.hole_for(server, slab_name, room)
    end = slab.tail if hole is not None else slab.tail + room
    place = Location(segment, slab.tail if hole is None else hole)
    reservation, needed = slabs.extended(server, f"variable {name!r}", slab_name, slab, end)
    is_lazy = False
    if nbytes:
        # A table without dense gradients may be large, and zeros need no memory until they are touched.
        is_lazy = value is None and (spec.sparse or not spec.trainable)
        needed.append(Allocate(place.segment, reservation, "", place.offset, place.offset + nbytes, is_lazy))
    needed += _page_of_versions(server, name)
    slabs.allocate(server, f"variable {name!r}", needed)
    server.tables.slabs[slab_name] = replace(
        slab, reservation=reservation, tail=end, nbytes=slab.nbytes + nbytes, idle_nbytes=slab.idle_nbytes + may_be_idle
    )
    server.tables.tally.variables += 1
    variable = Variable(server.tables.tally.variables, replace(spec, name=name), place, 0)
    server.tables.variables[variable.number] = variable
    server.index.numbers[name] = variable.number
    if name != spec.name:
        server.tables.asked[variable.number] = Asked(spec.name)
    if hole is None:
        return variable, ()
    left = server.tables.holes[slab_name, hole].nbytes - room
    del server.tables.holes[slab_name, hole]
    if left:
        server.tables.holes[slab_name, hole + room] = Hole(left)
    return variable, (SlotFill(place.segment, spec.dtype, *slabs.elements(variable.array), 0.0, is_lazy),)


def _page_of_versions(server: State, name: str) -> list[Allocate]:
    """The memory that the versions need before the next variable is made, which is to be called ``name``."""
    page, addresses = versions.page_of(server.tables.tally.variables + 1), server.config.addresses.versions
    if page is None:
        return []
    if page[1] > addresses:
        raise MemoryPlanError(
            f"variable {name!r}: {page[1]} bytes needed{in_units(page[1])} to count the changes of all "
            f"variables made so far, {addresses} bytes of addresses available{in_units(addresses)}; keep "
            "variables instead of making new ones, or restart the service"
        )
    return [Allocate(segment_names.versions(), addresses, "", *page, is_lazy=True)]


def free(server: State, numbers: Collection[int], touched: Collection[int]) -> tuple[tuple[int, str], ...]:
    """Forget these variables, which exist and have no slots and no sets any more, and give their memory back. An
    optimizer has updated those that are in ``touched``. Return the variables that are called otherwise now, with
    their names."""
    tables, freed = server.tables, []
    for number in sorted(numbers):
        variable = tables.variables[number]
        name = variable.spec.name
        asked = tables.asked[number].name if number in tables.asked else name
        freed.append((number, name, asked))
        del tables.variables[number]
        tables.asked.discard(number)
        server.index.drop_name(name)
        slabs.give_back(server, variable, is_idle=number not in touched)
    _forget_together(server, numbers)
    return _names_come_back(server, freed)


def _names_come_back(server: State, freed: Sequence[tuple[int, str, str]]) -> tuple[tuple[int, str], ...]:
    """Give the variables that are left the names that they would have if the freed ones had never been: a program that
    makes the same variables finds the same names, whatever was made and dropped before. ``freed`` has the number, the
    name and the asked name of each."""
    tables = server.tables
    after: dict[str, int] = {}  # by asked name: variables with higher numbers may get a name that is free now
    for number, name, asked in freed:
        after[asked] = min(number, after.get(asked, number))
        after |= dict.fromkeys({name, base_of(name)} - {asked}, 0)
    groups: dict[str, list[int]] = {}
    for number, record in sorted(tables.asked.items()):
        if number > after.get(record.name, number):
            groups.setdefault(record.name, []).append(number)
    moved: list[tuple[int, str]] = []
    for asked, numbers in groups.items():
        other = server.index.numbers.get(asked)
        if other is not None and other not in tables.asked and other > after[asked]:
            numbers = sorted([*numbers, other])
        moved += server.index.move_names(numbers, asked)
    for number, name in moved:
        variable = tables.variables[number]
        asked = tables.asked[number].name if number in tables.asked else variable.spec.name
        tables.variables[number] = replace(variable, spec=replace(variable.spec, name=name))
        tables.asked.discard(number)
        if name != asked:
            tables.asked[number] = Asked(asked)
    if moved:
        server.index.dense.clear()  # the rule of a variable may depend on its name
        server.out.append(Renamed())
    return tuple(moved)


def write(
    server: State,
    number: int,
    op: WriteOp,
    reduce: ReduceOpName | None,
    sources: Sequence[Array],
    indices: Array | None = None,
) -> Write:
    """The operation that writes ``sources``. Raises InvalidArgumentError if they do not fit the variable."""
    variable = row(server, number)
    what, spec = f"{op} to variable {variable.spec.name!r}", variable.spec
    if (indices is None) == op.startswith("scatter"):
        raise InvalidArgumentError(f"{what}: a scatter operation has indices, and no other operation has")
    if indices is not None:
        if not spec.shape or len(indices.shape) != 1 or np.dtype(indices.dtype).kind not in "iu":
            raise InvalidArgumentError(
                f"{what}: indices are {indices.dtype}{list(indices.shape)}; they must be integers [k] that count "
                f"rows of {spec.dtype}{list(spec.shape)}"
            )
        spec = replace(spec, shape=(*indices.shape, *spec.shape[1:]))
    for source in sources:
        check_fits(what, source, spec)
    if spec.dtype == "bool" and op not in ("assign", "scatter_update"):
        raise InvalidArgumentError(f"{what}: bool cannot be added")
    return Write(variable.array, op, reduce, tuple(sources), indices, (number,))


def written(server: State, number: int, count: int = 1) -> None:
    """``count`` writes were committed: count them in the variable's version."""
    variable = row(server, number)
    server.tables.variables[number] = altered(variable, version=variable.version + count)


def written_together(server: State, numbers: tuple[int, ...]) -> None:
    """A write of all these variables was committed: count it in the version of each."""
    tables, index = server.tables, server.index
    known = index.together.get(members := tuple(sorted(numbers)))
    if known is not None:
        before = tables.together[known]
        tables.together[known] = replace(before, count=before.count + 1)
        return
    most = _MOST_MEMBERS * len(tables.variables)
    if len(members) >= _FEW and sum(map(len, index.together)) + len(members) <= most:
        tables.together[tables.next_ticket()] = WrittenTogether(members, 1)
        index.derive_together()
        return
    for number in members:
        written(server, number)


def _forget_together(server: State, numbers: Collection[int]) -> None:
    """These variables are gone: what they were written together with keeps its counts."""
    gone, together = set(numbers), server.tables.together
    touched = [number for number, row in together.items() if not gone.isdisjoint(row.variables)]
    for number in touched:
        left = tuple(each for each in together[number].variables if each not in gone)
        if left:
            together[number] = replace(together[number], variables=left)
        else:
            del together[number]
    if touched:
        server.index.derive_together()


def row(server: State, number: int) -> Variable:
    """The variable as recorded: its version does not count the steps of its sets, and the writes together with others.
    Raises InvalidArgumentError if there is none."""
    variable = server.tables.variables.get(number)
    if variable is None:
        raise InvalidArgumentError(
            f"there is no variable {number}; a variable is freed when the script drops its last handle; "
            + _inventory(server)
        )
    return variable


def rows(server: State, numbers: Sequence[int]) -> list[Variable]:
    """As :func:`row`, of many variables."""
    known = server.tables.variables
    try:
        return [known[number] for number in numbers]
    except KeyError as error:
        row(server, error.args[0])
        raise


def _inventory(server: State) -> str:
    known = sorted(server.tables.variables)
    first, last = (known, []) if len(known) <= 8 else (known[:4], known[-3:])
    shown = [[f"{n} ({server.tables.variables[n].spec.name})" for n in part] for part in (first, last)]
    return f"there are {', '.join([*shown[0], *(['...'] if last else []), *shown[1]])}" if known else "there are none"


def check_fits(what: str, value: Array, spec: VariableSpec) -> None:
    """Raise InvalidArgumentError if ``value`` has another dtype or shape than ``spec``."""
    if value.dtype != spec.dtype or value.shape != spec.shape:
        raise InvalidArgumentError(
            f"{what} is {value.dtype}{list(value.shape)}; it must be {spec.dtype}{list(spec.shape)}"
        )
