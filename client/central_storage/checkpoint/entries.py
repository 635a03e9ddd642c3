"""The arrays of one object in a checkpoint: how each is read and set, and how many are read or set together."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from central_storage.core.backends import Column, ReadRows, Strategy
from central_storage.core.handles import handle_id
from central_storage.core.values import IndexedSlices
from central_storage.data.distributed import DistributedDataset, DistributedFromFunction, DistributedIterator
from central_storage.data.libraries import packed_state, unpacked_state
from central_storage.data.places import Place
from central_storage.optimizers import GradientAccumulator, Optimizer
from central_storage.variables.moving_averages import ExponentialMovingAverage
from central_storage.variables.variable import Variable
from cs_proto.arrays import dtype_name
from cs_proto.errors import CheckpointError
from cs_proto.printable import counted

from . import disk
from .stored import Stored
from .writing import Block

__all__ = [
    "TOGETHER_NBYTES",
    "Entries",
    "Entry",
    "Named",
    "Setting",
    "of_average",
    "of_data",
    "of_optimizer",
    "of_slot",
    "of_steps",
    "of_strategy",
    "of_sum",
    "of_variable",
    "read_together",
]

_log = logging.getLogger("central_storage.saving")

#: A restore holds about so many bytes of values in memory.
TOGETHER_NBYTES = 32 << 20


@dataclass(slots=True, eq=False)
class Entry:
    """An array of an object: its dtype and shape, and how it is read and set."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    read: Callable[[], Any]
    write: Callable[[np.ndarray], object]
    #: Why a value of the right shape and dtype cannot be set, or None.
    fault: Callable[[np.ndarray], str | None] | None = None
    #: Why no value can be set.
    misfit: str | None = None
    #: Whether it may have another length in the checkpoint, or be missing there.
    varies: bool = False
    #: The large variable or slot of a service that it is, which is read and set as a column of one.
    column: Column | None = None
    owner: Strategy | None = None
    #: Of the count of updates of a variable: whose, of which. Counts are set together.
    counted: tuple[Optimizer, Variable] | None = None
    #: As :attr:`writing.Block.read_rows`. Those of a service get it from :func:`read_together`.
    read_rows: ReadRows | None = None
    #: Sets the rows from a number on. Where both are there, a large array is never in memory as a whole.
    write_rows: Callable[[int, np.ndarray], object] | None = None


@dataclass(slots=True, eq=False)
class Named:
    """A column of a service, with the name of each value in the file."""

    owner: Strategy
    column: Column
    keys: list[str]

    def renamed(self, keys: Sequence[str | None]) -> Named:
        """The values that have one of these names instead; those without one are left out."""
        left = [place for place, key in enumerate(keys) if key is not None]
        return Named(self.owner, self.column.part(left), [key for key in keys if key is not None])


def _named_twice(name: str) -> CheckpointError:
    return CheckpointError(
        f"two objects have the name {name!r:.200} in a checkpoint, as the items 1 and '1' of a dict have; give one of "
        "them another name"
    )


class Entries:
    """All arrays of a nest of objects. There may be thousands of small variables and slots, so they are columns."""

    def __init__(self) -> None:
        #: By name.
        self.single: dict[str, Entry] = {}
        #: The small variables and slots of services.
        self.columns: list[Named] = []

    def put(self, entries: Mapping[str, Entry]) -> None:
        """Add entries by name. Raises CheckpointError if one has the name of another, which it would replace."""
        if taken := self.single.keys() & entries.keys():
            raise _named_twice(min(taken))
        self.single |= entries

    def check_names(self, also: Iterable[str]) -> None:
        """Raise CheckpointError if two arrays have one name, for a file would have one of them, or if one has a name
        that is ``also`` that of another variable."""
        names = [*self.single, *also, *itertools.chain.from_iterable(each.keys for each in self.columns)]
        if len(set(names)) < len(names):
            raise _named_twice(next(name for name, count in Counter(names).items() if count > 1))

    def add(self, labelled: Iterable[tuple[str, Variable]]) -> None:
        """Add variables by their names."""
        limit = disk.small_nbytes()
        kinds: dict[tuple[Strategy, np.dtype[Any]], Named] = {}
        for label, variable in labelled:
            owner, dtype, shape = variable.strategy, variable.dtype, variable.shape
            if owner is None or math.prod(shape) * dtype.itemsize > limit:
                self.put({label: of_variable(variable)})
                continue
            if (named := kinds.get((owner, dtype))) is None:
                named = kinds[owner, dtype] = Named(owner, Column(0, "", dtype_name(dtype)), [])
            named.keys.append(label)
            named.column.numbers.append(variable.number)
            named.column.shapes.append(shape)
        self.columns += kinds.values()

    def add_slots(
        self, optimizer: Optimizer, ways: Mapping[str, str], labelled: Iterable[tuple[str, Variable]]
    ) -> None:
        """Add slots of ``optimizer`` beside variables. ``ways`` has what stands before a label, by slot."""
        limit = disk.small_nbytes()
        kinds: dict[np.dtype[Any], tuple[list[str], list[int], list[tuple[int, ...]]]] = {}
        owner = optimizer.strategy
        known: dict[tuple[int, ...], tuple[int, ...]] = {}  # the shape of a slot, by that of its variable
        for label, variable in labelled:
            dtype = variable.dtype
            if (shape := known.get(variable.shape)) is None:
                # Also where there is no slot yet.
                shape = known[variable.shape] = optimizer._slot_shape(variable)  # noqa: SLF001
            if owner is None or variable.strategy is not owner or math.prod(shape) * dtype.itemsize > limit:
                self.put({f"{way}{label}": of_slot(optimizer, variable, slot) for slot, way in ways.items()})
                continue
            labels, numbers, shapes = kinds.setdefault(dtype, ([], [], []))
            labels.append(label)
            numbers.append(variable.number)
            shapes.append(shape)
        for slot, way in ways.items():
            for dtype, (labels, numbers, shapes) in kinds.items():
                assert owner is not None
                column = Column(handle_id(optimizer)[1], slot, dtype_name(dtype), numbers, shapes)
                self.columns.append(Named(owner, column, [f"{way}{label}" for label in labels]))


def _together(*_: object) -> Any:
    raise AssertionError("an entry of a service is read by read_together, and set by Setting")


def of_variable(variable: Variable) -> Entry:
    if (owner := variable.strategy) is None:
        entry = Entry(variable.dtype, variable.shape, variable.current, variable.assign)
    else:
        column = Column(0, "", dtype_name(variable.dtype), [variable.number], [variable.shape])
        entry = Entry(variable.dtype, variable.shape, _together, _together, column=column, owner=owner)
    if _is_large(entry):

        def write_rows(first: int, rows: np.ndarray) -> None:
            variable.scatter_update(IndexedSlices(rows, np.arange(first, first + len(rows))))

        if owner is None:
            entry.read_rows = lambda begin, end: variable.sparse_read(np.arange(begin, end))
        entry.write_rows = write_rows
    return entry


def _is_large(entry: Entry) -> bool:
    """Whether it is read and set in pieces of rows."""
    return bool(entry.shape) and math.prod(entry.shape) * entry.dtype.itemsize > disk.PART


def of_slot(optimizer: Optimizer, variable: Variable, slot: str) -> Entry:
    shape = optimizer._slot_shape(variable)  # noqa: SLF001  (also where there is no slot yet)
    if (owner := optimizer.strategy) is not None and owner is variable.strategy:
        column = Column(handle_id(optimizer)[1], slot, dtype_name(variable.dtype), [variable.number], [shape])
        entry = Entry(variable.dtype, shape, _together, _together, column=column, owner=owner)
    else:
        entry = Entry(
            variable.dtype,
            shape,
            partial(optimizer.slot_value, variable, slot),
            partial(optimizer.set_slot, variable, slot),
            misfit=_fault_of_owners(optimizer, variable),
        )
    if _is_large(entry):
        if owner is None:
            entry.read_rows = partial(optimizer.slot_rows, variable, slot)
        entry.write_rows = partial(optimizer.set_slot_rows, variable, slot)
    return entry


def of_steps(optimizer: Optimizer, variable: Variable, count: int) -> Entry:
    """How often the optimizer has updated the variable: ``count`` times."""

    def write(value: np.ndarray) -> None:
        optimizer.set_steps({variable: int(value)})

    return Entry(
        np.dtype(np.int64),
        (),
        lambda: np.int64(count),
        write,
        _fault_of_count,
        _fault_of_owners(optimizer, variable),
        counted=(optimizer, variable),
    )


def _fault_of_owners(optimizer: Optimizer, variable: Variable) -> str | None:
    owners = optimizer.strategy, variable.strategy
    if None in owners or owners[0] is owners[1]:
        return None
    return f"optimizer {optimizer.name} and variable {variable.name} belong to different strategies"


def of_average(average: ExponentialMovingAverage, variable: Variable) -> Entry:
    def write(value: np.ndarray) -> None:
        average.start(variable, value)

    return Entry(variable.dtype, variable.shape, lambda: None, write)


def of_sum(accumulator: GradientAccumulator, name: str) -> Entry:
    def write(value: np.ndarray) -> None:
        accumulator.start(name, value)

    def fault(value: np.ndarray) -> str | None:
        rows = 1 if accumulator.strategy is None else accumulator.strategy.num_replicas_in_sync
        if len(value) == rows:
            return None
        sums = f"sums of {counted(len(value), 'replica')}"
        return f"{sums} do not fit {rows}; apply the gradients and reset before you save"

    return Entry(np.dtype(np.float32), (), lambda: None, write, fault, varies=True)


def of_optimizer(optimizer: Optimizer, way: str) -> dict[str, Entry]:
    def write_iterations(value: np.ndarray) -> None:
        optimizer.iterations = int(value)

    def write_rate(value: np.ndarray) -> None:
        optimizer.learning_rate = float(value)

    def rate_fault(value: np.ndarray) -> str | None:
        return None if np.isfinite(value) else f"{value} is no learning rate"

    found = {
        f"{way}/iterations": Entry(
            np.dtype(np.int64), (), lambda: optimizer.iterations, write_iterations, _fault_of_count
        )
    }
    if not callable(optimizer.learning_rate):  # the script has the schedule
        found[f"{way}/learning_rate"] = Entry(
            np.dtype(np.float64), (), lambda: optimizer.learning_rate, write_rate, rate_fault
        )
    return found


def _fault_of_count(value: np.ndarray) -> str | None:
    return None if 0 <= value < 1 << 62 else f"{value} is no number of updates"


def of_data(data: DistributedDataset | DistributedFromFunction | DistributedIterator, way: str) -> dict[str, Entry]:
    """The number of the iteration, the number of elements used in it, and for each shuffle its seed, the iterations
    begun, and whether a cache remembers its order. Setting the last of these entries sets the data set."""
    parts: dict[str, np.ndarray] = {}

    def place() -> Place:
        orders = [(int(seed), int(begun), bool(is_kept)) for seed, begun, is_kept in parts["shuffles"]]
        states = unpacked_state(parts["source"].tobytes()) if "source" in parts else None
        return Place(int(parts["epoch"]), int(parts["position"]), tuple(orders), states)

    def entry(name: str, shape: tuple[int, ...], read: Callable[[], Any]) -> Entry:
        def fault(value: np.ndarray) -> str | None:
            parts[name] = value
            if name != "shuffles":
                return None
            is_whole = {"epoch", "position"} <= parts.keys()
            return data.fault(place()) if is_whole else "its epoch or its position is missing"

        def write(value: np.ndarray) -> None:
            if name == "shuffles":
                data.go_to(place())

        return Entry(np.dtype(np.int64), shape, read, write, fault)

    def state_fault(value: np.ndarray) -> str | None:
        parts["source"] = value
        try:
            unpacked_state(value.tobytes())
        except Exception as error:  # noqa: BLE001  (whatever a wrong file makes the reader raise)
            return f"it is no position of a source: {error}"
        return None

    count = len(data.orders())
    sources = {}
    if data.has_states:
        state = np.frombuffer(packed_state(data.place().states), np.uint8)
        sources[f"{way}/source"] = Entry(
            state.dtype, state.shape, lambda: state, lambda _: None, state_fault, varies=True
        )
    return sources | {
        f"{way}/epoch": entry("epoch", (), lambda: data.place().epoch),
        f"{way}/position": entry("position", (), lambda: data.place().position),
        f"{way}/shuffles": entry("shuffles", (count, 3), lambda: np.reshape(data.place().orders, (count, 3))),
    }


def of_strategy(strategy: Strategy, way: str) -> dict[str, Entry]:
    """The entries that determine the random numbers of the strategy's next run."""
    controller = strategy.controller

    def compare_seeds(value: np.ndarray) -> None:
        if int(value) != controller.seed:
            _log.warning(
                "the checkpoint was saved with the seed %d, but this strategy has %d; its random numbers will differ "
                "from those of the saved training",
                value,
                controller.seed,
            )

    steps = np.frombuffer(json.dumps(controller.steps(), sort_keys=True).encode(), np.uint8)
    return {
        f"{way}/seed": Entry(np.dtype(np.int64), (), lambda: controller.seed, compare_seeds),
        f"{way}/steps": Entry(
            steps.dtype,
            steps.shape,
            lambda: steps,
            lambda value: controller.set_steps(json.loads(value.tobytes())),
            _fault_of_steps,
            varies=True,
        ),
    }


def _fault_of_steps(value: np.ndarray) -> str | None:
    """Why the text ``value``, uint8, is not a table of the runs of functions."""
    with contextlib.suppress(ValueError, RecursionError):
        steps = json.loads(value.tobytes())
        if isinstance(steps, dict) and all(type(step) is int and 0 <= step < 1 << 62 for step in steps.values()):
            return None
    return "it is not the text of a JSON object of numbers of runs by function"


def read_together(entries: Entries, *, copied: bool) -> list[Block]:
    """All arrays. Those of a service are read with a few questions: now if ``copied``, and else when they are
    needed."""
    blocks: list[Block] = []
    others: list[tuple[str, Entry]] = []
    by_owner: dict[Strategy, list[Named]] = {}
    in_rows: dict[Strategy, list[tuple[Entry, Column]]] = {}
    for each in entries.columns:
        by_owner.setdefault(each.owner, []).append(each)
    for key, entry in entries.single.items():
        if entry.owner is None or entry.column is None:
            others.append((key, entry))
        elif _is_large(entry) and not copied:
            others.append((key, entry))
            in_rows.setdefault(entry.owner, []).append((entry, entry.column))
        else:
            by_owner.setdefault(entry.owner, []).append(Named(entry.owner, entry.column, [key]))
    for owner, large in in_rows.items():
        readers = owner.controller.read_in_rows([column for _, column in large])
        for (entry, _), reader in zip(large, readers, strict=True):
            entry.read_rows = reader
    for owner, own in by_owner.items():
        values = owner.controller.read_all([each.column for each in own], copied=copied)
        for each, found in zip(own, values, strict=True):
            blocks.append(Block(np.dtype(each.column.dtype), each.keys, each.column.shapes, found))
    for key, entry in others:
        if copied:
            value = partial(np.asarray, np.array(entry.read()))
            blocks.append(Block(entry.dtype, [key], [entry.shape], [value]))
        else:
            blocks.append(Block(entry.dtype, [key], [entry.shape], [entry.read], entry.read_rows))
    return blocks


class Setting:
    """Sets entries and columns to the arrays of a file, many together."""

    def __init__(self, stored: Stored) -> None:
        #: How many have been set.
        self.count = 0
        self._stored = stored
        self._columns: dict[Strategy, list[tuple[Column, memoryview]]] = {}
        self._counts: dict[Optimizer, dict[Variable, int]] = {}
        self._held = self._nbytes = 0

    def set_column(self, named: Named) -> None:
        """Set a column, at the latest with :meth:`flush`. Raises CheckpointDamagedError if the file has changed."""
        for places, values in self._stored.small(named.keys):
            self._hold(named.owner, named.column.part(places), values)

    def _hold(self, owner: Strategy, column: Column, values: memoryview) -> None:
        self._columns.setdefault(owner, []).append((column, values))
        self._held += len(column.numbers)
        self._nbytes += len(values)
        if self._nbytes > TOGETHER_NBYTES:
            self.flush()

    def set(self, entry: Entry, key: str) -> None:
        """Set an entry to the array ``key``. Raises as :meth:`set_column`."""
        if entry.write_rows is not None:
            for first, rows in self._stored.rows(key):
                entry.write_rows(first, rows)
            self.count += 1
            return
        value = self._stored.array(key)
        if entry.counted is not None:
            optimizer, variable = entry.counted
            self._counts.setdefault(optimizer, {})[variable] = int(value)
            self._held += 1
        elif entry.owner is not None and entry.column is not None:
            self._hold(entry.owner, entry.column, value.reshape(-1).view(np.uint8).data)
        else:
            entry.write(value)
            self.count += 1

    def flush(self) -> None:
        """Set what has not been set yet."""
        for owner, columns in self._columns.items():
            owner.controller.assign_all(columns)
        for optimizer, counts in self._counts.items():
            optimizer.set_steps(counts)
        self._columns, self._counts = {}, {}
        self.count += self._held
        self._held = self._nbytes = 0
